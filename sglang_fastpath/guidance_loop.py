"""SGLang's own denoising step on any Qwen-Image denoiser: classifier-free guidance, two passes a step."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from sglang_fastpath.denoisers import denoiser_inputs
from sglang_fastpath.denoising_loop import AroundPass, DenoisingLoop


class GuidanceLoop(DenoisingLoop):
    """`steps` denoising steps of a conditional and an unconditional pass each.

    The two prompts differ in content and, with a `negative_tokens` of its own, in length. The rest as `DenoisingLoop`
    takes it.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        *,
        steps: int,
        seed: int = 0,
        image_hw: tuple[int, int] = (8, 8),
        text_tokens: int = 13,
        negative_tokens: int | None = None,
        batch: int = 1,
        guidance_scale: float = 4.0,
        settings: Mapping[str, Any] | None = None,
        around_pass: AroundPass | None = None,
    ) -> None:
        import sglang.multimodal_gen.runtime.pipelines_core  # noqa: F401  before the scheduler: 0.5.21 has a circle
        from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig
        from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
            FlowMatchEulerDiscreteScheduler,
        )

        shape: dict[str, Any] = {"image_hw": image_hw, "batch": batch}
        positive = denoiser_inputs(denoiser, seed=seed, text_tokens=text_tokens, **shape)
        negative = denoiser_inputs(denoiser, seed=seed + 1, text_tokens=negative_tokens or text_tokens, **shape)
        latents = positive.pop("hidden_states")
        for inputs in (positive, negative):
            inputs.pop("timestep")
        negative.pop("hidden_states")
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(steps, device=latents.device)
        super().__init__(
            denoiser,
            QwenImagePipelineConfig(),
            scheduler,
            latents,
            [positive, negative],
            guidance_scale=guidance_scale,
            settings=settings,
            around_pass=around_pass,
        )
