"""Calling SGLang's denoiser in a test, and looking at what its FP8 linears were given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sglang_fastpath.denoisers import denoiser_inputs


def call(model: nn.Module, inputs: dict[str, Any], *args: Any, metadata: Any = None, batch: Any = None) -> Any:
    """One forward pass in SGLang's forward context, in whatever autograd mode the caller is."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    with set_forward_context(current_timestep=0, attn_metadata=metadata, forward_batch=batch):
        return model(*args, **inputs)


def infer(model: nn.Module, inputs: dict[str, Any], **context: Any) -> Any:
    """One inference pass; `context` as `call` takes it."""
    with torch.inference_mode():
        return call(model, inputs, **context)


def run_pass(model: nn.Module, **inputs: Any) -> Tensor:
    """One inference pass on `denoiser_inputs(model, **inputs)`: [batch, image tokens, channels]."""
    output: Tensor = infer(model, denoiser_inputs(model, **inputs))
    return output


@contextmanager
def recorded_fp8_linears(model: nn.Module) -> Iterator[list[tuple[str, nn.Module, Tensor, Tensor]]]:
    """Collects (name, layer, input, output) of each call of a block-FP8 linear while the context is open."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], tuple[Tensor, Any]], None]:
        return lambda layer, inputs, outputs: calls.append((name, layer, inputs[0].clone(), outputs[0].clone()))

    hooks = [
        layer.register_forward_hook(recorder(name))
        for name, layer in model.named_modules()
        if hasattr(layer, "weight_scale_inv")
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
