"""A bf16 diffusers checkpoint of Qwen-Image or FLUX.2 to block FP8 [128, 128], as SGLang 0.5.12 to 0.5.23 load it.

Layout of the result, per quantized linear of weight [N, K]: `<layer>.weight` float8_e4m3fn [N, K] and
`<layer>.weight_scale_inv` float32 [ceil(N/128), ceil(K/128)]; dequantized weight = weight * scale of its block.
Everything else keeps its name, dtype and bytes. SGLang finds the scheme in `quantization_config` of the
transformer's config.json and matches `modules_to_not_convert` against its own module prefixes, on dotted
boundaries (`Fp8Config.from_config`, `is_layer_skipped`); so that list holds those prefixes, which are not always
the checkpoint's names (see Linear.prefix). SGLang 0.5.11 cannot use the result: it builds Qwen-Image's MLP without
quantization and would take the codes for weights, and fails on the scales of FLUX.2's merged layers.

The work is done shard by shard in `DST.partial`, which becomes DST by one rename. A journal in it records every
finished shard, so that an interrupted run continues where it stopped, and gives the same bytes.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from .safetensors_stream import (
    INDEX_NAME,
    SafetensorsError,
    TensorInfo,
    load_tensor,
    publish,
    read_checkpoint,
    read_header,
    write_file,
)

BLOCK = 128
FP8_MAX = 448.0
# The smallest normal fp32. An all-zero block gets it as its scale, and no scale is ever subnormal.
SCALE_MIN = 2.0**-126
# Elements handled at a time: the fp32 copies of a band stay small beside a shard, and in the cache.
BAND_ELEMENTS = 2**18

CONFIG_NAME = "config.json"
TRANSFORMER = "transformer"
JOURNAL_NAME = "quantize-journal.json"
SOURCE_DTYPES = ("BF16", "F16", "F32")
QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"})


class QuantizeError(ValueError):
    """The checkpoint cannot be quantized; the message names the file, the tensor and the way out."""


# --- arithmetic ---------------------------------------------------------------------------------------------


def quantize_block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a finite weight [N, K] of any float dtype in blocks of 128 x 128; the last ones may be partial.

    Returns (float8_e4m3fn [N, K], float32 [ceil(N/128), ceil(K/128)]). Per block, in fp32 throughout:
    amax = max |w|; scale = max(amax / 448, 2**-126), one rounded division; w / scale, one rounded division;
    clamped to +-448; converted to nearest, ties to even. An all-zero block gives zeros.

    Stock SGLang has no float-scaled weight quantizer. Its `per_block_cast_to_fp8` (from DeepGEMM, for SM100)
    differs in three ways: it raises amax to at least 1e-4, rounds the scale up to a power of two, and multiplies
    by 1 / scale. The inverse is the one of its `block_quant_dequant`.
    """
    rows, columns = weight.shape
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK), dtype=torch.float32)
    for band, band_blocks in _bands(rows, columns):
        blocks = _blocks(weight[band].float())
        band_scale = blocks.abs().amax(dim=(1, 3), keepdim=True).div_(FP8_MAX).clamp_(min=SCALE_MIN)
        codes = (blocks / band_scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        quantized[band] = codes.flatten(2).flatten(0, 1)[: band.stop - band.start, :columns]
        scale[band_blocks] = band_scale[:, 0, :, 0]
    return quantized, scale


def dequantize_block_fp8(quantized: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [N, K] times the float32 scale [ceil(N/128), ceil(K/128)] of its block: float32 [N, K]."""
    rows, columns = quantized.shape
    blocks = _blocks(quantized.float()) * scale[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns]


def relative_error(weight: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> float | None:
    """||w - dequantized|| / ||w|| (Frobenius), or None if some element is further off than rounding explains.

    e4m3 has 3 mantissa bits: half a unit in the last place is at most |w| / 16 for a normal number and
    scale * 2**-10 below. A factor of 1 + 2**-16 covers the fp32 roundings of quotient, product and difference.
    """
    error = norm = 0.0
    for band, band_blocks in _bands(*weight.shape):
        band_scale = scale[band_blocks, None, :, None]
        blocks = _blocks(weight[band].float())
        difference = _blocks(quantized[band].float()).mul_(band_scale).sub_(blocks)
        error += float(torch.linalg.vector_norm(difference)) ** 2
        norm += float(torch.linalg.vector_norm(blocks)) ** 2
        bound = blocks.abs().mul_(2.0**-4).clamp_(min=band_scale * 2.0**-10).mul_(1 + 2.0**-16)
        if not (torch.isfinite(band_scale).all() and (difference.abs_() <= bound).all()):
            return None
    return math.sqrt(error / norm) if norm else 0.0


def _bands(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """The rows of a matrix in bands of whole blocks, each with the rows of the scale that belong to it."""
    height = max(BLOCK, BAND_ELEMENTS // columns // BLOCK * BLOCK)
    for top in range(0, rows, height):
        bottom = min(top + height, rows)
        yield slice(top, bottom), slice(top // BLOCK, math.ceil(bottom / BLOCK))


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] as [ceil(N/128), 128, ceil(K/128), 128], filled up with zeros."""
    rows, columns = matrix.shape
    if rows % BLOCK or columns % BLOCK:
        matrix = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return matrix.reshape(len(matrix) // BLOCK, BLOCK, -1, BLOCK)


# --- which layers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """A linear layer as SGLang builds it."""

    out_features: int
    in_features: int
    role: Literal["block", "optional", "fixed"]
    """block: attention or MLP, quantized by default. optional: SGLang would load it quantized, if asked to.
    fixed: SGLang builds it without a quantization config and would take FP8 codes for the weight itself."""
    prefix: str = ""
    """The name by which SGLang decides about it, if not the checkpoint's own."""
    parts: tuple[int, ...] = ()
    """Output sizes of the projections merged into it: Fp8LinearMethod takes only multiples of 128."""

    def obstacle(self) -> str | None:
        """Why SGLang could not load or run it in block FP8."""
        if self.role == "fixed":
            return "SGLang builds this layer without quantization"
        if self.in_features % BLOCK:
            return f"input size {self.in_features} is not a multiple of {BLOCK}, the group of the activations"
        if any(part % BLOCK for part in self.parts):
            return f"merged output sizes {self.parts} are not multiples of {BLOCK}"
        return None


def qwen_image_linears(config: Mapping[str, Any]) -> dict[str, Linear]:
    """By checkpoint name, the linears of QwenImageTransformer2DModel."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    patch = config["patch_size"] ** 2 * (config["out_channels"] or config["in_channels"])
    linears = {
        "img_in": Linear(width, config["in_channels"], "optional"),
        "txt_in": Linear(width, config["joint_attention_dim"], "optional"),
        "time_text_embed.timestep_embedder.linear_1": Linear(width, 256, "fixed"),
        "time_text_embed.timestep_embedder.linear_2": Linear(width, width, "fixed"),
        "norm_out.linear": Linear(2 * width, width, "fixed"),
        "proj_out": Linear(patch, width, "optional"),
    }
    for i in range(config["num_layers"]):
        block = f"transformer_blocks.{i}"
        linears |= _joint_attention(block, width)
        for stream in ("img", "txt"):
            modulation = f"{block}.{stream}_mod"
            linears[f"{modulation}.1"] = Linear(6 * width, width, "optional", prefix=modulation)
            linears[f"{block}.{stream}_mlp.net.0.proj"] = Linear(4 * width, width, "block")
            linears[f"{block}.{stream}_mlp.net.2"] = Linear(width, 4 * width, "block")
    return linears


def flux2_linears(config: Mapping[str, Any]) -> dict[str, Linear]:
    """By checkpoint name, the linears of Flux2Transformer2DModel."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    hidden = int(width * config["mlp_ratio"])
    patch = config["patch_size"] ** 2 * (config["out_channels"] or config["in_channels"])
    linears = {
        "x_embedder": Linear(width, config["in_channels"], "fixed"),
        "context_embedder": Linear(width, config["joint_attention_dim"], "fixed"),
        "double_stream_modulation_img.linear": Linear(6 * width, width, "fixed"),
        "double_stream_modulation_txt.linear": Linear(6 * width, width, "fixed"),
        "single_stream_modulation.linear": Linear(3 * width, width, "fixed"),
        "norm_out.linear": Linear(2 * width, width, "fixed"),
        "proj_out": Linear(patch, width, "optional"),
    }
    for embedder in ("timestep", "guidance") if config.get("guidance_embeds", True) else ("timestep",):
        name = f"time_guidance_embed.{embedder}_embedder"
        linears[f"{name}.linear_1"] = Linear(width, config["timestep_guidance_channels"], "fixed")
        linears[f"{name}.linear_2"] = Linear(width, width, "fixed")
    for i in range(config["num_layers"]):
        block = f"transformer_blocks.{i}"
        linears |= _joint_attention(block, width)
        for mlp in ("ff", "ff_context"):
            linears[f"{block}.{mlp}.linear_in"] = Linear(2 * hidden, width, "block", parts=(hidden, hidden))
            linears[f"{block}.{mlp}.linear_out"] = Linear(width, hidden, "block")
    for i in range(config["num_single_layers"]):
        attention = f"single_transformer_blocks.{i}.attn"
        parts = (width, width, width, hidden, hidden)
        linears[f"{attention}.to_qkv_mlp_proj"] = Linear(sum(parts), width, "block", parts=parts)
        linears[f"{attention}.to_out"] = Linear(width, width + hidden, "block")
    return linears


def _joint_attention(block: str, width: int) -> dict[str, Linear]:
    image = ("to_q", "to_k", "to_v", "to_out.0")
    text = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    return {f"{block}.attn.{projection}": Linear(width, width, "block") for projection in image + text}


@dataclass(frozen=True)
class Model:
    linears: Callable[[Mapping[str, Any]], dict[str, Linear]]
    name_hint: str
    """What a directory's name must contain for SGLang to choose its own pipeline rather than diffusers'."""
    note: str = ""


MODELS = {
    "QwenImageTransformer2DModel": Model(qwen_image_linears, "qwen-image"),
    "Flux2Transformer2DModel": Model(
        flux2_linears,
        "flux.2",
        note="SGLang before 0.5.23 shards the scales of single_transformer_blocks.*.attn.to_out in another order "
        "than its weights when --tp-size is above 1 (wrong images, no error); for tensor parallelism there, "
        "quantize with --exclude 'single_transformer_blocks.*.attn.to_out'",
    ),
}


# --- public interface ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizeOptions:
    include: tuple[str, ...] = ()
    """Globs of layers (checkpoint names without `.weight`) to quantize besides attention and MLP."""
    exclude: tuple[str, ...] = ()
    """Globs of layers to leave as they are; stronger than `include`."""
    max_shard_bytes: int = 5 * 10**9
    """Tensor bytes in a file, which also bounds the memory needed; a larger single layer gets its own file."""


@dataclass(frozen=True)
class ProgressEvent:
    phase: Literal["quantize", "check", "resume", "carry"]
    item: str
    """The tensor or file just finished."""
    shard: int
    """Counted from 1; 0 for `carry`."""
    shards: int
    done_bytes: int
    total_bytes: int
    """Source bytes: the transformer's twice, once to quantize and once to check, and the files carried over."""


@dataclass(frozen=True)
class QuantizeReport:
    destination: Path
    model_class: str
    quantized: tuple[str, ...]
    kept: Mapping[str, str]
    """Linear layers left as they were, each with the reason."""
    bytes_before: int
    """Tensor bytes of the transformer."""
    bytes_after: int
    max_relative_error: float
    """The largest over all quantized layers of ||w - dequantized|| / ||w||, Frobenius norms."""
    worst_layer: str
    shards: int
    resumed_shards: int
    """How many of them an interrupted run had finished."""
    warnings: tuple[str, ...]


def quantize_checkpoint(
    source: Path,
    destination: Path,
    *,
    options: QuantizeOptions | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> QuantizeReport:
    """Quantizes a pipeline directory (with model_index.json) or a transformer directory into a new one.

    A pipeline's other files come along: weights as hard links where possible, the rest as copies. Nothing appears
    at `destination` before everything is written and checked against the source. If the run is interrupted,
    or the disk fills up, `destination`.partial stays and the same call continues; any other failure removes it.

    Raises QuantizeError.
    """
    options = options or QuantizeOptions()
    try:
        plan = _make_plan(source, destination, options)
        with _open_partial(destination, plan.fingerprint) as (partial, journal):
            resumed = _write(plan, partial, journal, _Progress(progress, len(plan.shards), plan.work_bytes))
            if _fingerprint(plan.layout, options) != plan.fingerprint:
                raise QuantizeError(f"{source} changed while it was being quantized")
            partial.rename(destination)
            (destination / JOURNAL_NAME).unlink()
    except SafetensorsError as error:
        raise QuantizeError(str(error)) from error
    except OSError as error:
        raise QuantizeError(
            f"{error}; once this is put right, the same command continues where it stopped"
        ) from error
    worst = max(journal.shards.values(), key=lambda record: record["error"])
    return QuantizeReport(
        destination=destination,
        model_class=plan.config["_class_name"],
        quantized=plan.quantized,
        kept=plan.kept,
        bytes_before=plan.source_bytes,
        bytes_after=plan.output_bytes,
        max_relative_error=worst["error"],
        worst_layer=worst["layer"],
        shards=len(plan.shards),
        resumed_shards=resumed,
        warnings=_warnings(plan, destination),
    )


def parse_size(text: str) -> int:
    """'5GB', '512MiB' or '1000000' as bytes (GB = 10**9, GiB = 2**30)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?|B)?", text.strip().upper())
    if match is None:
        raise QuantizeError(f"'{text}' is not a size; write for example 5GB, 512MiB or 1000000")
    number, unit, binary = match.groups()
    exponent = "KMGT".index(unit) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


# --- planning -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Where things lie: `root` is the transformer itself unless `is_pipeline`."""

    root: Path
    is_pipeline: bool

    @property
    def transformer(self) -> Path:
        return self.root / TRANSFORMER if self.is_pipeline else self.root

    def carried(self) -> list[Path]:
        """Files to take over, relative to the root.

        Not the transformer's own weights, nor weights beside model_index.json, which are the same model in its
        single-file form and would double the result; nor hidden files, such as a download's cache.
        """
        files = []
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                weights = path.suffix in WEIGHT_SUFFIXES or ".index." in name
                ours = path.parent == self.transformer and (weights or name == CONFIG_NAME)
                if not (name.startswith(".") or ours or (weights and path.parent == self.root)):
                    files.append(path.relative_to(self.root))
        return files


@dataclass(frozen=True)
class _Item:
    """A source tensor and what becomes of it."""

    source: TensorInfo
    quantize: bool

    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape of the tensors that it turns into."""
        if not self.quantize:
            return {self.source.name: (self.source.dtype, self.source.shape)}
        rows, columns = self.source.shape
        scale_shape = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
        return {self.source.name: ("F8_E4M3", self.source.shape), self.scale_name: ("F32", scale_shape)}

    @property
    def scale_name(self) -> str:
        return f"{self.source.name}_scale_inv"

    @property
    def output_bytes(self) -> int:
        if not self.quantize:
            return self.source.nbytes
        return sum(math.prod(shape) * (4 if dtype == "F32" else 1) for dtype, shape in self.outputs().values())


@dataclass(frozen=True)
class _Plan:
    layout: _Layout
    config: dict[str, Any]
    shards: dict[str, list[_Item]]
    quantized: tuple[str, ...]
    kept: dict[str, str]
    not_converted: list[str]
    fingerprint: dict[str, Any]

    @property
    def source_bytes(self) -> int:
        return sum(item.source.nbytes for items in self.shards.values() for item in items)

    @property
    def output_bytes(self) -> int:
        return sum(item.output_bytes for items in self.shards.values() for item in items)

    @property
    def work_bytes(self) -> int:
        """Every source tensor is read twice, to quantize it and to check the result."""
        return 2 * self.source_bytes + sum((self.layout.root / file).stat().st_size for file in self.layout.carried())


def _make_plan(source: Path, destination: Path, options: QuantizeOptions) -> _Plan:
    if os.path.lexists(destination):
        raise QuantizeError(f"{destination} exists and is not overwritten; remove it or choose another destination")
    if destination.resolve().is_relative_to(source.resolve()):
        raise QuantizeError(f"{destination} lies inside the source {source}; choose a destination outside of it")
    if options.max_shard_bytes <= 0:
        raise QuantizeError(f"the largest shard size must be positive, not {options.max_shard_bytes}")
    layout = _find_layout(source)
    config = _read_json(layout.transformer / CONFIG_NAME)
    model_class = config.get("_class_name")
    if model_class not in MODELS:
        raise QuantizeError(
            f"{layout.transformer / CONFIG_NAME}: '{model_class}' is not a model that can be quantized here; "
            f"known: {', '.join(MODELS)}"
        )
    if config.get("quantization_config"):
        raise QuantizeError(
            f"{layout.transformer / CONFIG_NAME}: the checkpoint is already quantized "
            f"({config['quantization_config']}); start from the bf16 one"
        )
    try:
        linears = MODELS[model_class].linears(config)
    except (KeyError, TypeError) as error:
        raise QuantizeError(f"{layout.transformer / CONFIG_NAME}: missing or unusable setting {error}") from error
    tensors = read_checkpoint(layout.transformer)
    _check_tensors(layout, tensors, linears)
    kept = _kept_layers(linears, options)
    items = [
        _Item(info, quantize=layer in linears and layer not in kept and name == f"{layer}.weight")
        for name, info in tensors.items()
        for layer in [name.removesuffix(".weight")]
    ]
    if not any(item.quantize for item in items):
        raise QuantizeError("the patterns exclude every layer: there is nothing to quantize")
    # Any other matrix is listed too: were it a linear of a variant unknown here, SGLang must not expect codes.
    matrices = [item.source.name for item in items if len(item.source.shape) == 2 and not item.quantize]
    names = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    return _Plan(
        layout=layout,
        config=config,
        shards=_pack(items, options.max_shard_bytes),
        quantized=tuple(item.source.name.removesuffix(".weight") for item in items if item.quantize),
        kept=kept,
        not_converted=[linears[name].prefix or name if name in linears else name for name in names],
        fingerprint=_fingerprint(layout, options),
    )


def _find_layout(source: Path) -> _Layout:
    if not source.is_dir():
        raise QuantizeError(f"{source} is not a directory; download the checkpoint first and name its directory")
    if (source / "model_index.json").is_file():
        return _Layout(source, is_pipeline=True)
    if (source / CONFIG_NAME).is_file():
        return _Layout(source, is_pipeline=False)
    raise QuantizeError(f"{source} holds neither model_index.json (a pipeline) nor config.json (a transformer)")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise QuantizeError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise QuantizeError(f"{path} is not a JSON object")
    return content


def _check_tensors(layout: _Layout, tensors: Mapping[str, TensorInfo], linears: Mapping[str, Linear]) -> None:
    """The headers against the config, and against the notion of an unquantized checkpoint."""
    for info in tensors.values():
        if info.dtype in QUANTIZED_DTYPES or info.name.endswith(("weight_scale", "weight_scale_inv")):
            raise QuantizeError(
                f"{info.file}: tensor '{info.name}' ({info.dtype}) says that the checkpoint is already quantized; "
                "start from the bf16 one"
            )
    for name, linear in linears.items():
        expected = (linear.out_features, linear.in_features)
        found = tensors.get(f"{name}.weight")
        if found is None:
            raise QuantizeError(
                f"{layout.transformer} has no tensor '{name}.weight', which its {CONFIG_NAME} calls for "
                f"(shape {expected})"
            )
        if found.shape != expected:
            raise QuantizeError(
                f"{found.file}: tensor '{found.name}' has shape {found.shape}, but {CONFIG_NAME} calls for {expected}"
            )
        if found.dtype not in SOURCE_DTYPES:
            raise QuantizeError(
                f"{found.file}: tensor '{found.name}' is {found.dtype}, not one of {', '.join(SOURCE_DTYPES)}"
            )


def _kept_layers(linears: Mapping[str, Linear], options: QuantizeOptions) -> dict[str, str]:
    """Layer -> why it is not quantized. Raises QuantizeError for a pattern that decides nothing."""
    for pattern in options.include + options.exclude:
        matches = [name for name in linears if fnmatchcase(name, pattern)]
        if not matches:
            examples = ", ".join([*linears][:2] + [*linears][-2:])
            raise QuantizeError(f"'{pattern}' matches no linear layer; they are named like {examples}")
        obstacles = [linears[name].obstacle() for name in matches]
        if pattern in options.include and all(obstacles):
            raise QuantizeError(f"'{matches[0]}' (of '{pattern}') cannot be quantized: {obstacles[0]}")

    def reason(name: str, linear: Linear) -> str | None:
        if any(fnmatchcase(name, pattern) for pattern in options.exclude):
            return "excluded"
        included = linear.role == "block" or any(fnmatchcase(name, pattern) for pattern in options.include)
        return linear.obstacle() or (None if included else "kept by default")

    return {name: why for name, linear in linears.items() if (why := reason(name, linear))}


def _pack(items: list[_Item], max_shard_bytes: int) -> dict[str, list[_Item]]:
    """File name -> items, in the order of the source; a weight and its scale stay together."""
    shards: list[list[_Item]] = [[]]
    room = max_shard_bytes
    for item in items:
        if shards[-1] and item.output_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(item)
        room -= item.output_bytes
    return {
        f"diffusion_pytorch_model-{number:05}-of-{len(shards):05}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def _fingerprint(layout: _Layout, options: QuantizeOptions) -> dict[str, Any]:
    """What a resumed run must have in common with the interrupted one."""
    files = [layout.root / file for file in layout.carried()]
    files += [path for path in layout.transformer.iterdir() if path.suffix in WEIGHT_SUFFIXES | {".json"}]
    stats = {str(path.relative_to(layout.root)): path.stat() for path in sorted(set(files))}
    return {
        "version": 1,
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "options": {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()
        },
    }


# --- the partial directory and its journal ------------------------------------------------------------------


@dataclass
class _Journal:
    """What has been finished in a partial directory."""

    path: Path
    fingerprint: dict[str, Any]
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> sha256 of the file, and the error of its worst layer."""

    def save(self) -> None:
        unfinished = self.path.with_name(self.path.name + ".tmp")
        unfinished.write_text(json.dumps({"fingerprint": self.fingerprint, "shards": self.shards}, indent=1))
        publish(unfinished, self.path)


@contextmanager
def _open_partial(destination: Path, fingerprint: dict[str, Any]) -> Iterator[tuple[Path, _Journal]]:
    """The directory in which `destination` comes about, locked, with the journal of what is already there."""
    partial = destination.with_name(destination.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuantizeError(f"another process is writing {partial}") from None
        journal = _load_journal(partial, fingerprint)
        try:
            yield partial, journal
        except (QuantizeError, SafetensorsError):
            shutil.rmtree(partial)
            raise
    finally:
        os.close(handle)


def _load_journal(partial: Path, fingerprint: dict[str, Any]) -> _Journal:
    journal = _Journal(partial / JOURNAL_NAME, fingerprint)
    if not journal.path.exists():
        if any(path.suffix != ".tmp" for path in partial.iterdir()):
            raise QuantizeError(f"{partial} is in the way and was not left by an interrupted run; remove it")
        journal.save()
        return journal
    try:
        recorded = json.loads(journal.path.read_text())
        before, journal.shards = recorded["fingerprint"], recorded["shards"]
        changes = [
            f"{part} '{key}': {before[part].get(key)} then, {fingerprint[part].get(key)} now"
            for part in ("source", "options")
            for key in sorted(before[part].keys() | fingerprint[part].keys())
            if before[part].get(key) != fingerprint[part].get(key)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QuantizeError(f"{journal.path} is damaged ({error!r}); remove {partial} to start over") from error
    if changes or before.get("version") != fingerprint["version"]:
        raise QuantizeError(
            f"{partial} was left by a run over another source or with other options ({'; '.join(changes)}); "
            "remove it to start over"
        )
    return journal


# --- writing ------------------------------------------------------------------------------------------------


class _Progress:
    """Adds up the bytes that are done."""

    def __init__(self, callback: Callable[[ProgressEvent], None] | None, shards: int, total_bytes: int) -> None:
        self.callback = callback
        self.shards = shards
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.shard = 0

    def finished(self, phase: Literal["quantize", "check", "resume", "carry"], item: str, size: int) -> None:
        self.done_bytes += size
        if self.callback:
            self.callback(ProgressEvent(phase, item, self.shard, self.shards, self.done_bytes, self.total_bytes))


def _write(plan: _Plan, partial: Path, journal: _Journal, progress: _Progress) -> int:
    """Completes the partial directory; returns how many shards were there already."""
    layout = _Layout(partial, plan.layout.is_pipeline)
    layout.transformer.mkdir(exist_ok=True)
    for path in layout.transformer.iterdir():  # left by a run that was killed, some of it by the library
        if path.is_file() and path != journal.path and path.name not in journal.shards:
            path.unlink()
    resumed = 0
    for name, items in plan.shards.items():
        path = layout.transformer / name
        progress.shard += 1
        if name in journal.shards and path.is_file() and _sha256(path) == journal.shards[name]["sha256"]:
            resumed += 1
            progress.finished("resume", name, 2 * sum(item.source.nbytes for item in items))
        else:
            _write_shard(path, items, progress)
            error, layer = _check_shard(path, items, progress)
            journal.shards[name] = {"sha256": _sha256(path), "error": error, "layer": layer}
            journal.save()
    progress.shard = 0
    for file in plan.layout.carried():
        _carry(plan.layout.root / file, partial / file)
        progress.finished("carry", str(file), (partial / file).stat().st_size)
    _write_config_and_index(plan, layout.transformer)
    return resumed


def _write_shard(path: Path, items: list[_Item], progress: _Progress) -> None:
    needed, free = sum(item.output_bytes for item in items), shutil.disk_usage(path.parent).free
    if free < needed:
        raise OSError(f"{path} needs {needed} bytes, but its disk has only {free} left")
    outputs: dict[str, torch.Tensor] = {}
    for item in items:
        name, tensor = item.source.name, load_tensor(item.source)
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            bad = tensor.isfinite().logical_not().nonzero()
            raise QuantizeError(
                f"{item.source.file}: tensor '{name}' has {len(bad)} NaN or infinite values, "
                f"the first at {bad[0].tolist()}"
            )
        if item.quantize:
            outputs[name], outputs[item.scale_name] = quantize_block_fp8(tensor)
        else:
            outputs[name] = tensor
        progress.finished("quantize", name, item.source.nbytes)
    write_file(path, outputs)


def _check_shard(path: Path, items: list[_Item], progress: _Progress) -> tuple[float, str]:
    """Reads the file back and compares it with the source; returns the largest relative error and its layer."""
    written = read_header(path)
    expected = {name: output for item in items for name, output in item.outputs().items()}
    if {name: (info.dtype, info.shape) for name, info in written.items()} != expected:
        raise QuantizeError(f"{path} does not hold the tensors that were written to it")
    worst = (0.0, "")
    for item in items:
        source, output = load_tensor(item.source), load_tensor(written[item.source.name])
        if item.quantize:
            error = relative_error(source, output, load_tensor(written[item.scale_name]))
            if error is None:
                raise QuantizeError(f"{path}: tensor '{item.source.name}' is not what its source quantizes to")
            worst = max(worst, (error, item.source.name.removesuffix(".weight")))
        elif not torch.equal(source.reshape(-1).view(torch.uint8), output.reshape(-1).view(torch.uint8)):
            raise QuantizeError(f"{path}: tensor '{item.source.name}' differs from its source")
        progress.finished("check", item.source.name, item.source.nbytes)
    return worst


def _write_config_and_index(plan: _Plan, transformer: Path) -> None:
    config = plan.config | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plan.not_converted,
        }
    }
    outputs = {name: out for items in plan.shards.values() for item in items for name, out in item.outputs().items()}
    weight_map = {
        name: shard for shard, items in plan.shards.items() for item in items for name in sorted(item.outputs())
    }
    index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": weight_map}
    (transformer / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    (transformer / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    written = read_checkpoint(transformer)
    if {name: (info.dtype, info.shape) for name, info in written.items()} != outputs:
        raise QuantizeError(f"{transformer / INDEX_NAME} does not describe the tensors of the checkpoint")
    if sum(info.nbytes for info in written.values()) != plan.output_bytes:
        raise QuantizeError(f"{transformer / INDEX_NAME}: total_size is not the size of the tensors")


def _carry(source: Path, target: Path) -> None:
    """Weights as hard links where possible; the rest as copies, since people edit it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if source.suffix in WEIGHT_SUFFIXES:
        try:
            target.hardlink_to(source.resolve())
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _warnings(plan: _Plan, destination: Path) -> tuple[str, ...]:
    model = MODELS[plan.config["_class_name"]]
    warnings = [model.note] if model.note else []
    if plan.layout.is_pipeline and model.name_hint not in destination.name.lower():
        warnings.append(
            f"'{destination.name}' does not contain '{model.name_hint}', by which SGLang recognises the model: it "
            "would fall back to the diffusers backend; rename the directory or pass --model-id"
        )
    return tuple(warnings)
