"""FLUX.2's double and single blocks on block FP8, from fused kernels; klein's are the same classes.

fused_blocks.py says how a block is replaced as a whole and what keeps it right. Their steps, each in a stock form and
a fused one (flux2_forward.py); a double block has two streams, text and image, a single block their concatenation:

    step                                      fused by               stock
    norm + modulate + quantize                norm_quant             norm1, norm1_context, or norm, modulated eagerly
    QKV GEMMs (double)                        scale_prepack          six linears; merged into two GEMMs
    QK norm, RoPE, joint buffers (double)     qkv_epilogue           apply_qk_norm_with_optional_rope, cat
    QK norm, RoPE in place (single)           qk_norm_rope           norm_q, norm_k, RoPE on copies
    split + quantize attention output (double) act_quant             narrow, then the linears' quantizer
    gate + residual + norm2 + quantize (double) gated_residual_norm  eager, norm2, norm2_context
    SwiGLU + quantize                         act_quant              act_fn, then the linear's quantizer
    with the attention output (single)        act_quant              cat, then the linear's quantizer
    gate + residual (+ next block's norm)     gated_residual_norm    eager

The modulation is the same in all blocks of a kind, so that the next block's is known. Between the last double and the
first single block stock concatenates the streams: nothing is computed ahead there.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from sglang_fastpath.patches.diffusion.block_layout import BlockParts, Refused
from sglang_fastpath.patches.diffusion.flux2_forward import (
    HEAD,
    DoubleCall,
    DoubleForward,
    Modulation,
    Rotary,
    SingleCall,
    SingleForward,
    flux_2,
    modulations,
)
from sglang_fastpath.patches.diffusion.fused_blocks import FusedBlocks
from torch import Tensor, nn

from sglang_fastpath.features import FLUX2
from sglang_fastpath.plan import FeatureRecord, Plan

# Which features have a step in a kind of block.
_DOUBLE = ("scale_prepack", "norm_quant", "gated_residual_norm", "qkv_epilogue", "act_quant")
_SINGLE = ("norm_quant", "gated_residual_norm", "qk_norm_rope", "act_quant")


def _refuse_double(block: Any) -> str | None:
    attn = block.attn
    if getattr(attn, "use_fused_qkv", False) or getattr(attn, "use_fused_added_qkv", False):
        return "the attention has packed projections"
    if len(attn.to_out) != 2 or attn.to_out[1].p:
        return "the attention output has a dropout"
    return _refuse(block, attn.head_dim, (block.norm1, block.norm1_context, block.norm2, block.norm2_context))


def _refuse_single(block: Any) -> str | None:
    return _refuse(block, block.attn.head_dim, (block.norm,))


def _refuse(block: Any, head_dim: int, norms: tuple[Any, ...]) -> str | None:
    if any(type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 for norm in norms):
        return "a norm is not torch's LayerNorm over the last dimension"
    return f"heads are {head_dim} wide" if head_dim != HEAD else None


DOUBLE = BlockParts(
    # Text first, as in the joint sequence.
    linears={
        "qkv": tuple(("attn", name) for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_q", "to_k", "to_v")),
        "out": (("attn", "to_add_out"), ("attn.to_out", "0")),
        "up": (("ff_context", "linear_in"), ("ff", "linear_in")),
        "down": (("ff_context", "linear_out"), ("ff", "linear_out")),
    },
    merged=("qkv",),
    bypassed=("attn", "attn.to_out", "attn.to_out.1", "ff", "ff_context", "ff.act_fn", "ff_context.act_fn"),
    norms=("norm1_context", "norm1", "norm2_context", "norm2"),
    qk_norms=("attn.norm_added_q", "attn.norm_added_k", "attn.norm_q", "attn.norm_k"),
    biased=False,
    refuse=_refuse_double,
    bypassed_if_there=("ff.act_fn.gate_fn", "ff_context.act_fn.gate_fn"),  # until 0.5.17
)
SINGLE = BlockParts(
    linears={"in": (("attn", "to_qkv_mlp_proj"),), "out": (("attn", "to_out"),)},
    merged=(),
    bypassed=("attn", "attn.mlp_act_fn"),
    norms=("norm",),
    qk_norms=("attn.norm_q", "attn.norm_k"),
    biased=False,
    refuse=_refuse_single,
    bypassed_if_there=("attn.mlp_act_fn.gate_fn",),
)


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the features' sites, by target."""
    port = next(iter(records.values())).feature.port_of(__name__)
    assert port is not None
    kinds = plan.kept(__name__, lambda: _kinds(records, plan))
    return {site: blocks.wrap_forward for site, blocks in zip(port.sites, kinds, strict=True) if blocks is not None}


def _kinds(records: Mapping[str, FeatureRecord], plan: Plan) -> tuple[FusedBlocks | None, FusedBlocks | None]:
    """(double, single): None where every feature of the kind is off."""
    double, single = ({id: records[id] for id in ids if id in records} for ids in (_DOUBLE, _SINGLE))
    return DoubleBlocks(double, plan) if double else None, SingleBlocks(single, plan) if single else None


def _rotary(kwargs: dict[str, Any]) -> Rotary:
    """The tables as the release gives them: cosines and sines, or (from 0.5.20) one table of both."""
    joint, pair = kwargs.get("cos_sin_cache"), kwargs.get("freqs_cis")
    if joint is not None:
        if joint.dim() != 2 or joint.shape[1] != HEAD:
            raise Refused(f"the rotary table is {tuple(joint.shape)}")
        return Rotary(*joint.chunk(2, dim=-1), joint, kwargs.get("complex_freqs"))
    if pair is None or any(not isinstance(table, Tensor) or table.dim() != 2 for table in pair):
        raise Refused("there are no rotary tables")
    return Rotary(pair[0], pair[1], None, None)


def _attention(kwargs: dict[str, Any]) -> dict[str, Any]:
    attention = kwargs.get("joint_attention_kwargs") or {}
    if unknown := attention.keys() - {"attn_mask", "attn_mask_meta"}:
        raise Refused(f"the attention is given {', '.join(sorted(unknown))}")
    if (attention.get("attn_mask_meta") or {}).get("local_pad"):
        raise Refused("the sequence is sharded")
    return attention


def _stream(stream: Any) -> Tensor:
    """A residual stream; from 0.5.19 stock may leave its last sum, (residual, x, gate), to the next block."""
    whole: Tensor = flux_2()._materialize_gated_residual(stream) if isinstance(stream, tuple) else stream
    return whole


class DoubleBlocks(FusedBlocks):  # type: ignore[misc]  # mypy sees no mapped packages
    """`Flux2TransformerBlock`."""

    model: ClassVar[str] = FLUX2
    parts: ClassVar[BlockParts] = DOUBLE
    ahead_by: ClassVar[str] = "gated_residual_norm"

    def call(self, block: Any, kwargs: dict[str, Any]) -> DoubleCall:
        streams = [_stream(kwargs[name]) for name in ("encoder_hidden_states", "hidden_states")]
        text, image = ([Modulation(*three) for three in kwargs[f"temb_mod_params_{name}"]] for name in ("txt", "img"))
        return DoubleCall(
            block,
            self.layout(block),
            *streams,
            (text[0], image[0]),
            (text[1], image[1]),
            _rotary(kwargs),
            _attention(kwargs),
            # Until 0.5.13 the block takes the text's tokens itself.
            kwargs.get("num_replicated_prefix", streams[0].shape[1]),
        )

    def stock_outputs(self, result: Any) -> tuple[Tensor, ...]:
        return tuple(_stream(stream) for stream in result)

    def inputs(self, call: DoubleCall) -> tuple[Tensor, ...]:
        return *call.streams, *modulations(call)

    def forward(self, call: DoubleCall, features: frozenset[str], *, checking: bool = False) -> DoubleForward:
        return DoubleForward(call, features, checking=checking)


class SingleBlocks(FusedBlocks):  # type: ignore[misc]  # mypy sees no mapped packages
    """`Flux2SingleTransformerBlock`."""

    model: ClassVar[str] = FLUX2
    parts: ClassVar[BlockParts] = SINGLE
    ahead_by: ClassVar[str] = "gated_residual_norm"

    def call(self, block: Any, kwargs: dict[str, Any]) -> SingleCall:
        if kwargs.get("encoder_hidden_states") is not None or kwargs.get("split_hidden_states"):
            raise Refused("text and image come apart, or are to leave apart")
        return SingleCall(
            block,
            self.layout(block),
            _stream(kwargs["hidden_states"]),
            (Modulation(*kwargs["temb_mod_params"]),),
            _rotary(kwargs),
            _attention(kwargs),
            kwargs.get("num_replicated_prefix", kwargs.get("text_seq_len") or 0),
        )

    def stock_outputs(self, result: Any) -> tuple[Tensor, ...]:
        return (_stream(result),)

    def result(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]

    def inputs(self, call: SingleCall) -> tuple[Tensor, ...]:
        return *call.streams, *modulations(call)

    def forward(self, call: SingleCall, features: frozenset[str], *, checking: bool = False) -> SingleForward:
        return SingleForward(call, features, checking=checking)
