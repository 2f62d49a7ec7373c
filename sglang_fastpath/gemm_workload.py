"""Which block-FP8 GEMMs a model runs, by its sizes alone: nothing of SGLang is imported, no weight is loaded.

What stock launches, and what the fused forwards launch instead where that is another shape. The grouped launches of
the fused forwards are not in it, since only DeepGEMM has them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_fastpath import benchmark
from sglang_fastpath.denoisers import PIXELS_PER_TOKEN
from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Profile

HEAD = 128
QWEN_IMAGE, FLUX2, QWEN3_8B = "qwen-image", "flux2", "qwen3-8b"
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DENOISERS = {"QwenImageTransformer2DModel": QWEN_IMAGE, "Flux2Transformer2DModel": FLUX2}
# What a checkpoint's config.json calls the sizes that the benchmark's builders take.
_SIZES = {
    "num_layers": "layers",
    "num_single_layers": "single_layers",
    "num_attention_heads": "heads",
    "joint_attention_dim": "joint_attention_dim",
    "guidance_embeds": "guidance_embeds",
}
_FEED_FORWARD = {QWEN_IMAGE: 4, FLUX2: 3}  # its width, in widths of the model
_LLMS: dict[str, dict[str, int]] = {
    QWEN3_8B: {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
}
KNOWN = (QWEN_IMAGE, FLUX2, *_LLMS)


class WorkloadError(ValueError):
    """A model or a size that cannot be tuned; the message names it and says what to do."""


class Site(NamedTuple):
    """Linears that run as GEMMs of one shape, so many `calls` in a block; merged ones as the fused forwards do."""

    name: str
    problem: Problem
    calls: int


@dataclass(frozen=True)
class Pass:
    """The GEMMs that run together, in the order of a block; for a denoiser, what its whole pass is timed with."""

    label: str
    sites: tuple[Site, ...]
    layers: int
    denoiser: benchmark.Workload | None = None

    @property
    def problems(self) -> list[Problem]:
        """Without repetition, in the order of the sites."""
        return list(dict.fromkeys(site.problem for site in self.sites))


@dataclass(frozen=True)
class TuningWorkload:
    """A model at one size: a pass for each length of a prompt, or for each batch of an LLM."""

    model: str
    profile: Profile
    passes: tuple[Pass, ...]

    @property
    def problems(self) -> list[Problem]:
        """Those of all passes, without repetition."""
        return list(dict.fromkeys(problem for one in self.passes for problem in one.problems))

    def named(self, problem: Problem) -> str:
        """Which linears pose a problem."""
        sites = (site for one in self.passes for site in one.sites)
        return ", ".join(dict.fromkeys(site.name for site in sites if site.problem == problem))


def find(model: str, resolution: str, tokens: Sequence[int]) -> TuningWorkload:
    """The workload of a model that is named (`KNOWN`) or whose checkpoint lies in a folder.

    `resolution`: "WIDTHxHEIGHT" in pixels, for denoisers. `tokens`: text tokens of each prompt, or the batches that
    an LLM decodes; the model's own if there are none.

    Raises:
        WorkloadError: the model is not known, or a size cannot be.
    """
    for count in tokens:
        if count < 1:
            raise WorkloadError(f"--tokens {count}: a pass has at least one")
    if model in _LLMS:
        return llm(model, _LLMS[model], tokens or DECODE_BATCHES)
    if model in benchmark.MODELS:
        return denoiser(model, model, {}, resolution, tokens)
    return _of_checkpoint(Path(model), resolution, tokens)


def denoiser(
    model: str, kind: str, arch: Mapping[str, Any], resolution: str, tokens: Sequence[int]
) -> TuningWorkload:
    """`kind`: qwen-image or flux2; `arch`: its sizes, as far as they are not the published model's."""
    full = benchmark.MODELS[kind]
    sizes = {**full.arch, **arch}
    rows = _image_rows(resolution)
    sites = _qwen_image if kind == QWEN_IMAGE else _flux2
    passes = [
        Pass(
            f"{text_tokens} text tokens",
            tuple(sites(HEAD * sizes["heads"], rows[0] * rows[1], text_tokens)),
            sizes["layers"],
            benchmark.Workload(kind, dict(arch), rows, text_tokens),
        )
        for text_tokens in tokens or (full.text_tokens,)
    ]
    return TuningWorkload(model, "denoiser", tuple(passes))


def _qwen_image(width: int, image_tokens: int, text_tokens: int) -> list[Site]:
    inner = _FEED_FORWARD[QWEN_IMAGE] * width
    return [
        Site(f"{stream} {name}", Problem(rows, n, k), calls)
        for name, n, k, calls in (
            ("qkv", width, width, 3),
            ("out", width, width, 1),
            ("up", inner, width, 1),
            ("down", width, inner, 1),
        )
        for stream, rows in (("text", text_tokens), ("image", image_tokens))
    ]


def _flux2(width: int, image_tokens: int, text_tokens: int) -> list[Site]:
    """A double block and a single one."""
    inner = _FEED_FORWARD[FLUX2] * width
    sites = [
        Site(f"{stream} {name}", Problem(rows, n, k), calls)
        for name, n, k, calls in (
            ("qkv", width, width, 3),
            ("merged qkv", 3 * width, width, 1),
            ("out", width, width, 1),
            ("up", 2 * inner, width, 1),
            ("down", width, inner, 1),
        )
        for stream, rows in (("text", text_tokens), ("image", image_tokens))
    ]
    joint = image_tokens + text_tokens
    return [
        *sites,
        Site("single in", Problem(joint, 3 * width + 2 * inner, width), 1),
        Site("single out", Problem(joint, width, width + inner), 1),
    ]


def llm(model: str, config: Mapping[str, Any], batches: Sequence[int]) -> TuningWorkload:
    """A dense transformer with SwiGLU and merged projections, as SGLang has Qwen3 and Llama; one token a sequence.

    `config`: what its config.json says.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head, inner = config.get("head_dim") or hidden // heads, config["intermediate_size"]
    key_value = config.get("num_key_value_heads") or heads
    linears = (
        ("qkv", (heads + 2 * key_value) * head, hidden),
        ("out", hidden, heads * head),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
    )
    passes = [
        Pass(
            f"batch {batch}",
            tuple(Site(name, Problem(batch, n, k), 1) for name, n, k in linears),
            config["num_hidden_layers"],
        )
        for batch in batches
    ]
    return TuningWorkload(model, "decode", tuple(passes))


def _of_checkpoint(folder: Path, resolution: str, tokens: Sequence[int]) -> TuningWorkload:
    configs = folder / "transformer" / "config.json", folder / "config.json"
    path = next((path for path in configs if path.is_file()), None)
    if path is None:
        raise WorkloadError(f"--model {folder}: no such model or checkpoint folder; known: {', '.join(KNOWN)}")
    config = json.loads(path.read_text())
    kind = _DENOISERS.get(config.get("_class_name", ""))
    try:
        if kind:
            if config.get("attention_head_dim", HEAD) != HEAD:
                raise WorkloadError(f"{path}: heads of {config['attention_head_dim']}, and only {HEAD} is known")
            arch = {ours: config[theirs] for theirs, ours in _SIZES.items() if theirs in config}
            full = benchmark.MODELS[kind].arch
            arch = {name: value for name, value in arch.items() if name in full or name == "guidance_embeds"}
            return denoiser(str(folder), kind, arch, resolution, tokens)
        if any("expert" in name for name in config):
            raise WorkloadError(f"{path}: a mixture of experts, whose GEMMs are grouped: only DeepGEMM has those")
        return llm(str(folder), config, tokens or DECODE_BATCHES)
    except KeyError as missing:
        raise WorkloadError(f"{path} says no {missing}: it is neither a known denoiser nor a dense LLM") from None


def _image_rows(resolution: str) -> tuple[int, int]:
    """(rows, columns) of tokens."""
    width, _, height = resolution.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise WorkloadError(f"--resolution {resolution!r}: write WIDTHxHEIGHT, as in 1024x1024")
    pixels = int(height), int(width)
    if any(not side or side % PIXELS_PER_TOKEN for side in pixels):
        raise WorkloadError(f"--resolution {resolution}: each side is a multiple of {PIXELS_PER_TOKEN}")
    return pixels[0] // PIXELS_PER_TOKEN, pixels[1] // PIXELS_PER_TOKEN
