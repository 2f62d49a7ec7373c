"""SGLang's block-FP8 linears that take an operand which is quantized already.

From 0.5.17 on, `Fp8LinearMethod.apply` hands a tuple (q, scale) to its GEMM as it is, in the layout that the
quantizer in front of DeepGEMM writes; that is how SGLang hands over what ROCm's kernels fuse. So nothing of the
linear has to be rebuilt here: sharding, bias and the choice of the GEMM stay stock's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang_fastpath.kernels.fused_kernels import GROUP
from sglang_fastpath.patches.diffusion.fp8_cpu_emulation import w8a8_block_fp8_linear
from torch import nn

OUTPUT_STEP = 64
"""What DeepGEMM wants the number of outputs to be a multiple of; stock runs Triton otherwise, on other scales."""


@functools.cache
def _stock() -> tuple[Any, tuple[Callable[..., Any], ...], bool]:
    """The method's class, the GEMMs that read our operands, and whether scales are powers of two (Blackwell)."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8, fp8_utils

    gemms = (fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback, w8a8_block_fp8_linear)
    return fp8.Fp8LinearMethod, gemms, bool(deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0)


def refusal(linear: nn.Module | None, width: int) -> str | None:
    """Why this linear cannot take an operand [M, width], or None."""
    fp8_method, gemms, ue8m0 = _stock()
    layer: Any = linear
    method: Any = getattr(layer, "quant_method", None)
    if type(method) is not fp8_method or not method.block_quant or method.use_marlin or method.use_mxfp8:
        return "the next linear is not in block FP8"
    if list(method.weight_block_size) != [GROUP, GROUP]:
        return f"the next linear has weight blocks {list(method.weight_block_size)}"
    if method.w8a8_block_fp8_linear not in gemms:
        return f"the next linear runs {getattr(method.w8a8_block_fp8_linear, '__name__', 'another GEMM')}"
    if ue8m0:
        return "scales are powers of two here"
    weight = layer.weight
    if weight.dtype != torch.float8_e4m3fn or weight.shape[1] != width or weight.shape[0] % OUTPUT_STEP:
        return f"the next linear's weight is {tuple(weight.shape)} {weight.dtype}, its input {width} wide"
    return None
