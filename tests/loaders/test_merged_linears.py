"""Merging on SGLang's own block-FP8 linears: nothing that a linear computes, saves or is updated by changes."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sglang_fastpath.kernels.block_fp8_gemm import gemm
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import Quantized
from sglang_fastpath.loaders import merged_linears
from sglang_fastpath.loaders.merged_linears import PARAMETERS, MergedLinears, NotMergeable, merge_linears
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from stock_chains import assert_same_bytes, rows_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from sglang_fastpath.denoisers import start_runtime

K = 256
WIDTHS = (128, 384, 256)


def lies_in_one(merged: MergedLinears) -> bool:
    """Whether every part's parameters are still slices of the merged tensors, one behind the other."""
    for name, tensor in (("weight", merged.weight), ("weight_scale_inv", merged.scale), ("bias", merged.bias)):
        address = tensor.data_ptr() if tensor is not None else 0
        for part in merged.parts:
            parameter = part._parameters[name]
            if (parameter is None) is not (tensor is None):
                return False
            if parameter is not None:
                if parameter.data_ptr() != address:
                    return False
                address += parameter.numel() * parameter.element_size()
    return True


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    yield
    revert()


def make_linear(width: int, *, k: int = K, bias: bool = True, seed: int = 0) -> Any:
    """A linear of SGLang's own as a block-FP8 checkpoint gives it."""
    from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear
    from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    linear: Any = ReplicatedLinear(k, width, bias=bias, params_dtype=torch.bfloat16, quant_config=config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in linear.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values.abs() + 0.1 if name == "weight_scale_inv" else 4 * values)
    linear.quant_method.process_weights_after_loading(linear)
    linear.requires_grad_(False)
    return linear


def make_linears(*widths: int, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(make_linear(width, seed=seed, **options) for seed, width in enumerate(widths or WIDTHS))


def outputs_of(linears: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return [linear(x)[0] for linear in linears]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_state(module: nn.Module, expected: dict[str, Tensor]) -> None:
    state = module.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_same_bytes(state[name], value)


def x_of(rows: int = 5, *, k: int = K) -> Tensor:
    return rows_of(rows, k, seed=9)


@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.integers(1, 3).map(lambda blocks: 128 * blocks), min_size=1, max_size=6),
    k=st.integers(1, 3).map(lambda blocks: 128 * blocks),
    bias=st.booleans(),
    rows=st.sampled_from([0, 1, 5]),
)
def test_one_gemm_gives_every_linears_bytes(widths: list[int], k: int, bias: bool, rows: int) -> None:
    linears = make_linears(*widths, k=k, bias=bias)
    x = x_of(rows, k=k)
    state, expected = state_of(linears), outputs_of(linears, x)
    merged = merge_linears(linears)
    assert merged.parts == tuple(linears)
    assert (merged.bias is None) is not bias
    assert_same_state(linears, state)
    assert_same_bytes(outputs_of(linears, x), expected)
    joint = gemm(Quantized(*quantize_per_token_group(x), rows), merged.weight, merged.scale)
    if merged.bias is not None:
        joint += merged.bias
    assert_same_bytes(list(joint.split(widths, dim=1)), expected)
    assert merged.weight.is_contiguous()
    assert merged.scale.is_contiguous()


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_update_in_place_reaches_the_merged_tensor_and_back(name: str) -> None:
    linears = make_linears()
    merged = merge_linears(linears)
    whole = {"weight": merged.weight, "weight_scale_inv": merged.scale, "bias": merged.bias}[name]
    assert whole is not None
    start = 0
    for linear in linears:
        parameter = linear.get_parameter(name)
        parameter.data.copy_((0.5 * parameter.data.float()).to(parameter.dtype))
        assert_same_bytes(whole[start : start + len(parameter)], parameter.data)
        start += len(parameter)
    whole.fill_(1)
    assert all(bool((linear.get_parameter(name).float() == 1).all()) for linear in linears)
    assert lies_in_one(merged)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("replaced", ["data", "parameter", "removed"])
def test_a_parameter_that_leaves_is_noticed(name: str, replaced: str) -> None:
    linears = make_linears()
    merged = merge_linears(linears)
    assert lies_in_one(merged)
    middle: Any = linears[1]
    if replaced == "data":
        middle.get_parameter(name).data = middle.get_parameter(name).data.clone()
    elif replaced == "parameter":
        setattr(middle, name, nn.Parameter(middle.get_parameter(name).data.clone(), requires_grad=False))
    else:
        setattr(middle, name, None)
    assert not lies_in_one(merged)


def test_parameters_stay_the_same_objects_with_their_attributes() -> None:
    """A reload goes through the loader that SGLang hung on each parameter."""
    linears = make_linears()
    before = dict(linears.named_parameters())
    state = state_of(linears)
    merged = merge_linears(linears)
    after = dict(linears.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    for name, parameter in after.items():
        parameter.data.zero_()
        parameter.weight_loader(parameter, state[name])
    assert_same_state(linears, state)
    assert lies_in_one(merged)


def test_loading_a_state_twice_is_as_loading_it_afresh(tmp_path: Path) -> None:
    linears = make_linears()
    states = [state_of(linears), {name: value.flip(0) for name, value in state_of(linears).items()}]
    merged = merge_linears(linears)
    for index in (1, 0, 1, 0):
        linears.load_state_dict(states[index])
        assert_same_state(linears, states[index])
        assert_same_bytes(list(merged.weight.split(WIDTHS)), [states[index][f"{part}.weight"] for part in range(3)])
    assert lies_in_one(merged)
    save_file(linears.state_dict(), tmp_path / "linears.safetensors")
    saved = load_file(tmp_path / "linears.safetensors")
    linears.load_state_dict(saved)
    assert_same_state(linears, states[0])


def test_merging_again_moves_nothing() -> None:
    linears = make_linears()
    first = merge_linears(linears)
    second = merge_linears(linears)
    for ours, theirs in ((first.weight, second.weight), (first.scale, second.scale), (first.bias, second.bias)):
        assert ours is not None
        assert theirs is not None
        assert ours.data_ptr() == theirs.data_ptr()
        assert_same_bytes(ours, theirs)
    assert lies_in_one(first)


@pytest.mark.parametrize("order", [(2, 0), (0, 2), (1, 0, 2)])
def test_merging_others_in_another_order_merges_anew(order: tuple[int, ...]) -> None:
    linears = make_linears(256, 256, 256)
    state = state_of(linears)
    first = merge_linears(linears)
    second = merge_linears([linears[index] for index in order])
    assert not lies_in_one(first)
    assert lies_in_one(second)
    assert_same_state(linears, state)
    assert_same_bytes(list(second.weight.split(256)), [state[f"{index}.weight"] for index in order])


def test_some_of_what_was_merged_stay_where_they_are() -> None:
    linears = make_linears(256, 256, 256)
    first = merge_linears(linears)
    tail = merge_linears([linears[1], linears[2]])
    assert tail.weight.data_ptr() == first.weight[256:].data_ptr()
    assert_same_bytes(tail.weight, first.weight[256:])
    assert tail.bias is not None
    assert first.bias is not None
    assert_same_bytes(tail.bias, first.bias[256:])
    assert lies_in_one(first)


def test_a_transposed_weight_is_laid_out_anew() -> None:
    linears = make_linears()
    weight = linears[0].get_parameter("weight")
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    state, expected = state_of(linears), outputs_of(linears, x_of())
    merged = merge_linears(linears)
    assert merged.weight.is_contiguous()
    assert_same_state(linears, state)
    assert_same_bytes(outputs_of(linears, x_of()), expected)


@pytest.mark.parametrize("inference", [False, True])
def test_merged_parameters_can_be_updated_outside_inference_mode(inference: bool) -> None:
    """The first pass merges, inside inference mode. An update comes later."""
    linears = make_linears()
    if inference:
        with torch.inference_mode():
            for parameter in linears.parameters():
                parameter.data = parameter.data.clone()
    with torch.inference_mode():
        merged = merge_linears(linears)
    for parameter in linears.parameters():
        parameter.data.copy_(torch.ones_like(parameter.data))
    assert bool((merged.weight.float() == 1).all())
    merged.scale.mul_(2)
    assert bool((linears[1].get_parameter("weight_scale_inv") == 2).all())


# --- memory --------------------------------------------------------------------------------------------------------


class Watch(TorchFunctionMode):
    """Asks `look` before every copy into a merged tensor."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self._look()
        return func(*args, **kwargs or {})


def test_each_original_is_freed_before_the_next_is_copied() -> None:
    linears = make_linears()
    originals = {
        (name, part): StorageWeakRef(linear.get_parameter(name).untyped_storage())
        for name in PARAMETERS
        for part, linear in enumerate(linears)
    }
    alive: list[int] = []
    with Watch(lambda: alive.append(sum(not storage.expired() for storage in originals.values()))):
        merged = merge_linears(linears)
    assert alive == list(range(len(originals), 0, -1)), "one part is there twice at a time"
    assert all(storage.expired() for storage in originals.values())
    for tensor in (merged.weight, merged.scale, merged.bias):
        assert tensor is not None
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "nothing but the parts"


def test_merged_tensors_live_as_long_as_a_part() -> None:
    linears = make_linears()
    merged = merge_linears(linears)
    storage = StorageWeakRef(merged.weight.untyped_storage())
    gone = weakref.ref(merged)
    del merged
    assert gone() is None
    assert not storage.expired()
    for linear in linears:
        weight = linear.get_parameter("weight")
        weight.data = weight.data.clone()
    assert storage.expired()


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_out_of_memory_leaves_every_value_in_place(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    linears = make_linears()
    state, expected = state_of(linears), outputs_of(linears, x_of())
    allocate, left = torch.empty, fails_at

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal left
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left -= 1
        result: Tensor = allocate(*args, **kwargs)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(merged_linears.torch, "empty", empty)
        with pytest.raises(torch.OutOfMemoryError):
            merge_linears(linears)
    assert_same_state(linears, state)
    assert_same_bytes(outputs_of(linears, x_of()), expected)
    assert lies_in_one(merge_linears(linears))
    assert_same_state(linears, state)


# --- refusals ------------------------------------------------------------------------------------------------------


def narrow(linear: Any) -> None:
    for name, width in (("weight", 128), ("weight_scale_inv", 1)):
        set_data(linear, name, linear.get_parameter(name).data[:, :width].clone())


def not_whole_blocks(linear: Any) -> None:
    for name in ("weight", "bias"):
        set_data(linear, name, linear.get_parameter(name).data[:192].clone())


def too_few_scales(linear: Any) -> None:
    set_data(linear, "weight_scale_inv", linear.weight_scale_inv.data[:1].clone())


def packed_scales(linear: Any) -> None:
    set_data(linear, "weight_scale_inv", linear.weight_scale_inv.data.int())


def wide_weight(linear: Any) -> None:
    set_data(linear, "weight", linear.weight.data.bfloat16())


def wide_bias(linear: Any) -> None:
    set_data(linear, "bias", linear.bias.data.float())


def without_bias(linear: Any) -> None:
    linear.bias = None


def without_scales(linear: Any) -> None:
    linear.weight_scale_inv = None


def elsewhere(linear: Any) -> None:
    set_data(linear, "weight", linear.weight.data.to("meta"))


def set_data(linear: Any, name: str, value: Tensor) -> None:
    setattr(linear, name, nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (narrow, r"weight \(384, 128\)|weight \(384, 256\)"),
        (not_whole_blocks, r"a weight of \(192, 256\)"),
        (too_few_scales, r"with scales of \(1, 2\)"),
        (packed_scales, "int32"),
        (wide_weight, "bfloat16"),
        (wide_bias, r"bias \(384,\) torch.(float32|bfloat16)"),
        (without_bias, "no bias"),
        (without_scales, "no weight_scale_inv"),
        (elsewhere, "meta"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_merged_is_left_alone(change: Callable[[Any], None], message: str, part: int) -> None:
    linears = make_linears(384, 384, 384)
    change(linears[part])
    assert_refused_and_left_alone(linears, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (packed_scales, "torch.int32 scales"),
        (wide_weight, "weights are torch.bfloat16"),
        (not_whole_blocks, r"a weight of \(192, 256\)"),
        (without_scales, "no weight_scale_inv"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_linears_that_are_alike_in_what_cannot_be_merged(change: Callable[[Any], None], message: str) -> None:
    linears = make_linears(384, 384)
    for linear in linears:
        change(linear)
    assert_refused_and_left_alone(linears, message)


def test_unquantized_linears_cannot_be_merged() -> None:
    from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear

    linears = nn.ModuleList(ReplicatedLinear(K, 128, params_dtype=torch.bfloat16) for _ in range(2))
    assert_refused_and_left_alone(linears, "no weight_scale_inv")


def assert_refused_and_left_alone(linears: nn.ModuleList, message: str) -> None:
    def described() -> list[tuple[str, int, int]]:
        return [(name, id(p), p.data_ptr()) for name, p in linears.named_parameters()]

    before = described()
    state = {name: value.clone() for name, value in linears.state_dict().items() if not value.is_meta}
    with pytest.raises(NotMergeable, match=message):
        merge_linears(linears)
    assert described() == before
    for name, value in state.items():
        assert_same_bytes(linears.state_dict()[name], value)
