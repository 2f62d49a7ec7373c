"""`sglang-fastpath bench denoiser`: ways to serve a full-size denoiser, taking turns in one process.

The denoiser is SGLang's own, block FP8 with random weights, driven by SGLang's own denoising step (Qwen-Image: with
guidance, two passes a step; FLUX.2: one). Absolute times vary from machine to machine; what a run supports is the
ratio of its columns.
"""

import gc
import json
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sglang_fastpath import contracts
from sglang_fastpath.benchmark_variants import Variant, make_graph_variants, make_variants
from sglang_fastpath.denoisers import build_qwen_image, start_runtime
from sglang_fastpath.denoising_loop import AroundPass, DenoisingLoop
from sglang_fastpath.features import FLUX2, QWEN_IMAGE
from sglang_fastpath.flux2_denoiser import SIZES, build_flux2
from sglang_fastpath.guard import compare

# Kernels that belong to the floor, FP8 GEMM and attention, by the names that DeepGEMM and the backends give them.
_FLOOR_NAMES = ("fp8_gemm", "flash", "fmha")
_MARKER = "spin_kernel"  # what torch.cuda._sleep launches
# The calls by which a host starts work on a GPU; CUDA appends a version to some.
_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cudaGraphLaunch",
    "cuLaunchKernel",
    "cuLaunchCooperativeKernel",
    "cuGraphLaunch",
)
# Before each profiled pass. A GPU that is kept busy reaches its power limit after about 0.1 s and lowers its clock;
# one that waits for the host does not. Kernel times of the two compare only if both start from the full clock.
_REST_S = 0.5
_STEP_REST_S = 0.2
_HOST_STEPS = 2
_WARM_STEPS = 2
_PLUGINS_BEST = ("fast", "fast+graph")  # must give stock's bytes; their memory is watched
_LONGEST_REASON = 400


class Model(NamedTuple):
    """A denoiser at full size: the name that features know it by, its builder and what that is given, its text."""

    family: str
    build: Callable[..., nn.Module]
    arch: dict[str, Any]
    text_tokens: int

    def sized(self, layers: int | None, heads: int | None) -> dict[str, int]:
        """`Workload.arch` of one with so many blocks of each kind and so many heads, where they are given."""
        kinds = [name for name in self.arch if name.endswith("layers")]
        blocks = {} if layers is None else dict.fromkeys(kinds, layers)
        return blocks if heads is None else {**blocks, "heads": heads}


MODELS = {
    "qwen-image": Model(
        QWEN_IMAGE, build_qwen_image, {"layers": 60, "heads": 24, "joint_attention_dim": 3584}, text_tokens=256
    ),
    "flux2": Model(FLUX2, build_flux2, SIZES["dev"], text_tokens=512),
}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """One denoiser at one resolution: `image_hw` in tokens (64, 64 is 1024x1024).

    `arch`: of what size it is, as its builder takes it; the model's own where it does not say.
    """

    model: str = "qwen-image"
    arch: dict[str, Any] = field(default_factory=dict)
    image_hw: tuple[int, int] = (64, 64)
    text_tokens: int = 256
    attention: str = "fa"
    device: str = "cuda"

    @property
    def size(self) -> dict[str, Any]:
        return {"image_hw": self.image_hw, "text_tokens": self.text_tokens}


def run(
    workload: Workload,
    *,
    steps: int = 10,
    rounds: int = 3,
    sustained_steps: int = 6,
    ablation: bool = True,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Eager: parity over a guidance run, then times; docs/benchmarks.md explains the fields."""
    variants = make_variants(MODELS[workload.model].family, ablation=ablation)
    measured = Comparison(build(workload, report), workload, variants, report=report)
    measured.check_parity(steps)
    features = _seen(measured.variants["fast"])
    both = ("stock", "fast")
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        measured.time_interleaved(steps)
        measured.sustain(both, sustained_steps)
        measured.profile(both if number else tuple(measured.variants))
    entries = {name: measured.entry(name) for name in measured.variants}
    for entry in entries.values():
        # Eager, the host launches every kernel.
        entry["launches"] = entry.pop("kernels")
    return {
        "bitwise_equal": entries["fast"]["bitwise_equal"],
        "steps": steps,
        "rounds": rounds,
        "floor_ms": entries["stock"]["floor_ms"],
        **{name: {key: value for key, value in entries[name].items() if key != "bitwise_equal"} for name in both},
        "features": {
            id: {
                **seen,
                **{
                    f"{how}_{what}": entries[name][key]
                    for how in ("alone", "without")
                    if (name := f"{how} {id}") in entries
                    for what, key in (
                        ("bitwise_equal", "bitwise_equal"),
                        ("ms", "pass_ms"),
                        ("kernel_ms", "kernel_ms"),
                        ("launches", "launches"),
                    )
                },
            }
            for id, seen in features.items()
        },
    }


def run_parity(
    workload: Workload, *, steps: int = 10, emulate: bool = False, report: Report = lambda line: None
) -> dict[str, dict[str, Any]]:
    """By eager variant, those of the ablation included: whether the bytes are stock's, and what each feature did.

    `emulate`: with the FP8 linear emulated in torch, on a CPU.
    """
    variants = make_variants(MODELS[workload.model].family, emulate=emulate)
    with _emulated(workload) if emulate else nullcontext():
        compared = Comparison(build(workload, report), workload, variants, report=report, tolerant=True)
        compared.check_parity(steps)
    return {
        name: {
            "bitwise_equal": compared.is_equal(name),
            "failed": compared.failed.get(name, ""),
            "features": _seen(variant),
        }
        for name, variant in variants.items()
        if name != "stock"
    }


def run_graphs(
    workload: Workload,
    *,
    names: Sequence[str] | None = None,
    steps: int = 10,
    rounds: int = 3,
    sustained_steps: int = 6,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """The variants of `make_graph_variants`, or those named and stock.

    One that fails is recorded with the reason, and the others go on.
    """
    variants = make_graph_variants(names)
    measured = Comparison(build(workload, report), workload, variants, report=report, tolerant=True)
    measured.check_parity(steps)
    best = variants.get("fast+graph")
    features = _seen(best)
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        measured.time_interleaved(steps)
        measured.sustain(tuple(variants), sustained_steps)
        measured.profile(tuple(variants))
    entries = {name: measured.entry(name) for name in variants}
    return {
        "bitwise_equal": entries["fast+graph"].get("bitwise_equal", False) if best else None,
        "steps": steps,
        "rounds": rounds,
        "floor_ms": entries["stock"].get("floor_ms"),
        "variants": entries,
        "features": features,
    }


def _seen(variant: Variant | None) -> dict[str, dict[str, Any]]:
    """What a variant's features have done so far."""
    if variant is None or variant.plan is None:
        return {}
    plan = variant.plan
    return {
        id: {"state": plan.described(record), "hits": record.hits, "fallbacks": dict(record.fallbacks)}
        for id, record in plan.records.items()
    }


def unequal(document: dict[str, Any]) -> list[str]:
    """The plugin's variants in a result, of those that must give stock's bytes, that did not."""
    if "variants" not in document:
        return [] if document["bitwise_equal"] else ["fast"]
    entries = document["variants"]
    return [name for name in _PLUGINS_BEST if name in entries and not entries[name].get("bitwise_equal")]


def describe(workload: Workload, command: str) -> dict[str, Any]:
    """What a result file says about where it comes from."""
    release = contracts.installed_release()
    return {
        "model": workload.model,
        "sglang": release.version if release else "none",
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "attention": workload.attention,
        "image_tokens": workload.image_hw[0] * workload.image_hw[1],
        "text_tokens": workload.text_tokens,
        "arch": MODELS[workload.model].arch | workload.arch,
        "commit": commit(),
        "command": command,
    }


def write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def commit() -> str:
    """The commit that is measured; COMMIT names it where there is no repository."""
    if named := os.environ.get("COMMIT"):
        return named
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


class Comparison:
    """Measures the variants of one denoiser, step by step in turn.

    With `tolerant`, a variant that raises is left out from then on, with the reason.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        workload: Workload,
        variants: dict[str, Variant],
        *,
        report: Report = lambda line: None,
        tolerant: bool = False,
    ) -> None:
        self.variants = variants
        self.failed: dict[str, str] = {}
        self._denoiser = denoiser
        self._workload = workload
        self._report = report
        self._tolerant = tolerant
        self._passes_a_step = 0
        self._equal: dict[str, bool] = {}
        self._peaks: dict[str, dict[str, float]] = {}
        self._walls: dict[str, list[float]] = {name: [] for name in variants}
        self._clocks: dict[str, list[int]] = {name: [] for name in variants}
        self._hosts: dict[str, list[float]] = {name: [] for name in variants}
        self._sustained: dict[str, list[dict[str, float | None]]] = {name: [] for name in variants}
        self._profiles: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}

    def check_parity(self, steps: int) -> None:
        """Prepares every variant and compares the latents after each step with stock's, as bytes."""
        self._report(f"parity over {steps} steps of guidance")
        loop = self._loop(Variant(), steps)
        self._passes_a_step = loop.passes_a_step
        reference = [latents.clone() for latents in loop]
        # The plugin's variants first: their first pass moves weights to merge them, which SGLang's own graphs,
        # captured before, would not notice. And their memory is measured before the others' graphs hold any.
        for name in sorted(self.variants, key=lambda name: not name.startswith("fast")):
            variant = self.variants[name]
            with self._tolerating(name):
                variant.prepare(self._denoiser, **self._workload.size)
                with variant.applied(), self._watching_memory(name):
                    latents = [latents.clone() for latents in self._loop(variant, steps)]
                variant.verify()
                difference = compare(latents, reference)
                self._equal[name] = difference is None
                self._report(f"  {name}: {difference or 'bitwise equal'}")

    def is_equal(self, name: str) -> bool:
        """Whether a variant gave stock's bytes; one that failed has not."""
        return self._equal.get(name, False)

    def time_interleaved(self, steps: int) -> None:
        """Adds milliseconds a pass, wall: every variant runs its n-th step before any its next, in turning order.

        Each step starts from a rested GPU, so that none pays for the power that the one before it drew. Also the
        multiprocessors' clock at the end of each step.
        """
        names = [name for name in self.variants if name not in self.failed]
        loops = {name: iter(self._loop(self.variants[name], steps)) for name in names}
        for step in range(steps):
            for name in names[step % len(names) :] + names[: step % len(names)]:
                with self._serving(name) as serving:
                    if not serving:
                        continue
                    self._synchronize()
                    if not self._on_cpu:
                        time.sleep(_STEP_REST_S)
                    started = time.perf_counter()
                    next(loops[name])
                    self._synchronize()
                    elapsed = time.perf_counter() - started
                    if step:  # the first one warms up
                        self._walls[name].append(elapsed * 1e3 / self._passes_a_step)
                        if (clock := self._clock_mhz()) is not None:
                            self._clocks[name].append(clock)

    def pass_times(self, name: str) -> list[float]:
        """Milliseconds a pass, as `time_interleaved` has taken them: the n-th of every variant in the same step."""
        return list(self._walls[name])

    def sustain(self, names: Iterable[str], steps: int) -> None:
        """Adds the host's time a pass, then milliseconds a pass over steps without a synchronization between them.

        Clock and power are read while the last step runs, whether the host runs ahead of the GPU or behind it.
        """
        for name in names:
            with self._serving(name) as serving:
                if not serving:
                    continue
                host = _HostTimer(self._synchronize)
                loop = iter(self._loop(self.variants[name], _HOST_STEPS + _WARM_STEPS + steps, host))
                for _ in range(_HOST_STEPS):
                    next(loop)
                host.on = False
                for _ in range(_WARM_STEPS):
                    next(loop)
                self._synchronize()
                begun = self._event()
                for _ in range(steps - 1):
                    next(loop)
                last = self._event()
                next(loop)
                ended = self._event()
                last.synchronize()
                clock, watts = self._clock_mhz(), self._watts()
                ended.synchronize()
                self._hosts[name] += host.milliseconds
                self._sustained[name].append(
                    {
                        "sustained_ms": begun.elapsed_time(ended) / steps / self._passes_a_step,
                        "sustained_sm_mhz": clock,
                        "sustained_watts": watts,
                    }
                )

    def profile(self, names: Iterable[str]) -> None:
        """Adds the kernels of one step, every pass from a rested GPU.

        The passes stay in one step: one may reuse what the one before it computed.
        """
        for name in names:
            with self._serving(name) as serving:
                if not serving:
                    continue
                around = _RestAndMark(self._on_cpu)
                loop = iter(self._loop(self.variants[name], 3, around))
                next(loop)
                around.on = True
                self._synchronize()
                activity = torch.profiler.ProfilerActivity
                with torch.profiler.profile(activities=[activity.CPU if self._on_cpu else activity.CUDA]) as profiler:
                    next(loop)
                    self._synchronize()
                self._profiles[name].append(summarize(profiler.events(), self._passes_a_step))

    def entry(self, name: str) -> dict[str, Any]:
        """What a result file says of one variant."""
        if name in self.failed:
            return {"failed": self.failed[name]}
        entry: dict[str, Any] = {
            "pass_ms": _median(self._walls[name], 3),
            "min_ms": round(min(self._walls[name]), 3),
            "max_ms": round(max(self._walls[name]), 3),
            "sm_mhz": _median(self._clocks[name]),
            **({"host_ms": _median(self._hosts[name], 3)} if self._hosts[name] else {}),
        }
        for key, digits in (("sustained_ms", 3), ("sustained_sm_mhz", None), ("sustained_watts", None)):
            if taken := self._sustained[name]:
                entry[key] = _median([value for one in taken if (value := one[key]) is not None], digits)
        entry |= _median_profile(self._profiles[name])
        entry |= {"bitwise_equal": self._equal[name], **self._peaks.get(name, {})}
        if setup := self.variants[name].setup:
            entry["setup"] = setup
        return entry

    def _loop(self, variant: Variant, steps: int, around_pass: AroundPass | None = None) -> DenoisingLoop:
        return variant.loop(self._denoiser, steps=steps, around_pass=around_pass, **self._workload.size)

    @contextmanager
    def _tolerating(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._tolerant:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.failed[name] = reason[:_LONGEST_REASON]
            self._report(f"  {name} failed:\n{traceback.format_exc()}")

    @contextmanager
    def _serving(self, name: str) -> Iterator[bool]:
        """The variant is applied while open; False if it has failed."""
        if name in self.failed:
            yield False
            return
        entered = False
        with self._tolerating(name), self.variants[name].applied():
            entered = True
            yield True
        if not entered:
            yield False

    @contextmanager
    def _watching_memory(self, name: str) -> Iterator[None]:
        if name not in _PLUGINS_BEST or self._on_cpu:
            yield
            return
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        yield
        self._peaks[name] = {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        }

    @property
    def _on_cpu(self) -> bool:
        return self._workload.device == "cpu"

    def _synchronize(self) -> None:
        if not self._on_cpu:
            torch.cuda.synchronize()

    def _event(self) -> "_Event":
        if self._on_cpu:
            return _HostEvent()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _clock_mhz(self) -> int | None:
        """The multiprocessors' clock now, or None where NVML (nvidia-ml-py) is not there to ask."""
        try:
            return None if self._on_cpu else torch.cuda.clock_rate()
        except Exception:  # NVML has its own errors, and its absence several
            return None

    def _watts(self) -> float | None:
        """The power drawn, which NVML averages over about the last second; None where it does not tell."""
        try:
            return None if self._on_cpu else torch.cuda.power_draw() / 1e3
        except Exception:
            return None


class _Event(Protocol):
    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


class _HostEvent:
    """A point in time on a machine whose host does the work itself."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "_HostEvent", /) -> float:
        return (end_event._at - self._at) * 1e3


class _HostTimer:
    """Collects the milliseconds that a pass keeps the host busy.

    Each starts on an idle GPU: where the GPU is behind, its queue fills up and the host waits for it.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.milliseconds: list[float] = []
        self.on = True
        self._synchronize = synchronize

    def __call__(self, run_pass: Callable[[], Tensor]) -> Tensor:
        if not self.on:
            return run_pass()
        self._synchronize()
        started = time.perf_counter()
        result = run_pass()
        self.milliseconds.append((time.perf_counter() - started) * 1e3)
        return result


class _RestAndMark:
    """Lets the GPU rest before each pass, and launches a kernel that nothing else does to mark where it begins."""

    def __init__(self, on_cpu: bool) -> None:
        self.on = False
        self._on_cpu = on_cpu

    def __call__(self, run_pass: Callable[[], Tensor]) -> Tensor:
        if self.on and not self._on_cpu:
            torch.cuda.synchronize()
            time.sleep(_REST_S)
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        return run_pass()


def summarize(events: Iterable[Any], passes_a_step: int) -> dict[str, Any]:
    """Kernel time, floor, kernels and the host's launches a pass, from one step's profile; the passes' own sums too.

    `launches` is None if the profile has none although kernels ran.
    """
    by_name: dict[str, tuple[float, int]] = {}
    passes: list[float] = []
    launches = 0
    busy_until: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        if event.device_type.name == "CPU":
            # A launch may show as a call of the runtime and, within it, as one of the driver.
            if event.name.startswith(_LAUNCHES) and start >= busy_until.get(event.thread, start):
                busy_until[event.thread] = end
                launches += 1
            continue
        if event.device_type.name != "CUDA" or event.name.startswith(("Memcpy", "Memset")):
            continue
        if _MARKER in event.name:
            passes.append(0.0)
            continue
        total, count = by_name.get(event.name, (0.0, 0))
        by_name[event.name] = total + end - start, count + 1
        if passes:
            passes[-1] += end - start
    launches -= len(passes)  # the markers' own
    kernels = sum(count for _, count in by_name.values())
    floor = sum(us for name, (us, _) in by_name.items() if any(part in name.lower() for part in _FLOOR_NAMES))
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:12]
    return {
        "kernel_ms": round(sum(us for us, _ in by_name.values()) / 1e3 / passes_a_step, 3),
        "floor_ms": round(floor / 1e3 / passes_a_step, 3),
        "kernels": kernels // passes_a_step,
        "launches": None if kernels and launches <= 0 else launches // passes_a_step,
        "kernel_ms_by_pass": [round(us / 1e3, 3) for us in passes],
        "longest_ms": {name[:120]: round(us / 1e3 / passes_a_step, 3) for name, (us, _) in longest},
    }


def _median_profile(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """The profile with the median kernel time, so that its parts add up."""
    ranked = sorted(taken, key=lambda profile: profile["kernel_ms"])
    return ranked[len(ranked) // 2]


def _median(values: Sequence[float], digits: int | None = None) -> float | None:
    return round(statistics.median(values), digits) if values else None


@contextmanager
def _emulated(workload: Workload) -> Iterator[None]:
    from sglang_fastpath.patches.diffusion import fp8_cpu_emulation

    start_runtime(attention_backend=workload.attention)
    revert = fp8_cpu_emulation.apply()
    try:
        yield
    finally:
        revert()


def build(workload: Workload, report: Report) -> nn.Module:
    """The workload's denoiser in block FP8, and what SGLang needs in a process to run it."""
    start_runtime(attention_backend=workload.attention)
    report("building the denoiser")
    model = MODELS[workload.model]
    return model.build(**model.arch | workload.arch, fp8=True, device=workload.device)
