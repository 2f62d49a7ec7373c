"""SGLang's own denoisers, of any size, filled at random: no checkpoint, pipeline or server. For benchmark and tests.

Works with whichever SGLang release from 0.5.11 to 0.5.23 comes first on the import path, on a GPU and on a CPU.
"""

import atexit
import inspect
import shutil
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOT_QUANTIZED = ("img_in", "txt_in", "proj_out", "img_mod", "txt_mod")
"""Module names left unquantized by default, as in a Qwen-Image checkpoint: embedders, output, modulation."""

VAE_SCALE_FACTOR = 8
PIXELS_PER_TOKEN = 2 * VAE_SCALE_FACTOR  # a token is a patch of 2x2 latents


def start_runtime(*, tp_size: int = 1, attention_backend: str = "torch_sdpa") -> None:
    """Give SGLang's denoisers what a worker process has: global arguments and process groups.

    With `tp_size` above 1 the environment must say RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    A second call does nothing.
    """
    from sglang.multimodal_gen.runtime import server_args
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # the norms are torch.compile'd: 20 s of C++ otherwise
        _register_missing_cpu_ops()
    server_args.set_global_server_args(_ServerArgs(attention_backend))
    rendezvous = "env://"
    if tp_size == 1:
        folder = tempfile.mkdtemp(prefix="denoiser-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        rendezvous = f"file://{folder}/store"
    initialize = parallel_state.maybe_init_distributed_environment_and_model_parallel
    required = {"enable_cfg_parallel": False}  # up to 0.5.11
    known = inspect.signature(initialize).parameters
    initialize(
        tp_size=tp_size,
        sp_size=1,
        distributed_init_method=rendezvous,
        **{name: value for name, value in required.items() if name in known},
    )


def build_qwen_image(
    *,
    layers: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    fp8: bool = False,
    not_quantized: tuple[str, ...] = NOT_QUANTIZED,
    device: str = "cpu",
    **arch: Any,
) -> nn.Module:
    """A `QwenImageTransformer2DModel` with `heads` heads of 128, its weights drawn from `seed`, ready to run.

    With `fp8` its linears are block FP8 [128, 128] as in a serialized checkpoint, except those whose dotted name
    contains one of `not_quantized`. `arch` is what a checkpoint's config.json would say, e.g. `zero_cond_t=True`.
    """
    from sglang.multimodal_gen.configs.models.dits.qwenimage import QwenImageArchConfig, QwenImageDitConfig
    from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel

    architecture = QwenImageArchConfig(num_layers=layers, num_attention_heads=heads)
    for name, value in ({"joint_attention_dim": 128, "out_channels": 16, "patch_size": 2} | arch).items():
        setattr(architecture, name, value)  # as the loader does: not every name is a declared field
    return build_denoiser(
        QwenImageTransformer2DModel,
        QwenImageDitConfig(arch_config=architecture),
        dtype=dtype,
        seed=seed,
        not_quantized=not_quantized if fp8 else None,
        device=device,
    )


def build_denoiser(
    model_class: type[nn.Module],
    config: Any,
    *,
    dtype: torch.dtype,
    seed: int,
    not_quantized: tuple[str, ...] | None,
    device: str,
) -> nn.Module:
    """A denoiser of SGLang's, its weights drawn from `seed`, ready to run; `not_quantized` None: nothing in FP8."""
    from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Config

    start_runtime()
    quant_config = None
    if not_quantized is not None:
        quant_config = Fp8Config(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
            ignored_layers=list(not_quantized),
        )
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = model_class(config, {}, quant_config=quant_config)
    finally:
        torch.set_default_dtype(previous_dtype)
    _fill(model, seed)
    for module in model.modules():
        process = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if process is not None:
            process(module)
    model.post_load_weights()
    denoiser: nn.Module = model.eval()
    return denoiser


def denoiser_inputs(
    model: nn.Module,
    *,
    seed: int = 0,
    image_hw: tuple[int, int] = (8, 8),
    text_tokens: int = 13,
    batch: int = 1,
    timestep: float | Tensor = 500.0,
) -> dict[str, Any]:
    """Keyword arguments of one forward pass, as the release's own pipeline prepares them.

    `image_hw` counts image tokens (patches), `text_tokens` are the same for each of `batch` requests. A `timestep`
    tensor [batch] is passed on as it is, the same object.
    """
    from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig

    weight = model.get_parameter("proj_out.weight")
    config: Any = model.config
    arch = getattr(config, "arch_config", config)
    height, width = image_hw
    generator = torch.Generator().manual_seed(seed)

    def noise(tokens: int, channels: int) -> Tensor:
        values = torch.randn(batch, tokens, channels, generator=generator)
        return values.to(device=weight.device, dtype=weight.dtype)

    text = noise(text_tokens, arch.joint_attention_dim)
    request = SimpleNamespace(
        height=height * PIXELS_PER_TOKEN,
        width=width * PIXELS_PER_TOKEN,
        prompt_embeds=[text],
        prompt_seq_lens=[[text_tokens] * batch],
        prompt_embeds_mask=None,
    )
    pipeline = QwenImagePipelineConfig()
    pipeline.vae_config.arch_config.vae_scale_factor = VAE_SCALE_FACTOR  # an engine reads it from the checkpoint
    if not isinstance(timestep, Tensor):
        timestep = torch.full((batch,), timestep, device=weight.device)
    return {
        "hidden_states": noise(height * width, arch.in_channels),
        "encoder_hidden_states": text,
        "timestep": timestep,
        **pipeline.prepare_pos_cond_kwargs(request, weight.device, model.rotary_emb, weight.dtype),
    }


class _ServerArgs:
    """The few global arguments that a denoiser reads; everything else is unset."""

    kv_gather_degree = 1

    def __init__(self, attention_backend: str) -> None:
        self.attention_backend = attention_backend

    def __getattr__(self, name: str) -> None:
        return None


def _fill(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations near 1; block-FP8 weights over their whole range, with scales to match."""
    device = model.get_parameter("proj_out.weight").device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator, device=device)
        if name.endswith("weight_scale_inv"):
            values = (1.0 + 0.2 * values).abs() / (64 * (128 * parameter.shape[1]) ** 0.5)
        elif parameter.dtype == torch.float8_e4m3fn:
            values = (64 * values).clamp(-448, 448)
        elif parameter.dim() == 2:
            values = values / parameter.shape[1] ** 0.5
        else:
            values = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        parameter.data.copy_(values)


def _register_missing_cpu_ops() -> None:
    """From 0.5.21 the CPU path calls these sgl_kernel operators, which only the CPU build of sgl_kernel has.

    The norms here round after every operation, as the releases before do on a CPU.
    """
    for operator in (
        fused_scale_shift_cpu,
        fused_norm_scale_shift_cpu,
        fused_scale_residual_norm_scale_shift_cpu,
    ):
        if not hasattr(torch.ops.sgl_kernel, operator.__name__):
            torch.library.custom_op(f"sgl_kernel::{operator.__name__}", operator, mutates_args=())


def fused_scale_shift_cpu(x: Tensor, scale: Tensor, shift: Tensor, scale_constant: float) -> Tensor:
    return (x.float() * (scale_constant + scale.float()) + shift.float()).to(x.dtype)


def fused_norm_scale_shift_cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    norm_type: str,
    eps: float,
) -> Tensor:
    width = x.shape[-1:]
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    if norm_type == "layer":
        normed = F.layer_norm(x.float(), width, weight, bias, eps)
    else:
        normed = F.rms_norm(x.float(), width, weight, eps)
    return normed.to(x.dtype) * (1.0 + scale) + shift


def fused_scale_residual_norm_scale_shift_cpu(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    norm_type: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    summed = residual + (x if gate is None else x * gate)
    return fused_norm_scale_shift_cpu(summed, weight, bias, scale, shift, norm_type, eps), summed
