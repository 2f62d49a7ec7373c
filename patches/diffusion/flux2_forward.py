"""The steps of FLUX.2's blocks, each in a stock form and a fused one; flux2_blocks.py has the table."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from sglang_fastpath.kernels.act_quant import ActInput, act_quant
from sglang_fastpath.kernels.act_quant import can_use as can_quantize
from sglang_fastpath.kernels.block_fp8_gemm import gemm
from sglang_fastpath.kernels.fused_kernels import Quantized
from sglang_fastpath.kernels.gated_residual import GatedInput, gated_residual
from sglang_fastpath.kernels.gated_residual import can_use as can_gate
from sglang_fastpath.kernels.layer_norm_quant import LayerNormInput, layer_norm_quant, layer_norm_quant_pair
from sglang_fastpath.kernels.layer_norm_quant import can_use as can_norm
from sglang_fastpath.kernels.qk_norm_rope import QkInput, qk_norm_rope
from sglang_fastpath.kernels.qk_norm_rope import can_use as can_norm_and_rotate
from sglang_fastpath.kernels.qkv_epilogue import QkvInput, qkv_epilogue
from sglang_fastpath.kernels.qkv_epilogue import can_use as can_finish_qkv
from sglang_fastpath.kernels.swiglu_quant import SwigluInput, swiglu_quant, swiglu_quant_pair
from sglang_fastpath.kernels.swiglu_quant import can_use as can_quantize_swiglu
from sglang_fastpath.patches.diffusion.block_layout import BlockLayout, Refused
from sglang_fastpath.patches.diffusion.block_steps import check, project, rows, stock_quantize
from sglang_fastpath.patches.diffusion.fused_blocks import Ahead
from torch import Tensor

HEAD = 128

_Streams: TypeAlias = tuple[Tensor, ...]
# Quantized already, or left to the linears' own quantizer; one for each stream.
_Operands: TypeAlias = tuple[Quantized | Tensor, ...]


class Modulation(NamedTuple):
    """Of one stream at one norm, each [B, 1, D], in stock's order; the same in every block of a kind."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Rotary(NamedTuple):
    """cosine, sine: [tokens, 64] float32 with dense rows. joint: both in one table [tokens, 128], or None. complex:
    stock's table for where it has no fused kernel (from 0.5.20), or None."""

    cosine: Tensor
    sine: Tensor
    joint: Tensor | None
    complex: Tensor | None

    def kind(self) -> tuple[Any, ...]:
        tables = (self.cosine, self.sine)
        return *((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tables), self.complex is not None

    def stock_table(self) -> Tensor:
        """As stock's blocks make it for themselves until 0.5.19."""
        return torch.cat([self.cosine, self.sine], dim=-1) if self.joint is None else self.joint

    def stock_arguments(self, start: int, stop: int) -> dict[str, Any]:
        """What stock's QK norm and RoPE are given for the tokens from `start` to `stop`."""
        arguments: dict[str, Any] = {"cos_sin_cache": self.stock_table()}
        if start:
            arguments["position_offset"] = start
        if self.complex is not None:
            arguments["freqs_complex"] = self.complex[start:stop]
        return arguments

    def part(self, start: int) -> tuple[Tensor, Tensor]:
        return self.cosine[start:], self.sine[start:]


class DoubleCall(NamedTuple):
    """One call of a double block; see fused_blocks.py. Streams and modulations are (text, image)."""

    block: Any
    layout: BlockLayout
    text: Tensor  # [B, T, D]
    image: Tensor  # [B, I, D]
    first: tuple[Modulation, Modulation]  # before the attention
    second: tuple[Modulation, Modulation]  # before the feed-forward
    rotary: Rotary
    attention: dict[str, Any]
    replicated_prefix: int
    ahead: Ahead | None = None
    following: Any = None
    following_layout: BlockLayout | None = None

    @property
    def streams(self) -> _Streams:
        return self.text, self.image

    def kind(self) -> tuple[Any, ...]:
        return (*_kind(self), self.text.shape, self.text.data_ptr() % 16)

    def __str__(self) -> str:
        batch, text_tokens, width = self.text.shape
        return f"{batch} x ({text_tokens} text + {self.image.shape[1]} image) tokens of {width}{_masked(self)}"


class SingleCall(NamedTuple):
    """One call of a single block; see fused_blocks.py."""

    block: Any
    layout: BlockLayout
    image: Tensor  # [B, T + I, D]: the text's tokens first
    first: tuple[Modulation]
    rotary: Rotary
    attention: dict[str, Any]
    replicated_prefix: int
    ahead: Ahead | None = None
    following: Any = None
    following_layout: BlockLayout | None = None

    @property
    def streams(self) -> _Streams:
        return (self.image,)

    def kind(self) -> tuple[Any, ...]:
        return _kind(self)

    def __str__(self) -> str:
        batch, tokens, width = self.image.shape
        return f"{batch} x {tokens} joint tokens of {width}{_masked(self)}"


def _kind(call: DoubleCall | SingleCall) -> tuple[Any, ...]:
    return (
        call.image.shape,
        call.image.data_ptr() % 16,
        call.image.device,
        *((v.shape, v.stride(), v.dtype, v.data_ptr() % 16) for v in modulations(call)),
        *call.rotary.kind(),
        call.attention.get("attn_mask") is not None,
    )


def _masked(call: DoubleCall | SingleCall) -> str:
    return ", a mask" if call.attention.get("attn_mask") is not None else ""


class _BlockForward:
    """What both kinds of blocks share: norms, gates and attention."""

    ahead: Ahead | None = None

    def __init__(self, call: DoubleCall | SingleCall, features: frozenset[str], *, checking: bool = False) -> None:
        self._call = call
        self._checking = checking
        self._norm_quant = "norm_quant" in features
        self._gated_residual_norm = "gated_residual_norm" in features
        self._act_quant = "act_quant" in features

    def _first_norm(self, norms: tuple[Any, ...]) -> _Operands:
        call = self._call
        if call.ahead:
            operands: _Operands = call.ahead.operands
            return operands
        return self._norm(norms, call.streams, call.first)

    def _norm(self, norms: tuple[Any, ...], streams: _Streams, modulation: tuple[Modulation, ...]) -> _Operands:
        if not self._norm_quant:
            return tuple(
                _stock_norm()(norm, x, m.scale, m.shift)
                for norm, x, m in zip(norms, streams, modulation, strict=True)
            )
        inputs = [
            LayerNormInput(rows(x), rows(m.scale), rows(m.shift)) for x, m in zip(streams, modulation, strict=True)
        ]
        self._check(can_norm, *inputs)
        return _layer_norm_quant(inputs, self._call.layout.norm_eps)[0]

    def _gated_norm(
        self,
        norms: tuple[Any, ...],
        x: _Streams,
        gates: tuple[Tensor, ...],
        modulation: tuple[Modulation, ...],
        eps: float,
    ) -> tuple[_Operands, _Streams]:
        """(operands, residual streams): the streams that came in, with gate * x added, and their norm."""
        residuals = self._call.streams
        if not self._gated_residual_norm:
            sums = self._gate(x, gates, residuals)
            return self._norm(norms, sums, modulation), sums
        inputs = [
            LayerNormInput(rows(one), rows(m.scale), rows(m.shift), rows(gate), rows(residual))
            for one, m, gate, residual in zip(x, modulation, gates, residuals, strict=True)
        ]
        self._check(can_norm, *inputs)
        operands, totals = _layer_norm_quant(inputs, eps)
        return operands, tuple(total.view(x.shape) for total, x in zip(totals, residuals, strict=True))

    def _finish(self, x: _Streams, gates: tuple[Tensor, ...], residuals: _Streams) -> _Streams:
        """The end of the block: the streams that go out, with the next block's norm if it is known to follow."""
        call = self._call
        if not self._gated_residual_norm:
            return self._gate(x, gates, residuals)
        inputs = [
            LayerNormInput(rows(one), rows(m.scale), rows(m.shift), rows(gate), rows(residual))
            for one, m, gate, residual in zip(x, call.first, gates, residuals, strict=True)
        ]
        self._check(can_norm, *inputs)  # also of a call that nothing follows, as those are that are checked
        if call.following is None or call.following_layout is None:
            return self._gate(x, gates, residuals)
        eps = call.following_layout.norm_eps
        operands, totals = _layer_norm_quant(inputs, eps)
        outputs = tuple(total.view(residual.shape) for total, residual in zip(totals, residuals, strict=True))
        self.ahead = Ahead(call.block, call.following, (*outputs, *modulations(call)), None, operands, eps)
        return outputs

    def _gate(self, x: _Streams, gates: tuple[Tensor, ...], residuals: _Streams) -> _Streams:
        if not self._gated_residual_norm:
            stock = _stock_gate()
            return tuple(stock(residual, one, gate) for one, gate, residual in zip(x, gates, residuals, strict=True))
        inputs = [
            GatedInput(rows(one), rows(gate), rows(residual))
            for one, gate, residual in zip(x, gates, residuals, strict=True)
        ]
        self._check(can_gate, *inputs)
        inputs += [GatedInput(*(vector[:0] for vector in inputs[0][:3]))] * (2 - len(inputs))
        outputs = gated_residual(*inputs, rounds_product=True)
        return tuple(out.view(residual.shape) for out, residual in zip(outputs, residuals, strict=False))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, tokens, heads * 128]"""
        attended: Tensor = self._call.block.attn.attn(
            q,
            k,
            v,
            num_replicated_prefix=self._call.replicated_prefix,
            **self._call.attention,  # attention before 0.5.14 knows no masks
        )
        return attended.flatten(2, 3)

    def _check(self, can_use: Callable[[Any], str | None], *streams: Any) -> None:
        if self._checking:
            check(can_use, streams)


class DoubleForward(_BlockForward):
    """One pass through one double block with a given set of features. Streams are (text, image) throughout."""

    def __init__(self, call: DoubleCall, features: frozenset[str], *, checking: bool = False) -> None:
        super().__init__(call, features, checking=checking)
        self._double = call
        self._qkv_epilogue = "qkv_epilogue" in features
        self._prepack = "scale_prepack" in features and bool(call.layout.merged)
        if checking and "scale_prepack" in features and not call.layout.merged:
            raise Refused(call.layout.not_merged or "the linears are not merged")
        if checking and self._qkv_epilogue:
            _refuse_complex_tables(call)

    def run(self) -> _Streams:
        """(text, image), each [B, tokens, D]; `ahead` is set if the next block's norm was computed."""
        call, block = self._double, self._double.block
        operands = self._first_norm((block.norm1_context, block.norm1))
        attended = self._attend(*self._finish_qkv(self._project_qkv(operands)))
        projected = self._project_out(attended)
        gates = tuple(modulation.gate for modulation in call.first)
        operands, residuals = self._gated_norm(
            (block.norm2_context, block.norm2), projected, gates, call.second, call.layout.norm_eps
        )
        down = self._feed_forward(operands)
        return self._finish(down, tuple(modulation.gate for modulation in call.second), residuals)

    def _project_qkv(self, operands: _Operands) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each stream q, k and v, each [B, tokens, heads * 128]."""
        call, linears = self._double, self._double.layout.linears["qkv"]
        streams: list[Any] = []
        if not self._prepack:
            for index, (operand, stream) in enumerate(zip(operands, call.streams, strict=True)):
                three = linears[3 * index : 3 * index + 3]
                streams.append(tuple(project(linear, operand, stream.shape[:2]) for linear in three))
            return streams
        merged = call.layout.merged["qkv"]
        halves = zip(merged.weight.chunk(2), merged.scale.chunk(2), strict=True)
        for operand, half, stream in zip(operands, halves, call.streams, strict=True):
            quantized = operand if isinstance(operand, Quantized) else stock_quantize(rows(operand))
            raw = gemm(quantized, *half)
            streams.append(raw.view(*stream.shape[:2], raw.shape[-1]).chunk(3, dim=-1))
        return streams

    def _finish_qkv(self, streams: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """The joint q, k and v, each [B, text + image tokens, heads, 128]."""
        call, text_tokens = self._double, self._double.text.shape[1]
        if self._qkv_epilogue:
            inputs = [
                QkvInput(projected, None, call.layout.qk_norm[2 * index : 2 * index + 2], *call.rotary.part(start))
                for index, (projected, start) in enumerate(zip(streams, (0, text_tokens), strict=True))
            ]
            self._check(can_finish_qkv, *inputs)
            q, k, v = qkv_epilogue(*inputs, call.layout.qk_eps)
            return q, k, v
        from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

        attn, parts = call.block.attn, []
        norms = (attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k)
        for projected, (q_norm, k_norm), start in zip(streams, norms, (0, text_tokens), strict=True):
            q, k, v = (part.contiguous().view(*part.shape[:2], part.shape[2] // HEAD, HEAD) for part in projected)
            q, k = apply_qk_norm_with_optional_rope(
                q=q,
                k=k,
                q_norm=q_norm,
                k_norm=k_norm,
                head_dim=HEAD,
                is_neox=False,
                allow_inplace=True,
                **call.rotary.stock_arguments(start, start + q.shape[1]),
            )
            parts.append((q, k, v))
        q, k, v = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
        return q, k, v

    def _project_out(self, attended: Tensor) -> _Streams:
        text_tokens = self._double.text.shape[1]
        parts: _Operands = attended[:, :text_tokens], attended[:, text_tokens:]
        if self._act_quant:
            inputs = [ActInput(part) for part in parts]
            self._check(can_quantize, *inputs)
            pair = act_quant(*inputs, gelu=False)
            parts = pair.text, pair.image
        return self._project("out", parts)

    def _feed_forward(self, operands: _Operands) -> _Streams:
        block, ups = self._double.block, self._project("up", operands)
        parts: _Operands
        if self._act_quant:
            inputs = [SwigluInput(rows(up)) for up in ups]
            self._check(can_quantize_swiglu, *inputs)
            pair = swiglu_quant_pair(*inputs)
            parts = pair.text, pair.image
        else:
            parts = block.ff_context.act_fn(ups[0]), block.ff.act_fn(ups[1])
        return self._project("down", parts)

    def _project(self, name: str, operands: _Operands) -> _Streams:
        linears = self._double.layout.linears[name]
        return tuple(
            project(linear, operand, stream.shape[:2])
            for linear, operand, stream in zip(linears, operands, self._double.streams, strict=True)
        )


class SingleForward(_BlockForward):
    """One pass through one single block with a given set of features; the one stream is the joint sequence."""

    def __init__(self, call: SingleCall, features: frozenset[str], *, checking: bool = False) -> None:
        super().__init__(call, features, checking=checking)
        self._single = call
        self._qk_norm_rope = "qk_norm_rope" in features
        if checking and self._qk_norm_rope:
            _refuse_complex_tables(call)

    def run(self) -> _Streams:
        """([B, tokens, D],); `ahead` is set if the next block's norm was computed."""
        call, attn = self._single, self._single.block.attn
        (operand,) = self._first_norm((call.block.norm,))
        shape = call.image.shape[:2]
        merged = project(call.layout.linears["in"][0], operand, shape)
        width = attn.local_inner_dim
        q, k, v = (part.view(*shape, width // HEAD, HEAD) for part in merged[..., : 3 * width].chunk(3, dim=-1))
        attended = self._attend(*self._normed_and_rotated(q, k), v)
        out: Quantized | Tensor
        if self._act_quant:
            swiglu = SwigluInput(rows(merged)[:, 3 * width :], rows(attended))
            self._check(can_quantize_swiglu, swiglu)
            out = swiglu_quant(swiglu)
        else:
            out = torch.cat([attended, attn.mlp_act_fn(merged[..., 3 * width :])], dim=-1)
        projected = project(call.layout.linears["out"][0], out, shape)
        return self._finish((projected,), (call.first[0].gate,), call.streams)

    def _normed_and_rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        call = self._single
        if self._qk_norm_rope:
            both = QkInput(q, k, *call.layout.qk_norm, call.rotary.cosine, call.rotary.sine)
            self._check(can_norm_and_rotate, both)
            if self._checking and _stock_fuses_qk(call, q, k):
                raise Refused("stock has a kernel of its own for it here")
            qk_norm_rope(both, call.layout.qk_eps)
            return q, k
        return _stock_qk(call, q, k)


def _layer_norm_quant(streams: list[LayerNormInput], eps: float) -> tuple[_Operands, _Streams]:
    """(operands, residual sums) of one or two streams; the sums are None without gates."""
    if len(streams) == 1:
        one = layer_norm_quant(streams[0], eps)
        return (one.operand,), (one.residual_out,)
    pair = layer_norm_quant_pair(*streams, eps)
    return (pair.operands.text, pair.operands.image), pair.residual_out


def modulations(call: DoubleCall | SingleCall) -> tuple[Tensor, ...]:
    """Every modulation vector that the block was given."""
    every = call.first + call.second if isinstance(call, DoubleCall) else call.first
    return tuple(vector for modulation in every for vector in modulation)


def _refuse_complex_tables(call: DoubleCall | SingleCall) -> None:
    if call.rotary.complex is not None and not call.image.is_cuda:
        raise Refused("stock rotates q and k by complex tables on a CPU")


def flux_2() -> Any:
    """SGLang's module of FLUX.2, which is imported by the time that one of its blocks runs."""
    from sglang.multimodal_gen.runtime.models.dits import flux_2 as module

    return module


# Stock's own steps, by whatever name the release has them: its fused ones, where it has some, are bit-exact.


def _stock_norm() -> Callable[..., Tensor]:
    """(norm, x, scale, shift) -> modulated rows; fused in stock since 0.5.18."""
    stock: Callable[..., Tensor] = getattr(flux_2(), "_flux2_norm_modulate", _norm_modulate)
    return stock


def _norm_modulate(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    modulated: Tensor = (1 + scale) * norm(x) + shift
    return modulated


def _stock_gate() -> Callable[..., Tensor]:
    """(residual, x, gate) -> their sum; fused in stock since 0.5.18."""
    stock: Callable[..., Tensor] = getattr(flux_2(), "residual_gate_add", _residual_gate_add)
    return stock


def _residual_gate_add(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    return residual + gate * x


def _stock_fuses_qk(call: SingleCall, q: Tensor, k: Tensor) -> bool:
    """Whether stock takes these strided q and k in one kernel (from 0.5.21: 24 heads, as klein-4b has)."""
    can_use = getattr(flux_2(), "can_use_flux2_strided_qknorm_rope", None)
    return can_use is not None and can_use(q, k, *call.layout.qk_norm, call.rotary.stock_table())


def _stock_qk(call: SingleCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """QK norm and RoPE as the single block of this release does them."""
    from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

    attn, module = call.block.attn, flux_2()
    arguments = call.rotary.stock_arguments(0, q.shape[1])
    result: tuple[Tensor, Tensor]
    if hasattr(module, "_flux2_single_qk_rope"):  # from 0.5.21
        result = module._flux2_single_qk_rope(
            q, k, attn.norm_q, attn.norm_k, HEAD, arguments["cos_sin_cache"], arguments.get("freqs_complex")
        )
    elif hasattr(module, "apply_flashinfer_rope_qk_inplace"):  # until 0.5.17
        result = module.apply_flashinfer_rope_qk_inplace(
            attn.norm_q(q), attn.norm_k(k), arguments["cos_sin_cache"], is_neox=False
        )
    else:
        result = apply_qk_norm_with_optional_rope(
            q=q,
            k=k,
            q_norm=attn.norm_q,
            k_norm=attn.norm_k,
            head_dim=HEAD,
            is_neox=False,
            allow_inplace=True,
            **arguments,
        )
    return result
