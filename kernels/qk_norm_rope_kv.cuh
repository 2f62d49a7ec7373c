// Bias or QK RMSNorm, neox RoPE and the write of k and v into the paged cache, from one merged QKV GEMM output.
// Rounding and reduction order: see qk_norm_rope_kv.py.
#pragma once

#include "dependent_launch.cuh"

namespace fastpath {

constexpr int kRopeHead = 128;
constexpr int kHeadLanes = 16;      // lanes that share a head
constexpr int kRopeThreads = 128;
constexpr int kHeadsAtOnce = kRopeThreads / kHeadLanes;
constexpr int kHeadsInFlight = 3;   // heads that a lane has loaded before it begins with the first
constexpr int kReservedSlot = 0;    // takes the writes of padding tokens: nobody reads it, so nothing is written

struct RopeParams {
  const bf16* qkv;         // rows [q heads, k heads, v heads] of 128, `row_stride` apart
  const bf16* bias;        // [(q + 2 * kv heads) * 128], unread without kBias
  const bf16* weight[2];   // RMSNorm of q and of k, [128], unread without kNorm
  const float* cos_sin;    // [positions, 128]: 64 cosines, 64 sines
  const void* positions;   // [rows] int64 or int32
  const void* slots;       // [rows] int64 or int32
  bf16* q;                 // [rows, q heads, 128]
  void* cache[2];          // k and v: slots `slot_stride` elements apart, [kv heads, 128] dense
  int64_t slot_stride;
  int64_t slot_limit;
  int row_stride;
  int rows;
  int q_heads;
  int kv_heads;
  int wide_positions;      // int64 instead of int32
  int wide_slots;
  float eps;
};

// Four elements of a head.
struct alignas(8) Four {
  bf16x2 pair[2];
};

// A lane's part of a head: elements 4 * lane to 4 * lane + 3, and those 64 further on, which RoPE turns them with. In
// stock's norm these are two of its 32 lanes, 16 apart.
struct HeadPart {
  Four half[2];
};

__device__ __forceinline__ int64_t load_index(const void* from, bool wide, int at) {
  return wide ? reinterpret_cast<const int64_t*>(from)[at] : reinterpret_cast<const int*>(from)[at];
}

__device__ __forceinline__ HeadPart load_part(const bf16* head, int lane) {
  const uint2* from = reinterpret_cast<const uint2*>(head) + lane;
  const uint2 bits[2] = {from[0], from[kHeadLanes]};
  return {{reinterpret_cast<const Four&>(bits[0]), reinterpret_cast<const Four&>(bits[1])}};
}

__device__ __forceinline__ void store_part(bf16* head, int lane, const HeadPart& x) {
  uint2* to = reinterpret_cast<uint2*>(head) + lane;
  to[0] = reinterpret_cast<const uint2&>(x.half[0]);
  to[kHeadLanes] = reinterpret_cast<const uint2&>(x.half[1]);
}

// e4m3 as PyTorch converts to it: where the GPU's conversion saturates, above 464, it has NaN, and NaN keeps its sign.
__device__ __forceinline__ unsigned pytorch_e4m3(float x, unsigned saturated) {
  const unsigned nan = (__float_as_uint(x) >> 24 & 0x80u) | 0x7fu;
  return fabsf(x) <= 464.0f ? saturated : nan;
}

__device__ __forceinline__ void store_part(__nv_fp8_storage_t* head, int lane, const HeadPart& x) {
  unsigned* to = reinterpret_cast<unsigned*>(head) + lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned packed = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 value = to_floats(x.half[half].pair[i]);
      const unsigned pair = __nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3);
      packed |= (pytorch_e4m3(value.x, pair & 0xffu) | pytorch_e4m3(value.y, pair >> 8) << 8) << 16 * i;
    }
    to[half * kHeadLanes] = packed;
  }
}

__device__ __forceinline__ void normalize(HeadPart& x, const HeadPart& weight, float eps) {
  float squares[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 a = to_floats(x.half[half].pair[0]);
    const float2 b = to_floats(x.half[half].pair[1]);
    squares[half] = __fmaf_rn(b.y, b.y, __fmaf_rn(b.x, b.x, __fmaf_rn(a.y, a.y, __fmul_rn(a.x, a.x))));
  }
  float sum = __fadd_rn(squares[0], squares[1]);
#pragma unroll
  for (int lanes = kHeadLanes / 2; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
  const float factor = rsqrtf(__fmaf_rn(sum, 1.0f / kRopeHead, eps));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 value = to_floats(x.half[half].pair[i]);
      const float2 w = to_floats(weight.half[half].pair[i]);
      x.half[half].pair[i] = __floats2bfloat162_rn(
          __fmul_rn(__fmul_rn(value.x, factor), w.x), __fmul_rn(__fmul_rn(value.y, factor), w.y));
    }
  }
}

__device__ __forceinline__ void rotate(HeadPart& x, const float4& cosine, const float4& sine) {
  const float2 c[2] = {{cosine.x, cosine.y}, {cosine.z, cosine.w}};
  const float2 s[2] = {{sine.x, sine.y}, {sine.z, sine.w}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 a = to_floats(x.half[0].pair[i]);
    const float2 b = to_floats(x.half[1].pair[i]);
    x.half[0].pair[i] = __floats2bfloat162_rn(
        __fmaf_rn(a.x, c[i].x, -__fmul_rn(b.x, s[i].x)), __fmaf_rn(a.y, c[i].y, -__fmul_rn(b.y, s[i].y)));
    x.half[1].pair[i] = __floats2bfloat162_rn(
        __fmaf_rn(a.x, s[i].x, __fmul_rn(b.x, c[i].x)), __fmaf_rn(a.y, s[i].y, __fmul_rn(b.y, c[i].y)));
  }
}

// The blocks of a column of the grid share a token, half a warp takes a head at a time. Cache: bf16, or the bytes of an e4m3.
template <bool kNorm, bool kBias, typename Cache>
__global__ void __launch_bounds__(kRopeThreads) qk_norm_rope_kv_kernel(const __grid_constant__ RopeParams params) {
  const int row = blockIdx.x;
  const int lane = threadIdx.x % kHeadLanes;
  const int k_begins = params.q_heads;
  const int v_begins = k_begins + params.kv_heads;
  const int heads = v_begins + params.kv_heads;
  const int step = gridDim.y * kHeadsAtOnce;
  const bf16* qkv = params.qkv + static_cast<int64_t>(row) * params.row_stride;

  wait_for_inputs();
  const int64_t position = load_index(params.positions, params.wide_positions, row);
  const int64_t slot = load_index(params.slots, params.wide_slots, row);
  const float4* table = reinterpret_cast<const float4*>(params.cos_sin + position * kRopeHead) + lane;
  const float4 cosine = __ldg(table);
  const float4 sine = __ldg(table + kHeadLanes);
  HeadPart weights[2];
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < 2; ++i) weights[i] = load_part(params.weight[i], lane);
  }

  // A warp's lanes stay together: its first head decides, the second may be one too many.
  for (int first = blockIdx.y * kHeadsAtOnce + threadIdx.x / 32 * 2; first < heads; first += kHeadsInFlight * step) {
    const int own = first + threadIdx.x / kHeadLanes % 2;
    HeadPart x[kHeadsInFlight] = {};
#pragma unroll
    for (int i = 0; i < kHeadsInFlight; ++i) {
      if (own + i * step < heads) x[i] = load_part(qkv + (own + i * step) * kRopeHead, lane);
    }
#pragma unroll
    for (int i = 0; i < kHeadsInFlight; ++i) {
      const int head = own + i * step;
      if constexpr (kBias) {
        if (head < heads) {
          const HeadPart bias = load_part(params.bias + head * kRopeHead, lane);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            bf16x2& pair = x[i].half[j / 2].pair[j % 2];
            pair = __hadd2_rn(pair, bias.half[j / 2].pair[j % 2]);
          }
        }
      }
      HeadPart turned = x[i];
      if constexpr (kNorm) normalize(turned, weights[head >= k_begins], params.eps);
      rotate(turned, cosine, sine);
      if (head < k_begins) {
        store_part(params.q + (static_cast<int64_t>(row) * params.q_heads + head) * kRopeHead, lane, turned);
      } else if (head < heads && slot != kReservedSlot) {
        if (slot < 0 || slot >= params.slot_limit) __trap();
        const bool is_v = head >= v_begins;
        Cache* to = static_cast<Cache*>(params.cache[is_v]) + slot * params.slot_stride;
        store_part(to + (head - (is_v ? v_begins : k_begins)) * kRopeHead, lane, is_v ? x[i] : turned);
      }
    }
  }
  release_next_kernel();
}

}  // namespace fastpath
