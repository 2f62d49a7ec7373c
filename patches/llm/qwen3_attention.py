"""`qk_norm_rope_kv`: Qwen3's QK norm, RoPE and cache write from the QKV GEMM's output in one kernel.

`Qwen3Attention.forward` is replaced: it runs the same projection, attention and output projection, and between them
one kernel in place of three or four. q is the kernel's own contiguous tensor; k and v go to the cache alone, and
attention is told not to save them (`save_kv_cache=False`), as SGLang's own fused RoPE of other models does.

That is only right where nobody else reads the rotated k, and where a token's cache row is what the kernel writes:

- the attention backend is one that reads k and v from the cache: FlashAttention, or torch's (for tests);
- the pool is SGLang's plain paged one (no sliding window, page layouts, quantization with scales, unified memory);
- the layer has no KV scales, the rotary embedding is SGLang's one-dimensional neox RoPE (YaRN, Llama 3 and the other
  scalings are in its table) over the whole head, and both norms are plain ones with one eps.

Anything else is stock's, with the reason counted. In CUDA graphs `out_cache_loc` is SGLang's static buffer: padding
tokens have slot 0 there, which stock's kernel and ours leave alone.

The guard compares q, k and v with those of stock's norm and RoPE, k and v as they lie in the cache. While it
compares, the kernel writes to a cache of its own and stock saves.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang_fastpath.kernels import qk_norm_rope_kv
from sglang_fastpath.kernels.qk_norm_rope_kv import HEAD, QkvInput
from torch import Tensor

from sglang_fastpath.features import QWEN3
from sglang_fastpath.guard import Verdict, is_capturing
from sglang_fastpath.plan import FeatureRecord, Plan

FEATURE = "qk_norm_rope_kv"

# q, and k and v where stock still has to save them.
Parts = tuple[Tensor, Tensor | None, Tensor | None]


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of the feature's site, by target."""
    (record,) = records.values()
    port = record.feature.port_of(__name__)
    assert port
    (site,) = port.sites
    return {site: functools.partial(_wrap, record, plan)}


def _wrap(record: FeatureRecord, plan: Plan, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def attention_forward(attention: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        plan.serve(QWEN3)
        refused = "torch.compile" if torch.compiler.is_compiling() else _refusal(attention, positions, forward_batch)
        pool = None if refused else _pool()
        if refused is None and isinstance(pool, str):
            refused = pool
        if refused:
            record.fall_back(refused)
            return forward(attention, positions, hidden_states, forward_batch)
        qkv, _ = attention.qkv_proj(hidden_states)
        q, k, v = _parts(record, plan, attention, qkv, positions, forward_batch, pool)
        save = k is not None
        if not save:
            _, k, v = _split(attention, qkv)
        output, _ = attention.o_proj(attention.attn(q, k, v, forward_batch, save_kv_cache=save))
        rows: Tensor = output
        return rows

    return attention_forward


def _parts(
    record: FeatureRecord, plan: Plan, attention: Any, qkv: Tensor, positions: Tensor, forward_batch: Any, pool: Any
) -> Parts:
    """What attention is given: from the kernel, which has saved k and v, or from stock's steps."""
    k_cache, v_cache = pool.get_kv_buffer(attention.attn.layer_id)
    inputs = QkvInput(
        qkv,
        positions,
        attention.rotary_emb.cos_sin_cache,
        forward_batch.out_cache_loc,
        k_cache,
        v_cache,
        (attention.q_norm.weight.data, attention.k_norm.weight.data),
    )
    signature = f"{inputs.q_heads} + {inputs.kv_heads} heads, {k_cache.dtype} cache, {positions.dtype}"
    guard, eps = plan.guard, attention.q_norm.variance_epsilon
    verdict = guard.verdict(FEATURE, signature)
    refused = qk_norm_rope_kv.can_use(inputs)
    if refused is None and verdict is Verdict.FAILED:
        refused = "the guard sent it to stock"
    if refused is None and verdict is None and guard.policy.mode != "off" and is_capturing():
        refused = "first met while a CUDA graph was captured"
    if refused:
        record.fall_back(refused)
        return _stock_parts(attention, positions, qkv, k_cache.dtype)
    ours, run = inputs, _saved
    if guard.policy.mode != "off" and (guard.policy.mode != "once" or verdict is None):
        ours, run = inputs._replace(qkv=qkv.clone()), _apart  # stock, which works in place, may run as well

    def fast() -> Parts:
        parts = run(ours, eps)
        record.hit()
        return parts

    return guard.run(
        FEATURE, signature, fast=fast, stock=lambda: _stock_parts(attention, positions, qkv, k_cache.dtype)
    )


def _saved(inputs: QkvInput, eps: float) -> Parts:
    """q; k and v are in the cache."""
    return qk_norm_rope_kv.qk_norm_rope_kv(inputs, eps), None, None


def _apart(inputs: QkvInput, eps: float) -> Parts:
    """q, k and v as the kernel makes them, through a cache of its own."""
    tokens = len(inputs.qkv)
    k, v = (torch.empty_like(cache[:1]).expand(tokens + 1, -1, -1).contiguous() for cache in inputs[4:6])
    slots = torch.arange(1, tokens + 1, device=k.device)  # nothing is written to slot 0
    q = qk_norm_rope_kv.qk_norm_rope_kv(inputs._replace(slots=slots, k_cache=k, v_cache=v), eps)
    return q, k[1:], v[1:]


def _stock_parts(attention: Any, positions: Tensor, qkv: Tensor, cache_dtype: torch.dtype) -> Parts:
    """The steps of stock's `forward_prepare_native` behind the projection, and the cache's conversion of k and v."""
    from sglang.srt.models.utils import apply_qk_norm

    q, k, v = _split(attention, qkv)
    q, k = apply_qk_norm(
        q=q,
        k=k,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        head_dim=attention.head_dim,
        alt_stream=attention.alt_stream,
    )
    q, k = attention.rotary_emb(positions, q, k)
    k, v = (part.reshape(-1, attention.num_kv_heads, HEAD).to(cache_dtype) for part in (k, v))
    return q, k, v


def _split(attention: Any, qkv: Tensor) -> tuple[Tensor, ...]:
    return torch.split(qkv, [attention.q_size, attention.kv_size, attention.kv_size], dim=-1)


# Their modules are not imported: SGLang's kernels need not be there.
_BACKENDS = (
    "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend",
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
)
_STOCK = {
    "RMSNorm": "sglang.srt.layers.layernorm",
    "AttentionType": "sglang.srt.layers.radix_attention",
    "RadixAttention": "sglang.srt.layers.radix_attention",
    "RotaryEmbedding": "sglang.srt.layers.rotary_embedding.base",
    "is_prefill_context_parallel_enabled": "sglang.srt.layers.utils.cp_utils",
    "MHATokenToKVPool": "sglang.srt.mem_cache.memory_pool",
    "get_attn_backend": "sglang.srt.model_executor.forward_context",
    "Qwen3Attention": "sglang.srt.models.qwen3",
    "get_exec": "sglang.srt.runtime_context",
}


@functools.cache
def _stock() -> SimpleNamespace:
    """SGLang's classes and functions that a call is looked at with."""
    return SimpleNamespace(
        **{name: getattr(importlib.import_module(module), name) for name, module in _STOCK.items()}
    )


def _refusal(attention: Any, positions: Tensor, forward_batch: Any) -> str | None:
    """Why this layer, batch or place in the server is stock's, or None."""
    stock = _stock()
    layer, norms, rotary = attention.attn, (attention.q_norm, attention.k_norm), attention.rotary_emb
    if type(attention) is not stock.Qwen3Attention or attention.head_dim != HEAD:
        return f"{type(attention).__name__} with heads of {attention.head_dim}"
    if any(type(norm) is not stock.RMSNorm or norm.cast_x_before_out_mul for norm in norms):
        return "a QK norm of another kind"
    if norms[0].variance_epsilon != norms[1].variance_epsilon:
        return "QK norms with different eps"
    kind = type(rotary)
    base = stock.RotaryEmbedding
    if not isinstance(rotary, base) or (kind.forward_cuda, kind.forward_native) != (
        base.forward_cuda,
        base.forward_native,
    ):
        return f"{kind.__name__} rotates in another way"
    if (
        not rotary.is_neox_style
        or (rotary.head_size, rotary.rotary_dim) != (HEAD, HEAD)
        or rotary.use_fallback_kernel
    ):
        return "RoPE is not neox over whole heads"
    if rotary.is_torch_compile or stock.get_exec().deterministic.rl_on_policy_target is not None:
        return "torch.compile or RL on-policy mode"
    if type(layer) is not stock.RadixAttention or layer.attn_type is not stock.AttentionType.DECODER:
        return "attention of another kind"
    if layer.k_scale is not None or layer.v_scale is not None or layer.quant_method is not None:
        return "the KV cache has scales"
    if positions.dim() != 1 or forward_batch.forward_mode.is_idle():
        return "no tokens, or positions of more than one dimension"
    if stock.is_prefill_context_parallel_enabled() or getattr(forward_batch, "dcp_kv_mask", None) is not None:
        return "context parallelism"
    return None


def _pool() -> Any:
    """The cache that attention reads, or why the kernel must not write to it."""
    stock = _stock()
    backend = stock.get_attn_backend()
    kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
    if kind not in _BACKENDS:
        return f"{type(backend).__name__} may read k and v themselves"
    if getattr(backend, "use_mla", False) or getattr(backend, "fa_skip_kv_cache", False):
        return "attention that does not read k and v from the cache"
    pool = backend.token_to_kv_pool
    if type(pool) is not stock.MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
        return f"the KV cache is a {type(pool).__name__} of another layout"
    return pool
