"""What the fused forwards of all denoiser blocks are made of: quantizing and projecting as stock's linear does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.block_fp8_gemm import gemm
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import Quantized
from sglang_fastpath.patches.diffusion.block_layout import Linear, Refused
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D]."""
    return x.reshape(-1, x.shape[-1])


def project(linear: Linear, operand: Quantized | Tensor, shape: torch.Size, *, fold: bool = False) -> Tensor:
    """The linear's output, [*shape, N]; with `fold` its bias is left to the kernel that reads it.

    An operand that is not quantized yet, [*shape, K], is left to the linear's own quantizer.
    """
    if isinstance(operand, Quantized):
        out = gemm(operand, linear.weight, linear.scale)
        if not fold and linear.bias is not None:
            out += linear.bias
        result: Tensor = out.view(*shape, out.shape[-1])
        return result
    module = linear.module
    result = module.quant_method.apply(module, operand, None) if fold else module(operand)[0]
    return result


def stock_quantize(x: Tensor) -> Quantized:
    """What stock's linear does first, to x [rows, K]: its own quantizer where it runs, the emulation's on a CPU."""
    padded = -(-x.shape[0] // fused_kernels.TMA_ALIGNED_ROWS) * fused_kernels.TMA_ALIGNED_ROWS
    if not x.is_cuda:
        return Quantized(*quantize_per_token_group(x, tma_aligned=True), padded)
    from sglang.srt.layers.quantization import fp8_utils

    q, scale = fp8_utils.sglang_per_token_group_quant_fp8(
        x.contiguous(), 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )
    return Quantized(q, scale, padded)


def check(can_use: Callable[[Any], str | None], streams: Sequence[Any]) -> None:
    """Raises Refused if a kernel cannot run one of the streams."""
    for stream in streams:
        if reason := can_use(stream):
            raise Refused(reason)
