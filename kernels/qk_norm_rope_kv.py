"""QK RMSNorm (or bias), neox RoPE and the write of k and v into the paged KV cache, from one merged QKV GEMM output.

Per token and head of 128 (bf16 in and out, norms in fp32):

    x      = x + bias                              rounded to bf16               (with a bias, q, k and v)
    factor = rsqrt(fma(sum(x^2), 1/128, eps))                                    (with a norm, q and k)
    n      = bf16(x * factor * weight)             the products rounded one after another
    a, b   = elements i and i + 64
    a', b' = bf16(fma(a, cos, -(b * sin))), bf16(fma(a, sin, b * cos))           (q and k)

q goes into a tensor of its own, k and v into the cache slots that `slots` names: as they are, or converted to e4m3 as
`Tensor.to` converts (above 464 and NaN: NaN, not the largest number).

Why it is bit-identical. Stock (SGLang 0.5.17) runs, on the GEMM output in place: `fused_qknorm_warp` (qknorm.cuh), a
warp a head, a lane four elements, squares added by fma one after another from 0, then butterflies 16, 8, 4, 2, 1;
`fused_rope_kernel` (rope.cuh), whose contractions are those above; a copy that makes q contiguous (in the attention
backend, from 2 tokens on); `store_kvcache` (kvcache.cuh), behind a conversion of k and of v where the cache is in
fp8. Read from the SASS for sm_90a; here intrinsics spell it out. A lane here stands for two of stock's, 16 apart: the
first butterfly is a sum in registers, and so is the rotation.

Slot 0 takes the tokens that pad a batch to the size of a CUDA graph. Like stock's the kernel writes nothing there,
and stops the GPU at a slot outside the cache.

Bytes at 8192 tokens of 32 + 8 + 8 heads: 201 MB; stock moves 537 MB by four kernels.
"""

from typing import NamedTuple

import torch
from sglang_fastpath.kernels import fused_kernels, llm_kernels
from sglang_fastpath.kernels.llm_kernels import ROPE
from torch import Tensor

HEAD = 128


class QkvInput(NamedTuple):
    """What the kernel reads, and the caches that it writes.

    qkv: [M, (q heads + 2 * kv heads) * 128], dense rows of any stride. positions: [M] int64 or int32. cos_sin: [at
    least the largest position + 1, 128] float32, 64 cosines then 64 sines. slots: [M] int64 or int32. k_cache,
    v_cache: [slots, kv heads, 128] bfloat16 or float8_e4m3fn, dense slots one stride apart. norm: the RMSNorm weights
    of q and k, [128], or None. bias: of the projection, [(q heads + 2 * kv heads) * 128], or None.
    """

    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    norm: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def q_heads(self) -> int:
        return self.qkv.shape[1] // HEAD - 2 * self.kv_heads


def can_use(inputs: QkvInput) -> str | None:
    """Why the kernel cannot take these, or None."""
    qkv, positions, cos_sin, slots, k_cache, v_cache, norm, bias = inputs
    if qkv.dim() != 2 or qkv.dtype != torch.bfloat16 or qkv.shape[1] % HEAD:
        return f"the projection is {tuple(qkv.shape)} {qkv.dtype}"
    for name, cache in (("k", k_cache), ("v", v_cache)):
        if cache.dim() != 3 or cache.shape[2] != HEAD or cache.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            return f"the {name} cache is {tuple(cache.shape)} {cache.dtype}"
        if cache.stride()[1:] != (HEAD, 1):
            return f"the {name} cache's slots are not dense"
    if (k_cache.shape, k_cache.stride(), k_cache.dtype) != (v_cache.shape, v_cache.stride(), v_cache.dtype):
        return "the k and the v cache are not alike"
    if inputs.q_heads < 1:
        return f"{qkv.shape[1] // HEAD} heads hold no q beside {inputs.kv_heads} of k and of v"
    for name, index in (("positions", positions), ("slots", slots)):
        if index.dtype not in (torch.int64, torch.int32) or index.shape != qkv.shape[:1] or not index.is_contiguous():
            return f"the {name} are {tuple(index.shape)} {index.dtype}"
    if (
        cos_sin.dim() != 2
        or cos_sin.shape[1] != HEAD
        or cos_sin.dtype != torch.float32
        or not cos_sin.is_contiguous()
    ):
        return f"the rotary table is {tuple(cos_sin.shape)} {cos_sin.dtype}"
    if norm is not None and bias is not None:
        return "a bias in front of a QK norm"
    if any(weight.shape != (HEAD,) or weight.dtype != torch.bfloat16 for weight in norm or ()):
        return "a QK norm weight is not 128 bfloat16"
    if bias is not None and (bias.shape != qkv.shape[1:] or bias.dtype != torch.bfloat16):
        return f"the bias is {tuple(bias.shape)} {bias.dtype}"
    if qkv.stride(1) != 1:
        return "the projection's rows are not dense"
    if qkv.is_cuda and not fused_kernels.aligned(qkv, cos_sin, k_cache, v_cache, bias, *(norm or ())):
        return "a tensor is not 16-byte aligned"
    return None


def qk_norm_rope_kv(inputs: QkvInput, eps: float) -> Tensor:
    """q [M, q heads * 128], rotated; k and v are in the caches. `eps`: of the norm.

    Inputs must have passed `can_use`; M may be 0.
    """
    qkv, positions, cos_sin, slots, k_cache, v_cache, norm, bias = inputs
    if not qkv.is_cuda:
        q, k, v = reference(inputs, eps)
        for cache, values in ((k_cache, k), (v_cache, v)):
            bits = torch.int16 if cache.element_size() == 2 else torch.uint8  # e4m3 cannot be indexed
            cache.view(bits)[slots] = values.to(cache.dtype).view(bits)
        return q
    rows = len(qkv)
    q = torch.empty((rows, inputs.q_heads * HEAD), dtype=qkv.dtype, device=qkv.device)
    if rows:
        llm_kernels.load().qk_norm_rope_kv(
            ROPE.pack(
                qkv.data_ptr(),
                bias.data_ptr() if bias is not None else 0,
                *([weight.data_ptr() for weight in norm] if norm is not None else (0, 0)),
                cos_sin.data_ptr(),
                positions.data_ptr(),
                slots.data_ptr(),
                q.data_ptr(),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                k_cache.stride(0),
                len(k_cache),
                qkv.stride(0),
                rows,
                inputs.q_heads,
                inputs.kv_heads,
                positions.dtype == torch.int64,
                slots.dtype == torch.int64,
                eps,
            ),
            k_cache.dtype == torch.float8_e4m3fn,
            fused_kernels.processors(qkv.device),
            fused_kernels.current_stream(qkv.device),
        )
    return q


def reference(inputs: QkvInput, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """q [M, q heads * 128], k and v [M, kv heads, 128] as stock computes them without a GPU: cosines and sines
    rounded to bf16, as is every operation of the rotation."""
    qkv = inputs.qkv if inputs.bias is None else inputs.qkv + inputs.bias
    heads = qkv.view(len(qkv), qkv.shape[1] // HEAD, HEAD)
    q, k, v = torch.split(heads, [inputs.q_heads, inputs.kv_heads, inputs.kv_heads], dim=1)
    if inputs.norm is not None:
        q, k = (_rms_norm(x, weight, eps) for x, weight in zip((q, k), inputs.norm, strict=True))
    cosine, sine = inputs.cos_sin[inputs.positions].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    q, k = (_rotate(x, cosine, sine) for x in (q, k))
    return q.flatten(1), k, v


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
