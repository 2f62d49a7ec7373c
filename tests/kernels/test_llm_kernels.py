"""The language models' fused kernels without a GPU: they compile for every architecture, state the instructions that
stock's kernels were compiled to, their parameters are laid out as Python packs them, and the launchers give on a CPU
the bytes of SGLang's own modules."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_build import (
    ARCHITECTURES,
    Compiled,
    check_layouts,
    compile_for_all,
    hopper_ptx,
    load_in_a_new_process,
    name_of,
)
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
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.qk_norm_rope_kv import QkvInput
from stock_chains import EPS, assert_operand, assert_same_bytes, edge_groups, rows_of
from torch import Tensor

VARIANTS = {"rmsnorm_quant": 6, "silu_quant": 1, "qk_norm_rope_kv": 6}
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 5, 13])
SEED = st.integers(0, 2**16)
FINITE = edge_groups(finite=True)  # the bits of a NaN that a CPU computes depend on its vector unit

few_examples = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def arguments(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish_arguments(tmp_path_factory.mktemp("model"))


# --- compiling -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_for_all(nvcc, "llm_kernels", tmp_path_factory.mktemp("fatbin"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles_and_stays_in_registers(compiled: list[Compiled], architecture: str) -> None:
    ours = [entry for entry in compiled if entry.architecture == architecture]
    assert Counter(entry.kernel for entry in ours) == VARIANTS
    assert [entry for entry in ours if entry.stack_bytes or entry.spilled_bytes] == []


@pytest.fixture(scope="module")
def ptx(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hopper_ptx(nvcc, "llm_kernels", tmp_path_factory.mktemp("ptx"))


def test_the_compiler_is_free_to_contract_nothing(ptx: dict[str, str]) -> None:
    """Every sum and product names its rounding (`.rn`), which forbids ptxas to fuse it."""
    assert Counter(map(name_of, ptx)) == VARIANTS
    for symbol, body in ptx.items():
        arithmetic = re.findall(r"\b((?:add|sub|mul|mad|fma)\.[\w.]*(?:f32|f64|bf16x2|bf16|f16x2|f16))\b", body)
        assert arithmetic, symbol
        assert {op for op in arithmetic if ".rn." not in op} == set(), symbol


def test_the_approximate_operations_are_stocks(ptx: dict[str, str]) -> None:
    quantizer = {"rcp.approx.ftz.f32"}
    expected = {
        "rmsnorm_quant": quantizer | {"rsqrt.approx.ftz.f32", "div.rn.f32"},
        "silu_quant": quantizer | {"ex2.approx.ftz.f32", "div.approx.ftz.f32", "mul.rn.ftz.f32", "add.rn.ftz.f32"},
        "qk_norm_rope_kv": {"rsqrt.approx.f32"},
    }
    for symbol, body in ptx.items():
        found = set(re.findall(r"\b(?:\w+\.[\w.]*(?:approx|ftz|full)[\w.]*|div\.\w+\.f32)\b", body))
        assert found == expected[name_of(symbol)] - ({"rsqrt.approx.f32"} if "ILb0E" in symbol else set()), symbol


def test_a_kernel_touches_nothing_before_it_has_waited(ptx: dict[str, str]) -> None:
    """It may start while the kernel in front of it runs; afterwards it lets the next one start, once."""
    for symbol, body in ptx.items():
        wait = body.index("griddepcontrol.wait")
        assert wait < min(match.start() for match in re.finditer(r"\b(?:ld|st|atom|red)\.global", body)), symbol
        assert body.count("griddepcontrol.wait") == body.count("griddepcontrol.launch_dependents") == 1, symbol
        assert wait < body.index("griddepcontrol.launch_dependents"), symbol


def test_activations_are_not_read_as_constants(ptx: dict[str, str]) -> None:
    """`ld.global.nc` may return what lay there before the kernel in front wrote it: only for weights and tables."""
    constants = {"rmsnorm_quant": 1, "silu_quant": 0, "qk_norm_rope_kv": 2}  # the weight; cosines and sines
    for symbol, body in ptx.items():
        assert body.count("ld.global.nc") == constants[name_of(symbol)], symbol


LAYOUTS = {
    "RmsNormParams": (
        llm_kernels.RMS_NORM,
        "x weight residual normed out.q out.scale out.scale_stride out.padded_rows rows eps",
    ),
    "SiluParams": (llm_kernels.SILU, "x out.q out.scale out.scale_stride out.padded_rows rows width"),
    "RopeParams": (
        llm_kernels.ROPE,
        "qkv bias weight[0] weight[1] cos_sin positions slots q cache[0] cache[1] slot_stride slot_limit row_stride "
        "rows q_heads kv_heads wide_positions wide_slots eps",
    ),
}


def test_structs_are_laid_out_as_python_packs_them(nvcc: str, tmp_path: Path) -> None:
    check_layouts(nvcc, llm_kernels._SOURCES, LAYOUTS, tmp_path)


PARAMETERS = {
    "rmsnorm_quant": llm_kernels.RMS_NORM,
    "silu_quant": llm_kernels.SILU,
    "qk_norm_rope_kv": llm_kernels.ROPE,
}
ARGUMENTS = {"rmsnorm_quant": (4096, 64, 0), "silu_quant": (0,), "qk_norm_rope_kv": (False, 132, 0)}


def test_the_module_is_built_and_refuses_parameters_of_another_size(nvcc: str, tmp_path: Path) -> None:
    """`load` itself compares the sizes of the structs."""
    said = load_in_a_new_process("llm_kernels", ARGUMENTS, Path(nvcc).parent.parent, tmp_path)
    assert said["failure"] is None
    assert said["environment kept"]
    for name, layout in PARAMETERS.items():
        assert said["refusals"][name].endswith(f"kernel parameters of 5 bytes, expected {layout.size}")
    assert len(list(tmp_path.glob("*_sm90/llm_kernels.so"))) == 1


# --- the launchers on a CPU ----------------------------------------------------------------------------------------


@given(
    rows=TOKENS,
    width=st.sampled_from([256, 768, 1024, 3584]),
    with_residual=st.booleans(),
    out=st.sampled_from(["none", "new", "in place"]),
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_rmsnorm_quant(rows, width, with_residual, out, edges, seed) -> None:
    like = {"edges": FINITE if edges else None}
    x = rows_of(rows, width, seed=seed, **like)
    residual = rows_of(rows, width, seed=seed + 1, **like) if with_residual else None
    weight = norm_weight(width, seed=seed + 2)
    total, y = stock_rmsnorm(x, weight, residual)
    before = x.clone()
    target = {"none": None, "new": torch.empty_like(x), "in place": x}[out]
    assert rmsnorm_quant.can_use(x, weight, residual, target) is None
    operand = rmsnorm_quant.rmsnorm_quant(x, weight, EPS, residual=residual, out=target)
    assert_operand(operand, y, quantize_per_token_group)
    assert_same_bytes(residual, total)
    if target is not None:
        assert_same_bytes(target, y)
    if out != "in place":
        assert_same_bytes(x, before)


@given(rows=TOKENS, width=st.sampled_from([128, 384]), edges=st.booleans(), seed=SEED)
@few_examples
def test_silu_quant(rows, width, edges, seed) -> None:
    x = torch.cat([rows_of(rows, width, seed=seed + i, edges=FINITE if edges else None) for i in range(2)], dim=-1)
    assert silu_quant.can_use(x) is None
    assert_operand(silu_quant.silu_quant(x), stock_silu(x), quantize_per_token_group)


@given(
    tokens=TOKENS,
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    variant=st.sampled_from(["norm", "bias", "plain"]),
    cache=st.sampled_from(["bf16", "fp8"]),
    strided=st.booleans(),
    wide=st.booleans(),
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_qk_norm_rope_kv(tokens, heads, variant, cache, strided, wide, edges, seed) -> None:
    like = {"norm": variant == "norm", "bias": variant == "bias", "cache": cache, "edges": FINITE if edges else None}
    inputs = qkv_input(tokens, *heads, strided=strided, wide=wide, seed=seed, **like)
    assert qk_norm_rope_kv.can_use(inputs) is None
    expected = stock_qkv(inputs)
    ours = with_own_caches(inputs)
    q = qk_norm_rope_kv.qk_norm_rope_kv(ours, EPS)
    assert_same_bytes((q, ours.k_cache, ours.v_cache), expected)


def test_each_part_of_the_projection_shows_in_its_output_alone() -> None:
    """Equality with stock would mean little if q, k and v could take each other's place."""
    inputs = qkv_input(4, 2, 1, seed=0)

    def outputs(of: QkvInput) -> tuple[Tensor, Tensor, Tensor]:
        of = with_own_caches(of)
        return qk_norm_rope_kv.qk_norm_rope_kv(of, EPS), of.k_cache, of.v_cache

    before = outputs(inputs)
    for part, columns in enumerate((slice(0, 256), slice(256, 384), slice(384, 512))):
        changed = inputs.qkv.clone()
        changed[:, columns] = changed[:, columns].flip(1)
        after = outputs(inputs._replace(qkv=changed))
        assert [not torch.equal(*pair) for pair in zip(after, before, strict=True)] == [i == part for i in range(3)]


# --- refusals ------------------------------------------------------------------------------------------------------


def gaps_between_elements(tensor: Tensor) -> Tensor:
    """The same shape and values, with a last dimension that is not dense."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def gaps_between_rows(tensor: Tensor) -> Tensor:
    """The same shape and values, each row behind a row of something else."""
    return tensor.repeat_interleave(2, dim=0)[::2]


def swapped(tensor: Tensor) -> Tensor:
    """The same shape and values, the two last dimensions exchanged in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


NORM_REFUSALS: list[tuple[dict[str, Callable[[Tensor], Tensor]], str]] = [
    ({"x": lambda x: x.unsqueeze(0)}, "activations are (1, 6, 512), not rows"),
    ({"x": lambda x: x[:, :384]}, "width 384 is not a multiple of 256 up to 8192"),
    ({"x": lambda x: x.repeat(1, 7)[:, :3328]}, "width 3328 is not a multiple of 512 up to 8192"),
    ({"x": lambda x: x.repeat(1, 32)}, "width 16384 is not a multiple of 1024 up to 8192"),
    ({"x": Tensor.half}, "the activations is (6, 512) torch.float16"),
    ({"x": gaps_between_rows}, "the activations is not contiguous"),
    ({"residual": Tensor.float}, "the residual is (6, 512) torch.float32"),
    ({"residual": lambda residual: residual[:5]}, "the residual is (5, 512) torch.bfloat16"),
    ({"residual": gaps_between_elements}, "the residual is not contiguous"),
    ({"out": Tensor.half}, "the output is (6, 512) torch.float16"),
    ({"out": gaps_between_rows}, "the output is not contiguous"),
    ({"weight": Tensor.float}, "the norm weight is (512,) torch.float32"),
    ({"weight": lambda weight: weight[:256]}, "the norm weight is (256,) torch.bfloat16"),
]


@pytest.mark.parametrize(("changes", "reason"), NORM_REFUSALS)
def test_rmsnorm_refusals(changes, reason) -> None:
    tensors = {name: rows_of(6, 512, seed=i) for i, name in enumerate(("x", "residual", "out"))}
    tensors["weight"] = norm_weight(512, seed=3)
    assert rmsnorm_quant.can_use(**tensors) is None
    assert rmsnorm_quant.can_use(**{n: changes.get(n, Tensor.clone)(t) for n, t in tensors.items()}) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Tensor.half, "activations are (6, 512) torch.float16"),
        (lambda x: x.unsqueeze(0), "activations are (1, 6, 512) torch.bfloat16"),
        (lambda x: x[:, :384], "width 384 / 2 is not a multiple of 128"),
        (gaps_between_rows, "the activations are not contiguous"),
    ],
)
def test_silu_refusals(change, reason) -> None:
    x = rows_of(6, 512, seed=0)
    assert silu_quant.can_use(x) is None
    assert silu_quant.can_use(change(x)) == reason


def of_the_norm(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    return lambda norm: (norm[0], change(norm[1]))


ROPE_REFUSALS = [
    (True, {"qkv": Tensor.half}, "the projection is (6, 1024) torch.float16"),
    (True, {"qkv": lambda qkv: qkv[:, :1000]}, "the projection is (6, 1000) torch.bfloat16"),
    (True, {"qkv": lambda qkv: qkv.unsqueeze(0)}, "the projection is (1, 6, 1024) torch.bfloat16"),
    (True, {"qkv": lambda qkv: qkv[:, :512]}, "4 heads hold no q beside 2 of k and of v"),
    (True, {"qkv": gaps_between_elements}, "the projection's rows are not dense"),
    (True, {"k_cache": lambda cache: cache[..., :64]}, "the k cache is (17, 2, 64) torch.bfloat16"),
    (True, {"v_cache": lambda cache: cache.to(torch.float8_e5m2)}, "the v cache is (17, 2, 128) torch.float8_e5m2"),
    (True, {"v_cache": lambda cache: cache.flatten(1)}, "the v cache is (17, 256) torch.bfloat16"),
    (True, {"k_cache": swapped}, "the k cache's slots are not dense"),
    (True, {"k_cache": lambda cache: cache[:-1]}, "the k and the v cache are not alike"),
    (True, {"v_cache": gaps_between_rows}, "the k and the v cache are not alike"),
    (True, {"v_cache": lambda cache: cache.to(torch.float8_e4m3fn)}, "the k and the v cache are not alike"),
    (True, {"positions": lambda positions: positions.expand(3, 6)}, "the positions are (3, 6) torch.int64"),
    (True, {"positions": lambda positions: positions[:5]}, "the positions are (5,) torch.int64"),
    (True, {"slots": Tensor.short}, "the slots are (6,) torch.int16"),
    (True, {"slots": gaps_between_elements}, "the slots are (6,) torch.int64"),
    (True, {"cos_sin": Tensor.bfloat16}, "the rotary table is (64, 128) torch.bfloat16"),
    (True, {"cos_sin": lambda table: table[:, :64]}, "the rotary table is (64, 64) torch.float32"),
    (True, {"cos_sin": gaps_between_rows}, "the rotary table is (64, 128) torch.float32"),
    (True, {"bias": lambda _: torch.zeros(1024, dtype=torch.bfloat16)}, "a bias in front of a QK norm"),
    (True, {"norm": of_the_norm(Tensor.float)}, "a QK norm weight is not 128 bfloat16"),
    (True, {"norm": of_the_norm(lambda weight: weight[:64])}, "a QK norm weight is not 128 bfloat16"),
    (False, {"bias": Tensor.float}, "the bias is (1024,) torch.float32"),
    (False, {"bias": lambda bias: bias[:512]}, "the bias is (512,) torch.bfloat16"),
]


@pytest.mark.parametrize(("norm", "changes", "reason"), ROPE_REFUSALS)
def test_rope_refusals(norm, changes, reason) -> None:
    inputs = qkv_input(6, 4, 2, norm=norm, bias=not norm, seed=0)
    assert qk_norm_rope_kv.can_use(inputs) is None
    changed = inputs._replace(**{name: change(getattr(inputs, name)) for name, change in changes.items()})
    assert qk_norm_rope_kv.can_use(changed) == reason
