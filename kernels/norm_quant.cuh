// LayerNorm + modulation + quantization of one row per block, behind an optional bias + gate + residual.
// Rounding and reduction order: see norm_quant.py.
#pragma once

#include "fp8_quantize.cuh"

namespace fastpath {

// One stream (text or image). Rows of x, residual and the outputs are `width` apart; gate, scale and shift belong
// to a batch element and are `modulation_stride` apart. Pointers that a variant does not use may be null.
struct NormStream {
  const bf16* x;
  const bf16* bias;
  const bf16* residual;
  const bf16* gate;
  const bf16* scale;
  const bf16* shift;
  bf16* residual_out;
  bf16* normed;  // the modulated row in bf16, where something other than the next GEMM reads it
  QuantizedRows out;
  int rows;
  int rows_per_batch;
  int gate_stride;
  int modulation_stride;
};

struct NormParams {
  NormStream stream[2];
  int width;
  float eps;
};

// Stock's block has a thread for every eight elements. Here a thread has four of the lanes of one of stock's warps, eight
// apart: the first two steps of stock's tree (16 and 8 lanes apart) are additions in registers, and what is done once
// a thread is done a quarter as often. (Three of stock's warps a thread, a warp a row, was slower: too few in flight.)
constexpr int kStockLanes = 4;
constexpr int kLanesApart = 32 / kStockLanes;
constexpr int kStockWarp = 32 * kVector;  // elements of one of stock's warps
constexpr int kMostStockWarps = 32;

// Sum over stock's block in stock's order: `value` holds a thread's four lanes. Down the warp by 16, 8, 4, 2, 1, then
// the warps' sums by the same tree, which every warp computes for itself: that saves stock's second barrier.
__device__ __forceinline__ float block_sum(const float (&value)[kStockLanes], float* partial, int stock_warps) {
  float sum = __fadd_rn(__fadd_rn(value[0], value[2]), __fadd_rn(value[1], value[3]));
#pragma unroll
  for (int offset = kLanesApart / 2; offset; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, offset));
  }
  if (threadIdx.x % kLanesApart == 0) partial[threadIdx.x / kLanesApart] = sum;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  sum = lane < stock_warps ? partial[lane] : 0.0f;
#pragma unroll
  for (int offset = 16; offset; offset /= 2) sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, offset));
  return __shfl_sync(0xffffffffu, sum, 0);
}

// kGated: x is gated and added to a residual first. kZeroAdded: stock's MulAdd adds 0 to the gate, which turns a
// gate of -0 into +0; its fused residual norm does not.
template <bool kGated, bool kBias, bool kZeroAdded>
__global__ void __launch_bounds__(kMostStockWarps * kLanesApart, 3)
    norm_quant_kernel(const __grid_constant__ NormParams params) {
  __shared__ float partial[2][kMostStockWarps];
  const bool second = static_cast<int>(blockIdx.x) >= params.stream[0].rows;
  const NormStream& s = params.stream[second];
  const int row = blockIdx.x - (second ? params.stream[0].rows : 0);
  const int batch = s.rows == s.rows_per_batch ? 0 : row / s.rows_per_batch;
  const int stock_warps = params.width / kStockWarp;
  const int stock_warp = threadIdx.x / kLanesApart;
  const bool active = stock_warp < stock_warps;  // the block is made of whole warps; the rest repeats a warp's work
  const int column = (active ? stock_warp * kStockWarp : 0) + threadIdx.x % kLanesApart * kVector;
  const int64_t at = static_cast<int64_t>(row) * params.width + column;
  constexpr int kStep = kLanesApart * kVector;

  Vector x[kStockLanes];
#pragma unroll
  for (int j = 0; j < kStockLanes; ++j) x[j] = load(s.x + at + j * kStep);
  if constexpr (kGated) {
    Vector residual[kStockLanes];
#pragma unroll
    for (int j = 0; j < kStockLanes; ++j) residual[j] = load(s.residual + at + j * kStep);
    const bf16* gates = s.gate + static_cast<int64_t>(batch) * s.gate_stride + column;
#pragma unroll
    for (int j = 0; j < kStockLanes; ++j) {
      Vector gate = load(gates + j * kStep);
      Vector bias;
      if constexpr (kBias) bias = load(s.bias + column + j * kStep);
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        if constexpr (kBias) x[j].pair[i] = __hadd2_rn(x[j].pair[i], bias.pair[i]);
        if constexpr (kZeroAdded) gate.pair[i] = __hadd2_rn(gate.pair[i], __float2bfloat162_rn(0.0f));
        x[j].pair[i] = __hfma2(x[j].pair[i], gate.pair[i], residual[j].pair[i]);
      }
      if (active) store(s.residual_out + at + j * kStep, x[j]);
    }
  }

  float value[kStockLanes][kVector];
  float sum[kStockLanes];
#pragma unroll
  for (int j = 0; j < kStockLanes; ++j) {
    sum[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float2 pair = to_floats(x[j].pair[i]);
      value[j][2 * i] = pair.x;
      value[j][2 * i + 1] = pair.y;
      sum[j] = __fadd_rn(__fadd_rn(sum[j], pair.x), pair.y);
    }
  }
  const float width = static_cast<float>(params.width);
  const float mean = __fdiv_rn(block_sum(sum, partial[0], stock_warps), width);
#pragma unroll
  for (int j = 0; j < kStockLanes; ++j) {
    sum[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      value[j][i] = __fsub_rn(value[j][i], mean);
      sum[j] = __fmaf_rn(value[j][i], value[j][i], sum[j]);
    }
  }
  const float variance = __fdiv_rn(block_sum(sum, partial[1], stock_warps), width);
  const float factor = rsqrtf(__fadd_rn(variance, params.eps));

  const int64_t modulation = static_cast<int64_t>(batch) * s.modulation_stride + column;
  Vector y[kStockLanes];
#pragma unroll
  for (int j = 0; j < kStockLanes; ++j) {
    const Vector scale = load(s.scale + modulation + j * kStep);
    const Vector shift = load(s.shift + modulation + j * kStep);
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float2 n = to_floats(__floats2bfloat162_rn(
          __fmul_rn(value[j][2 * i], factor), __fmul_rn(value[j][2 * i + 1], factor)));
      const float2 sc = to_floats(scale.pair[i]);
      const float2 sh = to_floats(shift.pair[i]);
      y[j].pair[i] = __floats2bfloat162_rn(
          __fmaf_rn(__fadd_rn(sc.x, 1.0f), n.x, sh.x), __fmaf_rn(__fadd_rn(sc.y, 1.0f), n.y, sh.y));
    }
  }

  // The halves of one of stock's warps are two groups of 128. A thread has two vectors in each and reduces both
  // groups at once: the first in the low, the second in the high half of a pair.
  const bf16x2 first = __hmax2(vector_amax(y[0]), vector_amax(y[1]));
  const bf16x2 last = __hmax2(vector_amax(y[2]), vector_amax(y[3]));
  bf16x2 most = __hmax2(__lows2bfloat162(first, last), __highs2bfloat162(first, last));
#pragma unroll
  for (int lanes = kLanesApart / 2; lanes; lanes /= 2) most = __hmax2(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  if (!active) return;
  const float amax[2] = {floored(to_floats(most).x), floored(to_floats(most).y)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float multiplier = quantization_multiplier(amax[half]);
    store(s.out.q + at + 2 * half * kStep, quantized(y[2 * half], multiplier));
    store(s.out.q + at + (2 * half + 1) * kStep, quantized(y[2 * half + 1], multiplier));
    if (threadIdx.x % kLanesApart == half) {
      const int group = stock_warp * 2 + half;
      store_scale(s.out.scale + row, s.out.scale_stride, group, amax[half], padding_behind(s.out, row, s.rows));
    }
  }
  if (s.normed) {
#pragma unroll
    for (int j = 0; j < kStockLanes; ++j) store(s.normed + at + j * kStep, y[j]);
  }
}

}  // namespace fastpath
