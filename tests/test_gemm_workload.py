"""The GEMMs that a model is said to run against those that SGLang's own denoisers run, stock and with the plugin."""

import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_fastpath.kernels import block_fp8_gemm
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation

from sglang_fastpath import gemm_workload
from sglang_fastpath.benchmark_variants import Variant, only
from sglang_fastpath.denoisers import build_qwen_image, start_runtime
from sglang_fastpath.flux2_denoiser import build_flux2
from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_workload import DECODE_BATCHES, TuningWorkload, WorkloadError, denoiser, find

BUILDERS = {"qwen-image": build_qwen_image, "flux2": build_flux2}
LAYERS = 2
ARCH = {"layers": LAYERS, "heads": 2}
ARCHES = {"qwen-image": ARCH, "flux2": {**ARCH, "single_layers": LAYERS}}
FUSED = {
    "qwen-image": ("scale_prepack", "norm_quant", "qkv_epilogue", "act_quant", "bias_fold"),
    "flux2": ("scale_prepack", "act_quant"),
}
PIXELS = "64x80"
IMAGE_HW = (5, 4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than a tiny denoiser."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Counter[Any]]]:
    """What the linears ran: shapes (M, N, K) of stock's own, whole problems of the fused forwards'."""
    seen: dict[str, Counter[Any]] = {"stock": Counter(), "fused": Counter()}
    linear, gemm = fp8_cpu_emulation.w8a8_block_fp8_linear, block_fp8_gemm.fp8_gemm_nt

    @functools.wraps(linear)  # by its name the fused blocks know what they stand in for
    def stocks(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen["stock"][input.shape[:-1].numel(), *weight.shape] += 1
        return linear(input, weight, *args, **kwargs)

    def ours(lhs: Any, rhs: Any, out: torch.Tensor) -> None:
        seen["fused"][Problem.of(lhs, rhs, out)] += 1
        gemm(lhs, rhs, out)

    monkeypatch.setattr(fp8_cpu_emulation, "w8a8_block_fp8_linear", stocks)
    monkeypatch.setattr(block_fp8_gemm, "fp8_gemm_nt", ours)
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    yield seen
    revert()


def step_of(kind: str, text_tokens: int, seen: dict[str, Counter[Any]], *features: str) -> None:
    """The third step, for in those before every feature is tried alone, and blocks learn which one follows them."""
    model = BUILDERS[kind](**ARCHES[kind], fp8=True)
    variant = Variant(only(*features, emulate=True)) if features else Variant()
    with variant.applied():
        steps = iter(variant.loop(model, steps=3, image_hw=IMAGE_HW, text_tokens=text_tokens))
        next(steps), next(steps)
        for counter in seen.values():
            counter.clear()
        next(steps)


def workload_of(kind: str, text_tokens: int) -> TuningWorkload:
    return denoiser("tiny", kind, ARCHES[kind], PIXELS, [text_tokens])


@pytest.mark.parametrize("text_tokens", [7, 130])
@pytest.mark.parametrize("kind", BUILDERS)
def test_stocks_gemms_are_those_of_the_workload(kind: str, text_tokens: int, launched: dict[str, Any]) -> None:
    step_of(kind, text_tokens, launched)
    guidance = 2 if kind == "qwen-image" else 1
    (one,) = workload_of(kind, text_tokens).passes
    expected = Counter[Any]()
    for site in one.sites:
        if "merged" not in site.name:
            p = site.problem
            expected[p.m, p.n, p.k] += guidance * LAYERS * site.calls
    assert launched["stock"] == expected
    assert not launched["fused"]


@pytest.mark.parametrize("text_tokens", [7, 130])
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_fused_forwards_gemms_are_among_them_with_layout_and_alignment(
    kind: str, text_tokens: int, launched: dict[str, Any]
) -> None:
    step_of(kind, text_tokens, launched, *FUSED[kind])
    workload = workload_of(kind, text_tokens)
    # On a CPU a grouped launch is two GEMMs, on parts of one operand whose scales have the rows of both.
    found = {problem for problem in launched["fused"] if problem.layout[1] == "mn"}
    if kind == "qwen-image" and text_tokens < block_fp8_gemm.GROUP_ROWS:
        assert not found, "all are grouped"
        return
    assert found
    assert found <= set(workload.problems)
    names = {workload.named(problem) for problem in found}
    wanted = {"qwen-image": {"out", "down"}, "flux2": {"merged qkv", "out", "down", "single out"}}[kind]
    for name in wanted:
        assert any(name in one for one in names), f"{name} is not among {names}"


# --- what is named on the command line ----------------------------------------------------------------------------


def sizes(workload: TuningWorkload) -> set[tuple[int, int, int]]:
    return {(problem.m, problem.n, problem.k) for problem in workload.problems}


def test_qwen_image_at_1024() -> None:
    workload = find("qwen-image", "1024x1024", [])
    width = 3072
    assert sizes(workload) == {
        (m, n, k) for m in (256, 4096) for n, k in ((width, width), (4 * width, width), (width, 4 * width))
    }
    assert workload.profile == "denoiser"
    (one,) = workload.passes
    assert one.layers == 60
    assert one.denoiser is not None and (one.denoiser.image_hw, one.denoiser.text_tokens) == ((64, 64), 256)
    assert workload.named(Problem(4096, width, width)) == "image qkv, image out"


def test_flux2_dev_at_1024_and_another_resolution() -> None:
    width = 6144
    expected = {
        (m, n, k)
        for m in (512, 4096)
        for n, k in ((width, width), (3 * width, width), (6 * width, width), (width, 3 * width))
    }
    expected |= {(4608, 9 * width, width), (4608, width, 4 * width)}
    assert sizes(find("flux2", "1024x1024", [])) == expected
    other = find("flux2", "512x1536", [])
    assert other.passes[0].denoiser is not None and other.passes[0].denoiser.image_hw == (96, 32)


def test_two_prompts_are_two_passes_that_share_the_images_gemms() -> None:
    workload = find("qwen-image", "1024x1024", [256, 40])
    assert [one.label for one in workload.passes] == ["256 text tokens", "40 text tokens"]
    shared = set(workload.passes[0].problems) & set(workload.passes[1].problems)
    assert {problem.m for problem in shared} == {4096}
    assert len(workload.problems) == 9


def test_qwen3_8b_decodes_batches_each_a_pass_of_its_own() -> None:
    workload = find("qwen3-8b", "1024x1024", [])
    assert (workload.profile, [one.layers for one in workload.passes]) == ("decode", [36] * len(DECODE_BATCHES))
    assert sizes(workload) == {
        (m, n, k) for m in DECODE_BATCHES for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
    }
    assert sizes(find("qwen3-8b", "", [3])) >= {(3, 6144, 4096)}


def checkpoint(folder: Path, config: dict[str, Any], *, diffusers: bool) -> str:
    inner = folder / "transformer" if diffusers else folder
    inner.mkdir(parents=True, exist_ok=True)
    (inner / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_checkpoint_says_its_sizes_itself(tmp_path: Path) -> None:
    qwen = {
        "_class_name": "QwenImageTransformer2DModel",
        "num_layers": 3,
        "num_attention_heads": 4,
        "attention_head_dim": 128,
        "joint_attention_dim": 256,
        "patch_size": 2,
        "guidance_embeds": False,
    }
    found = find(checkpoint(tmp_path / "a", qwen, diffusers=True), "64x64", [5])
    assert sizes(found) == {(m, n, k) for m in (5, 16) for n, k in ((512, 512), (2048, 512), (512, 2048))}
    assert found.passes[0].denoiser is not None
    assert found.passes[0].denoiser.arch == {
        "layers": 3,
        "heads": 4,
        "joint_attention_dim": 256,
        "guidance_embeds": False,
    }
    klein = {
        "_class_name": "Flux2Transformer2DModel",
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "guidance_embeds": False,
    }
    found = find(checkpoint(tmp_path / "b", klein, diffusers=True), "64x64", [])
    assert (528, 27648, 3072) in sizes(found)
    assert found.passes[0].denoiser is not None and found.passes[0].denoiser.arch["single_layers"] == 20
    llama = {"hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 1024, "num_hidden_layers": 2}
    found = find(checkpoint(tmp_path / "c", llama, diffusers=False), "", [1])
    assert sizes(found) == {(1, 1536, 512), (1, 512, 512), (1, 2048, 512), (1, 512, 1024)}


@pytest.mark.parametrize(
    ("model", "resolution", "tokens", "complaint"),
    [
        ("qwen-imagine", "1024x1024", [], "no such model or checkpoint folder; known: qwen-image, flux2, qwen3-8b"),
        ("qwen-image", "1024", [], "write WIDTHxHEIGHT"),
        ("qwen-image", "1024x1000", [], "a multiple of 16"),
        ("qwen-image", "0x16", [], "a multiple of 16"),
        ("flux2", "1024x1024", [512, 0], "--tokens 0"),
    ],
)
def test_what_cannot_be_is_named(model: str, resolution: str, tokens: list[int], complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        find(model, resolution, tokens)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"architectures": ["X"]}, "says no 'hidden_size'"),
        ({"hidden_size": 1, "num_experts": 8}, "mixture of experts"),
        ({"_class_name": "QwenImageTransformer2DModel", "attention_head_dim": 64}, "heads of 64"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        find(checkpoint(tmp_path, config, diffusers=False), "64x64", [])


def test_the_names_are_those_of_the_benchmark() -> None:
    assert set(gemm_workload.KNOWN) == {"qwen-image", "flux2", "qwen3-8b"}
