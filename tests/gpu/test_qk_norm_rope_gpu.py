"""qk_norm_rope on Hopper against FLUX.2's own norms (Triton) and rotation (FlashInfer): all bytes of a projection."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang_fastpath.kernels import qk_norm_rope
from sglang_fastpath.kernels.qk_norm_rope import QkInput
from stock_chains import (
    BF16,
    EPS,
    assert_same_bytes,
    edge_groups,
    edges_of,
    misaligned,
    qk_input,
    stock_projection,
    stock_qk,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

TOKENS = [0, 1, 3, 4, 5, 127, 4609]
HEADS = [1, 2, 24, 32, 48]
CUDA: dict[str, Any] = {"device": "cuda"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    from sglang.multimodal_gen.runtime.layers.rotary_embedding import utils

    assert utils.flashinfer_apply_rope_inplace is not None, "stock would fall back to other kernels"
    with torch.inference_mode():
        yield


def check(stream: QkInput, whole: Tensor) -> None:
    assert qk_norm_rope.can_use(stream) is None
    expected = stock_projection(stream, whole)
    qk_norm_rope.qk_norm_rope(stream, EPS)
    assert_same_bytes(whole, expected)


@pytest.mark.parametrize("contents", ["normal", "edges"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("batch", [1, 2])
def test_q_and_k_become_stocks_and_their_neighbours_stay(batch, tokens, heads, contents) -> None:
    check(*qk_input(batch, tokens, heads, seed=tokens + heads, edges=edges_of(contents), **CUDA))


@pytest.mark.parametrize("heads", [3, 6, 25, 49, 96])
def test_other_numbers_of_heads(heads: int) -> None:
    """Such that leave a part of a round without work, and more than one round can take."""
    check(*qk_input(1, 130, heads, seed=heads, edges=edge_groups(), **CUDA))


def test_q_and_k_of_their_own() -> None:
    """Not in one projection, and with angles in one table."""
    stream, _ = qk_input(2, 77, 4, seed=0, **CUDA)
    cosine, sine = torch.cat([stream.cosine, stream.sine], dim=-1).chunk(2, dim=-1)
    apart = QkInput(stream.q.contiguous(), stream.k.contiguous(), *stream[2:4], cosine, sine)
    assert qk_norm_rope.can_use(apart) is None
    stock = stock_qk(stream)
    qk_norm_rope.qk_norm_rope(apart, EPS)
    assert_same_bytes((apart.q, apart.k), stock)


# --- order and rounding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [10, 25, 40, 60, 100])  # of 48 heads: one of each block that stock chooses
def test_only_stocks_order_of_additions_gives_its_bytes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is one ulp off seldom shows in bf16, so that it takes many of them to tell the orders apart."""
    inputs = [qk_input(1, tokens, 48, seed=seed, **CUDA)[0] for seed in range(60)]
    stock = [stock_qk(stream) for stream in inputs]
    right = qk_norm_rope.stock_lane(48 * tokens)
    for lane in (1, 2, 4, 8):
        monkeypatch.setattr(qk_norm_rope, "stock_lane", lambda _, lane=lane: lane)
        differ = 0
        for stream, expected in zip(inputs, stock, strict=True):
            ours = stream._replace(q=stream.q.clone(), k=stream.k.clone())
            qk_norm_rope.qk_norm_rope(ours, EPS)
            differ += not all(map(torch.equal, (ours.q, ours.k), expected))
        assert (differ == 0) == (lane == right), (lane, right, differ)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [5, 25, 40, 127])
def test_heads_whose_normed_elements_are_subnormal(tokens: int, seed: int) -> None:
    """The rotation takes them for zero, the norm does not; their products and sums likewise."""
    from sglang.multimodal_gen.runtime.layers.layernorm import RMSNorm

    stream, whole = qk_input(1, tokens, 48, seed=seed, **CUDA)
    generator = torch.Generator("cuda").manual_seed(seed)
    exponents = torch.randint(-75, 1, whole.shape, generator=generator, **CUDA)
    exponents[..., ::64] = 60  # the squares of these are the sum, and the factor about 2^-60
    whole.copy_((whole.sign() * torch.exp2(exponents.float())).to(BF16))
    normed = RMSNorm(128, eps=EPS).to(device="cuda", dtype=BF16)(stream.q)
    smallest = torch.finfo(BF16).tiny
    assert ((normed.abs() < smallest) & (normed != 0)).any()
    assert ((normed.abs() > smallest) & (normed.abs() < 8 * smallest)).any()
    check(stream, whole)


@pytest.mark.parametrize("seed", range(4))
def test_random_bits(seed: int) -> None:
    stream, whole = qk_input(1, 127, 48, seed=seed, **CUDA)
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, whole.shape, generator=generator, **CUDA).to(torch.int16).view(BF16)
    small = bits.abs() < 1e15  # or nearly every sum would be infinite
    whole.copy_(torch.where(small | (torch.rand(whole.shape, generator=generator, **CUDA) < 1e-3), bits, whole))
    check(stream, whole)


# --- launches ------------------------------------------------------------------------------------------------------


def test_a_captured_launch_replays_on_new_contents() -> None:
    """Capture runs on a stream of its own: the launch must go to PyTorch's current one."""
    (stream, whole), (other, other_whole) = (qk_input(2, 127, 3, seed=seed, **CUDA) for seed in (0, 1000))
    first, second = stock_projection(stream, whole), stock_projection(other, other_whole)
    qk_norm_rope.qk_norm_rope(other._replace(q=other.q.clone(), k=other.k.clone()), EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qk_norm_rope.qk_norm_rope(stream, EPS)
    graph.replay()
    assert_same_bytes(whole, first)
    whole.copy_(other_whole)
    for tensor, contents in zip(stream[2:], other[2:], strict=True):
        tensor.copy_(contents)
    graph.replay()
    assert_same_bytes(whole, second)


@pytest.mark.parametrize("field", QkInput._fields)
def test_misaligned_tensors_are_refused(field: str) -> None:
    stream, _ = qk_input(2, 5, 3, seed=0, **CUDA)
    off = misaligned(getattr(stream, field))
    assert qk_norm_rope.can_use(stream._replace(**{field: off})) == "a tensor is not 16-byte aligned"


def test_rows_of_angles_that_are_misaligned_are_refused() -> None:
    stream, _ = qk_input(2, 5, 3, seed=0, **CUDA)
    room = torch.empty(5, 66, **CUDA)[:, :64]
    assert qk_norm_rope.can_use(stream._replace(cosine=room, sine=room)) == "a tensor is not 16-byte aligned"
