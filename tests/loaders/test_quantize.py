"""Quantized checkpoints: arithmetic, files, refusals, interruptions, memory, and SGLang's own loader.

Run as a script, it loads checkpoints with the SGLang found on PYTHONPATH and prints what became of each layer:

    PYTHONPATH=.releases/0.5.23:. python tests/loaders/test_quantize.py PIPELINE MODEL_ID [PIPELINE MODEL_ID ...]
"""

import fcntl
import json
import math
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel, QwenImageTransformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sglang_fastpath.loaders.quantize import (
    MODELS,
    ProgressEvent,
    QuantizeError,
    QuantizeOptions,
    QuantizeReport,
    dequantize_block_fp8,
    parse_size,
    quantize_block_fp8,
    quantize_checkpoint,
    relative_error,
)
from sglang_fastpath.loaders.safetensors_stream import INDEX_NAME, load_tensor, read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "_class_name": "QwenImageTransformer2DModel",
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 1,
    "num_attention_heads": 1,
    "attention_head_dim": 128,
    "joint_attention_dim": 128,
}
IMAGE_UP = "transformer_blocks.0.img_mlp.net.0.proj.weight"


# --- arithmetic ---------------------------------------------------------------------------------------------


def e4m3_values() -> torch.Tensor:
    """The 127 non-negative finite numbers of the format, by code, from its definition: 4 exponent bits, bias 7."""
    values = [
        mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        for exponent in range(16)
        for mantissa in range(8)
    ]
    return torch.tensor(values[:-1], dtype=torch.float64)  # the last code is NaN


def nearest_code(magnitudes: torch.Tensor) -> torch.Tensor:
    """Code of the nearest e4m3 number; halfway between two, that with the even code."""
    values = e4m3_values()
    middle = (values[1:] + values[:-1]) / 2
    below, above = torch.searchsorted(middle, magnitudes), torch.searchsorted(middle, magnitudes, right=True)
    return torch.where(below % 2 == 0, below, above)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-130, 100),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    zero_rows=st.integers(0, 300),
)
def test_quantization_is_nearest_per_block(
    rows: int, columns: int, seed: int, exponent: int, dtype: torch.dtype, zero_rows: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64).mul(2.0**exponent).to(dtype)
    weight[:zero_rows] = 0
    quantized, scale = quantize_block_fp8(weight)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == (rows, columns)
    assert scale.dtype == torch.float32 and scale.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    restored = dequantize_block_fp8(quantized, scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            block = weight[at].to(torch.float32)
            expected_scale = max(block.abs().max() / torch.tensor(448.0), torch.tensor(2.0**-126))
            assert scale[i, j] == expected_scale
            codes = quantized[at].view(torch.uint8).to(torch.int64)
            expected = nearest_code((block / expected_scale).abs().double().clamp(max=448))
            assert torch.equal(codes & 127, expected)
            assert torch.equal(codes >= 128, torch.signbit(block))
            exact = e4m3_values()[codes & 127] * torch.where(codes >= 128, -1.0, 1.0) * expected_scale.double()
            assert torch.equal(restored[at], exact.float())
            tolerance = torch.maximum(block.abs() / 16, expected_scale / 1024).double() * (1 + 2**-18)
            assert ((exact - block.double()).abs() <= tolerance).all()
    assert relative_error(weight, quantized, scale) is not None


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 3.7e-3, 2.0**-126, 1e30])
def test_halfway_values_go_to_the_even_code(scale: float) -> None:
    """All values between two neighbours, and the largest, which fixes the scale."""
    values = e4m3_values()
    halfway = torch.cat([(values[1:] + values[:-1]) / 2, values[-1:]])
    weight = torch.stack([halfway, -halfway]).mul(scale).float()
    quantized, block_scale = quantize_block_fp8(weight)
    codes = quantized.view(torch.uint8).to(torch.int64) & 127
    ratio = (weight / block_scale).abs().double().clamp(max=448)
    assert torch.equal(codes, nearest_code(ratio))
    if math.frexp(scale)[0] == 0.5:  # a power of two: the halfway values are met exactly
        assert torch.equal(codes[0, :-1] % 2, torch.zeros(126, dtype=torch.int64))
    assert relative_error(weight, quantized, block_scale) is not None


@pytest.mark.parametrize("rows", [256, 257, 600, 768])
def test_bands_of_rows_make_no_difference(rows: int) -> None:
    weight = torch.randn(rows, 3000, generator=torch.Generator().manual_seed(0))
    quantized, scale = quantize_block_fp8(weight)
    for top in range(0, rows, 128):
        block, block_scale = quantize_block_fp8(weight[top : top + 128])
        assert torch.equal(quantized[top : top + 128].view(torch.uint8), block.view(torch.uint8))
        assert torch.equal(scale[top // 128], block_scale[0])


@pytest.mark.parametrize(("row", "column"), [(0, 0), (599, 2999), (130, 127), (256, 5)])
def test_relative_error_notices_one_wrong_code(row: int, column: int) -> None:
    weight = torch.randn(600, 3000, generator=torch.Generator().manual_seed(0))
    quantized, scale = quantize_block_fp8(weight)
    error = relative_error(weight, quantized, scale)
    assert error is not None and 0.01 < error < 0.05
    quantized.view(torch.uint8)[row, column] ^= 8  # the lowest exponent bit
    assert relative_error(weight, quantized, scale) is None


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("700", 700), ("2k", 2000), ("9B", 9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "5iB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(QuantizeError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (QwenImageTransformer2DModel, {}),
        (Flux2Transformer2DModel, {}),
        (Flux2Transformer2DModel, {"guidance_embeds": False}),
    ],
)
def test_layer_tables_are_those_of_the_full_size_models(model: Any, settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        real = model(**settings)
    linears = MODELS[model.__name__].linears(real.config)
    matrices = {name: tuple(p.shape) for name, p in real.named_parameters() if p.ndim == 2}
    assert {f"{name}.weight": (row.out_features, row.in_features) for name, row in linears.items()} == matrices
    assert all(row.obstacle() is None for row in linears.values() if row.role == "block")


# --- whole checkpoints --------------------------------------------------------------------------------------


def small_tensors(config: dict[str, Any] = SMALL) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"txt_norm.weight": torch.ones(config["joint_attention_dim"], dtype=torch.bfloat16)}
    for name, linear in MODELS[config["_class_name"]].linears(config).items():
        shape = (linear.out_features, linear.in_features)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
        tensors[f"{name}.bias"] = torch.randn(linear.out_features, generator=generator).bfloat16()
    return tensors


def write_source(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = SMALL, shards: int = 2
) -> Path:
    """A transformer directory with its tensors dealt out to several files."""
    folder.mkdir(parents=True)
    weight_map = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in weight_map if weight_map[name] == shard}, folder / shard)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", small_tensors())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def make_tiny() -> Callable[..., None]:
    main: Callable[..., None] = runpy.run_path(str(ROOT / "scripts/make_tiny_checkpoint.py"))["main"]
    return main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, make_tiny: Callable[..., None]) -> Path:
    """Pipelines `Qwen-Image` and `FLUX.2-dev`; of the second only the transformer is there."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny([str(folder / "Qwen-Image"), "--model", "qwen-image"])
    make_tiny([str(folder / "FLUX.2-dev/transformer"), "--model", "flux2"])
    index = {"_class_name": "Flux2Pipeline", "transformer": ["diffusers", "Flux2Transformer2DModel"]}
    (folder / "FLUX.2-dev/model_index.json").write_text(json.dumps(index))
    return folder


def test_tiny_checkpoints_are_deterministic_sharded_and_small(
    tiny: Path, tmp_path: Path, make_tiny: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    first = contents(tiny / "Qwen-Image")
    make_tiny([str(tmp_path / "again"), "--model", "qwen-image"])
    assert contents(tmp_path / "again") == first
    assert "'again' does not contain 'qwen-image'" in capsys.readouterr().err
    make_tiny([str(tmp_path / "my-qwen-image-2"), "--model", "qwen-image", "--seed", "1"])
    other = contents(tmp_path / "my-qwen-image-2")
    assert "warning" not in capsys.readouterr().err
    assert other.keys() == first.keys() and other != first
    assert sum(map(len, first.values())) < 40e6
    with pytest.raises(SystemExit):
        make_tiny([str(tmp_path / "again"), "--model", "qwen-image"])
    for transformer in (tiny / "Qwen-Image/transformer", tiny / "FLUX.2-dev/transformer"):
        tensors = read_checkpoint(transformer).values()
        assert len({info.file for info in tensors}) >= 2 and {info.dtype for info in tensors} == {"BF16"}


def test_pipeline_comes_out_complete(tiny: Path, tmp_path: Path) -> None:
    source, destination = tmp_path / "Qwen-Image", tmp_path / "new/Qwen-Image-fp8"
    shutil.copytree(tiny / "Qwen-Image", source)
    (source / "qwen-image.safetensors").write_bytes(b"the whole model once more")
    (source / "transformer/diffusion_pytorch_model.fp16.safetensors").write_bytes(b"a variant")
    (source / "transformer/NOTICE").write_text("notice")
    (source / ".cache").mkdir()
    (source / ".cache/download").write_text("")
    events: list[ProgressEvent] = []
    options = QuantizeOptions(max_shard_bytes=2_000_000)
    report = quantize_checkpoint(source, destination, options=options, progress=events.append)

    before, after = contents(source), contents(destination)
    dropped = {"qwen-image.safetensors", ".cache/download"}
    carried = {name for name in before if name not in dropped and not name.startswith("transformer/")}
    assert {name: after[name] for name in carried} == {name: before[name] for name in carried}
    assert (destination / "vae/diffusion_pytorch_model.safetensors").stat().st_nlink == 2
    assert (destination / "vae/config.json").stat().st_nlink == 1
    weights = {f"transformer/diffusion_pytorch_model-0000{i}-of-0000{report.shards}.safetensors" for i in range(1, 6)}
    rest = {"transformer/config.json", f"transformer/{INDEX_NAME}", "transformer/NOTICE"}
    assert after.keys() == carried | weights | rest
    assert all(len(after[name]) < 2_000_000 + 10_000 for name in weights)
    modes = {path.stat().st_mode & 0o777 for path in (destination / "transformer").iterdir()}
    assert len(modes) == 1, "weights must be as readable as the config"

    index = json.loads(after[f"transformer/{INDEX_NAME}"])
    assert index["metadata"]["total_size"] == report.bytes_after
    sizes = (tensor.nbytes for name in weights for tensor in load_file(destination / name).values())
    assert sum(sizes) == report.bytes_after < report.bytes_before
    assert [event.done_bytes for event in events] == sorted(event.done_bytes for event in events)
    assert events[-1].done_bytes == events[-1].total_bytes
    assert {event.phase for event in events} == {"quantize", "check", "carry"}
    assert {event.shard for event in events if event.phase == "check"} == set(range(1, report.shards + 1))
    assert report.warnings == () and report.resumed_shards == 0 and 0.01 < report.max_relative_error < 0.05


def test_every_tensor_is_the_quantized_or_the_same_one(source: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(source, tmp_path / "out")
    tensors, written = small_tensors(), read_checkpoint(tmp_path / "out")
    layers = [
        name.removesuffix(".weight") for name in tensors if ".attn.to" in name or "add_" in name or "_mlp" in name
    ]
    assert set(report.quantized) == {layer for layer in layers if not layer.endswith(".bias")}
    for layer in report.quantized:
        quantized, scale = quantize_block_fp8(tensors.pop(f"{layer}.weight"))
        assert torch.equal(load_tensor(written.pop(f"{layer}.weight")).view(torch.uint8), quantized.view(torch.uint8))
        assert torch.equal(load_tensor(written.pop(f"{layer}.weight_scale_inv")), scale)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert load_tensor(written[name]).dtype == torch.bfloat16 and torch.equal(load_tensor(written[name]), tensor)


def test_patterns_choose_layers(source: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(include=("*_mod.1", "???_in"), exclude=("*.attn.*", "*txt_mod*"))
    report = quantize_checkpoint(source, tmp_path / "out", options=options)
    block = "transformer_blocks.0"
    mlps = {f"{block}.{stream}_mlp.net.{part}" for stream in ("img", "txt") for part in ("0.proj", "2")}
    assert set(report.quantized) == mlps | {"txt_in", f"{block}.img_mod.1"}
    assert report.kept["img_in"] == "input size 64 is not a multiple of 128, the group of the activations"
    assert report.kept[f"{block}.attn.to_q"] == report.kept[f"{block}.txt_mod.1"] == "excluded"
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    kept = config.pop("modules_to_not_convert")
    assert config == {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert f"{block}.txt_mod" in kept and "txt_in" not in kept and len(kept) == len(report.kept)


def test_fp32_sources_and_unknown_matrices(tmp_path: Path) -> None:
    tensors = {name: tensor.float() for name, tensor in small_tensors().items()}
    tensors |= {"new.projection.weight": torch.ones(128, 128), "counter": torch.tensor(3)}
    report = quantize_checkpoint(write_source(tmp_path / "source", tensors), tmp_path / "out")
    written = read_checkpoint(tmp_path / "out")
    assert written["new.projection.weight"].dtype == "F32" and load_tensor(written["counter"]) == 3
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "new.projection" in config["modules_to_not_convert"]
    bf16 = quantize_checkpoint(write_source(tmp_path / "bf16", small_tensors()), tmp_path / "out-bf16")
    assert bf16.quantized == report.quantized
    same = load_tensor(read_checkpoint(tmp_path / "out-bf16")[IMAGE_UP]).view(torch.uint8)
    assert torch.equal(load_tensor(written[IMAGE_UP]).view(torch.uint8), same)


def test_single_file_source(source: Path, tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(source / "config.json", single)
    save_file(small_tensors(), single / "diffusion_pytorch_model.safetensors")
    quantize_checkpoint(source, tmp_path / "from-shards")
    quantize_checkpoint(single, tmp_path / "from-single")
    shards, whole = read_checkpoint(tmp_path / "from-shards"), read_checkpoint(tmp_path / "from-single")
    assert shards.keys() == whole.keys()
    for name in shards:
        assert torch.equal(load_tensor(shards[name]).view(torch.uint8), load_tensor(whole[name]).view(torch.uint8))


def test_unmergeable_layers_stay_and_flux2_says_what_tensor_parallelism_needs(tmp_path: Path) -> None:
    config = {
        "_class_name": "Flux2Transformer2DModel",
        "patch_size": 1,
        "in_channels": 128,
        "out_channels": None,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 1,
        "attention_head_dim": 128,
        "joint_attention_dim": 64,
        "timestep_guidance_channels": 256,
        "mlp_ratio": 2.5,
    }
    root = tmp_path / "pipeline"
    write_source(root / "transformer", small_tensors(config | {"joint_attention_dim": 64}), config)
    (root / "model_index.json").write_text("{}")
    report = quantize_checkpoint(root, tmp_path / "out")
    assert "merged output sizes (320, 320)" in report.kept["transformer_blocks.0.ff.linear_in"]
    assert (
        "merged output sizes (128, 128, 128, 320, 320)"
        in report.kept["single_transformer_blocks.0.attn.to_qkv_mlp_proj"]
    )
    assert "input size 448" in report.kept["single_transformer_blocks.0.attn.to_out"]
    assert set(report.quantized) == {name for name in report.quantized if ".attn." in name} and report.quantized
    assert any("--tp-size" in warning for warning in report.warnings)
    assert any("'out' does not contain 'flux.2'" in warning for warning in report.warnings)


# --- refusals -----------------------------------------------------------------------------------------------


def rewrite(source: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """Replaces a tensor in its file, or drops it; returns the file."""
    file: Path = read_checkpoint(source)[name].file
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed.contiguous()}, file)
    return file


def refused(source: Path, tmp_path: Path, **options: Any) -> str:
    """The message with which a source is refused; nothing must be left behind."""
    with pytest.raises(QuantizeError) as refusal:
        quantize_checkpoint(source, tmp_path / "out", options=QuantizeOptions(**options))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    return str(refusal.value)


def test_destination_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    destination.mkdir()
    with pytest.raises(QuantizeError, match="exists and is not overwritten; remove it or choose"):
        quantize_checkpoint(source, destination)
    assert not list(destination.iterdir())
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(QuantizeError, match="exists and is not overwritten"):
        quantize_checkpoint(source, tmp_path / "dangling")
    with pytest.raises(QuantizeError, match="lies inside the source"):
        quantize_checkpoint(source, source / "fp8")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [IMAGE_UP, "txt_in.bias"])
def test_values_that_are_not_finite(source: Path, tmp_path: Path, name: str, value: float) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[-1:] = value
        return tensor

    file = rewrite(source, name, spoil)
    count, first = (128, [511, 0]) if name == IMAGE_UP else (1, [127])
    message = refused(source, tmp_path, max_shard_bytes=100_000)
    assert message == f"{file}: tensor '{name}' has {count} NaN or infinite values, the first at {first}"


def test_truncated_files(source: Path, tmp_path: Path) -> None:
    last = max((info for info in read_checkpoint(source).values()), key=lambda info: info.name)
    data = last.file.read_bytes()
    last.file.write_bytes(data[:-1])
    message = refused(source, tmp_path)
    assert str(last.file) in message and "is truncated: tensor '" in message
    for cut in (0, 7, 100):
        last.file.write_bytes(data[:cut])
        assert str(last.file) in (message := refused(source, tmp_path)) and "truncated" in message
    last.file.write_bytes(data + b"more")
    assert f"{last.file} is not a readable safetensors file" in refused(source, tmp_path)
    last.file.write_bytes(data[:8] + b"x" * (len(data) - 8))
    assert f"{last.file} is not a readable safetensors file" in refused(source, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor[:-1], "has shape (511, 128), but config.json calls for (512, 128)"),
        (lambda tensor: tensor.T, "has shape (128, 512), but config.json calls for (512, 128)"),
        (lambda tensor: tensor.flatten(), "has shape (65536,), but config.json calls for (512, 128)"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), "(F8_E4M3) says that the checkpoint is already quantized"),
        (lambda tensor: tensor.double(), "is F64, not one of BF16, F16, F32"),
    ],
)
def test_tensors_of_the_wrong_kind(
    source: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    file = rewrite(source, IMAGE_UP, change)
    assert f"{file}: tensor '{IMAGE_UP}' {message}" in refused(source, tmp_path)


def test_index_and_files_that_disagree(source: Path, tmp_path: Path) -> None:
    index = source / INDEX_NAME
    original = json.loads(index.read_text())["weight_map"]

    def write(weight_map: dict[str, str]) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    write(original | {"ghost.weight": "part-0.safetensors"})
    assert f"puts tensor 'ghost.weight' into 'part-0.safetensors', but {source}/part-0" in refused(source, tmp_path)
    write(original | {"ghost.weight": "../part-9.safetensors"})
    assert "puts tensor 'ghost.weight' into '../part-9.safetensors', but there is no" in refused(source, tmp_path)
    write({name: shard for name, shard in original.items() if name != "txt_in.bias"})
    assert "holds tensor 'txt_in.bias', which" in refused(source, tmp_path)
    write(original)
    (source / "part-1.safetensors").rename(tmp_path / "part-1.safetensors")
    assert "into 'part-1.safetensors', but there is no file" in refused(source, tmp_path)
    (tmp_path / "part-1.safetensors").rename(source / "part-1.safetensors")
    index.write_text("{")
    assert f"{index} is not a readable index" in refused(source, tmp_path)
    index.unlink()
    assert f"holds neither {INDEX_NAME} nor" in refused(source, tmp_path)


def test_tensors_that_the_config_calls_for(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(json.dumps(SMALL | {"num_layers": 2}))
    message = refused(source, tmp_path)
    assert "has no tensor 'transformer_blocks.1.attn.to_q.weight', which its config.json calls for" in message


def test_sources_that_are_not_a_known_unquantized_model(source: Path, tmp_path: Path) -> None:
    config = source / "config.json"
    quantized = SMALL | {"quantization_config": {"quant_method": "fp8"}}
    for content, message in [
        (quantized, "the checkpoint is already quantized ({'quant_method': 'fp8'})"),
        (SMALL | {"_class_name": "FluxTransformer2DModel"}, "known: QwenImageTransformer2DModel, Flux2Trans"),
        ({name: value for name, value in SMALL.items() if name != "num_layers"}, "unusable setting 'num_layers'"),
        ([], "is not a JSON object"),
    ]:
        config.write_text(json.dumps(content))
        assert message in (text := refused(source, tmp_path)) and str(config) in text
    config.write_text("{")
    assert "is not readable JSON" in refused(source, tmp_path)
    config.unlink()
    assert "holds neither model_index.json" in refused(source, tmp_path)
    (source / "model_index.json").write_text("{}")
    assert "transformer/config.json is not readable" in refused(source, tmp_path)
    assert "is not a directory; download" in refused(tmp_path / "Qwen/Qwen-Image", tmp_path)


def test_quantized_output_is_refused_as_source(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "fp8")
    (tmp_path / "fp8/config.json").write_text(json.dumps(SMALL))
    assert "already quantized" in refused(tmp_path / "fp8", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ("*.to_qq",)}, "'*.to_qq' matches no linear layer; they are named like img_in"),
        ({"include": ("norm_out.*",)}, "'norm_out.linear' (of 'norm_out.*') cannot be quantized: SGLang builds"),
        ({"exclude": ("*",)}, "there is nothing to quantize"),
        ({"max_shard_bytes": 0}, "must be positive, not 0"),
    ],
)
def test_options_that_make_no_sense(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    assert message in refused(source, tmp_path, **options)


# --- interruptions ------------------------------------------------------------------------------------------

SHARDED = QuantizeOptions(max_shard_bytes=100_000)

INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from sglang_fastpath.loaders.quantize import QuantizeOptions, quantize_checkpoint

def progress(event):
    if (event.phase, event.shard) == (sys.argv[3], int(sys.argv[4])):
        os.kill(os.getpid(), signal.SIGKILL)

options = QuantizeOptions(max_shard_bytes=int(sys.argv[5]))
quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), options=options, progress=progress)
"""


def python(*arguments: object, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, [path]), str(ROOT)])}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)


def stop_at(phase: str, shard: int) -> Callable[[ProgressEvent], None]:
    def progress(event: ProgressEvent) -> None:
        if (event.phase, event.shard) == (phase, shard):
            raise KeyboardInterrupt

    return progress


def interrupt(source: Path, destination: Path, phase: str = "quantize", shard: int = 3) -> Path:
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, destination, options=SHARDED, progress=stop_at(phase, shard))
    assert not destination.exists()
    return destination.with_name(destination.name + ".partial")


def test_killed_runs_continue_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    whole = quantize_checkpoint(source, tmp_path / "whole", options=SHARDED)
    assert whole.shards > 5
    destination, partial = tmp_path / "out", tmp_path / "out.partial"
    for phase, shard in [("check", 2), ("quantize", 4)]:
        killed = python("-c", INTERRUPTED, source, destination, phase, shard, SHARDED.max_shard_bytes)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert partial.is_dir() and not destination.exists()
    (partial / ".tmpAbCdEf").write_bytes(b"what the safetensors library leaves when it is killed")
    finished = partial / f"diffusion_pytorch_model-00001-of-{whole.shards:05}.safetensors"
    written_at = finished.stat().st_mtime_ns
    events: list[ProgressEvent] = []
    report = quantize_checkpoint(source, destination, options=SHARDED, progress=events.append)
    assert report.resumed_shards == 3
    assert [event.shard for event in events if event.phase == "resume"] == [1, 2, 3]
    assert events[-1].done_bytes == events[-1].total_bytes
    assert (destination / finished.name).stat().st_mtime_ns == written_at
    assert contents(destination) == contents(tmp_path / "whole") and not partial.exists()
    assert (report.max_relative_error, report.worst_layer) == (whole.max_relative_error, whole.worst_layer)


def test_damaged_finished_shard_is_redone(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "whole", options=SHARDED)
    partial = interrupt(source, tmp_path / "out")
    shard = next(partial.glob("*-00001-of-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    report = quantize_checkpoint(source, tmp_path / "out", options=SHARDED)
    assert report.resumed_shards == 1 and contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_interrupted_run_is_not_continued_from_something_else(source: Path, tmp_path: Path) -> None:
    partial = interrupt(source, tmp_path / "out")
    left = contents(partial)

    def refusal(options: QuantizeOptions = SHARDED) -> str:
        with pytest.raises(QuantizeError, match=f"remove (it|{partial}) to start over") as error:
            quantize_checkpoint(source, tmp_path / "out", options=options)
        assert contents(partial).keys() == left.keys()
        return str(error.value)

    other = refusal(QuantizeOptions(max_shard_bytes=SHARDED.max_shard_bytes, exclude=("*.attn.*",)))
    assert "options 'exclude': [] then, ['*.attn.*'] now" in other
    file = rewrite(source, IMAGE_UP, lambda tensor: tensor * 2)
    assert f"source '{file.name}': [" in refusal()
    (partial / "quantize-journal.json").write_text("{")
    assert "quantize-journal.json is damaged" in refusal()
    shutil.rmtree(partial)
    quantize_checkpoint(source, tmp_path / "out", options=SHARDED)


def test_foreign_directory_in_the_way(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.txt").write_text("precious")
    with pytest.raises(QuantizeError, match="is in the way and was not left by an interrupted run"):
        quantize_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out.partial/thesis.txt").read_text() == "precious"


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    partial = interrupt(source, tmp_path / "out")
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(QuantizeError, match="another process is writing"):
        quantize_checkpoint(source, tmp_path / "out", options=SHARDED)
    os.close(handle)
    assert quantize_checkpoint(source, tmp_path / "out", options=SHARDED).resumed_shards == 2


def test_full_disk_keeps_what_is_finished(source: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk's: the write fails in the same place, with another errno."""
    options = QuantizeOptions(max_shard_bytes=100_000)  # the modulation, 196 kB each, does not fit the limit
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        with pytest.raises(QuantizeError, match=r"cannot write .*the same command continues where it stopped"):
            quantize_checkpoint(source, tmp_path / "out", options=options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(source, tmp_path / "out", options=options)
    assert 0 < report.resumed_shards < report.shards


def test_source_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    def progress(event: ProgressEvent) -> None:
        if (event.phase, event.shard) == ("check", 2):
            os.utime(source / "part-0.safetensors", ns=(1, 1))

    with pytest.raises(QuantizeError, match="changed while it was being quantized"):
        quantize_checkpoint(source, tmp_path / "out", options=SHARDED, progress=progress)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_written_files_are_read_back(source: Path, tmp_path: Path) -> None:
    """One bit flipped in each kind of tensor of a file between its writing and its check."""
    for suffix in ("_mlp.net.2.weight", "_mlp.net.2.weight_scale_inv", ".bias"):
        flipped: list[str] = []

        def progress(event: ProgressEvent, suffix: str = suffix, flipped: list[str] = flipped) -> None:
            if event.phase != "check" or flipped:
                return
            file = next((tmp_path / "out.partial").glob("*.safetensors"))
            data = bytearray(file.read_bytes())
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            name = next(name for name in header if name.endswith(suffix) and event.item not in (name, name[:-10]))
            data[8 + length + header[name]["data_offsets"][1] - 1] ^= 0x40
            file.write_bytes(data)
            flipped.append(name.removesuffix("_scale_inv"))

        with pytest.raises(QuantizeError) as error:
            quantize_checkpoint(source, tmp_path / "out", progress=progress)
        assert f"tensor '{flipped[0]}'" in str(error.value)
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


# --- memory -------------------------------------------------------------------------------------------------

MEASURED = """
import re, sys
from pathlib import Path
from sglang_fastpath.loaders.quantize import QuantizeOptions, quantize_checkpoint

def status(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

small, large, out, shard = sys.argv[1:]
quantize_checkpoint(Path(small), Path(out, "small"))  # brings in every library and thread
Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM is the peak
before = status("VmRSS")
quantize_checkpoint(Path(large), Path(out, "large"), options=QuantizeOptions(max_shard_bytes=int(shard)))
print(status("VmHWM") - before)
"""


def test_memory_stays_below_two_shards(source: Path, tmp_path: Path) -> None:
    config = SMALL | {"num_attention_heads": 8, "num_layers": 3}
    write_source(tmp_path / "source-of-large", small_tensors(config), config, shards=3)
    (tmp_path / "out").mkdir()
    limit = 40_000_000
    measured = python("-c", MEASURED, source, tmp_path / "source-of-large", tmp_path / "out", limit)
    assert measured.returncode == 0, measured.stderr
    shards = [path.stat().st_size for path in (tmp_path / "out/large").glob("*.safetensors")]
    assert len(shards) >= 4
    assert int(measured.stdout) < 2 * max(shards)


# --- SGLang -------------------------------------------------------------------------------------------------


def load_with_sglang(pipeline: Path, model_id: str) -> dict[str, dict[str, Any]]:
    """Loads a pipeline's transformer on the CPU with SGLang's own loader.

    Returns for each module with a quant method: its class, whether it is of block FP8, and which of its parameters
    have the very bytes of the checkpoint; and for the remaining parameters, under "", the same. Only the step after
    loading is left out, which on a CPU asserts AMX and repacks the weights for it.
    """
    from sglang.multimodal_gen.runtime.distributed.parallel_state import (
        maybe_init_distributed_environment_and_model_parallel,
    )
    from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader
    from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    arguments = ServerArgs.from_kwargs(model_path=str(pipeline), model_id=model_id, num_gpus=1, tp_size=1)
    set_global_server_args(arguments)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ["MASTER_PORT"] = str(arguments.master_port)
    address = f"tcp://127.0.0.1:{arguments.master_port}"
    maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=1, distributed_init_method=address)
    Fp8LinearMethod.process_weights_after_loading = lambda self, layer: None
    model = TransformerLoader().load_customized(str(pipeline / "transformer"), arguments, "transformer")

    checkpoint = read_checkpoint(pipeline / "transformer")
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "quant_method")}
    layers: dict[str, dict[str, Any]] = {"": {"parameters": {}}}
    for name, module in modules.items():
        method = module.quant_method
        block_fp8 = getattr(method, "block_quant", False) and method.quant_config.weight_block_size == [128, 128]
        layers[name] = {"method": type(method).__name__, "block_fp8": block_fp8, "parameters": {}}
        if block_fp8:
            stock = block_quant_dequant(module.weight.data, module.weight_scale_inv.data, [128, 128], torch.float32)
            ours = dequantize_block_fp8(module.weight.data, module.weight_scale_inv.data)
            layers[name]["dequantized_alike"] = torch.equal(stock, ours)
    unread = set(checkpoint)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        written = load_tensor(checkpoint[name])
        unread.discard(name)
        same = written.dtype == parameter.dtype and torch.equal(
            written.view(torch.uint8), parameter.detach().view(torch.uint8)
        )
        key, leaf = (owner, leaf) if owner in layers else ("", name)
        layers[key]["parameters"][leaf] = same
    layers[""]["parameters"] |= dict.fromkeys(unread, False)
    return layers


@pytest.fixture(scope="module")
def quantized(tiny: Path) -> dict[Path, tuple[str, QuantizeReport]]:
    """Quantized pipelines, each with its SGLang model id: both models, and one with other layers chosen."""
    qwen, flux, chosen = tiny / "Qwen-Image-fp8", tiny / "FLUX.2-dev-fp8", tiny / "Qwen-Image-chosen"
    options = QuantizeOptions(
        include=("*_mod.1", "txt_in", "proj_out"),
        exclude=("transformer_blocks.1.img_mod.1", "transformer_blocks.0.attn.to_q", "*.txt_mlp.net.2"),
        max_shard_bytes=2_000_000,
    )
    return {
        qwen: ("Qwen-Image", quantize_checkpoint(tiny / "Qwen-Image", qwen)),
        flux: ("FLUX.2-dev", quantize_checkpoint(tiny / "FLUX.2-dev", flux)),
        chosen: ("Qwen-Image", quantize_checkpoint(tiny / "Qwen-Image", chosen, options=options)),
    }


@pytest.mark.parametrize(
    "release", ["", pytest.param("0.5.23", marks=pytest.mark.releases)], ids=["installed", "0.5.23"]
)
def test_stock_sglang_loads_exactly_what_was_written(
    quantized: dict[Path, tuple[str, QuantizeReport]], release: str
) -> None:
    pairs = [argument for pipeline, (model_id, _) in quantized.items() for argument in (pipeline, model_id)]
    child = python(__file__, *pairs, path=str(ROOT / ".releases" / release) if release else "")
    assert child.returncode == 0, child.stderr[-3000:]
    loaded = json.loads(child.stdout.splitlines()[-1])
    assert not release or loaded.pop("version") == release
    for pipeline, (_, report) in quantized.items():
        layers = loaded[str(pipeline)]
        assert all(same for layer in layers.values() for same in layer["parameters"].values())
        del layers[""]
        found = {name for name, layer in layers.items() if layer["block_fp8"]}
        assert found == set(report.quantized)
        for name, layer in layers.items():
            assert layer["method"] == ("Fp8LinearMethod" if name in found else "UnquantizedLinearMethod")
            if name in found:
                assert {"weight", "weight_scale_inv"} <= layer["parameters"].keys() and layer["dequantized_alike"]
            else:
                assert name in report.kept and "weight_scale_inv" not in layer["parameters"]


if __name__ == "__main__":
    import sglang

    results: dict[str, Any] = {"version": sglang.__version__}
    for pipeline, model_id in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        results[pipeline] = load_with_sglang(Path(pipeline), model_id)
    print(json.dumps(results))
