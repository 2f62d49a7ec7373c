// Quantization of bf16 rows of both streams, plain or behind bias + GELU(tanh). Rounding: see act_quant.py.
#pragma once

#include "activation.cuh"

namespace fastpath {

// One stream. Row r of x starts at x + (r / rows_per_batch) * batch_stride + (r % rows_per_batch) * width: a
// stream's part of a joint buffer is read in place.
struct ActStream {
  const bf16* x;
  const bf16* bias;
  QuantizedRows out;
  int rows;
  int rows_per_batch;
  int64_t batch_stride;
};

struct ActParams {
  ActStream stream[2];
  int width;
  const bf16* gelu;  // [65536]: GELU of every bf16, indexed by its bits
};

// One stream's share of a block: every gridDim-th row from `row`. The next row is on its way while this one is done.
// kWhole: a row is exactly what the block's threads hold, so nothing is compared with its end, and a thread's biases
// stay in registers. `prepare` runs when the first row is on its way.
template <bool kGelu, bool kBias, bool kWhole, typename Prepare>
__device__ __forceinline__ void act_quant_stream(
    const ActStream& s, int row, int width, const uint16_t* table, const Prepare& prepare) {
  const int step = blockDim.x * kVector;
  const int chunks = kWhole ? 1 : (width + kInFlight * step - 1) / (kInFlight * step);
  int column = threadIdx.x * kVector;
  const auto fetch = [&](Vector (&x)[kInFlight], int at_row, int at_column) {
    if (at_row >= s.rows) return;
    const int batch = s.rows == s.rows_per_batch ? 0 : at_row / s.rows_per_batch;
    const int in_batch = at_row - batch * s.rows_per_batch;
    const bf16* from = s.x + batch * s.batch_stride + static_cast<int64_t>(in_batch) * width + at_column;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (kWhole || at_column + i * step < width) x[i] = load(from + i * step);
    }
  };
  Vector bias[kInFlight];
  if constexpr (kBias && kWhole) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) bias[i] = load(s.bias + column + i * step);
  }
  Vector next[kInFlight] = {};
  fetch(next, row, column);
  prepare();
  for (int chunk = 0; row < s.rows;) {
    Vector x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) x[i] = next[i];
    const bool row_ends = ++chunk == chunks;
    if (row_ends) chunk = 0;
    const int next_row = row_ends ? row + static_cast<int>(gridDim.x) : row;
    const int next_column = static_cast<int>(threadIdx.x) * kVector + chunk * kInFlight * step;
    fetch(next, next_row, next_column);
    float values[kInFlight][kVector];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if constexpr (kBias && !kWhole) bias[i] = load(s.bias + (column + i * step < width ? column + i * step : 0));
#pragma unroll
      for (int j = 0; j < kVector / 2; ++j) {
        if constexpr (kBias) x[i].pair[j] = __hadd2_rn(x[i].pair[j], bias[i].pair[j]);
        if constexpr (kGelu) x[i].pair[j] = looked_up(table, x[i].pair[j]);
      }
      to_floats(x[i], values[i]);
    }
    __nv_fp8_storage_t* to = s.out.q + static_cast<int64_t>(row) * width;
    const int end = kWhole ? 1 << 30 : width;
    quantize_vectors(
        values, column, step, end, to, s.out.scale + row, s.out.scale_stride, padding_behind(s.out, row, s.rows));
    row = next_row;
    column = next_column;
  }
}

// As many blocks as run at a time; with GELU one for each multiprocessor, the whole table in its shared memory.
template <bool kGelu, bool kBias, bool kWhole>
__global__ void __launch_bounds__(kActThreads) act_quant_kernel(const __grid_constant__ ActParams params) {
  extern __shared__ uint4 shared[];
  const auto fill = [&] {
    if constexpr (kGelu) fill_table(shared, params.gelu);
  };
  const uint16_t* table = reinterpret_cast<const uint16_t*>(shared);
  act_quant_stream<kGelu, kBias, kWhole>(params.stream[0], blockIdx.x, params.width, table, fill);
  const int row = first_row_behind(params.stream[0].rows);
  act_quant_stream<kGelu, kBias, kWhole>(params.stream[1], row, params.width, table, [] {});
}

}  // namespace fastpath
