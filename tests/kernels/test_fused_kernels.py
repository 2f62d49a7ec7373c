"""The fused kernels without a GPU: they compile for every architecture, their parameters are laid out as Python packs
them, and the launchers give on a CPU the bytes of the SGLang modules that they replace."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from sglang_fastpath.kernels import act_quant, fused_kernels, gated_residual, norm_quant, qkv_epilogue
from sglang_fastpath.kernels.act_quant import ActInput
from sglang_fastpath.kernels.block_fp8_linear import quantize_per_token_group
from sglang_fastpath.kernels.gated_residual import GatedInput
from sglang_fastpath.kernels.norm_quant import NormInput
from sglang_fastpath.kernels.qkv_epilogue import QkvInput
from stock_chains import (
    EPS,
    act_input,
    assert_operands,
    assert_same_bytes,
    edge_groups,
    gated_input,
    norm_input,
    qkv_input,
    stock_activation,
    stock_gated_residual,
    stock_norm,
    stock_qkv,
    with_joint_table,
)
from torch import Tensor

from sglang_fastpath.denoisers import start_runtime

VARIANTS = {
    "norm_quant": 5,
    "qkv_epilogue": 2,
    "act_quant": 6,
    "gated_residual": 4,
    "swiglu_quant": 1,
    "layer_norm_quant": 8,
    "qk_norm_rope": 4,
}


@pytest.fixture(scope="module", autouse=True)
def runtime() -> None:
    start_runtime()


# --- compiling -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_for_all(nvcc, "fused_kernels", tmp_path_factory.mktemp("fatbin"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles_and_stays_in_registers(compiled: list[Compiled], architecture: str) -> None:
    """A stack frame would mean that indexing the two streams' parameters copies them to local memory."""
    ours = [entry for entry in compiled if entry.architecture == architecture]
    assert Counter(entry.kernel for entry in ours) == VARIANTS
    assert [entry for entry in ours if entry.stack_bytes or entry.spilled_bytes] == []


@pytest.fixture(scope="module")
def ptx(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hopper_ptx(nvcc, "fused_kernels", tmp_path_factory.mktemp("ptx"))


def test_the_compiler_is_free_to_contract_nothing(ptx: dict[str, str]) -> None:
    """Every sum, product and quotient names its rounding (`.rn`), which forbids ptxas to fuse or approximate it."""
    assert Counter(map(name_of, ptx)) == VARIANTS
    for symbol, body in ptx.items():
        arithmetic = re.findall(r"\b((?:add|sub|mul|mad|fma|div)\.[\w.]*(?:f32|f64|bf16x2|bf16|f16x2|f16))\b", body)
        assert arithmetic, symbol
        assert {op for op in arithmetic if ".rn." not in op} == set(), symbol
        assert {op for op in arithmetic if op.startswith("div")} <= {"div.rn.f32"}, symbol


def test_the_approximate_operations_are_stocks(ptx: dict[str, str]) -> None:
    """Only the quantizer's reciprocal and FLUX.2's single block flush subnormals, only the norms take a root."""
    expected = {
        "norm_quant": {"rcp.approx.ftz.f32", "rsqrt.approx.f32"},
        "act_quant": {"rcp.approx.ftz.f32"},
        "qkv_epilogue": {"rsqrt.approx.f32"},
        "gated_residual": set(),
        "swiglu_quant": {"rcp.approx.ftz.f32"},
        "layer_norm_quant": {"rcp.approx.ftz.f32", "rsqrt.approx.f32"},
        "qk_norm_rope": {"rsqrt.approx.ftz.f32", "mul.rn.ftz.f32", "fma.rn.ftz.f32"},
    }
    for symbol, body in ptx.items():
        assert set(re.findall(r"\b\w+(?:\.rn)?\.(?:approx|ftz|full)[\w.]*", body)) == expected[name_of(symbol)], (
            symbol
        )


def test_gate_and_residual_round_once(ptx: dict[str, str]) -> None:
    """Qwen-Image's gated variants multiply and add in one `fma.rn.bf16x2`; what is FLUX.2's rounds every product."""
    for symbol, body in ptx.items():
        name = name_of(symbol)
        flux2 = name in ("swiglu_quant", "layer_norm_quant")
        rounds_product = flux2 or re.search("gated_residual_kernelILb[01]ELb1E", symbol) is not None
        gated = name == "gated_residual" or (name == "norm_quant" and "kernelILb1" in symbol)
        assert ("fma.rn.bf16x2" in body) == (gated and not rounds_product), symbol
        assert ("mul.rn.bf16x2" in body) == rounds_product, symbol


# The fields of the C++ structs in the order in which the launchers pack them.
LAYOUTS = {
    "NormStream": (
        fused_kernels.NORM_STREAM,
        "x bias residual gate scale shift residual_out normed out.q out.scale out.scale_stride out.padded_rows "
        "rows rows_per_batch gate_stride modulation_stride",
    ),
    "NormParams": (fused_kernels.NORM, "stream width eps"),
    "QkvStream": (
        fused_kernels.QKV_STREAM,
        "projected[0] projected[1] projected[2] bias[0] bias[1] bias[2] norm[0] norm[1] cosine sine "
        "rows rows_per_batch stride table_stride offset",
    ),
    "QkvParams": (fused_kernels.QKV, "stream joint[0] joint[1] joint[2] tokens heads eps"),
    "ActStream": (
        fused_kernels.ACT_STREAM,
        "x bias out.q out.scale out.scale_stride out.padded_rows rows rows_per_batch batch_stride",
    ),
    "ActParams": (fused_kernels.ACT, "stream width gelu"),
    "GatedStream": (fused_kernels.GATED_STREAM, "x bias gate residual out rows rows_per_gate gate_stride"),
    "GatedParams": (fused_kernels.GATED, "stream width"),
    "SwigluStream": (
        fused_kernels.SWIGLU_STREAM,
        "attention x out.q out.scale out.scale_stride out.padded_rows attention_stride stride rows",
    ),
    "SwigluParams": (fused_kernels.SWIGLU, "stream attention_width width silu"),
    "LayerNormStream": (
        fused_kernels.LAYER_NORM_STREAM,
        "x residual gate scale shift residual_out out.q out.scale out.scale_stride out.padded_rows "
        "rows rows_per_batch gate_stride modulation_stride",
    ),
    "LayerNormParams": (fused_kernels.LAYER_NORM, "stream width eps"),
    "QkParams": (
        fused_kernels.QK,
        "x[0] x[1] norm[0] norm[1] cosine sine stride table_stride rows tokens heads eps",
    ),
}


def test_structs_are_laid_out_as_python_packs_them(nvcc: str, tmp_path: Path) -> None:
    check_layouts(nvcc, fused_kernels._SOURCES, LAYOUTS, tmp_path)


PARAMETERS = {
    "norm_quant": fused_kernels.NORM,
    "qkv_epilogue": fused_kernels.QKV,
    "act_quant": fused_kernels.ACT,
    "gated_residual": fused_kernels.GATED,
    "swiglu_quant": fused_kernels.SWIGLU,
    "layer_norm_quant": fused_kernels.LAYER_NORM,
    "qk_norm_rope": fused_kernels.QK,
}
ARGUMENTS = {
    "norm_quant": (False, False, False, 0),
    "qkv_epilogue": (False, 0),
    "act_quant": (False, False, 132, 0),
    "gated_residual": (False, False, 0),
    "swiglu_quant": (132, 0),
    "layer_norm_quant": (False, 0),
    "qk_norm_rope": (8, 0),
}


def test_the_module_is_built_once_and_refuses_parameters_of_another_size(nvcc: str, tmp_path: Path) -> None:
    """`load` itself compares the sizes of the structs."""
    built = []
    for _ in range(2):
        said = load_in_a_new_process("fused_kernels", ARGUMENTS, Path(nvcc).parent.parent, tmp_path)
        assert said["failure"] is None
        assert said["environment kept"]
        for name, layout in PARAMETERS.items():
            assert said["refusals"][name].endswith(f"kernel parameters of 5 bytes, expected {layout.size}")
        (library,) = tmp_path.glob("*_sm90/fused_kernels.so")
        built.append(library.stat().st_mtime_ns)
    assert built[0] == built[1]


def test_a_compiler_that_is_missing_raises_runtime_error(tmp_path: Path) -> None:
    said = load_in_a_new_process("fused_kernels", ARGUMENTS, tmp_path, tmp_path)
    assert f"{tmp_path}/bin/nvcc" in said["failure"]
    assert said["environment kept"]


# --- the launchers on a CPU ----------------------------------------------------------------------------------------

BATCH = st.integers(1, 3)
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 5, 13])
SEED = st.integers(0, 2**16)
GROUPED_ROWS = st.sampled_from([0, 128])
FINITE = edge_groups(finite=True)  # the bits of a NaN that a CPU computes depend on its vector unit

few_examples = settings(max_examples=25, deadline=None)


@given(
    batch=BATCH,
    tokens=st.tuples(TOKENS, TOKENS),
    width=st.sampled_from([256, 768]),
    variant=st.sampled_from(["plain", "gated", "zero added"]),
    bias=st.booleans(),
    keep_modulated=st.booleans(),
    grouped_rows=GROUPED_ROWS,
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_norm_quant(batch, tokens, width, variant, bias, keep_modulated, grouped_rows, edges, seed) -> None:
    gated, zero_added = variant != "plain", variant == "zero added"
    like = {"gated": gated, "bias": bias and gated, "edges": FINITE if edges else None}
    text, image = (norm_input(batch, count, width, seed=seed + 10 * i, **like) for i, count in enumerate(tokens))
    assert norm_quant.can_use(text) is norm_quant.can_use(image) is None
    out = norm_quant.norm_quant(
        text, image, EPS, zero_added=zero_added, keep_modulated=keep_modulated, grouped_rows=grouped_rows
    )
    sums, modulated = zip(*(stock_norm(stream, zero_added=zero_added) for stream in (text, image)), strict=True)
    assert_same_bytes(out.residual_out, sums)
    assert_same_bytes(out.modulated, modulated if keep_modulated else (None, None))
    assert_operands(out.operands, modulated, quantize_per_token_group, grouped_rows=grouped_rows)


def test_the_inputs_tell_the_two_gated_forms_apart() -> None:
    stream = norm_input(1, 4, 256, gated=True, bias=False, seed=0)
    sums = [norm_quant.norm_quant(stream, stream, EPS, zero_added=added).residual_out[0] for added in (False, True)]
    assert torch.equal(*sums)
    assert not torch.equal(*(total.signbit() for total in sums))


@given(
    batch=BATCH,
    tokens=st.tuples(TOKENS, TOKENS),
    width=st.sampled_from([8, 256, 264]),
    bias=st.booleans(),
    gate_of_each_row=st.booleans(),
    rounds_product=st.booleans(),
    seed=SEED,
)
@few_examples
def test_gated_residual(batch, tokens, width, bias, gate_of_each_row, rounds_product, seed) -> None:
    text, image = (
        gated_input(
            batch, count, width, bias=bias, gate_of_each_row=gate_of_each_row and count > 0, seed=seed + 10 * i
        )
        for i, count in enumerate(tokens)
    )
    assert gated_residual.can_use(text) is gated_residual.can_use(image) is None
    out = gated_residual.gated_residual(text, image, rounds_product=rounds_product)
    stock = tuple(stock_gated_residual(stream, batch, rounds_product=rounds_product) for stream in (text, image))
    assert_same_bytes(out, stock)


def test_gated_residual_of_one_stream() -> None:
    """As FLUX.2's single block has it: nothing of the other one."""
    image = gated_input(2, 3, 256, bias=False, seed=0)
    absent = GatedInput(image.x[:0], image.gate[:0], image.residual[:0])
    assert gated_residual.can_use(absent) is gated_residual.can_use(image) is None
    out = gated_residual.gated_residual(absent, image, rounds_product=True)
    assert_same_bytes(out, (absent.x, stock_gated_residual(image, 2, rounds_product=True)))


@given(
    batch=BATCH,
    tokens=st.tuples(TOKENS, TOKENS),
    heads=st.integers(1, 3),
    merged=st.booleans(),
    bias=st.booleans(),
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_qkv_epilogue(batch, tokens, heads, merged, bias, edges, seed) -> None:
    like = {"merged": merged, "bias": bias, "edges": FINITE if edges else None}
    text, image = (qkv_input(batch, count, heads, seed=seed + 10 * i, **like) for i, count in enumerate(tokens))
    assert qkv_epilogue.can_use(text) is qkv_epilogue.can_use(image) is None
    joint = qkv_epilogue.qkv_epilogue(text, image, EPS)
    assert all(part.is_contiguous() for part in joint)
    assert_same_bytes(joint, stock_qkv(text, image))


@given(batch=BATCH, tokens=st.tuples(TOKENS, TOKENS), heads=st.integers(1, 3), seed=SEED)
@few_examples
def test_qkv_epilogue_with_one_table_for_the_joint_sequence(batch, tokens, heads, seed) -> None:
    """As FLUX.2's double block has it: cosines and sines apart, the image's rows behind the text's."""
    text, image = with_joint_table(
        *(qkv_input(batch, n, heads, merged=True, bias=False, seed=seed + i) for i, n in enumerate(tokens))
    )
    assert qkv_epilogue.can_use(text) is qkv_epilogue.can_use(image) is None
    joint = qkv_epilogue.qkv_epilogue(text, image, EPS)
    assert_same_bytes(joint, stock_qkv(text, image, joint_table=True))


@given(
    batch=BATCH,
    tokens=st.tuples(TOKENS, TOKENS),
    width=st.sampled_from([128, 384]),
    activation=st.sampled_from(["none", "gelu", "bias and gelu"]),
    grouped_rows=GROUPED_ROWS,
    edges=st.booleans(),
    seed=SEED,
)
@few_examples
def test_act_quant(batch, tokens, width, activation, grouped_rows, edges, seed) -> None:
    gelu = activation != "none"
    like = {"bias": activation == "bias and gelu", "edges": edge_groups() if edges else None}
    text, image = (act_input(batch, count, width, seed=seed + 10 * i, **like) for i, count in enumerate(tokens))
    assert act_quant.can_use(text) is act_quant.can_use(image) is None
    operands = act_quant.act_quant(text, image, gelu=gelu, grouped_rows=grouped_rows)
    rows = stock_activation(text, gelu=gelu), stock_activation(image, gelu=gelu)
    assert_operands(operands, rows, quantize_per_token_group, grouped_rows=grouped_rows)


@pytest.mark.parametrize("grouped_rows", [0, 128])
def test_act_quant_reads_both_streams_from_the_joint_attention_output(grouped_rows: int) -> None:
    joint = act_input(2, 77 + 5, 256, bias=False, seed=0).x
    text, image = ActInput(joint[:, :77]), ActInput(joint[:, 77:])
    assert act_quant.can_use(text) is act_quant.can_use(image) is None
    operands = act_quant.act_quant(text, image, gelu=False, grouped_rows=grouped_rows)
    rows = stock_activation(text, gelu=False), stock_activation(image, gelu=False)
    assert_operands(operands, rows, quantize_per_token_group, grouped_rows=grouped_rows)


# --- refusals ------------------------------------------------------------------------------------------------------


def gaps_between_elements(tensor: Tensor) -> Tensor:
    """The same shape and values, with a last dimension that is not dense."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def gaps_between_rows(tensor: Tensor) -> Tensor:
    """The same shape and values, with dense rows that do not follow each other."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def a_norm() -> NormInput:
    return norm_input(2, 3, 256, gated=True, bias=True, seed=0)


def a_gated() -> GatedInput:
    return gated_input(2, 3, 256, bias=True, seed=0)


def a_qkv() -> QkvInput:
    return qkv_input(2, 3, 2, merged=True, bias=True, seed=0)


def an_act() -> ActInput:
    return act_input(2, 3, 256, bias=True, seed=0)


def only(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Changes one tensor of a tuple."""
    return lambda tensors: tuple(change(tensor) if i == index else tensor for i, tensor in enumerate(tensors))


def every(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda tensors: tuple(map(change, tensors))


REFUSALS: list[tuple[Callable[[], Any], dict[str, Callable[[Any], Any]], str]] = [
    (a_norm, {"x": Tensor.half}, "activations are torch.float16"),
    (a_norm, {"x": lambda x: x[:, :128]}, "width 128 is not a multiple of 256 up to 8192"),
    (a_norm, {"x": lambda x: x.repeat(1, 33)}, "width 8448 is not a multiple of 256 up to 8192"),
    (a_norm, {"scale": Tensor.float}, "the scale is (2, 256) torch.float32"),
    (a_norm, {"shift": lambda shift: shift[:1]}, "the shift is (1, 256) torch.bfloat16"),
    (a_norm, {"gate": lambda gate: gate[:, :128]}, "the gate is (2, 128) torch.bfloat16"),
    (a_norm, {"residual": Tensor.float}, "the residual is (6, 256) torch.float32"),
    (a_norm, {"residual": lambda residual: residual[:3]}, "the residual is (3, 256) torch.bfloat16"),
    (a_norm, {"bias": Tensor.float}, "the bias is (256,) torch.float32"),
    (a_norm, {"bias": lambda bias: bias[:128]}, "the bias is (128,) torch.bfloat16"),
    (a_norm, {"x": lambda x: x[:5], "residual": lambda residual: residual[:5]}, "2 modulations for 5 rows"),
    (a_norm, {name: lambda vectors: vectors[:0] for name in ("scale", "shift", "gate")}, "0 modulations for 6 rows"),
    (a_norm, {"scale": Tensor.contiguous}, "scale and shift are not laid out alike"),
    (a_norm, {"gate": lambda _: None}, "gate and residual come together, a bias only with them"),
    (a_norm, {"residual": lambda _: None}, "gate and residual come together, a bias only with them"),
    (
        a_norm,
        {"gate": lambda _: None, "residual": lambda _: None},
        "gate and residual come together, a bias only with them",
    ),
    (a_norm, {"x": gaps_between_rows}, "rows are not contiguous"),
    (a_norm, {"residual": gaps_between_rows}, "rows are not contiguous"),
    *[(a_gated, {name: Tensor.float}, "activations are not all bfloat16") for name in GatedInput._fields],
    (a_gated, {"x": lambda x: x[:, :4], "gate": lambda gate: gate[:, :4]}, "a gate of (2, 4) for 6 rows of 4"),
    (a_gated, {"gate": lambda gate: gate[:, :128]}, "a gate of (2, 128) for 6 rows of 256"),
    (a_gated, {"x": lambda x: x[:5]}, "a gate of (2, 256) for 5 rows of 256"),
    (a_gated, {"gate": lambda gate: gate[:0]}, "a gate of (0, 256) for 6 rows of 256"),
    (a_gated, {"bias": lambda bias: bias[:128]}, "the bias is (128,) for 6 rows of 256"),
    (a_gated, {"x": gaps_between_rows}, "rows are not contiguous"),
    (a_gated, {"residual": gaps_between_rows}, "rows are not contiguous"),
    (a_gated, {"residual": lambda residual: residual[:4]}, "the residual is (4, 256) for 6 rows of 256"),
    *[
        (a_qkv, {name: only(1, Tensor.half)}, "activations, biases and norm weights are not all bfloat16")
        for name in ("projected", "bias", "norm")
    ],
    (a_qkv, {"projected": every(lambda part: part.flatten(0, 1))}, "heads are not 128 wide"),
    (a_qkv, {"projected": every(lambda part: part[..., :192])}, "heads are not 128 wide"),
    (a_qkv, {"norm": only(1, lambda weight: weight[:64])}, "heads are not 128 wide"),
    (a_qkv, {"projected": only(2, lambda v: v[:, :2])}, "q, k and v are not laid out alike"),
    (a_qkv, {"projected": only(1, Tensor.contiguous)}, "q, k and v are not laid out alike"),
    (a_qkv, {"bias": only(2, lambda bias: bias[:128])}, "a bias is not 256 long"),
    (a_qkv, {"projected": every(lambda part: part[:, :2])}, "batch elements are not one row stride apart"),
    (a_qkv, {"cosine": Tensor.bfloat16}, "the cosines are (6, 64) torch.bfloat16"),
    (a_qkv, {"sine": lambda table: table[:, :32]}, "the sines are (6, 32) torch.float32"),
    (a_qkv, {"sine": Tensor.flatten}, "the sines are (384,) torch.float32"),
    (a_qkv, {"cosine": lambda table: table[:2]}, "the cosines (2, 64) do not cover 3 tokens"),
    (a_qkv, {"sine": Tensor.contiguous}, "cosines and sines are not laid out alike, in dense rows"),
    (
        a_qkv,
        {name: gaps_between_elements for name in ("cosine", "sine")},
        "cosines and sines are not laid out alike, in dense rows",
    ),
    (an_act, {"x": Tensor.float}, "activations are torch.float32"),
    (an_act, {"bias": Tensor.float}, "the bias is (256,) torch.float32"),
    (an_act, {"bias": lambda bias: bias[:128]}, "the bias is (128,) torch.bfloat16"),
    (an_act, {"x": lambda x: x[..., :192], "bias": lambda bias: bias[:192]}, "width 192 is not a multiple of 128"),
    (an_act, {"x": gaps_between_rows}, "tokens are not contiguous"),
    (an_act, {"x": gaps_between_elements}, "tokens are not contiguous"),
]
CAN_USE = {
    a_norm: norm_quant.can_use,
    a_gated: gated_residual.can_use,
    a_qkv: qkv_epilogue.can_use,
    an_act: act_quant.can_use,
}


@pytest.mark.parametrize(("build", "changes", "reason"), REFUSALS)
def test_each_refusal_can_be_reached_and_says_why(build, changes, reason) -> None:
    stream = build()
    assert CAN_USE[build](stream) is None
    changed = stream._replace(**{name: change(getattr(stream, name)) for name, change in changes.items()})
    assert CAN_USE[build](changed) == reason


def test_alignment() -> None:
    tensor = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert fused_kernels.aligned(tensor, None, tensor[1], tensor[:, 8:16], tensor[:1].expand(5, 64))
    assert fused_kernels.aligned(torch.zeros(3, 4))
    for view in (tensor[:, 4:], tensor.flatten()[1:129].view(2, 64), tensor[..., ::2], torch.zeros(3, 6)):
        assert not fused_kernels.aligned(tensor, view)
