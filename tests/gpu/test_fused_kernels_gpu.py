"""The fused kernels on Hopper against the kernels of stock SGLang that they replace: every byte."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang_fastpath.kernels import act_quant, fused_kernels, gated_residual, norm_quant, qkv_epilogue
from sglang_fastpath.kernels.act_quant import ActInput
from sglang_fastpath.kernels.gated_residual import GatedInput
from stock_chains import (
    BF16,
    EPS,
    act_input,
    assert_operands,
    assert_same_bytes,
    edges_of,
    gated_input,
    misaligned,
    norm_input,
    poison,
    qkv_input,
    stock_activation,
    stock_gated_residual,
    stock_norm,
    stock_qkv,
    stock_quantize,
    with_joint_table,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

SHAPES = [  # (batch, text tokens, image tokens)
    (1, 0, 0),
    (1, 0, 1),
    (1, 1, 0),
    (2, 0, 5),
    (1, 77, 3),
    (2, 1, 4),
    (2, 77, 127),
    (1, 256, 127),
    (1, 256, 4097),
]
NORM_VARIANTS = ["plain", "gated", "gated, bias", "zero added", "zero added, bias"]
ACTIVATIONS = ["none", "gelu", "gelu, bias"]
CUDA: dict[str, Any] = {"device": "cuda"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def check_norm_quant(
    batch: int,
    tokens: tuple[int, int],
    width: int,
    variant: str,
    *,
    contents: str = "normal",
    grouped_rows: int = 0,
    seed: int = 0,
) -> None:
    like = {"gated": variant != "plain", "bias": "bias" in variant, "edges": edges_of(contents), **CUDA}
    zero_added = "zero added" in variant
    text, image = (norm_input(batch, count, width, seed=seed + 10 * i, **like) for i, count in enumerate(tokens))
    assert norm_quant.can_use(text) is norm_quant.can_use(image) is None
    sums, modulated = zip(*(stock_norm(stream, zero_added=zero_added) for stream in (text, image)), strict=True)
    poison()
    out = norm_quant.norm_quant(
        text, image, EPS, zero_added=zero_added, keep_modulated=True, grouped_rows=grouped_rows
    )
    assert_same_bytes(out.residual_out, sums)
    assert_same_bytes(out.modulated, modulated)
    assert_operands(out.operands, modulated, stock_quantize, grouped_rows=grouped_rows)


@pytest.mark.parametrize("grouped_rows", [0, 128])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("width", [256, 3072])
@pytest.mark.parametrize("variant", NORM_VARIANTS)
def test_norm_quant(variant, width, batch, text, image, grouped_rows) -> None:
    check_norm_quant(batch, (text, image), width, variant, grouped_rows=grouped_rows)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [256, 3072])
@pytest.mark.parametrize("variant", NORM_VARIANTS)
def test_norm_quant_of_zeros_subnormals_infinities_and_nan(variant, width, seed) -> None:
    check_norm_quant(2, (77, 127), width, variant, contents="edges", seed=seed)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("width", [512, 768, norm_quant.WIDEST - 256, norm_quant.WIDEST])
@pytest.mark.parametrize("variant", ["plain", "zero added, bias"])
def test_norm_quant_of_rows_of_other_widths(variant, width, contents) -> None:
    """Among them widths that leave a part of a warp or of a block without work."""
    check_norm_quant(1, (33, 50), width, variant, contents=contents)


def test_modulated_rows_are_kept_only_if_asked_for() -> None:
    stream = norm_input(1, 5, 256, gated=False, bias=False, seed=0, **CUDA)
    kept = norm_quant.norm_quant(stream, stream, EPS, keep_modulated=True)
    poison()
    out = norm_quant.norm_quant(stream, stream, EPS)
    assert out.modulated == out.residual_out == (None, None)
    assert_same_bytes(tensors_of(out.operands), tensors_of(kept.operands))


def test_the_inputs_tell_the_two_gated_forms_apart() -> None:
    stream = norm_input(1, 4, 256, gated=True, bias=False, seed=0, **CUDA)
    sums = [norm_quant.norm_quant(stream, stream, EPS, zero_added=added).residual_out[0] for added in (False, True)]
    assert torch.equal(*sums)
    assert not torch.equal(*(total.signbit() for total in sums))


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("width", [256, 3072])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rounds_product", [False, True])
def test_gated_residual(rounds_product, bias, width, batch, text, image, contents) -> None:
    like = {"bias": bias, "edges": edges_of(contents), **CUDA}
    streams = [gated_input(batch, count, width, seed=10 * i, **like) for i, count in enumerate((text, image))]
    assert [gated_residual.can_use(stream) for stream in streams] == [None, None]
    stock = tuple(stock_gated_residual(stream, batch, rounds_product=rounds_product) for stream in streams)
    poison()
    assert_same_bytes(gated_residual.gated_residual(*streams, rounds_product=rounds_product), stock)


@pytest.mark.parametrize("width", [8, 264, 3072])
@pytest.mark.parametrize("rounds_product", [False, True])
def test_gated_residual_with_a_gate_of_each_row(rounds_product, width) -> None:
    text, image = (gated_input(2, n, width, bias=True, gate_of_each_row=True, seed=n, **CUDA) for n in (5, 127))
    assert gated_residual.can_use(text) is gated_residual.can_use(image) is None
    stock = tuple(stock_gated_residual(stream, 2, rounds_product=rounds_product) for stream in (text, image))
    poison()
    assert_same_bytes(gated_residual.gated_residual(text, image, rounds_product=rounds_product), stock)


@pytest.mark.parametrize("rounds_product", [False, True])
def test_gated_residual_of_random_bits(rounds_product) -> None:
    """Every magnitude with every other: products and sums that overflow, are subnormal or lie halfway."""
    generator = torch.Generator("cuda").manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (3, 1024, 4096), generator=generator, **CUDA).to(torch.int16)
    stream = GatedInput(*bits.view(BF16))
    stock = stock_gated_residual(stream, 1, rounds_product=rounds_product)
    poison()
    absent = GatedInput(*(tensor[:0] for tensor in stream[:3]))
    _, out = gated_residual.gated_residual(absent, stream, rounds_product=rounds_product)
    assert_same_bytes(out, stock)


def test_the_inputs_tell_the_two_forms_of_a_gated_residual_apart() -> None:
    """By more than the sign of a zero: where the product is rounded, other values come out."""
    stream = gated_input(1, 4, 256, bias=False, seed=0, **CUDA)
    once, twice = (
        gated_residual.gated_residual(stream, stream, rounds_product=rounds)[0] for rounds in (False, True)
    )
    assert not torch.equal(once, twice)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("heads", [2, 24])
@pytest.mark.parametrize("bias", [False, True])
def test_qkv_epilogue(bias, heads, batch, text, image, contents) -> None:
    """Of the columns of merged GEMM outputs, and of separate ones."""
    from sglang.multimodal_gen.runtime.layers.layernorm import can_use_fused_inplace_qknorm_rope

    assert can_use_fused_inplace_qknorm_rope(128, 128, False, BF16), "stock would fall back to other kernels"
    like = {"bias": bias, "edges": edges_of(contents), **CUDA}
    for merged in (True, False):
        streams = [
            qkv_input(batch, count, heads, merged=merged, seed=10 * i, **like)
            for i, count in enumerate((text, image))
        ]
        assert [qkv_epilogue.can_use(stream) for stream in streams] == [None, None]
        stock = stock_qkv(*streams)
        poison()
        joint = qkv_epilogue.qkv_epilogue(*streams, EPS)
        assert all(part.is_contiguous() for part in joint)
        assert_same_bytes(joint, stock)


def test_qkv_epilogue_of_one_merged_and_one_separate_stream() -> None:
    text = qkv_input(2, 77, 2, merged=False, bias=True, seed=0, **CUDA)
    image = qkv_input(2, 127, 2, merged=True, bias=True, seed=1, **CUDA)
    assert_same_bytes(qkv_epilogue.qkv_epilogue(text, image, EPS), stock_qkv(text, image))


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("heads", [1, 24, 32, 48])
def test_qkv_epilogue_of_a_double_block(heads, batch, text, image, contents) -> None:
    """FLUX.2's: no biases, and one table, in which the image's positions follow the text's."""
    like = {"merged": True, "bias": False, "edges": edges_of(contents), **CUDA}
    streams = with_joint_table(
        *(qkv_input(batch, n, heads, seed=10 * i, **like) for i, n in enumerate((text, image)))
    )
    assert [qkv_epilogue.can_use(stream) for stream in streams] == [None, None]
    stock = stock_qkv(*streams, joint_table=True)
    poison()
    assert_same_bytes(qkv_epilogue.qkv_epilogue(*streams, EPS), stock)


def check_act_quant(text: ActInput, image: ActInput, *, gelu: bool, grouped_rows: int = 0) -> None:
    assert act_quant.can_use(text) is act_quant.can_use(image) is None
    rows = stock_activation(text, gelu=gelu), stock_activation(image, gelu=gelu)
    act_quant.act_quant(text, image, gelu=gelu)  # the first call fills the GELU table, which must not be poisoned
    poison()
    operands = act_quant.act_quant(text, image, gelu=gelu, grouped_rows=grouped_rows)
    assert_operands(operands, rows, stock_quantize, grouped_rows=grouped_rows)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("grouped_rows", [0, 128])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("width", [384, 12288])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_quant(activation, width, batch, text, image, grouped_rows, contents) -> None:
    like = {"bias": "bias" in activation, "edges": edges_of(contents), **CUDA}
    streams = [act_input(batch, count, width, seed=10 * i, **like) for i, count in enumerate((text, image))]
    check_act_quant(*streams, gelu=activation != "none", grouped_rows=grouped_rows)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("width", [128, 1408, 4096, 4224, 12416])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_quant_of_rows_of_other_widths(activation, width, contents) -> None:
    """Among them widths that leave a part of a warp or of a block without work."""
    like = {"bias": "bias" in activation, "edges": edges_of(contents), **CUDA}
    text, image = (act_input(1, count, width, seed=count, **like) for count in (33, 50))
    check_act_quant(text, image, gelu=activation != "none")


@pytest.mark.parametrize("grouped_rows", [0, 128])
@pytest.mark.parametrize(("batch", "text", "image"), SHAPES)
@pytest.mark.parametrize("width", [256, 3072])
def test_act_quant_reads_the_joint_attention_output(width, batch, text, image, grouped_rows) -> None:
    joint = act_input(batch, text + image, width, bias=False, seed=0, **CUDA).x
    check_act_quant(ActInput(joint[:, :text]), ActInput(joint[:, text:]), gelu=False, grouped_rows=grouped_rows)


def neighbours_together(every: Tensor) -> Tensor:
    return every.view(-1, 128)


def sixteen_binades_together(every: Tensor) -> Tensor:
    return every.view(32, 128, 16).transpose(1, 2).reshape(-1, 128)


def all_magnitudes_together(every: Tensor) -> Tensor:
    return every.view(128, 512).t()


def each_alone(every: Tensor) -> Tensor:
    """The scale then shows the value, whatever its size."""
    return every.unsqueeze(1).expand(-1, 128)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(
    "arrange", [neighbours_together, sixteen_binades_together, all_magnitudes_together, each_alone]
)
def test_act_quant_of_every_bf16(arrange: Callable[[Tensor], Tensor], gelu: bool) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, **CUDA).to(torch.int16).view(BF16)
    rows = arrange(every).contiguous().unsqueeze(0)
    check_act_quant(ActInput(rows[:, :100]), ActInput(rows[:, 100:]), gelu=gelu)


# --- launches ------------------------------------------------------------------------------------------------------


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among a kernel's inputs or outputs."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_of(part)]
    return [value] if isinstance(value, Tensor) else []


def norm_streams(seed: int) -> tuple[Any, Any]:
    text, image = (norm_input(2, n, 256, gated=True, bias=True, seed=seed + n, **CUDA) for n in (5, 127))
    return text, image


def gated_streams(seed: int) -> tuple[Any, Any]:
    text, image = (gated_input(2, n, 256, bias=True, seed=seed + n, **CUDA) for n in (5, 127))
    return text, image


def qkv_streams(seed: int) -> tuple[Any, Any]:
    text, image = (qkv_input(2, n, 2, merged=True, bias=True, seed=seed + n, **CUDA) for n in (5, 127))
    return text, image


def act_streams(seed: int) -> tuple[Any, Any]:
    text, image = (act_input(2, n, 256, bias=True, seed=seed + n, **CUDA) for n in (5, 127))
    return text, image


LAUNCHERS: dict[str, tuple[Callable[[int], tuple[Any, Any]], Callable[..., Any]]] = {
    "norm_quant": (norm_streams, lambda *streams: norm_quant.norm_quant(*streams, EPS, keep_modulated=True)),
    "gated_residual": (gated_streams, gated_residual.gated_residual),
    "qkv_epilogue": (qkv_streams, lambda *streams: qkv_epilogue.qkv_epilogue(*streams, EPS)),
    "act_quant": (act_streams, lambda *streams: act_quant.act_quant(*streams, gelu=True)),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_captured_launch_replays_on_new_contents(name: str) -> None:
    """Capture runs on a stream of its own: the launch must go to PyTorch's current one."""
    streams_of, launch = LAUNCHERS[name]
    streams, others = streams_of(0), streams_of(1000)
    first, second = tensors_of(launch(*streams)), tensors_of(launch(*others))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors_of(launch(*streams))
    graph.replay()
    assert_same_bytes(captured, first)
    for tensor, other in zip(tensors_of(streams), tensors_of(others), strict=True):
        tensor.copy_(other)
    graph.replay()
    assert_same_bytes(captured, second)


def test_a_failed_launch_leaves_the_next_one_right() -> None:
    too_wide = norm_input(1, 3, 8 * norm_quant.WIDEST, gated=False, bias=False, seed=0, **CUDA)
    assert norm_quant.can_use(too_wide) is not None
    with pytest.raises(RuntimeError, match="norm_quant: "):  # more threads than a block can have
        norm_quant.norm_quant(too_wide, too_wide, EPS)
    check_norm_quant(1, (3, 5), 256, "plain")
    with pytest.raises(ValueError, match="5 bytes, expected 128"):
        fused_kernels.load().act_quant(b"short", False, False, 1, 0)
    streams = act_streams(0)
    check_act_quant(*streams, gelu=True)
    torch.cuda.synchronize()


CAN_USE = {
    "norm_quant": norm_quant.can_use,
    "gated_residual": gated_residual.can_use,
    "qkv_epilogue": qkv_epilogue.can_use,
    "act_quant": act_quant.can_use,
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_misaligned_tensors_are_refused(name: str) -> None:
    stream, _ = LAUNCHERS[name][0](0)
    assert CAN_USE[name](stream) is None
    for field, value in stream._asdict().items():
        off = tuple(map(misaligned, value)) if isinstance(value, tuple) else misaligned(value)
        assert CAN_USE[name](stream._replace(**{field: off})) == "a tensor is not 16-byte aligned", field
