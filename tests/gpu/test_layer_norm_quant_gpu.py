"""layer_norm_quant on Hopper against FLUX.2's eager chain around nn.LayerNorm and SGLang's quantizer: every byte."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang_fastpath.kernels import layer_norm_quant
from sglang_fastpath.kernels.layer_norm_quant import LayerNormInput
from stock_chains import (
    BF16,
    EPS,
    assert_operand,
    assert_operands,
    assert_same_bytes,
    edges_of,
    layer_norm_input,
    poison,
    rows_of,
    stock_layer_norm,
    stock_quantize,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

# Kernels of their own have 3072, 4096 and 6144. Of the others, some leave warps without elements (up to 384) or with
# fewer than others (all that are no multiple of 512).
WIDTHS = [128, 256, 384, 512, 640, 1280, 3072, 3200, 4096, 6144, 6272, 8064, layer_norm_quant.WIDEST]
SHAPES = [  # (batch, text tokens, image tokens)
    (1, 0, 0),
    (1, 0, 1),
    (1, 1, 0),
    (2, 0, 5),
    (1, 77, 3),
    (2, 1, 4),
    (2, 77, 127),
    (1, 512, 4097),
]
CUDA: dict[str, Any] = {"device": "cuda"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def check(stream: LayerNormInput) -> None:
    assert layer_norm_quant.can_use(stream) is None
    total, modulated = stock_layer_norm(stream)
    poison()
    out = layer_norm_quant.layer_norm_quant(stream, EPS)
    assert_same_bytes(out.residual_out, total)
    assert_operand(out.operand, modulated, stock_quantize)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("grouped_rows", [0, 128])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("width", [256, 3072, 6144])
@pytest.mark.parametrize("gated", [False, True])
def test_two_streams(gated, width, batch, text, image, grouped_rows, contents) -> None:
    like = {"gated": gated, "edges": edges_of(contents), **CUDA}
    streams = [layer_norm_input(batch, count, width, seed=10 * i, **like) for i, count in enumerate((text, image))]
    assert [layer_norm_quant.can_use(stream) for stream in streams] == [None, None]
    totals, modulated = zip(*map(stock_layer_norm, streams), strict=True)
    poison()
    out = layer_norm_quant.layer_norm_quant_pair(*streams, EPS, grouped_rows=grouped_rows)
    assert_same_bytes(out.residual_out, totals)
    assert_operands(out.operands, modulated, stock_quantize, grouped_rows=grouped_rows)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gated", [False, True])
def test_one_stream(gated, width, batch, contents) -> None:
    check(layer_norm_input(batch, 75, width, gated=gated, seed=width, edges=edges_of(contents), **CUDA))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
def test_few_rows(rows) -> None:
    check(layer_norm_input(1, rows, 6144, gated=True, seed=rows, **CUDA))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [256, 6144])
@pytest.mark.parametrize("gated", [False, True])
def test_zeros_subnormals_infinities_and_nan(gated, width, seed) -> None:
    check(layer_norm_input(2, 127, width, gated=gated, seed=seed, edges=edges_of("edges"), **CUDA))


# --- the moments ---------------------------------------------------------------------------------------------------


def normed_alone(x: Tensor) -> LayerNormInput:
    """A modulation that changes nothing."""
    nothing = torch.zeros(1, x.shape[1], dtype=BF16, **CUDA)
    return LayerNormInput(x, nothing, nothing)


@pytest.mark.parametrize("width", WIDTHS)
def test_many_rows(width) -> None:
    """A root or a mean that is off by one fp32 ulp shows in about one of a million quantized values."""
    check(normed_alone(rows_of((1 << 25) // width, width, seed=width, **CUDA)))


@pytest.mark.parametrize("width", WIDTHS)
def test_means_far_from_zero(width) -> None:
    """Where rounding errors of the mean are large against the deviations from it."""
    x = rows_of(4096, width, seed=width, **CUDA)
    check(normed_alone(x + 100 * x[:, :1].abs()))


@pytest.mark.parametrize("width", WIDTHS)
def test_columns_of_very_different_size(width) -> None:
    """Where it shows which elements are added in what order."""
    exponents = torch.arange(width, **CUDA) * 7919 % 41 - 20
    check(normed_alone(rows_of(4096, width, seed=width, **CUDA) * torch.exp2(exponents.float()).to(BF16)))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.14, 1e-39, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("width", WIDTHS)
def test_constant_rows(width, value) -> None:
    """Without variance `eps` is all that the root is taken of."""
    check(normed_alone(torch.full((5, width), value, dtype=BF16, **CUDA)))


@pytest.mark.parametrize("width", [256, 6144])
def test_modulation_of_random_bits(width) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (3, 64, width), generator=generator, **CUDA).to(torch.int16)
    scale, shift, gate = bits.view(BF16)
    stream = layer_norm_input(64, 9, width, gated=True, seed=0, **CUDA)
    check(stream._replace(scale=scale, shift=shift))
    check(stream._replace(gate=gate))


# --- launches ------------------------------------------------------------------------------------------------------


def tensors(stream: LayerNormInput) -> list[Tensor]:
    return [tensor for tensor in stream if tensor is not None]


def test_a_captured_launch_replays_on_new_contents() -> None:
    """Capture runs on a stream of its own: the launch must go to PyTorch's current one."""

    def outputs_of(stream: LayerNormInput) -> tuple[Tensor | None, ...]:
        out = layer_norm_quant.layer_norm_quant(stream, EPS)
        return out.operand.q, out.operand.scale, out.residual_out

    stream, other = (layer_norm_input(2, 127, 256, gated=True, seed=seed, **CUDA) for seed in (0, 1000))
    first, second = outputs_of(stream), outputs_of(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs_of(stream)
    graph.replay()
    assert_same_bytes(captured, first)
    for tensor, contents in zip(tensors(stream), tensors(other), strict=True):
        tensor.copy_(contents)
    graph.replay()
    assert_same_bytes(captured, second)


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, shape and strides, one element off the start of an allocation."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(extent + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def test_misaligned_tensors_are_refused() -> None:
    stream = layer_norm_input(2, 3, 256, gated=True, seed=0, **CUDA)
    assert layer_norm_quant.can_use(stream) is None
    for field, value in stream._asdict().items():
        off = stream._replace(**{field: misaligned(value)})
        assert layer_norm_quant.can_use(off) == "a tensor is not 16-byte aligned", field
