"""The backends of the block-FP8 GEMM: who says to be able to run what. What they compute takes a GPU: tests/gpu."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import block_fp8_gemm
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group, to_tma_aligned
from sglang_fastpath.kernels.gemm_backends import BACKENDS

from sglang_fastpath.gemm_bench import UnsupportedProblemError, draw
from sglang_fastpath.gemm_problem import Problem

IMAGE = Problem(4096, 3072, 3072)
BY_NAME = {backend.name: backend for backend in BACKENDS}


def candidates(problem: Problem, sm: int) -> list[str]:
    return [backend.name for backend in BACKENDS if backend.can_use(problem, sm) is None]


def test_the_first_is_the_one_that_stock_dispatches_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization import fp8_utils

    monkeypatch.setattr(fp8_utils.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    assert fp8_utils.dispatch_w8a8_block_fp8_linear() is fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    assert BACKENDS[0].name == "deep_gemm"
    assert len(BY_NAME) == len(BACKENDS), "names are keys in the cache"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU SGLang has its CUTLASS kernel, or says why not")
@pytest.mark.parametrize(
    ("problem", "sm", "names"),
    [
        (IMAGE, 90, ["deep_gemm", "flashinfer_deepgemm", "cublaslt", "triton"]),
        (Problem(257, 3072, 3072), 90, ["deep_gemm", "flashinfer_deepgemm", "triton"]),
        (Problem(4096, 3072, 640), 90, ["deep_gemm", "flashinfer_deepgemm", "triton"]),
        (Problem(64, 576, 512), 90, ["deep_gemm", "flashinfer_deepgemm", "triton"]),
        (Problem(64, 608, 512), 90, ["triton"]),
        (IMAGE, 100, ["deep_gemm", "triton", "flashinfer_trtllm", "flashinfer_cutlass"]),
        (IMAGE, 120, ["deep_gemm", "triton", "flashinfer_cutlass"]),
    ],
)
def test_who_can_run_block_fp8_where(problem: Problem, sm: int, names: Sequence[str]) -> None:
    assert candidates(problem, sm) == names


@pytest.mark.parametrize(
    "problem",
    [
        Problem(4096, 3072, 3072, dtypes=("float8_e4m3fn", "int32", "float8_e4m3fn", "int32")),
        Problem(4096, 3072, 3072, dtypes=("float8_e5m2", "float32", "float8_e4m3fn", "float32")),
        Problem(4096, 3072, 3072, granularity=("1x32", "128x128")),
        Problem(4096, 3072, 3072, out="float16"),
        Problem(4096, 3072, 3072, alignment=8),
        Problem(4096, 3072, 3072, layout=("6144x1", "mn", "k", "k", "k")),
        Problem(4096, 3072, 3072, layout=("k", "mn", "k", "k", "6144x1")),
    ],
    ids=str,
)
def test_what_is_not_block_fp8_as_hopper_has_it_is_left_to_deepgemm(problem: Problem) -> None:
    assert candidates(problem, 90) == ["deep_gemm"]
    with pytest.raises(UnsupportedProblemError):
        draw(problem, 0, "cpu")


@pytest.mark.parametrize(
    "layout", [("k", "k", "k", "k", "k"), ("k", "1x8192", "k", "k", "k"), ("k", "mn", "k", "mn", "k")]
)
def test_scales_in_another_layout_are_taken_by_those_alone_that_read_strides(layout: tuple[str, ...]) -> None:
    assert candidates(Problem(4096, 3072, 3072, layout=layout), 90) == ["deep_gemm", "triton"]


def test_every_refusal_says_why() -> None:
    for sm in (80, 90, 100, 103, 120):
        for backend in BACKENDS:
            why = backend.can_use(Problem(5, 200, 200), sm)
            assert why is not None and len(why) > 10, f"{backend.name} on SM{sm}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("cutlass", "triton", "deep_gemm")])
def test_the_installed_library_takes_these_arguments_and_misses_only_the_gpu(name: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=r"must be a cuda device|from the 'CPU' backend"):
        BY_NAME[name].run(*draw(Problem(8, 128, 512), 0, "cpu"))


# --- problems and their inputs ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    m=st.sampled_from([1, 3, 4, 5, 127, 200]),
    n=st.sampled_from([64, 128, 576, 1024]),
    k=st.sampled_from([128, 256, 640]),
    seed=st.integers(0, 3),
)
def test_the_inputs_drawn_for_a_problem_pose_it(m: int, n: int, k: int, seed: int) -> None:
    problem = Problem(m, n, k)
    lhs, rhs, out = draw(problem, seed, "cpu")
    assert Problem.of(lhs, rhs, out) == problem
    assert Problem.parse(problem.key) == problem
    block_fp8_gemm.fp8_gemm_nt(lhs, rhs, out)
    assert out.isfinite().all() == (seed % 2 == 0)
    if seed % 2 == 0:
        assert 0.1 < out.float().std() < 1e4


@settings(deadline=None)
@given(m=st.integers(1, 40), blocks=st.integers(1, 5))
def test_stocks_quantizer_lays_out_scales_as_problems_say(m: int, blocks: int) -> None:
    q, scale = quantize_per_token_group(torch.randn(m, 128 * blocks).bfloat16())
    _, rhs, out = draw(Problem(m, 256, 128 * blocks), 0, "cpu")
    assert Problem.of((q, to_tma_aligned(scale)), rhs, out) == Problem(m, 256, 128 * blocks)
    assert Problem.of((q, scale), rhs, out).layout[1] == "k", "row-major, as its Triton and SM100 paths have it"


def test_what_distinguishes_two_problems_distinguishes_their_tensors() -> None:
    (q, scale), (weight, weight_scale), out = draw(Problem(8, 256, 256), 0, "cpu")
    plain = Problem(8, 256, 256)

    def posed(**changed: torch.Tensor) -> Problem:
        tensors = {"q": q, "scale": scale, "weight": weight, "weight_scale": weight_scale, "out": out} | changed
        return Problem.of(
            (tensors["q"], tensors["scale"]), (tensors["weight"], tensors["weight_scale"]), tensors["out"]
        )

    assert posed() == plain
    wide = torch.empty(8, 512).to(q.dtype)[:, :256]
    assert posed(q=wide).layout[0] == "512x1"
    assert posed(scale=scale.contiguous()).layout[1] == "k"
    assert posed(scale=torch.empty(2, 12).t()[:8]).layout[1] == "1x12"
    assert posed(weight_scale=torch.empty(2, 2).t()).layout[3] == "1x2"
    assert posed(out=torch.empty(8 * 256 + 1, dtype=out.dtype)[1:].view(8, 256)).alignment == 2
    assert posed(out=out.half()).out == "float16"
    assert posed(scale=torch.empty(8, 1, dtype=torch.int32)).dtypes[1] == "int32"
    assert posed(scale=torch.empty(8, 8)).granularity == ("1x32", "128x128")
    others = {posed(q=wide), posed(scale=scale.contiguous()), posed(out=out.half()), plain}
    assert len({problem.key for problem in others}) == 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"m": 1}', Problem(0, 1, 1).key, Problem(1, 1, 1).key + " "])
def test_what_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no GEMM problem"):
        Problem.parse(text)


def test_a_problem_in_words_names_what_is_out_of_the_ordinary() -> None:
    assert str(Problem(5, 128, 256)) == "5x128x256"
    assert str(Problem(5, 128, 256, alignment=8, out="float16")) == "5x128x256 alignment 8 out float16"
