// RMSNorm + quantization of one row per block, behind an optional residual sum. Rounding and reduction order: see
// rmsnorm_quant.py.
#pragma once

#include "dependent_launch.cuh"

namespace fastpath {

// Rows of all tensors are dense. Without kResidual `residual` is unused; `normed` may be null, and may be x.
struct RmsNormParams {
  const bf16* x;
  const bf16* weight;
  bf16* residual;  // the sum takes its place
  bf16* normed;    // the row in bf16, where something other than the next linear reads it
  QuantizedRows out;
  int rows;
  float eps;
};

constexpr int kMostNormThreads = 1024;

// rsqrt as stock has it: rsqrtf would rescale a subnormal argument (which cannot be, above an eps).
__device__ __forceinline__ float approximate_rsqrt(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// A thread of stock's kernel has every kChains-th vector of a row (kChains: 32, 64 or 128) and adds its squares one after
// another. Here each vector has a thread of its own; the values, in fp32, pass through shared memory to the first kChains
// threads, which do nothing but add.
template <int kChains, bool kResidual>
__global__ void __launch_bounds__(kMostNormThreads, 2) rmsnorm_quant_kernel(const __grid_constant__ RmsNormParams params) {
  extern __shared__ float4 shared[];  // [vectors of a chain, halves of a vector, kChains]
  __shared__ float partial[kChains / 32];
  const int row = blockIdx.x;
  const int column = threadIdx.x * kVector;
  const int64_t at = static_cast<int64_t>(row) * blockDim.x * kVector + column;
  const int chain = threadIdx.x % kChains;

  wait_for_inputs();
  release_next_kernel();
  const Vector x = load_written(params.x + at);
  Vector residual;
  if constexpr (kResidual) residual = load_written(params.residual + at);
  const Vector weight = load(params.weight + column);
  float value[kVector];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    float2 sum = to_floats(x.pair[i]);
    if constexpr (kResidual) {
      const float2 other = to_floats(residual.pair[i]);
      sum = {__fadd_rn(sum.x, other.x), __fadd_rn(sum.y, other.y)};
      residual.pair[i] = __floats2bfloat162_rn(sum.x, sum.y);
    }
    value[2 * i] = sum.x;
    value[2 * i + 1] = sum.y;
  }
  float4* own = shared + 2 * threadIdx.x - chain;
  own[0] = {value[0], value[1], value[2], value[3]};
  own[kChains] = {value[4], value[5], value[6], value[7]};  // read back below: registers are short
  __syncthreads();
  if constexpr (kResidual) store(params.residual + at, residual);

  if (threadIdx.x < kChains) {
    // The next vector is on its way while this one is added.
    const float4* end = shared + 2 * blockDim.x;
    const float4* from = shared + chain;
    float4 next[2] = {from[0], from[kChains]};
    float squares = 0.0f;
#pragma unroll 2
    while (from < end) {
      const float4 now[2] = {next[0], next[1]};
      from += 2 * kChains;
      if (from < end) {
        next[0] = from[0];
        next[1] = from[kChains];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        squares = __fmaf_rn(now[i].x, now[i].x, squares);
        squares = __fmaf_rn(now[i].y, now[i].y, squares);
        squares = __fmaf_rn(now[i].z, now[i].z, squares);
        squares = __fmaf_rn(now[i].w, now[i].w, squares);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, lanes));
    }
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  }
  __syncthreads();
  const float4 halves[2] = {own[0], own[kChains]};
  float sum = partial[0];
  if constexpr (kChains > 32) sum = __fadd_rn(sum, partial[1]);
  if constexpr (kChains > 64) sum = __fadd_rn(sum, __fadd_rn(partial[2], partial[3]));
  const float mean = __fdiv_rn(sum, static_cast<float>(blockDim.x * kVector));
  const float factor = approximate_rsqrt(__fadd_rn(mean, params.eps));

  Vector y;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float4& half = halves[i / 2];
    const float2 v = i % 2 ? float2{half.z, half.w} : float2{half.x, half.y};
    const float2 w = to_floats(weight.pair[i]);
    // Stock adds its weight's bias, 0: a weight of -0 is +0.
    y.pair[i] = __floats2bfloat162_rn(
        __fmul_rn(__fmul_rn(v.x, factor), __fadd_rn(w.x, 0.0f)), __fmul_rn(__fmul_rn(v.y, factor), __fadd_rn(w.y, 0.0f)));
  }
  bf16x2 most = vector_amax(y);
#pragma unroll
  for (int lanes = kGroupThreads / 2; lanes; lanes /= 2) most = __hmax2(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  const float amax = floored(fmaxf(to_floats(most).x, to_floats(most).y));
  store(params.out.q + at, quantized(y, quantization_multiplier(amax)));
  if (threadIdx.x % kGroupThreads == 0) {
    const int group = threadIdx.x / kGroupThreads;
    store_scale(
        params.out.scale + row, params.out.scale_stride, group, amax, padding_behind(params.out, row, params.rows));
  }
  if (params.normed) store(params.normed + at, y);
}

}  // namespace fastpath
