// Programmatic dependent launch: a kernel may start while the one before it still runs, and then waits for its results.
// Stock's kernels around a linear do so too, DeepGEMM included: between them a launch costs no idle time.
#pragma once

#include "fp8_quantize.cuh"

namespace fastpath {

// Returns when everything launched before has ended and its writes can be read. Before it, touch nothing but parameters.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start. It waits for the end of this one before it reads anything.
__device__ __forceinline__ void release_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What the kernel before wrote: not through the read-only path, which may only hold what nobody writes from this kernel's
// start on. Weights and tables may take that path.
__device__ __forceinline__ Vector load_written(const bf16* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  return reinterpret_cast<const Vector&>(bits);
}

}  // namespace fastpath
