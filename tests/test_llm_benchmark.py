"""`bench llm`, as far as a machine without a GPU can tell: shapes, weights that mean something, bytes, refusals."""

import json
from pathlib import Path

import pytest
import torch
from llm_layers import build_layers, run, start_runtime
from stock_chains import assert_same_bytes
from torch import nn
from transformers import AutoConfig
from typer.testing import CliRunner

from sglang_fastpath import cli
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.llm_benchmark import LlmBenchmarkError, Workload, _measure, draw_prompts, fill, read_bytes


def test_the_shapes_are_those_of_qwen3_8b(tmp_path: Path) -> None:
    """Hidden 4096, 12288 in the MLP, 36 layers, 32 and 8 heads of 128: 8.2e9 parameters, by hand."""
    (tmp_path / "config.json").write_text(json.dumps(Workload().config()))
    config = AutoConfig.from_pretrained(str(tmp_path))
    assert type(config).__name__ == "Qwen3Config"
    attention = (
        config.hidden_size * config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    )
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    total = config.num_hidden_layers * layer + 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(8.19e9, rel=1e-3)
    assert config.quantization_config["weight_block_size"] == [128, 128]
    assert max(Workload().prefills) + 1 <= config.max_position_embeddings


def test_filled_layers_are_the_same_for_a_seed_and_neither_vanish_nor_explode(tmp_path: Path) -> None:
    start_runtime(tmp_path)
    one, again, other = (build_layers(2, tmp_path, seed=seed) for seed in (1, 2, 3))
    for layers, seed in ((one, 0), (again, 0), (other, 1)):
        fill(nn.ModuleList(layers), seed=seed)
    for layer, same, different in zip(one, again, other, strict=True):
        state = layer.state_dict()
        assert_same_bytes(tuple(state.values()), tuple(same.state_dict().values()))
        names = [name for name, value in different.state_dict().items() if value.float().equal(state[name].float())]
        assert names == []
    (passed,) = run(one, 7)
    rms = passed.hidden.float().pow(2).mean().sqrt()
    assert 0.05 < rms < 20
    assert passed.hidden.float().std(0).min() > 0, "tokens differ"


def test_the_bytes_of_a_step_are_weights_and_cache_without_the_embedding() -> None:
    workload = Workload(layers=2, kv_heads=8, context=512, steps=48)
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(100, 64), "linear": nn.Linear(64, 32, bias=False)})
    cache = 4 * (512 + 24) * 2 * (8 * 128 * 2) * 2  # requests, tokens, layers, k or v of a token, k and v
    assert read_bytes(model, workload, 4) == 4 * 64 * 32 + cache


def test_prompts_are_of_their_seed_and_differ() -> None:
    prompts = draw_prompts(32, 16, seed=1)
    assert prompts == draw_prompts(32, 16, seed=1) != draw_prompts(32, 16, seed=2)
    assert len({tuple(prompt) for prompt in prompts}) == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_process_that_fails_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(LlmBenchmarkError, match=r"stock: .*llm_benchmark.* ended with 1:\n(.*\n)*.*Error"):
        _measure("stock", (), Workload(layers=1), model, lambda line: None)


def test_a_feature_that_is_none_of_the_language_models_is_refused_by_name() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "llm", "--features", "norm_quant"])
    assert result.exit_code == 1
    known = ", ".join(feature.id for feature in CATALOGUE if feature.path == "llm")
    assert result.output.strip() == f"sglang-fastpath: --features: no 'norm_quant'; known: {known}"
