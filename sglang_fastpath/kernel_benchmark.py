"""`sglang-fastpath bench kernels`: each fused kernel against stock's chain and the copy bandwidth, on a CUDA device.

A kernel is judged by the bytes that it cannot avoid moving (its inputs read once, its outputs written once) over its
time, as a fraction of what a device-to-device copy reaches in the same run. Biases, modulation, norm weights and
rotary tables count; an activation's table of 128 kB, which stays in the caches, does not.

FLUX.2 has twice the heads and text tokens of Qwen-Image, so its sites run at twice those of the size asked for.

How it is timed. Each chain, ours and stock's, is a CUDA graph that goes over several input sets, whose outputs lie
apart as well; the inputs alone are more than four times the L2 cache, so that every launch reads from memory. Rounds
over all graphs and the copy, in turning order; medians over the rounds. The gaps between the launches of a graph
count, for stock's chains as for ours.

To measure one more site, add a `Site` to `SITES`.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from sglang_fastpath import benchmark
from sglang_fastpath.guard import compare
from sglang_fastpath.kernels.act_quant import ActInput, act_quant
from sglang_fastpath.kernels.act_quant import can_use as can_use_act_quant
from sglang_fastpath.kernels.block_fp8_linear import GROUP, quantize_per_token_group
from sglang_fastpath.kernels.gated_residual import GatedInput, gated_residual
from sglang_fastpath.kernels.gated_residual import can_use as can_use_gated_residual
from sglang_fastpath.kernels.layer_norm_quant import LayerNormInput, layer_norm_quant_pair
from sglang_fastpath.kernels.layer_norm_quant import can_use as can_use_layer_norm_quant
from sglang_fastpath.kernels.norm_quant import NormInput, norm_quant
from sglang_fastpath.kernels.norm_quant import can_use as can_use_norm_quant
from sglang_fastpath.kernels.qk_norm_rope import QkInput, qk_norm_rope
from sglang_fastpath.kernels.qk_norm_rope import can_use as can_use_qk_norm_rope
from sglang_fastpath.kernels.qkv_epilogue import HEAD, QkvInput, qkv_epilogue
from sglang_fastpath.kernels.qkv_epilogue import can_use as can_use_qkv_epilogue
from sglang_fastpath.kernels.swiglu_quant import SwigluInput, swiglu_quant, swiglu_quant_pair
from sglang_fastpath.kernels.swiglu_quant import can_use as can_use_swiglu_quant

EPS = 1e-6
FEED_FORWARD = 4  # width of the feed-forward in widths of the model
FLUX2_FEED_FORWARD = 3
QKV = 3
COPY_BYTES = 512 << 20
COPIES = 4
LAUNCHES = 48  # of a chain in one graph, at least: what starting a graph costs must not show
TIMES_L2 = 4

Draw = Callable[..., Tensor]
Streams = tuple[Any, ...]
Outputs = tuple[Tensor | None, ...]


class UnsupportedSizeError(ValueError):
    """A kernel cannot run at the size asked for."""


@dataclass(frozen=True)
class Size:
    """Tokens of both streams (by default Qwen-Image's at 1024x1024) and heads of 128."""

    image_tokens: int = 4096
    text_tokens: int = 256
    heads: int = 24

    @property
    def width(self) -> int:
        return self.heads * int(HEAD)


def contiguous_copies(inputs: Streams) -> Streams:
    """Each tensor by itself, as stock's GEMMs leave theirs."""
    copied: Streams = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.clone(memory_format=torch.contiguous_format), inputs
    )
    return copied


def strided_copies(inputs: Streams) -> Streams:
    """With the same strides; views of one tensor are views of one copy."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        own = storages[storage.data_ptr()]
        return tensor.new_empty(0).set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())

    copied: Streams = pytree.tree_map_only(Tensor, copy, inputs)
    return copied


@dataclass(frozen=True)
class Site:
    """One place of the denoiser: what it is given, and both ways to compute it.

    `inputs` draws what (text, image), or the one joint stream, are given at a size. `ours` and `stock` take the
    streams and return the same tensors, stream by stream; None is allowed. `can_use` is the kernel's own. Stock gets
    a copy of the inputs, `for_stock`, which it may write to, as SGLang does.
    """

    name: str
    inputs: Callable[[Size, Draw], Streams]
    can_use: Callable[[Any], str | None]
    ours: Callable[..., Outputs]
    stock: Callable[..., Outputs]
    for_stock: Callable[[Streams], Streams] = contiguous_copies


# --- inputs ------------------------------------------------------------------------------------------------------


def _norm_inputs(size: Size, draw: Draw, *, gated: bool) -> tuple[Any, Any]:
    def stream(tokens: int) -> Any:
        shift, scale, gate = draw(1, 3 * size.width).chunk(3, -1)
        plain = NormInput(draw(tokens, size.width), scale, shift)
        if not gated:
            return plain
        return plain._replace(gate=gate, residual=draw(tokens, size.width), bias=_bias(size.width, draw))

    return stream(size.text_tokens), stream(size.image_tokens)


def _qkv_inputs(size: Size, draw: Draw) -> tuple[Any, Any]:
    def stream(tokens: int) -> Any:
        angles = draw(tokens, HEAD // 2).float()
        table = torch.cat([angles.cos(), angles.sin()], -1)
        return QkvInput(
            projected=draw(1, tokens, QKV * size.width).chunk(QKV, -1),
            bias=tuple(_bias(size.width, draw) for _ in range(QKV)),
            norm=(draw(HEAD), draw(HEAD)),
            cosine=table[:, : HEAD // 2],
            sine=table[:, HEAD // 2 :],
        )

    return stream(size.text_tokens), stream(size.image_tokens)


def _qkv_for_stock(inputs: Streams) -> Streams:
    """q, k and v come from GEMMs of their own; cosines and sines stay halves of one table."""
    pairs = zip(strided_copies(inputs), contiguous_copies(inputs), strict=True)
    return tuple(strided._replace(projected=contiguous.projected) for strided, contiguous in pairs)


def _attention_outputs(size: Size, draw: Draw) -> tuple[Any, Any]:
    joint = draw(1, size.text_tokens + size.image_tokens, size.width)
    return ActInput(joint[:, : size.text_tokens]), ActInput(joint[:, size.text_tokens :])


def _feed_forward_inputs(size: Size, draw: Draw) -> tuple[Any, Any]:
    width = FEED_FORWARD * size.width

    def stream(tokens: int) -> Any:
        return ActInput(draw(1, tokens, width), _bias(width, draw))

    return stream(size.text_tokens), stream(size.image_tokens)


def _gated_inputs(size: Size, draw: Draw) -> tuple[Any, Any]:
    def stream(tokens: int) -> Any:
        x, residual = draw(tokens, size.width), draw(tokens, size.width)
        return GatedInput(x, draw(1, size.width), residual, _bias(size.width, draw))

    return stream(size.text_tokens), stream(size.image_tokens)


def _layer_norm_inputs(size: Size, draw: Draw, *, gated: bool) -> Streams:
    """The norms of FLUX.2's double block."""
    size = _flux2(size)

    def stream(tokens: int) -> Any:
        shift, scale, gate = draw(1, 3 * size.width).chunk(3, -1)
        plain = LayerNormInput(draw(tokens, size.width), scale, shift)
        return plain._replace(gate=gate, residual=draw(tokens, size.width)) if gated else plain

    return stream(size.text_tokens), stream(size.image_tokens)


def _flux2_gated_inputs(size: Size, draw: Draw) -> Streams:
    return tuple(stream._replace(bias=None) for stream in _gated_inputs(_flux2(size), draw))


def _swiglu_inputs(size: Size, draw: Draw) -> Streams:
    """The feed-forwards of FLUX.2's double block."""
    size = _flux2(size)
    width = FLUX2_FEED_FORWARD * size.width
    return SwigluInput(draw(size.text_tokens, 2 * width)), SwigluInput(draw(size.image_tokens, 2 * width))


def _single_block_inputs(size: Size, draw: Draw) -> Streams:
    """FLUX.2's single block: x1 and x2 are the last columns of its merged projection."""
    size = _flux2(size)
    tokens = size.text_tokens + size.image_tokens
    merged = draw(tokens, (QKV + 2 * FLUX2_FEED_FORWARD) * size.width)
    return (SwigluInput(merged[:, QKV * size.width :], draw(tokens, size.width)),)


def _single_block_qk(size: Size, draw: Draw) -> Streams:
    """q and k in the merged projection of FLUX.2's single block."""
    size = _flux2(size)
    tokens = size.text_tokens + size.image_tokens
    merged = draw(1, tokens, (QKV + 2 * FLUX2_FEED_FORWARD) * size.width)
    q, k = (part.view(1, tokens, size.heads, HEAD) for part in merged[..., : 2 * size.width].chunk(2, -1))
    angles = draw(tokens, HEAD // 2).float()
    return (QkInput(q, k, draw(HEAD), draw(HEAD), angles.cos(), angles.sin()),)


def _flux2(size: Size) -> Size:
    return Size(size.image_tokens, 2 * size.text_tokens, 2 * size.heads)


def _bias(width: int, draw: Draw) -> Tensor:
    # Small, because the launches of one graph add it to the same tensor again and again.
    return 0.02 * draw(width)


# --- the fused kernels -------------------------------------------------------------------------------------------


def _norm_quant(text: Any, image: Any, *, zero_added: bool = False) -> Outputs:
    normed = norm_quant(text, image, EPS, zero_added=zero_added)
    operands = (normed.operands.text, normed.operands.image)
    streams = zip(operands, normed.residual_out, strict=True)
    return tuple(tensor for operand, total in streams for tensor in (operand.q, operand.scale, total))


def _qkv_epilogue(text: Any, image: Any) -> Outputs:
    q, k, v = qkv_epilogue(text, image, EPS)
    return q, k, v


def _act_quant(text: Any, image: Any, *, gelu: bool) -> Outputs:
    operands = act_quant(text, image, gelu=gelu)
    return operands.text.q, operands.text.scale, operands.image.q, operands.image.scale


def _gated_residual(text: Any, image: Any, *, rounds_product: bool = False) -> Outputs:
    text_out, image_out = gated_residual(text, image, rounds_product=rounds_product)
    return text_out, image_out


def _layer_norm_quant(text: Any, image: Any) -> Outputs:
    normed = layer_norm_quant_pair(text, image, EPS)
    streams = zip((normed.operands.text, normed.operands.image), normed.residual_out, strict=True)
    return tuple(tensor for operand, total in streams for tensor in (operand.q, operand.scale, total))


def _swiglu_quant_pair(text: Any, image: Any) -> Outputs:
    operands = swiglu_quant_pair(text, image)
    return operands.text.q, operands.text.scale, operands.image.q, operands.image.scale


def _swiglu_quant(stream: Any) -> Outputs:
    operand = swiglu_quant(stream)
    return operand.q, operand.scale


def _qk_norm_rope(stream: Any) -> Outputs:
    qk_norm_rope(stream, EPS)
    return stream.q, stream.k


# --- stock's chains (SGLang 0.5.17: qwen_image.py, flux_2.py, and the block-FP8 linear around each GEMM) -----------


def _stock_norm(stream: Any, *, linears: int) -> Outputs:
    """Norm and modulation, then every one of the `linears` that read the result quantizes it for itself."""
    from sglang.multimodal_gen.runtime.layers.layernorm import LayerNormScaleShift

    norm = LayerNormScaleShift(stream.x.shape[-1], eps=EPS)
    modulated = norm(stream.x.unsqueeze(0), shift=stream.shift.unsqueeze(1), scale=stream.scale.unsqueeze(1))
    for _ in range(linears):
        q, scale = _stock_quantize(modulated)
    return q, scale, None


def _stock_gated_norm(stream: Any) -> Outputs:
    from sglang.multimodal_gen.runtime.layers.layernorm import ScaleResidualLayerNormScaleShift

    norm = ScaleResidualLayerNormScaleShift(stream.x.shape[-1], eps=EPS)
    modulated, total = norm(
        residual=stream.residual.unsqueeze(0),
        x=stream.x.add_(stream.bias).unsqueeze(0),
        gate=stream.gate.unsqueeze(1),
        shift=stream.shift.unsqueeze(1),
        scale=stream.scale.unsqueeze(1),
    )
    return *_stock_quantize(modulated), total[0]


def _stock_cross_block(stream: Any) -> Outputs:
    (total,) = _stock_gated_residual(stream)
    q, scale, _ = _stock_norm(stream._replace(x=total), linears=QKV)
    return q, scale, total


def _stock_gated_residual(stream: Any) -> Outputs:
    from sglang.multimodal_gen.runtime.layers.elementwise import MulAdd

    x = stream.x.add_(stream.bias).unsqueeze(0)
    return (MulAdd()(x, stream.gate.unsqueeze(1), stream.residual.unsqueeze(0))[0],)


def _stock_flux2_residual(stream: Any) -> Outputs:
    return (stream.residual + stream.gate * stream.x,)


def _stock_layer_norm(stream: Any, *, linears: int) -> Outputs:
    """FLUX.2's eager operations, then every one of the `linears` quantizes the result for itself."""
    total = None
    if stream.residual is not None:
        (total,) = _stock_flux2_residual(stream)
    x = stream.x if total is None else total
    normed = torch.nn.LayerNorm(x.shape[-1], elementwise_affine=False, eps=EPS)(x)
    modulated = (1 + stream.scale) * normed + stream.shift
    for _ in range(linears):
        q, scale = _stock_quantize(modulated)
    return q, scale, total


def _stock_qkv(text: Any, image: Any) -> Outputs:
    from sglang.multimodal_gen.runtime.layers.layernorm import apply_qk_norm_with_optional_rope

    streams = []
    for stream in (text, image):
        table = stream.cosine.as_strided((len(stream.cosine), HEAD), (HEAD, 1))  # of which it is the first half
        q, k, v = (
            part.add_(bias).unflatten(-1, (-1, HEAD))
            for part, bias in zip(stream.projected, stream.bias, strict=True)
        )
        q, k = apply_qk_norm_with_optional_rope(
            q=q,
            k=k,
            q_norm=_stock_rms_norm(stream.norm[0]),
            k_norm=_stock_rms_norm(stream.norm[1]),
            head_dim=HEAD,
            cos_sin_cache=table,
            is_neox=False,
            allow_inplace=True,
        )
        streams.append((q, k, v))
    return tuple(torch.cat(parts, dim=1) for parts in zip(*streams, strict=True))


def _stock_qk_norm_rope(stream: Any) -> Outputs:
    from sglang.multimodal_gen.runtime.layers.rotary_embedding import apply_flashinfer_rope_qk_inplace

    q, k = _stock_rms_norm(stream.q_weight)(stream.q), _stock_rms_norm(stream.k_weight)(stream.k)
    table = torch.cat([stream.cosine, stream.sine], dim=-1)
    rotated: Outputs = apply_flashinfer_rope_qk_inplace(q, k, table, is_neox=False)
    return rotated


def _stock_rms_norm(weight: Tensor) -> Any:
    from sglang.multimodal_gen.runtime.layers.layernorm import RMSNorm

    norm = RMSNorm(HEAD, eps=EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def _stock_act_quant(stream: Any) -> Outputs:
    return _stock_quantize(stream.x)


def _stock_gelu_quant(stream: Any) -> Outputs:
    return _stock_quantize(F.gelu(stream.x.add_(stream.bias), approximate="tanh"))


def _stock_swiglu_quant(stream: Any) -> Outputs:
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2SwiGLU

    y = Flux2SwiGLU()(stream.x)
    return _stock_quantize(y if stream.attention is None else torch.cat([stream.attention, y], dim=-1))


def _stock_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the block-FP8 linear quantizes its input for DeepGEMM on SM90."""
    rows = x.view(-1, x.shape[-1])
    if not x.is_cuda:
        q, scale = quantize_per_token_group(rows)  # stock's kernel is CUDA; these are its bytes
        return q, scale
    from sglang.srt.layers.quantization.fp8_utils import sglang_per_token_group_quant_fp8

    q, scale = sglang_per_token_group_quant_fp8(rows, GROUP, column_major_scales=True, scale_tma_aligned=True)
    return q, scale


def _each(stock: Callable[..., Outputs], **options: Any) -> Callable[..., Outputs]:
    """A chain over all streams from stock's over one."""
    return lambda *streams: tuple(tensor for stream in streams for tensor in stock(stream, **options))


SITES = (
    Site(
        "norm_quant",
        functools.partial(_norm_inputs, gated=False),
        can_use_norm_quant,
        _norm_quant,
        _each(_stock_norm, linears=QKV),
    ),
    Site(
        "norm_quant_gated",
        functools.partial(_norm_inputs, gated=True),
        can_use_norm_quant,
        _norm_quant,
        _each(_stock_gated_norm),
    ),
    Site(
        "norm_quant_cross_block",
        functools.partial(_norm_inputs, gated=True),
        can_use_norm_quant,
        functools.partial(_norm_quant, zero_added=True),
        _each(_stock_cross_block),
    ),
    Site("qkv_epilogue", _qkv_inputs, can_use_qkv_epilogue, _qkv_epilogue, _stock_qkv, _qkv_for_stock),
    Site(
        "act_quant",
        _attention_outputs,
        can_use_act_quant,
        functools.partial(_act_quant, gelu=False),
        _each(_stock_act_quant),
    ),
    Site(
        "act_quant_gelu",
        _feed_forward_inputs,
        can_use_act_quant,
        functools.partial(_act_quant, gelu=True),
        _each(_stock_gelu_quant),
    ),
    Site("gated_residual", _gated_inputs, can_use_gated_residual, _gated_residual, _each(_stock_gated_residual)),
    Site("swiglu_quant", _swiglu_inputs, can_use_swiglu_quant, _swiglu_quant_pair, _each(_stock_swiglu_quant)),
    Site(
        "swiglu_quant_single",
        _single_block_inputs,
        can_use_swiglu_quant,
        _swiglu_quant,
        _each(_stock_swiglu_quant),
    ),
    Site(
        "layer_norm_quant",
        functools.partial(_layer_norm_inputs, gated=False),
        can_use_layer_norm_quant,
        _layer_norm_quant,
        _each(_stock_layer_norm, linears=QKV),
    ),
    Site(
        "layer_norm_quant_gated",
        functools.partial(_layer_norm_inputs, gated=True),
        can_use_layer_norm_quant,
        _layer_norm_quant,
        _each(_stock_layer_norm, linears=1),
    ),
    Site(
        "gated_residual_flux2",
        _flux2_gated_inputs,
        can_use_gated_residual,
        functools.partial(_gated_residual, rounds_product=True),
        _each(_stock_flux2_residual),
    ),
    Site("qk_norm_rope", _single_block_qk, can_use_qk_norm_rope, _qk_norm_rope, _stock_qk_norm_rope, strided_copies),
)


# --- measuring ---------------------------------------------------------------------------------------------------


def bytes_of(tree: Any) -> int:
    """Bytes of all tensors in nested tuples; a view counts its own elements."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def draw_inputs(site: Site, size: Size, device: str, seed: int) -> Streams:
    """Fresh random inputs of a site. Raises UnsupportedSizeError with the reason if its kernel cannot run them."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    inputs = site.inputs(size, draw)
    for stream in inputs:
        if reason := site.can_use(stream):
            raise UnsupportedSizeError(
                f"{site.name} cannot run {size.heads} heads of {HEAD}: {reason}; choose other --heads"
            )
    return inputs


@dataclass
class Timed:
    """Something to time: `launch` enqueues `count` launches of it, `prepare` comes before and is not timed."""

    launch: Callable[[], object]
    count: int
    prepare: Callable[[], object] = lambda: None
    keep: Any = None  # the tensors that a graph reads
    milliseconds: list[float] = field(default_factory=list)

    def microseconds(self) -> float:
        """Of one launch: the median over the rounds."""
        return 1e3 * statistics.median(self.milliseconds) / self.count

    def gigabytes_per_second(self, moved: int) -> float:
        return moved / 1e3 / self.microseconds()


@dataclass
class Measured:
    """A site's bytes, its parity, and both chains to time."""

    moved: int
    bitwise_equal: bool
    ours: Timed
    stock: Timed

    def entry(self, copy_gb_s: float) -> dict[str, Any]:
        reached = self.ours.gigabytes_per_second(self.moved)
        return {
            "bytes": self.moved,
            "us": round(self.ours.microseconds(), 2),
            "gb_s": round(reached, 1),
            "of_copy": round(reached / copy_gb_s, 3),
            "stock_us": round(self.stock.microseconds(), 2),
            "speedup": round(self.stock.microseconds() / self.ours.microseconds(), 2),
            "bitwise_equal": self.bitwise_equal,
        }


@torch.no_grad()  # as SGLang serves; some of its dispatch asks
def run(
    size: Size, command: str, *, rounds: int = 20, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Parity of every site, then times.

    `kernels`: per site its `bytes`, the fused kernel's `us` and `gb_s`, the latter also as a fraction `of_copy` of
    `copy_gb_s`, and stock's chain in `stock_us`; `speedup` is the ratio of the two times.
    """
    described = benchmark.describe(benchmark.Workload(), command)
    copy = _copy()
    sites = {site.name: _prepare(site, size, report) for site in SITES}
    report(f"timing, {rounds} rounds")
    _time_interleaved([copy, *(chain for one in sites.values() for chain in (one.ours, one.stock))], rounds)
    copy_gb_s = copy.gigabytes_per_second(2 * COPY_BYTES)
    return {
        **{key: described[key] for key in ("sglang", "torch", "gpu", "commit", "command")},
        "image_tokens": size.image_tokens,
        "text_tokens": size.text_tokens,
        "heads": size.heads,
        "copy_gb_s": round(copy_gb_s, 1),
        "kernels": {name: measured.entry(copy_gb_s) for name, measured in sites.items()},
    }


def _prepare(site: Site, size: Size, report: Callable[[str], None]) -> Measured:
    """Compares both chains, which also compiles them, and captures them over enough input sets."""
    sets = [draw_inputs(site, size, "cuda", seed=0)]
    own = site.for_stock(sets[0])
    outputs = site.ours(*sets[0])
    moved = bytes_of((sets[0], outputs))
    difference = compare(outputs, site.stock(*own))
    report(f"{site.name}: {difference or 'bitwise equal'}")
    cache = torch.cuda.get_device_properties().L2_cache_size
    while len(sets) * bytes_of(sets[0]) <= TIMES_L2 * cache:
        sets.append(draw_inputs(site, size, "cuda", seed=len(sets)))
    return Measured(moved, difference is None, _ours(site, sets), _stock(site, sets))


def _copy() -> Timed:
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)

    def launch() -> None:
        for _ in range(COPIES):
            destination.copy_(source)

    return Timed(launch, COPIES)


def _ours(site: Site, sets: Sequence[Streams]) -> Timed:
    graph, count = _capture(site.ours, sets)
    return Timed(graph.replay, count, keep=sets)


def _stock(site: Site, sets: Sequence[Streams]) -> Timed:
    own = [site.for_stock(inputs) for inputs in sets]
    graph, count = _capture(site.stock, own)
    written, fresh = ([leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (own, sets))
    return Timed(graph.replay, count, prepare=lambda: torch._foreach_copy_(written, fresh), keep=own)


def _capture(chain: Callable[..., Outputs], sets: Sequence[Streams]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that goes over all sets, again and again, and how many times it runs the chain."""
    passes = -(-LAUNCHES // len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            # Held until the next pass is through: an output buffer used again at once would stay in the L2 cache.
            outputs = [chain(*inputs) for inputs in sets]
        del outputs
    return graph, passes * len(sets)


def _time_interleaved(timed: Sequence[Timed], rounds: int) -> None:
    """Adds one time a round to each."""
    for number in range(rounds):
        start = number % len(timed)
        events = []
        for one in (*timed[start:], *timed[:start]):
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            one.prepare()
            one.launch()  # untimed: keeps the GPU busy until the host has enqueued the timed one
            begin.record()
            one.launch()
            end.record()
            events.append((one, begin, end))
        torch.cuda.synchronize()
        for one, begin, end in events:
            one.milliseconds.append(begin.elapsed_time(end))
