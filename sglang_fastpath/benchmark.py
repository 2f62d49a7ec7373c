"""`sglang-fastpath bench denoiser`: stock and fast interleaved in one process, on a full-size denoiser.

The denoiser is SGLang's own, block FP8 with random weights, driven by SGLang's own denoising step with guidance (two
passes a step). Absolute times vary from machine to machine; what a run supports is the ratio of its columns.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_fastpath import contracts, envs, plugin
from sglang_fastpath.denoisers import build_qwen_image, start_runtime
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.guard import compare
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import Plan, make_plan

PASSES_A_STEP = 2
# Kernels that belong to the floor, FP8 GEMM and attention, by the names that DeepGEMM and the backends give them.
_FLOOR_NAMES = ("fp8_gemm", "flash", "fmha")
_MARKER = "spin_kernel"  # what torch.cuda._sleep launches


@dataclass(frozen=True)
class Workload:
    """One denoiser at one resolution: `image_hw` in tokens (64, 64 is 1024x1024)."""

    layers: int = 60
    heads: int = 24
    image_hw: tuple[int, int] = (64, 64)
    text_tokens: int = 256
    attention: str = "fa"
    device: str = "cuda"


@contextmanager
def applied(new: Plan | None) -> Iterator[None]:
    """Applies a plan (None: stock) and restores every original object afterwards."""
    if new is None:
        yield
        return
    plugin.apply(new)
    try:
        yield
    finally:
        plugin.deactivate()


def make_variants(*, ablation: bool = True) -> dict[str, Plan | None]:
    """Name -> plan: stock, everything on; for the ablation each active feature alone, and everything without it."""

    def only(*on: str) -> Plan:
        settings = envs.Settings(enabled=True, switches={f.id: f.id in on for f in CATALOGUE})
        return make_plan(settings, contracts.installed_release())

    fast = only(*(feature.id for feature in CATALOGUE))
    variants: dict[str, Plan | None] = {"stock": None, "fast": fast}
    ids = [record.feature.id for record in fast.active()]
    for id in ids if ablation else ():
        variants[f"alone {id}"] = only(id)
        variants[f"without {id}"] = only(*(other for other in ids if other != id))
    return variants


def run(
    workload: Workload,
    *,
    steps: int = 10,
    rounds: int = 3,
    ablation: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Parity over a guidance run, then times; docs/benchmarks.md explains the fields."""
    start_runtime(attention_backend=workload.attention)
    report("building the denoiser")
    denoiser = build_qwen_image(
        layers=workload.layers,
        heads=workload.heads,
        joint_attention_dim=3584,
        fp8=True,
        device=workload.device,
    )
    variants = make_variants(ablation=ablation)
    report(f"parity over {steps} steps of guidance")
    reference = [latents.clone() for latents in _loop(denoiser, workload, steps)]
    equal: dict[str, bool] = {}
    for name, new in variants.items():
        with applied(new):
            difference = compare([latents.clone() for latents in _loop(denoiser, workload, steps)], reference)
        equal[name] = difference is None
        report(f"  {name}: {difference or 'bitwise equal'}")
    fast = variants["fast"]
    assert fast is not None
    features = {
        id: {"state": fast.described(record), "hits": record.hits, "fallbacks": dict(record.fallbacks)}
        for id, record in fast.records.items()
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    clocks: dict[str, list[int]] = {name: [] for name in variants}
    for number in range(rounds):
        report(f"timing, round {number + 1} of {rounds}")
        _time_interleaved(denoiser, workload, steps, variants, times, clocks)
    profiles: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for number in range(rounds):
        report(f"profiling, round {number + 1} of {rounds}")
        for name in variants if number == 0 else ("stock", "fast"):
            with applied(variants[name]):
                profiles[name].append(_profile(denoiser, workload))
    kernels = {name: _median_profile(taken) for name, taken in profiles.items()}
    wall = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {
        "bitwise_equal": equal["fast"],
        "steps": steps,
        "rounds": rounds,
        "floor_ms": kernels["stock"]["floor_ms"],
        **{
            name: {
                "pass_ms": wall[name],
                "min_ms": round(min(times[name]), 3),
                "max_ms": round(max(times[name]), 3),
                "sm_mhz": round(statistics.median(clocks[name])) if clocks[name] else None,
                **kernels[name],
            }
            for name in ("stock", "fast")
        },
        "features": {
            id: {
                **seen,
                **{
                    f"{how}_{what}": value
                    for how in ("alone", "without")
                    if (name := f"{how} {id}") in variants
                    for what, value in (
                        ("bitwise_equal", equal[name]),
                        ("ms", wall[name]),
                        ("kernel_ms", kernels[name]["kernel_ms"]),
                        ("launches", kernels[name]["launches"]),
                    )
                },
            }
            for id, seen in features.items()
        },
    }


def describe(workload: Workload, command: str) -> dict[str, Any]:
    """What a result file says about where it comes from."""
    release = contracts.installed_release()
    return {
        "model": "qwen-image",
        "sglang": release.version if release else "none",
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "attention": workload.attention,
        "image_tokens": workload.image_hw[0] * workload.image_hw[1],
        "text_tokens": workload.text_tokens,
        "layers": workload.layers,
        "commit": os.environ.get("COMMIT") or _commit(),
        "command": command,
    }


def write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _commit() -> str:
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _loop(denoiser: nn.Module, workload: Workload, steps: int) -> Iterator[Tensor]:
    return iter(GuidanceLoop(denoiser, steps=steps, image_hw=workload.image_hw, text_tokens=workload.text_tokens))


def _synchronize(workload: Workload) -> None:
    if workload.device != "cpu":
        torch.cuda.synchronize()


def _clock_mhz(workload: Workload) -> int | None:
    """The multiprocessors' clock now, or None where NVML (nvidia-ml-py) is not there to ask."""
    if workload.device == "cpu":
        return None
    try:
        return torch.cuda.clock_rate()
    except (ImportError, RuntimeError):
        return None


def _time_interleaved(
    denoiser: nn.Module,
    workload: Workload,
    steps: int,
    variants: dict[str, Plan | None],
    times: dict[str, list[float]],
    clocks: dict[str, list[int]],
) -> None:
    """Adds milliseconds a pass, wall: every variant runs its n-th step before any runs its next, in turning order.

    Also the multiprocessors' clock at the end of each step: a GPU that is always busy may have to slow down.
    """
    names = list(variants)
    loops = {name: _loop(denoiser, workload, steps) for name in names}
    for step in range(steps):
        for name in names[step % len(names) :] + names[: step % len(names)]:
            with applied(variants[name]):
                _synchronize(workload)
                started = time.perf_counter()
                next(loops[name])
                _synchronize(workload)
                elapsed = time.perf_counter() - started
            if step:  # the first one warms up
                times[name].append(elapsed * 1e3 / PASSES_A_STEP)
                if (clock := _clock_mhz(workload)) is not None:
                    clocks[name].append(clock)


def _profile(denoiser: nn.Module, workload: Workload) -> dict[str, Any]:
    """Kernel time, floor and launches of a pass, as the mean over one step's two passes; the passes' own sums too."""
    loop = _loop(denoiser, workload, steps=3)
    next(loop)
    _synchronize(workload)
    # A kernel that nothing else launches marks where a pass begins.
    marker = denoiser.register_forward_pre_hook(lambda *_: torch.cuda._sleep(1))  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            next(loop)
            _synchronize(workload)
    finally:
        marker.remove()
    by_name: dict[str, tuple[float, int]] = {}
    passes: list[float] = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.device_type.name != "CUDA" or event.name.startswith(("Memcpy", "Memset")):
            continue
        if _MARKER in event.name:
            passes.append(0.0)
            continue
        total, count = by_name.get(event.name, (0.0, 0))
        by_name[event.name] = total + event.time_range.elapsed_us(), count + 1
        if passes:
            passes[-1] += event.time_range.elapsed_us()
    floor = sum(us for name, (us, _) in by_name.items() if any(part in name.lower() for part in _FLOOR_NAMES))
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:12]
    return {
        "kernel_ms": round(sum(us for us, _ in by_name.values()) / 1e3 / PASSES_A_STEP, 3),
        "floor_ms": round(floor / 1e3 / PASSES_A_STEP, 3),
        "launches": sum(count for _, count in by_name.values()) // PASSES_A_STEP,
        "kernel_ms_by_pass": [round(us / 1e3, 3) for us in passes],
        "longest_ms": {name[:120]: round(us / 1e3 / PASSES_A_STEP, 3) for name, (us, _) in longest},
    }


def _median_profile(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """The profile with the median kernel time, so that its parts add up."""
    ranked = sorted(taken, key=lambda profile: profile["kernel_ms"])
    return ranked[len(ranked) // 2]
