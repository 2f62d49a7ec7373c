"""The FP8 emulation beneath SGLang's own modules: every linear's bytes, what it replaces, and its undoing."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoiser_calls import recorded_fp8_linears, run_pass
from sglang_fastpath.kernels.block_fp8_linear import block_fp8_linear, quantize_per_token_group
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from torch import Tensor, nn

from sglang_fastpath.denoisers import build_qwen_image, start_runtime

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fp8() -> Any:
    start_runtime()
    from sglang.multimodal_gen.runtime.layers.quantization import fp8

    return fp8


@pytest.fixture
def emulated(fp8: Any) -> Iterator[None]:
    revert = fp8_cpu_emulation.apply()
    yield
    revert()


def fp8_linear(name: str) -> Any:
    """A block-FP8 linear of SGLang's own, ready to run."""
    return build_qwen_image(fp8=True, layers=1).get_submodule(f"transformer_blocks.0.{name}")


def dequantized(layer: nn.Module) -> Tensor:
    weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale_inv")
    rows, columns = weight.shape
    return weight.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_fp8_linear_of_a_real_denoiser_gives_the_reference_bytes(dtype: torch.dtype) -> None:
    model = build_qwen_image(fp8=True, layers=2, dtype=dtype)
    with recorded_fp8_linears(model) as calls:
        output = run_pass(model, text_tokens=13)
    assert len({name for name, *_ in calls}) == 24, "each block has 8 attention and 4 MLP linears in FP8"
    for name, layer, x, out in calls:
        assert layer.weight.dtype == torch.float8_e4m3fn
        assert (x.dtype, out.dtype, layer.bias.dtype) == (dtype, dtype, dtype)
        expected = block_fp8_linear(x, layer.weight, layer.weight_scale_inv, layer.bias)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), name
    assert output.isfinite().all()


@pytest.mark.usefixtures("emulated")
def test_the_denoiser_approximates_its_dequantized_self() -> None:
    """Weights, scales and biases reach the reference in the right places: the same model in float32 agrees."""
    quantized = build_qwen_image(fp8=True, dtype=torch.float32)
    # A quantization config keeps Q, K and V separate in every release; this one skips all layers.
    plain = build_qwen_image(
        fp8=True, dtype=torch.float32, not_quantized=("transformer_blocks", "img_in", "txt_in", "proj_out")
    )
    state = quantized.state_dict()
    for name, layer in quantized.named_modules():
        if hasattr(layer, "weight_scale_inv"):
            state[f"{name}.weight"] = dequantized(layer)
            del state[f"{name}.weight_scale_inv"]
    plain.load_state_dict(state)
    expected, output = run_pass(plain), run_pass(quantized)
    error = (output - expected).norm() / expected.norm()
    assert 0 < error < 0.03


@pytest.mark.usefixtures("emulated")
def test_weights_stay_as_loaded() -> None:
    layer = fp8_linear("attn.to_q")
    before = [t.clone() for t in (layer.weight.data.view(torch.uint8), layer.weight_scale_inv.data)]
    layer.quant_method.process_weights_after_loading(layer)
    after = [layer.weight.data.view(torch.uint8), layer.weight_scale_inv.data]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("lead", [(0,), (5,), (2, 3), (1, 2, 3)])
def test_a_layer_takes_any_leading_dimensions(lead: tuple[int, ...]) -> None:
    layer = fp8_linear("img_mlp.net.2")
    x = torch.randn(*lead, 1024).to(torch.bfloat16)
    out, _ = layer(x)
    assert out.shape == (*lead, 256)
    assert torch.equal(out, block_fp8_linear(x, layer.weight, layer.weight_scale_inv, layer.bias))


@pytest.mark.usefixtures("emulated")
def test_a_quantized_activation_is_taken_as_stock_takes_it() -> None:
    layer = fp8_linear("attn.to_q")
    x = torch.randn(7, 256).to(torch.bfloat16)
    pair = quantize_per_token_group(x, tma_aligned=True)
    out = layer.quant_method.apply(layer, pair, layer.bias)
    assert torch.equal(out, layer.quant_method.apply(layer, x, layer.bias))


@pytest.mark.usefixtures("emulated")
def test_other_block_sizes_are_refused() -> None:
    layer = fp8_linear("attn.to_q")
    with pytest.raises(ValueError, match=r"\[64, 128\]"):
        fp8_cpu_emulation.w8a8_block_fp8_linear(
            torch.zeros(1, 256, dtype=torch.bfloat16), layer.weight, [64, 128], layer.weight_scale_inv
        )


def test_without_the_emulation_stock_refuses(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_is_cpu_amx_available", False)  # the machine that the emulation is for
    with pytest.raises(AssertionError, match="AMX"):
        build_qwen_image(fp8=True, layers=1)


def test_replaces_two_names_and_revert_restores_the_objects(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_is_cpu_amx_available", False)
    original = dict(vars(fp8))
    original_class = dict(vars(fp8.Fp8LinearMethod))
    revert = fp8_cpu_emulation.apply()
    changed = {name for name, value in vars(fp8).items() if value is not original.get(name)}
    assert changed == {"_is_cpu", "dispatch_w8a8_block_fp8_linear"}
    assert dict(vars(fp8.Fp8LinearMethod)) == original_class
    build_qwen_image(fp8=True, layers=1)
    fp8_cpu_emulation.apply()()  # a second one undone leaves the first in force
    build_qwen_image(fp8=True, layers=1)
    revert()
    assert vars(fp8).keys() == original.keys()
    assert all(value is original[name] for name, value in vars(fp8).items())
    with pytest.raises(AssertionError, match="AMX"):
        build_qwen_image(fp8=True, layers=1)


@pytest.mark.parametrize("name", ["_is_cpu", "dispatch_w8a8_block_fp8_linear", "Fp8LinearMethod"])
def test_a_release_without_a_name_is_refused_and_left_alone(
    fp8: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import sglang

    monkeypatch.delattr(fp8, name)
    before = dict(vars(fp8))
    with pytest.raises(RuntimeError, match=rf"SGLang {sglang.__version__} has no .*\.{name}\b"):
        fp8_cpu_emulation.apply()
    assert dict(vars(fp8)) == before


def test_a_gpu_is_refused(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_cpu=lambda: False, device_name="cuda")
    monkeypatch.setattr(fp8, "current_platform", gpu)
    with pytest.raises(RuntimeError, match="runs on cuda"):
        fp8_cpu_emulation.apply()
    assert fp8._is_cpu is True


def test_importing_it_imports_neither_sglang_nor_triton() -> None:
    program = (
        "import sys, sglang_fastpath.patches.diffusion.fp8_cpu_emulation\n"
        "assert not {'sglang', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


TP_RANK = """
import torch
from denoiser_calls import recorded_fp8_linears, run_pass
from sglang_fastpath.denoisers import build_qwen_image, start_runtime
start_runtime(tp_size=2)
from sglang_fastpath.kernels.block_fp8_linear import block_fp8_linear
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
fp8_cpu_emulation.apply()
model = build_qwen_image(fp8=True, layers=1)
with recorded_fp8_linears(model) as calls:
    output = run_pass(model)
rank = torch.distributed.get_rank()
kinds = set()
for name, layer, x, out in calls:
    kind = type(layer).__name__
    kinds.add(kind)
    whole = (layer.output_size, layer.input_size)
    shard_of_two = {"ColumnParallelLinear": (2, 1), "RowParallelLinear": (1, 2), "ReplicatedLinear": (1, 1)}[kind]
    assert tuple(n * s for n, s in zip(layer.weight.shape, shard_of_two)) == whole, (name, layer.weight.shape, whole)
    row_parallel = kind == "RowParallelLinear"
    bias = None if row_parallel and rank else layer.bias
    expected = block_fp8_linear(x, layer.weight, layer.weight_scale_inv, bias)
    if row_parallel:
        torch.distributed.all_reduce(expected)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), (rank, name)
assert {"ColumnParallelLinear", "RowParallelLinear"} <= kinds, kinds
outputs = [torch.empty_like(output) for _ in range(2)]
torch.distributed.all_gather(outputs, output.contiguous())
assert torch.equal(*outputs)
print(f"rank {rank}: {len(calls)} linears")
"""


def test_tensor_parallel_ranks_give_the_reference_bytes_of_their_shards() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TP_RANK],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, output[-4000:]
        assert f"rank {rank}: 12 linears" in output
