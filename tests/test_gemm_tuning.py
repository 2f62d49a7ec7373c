"""`sglang-fastpath tune`: a workload tuned, its pass timed, installed or not, found again, shown and shipped. Times
are made up; what needs a GPU is in tests/gpu."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_contest import H200, OTHER, PROBLEM, FakeBackend, benches, spread
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from typer.testing import CliRunner

from sglang_fastpath import benchmark, cli, envs, gemm_tuning, plan, tuner_benchmark
from sglang_fastpath.denoisers import start_runtime
from sglang_fastpath.environment import Environment
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Decision, PassTimes, Tuner
from sglang_fastpath.gemm_tuning import PassError, Report, Silent, time_denoiser, tune
from sglang_fastpath.gemm_workload import Pass, Site, TuningWorkload, WorkloadError, denoiser
from sglang_fastpath.plan import Plan, make_plan
from sglang_fastpath.tuning_cache import TuningCache

THIRD = Problem(4, 128, 128)
WORKLOAD = TuningWorkload(
    "a model",
    "denoiser",
    (
        Pass("long prompt", (Site("text qkv", PROBLEM, 3), Site("image qkv", OTHER, 3)), layers=2),
        Pass("short prompt", (Site("text qkv", THIRD, 3), Site("image qkv", OTHER, 3)), layers=2),
    ),
)
FASTER = PassTimes(spread(100.0, rounds=9), spread(100.0, rounds=9), spread(90.0, rounds=9))
SLOWER = FASTER._replace(winners=spread(101.0, rounds=9))
SHIFTY = FakeBackend("shifty", (10.0,), ulps=1)
SHY = FakeBackend("shy", refuses="it is for SM100, not for SM90 [/opt/it]")


class Passes:
    """Times passes as it is told, by label, and remembers with which winners."""

    def __init__(self, times: Mapping[str, PassTimes | Exception] | None = None) -> None:
        self.times = times or {}
        self.asked: dict[str, dict[Problem, str]] = {}

    def __call__(self, one: Pass, winners: Mapping[Problem, Any]) -> PassTimes:
        self.asked[one.label] = {problem: backend.name for problem, backend in winners.items()}
        times = self.times.get(one.label, FASTER)
        if isinstance(times, Exception):
            raise times
        return times


class Counting(Silent):
    def __init__(self) -> None:
        self.total = self.done = 0
        self.worked_on: list[str] = []

    def begin(self, total: int) -> None:
        self.total = total

    def working_on(self, what: str) -> None:
        self.worked_on.append(what)

    def advance(self) -> None:
        self.done += 1


@pytest.fixture
def tuner(tmp_path: Path) -> Tuner:
    backends = [FakeBackend("stock"), FakeBackend("fast", (50.0,)), SHIFTY, SHY]
    return Tuner(H200, backends, TuningCache(tmp_path), "denoiser")


def serving(report: Report) -> dict[Problem, str]:
    allowed = [backend.name for backend in report.tuner.backends]
    return {one.problem: one.decision.serving(allowed) for one in report.tuned if one.decision}


def test_the_winners_of_a_faster_pass_are_installed_and_the_next_process_finds_them(tuner: Tuner) -> None:
    log: list[str] = []
    passes, progress = Passes(), Counting()
    cold = tune(WORKLOAD, tuner, benches(log), passes, progress)
    assert passes.asked == {
        "long prompt": {PROBLEM: "fast", OTHER: "fast"},
        "short prompt": {THIRD: "fast", OTHER: "fast"},
    }
    assert serving(cold) == dict.fromkeys((PROBLEM, OTHER, THIRD), "fast")
    assert cold.timed == 5
    assert progress.total == progress.done == 5
    assert "5x128x256: shifty" in progress.worked_on and "the whole pass, long prompt" in progress.worked_on

    log.clear()
    passes.asked.clear()
    progress = Counting()
    warm = tune(WORKLOAD, tuner, benches(log), passes, progress)
    assert (log, passes.asked, warm.timed, warm.verdicts) == ([], {}, 0, {})
    assert serving(warm) == serving(cold)
    assert progress.total == progress.done == 5
    assert warm.seconds < 2


def test_a_pass_that_is_not_faster_installs_nothing_of_its_own_and_says_so(tuner: Tuner) -> None:
    report = tune(WORKLOAD, tuner, benches([]), Passes({"short prompt": SLOWER}))
    assert serving(report) == {PROBLEM: "fast", OTHER: "stock", THIRD: "stock"}
    shown = {(shape["m"], shape["verdict"][:14]) for shape in report.as_json()["shapes"]}
    assert shown == {(5, "the whole pass"), (3, "not installed:"), (4, "not installed:")}
    again = tune(WORKLOAD, tuner, benches([]), Passes())
    assert (again.timed, serving(again)) == (0, serving(report)), "nor is it tried again"
    fresh = tune(WORKLOAD, tuner, benches([]), Passes(), again=True)
    assert serving(fresh) == dict.fromkeys((PROBLEM, OTHER, THIRD), "fast"), "unless that is asked for"


@pytest.mark.parametrize("error", [PassError("with the winners the latents are not stock's"), KeyError("x"), None])
def test_a_pass_that_cannot_be_timed_installs_nothing(tuner: Tuner, error: Exception | None) -> None:
    passes = Passes({"long prompt": error, "short prompt": error}) if error else None
    report = tune(WORKLOAD, tuner, benches([]), passes)
    assert set(serving(report).values()) == {"stock"}
    if error:
        assert all(verdict.why.startswith("not installed: ") for verdict in report.verdicts.values())
        return
    log: list[str] = []
    later = tune(WORKLOAD, tuner, benches(log), Passes())
    assert (log, later.timed) == ([], 2), "what has been timed is not timed again"
    assert set(serving(later).values()) == {"fast"}


def test_without_winners_no_pass_is_timed(tuner: Tuner) -> None:
    slow = FakeBackend("fast", (150.0,))
    stays = Tuner(H200, [FakeBackend("stock"), slow], tuner.cache, "denoiser")
    passes = Passes()
    report = tune(WORKLOAD, stays, benches([]), passes)
    assert (passes.asked, report.timed) == ({}, 3)


def test_a_shape_that_failed_is_in_the_report_and_in_no_pass(tuner: Tuner) -> None:
    passes = Passes()
    report = tune(WORKLOAD, tuner, benches([], broken=[OTHER]), passes)
    assert passes.asked["long prompt"] == {PROBLEM: "fast"}
    failed = next(shape for shape in report.as_json()["shapes"] if shape["m"] == 3)
    assert "no room" in failed["failed"] and "winner" not in failed


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_denoisers_pass_is_not_timed_where_the_tuner_cannot_run() -> None:
    with pytest.raises(PassError, match="gemm_tuner is unsupported here: no NVIDIA GPU"):
        time_denoiser(benchmark.Workload(), {PROBLEM: FakeBackend("fast")})


@pytest.fixture
def emulated_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plans of a Hopper machine on a CPU: the fused forwards, and the tuner at their GEMMs."""
    hopper = Environment("NVIDIA H200", 90, "13.0", "/usr/local/cuda/bin/nvcc", True, {})
    catalogue = [feature for feature in CATALOGUE if feature.id != "step_graph"]

    def make_emulated_plan(settings: envs.Settings, release: Any) -> Plan:
        return make_plan(dataclasses.replace(settings, emulate=True), release, hopper, catalogue)

    monkeypatch.setattr(gemm_tuning, "make_plan", make_emulated_plan)
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    revert()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does it with real kernels")
@pytest.mark.parametrize("ulps", [0, 1])
def test_a_denoisers_pass_is_timed_with_and_without_the_winners(emulated_hopper: None, ulps: int) -> None:
    small = benchmark.Workload("qwen-image", {"layers": 3, "heads": 2}, (4, 4), 130, "torch_sdpa", "cpu")
    problems = denoiser("tiny", "qwen-image", small.arch, "64x64", [130]).problems
    winner = FakeBackend("winner", ulps=ulps)
    winners = dict.fromkeys(problems, winner)
    if ulps:
        with pytest.raises(PassError, match="the latents are not stock's"):
            time_denoiser(small, winners, layers=1, steps=2, rounds=1)
        return
    times = time_denoiser(small, winners, layers=1, steps=4, rounds=2)
    assert [len(series) for series in times] == [6, 6, 6]
    assert min(min(series) for series in times) > 0
    assert {problem.m for problem in winner.runs} == {130, 16}
    assert plan.current() is None


# --- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str, expect: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == expect, result.output
    return result


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return TuningCache(tmp_path / "sglang-fastpath")


def test_a_profile_is_shipped_without_a_gpu(cache: TuningCache, tmp_path: Path, monkeypatch) -> None:
    decision = Decision(PROBLEM, "a", "b", 0.5, 0.0, {"b": 1.0}, installed=True)
    cache.write(H200, "denoiser", "bitwise", [decision])
    profile = str(tmp_path / "profile.json")
    assert "1 decisions written to" in run("tune", "--export", profile).stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "image"))
    assert "1 decisions imported from" in run("tune", "--import", profile).stderr
    there = TuningCache(tmp_path / "image" / "sglang-fastpath")
    assert there.read(H200, "denoiser", "bitwise") == {PROBLEM: decision}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "tune takes --model (qwen-image, flux2, qwen3-8b), --import or --export"),
        (["--model", "qwen"], "--model qwen: no such model or checkpoint folder"),
        (["--model", "flux2", "--resolution", "big"], "--resolution 'big'"),
        (["--import", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_tuned_is_an_error(cache: TuningCache, arguments: list[str], complaint: str) -> None:
    result = run("tune", *arguments, expect=1)
    assert f"sglang-fastpath: {complaint}" in result.output or complaint in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("command", [["tune", "--model", "qwen-image"], ["bench", "tuner"]])
def test_without_a_gpu_it_says_so(cache: TuningCache, command: list[str]) -> None:
    assert "needs an NVIDIA GPU" in run(*command, expect=1).output


def test_the_table_has_a_row_a_shape_and_explains_who_declined(tuner: Tuner, monkeypatch, capsys) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=250))
    report = tune(WORKLOAD, tuner, benches([], broken=[THIRD]), Passes()).as_json()
    cli.show_tuning(report, explain=False)
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "5x128x256" in line).split()
    assert row[:5] == ["5x128x256", "text", "qkv", "stock", "fast"]
    assert "0.500" in row and row[-1] == "yes"
    assert "no room" in shown and "long prompt: 100.000 -> 90.000 ms" in shown
    assert "--explain says why" in shown and "SM100" not in shown
    cli.show_tuning(report, explain=True)
    shown = capsys.readouterr().out
    explained = [line.split(maxsplit=1) for line in shown.splitlines() if line.strip().startswith(("shifty", "shy"))]
    assert {name for name, _ in explained} == {"shifty", "shy"}
    assert "declined: it is for SM100, not for SM90 [/opt/it]" in shown and "excluded: " in shown


def test_the_table_says_what_is_not_installed_what_is_cached_and_that_the_gate_is_shut(
    tuner: Tuner, monkeypatch, capsys
) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=250))
    tune(WORKLOAD, tuner, benches([]), Passes({"long prompt": SLOWER}))
    cli.show_tuning(tune(WORKLOAD, tuner, benches([]), Passes()).as_json(), explain=False)
    shown = capsys.readouterr().out
    assert shown.count("cached") == 3
    assert shown.count("not installed: the whole pass takes 1.0100") == 2
    gated = Tuner(H200, tuner.backends[:1], TuningCache(Path("/nonexistent")), "denoiser")
    cli.show_tuning(tune(WORKLOAD, gated, benches([]), Passes()).as_json(), explain=True)
    shown = capsys.readouterr().out
    assert "SGLANG_FASTPATH_GEMM_TUNER=all lets in every backend" in shown
    assert shown.count("no gain of another backend has been measured") == 3


def test_the_report_is_json(tuner: Tuner) -> None:
    report = tune(WORKLOAD, tuner, benches([]), Passes())
    assert json.loads(json.dumps(report.as_json()))["pass_effect"]["long prompt"]["installed"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_second_process_that_fails_is_recorded_with_its_reason(tmp_path: Path) -> None:
    import os

    found = tuner_benchmark.second_process("qwen-image", {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, True)
    assert "needs an NVIDIA GPU" in found["failed"]


def test_only_hopper_is_tuned_so_far(tuner: Tuner, monkeypatch) -> None:
    blackwell = dataclasses.replace(tuner, machine=dataclasses.replace(H200, sm=100, device="NVIDIA B200"))
    monkeypatch.setattr(gemm_tuning, "make_tuner", lambda *_: blackwell)
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    with pytest.raises(WorkloadError, match="NVIDIA B200, SM100"):
        gemm_tuning.tune_on_gpu(WORKLOAD, envs.Settings(), Silent())
