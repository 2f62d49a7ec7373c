"""swiglu_quant on Hopper against FLUX.2's own SwiGLU, torch.cat and SGLang's quantizer: every byte."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sglang_fastpath.kernels import swiglu_quant
from sglang_fastpath.kernels.swiglu_quant import SwigluInput
from stock_chains import (
    BF16,
    assert_operand,
    assert_operands,
    assert_same_bytes,
    edges_of,
    poison,
    stock_quantize,
    stock_swiglu,
    swiglu_input,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

ROWS = [0, 1, 3, 4, 5, 127, 4609]
WIDTHS = [(0, 128), (128, 128), (256, 384), (6144, 18432)]  # of the attention output and of the SwiGLU
CUDA: dict[str, Any] = {"device": "cuda"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def fill_table() -> None:
    """The first call fills the table of SiLU, which must not be poisoned."""
    swiglu_quant.swiglu_quant(swiglu_input(1, 0, 128, strided=False, seed=0, **CUDA))


def check(stream: SwigluInput) -> None:
    assert swiglu_quant.can_use(stream) is None
    rows = stock_swiglu(stream)
    fill_table()
    poison()
    assert_operand(swiglu_quant.swiglu_quant(stream), rows, stock_quantize)


def check_pair(text: SwigluInput, image: SwigluInput, *, grouped_rows: int = 0) -> None:
    assert swiglu_quant.can_use(text) is swiglu_quant.can_use(image) is None
    rows = stock_swiglu(text), stock_swiglu(image)
    fill_table()
    poison()
    operands = swiglu_quant.swiglu_quant_pair(text, image, grouped_rows=grouped_rows)
    assert_operands(operands, rows, stock_quantize, grouped_rows=grouped_rows)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("attention_width", "width"), WIDTHS)
@pytest.mark.parametrize("strided", [False, True])
def test_one_stream(strided, attention_width, width, rows, contents) -> None:
    edges = edges_of(contents)
    check(swiglu_input(rows, attention_width, width, strided=strided, seed=rows, edges=edges, **CUDA))


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize(
    ("attention_width", "width"),
    [(0, 9216), (0, 12288), (3072, 9216), (4096, 12288), (0, 6272), (128, 12288), (6272, 12160), (12416, 128)],
)
def test_rows_of_other_widths(attention_width, width, contents) -> None:
    """FLUX.2-klein's, and such that leave a part of a warp, of a round or of a block without work."""
    check(swiglu_input(150, attention_width, width, strided=True, seed=width, edges=edges_of(contents), **CUDA))


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("grouped_rows", [0, 128])
@pytest.mark.parametrize(
    ("text", "image"), [(0, 0), (0, 1), (1, 0), (0, 5), (77, 3), (4, 127), (133, 263), (512, 4097)]
)
@pytest.mark.parametrize(("attention_width", "width"), [(0, 384), (128, 256), (0, 18432)])
def test_two_streams(attention_width, width, text, image, grouped_rows, contents) -> None:
    streams = [
        swiglu_input(
            count, attention_width, width, strided=bool(i), seed=10 * i + count, edges=edges_of(contents), **CUDA
        )
        for i, count in enumerate((text, image))
    ]
    check_pair(*streams, grouped_rows=grouped_rows)


# --- every bf16 ----------------------------------------------------------------------------------------------------


def neighbours_together(every: Tensor) -> Tensor:
    return every.view(-1, 128)


def all_magnitudes_together(every: Tensor) -> Tensor:
    return every.view(128, 512).t()


def each_alone(every: Tensor) -> Tensor:
    """The scale then shows the value, whatever its size."""
    return every.unsqueeze(1).expand(-1, 128)


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32, **CUDA).to(torch.int16).view(BF16)


@pytest.mark.parametrize("arrange", [neighbours_together, all_magnitudes_together, each_alone])
@pytest.mark.parametrize("factor", [1.0, -3.0, 1e-30, 1e-39, 3e38, 0.0, -0.0, torch.inf, torch.nan])
def test_every_bf16(arrange: Callable[[Tensor], Tensor], factor: float) -> None:
    """As x1 and as x2, beside an attention output of the same values."""
    every = arrange(every_bf16()).contiguous()
    other = torch.full_like(every, factor)
    check(SwigluInput(torch.cat([every, other], dim=-1), every))
    check(SwigluInput(torch.cat([other, every], dim=-1)))


@pytest.mark.parametrize("seed", range(4))
def test_products_of_random_bits(seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (2, 1 << 16), generator=generator, **CUDA).to(torch.int16)
    x1, x2 = (each_alone(values) for values in bits.view(BF16))
    check(SwigluInput(torch.cat([x1, x2], dim=-1)))


def test_silu_of_strided_rows_is_that_of_dense_ones() -> None:
    """PyTorch has a kernel for each; the table is filled by the dense one, FLUX.2 runs the strided one."""
    every = every_bf16().view(64, 1024)
    strided = torch.cat([every, every], dim=-1)[:, :1024]
    assert not strided.is_contiguous()
    assert_same_bytes(F.silu(strided), F.silu(every))


# --- launches ------------------------------------------------------------------------------------------------------


def test_a_captured_launch_replays_on_new_contents() -> None:
    """Capture runs on a stream of its own: the launch must go to PyTorch's current one."""
    stream, other = (swiglu_input(127, 128, 256, strided=True, seed=seed, **CUDA) for seed in (0, 1000))
    first, second = (swiglu_quant.swiglu_quant(one)[:2] for one in (stream, other))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = swiglu_quant.swiglu_quant(stream)[:2]
    graph.replay()
    assert_same_bytes(captured, first)
    for tensor, contents in zip(stream, other, strict=True):
        tensor.copy_(contents)
    graph.replay()
    assert_same_bytes(captured, second)


def test_misaligned_tensors_are_refused() -> None:
    stream = swiglu_input(6, 128, 256, strided=True, seed=0, **CUDA)
    for field, value in stream._asdict().items():
        room = torch.empty(value.shape[0], value.shape[1] + 8, dtype=BF16, **CUDA)
        off = room[:, 1 : value.shape[1] + 1].copy_(value)
        assert swiglu_quant.can_use(stream._replace(**{field: off})) == "a tensor is not 16-byte aligned", field
        odd = torch.empty(value.shape[0], value.shape[1] + 4, dtype=BF16, **CUDA)[:, : value.shape[1]].copy_(value)
        assert swiglu_quant.can_use(stream._replace(**{field: odd})) == "a tensor is not 16-byte aligned", field
