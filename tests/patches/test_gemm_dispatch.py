"""GEMMs sent to the backend that was tuned for them: at SGLang's own site and at ours, on a CPU. DeepGEMM, which
needs a GPU, is stood in for by the reference; all that lies around it in SGLang is SGLang's own."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gemm_contest import H200, OTHER, PROBLEM, FakeBackend
from sglang_fastpath.kernels import block_fp8_gemm
from sglang_fastpath.kernels.block_fp8_linear import block_fp8_matmul, to_tma_aligned
from sglang_fastpath.kernels.fused_kernels import Quantized
from sglang_fastpath.patches import gemm_dispatch
from sglang_fastpath.patches.gemm_dispatch import NOT_TUNED, NOTHING_TUNED
from stock_chains import assert_same_bytes
from torch import Tensor

from sglang_fastpath import contracts, envs, gemm_choices, plugin
from sglang_fastpath.environment import Environment
from sglang_fastpath.features import BY_ID
from sglang_fastpath.gemm_bench import Inputs, draw
from sglang_fastpath.gemm_choices import FEATURE, Choices
from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Decision, Tuner
from sglang_fastpath.plan import Plan, State, make_plan
from sglang_fastpath.tuning_cache import TuningCache

A_GPU = Environment("NVIDIA H200", 90, "13.0", "/usr/local/cuda/bin/nvcc", True, {})


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that DeepGEMM was given, by SGLang or by us."""
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils, entrypoint

    given: list[Problem] = []

    def fp8_gemm_nt(lhs: Any, rhs: Any, out: Tensor) -> None:
        given.append(Problem.of(lhs, rhs, out))
        out.copy_(block_fp8_matmul(*lhs, *rhs, out.dtype))

    monkeypatch.setattr(entrypoint, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt), raising=False)
    monkeypatch.setattr(compile_utils, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE", False)
    monkeypatch.setattr(block_fp8_gemm, "block_fp8_matmul", lambda *args: _through(fp8_gemm_nt, *args))
    return given


def _through(
    gemm: Callable[..., None], q: Tensor, scale: Tensor, weight: Tensor, weights: Tensor, dtype: Any
) -> Tensor:
    out = q.new_empty(q.shape[0], weight.shape[0], dtype=dtype)
    gemm((q, scale), (weight, weights), out)
    return out


def plan_with(choices: Choices | None, **settings: Any) -> Plan:
    made = make_plan(
        envs.Settings(enabled=True, switches={FEATURE: True}, **settings),
        contracts.installed_release(),
        A_GPU,
        [BY_ID[FEATURE]],
    )
    assert made.records[FEATURE].state is State.ACTIVE
    if choices is not None:
        gemm_dispatch.serve(made, choices)
    return made


def at_stocks_site(inputs: Inputs) -> None:
    from sglang.srt.layers import deep_gemm_wrapper

    deep_gemm_wrapper.gemm_nt_f8f8bf16(inputs.lhs, inputs.rhs, inputs.out)


def at_ours(inputs: Inputs) -> None:
    (q, scale), rhs = inputs.lhs, inputs.rhs
    inputs.out.copy_(block_fp8_gemm.gemm(Quantized(q, scale, -(-len(q) // 4) * 4), *rhs))


SITES = [at_stocks_site, at_ours]


def expected(inputs: Inputs) -> Tensor:
    return block_fp8_matmul(*inputs.lhs, *inputs.rhs, torch.bfloat16)


@pytest.fixture
def inputs() -> Iterator[Inputs]:
    drawn = draw(PROBLEM, 0, "cpu")
    yield drawn._replace(out=torch.full_like(drawn.out, torch.nan))


@pytest.mark.parametrize("site", SITES)
def test_the_winner_runs_once_it_has_given_the_firsts_bytes(site, inputs: Inputs, deep_gemm: list[Problem]) -> None:
    winner = FakeBackend("winner")
    made = plan_with(Choices({PROBLEM: winner}))
    plugin.apply(made)
    for call in range(1, 4):
        inputs.out.fill_(torch.nan)
        site(inputs)
        assert_same_bytes(inputs.out, expected(inputs))
        assert len(winner.runs) == call
    assert deep_gemm == [PROBLEM], "the check of the first call"
    record = made.records[FEATURE]
    assert (record.hits, record.fallbacks) == (3, {})
    assert [(v["signature"], v["verdict"]) for v in made.guard.verdicts] == [("winner for 5x128x256", "admitted")]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (Choices(), NOTHING_TUNED),
        (Choices({OTHER: FakeBackend("winner")}), NOT_TUNED),
        (
            Choices({}, {PROBLEM: "tuned: the first backend is the fastest"}),
            "tuned: the first backend is the fastest",
        ),
    ],
)
def test_a_miss_runs_the_first(site, choices: Choices, reason: str, inputs: Inputs, deep_gemm: list[Problem]) -> None:
    made = plan_with(choices)
    plugin.apply(made)
    for _ in range(2):
        site(inputs)
    assert_same_bytes(inputs.out, expected(inputs))
    assert deep_gemm == [PROBLEM, PROBLEM]
    assert made.records[FEATURE].fallbacks == {reason: 2}
    assert made.observed(made.records[FEATURE]) == (State.NEVER_HIT, reason)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(
    "bad", [FakeBackend("winner", ulps=1), FakeBackend("winner", raises=RuntimeError("no kernel"))]
)
def test_one_with_other_bytes_or_none_here_is_left_for_good(
    site, bad: FakeBackend, inputs: Inputs, deep_gemm: list[Problem], caplog: pytest.LogCaptureFixture
) -> None:
    bad = dataclasses.replace(bad, runs=[])
    made = plan_with(Choices({PROBLEM: bad}))
    plugin.apply(made)
    for _ in range(3):
        site(inputs)
        assert_same_bytes(inputs.out, expected(inputs))
    assert len(bad.runs) == 1
    assert len(deep_gemm) == 3
    assert made.observed(made.records[FEATURE])[0] is State.PARITY_FAILED
    assert caplog.text.count("parity failed") == 1


@pytest.mark.parametrize("site", SITES)
def test_a_backend_that_breaks_later_is_answered_for_by_the_first(
    site, inputs: Inputs, deep_gemm: list[Problem]
) -> None:
    winner = FakeBackend("winner")
    made = plan_with(Choices({PROBLEM: winner}))
    plugin.apply(made)
    site(inputs)
    winner.raises = RuntimeError("an illegal instruction")
    for _ in range(2):
        inputs.out.fill_(torch.nan)
        site(inputs)
        assert_same_bytes(inputs.out, expected(inputs))
    assert made.records[FEATURE].hits == 1
    assert made.records[FEATURE].fallbacks == {"left to the first backend by the guard": 2}


@pytest.mark.parametrize(("guard", "firsts"), [("off", 0), ("once", 1), ("sample:2", 2), ("always", 4)])
def test_the_guards_policy_says_how_often_both_run(
    guard: str, firsts: int, inputs: Inputs, deep_gemm: list[Problem]
) -> None:
    made = plan_with(Choices({PROBLEM: FakeBackend("winner")}), guard=guard)
    plugin.apply(made)
    for _ in range(4):
        inputs.out.fill_(torch.nan)
        at_stocks_site(inputs)
        assert_same_bytes(inputs.out, expected(inputs))
    assert len(deep_gemm) == firsts
    assert made.records[FEATURE].hits == 4


def test_another_layout_or_alignment_of_the_same_shape_is_another_problem(
    inputs: Inputs, deep_gemm: list[Problem]
) -> None:
    winner = FakeBackend("winner")
    made = plan_with(Choices({PROBLEM: winner}))
    plugin.apply(made)
    at_stocks_site(inputs)
    (q, scale), out = inputs.lhs, inputs.out
    joint = torch.cat([torch.zeros(8, 2), scale]).t().contiguous().t()[8:]
    odd = torch.empty(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape)
    for other in (
        inputs._replace(lhs=(q, scale.contiguous())),
        inputs._replace(lhs=(q, joint)),
        inputs._replace(out=odd),
    ):
        at_stocks_site(other)
        assert_same_bytes(other.out, expected(inputs))
    assert len(winner.runs) == 1
    assert made.records[FEATURE].fallbacks == {NOT_TUNED: 3}
    at_stocks_site(inputs)
    assert len(winner.runs) == 2


def test_what_is_asked_for_in_another_way_is_the_firsts(inputs: Inputs, deep_gemm: list[Problem]) -> None:
    """From 0.5.22 SGLang's function takes a recipe of the scales, None for the usual one."""
    made = plan_with(Choices({PROBLEM: FakeBackend("winner")}))
    asked: list[Any] = []

    def newer(lhs: Any, rhs: Any, out: Tensor, recipe: Any = None) -> None:
        asked.append(recipe)
        out.copy_(block_fp8_matmul(*lhs, *rhs, out.dtype))

    wraps = gemm_dispatch.wraps(made.records, made)
    gemm = next(iter(wraps.values()))(newer)
    gemm(*inputs, recipe=(1, 1, 128))
    gemm(*inputs, (1, 1, 128))
    assert (asked, made.records[FEATURE].hits) == ([(1, 1, 128)] * 2, 0)
    gemm(*inputs, recipe=None)
    assert (asked[2:], made.records[FEATURE].hits) == ([None], 1)
    assert_same_bytes(inputs.out, expected(inputs))


@pytest.mark.parametrize("site", SITES)
def test_no_rows_are_no_gemm(site, deep_gemm: list[Problem]) -> None:
    (q, scale), rhs, out = draw(PROBLEM, 0, "cpu")
    made = plan_with(Choices({PROBLEM: FakeBackend("winner")}))
    plugin.apply(made)
    site(Inputs((q[:0], to_tma_aligned(scale[:0])), rhs, out[:0]))
    assert made.records[FEATURE].hits == 0


def test_while_torch_compile_traces_it_is_the_firsts(inputs: Inputs, monkeypatch) -> None:
    made = plan_with(Choices({PROBLEM: FakeBackend("winner")}))
    calls: list[int] = []
    gemm = made.kept(gemm_dispatch.__name__, object).wrap(lambda *_: calls.append(1))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    gemm(*inputs)
    assert calls == [1]
    assert not made.records[FEATURE].hits and not made.records[FEATURE].fallbacks


def test_both_sites_come_back(inputs: Inputs, deep_gemm: list[Problem]) -> None:
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.deep_gemm_wrapper import entrypoint

    before = entrypoint.gemm_nt_f8f8bf16, deep_gemm_wrapper.gemm_nt_f8f8bf16, block_fp8_gemm.fp8_gemm_nt
    plugin.apply(plan_with(Choices({PROBLEM: FakeBackend("winner")})))
    during = entrypoint.gemm_nt_f8f8bf16, deep_gemm_wrapper.gemm_nt_f8f8bf16, block_fp8_gemm.fp8_gemm_nt
    assert during[0] is during[1]
    assert all(ours is not stock for ours, stock in zip(during, before, strict=True))
    plugin.deactivate()
    after = entrypoint.gemm_nt_f8f8bf16, deep_gemm_wrapper.gemm_nt_f8f8bf16, block_fp8_gemm.fp8_gemm_nt
    assert all(ours is stock for ours, stock in zip(after, before, strict=True))


def test_choices_outlive_a_revert_and_are_asked_for_once(
    inputs: Inputs, deep_gemm: list[Problem], monkeypatch
) -> None:
    asked: list[str] = []
    winner = FakeBackend("winner")
    monkeypatch.delitem(sys.modules, gemm_dispatch._DIFFUSION, raising=False)
    monkeypatch.setattr(
        gemm_choices, "load", lambda settings, profile: asked.append(profile) or Choices({PROBLEM: winner})
    )
    made = plan_with(None)
    for _ in range(2):
        plugin.apply(made)
        assert asked in ([], ["decode"]), "not before the first GEMM"
        at_stocks_site(inputs)
        at_ours(inputs)
        plugin.deactivate()
    assert asked == ["decode"]
    assert made.records[FEATURE].hits == 4
    assert len(deep_gemm) == 1


def test_a_process_that_serves_a_denoiser_takes_what_was_tuned_with_a_warm_cache(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, gemm_dispatch._DIFFUSION, raising=False)
    assert gemm_dispatch.profile() == "decode"
    monkeypatch.setitem(sys.modules, gemm_dispatch._DIFFUSION, SimpleNamespace())
    assert gemm_dispatch.profile() == "denoiser"


# --- choices, as the cache has them --------------------------------------------------------------------------------


def decision(m: int, winner: str, **fields: Any) -> Decision:
    return Decision(Problem(m, 128, 256), "stock", winner, 0.5, 0.0, {"stock": 2.0, winner: 1.0}, **fields)


def test_only_installed_winners_that_are_let_in_are_chosen_and_the_others_say_why(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    decisions = [
        decision(1, "winner", installed=True),
        decision(2, "winner", installed=False, verdict="not installed: the whole pass takes longer"),
        decision(3, "winner"),
        decision(4, "gated", installed=True),
        decision(5, "stock", installed=False),
    ]
    cache.write(H200, "denoiser", "bitwise", decisions)
    winner = FakeBackend("winner")
    choices = gemm_choices.of(Tuner(H200, [FakeBackend("stock"), winner], cache, "denoiser"))
    assert choices.backends == {Problem(1, 128, 256): winner}
    assert {problem.m: why for problem, why in choices.because.items()} == {
        2: "not installed: the whole pass takes longer",
        3: "the whole pass has not been timed with the winners",
        4: "the gain of gated is not recorded for this architecture (SGLANG_FASTPATH_GEMM_TUNER=all)",
        5: "tuned: the first backend is the fastest",
    }
    other = dataclasses.replace(H200, libraries={})
    assert gemm_choices.of(Tuner(other, [winner], cache, "denoiser")) == Choices()


@pytest.mark.parametrize(("all_of_them", "count"), [(False, 1), (True, 10)])
def test_the_gate_opens_by_the_variable(tmp_path: Path, monkeypatch, all_of_them: bool, count: int) -> None:
    monkeypatch.setattr(gemm_choices, "this_machine", lambda: H200)
    environment = {"XDG_CACHE_HOME": str(tmp_path), "SGLANG_FASTPATH_GEMM_TUNER": "all" if all_of_them else "1"}
    tuner = gemm_choices.make_tuner(envs.read(environment), "decode")
    assert len(tuner.backends) == count
    assert tuner.backends[0].name == "deep_gemm"
    assert tuner.cache.path.parent == tmp_path / "sglang-fastpath"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_nothing_is_chosen_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert gemm_choices.load(envs.Settings(cache_dir=tmp_path), "decode") == Choices()
    assert "no NVIDIA GPU" in caplog.text


def test_every_library_that_a_backend_names_is_part_of_the_key(monkeypatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    machine = gemm_choices.this_machine()
    assert (machine.sm, machine.device) == (90, "NVIDIA H200, 132 multiprocessors")
    wanted = {name for backend in gemm_choices.BACKENDS for name in backend.distributions}
    assert machine.libraries.keys() == wanted | {"sglang", "torch", "triton", "cuda", "driver", "nvcc"}
    assert machine.libraries["sglang"] == "0.5.17"
    assert machine.libraries["sgl-deep-gemm"][0].isdigit()
    assert "cuda_" in machine.libraries["nvcc"]
