// Bias, QK RMSNorm and RoPE on the raw QKV GEMM outputs of both streams, written into the joint q, k, v buffers.
// Rounding and reduction order: see qkv_epilogue.py.
#pragma once

#include "fp8_quantize.cuh"

namespace fastpath {

constexpr int kHead = 128;

// One stream. Rows of q, k and v are `stride` apart (three times their width where the GEMM was merged).
struct QkvStream {
  const bf16* projected[3];  // q, k, v
  const bf16* bias[3];       // [heads * 128], unread without kBias
  const bf16* norm[2];       // RMSNorm weight of q and of k, [128]
  const float* cosine;       // [rows_per_batch, 64], rows table_stride apart
  const float* sine;
  int rows;
  int rows_per_batch;
  int stride;
  int table_stride;
  int offset;                // of the stream's first token in the joint sequence
};

struct QkvParams {
  QkvStream stream[2];
  bf16* joint[3];            // [batch, tokens, heads, 128]
  int tokens;                // of the joint sequence
  int heads;
  float eps;
};

// One block a row, a warp a head. Each warp takes the same head of q, k and v at a time: three loads in flight.
template <bool kBias>
__global__ void __launch_bounds__(256) qkv_epilogue_kernel(const __grid_constant__ QkvParams params) {
  const bool second = static_cast<int>(blockIdx.x) >= params.stream[0].rows;
  const QkvStream& s = params.stream[second];
  const int row = blockIdx.x - (second ? params.stream[0].rows : 0);
  const int batch = row / s.rows_per_batch;
  const int token = row - batch * s.rows_per_batch;
  const int lane = threadIdx.x % 32;
  const int64_t out_row = static_cast<int64_t>(batch) * params.tokens + s.offset + token;

  const int64_t angle = static_cast<int64_t>(token) * s.table_stride;
  const float2 cosine = __ldg(reinterpret_cast<const float2*>(s.cosine + angle) + lane);
  const float2 sine = __ldg(reinterpret_cast<const float2*>(s.sine + angle) + lane);
  const Quad weights[2] = {load_quad(s.norm[0], lane), load_quad(s.norm[1], lane)};

  for (int head = threadIdx.x / 32; head < params.heads; head += 8) {
    Quad x[3];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      x[part] = load_quad(s.projected[part] + static_cast<int64_t>(row) * s.stride + head * kHead, lane);
    }
    if constexpr (kBias) {
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const Quad bias = load_quad(s.bias[part] + head * kHead, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) x[part].pair[i] = __hadd2_rn(x[part].pair[i], bias.pair[i]);
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const float2 a = to_floats(x[part].pair[0]);
      const float2 b = to_floats(x[part].pair[1]);
      float squares = __fadd_rn(
          __fmaf_rn(a.x, a.x, __fmul_rn(a.y, a.y)), __fmaf_rn(b.x, b.x, __fmul_rn(b.y, b.y)));
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) {
        squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, lanes));
      }
      const float factor = rsqrtf(__fmaf_rn(squares, 1.0f / kHead, params.eps));
      const float2 wa = to_floats(weights[part].pair[0]);
      const float2 wb = to_floats(weights[part].pair[1]);
      const float2 na = {__fmul_rn(a.x, __fmul_rn(factor, wa.x)), __fmul_rn(a.y, __fmul_rn(factor, wa.y))};
      const float2 nb = {__fmul_rn(b.x, __fmul_rn(factor, wb.x)), __fmul_rn(b.y, __fmul_rn(factor, wb.y))};
      x[part].pair[0] = __floats2bfloat162_rn(
          __fmaf_rn(na.x, cosine.x, -__fmul_rn(na.y, sine.x)), __fmaf_rn(na.y, cosine.x, __fmul_rn(na.x, sine.x)));
      x[part].pair[1] = __floats2bfloat162_rn(
          __fmaf_rn(nb.x, cosine.y, -__fmul_rn(nb.y, sine.y)), __fmaf_rn(nb.y, cosine.y, __fmul_rn(nb.x, sine.y)));
    }
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      bf16* to = params.joint[part] + (out_row * params.heads + head) * kHead;
      reinterpret_cast<uint2*>(to)[lane] = reinterpret_cast<const uint2&>(x[part]);
    }
  }
}

}  // namespace fastpath
