"""Qwen-Image's transformer block on block FP8, from fused kernels: one forward for five features.

`QwenImageTransformerBlock.forward` is replaced as a whole, because what is worth fusing crosses the borders of
SGLang's modules (a norm's output is only ever read by the next linear's quantizer). Inside, every step has a stock
form and a fused one, and each feature chooses its own steps, so that any subset runs:

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

What keeps it right:

- `BlockLayout.of` looks at every module that the fused forward goes around. LoRA wrappers, hooks, other
  quantizations, tensor or sequence parallelism, biases or norms of another kind: the block is stock's, with the
  reason counted. It is checked again at every call, by identity and address.
- The parity guard compares the block's two outputs with stock's own forward, so there is no copy of stock's steps to
  go stale: for each kind of call every feature alone, then all that passed together; and each block once, whatever
  the call, and again when its weights have been merged anew.
- The next block's norm is computed ahead only after that block has been seen to take this block's outputs, and is
  used only if it is given those very tensors again. A ControlNet residual makes new ones: nothing is computed ahead.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import fused_kernels
from sglang_fastpath.kernels.act_quant import ActInput, act_quant
from sglang_fastpath.kernels.act_quant import can_use as can_quantize
from sglang_fastpath.kernels.block_fp8_gemm import GROUP_ROWS, gemm, grouped_gemm
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.fused_kernels import Quantized, QuantizedPair
from sglang_fastpath.kernels.gated_residual import GatedInput, gated_residual
from sglang_fastpath.kernels.gated_residual import can_use as can_gate
from sglang_fastpath.kernels.norm_quant import NormInput, norm_quant
from sglang_fastpath.kernels.norm_quant import can_use as can_norm
from sglang_fastpath.kernels.qkv_epilogue import QkvInput, qkv_epilogue
from sglang_fastpath.kernels.qkv_epilogue import can_use as can_finish_qkv
from sglang_fastpath.loaders.merged_linears import MergedLinears, NotMergeable, merge_linears
from torch import Tensor, nn

from sglang_fastpath.guard import Verdict
from sglang_fastpath.plan import FeatureRecord, Plan

# Where each of the block's linears hangs: (path of the parent, name). Text first, as in the joint sequence.
_PLACES = {
    "qkv": tuple(("attn", name) for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_q", "to_k", "to_v")),
    "out": (("attn", "to_add_out"), ("attn.to_out", "0")),
    "up": (("txt_mlp.net.0", "proj"), ("img_mlp.net.0", "proj")),
    "down": (("txt_mlp.net", "2"), ("img_mlp.net", "2")),
}
# Modules that the fused forward goes around: a hook on one of them would not run.
_BYPASSED = (
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
)
_NORMS = ("img_norm1", "txt_norm1", "img_norm2", "txt_norm2")
_QK_NORMS = ("attn.norm_added_q", "attn.norm_added_k", "attn.norm_q", "attn.norm_k")
_LINEAR_TYPES = ("ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear")
_BLOCK = [128, 128]
_MISSES_ALLOWED = 2

# Up to how many text rows the GEMMs of both streams run as one grouped launch (docs/benchmarks.md has the
# measurements). The text's rows are padded to a tile of 128: with one such tile every GEMM gains, with more of them
# only the wide ones, whose grids leave the processors no idle wave.
GROUPED_UP_TO = {"qkv": 1 << 30, "out": GROUP_ROWS, "up": 1 << 30, "down": GROUP_ROWS}

_Outputs = tuple[Tensor, Tensor]  # text and image stream, in stock's order
_Operands: TypeAlias = (
    QuantizedPair | tuple[Tensor, Tensor]
)  # quantized already, or left to the linears' own quantizer
_Modulations = tuple["_Modulation", "_Modulation"]


class Refused(ValueError):
    """A fused step cannot run on these tensors; the message says why."""


def wraps(records: Mapping[str, FeatureRecord], plan: Plan) -> dict[str, Callable[..., Any]]:
    """The replacement of each of the features' sites, by target."""
    (site,) = next(iter(records.values())).feature.sites
    blocks = plan.kept(__name__, lambda: FusedBlocks(records, plan))
    return {site: blocks.wrap_forward}


class _Linear(NamedTuple):
    """A linear, where it hangs, and where its parameters lay when it was looked at."""

    children: dict[str, nn.Module | None]
    name: str
    module: Any
    weight: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter
    addresses: tuple[int, int, int]


@dataclass
class BlockLayout:
    """What the fused forward needs of one block, looked up once; `unchanged` says whether it still holds."""

    linears: dict[str, tuple[_Linear, ...]]
    bypassed: tuple[tuple[dict[str, Any], str, Any], ...]
    norm_eps: float
    qk_eps: float
    qk_norm: tuple[Tensor, Tensor, Tensor, Tensor]
    merged: dict[str, MergedLinears] = field(default_factory=dict)
    not_merged: str = ""
    merges: int = 0
    verified: set[tuple[frozenset[str], bool, bool]] = field(default_factory=set)

    @classmethod
    def of(cls, block: nn.Module) -> "BlockLayout":
        """Raises Refused if the block is not made as the fused forward expects."""
        linears = {
            name: tuple(_look_at_linear(block, *place) for place in places) for name, places in _PLACES.items()
        }
        bypassed: list[tuple[dict[str, Any], str, Any]] = []
        for path in (*_BYPASSED, *_NORMS, *_QK_NORMS):
            parent, _, name = path.rpartition(".")
            children = block.get_submodule(parent)._modules
            bypassed.append((children, name, block.get_submodule(path)))
        attn: Any = block.attn
        if getattr(attn, "use_fused_qkv", False) or getattr(attn, "use_fused_added_qkv", False) or not attn.qk_norm:
            raise Refused("the attention has packed projections or no QK norm")
        if len(attn.to_out) != 1:
            raise Refused("the attention output has a dropout")
        norms: list[Any] = [block.get_submodule(name) for name in _NORMS]
        if any(getattr(norm.norm, "weight", None) is not None for norm in norms):
            raise Refused("a layer norm has weights")
        qk: list[Any] = [block.get_submodule(name) for name in _QK_NORMS]
        if len({norm.eps for norm in norms}) != 1 or len({norm.variance_epsilon for norm in qk}) != 1:
            raise Refused("the norms' epsilons differ")
        weights = tuple(norm.weight for norm in qk)
        layout = cls(linears, tuple(bypassed), norms[0].eps, qk[0].variance_epsilon, weights)
        if hooked := layout.hooked():
            raise Refused(hooked)
        return layout

    def hooked(self) -> str | None:
        """Which bypassed module was replaced or has hooks, or None."""
        for children, name, module in self.bypassed:
            if module._forward_hooks or module._forward_pre_hooks or children.get(name) is not module:
                return f"{type(module).__name__} {name} was replaced or has hooks"
        return None

    def unchanged(self) -> bool:
        # Spelled out: this runs in every block of every pass, and the host is what an eager pass waits for.
        for linears in self.linears.values():
            for children, name, module, weight, scale, bias, (weight_at, scale_at, bias_at) in linears:
                parameters = module._parameters
                if (
                    module._forward_hooks
                    or module._forward_pre_hooks
                    or children.get(name) is not module
                    or parameters["weight"] is not weight
                    or parameters["weight_scale_inv"] is not scale
                    or parameters["bias"] is not bias
                    or weight.data_ptr() != weight_at
                    or scale.data_ptr() != scale_at
                    or bias.data_ptr() != bias_at
                ):
                    return False
        return self.hooked() is None

    def merge(self, block: nn.Module) -> None:
        """Merges the linears that run as one GEMM, or notes why not. Addresses are taken anew."""
        try:
            if why := _offloaded(block):
                raise NotMergeable(why)
            for name, linears in self.linears.items():
                self.merged[name] = merge_linears([linear.module for linear in linears])
            self.merges += 1
        except (NotMergeable, torch.OutOfMemoryError) as error:
            self.merged.clear()
            self.not_merged = str(error)
        for name, places in _PLACES.items():
            self.linears[name] = tuple(_look_at_linear(block, *place) for place in places)


def _look_at_linear(block: nn.Module, parent: str, name: str) -> _Linear:
    """Raises Refused unless it is SGLang's own linear in block FP8, whole on this rank."""
    children = block.get_submodule(parent)._modules
    module: Any = children.get(name)
    where = f"{parent}.{name}"
    if type(module).__name__ not in _LINEAR_TYPES or not type(module).__module__.startswith("sglang."):
        raise Refused(f"{where} is a {type(module).__name__}")
    method = module.quant_method
    if type(method).__name__ != "Fp8LinearMethod" or not getattr(method, "block_quant", False):
        raise Refused(f"{where} is not in block FP8 ({type(method).__name__})")
    if list(method.quant_config.weight_block_size) != _BLOCK or getattr(method, "use_marlin", False):
        raise Refused(f"{where} has weight blocks of {method.quant_config.weight_block_size}")
    backend = getattr(method.w8a8_block_fp8_linear, "__name__", "?")
    if backend not in ("deepgemm_w8a8_block_fp8_linear_with_fallback", "w8a8_block_fp8_linear"):
        raise Refused(f"{where} does not run on DeepGEMM ({backend})")
    if (
        module.skip_bias_add
        or getattr(module, "gather_output", False)
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        raise Refused(f"{where} gathers its output, keeps its bias or has hooks")
    if getattr(module, "tp_size", 1) != 1:
        raise Refused(f"tensor parallelism over {module.tp_size} ranks")
    weight, scale, bias = (module._parameters.get(key) for key in ("weight", "weight_scale_inv", "bias"))
    if weight is None or scale is None or bias is None:
        raise Refused(f"{where} has no bias or no block scales")
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32 or bias.dtype != torch.bfloat16:
        raise Refused(f"{where} is {weight.dtype} with {scale.dtype} scales and a {bias.dtype} bias")
    if weight.shape[0] % 128 or weight.shape[1] % 128 or not weight.is_contiguous() or not scale.is_contiguous():
        raise Refused(f"{where} is {tuple(weight.shape)}, not whole blocks")
    addresses = weight.data_ptr(), scale.data_ptr(), bias.data_ptr()
    if addresses[0] % 16 or addresses[2] % 16:
        raise Refused(f"{where} is not 16-byte aligned")
    return _Linear(children, name, module, weight, scale, bias, addresses)


def _offloaded(block: nn.Module) -> str | None:
    """Why this block's weights do not stay where they are, or None."""
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    if block._forward_pre_hooks:
        return "the block has hooks (layerwise offload)"
    args = get_global_server_args()
    for flag in ("dit_cpu_offload", "dit_layerwise_offload", "use_fsdp_inference"):
        if getattr(args, flag, False):
            return f"--{flag.replace('_', '-')}"
    return None


class _Ahead(NamedTuple):
    """The next block's modulation and first norm, computed at the end of this block."""

    block: nn.Module
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # text and image stream, both time embeddings: as it will see them
    modulation: tuple[Tensor, Tensor]
    operands: QuantizedPair


class _Call(NamedTuple):
    """One call of a block."""

    block: Any
    layout: BlockLayout
    text: Tensor  # [B, T, D]
    image: Tensor  # [B, I, D]
    temb: tuple[Tensor, Tensor]  # text, image
    rotary: tuple[Tensor, Tensor]  # text, image
    attention: dict[str, Any]
    modulate_index: Tensor | None
    cache_key: Any
    ahead: _Ahead | None
    following: Any  # the block whose norm is to be computed ahead, or None
    following_layout: BlockLayout | None


class _Modulation(NamedTuple):
    """One stream's six vectors, each [B, D] (the image stream's [2 B, D] under zero_cond_t)."""

    shift1: Tensor
    scale1: Tensor
    gate1: Tensor
    shift2: Tensor
    scale2: Tensor
    gate2: Tensor


class _FusedForward:
    """One pass through one block with a given set of features. Streams are (text, image) pairs throughout."""

    def __init__(self, call: _Call, features: frozenset[str], *, checking: bool = False) -> None:
        self._call = call
        self._checking = checking
        self._norm_quant = "norm_quant" in features and call.modulate_index is None
        self._act_quant = "act_quant" in features
        self._qkv_epilogue = "qkv_epilogue" in features
        self._bias_fold = "bias_fold" in features
        self._prepack = "scale_prepack" in features and bool(call.layout.merged)
        if checking and "scale_prepack" in features and not call.layout.merged:
            raise Refused(call.layout.not_merged or "the linears are not merged")
        if checking and "norm_quant" in features and not self._norm_quant:
            raise Refused("each token has its own modulation (modulate_index)")
        self.ahead: _Ahead | None = None

    def run(self) -> _Outputs:
        """(text, image), each [B, tokens, D]; `ahead` is set if the next block's norm was computed."""
        call = self._call
        text_params, image_params = call.ahead.modulation if call.ahead else self._modulation_of(call.block)
        modulation = _Modulation(*text_params.chunk(6, dim=-1)), _Modulation(*image_params.chunk(6, dim=-1))
        operands, gates = self._first_norm(modulation, image_params)
        attended = self._attend(self._project_qkv(operands))
        projected = self._project_out(attended)
        operands, residuals, gates = self._second_norm(projected, modulation, image_params, gates)
        down = self._feed_forward(operands)
        return self._finish(down, residuals, gates)

    # Steps, in the order of the block.

    def _first_norm(self, modulation: _Modulations, image_params: Tensor) -> tuple[_Operands, tuple[Tensor, Tensor]]:
        call, (text, image) = self._call, modulation
        if self._norm_quant:
            if call.ahead:
                return call.ahead.operands, (text.gate1, image.gate1)
            inputs = self._norm_inputs((call.text, call.image), modulation)
            normed = norm_quant(*inputs, call.layout.norm_eps, grouped_rows=self._group_rows("qkv", call.layout))
            return normed.operands, (text.gate1, image.gate1)
        text_out = call.block.txt_norm1(call.text, shift=text.shift1, scale=text.scale1)
        image_out, image_gate = call.block._modulate(
            call.image, image_params.chunk(2, dim=-1)[0], call.block.img_norm1, call.modulate_index
        )
        return (text_out, image_out), (text.gate1, image_gate)

    def _project_qkv(self, operands: _Operands) -> tuple[QkvInput, QkvInput]:
        call, layout = self._call, self._call.layout
        fold = self._bias_fold and self._qkv_epilogue
        linears = layout.linears["qkv"]
        streams = []
        if self._prepack:
            merged = layout.merged["qkv"]
            width = merged.weight.shape[0] // 2
            assert merged.bias is not None
            pair = operands if isinstance(operands, QuantizedPair) else self._quantize(operands)
            for raw, bias, stream in zip(
                self._both_gemms(pair, merged), merged.bias.split(width), (call.text, call.image), strict=True
            ):
                if not fold:
                    raw += bias
                streams.append(raw.view(*stream.shape[:2], width).chunk(3, dim=-1))
        else:
            for index, operand in enumerate(_streams(operands)):
                shape = (call.text, call.image)[index].shape[:2]
                three = linears[3 * index : 3 * index + 3]
                streams.append(tuple(self._project(linear, operand, shape, fold=fold) for linear in three))
        biases: list[Any] = [None, None]
        if fold:
            biases = [tuple(linear.bias for linear in linears[start : start + 3]) for start in (0, 3)]
        text, image = (
            QkvInput(projected, bias, layout.qk_norm[2 * index : 2 * index + 2], table)
            for index, (projected, bias, table) in enumerate(zip(streams, biases, call.rotary, strict=True))
        )
        return text, image

    def _attend(self, streams: tuple[QkvInput, QkvInput]) -> Tensor:
        """[B, text + image tokens, heads * 128]"""
        call = self._call
        if self._qkv_epilogue:
            self._check(can_finish_qkv, *streams)
            joint = qkv_epilogue(*streams, call.layout.qk_eps)
        else:
            joint = _stock_qkv_epilogue(streams, call.block.attn)
        attended: Tensor = call.block.attn.attn(
            *joint,
            attn_mask=call.attention.get("attn_mask"),
            attn_mask_meta=call.attention.get("attn_mask_meta"),
            num_replicated_prefix=call.text.shape[1],
        )
        return attended.flatten(2, 3)

    def _project_out(self, attended: Tensor) -> tuple[Tensor, Tensor]:
        call, text_tokens = self._call, self._call.text.shape[1]
        parts: _Operands = attended[:, :text_tokens], attended[:, text_tokens:]
        if self._act_quant:
            inputs = ActInput(parts[0]), ActInput(parts[1])
            self._check(can_quantize, *inputs)
            parts = act_quant(*inputs, gelu=False, grouped_rows=self._group_rows("out", call.layout))
        return self._project_both("out", parts, fold=self._bias_fold and self._norm_quant)

    def _second_norm(
        self, x: tuple[Tensor, Tensor], modulation: _Modulations, image_params: Tensor, gates: tuple[Tensor, Tensor]
    ) -> tuple[_Operands, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        call, (text, image) = self._call, modulation
        if self._norm_quant:
            biases = [linear.bias if self._bias_fold else None for linear in call.layout.linears["out"]]
            inputs = [
                NormInput(
                    rows.view(-1, rows.shape[-1]),
                    m.scale2,
                    m.shift2,
                    gate,
                    stream.view(rows.shape[0] * rows.shape[1], -1),
                    bias,
                )
                for rows, m, gate, stream, bias in zip(
                    x, modulation, gates, (call.text, call.image), biases, strict=True
                )
            ]
            self._check(can_norm, *inputs)
            normed = norm_quant(*inputs, call.layout.norm_eps, grouped_rows=self._group_rows("up", call.layout))
            text_out, image_out = normed.residual_out
            assert text_out is not None and image_out is not None
            residuals = text_out.view(call.text.shape), image_out.view(call.image.shape)
            return normed.operands, residuals, (text.gate2, image.gate2)
        text_in, text_residual = call.block.txt_norm2(
            residual=call.text, x=x[0], gate=gates[0].unsqueeze(1), shift=text.shift2, scale=text.scale2
        )
        image_gate = gates[1] if gates[1].dim() == 3 else gates[1].unsqueeze(1)
        image_in, image_residual, image_gate2 = call.block._modulate(
            x[1],
            image_params.chunk(2, dim=-1)[1],
            call.block.img_norm2,
            call.modulate_index,
            gate_x=image_gate,
            residual_x=call.image,
        )
        return (text_in, image_in), (text_residual, image_residual), (text.gate2, image_gate2)

    def _feed_forward(self, operands: _Operands) -> tuple[Tensor, Tensor]:
        layout = self._call.layout
        fold = self._bias_fold and self._act_quant
        ups = self._project_both("up", operands, fold=fold)
        parts: _Operands
        if self._act_quant:
            biases = [linear.bias if fold else None for linear in layout.linears["up"]]
            inputs = ActInput(ups[0], biases[0]), ActInput(ups[1], biases[1])
            self._check(can_quantize, *inputs)
            parts = act_quant(*inputs, gelu=True, grouped_rows=self._group_rows("down", layout))
        else:
            parts = F.gelu(ups[0], approximate="tanh"), F.gelu(ups[1], approximate="tanh")
        return self._project_both("down", parts, fold=self._bias_fold)

    def _finish(
        self, down: tuple[Tensor, Tensor], residuals: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor]
    ) -> _Outputs:
        call = self._call
        biases = [linear.bias if self._bias_fold else None for linear in call.layout.linears["down"]]
        if self._norm_quant and call.following is not None and call.following_layout is not None:
            following = self._modulation_of(call.following)
            first = tuple(_Modulation(*params.chunk(6, dim=-1)) for params in following)
            inputs = [
                NormInput(_rows(x), m.scale1, m.shift1, gate, _rows(residual), bias)
                for x, m, gate, residual, bias in zip(down, first, gates, residuals, biases, strict=True)
            ]
            self._check(can_norm, *inputs)
            normed = norm_quant(
                *inputs,
                call.following_layout.norm_eps,
                zero_added=True,
                grouped_rows=self._group_rows("qkv", call.following_layout),
            )
            text, image = normed.residual_out
            assert text is not None and image is not None
            outputs = text.view(call.text.shape), image.view(call.image.shape)
            self.ahead = _Ahead(call.following, (*outputs, *call.temb), following, normed.operands)
            return outputs
        if self._bias_fold:
            gated = [
                GatedInput(_rows(x), gate if gate.dim() == 2 else _gate_rows(gate), _rows(residual), bias)
                for x, gate, residual, bias in zip(down, gates, residuals, biases, strict=True)
            ]
            self._check(can_gate, *gated)
            text, image = gated_residual(*gated)
            return text.view(call.text.shape), image.view(call.image.shape)
        text, image = (
            call.block.fuse_mul_add(x, gate if gate.dim() == 3 else gate.unsqueeze(1), residual)
            for x, gate, residual in zip(down, gates, residuals, strict=True)
        )
        return text, image

    # What the steps are made of.

    def _norm_inputs(self, streams: tuple[Tensor, Tensor], modulation: _Modulations) -> list[NormInput]:
        inputs = [NormInput(_rows(x), m.scale1, m.shift1) for x, m in zip(streams, modulation, strict=True)]
        self._check(can_norm, *inputs)
        return inputs

    def _modulation_of(self, block: Any) -> tuple[Tensor, Tensor]:
        """(text, image) [B, 6 D]: from the block's own linears, so that LoRA and caches there keep working."""
        text, image = self._call.temb
        if hasattr(block, "_get_modulation_params"):  # from 0.5.19
            image_params, text_params = block._get_modulation_params(image, text, self._call.cache_key)
        else:
            image_params, text_params = block.img_mod[1](image)[0], block.txt_mod[1](text)[0]
        return text_params, image_params

    def _project_both(self, name: str, operands: _Operands, *, fold: bool) -> tuple[Tensor, Tensor]:
        """Both streams' `name` linears, [B, tokens, N] each."""
        linears, shapes = self._call.layout.linears[name], (self._call.text.shape[:2], self._call.image.shape[:2])
        if isinstance(operands, QuantizedPair) and operands.joint is not None:
            merged = self._call.layout.merged[name]
            raws = grouped_gemm(operands, merged.weight, merged.scale)
            if not fold:
                for raw, linear in zip(raws, linears, strict=True):
                    raw += linear.bias
            return raws[0].view(*shapes[0], -1), raws[1].view(*shapes[1], -1)
        return (
            self._project(linears[0], operands[0], shapes[0], fold=fold),
            self._project(linears[1], operands[1], shapes[1], fold=fold),
        )

    def _project(self, linear: _Linear, operand: Any, shape: Any, *, fold: bool) -> Tensor:
        """[B, tokens, N]; with `fold` the bias is left to the kernel that reads it."""
        if isinstance(operand, Quantized):
            out = gemm(operand, linear.weight, linear.scale)
            if not fold:
                out += linear.bias
            result: Tensor = out.view(*shape, -1)
            return result
        module = linear.module
        result = module.quant_method.apply(module, operand, None) if fold else module(operand)[0]
        return result

    def _both_gemms(self, pair: QuantizedPair, merged: MergedLinears) -> tuple[Tensor, Tensor]:
        if pair.joint is not None:
            grouped: tuple[Tensor, Tensor] = grouped_gemm(pair, merged.weight, merged.scale)
            return grouped
        text, image = (
            gemm(operand, *half)
            for operand, half in zip(
                (pair.text, pair.image), zip(merged.weight.chunk(2), merged.scale.chunk(2), strict=True), strict=True
            )
        )
        return text, image

    def _quantize(self, streams: tuple[Tensor, Tensor]) -> QuantizedPair:
        text, image = (_stock_quantize(_rows(x)) for x in streams)
        return QuantizedPair(text, image)

    def _group_rows(self, name: str, layout: BlockLayout) -> int:
        """DeepGEMM's alignment if these GEMMs run as one grouped launch, else 0."""
        text_rows = self._call.text.shape[0] * self._call.text.shape[1]
        return GROUP_ROWS if self._prepack and layout.merged and text_rows <= GROUPED_UP_TO[name] else 0

    def _check(self, can_use: Callable[[Any], str | None], *streams: Any) -> None:
        if self._checking:
            for stream in streams:
                if reason := can_use(stream):
                    raise Refused(reason)


class FusedBlocks:
    """Wraps the block's forward; one for all features that share it."""

    def __init__(self, records: Mapping[str, FeatureRecord], plan: Plan) -> None:
        self._records = records
        self._plan = plan
        self._layouts: weakref.WeakKeyDictionary[nn.Module, BlockLayout] = weakref.WeakKeyDictionary()
        # Kind of call -> the features that may run it together, and the guard's signature.
        self._checked: set[tuple[str, str]] = set()
        self._decided: dict[tuple[Any, ...], tuple[frozenset[str], str]] = {}
        self._last: tuple[Any, Any, Any] | None = None  # weak: the last block and its outputs
        self._following: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._misses: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._ahead: _Ahead | None = None

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block's forward: fused for whatever the guard has admitted, else `forward`."""

        @functools.wraps(forward)
        def block_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(block, *args, **kwargs)
            ahead, self._ahead = self._ahead, None
            try:
                call = self._call(block, ahead, args, kwargs)
            except Refused as refusal:
                self._count(self._records, str(refusal))
                return forward(block, *args, **kwargs)
            result = self._run(call, lambda: forward(block, **kwargs))
            if isinstance(result, tuple) and len(result) == 2:
                self._last = weakref.ref(block), weakref.ref(result[0]), weakref.ref(result[1])
                if self._ahead and (self._ahead.inputs[0] is not result[0] or self._ahead.inputs[1] is not result[1]):
                    self._ahead = None  # the guard answered with stock's outputs
            return result

        return block_forward

    def _count(self, ids: Any, reason: str) -> None:
        for id in ids:
            self._records[id].fall_back(reason)

    def _call(self, block: Any, ahead: _Ahead | None, args: Any, kwargs: dict[str, Any]) -> _Call:
        if args or torch.is_grad_enabled():
            raise Refused("gradients are enabled" if torch.is_grad_enabled() else "arguments are passed by position")
        text, image = kwargs["encoder_hidden_states"], kwargs["hidden_states"]
        temb = kwargs["temb_txt_silu"], kwargs["temb_img_silu"]
        if (
            image.dtype != torch.bfloat16
            or text.dtype != torch.bfloat16
            or torch.is_autocast_enabled(image.device.type)
        ):
            raise Refused(f"activations are {image.dtype} and {text.dtype}, or autocast is on")
        if not image.is_contiguous() or not text.is_contiguous():
            raise Refused("a stream is not contiguous")
        rotary = kwargs.get("image_rotary_emb")
        if rotary is None or not isinstance(rotary[0], Tensor) or rotary[0].dim() != 2:
            raise Refused("there are no rotary tables")
        attention = kwargs.get("joint_attention_kwargs") or {}
        mask = attention.get("attn_mask")
        if attention.get("sp_text_sharded") or attention.get("attention_mask") is not None:
            raise Refused("the sequence is sharded, or the mask has another name")
        if mask is None and kwargs.get("encoder_hidden_states_mask") is not None:
            raise Refused("the text has a mask of its own")
        if _in_breakable_graph():
            raise Refused("inside SGLang's breakable CUDA graph")
        layout = self._layout(block)
        self._learn(block, text, image)
        used = ahead if ahead and ahead.block is block and _all_same(ahead.inputs, (text, image, *temb)) else None
        if ahead and not used:
            self._miss(ahead.block)
        if used and used.operands.joint is not None and not layout.merged:
            used = None  # laid out for a grouped GEMM, but the linears are not merged any more
        following, following_layout = None, None
        if kwargs.get("modulate_index") is None and "norm_quant" in self._records:
            following, following_layout = self._next(block)
        return _Call(
            block,
            layout,
            text,
            image,
            temb,
            (rotary[1], rotary[0]),
            attention,
            kwargs.get("modulate_index"),
            kwargs.get("modulation_cache_key"),
            used,
            following,
            following_layout,
        )

    def _layout(self, block: nn.Module) -> BlockLayout:
        layout = known = self._layouts.get(block)
        if layout is None or not layout.unchanged():
            self._layouts.pop(block, None)
            layout = BlockLayout.of(block)
            layout.merges = known.merges if known else 0
            if "scale_prepack" in self._records:
                layout.merge(block)
            self._layouts[block] = layout
        return layout

    def _learn(self, block: nn.Module, text: Tensor, image: Tensor) -> None:
        """Notes that `block` was given the last block's outputs."""
        if self._last is None:
            return
        last, last_text, last_image = (reference() for reference in self._last)
        self._last = None
        if last is not None and last is not block and last_text is text and last_image is image:
            self._following[last] = weakref.ref(block)

    def _miss(self, intended: nn.Module) -> None:
        """The block whose norm was computed ahead was given other tensors, or another block came."""
        for block, reference in list(self._following.items()):
            if reference() is intended:
                del self._following[block]
                self._misses[block] = self._misses.get(block, 0) + 1
        self._count(("norm_quant",), "the next block was given other tensors: its norm was computed in vain")

    def _next(self, block: nn.Module) -> tuple[Any, BlockLayout | None]:
        reference = self._following.get(block)
        following: Any = reference() if reference else None
        if following is None or self._misses.get(block, 0) >= _MISSES_ALLOWED:
            return None, None
        if block._forward_hooks or following._forward_pre_hooks:
            return None, None
        layout = self._layouts.get(following)
        return (following, layout) if layout else (None, None)

    def _run(self, call: _Call, stock: Callable[[], _Outputs]) -> _Outputs:
        steps = call.ahead is not None, call.following is not None
        kind = (
            call.text.shape,
            call.image.shape,
            call.text.data_ptr() % 16,
            call.image.data_ptr() % 16,
            call.rotary[0].shape,
            call.rotary[1].shape,
            call.attention.get("attn_mask") is not None,
            call.modulate_index is not None,
            bool(call.layout.merged),
            call.image.device,
            *steps,
        )
        decided = self._decided.get(kind)
        if decided is None:
            stock = functools.cache(stock)  # several features are compared with one and the same output
            decided = self._decided[kind] = self._decide(call, stock)
        features, signature = decided
        if not features:
            return stock()
        verified = (features, *steps) in call.layout.verified
        if not verified:
            times = f" (merged {call.layout.merges} times)" if call.layout.merges > 1 else ""
            signature = f"{call.block.prefix}{times}: {_describe(features, *steps)}"

        def fast() -> _Outputs:
            forward = _FusedForward(call, features)
            outputs = forward.run()
            self._ahead = forward.ahead
            for id in features:
                self._records[id].hit()
            return outputs

        feature = min(features)
        outputs: _Outputs = self._plan.guard.run(feature, signature, fast=fast, stock=stock)
        if not verified and self._plan.guard.verdict(feature, signature) is Verdict.ADMITTED:
            call.layout.verified.add((features, *steps))
        return outputs

    def _decide(self, call: _Call, stock: Callable[[], _Outputs]) -> tuple[frozenset[str], str]:
        """Which features can run this kind of call: each is tried alone before they run together."""
        guard = self._plan.guard
        batch, text_tokens, width = call.text.shape
        what = f"{batch} x ({text_tokens} text + {call.image.shape[1]} image) tokens of {width}"
        what += ", a mask" if call.attention.get("attn_mask") is not None else ""
        what += ", modulate_index" if call.modulate_index is not None else ""
        alone = call._replace(ahead=None, following=None)
        admitted = []
        for id in self._records:
            try:
                forward = _FusedForward(alone, frozenset((id,)), checking=True)
                if (id, what) not in self._checked:
                    with contextlib.suppress(RuntimeError):  # the guard meets it again, and keeps it on record
                        forward.run()
                    self._checked.add((id, what))
                    if guard.policy.mode != "off":
                        guard.run(id, f"alone, {what}", fast=forward.run, stock=stock)
            except Refused as refusal:
                self._records[id].fall_back(f"{what}: {refusal}")
                continue
            if guard.verdict(id, f"alone, {what}") is not Verdict.FAILED:
                admitted.append(id)
        together = _describe(frozenset(admitted), call.ahead is not None, call.following is not None)
        return frozenset(admitted), f"{together}, {what}"


def _describe(features: frozenset[str], before: bool, after: bool) -> str:
    parts = ["+".join(sorted(features))]
    parts += ["norm by the block before"] if before else []
    parts += ["norm for the block after"] if after else []
    return ", ".join(parts)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _gate_rows(gate: Tensor) -> Tensor:
    """[B, 1, D] or [B, tokens, D] -> one gate for each batch element or row."""
    return gate.reshape(-1, gate.shape[-1])


def _streams(operands: _Operands) -> tuple[Any, Any]:
    return operands[0], operands[1]


def _all_same(tensors: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(tensors, others, strict=True))


@functools.cache
def _breakable_graph_probe() -> Callable[[], bool]:
    try:
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
    except ImportError:  # before 0.5.16
        return lambda: False
    probe: Callable[[], bool] = is_in_breakable_cuda_graph
    return probe


def _in_breakable_graph() -> bool:
    return _breakable_graph_probe()()


def _stock_quantize(x: Tensor) -> Quantized:
    """What stock's linear does first: its own quantizer where it runs, the emulation's on a CPU."""
    padded = -(-x.shape[0] // fused_kernels.TMA_ALIGNED_ROWS) * fused_kernels.TMA_ALIGNED_ROWS
    if not x.is_cuda:
        return Quantized(*quantize_per_token_group(x, tma_aligned=True), padded)
    from sglang.srt.layers.quantization import fp8_utils

    q, scale = fp8_utils.sglang_per_token_group_quant_fp8(
        x.contiguous(), 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )
    return Quantized(q, scale, padded)


def _stock_qkv_epilogue(streams: tuple[QkvInput, QkvInput], attn: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Stock's own norm and rotation of each stream, and the concatenation."""
    from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

    parts = []
    for stream, q_norm, k_norm in zip(
        streams, (attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k), strict=True
    ):
        q, k, v = (part.contiguous().view(*part.shape[:2], -1, attn.head_dim) for part in stream.projected)
        q, k = apply_qk_norm_with_optional_rope(
            q=q,
            k=k,
            q_norm=q_norm,
            k_norm=k_norm,
            head_dim=attn.head_dim,
            cos_sin_cache=stream.cos_sin,
            is_neox=False,
            allow_inplace=True,
        )
        parts.append((q, k, v))
    q, k, v = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
    return q, k, v
