"""The block-FP8 linear reference against SGLang's kernel bytes, an e4m3 table and float64 arithmetic."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels.block_fp8_linear import (
    block_fp8_linear,
    block_fp8_matmul,
    quantize_per_token_group,
    to_tma_aligned,
)
from torch import Tensor

E4M3 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf
ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 77])


def as_bytes(tensor: Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def rows_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(shape[:-1], generator=generator)).unsqueeze(-1)
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def group(*values: float, rest: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """One row of 128: `values`, then `rest`."""
    row = torch.full((1, 128), rest)
    row[0, : len(values)] = torch.tensor(values)
    return row.to(dtype)


def nearest_e4m3(value: float) -> float:
    """Round to nearest even by searching the table of e4m3 numbers, saturating."""
    magnitudes = [  # codes 0 to 0x7E in order; 0x7F is NaN
        (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(0x7F)
    ]
    distances = [abs(abs(value) - magnitude) for magnitude in magnitudes]
    best = min(distances)
    code = min((c for c, d in enumerate(distances) if d == best), key=lambda c: c % 2)
    return math.copysign(magnitudes[code], value)


# --- the quantizer -----------------------------------------------------------------------------------------------


def groups_with_every_amax() -> Tensor:
    """For ten exponents and all 128 bf16 mantissas: groups led by that amax, over all x down to amax / 2^20."""
    groups = []
    for exponent in (-33, -32, -20, -5, 0, 7, 20, 100, 126, 127):
        for mantissa in range(128):
            amax = (exponent + 127) * 128 + mantissa
            x = np.arange(amax - 20 * 128, amax + 1)
            x = np.where(np.arange(len(x)) % 2, x | 0x8000, x)
            x = np.append(x, np.zeros(-len(x) % 127, dtype=x.dtype))
            groups.append(np.insert(x.reshape(-1, 127), 0, amax, axis=1))
    bits = np.concatenate(groups).astype(np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def test_bytes_are_those_of_the_stock_kernel_on_an_h200() -> None:
    """The digests are of what SGLang 0.5.17's per_token_group_quant.cuh (--use_fast_math, sm_90a) returned."""
    x = groups_with_every_amax()
    q, scale = quantize_per_token_group(x)
    digests = [hashlib.sha256(as_bytes(t)).hexdigest() for t in (x, q, scale)]
    assert digests == [
        "3f4b01580ecda59ee473d8556dfff0a662a3bde6ea71c5c61f613dfbdd8d7281",
        "b557a845fb9bf33a1d1b9e20e984e916977f3b449f273a337a711f23b3e738dd",
        "9be2e1b00cde95089ee421b55d8c286f0f366f9321d6f3701ae71a3d9084e80d",
    ]


@pytest.mark.parametrize(
    ("amax", "x", "on_gpu", "by_ieee_division"),
    [(1.03125, 1.5735626220703125e-05, 0x03, 0x04), (1.078125, 0.00157928466796875, 0x33, 0x32)],
)
def test_ties_fall_where_the_approximate_reciprocal_puts_them(
    amax: float, x: float, on_gpu: int, by_ieee_division: int
) -> None:
    q, _ = quantize_per_token_group(group(amax, x))
    assert q.view(torch.uint8)[0, 1] == on_gpu
    product = np.float32(x) * (np.float32(448) / np.float32(amax))
    assert nearest_e4m3(float(product)) == torch.tensor(by_ieee_division, dtype=torch.uint8).view(E4M3).item()


FLOOR_SCALE = float(np.float32(1e-10) * np.float32(1 / 448))


@pytest.mark.parametrize(
    ("x", "scale", "q"),
    [
        pytest.param(group(), FLOOR_SCALE, [0.0], id="zeros"),
        pytest.param(group(rest=-0.0), FLOOR_SCALE, [-0.0], id="negative zeros"),
        pytest.param(group(rest=NAN), FLOOR_SCALE, [448.0], id="all NaN"),
        pytest.param(group(NAN, 1.0, -2.0, 0.5), 2 / 448, [448.0, 224.0, -448.0, 112.0], id="NaN is not the amax"),
        pytest.param(group(INF, 1.0, -1.0, NAN, -INF), INF, [448.0, 0.0, -0.0, 448.0, 448.0], id="infinities"),
        pytest.param(group(-INF, 3.0), INF, [448.0, 0.0], id="-inf alone"),
        pytest.param(group(1e-38, -1e-39, 9e-41), FLOOR_SCALE, [0.0, -0.0, 0.0], id="subnormals"),
        pytest.param(group(9.95e-11, -9e-11), FLOOR_SCALE, [448.0, -416.0], id="just below the floor"),
        pytest.param(group(1.0004e-10), 1.000444171950221e-10 / 448, [448.0], id="just above the floor"),
        pytest.param(group(448.0, 17.0, 19.0, -21.0), 1.0, [448.0, 16.0, 20.0, -20.0], id="ties go to even"),
        pytest.param(
            group(448.0, 2**-6, 2**-9, 2**-10, 3 * 2**-10, -(2**-10)),
            1.0,
            [448.0, 2**-6, 2**-9, 0.0, 2**-8, -0.0],
            id="e4m3 subnormals",
        ),
        pytest.param(group(448.0, 464.0, -480.0), 480 / 448, [416.0, 448.0, -448.0], id="amax above 448"),
        pytest.param(group(3.3895314e38, -1e38), 3.3895314e38 / 448, [0.0, -0.0], id="reciprocal flushed to zero"),
        pytest.param(group(2.0**126, -(2.0**125)), 2.0**126 / 448, [448.0, -224.0], id="reciprocal just normal"),
    ],
)
def test_edge_cases(x: Tensor, scale: float, q: list[float]) -> None:
    """NaN, infinities, zeros, the floor and the flush as the stock kernel has them on an H200."""
    got_q, got_scale = quantize_per_token_group(x)
    assert as_bytes(got_q[0, : len(q)].float()) == as_bytes(torch.tensor(q))
    assert got_scale.item() == pytest.approx(scale, rel=2**-23)


def test_no_input_gives_an_fp8_nan() -> None:
    every_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    alone = torch.zeros(2**16, 128, dtype=torch.bfloat16)
    alone[:, 5] = every_bf16
    for x in (alone, every_bf16.view(-1, 128)):
        q, scale = quantize_per_token_group(x)
        assert not (q.view(torch.uint8) & 0x7F == 0x7F).any()
        assert not scale.isnan().any()


@given(
    rows=ROWS,
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
)
@settings(max_examples=30, deadline=None)
def test_quantized_values_are_the_nearest_e4m3(rows: int, blocks: int, seed: int, dtype: torch.dtype) -> None:
    x = rows_of((rows, 128 * blocks), seed, dtype)
    q, scale = quantize_per_token_group(x)
    assert (q.shape, q.dtype) == (x.shape, E4M3)
    assert (scale.shape, scale.dtype) == ((rows, blocks), torch.float32)
    amax = x.double().view(rows, blocks, 128).abs().amax(-1)
    torch.testing.assert_close(scale.double(), amax / 448, rtol=2**-22, atol=0)
    wanted = x.double() / (amax / 448).repeat_interleave(128, dim=1)
    got = q.double()
    # Half an e4m3 step, or as far as fp32 rounding of the multiplier carries a near-tie beyond it.
    step = torch.exp2(wanted.abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((got - wanted).abs() <= step * (0.5 + 2**-17)).all()


def test_nearest_even_over_the_whole_e4m3_range() -> None:
    """float32 input whose group has amax 448 and so multiplier 1: what remains is the conversion."""
    values = torch.linspace(-448, 448, 127 * 40)
    midpoints = torch.arange(-1100, 1100) * 2.0**-10
    values = torch.cat([values, midpoints, midpoints * 1.001, -midpoints * 64])
    values = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(values, (1, 0), value=448.0)
    q, scale = quantize_per_token_group(x)
    assert (scale == 1).all()
    assert q.double().flatten().tolist() == [nearest_e4m3(v) for v in x.double().flatten().tolist()]


@pytest.mark.parametrize("shape", [(4,), (2, 130), (2, 64), (2, 2, 128)])
def test_refuses_what_stock_asserts_on(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"multiple of 128"):
        quantize_per_token_group(torch.zeros(shape, dtype=torch.bfloat16))


def strided_views(x: Tensor) -> list[Tensor]:
    """The same values behind other strides: a slice of columns, every second row, a transpose."""
    rows, k = x.shape
    wide = torch.zeros(rows, 2 * k + 8, dtype=x.dtype)
    wide[:, 8 : 8 + k] = x
    stepped = torch.zeros(2 * rows, k, dtype=x.dtype)
    stepped[::2] = x
    return [wide[:, 8 : 8 + k], stepped[::2], x.t().contiguous().t()]


@given(rows=ROWS, blocks=st.integers(1, 3), seed=st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_strides_do_not_change_the_bytes(rows: int, blocks: int, seed: int) -> None:
    x = rows_of((rows, 128 * blocks), seed)
    q, scale = quantize_per_token_group(x)
    for view in strided_views(x):
        q_view, scale_view = quantize_per_token_group(view)
        assert q_view.is_contiguous()
        assert (as_bytes(q_view), as_bytes(scale_view)) == (as_bytes(q), as_bytes(scale))


@given(rows=st.one_of(st.integers(0, 9), st.just(77)), blocks=st.integers(1, 4), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_tma_aligned_scales(rows: int, blocks: int, seed: int) -> None:
    x = rows_of((rows, 128 * blocks), seed)
    q, row_major = quantize_per_token_group(x)
    aligned_rows = math.ceil(rows / 4) * 4
    freed = torch.full((blocks, aligned_rows), NAN)  # so that padding left unwritten would show
    del freed
    q_aligned, scale = quantize_per_token_group(x, tma_aligned=True)
    assert as_bytes(q_aligned) == as_bytes(q)
    assert as_bytes(scale) == as_bytes(row_major)
    assert row_major.is_contiguous()
    assert scale.shape == (rows, blocks)
    if rows:
        assert scale.stride() == (1, aligned_rows)
    storage = torch.as_strided(scale, (blocks, aligned_rows), (aligned_rows, 1))
    assert as_bytes(storage[:, rows:]) == bytes(4 * blocks * (aligned_rows - rows))


# --- the matmul ----------------------------------------------------------------------------------------------------


def quantized_case(rows: int, columns: int, blocks: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = 128 * blocks
    q = (torch.randn(rows, k, generator=generator) * 120).clamp(-448, 448).to(E4M3)
    weight = (torch.randn(columns, k, generator=generator) * 120).clamp(-448, 448).to(E4M3)
    scale = torch.rand(rows, blocks, generator=generator) * 0.02
    weight_scale_inv = torch.rand(math.ceil(columns / 128), blocks, generator=generator) * 0.02
    return q, scale, weight, weight_scale_inv


@given(
    rows=ROWS,
    columns=st.sampled_from([1, 31, 64, 127, 128, 129, 300, 576]),
    blocks=st.integers(1, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_matmul_against_float64(rows: int, columns: int, blocks: int, dtype: torch.dtype, seed: int) -> None:
    q, scale, weight, weight_scale_inv = quantized_case(rows, columns, blocks, seed)
    out = block_fp8_matmul(q, scale, weight, weight_scale_inv, dtype)
    assert (out.shape, out.dtype) == ((rows, columns), dtype)
    a = q.double() * scale.double().repeat_interleave(128, dim=1)
    b = weight.double() * weight_scale_inv.double().repeat_interleave(128, 0)[:columns].repeat_interleave(128, 1)
    # Per block: dot, scale product, product and sum each round once in fp32; then once to the output type.
    accumulated = (blocks + 3) * 2.0**-24 * (a.abs() @ b.abs().t())
    exact = a @ b.t()
    # Below the smallest normal number the spacing stays what it is there.
    least = torch.finfo(dtype).smallest_normal
    rounded = exact.abs().clamp(min=least) * torch.finfo(dtype).eps / 2 + accumulated
    assert ((out.double() - exact).abs() <= rounded + accumulated).all()


def test_a_row_does_not_depend_on_its_batch_threads_or_strides() -> None:
    q, scale, weight, weight_scale_inv = quantized_case(77, 300, 4, seed=3)
    whole = block_fp8_matmul(q, scale, weight, weight_scale_inv, torch.float32)
    for part in (slice(0, 1), slice(5, 6), slice(3, 20), slice(70, 77)):
        alone = block_fp8_matmul(q[part], scale[part], weight, weight_scale_inv, torch.float32)
        assert as_bytes(alone) == as_bytes(whole[part])
    aligned = block_fp8_matmul(q, to_tma_aligned(scale), weight, weight_scale_inv, torch.float32)
    assert as_bytes(aligned) == as_bytes(whole)
    columns_alone = block_fp8_matmul(q, scale, weight[128:256], weight_scale_inv[1:2], torch.float32)
    assert as_bytes(columns_alone) == as_bytes(whole[:, 128:256])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert as_bytes(block_fp8_matmul(q, scale, weight, weight_scale_inv, torch.float32)) == as_bytes(whole)
    finally:
        torch.set_num_threads(threads)


def test_dot_products_inside_a_block_are_exact() -> None:
    """2^-18 beside terms of 448 * 448 that cancel: any fp32 sum in between would lose it."""
    q = torch.full((1, 128), 448.0)
    weight = torch.stack([torch.full((128,), 448.0), torch.full((128,), 448.0)])
    weight[:, 64:] *= -1
    q[0, 0], weight[1, 0] = 2.0**-9, 2.0**-9
    q[0, 64], weight[1, 64] = 0.0, 0.0
    out = block_fp8_matmul(q.to(E4M3), torch.ones(1, 1), weight.to(E4M3), torch.ones(1, 1), torch.float32)
    assert out[0, 1].item() == 2.0**-18


@pytest.mark.parametrize("name", ["weight", "scale", "weight_scale_inv"])
def test_matmul_names_the_tensor_that_does_not_fit(name: str) -> None:
    q, scale, weight, weight_scale_inv = quantized_case(3, 300, 2, seed=0)
    operands = {"scale": scale, "weight": weight, "weight_scale_inv": weight_scale_inv}
    operands[name] = operands[name][:, :1]
    with pytest.raises(ValueError, match=rf"\b{name} is "):
        block_fp8_matmul(q, operands["scale"], operands["weight"], operands["weight_scale_inv"], torch.bfloat16)


# --- the whole linear ----------------------------------------------------------------------------------------------


def test_the_bias_is_a_second_rounding() -> None:
    """257 rounds to 256 in bf16, and 256 + 1 to 256 again; a bias added before rounding would give 258."""
    q = group(256.0, 1.0).to(E4M3)
    weight = group(1.0, 1.0).to(E4M3)
    one = torch.ones(1, 1)
    out = block_fp8_linear(q, weight, one, torch.ones(1, dtype=torch.bfloat16), x_scale=one)
    assert out.dtype == torch.bfloat16
    assert out.item() == 256.0


@given(
    lead=st.sampled_from([(), (1,), (0,), (2, 0), (2, 3), (1, 5, 2), (77,)]),
    columns=st.sampled_from([1, 129, 256]),
    blocks=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_linear_is_quantize_matmul_bias(
    lead: tuple[int, ...], columns: int, blocks: int, dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    x = rows_of((*lead, 128 * blocks), seed, dtype)
    _, _, weight, weight_scale_inv = quantized_case(1, columns, blocks, seed)
    bias = rows_of((columns,), seed + 1, dtype) if with_bias else None
    out = block_fp8_linear(x, weight, weight_scale_inv, bias)
    assert (out.shape, out.dtype) == ((*lead, columns), dtype)
    q, scale = quantize_per_token_group(x.view(-1, 128 * blocks))
    product = block_fp8_matmul(q, scale, weight, weight_scale_inv, dtype).double()
    wanted = product if bias is None else (product + bias.double()).to(dtype).double()
    torch.testing.assert_close(out.view(-1, columns).double(), wanted, rtol=0, atol=0)
    if lead and dtype == torch.bfloat16:
        prequantized = block_fp8_linear(
            q.view(x.shape), weight, weight_scale_inv, bias, x_scale=to_tma_aligned(scale)
        )
        assert as_bytes(prequantized) == as_bytes(out)


def test_linear_approximates_the_unquantized_product() -> None:
    x = rows_of((50, 512), seed=7)
    _, _, weight, weight_scale_inv = quantized_case(1, 300, 4, seed=7)
    dequantized = weight.float() * weight_scale_inv.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)
    exact = x.float() @ dequantized.t()
    out = block_fp8_linear(x, weight, weight_scale_inv).float()
    assert ((out - exact).norm(dim=1) <= 0.04 * exact.norm(dim=1)).all()
