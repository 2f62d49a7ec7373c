"""The catalogue: one `Feature` per optimization.

Everything that lists features is made from it: the flags table in the README, `sglang-fastpath features`, the
ablation, the status line, the contracts to record.
"""

from dataclasses import dataclass
from typing import Literal

_QWEN_IMAGE = "sglang.multimodal_gen.runtime.models.dits.qwen_image"
_FLUX2 = "sglang.multimodal_gen.runtime.models.dits.flux_2"
_DENOISING = "sglang.multimodal_gen.runtime.pipelines_core.stages.denoising"
_LINEAR = "sglang.multimodal_gen.runtime.layers.linear"
_DIFFUSION_FP8 = "sglang.multimodal_gen.runtime.layers.quantization.fp8"
_FP8_LINEAR = "sglang.srt.layers.quantization.fp8_utils"
_ATTENTION = "sglang.multimodal_gen.runtime.layers.attention"


@dataclass(frozen=True)
class Feature:
    """One optimization, declared once.

    `sites` are the stock functions that the patch replaces and `relies_on` those whose behaviour it counts on,
    both as `module:qualified.name`; together they are the feature's contract. `needs` are keys of
    `environment.REQUIREMENTS`. `native_since` is the first release in which stock does the same by itself.
    `max_ulp` is what a feature of class `ulp` may differ from stock by, under SGLANG_FASTPATH_PARITY=ulp.
    """

    id: str
    title: str
    path: Literal["diffusion", "llm"]
    patch: str
    sites: tuple[str, ...]
    relies_on: tuple[str, ...]
    parity: Literal["bitwise", "ulp"]
    needs: tuple[str, ...]
    native_since: str | None
    why: str
    removal: str
    max_ulp: int = 0

    @property
    def env(self) -> str:
        """The environment variable that switches this feature: 0 or 1."""
        return f"SGLANG_FASTPATH_{self.id.upper()}"

    @property
    def needs_a_gpu(self) -> bool:
        """Whether it is off where SGLANG_FASTPATH_EMULATE stands in for a GPU's arithmetic."""
        return "gpu" in self.needs

    @property
    def contract(self) -> tuple[str, ...]:
        """Every stock function that must be the recorded one for the feature to be applied."""
        return self.sites + self.relies_on


def _qwen_image_block(id: str, title: str, why: str) -> Feature:
    """One of the features that share the fused forward of Qwen-Image's block."""
    return Feature(
        id=id,
        title=f"Qwen-Image: {title}",
        path="diffusion",
        patch="sglang_fastpath.patches.diffusion.qwen_image_block",
        sites=(f"{_QWEN_IMAGE}:QwenImageTransformerBlock.forward",),
        relies_on=(
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock.__init__",
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock._modulate",
            f"{_QWEN_IMAGE}:QwenImageTransformer2DModel.forward",
            f"{_QWEN_IMAGE}:QwenImageCrossAttention.__init__",
            f"{_QWEN_IMAGE}:QwenImageCrossAttention.forward",
            f"{_DIFFUSION_FP8}:Fp8LinearMethod.apply",
            f"{_FP8_LINEAR}:deepgemm_w8a8_block_fp8_linear_with_fallback",
        ),
        parity="bitwise",
        needs=("block_fp8_kernels",),
        native_since=None,
        why=why,
        removal="when SGLang fuses it for block FP8 on Hopper",
    )


CATALOGUE: tuple[Feature, ...] = (
    Feature(
        id="cfg_mod_cache",
        title="Qwen-Image: the second guidance pass of a step reuses the modulation",
        path="diffusion",
        patch="sglang_fastpath.patches.diffusion.qwen_image_modulation",
        sites=(
            f"{_QWEN_IMAGE}:QwenImageTransformer2DModel.forward",
            f"{_DENOISING}:DenoisingStage._run_denoising_step",
            f"{_LINEAR}:ReplicatedLinear.forward",
        ),
        relies_on=(
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock.__init__",
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock.forward",
            f"{_QWEN_IMAGE}:QwenTimestepProjEmbeddings.forward",
            f"{_DENOISING}:DenoisingStage._predict_noise_with_cfg",
            f"{_DENOISING}:DenoisingStage._predict_noise",
        ),
        parity="bitwise",
        needs=(),
        native_since="0.5.19",
        why="Both guidance passes of a step see the same timestep, so every block computes the same two "
        "modulation vectors twice (two [B, 6*dim] GEMVs a block, 120 a pass in Qwen-Image).",
        removal="when the oldest supported release is 0.5.19, whose blocks keep their modulation themselves",
    ),
    _qwen_image_block(
        "scale_prepack",
        "linears that run as one GEMM are merged at their first pass, scales in DeepGEMM's layout",
        "Stock quantizes the same activation three times and launches six small GEMMs for QKV; merged weights and "
        "scales, concatenated without requantization, need one grouped launch.",
    ),
    _qwen_image_block(
        "norm_quant",
        "layer norm, modulation and quantization in one kernel, with gate and residual where they come first",
        "Stock writes the modulated activation in bf16 and reads it back to quantize it, once for each linear; the "
        "end of a block and the next block's norm are two more passes over the residual stream.",
    ),
    _qwen_image_block(
        "qkv_epilogue",
        "bias, QK norm and RoPE of both streams in one kernel that writes the joint q, k, v",
        "Stock adds three biases, normalizes and rotates in place and concatenates text and image: four passes over "
        "q and k, three over v, for each stream.",
    ),
    _qwen_image_block(
        "act_quant",
        "GELU and quantization in one kernel; the attention output is quantized in place in its joint buffer",
        "Stock writes GELU's output in bf16 (107 MB a block at 1024x1024) and reads it back to quantize it.",
    ),
    _qwen_image_block(
        "bias_fold",
        "biases are added by the kernel that reads the GEMM's output anyway",
        "Stock adds every linear's bias in a kernel of its own: 20 of 112 ms a pass on an H200.",
    ),
    Feature(
        id="step_graph",
        title="Qwen-Image, FLUX.2: a whole pass, captured in a CUDA graph at its second call, is one launch",
        path="diffusion",
        patch="sglang_fastpath.patches.diffusion.step_graph",
        sites=(
            f"{_DENOISING}:DenoisingStage._run_denoising_step",
            f"{_LINEAR}:ReplicatedLinear.forward",
            f"{_QWEN_IMAGE}:QwenImageTransformer2DModel.forward",
            f"{_FLUX2}:Flux2Transformer2DModel.forward",
        ),
        relies_on=(
            f"{_FLUX2}:Flux2TransformerBlock.forward",
            f"{_FLUX2}:Flux2SingleTransformerBlock.forward",
            f"{_FLUX2}:Flux2Attention.forward",
            f"{_FLUX2}:Flux2ParallelSelfAttention.forward",
            f"{_FLUX2}:Flux2Modulation.forward",
            f"{_FLUX2}:Flux2TimestepGuidanceEmbeddings.forward",
            f"{_QWEN_IMAGE}:QwenImageTransformer2DModel.build_modulate_index",
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock.__init__",
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock.forward",
            f"{_QWEN_IMAGE}:QwenImageTransformerBlock._modulate",
            f"{_QWEN_IMAGE}:QwenImageCrossAttention.forward",
            f"{_QWEN_IMAGE}:QwenTimestepProjEmbeddings.forward",
            f"{_ATTENTION}.backends.flash_attn:FlashAttentionImpl.forward",
            f"{_ATTENTION}.backends.sdpa:SDPAImpl.forward",
            f"{_DENOISING}:DenoisingStage._predict_noise_with_cfg",
            f"{_DENOISING}:DenoisingStage._predict_noise",
        ),
        parity="bitwise",
        needs=("gpu",),
        native_since=None,
        why="An eager pass launches thousands of kernels, and on many hosts the GPU waits for them. SGLang's own "
        "breakable graphs need every resolution named at start-up and leave attention outside.",
        removal="when SGLang captures whole passes, attention included, without being told the resolutions",
    ),
)

BY_ID: dict[str, Feature] = {feature.id: feature for feature in CATALOGUE}


def contract_targets() -> tuple[str, ...]:
    """Every stock function that any feature relies on, without repetition, in catalogue order."""
    return tuple(dict.fromkeys(target for feature in CATALOGUE for target in feature.contract))
