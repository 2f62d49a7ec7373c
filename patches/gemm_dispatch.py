"""`gemm_tuner`: each block-FP8 GEMM goes to the backend that was tuned for it, and to DeepGEMM if none was.

Two places start them. Stock's is `deep_gemm_wrapper.gemm_nt_f8f8bf16`, which every block-FP8 linear on DeepGEMM comes
down to, in diffusion and in LLMs, whatever quantized its input; it lies beneath an operator of SGLang's, so that
torch.compile does not look into it. Ours is `fp8_gemm_nt` of the fused forwards.

Nothing is tuned here, and nothing is timed: `sglang-fastpath tune` does that, in a process of its own. What it
decided is read once, at the first GEMM, and does not change while the process lives, for CUDA graphs hold what was
chosen when they were captured. The parity guard compares a chosen backend with DeepGEMM at the first call of each
shape.
"""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sglang_fastpath import gemm_choices
from sglang_fastpath.gemm_choices import FEATURE, Choices
from sglang_fastpath.gemm_problem import VECTOR_BYTES, Backend, Operand, Problem
from sglang_fastpath.gemm_tuner import Profile
from sglang_fastpath.plan import FeatureRecord, Plan

OURS = "sglang_fastpath.kernels.block_fp8_gemm:fp8_gemm_nt"
NOTHING_TUNED = "nothing has been tuned on this machine: sglang-fastpath tune"
NOT_TUNED = "its shape has not been tuned: sglang-fastpath tune"
# Imported in a process that serves a diffusion model, and in no other.
_DIFFUSION = "sglang.multimodal_gen.runtime.pipelines_core.stages.denoising"

logger = logging.getLogger("sglang_fastpath")


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of stock's site, and of our own."""
    record = records[FEATURE]
    dispatch = plan.kept(__name__, lambda: GemmDispatch(record, plan, lambda: _load(plan)))
    return {record.feature.sites[0]: dispatch.wrap, OURS: dispatch.wrap}


def serve(plan: Plan, choices: Choices) -> None:
    """Makes a plan that is not applied yet take these choices, whatever has been tuned."""
    plan.kept(__name__, lambda: GemmDispatch(plan.records[FEATURE], plan, lambda: choices))


def profile() -> Profile:
    """What a GEMM of this process finds in the L2 cache, by what it serves."""
    return "denoiser" if _DIFFUSION in sys.modules else "decode"


def _load(plan: Plan) -> Choices:
    choices = gemm_choices.load(plan.settings, profile())
    logger.info("sglang-fastpath: gemm_tuner runs %d shapes on other backends than stock", len(choices.backends))
    return choices


class GemmDispatch:
    """Sends GEMMs to the backends of `load()`, which is asked at the first one."""

    def __init__(self, record: FeatureRecord, plan: Plan, load: Callable[[], Choices]) -> None:
        self._record = record
        self._plan = plan
        self._load = load
        self._choices: Choices | None = None
        # What distinguishes calls, as cheap as can be had -> the backend and the guard's signature, or why none.
        self._known: dict[tuple[Any, ...], tuple[Backend | None, str]] = {}

    def wrap(self, first: Callable[..., Any]) -> Callable[..., Any]:
        """`first(lhs, rhs, out)` where nothing else has been chosen, or more is asked of it than that."""

        @functools.wraps(first)
        def gemm(lhs: Operand, rhs: Operand, out: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return first(lhs, rhs, out, *args, **kwargs)
            if args or any(value is not None for value in kwargs.values()):
                self._record.fall_back("the scales are of another recipe")
                return first(lhs, rhs, out, *args, **kwargs)
            backend, why = self._chosen(lhs, rhs, out)
            if backend is None:
                self._record.fall_back(why)
                return first(lhs, rhs, out, **kwargs)
            self._run(backend, why, lhs, rhs, out, functools.partial(first, lhs, rhs, out, **kwargs))
            return None

        return gemm

    def _chosen(self, lhs: Operand, rhs: Operand, out: Tensor) -> tuple[Backend | None, str]:
        if self._choices is None:
            self._choices = self._load()
        if not self._choices.backends and not self._choices.because:
            return None, NOTHING_TUNED
        (q, scale), (weight, weight_scale) = lhs, rhs
        pointers = (
            q.data_ptr() | scale.data_ptr() | weight.data_ptr() | weight_scale.data_ptr() | out.data_ptr()
        ) % VECTOR_BYTES
        key = (
            *(q.shape, weight.shape, pointers),
            *(q.dtype, scale.dtype, weight_scale.dtype, out.dtype),
            *(q.stride(), scale.stride(), weight.stride(), weight_scale.stride(), out.stride()),
        )
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look_up(lhs, rhs, out)
        return known

    def _look_up(self, lhs: Operand, rhs: Operand, out: Tensor) -> tuple[Backend | None, str]:
        choices = self._choices
        assert choices is not None
        if not out.numel() or any(tensor.dim() != 2 for tensor in (*lhs, *rhs, out)):
            return None, "it has no rows, or is no GEMM of matrices"
        problem = Problem.of(lhs, rhs, out)
        backend = choices.backends.get(problem)
        if backend is None:
            return None, choices.because.get(problem, NOT_TUNED)
        return backend, f"{backend.name} for {problem}"

    def _run(
        self, backend: Backend, signature: str, lhs: Operand, rhs: Operand, out: Tensor, first: Callable[[], Any]
    ) -> None:
        compared = ran = False

        def fast() -> Tensor:
            nonlocal ran
            result = torch.empty_like(out) if compared else out
            backend.run(lhs, rhs, result)
            ran = True
            return result

        def stock() -> Tensor:
            nonlocal compared
            first()
            compared = True  # if `fast` comes now, it is to be compared with what is in `out`
            return out

        self._plan.guard.run(FEATURE, signature, fast=fast, stock=stock)
        if ran:
            self._record.hit()
        else:
            self._record.fall_back("left to the first backend by the guard")
