"""Lets SGLang's own block-FP8 diffusion linears run on a machine without a GPU.

Stock SGLang runs a block-FP8 checkpoint on a GPU, or on a CPU with AMX, and asserts otherwise. This replaces two
globals of its module `fp8` in the current process, so that the unmodified `Fp8LinearMethod` keeps the weights as
loaded and computes with the torch reference in `kernels/block_fp8_linear.py`: the arithmetic of a GPU, slowly.
Layers, sharding, bias handling and everything above stay SGLang's; per-tensor and per-channel FP8 are untouched.

For tests and demonstrations: it emulates, it accelerates nothing.

Run the engine with `--dit-precision bf16 --text-encoder-precisions bf16`: SGLang keeps the unquantized parameters of
a quantized checkpoint in bf16, and with fp32 its own linears fail on the mixture. A denoiser built in float32 works
all the same. Stock's FP8 kernels refuse such activations; here they are quantized by the same formula with the amax
in float32, and the output stays float32 (the accumulator is not rounded). K must be a multiple of 128, as on a GPU.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_fastpath.kernels.block_fp8_linear import GROUP, block_fp8_linear
from torch import Tensor

FP8_MODULE = "sglang.multimodal_gen.runtime.layers.quantization.fp8"


def apply() -> Callable[[], None]:
    """Switch the emulation on, before a model is built; returns the function that restores what was replaced.

    A layer remembers which function it computes with, so layers built while the emulation is on stay emulated.
    Raises RuntimeError where SGLang runs on a GPU, or if the installed release lacks a name that this relies on.
    """
    fp8 = importlib.import_module(FP8_MODULE)
    require(FP8_MODULE, "Fp8LinearMethod", "current_platform")
    if not fp8.current_platform.is_cpu():
        raise RuntimeError(
            f"the FP8 emulation is for machines without a GPU, but SGLang runs on {fp8.current_platform.device_name} "
            "here; unset SGLANG_FASTPATH_EMULATE"
        )
    replacements = {
        # Read only where the block-FP8 method would repack its weights for AMX; the path taken instead is the
        # GPU's, which leaves them as they are.
        "_is_cpu": False,
        "dispatch_w8a8_block_fp8_linear": lambda: w8a8_block_fp8_linear,
    }
    return replace_globals(FP8_MODULE, replacements)


def require(module_name: str, *names: str) -> None:
    """Raises RuntimeError if the installed release lacks one of these names in this module of SGLang's."""
    module = importlib.import_module(module_name)
    for name in names:
        if not hasattr(module, name):
            import sglang

            raise RuntimeError(
                f"SGLang {sglang.__version__} has no {module_name}.{name}, which the FP8 emulation replaces or needs"
                "; run this release on a GPU, or an unquantized checkpoint"
            )


def replace_globals(module_name: str, replacements: Mapping[str, Any]) -> Callable[[], None]:
    """Replaces all of these globals of a module, or none (see `require`); returns the function that undoes it."""
    require(module_name, *replacements)
    module = importlib.import_module(module_name)
    originals = {name: getattr(module, name) for name in replacements}

    def put(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    put(replacements)
    return lambda: put(originals)


def w8a8_block_fp8_linear(
    input: Tensor,
    weight: Tensor,
    block_size: Sequence[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Stock's signature of a block-FP8 linear, computed by the reference; shapes and rounding as it says.

    With `input_scale` the input is already quantized and the output is bfloat16.
    """
    if list(block_size) != [GROUP, GROUP]:
        raise ValueError(f"block FP8 with weight blocks {list(block_size)} is not emulated, only [{GROUP}, {GROUP}]")
    out: Tensor = block_fp8_linear(input, weight, weight_scale, bias, x_scale=input_scale)
    return out
