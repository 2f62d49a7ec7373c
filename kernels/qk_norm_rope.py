"""QK RMSNorm and RoPE of FLUX.2's single block, in place in its merged projection: q and k of a row by one block.

Per head of 128 (bf16 in and out; cosines and sines are fp32, a row for each token):

    factor = rsqrt(fma(sum(x^2), 1/128, eps))    approximate, fp32; q and k each have their own weight
    n      = (x * factor) * weight               fp32, rounded to bf16
    a, b   = fma(n0, cos, -(n1 * sin)), fma(n1, cos, n0 * sin)   interleaved pairs, fp32, rounded to bf16; subnormals,
                                                 among the operands too, are zero

v and the columns of the feed-forward stay as they are.

Why it is bit-identical. Stock (0.5.17) copies q and k out of the projection, norms the copies with a Triton kernel
(`_rms_norm_tiled_onepass`), concatenates cosines and sines, and rotates in place with FlashInfer's kernel, which its
JIT compiles with --use_fast_math. The operations above are theirs on sm_90a, read from PTX and SASS (Triton 3.6,
FlashInfer 0.6.15, CUDA 13.0); intrinsics spell them out. Triton's block is min(16, next power of two of heads in all
/ 512) heads for 128 lanes, so that a lane has 8 elements from 2560 heads on, 4 from 1536, 2 from 1024, else 1
(`stock_lane`). It adds their squares in order, x0^2 and x1^2 first, then over the lanes of a warp by shuffles xor 16,
8, 4, 2, 1 (xor 8, 4, 2, 1 where 16 lanes are a head), then over the 2 or 4 warps that share a head, the farthest
first. With 8 elements a lane that is the layout here; the smaller ones are repeated on it, addition by addition.
(Where a lane has one element, Triton fuses the first addition with a square. Squares of bf16 are exact in fp32 unless
they are too small to show beside eps, so that this cannot be told apart.)

Other stock. 0.5.18 to 0.5.23 take the same two kernels, through `apply_qk_norm_with_optional_rope`, as long as q is a
view with gaps between rows: a single token is contiguous, and then norm and rotation are one kernel that does not
round between them (qkv_epilogue.py). From 0.5.21 24 heads (FLUX.2-klein) have a Triton kernel for strided q and k,
which SGLang uses once it has seen it give the bytes of the two.

Bytes at 4608 tokens of 48 heads: 229 MB.
"""

from typing import NamedTuple

import torch
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.fused_kernels import QK
from sglang_fastpath.kernels.qkv_epilogue import HEAD, normed_and_rotated, unusable_angles
from torch import Tensor


class QkInput(NamedTuple):
    """q and k, written to: [B, tokens, heads, 128], heads side by side in rows that are one stride apart throughout.

    q_weight, k_weight: of their RMSNorms, [128]. cosine, sine: [at least tokens, 64] float32, dense rows, one stride
    for both.
    """

    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cosine: Tensor
    sine: Tensor


def can_use(stream: QkInput) -> str | None:
    """Why q and k cannot be run by the kernel, or None."""
    q, k, q_weight, k_weight, cosine, sine = stream
    if any(tensor.dtype != torch.bfloat16 for tensor in (q, k, q_weight, k_weight)):
        return "activations and norm weights are not all bfloat16"
    if q.dim() != 4 or q.shape[-1] != HEAD or q_weight.shape != (HEAD,) or k_weight.shape != (HEAD,):
        return f"heads are not {HEAD} wide"
    if k.shape != q.shape or k.stride() != q.stride():
        return "q and k are not laid out alike"
    batch, tokens, heads, _ = q.shape
    if q.stride(3) != 1 or (heads > 1 and q.stride(2) != HEAD):
        return "heads are not side by side"
    if batch > 1 and tokens > 1 and q.stride(0) != tokens * q.stride(1):
        return "batch elements are not one row stride apart"
    if batch * tokens > 1 and _row_stride(q) < heads * HEAD:
        return "rows overlap"
    if q.numel() and abs(q.data_ptr() - k.data_ptr()) < heads * HEAD * q.element_size():
        return "q and k overlap"
    if q.is_cuda and not fused_kernels.aligned(*stream):
        return "a tensor is not 16-byte aligned"
    reason: str | None = unusable_angles(cosine, sine, tokens)
    return reason


def qk_norm_rope(stream: QkInput, eps: float) -> None:
    """Norms and rotates q and k, which must have passed `can_use`, in place."""
    q, k, q_weight, k_weight, cosine, sine = stream
    if not q.is_cuda:
        for x, out in zip((q, k), reference(stream, eps), strict=True):
            x.copy_(out)
    elif q.numel():
        batch, tokens, heads, _ = q.shape
        fused_kernels.load().qk_norm_rope(
            QK.pack(
                q.data_ptr(),
                k.data_ptr(),
                q_weight.data_ptr(),
                k_weight.data_ptr(),
                cosine.data_ptr(),
                sine.data_ptr(),
                _row_stride(q),
                cosine.stride(0),
                batch * tokens,
                tokens,
                heads,
                eps,
            ),
            stock_lane(batch * tokens * heads),
            fused_kernels.current_stream(q.device),
        )


def _row_stride(x: Tensor) -> int:
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)  # of a single token, the former means nothing


def stock_lane(heads: int) -> int:
    """Consecutive elements that a lane of stock's norm has, for so many heads in all: at most 16 bytes."""
    block = min(16, 1 << (max(1, heads // 512) - 1).bit_length())
    return min(block, 8)


def reference(stream: QkInput, eps: float) -> tuple[Tensor, Tensor]:
    """q and k, freshly allocated, as stock computes them without a GPU: see `normed_and_rotated`."""
    q, k, q_weight, k_weight, *angles = stream
    return normed_and_rotated(q, q_weight, *angles, eps), normed_and_rotated(k, k_weight, *angles, eps)
