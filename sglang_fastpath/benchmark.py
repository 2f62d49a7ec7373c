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

from sglang_fastpath import contracts, envs, plan, plugin
from sglang_fastpath.denoisers import build_qwen_image, start_runtime
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.guard import compare
from sglang_fastpath.guidance_loop import GuidanceLoop

PASSES_A_STEP = 2
# Kernels that belong to the floor, FP8 GEMM and attention, by the names that DeepGEMM and the backends give them.
_FLOOR_NAMES = ("fp8_gemm", "flash", "fmha")


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
def features_on(settings: envs.Settings | None) -> Iterator[plan.Plan | None]:
    """Applies the plan that `settings` give (None: stock) and restores every original afterwards."""
    if settings is None:
        yield None
        return
    plugin.apply(new := plan.make_plan(settings, contracts.installed_release()))
    try:
        yield new
    finally:
        plugin.deactivate()


def variants() -> dict[str, envs.Settings | None]:
    """Name -> settings: stock, everything on, each feature alone, everything without it."""

    def only(*on: str) -> envs.Settings:
        return envs.Settings(enabled=True, switches={f.id: f.id in on for f in CATALOGUE})

    ids = [feature.id for feature in CATALOGUE]
    named: dict[str, envs.Settings | None] = {"stock": None, "fast": only(*ids)}
    for id in ids:
        named[f"alone {id}"] = only(id)
        named[f"without {id}"] = only(*(other for other in ids if other != id))
    return named


def run(
    workload: Workload, *, steps: int = 10, rounds: int = 3, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Parity over a guidance run, then times: see the schema in docs/benchmarks.md."""
    start_runtime(attention_backend=workload.attention)
    report("building the denoiser")
    denoiser = build_qwen_image(
        layers=workload.layers,
        heads=workload.heads,
        joint_attention_dim=3584,
        fp8=True,
        device=workload.device,
    )
    all_variants = variants()
    report(f"parity over {steps} steps of guidance")
    reference = [latents.clone() for latents in _loop(denoiser, workload, steps)]
    equal, states, hits = {}, {}, {}
    for name, settings in all_variants.items():
        with features_on(settings) as new:
            difference = compare([latents.clone() for latents in _loop(denoiser, workload, steps)], reference)
            equal[name] = difference is None
            if new:
                states[name] = {id: new.described(record) for id, record in new.records.items()}
                hits[name] = {id: record.hits for id, record in new.records.items()}
            report(f"  {name}: {'bitwise equal' if difference is None else difference}")
    times: dict[str, list[float]] = {name: [] for name in all_variants}
    for number in range(rounds):
        report(f"timing, round {number + 1} of {rounds}")
        for name, settings in all_variants.items():
            with features_on(settings):
                times[name] += _pass_times(denoiser, workload, steps)
    kernels = {}
    for name in ("stock", "fast"):
        report(f"profiling {name}")
        with features_on(all_variants[name]):
            kernels[name] = _profile(denoiser, workload)
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {
        "bitwise_equal": equal["fast"],
        "steps": steps,
        "rounds": rounds,
        "floor_ms": kernels["stock"]["floor_ms"],
        **{
            name: {"pass_ms": medians[name], "min_ms": min(times[name]), "max_ms": max(times[name]), **kernels[name]}
            for name in ("stock", "fast")
        },
        "features": {
            id: {
                "state": states["fast"][id],
                "hits": hits["fast"][id],
                "bitwise_equal_alone": equal[f"alone {id}"],
                "alone_ms": medians[f"alone {id}"],
                "without_ms": medians[f"without {id}"],
            }
            for id in (feature.id for feature in CATALOGUE)
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


def _pass_times(denoiser: nn.Module, workload: Workload, steps: int) -> list[float]:
    """Milliseconds a pass, wall, of each step but the first (which checks parity and warms up)."""
    times = []
    started = 0.0
    for index, _ in enumerate(_loop(denoiser, workload, steps)):
        _synchronize(workload)
        now = time.perf_counter()
        if index:
            times.append((now - started) * 1e3 / PASSES_A_STEP)
        started = now
    return times


def _profile(denoiser: nn.Module, workload: Workload) -> dict[str, Any]:
    """Kernel time, floor and launches of one pass, as the mean over one step's two passes."""
    loop = _loop(denoiser, workload, steps=3)
    next(loop)
    _synchronize(workload)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        next(loop)
        _synchronize(workload)
    by_name: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
            total, count = by_name.get(event.name, (0.0, 0))
            by_name[event.name] = total + event.time_range.elapsed_us(), count + 1
    floor = sum(us for name, (us, _) in by_name.items() if any(part in name.lower() for part in _FLOOR_NAMES))
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:12]
    return {
        "kernel_ms": round(sum(us for us, _ in by_name.values()) / 1e3 / PASSES_A_STEP, 3),
        "floor_ms": round(floor / 1e3 / PASSES_A_STEP, 3),
        "launches": sum(count for _, count in by_name.values()) // PASSES_A_STEP,
        "longest_ms": {name[:100]: round(us / 1e3 / PASSES_A_STEP, 3) for name, (us, _) in longest},
    }
