"""silu(x1) * x2 and the quantization for the next block-FP8 linear (`down_proj`) in one kernel.

    y    = bf16(x1 / (1 + exp(-x1)) * x2)    in fp32, rounded once
    q, s = quantize(y)                       as block_fp8_linear.py says

Why it is bit-identical. Stock (SGLang 0.5.17: `SiluAndMul.forward_cuda`, `act_and_mul_kernel` in activation.cuh, then
the linear's own quantizer) compiles its kernel with --use_fast_math on Hopper: the exponential is `ex2.approx.ftz` of
x1 * -log2(e) rounded to fp32, the quotient is `div.approx.ftz`, products and the sum flush subnormals. The kernel
here states the same PTX; ptxas makes MUFU.EX2, FADD.FTZ, MUFU.RCP, FMUL.FTZ, FMUL.FTZ of both. Unlike the denoisers'
SwiGLU (swiglu_quant.py), SiLU is not rounded before the product, so no table of bf16 can replace it; without IEEE
division it costs six instructions an element, which hide behind the bytes.

On Blackwell stock compiles without fast math: other bytes, not for this kernel.

Bytes at 8192 rows of 2 x 12288: 506 MB; stock moves 909 MB.
"""

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import fused_kernels, llm_kernels
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import GROUP, Quantized
from sglang_fastpath.kernels.llm_kernels import SILU
from torch import Tensor


def can_use(x: Tensor) -> str | None:
    """Why the kernel cannot take x [M, 2 * K], x1 and x2 side by side, or None."""
    if x.dim() != 2 or x.dtype != torch.bfloat16:
        return f"activations are {tuple(x.shape)} {x.dtype}"
    if x.shape[1] % (2 * GROUP):
        return f"width {x.shape[1]} / 2 is not a multiple of {GROUP}"
    if not x.is_contiguous():
        return "the activations are not contiguous"
    if x.is_cuda and not fused_kernels.aligned(x):
        return "a tensor is not 16-byte aligned"
    return None


def silu_quant(x: Tensor) -> Quantized:
    """The operand [M, K] of x [M, 2 * K], which must have passed `can_use`; M may be 0."""
    rows, width = x.shape[0], x.shape[1] // 2
    operand = fused_kernels.empty_quantized(rows, width, x.device)
    if not x.is_cuda:
        q, scale = quantize_per_token_group(reference(x))
        operand.q.copy_(q)
        operand.scale.copy_(scale)
    elif operand.q.numel():
        llm_kernels.load().silu_quant(
            SILU.pack(
                x.data_ptr(),
                operand.q.data_ptr(),
                operand.scale.data_ptr(),
                operand.scale.stride(1),
                operand.padded_rows,
                rows,
                width,
            ),
            fused_kernels.current_stream(x.device),
        )
    return operand


def reference(x: Tensor) -> Tensor:
    """The rows before quantization as `SiluAndMul.forward_native` computes them: SiLU is rounded to bf16 first."""
    x1, x2 = x.chunk(2, dim=-1)
    return F.silu(x1) * x2
