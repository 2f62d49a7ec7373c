"""The GEMMs on quantized operands against SGLang's own block-FP8 linear, separate, merged and grouped. On a CPU; what
DeepGEMM makes of the same operands is compared in tests/gpu."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import block_fp8_gemm
from sglang_fastpath.kernels.act_quant import ActInput, act_quant
from sglang_fastpath.kernels.block_fp8_gemm import GROUP_ROWS, gemm, grouped_gemm
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import Quantized, QuantizedPair
from sglang_fastpath.patches.diffusion import fp8_cpu_emulation
from stock_chains import assert_same_bytes, rows_of
from torch import Tensor

from sglang_fastpath.denoisers import start_runtime

ROWS = st.sampled_from([0, 1, 3, 4, 5, 127, 128, 129])
BLOCKS = st.integers(1, 3).map(lambda blocks: 128 * blocks)


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    start_runtime()
    revert = fp8_cpu_emulation.apply()
    yield
    revert()


def stock_linear(weight: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """What SGLang's linear with these parameters, without a bias, returns for rows x."""
    from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear
    from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    n, k = weight.shape
    linear: Any = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16, quant_config=config)
    linear.weight.data.copy_(weight)
    linear.weight_scale_inv.data.copy_(scale)
    linear.quant_method.process_weights_after_loading(linear)
    with torch.no_grad():
        out: Tensor = linear(x)[0]
    return out


def weights_of(n: int, k: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = (64 * torch.randn(n, k, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, torch.rand(n // 128, k // 128, generator=generator) / 64


def operand_of(x: Tensor) -> Quantized:
    return Quantized(*quantize_per_token_group(x, tma_aligned=True), -(-len(x) // 4) * 4)


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, n=BLOCKS, k=BLOCKS, seed=st.integers(0, 5))
def test_a_gemm_is_stocks_linear_without_a_bias(rows: int, n: int, k: int, seed: int) -> None:
    x = rows_of(rows, k, seed=seed)
    weight, scale = weights_of(n, k, seed=seed)
    out = gemm(operand_of(x), weight, scale)
    assert (out.shape, out.dtype) == ((rows, n), torch.bfloat16)
    assert_same_bytes(out, stock_linear(weight, scale, x))


@settings(max_examples=25, deadline=None)
@given(text=ROWS, image=ROWS, n=BLOCKS, k=BLOCKS, seed=st.integers(0, 5))
def test_a_grouped_gemm_is_both_streams_linears(text: int, image: int, n: int, k: int, seed: int) -> None:
    """From the operand that a kernel makes for it: the image's rows start at a tile, what lies between is unset."""
    streams = [rows_of(rows, k, seed=seed + index).unsqueeze(0) for index, rows in enumerate((text, image))]
    pair = act_quant(ActInput(streams[0]), ActInput(streams[1]), gelu=False, grouped_rows=GROUP_ROWS)
    assert pair.joint is not None
    assert pair.image_offset % GROUP_ROWS == 0
    pair.joint.q[text : pair.image_offset] = torch.nan
    weight, scale = weights_of(2 * n, k, seed=seed + 2)
    outs = grouped_gemm(pair, weight, scale)
    for out, x, half in zip(outs, streams, zip(weight.chunk(2), scale.chunk(2), strict=True), strict=True):
        assert (out.shape, out.dtype) == ((x.shape[1], n), torch.bfloat16)
        assert_same_bytes(out, stock_linear(*half, x[0]))


@pytest.mark.parametrize("rows", [(6, 15), (128, 130)])
def test_a_stream_of_a_joint_operand_is_an_operand_of_its_own(rows: tuple[int, int]) -> None:
    """Without merged weights, each linear takes its stream's part of what was laid out for a grouped launch."""
    streams = [rows_of(count, 256, seed=count).unsqueeze(0) for count in rows]
    pair = act_quant(ActInput(streams[0]), ActInput(streams[1]), gelu=False, grouped_rows=GROUP_ROWS)
    weight, scale = weights_of(256, 256, seed=1)
    for operand, x in zip((pair.text, pair.image), streams, strict=True):
        assert_same_bytes(gemm(operand, weight, scale), stock_linear(weight, scale, x[0]))


@settings(max_examples=10, deadline=None)
@given(rows=ROWS, widths=st.lists(BLOCKS, min_size=2, max_size=4), seed=st.integers(0, 5))
def test_a_merged_gemm_is_its_parts(rows: int, widths: list[int], seed: int) -> None:
    operand = operand_of(rows_of(rows, 256, seed=seed))
    parts = [weights_of(width, 256, seed=seed + index) for index, width in enumerate(widths)]
    merged = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    out = gemm(operand, *merged)
    assert_same_bytes(list(out.split(widths, dim=1)), [gemm(operand, *part) for part in parts])


def test_a_row_does_not_depend_on_the_others() -> None:
    x = rows_of(37, 256, seed=3)
    weight, scale = weights_of(384, 256, seed=4)
    whole = gemm(operand_of(x), weight, scale)
    for rows in (slice(0, 1), slice(5, 9), slice(36, 37)):
        assert_same_bytes(gemm(operand_of(x[rows]), weight, scale), whole[rows])


def test_operands_that_do_not_fit_the_weight_are_refused() -> None:
    weight, scale = weights_of(256, 384, seed=0)
    with pytest.raises(ValueError, match="weight is"):
        gemm(operand_of(rows_of(4, 256, seed=0)), weight, scale)
    pair = QuantizedPair(*(operand_of(rows_of(4, 256, seed=0)) for _ in range(2)))
    with pytest.raises(AssertionError):
        grouped_gemm(pair, weight, scale)


@pytest.mark.parametrize(
    ("offset", "rows"), [(0, 1), (0, 5), (128, 128), (128, 135), (256, 1000), (256, 32768), (512, 32769), (0, 70000)]
)
def test_rows_are_assigned_to_the_weight_of_their_stream(offset: int, rows: int) -> None:
    """DeepGEMM's layout: an int32 for each row, padding included. Kept between passes, so no inference tensor."""
    with torch.inference_mode():
        groups = block_fp8_gemm._groups(offset, rows, torch.device("cpu"))
        again = block_fp8_gemm._groups(offset, rows, torch.device("cpu"))
    assert again is groups
    assert groups.dtype == torch.int32
    assert not groups.is_inference()
    assert groups.tolist() == [0] * offset + [1] * (rows - offset)


def test_rows_are_assigned_at_addresses_that_stay() -> None:
    """Captured graphs read them long after more other sizes have come than anybody remembers."""
    with torch.inference_mode():
        first = block_fp8_gemm._groups(128, 1000, torch.device("cpu"))
        for rows in range(1001, 1200):
            block_fp8_gemm._groups(128, rows, torch.device("cpu"))
        again = block_fp8_gemm._groups(128, 1000, torch.device("cpu"))
    assert again is not first, "forgotten by now"
    assert again.data_ptr() == first.data_ptr()
