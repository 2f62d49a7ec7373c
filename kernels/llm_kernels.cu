// The fused kernels of language models as functions that Python calls through tvm-ffi: parameters as bytes (llm_kernels.py
// packs them and checks `struct_sizes`), then what selects the variant, then the raw stream.

#include <algorithm>

#include "launching.cuh"
#include "qk_norm_rope_kv.cuh"
#include "rmsnorm_quant.cuh"
#include "silu_quant.cuh"

namespace fastpath {

// The kernel may start before the one in front of it has ended: it begins with wait_for_inputs().
template <typename Params>
void launch_dependent(
    void (*kernel)(Params), dim3 blocks, int threads, size_t shared, int64_t stream, const Params& params,
    const char* name) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, params), name);
}

template <bool kResidual>
void (*rmsnorm_variant(int64_t chains))(RmsNormParams) {
  return chains == 32   ? rmsnorm_quant_kernel<32, kResidual>
         : chains == 64 ? rmsnorm_quant_kernel<64, kResidual>
                        : rmsnorm_quant_kernel<128, kResidual>;
}

void rmsnorm_quant(tvm::ffi::Bytes bytes, int64_t width, int64_t chains, int64_t stream) {
  const auto params = unpack<RmsNormParams>(bytes);
  const auto kernel = params.residual ? rmsnorm_variant<true>(chains) : rmsnorm_variant<false>(chains);
  const int threads = static_cast<int>(width) / kVector;
  launch_dependent(kernel, dim3(params.rows), threads, width * sizeof(float), stream, params, "rmsnorm_quant");
}

void silu_quant(tvm::ffi::Bytes bytes, int64_t stream) {
  const auto params = unpack<SiluParams>(bytes);
  const dim3 blocks(params.rows, ceil_div(params.width, kSiluPart));
  launch_dependent(silu_quant_kernel, blocks, kSiluThreads, 0, stream, params, "silu_quant");
}

template <typename Cache>
void (*rope_variant(bool norm, bool bias))(RopeParams) {
  return norm   ? qk_norm_rope_kv_kernel<true, false, Cache>
         : bias ? qk_norm_rope_kv_kernel<false, true, Cache>
                : qk_norm_rope_kv_kernel<false, false, Cache>;
}

void qk_norm_rope_kv(tvm::ffi::Bytes bytes, bool fp8_cache, int64_t processors, int64_t stream) {
  const auto params = unpack<RopeParams>(bytes);
  const bool norm = params.weight[0] != nullptr;
  const bool bias = params.bias != nullptr;
  const auto kernel = fp8_cache ? rope_variant<__nv_fp8_storage_t>(norm, bias) : rope_variant<bf16>(norm, bias);
  // Few tokens: every head at once. Many: a block for each, which reads its cosines and sines once.
  const int parts = ceil_div(params.q_heads + 2 * params.kv_heads, kHeadsAtOnce);
  const bool few = static_cast<int64_t>(params.rows) * parts <= 8 * processors;
  launch_dependent(kernel, dim3(params.rows, few ? parts : 1), kRopeThreads, 0, stream, params, "qk_norm_rope_kv");
}

tvm::ffi::Array<int64_t> struct_sizes() { return {sizeof(RmsNormParams), sizeof(SiluParams), sizeof(RopeParams)}; }

}  // namespace fastpath

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm_quant, fastpath::rmsnorm_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_quant, fastpath::silu_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(qk_norm_rope_kv, fastpath::qk_norm_rope_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(struct_sizes, fastpath::struct_sizes);
