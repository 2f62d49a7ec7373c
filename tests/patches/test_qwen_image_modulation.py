"""`cfg_mod_cache` on SGLang's own denoiser and denoising step: stock's bytes, whatever comes between two passes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from denoiser_calls import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sglang_fastpath import contracts, envs, plan, plugin
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import FeatureRecord, State

LAYERS = 2
LINEARS = 2 * LAYERS
STEPS = 3


@pytest.fixture(scope="module")
def denoiser() -> nn.Module:
    return build_qwen_image(layers=LAYERS)


@pytest.fixture(scope="module")
def other_denoiser() -> nn.Module:
    return build_qwen_image(layers=LAYERS, seed=1)


@contextmanager
def fastpath(guard: str = "once") -> Iterator[FeatureRecord]:
    plugin.apply(new := plan.make_plan(envs.Settings(enabled=True, guard=guard), contracts.installed_release()))
    try:
        yield new.records["cfg_mod_cache"]
    finally:
        plugin.deactivate()


def latents_of(denoiser: nn.Module, **loop: Any) -> list[Tensor]:
    return [latents.clone() for latents in GuidanceLoop(denoiser, steps=STEPS, **loop)]


def assert_same_bytes(fast: list[Tensor], stock: list[Tensor]) -> None:
    assert len(fast) == len(stock)
    for index, (a, b) in enumerate(zip(fast, stock, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"latents differ after step {index}"


def in_one_step(denoiser: nn.Module, passes: Callable[[], None]) -> None:
    """Runs `passes` where stock runs its guidance passes: inside `DenoisingStage._run_denoising_step`."""
    loop = GuidanceLoop(denoiser, steps=1)

    def predict(*, latents: Tensor, **_: Any) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            passes()
        return torch.zeros_like(latents)

    loop.stage._predict_noise_with_cfg = predict
    list(loop)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("image_hw", [(8, 8), (4, 6), (5, 7)])
def test_a_guidance_run_gives_stocks_bytes_and_hits_in_every_step(denoiser, image_hw, batch) -> None:
    loop = {"image_hw": image_hw, "batch": batch, "text_tokens": 13, "negative_tokens": 7}
    stock = latents_of(denoiser, **loop)
    with fastpath() as record:
        fast = latents_of(denoiser, **loop)
        assert record.hits == STEPS * LINEARS
        assert not record.fallbacks
        verdicts = plan.current().guard.verdicts
    assert_same_bytes(fast, stock)
    assert {(v["verdict"], v["difference"]) for v in verdicts} == {("admitted", None)}
    assert len(verdicts) == LINEARS, "every layer was compared with stock"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_dtype(dtype: torch.dtype) -> None:
    model = build_qwen_image(layers=LAYERS, dtype=dtype)
    stock = latents_of(model)
    with fastpath() as record:
        assert_same_bytes(latents_of(model), stock)
        assert record.hits == STEPS * LINEARS


def test_requests_interleaved_step_by_step_keep_apart(denoiser, other_denoiser) -> None:
    """Two requests of different prompts and resolutions, and a second model, advance in turns."""
    loops: list[tuple[nn.Module, dict[str, Any]]] = [
        (denoiser, {"seed": 1, "image_hw": (8, 8), "text_tokens": 13}),
        (denoiser, {"seed": 2, "image_hw": (4, 6), "text_tokens": 5}),
        (other_denoiser, {"seed": 3, "image_hw": (8, 8), "text_tokens": 13}),
    ]
    stock = [latents_of(model, **loop) for model, loop in loops]
    with fastpath() as record:
        running = [GuidanceLoop(model, steps=STEPS, **loop) for model, loop in loops]
        turns = [[latents.clone() for latents in turn] for turn in zip(*running, strict=True)]
        assert record.hits == len(loops) * STEPS * LINEARS
    for index, expected in enumerate(stock):
        assert_same_bytes([turn[index] for turn in turns], expected)


def test_nothing_is_reused_outside_a_step(denoiser) -> None:
    inputs = denoiser_inputs(denoiser)
    with fastpath() as record, torch.no_grad():
        call(denoiser, inputs)
        call(denoiser, inputs)
        assert record.hits == 0
        assert record.fallbacks["outside a denoising step"] == 2


def test_nothing_is_reused_in_the_next_step(denoiser) -> None:
    inputs = denoiser_inputs(denoiser)
    with fastpath() as record:
        for _ in range(2):
            in_one_step(denoiser, lambda: call(denoiser, inputs))
        assert record.hits == 0


def test_a_step_that_fails_leaves_nothing_behind(denoiser) -> None:
    stock = latents_of(denoiser)
    with fastpath() as record:

        def fail() -> None:
            call(denoiser, denoiser_inputs(denoiser))
            raise RuntimeError("as a request might")

        with pytest.raises(RuntimeError, match="as a request might"):
            in_one_step(denoiser, fail)
        with torch.no_grad():
            call(denoiser, denoiser_inputs(denoiser))
        assert record.hits == 0
        assert record.fallbacks["outside a denoising step"] == 1
        assert_same_bytes(latents_of(denoiser), stock)


def in_place(inputs: dict[str, Any]) -> dict[str, Any]:
    inputs["timestep"].add_(100)
    return inputs


def equal_but_another(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "timestep": inputs["timestep"].clone()}


def another_dtype(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "timestep": inputs["timestep"].double()}


@pytest.mark.parametrize("change", [in_place, equal_but_another, another_dtype], ids=lambda f: f.__name__)
def test_another_timestep_is_never_served_the_old_modulation(denoiser, change) -> None:
    outputs: list[Tensor] = []

    def passes() -> None:
        inputs = denoiser_inputs(denoiser)
        outputs.append(call(denoiser, inputs))
        outputs.append(call(denoiser, change(inputs)))

    in_one_step(denoiser, passes)
    with fastpath() as record:
        in_one_step(denoiser, passes)
        assert record.hits == 0
    assert_same_bytes(outputs[2:], outputs[:2])


def test_freed_timesteps_whose_address_is_used_again_do_not_match(denoiser) -> None:
    """Each timestep is dropped before the next is made, so that the allocator hands out the same address."""
    outputs: list[Tensor] = []

    def passes() -> None:
        for value in (100.0, 500.0, 900.0, 300.0):
            outputs.append(call(denoiser, denoiser_inputs(denoiser, timestep=value)))

    in_one_step(denoiser, passes)
    with fastpath() as record:
        in_one_step(denoiser, passes)
        assert record.hits == 0
    assert_same_bytes(outputs[4:], outputs[:4])


def add_in_place(linear: nn.Module) -> None:
    linear.weight.add_(1)


def swap_data(linear: nn.Module) -> None:
    linear.weight.data = linear.weight.data + 1


def new_parameter(linear: nn.Module) -> None:
    linear.weight = nn.Parameter(linear.weight + 1, requires_grad=False)


def change_bias(linear: nn.Module) -> None:
    linear.bias.add_(1)


@pytest.mark.parametrize("update", [add_in_place, swap_data, new_parameter, change_bias], ids=lambda f: f.__name__)
def test_weights_that_change_within_a_step_are_noticed(update) -> None:
    outputs: list[Tensor] = []

    def passes() -> None:
        model = build_qwen_image(layers=LAYERS)
        inputs = denoiser_inputs(model)
        call(model, inputs)
        update(model.transformer_blocks[1].img_mod[1])
        outputs.append(call(model, inputs))

    model = build_qwen_image(layers=LAYERS)
    in_one_step(model, passes)
    with fastpath() as record:
        in_one_step(model, passes)
        assert record.hits == LINEARS - 1
        assert record.fallbacks == {"the weights changed within the step": 1}
    assert_same_bytes(outputs[1:], outputs[:1])


def test_timestep_embedding_weights_that_change_within_a_step_are_noticed() -> None:
    outputs: list[Tensor] = []

    def passes() -> None:
        model = build_qwen_image(layers=LAYERS)
        inputs = denoiser_inputs(model)
        call(model, inputs)
        model.time_text_embed.timestep_embedder.linear_2.weight.mul_(2)
        outputs.append(call(model, inputs))

    model = build_qwen_image(layers=LAYERS)
    in_one_step(model, passes)
    with fastpath() as record:
        in_one_step(model, passes)
        assert record.hits == 0
    assert_same_bytes(outputs[1:], outputs[:1])


def test_weights_updated_between_steps_as_sglang_updates_them() -> None:
    """`param.data.copy_` moves neither version nor address: only the end of the step protects against it."""

    def run() -> list[Tensor]:
        model = build_qwen_image(layers=LAYERS)
        seen = []
        for latents in GuidanceLoop(model, steps=STEPS):
            seen.append(latents.clone())
            for block in model.transformer_blocks:
                weight = block.img_mod[1].weight
                weight.data.copy_(weight.data * 1.5)
        return seen

    stock = run()
    with fastpath() as record:
        assert_same_bytes(run(), stock)
        assert record.hits == STEPS * LINEARS


def test_lora_on_the_modulation_is_left_to_stock() -> None:
    from sglang.multimodal_gen.runtime.layers.lora.linear import wrap_with_lora_layer

    def run() -> list[Tensor]:
        model = build_qwen_image(layers=LAYERS)
        generator = torch.Generator().manual_seed(5)
        seen = []
        for index, latents in enumerate(GuidanceLoop(model, steps=STEPS)):
            seen.append(latents.clone())
            if index == 0:  # attached after the first step, as a LoRA that a request switches on
                mod = model.transformer_blocks[0].img_mod
                mod[1] = wrap_with_lora_layer(mod[1], lora_rank=4, lora_alpha=4)
                a = torch.randn(4, 256, generator=generator).bfloat16()
                b = torch.randn(6 * 256, 4, generator=generator).bfloat16()
                mod[1].set_lora_weights(a, b, merge_weights=False)
        return seen

    stock = run()
    with fastpath() as record:
        assert_same_bytes(run(), stock)
        assert record.hits == LINEARS + (STEPS - 1) * (LINEARS - 1)
        ((reason, count),) = record.fallbacks.items()
        assert "LoRA" in reason
        assert count == (STEPS - 1) * 2
    assert not torch.equal(stock[-1], latents_of(build_qwen_image(layers=LAYERS))[-1]), "LoRA acted"


def test_a_call_that_was_not_foreseen_is_left_to_stock(denoiser) -> None:
    """Latents by position, as no release passes them: nothing of ours may raise."""
    inputs = denoiser_inputs(denoiser)
    latents = inputs.pop("hidden_states")
    outputs: list[Tensor] = []

    def passes() -> None:
        with set_forward_context(current_timestep=0, attn_metadata=None):
            outputs.extend(denoiser(latents, **inputs) for _ in range(2))

    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    in_one_step(denoiser, passes)
    with fastpath() as record:
        in_one_step(denoiser, passes)
        assert record.hits == 0
        ((reason, count),) = record.fallbacks.items()
        assert "hidden_states" in reason
        assert count == 2
    assert_same_bytes(outputs[2:], outputs[:2])


def test_gradients_leave_it_to_stock(denoiser) -> None:
    with fastpath() as record:

        def passes() -> None:
            with torch.enable_grad():
                call(denoiser, denoiser_inputs(denoiser))

        in_one_step(denoiser, passes)
        assert record.fallbacks == {"gradients are enabled": 1}


@pytest.mark.parametrize("arch", [{"zero_cond_t": True}, {"use_additional_t_cond": True}], ids=str)
def test_variants_of_the_denoiser(arch: dict[str, bool]) -> None:
    """Edit models modulate condition tokens at t = 0; layered ones add a learned condition to the timestep."""
    model = build_qwen_image(layers=LAYERS, **arch)
    extra: list[dict[str, Any]] = [{}, {}]
    if "zero_cond_t" in arch:
        extra = [{"img_shapes": [[(1, 8, 8)]]}] * 2
    else:
        extra = [{"additional_t_cond": torch.tensor([value])} for value in (0, 1)]
    outputs: list[Tensor] = []

    def passes() -> None:
        inputs = denoiser_inputs(model)
        for more in (extra[0], extra[0], extra[1]):
            outputs.append(call(model, {**inputs, **more}))

    in_one_step(model, passes)
    with fastpath() as record:
        in_one_step(model, passes)
        assert record.hits == (2 if "zero_cond_t" in arch else 1) * LINEARS
    assert_same_bytes(outputs[3:], outputs[:3])


def test_hooks_on_the_modulation_leave_it_to_stock(denoiser) -> None:
    linear = denoiser.transformer_blocks[0].img_mod[1]
    handle = linear.register_forward_hook(lambda module, inputs, output: (output[0] * 2, output[1]))
    try:
        stock = latents_of(denoiser)
        with fastpath() as record:
            assert_same_bytes(latents_of(denoiser), stock)
            assert record.hits == STEPS * (LINEARS - 1)
            assert record.fallbacks == {"the modulation linear has hooks": 2 * STEPS}
    finally:
        handle.remove()


def _double_the_scale(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kwargs["scale"].mul_(2)


@contextmanager
def overwriting_the_modulation(denoiser: nn.Module, block: int) -> Iterator[None]:
    """Doubles the scale that a norm is given, in place: a reused modulation would be doubled twice."""
    norm = denoiser.transformer_blocks[block].img_norm1
    handle = norm.register_forward_pre_hook(_double_the_scale, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("block", range(LAYERS))
def test_a_recording_that_somebody_overwrites_is_caught_by_the_guard(denoiser, caplog, block) -> None:
    """Inference tensors carry no version, so that only the comparison with stock can tell."""
    with overwriting_the_modulation(denoiser, block):
        stock = latents_of(denoiser)
        with fastpath() as record, caplog.at_level(logging.WARNING, logger="sglang_fastpath"):
            fast = latents_of(denoiser)
            state, reason = plan.current().observed(record)
    assert_same_bytes(fast, stock)
    assert state is State.PARITY_FAILED
    assert f"transformer_blocks.{block}.img_mod" in reason
    assert sum("parity failed" in message for message in caplog.messages) == 1


def test_a_recording_that_somebody_overwrites_is_noticed_by_its_version(denoiser) -> None:
    inputs = denoiser_inputs(denoiser)
    outputs: list[Tensor] = []

    def passes() -> None:
        outputs.append(call(denoiser, inputs))
        outputs.append(call(denoiser, inputs))

    with overwriting_the_modulation(denoiser, 1):
        in_one_step(denoiser, passes)
        with fastpath("off") as record:
            in_one_step(denoiser, passes)
            assert record.fallbacks == {"the recorded modulation was overwritten": 1}
    assert_same_bytes(outputs[2:], outputs[:2])


@dataclass(frozen=True)
class Pass:
    """One forward pass within a step: which model, which timestep object, and whether it is changed before."""

    model: int
    timestep: int
    prompt: int
    change: bool


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(Pass, st.integers(0, 1), st.integers(0, 1), st.integers(0, 2), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
def test_any_sequence_of_passes_within_a_step(denoiser, other_denoiser, sequence: list[Pass]) -> None:
    models = [denoiser, other_denoiser]
    outputs: list[Tensor] = []

    def passes() -> None:
        timesteps = [torch.tensor([250.0]), torch.tensor([250.0])]
        for item in sequence:
            if item.change:
                timesteps[item.timestep].add_(50)
            inputs = denoiser_inputs(
                models[item.model],
                seed=item.prompt,
                image_hw=[(4, 4), (2, 6), (3, 3)][item.prompt],
                text_tokens=3 + item.prompt,
                timestep=timesteps[item.timestep],
            )
            outputs.append(call(models[item.model], inputs))

    in_one_step(denoiser, passes)
    with fastpath("off"):
        in_one_step(denoiser, passes)
    assert_same_bytes(outputs[len(sequence) :], outputs[: len(sequence)])
