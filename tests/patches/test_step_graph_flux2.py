"""`step_graph` on SGLang's own FLUX.2 and klein: a step is one pass, and its guidance an input like the others.

On a CPU, as tests/patches/test_step_graph.py, which has what does not depend on the model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_calls import call, infer
from step_graphs import (
    ALL,
    ALONE,
    FIRST,
    REUSING,
    assert_replays,
    fastpath,
    passes,
    step_by_step,
    stock_output,
    warm_up,
)
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs
from sglang_fastpath.features import BY_ID, FLUX2
from sglang_fastpath.flux2_denoiser import build_flux2, flux2_inputs
from sglang_fastpath.flux2_loop import Flux2Loop

pytestmark = pytest.mark.usefixtures("emulated", "counted")

STEPS = 5
REQUEST: dict[str, Any] = {"image_hw": (3, 5), "text_tokens": 6}
EDIT: dict[str, Any] = {**REQUEST, "references": ((2, 4), (3, 1))}


def build(**arch: Any) -> Any:
    return build_flux2(**{"layers": 1, "single_layers": 1} | arch)


@pytest.fixture(scope="module")
def dev() -> Any:
    return build()


@pytest.fixture(scope="module")
def klein() -> Any:
    return build(guidance_embeds=False)


@pytest.fixture(params=["dev", "klein"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def run(model: nn.Module, **request: Any) -> tuple[list[Tensor], list[dict[str, int]]]:
    """The latents after each step, and the denoiser's forwards in it."""
    return step_by_step(Flux2Loop(model, steps=STEPS, **request))


# --- capture and replay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [ALONE, REUSING], ids="+".join)
@pytest.mark.parametrize(
    "request_", [REQUEST, EDIT, {**REQUEST, "batch": 2}], ids=["text to image", "edit of two", "batch of two"]
)
def test_a_request_is_captured_in_its_second_step_and_replayed_from_the_third(
    model, request_: dict[str, Any], on: tuple[str, ...]
) -> None:
    first, _ = run(model, **request_)
    second, _ = run(model, **request_, seed=1, guidance_scale=2.5)
    with fastpath(on) as running:
        latents, ran = run(model, **request_)
        assert_same_bytes(latents, first)
        assert [step.stride() for step in latents] == [step.stride() for step in first]
        assert ran == [{"eager": 1}, {"eager": 1, "recorded": 1}, {}, {}, {}]
        assert (running.record.hits, running.record.fallbacks) == (STEPS - 1, {FIRST: 1})
        latents, ran = run(model, **request_, seed=1, guidance_scale=2.5)
        assert_same_bytes(latents, second)
        assert ran == [{}] * STEPS, "the next request of this kind is replays alone"
        assert running.recorder.records == 1
        assert not running.failed
        assert not running.plan.records["cfg_mod_cache"].hits, "a step has no second pass to reuse anything in"


def test_every_feature_together_in_block_fp8() -> None:
    model = build(layers=2, single_layers=2, fp8=True)
    requests: list[dict[str, Any]] = [REQUEST, {"image_hw": (2, 3), "text_tokens": 4, "batch": 2}]
    stock = [run(model, **request)[0] for request in requests]
    with fastpath(ALL) as running:
        for _ in range(3):
            ran: list[dict[str, int]] = []
            for request, expected in zip(requests, stock, strict=True):
                latents, new = run(model, **request)
                assert_same_bytes(latents, expected)
                ran += new
        assert ran == [{}] * 2 * STEPS
        assert not running.failed
        assert all(running.plan.records[id].hits for id in ALL if not BY_ID[id].lacks(FLUX2))


def test_requests_of_two_lengths_and_two_resolutions_in_turns(model) -> None:
    requests: list[dict[str, Any]] = [
        {"image_hw": hw, "text_tokens": tokens, "seed": seed}
        for seed, (hw, tokens) in enumerate([((3, 5), 6), ((3, 5), 4), ((4, 4), 6), ((4, 4), 4), ((3, 5), 6)])
    ]
    stock = [run(model, **request)[0] for request in requests]
    with fastpath() as running:
        loops = [Flux2Loop(model, steps=STEPS, **request) for request in requests]
        turns = [[latents.clone() for latents in turn] for turn in zip(*loops, strict=True)]
        assert running.recorder.records == 4
        assert running.record.hits == len(requests) * STEPS - 4
        assert not running.failed
    for index, expected in enumerate(stock):
        assert_same_bytes([turn[index] for turn in turns], expected)


def test_the_graph_of_a_resolution_that_was_evicted_is_captured_anew(model) -> None:
    requests: list[dict[str, Any]] = [{"image_hw": (2, width), "text_tokens": 4} for width in (2, 3, 4)]
    stock = [run(model, **request)[0] for request in requests]
    with fastpath(graphs=2) as running:
        for request, expected in list(zip(requests, stock, strict=True)) * 2:
            assert_same_bytes(run(model, **request)[0], expected)
            assert len(running.recorder.alive) <= 2
        assert running.recorder.records == 6
        assert not running.failed


def test_a_denoiser_of_each_family_in_turns(dev) -> None:
    other = build_qwen_image(layers=1)
    calls = [(dev, flux2_inputs(dev, **REQUEST)), (other, denoiser_inputs(other, **REQUEST))]
    with fastpath(REUSING) as running:
        for each, inputs in calls:
            warm_up(running, each, inputs)
        for each, inputs in calls * 2:
            assert_replays(running, each, inputs)
        assert running.recorder.records == 2


# --- inputs --------------------------------------------------------------------------------------------------------


def rich_inputs(model: nn.Module) -> dict[str, Any]:
    """Every tensor argument that stock's forward knows."""
    mask = torch.arange(6 + 15 + 11).remainder(4).ne(1)[None]
    inputs = {**flux2_inputs(model, **EDIT), "joint_attention_kwargs": {"attn_mask": mask}}
    return {**inputs, "freqs_cis": list(inputs["freqs_cis"])}


LEAVES: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "hidden_states": lambda kwargs: (kwargs, "hidden_states"),
    "encoder_hidden_states": lambda kwargs: (kwargs, "encoder_hidden_states"),
    "timestep": lambda kwargs: (kwargs, "timestep"),
    "guidance": lambda kwargs: (kwargs, "guidance"),
    "cosines": lambda kwargs: (kwargs["freqs_cis"], 0),
    "sines": lambda kwargs: (kwargs["freqs_cis"], 1),
    "attention mask": lambda kwargs: (kwargs["joint_attention_kwargs"], "attn_mask"),
}


def another(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value.roll(1, -1)
    return (0.7 * value + torch.linspace(-1, 1, value.numel()).view(value.shape)).to(value.dtype)


@pytest.mark.parametrize("in_place", [False, True], ids=["another tensor", "in place"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_each_input_alone(dev, leaf: str, in_place: bool) -> None:
    inputs = rich_inputs(dev)
    before = stock_output(dev, inputs)
    with fastpath() as running:
        warm_up(running, dev, inputs)
        holder, key = LEAVES[leaf](inputs)
        changed = another(holder[key])
        if in_place:
            holder[key].copy_(changed)
        else:
            holder[key] = changed.as_strided(changed.shape, holder[key].stride()).copy_(changed)
        assert_replays(running, dev, inputs)
        assert not torch.equal(before, infer(dev, inputs))
        assert running.recorder.records == 1


def test_all_inputs_at_once_in_any_order(dev) -> None:
    """Each pass changes another subset of the inputs; what an earlier one left in the buffers must not show."""
    with fastpath() as running:
        warm_up(running, dev, rich_inputs(dev))
        for subset in (0b1111111, 0b0000001, 0b1010101, 0b0, 0b0101010, 0b1100110):
            inputs = rich_inputs(dev)
            for bit, leaf in enumerate(LEAVES.values()):
                if subset >> bit & 1:
                    holder, key = leaf(inputs)
                    holder[key].copy_(another(holder[key]))
            assert_replays(running, dev, inputs)


@pytest.mark.parametrize(
    ("some", "others"),
    [
        pytest.param({"image_hw": (3, 5)}, {"image_hw": (5, 3)}, id="upright and lying"),
        pytest.param({"references": ((2, 3),)}, {"references": ((3, 2),)}, id="references"),
        pytest.param({"references": ((2, 2), (1, 2))}, {"references": ((3, 2),)}, id="two references or one"),
        pytest.param({"image_hw": (3, 7)}, {"image_hw": (3, 5), "references": ((3, 2),)}, id="an edit or none"),
    ],
)
def test_what_differs_in_the_rotary_tables_alone_shares_a_graph(
    model, some: dict[str, Any], others: dict[str, Any]
) -> None:
    """As many tokens at other places. The edit's latents come concatenated, as text to image's never do."""
    calls = [flux2_inputs(model, **REQUEST | request) for request in (some, others)]
    for inputs in calls:
        inputs["hidden_states"] = inputs["hidden_states"].contiguous()
    assert not torch.equal(
        *(stock_output(model, inputs | {"hidden_states": calls[0]["hidden_states"]}) for inputs in calls)
    )
    with fastpath() as running:
        warm_up(running, model, calls[0])
        for inputs in (*calls, *calls):
            assert_replays(running, model, inputs)
        assert running.recorder.records == 1


@pytest.mark.parametrize(
    "other",
    [
        {"text_tokens": 7},
        {"image_hw": (3, 6)},
        {"references": ((2, 3),)},
        {"references": ((2, 3), (1, 2))},
        {"batch": 2},
    ],
    ids=str,
)
def test_another_size_is_another_signature(model, other: dict[str, Any]) -> None:
    calls = [flux2_inputs(model, **request) for request in (REQUEST, REQUEST | other)]
    with fastpath() as running:
        for count, inputs in enumerate(calls, start=1):
            warm_up(running, model, inputs)
            assert running.recorder.records == count
        for inputs in calls * 2:
            assert_replays(running, model, inputs)


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, two bytes off."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda inputs: {"guidance": None}, id="no guidance"),
        pytest.param(lambda inputs: {"guidance": inputs["guidance"].float()}, id="guidance in float32"),
        pytest.param(lambda inputs: {"timestep": inputs["timestep"].bfloat16()}, id="timestep in bfloat16"),
        pytest.param(lambda inputs: {"hidden_states": inputs["hidden_states"].contiguous()}, id="dense latents"),
        pytest.param(lambda inputs: {"freqs_cis": None}, id="no rotary tables"),
        pytest.param(lambda inputs: {"freqs_cis": tuple(t.double() for t in inputs["freqs_cis"])}, id="doubles"),
        pytest.param(lambda inputs: {"freqs_cis": (inputs["freqs_cis"][0],) * 2}, id="one table twice"),
        pytest.param(lambda inputs: {"joint_attention_kwargs": None}, id="no attention arguments, said"),
        pytest.param(lambda inputs: {"joint_attention_kwargs": {"scale": 2.0}}, id="a scale"),
        pytest.param(
            lambda inputs: {"encoder_hidden_states": misaligned(inputs["encoder_hidden_states"])},
            id="misaligned text",
        ),
    ],
)
def test_another_kind_of_argument_is_another_signature(dev, change: Callable[[Any], dict[str, Any]]) -> None:
    plain = flux2_inputs(dev, **REQUEST)
    calls = [plain, plain | change(plain)]
    with fastpath() as running:
        for count, inputs in enumerate(calls, start=1):
            warm_up(running, dev, inputs)
            assert running.recorder.records == count
        for inputs in calls * 2:
            assert_replays(running, dev, inputs)


def test_klein_is_given_no_guidance_and_ignores_one(klein) -> None:
    none = flux2_inputs(klein, **REQUEST)
    assert none["guidance"] is None
    one = none | {"guidance": torch.tensor([4.0]).bfloat16()}
    with fastpath() as running:
        for count, inputs in enumerate((none, one), start=1):
            warm_up(running, klein, inputs)
            assert running.recorder.records == count
        assert_same_bytes(infer(klein, one), infer(klein, none))
        assert_replays(running, klein, one | {"guidance": torch.tensor([1.0]).bfloat16()})


# --- a denoiser that changes ---------------------------------------------------------------------------------------

WEIGHTS = (
    "x_embedder.weight",
    "context_embedder.weight",
    "time_guidance_embed.timestep_embedder.linear_1.weight",
    "time_guidance_embed.guidance_embedder.linear_2.weight",
    "double_stream_modulation_img.linear.weight",
    "double_stream_modulation_txt.linear.weight",
    "single_stream_modulation.linear.weight",
    "transformer_blocks.0.attn.to_k.weight",
    "transformer_blocks.0.attn.norm_added_q.weight",
    "transformer_blocks.0.ff_context.linear_in.weight",
    "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
    "single_transformer_blocks.0.attn.norm_k.weight",
    "norm_out.linear.weight",
    "proj_out.weight",
)


def ramp(weight: Tensor) -> Tensor:
    """Of the weight's shape, unlike from element to element: a norm would undo a common factor."""
    return torch.linspace(0.5, 2.0, weight.numel()).view(weight.shape).to(weight.dtype)


def in_place(model: Any, name: str) -> None:
    weight = model.get_parameter(name)
    weight.mul_(ramp(weight))


def as_a_loader_copies(model: Any, name: str) -> None:
    weight = model.get_parameter(name)
    weight.data.copy_(weight.data * ramp(weight))


def moved(model: Any, name: str) -> None:
    weight = model.get_parameter(name)
    weight.data = weight.data * ramp(weight)


def replaced(model: Any, name: str) -> None:
    weight = model.get_parameter(name)
    module, _, own = name.rpartition(".")
    setattr(model.get_submodule(module), own, nn.Parameter(weight * ramp(weight), requires_grad=False))


# What `.data` is written to leaves no trace, but the graph reads it where it lies.
CHANGES = {in_place: True, as_a_loader_copies: False, moved: True, replaced: True}


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_weight_that_changes_is_seen(change: Callable[[Any, str], None]) -> None:
    model = build()
    inputs = flux2_inputs(model, **REQUEST)
    after = stock_output(model, inputs)
    with fastpath(guard="off") as running:
        for count, name in enumerate(WEIGHTS, start=1):
            warm_up(running, model, inputs)
            before, _ = after, change(model, name)
            after = stock_output(model, inputs)
            assert not torch.equal(before, after), name
            for _ in range(3):
                assert_same_bytes(infer(model, inputs), after)
            assert_replays(running, model, inputs)
            assert len(running.recorder.alive) == 1, "the old graph is gone"
            anew = sum(number for why, number in running.record.fallbacks.items() if why.startswith("captured anew"))
            assert anew == (count if CHANGES[change] else 0), name


@torch.no_grad()
def test_weights_that_change_between_the_steps_of_a_request() -> None:
    def latents() -> list[Tensor]:
        model, seen = build(), []
        for index, step in enumerate(Flux2Loop(model, steps=20, **REQUEST)):
            seen.append(step.clone())
            if index % 4 == 3 and index < 16:
                list(CHANGES)[index // 4](model, WEIGHTS[index // 2])
        return seen

    stock = latents()
    with fastpath() as running:
        assert_same_bytes(latents(), stock)
        changes = sum(CHANGES.values())
        assert (running.recorder.records, running.record.hits) == (1 + changes, 20 - (1 + changes))
        assert not running.failed


def block_replaced(model: Any) -> None:
    model.single_transformer_blocks[0] = build(seed=3).single_transformer_blocks[0]


def block_removed(model: Any) -> None:
    del model.single_transformer_blocks[0]


def guidance_removed(model: Any) -> None:
    model.time_guidance_embed.guidance_embedder = None


@pytest.mark.parametrize("change", [block_replaced, block_removed, guidance_removed], ids=lambda f: f.__name__)
def test_a_module_that_changes_is_seen(change: Callable[[Any], None]) -> None:
    model = build()
    inputs = flux2_inputs(model, **REQUEST)
    before = stock_output(model, inputs)
    with fastpath(guard="off") as running:
        warm_up(running, model, inputs)
        change(model)
        after = stock_output(model, inputs)
        assert not torch.equal(before, after)
        for _ in range(3):
            assert_same_bytes(infer(model, inputs), after)
        assert_replays(running, model, inputs)


# --- left to stock -------------------------------------------------------------------------------------------------


@contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    yield
    handle.remove()


@contextmanager
def own_forward(block: Any) -> Iterator[None]:
    """As cache-dit wraps a block: an attribute of the instance."""
    forward = block.forward
    block.forward = lambda **kwargs: forward(**kwargs) * 2
    yield
    del block.forward


@contextmanager
def attention_backend(block: Any) -> Iterator[None]:
    from sglang.multimodal_gen.runtime.platforms.interface import AttentionBackendEnum

    attention = block.attn.attn
    before, attention.backend = attention.backend, AttentionBackendEnum.SAGE_ATTN
    yield
    attention.backend = before


SITUATIONS: dict[str, tuple[Callable[[Any], AbstractContextManager[None]], dict[str, Any], dict[str, Any], str]] = {
    "hook in a single block": (
        lambda model: hooked(
            model.single_transformer_blocks[0].attn.to_out.register_forward_hook,
            lambda module, inputs, output: (output[0] * 2, *output[1:]),
        ),
        {},
        {},
        "a module has hooks",
    ),
    "hook on the modulation": (
        lambda model: hooked(
            model.single_stream_modulation.register_forward_pre_hook, lambda module, inputs: (inputs[0] * 2,)
        ),
        {},
        {},
        "a module has hooks",
    ),
    "a single block's own forward": (
        lambda model: own_forward(model.single_transformer_blocks[0]),
        {},
        {},
        "a Flux2SingleTransformerBlock has a forward of its own",
    ),
    "a single block's attention backend": (
        lambda model: attention_backend(model.single_transformer_blocks[0]),
        {},
        {},
        "attention backend SAGE_ATTN may depend on more than shapes",
    ),
    "gradients": (lambda model: torch.enable_grad(), {}, {}, "gradients are enabled"),
    "an object for the attention": (
        lambda model: torch.no_grad(),
        {"joint_attention_kwargs": {"scale": SimpleNamespace()}},
        {},
        "argument['joint_attention_kwargs']['scale'] is a SimpleNamespace",
    ),
    "attention metadata": (lambda model: torch.no_grad(), {}, {"metadata": SimpleNamespace()}, "attention metadata"),
    "TeaCache": (lambda model: torch.no_grad(), {}, {"batch": SimpleNamespace(enable_teacache=True)}, "TeaCache"),
}


@pytest.mark.parametrize("when", ["from the start", "once captured"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_a_graph_cannot_do_is_left_to_stock(situation: str, when: str) -> None:
    model = build()
    enter, more, context, reason = SITUATIONS[situation]
    plain = flux2_inputs(model, **REQUEST)

    def result() -> Tensor:
        with torch.no_grad(), enter(model):
            output: Tensor = call(model, plain | more, **context)
        return output.detach()

    stock = result()
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
            assert_same_bytes(result(), stock)
        assert passes == {"eager": 3}
        assert (running.recorder.records, running.recorder.replays) == (records, replays)
        assert running.record.fallbacks - before == {reason: 3}
        warm_up(running, model, plain)  # afterwards the same denoiser runs from graphs
        assert not running.failed


def test_arguments_by_position_are_left_to_stock(dev) -> None:
    inputs = flux2_inputs(dev, **REQUEST)
    stock = stock_output(dev, inputs)
    latents = inputs.pop("hidden_states")
    with fastpath() as running, torch.inference_mode():
        for _ in range(3):
            assert_same_bytes(call(dev, inputs, latents), stock)
        assert running.record.fallbacks == {"arguments are passed by position": 3}
        assert running.recorder.records == 0


def test_a_capture_that_fails_leaves_its_signature_alone_to_stock(dev) -> None:
    """A mask's lengths read on the host, as stock's varlen attention reads them: no graph can do it."""
    plain = flux2_inputs(dev, **REQUEST)
    attention = dev.transformer_blocks[0].attn.attn
    forward = type(attention).forward

    def reading(self: Any, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return forward(self, *args, attn_mask=None if attn_mask is None or attn_mask.all() else attn_mask, **kwargs)

    masked = plain | {"joint_attention_kwargs": {"attn_mask": torch.arange(21)[None] < 20}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(attention), "forward", reading)
        stock = stock_output(dev, masked)
        with fastpath() as running:
            warm_up(running, dev, plain)
            for _ in range(4):
                assert_same_bytes(infer(dev, masked), stock)
            (why,) = running.record.fallbacks.keys() - {FIRST}
            assert "operation not permitted when stream is capturing" in why
            assert running.recorder.records == 2
            assert_replays(running, dev, plain)
