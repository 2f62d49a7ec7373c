"""`step_graph` in a test: a plan in force with a recorder of the test's own, and passes compared with stock's."""

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from denoiser_calls import infer
from rerun_recorder import RerunRecorder
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation, step_graph
from sglang_fastpath.patches.diffusion.graph_recorder import CudaGraphRecorder
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath import contracts, envs, plan, plugin
from sglang_fastpath.denoisers import start_runtime
from sglang_fastpath.denoising_loop import DenoisingLoop
from sglang_fastpath.environment import detect
from sglang_fastpath.features import BY_ID, CATALOGUE
from sglang_fastpath.plan import FeatureRecord, Plan, State

ALONE = ("step_graph",)
REUSING = ("cfg_mod_cache", "step_graph")
ALL = tuple(feature.id for feature in CATALOGUE if feature.path == "diffusion")
FIRST = "a signature's first call runs eagerly"
CHECKING = "other features were still being checked"

passes: Counter[str] = Counter()
"""How often a denoiser's own forward ran within `counted_passes`: `eager`, or `recorded`."""


@dataclass
class Running:
    """A plan in force whose `step_graph` captures with `recorder`."""

    plan: Plan
    recorder: Any

    @property
    def record(self) -> FeatureRecord:
        return self.plan.records["step_graph"]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [verdict for verdict in self.plan.guard.verdicts if verdict["verdict"] != "admitted"]


@functools.cache
def decided(on: tuple[str, ...], emulated: bool) -> Plan:
    """Which features are active: to find out, SGLang's sources are read, which takes longer than a pass."""
    switches = {feature.id: feature.id in on for feature in CATALOGUE}
    chosen = envs.Settings(enabled=True, emulate=emulated, switches=switches)
    machine = replace(detect(), gpu="NVIDIA H200", sm=90) if emulated else None
    return plan.make_plan(chosen, contracts.installed_release(), machine)


def prepare(on: tuple[str, ...] = ALONE, *, recorder: Any = None, **chosen: Any) -> Running:
    """A plan that is not in force yet; `chosen` are fields of `Settings`.

    Without a `CudaGraphRecorder` it takes this machine for one with a GPU whose arithmetic is emulated.
    """
    recorder = recorder or RerunRecorder()
    emulated = not isinstance(recorder, CudaGraphRecorder)
    first = decided(on, emulated)
    records = {id: replace(record, fallbacks=Counter(), out=dict(record.out)) for id, record in first.records.items()}
    if emulated:
        assert all(records[id].state is State.ACTIVE for id in on)
    new = Plan(replace(first.settings, **chosen), first.release, records)
    new.kept(step_graph.__name__, lambda: step_graph.StepGraphs(records["step_graph"], new, recorder))
    return Running(new, recorder)


@contextmanager
def applied(running: Running) -> Iterator[Running]:
    plugin.apply(running.plan)
    try:
        yield running
    finally:
        plugin.deactivate()


@contextmanager
def fastpath(on: tuple[str, ...] = ALONE, **chosen: Any) -> Iterator[Running]:
    with applied(prepare(on, **chosen)) as running:
        yield running


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """SGLang's runtime, for operations that are too small to share, with the FP8 linear emulated."""
    start_runtime()
    import_sites()
    revert = fp8_cpu_emulation.apply()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    revert()


def import_sites() -> None:
    """A patch that waits for one of its sites to be imported would hold each test's graphs."""
    for site in BY_ID["step_graph"].sites:
        importlib.import_module(site.partition(":")[0])


@contextmanager
def counted_passes() -> Iterator[None]:
    """Counts every denoiser's forward, by what each has once: the embedding of the timestep."""
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2TimestepGuidanceEmbeddings
    from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenTimestepProjEmbeddings

    passes.clear()
    with pytest.MonkeyPatch.context() as patched:
        for embeddings in (Flux2TimestepGuidanceEmbeddings, QwenTimestepProjEmbeddings):
            patched.setattr(embeddings, "forward", _counting(embeddings.forward))
        yield


def _counting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        passes["recorded" if is_recording() else "eager"] += 1
        return forward(*args, **kwargs)

    return counting


def is_recording() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def stock_output(model: nn.Module, inputs: dict[str, Any], **context: Any) -> Any:
    """What stock gives now. A plan in force is put aside meanwhile, and applied again; not counted in `passes`."""
    current, before = plan.current(), passes.copy()
    plugin.deactivate()
    try:
        return infer(model, inputs, **context)
    finally:
        passes.clear()
        passes.update(before)
        if current is not None:
            plugin.apply(current)


def step_by_step(loop: DenoisingLoop) -> tuple[list[Tensor], list[dict[str, int]]]:
    """The latents after each step, and how often the denoiser's forward ran in it."""
    latents, ran = [], []
    steps = iter(loop)
    while True:
        passes.clear()
        step = next(steps, None)
        if step is None:
            return latents, ran
        latents.append(step.clone())
        ran.append(dict(passes))


def assert_replays(running: Running, model: nn.Module, inputs: dict[str, Any], **context: Any) -> None:
    """The next pass is a replay, runs nothing of stock's, and has stock's bytes."""
    stock = stock_output(model, inputs, **context)
    hits, before = running.record.hits, passes.copy()
    assert_same_bytes(infer(model, inputs, **context), stock)
    assert running.record.hits == hits + 1, dict(running.record.fallbacks)
    assert passes == before


def warm_up(running: Running, model: nn.Module, inputs: dict[str, Any], **context: Any) -> None:
    """Passes until one is a replay and nothing else, each compared with stock."""
    stock = stock_output(model, inputs, **context)
    for _ in range(12):
        before = running.record.hits, passes.copy()
        assert_same_bytes(infer(model, inputs, **context), stock)
        if (running.record.hits - 1, passes) == before:
            return
    raise AssertionError(f"never replayed: {dict(running.record.fallbacks)}")


def modulation_weights(model: Any) -> list[Tensor]:
    return [mod[1].weight for block in model.transformer_blocks for mod in (block.img_mod, block.txt_mod)]


def computing_modulation(running: Running, model: Any) -> list[bool]:
    """Of each graph alive whether it computes the modulation; it must compute all of it or nothing."""
    counts = [
        {recording.reads(weight) for weight in modulation_weights(model)} for recording in running.recorder.alive
    ]
    assert all(count in ({0}, {1}) for count in counts)
    return [count == {1} for count in counts]


def replays_by_kind(running: Running, model: Any) -> dict[bool, int]:
    """How often graphs were replayed that compute the modulation (True) or take it from the pass before (False)."""
    replays = {True: 0, False: 0}
    for recording, computes in zip(running.recorder.alive, computing_modulation(running, model), strict=True):
        replays[computes] += recording.replays
        recording.replays = 0
    return replays
