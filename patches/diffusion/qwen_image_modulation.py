"""`cfg_mod_cache`: the second guidance pass of a denoising step reuses Qwen-Image's modulation.

Stock (before 0.5.19) computes `img_mod[1](silu(temb))` and `txt_mod[1](silu(temb))`, each [B, 6*dim], in every
block of every pass. `temb` is a function of the timestep (and of `additional_t_cond`) alone, and the guidance
passes of one step are given the same timestep tensor, so the second pass computes the first one's bytes again.

Why a wrong reuse cannot happen:

- A recording lives inside one call of `DenoisingStage._run_denoising_step` and dies with it. Requests, prompts,
  resolutions, LoRA switches and weight updates come between such calls, never inside one. A denoiser that is
  called outside a step is left to stock.
- Within a step a recording belongs to one denoiser and one `Source`: the very timestep tensor, held by
  reference so that its identity cannot be given to another, at the same version (inference tensors carry none),
  dtype, device, `additional_t_cond`, autocast state and weights of the timestep embedding.
- Within a pass a recorded output belongs to one linear, its input's shape, dtype and strides, and its weights:
  the same parameter objects at the same versions and addresses. It must not have been written to since.
- The guard compares the first reuse in every layer with stock's bytes.

A modulation linear that is wrapped (LoRA), hooked or otherwise not SGLang's own `ReplicatedLinear` is stock's.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sglang_fastpath.guard import is_capturing
from sglang_fastpath.plan import FeatureRecord, Plan

# What identifies a tensor's contents while a reference to it is held: itself, its version, its address.
_Identity = tuple[torch.Tensor, int | None, int]


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the feature's sites, by target."""
    (record,) = records.values()
    cache = ModulationCache(record, plan)
    denoiser_forward, run_denoising_step, linear_forward = record.feature.sites
    return {
        denoiser_forward: cache.wrap_pass,
        run_denoising_step: cache.wrap_step,
        linear_forward: cache.wrap_linear,
    }


def _identity(tensor: torch.Tensor) -> _Identity:
    return tensor, None if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _same(a: list[_Identity], b: list[_Identity]) -> bool:
    # Spelled out: this runs 240 times a pass, and the host is what an eager pass waits for.
    if len(a) != len(b):
        return False
    for (tensor, version, address), (other, other_version, other_address) in zip(a, b, strict=True):
        if tensor is not other or version != other_version or address != other_address:
            return False
    return True


def _weights(linear: nn.Module) -> list[_Identity]:
    return [_identity(parameter) for parameter in linear._parameters.values() if parameter is not None]


@dataclass(frozen=True, eq=False)
class Source:
    """What a pass's modulation is computed from: the very tensors, in what state, and under which modes."""

    tensors: list[_Identity]
    modes: Hashable

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], modes: Hashable) -> "Source":
        """The tensors as they are now; they are held, so that no other can get the identity of one."""
        return cls([_identity(tensor) for tensor in tensors], modes)

    def matches(self, other: "Source | None") -> bool:
        """Whether the other one's modulation has these bytes too."""
        return other is not None and self.modes == other.modes and _same(self.tensors, other.tensors)


@dataclass(frozen=True, eq=False)
class _Output:
    """What one modulation linear returned (stock's pair of output and bias), and from what."""

    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]
    weights: list[_Identity]
    value: Any
    result: _Identity
    signature: tuple[Hashable, ...]

    def changed(self, layout: tuple[Any, ...], weights: list[_Identity]) -> str | None:
        """Why this output must not be used for such an input and such weights, or None."""
        if self.layout != layout:
            return "the input's layout changed within the step"
        if not _same(self.weights, weights):
            return "the weights changed within the step"
        if not _same([self.result], [_identity(self.value[0])]):
            return "the recorded modulation was overwritten"
        return None


@dataclass
class _Recording:
    """The modulation of one denoiser at one timestep; `layers` names the linears that may be recorded."""

    source: Source
    autocast: tuple[bool, torch.dtype]
    layers: dict[nn.Module, str]
    outputs: dict[nn.Module, _Output] = field(default_factory=dict)


class ModulationCache:
    """Wraps the step (which owns the recordings), the pass (which picks one) and the linears (which use it)."""

    def __init__(self, record: FeatureRecord, plan: Plan) -> None:
        self._record = record
        self._plan = plan
        # nn.Module hashes and compares by identity, so modules can be keys.
        self._step: ContextVar[dict[nn.Module, _Recording] | None] = ContextVar("step", default=None)
        self._pass: ContextVar[_Recording | None] = ContextVar("pass", default=None)

    def wrap_step(self, run_denoising_step: Callable[..., Any]) -> Callable[..., Any]:
        """Opens an empty set of recordings for each denoising step and drops it at the end, also on errors."""

        @functools.wraps(run_denoising_step)
        def denoising_step(stage: Any, context: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
            token = self._step.set({})
            try:
                return run_denoising_step(stage, context, step, *args, **kwargs)
            finally:
                self._step.reset(token)
                last = step.step_index == len(context.timesteps) - 1
                (self._plan.on_event if last else self._plan.on_progress)()

        return denoising_step

    def wrap_pass(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the recording of this denoiser and timestep available to its modulation linears."""
        in_breakable_graph = inspect.unwrap(forward).__globals__.get("is_in_breakable_cuda_graph", lambda: False)

        @functools.wraps(forward)
        def denoiser_forward(denoiser: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(denoiser, *args, **kwargs)
            recording: _Recording | None = None
            step = self._step.get()
            if step is None:
                self._record.fall_back("outside a denoising step")
            elif torch.is_grad_enabled():
                self._record.fall_back("gradients are enabled")
            elif in_breakable_graph() or is_capturing():
                self._record.fall_back("inside a CUDA graph capture")
            elif not isinstance(kwargs.get("timestep"), torch.Tensor):
                self._record.fall_back("the timestep is not a tensor passed by name")
            else:
                try:
                    recording = self._recording(step, denoiser, **kwargs)
                except Exception as error:  # a denoiser or a device that we did not foresee: stock can still serve
                    self._record.fall_back(f"no recording: {type(error).__name__}: {error}")
            token = self._pass.set(recording)
            try:
                return forward(denoiser, *args, **kwargs)
            finally:
                self._pass.reset(token)

        return denoiser_forward

    def wrap_linear(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a modulation linear's recorded output where there is one; every other linear is stock's."""

        @functools.wraps(forward)
        def linear_forward(linear: nn.Module, x: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():
                return forward(linear, x)
            recording = self._pass.get()
            layer = recording.layers.get(linear) if recording else None
            if recording is None or layer is None:
                return forward(linear, x)
            layout = (x.shape, x.stride(), x.dtype)
            weights = _weights(linear)
            recorded = recording.outputs.get(linear)
            why = recorded.changed(layout, weights) if recorded else None
            if recorded is None or why:
                if why:
                    self._record.fall_back(why)
                value = forward(linear, x)
                signature = (
                    layer,
                    tuple(x.shape),
                    *layout[1:],
                    recording.autocast,
                    *(w[0].dtype for w in weights),
                )
                recording.outputs[linear] = _Output(layout, weights, value, _identity(value[0]), signature)
                return value

            def reuse() -> Any:
                self._record.hit()
                return recorded.value

            return self._plan.guard.run(
                self._record.feature.id, recorded.signature, fast=reuse, stock=lambda: forward(linear, x)
            )

        return linear_forward

    def _recording(
        self,
        step: dict[nn.Module, _Recording],
        denoiser: nn.Module,
        *,
        timestep: torch.Tensor,
        hidden_states: torch.Tensor,
        additional_t_cond: torch.Tensor | None = None,
        **_: Any,
    ) -> _Recording:
        embedder: Any = denoiser.time_text_embed
        inputs = [timestep, *embedder.parameters()]
        if additional_t_cond is not None:
            inputs.append(additional_t_cond)
        device = hidden_states.device
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        source = Source.of(inputs, (hidden_states.dtype, device, autocast))
        recording = step.get(denoiser)
        if recording is None or not source.matches(recording.source):
            recording = step[denoiser] = _Recording(source, autocast, {})
        # Looked up anew each pass: LoRA comes and goes.
        recording.layers = modulation_linears(denoiser, self._record.fall_back)
        return recording


def modulation_linears(denoiser: Any, refused: Callable[[str], None] = lambda why: None) -> dict[nn.Module, str]:
    """A denoiser's modulation linears that are SGLang's own, with their names; `refused` hears why others are not.

    Empty for a denoiser whose blocks have no modulation of their own.
    """
    from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear

    linears: dict[nn.Module, str] = {}
    for index, block in enumerate(denoiser._modules.get("transformer_blocks", ())):
        for name in ("img_mod", "txt_mod"):
            if name not in block._modules:
                return {}
            linear = block._modules[name]._modules["1"]  # block.img_mod[1] without its look-ups
            if type(linear) is not ReplicatedLinear:
                refused(f"the modulation linear is a {type(linear).__name__}")
            elif linear._forward_hooks or linear._forward_pre_hooks:
                refused("the modulation linear has hooks")
            else:
                linears[linear] = f"transformer_blocks.{index}.{name}"
    return linears
