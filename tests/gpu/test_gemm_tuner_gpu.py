"""The GEMM tuner on a GPU: what the backends compute, whether the yardstick measures, where the winners are put to
work. On Hopper, with DeepGEMM."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_fastpath.kernels.gemm_backends import BACKENDS
from sglang_fastpath.patches import gemm_dispatch
from stock_chains import assert_same_bytes
from torch import Tensor

from sglang_fastpath import benchmark, plugin
from sglang_fastpath.benchmark_variants import Variant, only
from sglang_fastpath.gemm_bench import CudaBench, cuda_bench, draw, time_gemms
from sglang_fastpath.gemm_choices import FEATURE, Choices, this_machine
from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Tuner, compete, judge
from sglang_fastpath.gemm_tuning import PassError, time_denoiser, tune
from sglang_fastpath.gemm_workload import denoiser, llm
from sglang_fastpath.tuning_cache import TuningCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0)
        or importlib.util.find_spec("deep_gemm") is None,
        reason="needs Hopper and DeepGEMM",
    ),
]

SM = 90
DEEP_GEMM, *CHALLENGERS = BACKENDS
BY_NAME = {backend.name: backend for backend in BACKENDS}
ROWS = (1, 3, 4, 5, 31, 32, 127, 256, 4097)
TINY = {"layers": 2, "heads": 8}
WORKLOAD = denoiser("tiny", "qwen-image", TINY, "256x256", [200])  # too many text rows for a grouped launch


class Twice:
    """Another backend's bytes in twice its time."""

    distributions = ()

    def __init__(self, name: str, of: Any = DEEP_GEMM, *, spoils: bool = False) -> None:
        self.name = name
        self._of = of
        self._spoils = spoils

    def can_use(self, problem: Problem, sm: int) -> str | None:
        return None

    def run(self, lhs: Any, rhs: Any, out: Tensor) -> None:
        self._of.run(lhs, rhs, out)
        self._of.run(lhs, rhs, out)
        if self._spoils:
            out.view(torch.int16).add_(1)


class Unwritten(Twice):
    def run(self, lhs: Any, rhs: Any, out: Tensor) -> None:
        pass


@pytest.fixture
def small_workload() -> benchmark.Workload:
    small = WORKLOAD.passes[0].denoiser
    assert small is not None
    return benchmark.Workload(small.model, small.arch, small.image_hw, small.text_tokens, "torch_sdpa")


# --- what they compute ---------------------------------------------------------------------------------------------


def computed(backend: Any, problem: Problem, seed: int) -> Tensor:
    lhs, rhs, out = draw(problem, seed)
    out.fill_(torch.nan)
    backend.run(lhs, rhs, out)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), [(1536, 1024), (576, 1280)])
@pytest.mark.parametrize("seed", [0, 1])
def test_flashinfers_deepgemm_gives_deepgemms_bytes(m: int, n: int, k: int, seed: int) -> None:
    backend, problem = BY_NAME["flashinfer_deepgemm"], Problem(m, n, k)
    if why := backend.can_use(problem, SM):
        pytest.skip(why)
    assert_same_bytes(computed(backend, problem, seed), computed(DEEP_GEMM, problem, seed))


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("name", [backend.name for backend in CHALLENGERS])
def test_every_other_backend_is_close_or_says_why_not(name: str, m: int) -> None:
    """One that computes something else would be excluded all the same; this says whether it is called as it wants."""
    backend, problem = BY_NAME[name], Problem(m, 1536, 1024)
    if why := backend.can_use(problem, SM):
        assert len(why) > 10
        return
    try:
        found = computed(backend, problem, 0)
    except Exception as error:
        pytest.skip(f"{name} declines: {type(error).__name__}: {error}")
    torch.testing.assert_close(found, computed(DEEP_GEMM, problem, 0), rtol=2e-2, atol=2e-2 * 8)


# --- the yardstick --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["denoiser", "decode"])
@pytest.mark.parametrize("problem", [Problem(8, 6144, 4096), Problem(2048, 3072, 3072)], ids=str)
def test_twice_the_work_is_twice_the_time_and_loses(profile: Any, problem: Problem) -> None:
    with cuda_bench(problem, profile) as bench:
        decision = compete(problem, [Twice("stock"), DEEP_GEMM, Unwritten("unwritten")], bench, sm=SM)
    assert decision.winner == "deep_gemm"
    assert decision.ratio == pytest.approx(0.5, abs=0.2)
    assert decision.noise < 0.1
    assert "differ" in decision.excluded["unwritten"]
    with cuda_bench(problem, profile) as bench:
        same = compete(problem, [DEEP_GEMM, Twice("twice")], bench, sm=SM)
    assert same.winner == "deep_gemm"
    assert same.microseconds["twice"] > 1.3 * same.microseconds["deep_gemm"]


def test_cold_weights_take_longer_than_warm_ones() -> None:
    """A decode GEMM whose weight fits the L2 cache: it is read from there, or from memory."""
    problem = Problem(8, 6144, 4096)
    assert 2 * problem.n * problem.k < torch.cuda.get_device_properties().L2_cache_size
    took = {}
    for profile in ("denoiser", "decode"):
        bench = CudaBench(problem, profile)  # type: ignore[arg-type]
        took[profile] = min(bench.time([bench.enter(DEEP_GEMM.run)], 10)[0])
        bench.close()
    assert took["decode"] > 1.05 * took["denoiser"]


def test_what_cannot_be_captured_is_no_candidate() -> None:
    class Synchronizing(Twice):
        def run(self, lhs: Any, rhs: Any, out: Tensor) -> None:
            DEEP_GEMM.run(lhs, rhs, out)
            torch.cuda.synchronize()

    problem = Problem(256, 1536, 1024)
    with cuda_bench(problem, "denoiser") as bench:
        decision = compete(problem, [Twice("stock"), Synchronizing("eager"), DEEP_GEMM], bench, sm=SM)
    assert "eager" in decision.declined
    assert decision.winner == "deep_gemm", "and the capture that failed breaks none after it"


# --- at work --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_denoiser() -> Iterator[Any]:
    small = WORKLOAD.passes[0].denoiser
    assert small is not None
    workload = benchmark.Workload(small.model, small.arch, small.image_hw, small.text_tokens, "torch_sdpa")
    yield benchmark.build(workload, print)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("fused", [False, True], ids=["stock's site", "the fused forwards'"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_the_shapes_tuned_are_the_shapes_run(small_denoiser: Any, fused: bool, graph: bool) -> None:
    """Every GEMM of stock's blocks, and those of the fused ones that are not grouped: layout and alignment too."""
    features = ["gemm_tuner", *(["scale_prepack", "norm_quant", "qkv_epilogue", "act_quant", "bias_fold"] * fused)]
    plan = only(*features, *(["step_graph"] * graph))
    choices = {problem: Twice("twice") for problem in WORKLOAD.problems}
    gemm_dispatch.serve(plan, Choices(choices))
    size = {"image_hw": (16, 16), "text_tokens": 200}
    expected = [latents.clone() for latents in Variant().loop(small_denoiser, steps=4, **size)]
    variant = Variant(plan)
    with variant.applied():
        found = [latents.clone() for latents in variant.loop(small_denoiser, steps=4, **size)]
    assert_same_bytes(found, expected)
    record = plan.records[FEATURE]
    assert record.hits > 0
    served = {v["signature"].removeprefix("twice for ") for v in plan.guard.verdicts if v["feature"] == FEATURE}
    names = {WORKLOAD.named(problem) for problem in WORKLOAD.problems if str(problem) in served}
    if fused:
        assert {"text down", "image down"} <= names
    else:
        assert served == {str(problem) for problem in WORKLOAD.problems}
        assert not record.fallbacks
    assert plan.failed_signatures(FEATURE) == []
    plugin.deactivate()


def test_a_pass_with_equal_backends_installs_nothing_and_one_with_other_bytes_is_an_error(
    small_workload: benchmark.Workload,
) -> None:
    problems = WORKLOAD.problems
    times = time_denoiser(small_workload, dict.fromkeys(problems, Twice("twice")), steps=6, rounds=1)
    assert len(times.first) == len(times.again) == len(times.winners) == 5
    assert not judge(times).installed
    with pytest.raises(PassError, match="not stock's"):
        time_denoiser(small_workload, dict.fromkeys(problems, Twice("spoilt", spoils=True)), steps=3, rounds=1)


def test_the_gemms_of_an_llms_pass_are_timed_in_sequence() -> None:
    config = {
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
    }
    (one,) = llm("tiny", config, [8]).passes
    faster = judge(time_gemms(one, Twice("stock"), dict.fromkeys(one.problems, DEEP_GEMM), rounds=10))
    assert faster.installed and faster.first_ms is not None and faster.winners_ms is not None
    assert faster.winners_ms < 0.8 * faster.first_ms
    assert not judge(time_gemms(one, DEEP_GEMM, dict.fromkeys(one.problems, Twice("twice")), rounds=10)).installed


def test_a_second_tuning_finds_everything(tmp_path: Path) -> None:
    backends = [Twice("stock"), DEEP_GEMM, BY_NAME["triton"]]
    tuner = Tuner(this_machine(), backends, TuningCache(tmp_path), "decode", rounds=5)
    workload = llm(
        "tiny",
        {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 4},
        [1, 8],
    )

    def time_pass(one: Any, winners: Any) -> Any:
        return time_gemms(one, backends[0], winners, rounds=5)

    cold = tune(workload, tuner, lambda problem: cuda_bench(problem, "decode"), time_pass)
    assert cold.timed == len(workload.problems) + 2
    assert {one.decision.winner for one in cold.tuned if one.decision} == {"deep_gemm"}
    warm = tune(workload, tuner, lambda problem: cuda_bench(problem, "decode"), time_pass)
    assert (warm.timed, warm.seconds < 2) == (0, True)
    assert [one.decision for one in warm.tuned] == [one.decision for one in cold.tuned]
