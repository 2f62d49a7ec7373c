"""SGLang's own denoising step, driven without a pipeline; the loops of each model family derive from it.

What runs is stock's `DenoisingStage._run_denoising_step` with its guidance, its scheduler and its pipeline config;
only text encoding, VAE and serving are left out. For the benchmark and the tests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

AroundPass = Callable[[Callable[[], Tensor]], Tensor]
"""Gets a pass to run and returns its result, having done what it likes before and after."""


class DenoisingLoop:
    """One step per timestep of `scheduler`, in each a pass per entry of `conditions`: with the prompt, then without.

    `conditions` are the arguments that stay the same over the steps. Latents are [batch, image tokens, channels] in
    the denoiser's dtype; `image_latent`, if given, is appended to them for every pass. Where the pipeline config says
    so, the denoiser is given the config's own guidance. `stage` is SGLang's own `DenoisingStage`, `batch` its
    request. `settings` are server arguments of SGLang that are not at their default.

    `around_pass` runs every pass. It wraps the stage's method, not the denoiser: a hook or a proxy there would be
    seen by whatever asks what kind of module it serves (CUDA graphs, torch.compile).
    """

    def __init__(
        self,
        denoiser: nn.Module,
        pipeline_config: Any,
        scheduler: Any,
        latents: Tensor,
        conditions: Sequence[dict[str, Any]],
        *,
        guidance_scale: float = 1.0,
        image_latent: Tensor | None = None,
        settings: Mapping[str, Any] | None = None,
        around_pass: AroundPass | None = None,
    ) -> None:
        from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

        self.latents = latents
        self.passes_a_step = len(conditions)
        self.text_tokens = tuple(sorted({given["encoder_hidden_states"].shape[1] for given in conditions}))
        self._server_args = SimpleNamespace(
            pipeline_config=pipeline_config,
            **{
                "enable_cfg_parallel": False,
                "enable_breakable_cuda_graph": False,
                "comfyui_mode": False,
                **(settings or {}),
            },
        )
        self.stage = object.__new__(DenoisingStage)
        self.stage.server_args = self._server_args
        # What `__init__` sets, as far as a step, torch.compile and breakable CUDA graphs read it.
        self.stage._extra_func_kwarg_names_cache = {}
        self.stage._cache_dit_enabled = False
        self.stage._mounted_quality = "exact"
        self.stage._bcg_runners = {}
        if around_pass:
            _wrap_passes(self.stage, around_pass)
        self.batch = SimpleNamespace(
            is_warmup=False,
            raw_latent_shape=latents.shape,
            image_latent=image_latent,
            extra={},
            do_classifier_free_guidance=len(conditions) > 1,
            is_cfg_negative=False,
            true_cfg_scale=guidance_scale,
            cfg_normalization=0,
            guidance_rescale=0.0,
        )
        self._denoiser = denoiser
        self._guidance_scale = guidance_scale
        self._context = SimpleNamespace(
            latents=latents,
            target_dtype=latents.dtype,
            scheduler=scheduler,
            timesteps=scheduler.timesteps,
            seq_len=None,
            reserved_frames_mask=None,
            guidance=_guidance(self._server_args, latents),
            extra={},
            extra_step_kwargs={},
            z=None,
            # Until 0.5.11 the stage took the prompts one by one; then the policy came.
            image_kwargs={},
            pos_cond_kwargs=conditions[0],
            neg_cond_kwargs=conditions[1] if len(conditions) > 1 else {},
            cfg_policy=_guidance_policy(conditions),
        )

    def __iter__(self) -> Iterator[Tensor]:
        """Runs the steps one after another and yields the latents after each."""
        for index in range(len(self._context.timesteps)):
            self.run_step(index)
            yield self._context.latents

    def run_step(self, index: int) -> None:
        """One step of the schedule. SGLang's own schedulers want them in order."""
        timestep = self._context.timesteps[index]
        step = SimpleNamespace(
            step_index=index,
            t_device=timestep,
            t_host=timestep,
            current_model=self._denoiser,
            current_guidance_scale=self._guidance_scale,
            attn_metadata=None,
        )
        with torch.inference_mode():
            self.stage._run_denoising_step(self._context, step, self.batch, self._server_args)


def _wrap_passes(stage: Any, around_pass: AroundPass) -> None:
    def predict_noise(*args: Any, **kwargs: Any) -> Tensor:
        return around_pass(lambda: type(stage)._predict_noise(stage, *args, **kwargs))

    stage._predict_noise = predict_noise


def _guidance(server_args: SimpleNamespace, latents: Tensor) -> Tensor | None:
    """By a stage of its own: SGLang's cache of these tensors keeps the stage alive, and would its CUDA graphs."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    stage: Any = object.__new__(DenoisingStage)
    stage.server_args = server_args
    guidance: Tensor | None = stage.get_or_build_guidance(latents.shape[0], latents.dtype, latents.device)
    return guidance


def _guidance_policy(conditions: Sequence[dict[str, Any]]) -> Any:
    try:
        from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGBranch, CFGPolicy
    except ImportError:
        return None
    names = (("conditional", True), ("unconditional", False))
    return CFGPolicy(branches=[CFGBranch(*name, given) for name, given in zip(names, conditions, strict=False)])
