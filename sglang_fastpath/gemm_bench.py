"""The tuner's yardstick on a CUDA device: inputs, outputs and times of one block-FP8 GEMM.

Every competitor of a problem is timed in the same way: a CUDA graph of the same number of launches over the same sets
of inputs, which step_graph and SGLang's decode graphs replay GEMMs from as well. What lies in the L2 cache depends on
the profile: `denoiser` launches the GEMM on one set of inputs again and again, so that the cache holds what the
launch before left in it; `decode` goes over so many sets that every launch reads its weight from memory. Rounds over
all competitors, in turning order; each graph runs once more before it is timed, so that none of them pays for what
another one left behind.

How a real pass leaves the cache is neither: that is what the timing of the whole pass is for.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_fastpath.gemm_problem import BLOCK, SCALE_ROWS, Backend, Operand, Problem
from sglang_fastpath.gemm_tuner import PassTimes, Profile, Run
from sglang_fastpath.gemm_workload import Pass
from sglang_fastpath.patches.diffusion.graph_recorder import CudaGraphRecorder, Recording

GRAPH_US = 2000.0  # of launches in a graph, about: starting it must not show
FEWEST_LAUNCHES, MOST_LAUNCHES = 4, 64
TIMES_L2 = 3
_DRAWS = 2
_POISON = 0xFF  # NaN in bfloat16 and in float32


class Inputs(NamedTuple):
    lhs: Operand
    rhs: Operand
    out: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.lhs, *self.rhs, self.out))


class Entrant(NamedTuple):
    """A graph of `launches` launches; `inputs` are the sets that it goes over, with outputs of its own."""

    graph: Recording
    inputs: tuple[Inputs, ...]
    launches: int


class UnsupportedProblemError(ValueError):
    """There are no inputs for such a problem here."""


def draw(problem: Problem, seed: int, device: str = "cuda") -> Inputs:
    """Values over all of e4m3's range with positive scales; with an odd seed also rows that are out of the ordinary.

    Those are a row of zeros, one of the largest values, and one whose scale is infinite, as the quantizer leaves it
    for a row with an infinity.
    """
    if problem != Problem(problem.m, problem.n, problem.k):
        raise UnsupportedProblemError(f"{problem} is not as SGLang lays out block FP8 on Hopper")
    generator = torch.Generator(device).manual_seed(seed)

    def values(rows: int) -> Tensor:
        drawn = torch.randn(rows, problem.k, generator=generator, device=device, dtype=torch.bfloat16)
        return (64 * drawn).clamp(-448, 448).to(torch.float8_e4m3fn)

    def scales(rows: int) -> Tensor:
        return (1 + torch.rand(rows, -(-problem.k // BLOCK), generator=generator, device=device)) / 128

    q, weight = values(problem.m), values(problem.n)
    padded = -(-problem.m // SCALE_ROWS) * SCALE_ROWS
    scale = torch.zeros(-(-problem.k // BLOCK), padded, device=device).t()[: problem.m]
    scale.copy_(scales(problem.m))
    if seed % 2:
        rows = itertools.cycle(range(problem.m))
        q[next(rows)] = torch.zeros((), dtype=q.dtype, device=device)
        q[next(rows)] = torch.full((), 448.0, device=device).to(q.dtype)
        scale[next(rows), 0] = torch.inf
    out = torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device=device)
    return Inputs((q, scale), (weight, scales(-(-problem.n // BLOCK))), out)


class CudaBench:
    """A problem on the current device. See `gemm_tuner.Bench`."""

    def __init__(self, problem: Problem, profile: Profile) -> None:
        self._draws = [draw(problem, seed) for seed in range(_DRAWS)]
        self._sets = [self._draws[0]]
        self._launches = 0
        if profile == "decode":
            cache = torch.cuda.get_device_properties().L2_cache_size
            while len(self._sets) * self._sets[0].nbytes <= TIMES_L2 * cache:
                self._sets.append(draw(problem, _DRAWS * len(self._sets)))

    def outputs(self, run: Run) -> list[Tensor]:
        results = []
        for lhs, rhs, out in self._draws:
            result = _poisoned(out)
            run(lhs, rhs, result)
            results.append(result)
        torch.cuda.synchronize()
        return results

    def enter(self, run: Run) -> Entrant:
        inputs = tuple(one._replace(out=_poisoned(one.out)) for one in self._sets)
        if not self._launches:
            self._launches = self._count(run)
        return Entrant(
            _capture([(run, inputs[index % len(inputs)]) for index in range(self._launches)]), inputs, self._launches
        )

    def time(self, entrants: Sequence[Entrant], rounds: int) -> list[list[float]]:
        taken = time_interleaved([entrant.graph for entrant in entrants], rounds)
        return [
            [ms * 1e3 / entrant.launches for ms in series] for entrant, series in zip(entrants, taken, strict=True)
        ]

    def left_by(self, entrant: Entrant) -> Tensor:
        torch.cuda.synchronize()
        return entrant.inputs[0].out

    def close(self) -> None:
        self._draws.clear()
        self._sets.clear()
        _recorder().empty_pool()

    def _count(self, run: Run) -> int:
        """How many launches make a graph, by what one takes; a multiple of the sets, so that all are read."""
        begin, end = _events()
        lhs, rhs, out = self._sets[0]
        run(lhs, rhs, out)
        begin.record()
        run(lhs, rhs, out)
        end.record()
        torch.cuda.synchronize()
        microseconds: float = max(1.0, 1e3 * begin.elapsed_time(end))
        wanted = min(MOST_LAUNCHES, max(FEWEST_LAUNCHES, round(GRAPH_US / microseconds)))
        return -(-wanted // len(self._sets)) * len(self._sets)


@contextmanager
def cuda_bench(problem: Problem, profile: Profile) -> Iterator[CudaBench]:
    """A problem set up for as long as it takes."""
    bench = CudaBench(problem, profile)
    try:
        yield bench
    finally:
        bench.close()


def time_gemms(one: Pass, first: Backend, winners: Mapping[Problem, Backend], *, rounds: int) -> PassTimes:
    """The GEMMs of a pass, layer after layer, over so many weights that no layer finds its own in the L2 cache.

    For a model whose pass this project does not drive itself: what lies between its GEMMs is left out.
    """
    cache = torch.cuda.get_device_properties().L2_cache_size
    sets = [{problem: draw(problem, 0) for problem in one.problems}]
    while len(sets) * sum(inputs.nbytes for inputs in sets[0].values()) <= TIMES_L2 * cache:
        sets.append({problem: draw(problem, _DRAWS * len(sets)) for problem in one.problems})

    def graph(chosen: Mapping[Problem, Backend]) -> Recording:
        launches: list[tuple[Run, Inputs]] = [
            (chosen.get(site.problem, first).run, sets[layer % len(sets)][site.problem])
            for layer in range(one.layers)
            for site in one.sites
            for _ in range(site.calls)
        ]
        for run, (lhs, rhs, out) in launches[: sum(site.calls for site in one.sites)]:
            run(lhs, rhs, out)
        torch.cuda.synchronize()
        return _capture(launches)

    times = PassTimes(*time_interleaved([graph({}), graph({}), graph(winners)], rounds))
    _recorder().empty_pool()
    return times


def time_interleaved(graphs: Sequence[Recording], rounds: int) -> list[list[float]]:
    """Milliseconds of a replay, by graph a list with an element for each round."""
    taken: list[list[float]] = [[] for _ in graphs]
    for number in range(rounds):
        order = [(number + offset) % len(graphs) for offset in range(len(graphs))]
        pending: list[tuple[int, Any, Any]] = []
        for index in order:
            begin, end = _events()
            graphs[index].replay()
            begin.record()
            graphs[index].replay()
            end.record()
            pending.append((index, begin, end))
        torch.cuda.synchronize()
        for index, begin, end in pending:
            taken[index].append(begin.elapsed_time(end))
    return taken


def _poisoned(like: Tensor) -> Tensor:
    """Memory may still hold the right bytes from a run before."""
    out = torch.empty_like(like)
    out.view(torch.uint8).fill_(_POISON)
    return out


@functools.cache
def _recorder() -> CudaGraphRecorder:
    return CudaGraphRecorder()


def _capture(launches: Sequence[tuple[Run, Inputs]]) -> Recording:
    def launch() -> None:
        for run, (lhs, rhs, out) in launches:
            run(lhs, rhs, out)

    recording: Recording = _recorder().record(launch)[0]
    return recording


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return (
        torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
    )
