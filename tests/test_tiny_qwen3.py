"""The small Qwen3 that `scripts/make_tiny_checkpoint.py` writes: the same bytes for a seed, and SGLang reads it."""

import sys
from pathlib import Path

import pytest
import torch
from engine import ROOT, run
from safetensors.torch import load_file
from sglang_fastpath.loaders.quantize import dequantize_block_fp8
from transformers import AutoConfig, AutoTokenizer


def write(folder: Path, seed: int) -> Path:
    script = ROOT / "scripts" / "make_tiny_checkpoint.py"
    run([sys.executable, str(script), str(folder), "--model", "qwen3", "--seed", str(seed)])
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen3") / "a", 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_the_same_bytes_for_a_seed_and_others_for_another(checkpoint: Path, tmp_path: Path) -> None:
    assert contents(write(tmp_path / "b", 0)) == contents(checkpoint)
    ours, others = (load_file(folder / "model.safetensors") for folder in (checkpoint, write(tmp_path / "c", 1)))
    assert ours.keys() == others.keys()
    assert not [name for name, tensor in ours.items() if tensor.float().equal(others[name].float())]


def test_every_linear_of_a_layer_is_in_block_fp8_and_nothing_else(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    quantized = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    linears = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert quantized == {f"model.layers.{layer}.{linear}.weight" for layer in range(2) for linear in linears}
    for name in quantized:
        weight, scale = tensors[name], tensors[f"{name}_scale_inv"]
        assert (weight.shape[0] // 128, weight.shape[1] // 128) == scale.shape
        assert dequantize_block_fp8(weight, scale).std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05)
    rest = {name: tensor for name, tensor in tensors.items() if name not in quantized and "scale" not in name}
    assert {tensor.dtype for tensor in rest.values()} == {torch.bfloat16}


def test_transformers_and_sglang_read_config_and_tokenizer_without_a_hub(checkpoint: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    config = AutoConfig.from_pretrained(str(checkpoint))
    assert (config.model_type, config.head_dim, config.num_hidden_layers) == ("qwen3", 128, 2)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    assert tokenizer.decode(tokenizer("a cat in the rain")["input_ids"]) == "a cat in the rain"
    assert len(tokenizer) == config.vocab_size
    read = ModelConfig(str(checkpoint))
    assert (read.hf_config.architectures, read.quantization) == (["Qwen3ForCausalLM"], "fp8")
    assert (read.head_dim, read.num_attention_heads, read.get_total_num_kv_heads()) == (128, 4, 2)
