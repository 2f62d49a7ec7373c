// Device code shared by the fused kernels: vectors of eight and four bf16, and stock's per-token-group quantizer.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace fastpath {

using bf16 = __nv_bfloat16;
using bf16x2 = __nv_bfloat162;

constexpr int kGroup = 128;              // elements of a row that share a scale
constexpr int kVector = 8;               // bf16 in one 16-byte access
constexpr int kGroupThreads = kGroup / kVector;
constexpr int kQuad = 4;                 // bf16 of a lane where a warp has a group

struct alignas(16) Vector {
  bf16x2 pair[kVector / 2];
};

struct alignas(8) Quad {
  bf16x2 pair[kQuad / 2];
};

struct alignas(8) Fp8Vector {
  __nv_fp8x2_storage_t pair[kVector / 2];
};

// Nothing that a kernel reads is written while it runs, so loads take the read-only path: on an H200 that was 2 to 8 %
// faster than loads marked as streaming (ld.global.cs), also for what is read only once.
__device__ __forceinline__ Vector load(const bf16* from) {
  const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
  return reinterpret_cast<const Vector&>(bits);
}

// The `index`-th four elements from `from`.
__device__ __forceinline__ Quad load_quad(const bf16* from, int index) {
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from) + index);
  return reinterpret_cast<const Quad&>(bits);
}

__device__ __forceinline__ void store(bf16* to, const Vector& v) {
  *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(v);
}

// A bf16 is the upper half of the float of the same value. (The toolkit's conversion takes two instructions.)
__device__ __forceinline__ float2 to_floats(const bf16x2& pair) {
  const unsigned bits = reinterpret_cast<const unsigned&>(pair);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Where quantized rows go. `scale` is MN-major: element (row, group) at [group * scale_stride + row]. The rows from
// the last one up to `padded_rows` get scale 0: TMA loads touch them.
struct QuantizedRows {
  __nv_fp8_storage_t* q;
  float* scale;
  int scale_stride;
  int padded_rows;
};

// Largest magnitudes of eight elements, of the even and of the odd ones; __hmax2 skips NaN, an infinity stays.
__device__ __forceinline__ bf16x2 vector_amax(const Vector& v) {
  bf16x2 most = __habs2(v.pair[0]);
#pragma unroll
  for (int i = 1; i < kVector / 2; ++i) most = __hmax2(most, __habs2(v.pair[i]));
  return most;
}

// 448 / amax, as stock's quantizer has it: compiled with --use_fast_math, the division is a product with the
// approximate reciprocal. `amax` has its floor of 1e-10 already.
__device__ __forceinline__ float quantization_multiplier(float amax) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(amax));
  return __fmul_rn(448.0f, reciprocal);
}

// The floor that stock's quantizer gives every amax.
__device__ __forceinline__ float floored(float amax) { return fmaxf(amax, 1e-10f); }

__device__ __forceinline__ __nv_fp8x2_storage_t quantized_pair(float x, float y, float multiplier) {
  // fminf turns a NaN into 448; the conversion saturates at -448.
  const float2 scaled = {fminf(__fmul_rn(x, multiplier), 448.0f), fminf(__fmul_rn(y, multiplier), 448.0f)};
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ Fp8Vector quantized(const Vector& v, float multiplier) {
  Fp8Vector packed;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 x = to_floats(v.pair[i]);
    packed.pair[i] = quantized_pair(x.x, x.y, multiplier);
  }
  return packed;
}

__device__ __forceinline__ Fp8Vector quantized(const float (&x)[kVector], float multiplier) {
  Fp8Vector packed;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) packed.pair[i] = quantized_pair(x[2 * i], x[2 * i + 1], multiplier);
  return packed;
}

__device__ __forceinline__ void store(__nv_fp8_storage_t* to, const Fp8Vector& v) {
  *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2&>(v);
}

// Writes the scale of one group of one row; `to` is the row's place in the first group's scales. The last row has
// `padding` rows behind it, which become zero.
__device__ __forceinline__ void store_scale(float* to, int64_t stride, int group, float amax, int padding) {
  to += group * stride;
  *to = __fmul_rn(amax, 1.0f / 448.0f);
#pragma unroll 1
  for (int i = 1; i <= padding; ++i) to[i] = 0.0f;
}

__device__ __forceinline__ int padding_behind(const QuantizedRows& out, int row, int rows) {
  return row == rows - 1 ? out.padded_rows - rows : 0;
}

}  // namespace fastpath
