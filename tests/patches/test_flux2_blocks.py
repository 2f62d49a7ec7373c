"""The fused forwards of FLUX.2's double and single blocks on SGLang's own denoiser: stock's bytes from every subset
of their features, whatever is asked of the denoiser and whatever is done to it between two passes. On a CPU, with FP8
emulated. Other releases have their turn in tests/test_release_matrix.py."""

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
    applied,
    assert_like_stock,
    block_inputs,
    call_context,
    class_forward,
    emulated,
    failed,
    infer,
    launches,
    make_plan,
    misaligned,
    signatures,
    twice_all,
    wide,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import (
    act_quant,
    gated_residual,
    layer_norm_quant,
    qk_norm_rope,
    qkv_epilogue,
    swiglu_quant,
)
from sglang_fastpath.patches.diffusion import flux2_forward
from sglang_fastpath.patches.diffusion.block_layout import BlockLayout, Refused
from sglang_fastpath.patches.diffusion.flux2_blocks import DOUBLE, SINGLE
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath import plugin
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs
from sglang_fastpath.features import BY_ID, QWEN_IMAGE
from sglang_fastpath.flux2_denoiser import build_flux2, flux2_inputs
from sglang_fastpath.flux2_loop import Flux2Loop
from sglang_fastpath.plan import State

IN_DOUBLE = ("scale_prepack", "norm_quant", "gated_residual_norm", "qkv_epilogue", "act_quant")
IN_SINGLE = ("norm_quant", "gated_residual_norm", "qk_norm_rope", "act_quant")
DOUBLES, SINGLES = "transformer_blocks", "single_transformer_blocks"
LAYERS = 2  # of either kind
TOKENS = 6 + 15  # text and image, of REQUEST
REQUEST: dict[str, Any] = {"image_hw": (3, 5), "text_tokens": 6}


def build(**arch: Any) -> Any:
    return build_flux2(**{"layers": LAYERS, "single_layers": LAYERS, "fp8": True} | arch)


FAMILY = Family(
    build=build,
    inputs=lambda model: flux2_inputs(model, **REQUEST),
    blocks={DOUBLES: IN_DOUBLE, SINGLES: IN_SINGLE},
    ahead_by="gated_residual_norm",
    forward=flux2_forward,
    kernels={
        "layer_norm_quant": layer_norm_quant.can_use,
        "layer_norm_quant_pair": layer_norm_quant.can_use,
        "gated_residual": gated_residual.can_use,
        "qkv_epilogue": qkv_epilogue.can_use,
        "qk_norm_rope": qk_norm_rope.can_use,
        "act_quant": act_quant.can_use,
        "swiglu_quant": swiglu_quant.can_use,
        "swiglu_quant_pair": swiglu_quant.can_use,
    },
    gemms=("gemm",),
)
FEATURES = FAMILY.features
SUBSETS = [on for size in range(len(FEATURES) + 1) for on in itertools.combinations(FEATURES, size)]
fastpath, hits, new_hits, served = FAMILY.fastpath, FAMILY.hits, FAMILY.new_hits, FAMILY.served


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
def other_denoiser() -> nn.Module:
    return build(seed=1)


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """Of either kind, its block in the middle has its norm computed ahead, and computes one."""
    return build(layers=3, single_layers=3)


@pytest.fixture(scope="module")
def klein() -> nn.Module:
    return build(guidance_embeds=False)


# --- every subset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", SUBSETS, ids=lambda on: "+".join(on) or "none")
def test_every_subset_gives_stocks_bytes(deep, on: tuple[str, ...]) -> None:
    with fastpath(on) as new:
        passes = assert_like_stock(deep, FAMILY.inputs(deep), passes=5)
        assert launches[AHEAD] == (4 if "gated_residual_norm" in on else 0)
        assert hits(new) == served(deep, passes, on=on)
        assert all(not new.records[id].fallbacks for id in FEATURES)
        assert not failed(new)
        assert ("norm by the block before" in signatures(new)) is ("gated_residual_norm" in on)


def test_the_features_run_what_they_say(denoiser) -> None:
    launched = {}
    for on in (*((id,) for id in FEATURES), FEATURES):
        with fastpath(on):
            assert_like_stock(denoiser, FAMILY.inputs(denoiser))
            launched[on] = {name for name in FAMILY.launchers if launches[name]}
    norms = {"layer_norm_quant", "layer_norm_quant_pair"}
    assert launched[("scale_prepack",)] == {"gemm"}
    assert launched[("norm_quant",)] == {*norms, "gemm"}
    assert launched[("gated_residual_norm",)] == {*norms, "gated_residual", "gemm"}
    assert launched[("qkv_epilogue",)] == {"qkv_epilogue"}
    assert launched[("qk_norm_rope",)] == {"qk_norm_rope"}
    assert launched[("act_quant",)] == {"act_quant", "swiglu_quant", "swiglu_quant_pair", "gemm"}
    assert launched[FEATURES] == set(FAMILY.launchers)


def test_gate_and_residual_round_as_flux2_has_them(denoiser) -> None:
    with fastpath(("gated_residual_norm",)):
        assert_like_stock(denoiser, FAMILY.inputs(denoiser))
        assert launches["gated_residual rounds_product"] == launches["gated_residual"] == 2


@pytest.mark.parametrize(
    ("on", "replaced"),
    [(("scale_prepack",), {DOUBLES}), (("qk_norm_rope",), {SINGLES}), (("act_quant",), {DOUBLES, SINGLES})],
)
def test_blocks_without_a_step_to_fuse_stay_stocks(denoiser, on: tuple[str, ...], replaced: set[str]) -> None:
    def forwards() -> dict[str, Any]:
        return {name: vars(type(denoiser.get_submodule(f"{name}.0")))["forward"] for name in (DOUBLES, SINGLES)}

    stock = forwards()
    with fastpath(on):
        assert {name for name, forward in forwards().items() if forward is not stock[name]} == replaced
    assert forwards() == stock


def test_several_steps_of_a_request(denoiser) -> None:
    """Other modulation at every step, and tensors at addresses that were another step's."""
    loop: dict[str, Any] = {"steps": 3, "image_hw": (3, 3), "text_tokens": 5, "references": ((2, 3),)}
    stock = [latents.clone() for latents in Flux2Loop(denoiser, **loop)]
    with fastpath() as new:
        for _ in range(2):
            for latents, expected in zip(Flux2Loop(denoiser, **loop), stock, strict=True):
                assert_same_bytes(latents, expected)
        assert hits(new) == served(denoiser, 2 * 3)
        assert not failed(new)


# --- shapes --------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    image_hw=st.tuples(st.integers(1, 12), st.integers(1, 8)),
    text_tokens=st.integers(1, 130),
    batch=st.integers(1, 2),
    references=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=2),
    on=st.sampled_from(SUBSETS),
)
def test_any_number_of_tokens(denoiser, on: tuple[str, ...], references: Any, **request: Any) -> None:
    inputs = flux2_inputs(denoiser, **request, references=tuple(references))
    with fastpath(on) as new:
        passes = assert_like_stock(denoiser, inputs, passes=5)
        assert hits(new) == served(denoiser, passes, on=on)
        assert not failed(new)


@pytest.mark.parametrize(("image_hw", "text_tokens"), [((1, 1), 1), ((1, 1), 0), ((8, 16), 128), ((3, 43), 127)])
def test_all_features_at_the_edges_of_tiles(denoiser, image_hw: tuple[int, int], text_tokens: int) -> None:
    with fastpath() as new:
        passes = assert_like_stock(denoiser, flux2_inputs(denoiser, image_hw=image_hw, text_tokens=text_tokens))
        assert hits(new) == served(denoiser, passes)
        assert not failed(new)


@pytest.mark.parametrize("text_tokens", [2, 7])
def test_a_batch_is_as_its_elements(denoiser, text_tokens: int) -> None:
    """As many text tokens as batch elements is where a modulation could be broadcast along the wrong dimension."""
    timestep = torch.tensor([900.0, 100.0])  # so that each element has a modulation of its own
    inputs = flux2_inputs(denoiser, image_hw=(3, 3), text_tokens=text_tokens, batch=2, timestep=timestep)
    with fastpath() as new:
        passes = assert_like_stock(denoiser, inputs)
        assert hits(new) == served(denoiser, passes)
        assert not failed(new)
        together = infer(denoiser, inputs)
        for index in range(2):
            alone = {name: inputs[name][index : index + 1] for name in inputs.keys() - {"freqs_cis"}}
            found = infer(denoiser, alone | {"freqs_cis": inputs["freqs_cis"]})
            torch.testing.assert_close(together[index : index + 1], found, atol=0.02, rtol=0.02)


def test_modulations_that_the_batch_shares(denoiser) -> None:
    """One timestep for two elements: of the strides of two, but one row."""
    inputs = flux2_inputs(denoiser, image_hw=(3, 3), text_tokens=4, batch=2)
    shared = inputs | {name: inputs[name][:1] for name in ("timestep", "guidance")}
    with fastpath() as new:
        passes = [assert_like_stock(denoiser, each) for each in (inputs, shared)]
        assert hits(new) == served(denoiser, sum(passes))
        assert not failed(new)


def test_two_resolutions_in_turns(denoiser) -> None:
    requests = [flux2_inputs(denoiser, image_hw=hw, text_tokens=n) for hw, n in (((3, 5), 6), ((4, 4), 9))]
    stock = [infer(denoiser, inputs) for inputs in requests]
    with fastpath() as new:
        for _ in range(6):
            for inputs, expected in zip(requests, stock, strict=True):
                assert_same_bytes(infer(denoiser, inputs), expected)
        assert launches[AHEAD] == 2 * (LAYERS - 1)
        assert hits(new) == served(denoiser, 2 * 6)
        assert not failed(new)


@pytest.mark.parametrize("references", [(), ((2, 4),), ((2, 4), (3, 1))], ids=len)
@pytest.mark.parametrize("name", ["denoiser", "klein"])
def test_dev_and_klein_with_references(request: pytest.FixtureRequest, name: str, references: Any) -> None:
    model = request.getfixturevalue(name)
    with fastpath() as new:
        passes = assert_like_stock(model, flux2_inputs(model, **REQUEST, references=references))
        assert hits(new) == served(model, passes)
        assert not failed(new)


@pytest.mark.parametrize("heads", [1, 3])
def test_widths_that_are_no_multiple_of_256(heads: int) -> None:
    model = build(heads=heads)
    with fastpath() as new:
        passes = assert_like_stock(model, FAMILY.inputs(model))
        assert hits(new) == served(model, passes)
        assert not failed(new)


def test_a_width_that_the_norm_refuses_leaves_the_norms_to_stock(denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    """A denoiser wider than 8192 would be too large for a test: the bound is lowered."""
    monkeypatch.setattr(layer_norm_quant, "WIDEST", 128)
    norms = ("norm_quant", "gated_residual_norm")
    with fastpath() as new:
        passes = assert_like_stock(denoiser, FAMILY.inputs(denoiser))
        assert hits(new) == served(denoiser, passes, on=FAMILY.others(*norms))
        for id in norms:
            state, reason = new.observed(new.records[id])
            assert state is State.NEVER_HIT
            assert reason == "width 256 is not a multiple of 128 up to 128"
            assert new.records[id].fallbacks == {reason: passes * 2 * LAYERS}
        assert not failed(new)


@dataclass(frozen=True)
class Pass:
    """One forward pass of some request, on one of two models."""

    other_model: bool
    request: int
    mask: bool
    between: bool


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.builds(Pass, st.booleans(), st.integers(0, 1), st.booleans(), st.booleans()), min_size=4, max_size=6),
    st.sampled_from(["once", "sample:3"]),
)
def test_any_sequence_of_passes(denoiser, other_denoiser, sequence: list[Pass], guard: str) -> None:
    @functools.cache
    def prepared(item: Pass) -> tuple[nn.Module, dict[str, Any]]:
        model = other_denoiser if item.other_model else denoiser
        batch, tokens, hw = [(1, 6, (3, 5)), (2, 4, (2, 3))][item.request]
        inputs = flux2_inputs(model, image_hw=hw, text_tokens=tokens, batch=batch, seed=item.request)
        if item.mask:
            inputs["joint_attention_kwargs"] = {"attn_mask": mask_of(batch, tokens + hw[0] * hw[1])}
        return model, inputs

    with fastpath(guard=guard) as new:
        for item in sequence:
            model, inputs = prepared(item)
            with something_between(model, DOUBLES) if item.between else call_context():
                assert_like_stock(model, inputs, passes=1)
        assert not failed(new)
        assert hits(new) == served(denoiser, len(sequence))


def mask_of(batch: int, tokens: int) -> Tensor:
    """The tokens from the fourth to the sixth are not attended to."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[:, 3:6] = False
    return mask


# --- what else a request may bring ---------------------------------------------------------------------------------


def test_a_mask_that_comes_and_goes(denoiser) -> None:
    inputs = FAMILY.inputs(denoiser)
    masked = inputs | {"joint_attention_kwargs": {"attn_mask": mask_of(1, TOKENS)}}
    assert not torch.equal(infer(denoiser, inputs), infer(denoiser, masked)), "stock honours the mask"
    with fastpath() as new:
        passes = [assert_like_stock(denoiser, each) for each in (masked, inputs, masked)]
        assert hits(new) == served(denoiser, sum(passes))
        assert launches[AHEAD]
        assert not failed(new)


class Between(nn.Module):
    """Adds to what passes from block to block, as ControlNets and step caches do: new tensors."""

    def forward(self, **given: Any) -> Any:
        streams = [given[name] for name in ("encoder_hidden_states", "hidden_states") if given[name] is not None]
        added = [stream + 0.25 for stream in streams]
        return tuple(added) if len(added) > 1 else added[0]


class something_between:
    """Puts it behind the first block of a kind while open."""

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self._kind, self._blocks = model, kind, model.get_submodule(kind)

    def __enter__(self) -> None:
        first, *others = self._blocks
        setattr(self._model, self._kind, nn.ModuleList([first, Between(), *others]))

    def __exit__(self, *_: Any) -> None:
        setattr(self._model, self._kind, self._blocks)


@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_something_between_two_blocks(kind: str) -> None:
    model = build()
    inputs = FAMILY.inputs(model)
    plain = infer(model, inputs)
    with fastpath() as new, something_between(model, kind):
        passes = assert_like_stock(model, inputs)
        assert not torch.equal(infer(model, inputs), plain)
        assert launches[AHEAD] == LAYERS - 1, "between the blocks of the other kind"
        assert hits(new) == {
            id: (passes + 1) * 4 if id in IN_DOUBLE and id in IN_SINGLE else (passes + 1) * 2 for id in FEATURES
        }
        assert not FAMILY.in_vain(new)
        assert not failed(new)


@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_something_between_now_and_then_ends_what_is_computed_ahead(kind: str) -> None:
    model = build()
    inputs = FAMILY.inputs(model)
    computed = []
    with fastpath() as new:
        with something_between(model, kind):
            assert_like_stock(model, inputs)
        assert_like_stock(model, inputs)
        for _ in range(4):
            assert_like_stock(model, inputs, passes=2)
            with something_between(model, kind):
                assert_like_stock(model, inputs, passes=1)
                computed.append(launches[AHEAD])
        assert_like_stock(model, inputs)
        assert launches[AHEAD] == LAYERS - 1
        assert not failed(new)
        assert FAMILY.in_vain(new) == 2
    assert computed == [2, 2, 1, 1]


@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_blocks_that_are_skipped_now_and_then_end_what_is_computed_ahead(kind: str) -> None:
    model = build(layers=3, single_layers=3)
    first, second, third = model.get_submodule(kind)
    inputs = FAMILY.inputs(model)
    misses = []
    with fastpath() as new:
        for blocks in ((first, second, third), (first, third)) * 3:
            setattr(model, kind, nn.ModuleList(blocks))
            assert_like_stock(model, inputs)
            misses.append(FAMILY.in_vain(new))
        assert not failed(new)
    assert misses[-1] == misses[-3] <= 2, "after the first block comes now this one, now that"


def test_a_block_that_refuses_its_calls_is_not_computed_ahead_for_forever() -> None:
    """Refused for how it is called, it is still as it was looked at."""
    model = build()
    inputs = FAMILY.inputs(model)

    class ByPosition(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden_states: Tensor, **given: Any) -> Any:
            return self.block(hidden_states, **given)

    with fastpath() as new:
        assert_like_stock(model, inputs)
        first, second = model.transformer_blocks
        model.transformer_blocks = nn.ModuleList([first, ByPosition(second)])
        for _ in range(4):
            assert_like_stock(model, inputs, passes=1)
        assert new.records["qkv_epilogue"].fallbacks == {"arguments are passed by position": 4}
        assert FAMILY.in_vain(new) == 1, "nothing is learned of a call that is refused"
        assert launches[AHEAD] == 1, "of the single blocks"
        assert not failed(new)


def double_inputs(model: nn.Module) -> dict[str, Any]:
    return block_inputs(model, f"{DOUBLES}.0", FAMILY.inputs(model))


def single_inputs(model: nn.Module) -> dict[str, Any]:
    return block_inputs(model, f"{SINGLES}.0", FAMILY.inputs(model))


def strided(stream: Tensor) -> Tensor:
    return torch.cat([stream] * 2, dim=-1)[..., : stream.shape[-1]]


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (DOUBLES, lambda given: {"hidden_states": strided(given["hidden_states"])}, "not contiguous"),
        (DOUBLES, lambda given: {"encoder_hidden_states": strided(given["encoder_hidden_states"])}, "not contiguous"),
        (DOUBLES, lambda given: {"encoder_hidden_states": given["encoder_hidden_states"].float()}, "torch.float32"),
        (DOUBLES, lambda given: {"freqs_cis": None}, "no rotary tables"),
        (SINGLES, lambda given: {"hidden_states": strided(given["hidden_states"])}, "not contiguous"),
        (SINGLES, lambda given: {"hidden_states": given["hidden_states"].float()}, "torch.float32"),
        (SINGLES, lambda given: {"freqs_cis": None}, "no rotary tables"),
        (SINGLES, lambda given: {"split_hidden_states": True}, "come apart"),
        (
            SINGLES,
            lambda given: {
                "encoder_hidden_states": given["hidden_states"][:, :6],
                "hidden_states": given["hidden_states"][:, 6:],
            },
            "come apart",
        ),
        (
            SINGLES,
            lambda given: {"joint_attention_kwargs": {"attention_mask": mask_of(1, TOKENS)}},
            "the attention is given attention_mask",
        ),
        (
            SINGLES,
            lambda given: {"joint_attention_kwargs": {"attn_mask_meta": {"local_pad": 1}}},
            "the sequence is sharded",
        ),
    ],
)
def test_a_call_that_is_stocks(denoiser, kind: str, change: Callable[[Any], Any], reason: str) -> None:
    given = block_inputs(denoiser, f"{kind}.0", FAMILY.inputs(denoiser))
    with torch.inference_mode():
        given |= change(given)
    on = FAMILY.blocks[kind]
    FAMILY.check_a_call_is_left_to_stock(reason, lambda: denoiser.get_submodule(f"{kind}.0")(**given), on)


@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_a_block_called_by_position_is_stocks(denoiser, kind: str) -> None:
    given = block_inputs(denoiser, f"{kind}.0", FAMILY.inputs(denoiser))
    first = given.pop("hidden_states")
    block = denoiser.get_submodule(f"{kind}.0")
    FAMILY.check_a_call_is_left_to_stock("by position", lambda: block(first, **given), FAMILY.blocks[kind])


@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_what_the_kernels_refuse_of_a_call_is_left_to_stock(denoiser, kind: str) -> None:
    """Of the same shapes as what was admitted before."""
    block = denoiser.get_submodule(f"{kind}.0")
    given = block_inputs(denoiser, f"{kind}.0", FAMILY.inputs(denoiser))
    rotating = "qkv_epilogue" if kind == DOUBLES else "qk_norm_rope"
    modulations = [name for name in given if name.startswith("temb_mod_params")]
    with torch.inference_mode(), call_context():
        odd_tables = given | {"freqs_cis": tuple(table.double() for table in given["freqs_cis"])}
        odd_modulation = given | {name: nested(given[name], lambda vector: vector.float()) for name in modulations}
        stock = {name: block(**each) for name, each in (("tables", odd_tables), ("modulation", odd_modulation))}
        with fastpath() as new:
            for _ in range(4):
                block(**given)
            before = hits(new)
            for _ in range(3):
                assert_same_bytes(block(**odd_tables), stock["tables"])
            on = tuple(id for id in FAMILY.blocks[kind] if id != rotating)
            assert hits(new) == {id: before[id] + (3 if id in on else 0) for id in FEATURES}
            assert new.records[rotating].fallbacks == {f"the cosines are ({TOKENS}, 64) torch.float64": 3}
            for _ in range(3):
                assert_same_bytes(block(**odd_modulation), stock["modulation"])
            for id in ("norm_quant", "gated_residual_norm"):
                ((why, count),) = new.records[id].fallbacks.items()
                assert "torch.float32" in why
                assert count == 3
                assert hits(new)[id] == before[id] + 3


def test_where_stock_norms_and_rotates_strided_q_and_k_itself_it_does(
    denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.5.21, on a GPU, with klein-4b's 24 heads: SGLang's own question about q and k is answered with yes."""
    from sglang.multimodal_gen.runtime.models.dits import flux_2

    asked: list[tuple[Any, ...]] = []

    def can_use(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor) -> bool:
        asked.append((q.shape, q.stride(1), q_weight.shape, cos_sin_cache.shape))
        return True

    monkeypatch.setattr(flux_2, "can_use_flux2_strided_qknorm_rope", can_use, raising=False)
    with fastpath() as new:
        passes = assert_like_stock(denoiser, FAMILY.inputs(denoiser))
        assert hits(new) == served(denoiser, passes, on=FAMILY.others("qk_norm_rope"))
        reason = "stock has a kernel of its own for it here"
        assert new.records["qk_norm_rope"].fallbacks == {reason: passes * LAYERS}
    assert set(asked) == {((1, TOKENS, 2, 128), 9 * 256, (128,), (TOKENS, 128))}


def nested(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tuple(nested(part, change) for part in value) if isinstance(value, tuple) else change(value)


# --- LoRA, hooks, replaced modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        f"{DOUBLES}.1.attn.add_k_proj",
        f"{DOUBLES}.0.attn.to_out.0",
        f"{DOUBLES}.1.ff_context.linear_out",
        f"{SINGLES}.0.attn.to_out",
    ],
)
def test_lora_comes_changes_and_goes(path: str) -> None:
    FAMILY.check_lora_comes_changes_and_goes(path)


def test_a_packed_linear_prepared_for_lora_is_stocks() -> None:
    """SGLang wraps these as well, though (0.5.17) it fails as soon as they have an adapter."""
    from sglang.multimodal_gen.runtime.layers.lora.linear import replace_submodule, wrap_with_lora_layer

    model = build()
    for path in (f"{DOUBLES}.1.ff.linear_in", f"{SINGLES}.0.attn.to_qkv_mlp_proj"):
        linear = model.get_submodule(path)
        replace_submodule(model, path, wrap_with_lora_layer(linear, lora_rank=4, lora_alpha=8))
    with fastpath() as new:
        assert_like_stock(model, FAMILY.inputs(model), passes=3)
        assert hits(new) == served(model, 3, stock={DOUBLES: 1, SINGLES: 1})
        wrapper = "is a MergedColumnParallelLinearWithLoRA"
        assert new.records["qkv_epilogue"].fallbacks == {f"ff.linear_in {wrapper}": 3}
        assert new.records["qk_norm_rope"].fallbacks == {f"attn.to_qkv_mlp_proj {wrapper}": 3}


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize(
    ("path", "some"),
    [
        (
            f"{DOUBLES}.1",
            {"", "norm1", "norm2_context", "attn", "attn.attn", "attn.to_q", "attn.norm_added_q", "attn.to_out.1"}
            | {"ff", "ff.act_fn", "ff.act_fn.gate_fn", "ff_context.linear_out"},
        ),
        (
            f"{SINGLES}.1",
            {"", "norm", "attn", "attn.attn", "attn.to_qkv_mlp_proj", "attn.norm_q", "attn.mlp_act_fn"}
            | {"attn.mlp_act_fn.gate_fn", "attn.to_out"},
        ),
    ],
    ids=["double", "single"],
)
def test_hooks_on_any_module_of_a_block_run_as_often_as_in_stock(path: str, some: set[str], register: str) -> None:
    FAMILY.check_hooks_run_as_often_as_in_stock(register, path, some=some)


def test_hooks_that_change_what_a_module_returns() -> None:
    double = ("attn.to_v", "attn", "ff.linear_in", "ff.act_fn.gate_fn", "ff", "norm2", "norm1_context")
    single = ("attn", "attn.to_qkv_mlp_proj", "attn.mlp_act_fn.gate_fn", "norm")
    FAMILY.check_hooks_that_change_what_a_module_returns(
        *(f"{DOUBLES}.1.{name}" for name in double), *(f"{SINGLES}.1.{name}" for name in single)
    )


def written_into(block: Any, *_: Any) -> None:
    """As a hook on a block: on what it returned, or on what it is given."""
    *_, last = _
    stream = last["hidden_states"] if isinstance(last, dict) else last[1] if isinstance(last, tuple) else last
    stream.add_(1)


@pytest.mark.parametrize("where", ["after the block", "before the next one"])
@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_hooks_that_write_into_the_streams_between_two_blocks(kind: str, where: str) -> None:
    def hook(model: Any) -> Any:
        first, second = model.get_submodule(kind)
        if where == "after the block":
            return first.register_forward_hook(written_into)
        return second.register_forward_pre_hook(written_into, with_kwargs=True)

    FAMILY.check_hooks_that_write_between_two_blocks(hook)


def test_global_hooks_see_every_module(denoiser) -> None:
    FAMILY.check_global_hooks_see_every_module(denoiser)


@pytest.mark.parametrize(
    "path", [f"{DOUBLES}.1.attn.to_v", f"{DOUBLES}.1.ff", f"{SINGLES}.1.attn.mlp_act_fn", f"{SINGLES}.1.norm"]
)
def test_a_forward_replaced_on_one_module_is_noticed(path: str) -> None:
    FAMILY.check_a_forward_replaced_on_one_module_is_noticed(path)


@pytest.mark.parametrize(
    ("path", "on"),
    [
        (f"{DOUBLES}.1.ff.linear_out", FEATURES),
        (f"{DOUBLES}.1.ff.act_fn", FEATURES),
        (f"{DOUBLES}.1.ff.act_fn", FAMILY.others("scale_prepack")),
        (f"{DOUBLES}.1.attn.norm_added_k", FEATURES),
        (f"{DOUBLES}.1.norm1", FAMILY.others("scale_prepack")),
        (f"{DOUBLES}.1.attn", FEATURES),
        (f"{SINGLES}.1.attn.mlp_act_fn", FEATURES),
        (f"{SINGLES}.1.attn.mlp_act_fn.gate_fn", FEATURES),
        (f"{SINGLES}.1.attn.norm_k", FEATURES),
        (f"{SINGLES}.1.norm", FEATURES),
    ],
)
def test_a_replaced_module_is_noticed(path: str, on: tuple[str, ...]) -> None:
    FAMILY.check_a_replaced_module_is_noticed(path, on)


@pytest.mark.parametrize(
    ("path", "norms"),
    [(f"{DOUBLES}.1", ("norm1", "norm1_context", "norm2", "norm2_context")), (f"{SINGLES}.1", ("norm",))],
    ids=["double", "single"],
)
def test_a_norm_with_another_epsilon_is_not_computed_ahead_with_the_old_one(
    path: str, norms: tuple[str, ...]
) -> None:
    FAMILY.check_norms_with_another_epsilon(path, norms)


@pytest.mark.parametrize(
    ("path", "name", "change"),
    [
        (f"{DOUBLES}.1", "attn.norm_added_q", wide),
        (f"{DOUBLES}.1", "attn.norm_k", misaligned),
        (f"{SINGLES}.1", "attn.norm_q", wide),
        (f"{SINGLES}.1", "attn.norm_k", misaligned),
    ],
)
def test_a_qk_norm_whose_weight_the_kernel_cannot_read_is_noticed(path: str, name: str, change: Any) -> None:
    FAMILY.check_a_qk_norm_whose_weight_cannot_be_read(path, name, change)


# --- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        f"{DOUBLES}.1.attn.add_v_proj.weight_scale_inv",
        f"{DOUBLES}.0.attn.to_add_out.weight",
        f"{DOUBLES}.0.ff_context.linear_in.weight",
        f"{DOUBLES}.1.attn.norm_added_k.weight",
        f"{SINGLES}.0.attn.to_qkv_mlp_proj.weight",
        f"{SINGLES}.1.attn.to_out.weight_scale_inv",
        f"{SINGLES}.1.attn.norm_q.weight",
        "double_stream_modulation_txt.linear.weight",
    ],
)
def test_a_changed_parameter_is_used_at_once(path: str) -> None:
    FAMILY.check_a_changed_parameter_is_used_at_once(path)


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
    block.norm2.eps = 1e-3


def unequal_qk_epsilon(block: Any) -> None:
    block.attn.norm_k.variance_epsilon = 1e-3


def a_bias(block: Any) -> None:
    linear = block.attn.to_q if hasattr(block, "ff") else block.attn.to_out
    linear.bias = nn.Parameter(torch.ones(256).bfloat16(), requires_grad=False)


def two_ranks(block: Any) -> None:
    # Neither stock's column-parallel forward looks at it, nor the row-parallel one but for the bias.
    linear = block.attn.to_q if hasattr(block, "ff") else block.attn.to_qkv_mlp_proj
    linear.tp_size = 2


def misaligned_weight(block: Any) -> None:
    linear = block.ff.linear_in if hasattr(block, "ff") else block.attn.to_qkv_mlp_proj
    linear.weight.data = misaligned(linear.weight.data)


def affine_norm(block: Any) -> None:
    norm = nn.LayerNorm(256, eps=1e-6).bfloat16()
    nn.init.normal_(norm.weight)
    setattr(block, "norm1" if hasattr(block, "ff") else "norm", norm)


def dropout(block: Any) -> None:
    block.attn.to_out[1].p = 0.5  # which evaluation ignores


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        (f"{DOUBLES}.1", unequal_epsilon, "epsilons differ"),
        (f"{DOUBLES}.1", unequal_qk_epsilon, "epsilons differ"),
        (f"{DOUBLES}.1", a_bias, "attn.to_q has a bias"),
        (f"{DOUBLES}.1", two_ranks, "tensor parallelism over 2 ranks"),
        (f"{DOUBLES}.1", misaligned_weight, "ff.linear_in is not 16-byte aligned"),
        (f"{DOUBLES}.1", affine_norm, "a layer norm has weights"),
        (f"{DOUBLES}.1", dropout, "the attention output has a dropout"),
        (f"{SINGLES}.1", unequal_qk_epsilon, "epsilons differ"),
        (f"{SINGLES}.1", a_bias, "attn.to_out has a bias"),
        (f"{SINGLES}.1", two_ranks, "tensor parallelism over 2 ranks"),
        (f"{SINGLES}.1", misaligned_weight, "attn.to_qkv_mlp_proj is not 16-byte aligned"),
        (f"{SINGLES}.1", affine_norm, "a layer norm has weights"),
    ],
)
def test_a_block_of_another_kind_is_stocks(path: str, change: Callable[[Any], None], reason: str) -> None:
    FAMILY.check_a_block_of_another_kind_is_stocks(path, change, reason)


@pytest.mark.parametrize("name", ["use_fused_qkv", "use_fused_added_qkv"])
def test_packed_projections_are_refused(name: str) -> None:
    """As ModelOpt's FP4 checkpoints have them (and from 0.5.19 its FP8 ones): those linears are others."""
    (block, _) = build().transformer_blocks
    BlockLayout.of(block, DOUBLE)
    setattr(block.attn, name, True)
    with pytest.raises(Refused, match="packed projections"):
        BlockLayout.of(block, DOUBLE)
    for linear in ("to_q", "to_k", "to_v"):
        delattr(block.attn, linear)
    with pytest.raises(Refused, match=r"attn\.to_q is not there: the projections are packed"):
        BlockLayout.of(block, DOUBLE)


def test_heads_of_another_width_are_refused() -> None:
    model = build()
    for name, parts in ((DOUBLES, DOUBLE), (SINGLES, SINGLE)):
        block = model.get_submodule(f"{name}.0")
        block.attn.head_dim = 64
        with pytest.raises(Refused, match="heads are 64 wide"):
            BlockLayout.of(block, parts)


@pytest.mark.parametrize(
    ("model", "double", "single"),
    [
        ({"fp8": False}, "attn.add_q_proj is not in block FP8", "attn.to_qkv_mlp_proj is not in block FP8"),
        ({"dtype": torch.float32}, "a QK norm has a torch.float32", "a QK norm has a torch.float32"),
        ({"not_quantized": ("proj_out", "ff.linear_out")}, "ff.linear_out is not in block FP8", None),
        ({"not_quantized": ("proj_out", "to_qkv_mlp_proj")}, None, "attn.to_qkv_mlp_proj is not in block FP8"),
    ],
    ids=["bf16", "float32", "double blocks partly", "single blocks partly"],
)
def test_a_denoiser_of_another_kind_is_stocks(model: dict[str, Any], double: str | None, single: str | None) -> None:
    denoiser = build(**model)
    with fastpath() as new:
        assert_like_stock(denoiser, FAMILY.inputs(denoiser), passes=2)
        left = {DOUBLES: LAYERS if double else 0, SINGLES: LAYERS if single else 0}
        assert hits(new) == served(denoiser, 2, stock=left)
        for id, reason in (("qkv_epilogue", double), ("qk_norm_rope", single)):
            counted = new.records[id].fallbacks
            assert list(counted.values()) == [2 * LAYERS] * bool(reason)
            assert not reason or reason in next(iter(counted))
            assert new.observed(new.records[id])[0] is (State.NEVER_HIT if reason else State.ACTIVE)


def test_gradients_are_stocks(denoiser) -> None:
    FAMILY.check_gradients_are_stocks(denoiser)


def test_autocast_is_stocks(denoiser) -> None:
    FAMILY.check_autocast_is_stocks(denoiser)


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY.launchers)
def test_a_kernel_that_fails_after_writing_once_admitted_is_banned(denoiser, name: str) -> None:
    FAMILY.check_a_kernel_that_fails_after_writing_is_banned(denoiser, name, warm=True)


@pytest.mark.parametrize("name", ["gemm", "layer_norm_quant_pair", "qk_norm_rope"])
def test_a_kernel_that_fails_after_writing_from_the_start_is_banned(denoiser, name: str) -> None:
    FAMILY.check_a_kernel_that_fails_after_writing_is_banned(denoiser, name, warm=False)


@pytest.mark.parametrize("name", ["layer_norm_quant_pair", "qk_norm_rope"])
def test_out_of_memory_in_a_kernel_bans_nothing(denoiser, name: str) -> None:
    FAMILY.check_out_of_memory_in_a_kernel_bans_nothing(denoiser, name, warm=True)


def test_out_of_memory_while_merging_leaves_the_linears_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ("scale_prepack", "qkv_epilogue")
    FAMILY.check_out_of_memory_while_merging_leaves_the_linears_apart(monkeypatch, on, fails=2)


# --- guard, plan and sites -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", ["always", "sample:2"])
def test_a_guard_that_checks_again(denoiser, guard: str) -> None:
    FAMILY.check_a_guard_that_checks_again(denoiser, guard)


def test_a_guard_that_is_off(denoiser) -> None:
    FAMILY.check_a_guard_that_is_off(denoiser)


def test_the_sites_are_restored_and_a_plan_keeps_what_it_learned(denoiser) -> None:
    FAMILY.check_the_sites_are_restored_and_a_plan_keeps_what_it_learned(denoiser)


def test_another_plan_starts_anew(denoiser) -> None:
    FAMILY.check_another_plan_starts_anew(denoiser, ("act_quant", "qk_norm_rope"))


def test_each_feature_announces_its_first_hit(denoiser, caplog: pytest.LogCaptureFixture) -> None:
    FAMILY.check_each_feature_announces_its_first_hit(denoiser, caplog)


# --- beside Qwen-Image ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen_image() -> nn.Module:
    return build_qwen_image(layers=LAYERS, fp8=True)


BOTH = tuple(id for id in FEATURES if not BY_ID[id].lacks(QWEN_IMAGE))
FLUX2_ONLY = tuple(id for id in FEATURES if id not in BOTH)


def test_what_does_nothing_in_flux2_says_why_once_a_block_has_run(denoiser, qwen_image) -> None:
    reasons = {
        "cfg_mod_cache": "FLUX.2: guidance is an input of the model, so a step is one pass",
        "bias_fold": "FLUX.2: its linears have no biases",
    }
    with applied(make_plan((*FEATURES, *reasons))) as new:
        states = {id: new.observed(new.records[id]) for id in reasons}
        assert states == dict.fromkeys(reasons, (State.NEVER_HIT, "no call reached it")), "nothing ran yet"
        infer(denoiser, FAMILY.inputs(denoiser))
        assert {id: new.observed(new.records[id]) for id in reasons} == {
            id: (State.UNSUPPORTED, reason) for id, reason in reasons.items()
        }
        assert {new.observed(new.records[id]) for id in FEATURES} == {(State.ACTIVE, "")}
    with applied(make_plan((*FEATURES, *reasons))) as new:
        infer(qwen_image, denoiser_inputs(qwen_image, **REQUEST))
        assert {id: new.observed(new.records[id])[0] for id in FLUX2_ONLY} == dict.fromkeys(
            FLUX2_ONLY, State.UNSUPPORTED
        )
        assert new.observed(new.records["bias_fold"]) == (State.ACTIVE, "")


@pytest.mark.parametrize("on", [BOTH, ("act_quant",)], ids=["all", "one"])
def test_each_family_is_compared_for_itself(denoiser, qwen_image, on: tuple[str, ...]) -> None:
    """Their blocks have the same names, and calls of the same sizes."""
    qwen_inputs, inputs = denoiser_inputs(qwen_image, **REQUEST), FAMILY.inputs(denoiser)
    with fastpath(on) as new:
        alone = assert_like_stock(denoiser, inputs)
        checks = new.guard.counters["checks"]
    with fastpath(on) as new:
        assert_like_stock(qwen_image, qwen_inputs)
        before = new.guard.counters["checks"]
        assert assert_like_stock(denoiser, inputs) == alone
        assert new.guard.counters["checks"] - before == checks, "as if Qwen-Image had not been there"
        assert not failed(new)


def test_a_kernel_that_fails_in_one_family_serves_the_other(denoiser, qwen_image) -> None:
    qwen_inputs = denoiser_inputs(qwen_image, **REQUEST)
    with fastpath(("act_quant",)) as new:
        with FAMILY.failing("act_quant", RuntimeError("scribbled")):
            assert_like_stock(denoiser, FAMILY.inputs(denoiser), passes=2)
        assert failed(new)
        before = new.records["act_quant"].hits
        passes = assert_like_stock(qwen_image, qwen_inputs)
        assert new.records["act_quant"].hits == before + passes * LAYERS


@pytest.mark.parametrize("kind", [DOUBLES, SINGLES])
def test_a_site_that_is_taken_before_is_lost_to_flux2_alone(denoiser, qwen_image, kind: str) -> None:
    """With both sites: the blocks of the other kind are stock's again as well."""
    inputs, qwen_inputs = FAMILY.inputs(denoiser), denoiser_inputs(qwen_image, **REQUEST)
    other = type(denoiser.get_submodule(f"{SINGLES if kind == DOUBLES else DOUBLES}.0"))
    original = vars(other)["forward"]
    with class_forward(denoiser, kind, twice_all):
        theirs = infer(denoiser, inputs)
        with fastpath() as new:
            assert vars(other)["forward"] is original
            assert {id: new.records[id].state for id in FEATURES} == {
                id: State.ACTIVE if id in BOTH else State.DRIFTED for id in FEATURES
            }
            assert_same_bytes(infer(denoiser, inputs), theirs)
            assert not any(hits(new).values())
            assert {new.observed(new.records[id])[0] for id in FEATURES} == {State.DRIFTED}
            passes = assert_like_stock(qwen_image, qwen_inputs)
            assert {id: new.observed(new.records[id])[0] for id in BOTH} == dict.fromkeys(BOTH, State.ACTIVE)
            assert {id: new.records[id].hits for id in BOTH} == dict.fromkeys(BOTH, passes * LAYERS)
            what = type(denoiser.get_submodule(f"{kind}.0")).__name__
            assert (
                f"act_quant in FLUX.2 (sglang.multimodal_gen.runtime.models.dits.flux_2:{what}.forward"
                in new.summary("x")
            )
        with pytest.raises(SystemExit, match="drifted"):
            plugin.apply(FAMILY.make_plan(strict=True))


def test_a_site_that_is_lost_later_is_drifted_for_flux2_and_active_for_qwen_image(denoiser, qwen_image) -> None:
    inputs, qwen_inputs = FAMILY.inputs(denoiser), denoiser_inputs(qwen_image, **REQUEST)
    with fastpath() as new:
        assert_like_stock(denoiser, inputs, passes=2)
        assert_like_stock(qwen_image, qwen_inputs, passes=2)
        with class_forward(denoiser, SINGLES, twice_all) as forward:
            theirs = infer(denoiser, inputs)
            plugin.verify(new)
            ((state, reason),) = {new.observed(new.records[id]) for id in FEATURES}
            assert state is State.DRIFTED
            assert "Flux2SingleTransformerBlock.forward" in reason
            in_double = new.records["qkv_epilogue"].hits
            assert_same_bytes(infer(denoiser, inputs), theirs)
            assert new.records["qkv_epilogue"].hits == in_double, "both sites are lost"
            assert_like_stock(qwen_image, qwen_inputs, passes=1)
            assert {new.observed(new.records[id]) for id in BOTH} == {(State.ACTIVE, "")}
            assert {new.observed(new.records[id])[0] for id in FLUX2_ONLY} == {State.DRIFTED}
            plugin.deactivate()
            assert vars(type(denoiser.single_transformer_blocks[0]))["forward"] is forward
