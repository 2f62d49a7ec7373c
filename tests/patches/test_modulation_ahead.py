"""`modulation_ahead` on SGLang's own denoiser and denoising step: stock's bytes, and rows that nobody else gets.

On a CPU, with `RerunRecorder` in the place of CUDA graph capture; the GEMMs of these sizes give a row's bytes there
whether it is alone or one of eight, as cuBLAS's do on an H200.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_calls import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_fastpath.patches.diffusion.modulation_table import ROWS, Ahead, LinearMode, ModulationTable, Step
from sglang_fastpath.patches.diffusion.qwen_image_modulation import Source
from step_graphs import REUSING, Running, fastpath, passes, prepare, replays_by_kind
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath import plugin
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import FeatureRecord, State

pytestmark = pytest.mark.usefixtures("emulated", "counted")

AHEAD = (*REUSING, "modulation_ahead")
LINEARS = 2  # of the modulation, in a denoiser of one block
NO_ONE_INPUT = "image and text are not modulated by one tensor"


@pytest.fixture(scope="module")
def denoiser() -> Any:
    return build()


def build(**arch: Any) -> Any:
    return build_qwen_image(**{"layers": 1} | arch)


def loop_of(model: nn.Module, *, steps: int = 12, **loop: Any) -> GuidanceLoop:
    return GuidanceLoop(model, steps=steps, **{"image_hw": (3, 5), "text_tokens": 6, "negative_tokens": 4} | loop)


def loop_with(model: nn.Module, *, image_hw: tuple[int, int] = (3, 5), **arguments: Any) -> GuidanceLoop:
    """Both passes of each step get these arguments."""
    loop = loop_of(model, image_hw=image_hw)
    context = loop._context
    branches = context.cfg_policy.branches if context.cfg_policy else []
    for conditions in (context.pos_cond_kwargs, context.neg_cond_kwargs, *(branch.kwargs for branch in branches)):
        conditions.update(arguments)
    return loop


def latents_of(model: nn.Module, **loop: Any) -> list[Tensor]:
    return [latents.clone() for latents in loop_of(model, **loop)]


def record_of(running: Running) -> FeatureRecord:
    return running.plan.records["modulation_ahead"]


# --- what is saved --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 20])
def test_one_pass_in_eight_steps_computes_the_modulation(denoiser, steps: int, batch: int) -> None:
    stock = latents_of(denoiser, steps=steps, batch=batch)
    with fastpath(AHEAD) as running:
        for _ in range(6 if steps < 8 else 2):  # until every kind of pass has been captured
            assert_same_bytes(latents_of(denoiser, steps=steps, batch=batch), stock)
        replays_by_kind(running, denoiser)
        passes.clear()
        before = record_of(running).hits
        assert_same_bytes(latents_of(denoiser, steps=steps, batch=batch), stock)
        assert not passes
        computed = -(-steps // ROWS)
        assert replays_by_kind(running, denoiser) == {True: computed, False: 2 * steps - computed}
        assert record_of(running).hits - before == LINEARS * (steps - computed)
        assert not running.failed
        assert not record_of(running).fallbacks
        admitted = [v["signature"] for v in running.plan.guard.verdicts if v["feature"] == "modulation_ahead"]
        assert admitted == [f"modulation of denoiser 1, {LINEARS} linears, {ROWS} x {batch} rows"]


def test_the_second_pass_of_a_step_counts_as_before(denoiser) -> None:
    latents_of(denoiser)
    with fastpath(AHEAD) as running:
        for _ in range(2):
            latents_of(denoiser)
        before = running.plan.records["cfg_mod_cache"].hits
        latents_of(denoiser, steps=10)
        assert running.plan.records["cfg_mod_cache"].hits - before == 10 * LINEARS


def test_two_shapes_of_one_denoiser_share_what_is_ahead(denoiser) -> None:
    """Resolutions and prompts have graphs of their own, the modulation is of the timestep alone."""
    loops: list[dict[str, Any]] = [{}, {"image_hw": (2, 4), "negative_tokens": 5}]
    stock = [latents_of(denoiser, **loop) for loop in loops]
    with fastpath(AHEAD) as running:
        for _ in range(3):
            passes.clear()
            for loop, expected in zip(loops, stock, strict=True):
                assert_same_bytes(latents_of(denoiser, **loop), expected)
        assert not passes
        assert not running.failed
        checks = [v["checks"] for v in running.plan.guard.verdicts if v["feature"] == "modulation_ahead"]
        assert checks == [1]


# --- whose rows they are --------------------------------------------------------------------------------------------


def test_requests_interleaved_step_by_step(denoiser) -> None:
    """Each with a schedule of its own: rows of the one are never the other's, though the steps have equal numbers."""
    loops: list[dict[str, Any]] = [{"steps": 10}, {"steps": 12, "seed": 3}, {"steps": 10, "seed": 5}]
    stock = [latents_of(denoiser, **loop) for loop in loops]
    with fastpath(AHEAD) as running:
        for _ in range(2):
            turns = [loop_of(denoiser, **loop) for loop in loops]
            seen: list[list[Tensor]] = [[] for _ in loops]
            for turn in itertools.zip_longest(*turns):
                for index, latents in enumerate(turn):
                    if latents is not None:
                        seen[index].append(latents.clone())
            for latents, expected in zip(seen, stock, strict=True):
                assert_same_bytes(latents, expected)
        assert not running.failed


def written_in_place(model: Any) -> None:
    model.transformer_blocks[0].txt_mod[1].weight.mul_(1.5)


def written_as_a_loader_does(model: Any) -> None:
    weight = model.transformer_blocks[0].img_mod[1].weight
    weight.data.copy_(weight.data * 0.5)


def embedder_written_as_a_loader_does(model: Any) -> None:
    weight = next(model.time_text_embed.parameters())
    weight.data.copy_(weight.data * 0.5)


def replaced(model: Any) -> None:
    linear = model.transformer_blocks[0].txt_mod[1]
    linear.bias = nn.Parameter(linear.bias + 1, requires_grad=False)


CHANGES = [written_in_place, written_as_a_loader_does, embedder_written_as_a_loader_does, replaced]


@pytest.mark.parametrize("left_early", [False, True], ids=["after a request", "after one that failed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_weights_that_change_between_requests(change: Callable[[Any], None], left_early: bool) -> None:
    """What was computed ahead dies with its request, also when that ends before its schedule does."""

    def run() -> list[Tensor]:
        model = build()
        seen = latents_of(model) + latents_of(model)
        if left_early:
            loop = loop_of(model)
            steps = iter(loop)
            for _ in range(4):
                next(steps)
            loop.stage._predict_noise_with_cfg = fails
            with pytest.raises(ConnectionError):
                next(steps)
        change(model)
        return seen + latents_of(model) + latents_of(model)

    def fails(**_: Any) -> None:
        raise ConnectionError

    stock = run()
    with fastpath(AHEAD) as running:
        assert_same_bytes(run(), stock)
        assert not running.failed
        assert record_of(running).hits


def test_the_learned_condition_belongs_to_the_rows() -> None:
    """Layered models add an embedding of a second condition to the timestep's; one that changes is another source."""
    model = build(use_additional_t_cond=True)
    condition = torch.tensor([0])

    def run() -> list[Tensor]:
        condition.fill_(0)
        seen = []
        for _ in range(3):
            loop = loop_with(model, additional_t_cond=condition)
            for index, latents in enumerate(loop):
                seen.append(latents.clone())
                if index == 3:
                    condition.fill_(1)
            condition.fill_(0)
        return seen

    stock = run()
    with fastpath(AHEAD) as running:
        assert_same_bytes(run(), stock)
        assert record_of(running).hits
        assert not running.failed


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), min_size=1, max_size=14)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from(["once", "off"]))
def test_steps_in_any_order(denoiser, steps: list[tuple[int, int]], guard: str) -> None:
    """Of three requests, two of which are given one and the same schedule: repeated, left out, backwards."""

    def run() -> list[Tensor]:
        loops = [loop_of(denoiser, seed=seed, negative_tokens=6) for seed in (0, 1, 2)]
        loops[2]._context.timesteps = loops[0]._context.timesteps
        seen = []
        for request, index in steps * 3:
            loop = loops[request]
            seen.append(one_step(loop, index))
        return seen

    stock = run()
    with fastpath(AHEAD, guard=guard) as running:
        assert_same_bytes(run(), stock)
        assert not running.failed


def one_step(loop: GuidanceLoop, index: int) -> Tensor:
    """What both passes of a step give, without the scheduler, which takes steps in order alone."""
    result: list[Tensor] = []

    def keep(*, model_output: Tensor, **_: Any) -> tuple[Tensor]:
        result.append(model_output.clone())
        return (loop._context.latents,)

    loop._context.scheduler = SimpleNamespace(scale_model_input=lambda latents, _: latents, step=keep)
    loop.run_step(index)
    return result[0]


# --- timesteps that nobody foresaw ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 9, 11])
def test_a_request_whose_passes_get_other_timesteps_than_its_schedule_fails(denoiser, step: int) -> None:
    def loop() -> GuidanceLoop:
        new = loop_of(denoiser)
        expand, calls = new.stage.expand_timestep_before_forward, itertools.count()

        def other(*args: Any, **kwargs: Any) -> Tensor:
            timestep = expand(*args, **kwargs)
            return timestep + 1 if next(calls) == step else timestep

        new.stage.expand_timestep_before_forward = other
        return new

    stock = latents_of(denoiser)
    with fastpath(AHEAD) as running:
        for _ in range(2):
            latents_of(denoiser)
        steps = iter(loop())
        for _ in range(11):
            next(steps)
        with pytest.raises(RuntimeError, match="SGLANG_FASTPATH_MODULATION_AHEAD=0"):
            next(steps)
        assert_same_bytes(latents_of(denoiser), stock)
        assert not running.failed


def test_what_a_failed_request_noticed_is_not_held_against_the_next_one(denoiser) -> None:
    stock = latents_of(denoiser)
    with fastpath(AHEAD):
        for _ in range(2):
            latents_of(denoiser)
        loop = loop_of(denoiser)
        steps = iter(loop)
        for _ in range(4):
            next(steps)
        expand = loop.stage.expand_timestep_before_forward
        loop.stage.expand_timestep_before_forward = lambda *args, **kwargs: expand(*args, **kwargs) + 1
        next(steps)
        loop.stage._predict_noise_with_cfg = lambda **_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            next(steps)
        assert_same_bytes(latents_of(denoiser), stock)


# --- left as it was -------------------------------------------------------------------------------------------------


def test_edit_models_with_tokens_at_zero_compute_each_step(denoiser) -> None:
    """Their image stream is modulated by two timesteps, the text by one."""
    model = build(zero_cond_t=True)

    def run() -> list[Tensor]:
        seen = []
        for _ in range(2):
            loop = loop_with(model, image_hw=(4, 4), img_shapes=[[(1, 2, 4), (1, 2, 4)]])
            seen += [latents.clone() for latents in loop]
        return seen

    stock = run()
    with fastpath(AHEAD) as running:
        assert_same_bytes(run(), stock)
        assert running.record.hits
        assert not record_of(running).hits
        assert set(record_of(running).fallbacks) == {NO_ONE_INPUT}
        assert not running.failed


def test_rows_that_have_other_bytes_together_than_alone_are_not_used(denoiser, monkeypatch) -> None:
    from sglang.multimodal_gen.runtime.layers.linear import UnquantizedLinearMethod

    apply = UnquantizedLinearMethod.apply

    def uneven(method: Any, layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = apply(method, layer, x, *args, **kwargs)
        if len(x) == ROWS:
            output.view(torch.int16)[5, 7] ^= 1
        return output

    stock = latents_of(denoiser)
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", uneven)
    with fastpath(AHEAD) as running:
        for _ in range(3):
            assert_same_bytes(latents_of(denoiser), stock)
        state, reason = running.plan.observed(record_of(running))
        assert state is State.PARITY_FAILED
        assert f"{LINEARS} linears" in reason
        assert not record_of(running).hits
        passes.clear()
        assert_same_bytes(latents_of(denoiser), stock)
        assert not passes, "the graphs serve as without it"


@pytest.mark.parametrize("guard", ["once", "sample:2", "always", "off"])
def test_every_policy_of_the_guard(denoiser, guard: str) -> None:
    stock = latents_of(denoiser)
    with fastpath(AHEAD, guard=guard) as running:
        for _ in range(3):
            assert_same_bytes(latents_of(denoiser), stock)
        assert record_of(running).hits
        assert not running.failed


def test_without_step_graph_it_is_off_and_says_so(denoiser) -> None:
    new = prepare(("cfg_mod_cache", "modulation_ahead")).plan
    plugin.apply(new)
    record = new.records["modulation_ahead"]
    assert (record.state, record.reason) == (
        State.OFF,
        "it is step_graph's passes that share what is computed ahead",
    )
    latents_of(denoiser, steps=2)
    assert new.records["cfg_mod_cache"].hits
    plugin.deactivate()


def test_without_cfg_mod_cache_nothing_is_shared(denoiser) -> None:
    stock = latents_of(denoiser)
    with fastpath(("step_graph", "modulation_ahead")) as running:
        for _ in range(2):
            assert_same_bytes(latents_of(denoiser), stock)
        assert running.plan.observed(record_of(running))[0] is State.NEVER_HIT


def test_a_pass_outside_a_step_does_not_fill_the_rows(denoiser) -> None:
    """It may replay the graph that computes rows, but of which timesteps nobody has said."""
    stock = latents_of(denoiser)
    inputs = denoiser_inputs(denoiser, image_hw=(3, 5), text_tokens=6, timestep=torch.tensor([321.0]))
    with torch.inference_mode():
        alone = call(denoiser, inputs)
    with fastpath(AHEAD) as running:
        for _ in range(2):
            latents_of(denoiser)
        seen = []
        for latents in loop_of(denoiser):
            seen.append(latents.clone())
            with torch.inference_mode():
                assert_same_bytes(call(denoiser, inputs), alone)
        assert_same_bytes(seen, stock)
        assert not running.failed


# --- the table ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(1, 70), st.sampled_from([torch.bfloat16, torch.float32, torch.int8])
        ),
        min_size=1,
        max_size=5,
    )
)
def test_buffers_of_any_shape_and_dtype_lie_apart(layout: list[tuple[int, int, torch.dtype]]) -> None:
    linears: dict[nn.Module, str] = {nn.Identity(): str(index) for index in range(len(layout))}
    table = ModulationTable(linears)
    mode = LinearMode("observe", table)
    x = torch.zeros(1)
    for linear, (rows, columns, dtype) in zip(linears, layout, strict=True):
        mode.run(lambda *_, of=(rows, columns), dtype=dtype: (torch.zeros(of, dtype=dtype), None), linear, x)
    timestep = torch.tensor([5.0])
    table.observe(mode, timestep)
    assert table.make_buffers()
    step = Step(torch.arange(12.0), 0)
    table.ahead = table.new_ahead(step, timestep)
    values = {
        linear: torch.arange(ROWS * rows * columns).view(ROWS, rows, columns).add(index).to(dtype)
        for index, (linear, (rows, columns, dtype)) in enumerate(zip(linears, layout, strict=True))
    }
    table.store(values)
    given = Source.of((step.timesteps,), None)
    table.ahead.computed(given)
    for linear, buffer in table.buffers.items():
        assert buffer.data_ptr() % 256 == table.buffers[next(iter(linears))].data_ptr() % 256
        assert buffer.is_contiguous()
        assert torch.equal(buffer, values[linear][0])
    for row in range(1, ROWS):
        assert table.take_foreseen(Step(step.timesteps, row), torch.tensor([float(row)]), given)
        for linear, buffer in table.buffers.items():
            assert torch.equal(buffer, values[linear][row])
    table.ahead.end_request(failed=False)
    assert not table.take_foreseen(Step(step.timesteps, ROWS), timestep, given)
    assert not table.take_foreseen(Step(step.timesteps, 0), timestep, given)
    assert not table.take_foreseen(Step(step.timesteps, 1), timestep, Source.of((step.timesteps.clone(),), None))


def test_what_was_foreseen_is_the_schedules_rest() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    ahead = Ahead(memory, {nn.Identity(): memory.view(torch.bfloat16)}, torch.zeros(2))
    schedule = torch.linspace(1000, 1, 10)
    ahead.foresee(Step(schedule, 1), torch.tensor([700.0, 700.0]))
    assert ahead.foreseen.tolist() == [[700.0] * 2, *([t] * 2 for t in schedule[2:9].tolist())]
    ahead.foresee(Step(schedule, 7), torch.tensor([1.0, 2.0]))
    assert ahead.foreseen[:3].tolist() == [[1.0, 2.0], *([t] * 2 for t in schedule[8:].tolist())]
