"""`bench kernels`, as far as a machine without a GPU can tell: bytes, both chains of every site, what is reported."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor
from torch.utils import _pytree as pytree
from typer.testing import CliRunner

from sglang_fastpath import cli
from sglang_fastpath.guard import compare
from sglang_fastpath.kernel_benchmark import (
    SITES,
    Measured,
    Site,
    Size,
    Timed,
    UnsupportedSizeError,
    bytes_of,
    draw_inputs,
)

BY_NAME = {site.name: site for site in SITES}
every_site = pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# --- bytes -------------------------------------------------------------------------------------------------------

# At 4352 tokens of 3072: a bf16 tensor, an fp8 tensor with its scales, a bf16 vector.
BF16 = 2 * 4352 * 3072
FP8 = 4352 * 3072 + 4 * 4352 * 24
VECTOR = 2 * 3072
# FLUX.2's single block, at 4608 tokens of 6144: the attention output, x1 and x2 of 18432, the operand of 24576.
SINGLE_BLOCK = 2 * 4608 * (6144 + 2 * 18432) + 4608 * 24576 + 4 * 4608 * 192
# Its double block: x1 and x2, the operand of 18432.
DOUBLE_BLOCK = 2 * 4608 * 2 * 18432 + 4608 * 18432 + 4 * 4608 * 144
# Its norms, at 4608 tokens of 6144.
FLUX2_BF16 = 2 * 4608 * 6144
FLUX2_FP8 = 4608 * 6144 + 4 * 4608 * 48
FLUX2_VECTOR = 2 * 6144
HAND_COUNTED = {  # by hand, and in MB as the design budgets it
    "norm_quant": (BF16 + FP8 + 2 * 2 * VECTOR, 40),
    "norm_quant_gated": (2 * BF16 + BF16 + FP8 + 2 * 4 * VECTOR, 93),
    "norm_quant_cross_block": (2 * BF16 + BF16 + FP8 + 2 * 4 * VECTOR, 93),
    "qkv_epilogue": (3 * BF16 + 3 * BF16 + 4 * 4352 * 128 + 2 * (3 * VECTOR + 2 * 2 * 128), 160),
    "act_quant": (BF16 + FP8, 40),
    "act_quant_gelu": (4 * (BF16 + FP8) + 2 * 4 * VECTOR, 160),
    "gated_residual": (2 * BF16 + BF16 + 2 * 2 * VECTOR, 80),
    "swiglu_quant": (DOUBLE_BLOCK, 425),
    "swiglu_quant_single": (SINGLE_BLOCK, 510),
    "layer_norm_quant": (FLUX2_BF16 + FLUX2_FP8 + 2 * 2 * FLUX2_VECTOR, 86),
    "layer_norm_quant_gated": (3 * FLUX2_BF16 + FLUX2_FP8 + 2 * 3 * FLUX2_VECTOR, 200),
    "gated_residual_flux2": (3 * FLUX2_BF16 + 2 * FLUX2_VECTOR, 170),
    "qk_norm_rope": (2 * 2 * 2 * 4608 * 6144 + 4 * 4608 * 128 + 2 * 2 * 128, 226),
}


def test_bytes_at_full_size_are_those_counted_by_hand() -> None:
    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    counted = {}
    for site in SITES:
        inputs = site.inputs(Size(), draw)
        counted[site.name] = bytes_of((inputs, site.ours(*inputs)))
    assert counted == {name: exact for name, (exact, _) in HAND_COUNTED.items()}
    budgets = {name: budget * 1e6 for name, (_, budget) in HAND_COUNTED.items()}
    assert counted == pytest.approx(budgets, rel=0.02)


# --- both chains -------------------------------------------------------------------------------------------------


@every_site
@given(text=st.integers(1, 9), image=st.integers(1, 9), heads=st.sampled_from([2, 4, 6]), seed=st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
@torch.no_grad()
def test_ours_and_stock_give_the_same_bytes(site: Site, text: int, image: int, heads: int, seed: int) -> None:
    inputs = draw_inputs(site, Size(image, text, heads), "cpu", seed)
    before = [tensor.clone() for tensor in tensors(inputs)]
    own = site.for_stock(inputs)
    ours, stock = site.ours(*inputs), site.stock(*own)
    assert compare(ours, stock) is None
    in_place = [any(out is tensor for out in ours) for tensor in tensors(inputs)]
    assert any(in_place) == (site.name == "qk_norm_rope")
    for tensor, was, written in zip(tensors(inputs), before, in_place, strict=True):
        assert written or compare(tensor, was) is None, "a timed graph would read something else the next time"


@torch.no_grad()
def test_a_difference_in_any_input_shows_in_the_outputs() -> None:
    """Of every site: equality above would mean little if a chain left an input out."""
    for site in SITES:
        inputs = draw_inputs(site, Size(6, 5, 2), "cpu", seed=3)
        stock = site.stock(*site.for_stock(inputs))
        for index in range(len(tensors(inputs))):
            changed = site.for_stock(inputs)
            tensors(changed)[index].mul_(-3)
            assert compare(site.stock(*changed), stock) is not None, (site.name, index)


# --- inputs ------------------------------------------------------------------------------------------------------


@every_site
def test_inputs_are_random_and_of_their_seed(site: Site) -> None:
    size = Size(64, 32, 2)
    first, again, second = (tensors(draw_inputs(site, size, "cpu", seed)) for seed in (1, 1, 2))
    assert compare(first, again) is None
    for tensor, other in zip(first, second, strict=True):
        assert (tensor == 0).float().mean() < 0.02
        assert (tensor != other).float().mean() > 0.9


@every_site
def test_stock_gets_tensors_of_its_own(site: Site) -> None:
    inputs = draw_inputs(site, Size(6, 5, 2), "cpu", seed=0)
    copied = site.for_stock(inputs)
    assert compare(tensors(copied), tensors(inputs)) is None
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(copied)}
    assert storages.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors(inputs))


@pytest.mark.parametrize("site", [site for site in SITES if site.name != "qk_norm_rope"], ids=lambda site: site.name)
def test_stock_gets_activations_as_separate_gemms_leave_them(site: Site) -> None:
    copied = tensors(site.for_stock(draw_inputs(site, Size(6, 5, 2), "cpu", seed=0)))
    activations = [tensor for tensor in copied if tensor.dtype == torch.bfloat16]
    assert all(tensor.is_contiguous() for tensor in activations)
    assert len({tensor.untyped_storage().data_ptr() for tensor in activations}) == len(activations)


def test_stock_gets_q_and_k_of_a_single_block_in_their_projection() -> None:
    site = BY_NAME["qk_norm_rope"]
    (ours,) = inputs = draw_inputs(site, Size(6, 5, 2), "cpu", seed=0)
    (stock,) = site.for_stock(inputs)
    assert ours.q.shape == (1, 6 + 2 * 5, 4, 128)
    assert ours.q.stride() == stock.q.stride() == ours.k.stride() == stock.k.stride()
    assert ours.q.stride(1) == (3 + 2 * 3) * 4 * 128
    assert stock.q.untyped_storage().data_ptr() == stock.k.untyped_storage().data_ptr()


@torch.no_grad()
def test_qk_norm_rope_can_run_on_its_own_outputs() -> None:
    """As a timed graph does."""
    site = BY_NAME["qk_norm_rope"]
    inputs = draw_inputs(site, Size(6, 5, 2), "cpu", seed=0)
    for _ in range(48):
        outputs = site.ours(*inputs)
    assert all(tensor.isfinite().all() and tensor.abs().max() > 0.1 for tensor in tensors(outputs))


def test_ours_reads_one_merged_qkv_output() -> None:
    for stream in draw_inputs(BY_NAME["qkv_epilogue"], Size(6, 5, 2), "cpu", seed=0):
        assert len({part.untyped_storage().data_ptr() for part in stream.projected}) == 1
        assert {part.stride(1) for part in stream.projected} == {3 * 2 * 128}


def test_ours_reads_the_feed_forward_of_one_merged_projection() -> None:
    (stream,) = draw_inputs(BY_NAME["swiglu_quant_single"], Size(6, 5, 2), "cpu", seed=0)
    assert stream.x.shape == (6 + 2 * 5, 2 * 3 * 4 * 128)
    assert stream.x.stride(0) == (3 + 2 * 3) * 4 * 128


def test_a_width_that_a_kernel_cannot_run_names_site_heads_and_reason() -> None:
    with pytest.raises(
        UnsupportedSizeError, match=r"norm_quant cannot run 3 heads .*width 384 is not a multiple of 256"
    ):
        draw_inputs(BY_NAME["norm_quant"], Size(4, 4, heads=3), "cpu", seed=0)


# --- what is reported --------------------------------------------------------------------------------------------


def measured(*, bitwise_equal: bool = True) -> Measured:
    """40 MB in 20 us a launch, against stock's 50."""
    ours = Timed(lambda: None, count=4, milliseconds=[0.5, 0.08, 0.07])
    stock = Timed(lambda: None, count=2, milliseconds=[0.1, 0.1, 0.3])
    return Measured(40_000_000, bitwise_equal, ours, stock)


def test_an_entry_is_made_of_medians_a_launch() -> None:
    assert measured().entry(copy_gb_s=4000.0) == {
        "bytes": 40_000_000,
        "us": 20.0,
        "gb_s": 2000.0,
        "of_copy": 0.5,
        "stock_us": 50.0,
        "speedup": 2.5,
        "bitwise_equal": True,
    }


def test_the_table_shows_each_kernel_in_the_units_of_its_header(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "console", Console(width=80))
    kernels = {"norm_quant_cross_block": measured(bitwise_equal=False), "act_quant": measured()}
    document = {"gpu": "H200", "sglang": "0.5.17", "copy_gb_s": 4000.0}
    cli.show_kernels(document | {"kernels": {name: one.entry(4000.0) for name, one in kernels.items()}})
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    for name in kernels:
        assert [name, "40.0", "20.0", "2,000", "50", "50.0", "2.50"] in rows
    assert "Not stock's bytes: norm_quant_cross_block\n" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_one_sentence_and_exit_1(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    result = CliRunner().invoke(cli.app, ["bench", "kernels", "--output", str(output)])
    assert result.exit_code == 1
    assert result.output.strip() == ("sglang-fastpath: bench needs an NVIDIA GPU; torch.cuda.is_available() is False")
    assert not output.exists()
