"""Weight scales of block-FP8 linears as DeepGEMM reads them on SM100: four UE8M0 exponents to an int32.

A weight [N, K] in blocks of 128 x 128 carries one scale per block:

            dtype    shape                      strides             a scale is
    SM90    float32  [ceil(N/128), ceil(K/128)] (ceil(K/128), 1)    any float; read in place, as the checkpoint has it
    SM100   int32    [N, ceil(ceil(K/128) / 4)] (1, N rounded to 4) a power of two 2^(e - 127); e is its byte

SM100 in full. A UE8M0 byte is the exponent field of a positive normal float32 that is a power of two; 0 and 255 are
not used. Each row of the weight has its own bytes: the 128 rows of a block repeat them, and so a linear's N may be
any number. Block j of K is byte j % 4 of word j // 4, counted from the least significant; bytes behind the last block
are 0. Words are MN-major: one column, all N rows for four blocks of K, is contiguous and starts at a multiple of
16 bytes, what TMA wants; the rows from N up to that lie behind the view and are 0 here (DeepGEMM's kernel leaves them
uninitialized). Activations have the same layout with M for N, see
`create_per_token_group_quant_fp8_output_scale(scale_ue8m0=True)`.

The column stride is part of the contract: DeepGEMM as SGLang 0.5.17 installs it (sgl-deep-gemm 0.1.5) asserts
`sf.stride(-1) == get_tma_aligned_size(mn, 4)`. A slice of rows of a merged tensor fails that, whereas a slice of
SM90's row-major scales is a good operand. So merged scales on SM100 are a copy beside the parts' own, 4 bytes for 512
of weight, and an update in place of a part does not reach them.

Sources: SGLang 0.5.17 to 0.5.23, sglang/srt/layers/quantization/fp8_utils.py (`requant_weight_ue8m0`,
`per_block_cast_to_fp8`, `ceil_to_ue8m0`, `transform_scale_ue8m0`, `_unpack_ue8m0_scale_for_triton`), and DeepGEMM's
deep_gemm/utils/layout.py and impls/smxx_layout.cuh. SGLang 0.5.11 rounds scales up by `pow(2, ceil(log2(x)))`
instead of in the exponent's bits.

Nothing uses this module yet. The fused path runs on SM90 alone, and `merge_linears` refuses int32 scales; to merge
on SM100 it would need `merge_packed`. Bytes are compared with the torch code of SGLang and DeepGEMM on a CPU; neither
their CUDA packing kernels nor a GEMM on SM100 has been run against it.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantize import dequantize_block_fp8

BLOCK = 128
PER_WORD = 4
"""Exponents in an int32."""

TMA_ALIGNED_ROWS = 4
"""Rows of int32 in 16 bytes."""

FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
"""Stock's floor of a block's largest magnitude; an all-zero block gets the scale 2^-22."""

MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
NO_EXPONENT, NOT_A_NUMBER = 0, 255
"""Exponent fields of zero and the subnormals, and of infinity and NaN. As UE8M0, byte 0 is 2^-127 and 255 is NaN."""

REQUANTIZE = "use requantize_ue8m0 on the weight and its scales"
RELOAD = "load this weight's scales again, or quantize it anew"


def pack_ue8m0(scale: Tensor, rows: int) -> Tensor:
    """Packs a weight's scales for SM100 without changing a single one: `unpack_ue8m0` returns them.

    scale: [ceil(N/128), ceil(K/128)] float32, any strides. rows: N.
    Returns int32 [N, ceil(ceil(K/128) / 4)] with strides (1, N rounded up to a multiple of 4), zeros behind.

    Bit for bit what stock's `transform_scale_ue8m0(scale, mn=rows)` returns, except that stock's torch code drops
    sign and mantissa of a scale that has them, silently. To do to any checkpoint what stock does while loading it,
    call `requantize_ue8m0`: stock also requantizes weights whose scales are powers of two already.

    Raises ValueError if shape or dtype are wrong, or for the first scale, in row-major order, that is not a power of
    two from 2^-126 to 2^127.
    """
    _check_scale(scale, rows, "rows")
    bits = scale.view(torch.int32)
    exponents = bits >> MANTISSA_BITS
    # A sign makes the exponent negative: the shift is arithmetic.
    refused = (bits & MANTISSA != 0) | (exponents <= NO_EXPONENT) | (exponents >= NOT_A_NUMBER)
    if refused.any():
        row, column = _first(refused)
        raise ValueError(f"scale[{row}, {column}] {_refusal(scale[row, column].item())}")
    exponents = F.pad(exponents.to(torch.uint8), (0, -scale.shape[1] % PER_WORD))
    words = exponents.contiguous().view(torch.int32)
    packed = _zeros_packed(rows, words.shape[1], scale.device)
    packed.copy_(words.repeat_interleave(BLOCK, dim=0)[:rows])
    return packed


def unpack_ue8m0(packed: Tensor) -> Tensor:
    """The inverse of `pack_ue8m0`: int32 [N, W] of any strides to float32 [ceil(N/128), ceil(K/128)], row-major.

    ceil(K/128) is read from the padding bytes. SM90's form: what stock's `_unpack_ue8m0_scale_for_triton` returns.

    Raises ValueError if a byte cannot have come from `pack_ue8m0`, or if rows of one block differ, as they do in a
    merged tensor of linears whose N is no multiple of 128 (unpack its parts instead).
    """
    exponents = _exponents(packed, "packed")
    firsts = exponents[::BLOCK]
    differ = exponents != firsts.repeat_interleave(BLOCK, dim=0)[: len(exponents)]
    if differ.any():
        row, column = _first(differ)
        raise ValueError(
            f"packed[{row}, {column // PER_WORD}]: the scale of block {column} of K is not the one of row "
            f"{row // BLOCK * BLOCK}, where this block of {BLOCK} rows begins; unpack merged linears one by one"
        )
    return (firsts << MANTISSA_BITS).view(torch.float32)


def merge_packed(scales: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Packed scales of several linears of one K as those of their weights concatenated along N; new memory.

    scales: int32 [N_i, W] each, of any strides. rows: N_i of each weight, any numbers.
    Returns int32 [sum N_i, W] with strides (1, sum N_i rounded up to a multiple of 4), zeros behind.

    Every row keeps its words, so nothing is rounded; each part's row padding is left out. If every N_i is a multiple
    of 128, it is `pack_ue8m0` of the concatenated scales.

    Raises ValueError if the parts are not packed scales of one K on one device with those rows.
    """
    if not scales or len(scales) != len(rows):
        raise ValueError(f"{len(scales)} packed scales with {len(rows)} row counts; pass one count for each of them")
    blocks = []
    for index, (scale, count) in enumerate(zip(scales, rows, strict=True)):
        if scale.device != scales[0].device:
            raise ValueError(f"scales[{index}] is on {scale.device} and scales[0] on {scales[0].device}; move one")
        blocks.append(_exponents(scale, f"scales[{index}]").shape[1])
        if scale.shape[0] != count:
            raise ValueError(f"scales[{index}] has {scale.shape[0]} rows and its weight {count}; pack it for {count}")
        if blocks[index] != blocks[0]:
            raise ValueError(
                f"scales[{index}] has {blocks[index]} blocks along K and scales[0] has {blocks[0]}; "
                "merge only linears of the same input"
            )
    merged = _zeros_packed(sum(rows), scales[0].shape[1], scales[0].device)
    start = 0
    for scale, count in zip(scales, rows, strict=True):
        merged[start : start + count] = scale
        start += count
    return merged


def requantize_ue8m0(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Requantizes a weight to scales that are powers of two, as stock SGLang does on SM100 while loading it.

    weight: [N, K] float8_e4m3fn. scale: [ceil(N/128), ceil(K/128)] float32. Neither is changed.
    Returns float8_e4m3fn [N, K], contiguous, and the packed scales, as `pack_ue8m0` lays them out.

    Bit for bit stock's `requant_weight_ue8m0`. Per block:

        w    = bf16(fp32(weight * scale))      two roundings
        amax = max(max |w|, 1e-4)
        s    = the smallest power of two that is not below amax / 448
        q    = e4m3(w / s), to nearest even    exact before this rounding

    s is the same however amax / 448 is rounded (torch divides on a CPU and multiplies by fp32(1/448) on CUDA): amax
    is 1e-4 or a bf16, so the quotient is a power of two, which both give exactly, or 1/224 of one away from it.

    A second pass returns the same values, but not always the same bytes: where amax has become 224 s, it halves s.

    Raises ValueError if shape or dtype are wrong, or for the first block whose scale is negative or which does not
    dequantize to finite bf16 (stock makes NaN of those).
    """
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}; only [N, K] float8_e4m3fn is requantized")
    rows, columns = weight.shape
    _check_scale(scale, rows, "the weight's rows")
    if scale.shape[1] != -(-columns // BLOCK):
        raise ValueError(f"scale is {tuple(scale.shape)} for a weight of {tuple(weight.shape)}; pass its own scales")
    dequantized = dequantize_block_fp8(weight, scale).to(torch.bfloat16)
    blocks = F.pad(dequantized, (0, -columns % BLOCK, 0, -rows % BLOCK)).view(len(scale), BLOCK, -1, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).float()
    refused = ~amax.isfinite()[:, 0, :, 0] | (scale < 0)
    if refused.any():
        row, column = _first(refused)
        raise ValueError(
            f"block [{row}, {column}] of the weight has the scale {scale[row, column].item():g} and reaches "
            f"{amax[row, 0, column, 0].item():g} in bfloat16; {RELOAD}"
        )
    quotient = amax.clamp(min=AMAX_FLOOR) / FP8_MAX
    # The carry of any mantissa bit raises the exponent; from 2^-22 to 2^120, so that nothing has to be clamped.
    power = ((quotient.view(torch.int32) + MANTISSA) & ~MANTISSA).view(torch.float32)
    codes = (blocks * (1.0 / power)).to(torch.float8_e4m3fn).view(len(scale) * BLOCK, -1)
    return codes[:rows, :columns].contiguous(), pack_ue8m0(power[:, 0, :, 0], rows)


def _check_scale(scale: Tensor, rows: int, name: str) -> None:
    if scale.dtype != torch.float32 or scale.dim() != 2 or not scale.numel():
        raise ValueError(
            f"scale is {tuple(scale.shape)} {scale.dtype}; pass unpacked scales, [ceil(N/128), ceil(K/128)] float32"
        )
    if scale.shape[0] != -(-rows // BLOCK):
        raise ValueError(
            f"scale has {scale.shape[0]} blocks of {BLOCK} rows, but {name} are {rows}; pass the N of its own weight"
        )


def _refusal(value: float) -> str:
    """Why a float32 is no UE8M0 scale, and what to do."""
    if not math.isfinite(value):
        return f"is {value}: the checkpoint is damaged; {RELOAD}"
    if value == torch.finfo(torch.float32).min:
        return f"is {value:g}, with which SGLang fills scales that are still to be loaded; {RELOAD}"
    if math.copysign(1.0, value) < 0:
        return f"is {value:g}: UE8M0 has no sign; {RELOAD}"
    if value < torch.finfo(torch.float32).tiny:
        kind = "subnormal" if value else "zero"
        return f"is {value:g}: UE8M0 has no {kind}, and its byte 0 stands for 2^-127; {REQUANTIZE}"
    return f"is {value!r}: not a power of two, and UE8M0 holds nothing else; {REQUANTIZE}"


def _exponents(packed: Tensor, name: str) -> Tensor:
    """The bytes of packed scales, [N, ceil(K/128)] int32, without the padding; ValueError if they are not such."""
    if packed.dtype != torch.int32 or packed.dim() != 2 or not packed.numel():
        raise ValueError(f"{name} is {tuple(packed.shape)} {packed.dtype}, not packed scales; use pack_ue8m0 first")
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    exponents = ((packed.unsqueeze(-1) >> shifts) & 0xFF).flatten(1)
    used = exponents.any(dim=0).tolist()
    blocks = len(used)
    while blocks > len(used) - PER_WORD + 1 and not used[blocks - 1]:
        blocks -= 1
    exponents = exponents[:, :blocks]
    refused = (exponents == NO_EXPONENT) | (exponents == NOT_A_NUMBER)
    if refused.any():
        row, column = _first(refused)
        raise ValueError(
            f"{name}[{row}, {column // PER_WORD}]: byte {column % PER_WORD} is {exponents[row, column].item()}, no "
            "exponent of a scale; pack the float32 scales again with pack_ue8m0"
        )
    return exponents


def _zeros_packed(rows: int, words: int, device: torch.device) -> Tensor:
    aligned_rows = -(-rows // TMA_ALIGNED_ROWS) * TMA_ALIGNED_ROWS
    return torch.zeros((words, aligned_rows), dtype=torch.int32, device=device).t()[:rows]


def _first(mask: Tensor) -> tuple[int, int]:
    """Where the first true element of a matrix is, in row-major order."""
    row, column = mask.nonzero()[0].tolist()
    return row, column
