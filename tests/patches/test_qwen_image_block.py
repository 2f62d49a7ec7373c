"""The fused forward of Qwen-Image's block on SGLang's own denoiser: stock's bytes from every subset of its features,
whatever is asked of the denoiser and whatever is done to it between two passes. On a CPU, with FP8 emulated."""

import functools
import gc
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from denoiser_calls import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sglang_fastpath.kernels import act_quant, gated_residual, norm_quant, qkv_epilogue
from sglang_fastpath.patches.diffusion import block_steps, fp8_cpu_emulation, qwen_image_forward
from stock_chains import assert_same_bytes
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_fastpath import contracts, envs, plan, plugin
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs, start_runtime
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import FeatureRecord, Plan, State

FEATURES = ("scale_prepack", "norm_quant", "qkv_epilogue", "act_quant", "bias_fold")
SUBSETS = [on for size in range(len(FEATURES) + 1) for on in itertools.combinations(FEATURES, size)]
LAYERS = 2
REQUEST: dict[str, Any] = {"image_hw": (3, 5), "text_tokens": 6}
# Two prompts of different length take turns, and share the modulation of a step.
GUIDANCE: dict[str, Any] = {"steps": 2, "image_hw": (3, 3), "text_tokens": 5, "negative_tokens": 3}
AHEAD = "norm computed ahead"
KERNELS = {
    "norm_quant": norm_quant.can_use,
    "qkv_epilogue": qkv_epilogue.can_use,
    "act_quant": act_quant.can_use,
    "gated_residual": gated_residual.can_use,
}
LAUNCHERS = (*KERNELS, "gemm", "grouped_gemm")
launches: Counter[str] = Counter()  # in the latest pass, by kernel
refusals: list[str] = []  # why a kernel that was launched should not have been


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the operations are too small to share
    yield
    torch.set_num_threads(threads)
    revert()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts `launches`. `applied` fails if a kernel was given what its `can_use` refuses."""
    refusals.clear()

    def counting(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launcher(text: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
            launches.update([name, *[AHEAD] * bool(kwargs.get("zero_added"))])
            if name in KERNELS:
                refusals.extend(f"{name}: {why}" for stream in (text, image) if (why := KERNELS[name](stream)))
            return launch(text, image, *args, **kwargs)

        return launcher

    for name in LAUNCHERS:
        for module in users_of(name):
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))


def users_of(launcher: str) -> list[Any]:
    """The modules that a block's forward calls it from."""
    return [module for module in (qwen_image_forward, block_steps) if hasattr(module, launcher)]


@pytest.fixture(scope="module")
def denoiser() -> nn.Module:
    return build()


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """Its block in the middle has its norm computed ahead, and computes one."""
    return build(layers=3)


@pytest.fixture(scope="module")
def guided(denoiser) -> list[Tensor]:
    """Stock's latents after each step."""
    return [latents.clone() for latents in GuidanceLoop(denoiser, **GUIDANCE)]


@pytest.fixture(scope="module")
def other_denoiser() -> nn.Module:
    return build(seed=1)


def build(**arch: Any) -> Any:
    return build_qwen_image(**{"layers": LAYERS, "fp8": True} | arch)


@functools.cache
def decided(on: tuple[str, ...]) -> Plan:
    """Which features are active: to find out, SGLang's sources are read, which takes longer than a pass."""
    switches = {feature.id: feature.id in on for feature in CATALOGUE}
    return plan.make_plan(envs.Settings(enabled=True, emulate=True, switches=switches), contracts.installed_release())


def make_plan(on: tuple[str, ...] = FEATURES, *, guard: str = "once", strict: bool = False) -> Plan:
    first = decided(on)
    records = {id: FeatureRecord(record.feature, record.state, record.reason) for id, record in first.records.items()}
    return Plan(replace(first.settings, guard=guard, strict=strict), first.release, records)


@contextmanager
def applied(new: Plan) -> Iterator[Plan]:
    plugin.apply(new)
    try:
        yield new
        assert not refusals
    finally:
        plugin.deactivate()


@contextmanager
def fastpath(on: tuple[str, ...] = FEATURES, *, guard: str = "once") -> Iterator[Plan]:
    with applied(make_plan(on, guard=guard)) as new:
        yield new


def infer(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    launches.clear()
    with torch.inference_mode():
        return call(model, inputs)


def stock_output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What stock gives now. A plan in force is put aside meanwhile, and applied again."""
    current = plan.current()
    plugin.deactivate()
    try:
        return infer(model, inputs)
    finally:
        if current is not None:
            plugin.apply(current)


def assert_like_stock(model: nn.Module, inputs: dict[str, Any], *, passes: int | None = None) -> int:
    """Compares so many passes with stock, or as many as the guard needs until it only trusts; returns how many."""
    stock = stock_output(model, inputs)
    current = plan.current()
    assert current is not None
    for count in range(1, passes or 12):
        checks = current.guard.counters["checks"]
        assert_same_bytes(infer(model, inputs), stock)
        if not passes and current.guard.counters["checks"] == checks:
            return count
    assert passes, "the guard goes on checking the same request"
    assert_same_bytes(infer(model, inputs), stock)
    return passes


def hits(new: Plan) -> dict[str, int]:
    return {id: new.records[id].hits for id in FEATURES}


def new_hits(new: Plan, model: nn.Module, inputs: dict[str, Any]) -> dict[str, int]:
    """How many blocks of one more pass each feature ran in."""
    before = hits(new)
    infer(model, inputs)
    return {id: count - before[id] for id, count in hits(new).items()}


def each(count: int, *, on: tuple[str, ...] = FEATURES) -> dict[str, int]:
    return {id: count if id in on else 0 for id in FEATURES}


def fallbacks(new: Plan, on: tuple[str, ...] = FEATURES) -> dict[str, int]:
    """Fallbacks by reason, which must be the same for all features in `on`."""
    counts = [dict(new.records[id].fallbacks) for id in on]
    assert all(count == counts[0] for count in counts)
    return counts[0]


def failed(new: Plan) -> list[dict[str, Any]]:
    return [verdict for verdict in new.guard.verdicts if verdict["verdict"] != "admitted"]


def signatures(new: Plan) -> str:
    return "\n".join(verdict["signature"] for verdict in new.guard.verdicts)


# --- every subset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", SUBSETS, ids=lambda on: "+".join(on) or "none")
def test_every_subset_gives_stocks_bytes(deep, on: tuple[str, ...]) -> None:
    inputs = denoiser_inputs(deep, **REQUEST)
    with fastpath(on) as new:
        passes = assert_like_stock(deep, inputs, passes=5)
        assert launches[AHEAD] == (2 if "norm_quant" in on else 0)
        assert hits(new) == each(3 * passes, on=on)
        assert all(not new.records[id].fallbacks for id in FEATURES)
        assert not failed(new)
        assert ("norm by the block before" in signatures(new)) is ("norm_quant" in on)


@pytest.mark.parametrize("on", SUBSETS, ids=lambda on: "+".join(on) or "none")
def test_every_subset_beside_the_modulation_cache(denoiser, guided, on: tuple[str, ...]) -> None:
    with fastpath((*on, "cfg_mod_cache")) as new:
        for latents, expected in zip(GuidanceLoop(denoiser, **GUIDANCE), guided, strict=True):
            assert_same_bytes(latents, expected)
        assert hits(new) == each(2 * 2 * LAYERS, on=on)
        assert new.records["cfg_mod_cache"].hits >= 2 * 2 * LAYERS, "all modulation of the second prompt is reused"
        assert all(not record.fallbacks for record in new.records.values())
        assert not failed(new)


def test_the_features_run_what_they_say(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    launched = {}
    for on in (*((id,) for id in FEATURES), FEATURES):
        with fastpath(on):
            assert_like_stock(denoiser, inputs)
            launched[on] = {name for name in LAUNCHERS if launches[name]}
    assert launched[("norm_quant",)] == {"norm_quant", "gemm"}
    assert launched[("qkv_epilogue",)] == {"qkv_epilogue"}
    assert launched[("act_quant",)] == {"act_quant", "gemm"}
    assert launched[("bias_fold",)] == {"gated_residual"}
    assert launched[("scale_prepack",)] == {"gemm"}
    assert {"norm_quant", "qkv_epilogue", "act_quant", "gated_residual", "grouped_gemm"} <= launched[FEATURES]


# --- shapes --------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    image_hw=st.tuples(st.integers(1, 12), st.integers(1, 8)),
    text_tokens=st.integers(1, 130),
    batch=st.integers(1, 2),
    on=st.sampled_from(SUBSETS),
)
def test_any_number_of_tokens(denoiser, image_hw, text_tokens: int, batch: int, on: tuple[str, ...]) -> None:
    inputs = denoiser_inputs(denoiser, image_hw=image_hw, text_tokens=text_tokens, batch=batch)
    with fastpath(on) as new:
        passes = assert_like_stock(denoiser, inputs, passes=5)
        assert hits(new) == each(passes * LAYERS, on=on)
        assert not failed(new)


@pytest.mark.parametrize(("image_hw", "text_tokens"), [((1, 1), 1), ((1, 1), 129), ((8, 16), 128), ((3, 43), 127)])
def test_all_features_at_the_edges_of_tiles(denoiser, image_hw: tuple[int, int], text_tokens: int) -> None:
    with fastpath() as new:
        inputs = denoiser_inputs(denoiser, image_hw=image_hw, text_tokens=text_tokens)
        passes = assert_like_stock(denoiser, inputs, passes=5)
        assert hits(new) == each(passes * LAYERS)
        assert not failed(new)


def test_without_text(denoiser) -> None:
    with fastpath():
        assert_like_stock(denoiser, denoiser_inputs(denoiser, image_hw=(2, 2), text_tokens=0))


@pytest.mark.parametrize("text_tokens", [2, 7])
def test_a_batch_is_as_its_elements(denoiser, text_tokens: int) -> None:
    """As many text tokens as batch elements is where a modulation could be broadcast along the wrong dimension."""
    inputs = denoiser_inputs(denoiser, image_hw=(3, 3), text_tokens=text_tokens, batch=2)
    per_element = {"hidden_states", "encoder_hidden_states", "timestep"}
    with fastpath() as new:
        passes = assert_like_stock(denoiser, inputs)
        assert hits(new) == each(passes * LAYERS)
        together = infer(denoiser, inputs)
        for index in range(2):
            alone = {
                name: value[index : index + 1] if name in per_element else value for name, value in inputs.items()
            } | {"txt_seq_lens": [text_tokens], "img_shapes": inputs["img_shapes"][:1]}
            torch.testing.assert_close(together[index : index + 1], infer(denoiser, alone), atol=0.02, rtol=0.02)


def test_two_resolutions_in_turns(denoiser) -> None:
    requests = [denoiser_inputs(denoiser, image_hw=hw, text_tokens=n) for hw, n in (((3, 5), 6), ((4, 4), 9))]
    stock = [infer(denoiser, inputs) for inputs in requests]
    with fastpath() as new:
        for _ in range(6):
            for inputs, expected in zip(requests, stock, strict=True):
                assert_same_bytes(infer(denoiser, inputs), expected)
        assert launches[AHEAD] == LAYERS - 1
        assert hits(new) == each(2 * 6 * LAYERS)
        assert not failed(new)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_width_that_the_norm_refuses_leaves_the_norm_to_stock(heads: int) -> None:
    model = build(heads=heads)
    others = tuple(id for id in FEATURES if id != "norm_quant")
    with fastpath() as new:
        passes = assert_like_stock(model, denoiser_inputs(model, **REQUEST))
        assert hits(new) == each(passes * LAYERS, on=others)
        assert any(f"width {128 * heads}" in why for why in new.records["norm_quant"].fallbacks)
        state, reason = new.observed(new.records["norm_quant"])
    assert state is State.NEVER_HIT
    assert f"width {128 * heads}" in reason


@dataclass(frozen=True)
class Pass:
    """One forward pass of some request, on one of two models."""

    other_model: bool
    request: int
    mask: bool
    controlnet: bool


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.builds(Pass, st.booleans(), st.integers(0, 1), st.booleans(), st.booleans()), min_size=4, max_size=6),
    st.sampled_from(["once", "sample:3"]),
)
def test_any_sequence_of_passes(denoiser, other_denoiser, sequence: list[Pass], guard: str) -> None:
    @functools.cache
    def prepared(item: Pass) -> tuple[nn.Module, dict[str, Any], Tensor]:
        model = other_denoiser if item.other_model else denoiser
        batch, tokens, hw = [(1, 6, (3, 5)), (2, 4, (2, 3))][item.request]
        inputs = denoiser_inputs(model, image_hw=hw, text_tokens=tokens, batch=batch, seed=item.request)
        if item.mask:
            inputs["encoder_hidden_states_mask"] = text_mask(tokens, *range(tokens, tokens - batch, -1))
        if item.controlnet:
            inputs["controlnet_block_samples"] = residuals(batch, hw[0] * hw[1])
        return model, inputs, stock_output(model, inputs)

    with fastpath(guard=guard) as new:
        for item in sequence:
            model, inputs, stock = prepared(item)
            assert_same_bytes(infer(model, inputs), stock)
        assert not failed(new)
        assert hits(new) == each(len(sequence) * LAYERS)


def text_mask(tokens: int, *lengths: int) -> Tensor:
    return torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)


def residuals(batch: int, image_tokens: int, *, count: int = LAYERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(batch, image_tokens, 256, generator=generator).bfloat16() for _ in range(count)]


# --- what else a request may bring ---------------------------------------------------------------------------------


def edit_inputs(model: Any, shapes: list[tuple[int, int, int]], *, text_tokens: int = 6) -> dict[str, Any]:
    """A request whose image sequence holds several images, as the edit and layered pipelines make it."""
    from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig

    tokens = sum(frames * height * width for frames, height, width in shapes)
    inputs = denoiser_inputs(model, image_hw=(1, tokens), text_tokens=text_tokens)
    inputs["img_shapes"] = [shapes]
    inputs["freqs_cis"] = QwenImagePipelineConfig.get_freqs_cis(
        [shapes], [text_tokens], model.rotary_emb, "cpu", torch.bfloat16
    )
    return inputs


@pytest.mark.parametrize("shapes", [[(1, 4, 5), (1, 5, 5), (1, 2, 5)], [(1, 3, 3), (1, 3, 3)], [(1, 3, 3)]])
def test_zero_cond_t_runs_all_but_the_norm(shapes: list[tuple[int, int, int]]) -> None:
    model = build(zero_cond_t=True)
    others = tuple(id for id in FEATURES if id != "norm_quant")
    with fastpath() as new:
        passes = assert_like_stock(model, edit_inputs(model, shapes))
        assert hits(new) == each(passes * LAYERS, on=others)
        assert any("modulate_index" in why for why in new.records["norm_quant"].fallbacks)
        assert not failed(new)
        assert launches["gated_residual"], "with a gate of each token"
        assert not launches[AHEAD]


def test_every_call_that_a_feature_leaves_to_stock_is_counted() -> None:
    model = build(zero_cond_t=True)
    with fastpath() as new:
        assert_like_stock(model, edit_inputs(model, [(1, 2, 3), (1, 3, 2)]), passes=3)
        assert sum(new.records["norm_quant"].fallbacks.values()) == 3 * LAYERS


@pytest.mark.parametrize("on", [(id,) for id in FEATURES if id != "norm_quant"], ids=lambda on: on[0])
def test_zero_cond_t_with_one_feature(on: tuple[str, ...]) -> None:
    model = build(zero_cond_t=True)
    with fastpath(on) as new:
        assert_like_stock(model, edit_inputs(model, [(1, 2, 3), (1, 3, 2)]), passes=2)
        assert hits(new) == each(2 * LAYERS, on=on)


def test_a_layered_model() -> None:
    model = build(use_additional_t_cond=True, use_layer3d_rope=True)
    inputs = edit_inputs(model, [(1, 2, 3)] * 4) | {"additional_t_cond": torch.tensor([0])}
    with fastpath() as new:
        passes = assert_like_stock(model, inputs)
        assert hits(new) == each(passes * LAYERS)
        assert not failed(new)
        assert launches[AHEAD]


@pytest.mark.parametrize("lengths", [(6, 4), (1, 6), (2, 3), (6,)])
def test_prompts_of_different_length_in_one_batch(denoiser, lengths: tuple[int, ...]) -> None:
    inputs = denoiser_inputs(denoiser, image_hw=(3, 5), text_tokens=6, batch=len(lengths))
    unmasked = infer(denoiser, inputs)
    inputs["encoder_hidden_states_mask"] = text_mask(6, *lengths)
    assert torch.equal(infer(denoiser, inputs), unmasked) is (set(lengths) == {6}), "stock honours the mask"
    with fastpath() as new:
        passes = assert_like_stock(denoiser, inputs)
        assert hits(new) == each(passes * LAYERS)
        assert launches[AHEAD]
        assert not failed(new)


def test_a_mask_that_changes_between_passes(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, image_hw=(3, 5), text_tokens=6, batch=2)
    with fastpath() as new:
        for lengths in ((6, 4), (3, 6), (1, 1), (6, 6)):
            assert_like_stock(denoiser, inputs | {"encoder_hidden_states_mask": text_mask(6, *lengths)}, passes=3)
        assert_like_stock(denoiser, inputs, passes=3)
        assert not failed(new)


def test_a_mask_in_the_attention_arguments(denoiser) -> None:
    """By the name that stock's attention looks at first it is passed on, by the other one the block is stock's."""
    inputs = denoiser_inputs(denoiser, **REQUEST)
    tokens = 6 + 15
    mask = torch.ones(1, tokens, dtype=torch.bool)
    mask[:, 3:6] = False
    with fastpath() as new:
        assert_like_stock(denoiser, inputs | {"attention_kwargs": {"attn_mask": mask}}, passes=3)
        assert hits(new) == each(3 * LAYERS)
        assert_like_stock(denoiser, inputs | {"attention_kwargs": {"attention_mask": mask}}, passes=2)
        assert hits(new) == each(3 * LAYERS)
        ((reason, count),) = fallbacks(new).items()
        assert "mask has another name" in reason
        assert count == 2 * LAYERS


@pytest.mark.parametrize("count", [LAYERS, 1])
def test_controlnet_residuals(denoiser, count: int) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    plain = infer(denoiser, inputs)
    inputs["controlnet_block_samples"] = residuals(1, 15, count=count)
    assert not torch.equal(infer(denoiser, inputs), plain)
    with fastpath() as new:
        passes = assert_like_stock(denoiser, inputs)
        assert hits(new) == each(passes * LAYERS)
        assert not fallbacks(new)
        assert not launches[AHEAD], "no block takes what the one before it returned"


def test_controlnet_now_and_then_ends_what_is_computed_ahead(denoiser) -> None:
    plain = denoiser_inputs(denoiser, **REQUEST)
    control = plain | {"controlnet_block_samples": residuals(1, 15)}
    computed = []
    with fastpath() as new:
        for inputs in (control, plain):
            assert_like_stock(denoiser, inputs)
        for _ in range(4):
            assert_like_stock(denoiser, plain, passes=2)
            assert_like_stock(denoiser, control, passes=1)
            computed.append(launches[AHEAD])
        assert_like_stock(denoiser, plain)
        assert not launches[AHEAD]
        assert not failed(new)
        assert in_vain(new) == 2
    assert computed == [1, 1, 0, 0]


def in_vain(new: Plan) -> int:
    return sum(count for why, count in new.records["norm_quant"].fallbacks.items() if "in vain" in why)


def test_blocks_that_are_skipped_now_and_then_end_what_is_computed_ahead() -> None:
    """As step caches do: the block after the skipped one is given the outputs of the one before it."""
    model = build(layers=3)
    first, second, third = model.transformer_blocks
    inputs = denoiser_inputs(model, **REQUEST)
    misses = []
    with fastpath() as new:
        for blocks in ((first, second, third), (first, third)) * 4:
            model.transformer_blocks = nn.ModuleList(blocks)
            assert_like_stock(model, inputs)
            misses.append(in_vain(new))
        assert not failed(new)
    assert misses[-1] == misses[-3] <= 2, "after the first block comes now this one, now that"


def test_a_block_called_by_position_is_stocks(denoiser) -> None:
    inputs = block_inputs(denoiser)
    names = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb_img_silu", "temb_txt_silu")
    arguments = [inputs.pop(name) for name in names]
    assert_block_left_to_stock(denoiser, "by position", lambda: denoiser.transformer_blocks[0](*arguments, **inputs))


def test_a_block_given_a_text_mask_alone_is_stocks(denoiser) -> None:
    inputs = block_inputs(denoiser) | {"encoder_hidden_states_mask": text_mask(6, 4)}
    assert_block_left_to_stock(denoiser, "mask of its own", lambda: denoiser.transformer_blocks[0](**inputs))


def test_streams_that_are_not_contiguous_are_stocks(denoiser) -> None:
    inputs = block_inputs(denoiser)
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"]] * 2, dim=-1)[..., :256]
    assert_block_left_to_stock(denoiser, "not contiguous", lambda: denoiser.transformer_blocks[0](**inputs))


def test_a_rotary_table_that_the_kernel_refuses_is_stocks(denoiser) -> None:
    """Of the same shape as one that was admitted before."""
    inputs = block_inputs(denoiser)
    double = tuple(table.double() for table in inputs["image_rotary_emb"])
    block = denoiser.transformer_blocks[0]
    with torch.inference_mode(), call_context():
        stock = block(**inputs | {"image_rotary_emb": double})
        with fastpath():
            for _ in range(3):
                block(**inputs)
            for _ in range(3):
                assert_same_bytes(block(**inputs | {"image_rotary_emb": double}), stock)


def block_inputs(model: nn.Module) -> dict[str, Any]:
    """What the first block is given in a pass."""
    seen: list[dict[str, Any]] = []
    hook = model.transformer_blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    infer(model, denoiser_inputs(model, **REQUEST))
    hook.remove()
    return seen[0]


@contextmanager
def call_context() -> Iterator[None]:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    with set_forward_context(current_timestep=0, attn_metadata=None):
        yield


def assert_block_left_to_stock(model: nn.Module, reason: str, run: Callable[[], object]) -> None:
    with torch.inference_mode(), call_context():
        stock = run()
        with fastpath() as new:
            for _ in range(2):
                assert_same_bytes(run(), stock)
            assert hits(new) == each(0)
            ((why, count),) = fallbacks(new).items()
    assert reason in why
    assert count == 2


# --- LoRA, hooks, replaced modules ---------------------------------------------------------------------------------


def low_rank(linear: Any, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(4, linear.input_size, generator=generator).bfloat16()
    b = (0.1 * torch.randn(linear.output_size, 4, generator=generator)).bfloat16()
    return a, b


@pytest.mark.parametrize("path", ["1.attn.add_k_proj", "1.attn.to_out.0", "0.txt_mlp.net.0.proj", "1.img_mlp.net.2"])
def test_lora_comes_changes_and_goes(path: str) -> None:
    from sglang.multimodal_gen.runtime.layers.lora.linear import replace_submodule, wrap_with_lora_layer

    model = build()
    name = f"transformer_blocks.{path}"
    inputs = denoiser_inputs(model, **REQUEST)
    bare = infer(model, inputs)
    with fastpath() as new:
        assert_like_stock(model, inputs)
        linear = model.get_submodule(name)
        wrapper = wrap_with_lora_layer(linear, lora_rank=4, lora_alpha=8)
        replace_submodule(model, name, wrapper)
        outputs = [bare]
        for stage in range(4):
            if stage:
                wrapper.set_lora_weights(*low_rank(linear, stage), clear_existing=True, merge_weights=stage == 3)
                outputs.append(stock_output(model, inputs))
            assert_like_stock(model, inputs, passes=2)
        assert fallbacks(new) == {f"{path[2:]} is a {type(wrapper).__name__}": 8}, "of one block, in eight passes"
        assert new_hits(new, model, inputs) == each(LAYERS - 1)

        replace_submodule(model, name, linear)  # with the last adapter merged into its weight
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)
        wrapper.unmerge_lora_weights()
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)
        assert_same_bytes(infer(model, inputs), bare)
        assert not failed(new)
    assert len({output.view(torch.uint8).numpy().tobytes() for output in outputs}) == 4, "each adapter counts"


def test_lora_on_the_modulation_reaches_the_fused_forward() -> None:
    """Also where the modulation is computed ahead, at the end of the block before."""
    from sglang.multimodal_gen.runtime.layers.lora.linear import replace_submodule, wrap_with_lora_layer

    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    with fastpath() as new:
        assert_like_stock(model, inputs)
        for stream in ("img_mod", "txt_mod"):
            linear = model.get_submodule(f"transformer_blocks.1.{stream}.1")
            wrapper = wrap_with_lora_layer(linear, lora_rank=4, lora_alpha=8)
            replace_submodule(model, f"transformer_blocks.1.{stream}.1", wrapper)
            for seed in range(2):
                wrapper.set_lora_weights(*low_rank(linear, seed), clear_existing=True, merge_weights=False)
                assert_like_stock(model, inputs, passes=2)
        assert new_hits(new, model, inputs) == each(LAYERS)
        assert not failed(new)


HOOKS = ("register_forward_hook", "register_forward_pre_hook")


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_any_module_of_a_block_run_as_often_as_in_stock(register: str) -> None:
    model = build()
    # On a GPU stock itself goes around the layer norm within a norm.
    modules = {path: m for path, m in model.transformer_blocks[1].named_modules() if not path.endswith(".norm")}
    inputs = denoiser_inputs(model, **REQUEST)
    runs: Counter[str] = Counter()

    def hook(path: str) -> Any:
        return getattr(modules[path], register)(lambda *_: runs.update([path]))

    handles = [hook(path) for path in modules]
    infer(model, inputs)
    stock = dict(runs)
    for handle in handles:
        handle.remove()
    runs.clear()
    wrong = {}
    with fastpath() as new:
        assert_like_stock(model, inputs)
        for path in modules:
            handle = hook(path)
            infer(model, inputs)
            handle.remove()
            if runs[path] < stock.get(path, 0):
                wrong[path] = runs[path]
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)
        assert not failed(new)
    assert {"", "attn", "attn.attn", "attn.to_q", "img_mlp", "img_mlp.net.2", "img_norm1"} <= stock.keys()
    assert not wrong, f"ran less often than {stock}"


def test_hooks_that_change_what_a_module_returns() -> None:
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    block = model.transformer_blocks[1]

    def doubled(module: nn.Module, args: Any, output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    with fastpath() as new:
        assert_like_stock(model, inputs)
        bare = infer(model, inputs)
        for path in ("attn.to_v", "attn", "img_mlp.net.0.proj", "img_mlp", "img_norm2", "txt_norm1", "img_mod.1"):
            with block.get_submodule(path).register_forward_hook(doubled):
                assert_like_stock(model, inputs, passes=3)
                assert not torch.equal(infer(model, inputs), bare), path
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)
        assert not failed(new)


def write_into(stream: Tensor) -> None:
    stream.add_(1)


@pytest.mark.parametrize("where", ["after the block", "before the next one"])
def test_hooks_that_write_into_the_streams_between_two_blocks(where: str) -> None:
    """In place: the next block is given the very tensors that this one returned, with other values."""
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    first, second = model.transformer_blocks
    with fastpath() as new:
        assert_like_stock(model, inputs)
        bare = infer(model, inputs)
        if where == "after the block":
            handle = first.register_forward_hook(lambda block, args, output: write_into(output[1]))
        else:
            handle = second.register_forward_pre_hook(
                lambda block, args, kwargs: write_into(kwargs["hidden_states"]), with_kwargs=True
            )
        with handle:
            assert_like_stock(model, inputs)
            assert not torch.equal(infer(model, inputs), bare)
            assert new_hits(new, model, inputs) == each(LAYERS)
        assert_like_stock(model, inputs)
        assert not failed(new)


def test_global_hooks_see_every_module(denoiser) -> None:
    """`register_module_forward_hook`: profilers and debuggers hook all modules of the process."""
    inputs = denoiser_inputs(denoiser, **REQUEST)
    runs: Counter[str] = Counter()
    names = {module: name for name, module in denoiser.named_modules()}

    def passes_seen() -> dict[str, int]:
        runs.clear()
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: runs.update([names[module]]))
        with handle:
            infer(denoiser, inputs)
        return dict(runs)

    stock = passes_seen()
    with fastpath():
        assert_like_stock(denoiser, inputs)
        assert passes_seen() == stock


@pytest.mark.parametrize("path", ["attn.to_v", "img_mlp.net.0.proj", "img_norm2", "attn"])
def test_a_forward_replaced_on_one_module_is_noticed(path: str) -> None:
    """As LoRA networks and offloading tools outside SGLang do it."""
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    with fastpath() as new:
        assert_like_stock(model, inputs)
        bare = infer(model, inputs)
        module = model.transformer_blocks[1].get_submodule(path)
        original = module.forward

        def doubled(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

        module.forward = doubled
        assert not torch.equal(stock_output(model, inputs), bare)
        assert_like_stock(model, inputs, passes=3)
        del module.forward
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)


class Doubled(nn.Module):
    """Around any module, without its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


@pytest.mark.parametrize(
    "path",
    [
        "img_mlp.net.2",
        "img_mlp.net.0",
        "img_mlp",
        "img_norm1",
        "attn.norm_added_q",
        "attn",
    ],
)
def test_a_replaced_module_is_noticed(path: str) -> None:
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    parent, _, name = f"transformer_blocks.1.{path}".rpartition(".")
    with fastpath() as new:
        assert_like_stock(model, inputs)
        original = model.get_submodule(f"{parent}.{name}")
        # In the dictionary: blocks read attributes of some modules (`eps`), which the wrapper lacks.
        wrapped = Doubled(original)
        if hasattr(original, "eps"):
            wrapped.eps = original.eps
            wrapped.norm = original.norm if hasattr(original, "norm") else None
        if hasattr(original, "variance_epsilon"):
            wrapped.variance_epsilon, wrapped.weight = original.variance_epsilon, original.weight
        model.get_submodule(parent)._modules[name] = wrapped
        assert_like_stock(model, inputs, passes=3)
        model.get_submodule(parent)._modules[name] = original
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)


# --- weights -------------------------------------------------------------------------------------------------------


def copy_into(owner: nn.Module, name: str, value: Tensor) -> None:
    owner._parameters[name].data.copy_(value)


def new_data(owner: nn.Module, name: str, value: Tensor) -> None:
    owner._parameters[name].data = value


def new_parameter(owner: nn.Module, name: str, value: Tensor) -> None:
    setattr(owner, name, nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize(
    "path",
    [
        "1.attn.to_q.weight",
        "1.attn.add_v_proj.weight_scale_inv",
        "0.attn.to_add_out.weight",
        "0.txt_mlp.net.0.proj.weight",
        "1.img_mlp.net.2.bias",
        "1.attn.norm_q.weight",
        "1.attn.norm_added_k.weight",
        "1.img_mod.1.weight",
    ],
)
def test_a_changed_parameter_is_used_at_once(path: str) -> None:
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    owner, _, name = f"transformer_blocks.{path}".rpartition(".")
    module = model.get_submodule(owner)
    with fastpath() as new:
        assert_like_stock(model, inputs)
        output = infer(model, inputs)
        for change in (copy_into, new_data, new_parameter, copy_into):
            value, before = module.get_parameter(name).data, output
            change(module, name, (0.5 * value.float()).to(value.dtype))
            assert_like_stock(model, inputs, passes=1)
            output = infer(model, inputs)
            assert not torch.equal(output, before), change.__name__
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)
        assert not failed(new)


@pytest.mark.parametrize("assign", [False, True])
def test_reloaded_weights_are_as_loaded_afresh(assign: bool) -> None:
    model, another = build(), build(seed=1)
    states = [{name: value.clone() for name, value in m.state_dict().items()} for m in (model, another)]
    inputs = denoiser_inputs(model, **REQUEST)
    fresh = [infer(m, inputs) for m in (model, another)]
    assert not torch.equal(*fresh)
    with fastpath() as new:
        for index in (0, 1, 0, 1):
            model.load_state_dict({name: value.clone() for name, value in states[index].items()}, assign=assign)
            for _ in range(2):
                assert_same_bytes(infer(model, inputs), fresh[index])
        assert hits(new) == each(4 * 2 * LAYERS)
        assert not failed(new)


def test_parameters_that_move_in_every_pass_stay_fused_and_leave_nothing_behind() -> None:
    """What an offload of the whole denoiser between requests amounts to."""
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    stock = infer(model, inputs)
    left: list[StorageWeakRef] = []
    with fastpath() as new:
        for _ in range(4):
            left += [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            assert_same_bytes(infer(model, inputs), stock)
        assert hits(new) == each(4 * LAYERS)
        assert not failed(new)
        gc.collect()
        assert all(storage.expired() for storage in left), "no merged tensor outlives its parameters"


def test_layerwise_offload_keeps_the_linears_apart() -> None:
    """Hooks fetch a block's weights before it runs, and drop them after it."""
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    stock = infer(model, inputs)
    host = {parameter: parameter.data for parameter in model.transformer_blocks.parameters()}

    def fetch(block: nn.Module, *_: Any) -> None:
        for parameter in block.parameters():
            parameter.data = host[parameter].clone()

    def drop(block: nn.Module, *_: Any) -> None:
        for parameter in block.parameters():
            parameter.data = torch.empty(1, dtype=parameter.dtype)

    for block in model.transformer_blocks:
        drop(block)
        block.register_forward_pre_hook(fetch)
        block.register_forward_hook(drop)
    others = tuple(id for id in FEATURES if id != "scale_prepack")
    with fastpath() as new:
        for _ in range(4):
            assert_same_bytes(infer(model, inputs), stock)
        assert hits(new) == each(4 * LAYERS, on=others)
        assert any("layerwise offload" in why for why in new.records["scale_prepack"].fallbacks)
        assert not launches[AHEAD], "the next block has no weights yet"
        assert not failed(new)


@pytest.mark.parametrize("flag", ["dit_cpu_offload", "dit_layerwise_offload", "use_fsdp_inference"])
def test_offload_by_flag_keeps_the_linears_apart(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    monkeypatch.setattr(get_global_server_args(), flag, True)
    model = build()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with fastpath() as new:
        assert_like_stock(model, denoiser_inputs(model, **REQUEST), passes=2)
        assert new.records["scale_prepack"].hits == 0
        assert any(f"--{flag.replace('_', '-')}" in why for why in new.records["scale_prepack"].fallbacks)
        assert new.records["act_quant"].hits == 2 * LAYERS
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_merging_changes_nothing_that_is_saved(tmp_path: Path) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    with fastpath():
        assert_like_stock(model, denoiser_inputs(model, **REQUEST))
    after = model.state_dict()
    assert dict(model.named_parameters()) == parameters, "the same objects under the same names"
    assert list(after) == list(before)
    for name, value in before.items():
        assert_same_bytes(after[name], value)
    save_file(after, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == before.keys()
    for name, value in before.items():
        assert_same_bytes(saved[name], value)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 1.01 * sum(value.nbytes for value in before.values())


def test_a_denoiser_that_is_dropped_is_freed() -> None:
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    with fastpath() as new:
        assert_like_stock(model, inputs)
        assert new_hits(new, model, inputs) == each(LAYERS)
        storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
        block = weakref.ref(model.transformer_blocks[1])
        del model
        gc.collect()
        assert block() is None
        assert all(storage.expired() for storage in storages)


def test_two_denoisers_in_turns_share_one_plan(denoiser, other_denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = [infer(model, inputs) for model in (denoiser, other_denoiser)]
    assert not torch.equal(*stock)
    with fastpath() as new:
        for _ in range(6):
            for model, expected in zip((denoiser, other_denoiser), stock, strict=True):
                assert_same_bytes(infer(model, inputs), expected)
        assert launches[AHEAD] == LAYERS - 1
        assert hits(new) == each(2 * 6 * LAYERS)
        assert not failed(new)


# --- blocks of another kind ----------------------------------------------------------------------------------------


def unequal_epsilon(block: Any) -> None:
    block.img_norm2.eps = 1e-3


def unequal_qk_epsilon(block: Any) -> None:
    block.attn.norm_k.variance_epsilon = 1e-3


def no_bias(block: Any) -> None:
    block.attn.to_k.bias = None


def wide_bias(block: Any) -> None:
    block.attn.to_k.bias = nn.Parameter(block.attn.to_k.bias.data.float(), requires_grad=False)


def two_ranks(block: Any) -> None:
    block.attn.to_q.tp_size = 2  # stock's column-parallel forward does not look at it


def gathered(block: Any) -> None:
    block.attn.to_q.gather_output = True


def misaligned(block: Any) -> None:
    weight = block.attn.to_q.weight
    weight.data = torch.empty(weight.numel() + 8, dtype=weight.dtype)[8:].view(weight.shape).copy_(weight.data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unequal_epsilon, "epsilons differ"),
        (unequal_qk_epsilon, "epsilons differ"),
        (no_bias, "attn.to_k has no bias"),
        (wide_bias, "torch.float32 bias"),
        (two_ranks, "tensor parallelism over 2 ranks"),
        (gathered, "attn.to_q gathers its output"),
        (misaligned, "attn.to_q is not 16-byte aligned"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_block_of_another_kind_is_stocks(change: Callable[[Any], None], reason: str) -> None:
    model = build()
    change(model.transformer_blocks[1])
    with fastpath() as new:
        assert_like_stock(model, denoiser_inputs(model, **REQUEST), passes=3)
        assert hits(new) == each(3 * (LAYERS - 1)), "the other blocks are fused"
        ((why, count),) = fallbacks(new).items()
    assert reason in why
    assert count == 3


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"fp8": False}, "not in block FP8 (UnquantizedLinearMethod)"),
        ({"not_quantized": ("img_in", "txt_in", "proj_out", "_mod", "img_mlp")}, "img_mlp.net.0.proj is not in"),
        ({"dtype": torch.float32}, "attn.add_q_proj has a torch.float32 bias"),
    ],
    ids=["bf16", "partly quantized", "float32"],
)
def test_a_denoiser_of_another_kind_is_stocks(model: dict[str, Any], reason: str) -> None:
    denoiser = build(**model)
    with fastpath() as new:
        assert_like_stock(denoiser, denoiser_inputs(denoiser, **REQUEST), passes=2)
        assert hits(new) == each(0)
        ((why, count),) = fallbacks(new).items()
        states = {new.observed(new.records[id])[0] for id in FEATURES}
    assert reason in why
    assert count == 2 * LAYERS
    assert states == {State.NEVER_HIT}


def test_gradients_are_stocks(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = infer(denoiser, inputs)
    with fastpath() as new:
        for _ in range(2):
            assert_same_bytes(call(denoiser, inputs).detach(), stock)
        assert hits(new) == each(0)
        assert fallbacks(new) == {"gradients are enabled": 2 * LAYERS}
        with torch.no_grad():
            for _ in range(3):
                assert_same_bytes(call(denoiser, inputs), stock)
        assert hits(new) == each(3 * LAYERS)


def test_autocast_is_stocks(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with torch.autocast("cpu", dtype=torch.bfloat16), fastpath() as new:
        assert_like_stock(denoiser, inputs, passes=2)
        assert hits(new) == each(0)
        ((why, count),) = fallbacks(new).items()
    assert "autocast" in why
    assert count == 2 * LAYERS


# --- failures ------------------------------------------------------------------------------------------------------


def tensors_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple):
        for part in output:
            yield from tensors_of(part)


@contextmanager
def failing(name: str, error: Exception) -> Iterator[Counter[str]]:
    """The launcher `name` scribbles over what it returned and raises; counts its calls."""
    calls: Counter[str] = Counter()

    def scribble(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        calls[name] += 1
        for tensor in tensors_of(launch(*args, **kwargs)):
            tensor.fill_(math.nan)
        raise error

    with pytest.MonkeyPatch.context() as patched:
        for module in users_of(name):
            patched.setattr(module, name, functools.partial(scribble, getattr(module, name)))
        yield calls


@pytest.mark.parametrize("warm", [False, True], ids=["from the start", "once admitted"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_kernel_that_fails_after_writing_is_banned(denoiser, name: str, warm: bool) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as new:
        if warm:
            assert_like_stock(denoiser, inputs)
            assert not failed(new)
        with failing(name, RuntimeError("CUDA error: scribbled")) as calls:
            assert_like_stock(denoiser, inputs, passes=3)
            settled = calls[name]
            assert_like_stock(denoiser, inputs, passes=1)
            assert calls[name] == settled, "what failed is not tried again"
        assert settled or (warm and name == "gemm"), "all of its GEMMs may run grouped"
        assert bool(failed(new)) is bool(settled)
        assert all("scribbled" in verdict["reason"] for verdict in failed(new))
        assert_like_stock(denoiser, inputs, passes=2)


@pytest.mark.parametrize("warm", [False, True], ids=["from the start", "once admitted"])
@pytest.mark.parametrize(
    "error", [ValueError, TypeError, AssertionError, ImportError, OSError], ids=lambda e: e.__name__
)
def test_a_kernel_may_fail_in_any_way(denoiser, error: type[Exception], warm: bool) -> None:
    """A missing compiler, a missing DeepGEMM, an unforeseen layout: none of them is the request's fault."""
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath(("qkv_epilogue",)) as new:
        if warm:
            assert_like_stock(denoiser, inputs)
        with failing("qkv_epilogue", error("scribbled")) as calls:
            assert_like_stock(denoiser, inputs, passes=2)
        assert calls["qkv_epilogue"]
        assert failed(new)


@pytest.mark.parametrize("warm", [False, True], ids=["from the start", "once admitted"])
def test_out_of_memory_in_a_kernel_bans_nothing(denoiser, warm: bool) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as new:
        if warm:
            assert_like_stock(denoiser, inputs)
        with failing("norm_quant", torch.OutOfMemoryError("scribbled")) as calls:
            assert_like_stock(denoiser, inputs, passes=2)
        assert calls["norm_quant"]
        assert not failed(new)
        assert_like_stock(denoiser, inputs)
        assert new_hits(new, denoiser, inputs) == each(LAYERS)


def test_out_of_memory_while_merging_leaves_the_linears_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    inputs = denoiser_inputs(model, **REQUEST)
    allocate, taken = torch.empty, 0

    def empty(*size: Any, **options: Any) -> Tensor:
        nonlocal taken
        if options.get("dtype") is torch.float8_e4m3fn:
            taken += 1
            if taken == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
        result: Tensor = allocate(*size, **options)
        return result

    with fastpath(("scale_prepack", "qkv_epilogue")) as new:
        monkeypatch.setattr(torch, "empty", empty)
        stock = stock_output(model, inputs)
        for _ in range(3):
            assert_same_bytes(infer(model, inputs), stock)
        assert taken >= 4
        assert new.records["qkv_epilogue"].hits == 3 * LAYERS


# --- guard, plan and site ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", ["always", "sample:2"])
def test_a_guard_that_checks_again(denoiser, guard: str) -> None:
    with fastpath(guard=guard) as new:
        assert_like_stock(denoiser, denoiser_inputs(denoiser, **REQUEST), passes=8)
        assert hits(new) == each(8 * LAYERS)
        assert not fallbacks(new)
        assert not failed(new)
        checks = new.guard.counters["checks"]
        assert checks >= (8 * LAYERS if guard == "always" else 8)


def test_a_guard_that_is_off(denoiser) -> None:
    with fastpath(guard="off") as new:
        assert_like_stock(denoiser, denoiser_inputs(denoiser, **REQUEST), passes=4)
        assert hits(new) == each(4 * LAYERS)
        assert new.guard.counters["checks"] == 0
        assert launches[AHEAD]


def test_the_site_is_restored_and_a_plan_keeps_what_it_learned(denoiser) -> None:
    block_type = type(denoiser.transformer_blocks[0])
    original = vars(block_type)["forward"]
    inputs = denoiser_inputs(denoiser, **REQUEST)
    stock = infer(denoiser, inputs)
    new = make_plan()
    with applied(new):
        replacement = vars(block_type)["forward"]
        assert replacement is not original
        assert replacement.__wrapped__ is original, "one wrapper for five features"
    assert vars(block_type)["forward"] is original
    with applied(new):
        passes = assert_like_stock(denoiser, inputs)
    checks = new.guard.counters["checks"]
    assert_same_bytes(infer(denoiser, inputs), stock)
    assert not launches
    with applied(new):
        assert_same_bytes(infer(denoiser, inputs), stock)
        assert launches[AHEAD] == LAYERS - 1
        assert hits(new) == each((passes + 1) * LAYERS)
    assert new.guard.counters["checks"] == checks
    assert vars(block_type)["forward"] is original


def test_another_plan_starts_anew(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with fastpath() as first:
        assert_like_stock(denoiser, inputs, passes=2)
    with fastpath(("act_quant",)) as second:
        assert_like_stock(denoiser, inputs, passes=2)
        assert hits(second) == each(2 * LAYERS, on=("act_quant",))
        assert second.guard.counters["checks"]
    assert hits(first) == each(2 * LAYERS)


def test_each_feature_announces_its_first_hit(denoiser, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sglang_fastpath"), fastpath():
        assert_like_stock(denoiser, denoiser_inputs(denoiser, **REQUEST), passes=2)
    announced = Counter(record.getMessage() for record in caplog.records if "first hit of" in record.getMessage())
    assert sorted(message.split("first hit of ")[1].split()[0] for message in announced) == sorted(FEATURES)
    assert set(announced.values()) == {1}


@contextmanager
def foreign_forward(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Another function in the block's place, as a plugin that does not know of us would put it there."""
    block_type: Any = type(model.transformer_blocks[0])
    before = block_type.forward

    def forward(block: nn.Module, **kwargs: Any) -> Any:
        text, image = before(block, **kwargs)
        return 2 * text, 2 * image

    block_type.forward = forward
    try:
        yield forward
    finally:
        block_type.forward = before


@pytest.mark.parametrize("on", [FEATURES, ("act_quant",)], ids=["all", "one"])
def test_a_site_that_is_taken_before_makes_all_features_drifted(denoiser, on: tuple[str, ...]) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    with foreign_forward(denoiser) as forward:
        theirs = infer(denoiser, inputs)
        with fastpath(on) as new:
            assert {id: new.observed(new.records[id])[0] for id in FEATURES} == {
                id: State.DRIFTED if id in on else State.OFF for id in FEATURES
            }
            assert all("QwenImageTransformerBlock.forward" in new.observed(new.records[id])[1] for id in on)
            assert_same_bytes(infer(denoiser, inputs), theirs)
            assert vars(type(denoiser.transformer_blocks[0]))["forward"] is forward
        with pytest.raises(SystemExit, match="drifted"):
            plugin.apply(make_plan(on, strict=True))


def test_a_site_that_is_lost_later_makes_all_features_drifted(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    block_type = type(denoiser.transformer_blocks[0])
    original = vars(block_type)["forward"]
    with fastpath((*FEATURES, "cfg_mod_cache")) as new:
        assert_like_stock(denoiser, inputs, passes=2)
        with foreign_forward(denoiser) as forward:
            theirs = infer(denoiser, inputs)
            plugin.verify(new)
            ((state, reason),) = {new.observed(new.records[id]) for id in FEATURES}
            assert state is State.DRIFTED
            assert "QwenImageTransformerBlock.forward" in reason
            assert new.records["cfg_mod_cache"].state is State.ACTIVE, "it does not share the site"
            assert_same_bytes(infer(denoiser, inputs), theirs)
            plugin.deactivate()
            assert vars(block_type)["forward"] is forward
        block_type.forward = original
