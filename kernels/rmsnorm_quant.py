"""RMSNorm and the quantization for the next block-FP8 linear in one kernel, optionally behind the residual sum.

For each row of width D (x, residual and weight in bf16):

    h        = x + residual                     in fp32; residual = bf16(h)            (with a residual)
    factor   = rsqrt(sum(h^2) / D + eps)        of the unrounded h
    y        = h * factor * (weight + 0)        in fp32, the products rounded one after another, then to bf16
    q, s     = quantize(y)                      as block_fp8_linear.py says

Why it is bit-identical. Stock (SGLang 0.5.17: `RMSNorm.forward_cuda` through sgl_kernel's wrapper to FlashInfer
0.6.15's CuTe-DSL kernels `FusedAddRMSNormKernel` and `RMSNormKernel`; then the linear's own quantizer) gives a row to
T threads, 32 up to a width of 3072, 64 up to 6144, 128 above:

- a thread has the vectors of eight elements t, t + T, t + 2 T, ... and adds their squares one after another, each by
  an fma that starts from 0;
- the warp's sums by butterflies 1, 2, 4, 8, 16, then the warps' sums by the same tree;
- divided by D with correct rounding (a power of two: a product, which is exact) before eps is added,
  `rsqrt.approx.ftz`;
- adding a weight bias of 0 turns a weight of -0 into +0.

Read from the PTX that FlashInfer compiles for sm_90a, at twelve widths from 512 to 8192. The kernel here
has a thread for each vector, which is faster where there are few rows; only the sums of squares, passed through
shared memory, are made by T threads in stock's order. A width that leaves some of stock's threads with a vector less
is refused.

FlashInfer's own CUDA kernel (FLASHINFER_USE_CUDA_NORM=1, or no CuTe-DSL) and SGLang's deterministic mode add in other
orders: not for this kernel.

Bytes at 8192 rows of 4096: 235 MB with a residual, 302 MB if y is written too; stock moves 369 MB.
"""

import torch
from sglang_fastpath.kernels import fused_kernels, llm_kernels
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import Quantized
from sglang_fastpath.kernels.llm_kernels import RMS_NORM
from torch import Tensor

WIDEST = 8192
VECTOR = 8


def chains(width: int) -> int:
    """How many threads of stock's kernel share a row: each adds one chain of squares."""
    return 32 if width <= 3072 else 64 if width <= 6144 else 128


def can_use(x: Tensor, weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these, or None. See `rmsnorm_quant` for what they are."""
    if x.dim() != 2:
        return f"activations are {tuple(x.shape)}, not rows"
    width = x.shape[1]
    if not 0 < width <= WIDEST or width % (VECTOR * chains(width)):
        return f"width {width} is not a multiple of {VECTOR * chains(width)} up to {WIDEST}"
    for name, tensor in (("activations", x), ("residual", residual), ("output", out)):
        if tensor is not None and (tensor.dtype != torch.bfloat16 or tensor.shape != x.shape):
            return f"the {name} is {tuple(tensor.shape)} {tensor.dtype}"
        if tensor is not None and not tensor.is_contiguous():
            return f"the {name} is not contiguous"
    if weight.dtype != torch.bfloat16 or weight.shape != (width,):
        return f"the norm weight is {tuple(weight.shape)} {weight.dtype}"
    if x.is_cuda and not fused_kernels.aligned(x, weight, residual, out):
        return "a tensor is not 16-byte aligned"
    return None


def rmsnorm_quant(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Quantized:
    """The operand [M, D] of the next linear. Inputs must have passed `can_use`; M may be 0.

    x: [M, D]. weight: [D]. residual: [M, D], becomes x + residual in place, as stock does it. out: [M, D], gets the
    normed rows in bf16; may be x.
    """
    rows, width = x.shape
    operand = fused_kernels.empty_quantized(rows, width, x.device)
    if not x.is_cuda:
        total, y = reference(x, weight, eps, residual=residual)
        q, scale = quantize_per_token_group(y)
        operand.q.copy_(q)
        operand.scale.copy_(scale)
        if residual is not None:
            residual.copy_(total)
        if out is not None:
            out.copy_(y)
    elif rows:
        llm_kernels.load().rmsnorm_quant(
            RMS_NORM.pack(
                x.data_ptr(),
                weight.data_ptr(),
                residual.data_ptr() if residual is not None else 0,
                out.data_ptr() if out is not None else 0,
                operand.q.data_ptr(),
                operand.scale.data_ptr(),
                operand.scale.stride(1),
                operand.padded_rows,
                rows,
                eps,
            ),
            width,
            chains(width),
            fused_kernels.current_stream(x.device),
        )
    return operand


def reference(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + residual, normed rows), both in bf16, as `RMSNorm.forward_native` computes them."""
    h = x.float()
    if residual is not None:
        h = h + residual.float()
    variance = h.pow(2).mean(dim=-1, keepdim=True)
    return h.to(x.dtype), (h * torch.rsqrt(variance + eps) * weight).to(x.dtype)
