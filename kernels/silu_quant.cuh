// silu(x1) * x2 and its quantization. Rounding: see silu_quant.py.
#pragma once

#include "activation.cuh"
#include "dependent_launch.cuh"

namespace fastpath {

// Rows of x are [x1, x2], dense.
struct SiluParams {
  const bf16* x;
  QuantizedRows out;
  int rows;
  int width;  // of x1, x2 and their product
};

constexpr int kSiluThreads = 128;
constexpr int kSiluPart = kInFlight * kSiluThreads * kVector;  // elements of a row that a block makes

// x / (1 + exp(-x)) by the instructions that stock's kernel is compiled to with --use_fast_math; in fp32, not rounded.
__device__ __forceinline__ float fast_silu(float x) {
  float y;
  asm("{\n"
      "  .reg .f32 t;\n"
      "  mul.rn.ftz.f32 t, %1, 0fBFB8AA3B;\n"  // -log2(e)
      "  ex2.approx.ftz.f32 t, t;\n"
      "  add.rn.ftz.f32 t, t, 0f3F800000;\n"
      "  div.approx.ftz.f32 %0, %1, t;\n"
      "}"
      : "=f"(y)
      : "f"(x));
  return y;
}

__device__ __forceinline__ float flushed_product(float x, float y) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

// A block makes one part of one row.
__global__ void __launch_bounds__(kSiluThreads) silu_quant_kernel(const __grid_constant__ SiluParams params) {
  const int row = blockIdx.x;
  const int column = blockIdx.y * kSiluPart + threadIdx.x * kVector;
  constexpr int kStep = kSiluThreads * kVector;
  const bf16* x1 = params.x + static_cast<int64_t>(row) * 2 * params.width + column;
  const bf16* x2 = x1 + params.width;

  wait_for_inputs();
  release_next_kernel();
  Vector gate[kInFlight] = {};
  Vector up[kInFlight] = {};
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (column + i * kStep < params.width) {
      gate[i] = load_written(x1 + i * kStep);
      up[i] = load_written(x2 + i * kStep);
    }
  }
  float values[kInFlight][kVector];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    Vector y;
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      const float2 a = to_floats(gate[i].pair[j]);
      const float2 b = to_floats(up[i].pair[j]);
      y.pair[j] = __floats2bfloat162_rn(flushed_product(fast_silu(a.x), b.x), flushed_product(fast_silu(a.y), b.y));
    }
    to_floats(y, values[i]);
  }
  quantize_vectors(
      values, column, kStep, params.width, params.out.q + static_cast<int64_t>(row) * params.width,
      params.out.scale + row, params.out.scale_stride, padding_behind(params.out, row, params.rows));
}

}  // namespace fastpath
