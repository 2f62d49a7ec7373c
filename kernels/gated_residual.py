"""bias + gate + residual of both streams in one launch: the end of a block where no norm follows in the same kernel.

    x   = x + bias                    rounded to bf16 (with a bias): stock adds it to the rounded GEMM output
    out = fma(x, gate + 0, residual)  rounded to bf16 once
    out = residual + gate * x         instead of that with `rounds_product`: the product and the sum rounded to bf16

Why it is bit-identical. Qwen-Image: stock's `MulAdd` is a Triton kernel (`fuse_scale_shift_kernel_blc_opt`, constant
0) whose bf16 product and sum become one `fma.rn.bf16x2`; adding 0 turns a gate of -0 into +0. Read from its PTX for
sm_90. FLUX.2 (`rounds_product`): two eager operations, each computed in fp32 and rounded to bf16. The fp32 product of
two bf16 is exact where it matters (see swiglu_quant.py). Their fp32 sum is not, but rounding it once more gives the
rounded sum, since 24 bits are at least two more than twice bf16's 8. So a bf16 operation for each gives their bytes.

Bytes at 4352 rows of 3072: 80 MB (the design's 93 MB count a second read).
"""

from typing import NamedTuple

import torch
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.fused_kernels import GATED, GATED_STREAM
from torch import Tensor


class GatedInput(NamedTuple):
    """One stream: x, residual [rows, D] contiguous; gate [G, D] with dense rows, one for each rows/G rows (a batch
    element's, or every row's own; none without rows); bias [D] or None."""

    x: Tensor
    gate: Tensor
    residual: Tensor
    bias: Tensor | None = None


def can_use(stream: GatedInput) -> str | None:
    """Why this stream cannot be run by the kernel, or None."""
    rows, width = stream.x.shape
    if any(tensor.dtype != torch.bfloat16 for tensor in stream if tensor is not None):
        return "activations are not all bfloat16"
    gates = stream.gate.shape[0]
    if width % 8 or stream.gate.shape[1] != width or (rows % gates if gates else rows):
        return f"a gate of {tuple(stream.gate.shape)} for {rows} rows of {width}"
    for name, tensor, shape in (("residual", stream.residual, (rows, width)), ("bias", stream.bias, (width,))):
        if tensor is not None and tensor.shape != shape:
            return f"the {name} is {tuple(tensor.shape)} for {rows} rows of {width}"
    if not stream.x.is_contiguous() or not stream.residual.is_contiguous():
        return "rows are not contiguous"
    if stream.x.is_cuda and not fused_kernels.aligned(*stream):
        return "a tensor is not 16-byte aligned"
    return None


def gated_residual(text: GatedInput, image: GatedInput, *, rounds_product: bool = False) -> tuple[Tensor, Tensor]:
    """(text, image) [rows, D], freshly allocated. Inputs must have passed `can_use`; both have a bias or neither.

    `rounds_product`: as FLUX.2 has it, see the module.
    """
    outs = torch.empty_like(text.x), torch.empty_like(image.x)
    if not text.x.is_cuda:
        for out, stream in zip(outs, (text, image), strict=True):
            out.copy_(reference(stream, rounds_product=rounds_product))
    elif text.x.shape[0] + image.x.shape[0]:
        packed = b"".join(
            GATED_STREAM.pack(
                stream.x.data_ptr(),
                stream.bias.data_ptr() if stream.bias is not None else 0,
                stream.gate.data_ptr(),
                stream.residual.data_ptr(),
                out.data_ptr(),
                stream.x.shape[0],
                max(1, stream.x.shape[0] // max(1, stream.gate.shape[0])),
                stream.gate.stride(0),
            )
            for out, stream in zip(outs, (text, image), strict=True)
        )
        fused_kernels.load().gated_residual(
            GATED.pack(packed, text.x.shape[1]),
            text.bias is not None,
            rounds_product,
            fused_kernels.current_stream(text.x.device),
        )
    return outs


def reference(stream: GatedInput, *, rounds_product: bool = False) -> Tensor:
    """The sum as stock computes it without a GPU: one bf16 rounding for each operation."""
    x = stream.x if stream.bias is None else stream.x + stream.bias
    gate = stream.gate.repeat_interleave(x.shape[0] // max(1, stream.gate.shape[0]), 0)
    return stream.residual + x * (gate if rounds_product else 0 + gate)
