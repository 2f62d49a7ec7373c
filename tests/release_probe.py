"""What the plugin does on the SGLang release that comes first on the path: the subprocess of the release matrix.

    PYTHONPATH=.releases/VERSION python tests/release_probe.py REPORT [NAME=VALUE ...]

Runs tiny denoisers on stock (Qwen-Image and FLUX.2, in bf16, and in block FP8 whose linears are emulated), loads the
plugin as SGLang does, with the environment variables given, runs the denoisers again, spawns a diffusion worker,
takes the plugin out again, and writes a `Report` as JSON. The process starts without the variables: what is found was
loaded through SGLang's own entry points, not by the `.pth` file.
"""

import hashlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import wrapt

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import nn

# Enough for a block to be checked alone, with the norm for the next block, and on the norm of the block before, and
# to serve each of these unchecked, at both lengths of text. A step of FLUX.2 is one pass.
STEPS = 4
FLUX2_STEPS = 6
LAYERS = 2  # of either kind
FLUX2_FP8 = "FLUX.2 block FP8"
_RUNTIME = "sglang.multimodal_gen.runtime"
_GPU_WORKER = f"{_RUNTIME}.managers.gpu_worker"
_PLUGINS = f"{_RUNTIME}.platforms.plugins"
_SEAMS = (
    f"{_RUNTIME}.launch_server",
    f"{_RUNTIME}.managers.scheduler",
    f"{_RUNTIME}.server_args",
    "sglang.srt.server_args",
)

# Feature id -> [state, reason]; None in a process without a plan.
States = dict[str, list[str]] | None
# Denoiser -> digests of the latents, one a step.
Digests = dict[str, list[str]]


class WorkerReport(TypedDict):
    """What a spawned worker finds at the point where SGLang would load the model."""

    startup_file_ran: bool
    states: States
    replaced: list[str]


class Report(TypedDict):
    """What the test asserts on.

    `changed` names what differs from stock with the plugin in, `left_behind` with the plugin taken out again.
    `hits` and `fallbacks` are counted by denoiser and feature, the latter by reason as well; `failed` says what the
    guard found not to be stock's bytes. `modulation_calls` is how often one guidance run reuses a modulation,
    `block_calls` how often a run of a denoiser calls a block of a kind, by the denoiser and the name of their list.
    `pending` is there if the plugin is.
    """

    release: list[str]
    startup_file_ran: bool
    states: States
    changed: list[str]
    left_behind: list[str]
    stock: Digests
    plugged: Digests
    unplugged: Digests
    hits: dict[str, dict[str, int]]
    fallbacks: dict[str, dict[str, dict[str, int]]]
    failed: list[dict[str, Any]]
    modulation_calls: int
    block_calls: dict[str, dict[str, int]]
    pending: "Pending | None"
    worker: WorkerReport


class Pending(TypedDict):
    """FLUX.2 in block FP8 with its first block of either kind left to stock, which leaves its last sum to the next.

    `handed_over` is how often a block was given such a sum, (residual, x, gate).
    """

    latents: list[str]
    handed_over: int
    hits: dict[str, int]


class Snapshot:
    """Every function, method and class in SGLang's imported modules, held to be compared by identity."""

    _KINDS = (FunctionType, type, staticmethod, classmethod, property)

    def __init__(self) -> None:
        self._held: list[tuple[str, Any, str, Any]] = []
        for module in list(sys.modules.values()):
            # SGLang has lazy stand-ins for modules in there, which are to be left alone.
            if type(module) is ModuleType and module.__name__.split(".")[0] == "sglang":
                self._hold(module, f"{module.__name__}:", module.__name__)

    def _hold(self, owner: Any, prefix: str, module: str) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, self._KINDS):
                self._held.append((f"{prefix}{name}", owner, name, value))
            nested = isinstance(value, type) and value.__module__ == module
            if nested and f"{module}:{value.__qualname__}" == f"{prefix}{name}":
                self._hold(value, f"{prefix}{name}.", module)

    def changed(self) -> list[str]:
        """The names that hold another object by now."""
        return sorted(name for name, owner, key, value in self._held if vars(owner).get(key) is not value)


def run(denoiser: "nn.Module") -> list[str]:
    """Guidance on two prompts of different length, or a prompt and a reference: a digest of the latents' bytes after
    each step."""
    import torch

    from sglang_fastpath.flux2_loop import Flux2Loop
    from sglang_fastpath.guidance_loop import GuidanceLoop

    if is_flux2(denoiser):
        loop: Any = Flux2Loop(denoiser, steps=FLUX2_STEPS, image_hw=(3, 5), text_tokens=6, references=((2, 3),))
    else:
        loop = GuidanceLoop(denoiser, steps=STEPS, text_tokens=13, negative_tokens=7)
    # FLUX.2's latents lie channel by channel until the first step.
    return [hashlib.sha256(latents.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for latents in loop]


def is_flux2(denoiser: "nn.Module") -> bool:
    return type(denoiser).__name__ == "Flux2Transformer2DModel"


def block_calls(denoiser: "nn.Module") -> dict[str, int]:
    if is_flux2(denoiser):
        return dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), FLUX2_STEPS * LAYERS)
    return {"transformer_blocks": STEPS * 2 * LAYERS}


@contextmanager
def sums_left_pending() -> Iterator[None]:
    """FLUX.2's blocks leave their last sum to the next block, as SGLang has them do on a GPU (from 0.5.19)."""
    flux_2 = importlib.import_module(f"{_RUNTIME}.models.dits.flux_2")
    name = "can_defer_flux2_gated_residual"
    stock = vars(flux_2).get(name)
    if stock:
        setattr(flux_2, name, lambda residual, update, gate: True)
    try:
        yield
    finally:
        if stock:
            setattr(flux_2, name, stock)


def run_pending(denoiser: Any) -> Pending:
    from sglang_fastpath import plan

    current = plan.current()
    assert current
    before = {id: record.hits for id, record in current.records.items()}
    handed_over = 0

    def count(block: Any, args: Any, given: dict[str, Any]) -> None:
        nonlocal handed_over
        handed_over += sum(
            isinstance(value, tuple) for name, value in given.items() if name.endswith("hidden_states")
        )

    hooks = []
    for first, second in (denoiser.transformer_blocks, denoiser.single_transformer_blocks):
        hooks.append(first.attn.register_forward_hook(lambda *_: None))
        hooks.append(second.register_forward_pre_hook(count, with_kwargs=True))
    with sums_left_pending():
        latents = run(denoiser)
    for hook in hooks:
        hook.remove()
    hits = {id: record.hits - before[id] for id, record in current.records.items()}
    return Pending(latents=latents, handed_over=handed_over, hits=hits)


def load_plugins() -> None:
    """As SGLang does in a process that it starts with; twice, as it does from 0.5.21."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    if importlib.util.find_spec(_PLUGINS):
        diffusion = importlib.import_module(_PLUGINS)
        diffusion.load_plugins()
        diffusion.apply_plugin_hooks()


def import_targets() -> list[str]:
    """Imports every stock function that the catalogue relies on, where this release has it on a machine without a
    GPU; returns which."""
    from sglang_fastpath import contracts, features

    release = contracts.installed_release()
    assert release
    recorded = contracts.recorded().get(release.version, {})
    diffusion = {
        target for feature in features.CATALOGUE if feature.path == "diffusion" for target in feature.contract
    }
    sites = {site for feature in features.CATALOGUE for site in feature.sites}
    found = [t for t in features.contract_targets() if t in diffusion or (t in sites and recorded.get(t))]
    for target in found:
        importlib.import_module(target.partition(":")[0])
    return found


def startup_file_ran() -> bool:
    return "sglang_fastpath.startup" in sys.modules


def states() -> States:
    from sglang_fastpath import plan

    current = plan.current()
    return {id: [record.state, record.reason] for id, record in current.records.items()} if current else None


def spawn_worker(settings: dict[str, str]) -> WorkerReport:
    """Spawns what SGLang's launcher would spawn, and reports from where its worker would begin to work."""
    launcher = importlib.import_module(f"{_RUNTIME}.launch_server")
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    arguments: dict[str, Any] = {"pipe_writer": writer}
    target = getattr(launcher, "run_scheduler_process", None)
    if target is None:
        from sglang.multimodal_gen.runtime.managers.worker_bootstrap import SchedulerProcessSpec, ServerArgsPayload

        payload = ServerArgsPayload.capture(object.__new__(launcher.ServerArgs))
        target = launcher.bootstrap_scheduler_process
        arguments = {"spec": SchedulerProcessSpec(0, 0, payload, writer)}
    worker = context.Process(
        target=be_worker, args=(settings, pickle.dumps(target), arguments), name="sglang-diffusionWorker-0"
    )
    for name in settings:  # the worker sets them once it runs, too late for the .pth file
        del os.environ[name]
    worker.start()
    os.environ.update(settings)
    writer.close()
    report: WorkerReport = reader.recv()
    worker.join()
    return report


def be_worker(settings: dict[str, str], pickled_target: bytes, arguments: dict[str, Any]) -> None:
    """Does what the child of a spawn does, but for the last function, which would load a model."""

    def stand_in(module: Any) -> None:
        module.run_scheduler_process = report_from_worker

    wrapt.register_post_import_hook(stand_in, _GPU_WORKER)
    os.environ.update(settings)
    pickle.loads(pickled_target)(**arguments)


def report_from_worker(*_: Any, pipe_writer: "Connection", **__: Any) -> None:
    from sglang_fastpath import contracts

    targets = import_targets()
    replaced = [target for target in targets if contracts.is_stock(target)]
    pipe_writer.send(WorkerReport(startup_file_ran=startup_file_ran(), states=states(), replaced=replaced))


def build_denoisers() -> dict[str, "nn.Module"]:
    """In bf16, and in block FP8 as far as the release quantizes; the latter stays emulated without the plugin."""
    from sglang_fastpath.patches.diffusion import fp8_cpu_emulation

    from sglang_fastpath.denoisers import build_qwen_image
    from sglang_fastpath.flux2_denoiser import build_flux2

    revert = fp8_cpu_emulation.apply()
    denoisers = {
        "bf16": build_qwen_image(layers=LAYERS),
        "block FP8": build_qwen_image(layers=LAYERS, fp8=True),
        "FLUX.2 bf16": build_flux2(layers=LAYERS, single_layers=LAYERS),
        FLUX2_FP8: build_flux2(layers=LAYERS, single_layers=LAYERS, fp8=True),
    }
    revert()
    return denoisers


def main(path: str, *assignments: str) -> None:
    from sglang_fastpath import contracts, plan, plugin

    for module in _SEAMS:
        importlib.import_module(module)
    import_targets()
    denoisers = build_denoisers()
    stock = {name: run(denoiser) for name, denoiser in denoisers.items()}

    before = Snapshot()
    settings = dict(assignment.split("=", 1) for assignment in assignments)
    os.environ.update(settings)
    load_plugins()
    states_found, changed, worker = states(), before.changed(), spawn_worker(settings)
    current = plan.current()
    records = current.records if current else {}
    plugged: Digests = {}
    hits: dict[str, dict[str, int]] = {}
    fallbacks: dict[str, dict[str, dict[str, int]]] = {}
    for name, denoiser in denoisers.items():
        for record in records.values():
            record.hits = 0
            record.fallbacks.clear()
        plugged[name] = run(denoiser)
        hits[name] = {id: record.hits for id, record in records.items()}
        fallbacks[name] = {id: dict(record.fallbacks) for id, record in records.items()}

    pending = run_pending(denoisers[FLUX2_FP8]) if current else None
    plugin.deactivate()
    release = contracts.installed_release()
    report = Report(
        release=[release.version, str(release.root)] if release else [],
        startup_file_ran=startup_file_ran(),
        states=states_found,
        changed=changed,
        left_behind=before.changed(),
        stock=stock,
        plugged=plugged,
        unplugged={name: run(denoiser) for name, denoiser in denoisers.items()},
        hits=hits,
        fallbacks=fallbacks,
        failed=[v for v in current.guard.verdicts if v["verdict"] != "admitted"] if current else [],
        modulation_calls=STEPS * 2 * LAYERS,
        block_calls={name: block_calls(denoiser) for name, denoiser in denoisers.items()},
        pending=pending,
        worker=worker,
    )
    Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
