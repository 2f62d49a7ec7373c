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
        self._pools: list[Any] = []  # the last one is in use; others belong to graphs from before a broken capture
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._stream: torch.cuda.Stream | None = None

    def record(self, work: Callable[[], T]) -> tuple[Recording, T]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if not self._pools:
            self._pools.append(torch.cuda.graph_pool_handle())
        pool = self._pools[-1]
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps a workspace for each stream. One from the graph's pool would outlive the pool.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (copies of the next request, NCCL's watchdog) may go on with what capture forbids.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # what `work` raised says more
                        self._end(graph, pool)
                    raise
                self._end(graph, pool)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result

    def pool_bytes(self) -> int:
        pools = {tuple(pool) for pool in self._pools}
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pools)

    def empty_pool(self) -> None:
        self._pools.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture. One that CUDA has invalidated raises, and leaves the allocator in the middle of it.

        PyTorch asks CUDA for the graph before it takes the allocator off the pool. So that is done here, and the next
        capture gets another pool; the graph object stays, since the allocator's filter belongs to it.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            device = torch.cuda.current_device()
            self._broken.append(graph)
            self._pools.append(torch.cuda.graph_pool_handle())
            with contextlib.suppress(RuntimeError):  # where PyTorch has taken it off itself
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            raise
