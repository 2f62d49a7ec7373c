"""The console script: what it prints, and when it exits with 1."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from typer.testing import CliRunner

from sglang_fastpath import __version__, benchmark, cli, contracts, doctor, envs
from sglang_fastpath.benchmark_variants import Variant, only
from sglang_fastpath.cli import app
from sglang_fastpath.denoisers import start_runtime
from sglang_fastpath.features import CATALOGUE, QWEN_IMAGE
from sglang_fastpath.plan import make_plan
from sglang_fastpath.status import StatusWriter


def run(*arguments: str, expect: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == expect, result.output
    return result


def test_the_script_is_installed() -> None:
    printed = subprocess.run(
        [Path(sys.executable).with_name("sglang-fastpath"), "version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == __version__


def test_features_is_the_catalogue() -> None:
    listed = json.loads(run("features", "--json").stdout)
    assert [(entry["id"], entry["env"]) for entry in listed] == [(f.id, f.env) for f in CATALOGUE]
    table = run("features").stdout
    assert all(feature.env in table for feature in CATALOGUE)


def test_features_shows_by_model_what_is_replaced_and_why_something_is_not() -> None:
    listed = {entry["id"]: entry for entry in json.loads(run("features", "--json").stdout)}
    # As if no line had been broken: the first column of what follows a break is empty.
    sections = "".join(run("features").stdout.split()).split("switchSGLANG_FASTPATH_")[1:]
    for feature, section in zip(CATALOGUE, sections, strict=True):
        for port, entry in zip(feature.ports, listed[feature.id]["ports"], strict=True):
            assert (entry["models"], entry["sites"]) == (list(port.models), list(port.sites))
            native = f"(nativesince{port.native_since})" if port.native_since else ""
            assert "".join(port.name.split()) + native + "".join(port.sites) in section
        assert listed[feature.id]["not_for"] == feature.not_for
        for model, reason in feature.not_for.items():
            assert "".join(f"{model}not there: {reason}".split()) in section


def test_env_shows_every_variable_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.GUARD, "sample:7")
    shown = json.loads(run("env", "--json").stdout)
    values = {variable["name"]: variable["set"] for variable in shown["variables"]}
    assert values.keys() == {variable.name for variable in envs.VARIABLES}
    assert values[envs.GUARD] == "sample:7"
    assert shown["machine"]["versions"]["torch"]
    assert "SGLANG_FASTPATH_GUARD" in run("env").stdout


def test_doctor_is_content_with_this_installation_once_the_fp8_linear_is_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(envs.EMULATE, "1")
    found = {entry["topic"]: entry for entry in json.loads(run("doctor", "--json").stdout)}
    assert found["release"]["text"].startswith("0.5.17 at ")
    for feature in CATALOGUE:
        if not feature.needs_a_gpu:
            assert found[feature.id]["text"] == (f"off ({feature.default_off})" if feature.default_off else "active")
    assert found["step_graph"]["text"].startswith("off (")
    assert found["needs block_fp8_kernels"]["text"] == "met"
    assert "cfg_mod_cache" in run("doctor").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_doctor_names_what_this_machine_lacks_and_who_needs_it() -> None:
    found = {entry["topic"]: entry for entry in json.loads(run("doctor", "--json", expect=1).stdout)}
    lacking = "no NVIDIA GPU: torch.cuda.is_available() is False"
    needing = [feature.id for feature in CATALOGUE if "block_fp8_kernels" in feature.needs]
    expected = {"level": "error", "text": f"{lacking}; needed by {', '.join(needing)}"}
    assert found["needs block_fp8_kernels"] == {"topic": "needs block_fp8_kernels", **expected}
    for feature in CATALOGUE:
        text = f"unsupported ({lacking})" if feature.needs else "active"
        if feature.default_off:
            text = f"off ({feature.default_off})"
        assert found[feature.id]["text"] == text


def test_doctor_reports_a_wrong_setting_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FASTPATH_CFG_MOD_CASHE", "0")
    result = run("doctor", "--json", expect=1)
    assert "SGLANG_FASTPATH_CFG_MOD_CACHE" in result.stdout


def test_doctor_survives_what_it_looks_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "qwen-image"
    (broken / "transformer").mkdir(parents=True)
    (broken / "model_index.json").write_text("{")
    levels = {finding.topic: finding.level for finding in doctor.examine({}, broken)}
    assert levels["doctor"] == "error"
    assert levels["cfg_mod_cache"] == "ok", "one broken part must not hide the others"


def checkpoint(folder: Path, quantization: dict | None) -> Path:
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    config = {"_class_name": "QwenImageTransformer2DModel"}
    if quantization:
        config["quantization_config"] = quantization
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (None, "not quantized"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 in blocks of [128, 128]"),
        ({"quant_method": "mystery"}, "mystery"),
    ],
)
def test_doctor_names_a_checkpoints_scheme(tmp_path: Path, quantization: dict | None, text: str) -> None:
    findings = doctor.examine_checkpoint(checkpoint(tmp_path / "my-Qwen-Image", quantization))
    assert text in " ".join(finding.text for finding in findings)
    assert not any(finding.level == "error" for finding in findings)


@pytest.mark.parametrize(("dtype", "noted"), [(torch.float16, True), (torch.bfloat16, False)])
def test_doctor_says_that_float16_stays_with_stock(tmp_path: Path, dtype: torch.dtype, noted: bool) -> None:
    folder = checkpoint(tmp_path / "qwen-image", None)
    save_file({"weight": torch.zeros(2, 2, dtype=dtype)}, folder / "transformer" / "model.safetensors")
    topics = {finding.topic for finding in doctor.examine_checkpoint(folder)}
    assert ("dtype" in topics) is noted


LANGUAGE_FEATURES = [feature.id for feature in CATALOGUE if feature.serves("llm")]
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "quantization_config": BLOCK_FP8}, []),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": BLOCK_FP8},
            ["unsupported (Llama: it has no QK norm)"],
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "quantization_config": BLOCK_FP8},
            ["unsupported (Gemma2ForCausalLM: not written for it)"] * 3,
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            [f"not in block FP8 [128, 128]: {', '.join(LANGUAGE_FEATURES)} leave it to stock"],
        ),
    ],
)
def test_doctor_says_what_a_language_model_lacks(tmp_path: Path, config: dict, notes: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, *rest = doctor.examine_checkpoint(tmp_path)
    assert (first.level, first.text.split(",")[0]) == ("ok", config["architectures"][0])
    assert [(finding.level, finding.text) for finding in rest] == [("note", note) for note in notes]


def test_doctor_knows_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (finding,) = doctor.examine_checkpoint(tmp_path)
    assert finding.level == "error" and "neither model_index.json" in finding.text


def test_doctor_warns_of_the_silent_fallback_to_diffusers(tmp_path: Path) -> None:
    findings = doctor.examine_checkpoint(checkpoint(tmp_path / "my-model", None))
    assert [finding.topic for finding in findings if finding.level == "error"] == ["backend"]


def test_status_shows_running_processes_with_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(envs.STATUS_DIR, str(tmp_path))
    assert "No process with the plugin is running" in run("status").stdout
    plan = make_plan(envs.Settings(enabled=True), contracts.installed_release())
    plan.records["cfg_mod_cache"].fall_back("gradients are enabled")
    writer = StatusWriter(tmp_path, "diffusion worker 0")
    writer.serves = True
    writer.remark = "a remark"
    writer.write(plan)
    shown = run("status").stdout
    assert "diffusion worker 0" in shown
    assert "never hit" in shown
    assert "a remark" in shown
    (entry,) = json.loads(run("status", "--json").stdout)
    assert entry["features"]["cfg_mod_cache"]["fallbacks"] == {"gradients are enabled": 1}


def test_quantize_errors_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(tmp_path / "nothing"), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "nothing" in str(result.exception) + result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture
def started() -> Iterator[None]:
    """SGLang looks for the file behind stdout when it starts, which a CliRunner does not have. On one thread: those
    that wait for each other take longer than a tiny denoiser."""
    start_runtime()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TINY = ["--emulate", "--layers", "1", "--heads", "2", "--width", "64", "--height", "64", "--text-tokens", "7"]
IN_FLUX2 = {feature.id for feature in CATALOGUE if feature.port_of("sglang_fastpath.patches.diffusion.flux2_blocks")}
IN_QWEN_IMAGE = {f.id for f in CATALOGUE if f.measured and not f.needs_a_gpu and not f.lacks(QWEN_IMAGE)}


def ablated(model: str, features: set[str], *, steps: int) -> dict[str, Any]:
    """What `ablate --model` says of each variant: in each the features that its name tells run, and no others."""
    outcomes: dict[str, Any] = json.loads(
        run("ablate", "--model", model, *TINY, "--steps", str(steps), "--json").stdout
    )
    assert outcomes.keys() == {"fast", *(f"{how} {id}" for how in ("alone", "without") for id in features)}
    for name, outcome in outcomes.items():
        assert outcome["bitwise_equal"] and not outcome["failed"]
        how, _, id = name.partition(" ")
        expected = {"fast": features, "alone": {id}, "without": features - {id}}[how]
        assert {id for id, seen in outcome["features"].items() if seen["hits"]} == expected, name
        assert all(outcome["features"][id]["state"] == "active" for id in expected)
    return outcomes


@pytest.mark.usefixtures("started")
def test_ablate_has_each_feature_of_qwen_image_on_alone_and_off_alone() -> None:
    """Whole engines are ablated by two features only (tests/test_engine.py): here it costs no start."""
    ablated("qwen-image", IN_QWEN_IMAGE, steps=3)


@pytest.mark.usefixtures("started")
def test_ablate_compares_one_denoiser_with_each_of_its_features_on_and_off() -> None:
    outcomes = ablated("flux2", IN_FLUX2, steps=2)
    assert outcomes["fast"]["features"]["qk_norm_rope"]["hits"] == 2, "a single block, two steps"
    assert outcomes["fast"]["features"]["act_quant"]["hits"] == 4, "and a double one"
    assert outcomes["fast"]["features"]["bias_fold"]["state"] == "unsupported (FLUX.2: its linears have no biases)"


@pytest.mark.usefixtures("started")
def test_ablate_exits_with_1_and_says_which_variant_of_a_denoiser_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant can be made to differ: the verdict is handed in."""
    both = {name: Variant() for name in ("stock", "fast")} | {
        "alone act_quant": Variant(only("act_quant", emulate=True))
    }
    monkeypatch.setattr(benchmark, "make_variants", lambda family, emulate: both)
    monkeypatch.setattr(benchmark, "compare", lambda latents, stock: "a difference")
    shown = run("ablate", "--model", "qwen-image", *TINY, "--steps", "1", expect=1).stdout
    assert "DIFFERENT" in shown and "identical" not in shown
    assert "alone act_quant" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--model-path", "--model", "one of them"]),
        (["--model", "flux2", "--model-path", "here"], ["one of them"]),
        (["--model", "flux"], ["'flux'", "qwen-image", "flux2"]),
        pytest.param(
            ["--model", "flux2"],
            ["ablate --model without --emulate", "NVIDIA GPU"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
        ),
    ],
)
def test_ablate_refuses_what_it_cannot_compare(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["ablate", *arguments])
    assert result.exit_code == 1
    assert all(word in str(result.exception) for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "fast"], ["--variants fast", "--graph"]),
        (["--graph", "--variants", "fast,stock+graf"], ["'stock+graf'", "stock+graph"]),
        (["--model", "flux"], ["'flux'", "qwen-image"]),
    ],
)
def test_bench_denoiser_refuses_what_it_does_not_know(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "denoiser", *arguments])
    assert result.exit_code == 1
    assert all(word in str(result.exception) for word in words)


@pytest.mark.parametrize(("graph", "equal"), [(True, False), (False, True)])
def test_bench_denoiser_writes_its_result_and_exits_with_1_unless_the_bytes_are_stocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: None, graph: bool, equal: bool
) -> None:
    """On a tiny denoiser and the CPU, where no variant can be made to differ: the verdict is handed in."""
    revert = fp8_cpu_emulation.apply()
    tiny = {"image_hw": (4, 4), "device": "cpu"}
    full = benchmark.MODELS["qwen-image"]
    small = full._replace(arch=full.arch | {"heads": 2, "joint_attention_dim": 128})
    monkeypatch.setitem(benchmark.MODELS, "qwen-image", small)
    monkeypatch.setattr(benchmark, "Workload", functools.partial(benchmark.Workload, **tiny))
    monkeypatch.setattr(cli, "_require_gpu", lambda: None)
    if not equal:
        monkeypatch.setattr(benchmark, "compare", lambda fast, stock: "a difference")
    output = tmp_path / "results" / "result.json"
    brief = ["--layers", "1", "--text-tokens", "7", "--steps", "2", "--rounds", "1", "--sustained-steps", "1"]
    which = ["--graph", "--variants", "fast"] if graph else ["--no-ablation"]
    words = ["bench", "denoiser", *brief, *which, "--attention", "torch_sdpa", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["sglang-fastpath", *words])
    try:
        result = run(*words, expect=0 if equal else 1)
    finally:
        revert()
    document = json.loads(output.read_text())
    assert json.loads(result.stdout) == document
    assert (document["model"], document["attention"], document["arch"]["layers"]) == ("qwen-image", "torch_sdpa", 1)
    assert document["command"] == " ".join(["sglang-fastpath", *words[:-2]]), "less where the result went"
    measured = document["variants"] if graph else document
    assert measured["stock"]["pass_ms"] > 0 and measured["fast"]["sustained_ms"] > 0
