"""Builds, loads and calls fused_kernels.cu: the CUDA side of the denoisers' fused kernels, and what llm_kernels.py
shares.

One shared object for all of them: 20 seconds of nvcc once per machine, kept where SGLang's own JIT keeps its own
(`$TVM_FFI_CACHE_DIR`, by default ~/.cache/tvm-ffi) in a folder that names the sources' hash, so that an upgrade never
loads an older build. Compiled without --use_fast_math: the sources spell out every rounding.

The functions take their C++ parameter struct as bytes. `NORM`, `QKV`, `ACT`, `GATED`, `SWIGLU`, `LAYER_NORM` and `QK`
below are those structs' layouts; `load` compares their sizes with the compiled ones.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_fastpath.environment import find_nvcc

GROUP = 128
TMA_ALIGNED_ROWS = 4
VECTOR_BYTES = 16

NORM_STREAM = Struct("<8Q2Q2i4i")
NORM = Struct(f"<{2 * NORM_STREAM.size}sif")
QKV_STREAM = Struct("<3Q3Q2Q2Q5i4x")
QKV = Struct(f"<{2 * QKV_STREAM.size}s3Qiif4x")
ACT_STREAM = Struct("<2Q2Q2i2iq")
ACT = Struct(f"<{2 * ACT_STREAM.size}si4xQ")
GATED_STREAM = Struct("<5Q3i4x")
GATED = Struct(f"<{2 * GATED_STREAM.size}si4x")
SWIGLU_STREAM = Struct("<2Q2Q2i2qi4x")
SWIGLU = Struct(f"<{2 * SWIGLU_STREAM.size}s2iQ")
LAYER_NORM_STREAM = Struct("<6Q2Q2i4i")
LAYER_NORM = Struct(f"<{2 * LAYER_NORM_STREAM.size}sif")
QK = Struct("<2Q2Q2Q2q3if")

_SOURCES = (
    "fused_kernels.cu",
    "launching.cuh",
    "fp8_quantize.cuh",
    "activation.cuh",
    "norm_quant.cuh",
    "qkv_epilogue.cuh",
    "act_quant.cuh",
    "gated_residual.cuh",
    "swiglu_quant.cuh",
    "layer_norm_quant.cuh",
    "qk_norm_rope.cuh",
)
_FLAGS = ("-std=c++17",)
_building = threading.Lock()


class Quantized(NamedTuple):
    """A block-FP8 GEMM operand.

    q: [M, K] float8_e4m3fn, contiguous. scale: [M, K/128] float32, MN-major (strides 1 and at least M), as DeepGEMM
    reads it on SM90. `padded_rows` (at least M): how far the scale's columns may be written, and are, with zeros.
    """

    q: Tensor
    scale: Tensor
    padded_rows: int


class QuantizedPair(NamedTuple):
    """The operands of the text and the image stream, for two GEMMs or for one grouped GEMM.

    `joint` is None, or the operand that holds both: the text's rows from 0, the image's from `image_offset`.
    """

    text: Quantized
    image: Quantized
    joint: Quantized | None = None
    image_offset: int = 0


def source_folder() -> Path:
    """Where the CUDA sources lie: beside this file."""
    return Path(__file__).parent


@functools.cache
def load() -> Any:
    """The compiled module of this process; the first call on a machine takes about 20 seconds.

    Raises RuntimeError if nvcc is missing or fails; the message carries its output.
    """
    module = build_module("fused_kernels", _SOURCES)
    sizes = tuple(module.struct_sizes())
    if sizes != (expected := tuple(layout.size for layout in (NORM, QKV, ACT, GATED, SWIGLU, LAYER_NORM, QK))):
        raise RuntimeError(f"fused_kernels.cu packs its parameters in {sizes} bytes, fused_kernels.py in {expected}")
    return module


def build_module(name: str, sources: Sequence[str]) -> Any:
    """Builds `name`.cu, unless it lies built on this machine, and loads it.

    sources: it and the headers that it includes, in `source_folder()`. Raises RuntimeError as `load` does.
    """
    import tvm_ffi
    from tvm_ffi.cpp import build

    major, minor = torch.cuda.get_device_capability()
    digest = hashlib.sha256(repr((_FLAGS, tvm_ffi.__version__, torch.version.cuda)).encode())
    for source in sources:
        digest.update((source_folder() / source).read_bytes())
    cache = Path(os.environ.get("TVM_FFI_CACHE_DIR") or "~/.cache/tvm-ffi").expanduser()
    folder = cache / f"sglang_fastpath_{digest.hexdigest()[:16]}_sm{major}{minor}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"TVM_FFI_CUDA_ARCH_LIST": f"{major}.{minor}"}
    if (nvcc := find_nvcc()) and not os.environ.get("CUDA_HOME"):
        settings["CUDA_HOME"] = str(Path(nvcc).parents[1])
    # Also where the library lies there already: the build is what locks out other processes, and mends an
    # interrupted one; if everything is up to date it does nothing.
    with _building, _environment(settings):
        library = build(
            name,
            cuda_files=[str(source_folder() / f"{name}.cu")],
            extra_cuda_cflags=_FLAGS,
            build_directory=str(folder),
        )
    return tvm_ffi.load_module(library)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """tvm-ffi takes the architecture and the toolkit from the environment alone."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def current_stream(device: torch.device) -> int:
    """The raw handle of PyTorch's current stream on `device`."""
    return torch._C._cuda_getCurrentRawStream(device.index)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def bf16_table(function: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """What `function` makes of each of the 65,536 bf16, indexed by its bits: made once per function and device."""
    with torch.inference_mode(False), torch.no_grad():
        bits = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16)
        return function(bits.view(torch.bfloat16))


def empty_quantized(rows: int, width: int, device: torch.device) -> Quantized:
    """Room for one operand, scale padding to TMA alignment included."""
    padded = -(-rows // TMA_ALIGNED_ROWS) * TMA_ALIGNED_ROWS
    q = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    allocate = torch.empty if device.type == "cuda" else torch.zeros  # the kernels write the padding themselves
    scale = allocate((width // GROUP, padded), dtype=torch.float32, device=device).t()
    return Quantized(q, scale if padded == rows else scale[:rows], padded)


def empty_pair(text_rows: int, image_rows: int, width: int, device: torch.device, grouped_rows: int) -> QuantizedPair:
    """Room for both streams' operands.

    With `grouped_rows` (DeepGEMM's alignment of a group's first row) they lie in one joint operand, else apart.
    """
    if not grouped_rows:
        return QuantizedPair(empty_quantized(text_rows, width, device), empty_quantized(image_rows, width, device))
    offset = -(-text_rows // grouped_rows) * grouped_rows
    joint = empty_quantized(offset + image_rows, width, device)
    text = Quantized(joint.q[:text_rows], joint.scale[:text_rows], offset)
    image = Quantized(joint.q[offset:], joint.scale[offset:], joint.padded_rows - offset)
    return QuantizedPair(text, image, joint, offset)


def aligned(*tensors: Tensor | None) -> bool:
    """Whether 16-byte accesses to every row of each tensor are aligned; its last dimension must be dense."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.stride(-1) != 1 or tensor.data_ptr() % VECTOR_BYTES:
            return False
        if any(stride * tensor.element_size() % VECTOR_BYTES for stride in tensor.stride()[:-1]):
            return False
    return True
