"""Qwen-Image's transformer block on block FP8, from fused kernels: one forward for five features.

fused_blocks.py says how a block is replaced as a whole and what keeps it right. Its steps, each in a stock form and a
fused one (qwen_image_forward.py):

    step                                   fused by        stock
    norm1 + modulate + quantize            norm_quant      block.img_norm1 / txt_norm1, then the linears' quantizer
    QKV GEMMs                              scale_prepack   six linears; merged into two GEMMs, or one grouped
    bias, QK norm, RoPE, joint buffers     qkv_epilogue    bias adds, apply_qk_norm_with_optional_rope, cat
    split + quantize attention output      act_quant       narrow, then the linears' quantizer
    gate + residual + norm2 + quantize     norm_quant      block.img_norm2 / txt_norm2
    up GEMMs                               scale_prepack   two linears; one grouped GEMM
    GELU + quantize                        act_quant       F.gelu, then the linears' quantizer
    gate + residual (+ next block's norm1) norm_quant, or bias_fold alone; stock: block.fuse_mul_add
    bias of any linear                     bias_fold, where the kernel that reads the GEMM's output is fused
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from sglang_fastpath.patches.diffusion.block_layout import BlockParts, Refused
from sglang_fastpath.patches.diffusion.fused_blocks import FusedBlocks
from sglang_fastpath.patches.diffusion.qwen_image_forward import Call, FusedForward
from torch import Tensor

from sglang_fastpath.features import QWEN_IMAGE
from sglang_fastpath.plan import FeatureRecord, Plan


def _refuse(block: Any) -> str | None:
    attn = block.attn
    if getattr(attn, "use_fused_qkv", False) or getattr(attn, "use_fused_added_qkv", False) or not attn.qk_norm:
        return "the attention has packed projections or no QK norm"
    return "the attention output has a dropout" if len(attn.to_out) != 1 else None


PARTS = BlockParts(
    # Text first, as in the joint sequence.
    linears={
        "qkv": tuple(("attn", name) for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_q", "to_k", "to_v")),
        "out": (("attn", "to_add_out"), ("attn.to_out", "0")),
        "up": (("txt_mlp.net.0", "proj"), ("img_mlp.net.0", "proj")),
        "down": (("txt_mlp.net", "2"), ("img_mlp.net", "2")),
    },
    merged=("qkv", "out", "up", "down"),
    bypassed=(
        "attn",
        "attn.to_out",
        "img_mlp",
        "txt_mlp",
        "img_mlp.net",
        "txt_mlp.net",
        "img_mlp.net.0",
        "txt_mlp.net.0",
        "img_mlp.net.1",
        "txt_mlp.net.1",
        "fuse_mul_add",
    ),
    norms=("img_norm1", "txt_norm1", "img_norm2", "txt_norm2"),
    qk_norms=("attn.norm_added_q", "attn.norm_added_k", "attn.norm_q", "attn.norm_k"),
    biased=True,
    refuse=_refuse,
)


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the features' sites, by target."""
    port = next(iter(records.values())).feature.port_of(__name__)
    assert port is not None
    (site,) = port.sites
    blocks = plan.kept(__name__, lambda: QwenImageBlocks(records, plan))
    return {site: blocks.wrap_forward}


class QwenImageBlocks(FusedBlocks):  # type: ignore[misc]  # mypy sees no mapped packages
    """`QwenImageTransformerBlock`."""

    model: ClassVar[str] = QWEN_IMAGE
    parts: ClassVar[BlockParts] = PARTS
    ahead_by: ClassVar[str] = "norm_quant"

    def call(self, block: Any, kwargs: dict[str, Any]) -> Call:
        text, image = kwargs["encoder_hidden_states"], kwargs["hidden_states"]
        rotary = kwargs.get("image_rotary_emb")
        if rotary is None or not isinstance(rotary[0], Tensor) or rotary[0].dim() != 2:
            raise Refused("there are no rotary tables")
        attention = kwargs.get("joint_attention_kwargs") or {}
        if attention.get("sp_text_sharded") or attention.get("attention_mask") is not None:
            raise Refused("the sequence is sharded, or the mask has another name")
        if attention.get("attn_mask") is None and kwargs.get("encoder_hidden_states_mask") is not None:
            raise Refused("the text has a mask of its own")
        return Call(
            block,
            self.layout(block),
            text,
            image,
            (kwargs["temb_txt_silu"], kwargs["temb_img_silu"]),
            (rotary[1], rotary[0]),
            attention,
            kwargs.get("modulate_index"),
            kwargs.get("modulation_cache_key"),
        )

    def inputs(self, call: Call) -> tuple[Tensor, ...]:
        return *call.streams, *call.temb

    def may_go_ahead(self, call: Call) -> bool:
        return call.modulate_index is None

    def forward(self, call: Call, features: frozenset[str], *, checking: bool = False) -> FusedForward:
        return FusedForward(call, features, checking=checking)
