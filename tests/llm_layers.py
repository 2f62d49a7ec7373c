"""Decoder layers of SGLang's own language models on a CPU: block FP8 by the torch reference, torch's attention."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from llm_chains import norm_weight, publish_arguments
from sglang_fastpath.kernels.qk_norm_rope_kv import HEAD
from sglang_fastpath.patches.diffusion.fp8_cpu_emulation import w8a8_block_fp8_linear
from torch import Tensor, nn

from sglang_fastpath import contracts, envs, hooks
from sglang_fastpath.features import BY_ID, LLAMA, QWEN2, QWEN3
from sglang_fastpath.plan import FeatureRecord, Plan, State

Q_HEADS, KV_HEADS = 16, 8
SLOTS = 64


def start_runtime(folder: Path) -> None:
    """Published arguments and process groups of one rank; a second call does nothing."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.runtime_context import get_server_args

    publish_arguments(folder)
    if parallel_state.model_parallel_is_initialized():
        return
    base._is_cpu = True  # without a GPU it would look for vLLM's kernel
    rendezvous = f"file://{folder}/store"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=rendezvous
    )
    initialize_model_parallel(1)
    initialize_dp_attention(get_server_args(), ModelConfig.from_server_args(get_server_args()))


LAYERS_OF = {
    QWEN3: "sglang.srt.models.qwen3:Qwen3DecoderLayer",
    QWEN2: "sglang.srt.models.qwen2:Qwen2DecoderLayer",
    LLAMA: "sglang.srt.models.llama:LlamaDecoderLayer",
}


def build_layers(count: int, folder: Path, *, seed: int = 0, model: str = QWEN3) -> list[nn.Module]:
    """`count` decoder layers of a family of models, of one size, with random weights."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder))
    quantized = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module, _, name = LAYERS_OF[model].partition(":")
        kind = getattr(importlib.import_module(module), name)
        layers = [kind(config, layer_id=i, quant_config=quantized, prefix=f"layers.{i}") for i in range(count)]
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.copy_(norm_weight(len(parameter), seed=seed))
            elif name.endswith("weight_scale_inv"):
                parameter.data.copy_(0.01 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        for module in layer.modules():
            if hasattr(module, "quant_method") and hasattr(module, "weight_scale_inv"):
                module.quant_method.w8a8_block_fp8_linear = w8a8_block_fp8_linear
    return layers


class Run(NamedTuple):
    """What a pass through the layers leaves behind."""

    hidden: Tensor
    residual: Tensor
    caches: tuple[Tensor, ...]


def run(layers: list[nn.Module], tokens: int, *, decode: int = 0, seed: int = 0) -> list[Run]:
    """A prefill of one request, then `decode` steps, each through all layers, in no_grad as a server runs them."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    pool = MHATokenToKVPool(
        size=SLOTS,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=KV_HEADS,
        head_dim=HEAD,
        layer_num=len(layers),
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(seed)
    slots = 1 + torch.randperm(SLOTS, generator=generator)[: tokens + decode]
    to_token = torch.zeros(2, SLOTS, dtype=torch.int64)
    to_token[1, : tokens + decode] = slots
    runner: Any = SimpleNamespace(
        device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=to_token), token_to_kv_pool=pool
    )
    backend = TorchNativeAttnBackend(runner)
    runs = []
    with torch.no_grad(), forward_context(ForwardContext(backend)):
        for begin, end in [(0, tokens), *((tokens + i, tokens + i + 1) for i in range(decode))]:
            batch: Any = SimpleNamespace(
                forward_mode=ForwardMode.DECODE if begin else ForwardMode.EXTEND,
                out_cache_loc=slots[begin:end],
                req_pool_indices=torch.tensor([1]),
                seq_lens=torch.tensor([end]),
                extend_prefix_lens=torch.tensor([begin]),
                extend_seq_lens=torch.tensor([end - begin]),
                encoder_lens=None,
                input_ids=torch.zeros(end - begin, dtype=torch.int64),
            )
            hidden = torch.randn(end - begin, 1024, generator=generator).to(torch.bfloat16)
            residual = None
            for layer in layers:
                hidden, residual = layer(torch.arange(begin, end), hidden, batch, residual)
            caches = tuple(cache.clone() for i in range(len(layers)) for cache in pool.get_kv_buffer(i))
            runs.append(Run(hidden, residual, caches))
    return runs


@contextmanager
def fastpath(features: Iterable[str], *, guard: str = "once") -> Iterator[Plan]:
    """The patches of these features in place, without the plugin around them."""
    records = {id: FeatureRecord(BY_ID[id], State.ACTIVE) for id in features}
    plan = Plan(envs.Settings(enabled=True, guard=guard), contracts.installed_release(), records)
    patch = hooks.Patch()
    by_module: dict[str, dict[str, FeatureRecord]] = {}
    for id, record in records.items():
        for port in record.ports:
            by_module.setdefault(port.patch, {})[id] = record
    for module, own in by_module.items():
        for target, wrap in importlib.import_module(module).wraps(own, plan).items():
            patch.replace(target, wrap, stock_only=False)
    try:
        yield plan
    finally:
        patch.revert()
