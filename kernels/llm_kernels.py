"""Builds and loads llm_kernels.cu: the fused kernels of language models.

A module of its own: a language-model server does not wait for the denoisers' 20 seconds of nvcc, nor they for its 10.
What both need (the build, operands, alignment) is in fused_kernels.py.

`RMS_NORM`, `SILU` and `ROPE` are the layouts of the parameter structs; `load` compares their sizes with the compiled
ones.
"""

import functools
from struct import Struct
from typing import Any

from sglang_fastpath.kernels.fused_kernels import build_module

RMS_NORM = Struct("<4Q2Q2iif")
SILU = Struct("<Q2Q2i2i")
ROPE = Struct("<2Q2Q4Q2Q2q6if4x")

_SOURCES = (
    "llm_kernels.cu",
    "launching.cuh",
    "dependent_launch.cuh",
    "fp8_quantize.cuh",
    "activation.cuh",
    "rmsnorm_quant.cuh",
    "silu_quant.cuh",
    "qk_norm_rope_kv.cuh",
)


@functools.cache
def load() -> Any:
    """The compiled module of this process; the first call on a machine takes about 10 seconds.

    Raises RuntimeError if nvcc is missing or fails; the message carries its output.
    """
    module = build_module("llm_kernels", _SOURCES)
    sizes = tuple(module.struct_sizes())
    if sizes != (expected := (RMS_NORM.size, SILU.size, ROPE.size)):
        raise RuntimeError(f"llm_kernels.cu packs its parameters in {sizes} bytes, llm_kernels.py in {expected}")
    return module
