// Concatenation of an attention output and a SwiGLU, quantized, of both streams. Rounding: see swiglu_quant.py.
#pragma once

#include "activation.cuh"

namespace fastpath {

// One stream. Row r of the result is [attention, silu(x1) * x2], the parts at attention + r * attention_stride and at
// x + r * stride, where [x1, x2] are side by side.
struct SwigluStream {
  const bf16* attention;
  const bf16* x;
  QuantizedRows out;
  int64_t attention_stride;
  int64_t stride;
  int rows;
};

struct SwigluParams {
  SwigluStream stream[2];
  int attention_width;
  int width;         // of x1, x2 and their product
  const bf16* silu;  // [65536]: SiLU of every bf16, indexed by its bits
};

// What a thread reads for its vectors of the result: x1 and x2, or the attention output in place of x1.
struct SwigluVectors {
  Vector x1[kInFlight];
  Vector x2[kInFlight];
};

// One stream's share of a block: every gridDim-th row from `row`, in rounds of kInFlight vectors a thread. The next
// round is on its way while this one is done, two rounds of code let them swap registers instead of copying them.
// `prepare` runs when the first round is on its way.
template <typename Prepare>
__device__ __forceinline__ void swiglu_quant_stream(
    const SwigluStream& s, int row, int attention_width, int width, const uint16_t* table, const Prepare& prepare) {
  const int end = attention_width + width;
  const int step = blockDim.x * kVector;
  const int own = threadIdx.x * kVector;
  const auto fetch = [&](int at_row, int from_column) {
    SwigluVectors read = {};
    if (at_row >= s.rows) return read;
    const bf16* attention = s.attention + at_row * s.attention_stride;
    const bf16* x = s.x + at_row * s.stride - attention_width;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = from_column + i * step + own;
      const bool product = at >= attention_width;
      const bf16* from = (product ? x : attention) + at;
      if (at < end) read.x1[i] = load(from);
      if (product && at < end) read.x2[i] = load(from + width);
    }
    return read;
  };
  SwigluVectors next = fetch(row, 0);
  prepare();
#pragma unroll 2
  for (int column = 0; row < s.rows;) {
    const SwigluVectors read = next;
    const bool row_ends = column + kInFlight * step >= end;
    const int next_row = row_ends ? row + static_cast<int>(gridDim.x) : row;
    const int next_column = row_ends ? 0 : column + kInFlight * step;
    next = fetch(next_row, next_column);
    float values[kInFlight][kVector];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      Vector y = read.x1[i];
      if (column + i * step + own >= attention_width) {
#pragma unroll
        for (int j = 0; j < kVector / 2; ++j) y.pair[j] = __hmul2_rn(looked_up(table, y.pair[j]), read.x2[i].pair[j]);
      }
      to_floats(y, values[i]);
    }
    quantize_vectors(
        values, column + own, step, end, s.out.q + static_cast<int64_t>(row) * end, s.out.scale + row,
        s.out.scale_stride, padding_behind(s.out, row, s.rows));
    row = next_row;
    column = next_column;
  }
}

// One block for each multiprocessor, the whole table in its shared memory.
__global__ void __launch_bounds__(kActThreads) swiglu_quant_kernel(const __grid_constant__ SwigluParams params) {
  extern __shared__ uint4 shared[];
  const uint16_t* table = reinterpret_cast<const uint16_t*>(shared);
  const auto fill = [&] { fill_table(shared, params.silu); };
  swiglu_quant_stream(params.stream[0], blockIdx.x, params.attention_width, params.width, table, fill);
  const int row = first_row_behind(params.stream[0].rows);
  swiglu_quant_stream(params.stream[1], row, params.attention_width, params.width, table, [] {});
}

}  // namespace fastpath
