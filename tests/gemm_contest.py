"""Backends that compute on a CPU and take the time that a test says, and the bench that believes them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang_fastpath.kernels.block_fp8_linear import block_fp8_matmul
from torch import Tensor

from sglang_fastpath.gemm_bench import draw
from sglang_fastpath.gemm_problem import Operand, Problem
from sglang_fastpath.gemm_tuner import Machine

PROBLEM = Problem(5, 128, 256)
OTHER = Problem(3, 256, 128)
H200 = Machine(90, "NVIDIA H200, 132 multiprocessors", {"torch": "2.11.0", "sgl-deep-gemm": "0.1.5"})


def spread(us: float, noise: float = 0.0, rounds: int = 20) -> list[float]:
    """Times around `us`, alternating, so that two series that start apart differ by `noise` in every round."""
    return [us * (1 + noise * (round % 2)) for round in range(rounds)]


@dataclass
class FakeBackend:
    """The reference's bytes, each moved by `ulps`; `spoils`: from which run on, and `writes`: whether at all."""

    name: str
    us: Sequence[float] = (100.0,)
    ulps: int = 0
    refuses: str | None = None
    raises: Exception | None = None
    writes: bool = True
    spoils: int | None = None
    distributions: tuple[str, ...] = ()
    runs: list[Problem] = field(default_factory=list)

    def can_use(self, problem: Problem, sm: int) -> str | None:
        return self.refuses

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> None:
        self.runs.append(Problem.of(lhs, rhs, out))
        if self.raises:
            raise self.raises
        if not self.writes:
            return
        out.copy_(block_fp8_matmul(*lhs, *rhs, out.dtype))
        if self.ulps or (self.spoils is not None and len(self.runs) > self.spoils):
            out.view(torch.int16).add_(self.ulps or 1)


class FakeBench:
    """Real inputs and outputs; the times are the backends' own, a fresh copy of `us` for each that enters."""

    def __init__(self, problem: Problem, log: list[str]) -> None:
        self.log = log
        self._draws = [draw(problem, seed, "cpu") for seed in range(2)]
        self._entered: dict[str, int] = {}

    def outputs(self, run: Any) -> list[Tensor]:
        self.log.append(f"outputs {run.__self__.name}")
        return [self._run(run, *inputs) for inputs in self._draws]

    def enter(self, run: Any) -> tuple[Any, int]:
        number = self._entered[run.__self__.name] = self._entered.get(run.__self__.name, -1) + 1
        self.log.append(f"enter {run.__self__.name}")
        return run, number

    def time(self, entrants: Sequence[tuple[Any, int]], rounds: int) -> list[list[float]]:
        self.log.append(f"time {', '.join(run.__self__.name for run, _ in entrants)}")
        times = []
        for run, number in entrants:
            series = run.__self__.us
            times.append([series[(round + number) % len(series)] for round in range(rounds)])
        return times

    def left_by(self, entrant: tuple[Any, int]) -> Tensor:
        return self._run(entrant[0], *self._draws[0])

    @staticmethod
    def _run(run: Any, lhs: Operand, rhs: Operand, out: Tensor) -> Tensor:
        fresh = torch.full_like(out, torch.nan)
        run(lhs, rhs, fresh)
        return fresh


def benches(log: list[str], broken: Iterable[Problem] = ()) -> Callable[[Problem], Any]:
    @contextmanager
    def bench_of(problem: Problem) -> Iterator[FakeBench]:
        if problem in broken:
            raise torch.OutOfMemoryError("no room for the inputs")
        log.append(f"bench {problem}")
        yield FakeBench(problem, log)

    return bench_of
