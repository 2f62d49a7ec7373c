// Host code shared by the modules of kernels: parameters come as the bytes of a C++ struct (one argument instead of
// forty keeps a launch at a few microseconds on the host), errors go to Python.
#pragma once

#include <cstring>

#include <cuda_runtime.h>
#include <tvm/ffi/tvm_ffi.h>

namespace fastpath {

template <typename Params>
Params unpack(const tvm::ffi::Bytes& bytes) {
  TVM_FFI_CHECK(bytes.size() == sizeof(Params), ValueError)
      << "kernel parameters of " << bytes.size() << " bytes, expected " << sizeof(Params);
  Params params;
  std::memcpy(&params, bytes.data(), sizeof(Params));
  return params;
}

inline void check(cudaError_t error, const char* kernel) {
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << kernel << ": " << cudaGetErrorString(error);
}

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

constexpr int ceil_div(int total, int part) { return (total + part - 1) / part; }

}  // namespace fastpath
