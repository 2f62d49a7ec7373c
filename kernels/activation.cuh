// Shared by the kernels that quantize behind an activation: its table, and the quantization of a thread's vectors.
//
// A bf16 has 65,536 values, so an activation is a table, filled by stock's own function: exact by construction.
#pragma once

#include "fp8_quantize.cuh"

namespace fastpath {

// Vectors that a thread quantizes at a time; their groups' maxima are reduced as the halves of one pair.
constexpr int kInFlight = 2;
constexpr int kActThreads = 768;  // two vectors each: a row of 12288
constexpr int kTableEntries = 1 << 16;
constexpr int kTableBytes = kTableEntries * static_cast<int>(sizeof(bf16));

// Copies a table [65536], indexed by a bf16's bits, to the block's shared memory. All threads call it. (Keeping only the
// usual magnitudes there needs a check for each element, which costs more than the room.)
__device__ __forceinline__ void fill_table(uint4* shared, const bf16* table) {
  for (int i = threadIdx.x; i < kTableEntries / kVector; i += blockDim.x) {
    shared[i] = __ldg(reinterpret_cast<const uint4*>(table) + i);
  }
  __syncthreads();
}

__device__ __forceinline__ bf16x2 looked_up(const uint16_t* table, const bf16x2& pair) {
  const unsigned bits = reinterpret_cast<const unsigned&>(pair);
  const unsigned found = table[bits & 0xffffu] | static_cast<unsigned>(table[bits >> 16]) << 16;
  return reinterpret_cast<const bf16x2&>(found);
}

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

// Where this block goes on in the second stream: blocks that had no last row of the first one, of `rows`, begin it.
__device__ __forceinline__ int first_row_behind(int rows) {
  const int blocks = gridDim.x;
  const int block = blockIdx.x;
  const int turn = rows % blocks;
  return block >= turn ? block - turn : block - turn + blocks;
}

}  // namespace fastpath
