"""Inputs for swiglu_quant, and the chain of SGLang's own modules that it replaces. See stock_chains.py."""

import torch
from sglang_fastpath.kernels.fused_kernels import TMA_ALIGNED_ROWS, Quantized
from sglang_fastpath.kernels.swiglu_quant import SwigluInput
from stock_chains import Quantizer, assert_same_bytes, assert_scale_layout, rows_of
from torch import Tensor


def swiglu_input(
    rows: int,
    attention_width: int,
    width: int,
    *,
    strided: bool,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> SwigluInput:
    """`strided`: x is the last columns of a merged projection, the attention output the first ones of wider rows."""
    spare = 3 * 128 if strided else 0
    like = {"device": device, "edges": edges}
    before = rows_of(rows, spare, seed=seed, device=device)
    x1, x2, attention, behind = (
        rows_of(rows, columns, seed=seed + 1 + i, **like)
        for i, columns in enumerate((width, width, attention_width or 128, 128))
    )
    return SwigluInput(
        x=torch.cat([before, x1, x2], dim=-1)[:, spare:],
        attention=(torch.cat([attention, behind], dim=-1) if strided else attention)[:, :attention_width]
        if attention_width
        else None,
    )


def stock_swiglu(stream: SwigluInput) -> Tensor:
    """The rows that stock's next linear quantizes, from [1, rows, ..] as its blocks have them."""
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2SwiGLU

    y = Flux2SwiGLU()(stream.x.unsqueeze(0))
    if stream.attention is not None:
        y = torch.cat([stream.attention.unsqueeze(0), y], dim=-1)
    return y[0]


def assert_operand(operand: Quantized, rows: Tensor, quantize: Quantizer) -> None:
    """`operand` is what `quantize` makes of the rows, laid out as DeepGEMM reads it."""
    assert_same_bytes((operand.q, operand.scale), quantize(rows))
    assert operand.q.is_contiguous()
    assert operand.padded_rows == -(-len(rows) // TMA_ALIGNED_ROWS) * TMA_ALIGNED_ROWS
    assert_scale_layout(operand)
