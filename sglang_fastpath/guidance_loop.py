"""SGLang's own denoising step, driven without a pipeline: classifier-free guidance on any Qwen-Image denoiser.

What runs is stock's `DenoisingStage._run_denoising_step` with its guidance, its scheduler and its pipeline config;
only text encoding, VAE and serving are left out. For the benchmark and the tests.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sglang_fastpath.denoisers import denoiser_inputs


class GuidanceLoop:
    """`steps` denoising steps of a conditional and an unconditional pass each.

    The two prompts differ in content and, with a `negative_tokens` of its own, in length. Latents are
    [batch, image tokens, channels] in the denoiser's dtype. `stage` is SGLang's own `DenoisingStage`.
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
    ) -> None:
        import sglang.multimodal_gen.runtime.pipelines_core  # noqa: F401  before the scheduler: 0.5.21 has a circle
        from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig
        from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
            FlowMatchEulerDiscreteScheduler,
        )
        from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

        shape: dict[str, Any] = {"image_hw": image_hw, "batch": batch}
        positive = denoiser_inputs(denoiser, seed=seed, text_tokens=text_tokens, **shape)
        negative = denoiser_inputs(denoiser, seed=seed + 1, text_tokens=negative_tokens or text_tokens, **shape)
        self.latents: Tensor = positive.pop("hidden_states")
        for inputs in (positive, negative):
            inputs.pop("timestep")
        negative.pop("hidden_states")

        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(steps, device=self.latents.device)
        self._server_args = SimpleNamespace(
            pipeline_config=QwenImagePipelineConfig(),
            enable_cfg_parallel=False,
            enable_breakable_cuda_graph=False,
            comfyui_mode=False,
        )
        self.stage = object.__new__(DenoisingStage)
        self.stage.server_args = self._server_args
        self.stage._extra_func_kwarg_names_cache = {}
        self._batch = SimpleNamespace(
            raw_latent_shape=self.latents.shape,
            image_latent=None,
            do_classifier_free_guidance=True,
            is_cfg_negative=False,
            true_cfg_scale=guidance_scale,
            cfg_normalization=0,
            guidance_rescale=0.0,
        )
        self._denoiser = denoiser
        self._guidance_scale = guidance_scale
        self._context = SimpleNamespace(
            latents=self.latents,
            target_dtype=self.latents.dtype,
            scheduler=scheduler,
            timesteps=scheduler.timesteps,
            seq_len=None,
            reserved_frames_mask=None,
            guidance=None,
            extra={},
            extra_step_kwargs={},
            z=None,
            # Until 0.5.11 the stage took the prompts one by one; then the policy came.
            image_kwargs={},
            pos_cond_kwargs=positive,
            neg_cond_kwargs=negative,
            cfg_policy=_guidance_policy(positive, negative),
        )

    def __iter__(self) -> Iterator[Tensor]:
        """Runs the steps one after another and yields the latents after each."""
        for index, timestep in enumerate(self._context.timesteps):
            step = SimpleNamespace(
                step_index=index,
                t_device=timestep,
                t_host=timestep,
                current_model=self._denoiser,
                current_guidance_scale=self._guidance_scale,
                attn_metadata=None,
            )
            with torch.inference_mode():
                self.stage._run_denoising_step(self._context, step, self._batch, self._server_args)
            yield self._context.latents


def _guidance_policy(positive: dict[str, Any], negative: dict[str, Any]) -> Any:
    try:
        from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGBranch, CFGPolicy
    except ImportError:
        return None
    branches = [CFGBranch("conditional", True, positive), CFGBranch("unconditional", False, negative)]
    return CFGPolicy(branches=branches)
