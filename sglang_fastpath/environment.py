"""What the machine has: GPU, compiler, GEMM library. Facts for the plan and for `sglang-fastpath doctor`."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import Version

# Architectures whose block-FP8 GEMM and scale layouts have been looked at: Hopper and datacenter Blackwell.
SUPPORTED_SM = (90, 100, 103)

# The FlashInfer whose CuTe-DSL RMSNorm `rmsnorm_quant` repeats, post releases included.
FLASHINFER_NORM = "0.6.15"


@dataclass(frozen=True)
class Environment:
    """Facts about this machine; None where the thing is absent.

    `sm` is the compute capability times ten (90 for an H200), `versions` maps distribution names to versions,
    `emulated` says that the FP8 linear is emulated in torch (SGLANG_FASTPATH_EMULATE=1).
    """

    gpu: str | None
    sm: int | None
    cuda: str | None
    nvcc: str | None
    deep_gemm: bool
    versions: dict[str, str | None]
    emulated: bool = False


def detect() -> Environment:
    """Looks at this machine. Imports torch, but neither sglang nor triton; never raises on what is missing."""
    import torch

    gpu = sm = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    distributions = ("sglang", "torch", "triton", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python")
    return Environment(
        gpu=gpu,
        sm=sm,
        cuda=torch.version.cuda,
        nvcc=find_nvcc(),
        deep_gemm=importlib.util.find_spec("deep_gemm") is not None,
        versions={name: _version(name) for name in (*distributions, "nvidia-cutlass-dsl")},
    )


def find_nvcc() -> str | None:
    """The CUDA compiler: of CUDA_HOME, CUDA_PATH or /usr/local/cuda, else the one on PATH."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    candidates = [Path(home, "bin", "nvcc") for home in homes if home]
    return next((str(path) for path in candidates if path.is_file()), shutil.which("nvcc"))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _needs_gpu(env: Environment) -> str | None:
    """A GPU, or the emulation: `plan` switches off what it cannot stand in for."""
    return None if env.gpu or env.emulated else "no NVIDIA GPU: torch.cuda.is_available() is False"


def _needs_supported_sm(env: Environment) -> str | None:
    if env.sm is None:
        return _needs_gpu(env)
    if env.sm in SUPPORTED_SM:
        return None
    known = ", ".join(f"SM{sm}" for sm in SUPPORTED_SM)
    return f"SM{env.sm} ({env.gpu}) has not been verified; supported: {known}"


def _needs_nvcc(env: Environment) -> str | None:
    return None if env.nvcc else "no nvcc: install the CUDA toolkit or set CUDA_HOME"


def _needs_deep_gemm(env: Environment) -> str | None:
    return None if env.deep_gemm else "no DeepGEMM: pip install sgl-deep-gemm"


def _needs_block_fp8_kernels(env: Environment) -> str | None:
    """The fused block-FP8 kernels: Hopper, or the emulation that stands in for it."""
    if env.emulated:
        return None
    if env.sm is not None and env.sm != 90:
        return f"SM{env.sm} ({env.gpu}): the fused block-FP8 kernels write Hopper's scale layout"
    return _needs_gpu(env) or _needs_nvcc(env) or _needs_deep_gemm(env)


def _needs_flashinfer_norm(env: Environment) -> str | None:
    """FlashInfer's CuTe-DSL norm in the version whose order of addition has been read, or the emulation."""
    if env.emulated:
        return None
    found = env.versions.get("flashinfer-python")
    if found is None or Version(found).base_version != FLASHINFER_NORM:
        return f"FlashInfer {found or 'is not installed'}: only the norm of {FLASHINFER_NORM} has been read"
    if env.versions.get("nvidia-cutlass-dsl") is None:
        return "FlashInfer's norm is its CUDA kernel without nvidia-cutlass-dsl, which adds in another order"
    if os.environ.get("FLASHINFER_USE_CUDA_NORM", "0") == "1":
        return "FLASHINFER_USE_CUDA_NORM=1: FlashInfer's CUDA norm adds in another order"
    return None


# What a feature may ask for in `Feature.needs`; each returns why it is not met, or None.
REQUIREMENTS: dict[str, Callable[[Environment], str | None]] = {
    "gpu": _needs_gpu,
    "sm": _needs_supported_sm,
    "nvcc": _needs_nvcc,
    "deep_gemm": _needs_deep_gemm,
    "block_fp8_kernels": _needs_block_fp8_kernels,
    "flashinfer_norm": _needs_flashinfer_norm,
}
