"""What of SGLang's denoiser is watched: each change is named, and what is no change is none."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang_fastpath.patches.diffusion.model_state import ModelState
from torch import Tensor, nn

from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs, start_runtime


@pytest.fixture
def model() -> Any:
    return build_qwen_image(layers=1)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[None]:
    start_runtime()
    yield


def run(model: Any) -> Any:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(current_timestep=0, attn_metadata=None):
        return model(**denoiser_inputs(model, image_hw=(2, 3), text_tokens=4))


def linear(model: Any) -> Any:
    return model.transformer_blocks[0].attn.to_q


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a weight is written to": lambda model: linear(model).weight.add_(1),
    "a bias is written to": lambda model: linear(model).bias.zero_(),
    "a weight is moved": lambda model: setattr(linear(model).weight, "data", linear(model).weight.data.clone()),
    "a weight is replaced": lambda model: setattr(
        linear(model), "weight", nn.Parameter(linear(model).weight.data, requires_grad=False)
    ),
    "a bias is removed": lambda model: setattr(linear(model), "bias", None),
    "a parameter is added": lambda model: linear(model).register_parameter("more", nn.Parameter(torch.zeros(1))),
    "a parameter is added where there was none": lambda model: model.rotary_emb.register_parameter(
        "more", nn.Parameter(torch.zeros(1))
    ),
    "a buffer is added": lambda model: linear(model).register_buffer("more", torch.zeros(1)),
    "a parameter is deleted": lambda model: delattr(linear(model), "bias"),
    "a module is replaced": lambda model: setattr(model.transformer_blocks[0].attn, "to_q", nn.Identity()),
    "a module is added": lambda model: setattr(linear(model), "adapter", nn.Identity()),
    "a module is deleted": lambda model: delattr(model.transformer_blocks[0], "txt_mlp"),
    "a block is appended": lambda model: model.transformer_blocks.append(nn.Identity()),
    "an attribute is added": lambda model: setattr(linear(model), "lora_path", "x"),
    "a forward of its own": lambda model: setattr(linear(model), "forward", linear(model).forward),
    "an attention implementation": lambda model: setattr(
        model.transformer_blocks[0].attn.attn,
        "attn_impl",
        build_qwen_image(layers=1).transformer_blocks[0].attn.attn.attn_impl,
    ),
    "another class": lambda model: setattr(linear(model), "__class__", type("Sharded", (type(linear(model)),), {})),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_is_seen(model: Any, change: str) -> None:
    state = ModelState(model)
    assert state.changed() is None
    CHANGES[change](model)
    assert state.changed()
    assert ModelState(model).changed() is None


@torch.no_grad()
def test_a_function_of_a_class_is_watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plugin may replace what is no site of ours at any time; a graph would go on with what was there."""
    state = ModelState(model)
    forward = type(linear(model)).forward
    monkeypatch.setattr(type(linear(model)), "forward", lambda *args: forward(*args))
    assert state.changed()
    monkeypatch.undo()
    assert state.changed() is None


def test_passes_change_nothing(model: Any) -> None:
    run(model)
    state = ModelState(model)
    for _ in range(2):
        run(model)
        assert state.changed() is None
        assert state.refusal is None
        assert not state.has_hooks()


@torch.no_grad()
def test_a_weight_that_is_freed_cannot_be_mistaken_for_its_successor(model: Any) -> None:
    """Identities and addresses are used again at once: the state must hold what it compares with."""
    state = ModelState(model)
    for _ in range(50):
        weight = linear(model).weight
        linear(model).weight = nn.Parameter(weight.data + 1, requires_grad=False)
        del weight
        gc.collect(0)
        assert state.changed()


@torch.no_grad()
def test_inference_tensors_as_weights(model: Any) -> None:
    with torch.inference_mode():
        value = linear(model).weight.data.clone()
    linear(model).weight = nn.Parameter(value, requires_grad=False)
    state = ModelState(model)
    assert state.changed() is None
    with torch.inference_mode():
        linear(model).weight.data = value.clone()
    assert state.changed()


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("where", ["", "transformer_blocks.0.attn.to_q", "transformer_blocks", "rotary_emb"])
def test_hooks_come_and_go_without_being_a_change(model: Any, where: str, kind: str) -> None:
    state = ModelState(model)
    for options in ({}, {"with_kwargs": True}):
        handle = getattr(model.get_submodule(where), kind)(lambda *_: None, **options)
        assert state.has_hooks()
        assert state.changed() is None
        handle.remove()
        assert not state.has_hooks()


def lora(model: Any) -> Any:
    from sglang.multimodal_gen.runtime.layers.lora.linear import wrap_with_lora_layer

    attn = model.transformer_blocks[0].attn
    attn.to_q = wrap_with_lora_layer(attn.to_q, lora_rank=2, lora_alpha=2)
    return attn.to_q


def adapter(layer: Any, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = layer.weight.shape
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in ((2, columns), (rows, 2)))  # type: ignore[return-value]


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "another adapter": lambda layer: layer.set_lora_weights(*adapter(layer, 2), merge_weights=False),
    "another adapter instead": lambda layer: layer.set_lora_weights(
        *adapter(layer, 2), merge_weights=False, clear_existing=True
    ),
    "the strength": lambda layer: setattr(layer, "strength", 0.5),
    "off": lambda layer: setattr(layer, "disable_lora", True),
    "merged": lambda layer: layer.merge_lora_weights(),
    "merged at a strength": lambda layer: layer.merge_lora_weights(strength=0.5),
    "an adapter is written to": lambda layer: layer.lora_B.mul_(2),
    "an adapter is moved": lambda layer: setattr(layer.lora_A, "data", layer.lora_A.data * 2),
}


@pytest.mark.parametrize("switch", SWITCHES)
@torch.no_grad()
def test_a_switch_of_lora_is_seen(model: Any, switch: str) -> None:
    layer = lora(model)
    layer.set_lora_weights(*adapter(layer, 1), merge_weights=False)
    state = ModelState(model)
    assert state.changed() is None
    SWITCHES[switch](layer)
    assert state.changed()


@torch.no_grad()
def test_each_step_of_a_merged_adapters_life_is_seen(model: Any) -> None:
    state = ModelState(model)

    def moved_on() -> None:
        nonlocal state
        assert state.changed()
        state = ModelState(model)
        assert state.changed() is None

    layer = lora(model)
    moved_on()
    layer.set_lora_weights(*adapter(layer, 1))
    moved_on()
    layer.unmerge_lora_weights()
    moved_on()
    layer.merge_lora_weights(strength=0.5)
    moved_on()
    layer.set_lora_weights(*adapter(layer, 2), clear_existing=True)
    moved_on()
    layer.commit_merged_as_base()
    moved_on()
    model.transformer_blocks[0].attn.to_q = layer.base_layer
    moved_on()


def test_a_stock_denoiser_is_not_refused(model: Any) -> None:
    assert ModelState(model).refusal is None


def compile_a_part(model: Any) -> None:
    linear(model).compile()


def offload_a_part(model: Any) -> None:
    linear(model).weight = nn.Parameter(linear(model).weight.data.to("meta"), requires_grad=False)


def own_forward(model: Any) -> None:
    linear(model).forward = linear(model).forward


def denoisers_own_forward(model: Any) -> None:
    model.forward = model.forward


def sparse_attention(model: Any) -> None:
    from sglang.multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

    model.transformer_blocks[0].attn.attn.backend = AttentionBackendEnum.SLIDING_TILE_ATTN


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (compile_a_part, "torch.compile compiled it, or a part of it"),
        (offload_a_part, "its weights are on cpu, meta: offloaded"),
        (own_forward, "a ColumnParallelLinear has a forward of its own"),
        (denoisers_own_forward, "the denoiser has a forward of its own"),
        (sparse_attention, "attention backend SLIDING_TILE_ATTN"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_why_a_model_is_refused(model: Any, change: Callable[[Any], None], reason: str) -> None:
    change(model)
    refusal = ModelState(model).refusal
    assert refusal
    assert reason in refusal


def test_a_state_does_not_keep_its_model_alive() -> None:
    model = build_qwen_image(layers=1)
    state = ModelState(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not state.has_hooks()
