"""`step_graph` on SGLang's own denoiser and denoising step: stock's bytes, whatever changes between two passes.

On a CPU, where `RerunRecorder` stands in for CUDA graph capture; `tests/gpu/test_step_graph_gpu.py` has the real one.
"""

import functools
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_calls import call, infer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rerun_recorder import RerunRecorder
from sglang_fastpath.patches.diffusion import step_graph
from step_graphs import (
    ALL,
    ALONE,
    CHECKING,
    FIRST,
    REUSING,
    Running,
    applied,
    assert_replays,
    computing_modulation,
    fastpath,
    is_recording,
    passes,
    prepare,
    replays_by_kind,
    stock_output,
    warm_up,
)
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath import plugin
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs
from sglang_fastpath.features import BY_ID, QWEN_IMAGE
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import Plan, State

pytestmark = pytest.mark.usefixtures("emulated", "counted")

LINEARS = 2  # of the modulation, in a denoiser of one block
BLOCK_FEATURES = ("scale_prepack", "norm_quant", "qkv_epilogue", "act_quant", "bias_fold")
REQUEST: dict[str, Any] = {"image_hw": (3, 5), "text_tokens": 6}
GIVEN_UP = "capture failed"


@pytest.fixture(scope="module")
def denoiser() -> Any:
    return build()


@pytest.fixture(scope="module")
def other_denoiser() -> Any:
    return build(seed=1)


@pytest.fixture(scope="module")
def fp8_denoiser() -> Any:
    return build(fp8=True)


def build(**arch: Any) -> Any:
    """One block, or in FP8 two: there a block computes the next one's norm."""
    return build_qwen_image(**{"layers": 2 if arch.get("fp8") else 1} | arch)


def latents_of(model: nn.Module, *, steps: int = 5, **loop: Any) -> list[Tensor]:
    return [latents.clone() for latents in GuidanceLoop(model, steps=steps, **{"image_hw": (3, 5)} | loop)]


def in_one_step(model: nn.Module, run: Callable[[], None]) -> None:
    """Runs `run` where stock runs its guidance passes: inside `DenoisingStage._run_denoising_step`."""
    loop = GuidanceLoop(model, steps=1)

    def predict(*, latents: Tensor, **_: Any) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            run()
        return torch.zeros_like(latents)

    loop.stage._predict_noise_with_cfg = predict
    list(loop)


# --- capture and replay --------------------------------------------------------------------------------------------


def test_the_first_call_is_eager_the_second_captures_and_the_third_replays(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    with fastpath() as running:
        seen = []
        for _ in range(4):
            passes.clear()
            assert_same_bytes(infer(denoiser, inputs), stock)
            seen.append(dict(passes))
    assert seen == [{"eager": 1}, {"eager": 1, "recorded": 1}, {}, {}]
    assert running.record.hits == 3
    assert running.record.fallbacks == {FIRST: 1}
    assert running.recorder.records == 1
    assert [(verdict["verdict"], verdict["checks"]) for verdict in running.plan.guard.verdicts] == [("admitted", 1)]


def test_no_capture_while_other_features_are_being_checked(fp8_denoiser) -> None:
    inputs = denoiser_inputs(fp8_denoiser, **REQUEST)
    stock = stock_output(fp8_denoiser, inputs)
    with fastpath(ALL) as running:
        checked = []  # in each pass before the capture: whether another feature compared with stock
        while not running.recorder.records:
            before = running.plan.guard.counters["checks"]
            assert_same_bytes(infer(fp8_denoiser, inputs), stock)
            checked.append(running.plan.guard.counters["checks"] > before)
            assert len(checked) < 12
        *early, last_eager, capturing = checked
        assert early
        assert all(early)
        assert (last_eager, capturing) == (False, True), "the capture's own check"
        moved = {"captured anew: a weight was moved": 1}  # the first pass has merged linears
        assert running.record.fallbacks == {CHECKING: len(early) - 1, FIRST: 1, **moved}
        assert_replays(running, fp8_denoiser, inputs)
        assert not running.failed


def test_results_are_the_callers_own(denoiser) -> None:
    """Two passes of one step have results of one shape: neither lies in the memory that the graphs share."""
    first, second = (denoiser_inputs(denoiser, image_hw=(3, 5), text_tokens=tokens) for tokens in (6, 4))
    stock = [stock_output(denoiser, inputs) for inputs in (first, second)]
    with fastpath() as running:
        for inputs in (first, second):
            warm_up(running, denoiser, inputs)
        results = [infer(denoiser, inputs) for _ in range(3) for inputs in (first, second)]
        running.recorder.spoil()
        for index, result in enumerate(results):
            assert_same_bytes(result, stock[index % 2])
        assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)
        with torch.inference_mode():
            results[0].fill_(torch.nan)
        assert_replays(running, denoiser, first)


def test_the_autograd_mode_of_the_caller_is_kept(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    with fastpath() as running:
        warm_up(running, denoiser, inputs)
        with torch.no_grad():
            results = [call(denoiser, inputs) for _ in range(4)]
        assert running.record.fallbacks == {FIRST: 2}
        assert running.recorder.records == 2
        for result in results:
            assert_same_bytes(result, stock)
            assert not result.is_inference()
        assert infer(denoiser, inputs).is_inference()


def rich_inputs(model: nn.Module) -> dict[str, Any]:
    """Every tensor argument that stock's forward knows, nested as stock nests them."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    inputs = denoiser_inputs(model, **REQUEST)
    return {
        **inputs,
        "guidance": torch.tensor([3.5]),
        "additional_t_cond": torch.tensor([0]),
        "controlnet_block_samples": [noise(1, 15, 256), noise(1, 15, 256)],
        "attention_kwargs": {"attn_mask": torch.arange(21).remainder(4).ne(1)[None]},
    }


def another(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value.roll(1, -1)
    if value.dtype == torch.int64:
        return 1 - value
    return (0.7 * value + torch.linspace(-1, 1, value.numel()).view(value.shape)).to(value.dtype)


LEAVES: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "hidden_states": lambda kwargs: (kwargs, "hidden_states"),
    "encoder_hidden_states": lambda kwargs: (kwargs, "encoder_hidden_states"),
    "timestep": lambda kwargs: (kwargs, "timestep"),
    "image rotary table": lambda kwargs: (kwargs["freqs_cis"], 0),
    "text rotary table": lambda kwargs: (kwargs["freqs_cis"], 1),
    "guidance": lambda kwargs: (kwargs, "guidance"),
    "additional_t_cond": lambda kwargs: (kwargs, "additional_t_cond"),
    "first controlnet sample": lambda kwargs: (kwargs["controlnet_block_samples"], 0),
    "second controlnet sample": lambda kwargs: (kwargs["controlnet_block_samples"], 1),
    "attention mask": lambda kwargs: (kwargs["attention_kwargs"], "attn_mask"),
}


@pytest.fixture(scope="module")
def layered_denoiser() -> Any:
    return build(layers=2, use_additional_t_cond=True)


@pytest.mark.parametrize("in_place", [False, True], ids=["another tensor", "in place"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_each_input_alone(layered_denoiser, leaf: str, in_place: bool) -> None:
    inputs = rich_inputs(layered_denoiser)
    inputs["freqs_cis"] = list(inputs["freqs_cis"])
    before = stock_output(layered_denoiser, inputs)
    with fastpath() as running:
        warm_up(running, layered_denoiser, inputs)
        holder, key = LEAVES[leaf](inputs)
        changed = another(holder[key])
        if in_place:
            holder[key].copy_(changed)
        else:
            holder[key] = changed
        assert_replays(running, layered_denoiser, inputs)
        after = infer(layered_denoiser, inputs)
        assert running.recorder.records == 1
    assert torch.equal(before, after) == (leaf == "guidance"), "stock's Qwen-Image reads all but the guidance"


def test_all_inputs_at_once_in_any_order(layered_denoiser) -> None:
    """Each pass changes another subset of the inputs; what an earlier one left in the buffers must not show."""
    leaves = list(LEAVES.values())
    with fastpath() as running:
        base = rich_inputs(layered_denoiser)
        base["freqs_cis"] = list(base["freqs_cis"])
        warm_up(running, layered_denoiser, base)
        for subset in (0b1111111111, 0b0000000001, 0b1010101010, 0b0, 0b0101010101, 0b1000011000):
            inputs = rich_inputs(layered_denoiser)
            inputs["freqs_cis"] = list(inputs["freqs_cis"])
            for bit, leaf in enumerate(leaves):
                if subset >> bit & 1:
                    holder, key = leaf(inputs)
                    holder[key] = another(holder[key])
            assert_replays(running, layered_denoiser, inputs)


@pytest.mark.parametrize(
    "change",
    [
        {"txt_seq_lens": [5]},
        {"img_shapes": [[(1, 5, 3)]]},
        {"return_dict": False},
        {"guidance": 1},
        {"guidance": True},
        {"guidance": 1.0},
        {"attention_kwargs": {}},
        {"attention_kwargs": {"scale": None}},
        {"controlnet_block_samples": None},
    ],
    ids=str,
)
def test_another_plain_value_is_another_signature(denoiser, change: dict[str, Any]) -> None:
    base = {**denoiser_inputs(denoiser, **REQUEST), "guidance": None}
    with fastpath() as running:
        for count, inputs in enumerate((base, {**base, **change}), start=1):
            warm_up(running, denoiser, inputs)
            assert running.recorder.records == count
            assert running.record.fallbacks == {FIRST: count}
        assert_replays(running, denoiser, base)


def test_equal_numbers_of_other_types_are_other_signatures(denoiser) -> None:
    base = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as running:
        for count, guidance in enumerate((1, True, 1.0, 0.0, -0.0, False), start=1):
            warm_up(running, denoiser, {**base, "guidance": guidance})
            assert running.recorder.records == count, guidance


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.repeat(1, 2, 1)[:, ::2], id="strides"),
        pytest.param(lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), id="transposed"),
        pytest.param(lambda t: t[:, :1].expand(t.shape), id="expanded"),
        pytest.param(lambda t: t[:, :14].contiguous(), id="shape"),
    ],
)
def test_another_layout_of_a_tensor_is_another_signature(denoiser, change: Callable[[Tensor], Tensor]) -> None:
    base = denoiser_inputs(denoiser, **REQUEST)
    changed = {**base, "hidden_states": change(base["hidden_states"])}
    cache = base["freqs_cis"][0][: changed["hidden_states"].shape[1]]
    changed["freqs_cis"] = (cache, base["freqs_cis"][1])
    with fastpath() as running:
        for count, inputs in enumerate((base, changed), start=1):
            warm_up(running, denoiser, inputs)
            assert running.recorder.records == count
            inputs["hidden_states"] = inputs["hidden_states"] * 2 if count == 1 else change(base["hidden_states"] * 3)
            assert_replays(running, denoiser, inputs)


def test_a_tensor_given_twice_is_not_the_same_call_as_two_tensors(denoiser) -> None:
    base = denoiser_inputs(denoiser, **REQUEST)
    sample = torch.ones(1, 15, 256, dtype=torch.bfloat16)
    twice = {**base, "controlnet_block_samples": [sample, sample]}
    apart = {**base, "controlnet_block_samples": [sample, sample.clone()]}
    with fastpath() as running:
        warm_up(running, denoiser, twice)
        warm_up(running, denoiser, apart)
        assert running.recorder.records == 2
        for inputs in (twice, apart):
            inputs["controlnet_block_samples"] = [torch.zeros_like(sample)] * 2
        assert_replays(running, denoiser, twice)
        apart["controlnet_block_samples"] = [sample, 2 * sample]
        assert_replays(running, denoiser, apart)


def test_edit_models_whose_token_index_stock_may_drop() -> None:
    """Tokens of the condition are modulated at t = 0; which they are is on the device, in a cache of stock's."""
    model = build(zero_cond_t=True)
    base = denoiser_inputs(model, image_hw=(4, 4), text_tokens=6)
    shapes: list[Any] = [[[(1, 2, 4), (1, 2, 4)]], [[(1, 3, 4), (1, 1, 4)]]]
    calls = [{**base, "img_shapes": shape} for shape in shapes]
    assert not torch.equal(*(stock_output(model, inputs) for inputs in calls))
    with fastpath() as running:
        for inputs in calls:
            warm_up(running, model, inputs)
        assert running.recorder.records == 2
        for inputs in calls:
            assert_replays(running, model, {**inputs, "timestep": torch.tensor([200.0])})
            # As 50 other resolutions do; what the graphs read must not be freed.
            type(model).build_modulate_index.cache_clear()
            with torch.inference_mode():
                results = [call(model, inputs) for inputs in calls]
        for result, inputs in zip(results, calls, strict=True):
            assert_same_bytes(result, stock_output(model, inputs))


def test_two_denoisers_in_turns(denoiser, other_denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as running:
        for model in (denoiser, other_denoiser):
            warm_up(running, model, inputs)
        for model in (denoiser, other_denoiser) * 2:
            assert_replays(running, model, inputs)
        assert running.recorder.records == 2


def test_the_quality_tier_is_another_signature(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    tiers = [SimpleNamespace(sampling_params=SimpleNamespace(quality=quality)) for quality in ("lossless", "high")]
    with fastpath() as running:
        for count, batch in enumerate(tiers, start=1):
            warm_up(running, denoiser, inputs, batch=batch)
            assert running.recorder.records == count


def test_each_new_graph_replaces_the_least_recently_used(denoiser) -> None:
    calls = [denoiser_inputs(denoiser, image_hw=(2, 3), text_tokens=tokens) for tokens in (3, 4, 5)]
    with fastpath(graphs=2) as running:
        for inputs in calls[:2]:
            warm_up(running, denoiser, inputs)
        assert_replays(running, denoiser, calls[0])
        warm_up(running, denoiser, calls[2])
        assert len(running.recorder.alive) == 2
        for inputs in (calls[0], calls[2]):
            assert_replays(running, denoiser, inputs)
        stock = stock_output(denoiser, calls[1])
        passes.clear()
        assert_same_bytes(infer(denoiser, calls[1]), stock)
        assert passes == {"recorded": 1, "eager": 1}, "captured anew at once, and checked anew"
        assert running.recorder.records == 4


def test_what_is_remembered_of_signatures_is_bounded(denoiser) -> None:
    """A graph whose signature was forgotten could never be found again, so it goes as well."""
    calls = [denoiser_inputs(denoiser, image_hw=(2, 3), text_tokens=tokens) for tokens in (3, 4, 5)]
    with fastpath() as running, attribute(step_graph, "_MOST_SEEN", 2):
        for inputs in calls[:2]:
            warm_up(running, denoiser, inputs)
        assert len(running.recorder.alive) == 2
        warm_up(running, denoiser, calls[2])
        assert len(running.recorder.alive) == 1
        warm_up(running, denoiser, calls[0])
        for inputs in (calls[2], calls[0]):
            assert_replays(running, denoiser, inputs)
        assert running.recorder.records == 4
        assert not running.failed


def test_a_graph_over_the_ceiling_is_given_up_with_one_warning(denoiser, caplog) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    with (
        caplog.at_level(logging.WARNING, logger="sglang_fastpath"),
        fastpath(graph_bytes=1000, recorder=RerunRecorder(bytes_each=1001)) as running,
    ):
        for _ in range(4):
            assert_same_bytes(infer(denoiser, inputs), stock)
        assert running.record.hits == 0
        assert (running.recorder.records, running.recorder.emptied, running.recorder.alive) == (1, 1, [])
        (reason,) = running.record.fallbacks.keys() - {FIRST}
        assert running.record.fallbacks[reason] == 3
    assert "SGLANG_FASTPATH_GRAPH_BYTES=1000" in reason
    assert sum("runs eagerly from now on" in message for message in caplog.messages) == 1


# --- guidance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("negative_tokens", [6, 4], ids=["equal lengths", "two lengths"])
@pytest.mark.parametrize("on", [ALONE, REUSING], ids=["alone", "with cfg_mod_cache"])
def test_guidance_runs_from_graphs(denoiser, on: tuple[str, ...], negative_tokens: int, batch: int) -> None:
    loop: dict[str, Any] = {"text_tokens": 6, "negative_tokens": negative_tokens, "batch": batch}
    stock = latents_of(denoiser, **loop)
    with fastpath(on) as running:
        assert_same_bytes(latents_of(denoiser, **loop), stock)
        assert not running.failed
        assert running.record.hits + running.record.fallbacks.total() == 2 * len(stock)
        replays_by_kind(running, denoiser)
        hits = running.plan.records["cfg_mod_cache"].hits
        passes.clear()
        assert_same_bytes(latents_of(denoiser, **loop), stock)
        assert not passes, "a second request of this kind is replays alone"
        reused = len(stock) if on == REUSING else 0
        assert replays_by_kind(running, denoiser) == {True: 2 * len(stock) - reused, False: reused}
        assert running.plan.records["cfg_mod_cache"].hits - hits == reused * LINEARS


def test_every_feature_together(fp8_denoiser) -> None:
    loops: list[dict[str, Any]] = [
        {"image_hw": (3, 3), "text_tokens": 5, "negative_tokens": 3, "steps": 6},
        {"image_hw": (2, 3), "text_tokens": 4, "negative_tokens": 4, "steps": 6, "batch": 2},
    ]
    stock = [latents_of(fp8_denoiser, **loop) for loop in loops]
    with fastpath(ALL) as running:
        for _ in range(3):
            replays_by_kind(running, fp8_denoiser)
            passes.clear()
            for loop, expected in zip(loops, stock, strict=True):
                assert_same_bytes(latents_of(fp8_denoiser, **loop), expected)
        assert not passes
        assert not running.failed
        assert replays_by_kind(running, fp8_denoiser) == {True: 2, False: 22}, "each request computes it once"
        assert all(running.plan.records[id].hits for id in ALL if not BY_ID[id].lacks(QWEN_IMAGE))


def test_requests_interleaved_step_by_step_keep_apart(denoiser, other_denoiser) -> None:
    loops: list[tuple[Any, dict[str, Any]]] = [
        (denoiser, {"seed": 1, "image_hw": (3, 5), "text_tokens": 6}),
        (denoiser, {"seed": 2, "image_hw": (2, 4), "text_tokens": 3, "negative_tokens": 5}),
        (denoiser, {"seed": 4, "image_hw": (3, 5), "text_tokens": 6}),
        (other_denoiser, {"seed": 3, "image_hw": (3, 5), "text_tokens": 6}),
    ]
    stock = [latents_of(model, **loop) for model, loop in loops]
    with fastpath(REUSING) as running:
        runs = [GuidanceLoop(model, steps=5, **loop) for model, loop in loops]
        turns = [[latents.clone() for latents in turn] for turn in zip(*runs, strict=True)]
        assert not running.failed
        assert running.record.hits > 20
    for index, expected in enumerate(stock):
        assert_same_bytes([turn[index] for turn in turns], expected)


@dataclass
class Guided:
    """Passes within steps, each with stock's result in `stock` by position."""

    model: Any
    outputs: list[Tensor]

    def step(self, *calls: dict[str, Any]) -> None:
        """A step whose passes get these arguments, changed by `change` just before the pass."""

        def run() -> None:
            for inputs in calls:
                inputs = dict(inputs)
                if change := inputs.pop("change", None):
                    change(inputs)
                self.outputs.append(call(self.model, inputs))

        in_one_step(self.model, run)


def play(model: Any, script: Callable[[Guided], None]) -> list[Tensor]:
    guided = Guided(model, [])
    script(guided)
    return guided.outputs


def prompts(model: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a step's two passes, which share the timestep tensor."""
    timestep = more.pop("timestep", None)
    if timestep is None:
        timestep = torch.tensor([500.0])
    return tuple(  # type: ignore[return-value]
        {**denoiser_inputs(model, image_hw=(3, 5), text_tokens=tokens, seed=tokens, timestep=timestep), **more}
        for tokens in (6, 4)
    )


def warm(guided: Guided) -> None:
    """Both of a step's graphs are captured afterwards."""
    for value in (100.0, 200.0, 300.0, 400.0):
        guided.step(*prompts(guided.model, timestep=torch.tensor([value])))


def set_value(inputs: dict[str, Any]) -> None:
    inputs["timestep"].fill_(900.0)


def set_data(inputs: dict[str, Any]) -> None:
    inputs["timestep"].data = torch.tensor([900.0])


def equal_but_another(inputs: dict[str, Any]) -> None:
    inputs["timestep"] = inputs["timestep"].clone()


def another_value(inputs: dict[str, Any]) -> None:
    inputs["timestep"] = torch.tensor([900.0])


def another_dtype(inputs: dict[str, Any]) -> None:
    inputs["timestep"] = inputs["timestep"].double()


@pytest.mark.parametrize("guard", ["once", "off"])
@pytest.mark.parametrize(
    "change", [set_value, set_data, equal_but_another, another_value, another_dtype], ids=lambda f: f.__name__
)
def test_another_timestep_within_a_step_gets_its_own_modulation(denoiser, change, guard: str) -> None:
    def script(guided: Guided) -> None:
        warm(guided)
        for _ in range(3):
            first, second = prompts(guided.model)
            guided.step(first, {**second, "change": change}, first)

    stock = play(denoiser, script)
    with fastpath(REUSING, guard=guard) as running:
        assert_same_bytes(play(denoiser, script), stock)
        assert not running.failed


def test_equal_timesteps_of_two_steps_do_not_share_a_modulation(denoiser) -> None:
    """The weights change between two steps at the same timestep, in a way that leaves no trace but the values."""

    def script(guided: Guided) -> None:
        warm(guided)
        timestep = torch.tensor([500.0])
        guided.step(*prompts(guided.model, timestep=timestep))
        linear = guided.model.transformer_blocks[0].img_mod[1]
        linear.bias.data.copy_(linear.bias.data + 1)
        _, second = prompts(guided.model, timestep=timestep)
        guided.step(second, second, second)

    stock = play(build(), script)
    with fastpath(REUSING, guard="off") as running:
        assert_same_bytes(play(build(), script), stock)
        assert running.record.hits


def test_a_table_does_not_outlive_its_step(denoiser) -> None:
    timestep = torch.tensor([500.0])
    with fastpath(REUSING) as running:
        play(denoiser, warm)
        for _ in range(2):
            in_one_step(denoiser, lambda: call(denoiser, prompts(denoiser, timestep=timestep)[0]))
            before = passes.copy()
            with torch.no_grad():
                outside = call(denoiser, prompts(denoiser, timestep=timestep)[1])
            assert passes["eager"] > before["eager"] or not running.failed
            assert_same_bytes(outside, stock_output(denoiser, prompts(denoiser, timestep=timestep)[1]))
        reads = [computes for computes in computing_modulation(running, denoiser) if not computes]
        assert len(reads) == 1, "only within a step"


def test_a_step_of_one_eager_pass_and_one_graph_in_either_order(denoiser) -> None:
    def script(guided: Guided) -> None:
        warm(guided)
        for tokens in (2, 3):
            unseen = {**denoiser_inputs(guided.model, image_hw=(3, 5), text_tokens=tokens)}
            first, second = prompts(guided.model)
            unseen["timestep"] = first["timestep"]
            guided.step({**unseen}, second, first, second)
            first, second = prompts(guided.model)
            guided.step(first, {**unseen, "timestep": first["timestep"]}, second)

    stock = play(denoiser, script)
    with fastpath(REUSING) as running:
        assert_same_bytes(play(denoiser, script), stock)
        assert not running.failed
        assert running.record.hits > 8


def test_a_step_that_fails_leaves_no_table(denoiser) -> None:
    timestep = torch.tensor([500.0])
    with fastpath(REUSING) as running:
        play(denoiser, warm)

        def fail() -> None:
            call(denoiser, prompts(denoiser, timestep=timestep)[0])
            raise RuntimeError("as a request might")

        with pytest.raises(RuntimeError, match="as a request might"):
            in_one_step(denoiser, fail)
        before = running.record.hits
        stock = stock_output(denoiser, prompts(denoiser, timestep=timestep)[1])
        results: list[Tensor] = []
        in_one_step(denoiser, lambda: results.append(call(denoiser, prompts(denoiser, timestep=timestep)[1])))
        assert_same_bytes(results, [stock])
        assert running.record.hits == before, "the graph that reads the table was not used"


@pytest.mark.parametrize("guard", ["once", "off"])
def test_the_learned_condition_belongs_to_the_modulation(layered_denoiser, guard: str) -> None:
    def script(guided: Guided) -> None:
        zero, one = torch.tensor([0]), torch.tensor([1])
        for value in (100.0, 200.0, 300.0, 400.0, 500.0, 600.0):
            first, second = prompts(guided.model, timestep=torch.tensor([value]), additional_t_cond=zero)
            other = {**second, "additional_t_cond": one}
            guided.step(first, second, other, {**second, "change": lambda inputs: zero.fill_(1)})
            zero.fill_(0)

    stock = play(layered_denoiser, script)
    with fastpath(REUSING, guard=guard) as running:
        assert_same_bytes(play(layered_denoiser, script), stock)
        assert not running.failed
        assert False in computing_modulation(running, layered_denoiser)


def test_autocast_within_a_step_gets_its_own_modulation(denoiser) -> None:
    def script(guided: Guided) -> None:
        def run() -> None:
            first, second = prompts(guided.model)
            guided.outputs.append(call(guided.model, first))
            with torch.autocast("cpu", dtype=torch.float16):
                guided.outputs.extend(call(guided.model, second) for _ in range(2))

        warm(guided)
        for _ in range(4):
            in_one_step(guided.model, run)

    stock = play(denoiser, script)
    with fastpath(REUSING, guard="off"):
        assert_same_bytes(play(denoiser, script), stock)


@dataclass(frozen=True)
class Pass:
    """One pass: which model, prompt and timestep object, and what happens before it; all but the first two kinds
    of happenings begin a new step."""

    model: int
    prompt: int
    timestep: int
    before: str


PASSES = st.builds(
    Pass,
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from(
        ["nothing"] * 6 + ["timestep in place", "step", "weight in place", "weight replaced", "weight moved"]
    ),
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PASSES, min_size=1, max_size=8), st.sampled_from([ALONE, REUSING]), st.integers(1, 3))
def test_any_sequence_of_passes(sequence: list[Pass], on: tuple[str, ...], graphs: int) -> None:
    def run() -> list[Tensor]:
        models = [build(), build(seed=1)]
        timesteps = [torch.tensor([250.0]), torch.tensor([250.0])]
        outputs: list[Tensor] = []

        def passes_of(step: list[Pass]) -> None:
            for item in step:
                if item.before == "timestep in place":
                    timesteps[item.timestep].add_(50)
                inputs = denoiser_inputs(
                    models[item.model],
                    seed=item.prompt,
                    image_hw=[(2, 3), (2, 2), (2, 3)][item.prompt],
                    text_tokens=[3, 2, 2][item.prompt],
                    timestep=timesteps[item.timestep],
                )
                outputs.append(call(models[item.model], inputs))

        steps: list[list[Pass]] = [[]]
        for item in sequence * 3:  # so that what recurs is captured and replayed
            if item.before not in ("nothing", "timestep in place"):
                steps.append([])
            steps[-1].append(item)
        for step in filter(None, steps):
            linear = models[step[0].model].transformer_blocks[0].txt_mod[1]
            if step[0].before == "weight in place":
                linear.weight.mul_(1.5)
            elif step[0].before == "weight replaced":
                linear.bias = nn.Parameter(linear.bias + 1, requires_grad=False)
            elif step[0].before == "weight moved":
                linear.weight.data = linear.weight.data * 0.5
            in_one_step(models[0], functools.partial(passes_of, step))
        return outputs

    stock = run()
    with fastpath(on, guard="off", graphs=graphs):
        assert_same_bytes(run(), stock)


# --- left to stock -------------------------------------------------------------------------------------------------


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, value, raising=False)
        yield


@contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def double_the_first(module: nn.Module, inputs: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:])


def double_the_input(module: nn.Module, inputs: Any) -> Any:
    return tuple(value * 2 for value in inputs)


def doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: tuple(value * 2 for value in forward(*args, **kwargs))


@contextmanager
def own_forward(module: Any, wrap: Callable[..., Any]) -> Iterator[None]:
    """As cache-dit and debuggers wrap a single module: an attribute of the instance."""
    module.forward = wrap(module.forward)
    try:
        yield
    finally:
        del module.forward


@contextmanager
def compiled(module: Any) -> Iterator[None]:
    module.compile()
    try:
        yield
    finally:
        del module._compiled_call_impl


def server_argument(name: str) -> Any:
    from sglang.multimodal_gen.runtime import server_args

    return attribute(server_args.get_global_server_args(), name, True)


def attention_backend(model: Any) -> Any:
    from sglang.multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

    return attribute(model.transformer_blocks[0].attn.attn, "backend", AttentionBackendEnum.SAGE_ATTN)


@contextmanager
def two_ranks() -> Iterator[None]:
    """What the process is told; that two real ranks agree with stock is the engine's test with TP 2."""
    with attribute(torch.distributed, "get_world_size", lambda group=None: 2):
        yield


NOTHING: dict[str, Any] = {}
SITUATIONS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], dict[str, Any], str]] = {
    "gradients": (lambda model: torch.enable_grad(), NOTHING, NOTHING, "gradients are enabled"),
    "text mask": (
        lambda model: nullcontext(),
        {"encoder_hidden_states_mask": torch.arange(6)[None] < 4},
        NOTHING,
        "text mask",
    ),
    "metadata": (lambda model: nullcontext(), NOTHING, {"metadata": SimpleNamespace()}, "attention metadata"),
    "TeaCache": (
        lambda model: nullcontext(),
        NOTHING,
        {"batch": SimpleNamespace(enable_teacache=True)},
        "TeaCache",
    ),
    "another object": (
        lambda model: nullcontext(),
        {"attention_kwargs": {"who": object()}},
        NOTHING,
        "['attention_kwargs']['who'] is a object",
    ),
    "dict subclass": (
        lambda model: nullcontext(),
        {"attention_kwargs": Counter()},
        NOTHING,
        "['attention_kwargs'] is a Counter",
    ),
    "sparse tensor": (
        lambda model: nullcontext(),
        {"guidance": torch.eye(3).to_sparse()},
        NOTHING,
        "guidance",
    ),
    "forward hook": (
        lambda model: hooked(model.transformer_blocks[0].attn.to_q.register_forward_hook, double_the_first),
        NOTHING,
        NOTHING,
        "hooks",
    ),
    "pre-hook": (
        lambda model: hooked(model.proj_out.register_forward_pre_hook, double_the_input),
        NOTHING,
        NOTHING,
        "hooks",
    ),
    "hook on the denoiser": (
        lambda model: hooked(model.register_forward_hook, lambda module, inputs, output: output * 2),
        NOTHING,
        NOTHING,
        "hooks",
    ),
    "global hook": (
        lambda model: hooked(
            nn.modules.module.register_module_forward_hook,
            lambda module, inputs, output: output * 2 if isinstance(output, Tensor) else None,
        ),
        NOTHING,
        NOTHING,
        "hooks on all modules",
    ),
    "global pre-hook": (
        lambda model: hooked(nn.modules.module.register_module_forward_pre_hook, lambda module, inputs: None),
        NOTHING,
        NOTHING,
        "hooks on all modules",
    ),
    "block's own forward": (
        lambda model: own_forward(model.transformer_blocks[0], doubling),
        NOTHING,
        NOTHING,
        "forward of its own",
    ),
    "denoiser's own forward": (
        lambda model: own_forward(model, lambda forward: lambda **kwargs: forward(**kwargs) * 2),
        NOTHING,
        NOTHING,
        "the denoiser has a forward of its own",
    ),
    "autocast": (lambda model: torch.autocast("cpu", dtype=torch.bfloat16), NOTHING, NOTHING, "autocast"),
    "compiled block": (lambda model: compiled(model.transformer_blocks[0]), NOTHING, NOTHING, "torch.compile"),
    "attention backend": (attention_backend, NOTHING, NOTHING, "attention backend SAGE_ATTN"),
    "two ranks": (lambda model: two_ranks(), NOTHING, NOTHING, "2 ranks"),
    **{
        name: (functools.partial(lambda name, model: server_argument(name), name), NOTHING, NOTHING, reason)
        for name, reason in step_graph._SERVER_ARGS.items()
    },
}


@pytest.mark.parametrize("when", ["from the start", "once captured"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_a_graph_cannot_do_is_left_to_stock(situation: str, when: str) -> None:
    model = build()
    enter, more, context, reason = SITUATIONS[situation]
    plain = denoiser_inputs(model, **REQUEST)
    inputs = {**plain, **more}

    def run() -> Tensor:
        with torch.no_grad(), enter(model):
            result = call(model, inputs, **context)
        return result.detach()

    stock = run()
    with fastpath() as running:
        if when == "once captured":
            with torch.no_grad():
                for _ in range(3):
                    call(model, plain)
            assert running.record.hits == 2
        records, replays = running.recorder.records, running.recorder.replays
        before = running.record.fallbacks.copy()
        passes.clear()
        for _ in range(3):
            assert_same_bytes(run(), stock)
        assert passes == {"eager": 3}
        assert (running.recorder.records, running.recorder.replays) == (records, replays)
        new = running.record.fallbacks - before
        assert sum(count for why, count in new.items() if reason in why) == 3, new
        # Afterwards the same denoiser runs from graphs.
        warm_up(running, model, plain)
        assert not running.failed


def test_arguments_by_position_are_left_to_stock(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    latents = inputs.pop("hidden_states")
    with fastpath() as running, torch.inference_mode():
        for _ in range(3):
            assert_same_bytes(call(denoiser, inputs, latents), stock)
        assert running.record.fallbacks == {"arguments are passed by position": 3}
        assert running.recorder.records == 0


def test_outside_a_forward_context_stock_says_what_is_wrong(denoiser) -> None:
    with fastpath() as running, torch.inference_mode():
        for _ in range(2):
            with pytest.raises(AssertionError, match="Forward context is not set"):
                denoiser(**denoiser_inputs(denoiser, **REQUEST))
        assert running.record.fallbacks == {"outside a forward context": 2}


def test_what_stock_raises_is_the_callers(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as running:
        warm_up(running, denoiser, inputs)
        wrong = {**inputs, "encoder_hidden_states": torch.zeros(1, 6, 99, dtype=torch.bfloat16)}
        for _ in range(3):
            with pytest.raises(ValueError, match="Expected hidden_size to be 128, but found: 99"):
                infer(denoiser, wrong)
        assert running.recorder.records == 1
        assert_replays(running, denoiser, inputs)


# --- a denoiser that changes ---------------------------------------------------------------------------------------


def in_place(model: Any) -> None:
    model.transformer_blocks[0].attn.to_k.weight.mul_(1.5)


def in_place_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.transformer_blocks[0].attn.to_k.weight.mul_(1.5)


def as_a_loader_copies(model: Any) -> None:
    weight = model.transformer_blocks[0].attn.to_k.weight
    weight.data.copy_(weight.data * 1.5)


def moved(model: Any) -> None:
    weight = model.transformer_blocks[0].img_mlp.net[2].weight
    weight.data = weight.data * 1.5


def replaced(model: Any) -> None:
    model.norm_out.linear.bias = nn.Parameter(model.norm_out.linear.bias + 0.5, requires_grad=False)


def bias_removed(model: Any) -> None:
    model.transformer_blocks[0].attn.to_q.bias = None


def module_replaced(model: Any) -> None:
    model.txt_norm = build(seed=3).txt_norm
    model.txt_norm.weight.data.mul_(2)


def block_replaced(model: Any) -> None:
    model.transformer_blocks[1] = build(seed=3).transformer_blocks[0]


def block_added(model: Any) -> None:
    model.transformer_blocks.append(build(seed=3).transformer_blocks[0])


def block_removed(model: Any) -> None:
    del model.transformer_blocks[1]


def norm_weight_added(model: Any) -> None:
    """Of a module that had no parameters."""
    norm = model.transformer_blocks[0].img_norm1.norm
    norm.register_parameter("weight", nn.Parameter(torch.full((256,), 2.0).bfloat16(), requires_grad=False))


def weights_loaded(model: Any) -> None:
    model.load_state_dict(build(layers=2, seed=4).state_dict())


def put_to_sleep_and_woken(model: Any) -> None:
    """The weights go and come back as other tensors."""
    saved = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    for name, parameter in model.named_parameters():
        parameter.data = saved[name] * 1.25


def class_forward_replaced(model: Any) -> None:
    """As another plugin replaces a function of stock's that is no site of ours."""
    forward = type(model.norm_out).forward
    if not hasattr(forward, "replaced"):
        twice = functools.wraps(forward)(lambda *args, **kwargs: 2 * forward(*args, **kwargs))
        twice.replaced = forward  # type: ignore[attr-defined]
        type(model.norm_out).forward = twice


CHANGES = [
    in_place,
    in_place_in_inference_mode,
    as_a_loader_copies,
    moved,
    replaced,
    bias_removed,
    module_replaced,
    block_replaced,
    block_added,
    block_removed,
    norm_weight_added,
    weights_loaded,
    put_to_sleep_and_woken,
    class_forward_replaced,
]


@pytest.fixture(autouse=True)
def stock_norm() -> Iterator[None]:
    from sglang.multimodal_gen.runtime.models.dits import qwen_image

    owner = qwen_image.AdaLayerNormContinuous
    forward = owner.forward
    yield
    owner.forward = forward


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_denoiser_is_seen(change: Callable[[Any], None]) -> None:
    model = build(layers=2)
    inputs = denoiser_inputs(model, **REQUEST)
    before = stock_output(model, inputs)
    with fastpath(guard="off") as running:
        warm_up(running, model, inputs)
        change(model)
        after = stock_output(model, inputs)
        assert not torch.equal(before, after)
        results = [infer(model, inputs) for _ in range(4)]
        for result in results:
            assert_same_bytes(result, after)
        assert_replays(running, model, inputs)
        assert len(running.recorder.alive) == 1, "the old graph is gone"


def test_weights_that_change_between_steps_of_a_guidance_run() -> None:
    changes = [in_place, as_a_loader_copies, moved, replaced, module_replaced]

    def run() -> list[Tensor]:
        model = build()
        seen = []
        for index, latents in enumerate(GuidanceLoop(model, steps=20, image_hw=(3, 5), negative_tokens=6)):
            seen.append(latents.clone())
            if index % 4 == 3:
                changes[index // 4](model)
        return seen

    stock = run()
    with fastpath(REUSING) as running:
        assert_same_bytes(run(), stock)
        assert not running.failed
        assert sum(why.startswith("captured anew") for why in running.record.fallbacks) >= 3
        assert running.record.hits + running.record.fallbacks.total() == 2 * len(stock), "each pass counts once"


def test_fp8_weights_that_change_under_all_features() -> None:
    def run() -> list[Tensor]:
        model = build(fp8=True)
        seen = []
        for index, latents in enumerate(GuidanceLoop(model, steps=16, image_hw=(3, 3), text_tokens=5)):
            seen.append(latents.clone())
            linear = model.transformer_blocks[1].attn.to_k
            if index == 7:
                linear.bias.data.copy_(linear.bias.data + 0.5)
            elif index == 11:
                linear.weight_scale_inv.data = linear.weight_scale_inv.data * 1.5
        return seen

    stock = run()
    with fastpath(ALL) as running:
        assert_same_bytes(run(), stock)
        assert not running.failed
        assert running.record.hits > 8


def lora_weights(layer: Any, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = layer.weight.shape
    down = torch.randn(4, columns, generator=generator).bfloat16()
    return down, torch.randn(rows, 4, generator=generator).bfloat16() / 8


PLACES = {"attention": ("transformer_blocks.0.attn", "to_q"), "modulation": ("transformer_blocks.0.img_mod", "1")}


@pytest.mark.parametrize(("place", "merge"), [("attention", True), ("modulation", False)])
def test_lora_is_switched_between_steps(place: str, merge: bool) -> None:
    """SGLang's own LoRA layer through its life: each state must serve its own results, and from a graph again."""
    from sglang.multimodal_gen.runtime.layers.lora.linear import wrap_with_lora_layer

    def states(model: Any) -> Iterator[str]:
        path, name = PLACES[place]
        parent = model.get_submodule(path)
        base = parent._modules[name]
        yield "without"
        layer = parent._modules[name] = wrap_with_lora_layer(base, lora_rank=4, lora_alpha=8)
        yield "wrapped"
        layer.set_lora_weights(*lora_weights(layer, 1), merge_weights=merge)
        yield "set"
        layer.set_lora_weights(*lora_weights(layer, 2), merge_weights=merge, strength=0.5)
        yield "a second one"
        if merge:
            layer.merge_lora_weights(strength=0.25)
            yield "strength"
            layer.unmerge_lora_weights()
            yield "unmerged"
            layer.merge_lora_weights()
            yield "merged again"
            layer.unmerge_lora_weights()
        else:
            layer.strength = 0.25
            yield "strength"
            layer.merge_lora_weights()
            yield "merged"
            layer.unmerge_lora_weights()
            yield "unmerged"
        layer.disable_lora = True
        yield "disabled"
        layer.disable_lora = False
        yield "enabled"
        layer.set_lora_weights(*lora_weights(layer, 3), merge_weights=merge, clear_existing=True)
        yield "another"
        if merge:
            layer.unmerge_lora_weights()
        parent._modules[name] = base
        yield "removed"

    def run(check: Callable[[str], None] = lambda state: None) -> dict[str, list[Tensor]]:
        model = build()
        outputs = {}
        for state in states(model):
            guided = Guided(model, [])
            for value in (100.0, 300.0, 500.0, 700.0):
                guided.step(*prompts(model, timestep=torch.tensor([value])))
            outputs[state] = guided.outputs
            check(state)
        return outputs

    stock = run()
    with fastpath(REUSING) as running:
        seen: list[int] = []

        def replayed(state: str) -> None:
            assert running.record.hits > sum(seen), f"nothing was replayed: {state}"
            seen.append(running.record.hits - sum(seen))

        fast = run(replayed)
        assert not running.failed
    for state, outputs in stock.items():
        assert_same_bytes(fast[state], outputs)
    distinct = {outputs[-1].view(torch.uint8).numpy().tobytes() for outputs in stock.values()}
    assert len(distinct) >= 5, "LoRA acted"


def test_a_denoiser_that_is_dropped_is_freed_with_its_graphs(other_denoiser) -> None:
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    with fastpath(REUSING) as running:
        for each in (model, other_denoiser):
            warm_up(running, each, inputs)
            play(each, warm)
        weight = weakref.ref(model.transformer_blocks[0].img_mod[1].weight)
        alive = len(running.recorder.alive)
        assert alive == 6
        block = weakref.ref(model.transformer_blocks[0])
        del model, each
        gc.collect()
        assert block() is None
        assert weight() is None
        assert len(running.recorder.alive) == alive // 2
        assert_replays(running, other_denoiser, inputs)


def test_a_plan_that_is_dropped_frees_its_graphs(denoiser) -> None:
    """As a benchmark of several variants makes one plan after another for a denoiser that stays."""
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as running:
        warm_up(running, denoiser, inputs)
        recorder = running.recorder
        assert len(recorder.alive) == 1
    del running
    gc.collect()
    assert recorder.alive == []


def test_a_feature_that_fails_its_parity_takes_all_graphs_along(denoiser, other_denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath(graphs=4) as running:
        for model in (denoiser, other_denoiser):
            warm_up(running, model, inputs)
        guard = running.plan.guard
        guard.run("act_quant", "somewhere", fast=lambda: torch.zeros(2), stock=lambda: torch.ones(2))
        assert guard.failures == 1
        stock = stock_output(denoiser, inputs)
        passes.clear()
        assert_same_bytes(infer(denoiser, inputs), stock)
        assert passes == {"eager": 1}
        assert running.recorder.alive == []
        assert running.recorder.emptied
        for model in (denoiser, other_denoiser):
            warm_up(running, model, inputs)
        assert len(running.recorder.alive) == 2


# --- guard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("guard", "checks"), [("off", 0), ("once", 1), ("sample:3", 3), ("always", 8)])
def test_how_often_the_guard_looks(denoiser, guard: str, checks: int) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    with fastpath(guard=guard) as running:
        for _ in range(9):
            assert_same_bytes(infer(denoiser, inputs), stock)
        assert running.record.hits == 8
        assert running.plan.guard.checks == checks
        assert passes == {"recorded": 1, "eager": 1 + checks}


class Beneath(nn.Module):
    """In the place of a denoiser's last linear: does something before it, `act(output)` with the output."""

    def __init__(self, linear: nn.Module, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = linear
        self.act = act

    @property
    def weight(self) -> Any:
        return self.linear.weight

    def forward(self, x: Tensor) -> Any:
        output, bias = self.linear(x)
        return self.act(output), bias


def with_last(act: Callable[[Tensor], Any], **arch: Any) -> Any:
    model = build(**arch)
    model.proj_out = Beneath(model.proj_out, act)
    return model


def test_a_pass_that_counts_in_python_fails_its_parity_once(caplog) -> None:
    """What the recording bakes in: here, how often the pass has run."""
    counter = [0]

    def act(output: Tensor) -> Tensor:
        counter[0] += not is_recording()
        return output * (1 + counter[0])

    model = with_last(act)
    inputs = denoiser_inputs(model, **REQUEST)
    plain = stock_output(model, inputs) / 2
    counter[0] = 0
    with caplog.at_level(logging.WARNING, logger="sglang_fastpath"), fastpath() as running:
        for expected in range(2, 8):
            assert_same_bytes(infer(model, inputs), plain * expected)
        assert len(running.failed) == 1
        assert running.record.fallbacks["left to stock by the guard"] == 4
        assert running.plan.observed(running.record)[0] is State.PARITY_FAILED
        assert running.recorder.alive == []
    assert sum("parity failed" in message for message in caplog.messages) == 1


# --- captures that fail --------------------------------------------------------------------------------------------


def raising(error: type[Exception]) -> Callable[[Tensor], Tensor]:
    def act(output: Tensor) -> Tensor:
        if is_recording():
            raise error("as a model might")
        return output

    return act


def reading_on_the_host(output: Tensor) -> Tensor:
    return output if output.sum().item() else 2 * output


def of_another_kind(output: Tensor) -> Any:
    return SimpleNamespace(sample=output) if is_recording() else output


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (raising(RuntimeError), "RuntimeError: as a model might"),
        (raising(AssertionError), "AssertionError: as a model might"),
        (reading_on_the_host, "operation not permitted when stream is capturing"),
        (of_another_kind, "output is a SimpleNamespace"),
    ],
    ids=["RuntimeError", "AssertionError", "read on the host", "no tensors"],
)
def test_a_capture_that_fails_leaves_the_signature_to_stock(act, reason: str, caplog) -> None:
    model = with_last(act)
    inputs = denoiser_inputs(model, **REQUEST)
    stock = stock_output(model, inputs)
    with caplog.at_level(logging.WARNING, logger="sglang_fastpath"), fastpath(REUSING) as running:
        for _ in range(5):
            assert_same_bytes(infer(model, inputs), stock)
        assert passes["eager"] == 5
        assert running.recorder.records == 1
        assert running.recorder.alive == []
        assert running.record.hits == 0
        ((why, count),) = ((why, count) for why, count in running.record.fallbacks.items() if why != FIRST)
        assert reason in why
        assert why.startswith(GIVEN_UP)
        assert count == 4, "also the call whose capture failed"
        assert not running.failed
    (warning,) = (message for message in caplog.messages if message.startswith("step_graph"))
    assert reason in warning
    assert "1x15x64" in warning


def test_a_failed_capture_is_of_one_signature_alone() -> None:
    failures = ["once"]

    def act(output: Tensor) -> Tensor:
        if is_recording() and failures:
            raise RuntimeError(failures.pop())
        return output

    model = with_last(act)
    first, second = (denoiser_inputs(model, image_hw=(2, 3), text_tokens=tokens) for tokens in (3, 4))
    stock = stock_output(model, first)
    with fastpath() as running:
        for _ in range(3):
            assert_same_bytes(infer(model, first), stock)
        warm_up(running, model, second)
        assert_replays(running, model, second)
        assert_same_bytes(infer(model, first), stock)
        assert running.recorder.records == 2


def test_a_failed_capture_leaves_the_modulation_right(denoiser) -> None:
    """The pass that would fill the table cannot be captured; the one after it must not read what was never there."""
    model = with_last(lambda output: output)

    def script(guided: Guided) -> None:
        for value in (100.0, 200.0, 300.0, 400.0, 500.0):
            guided.step(*prompts(guided.model, timestep=torch.tensor([value])))

    stock = play(model, script)
    for failing_pass in (1, 2, 3):
        recorder = FailingRecorder(failing_pass)
        with fastpath(REUSING, recorder=recorder) as running:
            assert_same_bytes(play(model, script), stock)
            assert not running.failed


class FailingRecorder(RerunRecorder):
    """Its capture number `failing` fails after the work, as `cudaStreamEndCapture` may."""

    def __init__(self, failing: int, error: type[Exception] = RuntimeError) -> None:
        super().__init__()
        self.failing = failing
        self.error = error

    def record(self, work: Callable[[], Any]) -> Any:
        recorded = super().record(work)
        if self.records == self.failing:
            raise self.error("cudaErrorStreamCaptureInvalidated")
        return recorded


def test_a_recorder_that_fails(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    with fastpath(recorder=FailingRecorder(1)) as running:
        for _ in range(4):
            assert_same_bytes(infer(denoiser, inputs), stock)
        assert running.recorder.alive == []
        (why,) = running.record.fallbacks.keys() - {FIRST}
        assert "cudaErrorStreamCaptureInvalidated" in why


def test_out_of_memory_during_capture_is_no_verdict(denoiser, caplog) -> None:
    first, second = (denoiser_inputs(denoiser, image_hw=(2, 3), text_tokens=tokens) for tokens in (3, 4))
    stock = stock_output(denoiser, second)
    recorder = FailingRecorder(2, torch.OutOfMemoryError)
    with caplog.at_level(logging.WARNING, logger="sglang_fastpath"), fastpath(recorder=recorder) as running:
        warm_up(running, denoiser, first)
        for _ in range(2):
            assert_same_bytes(infer(denoiser, second), stock)
        assert running.record.fallbacks["out of memory during capture"] == 1
        assert (recorder.alive, recorder.emptied) == ([], 1), "the other graphs made room"
        warm_up(running, denoiser, second)
        warm_up(running, denoiser, first)
        assert not running.failed
    assert not caplog.messages


# --- counting ------------------------------------------------------------------------------------------------------


def test_features_count_the_same_from_graphs_as_eagerly() -> None:
    """Hits and fallbacks of a block that is fused and one that is not, with and without graphs."""

    def counts(new: Plan) -> dict[str, tuple[int, dict[str, int]]]:
        return {id: (new.records[id].hits, dict(new.records[id].fallbacks)) for id in BLOCK_FEATURES}

    def of(model: Any, running: Running, number: int) -> dict[str, tuple[int, dict[str, int]]]:
        before = counts(running.plan)
        for _ in range(number):
            infer(model, inputs)
        return {
            id: (hits - before[id][0], dict(Counter(fallbacks) - Counter(before[id][1])))
            for id, (hits, fallbacks) in counts(running.plan).items()
        }

    model = build(fp8=True)
    model.transformer_blocks[1].attn.to_k.bias = None  # this block is stock's
    inputs = denoiser_inputs(model, **REQUEST)
    with fastpath(BLOCK_FEATURES) as eagerly:
        for _ in range(8):
            infer(model, inputs)
        expected = of(model, eagerly, 5)
        assert all(hits == 5 and sum(fallbacks.values()) == 5 for hits, fallbacks in expected.values())
    with fastpath((*BLOCK_FEATURES, "step_graph")) as running:
        warm_up(running, model, inputs)
        passes.clear()
        assert of(model, running, 5) == expected
        assert not passes


def test_a_capture_counts_nothing_and_its_check_counts_once() -> None:
    model = build(fp8=True)
    inputs = denoiser_inputs(model, **REQUEST)
    with fastpath((*BLOCK_FEATURES, "step_graph")) as running:
        while not running.recorder.records:
            before = running.plan.records["act_quant"].hits
            infer(model, inputs)
        assert running.plan.records["act_quant"].hits == before + 2
        assert running.record.hits == 1


def test_the_reuse_counts_the_modulation_it_saved(denoiser) -> None:
    with fastpath(REUSING) as running:
        play(denoiser, warm)
        before = running.plan.records["cfg_mod_cache"].hits
        in_one_step(denoiser, lambda: [call(denoiser, inputs) for inputs in prompts(denoiser)] and None)
        assert running.plan.records["cfg_mod_cache"].hits == before + LINEARS


# --- sites ---------------------------------------------------------------------------------------------------------


def site_objects() -> list[Any]:
    from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2Transformer2DModel
    from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    return [
        vars(DenoisingStage)["_run_denoising_step"],
        vars(ReplicatedLinear)["forward"],
        vars(QwenImageTransformer2DModel)["forward"],
        vars(Flux2Transformer2DModel)["forward"],
    ]


@pytest.mark.parametrize("on", [ALONE, REUSING, ALL], ids="+".join)
def test_the_sites_are_restored_and_a_plan_keeps_its_graphs(fp8_denoiser, on: tuple[str, ...]) -> None:
    inputs = denoiser_inputs(fp8_denoiser, **REQUEST)
    original = site_objects()
    running = prepare(on)
    with applied(running):
        plugin.verify(running.plan)
        assert all(running.plan.records[id].state is State.ACTIVE for id in on)
        assert not any(now is before for now, before in zip(site_objects(), original, strict=True))
        warm_up(running, fp8_denoiser, inputs)
    assert all(now is before for now, before in zip(site_objects(), original, strict=True))
    passes.clear()
    infer(fp8_denoiser, inputs)
    assert passes == {"eager": 1}
    records = running.recorder.records
    with applied(running):
        assert_replays(running, fp8_denoiser, inputs)
    assert running.recorder.records == records
    assert all(now is before for now, before in zip(site_objects(), original, strict=True))


def test_a_feature_that_loses_a_shared_site_leaves_stock_behind(denoiser) -> None:
    """Another plugin takes the denoiser's forward: both features stand aside, and nothing of theirs stays."""
    from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel

    original = site_objects()
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = stock_output(denoiser, inputs)
    with fastpath(REUSING) as running:
        warm_up(running, denoiser, inputs)

        def foreign(model: nn.Module, **kwargs: Any) -> Tensor:
            return 2 * original[2](model, **kwargs)

        with attribute(QwenImageTransformer2DModel, "forward", foreign):
            plugin.verify(running.plan)
            assert {running.plan.records[id].state for id in REUSING} == {State.DRIFTED}
            assert_same_bytes(infer(denoiser, inputs), 2 * stock)
            plugin.deactivate()
            assert site_objects()[2] is foreign
            assert all(now is before for now, before in zip(site_objects()[:2], original[:2], strict=True))
        QwenImageTransformer2DModel.forward = original[2]


def test_cfg_mod_cache_that_is_lost_alone_leaves_its_sites(denoiser) -> None:
    """Reverted from beneath: afterwards, in the end, stock's own objects are back."""
    original = site_objects()
    with fastpath(REUSING) as running:
        lost = plugin._patches["sglang_fastpath.patches.diffusion.qwen_image_modulation"]
        lost._lose("for the test")
        assert running.plan.records["cfg_mod_cache"].state is State.DRIFTED
        play(denoiser, warm)
    assert all(now is before for now, before in zip(site_objects(), original, strict=True))
