"""SGLang's own FLUX.2 denoiser, of any size, filled at random, and what its pipeline feeds it.

For the benchmark and the tests. Works with the releases and devices that `denoisers` names.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sglang_fastpath.denoisers import PIXELS_PER_TOKEN, VAE_SCALE_FACTOR, build_denoiser

NOT_QUANTIZED = ("proj_out",)
"""Left unquantized by default; embedders, modulation and the output norm SGLang never quantizes in a FLUX.2."""

SIZES: dict[str, dict[str, Any]] = {
    "dev": {"layers": 8, "single_layers": 48, "heads": 48, "joint_attention_dim": 15360},
    "klein-4b": {
        "layers": 5,
        "single_layers": 20,
        "heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    },
    "klein-9b": {
        "layers": 8,
        "single_layers": 24,
        "heads": 32,
        "joint_attention_dim": 12288,
        "guidance_embeds": False,
    },
}
"""The published checkpoints, as `build_flux2` takes them. Their text is always padded to 512 tokens."""

# The same in the config.json of every published FLUX.2; SGLang's class has FLUX.1's values, or none.
_ARCHITECTURE: dict[str, Any] = {
    "in_channels": 128,
    "out_channels": None,
    "mlp_ratio": 3.0,
    "timestep_guidance_channels": 256,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "eps": 1e-6,
}


def build_flux2(
    *,
    layers: int = 2,
    single_layers: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    fp8: bool = False,
    not_quantized: tuple[str, ...] = NOT_QUANTIZED,
    device: str = "cpu",
    **arch: Any,
) -> nn.Module:
    """A `Flux2Transformer2DModel` with `heads` heads of 128, its weights drawn from `seed`, ready to run.

    With `fp8` the linears of its blocks are block FP8 [128, 128] as in a serialized checkpoint. `arch` is what a
    checkpoint's config.json would say: `guidance_embeds=False` makes it a klein.
    """
    from sglang.multimodal_gen.configs.models.dits.flux import FluxArchConfig, FluxConfig
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2Transformer2DModel

    architecture = FluxArchConfig(num_layers=layers, num_single_layers=single_layers, num_attention_heads=heads)
    for name, value in (_ARCHITECTURE | {"joint_attention_dim": 128} | arch).items():
        setattr(architecture, name, value)  # as the loader does: not every name is a declared field
    return build_denoiser(
        Flux2Transformer2DModel,
        FluxConfig(arch_config=architecture),
        dtype=dtype,
        seed=seed,
        not_quantized=not_quantized if fp8 else None,
        device=device,
    )


def make_pipeline_config(model: nn.Module, guidance_scale: float = 4.0) -> Any:
    """FLUX.2-dev's pipeline config, or klein's for a `model` without guidance embedding.

    An engine takes the guidance from here, not from the request.
    """
    from sglang.multimodal_gen.configs.models.dits.flux import FluxConfig
    from sglang.multimodal_gen.configs.pipeline_configs.flux import Flux2KleinPipelineConfig, Flux2PipelineConfig

    config: Any = model.config
    arch = getattr(config, "arch_config", config)
    of = Flux2PipelineConfig if arch.guidance_embeds else Flux2KleinPipelineConfig
    pipeline = of(dit_config=FluxConfig(arch_config=arch), embedded_cfg_scale=guidance_scale)
    pipeline.vae_config.arch_config.vae_scale_factor = VAE_SCALE_FACTOR  # an engine reads it from the checkpoint
    return pipeline


def make_request(
    model: nn.Module,
    pipeline: Any,
    *,
    seed: int = 0,
    image_hw: tuple[int, int] = (8, 8),
    text_tokens: int = 13,
    batch: int = 1,
    references: tuple[tuple[int, int], ...] = (),
) -> SimpleNamespace:
    """A request as it is when the denoising starts: noise, text and the images to edit by, (height, width) in tokens.

    `latents` are [batch, image tokens, 128], channel by channel in memory as `pipeline` packs them.
    """
    weight = model.get_parameter("x_embedder.weight")
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=weight.device, dtype=weight.dtype)

    request = SimpleNamespace(
        height=image_hw[0] * PIXELS_PER_TOKEN,
        width=image_hw[1] * PIXELS_PER_TOKEN,
        batch_size=batch,
        prompt_embeds=[noise(batch, text_tokens, pipeline.dit_config.arch_config.joint_attention_dim)],
        prompt_seq_lens=[[text_tokens] * batch],
        image_latent=None,
        extra={},
    )
    latents = noise(*pipeline.prepare_latent_shape(request, batch, 1))
    request.latent_ids = pipeline.maybe_prepare_latent_ids(latents).to(weight.device)
    request.latents = pipeline.maybe_pack_latents(latents, batch, request)
    request.raw_latent_shape = request.latents.shape
    if references:
        images = [noise(1, latents.shape[1], height, width) for height, width in references]
        packed = [pipeline.postprocess_image_latent(image, request) for image in images]
        request.image_latent = torch.cat(packed, dim=1)
        pipeline.prepare_condition_image_latent_ids(images, request)
    return request


def condition(model: nn.Module, pipeline: Any, request: SimpleNamespace) -> dict[str, Any]:
    """What every pass of a request is given: text and rotary tables (cos, sin) of text, image and references."""
    weight = model.get_parameter("x_embedder.weight")
    conditions = pipeline.prepare_pos_cond_kwargs(request, weight.device, model.rotary_emb, weight.dtype)
    return {**conditions, "encoder_hidden_states": pipeline.get_pos_prompt_embeds(request)}


def flux2_inputs(
    model: nn.Module, *, timestep: float | Tensor = 500.0, guidance_scale: float = 4.0, **request: Any
) -> dict[str, Any]:
    """Keyword arguments of one forward pass on `make_request(**request)`, as SGLang's denoising step gives them."""
    pipeline = make_pipeline_config(model)
    prepared = make_request(model, pipeline, **request)
    latents = prepared.latents
    batch = latents.shape[0]
    guidance = torch.full((batch,), guidance_scale, dtype=latents.dtype, device=latents.device)
    if prepared.image_latent is not None:
        latents = torch.cat([latents, prepared.image_latent], dim=1)
    if not isinstance(timestep, Tensor):
        timestep = torch.full((batch,), timestep, device=latents.device)
    return {
        "hidden_states": latents,
        "timestep": timestep,
        "guidance": guidance if pipeline.should_use_guidance else None,
        **condition(model, pipeline, prepared),
    }
