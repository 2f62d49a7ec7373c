"""`sglang-fastpath tune`: a model's GEMMs tuned on this machine, and its whole pass timed with the winners.

The pass of a denoiser is SGLang's own denoising step on random weights with every feature of the plugin that is
active here: with the first backends, with the same once more, and with the winners, step by step in turn. That of an
LLM are its GEMMs in the order of its layers, in one CUDA graph.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sglang_fastpath import benchmark, contracts, envs
from sglang_fastpath.benchmark_variants import Variant
from sglang_fastpath.gemm_choices import FEATURE, Choices, make_tuner
from sglang_fastpath.gemm_problem import Backend, Problem
from sglang_fastpath.gemm_tuner import Bench, PassTimes, Tuned, Tuner, Verdict, judge
from sglang_fastpath.gemm_workload import Pass, TuningWorkload, WorkloadError
from sglang_fastpath.patches import gemm_dispatch
from sglang_fastpath.plan import State, make_plan

HOPPER = 90
PASS_STEPS = 8  # the first of a round warms up
PASS_ROUNDS = 2
GEMM_ROUNDS = 20

TimePass = Callable[[Pass, Mapping[Problem, Backend]], PassTimes]
BenchOf = Callable[[Problem], AbstractContextManager[Bench]]


class PassError(RuntimeError):
    """The pass could not be timed with the winners; the message says why. They are not installed."""


class Progress(Protocol):
    """Who is told how far the work has come, in problems and passes."""

    def begin(self, total: int) -> None: ...
    def working_on(self, what: str) -> None: ...
    def advance(self) -> None: ...


class Silent:
    def begin(self, total: int) -> None:
        pass

    def working_on(self, what: str) -> None:
        pass

    def advance(self) -> None:
        pass


@dataclass(frozen=True)
class Report:
    """What came of it: a decision on each problem, a verdict on each pass that was timed, by its label.

    `timed`: how many problems and passes were timed, and not found in the cache; `seconds` is what all of it took.
    """

    workload: TuningWorkload
    tuner: Tuner
    tuned: Sequence[Tuned]
    verdicts: Mapping[str, Verdict]
    timed: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        allowed = [backend.name for backend in self.tuner.backends]
        return {
            "model": self.workload.model,
            "profile": self.workload.profile,
            "passes": [one.label for one in self.workload.passes],
            "backends": allowed,
            "seconds": round(self.seconds, 3),
            "timed": self.timed,
            "shapes": [
                {
                    **{name: getattr(one.problem, name) for name in ("m", "n", "k")},
                    "linears": self.workload.named(one.problem),
                    "cached": one.cached,
                    **({"failed": one.failed} if one.failed else {}),
                    **(one.decision.as_json() | {"serving": one.decision.serving(allowed)} if one.decision else {}),
                }
                for one in self.tuned
            ],
            "pass_effect": {label: verdict._asdict() for label, verdict in self.verdicts.items()},
        }


def tune(
    workload: TuningWorkload,
    tuner: Tuner,
    bench_of: BenchOf,
    time_pass: TimePass | None,
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> Report:
    """Decides on every problem, then on every pass that has winners without a verdict.

    `time_pass` None: no pass is timed, so that winners which have no verdict yet are not installed. `again`: what has
    been decided before does not count.
    """
    started = time.perf_counter()
    progress = progress or Silent()
    progress.begin(len(workload.problems) + len(workload.passes))

    def working_on(problem: Problem, what: str) -> None:
        progress.working_on(f"{problem}: {what}")

    tuned = tuner.tune(
        workload.problems, bench_of, again=again, on_problem=working_on, on_tuned=lambda one: progress.advance()
    )
    timed = sum(not one.cached and one.decision is not None and bool(one.decision.seconds) for one in tuned)
    verdicts: dict[str, Verdict] = {}
    by_problems: dict[Iterable[Problem], Verdict] = {}
    winners = tuner.winners(tuned)
    for one in workload.passes:
        if time_pass and tuner.undecided(tuned, one.problems):
            progress.working_on(f"the whole pass, {one.label}")
            mine = {problem: winners[problem] for problem in one.problems if problem in winners}
            try:
                verdict = judge(time_pass(one, mine))
            except Exception as error:  # whatever stops the pass must not stop stock's backend
                verdict = Verdict(False, f"not installed: {' '.join(str(error).split())[:300]}")
            verdicts[one.label] = by_problems[tuple(one.problems)] = verdict
            timed += 1
        progress.advance()
    if by_problems:
        tuned = tuner.install(tuned, by_problems)
    return Report(workload, tuner, tuned, verdicts, timed, time.perf_counter() - started)


def tune_on_gpu(
    workload: TuningWorkload,
    settings: envs.Settings,
    progress: Progress,
    *,
    layers: int | None = None,
    check: bool = True,
    again: bool = False,
) -> Report:
    """With the backends that the settings let in. `layers`: see `time_pass_on_gpu`; `check`: time the pass.

    Raises:
        WorkloadError: the GPU is not Hopper, whose layout of the scales alone is known here.
    """
    # SGLang reads it when it is imported. Otherwise it has DeepGEMM's kernels compiled for every M up to 16,384.
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    from sglang_fastpath.gemm_bench import cuda_bench

    tuner = make_tuner(settings, workload.profile)
    if tuner.machine.sm != HOPPER:
        raise WorkloadError(
            f"{tuner.machine.device}, SM{tuner.machine.sm}: block FP8 is tuned on Hopper (SM90) so far"
        )
    time_pass = time_pass_on_gpu(tuner, layers=layers, report=progress.working_on) if check else None
    return tune(
        workload, tuner, lambda problem: cuda_bench(problem, workload.profile), time_pass, progress, again=again
    )


def time_pass_on_gpu(tuner: Tuner, *, layers: int | None, report: Callable[[str], None]) -> TimePass:
    """`layers`: blocks of each kind in a denoiser's pass, if not all."""

    def time_pass(one: Pass, winners: Mapping[Problem, Backend]) -> PassTimes:
        from sglang_fastpath.gemm_bench import time_gemms

        if one.denoiser is None:
            return time_gemms(one, tuner.backends[0], winners, rounds=GEMM_ROUNDS)
        return time_denoiser(one.denoiser, winners, layers=layers, report=report)

    return time_pass


def time_denoiser(
    workload: benchmark.Workload,
    winners: Mapping[Problem, Backend],
    *,
    layers: int | None = None,
    steps: int = PASS_STEPS,
    rounds: int = PASS_ROUNDS,
    report: Callable[[str], None] = lambda line: None,
) -> PassTimes:
    """A whole pass with every feature that is active here.

    Raises:
        PassError: with the winners the latents are not stock's.
    """
    full = benchmark.MODELS[workload.model]
    sized = replace(workload, arch={**workload.arch, **full.sized(layers, None)})
    names = ("fast, first backends", "fast, first backends again", "fast, winners")
    variants = {name: _variant(winners if name == names[-1] else {}) for name in names}
    measured = benchmark.Comparison(benchmark.build(sized, report), sized, variants, report=report)
    measured.check_parity(2)
    if not measured.is_equal(names[-1]):
        raise PassError("with the winners the latents are not stock's")
    for _ in range(rounds):
        measured.time_interleaved(steps)
    return PassTimes(*(measured.pass_times(name) for name in names))


def _variant(winners: Mapping[Problem, Backend]) -> Variant:
    """Everything on, unguarded: the latents are compared with stock's as a whole."""
    settings = envs.Settings(enabled=True, guard="off", switches={FEATURE: True})
    plan = make_plan(settings, contracts.installed_release())
    record = plan.records[FEATURE]
    if record.state is not State.ACTIVE:
        raise PassError(f"{FEATURE} is {record.state} here: {record.reason}")
    gemm_dispatch.serve(plan, Choices(winners))
    return Variant(plan, required=[FEATURE] if winners else ())
