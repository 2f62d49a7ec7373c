"""`sglang-fastpath bench tuner`: what the GEMM tuner finds for a few models, and what finding it costs.

Every backend is let in, whether the gate knows it or not: this is how rows for the gate are found. The cache is a new
one, so that nothing is known at first; then a second process tunes the same, and must find all of it. What libraries
compile on first use counts as tuning, and is as cold as it was on this machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_fastpath import benchmark, envs, gemm_workload
from sglang_fastpath.features import BY_ID
from sglang_fastpath.gemm_choices import FEATURE, this_machine
from sglang_fastpath.gemm_tuning import Progress, tune_on_gpu

RESOLUTION = "1024x1024"
TOKENS: dict[str, tuple[int, ...]] = {gemm_workload.QWEN3_8B: (1, 8, 32, 128)}
"""Batches of an LLM: fewer than `tune` takes by itself, for each compiles kernels of its own."""


def run(
    models: Sequence[str], command: str, *, layers: int | None, check: bool, progress: Progress
) -> dict[str, Any]:
    """`models`: as `gemm_workload.find` takes them. `layers`, `check`: as `tune_on_gpu`.

    Per model what `Report.as_json` says, and of a `second_process` what it took: `tuning_seconds` alone and
    `process_seconds` with all imports, and how much it `timed`.
    """
    workloads = [gemm_workload.find(model, RESOLUTION, TOKENS.get(model, ())) for model in models]
    described = benchmark.describe(benchmark.Workload(), command)
    document: dict[str, Any] = {key: described[key] for key in ("sglang", "torch", "gpu", "commit", "command")}
    document |= {"machine": asdict(this_machine()), "resolution": RESOLUTION, "tuned": {}}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder, BY_ID[FEATURE].env: "all"}
        settings = envs.read(environment)
        for workload in workloads:
            report = tune_on_gpu(workload, settings, progress, layers=layers, check=check)
            document["tuned"][workload.model] = report.as_json()
        for workload in workloads:
            progress.working_on(f"{workload.model} in a second process")
            document["tuned"][workload.model]["second_process"] = second_process(workload.model, environment, check)
    return document


def second_process(model: str, environment: Mapping[str, str], check: bool) -> dict[str, Any]:
    """`tune` on the same cache, as a user starts it."""
    words = ["tune", "--model", model, "--resolution", RESOLUTION, "--check" if check else "--no-check", "--json"]
    for count in TOKENS.get(model, ()):
        words += ["--tokens", str(count)]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "sglang_fastpath.cli", *words],
        env=dict(environment),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - started
    if done.returncode:
        return {"failed": done.stderr.strip()[-400:]}
    found = json.loads(done.stdout)
    return {
        "tuning_seconds": found["seconds"],
        "process_seconds": round(took, 3),
        "timed": found["timed"],
        "cached": sum(shape["cached"] for shape in found["shapes"]),
    }
