"""The GEMM tuner: who is asked, who is let in, who wins, and what is remembered. On a CPU, with backends whose times
are made up and whose bytes are real."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gemm_contest import H200, OTHER, PROBLEM, FakeBackend, FakeBench, benches, spread
from hypothesis import given
from hypothesis import strategies as st

from sglang_fastpath import gemm_tuner
from sglang_fastpath.gemm_tuner import (
    GATED,
    LEAST_GAIN,
    MEASURED_GAINS,
    Decision,
    Gain,
    PassTimes,
    Tuner,
    TuningError,
    Verdict,
    compete,
    contestants,
    judge,
    noise_of,
    ratio_of,
)
from sglang_fastpath.tuning_cache import TuningCache

STOCK = FakeBackend("stock")
TIMES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=30)


def hold(*challengers: FakeBackend, first: FakeBackend = STOCK, log: list[str] | None = None, **how) -> Decision:
    return compete(PROBLEM, [first, *challengers], FakeBench(PROBLEM, [] if log is None else log), sm=90, **how)


def fast(name: str = "fast", us: float = 50.0, **how) -> FakeBackend:
    return FakeBackend(name, (us,), **how)


# --- one competition -----------------------------------------------------------------------------------------------


def test_the_fastest_of_those_with_the_firsts_bytes_wins() -> None:
    decision = hold(fast("a", 80.0), fast("b", 50.0), fast("c", 60.0), fast("slow", 200.0))
    assert (decision.first, decision.winner, decision.ratio) == ("stock", "b", 0.5)
    assert decision.microseconds == {"stock": 100.0, "a": 80.0, "b": 50.0, "c": 60.0, "slow": 200.0}
    assert decision.installed is None, "the pass has still to be timed"
    assert decision.serving(decision.considered) == "stock", "until then stock's runs"


def test_the_first_is_run_first_and_all_are_timed_together_by_one_yardstick() -> None:
    log: list[str] = []
    hold(fast("a"), fast("b"), log=log)
    asked = ["outputs stock", "enter stock", "enter stock", "outputs a", "enter a", "outputs b", "enter b"]
    assert log == [*asked, "time stock, a, b, stock"]


def test_of_equals_the_first_one_stays() -> None:
    assert hold(fast("a", 100.0)).winner == "stock"
    assert hold(fast("a"), fast("b")).winner == "a"


@pytest.mark.parametrize(
    ("challenger", "reason"),
    [
        (fast(refuses="it is for SM100, not for SM90"), "it is for SM100, not for SM90"),
        (fast(raises=ModuleNotFoundError("No module named 'flashinfer'")), "ModuleNotFoundError: No module named"),
        (fast(raises=RuntimeError("ninja:\nbuild stopped")), "RuntimeError: ninja: build stopped"),
        (fast(raises=torch.OutOfMemoryError("2 GiB")), "OutOfMemoryError: 2 GiB"),
    ],
    ids=["refuses", "no library", "build error", "out of memory"],
)
def test_one_that_declines_is_no_candidate_and_the_others_go_on(
    challenger: FakeBackend, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "sglang_fastpath"):
        decision = hold(challenger, fast("other", 60.0))
    assert decision.winner == "other"
    assert reason in decision.declined["fast"]
    assert decision.excluded == {}
    assert "fast" not in decision.microseconds
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert reason in caplog.text


def test_one_that_refuses_is_never_run() -> None:
    refusing = fast(refuses="K = 64")
    hold(refusing)
    assert refusing.runs == []


def test_one_whose_graph_cannot_be_captured_or_whose_refusal_breaks_is_no_candidate_either(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    unaskable, other = fast("unaskable"), fast("other", 60.0)
    monkeypatch.setattr(unaskable, "can_use", broken)
    assert set(hold(unaskable, other).declined) == {"unaskable"}

    class Uncapturable(FakeBench):
        def enter(self, run):
            return broken() if run.__self__.name == "fast" else super().enter(run)

    decision = compete(PROBLEM, [STOCK, fast(), other], Uncapturable(PROBLEM, []), sm=90)
    assert decision.winner == "other"
    assert "capturing" in decision.declined["fast"]


@pytest.mark.parametrize("ulps", [1, -1, 7])
def test_other_bytes_exclude_however_fast(ulps: int) -> None:
    decision = hold(fast(ulps=ulps), fast("honest", 90.0))
    assert decision.winner == "honest"
    assert "elements differ" in decision.excluded["fast"]
    assert "fast" not in decision.microseconds, "nor is it timed"


def test_what_leaves_its_output_unwritten_is_excluded() -> None:
    assert "differ" in hold(fast(writes=False)).excluded["fast"]


def test_the_accuracy_class_may_allow_the_last_place_but_no_more() -> None:
    last_place = fast(ulps=1)
    assert hold(last_place, max_ulp=1).excluded.keys() == {"fast"}, "where the ordinary rows end there are NaNs"

    class Ordinary(FakeBench):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            del self._draws[1]

    def compare(ulps: int) -> Decision:
        return compete(PROBLEM, [STOCK, fast(ulps=ulps)], Ordinary(PROBLEM, []), sm=90, max_ulp=1)

    assert compare(1).winner == "fast"
    assert compare(2).winner == "stock"


def test_bytes_that_change_once_it_is_timed_exclude_too() -> None:
    decision = hold(fast(spoils=2), fast("honest", 90.0))
    assert decision.winner == "honest"
    assert decision.excluded["fast"].startswith("after it was timed: ")


def test_if_nobody_else_is_left_nothing_is_timed() -> None:
    log: list[str] = []
    decision = hold(fast(ulps=1), log=log)
    assert not any(entry.startswith("time") for entry in log)
    assert (decision.winner, decision.installed) == ("stock", False)
    assert decision.verdict == "no other backend gives its bytes"
    assert hold(fast(refuses="no")).verdict == "no other backend can run it"


@pytest.mark.parametrize(("noise", "winner"), [(0.0, "fast"), (0.02, "fast"), (0.05, "stock"), (0.3, "stock")])
def test_a_challenger_must_win_by_more_than_the_noise(noise: float, winner: str) -> None:
    decision = hold(fast(us=97.0 * (1 + noise / 2)), first=FakeBackend("stock", spread(100.0, noise)))
    assert decision.noise == pytest.approx(noise, rel=0.1, abs=1e-9)
    assert decision.winner == winner
    if winner == "stock":
        assert decision.verdict == "no other backend is faster by more than the noise"


def test_a_gain_of_less_than_a_percent_is_none_on_the_quietest_machine() -> None:
    assert hold(fast(us=100.0 * (1 - LEAST_GAIN) + 0.1)).winner == "stock"
    assert hold(fast(us=100.0 * (1 - LEAST_GAIN) - 0.1)).winner == "fast"


def test_one_round_in_which_something_else_ran_decides_nothing() -> None:
    hiccup = [*spread(100.0, rounds=19), 1000.0]
    assert hold(fast(us=99.5), first=FakeBackend("stock", hiccup)).winner == "stock"
    assert hold(FakeBackend("fast", [*spread(50.0, rounds=19), 1000.0])).winner == "fast"


@pytest.mark.parametrize("what", ["raises", "is not deterministic"])
def test_without_the_first_there_is_no_decision(what: str) -> None:
    if what == "raises":
        with pytest.raises(TuningError, match=r"stock cannot run 5x128x256: .*no kernel image"):
            hold(fast(), first=FakeBackend("stock", raises=RuntimeError("no kernel image")))
    else:
        with pytest.raises(TuningError, match="the same bytes twice"):
            hold(fast(), first=FakeBackend("stock", spoils=2))


@given(TIMES, st.floats(0.5, 2.0))
def test_noise_and_ratio_are_relative(times: list[float], factor: float) -> None:
    assert noise_of(times, times) == 0
    assert noise_of(times, [factor * one for one in times]) == pytest.approx(abs(factor - 1), abs=1e-9)
    assert ratio_of([factor * one for one in times], times, times) == pytest.approx(factor)


# --- the gate ------------------------------------------------------------------------------------------------------


def test_only_what_was_measured_on_this_architecture_may_challenge_the_first() -> None:
    backends = [FakeBackend(name) for name in ("stock", "a", "b", "c")]
    gains = [Gain(90, "stock", "c", "x.json"), Gain(90, "a", "b", "x.json"), Gain(100, "stock", "a", "x.json")]

    def allowed(sm: int, **how) -> list[str]:
        return [backend.name for backend in contestants(backends, sm, gains=gains, everywhere=False, **how)]

    assert allowed(90) == ["stock", "c"]
    assert allowed(100) == ["stock", "a"]
    assert allowed(120) == ["stock"]
    everyone = contestants(backends, 120, everywhere=True, gains=gains)
    assert [backend.name for backend in everyone] == ["stock", "a", "b", "c"], "and in this order"


def test_a_row_of_the_gate_names_a_result_that_shows_the_winner_installed() -> None:
    import json

    from sglang_fastpath.kernels.gemm_backends import BACKENDS

    def shows(gain: Gain, document: Mapping) -> bool:
        shapes = [shape for found in document["tuned"].values() for shape in found["shapes"]]
        served = any((s["first"], s["serving"]) == (gain.first, gain.challenger) for s in shapes)
        return document["machine"]["sm"] == gain.sm and gain.first != gain.challenger and served

    found = {"machine": {"sm": 90}, "tuned": {"m": {"shapes": [{"first": "a", "winner": "b", "serving": "b"}]}}}
    assert shows(Gain(90, "a", "b", ""), found)
    assert not shows(Gain(100, "a", "b", ""), found)
    found["tuned"]["m"]["shapes"][0]["serving"] = "a"
    assert not shows(Gain(90, "a", "b", ""), found)
    root = Path(__file__).parents[1]
    for gain in MEASURED_GAINS:
        assert {gain.first, gain.challenger} <= {backend.name for backend in BACKENDS}
        assert shows(gain, json.loads((root / gain.evidence).read_text()))


# --- a workload and its memory --------------------------------------------------------------------------------------


@pytest.fixture
def log() -> list[str]:
    return []


def tuner_of(folder: Path, *backends: FakeBackend, machine=H200, **how) -> Tuner:
    return Tuner(machine, [STOCK, *backends], TuningCache(folder), "denoiser", **how)


def test_what_was_decided_is_found_by_the_next_process_and_nothing_is_timed(tmp_path: Path, log: list[str]) -> None:
    cold = tuner_of(tmp_path, fast()).tune([PROBLEM, OTHER, PROBLEM], benches(log))
    assert [one.problem for one in cold] == [PROBLEM, OTHER]
    assert [one.cached for one in cold] == [False, False]
    log.clear()
    warm = tuner_of(tmp_path, fast()).tune([PROBLEM, OTHER], benches(log))
    assert log == []
    assert [one.cached for one in warm] == [True, True]
    assert [one.decision for one in warm] == [one.decision for one in cold]


def test_again_and_a_backend_that_was_not_asked_are_reasons_to_tune_anew(tmp_path: Path, log: list[str]) -> None:
    tuner_of(tmp_path, fast("a", refuses="no")).tune([PROBLEM], benches(log))
    log.clear()
    tuner_of(tmp_path, fast("a")).tune([PROBLEM], benches(log))
    assert log == [], "that a declined and why is known"
    tuner_of(tmp_path, fast("a")).tune([PROBLEM], benches(log), again=True)
    assert log[0] == "bench 5x128x256"
    log.clear()
    (tuned,) = tuner_of(tmp_path, fast("a"), fast("b", 20.0)).tune([PROBLEM], benches(log))
    assert tuned.decision is not None and tuned.decision.winner == "b"
    log.clear()
    (tuned,) = tuner_of(tmp_path, fast("a")).tune([PROBLEM], benches(log))
    assert tuned.cached
    assert tuned.decision is not None and tuned.decision.serving(["stock", "a"]) == "stock", "b may not run here"


@pytest.mark.parametrize(
    "machine",
    [
        dataclasses.replace(H200, libraries={**H200.libraries, "sgl-deep-gemm": "0.1.6"}),
        dataclasses.replace(H200, libraries={**H200.libraries, "another": "1"}),
        dataclasses.replace(H200, sm=100),
        dataclasses.replace(H200, device="NVIDIA H100, 132 multiprocessors"),
    ],
    ids=["version", "library", "architecture", "device"],
)
def test_another_version_or_device_knows_nothing_of_it(tmp_path: Path, log: list[str], machine) -> None:
    tuner_of(tmp_path, fast()).tune([PROBLEM], benches(log))
    log.clear()
    (tuned,) = tuner_of(tmp_path, fast(), machine=machine).tune([PROBLEM], benches(log))
    assert not tuned.cached and log


def test_profiles_and_accuracy_classes_are_apart(tmp_path: Path, log: list[str]) -> None:
    tuner_of(tmp_path, fast()).tune([PROBLEM], benches(log))
    for change in ({"profile": "decode"}, {"parity": "ulp"}):
        other = dataclasses.replace(tuner_of(tmp_path, fast()), **change)
        assert not other.tune([PROBLEM], benches(log))[0].cached


@pytest.mark.parametrize("parity", ["bitwise", "ulp"])
def test_the_last_place_counts_unless_the_policy_says_ulp(tmp_path: Path, monkeypatch, parity: str) -> None:
    seen = []
    monkeypatch.setattr(gemm_tuner, "compete", lambda *args, **how: seen.append(how["max_ulp"]) or hold(fast()))
    tuner_of(tmp_path, fast(), parity=parity, max_ulp=1).tune([PROBLEM], benches([]))
    assert seen == [1 if parity == "ulp" else 0]


def test_a_problem_that_cannot_be_tuned_stays_with_the_first_and_the_others_go_on(
    tmp_path: Path, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    failed, tuned = tuner_of(tmp_path, fast()).tune([PROBLEM, OTHER], benches(log, broken=[PROBLEM]))
    assert failed.decision is None and "no room" in failed.failed
    assert tuned.decision is not None and tuned.decision.winner == "fast"
    assert "5x128x256 is not tuned" in caplog.text
    (again, cached) = tuner_of(tmp_path, fast()).tune([PROBLEM, OTHER], benches(log))
    assert (again.cached, cached.cached) == (False, True), "a failure is not remembered"


def test_behind_the_gate_nothing_is_set_up_and_nothing_remembered(tmp_path: Path, log: list[str]) -> None:
    (tuned,) = tuner_of(tmp_path).tune([PROBLEM], benches(log))
    assert log == [] and not list(tmp_path.iterdir())
    assert tuned.decision is not None and (tuned.decision.winner, tuned.decision.verdict) == ("stock", GATED)


def test_what_was_decided_before_a_crash_is_kept(tmp_path: Path, log: list[str]) -> None:
    def interrupted(tuned) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner_of(tmp_path, fast()).tune([PROBLEM, OTHER], benches(log), on_tuned=interrupted)
    first, second = tuner_of(tmp_path, fast()).tune([PROBLEM, OTHER], benches(log))
    assert (first.cached, second.cached) == (True, False)


# --- the whole pass -------------------------------------------------------------------------------------------------

FASTER, SLOWER = Verdict(True, "the whole pass is faster"), Verdict(False, "not installed: it is not")


def installed(tuner: Tuner) -> dict[str, bool | None]:
    known = tuner.cache.read(H200, "denoiser", "bitwise")
    return {str(problem): decision.installed for problem, decision in known.items()}


@pytest.mark.parametrize("verdict", [FASTER, SLOWER])
def test_a_set_is_installed_as_a_whole_or_not_at_all(tmp_path: Path, log: list[str], verdict: Verdict) -> None:
    tuner = tuner_of(tmp_path, fast())
    tuned = tuner.tune([PROBLEM, OTHER], benches(log))
    assert tuner.undecided(tuned, [PROBLEM])
    tuned = tuner.install(tuned, {(PROBLEM, OTHER): verdict})
    assert installed(tuner) == {"5x128x256": verdict.installed, "3x256x128": verdict.installed}
    for one in tuned:
        assert one.decision is not None and one.decision.verdict == verdict.why
        assert one.decision.serving(["stock", "fast"]) == ("fast" if verdict.installed else "stock")
    assert not tuner.undecided(tuned, [PROBLEM, OTHER]), "a verdict is remembered, whatever it is"


def test_a_winner_of_two_passes_must_win_in_both(tmp_path: Path, log: list[str]) -> None:
    tuner = tuner_of(tmp_path, fast())
    tuned = tuner.tune([PROBLEM, OTHER], benches(log))
    tuned = tuner.install(tuned, {(PROBLEM,): FASTER, (PROBLEM, OTHER): SLOWER})
    assert installed(tuner) == {"5x128x256": False, "3x256x128": False}
    tuner.install(tuned, {(PROBLEM,): FASTER, (OTHER,): FASTER})
    assert installed(tuner) == {"5x128x256": True, "3x256x128": True}


def test_where_the_first_stays_there_is_nothing_to_install(tmp_path: Path, log: list[str]) -> None:
    tuner = tuner_of(tmp_path, fast(us=200.0))
    tuned = tuner.tune([PROBLEM], benches(log))
    assert not tuner.undecided(tuned, [PROBLEM]) and tuner.winners(tuned) == {}
    assert tuner.install(tuned, {(PROBLEM,): FASTER}) == tuned


def test_a_pass_must_be_faster_by_more_than_its_own_noise() -> None:
    quiet = PassTimes(spread(100.0, rounds=9), spread(100.0, rounds=9), spread(99.0, rounds=9))
    assert judge(quiet) == Verdict(True, judge(quiet).why, 100.0, 99.0, 0.0)
    noisy = quiet._replace(again=spread(102.0, rounds=9))
    assert not judge(noisy).installed and judge(noisy).why.startswith("not installed")
    assert not judge(quiet._replace(winners=spread(100.0, rounds=9))).installed
    assert not judge(quiet._replace(winners=spread(103.0, rounds=9))).installed


# --- decisions as text ----------------------------------------------------------------------------------------------


def test_a_decision_comes_back_from_json_as_it_was() -> None:
    decision = hold(fast(), fast("wrong", ulps=1), fast("shy", refuses="no"))
    assert Decision.from_json(PROBLEM, decision.as_json()) == decision


@pytest.mark.parametrize(
    "change",
    [
        {"winner": "somebody else"},
        {"winner": None},
        {"ratio": "fast"},
        {"ratio": float("nan")},
        {"installed": "yes"},
        {"declined": []},
        {"unknown": 1},
    ],
)
def test_what_is_no_decision_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="no decision"):
        Decision.from_json(PROBLEM, hold(fast()).as_json() | change)
