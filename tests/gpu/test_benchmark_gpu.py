"""`bench denoiser --graph` on a GPU, with a small denoiser: SGLang's own graphs, and what only a profiler counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_fastpath import benchmark
from sglang_fastpath.benchmark import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GRAPHS = ("stock+bcg", "stock+graph", "fast+graph")
EAGER = ("stock", "fast")


@pytest.fixture(scope="module")
def variants() -> dict[str, dict[str, Any]]:
    """What the run says of each variant but `stock+compile`, which takes minutes."""
    small = Workload(arch={"layers": 4, "heads": 8}, image_hw=(16, 16), text_tokens=64, attention="torch_sdpa")
    document = benchmark.run_graphs(
        small, names=[*EAGER, *GRAPHS], steps=6, rounds=1, sustained_steps=2, report=print
    )
    measured: dict[str, dict[str, Any]] = document["variants"]
    return measured


def test_every_variant_runs(variants: dict[str, dict[str, Any]]) -> None:
    assert {name: entry["failed"] for name, entry in variants.items() if "failed" in entry} == {}
    for entry in variants.values():
        assert len(entry["kernel_ms_by_pass"]) == 2, "each pass was marked"
        assert 0 < entry["floor_ms"] < entry["kernel_ms"]
        assert min(entry["host_ms"], entry["sustained_ms"], entry["pass_ms"]) > 0


@pytest.mark.parametrize("name", ["stock", "stock+graph", "fast", "fast+graph"])
def test_the_bytes_are_stocks(variants: dict[str, dict[str, Any]], name: str) -> None:
    assert variants[name]["bitwise_equal"] is True


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_pass_launches_each_of_its_kernels(variants: dict[str, dict[str, Any]], name: str) -> None:
    entry = variants[name]
    assert entry["launches"] == pytest.approx(entry["kernels"], rel=0.05)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_launched_in_one_go_and_its_kernels_are_counted(
    variants: dict[str, dict[str, Any]], name: str
) -> None:
    entry = variants[name]
    assert entry["launches"] < 0.7 * entry["kernels"]
    eager = variants["fast" if name.startswith("fast") else "stock"]
    assert entry["kernels"] > 0.8 * eager["kernels"]


def test_the_memory_of_the_plugins_variants_is_watched(variants: dict[str, dict[str, Any]]) -> None:
    for name in ("fast", "fast+graph"):
        assert 0 < variants[name]["peak_gib"] <= variants[name]["peak_reserved_gib"]
    assert "peak_gib" not in variants["stock"]
