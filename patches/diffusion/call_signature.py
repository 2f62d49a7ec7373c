"""The arguments of a call, taken apart: the tensors, and a hashable rest that says what the call will do with them.

A captured graph reads its inputs from fixed buffers and has every Python value baked in. So of each tensor the
signature holds what decides which kernels run (shape, strides, dtype, device, alignment), of everything else the
value itself.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

# Values that cannot change once they are part of a signature. An object hashed by its identity could.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Ineligible(Exception):
    """These arguments cannot be fixed in a signature; the message says which and why."""


@dataclass(frozen=True)
class FlatCall:
    """`tensors`: each tensor once, in the order of its first appearance. `structure`: the rest, tensors numbered."""

    tensors: tuple[Tensor, ...]
    structure: Hashable

    @property
    def signature(self) -> Hashable:
        return self.structure, tuple((t.shape, t.stride(), t.dtype, t.device, _alignment(t)) for t in self.tensors)

    def rebuild(self, tensors: Iterable[Tensor]) -> Any:
        """The same arguments with other tensors in the place of these."""
        return _rebuild(self.structure, tuple(tensors))


def flatten(value: Any, name: str = "argument") -> FlatCall:
    """Takes apart tensors and plain values in exact tuples, lists and dicts, nested at will.

    A tensor that appears twice is one input: the captured code may depend on its being the same.

    Raises:
        Ineligible: for anything else, an object or a subclass of a container.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    structure = _flatten(value, name, tensors)
    return FlatCall(tuple(tensor for _, tensor in tensors.values()), structure)


def _flatten(value: Any, name: str, tensors: dict[int, tuple[int, Tensor]]) -> Hashable:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or type(value) not in (Tensor, torch.nn.Parameter):
            raise Ineligible(f"{name} is a {value.layout} {type(value).__name__}")
        index, _ = tensors.setdefault(id(value), (len(tensors), value))
        return "tensor", index
    kind = type(value)
    if kind in (tuple, list):
        return kind, tuple(_flatten(item, f"{name}[{index}]", tensors) for index, item in enumerate(value))
    if kind is dict:
        items = ((key, item, f"{name}[{key!r}]") for key, item in value.items())
        return kind, tuple((_plain(key, f"key of {at}"), _flatten(item, at, tensors)) for key, item, at in items)
    return _plain(value, name)


def _plain(value: Any, name: str) -> Hashable:
    kind = type(value)
    if kind not in _PLAIN and not isinstance(value, Enum):
        raise Ineligible(f"{name} is a {kind.__name__}")
    return "value", value, kind, repr(value)  # 1, 1.0 and True are equal, so are 0.0 and -0.0


def _rebuild(structure: Any, tensors: tuple[Tensor, ...]) -> Any:
    kind, *content = structure
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "value":
        return content[0]
    if kind is dict:
        return {_rebuild(key, tensors): _rebuild(item, tensors) for key, item in content[0]}
    return kind(_rebuild(item, tensors) for item in content[0])


class StaticTensors:
    """Buffers with the layout of some tensors, at addresses that stay: what a graph reads its inputs from."""

    def __init__(self, like: Iterable[Tensor]) -> None:
        # Ordinary tensors also under inference mode, so that they may be written in any mode.
        with torch.inference_mode(False):
            self._dense = [
                torch.empty_strided(dense.shape, dense.stride(), dtype=dense.dtype, device=dense.device)
                for dense in map(_dense, like)
            ]
            self.tensors = tuple(
                buffer.expand(tensor.shape) for buffer, tensor in zip(self._dense, like, strict=True)
            )

    def copy_from(self, tensors: Iterable[Tensor]) -> None:
        """Fills the buffers, on the current stream, from tensors of the layout that they were made for."""
        for buffer, tensor in zip(self._dense, tensors, strict=True):
            buffer.copy_(_dense(tensor), non_blocking=True)


def _alignment(tensor: Tensor) -> int:
    """By it libraries choose matrix kernels. A vector is no operand of those, and may be a view: of a schedule."""
    return tensor.data_ptr() % 16 if tensor.dim() > 1 else 0


def _dense(tensor: Tensor) -> Tensor:
    """The tensor without what an expanded dimension repeats: only that can be written."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
