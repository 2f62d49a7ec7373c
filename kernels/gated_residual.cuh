// bias + gate + residual of both streams, elementwise. Rounding: see gated_residual.py.
#pragma once

#include "fp8_quantize.cuh"

namespace fastpath {

struct GatedStream {
  const bf16* x;
  const bf16* bias;
  const bf16* gate;      // rows `gate_stride` apart, one for each `rows_per_gate` rows of x
  const bf16* residual;
  bf16* out;
  int rows;
  int rows_per_gate;
  int gate_stride;
};

struct GatedParams {
  GatedStream stream[2];
  int width;
};

constexpr int kGatedThreads = 256;

// kRoundsProduct: the product is rounded before the residual is added to it, and nothing is added to the gate.
template <bool kBias, bool kRoundsProduct>
__global__ void __launch_bounds__(kGatedThreads) gated_residual_kernel(const __grid_constant__ GatedParams params) {
  const unsigned vectors = params.width / kVector;
  const unsigned first = params.stream[0].rows * vectors;
  const unsigned total = first + params.stream[1].rows * vectors;
  const unsigned i = blockIdx.x * kGatedThreads + threadIdx.x;
  if (i >= total) return;
  const bool second = i >= first;
  const GatedStream& s = params.stream[second];
  const unsigned local = i - (second ? first : 0);
  const int row = local / vectors;
  const int column = (local - row * vectors) * kVector;
  const int64_t at = static_cast<int64_t>(row) * params.width + column;
  Vector x = load(s.x + at);
  const Vector residual = load(s.residual + at);
  const Vector gate = load(s.gate + static_cast<int64_t>(row / s.rows_per_gate) * s.gate_stride + column);
  if constexpr (kBias) {
    const Vector bias = load(s.bias + column);
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) x.pair[j] = __hadd2_rn(x.pair[j], bias.pair[j]);
  }
#pragma unroll
  for (int j = 0; j < kVector / 2; ++j) {
    if constexpr (kRoundsProduct) {
      x.pair[j] = __hadd2_rn(residual.pair[j], __hmul2_rn(gate.pair[j], x.pair[j]));
    } else {
      const bf16x2 scale = __hadd2_rn(gate.pair[j], __float2bfloat162_rn(0.0f));
      x.pair[j] = __hfma2(x.pair[j], scale, residual.pair[j]);
    }
  }
  store(s.out + at, x);
}

}  // namespace fastpath
