"""The GEMM tuner: which backend runs a problem, decided by bytes and by times; nothing here knows about devices.

A list of backends competes for a problem. The first is what stock would run; it is what runs for a problem that
nobody has tuned, and whenever anything here fails. A challenger takes its place only if

- the gate lets it in: a gain of this pair of backends on this architecture has been measured (`MEASURED_GAINS`), or
  the user asked for all of them (SGLANG_FASTPATH_GEMM_TUNER=all);
- it can run the problem; one that refuses or raises is no candidate, with the reason on record;
- its outputs are those of the first, as bytes, before it is timed and after;
- it wins by more than the noise. All are timed by one yardstick (the same inputs, the same state of the L2 cache, a
  CUDA graph each), in rounds that every one of them takes part in. The first takes part twice: how far its two times
  of one round are apart is the noise, at the 90th percentile of the rounds;
- the winners of all problems of a workload, put to work together, make its whole pass faster than the first backends
  do, by more than the noise of that. What wins alone can lose in sequence, where the caches are in another state.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeAlias

from sglang_fastpath.gemm_problem import Backend, Problem
from sglang_fastpath.guard import compare

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("sglang_fastpath")

ROUNDS = 20
LEAST_GAIN = 0.01
"""A gain below it is not worth another backend, however quiet the machine was."""
GATED = "no gain of another backend has been measured on this architecture"
_NOISE_QUANTILE = 0.9

Profile = Literal["denoiser", "decode"]
"""The state of the L2 cache: warm, as in a loop over the same tensors, or cold, with weights that nobody has read."""
Run: TypeAlias = "Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor], None]"
"""`Backend.run`."""


class Gain(NamedTuple):
    """A pair of backends of which the second was measured to be the faster one for some problems."""

    sm: int
    first: str
    challenger: str
    evidence: str


MEASURED_GAINS: tuple[Gain, ...] = ()
"""The gate. A row is added with the file below benchmarks/results that shows it installed: `evidence`."""


class TuningError(RuntimeError):
    """A problem could not be tuned at all, so the first backend runs it; the message says why."""


class Bench(Protocol):
    """A problem, set up on a device: several draws of its inputs, and one yardstick for all that compete."""

    def outputs(self, run: Run) -> list[Tensor]:
        """Of each draw, in a fresh output that held other bytes."""

    def enter(self, run: Run) -> Any:
        """Makes it ready to be timed. It may raise."""

    def time(self, entrants: Sequence[Any], rounds: int) -> list[list[float]]:
        """Microseconds a launch, by entrant a list with an element for each round."""

    def left_by(self, entrant: Any) -> Tensor:
        """The output that the timed launches left, of the first draw of `outputs`."""


@dataclass(frozen=True)
class Decision:
    """What came of one competition.

    `declined` and `excluded` say, by backend, why it was no candidate: refused or raised, or its bytes were others.
    `ratio`: the winner's time over the first's, `microseconds`: everybody's median. `installed`: whether the winner
    is put to work; None while the pass has not been timed with it. `verdict` says why, or why not.
    """

    problem: Problem
    first: str
    winner: str
    ratio: float
    noise: float
    microseconds: Mapping[str, float] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    installed: bool | None = None
    verdict: str = ""

    @classmethod
    def unchallenged(cls, problem: Problem, first: str, verdict: str, **fields: Any) -> Self:
        """The first backend stays, because no other one is a candidate."""
        return cls(problem, first, first, ratio=1.0, noise=0.0, installed=False, verdict=verdict, **fields)

    @property
    def considered(self) -> set[str]:
        """Every backend that was asked."""
        return {self.first, *self.microseconds, *self.declined, *self.excluded}

    def serving(self, allowed: Iterable[str]) -> str:
        """The backend that runs the problem, of those allowed."""
        return self.winner if self.installed and self.winner in allowed else self.first

    def as_json(self) -> dict[str, Any]:
        """Without the problem, which is its key."""
        return {name: value for name, value in asdict(self).items() if name != "problem"}

    @classmethod
    def from_json(cls, problem: Problem, document: Any) -> Self:
        """Raises ValueError for what `as_json` has not made."""
        try:
            made = cls(problem=problem, **document)
            sound = (
                all(isinstance(name, str) for name in (made.first, made.winner, made.verdict))
                and all(isinstance(table, dict) for table in (made.microseconds, made.declined, made.excluded))
                and made.installed in (True, False, None)
                and math.isfinite(made.ratio)
                and made.winner in {made.first, *made.microseconds}
            )
        except TypeError as error:
            raise ValueError(f"no decision: {error}") from None
        if not sound:
            raise ValueError(f"no decision on {problem}: {document!r:.200}")
        return made


def contestants(
    backends: Sequence[Backend], sm: int, *, everywhere: bool, gains: Iterable[Gain] = MEASURED_GAINS
) -> list[Backend]:
    """The backends that may compete on this architecture, in their order; the first always may."""
    first, *challengers = backends
    measured = {gain.challenger for gain in gains if (gain.sm, gain.first) == (sm, first.name)}
    return [first, *(backend for backend in challengers if everywhere or backend.name in measured)]


def compete(
    problem: Problem,
    backends: Sequence[Backend],
    bench: Bench,
    *,
    sm: int,
    max_ulp: int = 0,
    rounds: int = ROUNDS,
    on_step: Callable[[str], None] = lambda what: None,
) -> Decision:
    """Who runs the problem. Outputs may differ from the first's by `max_ulp` in the last place; 0: in no bit.

    Raises:
        TuningError: the first backend itself cannot run the problem here.
    """
    started = time.perf_counter()
    first, *challengers = backends
    try:
        on_step(first.name)
        expected = bench.outputs(first.run)
        entrants = {first.name: bench.enter(first.run)}
        again = bench.enter(first.run)
    except Exception as error:
        raise TuningError(f"{first.name} cannot run {problem}: {_said(error)}") from error
    declined: dict[str, str] = {}
    excluded: dict[str, str] = {}
    for backend in challengers:
        on_step(backend.name)
        try:
            why = backend.can_use(problem, sm)
            if why is None and (difference := _difference(bench.outputs(backend.run), expected, max_ulp)):
                excluded[backend.name] = difference
            elif why is None:
                entrants[backend.name] = bench.enter(backend.run)
        except Exception as error:
            why = _said(error)
        if why is not None:
            declined[backend.name] = why
            logger.debug("%s is no candidate for %s: %s", backend.name, problem, why)
    if len(entrants) == 1:
        verdict = "no other backend gives its bytes" if excluded else "no other backend can run it"
        return Decision.unchallenged(
            problem, first.name, verdict, declined=declined, excluded=excluded, seconds=_since(started)
        )
    on_step("timing")
    times = bench.time([*entrants.values(), again], rounds)
    series = dict(zip(entrants, times, strict=False))
    noise = noise_of(series[first.name], times[-1])
    ratios = {name: ratio_of(took, series[first.name], times[-1]) for name, took in series.items()}
    for name, entrant in entrants.items():
        if difference := _difference([bench.left_by(entrant)], expected[:1], max_ulp):
            excluded[name] = f"after it was timed: {difference}"
    if first.name in excluded:
        raise TuningError(f"{first.name} does not give the same bytes twice for {problem}: {excluded[first.name]}")
    faster = {name: ratio for name, ratio in ratios.items() if name not in excluded and is_gain(ratio, noise)}
    winner = min(faster, key=faster.__getitem__, default=first.name)
    return Decision(
        problem,
        first.name,
        winner,
        ratio=ratios[winner] if faster else 1.0,
        noise=noise,
        microseconds={name: statistics.median(took) for name, took in series.items()},
        declined=declined,
        excluded=excluded,
        seconds=_since(started),
        installed=None if faster else False,
        verdict="" if faster else "no other backend is faster by more than the noise",
    )


def noise_of(first: Sequence[float], again: Sequence[float]) -> float:
    """How far two times of one and the same thing, taken in the same round, are apart, relatively."""
    apart = sorted(abs(b / a - 1.0) for a, b in zip(first, again, strict=True))
    return apart[max(0, math.ceil(_NOISE_QUANTILE * len(apart)) - 1)]


def ratio_of(challenger: Sequence[float], first: Sequence[float], again: Sequence[float]) -> float:
    """The challenger's time over the first's, the median of the rounds."""
    return statistics.median(2.0 * c / (a + b) for c, a, b in zip(challenger, first, again, strict=True))


def is_gain(ratio: float, noise: float) -> bool:
    return 1.0 - ratio > max(noise, LEAST_GAIN)


def _difference(actual: Sequence[Tensor], expected: Sequence[Tensor], max_ulp: int) -> str | None:
    difference = compare(list(actual), list(expected))
    if difference is None or (difference.max_ulp is not None and difference.max_ulp <= max_ulp):
        return None
    return str(difference)


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 3)


# --- a workload's problems -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a decision holds for, and nothing else: the device and the version of every library that has a part."""

    sm: int
    device: str
    libraries: Mapping[str, str]


class Cache(Protocol):
    """Where decisions outlive the process; sglang_fastpath/tuning_cache.py."""

    def read(self, machine: Machine, profile: str, parity: str) -> dict[Problem, Decision]: ...
    def write(self, machine: Machine, profile: str, parity: str, decisions: Iterable[Decision]) -> None: ...


@dataclass(frozen=True)
class Tuned:
    """One problem of a workload: the decision, made now or `cached`; None if it `failed`, with the reason."""

    problem: Problem
    decision: Decision | None
    cached: bool = False
    failed: str = ""


@dataclass(frozen=True)
class Tuner:
    """How a machine's problems are tuned. `backends` may compete; `parity` is the accuracy class asked for."""

    machine: Machine
    backends: Sequence[Backend]
    cache: Cache
    profile: Profile
    parity: Literal["bitwise", "ulp"] = "bitwise"
    max_ulp: int = 0
    rounds: int = ROUNDS

    def tune(
        self,
        problems: Sequence[Problem],
        bench_of: Callable[[Problem], AbstractContextManager[Bench]],
        *,
        again: bool = False,
        on_problem: Callable[[Problem, str], None] = lambda problem, what: None,
        on_tuned: Callable[[Tuned], None] = lambda tuned: None,
    ) -> list[Tuned]:
        """A decision on each problem, from the cache where it holds one that asked these backends; not if `again`."""
        wanted = {backend.name for backend in self.backends}
        known = {} if again else self.cache.read(self.machine, self.profile, self.parity)
        result = []
        for problem in dict.fromkeys(problems):
            decision = known.get(problem)
            if decision is not None and wanted <= decision.considered:
                tuned = Tuned(problem, decision, cached=True)
            elif len(wanted) == 1:
                tuned = Tuned(problem, Decision.unchallenged(problem, self.backends[0].name, GATED))
            else:
                tuned = self._compete(problem, bench_of, lambda what, p=problem: on_problem(p, what))  # type: ignore[misc]
            result.append(tuned)
            on_tuned(tuned)
        return result

    def _compete(
        self,
        problem: Problem,
        bench_of: Callable[[Problem], AbstractContextManager[Bench]],
        on_step: Callable[[str], None],
    ) -> Tuned:
        try:
            with bench_of(problem) as bench:
                decision = compete(
                    problem,
                    self.backends,
                    bench,
                    sm=self.machine.sm,
                    max_ulp=self.max_ulp if self.parity == "ulp" else 0,
                    rounds=self.rounds,
                    on_step=on_step,
                )
        except Exception as error:
            why = str(error) if isinstance(error, TuningError) else _said(error)
            logger.warning("%s is not tuned, the first backend runs it: %s", problem, why)
            return Tuned(problem, None, failed=why)
        # At once: what has been decided survives whatever ends this process.
        self.cache.write(self.machine, self.profile, self.parity, [decision])
        return Tuned(problem, decision)

    def winners(self, tuned: Iterable[Tuned]) -> dict[Problem, Backend]:
        """The backends that took the first's place, by problem, installed or not."""
        by_name = {backend.name: backend for backend in self.backends[1:]}
        return {
            one.problem: by_name[one.decision.winner]
            for one in tuned
            if one.decision and one.decision.winner in by_name
        }

    def undecided(self, tuned: Iterable[Tuned], problems: Iterable[Problem]) -> bool:
        """Whether the pass that poses these problems has still to be timed with the winners in it."""
        ours = set(problems)
        return any(one.decision and one.decision.installed is None for one in tuned if one.problem in ours)

    def install(self, tuned: Sequence[Tuned], verdicts: Mapping[Iterable[Problem], Verdict]) -> list[Tuned]:
        """Puts the winners of each pass to work, all of them or none, and remembers it.

        `verdicts`: by the problems of a pass. A winner of several passes must win in all of them.
        """
        result, changed = [], []
        winners = self.winners(tuned)
        for one in tuned:
            heard = [verdict for problems, verdict in verdicts.items() if one.problem in problems]
            if one.decision and one.problem in winners and heard:
                against = next((verdict for verdict in heard if not verdict.installed), heard[0])
                decision = replace(one.decision, installed=against.installed, verdict=against.why)
                one = replace(one, decision=decision)
                changed.append(decision)
            result.append(one)
        self.cache.write(self.machine, self.profile, self.parity, changed)
        return result


class PassTimes(NamedTuple):
    """Milliseconds a pass, an element for each round: with the first backends, once more, and with the winners."""

    first: Sequence[float]
    again: Sequence[float]
    winners: Sequence[float]


class Verdict(NamedTuple):
    """Whether a set of winners is put to work, and why."""

    installed: bool
    why: str
    first_ms: float | None = None
    winners_ms: float | None = None
    noise: float | None = None


def judge(times: PassTimes) -> Verdict:
    """Whether the winners together make the pass faster, by more than the noise."""
    noise, ratio = noise_of(times.first, times.again), ratio_of(times.winners, times.first, times.again)
    installed = 1.0 - ratio > noise
    took = f"takes {ratio:.4f} of the first backends' time, noise {noise:.4f}"
    return Verdict(
        installed,
        f"the whole pass {took}" if installed else f"not installed: the whole pass {took}",
        statistics.median([*times.first, *times.again]),
        statistics.median(times.winners),
        noise,
    )
