"""Stands in for CUDA graph capture where there is no GPU: records a call's tensor operations and runs them again.

What it shares with a CUDA graph, and what the tests are about:

- Nothing but tensor operations is recorded. A replay runs no Python of the model's: no hook, no branch, no counter.
- Operands are what lay at their addresses while recording: a weight that is moved or replaced later is not seen, and
  one that has been freed is a `DanglingAddress`.
- Recording computes nothing: results hold NaN before the first replay, other memory is untouched.
- Recordings share one pool: recording or replaying one destroys what the others computed.
- While recording, torch says that a CUDA graph is being captured, and reading a tensor's value on the host raises.

What it cannot show is whether a GPU can capture the work, and how much memory it takes.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_READS_ON_THE_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::item"}


class DanglingAddress(AssertionError):
    """A replay reads memory that its owner has freed since."""


@dataclass(frozen=True)
class _Outside:
    """A tensor that the recorded work did not make: its address, which keeps nothing alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Outside":
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise DanglingAddress(f"a recorded operation reads a freed {self.dtype} tensor {tuple(self.shape)}")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True)
class _Step:
    """One operation. `results`: what it makes that is no view of an operand, by position. `reads`: its operands that
    are not of the recording's own making."""

    operation: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[tuple[int, Tensor]]
    reads: list[_Outside]

    def run(self) -> None:
        args, kwargs = self.args, self.kwargs
        if self.reads:
            args, kwargs = (_mapped(operands, _Outside, _Outside.tensor) for operands in (args, kwargs))
        again = _leaves(self.operation(*args, **kwargs), Tensor)
        for index, result in self.results:
            result.copy_(again[index])

    def spoil(self) -> None:
        for _, result in self.results:
            if result.is_floating_point() and result.dtype.itemsize > 1:
                result.fill_(torch.nan)
            else:
                result.zero_()


class RerunRecording:
    def __init__(self, recorder: "RerunRecorder") -> None:
        self.steps: list[_Step] = []
        self.replays = 0
        self._recorder = recorder
        self._holds_results = True

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        self._recorder.replays += 1
        self._recorder.spoil()
        self._holds_results = True
        for step in self.steps:
            step.run()

    @torch.inference_mode()
    def spoil(self) -> None:
        if self._holds_results:
            for step in self.steps:
                step.spoil()
        self._holds_results = False

    def reads(self, tensor: Tensor) -> int:
        """How many operations have this tensor, or a view of it, as an operand."""
        address = StorageWeakRef(tensor.untyped_storage()).cdata
        return sum(operand.storage.cdata == address for step in self.steps for operand in step.reads)


class RerunRecorder:
    """`bytes_each`: what each recording makes the pool hold at least. The other numbers count calls."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.bytes_each = bytes_each
        self.held = 0
        self.records = 0
        self.replays = 0
        self.emptied = 0
        self._recordings: list[weakref.ref[RerunRecording]] = []

    @property
    def alive(self) -> list[RerunRecording]:
        """The recordings that have not been dropped, oldest first."""
        found = [recording for ref in self._recordings if (recording := ref()) is not None]
        self._recordings = [weakref.ref(recording) for recording in found]
        return found

    def record(self, work: Callable[[], T]) -> tuple[RerunRecording, T]:
        self.records += 1
        recording = RerunRecording(self)
        self._recordings.append(weakref.ref(recording))
        listener = _Listener(recording.steps)
        try:
            with _as_if_capturing(), listener:
                result = work()
        finally:
            listener.undo()
            self.spoil()
        self.held = max(self.held, self.bytes_each)
        return recording, result

    def spoil(self) -> None:
        """Whatever recordings computed: others have used the memory since."""
        for recording in self.alive:
            recording.spoil()

    def pool_bytes(self) -> int:
        return self.held

    def empty_pool(self) -> None:
        self.held = 0
        self.emptied += 1


class _Listener(TorchDispatchMode):
    """Runs every operation and notes it in `steps`."""

    def __init__(self, steps: list[_Step]) -> None:
        super().__init__()
        self._steps = steps
        self._own: set[int] = set()  # storages that the work made; the recording holds them
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _READS_ON_THE_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing ({func})")
        operands = _leaves((args, kwargs), Tensor)
        storages = {_storage(tensor) for tensor in operands}
        if func._schema.is_mutable:
            for tensor in operands:
                if _storage(tensor) not in self._own | self._before.keys():
                    self._before[_storage(tensor)] = tensor.detach(), tensor.clone()
        noted = _mapped(args, Tensor, self._note), _mapped(kwargs, Tensor, self._note)
        result = func(*args, **kwargs)
        made = [(index, t) for index, t in enumerate(_leaves(result, Tensor)) if _storage(t) not in storages]
        self._own.update(_storage(tensor) for _, tensor in made)
        if func is torch.ops.aten.lift_fresh.default:  # `torch.tensor(1.0)`: a constant of the recording
            self._own |= storages
        if made or func._schema.is_mutable:
            self._steps.append(_Step(func, *noted, made, _leaves(noted, _Outside)))
        return result

    def _note(self, tensor: Tensor) -> Tensor | _Outside:
        # An alias, because `weight.data = ...` must not change what was recorded.
        return tensor.detach() if _storage(tensor) in self._own else _Outside.of(tensor)

    @torch.inference_mode()
    def undo(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)


@contextmanager
def _as_if_capturing() -> Iterator[None]:
    names = ("is_initialized", "is_current_stream_capturing")
    originals = {name: getattr(torch.cuda, name) for name in names}
    try:
        for name in names:
            setattr(torch.cuda, name, lambda: True)
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)


def _leaves(value: Any, kind: type[T]) -> list[T]:
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [leaf for item in value for leaf in _leaves(item, kind)]


def _mapped(value: Any, kind: type[T], change: Callable[[T], Any]) -> Any:
    """The operands of an operation with `change` applied to those of a kind."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(item, kind, change) for name, item in value.items()}
    return type(value)(_mapped(item, kind, change) for item in value) if type(value) in (list, tuple) else value


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
