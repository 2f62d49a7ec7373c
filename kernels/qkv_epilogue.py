"""Bias, QK RMSNorm and RoPE of both streams, written into the joint q, k and v buffers by one launch.

Per token and head of 128 (bf16 in and out):

    x      = x + bias                            rounded to bf16 (with a bias: stock adds it to the GEMM output)
    factor = rsqrt(fma(sum(x^2), 1/128, eps))    q and k, each with its own weight
    n      = x * (factor * weight)               fp32, not rounded
    a, b   = fma(n0, cos, -(n1 * sin)), fma(n1, cos, n0 * sin)   interleaved pairs, fp32, rounded to bf16

and v only gets its bias. The joint sequence is [text, image].

Why it is bit-identical. Stock (0.5.17: `fused_qknorm_rope_warp`, CUDA) gives a warp a head and a lane four elements:
sum = fma(x0, x0, x1 * x1) + fma(x2, x2, x3 * x3), then shuffles xor 16, 8, 4, 2, 1; rsqrt is approximate. These are
the contractions that nvcc and ptxas choose for it on sm_90a, read from PTX and SASS; here intrinsics spell them out.
Stock runs it in place for each stream, after three bias additions, and concatenates afterwards. FLUX.2's double
blocks call the same kernel, without biases, with one table for both streams: the image's positions follow the text's.

Bytes at 4352 tokens of 24 heads: 160 MB.
"""

from typing import NamedTuple

import torch
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.fused_kernels import QKV, QKV_STREAM
from torch import Tensor

HEAD = 128


class QkvInput(NamedTuple):
    """One stream.

    projected: q, k, v, each [B, tokens, heads * 128] with dense rows that are one stride apart throughout (parts of
    a merged GEMM output, or tensors of their own). bias: their biases [heads * 128], or None. norm: the RMSNorm
    weights of q and k, [128]. cosine, sine: [at least tokens, 64] float32, dense rows, one stride for both (halves of
    one table, or rows of two).
    """

    projected: tuple[Tensor, Tensor, Tensor]
    bias: tuple[Tensor, Tensor, Tensor] | None
    norm: tuple[Tensor, Tensor]
    cosine: Tensor
    sine: Tensor


def can_use(stream: QkvInput) -> str | None:
    """Why this stream cannot be run by the kernel, or None."""
    q = stream.projected[0]
    tensors = (*stream.projected, *(stream.bias or ()), *stream.norm)
    if any(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return "activations, biases and norm weights are not all bfloat16"
    if q.dim() != 3 or q.shape[-1] % HEAD or any(weight.shape != (HEAD,) for weight in stream.norm):
        return f"heads are not {HEAD} wide"
    batch, tokens, _ = q.shape
    if any(part.shape != q.shape or part.stride() != q.stride() for part in stream.projected):
        return "q, k and v are not laid out alike"
    if any(bias.shape != q.shape[2:] for bias in stream.bias or ()):
        return f"a bias is not {q.shape[2]} long"
    if batch > 1 and tokens and q.stride(0) != tokens * q.stride(1):
        return "batch elements are not one row stride apart"
    if reason := unusable_angles(stream.cosine, stream.sine, tokens):
        return reason
    if q.is_cuda and not fused_kernels.aligned(*tensors, stream.cosine, stream.sine):
        return "a tensor is not 16-byte aligned"
    return None


def unusable_angles(cosine: Tensor, sine: Tensor, tokens: int) -> str | None:
    """Why these are not the cosines and sines of `tokens` tokens that `QkvInput` wants, or None."""
    for name, table in (("cosines", cosine), ("sines", sine)):
        if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] != HEAD // 2:
            return f"the {name} are {tuple(table.shape)} {table.dtype}"
        if table.shape[0] < tokens:
            return f"the {name} {tuple(table.shape)} do not cover {tokens} tokens"
    if cosine.stride() != sine.stride() or cosine.stride(1) != 1:
        return "cosines and sines are not laid out alike, in dense rows"
    return None


def qkv_epilogue(text: QkvInput, image: QkvInput, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The joint q, k, v: each [B, text + image tokens, heads, 128], freshly allocated.

    Both streams must have passed `can_use`, agree in batch and heads, and both have biases or neither.
    """
    batch, text_tokens, width = text.projected[0].shape
    tokens = text_tokens + image.projected[0].shape[1]
    shape = (batch, tokens, width // HEAD, HEAD)
    device = text.projected[0].device
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    if not text.projected[0].is_cuda:
        for stream, start in ((text, 0), (image, text_tokens)):
            for joint, part in zip((q, k, v), reference(stream, eps), strict=True):
                joint[:, start : start + part.shape[1]] = part
    elif batch * tokens:
        packed = b"".join(
            QKV_STREAM.pack(
                *[part.data_ptr() for part in stream.projected],
                *([bias.data_ptr() for bias in stream.bias] if stream.bias is not None else (0, 0, 0)),
                stream.norm[0].data_ptr(),
                stream.norm[1].data_ptr(),
                stream.cosine.data_ptr(),
                stream.sine.data_ptr(),
                batch * stream.projected[0].shape[1],
                max(1, stream.projected[0].shape[1]),
                stream.projected[0].stride(1),
                stream.cosine.stride(0),
                start,
            )
            for stream, start in ((text, 0), (image, text_tokens))
        )
        fused_kernels.load().qkv_epilogue(
            QKV.pack(packed, q.data_ptr(), k.data_ptr(), v.data_ptr(), tokens, width // HEAD, eps),
            text.bias is not None,
            fused_kernels.current_stream(device),
        )
    return q, k, v


def reference(stream: QkvInput, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one stream [B, tokens, heads, 128] as stock computes them without a GPU: normed rows, cosines and
    sines rounded to bf16 before the rotation, whose operations are bf16."""
    parts = [
        (part if stream.bias is None else part + stream.bias[i]).reshape(*part.shape[:2], part.shape[2] // HEAD, HEAD)
        for i, part in enumerate(stream.projected)
    ]
    for i, weight in enumerate(stream.norm):
        parts[i] = normed_and_rotated(parts[i], weight, stream.cosine, stream.sine, eps)
    return parts[0], parts[1], parts[2]


def normed_and_rotated(x: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor, eps: float) -> Tensor:
    """Heads [B, tokens, heads, 128] as stock norms and rotates them without a GPU."""
    normed = x.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    first, second = (normed * weight).bfloat16().view(*x.shape[:-1], HEAD // 2, 2).unbind(-1)
    cosine, sine = (table[: x.shape[1]].unsqueeze(1).bfloat16() for table in (cosine, sine))
    return torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1).flatten(-2)
