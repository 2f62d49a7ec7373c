"""UE8M0 packing of weight scales against the torch code of SGLang and DeepGEMM, byte for byte, padding included."""

import math
import re
from fractions import Fraction

import deep_gemm.utils.layout
import pytest
import torch
from deep_gemm.utils import get_tma_aligned_size
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.quantization.fp8_kernel import create_per_token_group_quant_fp8_output_scale
from sglang.srt.layers.quantization import fp8_utils
from sglang_fastpath.loaders.quantize import dequantize_block_fp8
from sglang_fastpath.loaders.scale_packing import merge_packed, pack_ue8m0, requantize_ue8m0, unpack_ue8m0
from torch import Tensor

E4M3 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf
UNLOADED = torch.finfo(torch.float32).min
ROWS = st.one_of(st.integers(1, 10), st.sampled_from([64, 127, 128, 129, 192, 255, 256, 320, 384]))
BLOCKS = st.integers(1, 9)
SEEDS = st.integers(0, 2**16)


def powers(rows: int, blocks: int, seed: int) -> Tensor:
    """Scales of a weight of `rows` rows: any UE8M0 exponents, the smallest and the largest among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(1, 255, (math.ceil(rows / 128), blocks), generator=generator, dtype=torch.int32)
    exponents.view(-1)[seed % exponents.numel()] = 254
    exponents.view(-1)[-1 - seed % exponents.numel()] = 1
    return (exponents << 23).view(torch.float32)


def storage(packed: Tensor) -> Tensor:
    """What lies in memory: [W, N rounded up to a multiple of 4], the padding behind the view included."""
    rows, words = packed.shape
    aligned_rows = math.ceil(rows / 4) * 4
    assert packed.stride() == (1, aligned_rows)
    assert packed.data_ptr() % 16 == 0
    return packed.as_strided((words, aligned_rows), (aligned_rows, 1))


def assert_same_layout_and_bytes(packed: Tensor, stock: Tensor) -> None:
    assert (packed.shape, packed.dtype, packed.stride()) == (stock.shape, stock.dtype, stock.stride())
    assert torch.equal(storage(packed), storage(stock))


def assert_same_fp8(codes: Tensor, stock: Tensor) -> None:
    assert (codes.dtype, codes.shape, codes.is_contiguous()) == (E4M3, stock.shape, True)
    assert torch.equal(codes.view(torch.uint8), stock.view(torch.uint8))


def dirty_the_allocator(rows: int, words: int) -> None:
    """Frees memory of a packed tensor's size full of ones, so that padding left unwritten would show."""
    torch.full((words, math.ceil(rows / 4) * 4), -1, dtype=torch.int32)


def strided_views(x: Tensor) -> list[Tensor]:
    """The same values behind other strides: column-major, a slice of columns, every second row."""
    wide = torch.ones(x.shape[0], x.shape[1] + 3, dtype=x.dtype)
    wide[:, 2:-1] = x
    stepped = torch.ones(2 * x.shape[0], x.shape[1], dtype=x.dtype)
    stepped[::2] = x
    return [x.t().contiguous().t(), wide[:, 2:-1], stepped[::2]]


# --- packing -------------------------------------------------------------------------------------------------


@given(rows=ROWS, blocks=BLOCKS, seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_bytes_are_those_of_sglang_and_deep_gemm(rows: int, blocks: int, seed: int) -> None:
    scale = powers(rows, blocks, seed)
    dirty_the_allocator(rows, math.ceil(blocks / 4))
    packed = pack_ue8m0(scale, rows)
    assert_same_layout_and_bytes(packed, fp8_utils.transform_scale_ue8m0(scale, mn=rows, use_torch_impl=True))
    of_each_row = scale.repeat_interleave(128, dim=0)[:rows]
    assert_same_layout_and_bytes(packed, deep_gemm.utils.layout._pack_fp32_into_ue8m0_fallback(of_each_row))
    if blocks % 4 == 0:
        assert torch.equal(packed, deep_gemm.utils.math.pack_ue8m0_to_int(of_each_row))


def test_a_word_written_out() -> None:
    """K of 640: 2^-3, 1, 2, 2^127 in the first word, lowest byte first, and 2^-126 alone in the second."""
    packed = pack_ue8m0(torch.tensor([[0.125, 1.0, 2.0, 2.0**127, 2.0**-126], [1.0] * 5]), 130)
    assert packed.shape == (130, 2)
    assert packed[:128].unique(dim=0).tolist() == [[int.from_bytes([124, 127, 128, 254], "little", signed=True), 1]]
    assert packed[128:].unique(dim=0).tolist() == [[0x7F7F7F7F, 0x7F]]


@given(rows=ROWS, blocks=BLOCKS)
@settings(max_examples=40, deadline=None)
def test_a_weight_has_the_layout_of_an_activation(rows: int, blocks: int) -> None:
    activation = create_per_token_group_quant_fp8_output_scale(
        (rows, blocks * 128), "cpu", 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True
    )
    packed = pack_ue8m0(powers(rows, blocks, 0), rows)
    assert (packed.shape, packed.dtype, packed.stride()) == (activation.shape, activation.dtype, activation.stride())
    # What DeepGEMM asserts of a packed operand (check_sf_layout).
    assert packed.stride(-1) == get_tma_aligned_size(rows, packed.element_size())


@given(rows=ROWS, blocks=BLOCKS, seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_strides_do_not_matter(rows: int, blocks: int, seed: int) -> None:
    scale = powers(rows, blocks, seed)
    packed = pack_ue8m0(scale, rows)
    for view in strided_views(scale):
        assert_same_layout_and_bytes(pack_ue8m0(view, rows), packed)
    for view in strided_views(packed):
        assert torch.equal(unpack_ue8m0(view), scale)
        assert_same_layout_and_bytes(merge_packed([view], [rows]), packed)


@given(st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=300, deadline=None)
def test_any_float_is_packed_exactly_or_refused(bits: int) -> None:
    scale = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
    value = scale.item()
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5 and value >= 2.0**-126:
        assert unpack_ue8m0(pack_ue8m0(scale, 1)).item() == value
    else:
        with pytest.raises(ValueError, match=r"^scale\[0, 0\] is "):
            pack_ue8m0(scale, 1)


@given(exponent=st.integers(1, 254), step=st.sampled_from([-1, 0, 1]), negative=st.booleans())
@settings(max_examples=100, deadline=None)
def test_one_ulp_or_a_sign_beside_a_power_of_two(exponent: int, step: int, negative: bool) -> None:
    bits = (exponent << 23) + step - (2**31 if negative else 0)
    scale = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
    if step == 0 and not negative:
        assert pack_ue8m0(scale, 1).item() == exponent
    else:
        with pytest.raises(ValueError):
            pack_ue8m0(scale, 1)


@pytest.mark.parametrize(
    ("value", "reason", "remedy"),
    [
        pytest.param(0.003, "not a power of two", "requantize_ue8m0", id="mantissa"),
        pytest.param(3.4e38, "not a power of two", "requantize_ue8m0", id="mantissa at the top"),
        pytest.param(0.0, "no zero", "requantize_ue8m0", id="zero"),
        pytest.param(2.0**-127, "no subnormal", "requantize_ue8m0", id="a subnormal power of two"),
        pytest.param(2.0**-149, "no subnormal", "requantize_ue8m0", id="the smallest subnormal"),
        pytest.param(-0.0, "no sign", "load this weight's scales again", id="negative zero"),
        pytest.param(-0.5, "no sign", "load this weight's scales again", id="negative"),
        pytest.param(UNLOADED, "still to be loaded", "load this weight's scales again", id="unloaded"),
        pytest.param(INF, "is inf", "load this weight's scales again", id="infinity"),
        pytest.param(-INF, "is -inf", "load this weight's scales again", id="negative infinity"),
        pytest.param(NAN, "is nan", "load this weight's scales again", id="NaN"),
    ],
)
def test_the_first_scale_that_does_not_fit_is_named(value: float, reason: str, remedy: str) -> None:
    scale = powers(300, 6, seed=1)
    scale[1, 4] = value
    scale[2, 0] = 0.3
    with pytest.raises(ValueError, match=rf"^scale\[1, 4\].*{reason}.*{remedy}"):
        pack_ue8m0(scale, 300)


def test_stock_rounds_silently_what_is_refused_here() -> None:
    """Why there is a refusal: SGLang's torch code turns 0.003 into 2^-9 and -0.5 into 0.5."""
    scale = torch.tensor([[0.003, -0.5, 1.0, 1.0]])
    stock = fp8_utils.transform_scale_ue8m0(scale, mn=128, use_torch_impl=True)
    assert fp8_utils.inverse_transform_scale_ue8m0(stock, mn=128).tolist() == [[2.0**-9, 0.5, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("scale", "rows", "message"),
    [
        pytest.param(torch.ones(2, 3), 257, r"2 blocks of 128 rows, but rows are 257", id="too many rows"),
        pytest.param(torch.ones(2, 3), 128, r"2 blocks of 128 rows, but rows are 128", id="too few rows"),
        pytest.param(torch.ones(2, 3, dtype=torch.float64), 256, r"\(2, 3\) torch.float64", id="float64"),
        pytest.param(torch.ones(2, 3, dtype=torch.int32), 256, r"torch.int32; pass unpacked scales", id="packed"),
        pytest.param(torch.ones(1, 2, 3), 256, r"\(1, 2, 3\)", id="3-D"),
        pytest.param(torch.ones(0, 3), 0, r"\(0, 3\)", id="no rows"),
        pytest.param(torch.ones(1, 0), 1, r"\(1, 0\)", id="no columns"),
    ],
)
def test_scales_of_another_shape_are_refused(scale: Tensor, rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_ue8m0(scale, rows)


# --- unpacking -----------------------------------------------------------------------------------------------


@given(rows=ROWS, blocks=BLOCKS, seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_unpacking_is_the_inverse_and_stocks(rows: int, blocks: int, seed: int) -> None:
    scale = powers(rows, blocks, seed)
    packed = pack_ue8m0(scale, rows)
    unpacked = unpack_ue8m0(packed)
    assert unpacked.is_contiguous()
    assert unpacked.dtype == torch.float32
    assert torch.equal(unpacked, scale)
    # Of a single word (K of 512 or less) stock's function would raise, were it MN-major.
    for_stock = packed if packed.shape[1] > 1 else packed.clone(memory_format=torch.contiguous_format)
    shape = (rows, 128 * blocks)
    assert torch.equal(unpacked, fp8_utils._unpack_ue8m0_scale_for_triton(for_stock, shape, [128, 128]))
    if rows % 128 == 0:
        stock = fp8_utils.inverse_transform_scale_ue8m0(packed, mn=rows)
        assert torch.equal(unpacked, stock[:, :blocks])


@pytest.mark.parametrize(
    ("row", "byte", "value", "message"),
    [
        pytest.param(0, 2, 0, r"packed\[0, 0\]: byte 2 is 0,", id="zero"),
        pytest.param(200, 5, 0, r"packed\[200, 1\]: byte 1 is 0,", id="zero in the last block"),
        pytest.param(200, 3, 255, r"packed\[200, 0\]: byte 3 is 255,", id="NaN"),
        pytest.param(200, 6, 100, r"packed\[0, 1\]: byte 2 is 0,", id="padding in use"),
        pytest.param(129, 4, 100, r"packed\[129, 1\]: the scale of block 4 of K is not the one of row 128", id="row"),
        pytest.param(
            128, 1, 100, r"packed\[129, 0\]: the scale of block 1 of K is not the one of row 128", id="first"
        ),
    ],
)
def test_bytes_that_packing_does_not_write_are_refused(row: int, byte: int, value: int, message: str) -> None:
    """Row 0 to 299, six blocks of K: bytes 6 and 7 of each row are padding."""
    contents = torch.full((300, 8), 127, dtype=torch.uint8)
    contents[:, 6:] = 0
    assert unpack_ue8m0(contents.view(torch.int32)).tolist() == [[1.0] * 6] * 3
    contents[row, byte] = value
    with pytest.raises(ValueError, match=f"^{message}"):
        unpack_ue8m0(contents.view(torch.int32))


@pytest.mark.parametrize(
    "packed",
    [torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.ones(1, 2, 3, dtype=torch.int32)],
    ids=["float32", "int64", "3-D"],
)
def test_only_packed_scales_are_unpacked(packed: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^packed is .*, not packed scales"):
        unpack_ue8m0(packed)


def test_scales_whose_first_rows_are_all_zero_bytes_are_not_taken_for_padding() -> None:
    """Only the last three bytes of the last word can be padding."""
    with pytest.raises(ValueError, match=r"^packed\[0, 0\]: byte 0 is 0,"):
        unpack_ue8m0(torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^packed\[0, 1\]: byte 0 is 0,"):
        unpack_ue8m0(torch.tensor([[0x7F7F7F7F, 0]], dtype=torch.int32))


# --- merging -------------------------------------------------------------------------------------------------


@given(rows=st.lists(ROWS, min_size=1, max_size=4), blocks=BLOCKS, seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_merging_keeps_every_row_of_every_part(rows: list[int], blocks: int, seed: int) -> None:
    scales = [powers(count, blocks, seed + index) for index, count in enumerate(rows)]
    parts = [pack_ue8m0(scale, count) for scale, count in zip(scales, rows, strict=True)]
    dirty_the_allocator(sum(rows), parts[0].shape[1])
    merged = merge_packed(parts, rows)
    of_each_row = torch.cat([scale.repeat_interleave(128, 0)[:n] for scale, n in zip(scales, rows, strict=True)])
    assert_same_layout_and_bytes(merged, deep_gemm.utils.layout._pack_fp32_into_ue8m0_fallback(of_each_row))
    for part, scale, count in zip(parts, scales, rows, strict=True):
        assert merged.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
        assert_same_layout_and_bytes(part, pack_ue8m0(scale, count))


@given(tiles=st.lists(st.integers(1, 3), min_size=1, max_size=3), blocks=BLOCKS, seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_merging_whole_blocks_is_packing_the_concatenation(tiles: list[int], blocks: int, seed: int) -> None:
    rows = [128 * count for count in tiles]
    scales = [powers(count, blocks, seed + index) for index, count in enumerate(rows)]
    merged = merge_packed([pack_ue8m0(scale, count) for scale, count in zip(scales, rows, strict=True)], rows)
    joined = torch.cat(scales)
    assert_same_layout_and_bytes(merged, pack_ue8m0(joined, sum(rows)))
    assert_same_layout_and_bytes(merged, fp8_utils.transform_scale_ue8m0(joined, mn=sum(rows), use_torch_impl=True))
    assert torch.equal(unpack_ue8m0(merged), joined)


def test_a_part_that_ends_inside_a_block_keeps_its_scale() -> None:
    """N of 64 and 192: block 0 of the merged weight holds rows of both, so no [N/128, K/128] scales exist."""
    parts = [pack_ue8m0(torch.full((1, 5), 0.25), 64), pack_ue8m0(torch.full((2, 5), 4.0), 192)]
    merged = merge_packed(parts, [64, 192])
    exponents = merged.contiguous().view(torch.uint8)[:, :5]
    assert (exponents[:64] == 125).all()
    assert (exponents[64:] == 129).all()
    with pytest.raises(ValueError, match=r"^packed\[64, 0\]: .* unpack merged linears one by one"):
        unpack_ue8m0(merged)


def test_a_slice_of_merged_scales_is_no_operand_for_deep_gemm() -> None:
    """Why merged scales are a copy: DeepGEMM asserts this stride (sf.stride(-1) == get_tma_aligned_size(mn, 4))."""
    part = pack_ue8m0(powers(256, 6, 0), 256)
    merged = merge_packed([part, part], [256, 256])
    assert torch.equal(merged[256:], part)
    assert part.stride(-1) == get_tma_aligned_size(256, 4) != merged[256:].stride(-1)


PACKED = pack_ue8m0(torch.ones(2, 6), 200)


@pytest.mark.parametrize(
    ("scales", "rows", "message"),
    [
        pytest.param([], [], "0 packed scales with 0 row counts", id="nothing"),
        pytest.param([PACKED, PACKED], [200], "2 packed scales with 1 row counts", id="a count is missing"),
        pytest.param([PACKED, PACKED], [200, 256], r"scales\[1\] has 200 rows and its weight 256", id="rows"),
        pytest.param(
            [PACKED, pack_ue8m0(torch.ones(2, 7), 200)],
            [200, 200],
            r"scales\[1\] has 7 blocks along K and scales\[0\] has 6",
            id="another K with as many words",
        ),
        pytest.param(
            [PACKED, pack_ue8m0(torch.ones(2, 9), 200)],
            [200, 200],
            r"scales\[1\] has 9 blocks along K and scales\[0\] has 6",
            id="another K",
        ),
        pytest.param(
            [PACKED, torch.ones(2, 6)],
            [200, 200],
            r"scales\[1\] is \(2, 6\) torch.float32, not packed",
            id="not packed",
        ),
        pytest.param(
            [PACKED, pack_ue8m0(torch.ones(2, 6), 200).to("meta")],
            [200, 200],
            r"scales\[1\] is on meta and scales\[0\] on cpu",
            id="another device",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(scales: list[Tensor], rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_packed(scales, rows)


# --- requantizing --------------------------------------------------------------------------------------------


def block_fp8(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight of any codes but NaN, with scales over many magnitudes, some zero or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[codes == 0x7F] = 0x80
    spread = torch.randint(0, 9, (rows, 1), generator=generator) * 8
    codes = torch.where(codes & 0x7F >= spread, codes - spread.to(torch.uint8), codes & 0x80)
    shape = math.ceil(rows / 128), math.ceil(columns / 128)
    scale = torch.exp(7 * torch.randn(shape, generator=generator) - 5)
    scale[torch.rand(shape, generator=generator) < 0.05] = 0.0
    scale[torch.rand(shape, generator=generator) < 0.05] = 2.0**-140
    return codes.view(E4M3), scale


def stock_requantized(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stock's `requant_weight_ue8m0` by its own functions, with its torch packing."""
    dequantized = fp8_utils.block_quant_dequant(weight, scale, [128, 128], torch.bfloat16)
    codes, power = fp8_utils.quant_weight_ue8m0(dequantized, [128, 128])
    return codes, fp8_utils.transform_scale_ue8m0(power, mn=len(weight), use_torch_impl=True)


@given(rows=ROWS, columns=st.sampled_from([1, 100, 128, 200, 512, 520, 640, 1152]), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_requantized_bytes_are_stocks(rows: int, columns: int, seed: int) -> None:
    weight, scale = block_fp8(rows, columns, seed)
    before = weight.clone(), scale.clone()
    codes, packed = requantize_ue8m0(weight, scale)
    stock_codes, stock_packed = stock_requantized(weight, scale)
    assert_same_fp8(codes, stock_codes)
    assert_same_layout_and_bytes(packed, stock_packed)
    assert_same_fp8(weight, before[0])
    assert torch.equal(scale, before[1])


@pytest.mark.parametrize(("rows", "columns"), [(384, 640), (200, 1152), (256, 512)])
def test_what_stock_does_to_a_loaded_layer(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """SGLang's whole function on parameters; DeepGEMM's own fallback in torch stands in for its CUDA kernel."""
    monkeypatch.setattr(
        deep_gemm.utils.layout,
        "get_mn_major_tma_aligned_packed_ue8m0_tensor",
        deep_gemm.utils.layout._pack_fp32_into_ue8m0_fallback,
    )
    tensors = block_fp8(rows, columns, seed=rows)
    weight, scale = (torch.nn.Parameter(tensor.clone(), requires_grad=False) for tensor in tensors)
    codes, packed = requantize_ue8m0(weight, scale)
    fp8_utils.requant_weight_ue8m0_inplace(weight, scale, [128, 128])
    assert_same_fp8(codes, weight.data)
    assert_same_layout_and_bytes(packed, scale.data)


def test_the_scale_is_the_smallest_power_of_two_for_every_mantissa() -> None:
    """However amax / 448 is rounded: torch divides on a CPU and multiplies by fp32(1/448) on CUDA."""
    exponents = [-13, -12, -6, -1, 0, 1, 8, 9, 60, 126, 127]
    amax = torch.tensor([[(128 + m) * 2.0 ** (e - 7) for e in exponents for m in range(128)]])
    assert torch.equal(amax, amax.bfloat16().float())
    weight = torch.zeros(1, 128 * amax.shape[1])
    weight[:, 5::128] = 1.0
    codes, packed = requantize_ue8m0(weight.to(E4M3), amax)
    powers_of_two = unpack_ue8m0(packed)[0].tolist()
    by_reciprocal = fp8_utils.ceil_to_ue8m0(amax.clamp(min=1e-4) * torch.tensor(1 / 448))[0].tolist()
    for value, power, on_cuda in zip(amax[0].tolist(), powers_of_two, by_reciprocal, strict=True):
        bound = Fraction(max(value, 1e-4)) / 448
        assert Fraction(power) / 2 < bound <= Fraction(power)
        assert power == on_cuda
    codes = codes.float()[0, 5::128]
    assert codes.max() == 448
    assert codes[amax[0] >= 1e-4].min() == 224


@pytest.mark.parametrize(
    ("value", "scale", "code", "power"),
    [
        pytest.param(0.0, 1.0, 0.0, 2.0**-22, id="a block of zeros has the floor's scale"),
        pytest.param(-0.0, 1.0, -0.0, 2.0**-22, id="negative zeros stay"),
        pytest.param(448.0, 0.0, 0.0, 2.0**-22, id="a scale of zero"),
        pytest.param(1.0, 2.0**-14, 256.0, 2.0**-22, id="below the floor"),
        pytest.param(448.0, 2.0**-22, 448.0, 2.0**-22, id="just above the floor"),
        pytest.param(448.0, 1.0, 448.0, 1.0, id="nothing to change"),
        pytest.param(448.0, 1.01, 224.0, 2.0, id="one more than a power"),
        pytest.param(-1.0, 1.0, -256.0, 2.0**-8, id="a power of two changes where the codes have room"),
        pytest.param(17.0, 1.0, 256.0, 2.0**-4, id="17 is no e4m3: 16"),
        pytest.param(448.0, 2.0**119, 448.0, 2.0**119, id="the largest that bf16 holds"),
    ],
)
def test_requantized_blocks_by_hand(value: float, scale: float, code: float, power: float) -> None:
    weight = torch.full((3, 5), value).to(E4M3)
    codes, packed = requantize_ue8m0(weight, torch.tensor([[scale]]))
    assert_same_fp8(codes, torch.full((3, 5), code).to(E4M3))
    assert unpack_ue8m0(packed).item() == power


@given(rows=ROWS, blocks=st.integers(1, 3), seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_second_pass_keeps_the_values(rows: int, blocks: int, seed: int) -> None:
    weight, packed = requantize_ue8m0(*block_fp8(rows, 128 * blocks, seed))
    again, packed_again = requantize_ue8m0(weight, unpack_ue8m0(packed))
    values = dequantize_block_fp8(weight, unpack_ue8m0(packed))
    assert torch.equal(values, dequantize_block_fp8(again, unpack_ue8m0(packed_again)))


def test_a_second_pass_may_change_the_bytes() -> None:
    """An amax of 225 s becomes the code 224, for which s / 2 is enough."""
    weight, packed = requantize_ue8m0(torch.full((1, 128), 225.0).to(E4M3), torch.tensor([[225 / 224]]))
    assert (weight[0, 0].item(), packed.item()) == (224.0, 127)
    weight, packed = requantize_ue8m0(weight, unpack_ue8m0(packed))
    assert (weight[0, 0].item(), packed.item()) == (448.0, 126)


@given(tiles=st.lists(st.integers(1, 2), min_size=2, max_size=3), blocks=st.integers(1, 3), seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_merging_after_requantizing_is_requantizing_the_merged_weight(
    tiles: list[int], blocks: int, seed: int
) -> None:
    parts = [block_fp8(128 * count, 128 * blocks, seed + index) for index, count in enumerate(tiles)]
    codes, packed = requantize_ue8m0(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    separate = [requantize_ue8m0(*part) for part in parts]
    assert_same_fp8(torch.cat([part[0] for part in separate]), codes)
    merged = merge_packed([part[1] for part in separate], [128 * count for count in tiles])
    assert_same_layout_and_bytes(merged, packed)


@pytest.mark.parametrize(
    ("scale", "code"),
    [
        pytest.param(NAN, 1.0, id="NaN scale"),
        pytest.param(INF, 1.0, id="infinite scale"),
        pytest.param(INF, 0.0, id="infinite scale of zeros"),
        pytest.param(2.0**120, 448.0, id="too large for bf16"),
        pytest.param(1.0, NAN, id="NaN code"),
        pytest.param(-0.5, 1.0, id="negative scale"),
        pytest.param(UNLOADED, 0.0, id="unloaded scale of zeros"),
    ],
)
def test_blocks_that_stock_would_spoil_are_refused(scale: float, code: float) -> None:
    weight, scales = torch.ones(300, 384).to(E4M3), torch.ones(3, 3)
    weight[128:256, 256:] = torch.tensor(code).to(E4M3)
    scales[1, 2] = scale
    scales[2, 0] = NAN
    named = re.escape(f"block [1, 2] of the weight has the scale {scale:g}")
    with pytest.raises(ValueError, match=rf"^{named}.*load this weight's scales again"):
        requantize_ue8m0(weight, scales)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        pytest.param(torch.ones(256, 384), torch.ones(2, 3), r"weight is \(256, 384\) torch.float32", id="float32"),
        pytest.param(torch.ones(1, 256, 384).to(E4M3), torch.ones(2, 3), r"weight is \(1, 256, 384\)", id="3-D"),
        pytest.param(
            torch.ones(256, 384).to(E4M3), torch.ones(3, 3), "3 blocks of 128 rows, but the weight's rows", id="rows"
        ),
        pytest.param(
            torch.ones(256, 384).to(E4M3), torch.ones(2, 4), r"scale is \(2, 4\) for a weight", id="columns"
        ),
        pytest.param(torch.ones(256, 384).to(E4M3), PACKED, "torch.int32; pass unpacked scales", id="packed already"),
    ],
)
def test_other_weights_are_not_requantized(weight: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requantize_ue8m0(weight, scale)
