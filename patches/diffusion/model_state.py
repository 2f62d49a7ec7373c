"""What of a model a captured graph depends on, and whether it is still so.

A graph reads weights at fixed addresses and goes around all Python: hooks, replaced modules, LoRA switches and
weights that were moved, replaced or written to would go unnoticed. `ModelState.changed` looks at all of them before
each step, in about a millisecond for the 2,700 modules and 1,900 tensors of a 60-block denoiser.
"""

import itertools
import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sglang_fastpath.hooks import beneath_ours

# Attention implementations whose launches depend on shapes alone.
_ATTENTION = frozenset(("FA", "TORCH_SDPA"))


class ModelState:
    """A model's modules, tensors and hooks at the time it was looked at; holds references, so identities last."""

    def __init__(self, model: nn.Module) -> None:
        # The model itself is not held: whoever keeps this by the model would keep it alive.
        modules = list(model.modules())
        registries = [
            registry
            for module in modules
            for registry in (vars(module), module._modules, module._parameters, module._buffers)
        ]
        self._registries = registries
        self._sizes = list(map(len, registries))
        # Most are empty; what they hold is only looked at where there is something.
        self._children = [module._modules for module in modules if module._modules]
        self._child_modules = _values(self._children)
        tables = (table for module in modules for table in (module._parameters, module._buffers))
        self._tables = [table for table in tables if table]
        self._entries = _values(self._tables)
        self._tensors = [tensor for tensor in self._entries if tensor is not None]
        self.devices = {tensor.device for tensor in self._tensors}
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._wrappers = [module for module in modules if hasattr(module, "lora_A")]
        self._wrapper_states = _simple_attributes(self._wrappers)
        self._attentions = [module for module in modules if hasattr(module, "attn_impl")]
        self._implementations = _implementations(self._attentions)
        self._parts = modules[1:]
        self._types = list(map(type, self._parts))
        self._classes = list(dict.fromkeys(map(type, modules)))
        self._forwards = _forwards(self._classes)
        self.refusal = self._refusal(model, modules)

    def changed(self) -> str | None:
        """What is no longer as it was, or None."""
        # Loops in C: the host does this before every step's first replay.
        if list(map(len, self._registries)) != self._sizes:
            return "a module got or lost a child, a weight or an attribute"
        if not _same(_values(self._children), self._child_modules):
            return "a module was replaced"
        if not _same(_values(self._tables), self._entries):
            return "a weight was replaced"
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return "a weight was moved"
        if list(map(_version, self._counted)) != self._versions:
            return "a weight was written to"
        if not _same(list(map(type, self._parts)), self._types):
            return "a module got another class"
        if not _same(_forwards(self._classes), self._forwards):
            return "a class of its modules got another forward"
        if not _same(_implementations(self._attentions), self._implementations):
            return "an attention got another implementation"
        if self._wrappers and _simple_attributes(self._wrappers) != self._wrapper_states:
            return "LoRA was switched"
        return None

    def has_hooks(self) -> bool:
        """Whether anybody listens to one of the modules' calls: a replay makes none."""
        return any(self._hooks)

    def _refusal(self, model: nn.Module, modules: list[nn.Module]) -> str | None:
        """Why this model cannot be captured at all, or None."""
        if len(self.devices) > 1:
            return f"its weights are on {', '.join(sorted(map(str, self.devices)))}: offloaded"
        for module in modules:
            if getattr(module, "_compiled_call_impl", None) is not None:
                return "torch.compile compiled it, or a part of it"
            if module is not model and "forward" in vars(module):
                return f"a {type(module).__name__} has a forward of its own"
        for module in self._attentions:
            if (backend := _backend(module)) not in _ATTENTION:
                return f"attention backend {backend} may depend on more than shapes"
        if "forward" in vars(model):
            return "the denoiser has a forward of its own (cache-dit, a wrapper)"
        return None


_version = operator.attrgetter("_version")


def _values(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, tables)))


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _forwards(classes: Iterable[type]) -> list[Any]:
    """Beneath this plugin's own wrappers, which are others each time that a plan is applied."""
    return [beneath_ours(getattr(module_class, "forward", None)) for module_class in classes]


def _implementations(attentions: Iterable[Any]) -> list[Any]:
    return [part for module in attentions for part in (module.attn_impl, getattr(module, "backend", None))]


def _simple_attributes(modules: Iterable[nn.Module]) -> list[tuple[Any, ...]]:
    """Attributes by value where that is safe to compare, by identity else."""
    return [
        tuple(
            (name, value if isinstance(value, (bool, int, float, str, type(None))) else _identity(value))
            for name, value in vars(module).items()
        )
        for module in modules
    ]


def _identity(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor) and not value.is_inference():
        return id(value), value._version, value.data_ptr()
    return (id(value),)


def _backend(module: nn.Module) -> str:
    backend: Any = getattr(module, "backend", None)
    return str(getattr(backend, "name", backend))
