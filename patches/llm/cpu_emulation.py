"""Lets SGLang's own language models in block FP8 run on a machine without a GPU, started with `--device cpu`.

Stock's server builds such a model there, and stops at two places, which this replaces in the current process:

- `quantization.fp8` picks a GEMM for a GPU. Here `Fp8LinearMethod` computes with the torch reference that the
  diffusion emulation uses, from the weights as loaded;
- `rotary_embedding.base` asks for vLLM's kernel wherever it does not run on a device that it knows, and a CPU is one
  only for a build of SGLang's kernels for CPUs. Told that this is a CPU, it rotates in torch.

Layers, sharding, scheduling, cache and sampling stay SGLang's. For tests and demonstrations: it accelerates nothing.
"""

from collections.abc import Callable
from typing import Any

from sglang_fastpath.patches.diffusion.fp8_cpu_emulation import replace_globals, w8a8_block_fp8_linear

FP8 = "sglang.srt.layers.quantization.fp8"
ROTARY = "sglang.srt.layers.rotary_embedding.base"
REPLACED: dict[str, dict[str, Any]] = {
    FP8: {"dispatch_w8a8_block_fp8_linear": lambda: w8a8_block_fp8_linear},
    ROTARY: {"_is_cpu": True},
}


def apply(module_name: str) -> Callable[[], None]:
    """Replaces what `REPLACED` names in this module, before a model is built; returns the function that undoes it.

    A layer remembers which function it computes with, so layers built while the emulation is on stay emulated.

    Raises:
        RuntimeError: where there is a GPU, or if the installed release lacks a name that this replaces.
    """
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            f"the FP8 emulation is for machines without a GPU, but torch sees {torch.cuda.get_device_name()}; "
            "unset SGLANG_FASTPATH_EMULATE"
        )
    revert: Callable[[], None] = replace_globals(module_name, REPLACED[module_name])
    return revert
