// PyTorch's LayerNorm + modulation + quantization of one row per block, optionally behind gate + residual.
// Rounding and reduction order: see layer_norm_quant.py.
#pragma once

#include "fp8_quantize.cuh"

namespace fastpath {

// One stream. Rows of x, residual and the outputs are `width` apart; gate, scale and shift belong to a batch element
// and are `gate_stride` and `modulation_stride` apart. Without a gate, residual and residual_out are null too.
struct LayerNormStream {
  const bf16* x;
  const bf16* residual;
  const bf16* gate;
  const bf16* scale;
  const bf16* shift;
  bf16* residual_out;
  QuantizedRows out;
  int rows;
  int rows_per_batch;
  int gate_stride;
  int modulation_stride;
};

struct LayerNormParams {
  LayerNormStream stream[2];
  int width;
  float eps;
};

// As in PyTorch's kernel a thread takes a quad at a time, so that a warp takes one group of 128.
constexpr int kLayerNormWarps = 4;
constexpr int kLayerNormThreads = 32 * kLayerNormWarps;
constexpr int kLayerNormStep = kQuad * kLayerNormThreads;  // columns that a block takes at a time
constexpr int kMostQuads = 16;                             // that a thread can hold: rows of up to 8192

// Of some elements: their mean, and the sum of the squared deviations from it.
struct alignas(8) Moments {
  float mean;
  float squares;
};

// Adds the n-th element; `reciprocal` is 1 / n.
__device__ __forceinline__ void add(Moments& m, float x, float reciprocal) {
  const float deviation = __fsub_rn(x, m.mean);
  m.mean = __fmaf_rn(deviation, reciprocal, m.mean);
  m.squares = __fmaf_rn(deviation, __fsub_rn(x, m.mean), m.squares);
}

// The shares of two parts in the whole that they make. Nothing has no share in nothing; its moments are 0 anyway.
struct Shares {
  float own;
  float other;
};

__device__ __forceinline__ Shares shares_of(int own, int other) {
  const float reciprocal = own + other > 0 ? __frcp_rn(static_cast<float>(own + other)) : 0.0f;
  return {__fmul_rn(static_cast<float>(own), reciprocal), __fmul_rn(static_cast<float>(other), reciprocal)};
}

__device__ __forceinline__ Moments
combined(const Moments& own, const Moments& other, const Shares& share, int other_count) {
  const float apart = __fsub_rn(own.mean, other.mean);
  const float squared = __fmul_rn(static_cast<float>(other_count), __fmul_rn(apart, apart));
  return {
      __fmaf_rn(other.mean, share.other, __fmul_rn(own.mean, share.own)),
      __fmaf_rn(share.own, squared, __fadd_rn(own.squares, other.squares))};
}

// A row's moments from those of its threads. The lanes of a warp have equally many of the row's `groups`, one quad
// each; the first warps have one more than the last ones where the row ends within a step. kWhole: it does not.
template <int kQuads, bool kWhole>
__device__ __forceinline__ Moments row_moments(Moments own, int groups, Moments (&partial)[kLayerNormWarps]) {
  const auto elements = [groups](int of_warp) {
    return kQuad * (kWhole ? kQuads : (groups - of_warp + kLayerNormWarps - 1) / kLayerNormWarps);
  };
  // Doubling both counts halves the reciprocal exactly, so that equal parts have the same shares at every step.
  constexpr float kHalf = kQuad * kQuads * (1.0f / (2 * kQuad * kQuads));
  const auto shares = [](int own_count, int other_count) {
    return kWhole ? Shares{kHalf, kHalf} : shares_of(own_count, other_count);
  };
  const int warp = threadIdx.x / 32;
  const Shares equal = shares(elements(warp), elements(warp));
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int apart = 16 / lanes;
    const Moments other = {
        __shfl_down_sync(0xffffffffu, own.mean, apart), __shfl_down_sync(0xffffffffu, own.squares, apart)};
    own = combined(own, other, equal, lanes * elements(warp));
  }
  if (threadIdx.x % 32 == 0) partial[warp] = own;
  __syncthreads();
  const auto pair = [&](int first, int second) {
    const int own_count = 32 * elements(first), other_count = 32 * elements(second);
    return combined(partial[first], partial[second], shares(own_count, other_count), other_count);
  };
  const int even = 32 * (elements(0) + elements(2)), odd = 32 * (elements(1) + elements(3));
  return combined(pair(0, 2), pair(1, 3), shares(even, odd), odd);
}

// Largest magnitudes of the groups of two quads of every lane of the warp, with the quantizer's floor.
__device__ __forceinline__ float2 group_amax(const Quad& a, const Quad& b) {
  const bf16x2 first = __hmax2(__habs2(a.pair[0]), __habs2(a.pair[1]));
  const bf16x2 second = __hmax2(__habs2(b.pair[0]), __habs2(b.pair[1]));
  bf16x2 most = __hmax2(__lows2bfloat162(first, second), __highs2bfloat162(first, second));
  most = __hmax2(most, __float2bfloat162_rn(0.0f));  // a NaN would be the greatest integer
  const unsigned bits = reinterpret_cast<const unsigned&>(most);
  return {
      floored(__uint_as_float(__reduce_max_sync(0xffffffffu, bits << 16))),
      floored(__uint_as_float(__reduce_max_sync(0xffffffffu, bits) & 0xffff0000u))};
}

// Blocks for a multiprocessor: as many as leave the threads registers enough for rows of 6144, or of any width.
constexpr int layer_norm_blocks(bool gated, bool whole) { return !whole ? 3 : gated ? 5 : 7; }

// kGated: x is gated and added to a residual first. kQuads: what a thread has of a row, at most; kWhole: exactly.
template <bool kGated, int kQuads, bool kWhole>
__global__ void __launch_bounds__(kLayerNormThreads, layer_norm_blocks(kGated, kWhole))
    layer_norm_quant_kernel(const __grid_constant__ LayerNormParams params) {
  static_assert(kQuads % 2 == 0);
  __shared__ Moments partial[kLayerNormWarps];
  __shared__ float2 maxima[kLayerNormWarps][kQuads / 2];
  const bool second = static_cast<int>(blockIdx.x) >= params.stream[0].rows;
  const LayerNormStream& s = params.stream[second];
  const int row = blockIdx.x - (second ? params.stream[0].rows : 0);
  const int batch = s.rows == s.rows_per_batch ? 0 : row / s.rows_per_batch;
  const int width = kWhole ? kQuads * kLayerNormStep : params.width;
  const int groups = width / kGroup;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int quads = kWhole ? kQuads : (groups - warp + kLayerNormWarps - 1) / kLayerNormWarps;
  const int column = threadIdx.x * kQuad;
  const int64_t at = static_cast<int64_t>(row) * width + column;

  Quad x[kQuads] = {};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (kWhole || i < quads) x[i] = load_quad(s.x + at, i * kLayerNormThreads);
  }
  if constexpr (kGated) {
    Quad residual[kQuads] = {};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (kWhole || i < quads) residual[i] = load_quad(s.residual + at, i * kLayerNormThreads);
    }
    const bf16* gates = s.gate + static_cast<int64_t>(batch) * s.gate_stride + column;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (!kWhole && i >= quads) continue;
      const Quad gate = load_quad(gates, i * kLayerNormThreads);
#pragma unroll
      for (int j = 0; j < kQuad / 2; ++j) {
        x[i].pair[j] = __hadd2_rn(residual[i].pair[j], __hmul2_rn(gate.pair[j], x[i].pair[j]));
      }
      reinterpret_cast<uint2*>(s.residual_out + at)[i * kLayerNormThreads] = reinterpret_cast<const uint2&>(x[i]);
    }
  }

  Moments moments = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (!kWhole && i >= quads) continue;
#pragma unroll
    for (int j = 0; j < kQuad / 2; ++j) {
      const float2 pair = to_floats(x[i].pair[j]);
      const int before = i * kQuad + 2 * j;
      add(moments, pair.x, 1.0f / (before + 1));
      add(moments, pair.y, 1.0f / (before + 2));
    }
  }
  moments = row_moments<kQuads, kWhole>(moments, groups, partial);
  const float factor = rsqrtf(__fadd_rn(__fdiv_rn(moments.squares, static_cast<float>(width)), params.eps));

  const int64_t modulation = static_cast<int64_t>(batch) * s.modulation_stride + column;
#pragma unroll
  for (int i = 0; i < kQuads; i += 2) {
    if (!kWhole && i >= quads) continue;
    Quad y[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (!kWhole && i + k >= quads) continue;
      const Quad scale = load_quad(s.scale + modulation, (i + k) * kLayerNormThreads);
      const Quad shift = load_quad(s.shift + modulation, (i + k) * kLayerNormThreads);
#pragma unroll
      for (int j = 0; j < kQuad / 2; ++j) {
        const float2 pair = to_floats(x[i + k].pair[j]);
        const bf16x2 normed = __floats2bfloat162_rn(
            __fmul_rn(factor, __fsub_rn(pair.x, moments.mean)), __fmul_rn(factor, __fsub_rn(pair.y, moments.mean)));
        const bf16x2 factors = __hadd2_rn(scale.pair[j], __float2bfloat162_rn(1.0f));
        y[k].pair[j] = __hadd2_rn(__hmul2_rn(factors, normed), shift.pair[j]);
      }
    }
    const float2 amax = group_amax(y[0], y[1]);
    maxima[warp][i / 2] = amax;  // by every lane: choosing one costs more
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (!kWhole && i + k >= quads) continue;
      const float multiplier = quantization_multiplier(k ? amax.y : amax.x);
      const float2 low = to_floats(y[k].pair[0]), high = to_floats(y[k].pair[1]);
      const unsigned packed = quantized_pair(low.x, low.y, multiplier) |
                              static_cast<unsigned>(quantized_pair(high.x, high.y, multiplier)) << 16;
      reinterpret_cast<unsigned*>(s.out.q + at)[(i + k) * kLayerNormThreads] = packed;
    }
  }
  // A warp's n-th group is the n-th lane's to write.
  __syncwarp();
  if (lane < quads) {
    const int group = lane * kLayerNormWarps + warp;
    const float amax = lane % 2 ? maxima[warp][lane / 2].y : maxima[warp][lane / 2].x;
    store_scale(s.out.scale + row, s.out.scale_stride, group, amax, padding_behind(s.out, row, s.rows));
  }
}

}  // namespace fastpath
