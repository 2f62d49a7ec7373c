"""Taking a call's arguments apart: nothing is lost, nothing that decides about the work is left out."""

import enum
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.patches.diffusion.call_signature import FlatCall, Ineligible, StaticTensors, flatten
from stock_chains import assert_same_bytes
from torch import Tensor, nn

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(allow_nan=False, width=16),
    st.sampled_from([0.0, -0.0, 1.0, 1 + 0j, complex(0, -0.0), "", "a", b"a", torch.float32, torch.device("cpu")]),
    st.sampled_from([torch.Size((1, 2)), Colour.RED, Colour.GREEN]),
)
TENSORS = [torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(())]
VALUES = st.recursive(
    PLAIN | st.sampled_from(TENSORS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(some: Any, others: Any) -> bool:
    """The same values of the same types; tensors the very objects."""
    if type(some) is not type(others):
        return False
    if isinstance(some, Tensor):
        return some is others
    if isinstance(some, dict):
        return list(some) == list(others) and all(same(some[key], others[key]) for key in some)
    if isinstance(some, tuple | list) and not isinstance(some, torch.Size):
        return len(some) == len(others) and all(map(same, some, others))
    return some == others and repr(some) == repr(others)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, tuple | list) else []


@settings(deadline=None)
@given(VALUES)
def test_what_is_taken_apart_can_be_put_together(value: Any) -> None:
    call = flatten(value)
    assert same(call.rebuild(call.tensors), value)
    ids = [id(tensor) for tensor in tensors_in(value)]
    assert [id(tensor) for tensor in call.tensors] == list(dict.fromkeys(ids)), "each once, in order"
    hash(call.signature)


@settings(deadline=None)
@given(VALUES)
def test_other_tensors_take_the_places_of_these(value: Any) -> None:
    call = flatten(value)
    others = [tensor.clone() for tensor in call.tensors]
    rebuilt = flatten(call.rebuild(others))
    assert rebuilt.structure == call.structure
    assert all(a is b for a, b in zip(rebuilt.tensors, others, strict=True))


@settings(deadline=None, max_examples=300)
@given(VALUES, VALUES)
def test_calls_of_one_signature_differ_in_what_tensors_hold_alone(some: Any, others: Any) -> None:
    first, second = flatten(some), flatten(others)
    if first.signature == second.signature:
        assert hash(first.signature) == hash(second.signature)
        assert same(first.rebuild(first.tensors), second.rebuild(first.tensors))
        for a, b in zip(first.tensors, second.tensors, strict=True):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def distinct(*values: Any) -> bool:
    signatures = [flatten(value).signature for value in values]
    assert signatures == [flatten(value).signature for value in values]
    return len(set(signatures)) == len(signatures)


def test_equal_values_of_other_types_are_told_apart() -> None:
    assert distinct(1, True, 1.0, 1 + 0j, "1", b"1")
    assert distinct(0, False, 0.0, -0.0, None, "", ())
    assert distinct([1], (1,), [(1,)], {"a": 1}, {"b": 1})
    assert distinct(torch.Size((1,)), (1,))
    assert distinct(Colour.RED, Colour.GREEN, 1)
    assert distinct(torch.float16, torch.bfloat16, "torch.float16")


def test_matrices_are_told_apart_by_alignment() -> None:
    """cuBLAS chooses by it; vectors it never sees, and a schedule's are views at any address."""
    values = torch.zeros(64)
    assert distinct(*(values[start : start + 32].view(4, 8) for start in range(4)))
    assert not distinct(*(values[start : start + 32].view(4, 8) for start in (0, 4, 32)))
    assert not distinct(*(values[start : start + 1] for start in range(4)))


def test_equal_keys_of_other_types_are_told_apart() -> None:
    assert distinct({1: "a"}, {True: "a"}, {1.0: "a"}, {0.0: "a"}, {-0.0: "a"})


def test_which_tensors_are_one_and_the_same_is_told_apart() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    assert distinct([a, a, b], [a, b, b], [a, b, a], [a, a, a])
    assert not distinct([a, b], [b, a])
    assert flatten([a, {"x": (b, a)}]).tensors == (a, b)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(3, 2).T,
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(2, 6)[:, ::2],
        None,
    ],
    ids=["shape", "dtype", "device", "transposed", "expanded", "strided", "none"],
)
def test_what_decides_which_kernels_run_is_told_apart(other: Any) -> None:
    assert distinct(torch.zeros(2, 3), other)


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "object"),
        (nn.Linear(1, 1), "Linear"),
        ({1, 2}, "set"),
        (Point(1, 2), "Point"),
        (OrderedDict(a=1), "OrderedDict"),
        (slice(1), "slice"),
        (print, "builtin_function_or_method"),
        (iter([1]), "list_iterator"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2).as_subclass(Subclass), "Subclass"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_refused_by_name(value: Any, what: str) -> None:
    nested = {"attention_kwargs": [1, {"layers": (None, value)}]}
    with pytest.raises(Ineligible) as caught:
        flatten(nested, "call")
    assert "call['attention_kwargs'][1]['layers'][1]" in str(caught.value)
    assert what in str(caught.value)


def test_a_key_that_could_change_is_refused() -> None:
    with pytest.raises(Ineligible):
        flatten({object(): 1})


# --- buffers -------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype whose dimensions are permuted, strided or expanded."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    expanded = [draw(st.booleans()) and draw(st.booleans()) for _ in shape]
    dense = [1 if repeat else size * step for size, step, repeat in zip(shape, steps, expanded, strict=True)]
    tensor = torch.randn(dense, generator=generator).mul(3).to(dtype)
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    return tensor.expand(shape).permute(draw(st.permutations(range(len(shape)))))


@settings(deadline=None, max_examples=200)
@given(st.lists(layouts(), max_size=3), st.booleans())
def test_buffers_have_the_layout_and_take_the_bytes(tensors: list[Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        buffers = StaticTensors(tensors)
        addresses = [buffer.data_ptr() for buffer in buffers.tensors]
        assert FlatCall(buffers.tensors, None).signature == FlatCall(tuple(tensors), None).signature
        for values in (tensors, [(tensor != 0).to(tensor.dtype) for tensor in tensors], tensors):
            # Another call of the same signature: the same strides, too.
            again = [_like(tensor, value) for tensor, value in zip(tensors, values, strict=True)]
            buffers.copy_from(again)
            for buffer, value in zip(buffers.tensors, again, strict=True):
                assert_same_bytes(buffer, value)
        assert [buffer.data_ptr() for buffer in buffers.tensors] == addresses
    assert not any(buffer.is_inference() for buffer in buffers.tensors)
    with torch.inference_mode(not inference):
        buffers.copy_from(tensors)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides of `tensor`; where that repeats elements, the first of each counts."""
    needed = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.zeros(max(needed, 0) if tensor.numel() else 0, dtype=tensor.dtype)
    result = storage.as_strided(tensor.shape, tensor.stride())
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    result[once] = value[once]
    return result


def test_buffers_share_nothing_with_the_tensors() -> None:
    tensors = [torch.ones(2, 3), torch.ones(1, 3).expand(2, 3)]
    buffers = StaticTensors(tensors)
    buffers.copy_from(tensors)
    for tensor in tensors:
        tensor.untyped_storage().fill_(0)
    assert all(buffer.eq(1).all() for buffer in buffers.tensors)


def test_one_tensor_more_or_less_is_an_error() -> None:
    buffers = StaticTensors([torch.zeros(2)])
    for tensors in ([], [torch.zeros(2), torch.zeros(2)]):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            buffers.copy_from(tensors)
