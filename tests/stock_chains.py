"""Inputs for the fused kernels, and the chains of SGLang's own modules that the kernels replace.

The chains dispatch by device as SGLang does, so that a test on a CPU and one on a GPU share them. Each takes the
kernel's own input of one stream and starts from the GEMM output that it holds: a bias is added in place to a copy.
"""

from collections.abc import Callable

import torch
from sglang_fastpath.kernels.act_quant import ActInput
from sglang_fastpath.kernels.fused_kernels import GROUP, TMA_ALIGNED_ROWS, Quantized, QuantizedPair
from sglang_fastpath.kernels.gated_residual import GatedInput
from sglang_fastpath.kernels.layer_norm_quant import LayerNormInput
from sglang_fastpath.kernels.norm_quant import NormInput
from sglang_fastpath.kernels.qk_norm_rope import QkInput
from sglang_fastpath.kernels.qkv_epilogue import HEAD, QkvInput
from sglang_fastpath.kernels.swiglu_quant import SwigluInput
from torch import Tensor, nn

from sglang_fastpath.guard import compare

EPS = 1e-6
BF16 = torch.bfloat16
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]


def assert_same_bytes(fast: object, stock: object) -> None:
    difference = compare(fast, stock)
    assert difference is None, str(difference)


# --- inputs --------------------------------------------------------------------------------------------------------


def edge_groups(*, finite: bool = False) -> Tensor:
    """Groups of 128 that a quantizer, a norm or a product may trip over, one a row; `finite`: without inf and NaN."""
    ramp = torch.linspace(-1, 1, GROUP)
    groups = [
        torch.full((GROUP,), 0.0),
        torch.full((GROUP,), -0.0),
        torch.full((GROUP,), 1.5),
        ramp * 1e-39,  # subnormal
        ramp * 9e-11,  # below the quantizer's floor
        ramp * 1e-20,
        ramp * (1e30 if finite else 3e38),
    ]
    if not finite:
        for special in ([torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf, torch.nan]):
            groups.append(ramp.clone())
            groups[-1][5 : 5 + len(special)] = torch.tensor(special)
        groups.append(torch.full((GROUP,), torch.nan))
    return torch.stack(groups).to(BF16)


def edges_of(contents: str) -> Tensor | None:
    return edge_groups() if contents == "edges" else None


def rows_of(
    rows: int,
    width: int,
    *,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> Tensor:
    """[rows, width] bf16, each row of its own magnitude. With `edges` (groups of 128) row r holds one of them: in a
    single group, or in all of its groups."""
    generator = torch.Generator(device).manual_seed(seed)
    spread = torch.exp(2 * torch.randn(rows, 1, generator=generator, device=device))
    x = (torch.randn(rows, width, generator=generator, device=device) * spread).to(BF16)
    if edges is not None:
        row = torch.arange(rows, device=device)
        turn = (row + seed) // len(edges)
        edge = edges.to(device)[(row + seed) % len(edges)]
        groups = x.view(rows, width // GROUP, GROUP)
        groups[row, turn % groups.shape[1]] = edge
        groups[turn % 2 == 1] = edge[turn % 2 == 1].unsqueeze(1)
    return x


def norm_input(
    batch: int,
    tokens: int,
    width: int,
    *,
    gated: bool,
    bias: bool,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> NormInput:
    """The modulation is a chunk of one projection, as stock's is. Some gates and residuals are -0."""
    modulation = 0.5 * rows_of(batch, 6 * width, seed=seed + 1, device=device)
    shift, scale, gate = modulation.chunk(2, dim=-1)[1].chunk(3, dim=-1)
    gate[:, ::8] = -0.0
    residual = rows_of(batch * tokens, width, seed=seed + 2, device=device, edges=edges)
    residual[:, ::4] = -0.0
    return NormInput(
        x=rows_of(batch * tokens, width, seed=seed, device=device, edges=edges),
        scale=scale,
        shift=shift,
        gate=gate if gated else None,
        residual=residual if gated else None,
        bias=rows_of(1, width, seed=seed + 3, device=device)[0] if bias else None,
    )


def layer_norm_input(
    batch: int,
    tokens: int,
    width: int,
    *,
    gated: bool,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> LayerNormInput:
    """As `norm_input`: FLUX.2's modulation is laid out like Qwen-Image's."""
    like = norm_input(batch, tokens, width, gated=gated, bias=False, seed=seed, device=device, edges=edges)
    return LayerNormInput(like.x, like.scale, like.shift, like.gate, like.residual)


def gated_input(
    batch: int,
    tokens: int,
    width: int,
    *,
    bias: bool,
    gate_of_each_row: bool = False,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> GatedInput:
    """As the gated `norm_input`, with one gate a batch element or one a row."""
    rows = batch * tokens
    gate = rows_of(rows if gate_of_each_row else batch, 6 * width, seed=seed + 1, device=device)[:, -width:]
    gate[:, ::8] = -0.0
    residual = rows_of(rows, width, seed=seed + 2, device=device, edges=edges)
    residual[:, ::4] = -0.0
    return GatedInput(
        x=rows_of(rows, width, seed=seed, device=device, edges=edges),
        gate=gate,
        residual=residual,
        bias=rows_of(1, width, seed=seed + 3, device=device)[0] if bias else None,
    )


def qkv_input(
    batch: int,
    tokens: int,
    heads: int,
    *,
    merged: bool,
    bias: bool,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> QkvInput:
    """`merged`: q, k and v are columns of one GEMM output. The rotary table has rows to spare."""
    width = heads * HEAD
    whole = rows_of(batch * tokens, 3 * width, seed=seed, device=device, edges=edges).view(batch, tokens, 3 * width)
    q, k, v = whole.chunk(3, dim=-1)
    if not merged:
        q, k, v = q.clone(), k.clone(), v.clone()
    weights = 1 + 0.1 * rows_of(2, HEAD, seed=seed + 1, device=device)
    biases = rows_of(3, width, seed=seed + 2, device=device)
    generator = torch.Generator(device).manual_seed(seed + 3)
    angles = 100 * torch.rand(tokens + 3, HEAD // 2, generator=generator, device=device)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return QkvInput(
        projected=(q, k, v),
        bias=(biases[0], biases[1], biases[2]) if bias else None,
        norm=(weights[0], weights[1]),
        cosine=table[:, : HEAD // 2],
        sine=table[:, HEAD // 2 :],
    )


def with_joint_table(text: QkvInput, image: QkvInput) -> tuple[QkvInput, QkvInput]:
    """The same with cosines and sines in tensors of their own, the image's rows behind as many as the text needs."""
    tokens = text.projected[0].shape[1]
    cosine, sine = (
        torch.cat([own[:tokens], others]) for own, others in ((text.cosine, image.cosine), (text.sine, image.sine))
    )
    return text._replace(cosine=cosine, sine=sine), image._replace(cosine=cosine[tokens:], sine=sine[tokens:])


def qk_input(
    batch: int,
    tokens: int,
    heads: int,
    *,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> tuple[QkInput, Tensor]:
    """q and k in the merged projection of a single block, and that projection [B, tokens, 3 * 128 * heads + more]."""
    width = heads * HEAD
    whole = rows_of(batch * tokens, 3 * width + 2 * HEAD, seed=seed, device=device, edges=edges)
    whole = whole.view(batch, tokens, 3 * width + 2 * HEAD)
    q, k = (whole[..., start : start + width].unflatten(-1, (heads, HEAD)) for start in (0, width))
    weights = 1 + 0.1 * rows_of(2, HEAD, seed=seed + 1, device=device)
    generator = torch.Generator(device).manual_seed(seed + 3)
    angles = 100 * torch.rand(tokens + 3, HEAD // 2, generator=generator, device=device)
    return QkInput(q, k, weights[0], weights[1], angles.cos(), angles.sin()), whole


def act_input(
    batch: int,
    tokens: int,
    width: int,
    *,
    bias: bool,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> ActInput:
    x = rows_of(batch * tokens, width, seed=seed, device=device, edges=edges).view(batch, tokens, width)
    return ActInput(x, rows_of(1, width, seed=seed + 1, device=device)[0] if bias else None)


def swiglu_input(
    rows: int,
    attention_width: int,
    width: int,
    *,
    strided: bool,
    seed: int,
    device: str = "cpu",
    edges: Tensor | None = None,
) -> SwigluInput:
    """`strided`: x is the last columns of a merged projection, the attention output the first ones of wider rows."""
    spare = 3 * 128 if strided else 0
    like = {"device": device, "edges": edges}
    before = rows_of(rows, spare, seed=seed, device=device)
    x1, x2, attention, behind = (
        rows_of(rows, columns, seed=seed + 1 + i, **like)
        for i, columns in enumerate((width, width, attention_width or 128, 128))
    )
    return SwigluInput(
        x=torch.cat([before, x1, x2], dim=-1)[:, spare:],
        attention=(torch.cat([attention, behind], dim=-1) if strided else attention)[:, :attention_width]
        if attention_width
        else None,
    )


# --- what stock does -----------------------------------------------------------------------------------------------


def linear_output(x: Tensor, bias: Tensor | None) -> Tensor:
    """What stock's block-FP8 linear returns for the GEMM output x: the bias is added in place."""
    out = x.clone(memory_format=torch.contiguous_format)
    if bias is not None:
        out += bias
    return out


def stock_norm(stream: NormInput, *, zero_added: bool) -> tuple[Tensor | None, Tensor]:
    """(residual sum, modulated rows). `zero_added`: the sum ends a block, the norm is the next block's."""
    from sglang.multimodal_gen.runtime.layers.elementwise import MulAdd
    from sglang.multimodal_gen.runtime.layers.layernorm import LayerNormScaleShift, ScaleResidualLayerNormScaleShift

    rows, width = stream.x.shape
    if not rows:
        return stream.residual, stream.x
    batch = stream.scale.shape[0]
    scale, shift = stream.scale.unsqueeze(1), stream.shift.unsqueeze(1)
    x = linear_output(stream.x, stream.bias).view(batch, -1, width)
    norm = {"hidden_size": width, "eps": EPS, "elementwise_affine": False}
    if stream.gate is None or stream.residual is None:
        return None, LayerNormScaleShift(**norm)(x=x, shift=shift, scale=scale).view(rows, width)
    residual, gate = stream.residual.view(batch, -1, width), stream.gate.unsqueeze(1)
    if zero_added:
        total = MulAdd()(x, gate, residual)
        modulated = LayerNormScaleShift(**norm)(x=total, shift=shift, scale=scale)
    else:
        modulated, total = ScaleResidualLayerNormScaleShift(**norm)(
            residual=residual, x=x, gate=gate, shift=shift, scale=scale
        )
    return total.view(rows, width), modulated.view(rows, width)


def stock_gated_residual(stream: GatedInput, batch: int, *, rounds_product: bool = False) -> Tensor:
    """Qwen-Image's end of a block, or FLUX.2's, which rounds the product."""
    from sglang.multimodal_gen.runtime.layers.elementwise import MulAdd

    rows, width = stream.x.shape
    if not rows:
        return stream.x
    x = linear_output(stream.x, stream.bias).view(batch, -1, width)
    gate, residual = stream.gate.reshape(batch, -1, width), stream.residual.view(batch, -1, width)
    out: Tensor = residual + gate * x if rounds_product else MulAdd()(x, gate, residual)
    return out.view(rows, width)


def stock_layer_norm(stream: LayerNormInput) -> tuple[Tensor | None, Tensor]:
    """(residual sum, modulated rows), as the blocks of FLUX.2 compute them."""
    rows, width = stream.x.shape
    if not rows:
        return stream.residual, stream.x
    batch = len(stream.scale)
    x, total = stream.x.view(batch, -1, width), None
    if stream.gate is not None and stream.residual is not None:
        x = total = stream.residual.view(batch, -1, width) + stream.gate.unsqueeze(1) * x
    normed = nn.LayerNorm(width, elementwise_affine=False, eps=EPS)(x)
    modulated = (1 + stream.scale.unsqueeze(1)) * normed + stream.shift.unsqueeze(1)
    return None if total is None else total.view(rows, width), modulated.view(rows, width)


def stock_qkv(text: QkvInput, image: QkvInput, *, joint_table: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The joint q, k and v: each stream normed and rotated in place, then concatenated.

    `joint_table`: the text's table is that of the whole sequence, and the image's positions follow the text's.
    """
    tables = [torch.cat([stream.cosine, stream.sine], dim=-1) for stream in (text, image)]
    offset = text.projected[0].shape[1] if joint_table else 0
    streams = [
        _stock_stream_qkv(text, tables[0], 0),
        _stock_stream_qkv(image, tables[0 if joint_table else 1], offset),
    ]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*streams, strict=True))
    return q, k, v


def _stock_stream_qkv(stream: QkvInput, table: Tensor, position_offset: int) -> tuple[Tensor, Tensor, Tensor]:
    from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

    q, k, v = (
        linear_output(part, bias).unflatten(-1, (-1, HEAD))
        for part, bias in zip(stream.projected, stream.bias or (None,) * 3, strict=True)
    )
    if not q.numel():
        return q, k, v
    norms = _stock_norms(stream.norm)
    q, k = apply_qk_norm_with_optional_rope(
        q=q,
        k=k,
        q_norm=norms[0],
        k_norm=norms[1],
        head_dim=HEAD,
        cos_sin_cache=table,
        is_neox=False,
        position_offset=position_offset,
        allow_inplace=True,
    )
    return q, k, v


def _stock_norms(weights: tuple[Tensor, Tensor]) -> list[nn.Module]:
    from sglang.multimodal_gen.runtime.layers.layernorm import RMSNorm

    norms = [RMSNorm(HEAD, eps=EPS) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight = nn.Parameter(weight, requires_grad=False)
    return norms


def stock_qk(stream: QkInput) -> tuple[Tensor, Tensor]:
    """q and k as FLUX.2's single block has them: each normed, then both rotated."""
    from sglang.multimodal_gen.runtime.layers.rotary_embedding import apply_flashinfer_rope_qk_inplace

    if not stream.q.numel():
        return stream.q, stream.k
    q_norm, k_norm = _stock_norms((stream.q_weight, stream.k_weight))
    table = torch.cat([stream.cosine, stream.sine], dim=-1)[: stream.q.shape[1]]
    q, k = apply_flashinfer_rope_qk_inplace(q_norm(stream.q), k_norm(stream.k), table, is_neox=False)
    return q, k


def stock_projection(stream: QkInput, whole: Tensor) -> Tensor:
    """`whole`, the projection of which q and k are the first columns, with stock's q and k in their place."""
    out = whole.clone()
    for part, x in enumerate(stock_qk(stream)):
        out[..., part * x.shape[2] * HEAD :][..., : x.shape[2] * HEAD] = x.flatten(2)
    return out


def stock_activation(stream: ActInput, *, gelu: bool) -> Tensor:
    """The rows that stock's next linear quantizes, [rows, K]."""
    x = linear_output(stream.x, stream.bias)
    return (nn.functional.gelu(x, approximate="tanh") if gelu else x).view(-1, x.shape[-1])


def stock_swiglu(stream: SwigluInput) -> Tensor:
    """The rows that stock's next linear quantizes, from [1, rows, ..] as its blocks have them."""
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2SwiGLU

    y = Flux2SwiGLU()(stream.x.unsqueeze(0))
    if stream.attention is not None:
        y = torch.cat([stream.attention.unsqueeze(0), y], dim=-1)
    return y[0]


def stock_quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """On a GPU: what stock's block-FP8 linear makes of its input."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    q, scale = sglang_per_token_group_quant_fp8(
        rows.contiguous(), 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )
    return q, scale


def assert_operands(
    pair: QuantizedPair, rows: tuple[Tensor, Tensor], quantize: Quantizer, *, grouped_rows: int = 0
) -> None:
    """`pair` holds what `quantize` makes of the text's and the image's rows, laid out as DeepGEMM reads it."""
    for operand, expected in zip((pair.text, pair.image), rows, strict=True):
        assert_same_bytes((operand.q, operand.scale), quantize(expected))
        assert operand.q.is_contiguous()
        assert_scale_layout(operand)
    counts = [len(operand.q) for operand in (pair.text, pair.image)]
    if not grouped_rows:
        assert pair.joint is None
        assert [pair.text.padded_rows, pair.image.padded_rows] == [-(-count // 4) * 4 for count in counts]
        return
    joint, offset = pair.joint, pair.image_offset
    assert joint is not None
    assert offset == -(-counts[0] // grouped_rows) * grouped_rows
    assert len(joint.q) == len(joint.scale) == offset + counts[1]
    assert joint.q.is_contiguous()
    assert_scale_layout(joint)
    assert pair.text.padded_rows == offset
    assert pair.image.padded_rows == joint.padded_rows - offset == -(-counts[1] // 4) * 4
    for operand, part in ((pair.text, slice(counts[0])), (pair.image, slice(offset, None))):
        for own, shared in ((operand.q, joint.q), (operand.scale, joint.scale)):
            assert own.data_ptr() == shared[part].data_ptr()
            assert own.stride() == shared.stride()


def assert_scale_layout(operand: Quantized) -> None:
    """MN-major, columns and their start on TMA's 16 bytes, and zeros from the last row up to `padded_rows`."""
    rows, groups = operand.scale.shape
    if not rows:
        return
    token_stride, group_stride = operand.scale.stride()
    assert token_stride == 1
    assert group_stride >= operand.padded_rows >= rows
    assert group_stride % 4 == 0
    assert operand.scale.data_ptr() % 16 == 0
    padding = torch.as_strided(
        operand.scale,
        (groups, operand.padded_rows - rows),
        (group_stride, 1),
        operand.scale.storage_offset() + rows,
    )
    assert_same_bytes(padding, torch.zeros_like(padding))


def assert_operand(operand: Quantized, rows: Tensor, quantize: Quantizer) -> None:
    """`operand` is what `quantize` makes of the rows, laid out as DeepGEMM reads it."""
    assert_same_bytes((operand.q, operand.scale), quantize(rows))
    assert operand.q.is_contiguous()
    assert operand.padded_rows == -(-len(rows) // TMA_ALIGNED_ROWS) * TMA_ALIGNED_ROWS
    assert_scale_layout(operand)


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, shape and strides, one element off the start of an allocation."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(extent + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def poison() -> None:
    """Fills the memory that the next allocations will get with NaN of every format: what is left unwritten shows."""
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in (1 << 30, *[1 << 19] * 64)]
    del blocks
