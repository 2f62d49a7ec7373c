// The fused kernels as functions that Python calls through tvm-ffi.
//
// Each takes its parameters as the bytes of the C++ struct (fused_kernels.py packs them and checks `struct_sizes`),
// the variant, and the raw stream: one argument instead of forty keeps a launch at a few microseconds on the host.

#include <algorithm>

#include "act_quant.cuh"
#include "gated_residual.cuh"
#include "layer_norm_quant.cuh"
#include "launching.cuh"
#include "norm_quant.cuh"
#include "qk_norm_rope.cuh"
#include "qkv_epilogue.cuh"
#include "swiglu_quant.cuh"

namespace fastpath {

template <typename Params>
void launch(void (*kernel)(Params), int blocks, int threads, int shared, int64_t stream, const Params& params) {
  kernel<<<blocks, threads, shared, reinterpret_cast<cudaStream_t>(stream)>>>(params);
}

// A kernel gets the room for an activation's table only if asked for.
template <typename Params>
void allow_table(void (*kernel)(Params), const char* name) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTableBytes), name);
}

void norm_quant(tvm::ffi::Bytes bytes, bool gated, bool bias, bool zero_added, int64_t stream) {
  const auto params = unpack<NormParams>(bytes);
  const auto kernel = !gated       ? norm_quant_kernel<false, false, false>
                      : zero_added ? (bias ? norm_quant_kernel<true, true, true> : norm_quant_kernel<true, false, true>)
                      : bias       ? norm_quant_kernel<true, true, false>
                                   : norm_quant_kernel<true, false, false>;
  const int threads = (params.width / kStockWarp * kLanesApart + 31) / 32 * 32;
  launch(kernel, params.stream[0].rows + params.stream[1].rows, threads, 0, stream, params);
  check_launch("norm_quant");
}

// FLUX.2's widths, and FLUX.2-klein's, have kernels of their own: their loops end where the compiler knows.
template <bool kGated>
void (*layer_norm_quant_variant(int width))(LayerNormParams) {
  switch (width) {
    case 12 * kLayerNormStep: return layer_norm_quant_kernel<kGated, 12, true>;
    case 8 * kLayerNormStep: return layer_norm_quant_kernel<kGated, 8, true>;
    case 6 * kLayerNormStep: return layer_norm_quant_kernel<kGated, 6, true>;
    default: return layer_norm_quant_kernel<kGated, kMostQuads, false>;
  }
}

void layer_norm_quant(tvm::ffi::Bytes bytes, bool gated, int64_t stream) {
  const auto params = unpack<LayerNormParams>(bytes);
  const auto kernel = gated ? layer_norm_quant_variant<true>(params.width) : layer_norm_quant_variant<false>(params.width);
  launch(kernel, params.stream[0].rows + params.stream[1].rows, kLayerNormThreads, 0, stream, params);
  check_launch("layer_norm_quant");
}

void qkv_epilogue(tvm::ffi::Bytes bytes, bool bias, int64_t stream) {
  const auto params = unpack<QkvParams>(bytes);
  const int rows = params.stream[0].rows + params.stream[1].rows;
  launch(bias ? qkv_epilogue_kernel<true> : qkv_epilogue_kernel<false>, rows, 256, 0, stream, params);
  check_launch("qkv_epilogue");
}

void qk_norm_rope(tvm::ffi::Bytes bytes, int64_t stock_lane, int64_t stream) {
  const auto params = unpack<QkParams>(bytes);
  const auto kernel = stock_lane == 8   ? qk_norm_rope_kernel<8>
                      : stock_lane == 4 ? qk_norm_rope_kernel<4>
                      : stock_lane == 2 ? qk_norm_rope_kernel<2>
                                        : qk_norm_rope_kernel<1>;
  // As few rounds a row as the most warps need, then only the warps that these need.
  const int rounds = ceil_div(params.heads, kQkInFlight * kQkThreads / 32);
  const int warps = ceil_div(params.heads, kQkInFlight * rounds);
  launch(kernel, params.rows, warps * 32, 0, stream, params);
  check_launch("qk_norm_rope");
}

template <bool kWhole>
void (*act_quant_variant(bool gelu, bool bias))(ActParams) {
  return !gelu  ? act_quant_kernel<false, false, kWhole>
         : bias ? act_quant_kernel<true, true, kWhole>
                : act_quant_kernel<true, false, kWhole>;
}

void act_quant(tvm::ffi::Bytes bytes, bool gelu, bool bias, int64_t processors, int64_t stream) {
  const auto params = unpack<ActParams>(bytes);
  const int rows = params.stream[0].rows + params.stream[1].rows;
  const int threads = std::min((params.width / kVector / kInFlight + 31) / 32 * 32, kActThreads);
  const bool whole = params.width == threads * kInFlight * kVector;
  const auto kernel = whole ? act_quant_variant<true>(gelu, bias) : act_quant_variant<false>(gelu, bias);
  if (gelu) allow_table(kernel, "act_quant");
  const int64_t at_a_time = processors * (gelu ? 1 : 1536 / threads);
  const int blocks = static_cast<int>(std::min<int64_t>(rows, at_a_time));
  launch(kernel, blocks, threads, gelu ? kTableBytes : 0, stream, params);
  check_launch("act_quant");
}

void swiglu_quant(tvm::ffi::Bytes bytes, int64_t processors, int64_t stream) {
  const auto params = unpack<SwigluParams>(bytes);
  const int rows = params.stream[0].rows + params.stream[1].rows;
  // As few rounds a row as the most threads need, then only the threads that these need: no round is half empty.
  const int vectors = (params.attention_width + params.width) / kVector;
  const int rounds = ceil_div(vectors, kInFlight * kActThreads);
  const int threads = ceil_div(vectors, kInFlight * rounds * 32) * 32;
  allow_table(swiglu_quant_kernel, "swiglu_quant");
  const int blocks = static_cast<int>(std::min<int64_t>(rows, processors));
  launch(swiglu_quant_kernel, blocks, threads, kTableBytes, stream, params);
  check_launch("swiglu_quant");
}

void gated_residual(tvm::ffi::Bytes bytes, bool bias, bool rounds_product, int64_t stream) {
  const auto params = unpack<GatedParams>(bytes);
  const int64_t vectors = (static_cast<int64_t>(params.stream[0].rows) + params.stream[1].rows) * params.width / kVector;
  const int blocks = static_cast<int>((vectors + kGatedThreads - 1) / kGatedThreads);
  const auto kernel = rounds_product ? (bias ? gated_residual_kernel<true, true> : gated_residual_kernel<false, true>)
                      : bias         ? gated_residual_kernel<true, false>
                                     : gated_residual_kernel<false, false>;
  launch(kernel, blocks, kGatedThreads, 0, stream, params);
  check_launch("gated_residual");
}

tvm::ffi::Array<int64_t> struct_sizes() {
  return {
      sizeof(NormParams),   sizeof(QkvParams),       sizeof(ActParams), sizeof(GatedParams),
      sizeof(SwigluParams), sizeof(LayerNormParams), sizeof(QkParams),
  };
}

}  // namespace fastpath

TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_quant, fastpath::norm_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(qkv_epilogue, fastpath::qkv_epilogue);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(act_quant, fastpath::act_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_residual, fastpath::gated_residual);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_quant, fastpath::swiglu_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_norm_quant, fastpath::layer_norm_quant);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(qk_norm_rope, fastpath::qk_norm_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(struct_sizes, fastpath::struct_sizes);
