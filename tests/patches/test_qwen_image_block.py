"""The fused forward of Qwen-Image's block on SGLang's own denoiser: stock's bytes from every subset of its features,
whatever is asked of the denoiser and whatever is done to it between two passes. On a CPU, with FP8 emulated."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from block_harness import (
    AHEAD,
    FLAGS,
    HOOKS,
    Family,
    assert_like_stock,
    block_inputs,
    call_context,
    class_forward,
    emulated,
    failed,
    infer,
    launches,
    low_rank,
    misaligned,
    signatures,
    stock_output,
    twice_all,
    wide,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import act_quant, gated_residual, norm_quant, qkv_epilogue
from sglang_fastpath.patches.diffusion import qwen_image_forward
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath import plugin
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import State

FEATURES = ("scale_prepack", "norm_quant", "qkv_epilogue", "act_quant", "bias_fold")
SUBSETS = [on for size in range(len(FEATURES) + 1) for on in itertools.combinations(FEATURES, size)]
LAYERS = 2
BLOCKS = "transformer_blocks"
REQUEST: dict[str, Any] = {"image_hw": (3, 5), "text_tokens": 6}
# Two prompts of different length take turns, and share the modulation of a step.
GUIDANCE: dict[str, Any] = {"steps": 2, "image_hw": (3, 3), "text_tokens": 5, "negative_tokens": 3}


def build(**arch: Any) -> Any:
    return build_qwen_image(**{"layers": LAYERS, "fp8": True} | arch)


FAMILY = Family(
    build=build,
    inputs=lambda model: denoiser_inputs(model, **REQUEST),
    blocks={BLOCKS: FEATURES},
    ahead_by="norm_quant",
    forward=qwen_image_forward,
    kernels={
        "norm_quant": norm_quant.can_use,
        "qkv_epilogue": qkv_epilogue.can_use,
        "act_quant": act_quant.can_use,
        "gated_residual": gated_residual.can_use,
    },
    gemms=("gemm", "grouped_gemm"),
)
LAUNCHERS = FAMILY.launchers
fastpath, hits, new_hits, each, fallbacks = (
    FAMILY.fastpath,
    FAMILY.hits,
    FAMILY.new_hits,
    FAMILY.each,
    FAMILY.fallbacks,
)


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> Iterator[None]:
    with emulated():
        yield


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    with FAMILY.watched():
        yield


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


# --- every subset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", SUBSETS, ids=lambda on: "+".join(on) or "none")
def test_every_subset_gives_stocks_bytes(deep, on: tuple[str, ...]) -> None:
    inputs = denoiser_inputs(deep, **REQUEST)
    with fastpath(on) as new:
        passes = assert_like_stock(deep, inputs, passes=5)
        assert launches[AHEAD] == launches["norm_quant zero_added"] == (2 if "norm_quant" in on else 0)
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
    with fastpath() as new:
        passes = assert_like_stock(denoiser, denoiser_inputs(denoiser, image_hw=(2, 2), text_tokens=0))
        assert hits(new) == each(passes * LAYERS)
        assert not failed(new)


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
        assert FAMILY.in_vain(new) == 2
    assert computed == [1, 1, 0, 0]


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
            misses.append(FAMILY.in_vain(new))
        assert not failed(new)
    assert misses[-1] == misses[-3] <= 2, "after the first block comes now this one, now that"


def test_a_block_called_by_position_is_stocks(denoiser) -> None:
    inputs = first_block_inputs(denoiser)
    names = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb_img_silu", "temb_txt_silu")
    arguments = [inputs.pop(name) for name in names]
    FAMILY.check_a_call_is_left_to_stock("by position", lambda: denoiser.transformer_blocks[0](*arguments, **inputs))


def test_a_block_given_a_text_mask_alone_is_stocks(denoiser) -> None:
    inputs = first_block_inputs(denoiser) | {"encoder_hidden_states_mask": text_mask(6, 4)}
    FAMILY.check_a_call_is_left_to_stock("mask of its own", lambda: denoiser.transformer_blocks[0](**inputs))


def test_streams_that_are_not_contiguous_are_stocks(denoiser) -> None:
    inputs = first_block_inputs(denoiser)
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"]] * 2, dim=-1)[..., :256]
    FAMILY.check_a_call_is_left_to_stock("not contiguous", lambda: denoiser.transformer_blocks[0](**inputs))


def test_a_rotary_table_that_the_kernel_refuses_is_stocks(denoiser) -> None:
    """Of the same shape as one that was admitted before."""
    inputs = first_block_inputs(denoiser)
    double = tuple(table.double() for table in inputs["image_rotary_emb"])
    block = denoiser.transformer_blocks[0]
    with torch.inference_mode(), call_context():
        stock = block(**inputs | {"image_rotary_emb": double})
        with fastpath():
            for _ in range(3):
                block(**inputs)
            for _ in range(3):
                assert_same_bytes(block(**inputs | {"image_rotary_emb": double}), stock)


def first_block_inputs(model: nn.Module) -> dict[str, Any]:
    return block_inputs(model, f"{BLOCKS}.0", FAMILY.inputs(model))


# --- LoRA, hooks, replaced modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["1.attn.add_k_proj", "1.attn.to_out.0", "0.txt_mlp.net.0.proj", "1.img_mlp.net.2"])
def test_lora_comes_changes_and_goes(path: str) -> None:
    FAMILY.check_lora_comes_changes_and_goes(f"{BLOCKS}.{path}")


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


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_any_module_of_a_block_run_as_often_as_in_stock(register: str) -> None:
    # On a GPU stock itself goes around the layer norm within a norm.
    some = {"", "attn", "attn.attn", "attn.to_q", "img_mlp", "img_mlp.net.2", "img_norm1"}
    FAMILY.check_hooks_run_as_often_as_in_stock(register, f"{BLOCKS}.1", some=some, skipped=(".norm",))


def test_hooks_that_change_what_a_module_returns() -> None:
    names = ("attn.to_v", "attn", "img_mlp.net.0.proj", "img_mlp", "img_norm2", "txt_norm1", "img_mod.1")
    FAMILY.check_hooks_that_change_what_a_module_returns(*(f"{BLOCKS}.1.{name}" for name in names))


@pytest.mark.parametrize("where", ["after the block", "before the next one"])
def test_hooks_that_write_into_the_streams_between_two_blocks(where: str) -> None:
    def write_into(stream: Tensor) -> None:
        stream.add_(1)

    def hook(model: Any) -> Any:
        first, second = model.transformer_blocks
        if where == "after the block":
            return first.register_forward_hook(lambda block, args, output: write_into(output[1]))
        return second.register_forward_pre_hook(
            lambda block, args, kwargs: write_into(kwargs["hidden_states"]), with_kwargs=True
        )

    FAMILY.check_hooks_that_write_between_two_blocks(hook)


def test_global_hooks_see_every_module(denoiser) -> None:
    FAMILY.check_global_hooks_see_every_module(denoiser)


@pytest.mark.parametrize("path", ["attn.to_v", "img_mlp.net.0.proj", "img_norm2", "attn"])
def test_a_forward_replaced_on_one_module_is_noticed(path: str) -> None:
    FAMILY.check_a_forward_replaced_on_one_module_is_noticed(f"{BLOCKS}.1.{path}")


@pytest.mark.parametrize("on", [FEATURES, FAMILY.others("scale_prepack")], ids=["all", "nothing merged"])
@pytest.mark.parametrize(
    "path", ["img_mlp.net.2", "img_mlp.net.0", "img_mlp", "img_norm1", "attn.norm_added_k", "attn"]
)
def test_a_replaced_module_is_noticed(path: str, on: tuple[str, ...]) -> None:
    FAMILY.check_a_replaced_module_is_noticed(f"{BLOCKS}.1.{path}", on)


@pytest.mark.parametrize("on", [FEATURES, FAMILY.others("scale_prepack")], ids=["all", "nothing merged"])
def test_a_norm_with_another_epsilon_is_not_computed_ahead_with_the_old_one(on: tuple[str, ...]) -> None:
    FAMILY.check_norms_with_another_epsilon(f"{BLOCKS}.1", ("img_norm1", "txt_norm1", "img_norm2", "txt_norm2"), on)


@pytest.mark.parametrize("change", [wide, misaligned])
@pytest.mark.parametrize("path", ["attn.norm_q", "attn.norm_added_k"])
def test_a_qk_norm_whose_weight_the_kernel_cannot_read_is_noticed(path: str, change: Any) -> None:
    FAMILY.check_a_qk_norm_whose_weight_cannot_be_read(f"{BLOCKS}.1", path, change)


# --- weights -------------------------------------------------------------------------------------------------------


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
    FAMILY.check_a_changed_parameter_is_used_at_once(f"{BLOCKS}.{path}")


@pytest.mark.parametrize("assign", [False, True])
def test_reloaded_weights_are_as_loaded_afresh(assign: bool) -> None:
    FAMILY.check_reloaded_weights_are_as_loaded_afresh(assign=assign)


def test_parameters_that_move_in_every_pass_stay_fused_and_leave_nothing_behind() -> None:
    FAMILY.check_parameters_that_move_in_every_pass_leave_nothing_behind()


def test_layerwise_offload_keeps_the_linears_apart() -> None:
    FAMILY.check_layerwise_offload_keeps_the_linears_apart()


@pytest.mark.parametrize("flag", FLAGS)
def test_offload_by_flag_keeps_the_linears_apart(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    FAMILY.check_offload_by_flag_keeps_the_linears_apart(monkeypatch, flag)


def test_merging_changes_nothing_that_is_saved(tmp_path: Path) -> None:
    FAMILY.check_merging_changes_nothing_that_is_saved(tmp_path)


def test_a_denoiser_that_is_dropped_is_freed() -> None:
    FAMILY.check_a_denoiser_that_is_dropped_is_freed()


def test_two_denoisers_in_turns_share_one_plan(denoiser, other_denoiser) -> None:
    FAMILY.check_two_denoisers_in_turns_share_one_plan(denoiser, other_denoiser)


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


def misaligned_weight(block: Any) -> None:
    block.attn.to_q.weight.data = misaligned(block.attn.to_q.weight.data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unequal_epsilon, "epsilons differ"),
        (unequal_qk_epsilon, "epsilons differ"),
        (no_bias, "attn.to_k has no bias"),
        (wide_bias, "torch.float32 bias"),
        (two_ranks, "tensor parallelism over 2 ranks"),
        (gathered, "attn.to_q gathers its output"),
        (misaligned_weight, "attn.to_q is not 16-byte aligned"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_block_of_another_kind_is_stocks(change: Callable[[Any], None], reason: str) -> None:
    FAMILY.check_a_block_of_another_kind_is_stocks(f"{BLOCKS}.1", change, reason)


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
    FAMILY.check_gradients_are_stocks(denoiser)


def test_autocast_is_stocks(denoiser) -> None:
    FAMILY.check_autocast_is_stocks(denoiser)


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["from the start", "once admitted"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_kernel_that_fails_after_writing_is_banned(denoiser, name: str, warm: bool) -> None:
    # All GEMMs may run grouped.
    FAMILY.check_a_kernel_that_fails_after_writing_is_banned(denoiser, name, warm=warm, unused=name == "gemm")


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
        with FAMILY.failing("qkv_epilogue", error("scribbled")) as calls:
            assert_like_stock(denoiser, inputs, passes=2)
        assert calls["qkv_epilogue"]
        assert failed(new)


@pytest.mark.parametrize("warm", [False, True], ids=["from the start", "once admitted"])
def test_out_of_memory_in_a_kernel_bans_nothing(denoiser, warm: bool) -> None:
    FAMILY.check_out_of_memory_in_a_kernel_bans_nothing(denoiser, "norm_quant", warm=warm)


def test_out_of_memory_while_merging_leaves_the_linears_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ("scale_prepack", "qkv_epilogue")
    FAMILY.check_out_of_memory_while_merging_leaves_the_linears_apart(monkeypatch, on, fails=4)


# --- guard, plan and site ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", ["always", "sample:2"])
def test_a_guard_that_checks_again(denoiser, guard: str) -> None:
    FAMILY.check_a_guard_that_checks_again(denoiser, guard)


def test_a_guard_that_is_off(denoiser) -> None:
    FAMILY.check_a_guard_that_is_off(denoiser)


def test_the_site_is_restored_and_a_plan_keeps_what_it_learned(denoiser) -> None:
    FAMILY.check_the_sites_are_restored_and_a_plan_keeps_what_it_learned(denoiser)


def test_another_plan_starts_anew(denoiser) -> None:
    FAMILY.check_another_plan_starts_anew(denoiser, ("act_quant",))


def test_each_feature_announces_its_first_hit(denoiser, caplog: pytest.LogCaptureFixture) -> None:
    FAMILY.check_each_feature_announces_its_first_hit(denoiser, caplog)


@pytest.mark.parametrize("on", [FEATURES, ("act_quant",)], ids=["all", "one"])
def test_a_site_that_is_taken_before_makes_all_features_drifted(denoiser, on: tuple[str, ...]) -> None:
    FAMILY.check_a_site_that_is_taken_before_makes_all_features_drifted(denoiser, BLOCKS, on)


def test_a_site_that_is_lost_later_makes_all_features_drifted(denoiser) -> None:
    inputs = denoiser_inputs(denoiser, **REQUEST)
    block_type = type(denoiser.transformer_blocks[0])
    with fastpath((*FEATURES, "cfg_mod_cache")) as new:
        assert_like_stock(denoiser, inputs, passes=2)
        with class_forward(denoiser, BLOCKS, twice_all) as forward:
            theirs = infer(denoiser, inputs)
            plugin.verify(new)
            ((state, reason),) = {new.observed(new.records[id]) for id in FEATURES}
            assert state is State.DRIFTED
            assert "QwenImageTransformerBlock.forward" in reason
            assert new.records["cfg_mod_cache"].state is State.ACTIVE, "it does not share the site"
            assert_same_bytes(infer(denoiser, inputs), theirs)
            plugin.deactivate()
            assert vars(block_type)["forward"] is forward
