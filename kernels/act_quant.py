"""Quantization of both streams in one launch: plain (attention output), or behind bias + GELU(tanh) (feed-forward).

    x    = x + bias      rounded to bf16 (with a bias): stock adds it to the rounded GEMM output
    y    = gelu_tanh(x)  as `F.gelu(x, approximate="tanh")` rounds it to bf16 (with `gelu`)
    q, s = quantize(y)   as block_fp8_linear.py says

Why it is bit-identical. A bf16 has 65,536 values, so GELU is a table: `F.gelu` itself fills it, once per device, and
the kernel looks every element up in shared memory (128 KB, one block a multiprocessor): exact by construction, and
cheaper than tanhf, which alone would take longer than moving the bytes.

The attention output is read in place from the joint buffer, text rows and image rows each into their own operand.

Bytes at 4352 rows: attention output (3072 wide) 40 MB, feed-forward (12288 wide) 160 MB.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import ACT, ACT_STREAM, GROUP, QuantizedPair
from torch import Tensor


class ActInput(NamedTuple):
    """One stream: x [B, tokens, K], each batch element contiguous; bias [K] or None (only with GELU)."""

    x: Tensor
    bias: Tensor | None = None


def can_use(stream: ActInput) -> str | None:
    """Why this stream cannot be run by the kernel, or None."""
    x, bias = stream
    if x.dtype != torch.bfloat16:
        return f"activations are {x.dtype}"
    if bias is not None and (bias.dtype != torch.bfloat16 or bias.shape != x.shape[2:]):
        return f"the bias is {tuple(bias.shape)} {bias.dtype}"
    if x.shape[-1] % GROUP:
        return f"width {x.shape[-1]} is not a multiple of {GROUP}"
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        return "tokens are not contiguous"
    if x.is_cuda and not fused_kernels.aligned(x, bias):
        return "a tensor is not 16-byte aligned"
    return None


def act_quant(text: ActInput, image: ActInput, *, gelu: bool, grouped_rows: int = 0) -> QuantizedPair:
    """Both streams' operands, rows in [B, tokens] order. Inputs must have passed `can_use`.

    With `gelu`, both have a bias or neither. `grouped_rows`: see `fused_kernels.empty_pair`.
    """
    device, width = text.x.device, text.x.shape[2]
    rows = tuple(stream.x.shape[0] * stream.x.shape[1] for stream in (text, image))
    operands = fused_kernels.empty_pair(rows[0], rows[1], width, device, grouped_rows)
    if not text.x.is_cuda:
        for stream, operand in zip((text, image), operands, strict=False):
            q, scale = quantize_per_token_group(reference(stream, gelu).reshape(-1, width))
            operand.q.copy_(q)
            operand.scale.copy_(scale)
    elif rows[0] + rows[1]:
        packed = b"".join(
            ACT_STREAM.pack(
                stream.x.data_ptr(),
                stream.bias.data_ptr() if stream.bias is not None else 0,
                operand.q.data_ptr(),
                operand.scale.data_ptr(),
                operand.scale.stride(1),
                operand.padded_rows,
                count,
                max(1, stream.x.shape[1]),
                stream.x.stride(0),
            )
            for stream, operand, count in zip((text, image), operands, rows, strict=False)
        )
        fused_kernels.load().act_quant(
            ACT.pack(packed, width, fused_kernels.bf16_table(_gelu, device).data_ptr() if gelu else 0),
            gelu,
            text.bias is not None,
            fused_kernels.processors(device),
            fused_kernels.current_stream(device),
        )
    return operands


def reference(stream: ActInput, gelu: bool) -> Tensor:
    """The rows before quantization, in bf16, as stock computes them (on any device)."""
    x = stream.x if stream.bias is None else stream.x + stream.bias
    return _gelu(x) if gelu else x


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
