"""Fails the requests of a server whose diffusion worker has died, with a message.

Stock's HTTP server waits 100 minutes for the answer of a worker that no longer exists (0.5.17), says nothing, calls
itself healthy and does not stop on SIGTERM. Whoever adds fast paths to a worker must not let it vanish silently.
"""

import asyncio
import functools
import logging
import multiprocessing
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from typing import Any

logger = logging.getLogger("sglang_fastpath")

CLIENT = "sglang.multimodal_gen.runtime.scheduler_client:AsyncSchedulerClient"
_POLL_SECONDS = 1.0


class WorkerWatch:
    """Wraps the HTTP server's scheduler client, which lives in the process that spawned the workers."""

    def __init__(self) -> None:
        self._workers: list[BaseProcess] = []

    def wrap_initialize(self, initialize: Callable[..., Any]) -> Callable[..., Any]:
        """Remembers the workers; SGLang initializes its client as soon as all of them are ready."""

        @functools.wraps(initialize)
        def initialize_and_remember(*args: Any, **kwargs: Any) -> Any:
            children = multiprocessing.active_children()
            self._workers = [child for child in children if child.name.startswith("sglang-diffusionWorker-")]
            return initialize(*args, **kwargs)

        return initialize_and_remember

    def wrap_forward(self, forward: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Gives up waiting for an answer once a worker is dead: HTTP 503 that names it."""

        @functools.wraps(forward)
        async def forward_or_fail(*args: Any, **kwargs: Any) -> Any:
            answer = asyncio.ensure_future(forward(*args, **kwargs))
            try:
                while not answer.done():
                    await asyncio.wait({answer}, timeout=_POLL_SECONDS)
                    if not answer.done() and (dead := self._dead_worker()):
                        from fastapi import HTTPException

                        logger.error("sglang-fastpath: %s", dead)
                        raise HTTPException(503, dead)
                return answer.result()
            finally:
                answer.cancel()

        return forward_or_fail

    def _dead_worker(self) -> str | None:
        for worker in self._workers:
            if worker.exitcode is not None:
                how = signal.Signals(-worker.exitcode).name if worker.exitcode < 0 else f"exit code {worker.exitcode}"
                return f"{worker.name} (pid {worker.pid}) has ended ({how}); restart the server"
        return None
