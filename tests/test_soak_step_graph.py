"""The soak of `step_graph`, on a CPU and small: it shows what it says, and says what does not hold."""

import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rerun_recorder import RerunRecorder
from step_graphs import REUSING, on_a_cpu, prepare

from sglang_fastpath.benchmark_variants import Variant
from sglang_fastpath.denoisers import build_qwen_image

PATH = Path(__file__).parents[1] / "scripts/soak_step_graph.py"
RUNS = (
    {"image_hw": (3, 5), "text_tokens": 6, "negative_tokens": 4},
    {"image_hw": (2, 4), "text_tokens": 5, "negative_tokens": 4},
    {"image_hw": (3, 5), "text_tokens": 6, "negative_tokens": 4},
)
STEPS = 5
PASSES = 80
PAIRS = [((2, 3), 3), ((2, 3), 4), ((2, 2), 3), ((3, 1), 5)]


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    with on_a_cpu():
        yield


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("soak_step_graph", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SETTLED_AFTER", 20)
    monkeypatch.setattr(module, "CHECK_EVERY", 3)
    return module


@pytest.fixture(scope="module")
def denoiser() -> Any:
    return build_qwen_image(layers=1)


class StaleRecorder(RerunRecorder):
    """Its recordings run once; every replay after that leaves the results of the first."""

    def record(self, work: Callable[[], Any]) -> Any:
        recording, result = super().record(work)
        replay = recording.replay

        def once() -> None:
            replay()
            recording.replay = recording.spoil = lambda: None

        recording.replay = once
        return recording, result


def graph(recorder: RerunRecorder | None = None, **settings: Any) -> Variant:
    return Variant(prepare(REUSING, recorder=recorder, **settings).plan, required=["step_graph"])


def guided(script: Any, denoiser: Any, variant: Variant) -> dict[str, Any]:
    eager = Variant(prepare(("cfg_mod_cache",)).plan)
    kept: list[dict[str, Any]] = []
    found: dict[str, Any] = script.guided(denoiser, eager, variant, steps=STEPS, runs=RUNS)(kept.append)
    assert len(kept) == 3
    return found


def soak(script: Any, denoiser: Any, variant: Variant) -> dict[str, Any]:
    found: dict[str, Any] = script.soak(denoiser, variant, passes=PASSES, pairs=PAIRS)(lambda found: None)
    return found


def test_the_guided_runs(script: Any, denoiser: Any) -> None:
    found = guided(script, denoiser, graph())
    assert found["bitwise_equal"] == [True] * 3
    assert found["memory"]["fast+graph"]["graphs"] == 4, "of two lengths at two resolutions"
    assert found["hits"] + sum(found["fallbacks"].values()) == 3 * 2 * STEPS
    assert found["hits"] >= 2 * STEPS
    host = found["host_ms"]["fast+graph"]
    assert 0 < host["median"] <= host["max"]
    json.dumps(found)
    found["host_ms"]["fast+graph"]["mean"] = 1.999  # a CPU computes meanwhile
    assert list(script.unmet_by_guided(found)) == []


def test_guided_runs_that_do_not_hold(script: Any, denoiser: Any) -> None:
    found = guided(script, denoiser, graph(StaleRecorder(), guard="off"))
    assert not all(found["bitwise_equal"])
    found["host_ms"]["fast+graph"]["mean"] = 2.0
    found["memory"] = {
        "stock": {"peak_gib": 10.0, "reserved_gib": 10.0},
        "fast": {"peak_gib": 10.0, "reserved_gib": 20.0},
        "fast+graph": {"peak_gib": 10.5, "reserved_gib": 11.6, "pool_gib": 1.1, "graphs": 3},
    }
    assert [what.split(":")[0] for what in script.unmet_by_guided(found)] == [
        "latents that are not stock's",
        "a replayed pass keeps the host for 2.0 ms",
        "3 graphs alive",
        "peak_gib",
        "reserved_gib",
    ]
    found["memory"]["fast+graph"] = {"peak_gib": 10.4, "reserved_gib": 11.5, "pool_gib": 1.1, "graphs": 4}
    assert len(list(script.unmet_by_guided(found))) == 2


def test_a_soak(script: Any, denoiser: Any) -> None:
    recorder = RerunRecorder()
    found = soak(script, denoiser, graph(recorder, graphs=2))
    assert (found["passes"], found["checked"]) == (PASSES, len(range(0, PASSES, 3)))
    assert found["checked_replays"] >= 5
    assert len(found["reserved_gib"]) == 4
    assert found["hits"] + sum(found["fallbacks"].values()) == PASSES
    assert recorder.records > 2 * len(PAIRS), "graphs come and go"
    assert list(script.unmet_by_soak(found, PASSES)) == []
    json.dumps(found)


def test_a_soak_that_does_not_hold(script: Any, denoiser: Any) -> None:
    """A graph that goes on with the inputs that it was captured with: its parity was right."""
    found = soak(script, denoiser, graph(StaleRecorder(), graphs=2))
    assert found["unequal"]
    assert found["parity_failed"] == []
    found["reserved_gib"] = [1.0, 1.0, 1.001]
    found["checked_replays"] = 0
    assert [what.split(":")[0] for what in script.unmet_by_soak(found, PASSES + 1)] == [
        f"only {PASSES} passes",
        "not stock's bytes",
        "no pass that was compared with stock was a replay",
        "reserved memory grew from 1.0 to 1.001 GiB after 20 passes",
    ]


def test_every_pair_is_called_often_before_memory_is_taken_for_settled(script: Any) -> None:
    order = list(script.schedule(30, 2000))
    assert len(order) == 2000
    assert min(order[:200].count(pair) for pair in range(30)) >= script.SWEEPS
    bursts = sum(a != b for a, b in itertools.pairwise(order))
    assert 600 < bursts < 1200, "captures and replays"
    assert list(script.schedule(30, 7)) == order[:7]


def test_a_part_that_fails_leaves_what_it_knew_and_the_others_run(script: Any, tmp_path: Path) -> None:
    output = tmp_path / "new" / "soak.json"

    def failing(keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        keep({"passes": 200})
        assert json.loads(output.read_text())["first"] == {"passes": 200}, "at once"
        raise torch.OutOfMemoryError("as a GPU might")

    def fine(keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        return {"passes": 400}

    parts = {
        "first": (failing, lambda found: iter(())),
        "second": (fine, lambda found: iter(("too few",) if found["passes"] < 500 else ())),
    }
    before = {"third": {"passes": 7}, "first": {"checked": 1}, "unmet": ["first: slow", "third: too few"]}
    unmet = script.run({"model": "qwen-image", **before}, output, parts)
    written = json.loads(output.read_text())
    assert unmet == ["third: too few", "first: OutOfMemoryError: as a GPU might", "second: too few"]
    assert written["unmet"] == unmet
    assert written["third"] == before["third"], "a part that is left out keeps what was said of it"
    assert written["first"].keys() == {"passes", "failed", "seconds"}
    assert written["first"]["passes"] == 200
    assert written["first"]["failed"] == "OutOfMemoryError: as a GPU might"
    assert written["second"]["passes"] == 400
    assert written["model"] == "qwen-image"
