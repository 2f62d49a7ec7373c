"""`bench denoiser`, as far as a machine without a GPU can tell: what is compared, counted, undone and recorded."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from sglang_fastpath import benchmark, plan
from sglang_fastpath.benchmark import Comparison, Workload, summarize, unequal
from sglang_fastpath.benchmark_variants import (
    FEATURES,
    IN_GRAPHS,
    BreakableGraphs,
    Compiled,
    Variant,
    VariantError,
    make_graph_variants,
    make_variants,
    only,
)
from sglang_fastpath.denoisers import build_qwen_image, start_runtime
from sglang_fastpath.features import FLUX2, QWEN_IMAGE
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import State

TINY = Workload(arch={"layers": 1, "heads": 2}, image_hw=(4, 4), text_tokens=7, attention="torch_sdpa", device="cpu")
STEPS = 2
BLOCKS = 2
RELEASES = Path(__file__).resolve().parent.parent / ".releases"

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than a tiny denoiser."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def denoiser() -> nn.Module:
    return build_qwen_image(layers=BLOCKS)


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    yield
    revert()


class Broken(Variant):
    """Fails while it is applied, from the `serves`-th time on."""

    def __init__(self, serves: int) -> None:
        super().__init__()
        self._serves = serves

    @contextmanager
    def applied(self) -> Iterator[None]:
        yield
        self._serves -= 1
        if self._serves < 0:
            raise RuntimeError("the first line\nand `the` second")


class OneBitOff(Variant):
    """Stock, but for the last bit of one weight."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self._bits = denoiser.get_parameter("proj_out.weight").view(torch.int16)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with torch.no_grad():
            self._bits[0, 0] ^= 1
            try:
                yield
            finally:
                self._bits[0, 0] ^= 1


def compiled_modules(denoiser: nn.Module) -> set[str]:
    return {name for name, module in denoiser.named_modules() if module._compiled_call_impl is not None}


# --- the loop ----------------------------------------------------------------------------------------------------


def latents_of(denoiser: nn.Module, **loop: Any) -> list[Tensor]:
    return [latents.clone() for latents in GuidanceLoop(denoiser, steps=STEPS, **loop)]


def test_what_runs_around_a_pass_runs_around_each_and_is_not_seen_by_stock(denoiser: nn.Module) -> None:
    seen: list[Tensor] = []
    models: list[nn.Module] = []

    def around(run_pass: Any) -> Tensor:
        seen.append(run_pass())
        return seen[-1]

    stock = latents_of(denoiser)
    loop = GuidanceLoop(denoiser, steps=STEPS, around_pass=around)
    loop.stage._maybe_get_bcg_runner = models.append  # which decides by what the model is
    wrapped = [latents.clone() for latents in loop]
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(stock, wrapped, strict=True))
    assert [result.shape for result in seen] == [loop.latents.shape] * 2 * STEPS
    assert not torch.equal(seen[0], seen[1]), "the passes have a prompt each"
    assert len(models) == 2 * STEPS and all(model is denoiser for model in models)


ON_A_RELEASE = """
import torch
from sglang_fastpath.benchmark_variants import BreakableGraphs, Compiled
from sglang_fastpath.denoisers import build_qwen_image
from sglang_fastpath.guidance_loop import GuidanceLoop
denoiser, passes = build_qwen_image(layers=2), []
plain = [latents.clone() for latents in GuidanceLoop(denoiser, steps=2)]
around = GuidanceLoop(denoiser, steps=2, around_pass=lambda run_pass: passes.append(run_pass()) or passes[-1])
assert all(torch.equal(a, b) for a, b in zip(plain, around, strict=True)) and len(passes) == 4
torch._dynamo.config.disable = False
compiled = Compiled()
compiled.prepare(denoiser)
with compiled.applied():
    print([name for name, module in denoiser.named_modules() if module._compiled_call_impl is not None])
try:
    BreakableGraphs().prepare(denoiser)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.releases
def test_other_releases_take_what_is_wrapped_around_a_pass_and_compile_by_their_own_method() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    running = {
        release: subprocess.Popen(
            [sys.executable, "-c", ON_A_RELEASE],
            env=environment | {"PYTHONPATH": str(RELEASES / release), "OMP_NUM_THREADS": "1"},
            cwd=RELEASES.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for release in ("0.5.11", "0.5.23")
    }
    printed = {}
    for release, process in running.items():
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"{release}: {errors[-4000:]}"
        printed[release] = output.strip().splitlines()[-2:]
    # 0.5.11 cannot compile regions: the whole denoiser.
    assert printed["0.5.11"] == ["['']", "VariantError: SGLang 0.5.11 has no breakable CUDA graphs"]
    compiled, graphs = printed["0.5.23"]
    assert compiled == "['transformer_blocks.0', 'transformer_blocks.1']"
    assert "graph_pool_handle" in graphs, "SGLang's runner was made, which needs a GPU"


# --- variants ----------------------------------------------------------------------------------------------------


def switched_on(variant: Variant) -> set[str]:
    if variant.plan is None:
        return set()
    return {id for id, record in variant.plan.records.items() if record.state is not State.OFF}


def test_fast_has_every_feature_that_acts_in_an_eager_pass_and_the_graph_variants_the_others_too() -> None:
    everything = {feature.id for feature in FEATURES}
    eager, graphs = make_variants(QWEN_IMAGE), make_graph_variants()
    assert list(make_graph_variants(["fast", "stock+bcg"])) == ["stock", "stock+bcg", "fast"]
    assert list(graphs) == ["stock", "stock+compile", "stock+bcg", "stock+graph", "fast", "fast+graph"]
    assert switched_on(eager["fast"]) == switched_on(graphs["fast"]) == everything - set(IN_GRAPHS)
    assert switched_on(graphs["fast+graph"]) == everything
    assert switched_on(graphs["stock+graph"]) == {"step_graph"}
    assert all(not switched_on(graphs[name]) for name in ("stock", "stock+compile", "stock+bcg"))
    assert not any(switched_on(variant).intersection(IN_GRAPHS) for variant in eager.values())
    for id in switched_on(eager["fast"]):
        if f"alone {id}" in eager:
            assert switched_on(eager[f"alone {id}"]) == {id}
            assert id not in switched_on(eager[f"without {id}"])


def test_each_family_is_ablated_by_its_own_features() -> None:
    """Those that are not for a model, or not active here, would show nothing."""
    for model, missing in (
        (QWEN_IMAGE, {"gated_residual_norm", "qk_norm_rope"}),
        (FLUX2, {"cfg_mod_cache", "bias_fold"}),
    ):
        variants = make_variants(model, emulate=True)
        active = {record.feature.id for record in variants["fast"].plan.active()}  # type: ignore[union-attr]
        assert missing < active
        ablated = active - missing
        assert variants.keys() == {
            "stock",
            "fast",
            *(f"{how} {id}" for how in ("alone", "without") for id in ablated),
        }
        for id in ablated:
            assert switched_on(variants[f"alone {id}"]) == {id}
            assert switched_on(variants[f"without {id}"]) == ablated - {id}
        assert make_variants(model, ablation=False, emulate=True).keys() == {"stock", "fast"}


def test_a_model_is_sized_by_what_is_given() -> None:
    qwen_image, flux2 = (benchmark.MODELS[name] for name in ("qwen-image", "flux2"))
    assert (qwen_image.family, flux2.family) == (QWEN_IMAGE, FLUX2)
    for model in (qwen_image, flux2):
        assert model.sized(None, None) == {}
        assert model.sized(None, 3) == {"heads": 3}
    assert qwen_image.sized(2, None) == {"layers": 2}
    assert flux2.sized(2, 3) == {"layers": 2, "single_layers": 2, "heads": 3}


def test_torch_compile_is_sglangs_own_on_the_blocks_and_only_while_it_is_applied(
    denoiser: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    attributes = {module: set(vars(module)) for module in denoiser.modules()}
    overlap = inductor.reorder_for_compute_comm_overlap
    variant = Compiled()
    with torch._dynamo.config.patch(disable=False):
        variant.prepare(denoiser)
        for _ in range(2):
            assert compiled_modules(denoiser) == set()
            assert {module: set(vars(module)) for module in denoiser.modules()} == attributes
            assert inductor.reorder_for_compute_comm_overlap == overlap
            with variant.applied():
                assert compiled_modules(denoiser) == {f"transformer_blocks.{index}" for index in range(BLOCKS)}
                assert inductor.reorder_for_compute_comm_overlap, "SGLang's setting for what it compiles"
    assert "regional_compile" in variant.setup


def test_what_torch_compile_makes_is_what_runs(denoiser: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    variant = Compiled()
    with torch._dynamo.config.patch(disable=False):
        variant.prepare(denoiser)
    called: list[nn.Module] = []
    for module in variant._compiled:
        variant._compiled[module] = lambda *args, module=module, **kwargs: (
            called.append(module),
            module._call_impl(*args, **kwargs),
        )[1]
    with variant.applied():
        latents_of(denoiser)
    assert called == list(denoiser.transformer_blocks) * 2 * STEPS
    latents_of(denoiser)
    assert len(called) == BLOCKS * 2 * STEPS


def test_without_dynamo_there_is_nothing_to_compare_with(
    denoiser: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(VariantError, match="switched off"):
        Compiled().prepare(denoiser)


def test_breakable_graphs_are_captured_in_a_warm_up_for_the_prompts_own_lengths(denoiser: nn.Module) -> None:
    """A runner that does what SGLang's does when a capture fails: serve eagerly. That must not pass for a graph."""
    variant = BreakableGraphs()
    calls: list[tuple[bool, int]] = []

    class Runner:
        entries: dict[object, object] = {}  # noqa: RUF012

        def capture(self, **arguments: Any) -> bool:
            calls.append((True, arguments["encoder_hidden_states"].shape[1]))
            return False

        def __call__(self, **arguments: Any) -> Tensor:
            calls.append((False, arguments["encoder_hidden_states"].shape[1]))
            arguments["encoder_hidden_states_mask"] = None
            result: Tensor = denoiser(**arguments)
            return result

    def runner_of(model: nn.Module) -> Runner:
        assert model is denoiser
        return variant._runners.setdefault(id(model), Runner())

    def loop_with_runner(*args: Any, **kwargs: Any) -> GuidanceLoop:
        loop = BreakableGraphs.loop(variant, *args, **kwargs)
        assert loop.stage.server_args.enable_breakable_cuda_graph
        assert loop.stage._bcg_runners is variant._runners
        loop.stage._maybe_get_bcg_runner = runner_of
        return loop

    variant.loop = loop_with_runner  # type: ignore[method-assign]
    with pytest.raises(VariantError, match="captured no graph"):
        variant.prepare(denoiser, text_tokens=5)
    assert calls == [(True, 5), (False, 5)] * 2
    calls.clear()
    list(variant.loop(denoiser, steps=1, text_tokens=5))
    assert calls == [(False, 5)] * 2, "captures belong to the warm-up"


def test_a_variant_says_which_required_feature_is_missing_or_did_nothing(denoiser: nn.Module) -> None:
    off = Variant(only(), required=["cfg_mod_cache"])
    with pytest.raises(VariantError, match="cfg_mod_cache: off"):
        off.prepare(denoiser)
    variant = Variant(only("cfg_mod_cache"), required=["cfg_mod_cache"])
    variant.prepare(denoiser)
    with variant.applied():
        assert plan.current() is variant.plan
        with pytest.raises(VariantError, match="never hit"):
            variant.verify()
        list(variant.loop(denoiser, steps=STEPS))
    variant.verify()
    assert plan.current() is None


# --- the comparison ----------------------------------------------------------------------------------------------


def test_a_variant_that_fails_is_recorded_whenever_it_does_and_the_others_go_on(denoiser: nn.Module) -> None:
    variants = {
        "stock": Variant(),
        "at once": Broken(serves=0),
        "when timed": Broken(serves=1),
        "when sustained": Broken(serves=1 + STEPS),
        "when profiled": Broken(serves=2 + STEPS),
        "wrong": OneBitOff(denoiser),
    }
    lines: list[str] = []
    compared = Comparison(denoiser, TINY, variants, report=lines.append, tolerant=True)
    compared.check_parity(STEPS)
    assert list(compared.failed) == ["at once"]
    compared.time_interleaved(STEPS)
    compared.sustain(variants, 1)
    compared.profile(variants)
    assert list(compared.failed) == ["at once", "when timed", "when sustained", "when profiled"]
    for name in compared.failed:
        assert compared.entry(name) == {"failed": "RuntimeError: the first line and `the` second"}
    assert sum("Traceback" in line for line in lines) == 4
    assert compared.entry("stock")["bitwise_equal"] is True
    assert compared.entry("wrong")["bitwise_equal"] is False
    assert any(line.startswith("  wrong: output 0: ") for line in lines), "and how they differ"


def test_without_tolerance_a_failure_is_raised(denoiser: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="second"):
        Comparison(denoiser, TINY, {"stock": Broken(serves=0)}).check_parity(STEPS)


def test_the_eager_run_says_what_each_feature_did(emulated: None) -> None:
    document = benchmark.run(TINY, steps=STEPS, rounds=1, sustained_steps=1)
    assert document["bitwise_equal"] is True and unequal(document) == []
    assert document["features"].keys() == {feature.id for feature in FEATURES}
    cache = document["features"]["cfg_mod_cache"]
    assert (
        cache["hits"] == STEPS * 2 * TINY.arch["layers"] and cache["alone_bitwise_equal"] and cache["without_ms"] > 0
    )
    assert document["features"]["step_graph"]["state"].startswith("off")
    for name in ("stock", "fast"):
        entry = document[name]
        assert 0 < entry["min_ms"] <= entry["pass_ms"] <= entry["max_ms"]
        assert min(entry["host_ms"], entry["sustained_ms"]) > 0
        # The host is the device here, and the profiler sees no kernel.
        assert (entry["launches"], entry["kernel_ms"], entry["sustained_sm_mhz"]) == (0, 0.0, None)
        assert "kernels" not in entry
    assert plan.current() is None


def test_a_comparison_without_times_says_of_each_variant_whether_its_bytes_are_stocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emulated by itself, and put back: linears built later are not."""
    variants = {"stock": Variant(), "fast": Variant(only("act_quant", emulate=True)), "broken": Broken(serves=0)}
    monkeypatch.setattr(benchmark, "make_variants", lambda family, emulate: variants)
    fp8 = importlib.import_module(fp8_cpu_emulation.FP8_MODULE)
    dispatch = fp8.dispatch_w8a8_block_fp8_linear
    flux2 = Workload(
        model="flux2",
        arch={"layers": 1, "single_layers": 1, "heads": 2, "joint_attention_dim": 128},
        image_hw=(2, 3),
        text_tokens=5,
        attention="torch_sdpa",
        device="cpu",
    )
    found = benchmark.run_parity(flux2, steps=1, emulate=True)
    assert found.keys() == {"fast", "broken"}
    assert (found["fast"]["bitwise_equal"], found["fast"]["failed"]) == (True, "")
    assert found["fast"]["features"]["act_quant"]["hits"] == 2
    assert found["broken"] == {
        "bitwise_equal": False,
        "failed": "RuntimeError: the first line and `the` second",
        "features": {},
    }
    assert fp8.dispatch_w8a8_block_fp8_linear is dispatch
    assert plan.current() is None


@on_a_cpu
def test_the_graph_run_records_what_needs_a_gpu_and_measures_the_rest(emulated: None) -> None:
    document = benchmark.run_graphs(TINY, steps=STEPS, rounds=1, sustained_steps=1)
    variants = document["variants"]
    assert list(variants) == list(make_graph_variants())
    failed = {name: entry["failed"] for name, entry in variants.items() if "failed" in entry}
    assert failed.keys() == {"stock+compile", "stock+bcg", "stock+graph", "fast+graph"}
    assert failed["stock+compile"] == "VariantError: torch.compile is switched off here"
    assert failed["stock+graph"].startswith("VariantError: step_graph: unsupported (")
    assert failed["fast+graph"].startswith("VariantError: step_graph: unsupported (")
    assert variants["fast"]["bitwise_equal"] is variants["stock"]["bitwise_equal"] is True
    assert document["bitwise_equal"] is False, "a variant that did not run has shown nothing"
    assert unequal(document) == ["fast+graph"]
    assert document["features"].keys() == {feature.id for feature in FEATURES}
    assert document["floor_ms"] == variants["stock"]["floor_ms"]


@on_a_cpu
def test_without_the_plugin_the_graph_run_has_no_verdict_on_it(emulated: None) -> None:
    document = benchmark.run_graphs(TINY, names=[], steps=STEPS, rounds=1, sustained_steps=1)
    assert list(document["variants"]) == ["stock"]
    assert document["bitwise_equal"] is None and document["features"] == {} and unequal(document) == []


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({"bitwise_equal": True, "stock": {}}, []),
        ({"bitwise_equal": False, "stock": {}}, ["fast"]),
        ({"bitwise_equal": True, "variants": {"stock": {"bitwise_equal": True}}}, []),
        (
            {
                "bitwise_equal": True,
                "variants": {
                    "stock+compile": {"bitwise_equal": False},
                    "fast": {"bitwise_equal": False},
                    "fast+graph": {"bitwise_equal": True},
                },
            },
            ["fast"],
        ),
        ({"bitwise_equal": False, "variants": {"fast+graph": {"failed": "why"}}}, ["fast+graph"]),
    ],
)
def test_only_the_plugins_own_variants_must_give_stocks_bytes(document: dict[str, Any], names: list[str]) -> None:
    assert unequal(document) == names


# --- the profile -------------------------------------------------------------------------------------------------


def event(name: str, start: float, end: float, *, device: DeviceType = DeviceType.CUDA, thread: int = 1) -> Any:
    return FunctionEvent(id=0, name=name, thread=thread, start_us=start, end_us=end, device_type=device)


def call(name: str, start: float, end: float, **where: Any) -> Any:
    return event(name, start, end, device=DeviceType.CPU, **where)


def test_a_profile_counts_kernels_launches_and_the_passes_apart() -> None:
    marker = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        *(call("cudaLaunchKernel", at, at + 1) for at in (0, 100)),  # the markers'
        event(marker, 1, 3),
        event(marker, 101, 103),
        # The first pass: three kernels in a graph, one launched by the driver, below a call of the runtime.
        call("cudaGraphLaunch_v10000", 4, 8),
        event("sm90_fp8_gemm_1d2d", 10, 40),
        event("FlashAttnFwdSm90", 40, 60),
        event("elementwise", 60, 65),
        call("cudaLaunchKernelExC_v11060", 20, 24),
        call("cuLaunchKernelEx", 21, 23),
        event("elementwise", 65, 70),
        # The second: one kernel; what is no kernel and no launch.
        call("cuLaunchKernel", 104, 105),
        call("cuLaunchKernel", 104, 105, thread=2),
        call("cudaMemcpyAsync", 106, 107),
        call("cudaStreamSynchronize", 107, 108),
        event("Memcpy DtoD (Device -> Device)", 106, 109),
        event("Memset (Device)", 109, 110),
        event("elementwise", 110, 130),
    ]
    found = summarize(reversed(events), passes_a_step=2)
    assert found["kernels"] == 5 // 2
    assert found["launches"] == 4 // 2
    assert found["kernel_ms"] == round(80 / 1e3 / 2, 3)
    assert found["floor_ms"] == round(50 / 1e3 / 2, 3)
    assert found["kernel_ms_by_pass"] == [0.06, 0.02]
    assert list(found["longest_ms"]) == ["sm90_fp8_gemm_1d2d", "elementwise", "FlashAttnFwdSm90"]


def test_a_profile_without_the_hosts_calls_says_so() -> None:
    events = [event("spin_kernel", 0, 1), event("elementwise", 1, 2), event("elementwise", 2, 3)]
    found = summarize(events, passes_a_step=1)
    assert (found["kernels"], found["launches"]) == (2, None)


def test_the_profile_in_the_middle_is_taken_whole() -> None:
    taken = [SimpleNamespace(kernel_ms=ms) for ms in (3.0, 1.0, 2.0)]
    assert benchmark._median_profile([vars(one) for one in taken]) == {"kernel_ms": 2.0}
