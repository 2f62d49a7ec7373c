"""LayerNorm, modulation and quantization of both streams in one launch, optionally behind bias + gate + residual.

For each row of width D (bf16 throughout, B batch elements):

    x      = x + bias                       rounded to bf16                                 (with a bias)
    x      = fma(x, gate, residual)         rounded to bf16 once; stored as `residual_out`  (with a residual)
    normed = (x - mean) * rsqrt(var + eps)  in fp32, rounded to bf16
    y      = fma(1 + scale, normed, shift)  in fp32, rounded to bf16
    q, s   = quantize(y)                    as block_fp8_linear.py says

Why it is bit-identical. Stock (0.5.11 to 0.5.23, D a multiple of 256 up to 8192) runs its CuTe-DSL kernel
`ScaleResidualNormScaleShift`, one block of D/8 threads a row, eight consecutive elements a thread:

- The gate's product and the residual's sum are bf16 operations in the source that ptxas contracts to one HFMA2.BF16.
- mean: each thread adds its eight elements one after another in fp32, then the warp by shuffles down 16, 8, 4, 2, 1,
  then the D/256 warp sums by the same tree; divided by D with correct rounding. var: the same over fma(d, d, sum) of
  d = x - mean, x being the rounded bf16.
- rsqrt is the hardware's approximate one (`rsqrt.approx.f32`), 1 + scale is not rounded to bf16.

The kernel here has the same order and roundings, spelled out by intrinsics, so that no compiler contracts anything
else; read from stock's PTX and SASS for sm_90a. Its threads each stand for four lanes of one of stock's warps: the
same additions in the same tree, a quarter of the shuffles.

The gated form also replaces the end of a block, stock's `MulAdd` (Triton, `fuse_scale_shift_kernel_blc_opt` with
constant 0): fma(x, gate + 0, residual) in bf16x2, where adding 0 turns a gate of -0 into +0 (`zero_added`).

Bytes at 4352 rows of 3072 (budget in the design): plain 40 MB, gated 93 MB.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import NORM, NORM_STREAM, Quantized, QuantizedPair
from torch import Tensor

WIDTH_STEP = 256
WIDEST = 8192


class NormInput(NamedTuple):
    """One stream.

    x: [rows, D], contiguous. scale, shift: [B, D] with dense rows; row r of x belongs to batch element
    r // (rows / B). With a residual: residual [rows, D] contiguous, gate [B, D] with dense rows, bias [D] or None.
    """

    x: Tensor
    scale: Tensor
    shift: Tensor
    gate: Tensor | None = None
    residual: Tensor | None = None
    bias: Tensor | None = None


class Normed(NamedTuple):
    """What comes out: the operands, and for each stream the residual sum and the modulated rows, where asked for."""

    operands: QuantizedPair
    residual_out: tuple[Tensor | None, Tensor | None]
    modulated: tuple[Tensor | None, Tensor | None]


def can_use(stream: NormInput) -> str | None:
    """Why this stream cannot be run by the kernel, or None."""
    rows, width = stream.x.shape
    if stream.x.dtype != torch.bfloat16:
        return f"activations are {stream.x.dtype}"
    if width % WIDTH_STEP or width > WIDEST:
        return f"width {width} is not a multiple of {WIDTH_STEP} up to {WIDEST}"
    batch = stream.scale.shape[0]
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(("scale", "shift", "gate"), (batch, width))
    for name, shape in (expected | {"residual": (rows, width), "bias": (width,)}).items():
        tensor: Tensor | None = getattr(stream, name)
        if tensor is not None and (tensor.dtype != torch.bfloat16 or tensor.shape != shape):
            return f"the {name} is {tuple(tensor.shape)} {tensor.dtype}"
    if not batch or rows % batch:
        return f"{batch} modulations for {rows} rows"
    if stream.scale.stride() != stream.shift.stride():
        return "scale and shift are not laid out alike"
    if (stream.gate is None) != (stream.residual is None) or (stream.bias is not None and stream.gate is None):
        return "gate and residual come together, a bias only with them"
    if not stream.x.is_contiguous() or (stream.residual is not None and not stream.residual.is_contiguous()):
        return "rows are not contiguous"
    if stream.x.is_cuda and not fused_kernels.aligned(*stream):
        return "a tensor is not 16-byte aligned"
    return None


def norm_quant(
    text: NormInput,
    image: NormInput,
    eps: float,
    *,
    zero_added: bool = False,
    keep_modulated: bool = False,
    grouped_rows: int = 0,
) -> Normed:
    """Runs both streams, which must be alike in what they have (gate, bias). Inputs must have passed `can_use`.

    `zero_added`, `grouped_rows`: see the module and `empty_pair`. `keep_modulated` also returns y in bf16.
    The outputs are freshly allocated; either stream may have 0 rows.
    """
    device = text.x.device
    rows, width = (text.x.shape[0], image.x.shape[0]), text.x.shape[1]
    operands = fused_kernels.empty_pair(*rows, width, device, grouped_rows)
    gated, biased = image.gate is not None, image.bias is not None
    sums = tuple(torch.empty_like(s.x) if gated else None for s in (text, image))
    modulated = tuple(torch.empty_like(s.x) if keep_modulated else None for s in (text, image))
    result = Normed(operands, sums, modulated)  # type: ignore[arg-type]
    if not text.x.is_cuda:
        for stream, operand, out, kept in zip((text, image), operands, sums, modulated, strict=False):
            _on_cpu(stream, eps, zero_added, operand, out, kept)
    elif rows[0] + rows[1]:
        packed = [
            NORM_STREAM.pack(
                stream.x.data_ptr(),
                stream.bias.data_ptr() if stream.bias is not None else 0,
                stream.residual.data_ptr() if stream.residual is not None else 0,
                stream.gate.data_ptr() if stream.gate is not None else 0,
                stream.scale.data_ptr(),
                stream.shift.data_ptr(),
                out.data_ptr() if out is not None else 0,
                kept.data_ptr() if kept is not None else 0,
                operand.q.data_ptr(),
                operand.scale.data_ptr(),
                operand.scale.stride(1),
                operand.padded_rows,
                count,
                max(1, count // stream.scale.shape[0]),
                stream.gate.stride(0) if stream.gate is not None else 0,
                stream.scale.stride(0),
            )
            for stream, operand, out, kept, count in zip((text, image), operands, sums, modulated, rows, strict=False)
        ]
        fused_kernels.load().norm_quant(
            NORM.pack(packed[0] + packed[1], width, eps),
            gated,
            biased,
            zero_added,
            fused_kernels.current_stream(device),
        )
    return result


def reference(stream: NormInput, eps: float, *, zero_added: bool = False) -> tuple[Tensor, Tensor]:
    """(residual sum, modulated rows) as stock computes them without a GPU: one bf16 rounding for each operation."""
    x = stream.x if stream.bias is None else stream.x + stream.bias

    def by_row(vectors: Tensor) -> Tensor:
        return vectors.repeat_interleave(x.shape[0] // vectors.shape[0], 0)

    if stream.gate is not None and stream.residual is not None:
        x = stream.residual + x * by_row(0 + stream.gate if zero_added else stream.gate)
    normed = F.layer_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype)
    return x, normed * (1.0 + by_row(stream.scale)) + by_row(stream.shift)


def _on_cpu(
    stream: NormInput, eps: float, zero_added: bool, operand: Quantized, out: Tensor | None, kept: Tensor | None
) -> None:
    total, modulated = reference(stream, eps, zero_added=zero_added)
    q, scale = quantize_per_token_group(modulated)
    operand.q.copy_(q)
    operand.scale.copy_(scale)
    if out is not None:
        out.copy_(total)
    if kept is not None:
        kept.copy_(modulated)
