// Quantization of bf16 rows of both streams, plain or behind bias + GELU(tanh). Rounding: see act_quant.py.
#pragma once

#include "fp8_quantize.cuh"

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

// Vectors that a thread loads before it computes; their groups' maxima are reduced as the halves of one pair.
constexpr int kInFlight = 2;
constexpr int kActThreads = 768;  // two vectors each: a row of 12288
constexpr int kGeluEntries = 1 << 16;

__device__ __forceinline__ void to_floats(const Vector& v, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 pair = to_floats(v.pair[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// Quantizes a thread's two vectors, bf16 values given as floats, `step` columns apart, and writes what lies before
// `end`. Sixteen threads are a group of 128. All lanes of the warp call it.
__device__ __forceinline__ void quantize_vectors(
    const float (&x)[kInFlight][kVector], int column, int step, int end, __nv_fp8_storage_t* to, float* to_scale,
    int scale_stride, int padding) {
  float most[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    most[i] = fabsf(x[i][0]);
#pragma unroll
    for (int j = 1; j < kVector; ++j) most[i] = fmaxf(most[i], fabsf(x[i][j]));  // skips NaN, as stock's maximum does
  }
  bf16x2 both = __floats2bfloat162_rn(most[0], most[1]);  // exact
#pragma unroll
  for (int lanes = kGroupThreads / 2; lanes; lanes /= 2) both = __hmax2(both, __shfl_xor_sync(0xffffffffu, both, lanes));
  const float2 maxima = to_floats(both);
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int at = column + i * step;
    if (at < end) {
      const float amax = floored(i ? maxima.y : maxima.x);
      store(to + at, quantized(x[i], quantization_multiplier(amax)));
      if (threadIdx.x % kGroupThreads == 0) {
        store_scale(to_scale, scale_stride, static_cast<unsigned>(at) / kGroup, amax, padding);
      }
    }
  }
}

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
        if constexpr (kGelu) {
          const unsigned bits = reinterpret_cast<const unsigned&>(x[i].pair[j]);
          values[i][2 * j] = __uint_as_float(static_cast<unsigned>(table[bits & 0xffffu]) << 16);
          values[i][2 * j + 1] = __uint_as_float(static_cast<unsigned>(table[bits >> 16]) << 16);
        }
      }
      if constexpr (!kGelu) to_floats(x[i], values[i]);
    }
    __nv_fp8_storage_t* to = s.out.q + static_cast<int64_t>(row) * width;
    const int end = kWhole ? 1 << 30 : width;
    quantize_vectors(
        values, column, step, end, to, s.out.scale + row, s.out.scale_stride, padding_behind(s.out, row, s.rows));
    row = next_row;
    column = next_column;
  }
}

// As many blocks as run at a time; with GELU one for each multiprocessor, the whole table in its shared memory. (Keeping
// only the usual magnitudes there needs a check for each element, which costs more than the room.)
template <bool kGelu, bool kBias, bool kWhole>
__global__ void __launch_bounds__(kActThreads) act_quant_kernel(const __grid_constant__ ActParams params) {
  extern __shared__ uint4 shared[];
  const auto fill_table = [&] {
    if constexpr (kGelu) {
      for (int i = threadIdx.x; i < kGeluEntries / kVector; i += blockDim.x) {
        shared[i] = __ldg(reinterpret_cast<const uint4*>(params.gelu) + i);
      }
      __syncthreads();
    }
  };
  const uint16_t* table = reinterpret_cast<const uint16_t*>(shared);
  const int blocks = gridDim.x;
  const int block = blockIdx.x;
  act_quant_stream<kGelu, kBias, kWhole>(params.stream[0], block, params.width, table, fill_table);
  const int turn = params.stream[0].rows % blocks;  // blocks without a last row of the first stream begin the second
  const int row = block >= turn ? block - turn : block - turn + blocks;
  act_quant_stream<kGelu, kBias, kWhole>(params.stream[1], row, params.width, table, [] {});
}

}  // namespace fastpath
