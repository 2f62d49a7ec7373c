"""The steps of a Qwen-Image block, each in a stock form and a fused one; qwen_image_block.py has the table."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from sglang_fastpath.kernels.act_quant import ActInput, act_quant
from sglang_fastpath.kernels.act_quant import can_use as can_quantize
from sglang_fastpath.kernels.block_fp8_gemm import GROUP_ROWS, gemm, grouped_gemm
from sglang_fastpath.kernels.fused_kernels import QuantizedPair
from sglang_fastpath.kernels.gated_residual import GatedInput, gated_residual
from sglang_fastpath.kernels.gated_residual import can_use as can_gate
from sglang_fastpath.kernels.norm_quant import NormInput, norm_quant
from sglang_fastpath.kernels.norm_quant import can_use as can_norm
from sglang_fastpath.kernels.qkv_epilogue import HEAD, QkvInput, qkv_epilogue
from sglang_fastpath.kernels.qkv_epilogue import can_use as can_finish_qkv
from sglang_fastpath.loaders.merged_linears import MergedLinears
from sglang_fastpath.patches.diffusion.block_layout import BlockLayout, Refused
from sglang_fastpath.patches.diffusion.block_steps import check, project, rows, stock_quantize
from sglang_fastpath.patches.diffusion.fused_blocks import Ahead
from torch import Tensor

# Up to how many text rows the GEMMs of both streams run as one grouped launch, as measured (docs/benchmarks.md). The
# text's rows are padded to a tile of 128: with one such tile every GEMM gains, with more of them only the wide ones.
GROUPED_UP_TO = {"qkv": 1 << 30, "out": GROUP_ROWS, "up": 1 << 30, "down": GROUP_ROWS}

Outputs = tuple[Tensor, Tensor]  # text and image stream, in stock's order
# Quantized already, or left to the linears' own quantizer.
_Operands: TypeAlias = QuantizedPair | tuple[Tensor, Tensor]
_Modulations = tuple["_Modulation", "_Modulation"]


class Call(NamedTuple):
    """One call of a block; see fused_blocks.py."""

    block: Any
    layout: BlockLayout
    text: Tensor  # [B, T, D]
    image: Tensor  # [B, I, D]
    temb: tuple[Tensor, Tensor]  # text, image
    rotary: tuple[Tensor, Tensor]  # text, image
    attention: dict[str, Any]
    modulate_index: Tensor | None
    cache_key: Any
    ahead: Ahead | None = None
    following: Any = None
    following_layout: BlockLayout | None = None

    @property
    def streams(self) -> Outputs:
        return self.text, self.image

    def kind(self) -> tuple[Any, ...]:
        return (
            self.text.shape,
            self.image.shape,
            self.text.data_ptr() % 16,
            self.image.data_ptr() % 16,
            *((table.shape, table.stride(), table.dtype, table.data_ptr() % 16) for table in self.rotary),
            self.attention.get("attn_mask") is not None,
            self.modulate_index is not None,
            self.image.device,
        )

    def __str__(self) -> str:
        batch, text_tokens, width = self.text.shape
        what = f"{batch} x ({text_tokens} text + {self.image.shape[1]} image) tokens of {width}"
        what += ", a mask" if self.attention.get("attn_mask") is not None else ""
        return what + (", modulate_index" if self.modulate_index is not None else "")


class _Modulation(NamedTuple):
    """One stream's six vectors, each [B, D] (the image stream's [2 B, D] under zero_cond_t)."""

    shift1: Tensor
    scale1: Tensor
    gate1: Tensor
    shift2: Tensor
    scale2: Tensor
    gate2: Tensor


class FusedForward:
    """One pass through one block with a given set of features. Streams are (text, image) pairs throughout."""

    def __init__(self, call: Call, features: frozenset[str], *, checking: bool = False) -> None:
        self._call = call
        self._checking = checking
        self._norm_quant = "norm_quant" in features and call.modulate_index is None
        self._act_quant = "act_quant" in features
        self._qkv_epilogue = "qkv_epilogue" in features
        self._bias_fold = "bias_fold" in features
        self._prepack = "scale_prepack" in features and bool(call.layout.merged)
        if checking and "scale_prepack" in features and not call.layout.merged:
            raise Refused(call.layout.not_merged or "the linears are not merged")
        if checking and self._qkv_epilogue and not call.image.is_cuda and call.attention.get("freqs_complex"):
            raise Refused("stock rotates q and k by complex tables on a CPU")
        if checking and "norm_quant" in features and not self._norm_quant:
            raise Refused("each token has its own modulation (modulate_index)")
        self.ahead: Ahead | None = None

    def run(self) -> Outputs:
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
                streams.append(tuple(project(linear, operand, shape, fold=fold) for linear in three))
        biases: list[Any] = [None, None]
        if fold:
            biases = [tuple(linear.bias for linear in linears[start : start + 3]) for start in (0, 3)]
        text, image = (
            QkvInput(
                projected,
                bias,
                layout.qk_norm[2 * index : 2 * index + 2],
                cosine=table[:, : HEAD // 2],
                sine=table[:, HEAD // 2 :],
            )
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
            joint = _stock_qkv_epilogue(streams, call.rotary, call.block.attn, call.attention.get("freqs_complex"))
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
                NormInput(rows(out), m.scale2, m.shift2, gate, rows(stream), bias)
                for out, m, gate, stream, bias in zip(
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
    ) -> Outputs:
        call = self._call
        biases = [linear.bias if self._bias_fold else None for linear in call.layout.linears["down"]]
        if self._norm_quant and call.following is not None and call.following_layout is not None:
            following = self._modulation_of(call.following)
            first = tuple(_Modulation(*params.chunk(6, dim=-1)) for params in following)
            inputs = [
                NormInput(rows(x), m.scale1, m.shift1, gate, rows(residual), bias)
                for x, m, gate, residual, bias in zip(down, first, gates, residuals, biases, strict=True)
            ]
            self._check(can_norm, *inputs)
            eps = call.following_layout.norm_eps
            normed = norm_quant(
                *inputs,
                eps,
                zero_added=True,
                grouped_rows=self._group_rows("qkv", call.following_layout),
            )
            text, image = normed.residual_out
            assert text is not None and image is not None
            outputs = text.view(call.text.shape), image.view(call.image.shape)
            self.ahead = Ahead(call.block, call.following, (*outputs, *call.temb), following, normed.operands, eps)
            return outputs
        if self._bias_fold:
            gated = [
                GatedInput(rows(x), rows(gate), rows(residual), bias)
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
        inputs = [NormInput(rows(x), m.scale1, m.shift1) for x, m in zip(streams, modulation, strict=True)]
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
            text, image = (raw.view(*shape, raw.shape[-1]) for raw, shape in zip(raws, shapes, strict=True))
            return text, image
        return (
            project(linears[0], operands[0], shapes[0], fold=fold),
            project(linears[1], operands[1], shapes[1], fold=fold),
        )

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
        text, image = (stock_quantize(rows(x)) for x in streams)
        return QuantizedPair(text, image)

    def _group_rows(self, name: str, layout: BlockLayout) -> int:
        """DeepGEMM's alignment if these GEMMs run as one grouped launch, else 0."""
        text_rows = self._call.text.shape[0] * self._call.text.shape[1]
        return GROUP_ROWS if self._prepack and layout.merged and text_rows <= GROUPED_UP_TO[name] else 0

    def _check(self, can_use: Callable[[Any], str | None], *streams: Any) -> None:
        if self._checking:
            check(can_use, streams)


def _streams(operands: _Operands) -> tuple[Any, Any]:
    return operands[0], operands[1]


def _stock_qkv_epilogue(
    streams: tuple[QkvInput, QkvInput],
    rotary: tuple[Tensor, Tensor],
    attn: Any,
    freqs_complex: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stock's own norm and rotation of each stream, and the concatenation.

    `rotary` (text, image) are whole tables. `freqs_complex` (image, text; from 0.5.20): stock rotates by these where
    it has no fused kernel.
    """
    from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

    tables = [{"cos_sin_cache": table} for table in rotary]
    if freqs_complex is not None:
        for table, complex_table in zip(tables, reversed(freqs_complex), strict=True):
            table["freqs_complex"] = complex_table
    parts = []
    for stream, q_norm, k_norm, table in zip(
        streams, (attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k), tables, strict=True
    ):
        q, k, v = (
            part.contiguous().view(*part.shape[:2], part.shape[2] // attn.head_dim, attn.head_dim)
            for part in stream.projected
        )
        q, k = apply_qk_norm_with_optional_rope(
            q=q,
            k=k,
            q_norm=q_norm,
            k_norm=k_norm,
            head_dim=attn.head_dim,
            **table,
            is_neox=False,
            allow_inplace=True,
        )
        parts.append((q, k, v))
    q, k, v = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
    return q, k, v
