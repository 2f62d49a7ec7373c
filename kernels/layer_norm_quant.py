"""PyTorch's LayerNorm, modulation and quantization, optionally behind gate + residual: FLUX.2's norms.

For each row of width D (bf16 throughout, B batch elements), of one stream, or of two in one launch:

    product = gate * x                           rounded to bf16                                    (with a residual)
    x       = residual + product                 rounded to bf16; stored as `residual_out`          (with a residual)
    normed  = (x - mean) * rsqrt(var + eps)      in fp32, rounded to bf16
    y       = (1 + scale) * normed + shift       the factor, the product and the sum, each rounded to bf16
    q, s    = quantize(y)                        as block_fp8_linear.py says

Why it is bit-identical. Stock (0.5.17: `Flux2TransformerBlock`, `Flux2SingleTransformerBlock`) runs one eager
operation after another, each in fp32 and rounded to bf16: bf16 operations here, for the reason in gated_residual.py.
The norm is `nn.LayerNorm` without weights: PyTorch's `vectorized_layer_norm_kernel`, 128 threads a row, read in
aten/src/ATen/native/cuda/layer_norm_kernel.cu and in 2.11's SASS for sm_90:

- Thread t takes the four elements from column 4 * (t + 128 * i), i = 0, 1, ..., and adds them one after another to
  a mean and a sum of squared deviations, by Welford: d = x - mean; mean = fma(d, 1 / n, mean); squares = fma(d,
  x - mean, squares). 1 / n is `rcp.rn`, the correctly rounded reciprocal.
- The lanes of each warp (by shuffles down 16, 8, 4, 2, 1), then warps 0 and 2, 1 and 3, then both pairs are combined
  by Chan's formula. Of n elements here and n' there, r = rcp.rn(n + n'), a = n * r, b = n' * r: mean = fma(mean', b,
  a * mean), squares = fma(a, n' * (mean - mean')^2, squares + squares'), each product rounded. Without elements: 0.
- var = squares / D, correctly rounded; the root is the hardware's approximate one (`rsqrt.approx.f32`); x - mean is
  rounded, then multiplied with it.

The kernel here has the same layout and order, spelled out by intrinsics. A warp takes whole groups of 128, so its
lanes hold equally many elements. Where the warps do too, a = b is one constant for every step, since doubling n and
n' only halves r. Every thread combines the warps for itself, which saves barriers. PyTorch takes its vectorized
kernel where D is a multiple of 4 up to 2^24 and the rows are aligned to 8 bytes: `can_use` asks for more.

Bytes at 4608 rows of 6144: plain 86 MB, gated 199 MB.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import (
    GROUP,
    LAYER_NORM,
    LAYER_NORM_STREAM,
    Quantized,
    QuantizedPair,
)
from torch import Tensor

WIDEST = 8192


class LayerNormInput(NamedTuple):
    """One stream.

    x: [rows, D], contiguous. scale, shift: [B, D] with dense rows; row r of x belongs to batch element
    r // (rows / B). With a residual: residual [rows, D] contiguous, gate [B, D] with dense rows.
    """

    x: Tensor
    scale: Tensor
    shift: Tensor
    gate: Tensor | None = None
    residual: Tensor | None = None


class LayerNormed(NamedTuple):
    """One stream's operand, and its residual sum [rows, D] if it has a gate."""

    operand: Quantized
    residual_out: Tensor | None


class LayerNormedPair(NamedTuple):
    """The operands of the text and the image stream, and their residual sums if they have gates."""

    operands: QuantizedPair
    residual_out: tuple[Tensor | None, Tensor | None]


def can_use(stream: LayerNormInput) -> str | None:
    """Why this stream cannot be run by the kernel, or None."""
    if stream.x.dtype != torch.bfloat16 or stream.x.dim() != 2:
        return f"activations are {tuple(stream.x.shape)} {stream.x.dtype}"
    rows, width = stream.x.shape
    if width % GROUP or not 0 < width <= WIDEST:
        return f"width {width} is not a multiple of {GROUP} up to {WIDEST}"
    batch = stream.scale.shape[0]
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(("scale", "shift", "gate"), (batch, width))
    for name, shape in (expected | {"residual": (rows, width)}).items():
        tensor: Tensor | None = getattr(stream, name)
        if tensor is not None and (tensor.dtype != torch.bfloat16 or tensor.shape != shape):
            return f"the {name} is {tuple(tensor.shape)} {tensor.dtype}"
    if not batch or rows % batch:
        return f"{batch} modulations for {rows} rows"
    if stream.scale.stride() != stream.shift.stride():
        return "scale and shift are not laid out alike"
    if any(tensor is not None and tensor.stride(1) != 1 for tensor in (stream.scale, stream.gate)):
        return "rows of the modulation are not dense"
    if (stream.gate is None) != (stream.residual is None):
        return "gate and residual come together"
    if not stream.x.is_contiguous() or (stream.residual is not None and not stream.residual.is_contiguous()):
        return "rows are not contiguous"
    if stream.x.is_cuda and not fused_kernels.aligned(*stream):
        return "a tensor is not 16-byte aligned"
    return None


def layer_norm_quant(stream: LayerNormInput, eps: float) -> LayerNormed:
    """One stream, which must have passed `can_use`. The outputs are freshly allocated."""
    operand = fused_kernels.empty_quantized(*stream.x.shape, stream.x.device)
    (total,) = _run((stream,), (operand,), eps)
    return LayerNormed(operand, total)


def layer_norm_quant_pair(
    text: LayerNormInput, image: LayerNormInput, eps: float, *, grouped_rows: int = 0
) -> LayerNormedPair:
    """Both streams by one launch. Inputs must have passed `can_use` and agree in their width and in having a gate.

    `grouped_rows`: see `fused_kernels.empty_pair`. The outputs are freshly allocated; either stream may have 0 rows.
    """
    rows, width = (len(text.x), len(image.x)), text.x.shape[1]
    operands = fused_kernels.empty_pair(*rows, width, text.x.device, grouped_rows)
    text_total, image_total = _run((text, image), (operands.text, operands.image), eps)
    return LayerNormedPair(operands, (text_total, image_total))


def reference(stream: LayerNormInput, eps: float) -> tuple[Tensor, Tensor]:
    """(residual sum or x, modulated rows), by the operations of stock (on any device)."""

    def by_row(vectors: Tensor) -> Tensor:
        return vectors.repeat_interleave(len(stream.x) // len(vectors), 0)

    x = stream.x
    if stream.gate is not None and stream.residual is not None:
        x = stream.residual + by_row(stream.gate) * x
    normed = F.layer_norm(x, (x.shape[-1],), eps=eps)
    return x, by_row(1 + stream.scale) * normed + by_row(stream.shift)


def _run(streams: Sequence[LayerNormInput], operands: Sequence[Quantized], eps: float) -> tuple[Tensor | None, ...]:
    """Fills the operands and returns each stream's residual sum."""
    x = streams[0].x
    gated = streams[0].gate is not None
    totals = tuple(torch.empty_like(stream.x) if gated else None for stream in streams)
    if not x.is_cuda:
        for stream, operand, total in zip(streams, operands, totals, strict=True):
            summed, modulated = reference(stream, eps)
            q, scale = quantize_per_token_group(modulated)
            operand.q.copy_(q)
            operand.scale.copy_(scale)
            if total is not None:
                total.copy_(summed)
    elif any(len(stream.x) for stream in streams):
        packed = b"".join(
            LAYER_NORM_STREAM.pack(
                stream.x.data_ptr(),
                stream.residual.data_ptr() if stream.residual is not None else 0,
                stream.gate.data_ptr() if stream.gate is not None else 0,
                stream.scale.data_ptr(),
                stream.shift.data_ptr(),
                total.data_ptr() if total is not None else 0,
                operand.q.data_ptr(),
                operand.scale.data_ptr(),
                operand.scale.stride(1),
                operand.padded_rows,
                len(stream.x),
                max(1, len(stream.x) // len(stream.scale)),
                stream.gate.stride(0) if stream.gate is not None else 0,
                stream.scale.stride(0),
            )
            for stream, operand, total in zip(streams, operands, totals, strict=True)
        )
        fused_kernels.load().layer_norm_quant(
            # One stream alone: struct fills the second with zeros, so that it has no rows.
            LAYER_NORM.pack(packed, x.shape[1], eps),
            gated,
            fused_kernels.current_stream(x.device),
        )
    return totals
