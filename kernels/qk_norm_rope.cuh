// RMSNorm and RoPE of q and k, in place in a merged GEMM output. Rounding and reduction order: see qk_norm_rope.py.
#pragma once

#include "activation.cuh"
#include "qkv_epilogue.cuh"

namespace fastpath {

constexpr int kHeadLanes = kHead / kVector;  // half a warp a head
constexpr int kQkThreads = 256;
constexpr int kQkInFlight = 3;  // heads that a half warp reads at once

struct QkParams {
  bf16* x[2];            // q, k: the heads of row r lie side by side from r * stride
  const bf16* norm[2];   // RMSNorm weights, [128]
  const float* cosine;   // [tokens, 64], rows table_stride apart
  const float* sine;
  int64_t stride;
  int64_t table_stride;
  int rows;
  int tokens;            // of a batch element
  int heads;
  float eps;
};

// What FlashInfer, compiled with --use_fast_math, multiplies and adds with: subnormals are zero, as operands too.
__device__ __forceinline__ float mul_ftz(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ __forceinline__ float fma_ftz(float a, float b, float c) {
  float sum;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

__device__ __forceinline__ float rsqrt_ftz(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// Of a head, as stock adds it up where a lane has kLane consecutive elements: each lane's own, then across a warp, its
// farthest lanes first, then across the warps, likewise. Eight elements a lane here are 8 / kLane of stock's lanes.
template <int kLane>
__device__ __forceinline__ float sum_of_squares(const Vector& v) {
  constexpr int kParts = kVector / kLane;
  constexpr int kStockWarpLanes = kLane < 4 ? 4 * kLane : kHeadLanes;  // of ours, for one of stock's warps
  float x[kVector];
  to_floats(v, x);
  float sum[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float* own = x + part * kLane;
    if constexpr (kLane == 1) {
      sum[part] = __fmul_rn(own[0], own[0]);
    } else {
      sum[part] = __fmaf_rn(own[0], own[0], __fmul_rn(own[1], own[1]));
#pragma unroll
      for (int i = 2; i < kLane; ++i) sum[part] = __fmaf_rn(own[i], own[i], sum[part]);
    }
  }
#pragma unroll
  for (int lanes = kStockWarpLanes / 2; lanes; lanes /= 2) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      sum[part] = __fadd_rn(sum[part], __shfl_xor_sync(0xffffffffu, sum[part], lanes));
    }
  }
#pragma unroll
  for (int parts = kParts / 2; parts; parts /= 2) {
#pragma unroll
    for (int part = 0; part < parts; ++part) sum[part] = __fadd_rn(sum[part], sum[part + parts]);
  }
#pragma unroll
  for (int lanes = kHeadLanes / 2; lanes >= kStockWarpLanes; lanes /= 2) {
    sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(0xffffffffu, sum[0], lanes));
  }
  return sum[0];
}

// One block a row. Half of a warp has heads of q, the other half the same heads of k.
template <int kLane>
__global__ void __launch_bounds__(kQkThreads) qk_norm_rope_kernel(const __grid_constant__ QkParams params) {
  const int lane = threadIdx.x % kHeadLanes;
  const bool is_key = threadIdx.x & kHeadLanes;
  const int step = blockDim.x / 32;
  bf16* const heads = params.x[is_key] + blockIdx.x * params.stride + lane * kVector;
  Vector x[kQkInFlight];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kQkInFlight; ++i) {
      const int head = first + i * step;
      // Not through the read-only path: the kernel writes here.
      const uint4* from = reinterpret_cast<const uint4*>(heads + head * kHead);
      reinterpret_cast<uint4&>(x[i]) = head < params.heads ? *from : uint4{};
    }
  };
  int first = threadIdx.x / 32;
  fetch(first);

  const int64_t angle = static_cast<int>(blockIdx.x) % params.tokens * params.table_stride + lane * (kVector / 2);
  float cosine[kVector / 2];
  float sine[kVector / 2];
  reinterpret_cast<float4&>(cosine) = __ldg(reinterpret_cast<const float4*>(params.cosine + angle));
  reinterpret_cast<float4&>(sine) = __ldg(reinterpret_cast<const float4*>(params.sine + angle));
  const Vector weight = load(params.norm[is_key] + lane * kVector);

  for (; first < params.heads; first += kQkInFlight * step, fetch(first)) {
    float factor[kQkInFlight];
#pragma unroll
    for (int i = 0; i < kQkInFlight; ++i) {
      factor[i] = rsqrt_ftz(__fmaf_rn(sum_of_squares<kLane>(x[i]), 1.0f / kHead, params.eps));
    }
#pragma unroll
    for (int i = 0; i < kQkInFlight; ++i) {
      Vector rotated;
#pragma unroll
      for (int j = 0; j < kVector / 2; ++j) {
        const float2 a = to_floats(x[i].pair[j]);
        const float2 w = to_floats(weight.pair[j]);
        const float2 n = to_floats(__floats2bfloat162_rn(
            __fmul_rn(__fmul_rn(a.x, factor[i]), w.x), __fmul_rn(__fmul_rn(a.y, factor[i]), w.y)));
        rotated.pair[j] = __floats2bfloat162_rn(
            fma_ftz(n.x, cosine[j], -mul_ftz(n.y, sine[j])), fma_ftz(n.y, cosine[j], mul_ftz(n.x, sine[j])));
      }
      const int head = first + i * step;
      // As one access: a plain assignment became four.
      const uint4& bits = reinterpret_cast<const uint4&>(rotated);
      if (head < params.heads) __stwb(reinterpret_cast<uint4*>(heads + head * kHead), bits);
    }
  }
}

}  // namespace fastpath
