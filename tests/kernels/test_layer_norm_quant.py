"""layer_norm_quant without a GPU: the bytes of FLUX.2's eager operations and quantization, and its refusals.

That it compiles and how its parameters are laid out: test_fused_kernels.py.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import layer_norm_quant
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.layer_norm_quant import LayerNormInput
from stock_chains import (
    EPS,
    assert_operand,
    assert_operands,
    assert_same_bytes,
    edge_groups,
    layer_norm_input,
    stock_layer_norm,
)
from torch import Tensor

BATCH = st.integers(1, 3)
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 5, 13])
WIDTH = st.sampled_from([128, 256, 640])
SEED = st.integers(0, 2**16)
FINITE = edge_groups(finite=True)  # the bits of a NaN that a CPU computes depend on its vector unit

few_examples = settings(max_examples=25, deadline=None)


@given(batch=BATCH, tokens=TOKENS, width=WIDTH, gated=st.booleans(), edges=st.booleans(), seed=SEED)
@few_examples
def test_one_stream(batch, tokens, width, gated, edges, seed) -> None:
    edge = FINITE if edges else None
    stream = layer_norm_input(batch, tokens, width, gated=gated, seed=seed, edges=edge)
    assert layer_norm_quant.can_use(stream) is None
    out = layer_norm_quant.layer_norm_quant(stream, EPS)
    total, modulated = stock_layer_norm(stream)
    assert_same_bytes(out.residual_out, total)
    assert_operand(out.operand, modulated, quantize_per_token_group)


@given(
    batch=BATCH,
    tokens=st.tuples(TOKENS, TOKENS),
    width=WIDTH,
    gated=st.booleans(),
    grouped_rows=st.sampled_from([0, 128]),
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_two_streams(batch, tokens, width, gated, grouped_rows, edges, seed) -> None:
    like = {"gated": gated, "edges": FINITE if edges else None}
    streams = [layer_norm_input(batch, count, width, seed=seed + 10 * i, **like) for i, count in enumerate(tokens)]
    out = layer_norm_quant.layer_norm_quant_pair(*streams, EPS, grouped_rows=grouped_rows)
    totals, modulated = zip(*map(stock_layer_norm, streams), strict=True)
    assert_same_bytes(out.residual_out, totals)
    assert_operands(out.operands, modulated, quantize_per_token_group, grouped_rows=grouped_rows)


def test_each_part_of_the_input_shows() -> None:
    """Equality with stock would mean little if the outputs did not depend on a part, or on its batch element."""
    stream = layer_norm_input(2, 3, 256, gated=True, seed=0)
    before = layer_norm_quant.layer_norm_quant(stream, EPS)
    for name, value in stream._asdict().items():
        for change in (Tensor.neg, lambda tensor: tensor.roll(len(tensor) // 2, 0)):
            after = layer_norm_quant.layer_norm_quant(stream._replace(**{name: change(value)}), EPS)
            assert not torch.equal(after.operand.q.view(torch.uint8), before.operand.q.view(torch.uint8)), name
            assert torch.equal(after.residual_out, before.residual_out) == (name in ("scale", "shift")), name


def test_the_residual_sum_is_freshly_allocated() -> None:
    stream = layer_norm_input(2, 3, 256, gated=True, seed=0)
    before = [tensor.clone() for tensor in stream]
    out = layer_norm_quant.layer_norm_quant(stream, EPS)
    assert_same_bytes(list(stream), before)
    assert out.residual_out.data_ptr() not in {tensor.data_ptr() for tensor in stream}


# --- refusals ------------------------------------------------------------------------------------------------------


def gaps_between_elements(tensor: Tensor) -> Tensor:
    """The same shape and values, with a last dimension that is not dense."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def gaps_between_rows(tensor: Tensor) -> Tensor:
    """The same shape and values, with dense rows that do not follow each other."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def nothing(_: Tensor) -> None:
    return None


Changes = dict[str, Callable[[Tensor], Tensor | None]]
REFUSALS: list[tuple[Changes, str]] = [
    ({"x": Tensor.half}, "activations are (6, 256) torch.float16"),
    ({"x": lambda x: x.unsqueeze(0)}, "activations are (1, 6, 256) torch.bfloat16"),
    ({"x": lambda x: x[:, :192]}, "width 192 is not a multiple of 128 up to 8192"),
    ({"x": lambda x: x[:, :0]}, "width 0 is not a multiple of 128 up to 8192"),
    ({"x": lambda x: x.repeat(1, 33)}, "width 8448 is not a multiple of 128 up to 8192"),
    ({"scale": Tensor.float}, "the scale is (2, 256) torch.float32"),
    ({"shift": lambda shift: shift[:1]}, "the shift is (1, 256) torch.bfloat16"),
    ({"gate": lambda gate: gate[:, :128]}, "the gate is (2, 128) torch.bfloat16"),
    ({"residual": Tensor.float}, "the residual is (6, 256) torch.float32"),
    ({"residual": lambda residual: residual[:3]}, "the residual is (3, 256) torch.bfloat16"),
    ({"x": lambda x: x[:5], "residual": lambda residual: residual[:5]}, "2 modulations for 5 rows"),
    ({name: lambda vectors: vectors[:0] for name in ("scale", "shift", "gate")}, "0 modulations for 6 rows"),
    ({"scale": Tensor.contiguous}, "scale and shift are not laid out alike"),
    ({"scale": gaps_between_elements, "shift": gaps_between_elements}, "rows of the modulation are not dense"),
    ({"gate": gaps_between_elements}, "rows of the modulation are not dense"),
    ({"gate": nothing}, "gate and residual come together"),
    ({"residual": nothing}, "gate and residual come together"),
    ({"x": gaps_between_rows}, "rows are not contiguous"),
    ({"residual": gaps_between_rows}, "rows are not contiguous"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
def test_each_refusal_can_be_reached_and_says_why(changes: Changes, reason: str) -> None:
    stream = layer_norm_input(2, 3, 256, gated=True, seed=0)
    assert layer_norm_quant.can_use(stream) is None
    changed: LayerNormInput = stream._replace(
        **{name: change(getattr(stream, name)) for name, change in changes.items()}
    )
    assert layer_norm_quant.can_use(changed) == reason
