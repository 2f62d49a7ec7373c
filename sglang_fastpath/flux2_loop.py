"""SGLang's own denoising step on any FLUX.2 denoiser: guidance is an input of the model, so a step is one pass."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from sglang_fastpath.denoising_loop import AroundPass, DenoisingLoop
from sglang_fastpath.flux2_denoiser import condition, make_pipeline_config, make_request


class Flux2Loop(DenoisingLoop):
    """`steps` denoising steps of one request, on FLUX.2's own schedule.

    Arguments as `make_request` and `DenoisingLoop` take them.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        *,
        steps: int,
        seed: int = 0,
        image_hw: tuple[int, int] = (8, 8),
        text_tokens: int = 13,
        batch: int = 1,
        references: tuple[tuple[int, int], ...] = (),
        guidance_scale: float = 4.0,
        settings: Mapping[str, Any] | None = None,
        around_pass: AroundPass | None = None,
    ) -> None:
        import sglang.multimodal_gen.runtime.pipelines_core  # noqa: F401  before the scheduler: 0.5.21 has a circle
        from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
            FlowMatchEulerDiscreteScheduler,
        )
        from sglang.multimodal_gen.runtime.pipelines.flux_2 import compute_empirical_mu

        pipeline = make_pipeline_config(denoiser, guidance_scale)
        request = make_request(
            denoiser,
            pipeline,
            seed=seed,
            image_hw=image_hw,
            text_tokens=text_tokens,
            batch=batch,
            references=references,
        )
        request.num_inference_steps = steps
        shift = dict([compute_empirical_mu(request, SimpleNamespace(pipeline_config=pipeline))])
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        sigmas = pipeline.prepare_sigmas(None, steps)
        scheduler.set_timesteps(sigmas=sigmas, device=request.latents.device, **shift)
        scheduler.set_begin_index(0)
        super().__init__(
            denoiser,
            pipeline,
            scheduler,
            request.latents,
            [condition(denoiser, pipeline, request)],
            guidance_scale=guidance_scale,
            image_latent=request.image_latent,
            settings=settings,
            around_pass=around_pass,
        )
