"""swiglu_quant without a GPU: the bytes of FLUX.2's own SwiGLU, concatenation and quantization, and its refusals.

That it compiles and how its parameters are laid out: test_fused_kernels.py.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import fused_kernels, swiglu_quant
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.swiglu_quant import SwigluInput
from stock_chains import (
    BF16,
    assert_operand,
    assert_operands,
    assert_same_bytes,
    edge_groups,
    stock_swiglu,
    swiglu_input,
)
from torch import Tensor

from sglang_fastpath.denoisers import start_runtime

ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 13])
ATTENTION_WIDTH = st.sampled_from([0, 128, 256])
WIDTH = st.sampled_from([128, 384])
SEED = st.integers(0, 2**16)

few_examples = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> None:
    start_runtime()


@given(rows=ROWS, attention_width=ATTENTION_WIDTH, width=WIDTH, strided=st.booleans(), edges=st.booleans(), seed=SEED)
@few_examples
def test_one_stream(rows, attention_width, width, strided, edges, seed) -> None:
    edge = edge_groups() if edges else None
    stream = swiglu_input(rows, attention_width, width, strided=strided, seed=seed, edges=edge)
    assert swiglu_quant.can_use(stream) is None
    assert_operand(swiglu_quant.swiglu_quant(stream), stock_swiglu(stream), quantize_per_token_group)


@given(
    rows=st.tuples(ROWS, ROWS),
    attention_width=ATTENTION_WIDTH,
    width=WIDTH,
    strided=st.tuples(st.booleans(), st.booleans()),
    grouped_rows=st.sampled_from([0, 128]),
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_two_streams(rows, attention_width, width, strided, grouped_rows, edges, seed) -> None:
    edge = edge_groups() if edges else None
    text, image = (
        swiglu_input(count, attention_width, width, strided=gaps, seed=seed + 10 * i, edges=edge)
        for i, (count, gaps) in enumerate(zip(rows, strided, strict=True))
    )
    operands = swiglu_quant.swiglu_quant_pair(text, image, grouped_rows=grouped_rows)
    expected = stock_swiglu(text), stock_swiglu(image)
    assert_operands(operands, expected, quantize_per_token_group, grouped_rows=grouped_rows)


def test_each_part_of_the_input_shows() -> None:
    """Equality with stock would mean little if the quantized values did not depend on a part, or on its place."""
    stream = swiglu_input(4, 128, 256, strided=False, seed=0)
    before = swiglu_quant.swiglu_quant(stream)
    x1, x2 = stream.x.chunk(2, dim=-1)
    for changed in (
        SwigluInput(stream.x, -stream.attention),
        SwigluInput(torch.cat([x1, -x2], dim=-1), stream.attention),
        SwigluInput(torch.cat([x2, x1], dim=-1), stream.attention),
    ):
        after = swiglu_quant.swiglu_quant(changed)
        assert not torch.equal(after.q.view(torch.uint8), before.q.view(torch.uint8))


@pytest.mark.parametrize("function", [torch.neg, torch.abs])  # exact, whatever vector unit a CPU computes them with
def test_a_table_is_indexed_by_the_bits_of_the_bf16(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([torch.linspace(-40, 40, 4096), torch.tensor([0.0, -0.0, 1e-40, 3e38, torch.inf, -torch.inf])])
    x = x.to(BF16)
    table = fused_kernels.bf16_table(function, x.device)
    assert_same_bytes(table[x.view(torch.int16).int() & 0xFFFF], function(x))
    assert fused_kernels.bf16_table(function, x.device) is table


# --- refusals ------------------------------------------------------------------------------------------------------


def gaps_between_elements(tensor: Tensor) -> Tensor:
    """The same shape and values, with a last dimension that is not dense."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


REFUSALS: list[tuple[dict[str, Callable[[Tensor], Tensor]], str]] = [
    ({"x": Tensor.half}, "activations are (6, 512) torch.float16"),
    ({"attention": Tensor.float}, "activations are (6, 128) torch.float32"),
    ({"x": lambda x: x.unsqueeze(0)}, "activations are (1, 6, 512) torch.bfloat16"),
    ({"attention": lambda attention: attention[0]}, "activations are (128,) torch.bfloat16"),
    ({"attention": lambda attention: attention[:5]}, "5 rows of attention output for 6 of the feed-forward"),
    ({"x": lambda x: x[:, :384]}, "widths 128 and 384 / 2 are not multiples of 128"),
    ({"attention": lambda attention: attention[:, :64]}, "widths 64 and 512 / 2 are not multiples of 128"),
    ({"x": gaps_between_elements}, "rows are not dense"),
    ({"attention": gaps_between_elements}, "rows are not dense"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
def test_each_refusal_can_be_reached_and_says_why(changes, reason) -> None:
    stream = swiglu_input(6, 128, 256, strided=True, seed=0)
    assert swiglu_quant.can_use(stream) is None
    changed = stream._replace(**{name: change(getattr(stream, name)) for name, change in changes.items()})
    assert swiglu_quant.can_use(changed) == reason
