"""What the GEMM tuner has decided for this machine, as the settings of this process allow it."""

import logging
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from sglang_fastpath import contracts, environment
from sglang_fastpath.envs import Settings
from sglang_fastpath.features import BY_ID
from sglang_fastpath.gemm_problem import Backend, Problem
from sglang_fastpath.gemm_tuner import Machine, Profile, Tuner, contestants
from sglang_fastpath.kernels.gemm_backends import BACKENDS
from sglang_fastpath.tuning_cache import TuningCache

FEATURE = "gemm_tuner"

logger = logging.getLogger("sglang_fastpath")


@dataclass(frozen=True)
class Choices:
    """Which backend runs a problem instead of the first one; `because`: of those where none does, why."""

    backends: Mapping[Problem, Backend] = field(default_factory=dict)
    because: Mapping[Problem, str] = field(default_factory=dict)


def load(settings: Settings, profile: Profile) -> Choices:
    """From the cache. A machine that cannot be told apart has no choices, with one warning."""
    try:
        tuner = make_tuner(settings, profile)
    except RuntimeError as error:
        logger.warning("%s: nothing that was tuned is used: %s", FEATURE, error)
        return Choices()
    return of(tuner)


def of(tuner: Tuner) -> Choices:
    """What the tuner's cache holds for its machine, profile and accuracy class, of the backends it may use."""
    allowed = {backend.name: backend for backend in tuner.backends}
    first = tuner.backends[0].name
    backends: dict[Problem, Backend] = {}
    because: dict[Problem, str] = {}
    for problem, decision in tuner.cache.read(tuner.machine, tuner.profile, tuner.parity).items():
        serving = decision.serving(allowed)
        if serving != first:
            backends[problem] = allowed[serving]
        elif decision.installed:
            env = BY_ID[FEATURE].env
            because[problem] = f"the gain of {decision.winner} is not recorded for this architecture ({env}=all)"
        elif decision.winner != first:
            because[problem] = decision.verdict or "the whole pass has not been timed with the winners"
        else:
            because[problem] = "tuned: the first backend is the fastest"
    return Choices(backends, because)


def make_tuner(settings: Settings, profile: Profile) -> Tuner:
    """Raises RuntimeError without a GPU."""
    machine = this_machine()
    backends = contestants(BACKENDS, machine.sm, everywhere=settings.every_gemm_backend)
    cache = TuningCache(settings.cache_dir)
    return Tuner(machine, backends, cache, profile, settings.parity, BY_ID[FEATURE].max_ulp)


def this_machine() -> Machine:
    """The current CUDA device and the version of everything that decides what a backend computes, and how fast.

    Raises RuntimeError without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no NVIDIA GPU: torch.cuda.is_available() is False")
    driver: Any = torch._C
    properties = torch.cuda.get_device_properties()
    release = contracts.installed_release()
    names = dict.fromkeys(name for backend in BACKENDS for name in backend.distributions)
    libraries = {name: _version(name) for name in ("torch", "triton", *names)}
    libraries |= {
        "sglang": release.version if release else "none",
        "cuda": str(torch.version.cuda),
        "driver": str(driver._cuda_getDriverVersion()),
        "nvcc": _nvcc_version(),
    }
    return Machine(
        10 * properties.major + properties.minor,
        f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        libraries,
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _nvcc_version() -> str:
    """Of the compiler that DeepGEMM and FlashInfer build their kernels with, in its own words."""
    nvcc = environment.find_nvcc()
    if nvcc is None:
        return "none"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip().rpartition("\n")[2]
