"""SwiGLU, concatenated behind an attention output, and the quantization of both: one stream, or two in one launch.

    y    = silu(x1)                   as `F.silu` rounds it to bf16
    y    = y * x2                     rounded to bf16
    q, s = quantize([attention, y])   as block_fp8_linear.py says; the attention output may be missing

[x1, x2] lie side by side in rows of any stride: FLUX.2's single block reads them in place, from the last columns of
its merged projection.

Why it is bit-identical. Stock (0.5.17: `Flux2SwiGLU`, `torch.cat`, then the linear's own quantizer) takes PyTorch's
SiLU, x / (1 + exp(-x)) in fp32. A bf16 has 65,536 values, so here it is a table, as GELU is in act_quant.py: `F.silu`
itself fills it, and the kernel looks every x1 up in shared memory. PyTorch (2.11, sm_90) runs the same instructions
on dense and on strided tensors, so that one table stands for both. Stock's product is taken in fp32 and rounded to
bf16; of two bf16 the former is exact, also where it is subnormal as long as it can reach the smallest bf16. A bf16
multiplication, which rounds once, gives the same bytes. (A NaN may have other bits; the quantizer does not look.)

Why a table. SiLU's bytes cost 19 instructions an element, two of them in the special function unit, which the 85
million elements of a single block would keep busy for 45 us, and the schedulers, quantization included, for nearly
all of the 120 us that the bytes take to move. A lookup costs three instructions, and its bank conflicts (3.5 ways for
random addresses) a third of that time in shared memory.

Bytes at 4608 rows of 6144 + 18432: 513 MB. Without an attention output, 18432 wide: 427 MB.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import GROUP, SWIGLU, SWIGLU_STREAM, Quantized, QuantizedPair
from torch import Tensor


class SwigluInput(NamedTuple):
    """One stream: x [rows, 2 * K], x1 and x2; attention [rows, K_attention] or None. Dense rows, any stride."""

    x: Tensor
    attention: Tensor | None = None

    @property
    def attention_width(self) -> int:
        return 0 if self.attention is None else self.attention.shape[1]

    @property
    def width(self) -> int:
        """Of a row of the result."""
        return self.attention_width + self.x.shape[1] // 2


def can_use(stream: SwigluInput) -> str | None:
    """Why this stream cannot be run by the kernel, or None."""
    x, attention = stream
    for tensor in (x, attention):
        if tensor is not None and (tensor.dtype != torch.bfloat16 or tensor.dim() != 2):
            return f"activations are {tuple(tensor.shape)} {tensor.dtype}"
    if attention is not None and len(attention) != len(x):
        return f"{len(attention)} rows of attention output for {len(x)} of the feed-forward"
    if x.shape[1] % (2 * GROUP) or stream.attention_width % GROUP:
        return f"widths {stream.attention_width} and {x.shape[1]} / 2 are not multiples of {GROUP}"
    if any(tensor is not None and tensor.stride(1) != 1 for tensor in (x, attention)):
        return "rows are not dense"
    if x.is_cuda and not fused_kernels.aligned(x, attention):
        return "a tensor is not 16-byte aligned"
    return None


def swiglu_quant(stream: SwigluInput) -> Quantized:
    """The operand [rows, K_attention + K] of one stream, which must have passed `can_use`."""
    operand = fused_kernels.empty_quantized(len(stream.x), stream.width, stream.x.device)
    _quantize((stream,), (operand,))
    return operand


def swiglu_quant_pair(text: SwigluInput, image: SwigluInput, *, grouped_rows: int = 0) -> QuantizedPair:
    """Both streams' operands by one launch. Inputs must have passed `can_use` and agree in their widths.

    `grouped_rows`: see `fused_kernels.empty_pair`.
    """
    operands = fused_kernels.empty_pair(len(text.x), len(image.x), text.width, text.x.device, grouped_rows)
    _quantize((text, image), (operands.text, operands.image))
    return operands


def reference(stream: SwigluInput) -> Tensor:
    """The rows before quantization, in bf16, as stock computes them (on any device)."""
    x1, x2 = stream.x.chunk(2, dim=-1)
    y = F.silu(x1) * x2
    return y if stream.attention is None else torch.cat([stream.attention, y], dim=-1)


def _quantize(streams: Sequence[SwigluInput], operands: Sequence[Quantized]) -> None:
    x = streams[0].x
    if not x.is_cuda:
        for stream, operand in zip(streams, operands, strict=True):
            q, scale = quantize_per_token_group(reference(stream))
            operand.q.copy_(q)
            operand.scale.copy_(scale)
    elif any(operand.q.numel() for operand in operands):
        packed = b"".join(
            SWIGLU_STREAM.pack(
                stream.attention.data_ptr() if stream.attention is not None else 0,
                stream.x.data_ptr(),
                operand.q.data_ptr(),
                operand.scale.data_ptr(),
                operand.scale.stride(1),
                operand.padded_rows,
                stream.attention.stride(0) if stream.attention is not None else 0,
                stream.x.stride(0),
                len(stream.x),
            )
            for stream, operand in zip(streams, operands, strict=True)
        )
        table = fused_kernels.bf16_table(F.silu, x.device)
        fused_kernels.load().swiglu_quant(
            # One stream alone: struct fills the second with zeros, so that it has no rows.
            SWIGLU.pack(packed, streams[0].attention_width, x.shape[1] // 2, table.data_ptr()),
            fused_kernels.processors(x.device),
            fused_kernels.current_stream(x.device),
        )
