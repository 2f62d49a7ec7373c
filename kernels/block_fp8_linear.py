"""The block-FP8 linear of stock SGLang on Hopper, in torch: quantize the activation, multiply, add the bias.

Stock runs three kernels for `y = x @ W.T + bias`; this is the reference of each, on any device.

1. `quantize_per_token_group`: one fp32 scale for each 128 consecutive elements of a row.
   Source: `per_token_group_quant.cuh` in SGLang 0.5.17 (`QuantTrait::run`, fp32 scales).
2. `block_fp8_matmul`: fp8 times fp8, each 128-wide block of K scaled in fp32, rounded once to the output type.
   Source: DeepGEMM's `fp8_gemm_nt` for SM90, one scale per 1x128 of the activation and 128x128 of the weight.
3. The bias is added to the *rounded* output, a second rounding.
   Source: `deepgemm_w8a8_block_fp8_linear_with_fallback` in SGLang's `fp8_utils.py`.

Rounding order of the quantizer, per group (bf16 input):

    amax       = max(max |x| in bf16, 1e-10)   NaN is skipped, an infinity is not
    scale      = fp32(amax * fp32(1/448))
    multiplier = fp32(448 * rcp(amax))         rcp: the GPU's approximate reciprocal, see `_hardware_reciprocal`
    q          = e4m3(min(fp32(x * multiplier), 448)), to nearest even, saturating; NaN becomes +448

The kernel is compiled with `--use_fast_math`, so `448 / amax` is not a division: the approximate reciprocal is
off by one ulp for 20 of the 128 bf16 mantissas and zero above 2^126. On normally distributed rows an IEEE division
would change one fp8 byte in 1,200 and a correctly rounded reciprocal one in 20,000, so it is part of the contract.
With it, bytes and scales equal the stock kernel's on an H200 for every bf16 mantissa of the amax and every x below
it (see the tests).

The matmul's dot products are exact (products of two e4m3 are multiples of 2^-18 below 2^18, so 128 of them fit
a float64), hence a row's bytes depend neither on the other rows nor on the BLAS, its threads or the machine.
Hopper's tensor cores keep fewer bits inside a block, so DeepGEMM agrees within a tolerance: on an H200 94 % of the
bf16 outputs are the same, whatever the shape.
"""

import functools

import torch
from torch import Tensor

GROUP = 128
"""Elements of K that share an activation scale; weight scales cover GROUP x GROUP."""

FP8_MAX = 448.0
AMAX_FLOOR = 1e-10
TMA_ALIGNED_ROWS = 4
"""Rows of fp32 scales in 16 bytes, what the TMA unit wants every column of scales to be a multiple of."""

# bf16 mantissas m (7 bits) for which the GPU's rcp.approx.ftz.f32 of 1.m is one fp32 ulp below or above the
# correctly rounded reciprocal; read from an H200, where the exponent makes no difference.
_RECIPROCAL_ONE_ULP_LOW = (4, 11, 20, 22, 127)
_RECIPROCAL_ONE_ULP_HIGH = (6, 13, 37, 38, 51, 61, 65, 66, 81, 91, 109, 115, 116, 118, 121)
_SMALLEST_NORMAL_RECIPROCAL_OF = 2.0**126


def quantize_per_token_group(x: Tensor, *, tma_aligned: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize each row in groups of 128 to e4m3.

    x: [M, K], K a multiple of 128, bfloat16, any strides; M may be 0. float32 and float16 are taken too: float32
    (which stock's kernel refuses) runs the same formula with the amax in float32 and an IEEE reciprocal; float16
    as well, so there single bytes can differ from the GPU's.

    Returns q [M, K] float8_e4m3fn, contiguous, and scale [M, K/128] float32 with x close to q * scale.
    The scale is row-major, or laid out as DeepGEMM reads it on SM90 if `tma_aligned` (see `to_tma_aligned`).

    Raises ValueError if x is not 2-D or K is not a multiple of 128 (stock asserts the same).
    """
    if x.dim() != 2 or x.shape[1] % GROUP:
        raise ValueError(
            f"block-FP8 quantization takes [M, K] with K a multiple of {GROUP}, got {tuple(x.shape)}; "
            "keep this layer in bf16"
        )
    rows, k = x.shape
    groups = x.contiguous().view(rows, k // GROUP, GROUP)
    magnitude = groups.abs()
    amax = magnitude.masked_fill(magnitude.isnan(), 0.0).amax(-1).float().clamp(min=AMAX_FLOOR)
    reciprocal = _hardware_reciprocal(amax) if x.dtype == torch.bfloat16 else amax.reciprocal()
    scaled = groups.float() * (FP8_MAX * reciprocal).unsqueeze(-1)
    # fmin, unlike clamp, returns the number when the other operand is NaN.
    saturated = torch.fmin(scaled, scaled.new_tensor(FP8_MAX)).clamp(min=-FP8_MAX)
    q = saturated.to(torch.float8_e4m3fn).view(rows, k)
    scale = amax * (1.0 / FP8_MAX)
    return q, to_tma_aligned(scale) if tma_aligned else scale


def to_tma_aligned(scale: Tensor) -> Tensor:
    """Lay out activation scales [M, K/128] float32 as DeepGEMM reads them on SM90.

    The result has the same shape and values, but is MN-major: strides (1, M rounded up to a multiple of 4).
    The rows of padding lie behind the view and are zero; stock leaves them uninitialized.
    """
    rows, blocks = scale.shape
    aligned_rows = -(-rows // TMA_ALIGNED_ROWS) * TMA_ALIGNED_ROWS
    buffer = scale.new_zeros(blocks, aligned_rows)
    buffer[:, :rows] = scale.t()
    return buffer.t()[:rows]


def block_fp8_matmul(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiply quantized activations by a block-quantized weight: [M, K] x [N, K] -> [M, N] in `out_dtype`.

    q: [M, K] float8_e4m3fn. scale: [M, K/128] float32, either layout.
    weight: [N, K] float8_e4m3fn. weight_scale_inv: [ceil(N/128), K/128] float32.

    For each block of 128 along K, in order: the exact dot product rounded to fp32, times
    fp32(scale * weight_scale_inv), added to the fp32 accumulator; the sum is rounded once to `out_dtype`.

    Raises ValueError if the shapes don't fit together.
    """
    rows, k = q.shape
    columns = weight.shape[0]
    blocks = k // GROUP
    expected = {
        "weight": (weight, (columns, k)),
        "scale": (scale, (rows, blocks)),
        "weight_scale_inv": (weight_scale_inv, (-(-columns // GROUP), blocks)),
    }
    for name, (tensor, shape) in expected.items():
        if k % GROUP or tensor.shape != shape:
            raise ValueError(f"block-FP8 matmul of q {tuple(q.shape)}: {name} is {tuple(tensor.shape)}, not {shape}")

    accumulator = torch.zeros(rows, columns, dtype=torch.float32, device=q.device)
    for block in range(blocks):
        k_slice = slice(block * GROUP, (block + 1) * GROUP)
        dot = (_to_float64(q[:, k_slice]) @ _to_float64(weight[:, k_slice]).t()).float()
        column_scale = weight_scale_inv[:, block].repeat_interleave(GROUP)[:columns]
        accumulator += dot * (scale[:, block].unsqueeze(1) * column_scale)
    return accumulator.to(out_dtype)


@functools.cache
def _every_e4m3(device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).double()


def _to_float64(x: Tensor) -> Tensor:
    """`x.double()` of float8_e4m3fn, by a table: PyTorch's own conversion is five times slower on a CPU."""
    return _every_e4m3(x.device).index_select(0, x.reshape(-1).view(torch.uint8).int()).view(x.shape)


def block_fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
) -> Tensor:
    """Stock's whole block-FP8 linear: x [..., K] -> [..., N] in x's dtype.

    x: bfloat16 (float32 and float16 as `quantize_per_token_group` says), any leading dimensions and strides.
    With `x_scale` [M, K/128], x is already quantized, M being the product of its leading dimensions; the output
    is then bfloat16, as stock has it.
    weight, weight_scale_inv: as `block_fp8_matmul` takes them. bias: [N], added in the output's dtype after the
    matmul's rounding, so that bf16 rounds twice.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x_scale is None:
        q, x_scale = quantize_per_token_group(rows)
        out = block_fp8_matmul(q, x_scale, weight, weight_scale_inv, x.dtype)
    else:
        out = block_fp8_matmul(rows, x_scale, weight, weight_scale_inv, torch.bfloat16)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _hardware_reciprocal(amax: Tensor) -> Tensor:
    """What `rcp.approx.ftz.f32` gives on a GPU for amax [..] float32, each a positive bf16 value.

    AMAX_FLOOR, which is none, comes out one ulp high; no bf16 x below it quantizes differently for that.
    """
    ulps = torch.zeros(128, dtype=torch.int32)
    ulps[list(_RECIPROCAL_ONE_ULP_LOW)] = -1
    ulps[list(_RECIPROCAL_ONE_ULP_HIGH)] = 1
    mantissa = (amax.view(torch.int32) >> 16) & 0x7F
    reciprocal = (amax.reciprocal().view(torch.int32) + ulps.to(amax.device)[mantissa]).view(torch.float32)
    return reciprocal.masked_fill(amax > _SMALLEST_NORMAL_RECIPROCAL_OF, 0.0)  # subnormals are flushed
