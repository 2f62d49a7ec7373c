"""Inputs for the language models' fused kernels, and the chains of SGLang's own modules that the kernels replace.

The chains dispatch by device: on a GPU they run stock's kernels, without one what SGLang computes there instead.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from sglang_fastpath.kernels.qk_norm_rope_kv import HEAD, QkvInput
from stock_chains import BF16, EPS, rows_of
from torch import Tensor, nn

CACHES = {"bf16": BF16, "fp8": torch.float8_e4m3fn}


def publish_arguments(folder: Path) -> None:
    """Gives SGLang's language-model layers what a scheduler process has: published arguments, of a small Qwen3."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": HEAD,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(folder), device=device, skip_tokenizer_init=True))


# --- inputs --------------------------------------------------------------------------------------------------------


def norm_weight(width: int, *, seed: int, device: str = "cpu") -> Tensor:
    """About 1; some are 0 and some -0, which stock's norm takes for +0."""
    weight = 1 + 0.1 * rows_of(1, width, seed=seed, device=device)[0]
    weight[::64] = -0.0
    weight[1::64] = 0.0
    return weight


def qkv_input(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    *,
    norm: bool = True,
    bias: bool = False,
    cache: str = "bf16",
    strided: bool = False,
    wide: bool = True,
    padding: int = 0,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> QkvInput:
    """Random slots, none twice. The last `padding` tokens are a CUDA graph's: position 0, slot 0. `strided`: the rows
    are parts of wider ones. `wide`: indices are int64, else int32. The caches hold noise."""
    width = (q_heads + 2 * kv_heads) * HEAD
    spare = HEAD if strided else 0
    generator = torch.Generator(device).manual_seed(seed + 1)
    index: dict[str, Any] = {"dtype": torch.int64 if wide else torch.int32, "device": device}
    qkv = rows_of(tokens, width + spare, seed=seed, device=device, edges=edges)[:, :width]
    count = 2 * tokens + 5
    positions = torch.randint(0, 64, (tokens,), generator=generator, **index)
    slots = 1 + torch.randperm(count - 1, generator=generator, device=device)[:tokens].to(index["dtype"])
    if padding:
        positions[-padding:] = 0
        slots[-padding:] = 0
    angles = 100 * torch.rand(64, HEAD // 2, generator=generator, device=device)
    caches = [
        (10 * torch.randn(count, kv_heads, HEAD, generator=generator, device=device)).to(CACHES[cache])
        for _ in range(2)
    ]
    return QkvInput(
        qkv=qkv,
        positions=positions,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1),
        slots=slots,
        k_cache=caches[0],
        v_cache=caches[1],
        norm=(norm_weight(HEAD, seed=seed + 2, device=device), norm_weight(HEAD, seed=seed + 3, device=device))
        if norm
        else None,
        bias=rows_of(1, width, seed=seed + 4, device=device)[0] if bias else None,
    )


def with_own_caches(inputs: QkvInput) -> QkvInput:
    """The same inputs, with caches of the same contents that nobody else writes."""
    return inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())


# --- what stock does -----------------------------------------------------------------------------------------------


def rms_norm(weight: Tensor) -> nn.Module:
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(len(weight), eps=EPS)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def stock_rmsnorm(x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """(residual sum, normed rows)."""
    norm = rms_norm(weight)
    forward = norm.forward_cuda if x.is_cuda else norm.forward_native  # type: ignore[operator]
    if residual is None:
        return None, forward(x.clone())
    y, total = forward(x.clone(), residual.clone())
    return total, y


def stock_silu(x: Tensor) -> Tensor:
    from sglang.srt.layers.activation import SiluAndMul

    activation = SiluAndMul()
    out: Tensor = activation.forward_cuda(x) if x.is_cuda else activation.forward_native(x)
    return out


def stock_qkv(inputs: QkvInput) -> tuple[Tensor, Tensor, Tensor]:
    """(q [M, q heads * 128], k cache, v cache) after `Qwen3Attention.forward_prepare_native` and the cache write of
    the attention backend; without a norm as `LlamaAttention` and `Qwen2Attention` have it."""
    from sglang.srt.models.utils import apply_qk_norm

    qkv = inputs.qkv.clone(memory_format=torch.contiguous_format)
    if inputs.bias is not None:
        qkv += inputs.bias
    sizes = [heads * HEAD for heads in (inputs.q_heads, inputs.kv_heads, inputs.kv_heads)]
    q, k, v = qkv.split(sizes, dim=-1)
    pool = cache_pool(inputs)
    if len(qkv):
        if inputs.norm is not None:
            q_norm, k_norm = (rms_norm(weight) for weight in inputs.norm)
            q, k = apply_qk_norm(q=q, k=k, q_norm=q_norm, k_norm=k_norm, head_dim=HEAD)
        q, k = rotated(inputs, q, k)
        k, v = (part.view(-1, inputs.kv_heads, HEAD) for part in (k, v))
        pool.set_kv_buffer(attention_layer(inputs), inputs.slots, k, v)
    k_cache, v_cache = pool.get_kv_buffer(0)
    return q.contiguous(), k_cache, v_cache


def rotated(inputs: QkvInput, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """By `RotaryEmbedding` with the inputs' table: its kernel on a GPU, else what its `forward_native` calls."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    if q.is_cuda:
        from sglang.srt.layers.rotary_embedding import RotaryEmbedding

        rope = RotaryEmbedding(HEAD, HEAD, len(inputs.cos_sin), 10000, is_neox_style=True, dtype=BF16).to(q.device)
        rope.cos_sin_cache = inputs.cos_sin
        q, k = rope(inputs.positions, q, k)
        return q, k
    cosine, sine = inputs.cos_sin.index_select(0, inputs.positions).chunk(2, dim=-1)
    q, k = (
        apply_rotary_emb(x.view(len(x), -1, HEAD), cosine, sine, is_neox_style=True).reshape(x.shape) for x in (q, k)
    )
    return q, k


def cache_pool(inputs: QkvInput) -> Any:
    """SGLang's paged cache of one layer, with the contents of the inputs' caches; the first page is slot 0."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=len(inputs.k_cache) - 1,
        page_size=1,
        dtype=inputs.k_cache.dtype,
        head_num=inputs.kv_heads,
        head_dim=HEAD,
        layer_num=1,
        device=str(inputs.k_cache.device.type),
        enable_memory_saver=False,
    )
    for mine, theirs in zip(pool.get_kv_buffer(0), (inputs.k_cache, inputs.v_cache), strict=True):
        mine.copy_(theirs)
    return pool


def attention_layer(inputs: QkvInput) -> nn.Module:
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(inputs.q_heads, HEAD, 1 / math.sqrt(HEAD), inputs.kv_heads, layer_id=0)
