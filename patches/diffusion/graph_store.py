"""The captured passes of a process: found by signature, the least recently used dropped, their memory bounded."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from sglang_fastpath.patches.diffusion.call_signature import FlatCall, StaticTensors, flatten
from sglang_fastpath.patches.diffusion.graph_recorder import Recorder, Recording
from torch import Tensor

# Giving memory back means to capture the surviving graphs anew, so only for more than this part of the pool.
_WORTH_RETIRING = 0.25


class TooLarge(Exception):
    """A captured pass needs more memory than SGLANG_FASTPATH_GRAPH_BYTES allows."""


class CapturedPass:
    """One recorded call: its input buffers, its recorded work, its outputs."""

    def __init__(self, recorder: Recorder, call: FlatCall, work: Callable[[Any], Any], keep: Iterable[Any]) -> None:
        """Records `work(arguments)`; `keep` is held as long as the recording, for the addresses it has baked in.

        Raises:
            Ineligible: if what `work` returns is not made of tensors and plain values.
        """
        self._inputs = StaticTensors(call.tensors)
        self._inputs.copy_from(call.tensors)
        arguments = call.rebuild(self._inputs.tensors)

        def recorded() -> FlatCall:
            return flatten(work(arguments), "output")

        self._recording: Recording
        self._recording, self._result = recorder.record(recorded)
        self._kept = tuple(keep)

    def replay(self, tensors: Iterable[Tensor]) -> Any:
        """The call's result for other inputs of the same layout, in memory of its own."""
        self._inputs.copy_from(tensors)
        self._recording.replay()
        # Copies: the next replay of any graph writes to the same memory.
        return self._result.rebuild(tensor.clone() for tensor in self._result.tensors)


class GraphStore:
    """Captured passes by key, at most `entries` of them and at most `pool_bytes` in the pool that they share.

    A pool only grows: what a dropped graph needed is reused by the others, but goes back to the device only with the
    whole pool. So when a graph is dropped that made the pool grow notably, all are dropped and captured anew by their
    next calls.
    """

    def __init__(self, recorder: Recorder, *, entries: int, pool_bytes: int) -> None:
        self._recorder = recorder
        self._most = entries
        self._ceiling = pool_bytes
        self._captured: OrderedDict[Hashable, tuple[CapturedPass, int]] = OrderedDict()
        self._alive: weakref.WeakSet[CapturedPass] = weakref.WeakSet()
        self.captures = 0

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def pool_bytes(self) -> int:
        """What the pool holds now."""
        held: int = self._recorder.pool_bytes()
        return held

    def get(self, key: Hashable) -> CapturedPass | None:
        """The captured pass, which counts as used now."""
        found = self._captured.get(key)
        if found is None:
            return None
        self._captured.move_to_end(key)
        return found[0]

    def capture(
        self, key: Hashable, call: FlatCall, work: Callable[[Any], Any], keep: Iterable[Any] = ()
    ) -> CapturedPass:
        """Captures `work(arguments)` under `key`; see `CapturedPass` for what it raises.

        Raises:
            TooLarge: if the pool outgrew its ceiling for this pass alone. Then all graphs are gone.
        """
        while len(self._captured) >= self._most:
            self._evict()
        before = self._recorder.pool_bytes()
        captured = CapturedPass(self._recorder, call, work, keep)
        self._alive.add(captured)
        self.captures += 1
        held = self._recorder.pool_bytes()
        if held > self._ceiling:
            del captured
            others = bool(self._captured)
            self.clear()
            if others:  # they may have made it so: alone it may fit
                return self.capture(key, call, work, keep)
            raise TooLarge(
                f"its graph takes the pool to {held:,} bytes, over SGLANG_FASTPATH_GRAPH_BYTES={self._ceiling}"
            )
        self._captured[key] = captured, held - before
        return captured

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Drops the passes whose key is `unwanted`."""
        dropped = [key for key in self._captured if unwanted(key)]
        for key in dropped:
            del self._captured[key]
        if dropped and not self._captured:
            self.clear()

    def clear(self) -> None:
        """Drops all passes and gives the pool's memory back."""
        self._captured.clear()
        if self._alive:  # a cycle that holds a graph would hold the pool; to look for one takes long
            gc.collect()
        self._recorder.empty_pool()

    def _evict(self) -> None:
        _, (_, grown) = self._captured.popitem(last=False)
        if not self._captured or grown > _WORTH_RETIRING * self._recorder.pool_bytes():
            self.clear()
