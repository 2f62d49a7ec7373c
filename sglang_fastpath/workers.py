"""What spawned diffusion workers run first on releases that load no plugin there (before 0.5.21).

SGLang hands a function to `multiprocessing.Process`; the child looks it up by name. A wrapper made with
`functools.wraps` would be looked up under the original's name and the plugin would be gone in the child, without
a word. `run_worker` is found under its own name.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any


def run_worker(target: str, /, *args: Any, **kwargs: Any) -> Any:
    """Loads the plugin in this process, then calls SGLang's own process target `module:name`."""
    from sglang_fastpath import plugin

    plugin.register(in_worker=True)
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def with_plugin(process_target: Callable[..., Any]) -> Callable[..., Any]:
    """The picklable process target that stands in for SGLang's own module-level `process_target`."""
    return partial(run_worker, f"{process_target.__module__}:{process_target.__qualname__}")
