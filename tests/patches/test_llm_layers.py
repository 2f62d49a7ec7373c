"""`rmsnorm_quant`, `silu_quant` and `qk_norm_rope_kv` in SGLang's own decoder layers: stock's bytes in prefill and
decode, and what makes each of them stand aside."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_layers import Run, build_layers, fastpath, run, start_runtime
from sglang_fastpath.kernels import qk_norm_rope_kv, rmsnorm_quant, silu_quant
from sglang_fastpath.patches.llm import quantized_outputs
from stock_chains import assert_same_bytes
from torch import Tensor, nn

from sglang_fastpath.features import LLAMA, QWEN2
from sglang_fastpath.plan import Plan, State

LAYERS = 2
FEATURES = ("rmsnorm_quant", "silu_quant", "qk_norm_rope_kv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    start_runtime(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ROPE_CACHE_FP32", "1")  # as on a GPU
        yield folder


@pytest.fixture(scope="module")
def stock_layers(folder: Path) -> list[nn.Module]:
    return build_layers(LAYERS, folder)


def assert_same_runs(fast: list[Run], stock: list[Run]) -> None:
    for ours, theirs in zip(fast, stock, strict=True):
        assert_same_bytes((ours.hidden, ours.residual, ours.caches), (theirs.hidden, theirs.residual, theirs.caches))


def hits(plan: Plan) -> dict[str, int]:
    return {id: record.hits for id, record in plan.records.items()}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("only", ["all", *FEATURES])
def test_prefill_and_decode_give_stocks_bytes(folder, stock_layers, only, tokens) -> None:
    features = FEATURES if only == "all" else (only,)
    with fastpath(features) as plan:
        layers = build_layers(LAYERS, folder)
        fast = run(layers, tokens, decode=3)
    assert_same_runs(fast, run(stock_layers, tokens, decode=3))
    calls = 4 * LAYERS  # a prefill and three steps
    # The first call of each signature is stock's, for comparison.
    expected = {"rmsnorm_quant": 2 * calls - 2, "silu_quant": calls - 1, "qk_norm_rope_kv": calls}
    assert hits(plan) == {id: expected[id] for id in features}
    assert {v["verdict"] for v in plan.guard.verdicts} == {"admitted"}
    assert not any(record.fallbacks for record in plan.records.values())


@pytest.mark.parametrize("model", [QWEN2, LLAMA])
def test_layers_of_other_families_give_stocks_bytes_and_lack_what_is_qwen3s(folder, model) -> None:
    with fastpath(FEATURES) as plan:
        layers = build_layers(LAYERS, folder, model=model)
        fast = run(layers, 5, decode=3)
    assert_same_runs(fast, run(build_layers(LAYERS, folder, model=model), 5, decode=3))
    calls = 4 * LAYERS
    assert hits(plan) == {"rmsnorm_quant": 2 * calls - 2, "silu_quant": calls - 1, "qk_norm_rope_kv": 0}
    assert {v["verdict"] for v in plan.guard.verdicts} == {"admitted"}
    assert not any(record.fallbacks for record in plan.records.values())
    observed = {id: plan.observed(record) for id, record in plan.records.items()}
    assert observed.pop("qk_norm_rope_kv") == (State.UNSUPPORTED, f"{model}: it has no QK norm")
    assert set(observed.values()) == {(State.ACTIVE, "")}


@pytest.mark.parametrize("guard", ["off", "always", "sample:2"])
def test_every_policy_of_the_guard_gives_stocks_bytes(folder, stock_layers, guard) -> None:
    with fastpath(FEATURES, guard=guard):
        fast = run(build_layers(LAYERS, folder), 5, decode=2)
    assert_same_runs(fast, run(stock_layers, 5, decode=2))


def test_the_kernels_are_what_runs(folder, monkeypatch) -> None:
    """A wrong bit from a kernel is seen by the guard, which then leaves everything to stock."""

    def of_another_eps(launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, eps, **rest: launch(x, weight, 1.0, **rest)

    monkeypatch.setattr(rmsnorm_quant, "rmsnorm_quant", of_another_eps(rmsnorm_quant.rmsnorm_quant))
    launch = silu_quant.silu_quant
    monkeypatch.setattr(silu_quant, "silu_quant", lambda x: launch(-x))
    with_norm = qk_norm_rope_kv.qk_norm_rope_kv
    monkeypatch.setattr(qk_norm_rope_kv, "qk_norm_rope_kv", lambda inputs, _: with_norm(inputs, 1.0))
    with fastpath(FEATURES) as plan:
        layers = build_layers(LAYERS, folder)
        fast = run(layers, 5, decode=1)
    assert_same_runs(fast, run(build_layers(LAYERS, folder), 5, decode=1))
    assert {v["verdict"] for v in plan.guard.verdicts} == {"parity-failed"}
    assert {v["feature"] for v in plan.guard.verdicts} == set(FEATURES)
    assert all(record.fallbacks["the guard sent it to stock"] for record in plan.records.values())


def test_layers_are_stocks_again_after_a_revert(folder, stock_layers) -> None:
    with fastpath(FEATURES) as plan:
        layers = build_layers(LAYERS, folder)
        run(layers, 3)
        before = hits(plan)
    assert_same_runs(run(layers, 3, decode=1), run(stock_layers, 3, decode=1))
    assert hits(plan) == before


def test_updated_weights_are_used_at_once(folder) -> None:
    """SGLang loads new weights into the parameters that are there."""
    with fastpath(FEATURES):
        layers = build_layers(LAYERS, folder)
        run(layers, 3, decode=1)
        others = build_layers(LAYERS, folder, seed=7)
        for layer, other in zip(layers, others, strict=True):
            layer.load_state_dict(other.state_dict())
        fast = run(layers, 3, decode=1)
    assert_same_runs(fast, run(build_layers(LAYERS, folder, seed=7), 3, decode=1))


# --- the twin ------------------------------------------------------------------------------------------------------


def normed(layer: Any, plan: Plan) -> Tensor:
    """The output of the layer's first norm, with its twin."""
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad():
        layer.input_layernorm(x.clone())  # the guard's comparison
        rows: Tensor = layer.input_layernorm(x)
    assert hasattr(rows, quantized_outputs.TWIN)
    return rows


def changed_in_place(rows: Tensor, layer: Any) -> Any:
    rows.mul_(2)
    return layer.self_attn.qkv_proj


def given_to_another_linear(rows: Tensor, layer: Any) -> Any:
    return layer.mlp.gate_up_proj


@pytest.mark.parametrize("happens", [changed_in_place, given_to_another_linear])
def test_a_twin_that_is_not_its_tensors_any_more_is_dropped(folder, happens) -> None:
    with fastpath(FEATURES) as plan, torch.no_grad():
        (layer,) = build_layers(1, folder)
        rows = normed(layer, plan)
        linear = happens(rows, layer)
        out = linear(rows)[0]
        record = plan.records["rmsnorm_quant"]
        assert record.hits == 0
        assert record.fallbacks == {"the normed rows were changed, or reached another linear": 1}
        assert not hasattr(rows, quantized_outputs.TWIN)
        assert_same_bytes(out, linear(rows.clone())[0])


@pytest.mark.parametrize("made_anew", [Tensor.clone, lambda rows: rows[:3], lambda rows: rows + 0, Tensor.contiguous])
def test_a_new_tensor_has_no_twin(folder, made_anew) -> None:
    """What makes a tensor on the way, as an all-gather does, ends the shortcut; `contiguous` returns the same one."""
    with fastpath(FEATURES) as plan, torch.no_grad():
        (layer,) = build_layers(1, folder)
        rows = made_anew(normed(layer, plan))
        same = made_anew is Tensor.contiguous
        out = layer.self_attn.qkv_proj(rows)[0]
        assert plan.records["rmsnorm_quant"].hits == same
        assert_same_bytes(out, layer.self_attn.qkv_proj(rows.clone())[0])


def test_a_twin_is_taken_once(folder) -> None:
    with fastpath(FEATURES) as plan, torch.no_grad():
        (layer,) = build_layers(1, folder)
        rows = normed(layer, plan)
        first, second = (layer.self_attn.qkv_proj(rows)[0] for _ in range(2))
        assert plan.records["rmsnorm_quant"].hits == 1
        assert_same_bytes(first, second)


# --- what makes a feature stand aside ------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """What LoRA does to a linear: another module in its place that calls its quantized method and reads its input."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.quant_method = base.quant_method
        self.weight = base.weight

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.base_layer.quant_method.apply(self.base_layer, x) + x.sum(), None


def wrap_down_proj(layer: Any) -> None:
    layer.mlp.down_proj = Wrapped(layer.mlp.down_proj)


def wrap_qkv_proj(layer: Any) -> None:
    layer.self_attn.qkv_proj = Wrapped(layer.self_attn.qkv_proj)


def hook_down_proj(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: None)


def run_triton(layer: Any) -> None:
    """As a server with --fp8-gemm-backend triton, whose scales lie otherwise."""
    for module in layer.modules():
        if hasattr(module, "weight_scale_inv"):
            gemm = module.quant_method.w8a8_block_fp8_linear
            module.quant_method.w8a8_block_fp8_linear = lambda *args, gemm=gemm, **kwargs: gemm(*args, **kwargs)


def cast_before_multiplying(layer: Any) -> None:
    layer.input_layernorm.cast_x_before_out_mul = layer.post_attention_layernorm.cast_x_before_out_mul = True
    layer.self_attn.q_norm.cast_x_before_out_mul = True


def give_the_cache_scales(layer: Any) -> None:
    layer.self_attn.attn.k_scale = torch.tensor(1.0)


def rotate_by_gptj(layer: Any) -> None:
    from copy import copy

    layer.self_attn.rotary_emb = copy(layer.self_attn.rotary_emb)  # SGLang shares it between layers
    layer.self_attn.rotary_emb.is_neox_style = False


STANDING_ASIDE = [
    (wrap_down_proj, "silu_quant", "the next linear is wrapped or of another kind"),
    (wrap_qkv_proj, "rmsnorm_quant", "the normed rows were changed, or reached another linear"),
    (hook_down_proj, "silu_quant", "the next linear has hooks"),
    (run_triton, "rmsnorm_quant", "the next linear runs <lambda>"),
    (run_triton, "silu_quant", "the next linear runs <lambda>"),
    (cast_before_multiplying, "rmsnorm_quant", "the norm is of another kind"),
    (cast_before_multiplying, "qk_norm_rope_kv", "a QK norm of another kind"),
    (give_the_cache_scales, "qk_norm_rope_kv", "the KV cache has scales"),
    (rotate_by_gptj, "qk_norm_rope_kv", "RoPE is not neox over whole heads"),
]


@pytest.mark.parametrize(("change", "feature", "reason"), STANDING_ASIDE)
def test_each_feature_stands_aside_and_says_why(folder, change, feature, reason) -> None:
    with fastpath(FEATURES) as plan:
        layers = build_layers(LAYERS, folder)
        for layer in layers:
            change(layer)
        fast = run(layers, 4, decode=2)
    stock = build_layers(LAYERS, folder)
    for layer in stock:
        change(layer)
    assert_same_runs(fast, run(stock, 4, decode=2))
    assert plan.records[feature].fallbacks[reason]


def test_inference_tensors_are_left_to_stock(folder, stock_layers) -> None:
    x = torch.ones(3, 1024, dtype=torch.bfloat16)
    with fastpath(FEATURES) as plan, torch.inference_mode():
        (layer,) = build_layers(1, folder)
        rows = layer.input_layernorm(x)
        assert not hasattr(rows, quantized_outputs.TWIN)
        assert plan.records["rmsnorm_quant"].fallbacks == {"inference tensors have no versions": 1}
