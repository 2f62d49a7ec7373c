"""`sglang-fastpath doctor`: what is installed, what would be active here and why not. Never raises."""

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from safetensors import safe_open

from sglang_fastpath import contracts, envs
from sglang_fastpath.environment import REQUIREMENTS, detect
from sglang_fastpath.features import CATALOGUE, llm_family
from sglang_fastpath.plan import FeatureRecord, State, make_plan


@dataclass(frozen=True)
class Finding:
    """One line of the report; `error` means that something asked for cannot run."""

    topic: str
    level: Literal["ok", "note", "error"]
    text: str


def examine(environ: Mapping[str, str], model_path: Path | None = None) -> list[Finding]:
    """Looks at settings, release, machine, features and (if given) a checkpoint; a crash becomes a finding."""
    findings: list[Finding] = []
    parts: list[Callable[[], list[Finding]]] = [
        lambda: _settings(environ),
        _release,
        lambda: _machine(environ),
        lambda: _features(environ),
    ]
    if model_path is not None:
        parts.append(lambda: examine_checkpoint(model_path))
    for part in parts:
        try:
            findings += part()
        except Exception:
            findings.append(Finding("doctor", "error", traceback.format_exc(limit=-2).strip()))
    return findings


def _settings(environ: Mapping[str, str]) -> list[Finding]:
    try:
        settings = envs.read(environ)
    except envs.ConfigurationError as error:
        return [Finding("settings", "error", str(error))]
    asked = "asked for" if settings.enabled else f"not asked for: pass --plugin fastpath or set {envs.ENABLE}=1"
    return [Finding("plugin", "ok" if settings.enabled else "note", asked)]


def _release() -> list[Finding]:
    release = contracts.installed_release()
    if release is None:
        return [Finding("release", "error", 'SGLang is not installed: pip install "sglang[diffusion]"')]
    if not contracts.is_recorded(release):
        drift = contracts.check((), release)
        return [Finding("release", "error", f"{release.version} at {release.root}: {drift}")]
    known = list(contracts.recorded())
    text = f"{release.version} at {release.root}; supported: {known[0]} to {known[-1]}"
    return [Finding("release", "ok", text)]


def _machine(environ: Mapping[str, str]) -> list[Finding]:
    machine = replace(detect(), emulated=environ.get(envs.EMULATE) == "1")
    findings = [Finding(name, "ok" if v else "note", v or "not installed") for name, v in machine.versions.items()]
    for need, unmet in REQUIREMENTS.items():
        why = unmet(machine)
        wanted_by = [feature.id for feature in CATALOGUE if need in feature.needs]
        by_default = any(feature.measured for feature in CATALOGUE if need in feature.needs)
        level: Literal["note", "error"] = "error" if by_default else "note"
        text = f"{why}{'; needed by ' + ', '.join(wanted_by) if wanted_by else ''}" if why else "met"
        findings.append(Finding(f"needs {need}", level if why else "ok", text))
    return findings


def _features(environ: Mapping[str, str]) -> list[Finding]:
    try:
        settings = envs.read(environ)
    except envs.ConfigurationError:
        return []
    plan = make_plan(settings, contracts.installed_release())
    return [Finding(id, _level(record), _described(record)) for id, record in plan.records.items()]


def _level(record: FeatureRecord) -> Literal["ok", "note", "error"]:
    if record.state is State.ACTIVE:
        return "note" if any(state is State.DRIFTED for state, _ in record.out.values()) else "ok"
    others: dict[State, Literal["ok", "note"]] = {State.NATIVE: "ok", State.OFF: "note"}
    return others.get(record.state, "error")


def _described(record: FeatureRecord) -> str:
    """State and reason; of an active feature, also the models in which it is not."""
    if record.state is not State.ACTIVE:
        return f"{record.state} ({record.reason})" if record.reason else str(record.state)
    elsewhere = (f"{state} in {port.name} ({why})" for port, (state, why) in record.out.items())
    return "; ".join([str(record.state), *elsewhere])


def examine_checkpoint(path: Path) -> list[Finding]:
    """What a diffusers pipeline's or a language model's folder holds: model class and quantization scheme, as SGLang
    would read them, and which features do nothing in a language model of this class."""
    index = path / "model_index.json"
    if not index.is_file():
        if (path / "config.json").is_file():
            return _language_model(path)
        text = f"{path} has neither model_index.json (a diffusers pipeline) nor config.json (a language model)"
        return [Finding("checkpoint", "error", text)]
    pipeline = json.loads(index.read_text())["_class_name"]
    config = json.loads((path / "transformer" / "config.json").read_text())
    quantization = config.get("quantization_config")
    findings = [Finding("checkpoint", "ok", f"{pipeline}, {config.get('_class_name')}, {_scheme(quantization)}")]
    if "F16" in _dtypes(path / "transformer"):
        text = "float16 weights: fused kernels want bfloat16 and leave float16 to stock; use --dit-precision bf16"
        findings.append(Finding("dtype", "note", text))
    if quantization and quantization.get("quant_method") != "fp8":
        method = quantization.get("quant_method")
        findings.append(Finding("scheme", "note", f"{method!r}: only features for any scheme apply"))
    if pipeline == "QwenImagePipeline" and "qwen-image" not in path.name.lower():
        findings.append(
            Finding(
                "backend",
                "error",
                f"SGLang picks its own Qwen-Image by the folder's name; {path.name!r} does not contain 'qwen-image', "
                "so it would fall back to diffusers and nothing would be accelerated. Rename it or pass --model-id.",
            )
        )
    return findings


def _language_model(path: Path) -> list[Finding]:
    config = json.loads((path / "config.json").read_text())
    architecture = (config.get("architectures") or ["a model without architectures"])[0]
    quantization = config.get("quantization_config")
    findings = [Finding("checkpoint", "ok", f"{architecture}, {_scheme(quantization)}")]
    model = llm_family(architecture)
    features = [feature for feature in CATALOGUE if feature.serves("llm")]
    findings += [
        Finding(feature.id, "note", f"{State.UNSUPPORTED} ({lacking})")
        for feature in features
        if (lacking := feature.lacks(model))
    ]
    if not quantization or quantization.get("weight_block_size") != [128, 128]:
        names = ", ".join(feature.id for feature in features)
        findings.append(Finding("scheme", "note", f"not in block FP8 [128, 128]: {names} leave it to stock"))
    return findings


def _scheme(quantization: dict[str, object] | None) -> str:
    if not quantization:
        return "not quantized"
    block = quantization.get("weight_block_size")
    return f"{quantization.get('quant_method')}{f' in blocks of {block}' if block else ''}"


def _dtypes(transformer: Path) -> set[str]:
    """The dtypes of the checkpoint's tensors, as safetensors names them, read from its files' headers."""
    found = set()
    for path in transformer.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]
