"""qk_norm_rope without a GPU: the bytes of FLUX.2's own norms and rotation, what is left alone, stock's order of
additions, and its refusals.

That it compiles and how its parameters are laid out: test_fused_kernels.py.
"""

import ast
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_fastpath.kernels import qk_norm_rope, qkv_epilogue
from sglang_fastpath.kernels.qk_norm_rope import QkInput
from stock_chains import (
    EPS,
    assert_same_bytes,
    edge_groups,
    qk_input,
    qkv_input,
    rows_of,
    stock_projection,
    stock_qk,
    with_joint_table,
)
from torch import Tensor, nn

from sglang_fastpath.denoisers import start_runtime

BATCH = st.integers(1, 3)
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 5, 13])
SEED = st.integers(0, 2**16)
FINITE = edge_groups(finite=True)  # the bits of a NaN that a CPU computes depend on its vector unit

few_examples = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> None:
    start_runtime()


@given(batch=BATCH, tokens=TOKENS, heads=st.integers(1, 5), edges=st.booleans(), seed=SEED)
@few_examples
def test_q_and_k_become_stocks_and_their_neighbours_stay(batch, tokens, heads, edges, seed) -> None:
    stream, whole = qk_input(batch, tokens, heads, seed=seed, edges=FINITE if edges else None)
    assert qk_norm_rope.can_use(stream) is None
    expected = stock_projection(stream, whole)
    qk_norm_rope.qk_norm_rope(stream, EPS)
    assert_same_bytes(whole, expected)


@given(batch=BATCH, tokens=TOKENS, heads=st.integers(1, 3), seed=SEED)
@few_examples
def test_angles_may_be_halves_of_one_table(batch, tokens, heads, seed) -> None:
    stream, _ = qk_input(batch, tokens, heads, seed=seed)
    cosine, sine = torch.cat([stream.cosine, stream.sine], dim=-1).chunk(2, dim=-1)
    halves = stream._replace(cosine=cosine, sine=sine)
    assert qk_norm_rope.can_use(halves) is None
    stock = stock_qk(stream)
    qk_norm_rope.qk_norm_rope(halves, EPS)
    assert_same_bytes((halves.q, halves.k), stock)


def test_each_part_of_the_input_shows() -> None:
    """Equality with stock would mean little if q or k did not depend on a part, or on its place."""
    stream, _ = qk_input(1, 4, 2, seed=0)
    before = qk_norm_rope.reference(stream, EPS)
    for index, changes in (
        (0, {"q_weight": stream.q_weight.flip(0)}),
        (1, {"k_weight": stream.k_weight.flip(0)}),
        (0, {"cosine": stream.cosine.flip(0)}),
        (1, {"sine": stream.sine.flip(0)}),
        (0, {"q": stream.k}),
    ):
        after = qk_norm_rope.reference(stream._replace(**changes), EPS)
        assert not torch.equal(after[index], before[index]), changes.keys()
    assert not torch.equal(qk_norm_rope.reference(stream, 1.0)[0], before[0])


# --- what stock's blocks do ----------------------------------------------------------------------------------------


class Attended(Exception):
    """Stops a block at its attention, with what that is given."""


class Attention(nn.Module):
    def forward(self, *qkv: Tensor, **_: Any) -> None:
        raise Attended(*qkv)


class Projection(nn.Module):
    """A linear whose output is known."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out

    def forward(self, _: Tensor) -> tuple[Tensor, None]:
        return self.out, None


def attended(block: Any, *inputs: Tensor, **angles: Any) -> tuple[Tensor, ...]:
    block.attn = Attention()
    with pytest.raises(Attended) as stopped, torch.no_grad():
        block(*inputs, **angles)
    return stopped.value.args


def test_the_chain_is_that_of_a_single_block() -> None:
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2ParallelSelfAttention

    stream, whole = qk_input(2, 5, 2, seed=0)
    projected = torch.cat([whole[..., : 3 * 256], rows_of(10, 2 * 256, seed=9).view(2, 5, 512)], dim=-1)
    block = Flux2ParallelSelfAttention(
        query_dim=256, num_heads=2, dim_head=128, out_dim=256, bias=False, out_bias=False, eps=EPS, mlp_ratio=1.0
    )
    block.to_qkv_mlp_proj = Projection(projected)
    for norm, weight in zip((block.norm_q, block.norm_k), stream[2:4], strict=True):
        norm.weight = nn.Parameter(weight, requires_grad=False)
    angles = stream.cosine[:5].contiguous(), stream.sine[:5].contiguous()
    q, k, v = attended(block, projected, freqs_cis=angles)
    assert_same_bytes((q, k), stock_qk(stream))
    assert_same_bytes(v, whole[..., 512:768].unflatten(-1, (2, 128)))
    qk_norm_rope.qk_norm_rope(stream, EPS)
    assert_same_bytes((stream.q, stream.k), (q, k))


@pytest.mark.parametrize(("text_tokens", "image_tokens"), [(3, 5), (1, 4)])
def test_qkv_epilogue_is_what_a_double_block_does(text_tokens: int, image_tokens: int) -> None:
    """qkv_epilogue, because FLUX.2 differs from Qwen-Image in its table alone."""
    from sglang.multimodal_gen.runtime.models.dits.flux_2 import Flux2Attention

    text, image = with_joint_table(
        *(qkv_input(2, n, 2, merged=True, bias=False, seed=n) for n in (text_tokens, image_tokens))
    )
    block = Flux2Attention(
        query_dim=256, num_heads=2, dim_head=128, out_dim=256, added_kv_proj_dim=256, added_proj_bias=False, eps=EPS
    )
    for name, out in zip(("to_q", "to_k", "to_v"), image.projected, strict=True):
        setattr(block, name, Projection(out.contiguous()))
    for name, out in zip(("add_q_proj", "add_k_proj", "add_v_proj"), text.projected, strict=True):
        setattr(block, name, Projection(out.contiguous()))
    norms = block.norm_added_q, block.norm_added_k, block.norm_q, block.norm_k
    for norm, weight in zip(norms, (*text.norm, *image.norm), strict=True):
        norm.weight = nn.Parameter(weight, requires_grad=False)
    tokens = text_tokens + image_tokens
    angles = text.cosine[:tokens].contiguous(), text.sine[:tokens].contiguous()
    joint = attended(block, image.projected[0], text.projected[0], freqs_cis=angles)
    assert_same_bytes(qkv_epilogue.qkv_epilogue(text, image, EPS), joint)


# --- stock's norm, compiled for Hopper -----------------------------------------------------------------------------


def block_of_stock(heads: int) -> int:
    """How many heads stock's own launcher gives a block, of so many in all: a machine without a GPU cannot run it."""
    import triton
    from sglang.kernels.ops.diffusion.triton import rmsnorm_onepass

    functions = {
        node.name: node for node in ast.parse(inspect.getsource(rmsnorm_onepass)).body if hasattr(node, "name")
    }
    nodes = [node for line in functions["_triton_one_pass_rms_norm_cuda"].body for node in ast.walk(line)]
    (options,) = ({option.arg for option in node.keywords} for node in nodes if getattr(node, "keywords", None))
    assert options == {"BLOCK_SIZE_SEQ", "BLOCK_SIZE_DIM"}, "warps and the like would change the layout"
    (block,) = (
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "block_size_seq"
    )
    result: int = eval(ast.unparse(block), {"triton": triton, "S": heads})
    return result


@functools.cache
def compiled_norm(block: int) -> dict[str, str]:
    """Stock's norm for Hopper, at any number of heads that fill such blocks."""
    import triton
    from sglang.kernels.ops.diffusion.triton.rmsnorm_onepass import _rms_norm_tiled_onepass
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = ("y_ptr", "x_ptr", "w_ptr")
    constants = {"SEQ": 512 * block, "DIM": 128, "EPS": EPS, "BLOCK_SIZE_SEQ": block, "BLOCK_SIZE_DIM": 128}
    source = ASTSource(
        _rms_norm_tiled_onepass,
        signature={name: "*bf16" for name in pointers} | {name: "constexpr" for name in constants},
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(pointers))},
    )
    asm: dict[str, str] = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
    return asm


@pytest.mark.parametrize(
    "heads", [1, 511, 512, 1023, 1024, 1535, 1536, 2047, 2048, 2559, 2560, 4607, 4608, 4609, 48 * 4608]
)
def test_a_lane_of_stocks_norm_has_as_many_elements_as_we_think(heads: int) -> None:
    layout = re.search(
        r"sizePerThread = \[1, (\d+)\], threadsPerWarp = \[\d+, (\d+)\], warpsPerCTA = \[\d+, (\d+)\]",
        compiled_norm(block_of_stock(heads))["ttgir"],
    )
    assert layout
    elements, lanes, warps = map(int, layout.groups())
    assert elements == qk_norm_rope.stock_lane(heads)
    assert elements * lanes * warps == 128


@pytest.mark.parametrize(
    ("block", "lanes"),
    [
        (1, [16, 8, 4, 2, 1, 2, 1]),
        (2, [16, 8, 4, 2, 1, 1]),
        (4, [16, 8, 4, 2, 1]),
        (8, [8, 4, 2, 1]),
        (16, [8, 4, 2, 1] * 2),
    ],
)
def test_stocks_norm_adds_in_the_order_that_the_kernel_repeats(block: int, lanes: list[int]) -> None:
    ptx = compiled_norm(block)["ptx"]
    assert list(map(int, re.findall(r"shfl\.sync\.bfly\.b32\s+\S+ \S+ (\d+),", ptx))) == lanes
    # Each lane's own squares, one after another; the only other sums are those of the lanes, and eps.
    own = min(block, 8)
    heads = max(1, block // 8)
    assert ptx.count("fma.rn.f32") == (heads * (own - 1) or 1)
    assert ptx.count("add.f32") == len(lanes) + heads - (own == 1)
    assert len(re.findall(r"rsqrt\.approx\.ftz\.f32", ptx)) == heads
    assert len(re.findall(r"\bmul\.f32", ptx)) == heads * (1 + 2 * own)
    assert "sqrt.rn" not in ptx and "mul.ftz" not in ptx


# --- refusals ------------------------------------------------------------------------------------------------------


def gaps_between_elements(tensor: Tensor) -> Tensor:
    """The same shape and values, with a last dimension that is not dense."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def both(change: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Any], Any]]:
    return {"q": change, "k": change}


REFUSALS: list[tuple[dict[str, Callable[[Any], Any]], str]] = [
    ({"q": Tensor.half}, "activations and norm weights are not all bfloat16"),
    ({"k": Tensor.float}, "activations and norm weights are not all bfloat16"),
    ({"q_weight": Tensor.float}, "activations and norm weights are not all bfloat16"),
    (both(lambda x: x.flatten(0, 1)), "heads are not 128 wide"),
    (both(lambda x: x[..., :64]), "heads are not 128 wide"),
    ({"k_weight": lambda weight: weight[:64]}, "heads are not 128 wide"),
    ({"k": lambda k: k[:, :2]}, "q and k are not laid out alike"),
    ({"k": Tensor.contiguous}, "q and k are not laid out alike"),
    (both(gaps_between_elements), "heads are not side by side"),
    (both(lambda x: x[:, :, ::2].repeat(1, 1, 2, 1)[:, :, ::2]), "heads are not side by side"),
    (both(lambda x: x.transpose(1, 2)), "heads are not side by side"),
    (both(lambda x: x[:, :2]), "batch elements are not one row stride apart"),
    (both(lambda x: x[:1, :1].expand(1, 3, 4, 128)), "rows overlap"),
    (both(lambda x: x[:1].as_strided((1, 3, 4, 128), (0, 384, 128, 1))), "rows overlap"),
    ({"k": lambda _: None}, "q and k overlap"),
    ({"cosine": Tensor.bfloat16}, "the cosines are (6, 64) torch.bfloat16"),
    ({"sine": lambda table: table[:2]}, "the sines (2, 64) do not cover 3 tokens"),
    ({"sine": gaps_between_elements}, "cosines and sines are not laid out alike, in dense rows"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
def test_each_refusal_can_be_reached_and_says_why(changes, reason) -> None:
    stream, _ = qk_input(2, 3, 4, seed=0)
    assert qk_norm_rope.can_use(stream) is None
    changed = stream._replace(**{name: change(getattr(stream, name)) for name, change in changes.items()})
    if changed.k is None:
        changed = changed._replace(k=changed.q)
    assert qk_norm_rope.can_use(changed) == reason


def test_q_and_k_that_share_a_head_overlap() -> None:
    stream, whole = qk_input(2, 3, 4, seed=0)
    off = whole[..., 3 * 128 : 7 * 128].unflatten(-1, (4, 128))
    assert qk_norm_rope.can_use(QkInput(stream.q, off, *stream[2:])) == "q and k overlap"
