"""The language models' fused kernels on Hopper against the kernels of stock SGLang that they replace: every byte."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from llm_chains import (
    norm_weight,
    publish_arguments,
    qkv_input,
    stock_qkv,
    stock_rmsnorm,
    stock_silu,
    with_own_caches,
)
from sglang_fastpath.kernels import llm_kernels, qk_norm_rope_kv, rmsnorm_quant, silu_quant
from sglang_fastpath.kernels.qk_norm_rope_kv import HEAD, QkvInput
from stock_chains import BF16, EPS, assert_operand, assert_same_bytes, edges_of, poison, rows_of, stock_quantize
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

ROWS = [0, 1, 3, 4, 5, 127, 4097]
CUDA: dict[str, Any] = {"device": "cuda"}


@pytest.fixture(scope="module", autouse=True)
def arguments(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish_arguments(tmp_path_factory.mktemp("model"))
    llm_kernels.load()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


# --- rmsnorm_quant -------------------------------------------------------------------------------------------------


def check_rmsnorm(x: Tensor, weight: Tensor, residual: Tensor | None, *, out: str = "in place") -> None:
    total, y = stock_rmsnorm(x, weight, residual)
    before, x, residual = x, x.clone(), residual if residual is None else residual.clone()
    target = {"none": None, "new": torch.empty_like(x), "in place": x}[out]
    assert rmsnorm_quant.can_use(x, weight, residual, target) is None
    poison()
    operand = rmsnorm_quant.rmsnorm_quant(x, weight, EPS, residual=residual, out=target)
    assert_operand(operand, y, stock_quantize)
    assert_same_bytes(residual, total if len(x) else residual)
    assert_same_bytes(x, y if out == "in place" else before)
    if target is not None:
        assert_same_bytes(target, y)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("width", [256, 1024, 4096])
def test_rmsnorm_quant(width, with_residual, rows, contents) -> None:
    like = {"edges": edges_of(contents), **CUDA}
    x = rows_of(rows, width, seed=rows, **like)
    residual = rows_of(rows, width, seed=rows + 1, **like) if with_residual else None
    check_rmsnorm(x, norm_weight(width, seed=2, **CUDA), residual)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("out", ["none", "new"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("width", [512, 1536, 2048, 2560, 3072, 3584, 5120, 6144, 7168, 8192])
def test_rmsnorm_of_other_widths(width, with_residual, out, contents) -> None:
    """Chains of every length that models have, on 32, 64 and 128 threads of stock's."""
    like = {"edges": edges_of(contents), **CUDA}
    x = rows_of(151, width, seed=width, **like)
    residual = rows_of(151, width, seed=width + 1, **like) if with_residual else None
    check_rmsnorm(x, norm_weight(width, seed=2, **CUDA), residual, out=out)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-5, 1e5, 1e18, 1e30])
def test_rmsnorm_of_rows_of_any_magnitude(scale: float) -> None:
    """From a sum of squares that the eps hides to one that overflows."""
    x, residual = (scale * torch.randn(512, 4096, **CUDA) for _ in range(2))
    check_rmsnorm(x.to(BF16), norm_weight(4096, seed=0, **CUDA), residual.to(BF16))


def test_sums_that_cancel_are_not_rounded_before_the_norm() -> None:
    """x + residual is normed in fp32: a row whose sums are far below its parts shows a rounding in between."""
    x = rows_of(64, 4096, seed=0, **CUDA)
    residual = -x * (1 + 2**-7 * torch.randn_like(x))
    check_rmsnorm(x, norm_weight(4096, seed=1, **CUDA), residual)


# --- silu_quant ----------------------------------------------------------------------------------------------------


def check_silu(x: Tensor) -> None:
    assert silu_quant.can_use(x) is None
    y = stock_silu(x)
    poison()
    assert_operand(silu_quant.silu_quant(x), y, stock_quantize)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [128, 3072, 12288, 12416])
def test_silu_quant(width, rows, contents) -> None:
    parts = [rows_of(rows, width, seed=rows + i, edges=edges_of(contents), **CUDA) for i in range(2)]
    check_silu(torch.cat(parts, dim=-1))


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32, **CUDA).to(torch.int16).view(BF16)


def neighbours_together(every: Tensor) -> Tensor:
    return every.view(-1, 128)


def all_magnitudes_together(every: Tensor) -> Tensor:
    return every.view(128, 512).t()


def each_alone(every: Tensor) -> Tensor:
    """The scale then shows the value, whatever its size."""
    return every.unsqueeze(1).expand(-1, 128)


@pytest.mark.parametrize("arrange", [neighbours_together, all_magnitudes_together, each_alone])
@pytest.mark.parametrize("factor", [1.0, -3.0, 1e-30, 1e-39, 3e38, 0.0, -0.0, torch.inf, torch.nan])
def test_silu_of_every_bf16(arrange: Callable[[Tensor], Tensor], factor: float) -> None:
    """As x1 and as x2."""
    every = arrange(every_bf16()).contiguous()
    other = torch.full_like(every, factor)
    check_silu(torch.cat([every, other], dim=-1))
    check_silu(torch.cat([other, every], dim=-1))


@pytest.mark.parametrize("seed", range(4))
def test_products_of_random_bits(seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (2, 1 << 16), generator=generator, **CUDA).to(torch.int16)
    check_silu(torch.cat([each_alone(values) for values in bits.view(BF16)], dim=-1))


# --- qk_norm_rope_kv -----------------------------------------------------------------------------------------------


def check_qkv(inputs: QkvInput) -> None:
    assert qk_norm_rope_kv.can_use(inputs) is None
    expected = stock_qkv(inputs)
    ours, before = with_own_caches(inputs), inputs.qkv.clone()
    poison()
    q = qk_norm_rope_kv.qk_norm_rope_kv(ours, EPS)
    assert_same_bytes((q, ours.k_cache, ours.v_cache), expected)
    assert_same_bytes(inputs.qkv, before)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("variant", ["norm", "bias", "plain"])
def test_qk_norm_rope_kv(variant, cache, tokens, contents) -> None:
    like = {"norm": variant == "norm", "bias": variant == "bias", "cache": cache, "edges": edges_of(contents), **CUDA}
    check_qkv(qkv_input(tokens, 32, 8, seed=tokens, **like))


@pytest.mark.parametrize("tokens", [7, 1200])
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (5, 1), (16, 4), (28, 4), (40, 8), (64, 8), (64, 4)])
def test_other_heads_strides_and_indices(heads, strided, wide, cache, tokens) -> None:
    """Among them numbers of heads that leave half a warp, or a part of a round, without one."""
    check_qkv(qkv_input(tokens, *heads, strided=strided, wide=wide, cache=cache, seed=tokens, **CUDA))


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [8, 1000])
def test_padding_tokens_leave_the_cache_alone(tokens, cache) -> None:
    inputs = qkv_input(tokens, 4, 2, padding=3, cache=cache, seed=0, **CUDA)
    check_qkv(inputs)
    ours = with_own_caches(inputs)
    qk_norm_rope_kv.qk_norm_rope_kv(ours, EPS)
    assert_same_bytes((ours.k_cache[0], ours.v_cache[0]), (inputs.k_cache[0], inputs.v_cache[0]))


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("norm", [False, True])
def test_every_bf16(norm, cache) -> None:
    """In q, k and v alike: 512 tokens of one head of each."""
    head = every_bf16().view(-1, HEAD)
    inputs = qkv_input(len(head), 1, 1, norm=norm, cache=cache, seed=0, **CUDA)
    check_qkv(inputs._replace(qkv=torch.cat([head, head.flip(0), head.roll(1, 0)], dim=-1)))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-4, 1e4, 1e18, 1e30])
def test_heads_of_any_magnitude(scale: float) -> None:
    inputs = qkv_input(300, 8, 2, seed=0, **CUDA)
    check_qkv(inputs._replace(qkv=(scale * torch.randn_like(inputs.qkv, dtype=torch.float32)).to(BF16)))


# --- launches ------------------------------------------------------------------------------------------------------


def norm_launch(seed: int) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    x, residual = (rows_of(127, 1024, seed=seed + i, **CUDA) for i in range(2))
    weight = norm_weight(1024, seed=2, **CUDA)

    def launch() -> list[Tensor]:
        out, total = torch.empty_like(x), residual.clone()
        operand = rmsnorm_quant.rmsnorm_quant(x, weight, EPS, residual=total, out=out)
        return [operand.q, operand.scale, total, out]

    return [x, residual], launch


def silu_launch(seed: int) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    x = rows_of(127, 2048, seed=seed, **CUDA)
    return [x], lambda: list(silu_quant.silu_quant(x)[:2])


def qkv_launch(seed: int) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """Positions and slots change from replay to replay as well, and some tokens are padding."""
    inputs = qkv_input(127, 4, 2, padding=5, seed=seed, **CUDA)

    def launch() -> list[Tensor]:
        ours = with_own_caches(inputs)
        return [qk_norm_rope_kv.qk_norm_rope_kv(ours, EPS), ours.k_cache, ours.v_cache]

    return [inputs.qkv, inputs.positions, inputs.slots, inputs.k_cache, inputs.v_cache], launch


@pytest.mark.parametrize("prepare", [norm_launch, silu_launch, qkv_launch])
def test_a_captured_launch_replays_on_new_contents(prepare) -> None:
    """The copies in front of the kernel are what it must wait for: it may start before they have ended."""
    (tensors, launch), (others, launch_others) = prepare(0), prepare(1000)
    first, second = launch(), launch_others()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    graph.replay()
    assert_same_bytes(captured, first)
    for tensor, other in zip(tensors, others, strict=True):
        tensor.copy_(other)
    graph.replay()
    assert_same_bytes(captured, second)


def test_each_kernel_waits_for_the_one_before_it() -> None:
    """A chain of dependent launches, eager and in a graph, in which each kernel reads what the one before has just
    written: large enough that a kernel which did not wait would read old bytes."""
    rows, width = 4096, 4096
    x, residual, source = (rows_of(rows, width, seed=i, **CUDA) for i in range(3))
    weight = norm_weight(width, seed=3, **CUDA)

    def chain(total: Tensor) -> list[Tensor]:
        operands: list[Tensor] = []
        y = x.clone()
        for _ in range(6):
            operands += rmsnorm_quant.rmsnorm_quant(y, weight, EPS, residual=total, out=y)[:2]
            operands += silu_quant.silu_quant(y.view(rows, width))[:2]
            y += source
        return operands

    def stock(total: Tensor) -> list[Tensor]:
        operands: list[Tensor] = []
        y = x.clone()
        for _ in range(6):
            sums, y = stock_rmsnorm(y, weight, total)
            total.copy_(sums)
            operands += stock_quantize(y)
            operands += stock_quantize(stock_silu(y))
            y += source
        return operands

    expected = stock(residual.clone())
    for _ in range(5):
        assert_same_bytes(chain(residual.clone()), expected)
    own = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.copy_(residual)
        captured = chain(own)
    for _ in range(5):
        graph.replay()
        assert_same_bytes(captured, expected)


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, shape and strides, one element off the start of an allocation."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(extent + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def test_misaligned_tensors_are_refused() -> None:
    reason = "a tensor is not 16-byte aligned"
    norm = {name: rows_of(6, 512, seed=i, **CUDA) for i, name in enumerate(("x", "residual", "out"))}
    norm["weight"] = norm_weight(512, seed=3, **CUDA)
    assert rmsnorm_quant.can_use(**norm) is None
    for name, tensor in norm.items():
        assert rmsnorm_quant.can_use(**norm | {name: misaligned(tensor)}) == reason, name
    assert silu_quant.can_use(misaligned(norm["x"])) == reason
    for variant in ({"norm": True}, {"norm": False, "bias": True}):
        inputs = qkv_input(6, 4, 2, seed=0, **variant, **CUDA)
        assert qk_norm_rope_kv.can_use(inputs) is None
        for field in ("qkv", "cos_sin", "k_cache", "v_cache", *("bias" if inputs.bias is not None else "norm",)):
            value = getattr(inputs, field)
            off = tuple(map(misaligned, value)) if isinstance(value, tuple) else misaligned(value)
            assert qk_norm_rope_kv.can_use(inputs._replace(**{field: off})) == reason, field


def test_parameters_of_another_size_are_refused_and_the_next_launch_is_right() -> None:
    with pytest.raises(ValueError, match="5 bytes, expected 40"):
        llm_kernels.load().silu_quant(b"short", 0)
    check_silu(rows_of(5, 512, seed=0, **CUDA))
    torch.cuda.synchronize()
