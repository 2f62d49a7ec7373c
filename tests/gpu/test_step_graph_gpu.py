"""`step_graph` with real CUDA graphs: stock's bytes, captures that CUDA refuses, and memory that comes back."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import step_graphs
import torch
from denoiser_calls import infer
from sglang_fastpath.kernels import block_fp8_gemm
from sglang_fastpath.patches.diffusion.graph_recorder import CudaGraphRecorder
from step_graphs import (
    ALL,
    ALONE,
    REUSING,
    Running,
    assert_replays,
    counted_passes,
    import_sites,
    passes,
    stock_output,
    warm_up,
)
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs, start_runtime
from sglang_fastpath.denoising_loop import DenoisingLoop
from sglang_fastpath.flux2_denoiser import build_flux2
from sglang_fastpath.flux2_loop import Flux2Loop
from sglang_fastpath.guard import compare
from sglang_fastpath.guidance_loop import GuidanceLoop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SMALL: dict[str, Any] = {"image_hw": (8, 8), "text_tokens": 16}
STEPS = 8
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[None]:
    """FlashAttention where SGLang has it for this GPU, whatever another module has started with."""
    from sglang.multimodal_gen.runtime import server_args

    start_runtime()
    import_sites()
    arguments = server_args.get_global_server_args()
    before = arguments.attention_backend
    arguments.attention_backend = "fa" if _has_flash_attention() else "torch_sdpa"
    yield
    arguments.attention_backend = before


def _has_flash_attention() -> bool:
    from sglang.multimodal_gen.runtime import server_args

    arguments = server_args.get_global_server_args()
    before = arguments.attention_backend
    arguments.attention_backend = "fa"
    try:
        model = build(layers=1)
        infer(model, denoiser_inputs(model, **SMALL))
    except Exception:  # no kernels for this GPU, or none installed: SDPA serves
        return False
    finally:
        arguments.attention_backend = before
    return True


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    with counted_passes():
        yield


@pytest.fixture(scope="module")
def denoiser(runtime: None) -> Any:
    return build()


def build(**arch: Any) -> Any:
    return build_qwen_image(**{"layers": 4, "heads": 4, "device": "cuda"} | arch)


def fastpath(on: tuple[str, ...] = ALONE, **chosen: Any) -> AbstractContextManager[Running]:
    """`chosen` are fields of `Settings`."""
    return step_graphs.fastpath(on, recorder=CudaGraphRecorder(), **chosen)


def latents_of(loop: DenoisingLoop) -> list[Tensor]:
    return [latents.clone() for latents in loop]


def latents_or_skip(make: Callable[[], DenoisingLoop], fp8: bool) -> list[Tensor]:
    """Stock's latents; without DeepGEMM or Hopper there are none in block FP8."""
    try:
        return latents_of(make())
    except Exception as error:
        if not fp8:
            raise
        pytest.skip(f"stock's block FP8 does not run here: {type(error).__name__}: {error}")


def reserved() -> int:
    """Device memory that cannot be given back: what tensors and the graphs' pools hold."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# --- bytes ---------------------------------------------------------------------------------------------------------

RUNS: tuple[dict[str, Any], ...] = (
    {"image_hw": (16, 16), "text_tokens": 40},
    {"image_hw": (12, 20), "text_tokens": 40},
    {"image_hw": (16, 16), "text_tokens": 40},
)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "block FP8"])
def test_guidance_with_two_lengths_another_resolution_and_the_first_again(fp8: bool) -> None:
    model = build(fp8=fp8)

    def loop(run: dict[str, Any]) -> DenoisingLoop:
        return GuidanceLoop(model, steps=STEPS, negative_tokens=24, **run)

    stock = [latents_or_skip(partial(loop, run), fp8) for run in RUNS]
    with fastpath(ALL if fp8 else REUSING) as running:
        for run, expected in zip(RUNS, stock, strict=True):
            passes.clear()
            assert_same_bytes(latents_of(loop(run)), expected)
        assert not passes, "the first resolution again is replays alone"
        assert not running.failed


@pytest.mark.parametrize(
    "arch", [{}, {"guidance_embeds": False}, {"fp8": True}], ids=["dev bf16", "klein bf16", "dev block FP8"]
)
def test_flux2_with_two_lengths_two_resolutions_and_references(arch: dict[str, Any]) -> None:
    model, fp8 = build_flux2(layers=2, single_layers=2, heads=4, device="cuda", **arch), "fp8" in arch
    requests: list[dict[str, Any]] = [*RUNS[:2], RUNS[0] | {"text_tokens": 24}, RUNS[0] | {"references": ((8, 4),)}]

    def loop(request: dict[str, Any]) -> DenoisingLoop:
        return Flux2Loop(model, steps=STEPS, **request)

    stock = [latents_or_skip(partial(loop, request), fp8) for request in requests]
    with fastpath(ALL if fp8 else ALONE) as running:
        for round_ in range(2):
            for request, expected in zip(requests, stock, strict=True):
                passes.clear()
                assert_same_bytes(latents_of(loop(request)), expected)
                assert not round_ or not passes, "again: replays alone"
        assert running.record.hits >= len(requests) * STEPS
        assert not running.failed


def test_what_block_fp8_reads_beside_its_inputs_stays_where_it_is() -> None:
    """Which rows of a grouped GEMM belong to which stream: made once for each pair of sizes, and many come and go."""
    model = build(fp8=True)
    inputs = denoiser_inputs(model, **SMALL)
    latents_or_skip(lambda: GuidanceLoop(model, steps=1, **SMALL), fp8=True)
    with fastpath(ALL) as running:
        warm_up(running, model, inputs)
        for rows in range(256, 256 + 200):
            block_fp8_gemm._groups(128, rows, torch.device("cuda", torch.cuda.current_device()))
        garbage = [torch.full((rows,), 7, dtype=torch.int32, device="cuda") for rows in range(64, 512)]
        assert_replays(running, model, inputs)
        del garbage


def test_results_stay_intact_while_other_graphs_run(denoiser: Any) -> None:
    calls = [denoiser_inputs(denoiser, image_hw=(12, 12), text_tokens=tokens, seed=tokens) for tokens in (8, 9, 10)]
    stock = [stock_output(denoiser, inputs) for inputs in calls]
    with fastpath() as running:
        for inputs in calls:
            warm_up(running, denoiser, inputs)
        results = [infer(denoiser, inputs) for _ in range(5) for inputs in calls]
        for index, result in enumerate(results):
            assert_same_bytes(result, stock[index % 3])
        assert len({result.data_ptr() for result in results}) == len(results)


def test_every_input_is_read_at_each_replay(denoiser: Any) -> None:
    base = denoiser_inputs(denoiser, **SMALL)
    with fastpath() as running:
        warm_up(running, denoiser, base)
        verdicts = len(running.plan.guard.verdicts)
        for name in ("hidden_states", "encoder_hidden_states", "timestep"):
            assert_replays(running, denoiser, {**base, name: base[name] * 0.7})
        for index in range(2):
            tables = list(base["freqs_cis"])
            tables[index] = tables[index].flip(0).contiguous()
            assert_replays(running, denoiser, {**base, "freqs_cis": tuple(tables)})
        assert len(running.plan.guard.verdicts) == verdicts, "one graph served them all"


def in_place(weight: Any) -> None:
    weight.mul_(1.5)


def moved(weight: Any) -> None:
    weight.data = weight.data * 1.5


def as_a_loader_copies(weight: Any) -> None:
    weight.data.copy_(weight.data * 1.5)


@pytest.mark.parametrize("change", [in_place, moved, as_a_loader_copies], ids=lambda change: change.__name__)
@torch.no_grad()
def test_weights_that_change_are_seen(change: Callable[[Any], None]) -> None:
    model = build(layers=2)
    inputs = denoiser_inputs(model, **SMALL)
    with fastpath(guard="off") as running:
        warm_up(running, model, inputs)
        before = stock_output(model, inputs)
        for parameter in list(model.transformer_blocks[1].parameters()):
            change(parameter)
        garbage = [torch.full_like(parameter, torch.nan) for parameter in model.parameters()]  # where the old lay
        assert compare(stock_output(model, inputs), before) is not None
        warm_up(running, model, inputs)
        assert_replays(running, model, inputs)
        del garbage


def test_a_denoiser_asleep_and_awake_again() -> None:
    """The weights leave the device and come back, to wherever there is room."""
    model = build(layers=2)
    inputs = denoiser_inputs(model, **SMALL)
    with fastpath() as running:
        warm_up(running, model, inputs)
        for parameter in model.parameters():
            parameter.data = parameter.data.cpu()
        torch.cuda.empty_cache()
        room = [torch.full((MIB,), torch.nan, device="cuda") for _ in range(64)]
        for parameter in model.parameters():
            parameter.data = parameter.data.cuda()
        warm_up(running, model, inputs)
        del room


# --- captures that fail --------------------------------------------------------------------------------------------


def raises(x: Tensor) -> None:
    raise RuntimeError("as a model might, between two launches")


def reads_on_the_host(x: Tensor) -> None:
    x.sum().item()


def synchronizes(x: Tensor) -> None:
    torch.cuda.synchronize()


def goes_on_after_an_error(x: Tensor) -> None:
    """Model code that catches what CUDA says: the capture is invalid all the same, which its end finds out."""
    try:
        x.sum().item()
    except Exception:
        return


def runs_out_of_memory(x: Tensor) -> None:
    torch.empty(1 << 60, dtype=torch.uint8, device="cuda")


@contextmanager
def obstacle(model: Any, act: Callable[[Tensor], None], tokens: int) -> Iterator[list[int]]:
    """`act` in the middle of each captured pass with so many image tokens; counts how often."""
    owner = type(model.norm_out)
    forward = owner.forward
    met: list[int] = []

    def blocked(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and x.shape[1] == tokens:
            met.append(x.shape[1])
            act(x)
        return forward(module, x, *args, **kwargs)

    owner.forward = blocked
    try:
        yield met
    finally:
        owner.forward = forward


@pytest.mark.parametrize(
    "act",
    [raises, reads_on_the_host, synchronizes, goes_on_after_an_error, runs_out_of_memory],
    ids=lambda act: act.__name__,
)
def test_a_capture_that_fails_leaves_the_process_usable(denoiser: Any, act: Callable[[Tensor], None]) -> None:
    bad, good, later = (
        denoiser_inputs(denoiser, image_hw=image_hw, text_tokens=16) for image_hw in ((8, 9), (8, 8), (8, 10))
    )
    stock = {id(inputs): stock_output(denoiser, inputs) for inputs in (bad, good, later)}
    before = reserved()
    with obstacle(denoiser, act, tokens=72) as met, fastpath(graphs=4) as running:
        warm_up(running, denoiser, good)
        for _ in range(3):
            assert_same_bytes(infer(denoiser, bad), stock[id(bad)])
        assert met
        torch.cuda.synchronize()
        reasons = [why for why in running.record.fallbacks if "capture" in why]
        if act is runs_out_of_memory:
            assert reasons == ["out of memory during capture", "out of memory during capture, twice"]
            assert len(met) == 2, "tried again, once"
        else:
            assert len(met) == 1, "not tried again"
            assert len(reasons) == 1
        for inputs in (later, good):
            warm_up(running, denoiser, inputs)
        for _ in range(2):
            assert_same_bytes(infer(denoiser, bad), stock[id(bad)])
        assert not running.failed
    del running
    assert reserved() <= before + 4 * MIB, "the failed capture holds no memory"


# --- memory --------------------------------------------------------------------------------------------------------

BIG: dict[str, Any] = {"image_hw": (160, 160), "text_tokens": 16}  # some hundred MiB


def test_a_big_graph_that_is_evicted_gives_its_memory_back(denoiser: Any) -> None:
    big = denoiser_inputs(denoiser, **BIG)
    small = [denoiser_inputs(denoiser, image_hw=(8, 8), text_tokens=tokens) for tokens in (10, 11, 12)]
    with fastpath(graphs=2) as running:
        warm_up(running, denoiser, small[0])
        before = reserved()
        warm_up(running, denoiser, big)
        pool = running.recorder.pool_bytes()
        with_big = reserved()
        assert with_big - before > 0.6 * pool, "what the pool holds is on the device"
        for inputs in small[1:]:
            warm_up(running, denoiser, inputs)
        assert running.recorder.pool_bytes() < 0.4 * pool
        assert with_big - reserved() > 0.6 * pool


def test_graphs_share_one_pool(denoiser: Any) -> None:
    """Of two lengths at one resolution the second needs little more than its outputs."""
    with fastpath() as running:
        warm_up(running, denoiser, denoiser_inputs(denoiser, image_hw=(64, 64), text_tokens=24))
        first = running.recorder.pool_bytes()
        for tokens in (23, 22, 21):
            warm_up(running, denoiser, denoiser_inputs(denoiser, image_hw=(64, 64), text_tokens=tokens))
        assert running.recorder.pool_bytes() < 1.5 * first


def test_a_graph_over_the_ceiling_is_given_up_and_its_memory_given_back(denoiser: Any) -> None:
    small, big = denoiser_inputs(denoiser, **SMALL), denoiser_inputs(denoiser, **BIG)
    stock = stock_output(denoiser, big)
    with fastpath() as running:
        pools = []
        for inputs in (small, big):
            warm_up(running, denoiser, inputs)
            pools.append(running.recorder.pool_bytes())
    ceiling = sum(pools) // 2
    del running
    with fastpath(graph_bytes=ceiling) as running:
        warm_up(running, denoiser, small)
        before = reserved()
        for _ in range(4):
            assert_same_bytes(infer(denoiser, big), stock)
        assert any(f"SGLANG_FASTPATH_GRAPH_BYTES={ceiling}" in why for why in running.record.fallbacks)
        assert running.recorder.pool_bytes() == 0
        assert reserved() <= before
        warm_up(running, denoiser, small)
        assert not running.failed


def test_a_dropped_plan_leaves_no_memory_behind(denoiser: Any) -> None:
    inputs = denoiser_inputs(denoiser, **BIG)
    stock_output(denoiser, inputs)
    before = reserved()
    for _ in range(2):
        with fastpath() as running:
            warm_up(running, denoiser, inputs)
            assert running.recorder.pool_bytes() > 50 * MIB
        del running
        assert reserved() <= before + 4 * MIB


def test_memory_does_not_grow_over_many_graphs() -> None:
    """Requests of twelve kinds come in bursts; there is room for four graphs."""
    model = build(layers=2)
    rng = random.Random(0)
    sizes = [((rng.randint(8, 40), rng.randint(8, 40)), rng.randint(8, 200)) for _ in range(12)]
    inputs = [denoiser_inputs(model, image_hw=hw, text_tokens=tokens) for hw, tokens in sizes]
    expected = [stock_output(model, each) for each in inputs]
    with fastpath(graphs=4) as running:
        held, number = [], 0
        for index in range(300):
            if rng.random() < 0.4:
                number = rng.randrange(len(inputs))
            result = infer(model, inputs[number])
            if index % 25 == 0:
                assert_same_bytes(result, expected[number])
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_reserved())
        assert max(held[150:]) <= max(held[:150])
        assert running.record.hits > 200
        assert not running.failed
