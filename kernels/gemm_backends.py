"""The backends that can compute a block-FP8 GEMM, in order: the first is what stock SGLang runs, and what is trusted.

Each `run` fills `out` [M, N] bfloat16 from q [M, K] float8_e4m3fn with scale [M, K/128] float32 and weight [N, K]
float8_e4m3fn with weight_scale [N/128, K/128] float32 (layouts: `Problem`). What an installed library makes of it:

    backend              where         how it rounds                                               DeepGEMM's bytes
    deep_gemm            SM90, SM100   per 128 of K: acc += (scale * weight_scale) * dot, in fp32  the measure
    flashinfer_deepgemm  SM90          the same: TensorRT-LLM's fork of DeepGEMM; below 32 rows    by its source
                                       with A and B swapped, which changes no product
    cublaslt             SM90          not published                                               to be seen
    triton               SM80 and up   acc += (dot * scale) * weight_scale                         no
    cutlass              SM90 until SGLang 0.5.15, from then on SM120 alone                        to be seen
    flashinfer_*, mxfp8  SM100 and up  other layouts or granularities of the scales                to be seen

Nothing here decides: the tuner compares bytes and times, and what `can_use` refuses or `run` raises is no candidate.
Libraries are imported when they are asked for.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_fastpath.gemm_problem import BLOCK, SCALE_ROWS, VECTOR_BYTES, Operand, Problem

HOPPER = (90,)
DATACENTER_BLACKWELL = (100, 103)
BLACKWELL = (*DATACENTER_BLACKWELL, 110, 120, 121)
_PACKED = "int32"  # four UE8M0 exponents in a word: DeepGEMM's scales on SM100


class DeepGemm:
    """DeepGEMM, as SGLang's AUTO has it wherever it is installed."""

    name = "deep_gemm"
    distributions = ("sgl-deep-gemm",)

    def can_use(self, problem: Problem, sm: int) -> str | None:
        if problem.n % 64 or problem.k % BLOCK:
            return f"N = {problem.n} is no multiple of 64 or K = {problem.k} none of {BLOCK}"
        return _missing("deep_gemm")

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        import deep_gemm

        deep_gemm.fp8_gemm_nt(lhs, rhs, out)


class FlashInferDeepGemm:
    """FlashInfer's `fp8_blockscale_gemm_sm90`: DeepGEMM of early 2025, with A and B swapped below 32 rows.

    FlashInfer allocates K * (M + N) bytes for the time of a call, which this path of it does not write.
    """

    name = "flashinfer_deepgemm"
    distributions = ("flashinfer-python",)

    def can_use(self, problem: Problem, sm: int) -> str | None:
        return (
            _on(HOPPER, sm)
            or _plain(problem)
            or _scales_laid_out(problem, "mn", "k")
            or (f"N = {problem.n} is no multiple of 64" if problem.n % 64 else None)
            or _missing("flashinfer")
        )

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        fp8_blockscale_gemm_sm90(lhs[0], rhs[0], lhs[1], rhs[1], out=out)


class CublasLt:
    """cuBLASLt's 1x128 by 128x128 scaling, by way of torch; Hopper's alone, from CUDA 12.9.

    Its scales of the activation are MN-major without padding, so M must be a multiple of 4 for DeepGEMM's to be such.
    """

    name = "cublaslt"
    distributions = ("torch", "nvidia-cublas")

    def can_use(self, problem: Problem, sm: int) -> str | None:
        if why := _on(HOPPER, sm) or _plain(problem) or _scales_laid_out(problem, "mn", "k"):
            return why
        if problem.m % SCALE_ROWS or problem.k // BLOCK % SCALE_ROWS or problem.n % BLOCK:
            return f"M or K/{BLOCK} is no multiple of {SCALE_ROWS}, or N none of {BLOCK}"
        if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
            return f"torch {torch.__version__} has no aten::_scaled_mm_v2"
        return None

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        from torch.nn.functional import ScalingType

        recipes = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
        torch.ops.aten._scaled_mm_v2.out(
            *(lhs[0], rhs[0].t()),
            *([lhs[1]], [recipes[0]], []),
            *([rhs[1].t()], [recipes[1]], []),
            *(None, out.dtype),
            out=out,
        )


class Triton:
    """SGLang's Triton kernel, which it takes where DeepGEMM is not installed. It makes a tensor of its own."""

    name = "triton"
    distributions = ("sglang", "triton")

    def can_use(self, problem: Problem, sm: int) -> str | None:
        return _plain(problem) or _missing("triton")

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        from sglang.srt.layers.quantization import fp8_utils

        out.copy_(
            fp8_utils.w8a8_block_fp8_matmul_triton(
                lhs[0], rhs[0], lhs[1], rhs[1], [BLOCK, BLOCK], output_dtype=out.dtype
            )
        )


class Cutlass:
    """SGLang's `fp8_blockwise_scaled_mm`: sgl-kernel's until 0.5.15, then compiled on first use, for SM120 alone."""

    name = "cutlass"
    distributions = ("sglang", "sglang-kernel")

    def can_use(self, problem: Problem, sm: int) -> str | None:
        if why := _plain(problem) or _scales_laid_out(problem, "mn", "k"):
            return why
        if problem.m % SCALE_ROWS or problem.n % BLOCK:
            return f"M is no multiple of {SCALE_ROWS}, or N none of {BLOCK}"
        function = self._function()
        if function is None:
            return "this SGLang has no fp8_blockwise_scaled_mm"
        if function.__module__.startswith("sglang.") and sm // 10 != 12:
            return f"this SGLang compiles fp8_blockwise_scaled_mm for SM120 alone, not for SM{sm}"
        return None

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        function = self._function()
        assert function is not None
        out.copy_(function(lhs[0], rhs[0].t(), lhs[1], rhs[1].t(), out.dtype))

    @staticmethod
    def _function() -> Callable[..., Tensor] | None:
        from sglang.srt.layers.quantization import fp8_utils

        function: Callable[..., Tensor] | None = getattr(fp8_utils, "fp8_blockwise_scaled_mm", None)
        return function


class FlashInferGroupwise:
    """FlashInfer's `gemm_fp8_nt_groupwise` on Blackwell: its own CUTLASS kernels, or TensorRT-LLM's."""

    distributions = ("flashinfer-python", "flashinfer-cubin")

    def __init__(self, backend: str, architectures: tuple[int, ...]) -> None:
        self.name = f"flashinfer_{backend}"
        self._backend = backend
        self._architectures = architectures

    def can_use(self, problem: Problem, sm: int) -> str | None:
        if why := _on(self._architectures, sm) or _plain(problem) or _scales_laid_out(problem, "mn", "k"):
            return why
        if problem.m % SCALE_ROWS or problem.n % BLOCK or problem.k < 2 * BLOCK:
            return f"M is no multiple of {SCALE_ROWS}, N none of {BLOCK}, or K below {2 * BLOCK}"
        return _missing("flashinfer")

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        from flashinfer.gemm import gemm_fp8_nt_groupwise

        options: dict[str, Any] = {}
        scales = lhs[1], rhs[1]
        if self._backend == "cutlass":
            # As SGLang calls it: MN-major scales as [K/128, M] and [K/128, N/128]. The weight's are copied anew.
            options["scale_major_mode"] = "MN"
            scales = lhs[1].t(), rhs[1].t().contiguous()
        gemm_fp8_nt_groupwise(lhs[0], rhs[0], *scales, out=out, backend=self._backend, **options)


class MxFp8:
    """FlashInfer's `mm_mxfp8`: for values with a UE8M0 scale for 1x32, in the 128x4 swizzle."""

    distributions = ("flashinfer-python", "flashinfer-cubin", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")

    def __init__(self, backend: str, architectures: tuple[int, ...]) -> None:
        self.name = f"mxfp8_{backend}"
        self._backend = backend
        self._architectures = architectures

    def can_use(self, problem: Problem, sm: int) -> str | None:
        if why := _on(self._architectures, sm):
            return why
        if problem.granularity != ("1x32", "1x32"):
            return f"it takes scales for 1x32, not {' and '.join(problem.granularity)}"
        return _missing("flashinfer")

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        from flashinfer import mm_mxfp8

        mm_mxfp8(lhs[0], rhs[0].t(), lhs[1], rhs[1], out=out, backend=self._backend, use_8x4_sf_layout=False)


BACKENDS: tuple[Any, ...] = (
    DeepGemm(),
    FlashInferDeepGemm(),
    CublasLt(),
    Triton(),
    Cutlass(),
    FlashInferGroupwise("trtllm", DATACENTER_BLACKWELL),
    FlashInferGroupwise("cutlass", BLACKWELL),
    MxFp8("cutlass", BLACKWELL),
    MxFp8("cute-dsl", DATACENTER_BLACKWELL),
    MxFp8("cudnn", BLACKWELL),
)
"""In this order they are tried; of equals the earlier one is kept."""


def _on(architectures: tuple[int, ...], sm: int) -> str | None:
    if sm in architectures:
        return None
    return f"it is for {', '.join(f'SM{one}' for one in architectures)}, not for SM{sm}"


def _plain(problem: Problem) -> str | None:
    if not problem.is_block_fp8:
        kind = "packed UE8M0 scales" if _PACKED in problem.dtypes else "something else"
        return f"it takes e4m3 with float32 scales for 1x{BLOCK} and {BLOCK}x{BLOCK} to bfloat16; this is {kind}"
    if problem.k % BLOCK:
        return f"K = {problem.k} is no multiple of {BLOCK}"
    if (problem.layout[0], problem.layout[2], problem.layout[4]) != ("k", "k", "k"):
        return "values or output are strided"
    return f"addresses are aligned to {problem.alignment} bytes" if problem.alignment < VECTOR_BYTES else None


def _scales_laid_out(problem: Problem, activation: str, weight: str) -> str | None:
    found = problem.layout[1], problem.layout[3]
    if found == (activation, weight):
        return None
    return f"it takes scales laid out {activation} and {weight}, not {found[0]} and {found[1]}"


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"
