"""The FLUX.2 denoiser and its loop: what SGLang's own stages prepare, one pass a step, every input in use."""

import gc
import inspect
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_calls import call, recorded_fp8_linears
from sglang_fastpath.loaders.quantize import flux2_linears
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from torch import Tensor, nn

from sglang_fastpath.flux2_denoiser import SIZES, build_flux2, flux2_inputs, make_pipeline_config, make_request
from sglang_fastpath.flux2_loop import Flux2Loop

ROOT = Path(__file__).resolve().parent.parent
STEPS = 3
# Two reference images of unlike size; the tokens are no multiple of 4.
EDIT: dict[str, Any] = {"image_hw": (5, 7), "text_tokens": 9, "batch": 2, "references": ((4, 6), (3, 1))}


@pytest.fixture(scope="module")
def dev() -> nn.Module:
    return build_flux2(layers=1, single_layers=2)


@pytest.fixture(scope="module")
def klein() -> nn.Module:
    return build_flux2(layers=2, single_layers=1, guidance_embeds=False)


@pytest.fixture(params=["dev", "klein"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    denoiser: nn.Module = request.getfixturevalue(request.param)
    return denoiser


def run(model: nn.Module, **loop: Any) -> list[Tensor]:
    return [latents.clone() for latents in Flux2Loop(model, steps=STEPS, **loop)]


def assert_same(found: Any, expected: Any) -> None:
    """The same bytes in the same layout; tuples element by element."""
    if isinstance(expected, Tensor):
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(found, expected)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.inference_mode():
        return call(model, inputs)


def test_the_loop_starts_as_sglangs_own_stages_would_have_it(model: nn.Module) -> None:
    """SGLang's latent, timestep and denoising stages prepare the same request, up to the noise."""
    import sglang.multimodal_gen.runtime.pipelines_core  # noqa: F401  before the stages: 0.5.21 has a circle
    from sglang.multimodal_gen.configs.sample.flux import Flux2SamplingParams
    from sglang.multimodal_gen.runtime.layers.attention.selector import get_attn_backend
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )
    from sglang.multimodal_gen.runtime.pipelines.flux_2 import compute_empirical_mu
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
    from sglang.multimodal_gen.runtime.pipelines_core.stages.latent_preparation import LatentPreparationStage
    from sglang.multimodal_gen.runtime.pipelines_core.stages.timestep_preparation import TimestepPreparationStage

    class Arguments(SimpleNamespace):
        def __getattr__(self, name: str) -> None:
            return None

    pipeline = make_pipeline_config(model)
    pipeline.dit_precision = "bf16"
    prepared = make_request(model, pipeline, image_hw=(5, 7))
    arguments = Arguments(pipeline_config=pipeline, dit_precision="bf16", model_loaded={"transformer": True})
    request = Req(sampling_params=Flux2SamplingParams(prompt="", height=80, width=112, num_inference_steps=STEPS))
    request.generator = torch.Generator().manual_seed(0)
    request.prompt_embeds, request.prompt_seq_lens = prepared.prompt_embeds, prepared.prompt_seq_lens
    request.quality = "exact"
    # The scheduler_config.json of every published FLUX.2.
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=4096,
        max_shift=1.15,
        shift=3.0,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )
    request = LatentPreparationStage(scheduler, model).forward(request, arguments)
    request = TimestepPreparationStage(scheduler, [compute_empirical_mu]).forward(request, arguments)
    stage = object.__new__(DenoisingStage)  # its __init__ wants the arguments of a whole engine
    vars(stage).update(
        server_args=arguments,
        transformer=model,
        transformer_2=None,
        pipeline=None,
        attn_backend=get_attn_backend(128, torch.bfloat16),
        _cache_dit_enabled=False,
        _fused_gelu_mounted=False,
        _extra_func_kwarg_names_cache={},
    )
    expected = stage._prepare_denoising_loop(request, arguments)

    found = Flux2Loop(model, steps=STEPS, image_hw=(5, 7))
    context = found._context
    assert (found.latents.shape, found.latents.stride()) == (expected.latents.shape, expected.latents.stride())
    assert (found.latents.dtype, context.target_dtype) == (expected.latents.dtype, expected.target_dtype)
    assert found.batch.raw_latent_shape == request.raw_latent_shape
    assert_same(prepared.latent_ids, request.latent_ids)
    assert_same(context.timesteps, expected.timesteps)
    assert_same(context.scheduler.sigmas, expected.scheduler.sigmas)
    assert_same(context.guidance, expected.guidance)
    (branch,) = expected.cfg_policy.branches
    (given,) = context.cfg_policy.branches
    assert given.kwargs.keys() == branch.kwargs.keys()
    for name, value in branch.kwargs.items():
        assert_same(given.kwargs[name], value)


@pytest.mark.parametrize("request_", [{}, EDIT], ids=["text to image", "edit of two, batch 2"])
def test_a_step_is_one_pass_on_the_inputs_that_flux2_inputs_gives(model: nn.Module, request_: dict[str, Any]) -> None:
    passes: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: passes.append(kwargs), with_kwargs=True)
    loop = Flux2Loop(model, steps=STEPS, guidance_scale=2.5, **request_)
    try:
        latents = [latents.clone() for latents in loop]
    finally:
        hook.remove()
    assert len(passes) == STEPS * loop.passes_a_step == STEPS
    assert loop.text_tokens == (passes[0]["encoder_hidden_states"].shape[1],)

    timestep = loop._context.timesteps[:1].repeat(request_.get("batch", 1))
    expected = flux2_inputs(model, timestep=timestep, guidance_scale=2.5, **request_)
    assert passes[0].keys() == expected.keys()
    for name, value in expected.items():
        assert_same(passes[0][name], value)
    # Euler's first step, on the tokens of the image alone.
    noise, sigmas = output(model, expected)[:, : latents[0].shape[1]], loop._context.scheduler.sigmas
    assert torch.equal(latents[0], (loop.latents.float() + (sigmas[1] - sigmas[0]) * noise).bfloat16())


@pytest.mark.parametrize("guidance_embeds", [True, False])
def test_a_pass_computes_what_diffusers_computes(guidance_embeds: bool) -> None:
    """In float32, on token positions written down here: (image, row, column, token of the text)."""
    from diffusers import Flux2Transformer2DModel

    arch: dict[str, Any] = {"joint_attention_dim": 128, "guidance_embeds": guidance_embeds}
    model = build_flux2(layers=1, single_layers=1, dtype=torch.float32, **arch)
    other = Flux2Transformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=2, **arch)
    other.load_state_dict(model.state_dict())
    inputs = flux2_inputs(model, timestep=640.0, guidance_scale=2.5, **EDIT)

    images = [(0, *EDIT["image_hw"])] + [(10 * n, *size) for n, size in enumerate(EDIT["references"], 1)]
    image_ids = [
        (n, row, column, 0) for n, rows, columns in images for row in range(rows) for column in range(columns)
    ]
    with torch.inference_mode():
        expected = other(
            hidden_states=inputs["hidden_states"],
            encoder_hidden_states=inputs["encoder_hidden_states"],
            timestep=inputs["timestep"] / 1000,
            guidance=inputs["guidance"],
            img_ids=torch.tensor(image_ids),
            txt_ids=torch.tensor([(0, 0, 0, token) for token in range(EDIT["text_tokens"])]),
        ).sample
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-4, atol=1e-4)


def test_references_follow_one_another(dev: nn.Module) -> None:
    pipeline = make_pipeline_config(dev)
    first, both = (make_request(dev, pipeline, references=EDIT["references"][:n]).image_latent for n in (1, 2))
    assert torch.equal(both[:, : first.shape[1]], first)


def test_two_runs_give_the_same_bytes(model: nn.Module) -> None:
    first, second = run(model, **EDIT), run(model, **EDIT)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(latents.isfinite().all() for latents in first)
    assert not torch.equal(first[-1], run(model, **(EDIT | {"seed": 1}))[-1])
    assert not torch.equal(first[-1], run(model, **(EDIT | {"references": ((4, 6), (1, 3))}))[-1])


def test_sglang_keeps_no_stage_alive(dev: nn.Module) -> None:
    """It caches guidance tensors by stage, and a stage holds CUDA graphs."""
    stage = weakref.ref(Flux2Loop(dev, steps=1).stage)
    gc.collect()
    assert stage() is None


def test_the_guidance_is_an_input_of_dev_alone(dev: nn.Module, klein: nn.Module) -> None:
    weak, strong = ([run(model, guidance_scale=scale)[-1] for model in (dev, klein)] for scale in (1.0, 4.0))
    assert not torch.equal(weak[0], strong[0])
    assert torch.equal(weak[1], strong[1])
    assert flux2_inputs(klein)["guidance"] is None


@pytest.mark.parametrize(
    "name", ["hidden_states", "encoder_hidden_states", "timestep", "guidance", "freqs_cis 0", "freqs_cis 1"]
)
def test_each_input_changes_the_output(dev: nn.Module, name: str) -> None:
    inputs = flux2_inputs(dev)
    expected = output(dev, inputs)
    name, _, index = name.partition(" ")
    if index:
        tables = list(inputs[name])
        tables[int(index)] = tables[int(index)].flip(0)
        changed: Any = tuple(tables)
    elif name in ("timestep", "guidance"):
        changed = inputs[name] / 2
    else:
        changed = inputs[name].clone()
        changed[:, -1] *= -1  # one token
    assert not torch.equal(output(dev, inputs | {name: changed}), expected)
    assert torch.equal(output(dev, inputs), expected)


@pytest.mark.parametrize("guidance_embeds", [True, False])
def test_fp8_are_the_layers_of_a_quantized_checkpoint(guidance_embeds: bool) -> None:
    """Those that `sglang-fastpath quantize` quantizes; every one of them is run."""
    revert = fp8_cpu_emulation.apply()
    try:
        model = build_flux2(layers=1, single_layers=1, fp8=True, guidance_embeds=guidance_embeds)
    finally:
        revert()
    config = {name: parameter.default for name, parameter in _diffusers_parameters().items()}
    config |= {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 128}
    linears = flux2_linears(config | {"guidance_embeds": guidance_embeds})
    with recorded_fp8_linears(model) as calls:
        noise = output(model, flux2_inputs(model))
    assert sorted(name for name, *_ in calls) == sorted(
        name for name, linear in linears.items() if linear.role == "block"
    )
    assert noise.isfinite().all() and noise.std() > 0.1


@pytest.mark.parametrize("name", SIZES)
def test_the_architecture_is_that_of_the_published_checkpoints(name: str) -> None:
    """As diffusers defines it: dev by its defaults, all by names and shapes of the parameters and by their number."""
    from diffusers import Flux2Transformer2DModel

    size = SIZES[name]
    published = {
        "num_layers": size["layers"],
        "num_single_layers": size["single_layers"],
        "num_attention_heads": size["heads"],
        "joint_attention_dim": size["joint_attention_dim"],
        "guidance_embeds": size.get("guidance_embeds", True),
    }
    if name == "dev":
        assert published == {key: _diffusers_parameters()[key].default for key in published}
    with torch.device("meta"):
        whole = Flux2Transformer2DModel(**published)
        small = Flux2Transformer2DModel(
            **published
            | {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 128}
        )
    billions = sum(parameter.numel() for parameter in whole.parameters()) / 1e9
    assert round(billions) == {"dev": 32, "klein-4b": 4, "klein-9b": 9}[name]
    model = build_flux2(**size | {"layers": 1, "single_layers": 1, "heads": 2, "joint_attention_dim": 128})
    shapes = [{key: value.shape for key, value in module.named_parameters()} for module in (model, small)]
    assert shapes[0] == shapes[1]


@pytest.mark.releases
def test_the_loop_runs_on_the_oldest_and_the_newest_release() -> None:
    """In bf16 and in block FP8, with nothing imported before it: 0.5.21 and later import in a circle."""
    program = """
import json
from sglang_fastpath.flux2_denoiser import build_flux2
from sglang_fastpath.flux2_loop import Flux2Loop
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
import sglang
import torch

fp8_cpu_emulation.apply()
edit = {"image_hw": (5, 7), "batch": 2, "references": ((4, 6),)}
report = {"release": sglang.__version__}
for name, arch in {"dev": {}, "klein": {"guidance_embeds": False}, "fp8": {"fp8": True}}.items():
    model = build_flux2(layers=1, single_layers=1, **arch)
    runs = [[latents.clone() for latents in Flux2Loop(model, steps=2, **edit)] for _ in range(2)]
    steps = runs[0]
    report[name] = {
        "shape": list(steps[-1].shape),
        "finite": bool(steps[-1].isfinite().all()),
        "equal": all(map(torch.equal, *runs)),
        "moving": not torch.equal(*steps),
    }
print(json.dumps(report))
"""
    versions = ("0.5.11", "0.5.23")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(ROOT / ".releases" / version), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for version in versions
    ]
    answers = [process.communicate() for process in processes]
    found = {"shape": [2, 35, 128], "finite": True, "equal": True, "moving": True}
    for version, process, (stdout, stderr) in zip(versions, processes, answers, strict=True):
        assert process.returncode == 0, stderr
        expected = {"release": version, **dict.fromkeys(("dev", "klein", "fp8"), found)}
        assert json.loads(stdout.splitlines()[-1]) == expected


def _diffusers_parameters() -> dict[str, inspect.Parameter]:
    from diffusers import Flux2Transformer2DModel

    parameters = dict(inspect.signature(Flux2Transformer2DModel.__init__).parameters)
    del parameters["self"]
    return parameters
