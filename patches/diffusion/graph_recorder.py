"""CUDA graph capture behind a small interface: work is recorded once and replayed any number of times."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recording(Protocol):
    """Recorded work; dropping it gives back what only it holds."""

    def replay(self) -> None:
        """Runs the work again on the current stream, on the same addresses."""


class Recorder(Protocol):
    """Records work. What the work allocates belongs to a pool that all recordings share, one at a time."""

    def record(self, work: Callable[[], T]) -> tuple[Recording, T]:
        """Runs `work` once without executing its launches; returns the recording and the result, not computed yet.

        An exception of `work`, or a call in it that cannot be recorded, is raised and leaves no trace.
        """

    def pool_bytes(self) -> int:
        """Device memory that the pool holds."""

    def empty_pool(self) -> None:
        """Gives the pool's memory back. All recordings must have been dropped."""


class CudaGraphRecorder:
    """One private pool and one capture stream for all graphs of a process.

    Graphs that share a pool reuse each other's intermediates: they may be replayed in any order but never at the same
    time, and what one leaves in the pool is lost when the next one runs.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def record(self, work: Callable[[], T]) -> tuple[Recording, T]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps a workspace for each stream. One from the graph's pool would outlive the pool.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (copies of the next request, NCCL's watchdog) may go on with what capture forbids.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    _abandon(graph)
                    raise
                graph.capture_end()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result

    def pool_bytes(self) -> int:
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    def empty_pool(self) -> None:
        self._pool = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture whose work raised; ending one that CUDA has already invalidated raises as well."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
