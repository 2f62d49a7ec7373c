"""DeepGEMM's block-FP8 GEMM on operands that are quantized already; on a CPU, the reference.

DeepGEMM's output for a row does not depend on the other rows or columns, so merged and grouped GEMMs give the bytes
of separate ones (checked on an H200 for M = 77, 256, 4096, 4100 and N = 3072, 9216, 12288; the parity guard checks
each layer).
"""

import functools

import torch
from sglang_fastpath.kernels.block_fp8_linear import block_fp8_matmul
from sglang_fastpath.kernels.fused_kernels import Quantized, QuantizedPair
from torch import Tensor

GROUP_ROWS = 128
"""Rows that a group of `grouped_gemm` starts at a multiple of: DeepGEMM's tile of M in its contiguous layout."""


def gemm(operand: Quantized, weight: Tensor, scale: Tensor) -> Tensor:
    """[M, K] x [N, K] -> [M, N] bfloat16. weight: float8_e4m3fn with [N/128, K/128] float32 scales; M may be 0."""
    out: Tensor = operand.q.new_empty((operand.q.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    fp8_gemm_nt((operand.q, operand.scale), (weight, scale), out)
    return out


def fp8_gemm_nt(lhs: tuple[Tensor, Tensor], rhs: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Fills `out` [M, N] from (values, scales) of both operands: where `gemm_tuner` puts another backend to work."""
    if not out.is_cuda:
        out.copy_(block_fp8_matmul(*lhs, *rhs, out.dtype))
    elif out.shape[0]:
        import deep_gemm

        deep_gemm.fp8_gemm_nt(lhs, rhs, out)


def grouped_gemm(pair: QuantizedPair, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Both streams' GEMMs as one launch: (text [Mt, N], image [Mi, N]) bfloat16, views of one output.

    pair: with a joint operand, its image rows from a multiple of GROUP_ROWS. weight: [2 N, K], the text's rows first,
    with [2 N/128, K/128] scales.
    """
    joint, n = pair.joint, weight.shape[0] // 2
    assert joint is not None
    text_rows = pair.text.q.shape[0]
    if not joint.q.is_cuda:
        halves = zip(weight.chunk(2), scale.chunk(2), strict=True)
        text, image = (gemm(operand, *half) for operand, half in zip((pair.text, pair.image), halves, strict=True))
        return text, image
    out = joint.q.new_empty((joint.q.shape[0], n), dtype=torch.bfloat16)
    import deep_gemm

    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (joint.q, joint.scale),
        (weight.view(2, n, -1), scale.view(2, n // 128, -1)),
        out,
        _groups(pair.image_offset, joint.q.shape[0], joint.q.device),
    )
    return out[:text_rows], out[pair.image_offset :]


@functools.lru_cache(maxsize=64)
def _groups(image_offset: int, rows: int, device: torch.device) -> Tensor:
    """Which weight each row of a joint operand belongs to: int32 [rows], 0 up to the offset, then 1."""
    with torch.inference_mode(False):
        groups = torch.zeros(rows, dtype=torch.int32, device=device)
        groups[image_offset:] = 1
        return groups
