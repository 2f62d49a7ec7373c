"""The catalogue: one `Feature` per optimization.

Everything that lists features is made from it: the flags table in the README, `sglang-fastpath features`, the
ablation, the status line, the contracts to record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

QWEN_IMAGE = "Qwen-Image"
FLUX2 = "FLUX.2"
QWEN3 = "Qwen3"
QWEN2 = "Qwen2"
LLAMA = "Llama"
LLM = "LLMs"  # all that SGLang's language model server runs
_LLM_FAMILIES = {"Qwen3ForCausalLM": QWEN3, "Qwen2ForCausalLM": QWEN2, "LlamaForCausalLM": LLAMA}

_QWEN_IMAGE = "sglang.multimodal_gen.runtime.models.dits.qwen_image"
_FLUX2 = "sglang.multimodal_gen.runtime.models.dits.flux_2"
_DENOISING = "sglang.multimodal_gen.runtime.pipelines_core.stages.denoising"
_LINEAR = "sglang.multimodal_gen.runtime.layers.linear"
_DIFFUSION_FP8 = "sglang.multimodal_gen.runtime.layers.quantization.fp8"
_FP8_LINEAR = "sglang.srt.layers.quantization.fp8_utils"
_DEEP_GEMM = "sglang.srt.layers.deep_gemm_wrapper.entrypoint"
_ATTENTION = "sglang.multimodal_gen.runtime.layers.attention"
_LLM_LAYERS = "sglang.srt.layers"
_LLM_MODELS = "sglang.srt.models"
_LLM_CACHE = "sglang.srt.mem_cache.memory_pool"
_LLM_KERNELS = "sglang.kernels.ops"


@dataclass(frozen=True)
class Port:
    """A feature in one family of models (or several that one patch serves): where it goes, and what it counts on.

    `sites` are the stock functions that `patch`, a module, replaces and `relies_on` those whose behaviour it counts
    on, both as `module:qualified.name`; together they are the port's contract. `native_since` is the first release
    in which stock does the same by itself.
    """

    models: tuple[str, ...]
    patch: str
    sites: tuple[str, ...]
    relies_on: tuple[str, ...]
    native_since: str | None = None

    @property
    def name(self) -> str:
        """The models, in words."""
        return ", ".join(self.models)

    @property
    def contract(self) -> tuple[str, ...]:
        """Every stock function that must be the recorded one for the port to be applied."""
        return self.sites + self.relies_on


@dataclass(frozen=True)
class Feature:
    """One optimization, declared once; `ports` say where it is put to work.

    `not_for` says, by model, why a model that the plugin knows has no port. `needs` are keys of
    `environment.REQUIREMENTS`. `max_ulp` is what a feature of class `ulp` may differ from stock by, under
    SGLANG_FASTPATH_PARITY=ulp. `choices` are the values of its variable. A feature that is not `measured` on a GPU
    yet is off unless it is asked for by name.
    """

    id: str
    title: str
    path: Literal["diffusion", "llm", "both"]
    ports: tuple[Port, ...]
    parity: Literal["bitwise", "ulp"]
    needs: tuple[str, ...]
    why: str
    removal: str
    not_for: Mapping[str, str] = field(default_factory=dict)
    max_ulp: int = 0
    choices: tuple[str, ...] = ("0", "1")
    measured: bool = True

    @property
    def env(self) -> str:
        """The environment variable that switches this feature: 0, or another one of its `choices`."""
        return f"SGLANG_FASTPATH_{self.id.upper()}"

    def serves(self, path: str | None) -> bool:
        """Whether it is of use to what a process serves, "llm" or "diffusion"; None: that is not known."""
        return path is None or self.path in (path, "both")

    @property
    def default_off(self) -> str | None:
        """Why it is off unless it is asked for by name, or None if it is on by default."""
        return None if self.measured else f"not measured on a GPU yet; {self.env}=1 switches it on"

    @property
    def needs_a_gpu(self) -> bool:
        """Whether it is off where SGLANG_FASTPATH_EMULATE stands in for a GPU's arithmetic."""
        return "gpu" in self.needs

    @property
    def sites(self) -> tuple[str, ...]:
        """Every stock function that it replaces, in any model."""
        return tuple(dict.fromkeys(site for port in self.ports for site in port.sites))

    @property
    def contract(self) -> tuple[str, ...]:
        """Every stock function that it counts on, in any model."""
        return tuple(dict.fromkeys(target for port in self.ports for target in port.contract))

    def port_of(self, patch: str) -> Port | None:
        """Its port in a patch module, or None."""
        return next((port for port in self.ports if port.patch == patch), None)

    def lacks(self, model: str) -> str | None:
        """Why it does nothing in a model, or None if it has a port there."""
        names = {model} if model in (QWEN_IMAGE, FLUX2) else {model, LLM}
        if any(names.intersection(port.models) for port in self.ports):
            return None
        return f"{model}: {self.not_for.get(model, 'not written for it')}"


_QWEN_IMAGE_BLOCK = Port(
    models=(QWEN_IMAGE,),
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
)


_MODULATION_AHEAD = Port(
    models=(QWEN_IMAGE,),
    patch="sglang_fastpath.patches.diffusion.step_graph",
    sites=(
        f"{_DENOISING}:DenoisingStage._run_denoising_step",
        f"{_LINEAR}:ReplicatedLinear.forward",
        f"{_QWEN_IMAGE}:QwenImageTransformer2DModel.forward",
    ),
    relies_on=(
        f"{_QWEN_IMAGE}:QwenImageTransformerBlock.__init__",
        f"{_QWEN_IMAGE}:QwenImageTransformerBlock.forward",
        f"{_QWEN_IMAGE}:QwenTimestepProjEmbeddings.forward",
        f"{_DENOISING}:DenoisingStage.expand_timestep_before_forward",
    ),
)

_FLUX2_BLOCKS = Port(
    models=(FLUX2,),
    patch="sglang_fastpath.patches.diffusion.flux2_blocks",
    sites=(
        f"{_FLUX2}:Flux2TransformerBlock.forward",
        f"{_FLUX2}:Flux2SingleTransformerBlock.forward",
    ),
    relies_on=(
        f"{_FLUX2}:Flux2TransformerBlock.__init__",
        f"{_FLUX2}:Flux2SingleTransformerBlock.__init__",
        f"{_FLUX2}:Flux2Attention.__init__",
        f"{_FLUX2}:Flux2Attention.forward",
        f"{_FLUX2}:Flux2ParallelSelfAttention.__init__",
        f"{_FLUX2}:Flux2ParallelSelfAttention.forward",
        f"{_FLUX2}:Flux2FeedForward.__init__",
        f"{_FLUX2}:Flux2FeedForward.forward",
        f"{_FLUX2}:Flux2SwiGLU.forward",
        f"{_FLUX2}:Flux2Modulation.forward",
        f"{_FLUX2}:Flux2Transformer2DModel.forward",
        f"{_DIFFUSION_FP8}:Fp8LinearMethod.apply",
        f"{_FP8_LINEAR}:deepgemm_w8a8_block_fp8_linear_with_fallback",
    ),
)


# Only 0.5.17 has `MultiPlatformOp` and the kernels at these places: every other release is a drift.
_OP_FORWARD = f"{_LLM_LAYERS}.utils.multi_platform:MultiPlatformOp.forward"

_QUANTIZED_OUTPUTS = Port(
    models=(QWEN3, QWEN2, LLAMA),
    patch="sglang_fastpath.patches.llm.quantized_outputs",
    sites=(
        _OP_FORWARD,
        f"{_LLM_LAYERS}.quantization.fp8:Fp8LinearMethod.apply",
        f"{_LLM_MODELS}.qwen3:Qwen3DecoderLayer.__init__",
        f"{_LLM_MODELS}.qwen2:Qwen2DecoderLayer.__init__",
        f"{_LLM_MODELS}.llama:LlamaDecoderLayer.__init__",
    ),
    relies_on=(
        f"{_LLM_MODELS}.qwen3:Qwen3DecoderLayer.forward",
        f"{_LLM_MODELS}.qwen3:Qwen3Attention.forward_prepare_native",
        f"{_LLM_MODELS}.qwen2:Qwen2DecoderLayer.forward",
        f"{_LLM_MODELS}.qwen2:Qwen2Attention.forward",
        f"{_LLM_MODELS}.qwen2:Qwen2MLP.forward",
        f"{_LLM_MODELS}.llama:LlamaDecoderLayer.forward",
        f"{_LLM_MODELS}.llama:LlamaAttention.forward",
        f"{_LLM_MODELS}.llama:LlamaMLP.forward",
        f"{_LLM_LAYERS}.communicator:LayerCommunicator.prepare_attn",
        f"{_LLM_LAYERS}.communicator:LayerCommunicator.prepare_mlp",
        f"{_LLM_LAYERS}.layernorm:RMSNorm.__init__",
        f"{_LLM_LAYERS}.layernorm:RMSNorm.forward_cuda",
        f"{_LLM_LAYERS}.activation:SiluAndMul.forward_cuda",
        f"{_LLM_LAYERS}.linear:ColumnParallelLinear.forward",
        f"{_LLM_LAYERS}.linear:RowParallelLinear.forward",
        f"{_FP8_LINEAR}:deepgemm_w8a8_block_fp8_linear_with_fallback",
        f"{_LLM_KERNELS}.activation.activation:silu_and_mul",
        f"{_LLM_KERNELS}.quantization.fp8_kernel:sglang_per_token_group_quant_fp8",
    ),
)

_QWEN3_ATTENTION = Port(
    models=(QWEN3,),
    patch="sglang_fastpath.patches.llm.qwen3_attention",
    sites=(f"{_LLM_MODELS}.qwen3:Qwen3Attention.forward",),
    relies_on=(
        _OP_FORWARD,
        f"{_LLM_MODELS}.qwen3:Qwen3Attention.__init__",
        f"{_LLM_MODELS}.qwen3:Qwen3Attention.forward_prepare_native",
        f"{_LLM_MODELS}.utils:apply_qk_norm",
        f"{_LLM_LAYERS}.layernorm:RMSNorm.__init__",
        f"{_LLM_LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cuda",
        f"{_LLM_LAYERS}.radix_attention:RadixAttention.forward",
        f"{_LLM_LAYERS}.attention.flashattention_backend:FlashAttentionBackend.forward_extend",
        f"{_LLM_LAYERS}.attention.flashattention_backend:FlashAttentionBackend.forward_decode",
        f"{_LLM_LAYERS}.utils.cp_utils:is_prefill_context_parallel_enabled",
        f"{_LLM_CACHE}:MHATokenToKVPool.get_kv_buffer",
        f"{_LLM_CACHE}:MHATokenToKVPool.set_kv_buffer",
        "sglang.srt.model_executor.forward_context:get_attn_backend",
        "sglang.srt.runtime_context:get_exec",
    ),
)


def _llm(id: str, title: str, why: str, port: Port, *needs: str, not_for: Mapping[str, str] | None = None) -> Feature:
    """One of the language models' features, which have not run on a GPU yet."""
    return Feature(
        id=id,
        title=title,
        path="llm",
        ports=(port,),
        parity="bitwise",
        needs=("block_fp8_kernels", *needs),
        why=why,
        removal="when SGLang fuses it for block FP8 on Hopper, in prefill and decode",
        not_for=not_for or {},
        measured=False,
    )


def _block_fp8(id: str, title: str, why: str, *ports: Port, not_for: Mapping[str, str] | None = None) -> Feature:
    """One of the features that share the fused forwards of the denoisers' blocks."""
    return Feature(
        id=id,
        title=title,
        path="diffusion",
        ports=ports,
        parity="bitwise",
        needs=("block_fp8_kernels",),
        why=why,
        removal="when SGLang fuses it for block FP8 on Hopper",
        not_for=not_for or {},
    )


CATALOGUE: tuple[Feature, ...] = (
    Feature(
        id="cfg_mod_cache",
        title="the second guidance pass of a step reuses the modulation",
        path="diffusion",
        ports=(
            Port(
                models=(QWEN_IMAGE,),
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
                native_since="0.5.19",
            ),
        ),
        parity="bitwise",
        needs=(),
        why="Both guidance passes of a step see the same timestep, so every block computes the same two "
        "modulation vectors twice (two [B, 6*dim] GEMVs a block, 120 a pass in Qwen-Image).",
        removal="when the oldest supported release is 0.5.19, whose blocks keep their modulation themselves",
        not_for={FLUX2: "guidance is an input of the model, so a step is one pass"},
    ),
    _block_fp8(
        "scale_prepack",
        "linears that run as one GEMM are merged at their first pass, scales in DeepGEMM's layout",
        "Stock quantizes the same activation three times and launches six small GEMMs for QKV; merged weights and "
        "scales, concatenated without requantization, need one grouped launch, or one for each stream.",
        _QWEN_IMAGE_BLOCK,
        _FLUX2_BLOCKS,
    ),
    _block_fp8(
        "norm_quant",
        "layer norm, modulation and quantization in one kernel; in Qwen-Image with gate and residual before them",
        "Stock writes the modulated activation in bf16 and reads it back to quantize it, once for each linear; the "
        "end of a block and the next block's norm are two more passes over the residual stream.",
        _QWEN_IMAGE_BLOCK,
        _FLUX2_BLOCKS,
    ),
    _block_fp8(
        "gated_residual_norm",
        "gate, residual, layer norm, modulation and quantization in one kernel, across the border of two blocks",
        "Stock runs gate, residual, norm, scale and shift as elementwise kernels, 32 of the 314 ms of a FLUX.2 pass "
        "on an H200, and quantizes what they wrote in one more.",
        _FLUX2_BLOCKS,
        not_for={QWEN_IMAGE: "norm_quant does it there"},
    ),
    _block_fp8(
        "qkv_epilogue",
        "bias, QK norm and RoPE of both streams in one kernel that writes the joint q, k, v",
        "Stock adds three biases, normalizes and rotates in place and concatenates text and image: four passes over "
        "q and k, three over v, for each stream.",
        _QWEN_IMAGE_BLOCK,
        _FLUX2_BLOCKS,
    ),
    _block_fp8(
        "qk_norm_rope",
        "QK norm and RoPE of the single blocks in one kernel, in place in the merged projection",
        "q and k are strided views of one merged GEMM output: stock's fused kernel does not take them, so that norm, "
        "copies and RoPE run apart, and cosines and sines are concatenated in every block.",
        _FLUX2_BLOCKS,
        not_for={QWEN_IMAGE: "qkv_epilogue does it there"},
    ),
    _block_fp8(
        "act_quant",
        "GELU or SwiGLU and quantization in one kernel; the attention output is quantized where it lies",
        "Stock writes the activation's output in bf16 (107 MB a block of Qwen-Image at 1024x1024, 170 MB one of "
        "FLUX.2), in FLUX.2 concatenates it with the attention output, and reads it back to quantize it.",
        _QWEN_IMAGE_BLOCK,
        _FLUX2_BLOCKS,
    ),
    _block_fp8(
        "bias_fold",
        "biases are added by the kernel that reads the GEMM's output anyway",
        "Stock adds every linear's bias in a kernel of its own: 20 of 112 ms a pass of Qwen-Image on an H200.",
        _QWEN_IMAGE_BLOCK,
        not_for={FLUX2: "its linears have no biases"},
    ),
    Feature(
        id="gemm_tuner",
        title="of the GEMM backends that give stock's bytes, the fastest one for each shape that has been tuned",
        path="both",
        ports=(
            Port(
                models=(QWEN_IMAGE, FLUX2, LLM),
                patch="sglang_fastpath.patches.gemm_dispatch",
                sites=(f"{_DEEP_GEMM}:gemm_nt_f8f8bf16",),
                relies_on=(),
            ),
        ),
        parity="bitwise",
        needs=("gpu", "deep_gemm"),
        why="SGLang picks one block-FP8 GEMM backend for the whole process, and other shapes are won by other ones. "
        "Only what `sglang-fastpath tune` has measured here is used; what it has not is DeepGEMM's, as in stock.",
        removal="when SGLang chooses the backend by the shape",
        max_ulp=1,
        choices=("0", "1", "all"),
        measured=False,
    ),
    Feature(
        id="step_graph",
        title="a whole pass, captured in a CUDA graph at its second call, is one launch",
        path="diffusion",
        ports=(
            Port(
                models=(QWEN_IMAGE, FLUX2),
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
            ),
        ),
        parity="bitwise",
        needs=("gpu",),
        why="An eager pass launches thousands of kernels, and on many hosts the GPU waits for them. SGLang's own "
        "breakable graphs need every resolution named at start-up and leave attention outside.",
        removal="when SGLang captures whole passes, attention included, without being told the resolutions",
    ),
    Feature(
        id="modulation_ahead",
        title="a captured pass computes the modulation of the request's next eight steps at once",
        path="diffusion",
        ports=(_MODULATION_AHEAD,),
        parity="bitwise",
        needs=("gpu",),
        why="Each of Qwen-Image's 120 modulation linears reads a weight of 113 MB for one row, in every step anew: "
        "13.6 GB, which cfg_mod_cache spares only the second pass of a step (1.9 ms a pass on an H200). A GEMM of "
        "eight rows reads them once for all eight.",
        removal="when SGLang computes the modulation of all steps before the first",
        not_for={FLUX2: "all its blocks share three modulation linears"},
        measured=False,
    ),
    _llm(
        "rmsnorm_quant",
        "residual sum, RMSNorm and quantization in one kernel; the linear behind it takes the operand as it is",
        "Stock writes the normed rows in bf16 and reads them back to quantize them, in front of QKV and of the MLP.",
        _QUANTIZED_OUTPUTS,
        "flashinfer_norm",
    ),
    _llm(
        "silu_quant",
        "SiLU, product and quantization in one kernel that feeds down_proj",
        "Stock writes the activation's rows, three times as wide as the model in Qwen3-8B, and reads them back.",
        _QUANTIZED_OUTPUTS,
    ),
    _llm(
        "qk_norm_rope_kv",
        "QK norm, RoPE and the write into the KV cache in one kernel",
        "Stock runs norm, RoPE, a copy of q and the cache write as four kernels over the QKV output.",
        _QWEN3_ATTENTION,
        not_for={QWEN2: "it has no QK norm", LLAMA: "it has no QK norm"},
    ),
)

BY_ID: dict[str, Feature] = {feature.id: feature for feature in CATALOGUE}


def llm_family(architecture: str) -> str:
    """What the catalogue calls the models of a class of SGLang's; an unknown class keeps its name."""
    return _LLM_FAMILIES.get(architecture, architecture)


def contract_targets() -> tuple[str, ...]:
    """Every stock function that any feature relies on, without repetition, in catalogue order."""
    return tuple(dict.fromkeys(target for feature in CATALOGUE for target in feature.contract))
