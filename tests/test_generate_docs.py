"""The generated parts of the documents: what is in them, and that they are what the catalogue and the results say."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglang_fastpath import contracts, environment, envs
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.kernel_benchmark import Measured, Timed
from sglang_fastpath.plan import State, make_plan

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "generate_docs.py"
DENOISER_RESULT = ROOT / "benchmarks/results/nvidia-h200/qwen-image.json"


def cells(table: str) -> list[list[str]]:
    """The rows of a table, its header first."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return [rows[0], *rows[2:]]


@pytest.fixture
def generator() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def results(tmp_path: Path, generator: dict[str, Any]) -> Callable[..., dict[str, str]]:
    """The benchmarks' tables, made from the result files given by name."""

    def make(**documents: dict[str, Any]) -> dict[str, str]:
        folder = tmp_path / "benchmarks/results/nvidia-h200"
        folder.mkdir(parents=True)
        for name, document in documents.items():
            (folder / f"{name}.json").write_text(json.dumps(document))
        generator["results"].__globals__["ROOT"] = tmp_path
        made = ("results", "measured", "graph", "measured-graph", "ablation", "kernels", "tuner")
        return {name: generator["GENERATED"][name]() for name in made}

    return make


def kernel_result(**bitwise_equal: bool) -> dict[str, Any]:
    """A document as `bench kernels` writes it: 40 MB in 20 us, against stock's 50."""
    ours, stock = (Timed(lambda: None, count=1, milliseconds=[ms]) for ms in (0.02, 0.05))
    return {
        "sglang": "0.5.17",
        "torch": "2.11.0+cu130",
        "gpu": "NVIDIA H200",
        "commit": "abcdef0",
        "command": "sglang-fastpath bench kernels",
        "image_tokens": 4096,
        "text_tokens": 256,
        "heads": 24,
        "copy_gb_s": 4200.0,
        "kernels": {
            name: Measured(40_000_000, equal, ours, stock).entry(copy_gb_s=4200.0)
            for name, equal in bitwise_equal.items()
        },
    }


def test_the_documents_are_up_to_date() -> None:
    subprocess.run([sys.executable, SCRIPT, "--check"], check=True)


def test_every_generated_part_has_its_place_in_a_document(generator: dict[str, Any]) -> None:
    documents = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    for name in generator["GENERATED"]:
        assert documents.count(f"<!-- {name} -->\n") == documents.count(f"<!-- /{name} -->\n") == 1


def test_both_benchmarks_find_their_own_results(results: Callable[..., dict[str, str]]) -> None:
    denoiser = json.loads(DENOISER_RESULT.read_text())
    made = results(**{"qwen-image": denoiser, "kernels": kernel_result(norm_quant=True, act_quant=False)})
    _, stock, fast = cells(made["results"])
    assert "(../benchmarks/results/nvidia-h200/qwen-image.json)" in stock[0]
    assert [row[8] for row in (stock, fast)] == [f"{denoiser[name]['floor_ms']:.1f}" for name in ("stock", "fast")]
    assert cells(made["kernels"]) == [
        ["kernel", "MB", "us", "GB/s", "% of copy", "stock us", "speedup", "bitwise equal"],
        ["`norm_quant`", "40.0", "20.0", "2,000", "48", "50.0", "2.50", "yes"],
        ["`act_quant`", "40.0", "20.0", "2,000", "48", "50.0", "2.50", "NO"],
    ]
    title = made["kernels"].splitlines()[0]
    assert "[NVIDIA H200](../benchmarks/results/nvidia-h200/kernels.json), SGLang 0.5.17" in title
    assert "4,200 GB/s" in title


def test_without_kernel_results_the_document_says_so(results: Callable[..., dict[str, str]]) -> None:
    made = results(**{"qwen-image": json.loads(DENOISER_RESULT.read_text())})
    assert made["kernels"] == "Not measured yet."
    assert len(cells(made["results"])) == 3


def test_the_sustained_time_is_shown_beside_the_wall_where_a_file_has_it(
    results: Callable[..., dict[str, str]],
) -> None:
    old = json.loads(DENOISER_RESULT.read_text())
    for name in ("stock", "fast"):
        old[name].pop("sustained_ms", None)
    new = json.loads(json.dumps(old))
    new["stock"]["sustained_ms"], new["fast"]["sustained_ms"] = 170.04, 88.66
    made = results(new=new, old=old)
    header, *rows = cells(made["results"])
    assert header[5:7] == ["wall ms a pass", "sustained ms"]
    assert [row[6] for row in rows] == ["170.0", "88.7", "-", "-"]
    header, *rows = cells(made["measured"])
    assert header[2:4] == ["wall ms a pass", "sustained ms"]
    assert [row[3] for row in rows] == ["170.0 -> 88.7", "-"]


def graph_result(**variants: dict[str, Any]) -> dict[str, Any]:
    """A document as `bench denoiser --graph` writes it."""
    return {
        "model": "qwen-image",
        "sglang": "0.5.17",
        "gpu": "NVIDIA H200",
        "attention": "fa",
        "bitwise_equal": True,
        "floor_ms": 68.05,
        "variants": {name.replace("_", "+"): entry for name, entry in variants.items()},
        "features": {},
    }


def timed(ms: float, *, bitwise_equal: bool = True, **more: Any) -> dict[str, Any]:
    times = {"pass_ms": ms, "min_ms": ms - 1, "max_ms": ms + 1, "sustained_ms": ms + 10, "host_ms": ms / 100}
    counts = {"launches": 2, "kernels": 3275, "kernel_ms": ms - 2, "sustained_sm_mhz": 1590, "sustained_watts": 700}
    return times | counts | {"bitwise_equal": bitwise_equal} | more


def test_graphs_are_compared_with_stock_eager_and_with_the_best_of_stock(
    results: Callable[..., dict[str, str]],
) -> None:
    document = graph_result(
        stock=timed(300.0, launches=None, sustained_watts=None),
        stock_compile={"failed": "VariantError: `a` | b"},
        stock_bcg=timed(150.0, bitwise_equal=False, setup="for this length"),
        stock_graph=timed(120.0),
        fast=timed(100.0),
        fast_graph=timed(80.0, peak_reserved_gib=26.04),
    )
    made = results(**{"qwen-image-graph": document, "qwen-image": json.loads(DENOISER_RESULT.read_text())})
    header, *rows = cells(made["graph"])
    shown = {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}
    assert list(shown) == list(document["variants"])
    faster = {name: (row["times stock eager"], row["times best stock variant"]) for name, row in shown.items()}
    assert faster == {
        "stock": ("1.00", "0.40"),
        "stock+compile": ("-", "-"),
        "stock+bcg": ("2.00", "0.80"),
        "stock+graph": ("2.50", "1.00"),
        "fast": ("3.00", "1.20"),
        "fast+graph": ("3.75", "1.50"),
    }
    assert [row["bitwise equal"] for row in shown.values()] == ["yes", "failed", "NO", "yes", "yes", "yes"]
    assert shown["stock"]["launches"] == shown["stock"]["sustained W"] == shown["stock"]["peak GiB"] == "-"
    assert shown["fast+graph"]["wall ms a pass"] == "80.0 (79.0 to 81.0)"
    assert shown["fast+graph"]["peak GiB"] == "26.0"
    assert shown["fast+graph"]["kernels"] == "3,275"
    remarks = [line for line in made["graph"].splitlines() if line.startswith("- ")]
    assert remarks == [
        "- `fast+graph` is 1.50 times as fast as the best stock variant, `stock+graph` (1.44 times sustained).",
        "- `stock+bcg`: for this length.",
        "- `stock+compile` failed: `VariantError: 'a' | b`.",
    ]
    assert "(../benchmarks/results/nvidia-h200/qwen-image-graph.json)" in made["graph"].splitlines()[0]

    assert "(benchmarks/results/nvidia-h200/qwen-image-graph.json)" in made["measured-graph"].splitlines()[0]
    header, *rows = cells(made["measured-graph"])
    assert [row[-3:-1] for row in rows] == [list(times) for times in faster.values()]
    assert remarks[0] in made["measured-graph"].splitlines()
    assert len(cells(made["results"])) == 3, "each kind of file has its own table"


def test_a_graph_result_in_which_everything_failed_has_a_table(results: Callable[..., dict[str, str]]) -> None:
    nothing = {"failed": "OutOfMemoryError: why"}
    document = graph_result(stock=nothing, fast_graph=nothing) | {"floor_ms": None, "bitwise_equal": False}
    made = results(graph=document)
    for name in ("graph", "measured-graph"):
        _, *rows = cells(made[name])
        assert [row[-3:] for row in rows] == [["-", "-", "failed"]] * 2
        assert "best stock variant, " not in made[name]


def test_without_graph_results_the_documents_say_so(results: Callable[..., dict[str, str]]) -> None:
    made = results(**{"qwen-image": json.loads(DENOISER_RESULT.read_text())})
    assert made["graph"] == made["measured-graph"] == "Not measured yet."


def test_the_ablation_is_of_the_files_that_have_one(results: Callable[..., dict[str, str]]) -> None:
    numbers = {"bitwise_equal": True, "ms": 171.8, "kernel_ms": 109.94, "launches": 3215}
    alone = {f"alone_{what}": value for what, value in numbers.items()}
    without = {f"without_{what}": value for what, value in numbers.items()}
    seen = {"state": "active", "hits": 3, "fallbacks": {}}
    whole = json.loads(DENOISER_RESULT.read_text()) | {
        "features": {
            "norm_quant": seen | alone | without,
            "act_quant": seen | alone | without | {"alone_bitwise_equal": False},
        }
    }
    made = results(whole=whole, brief=whole | {"features": {"norm_quant": seen}})
    assert made["ablation"].count("/whole.json)") == 1 and "/brief.json)" not in made["ablation"]
    _, *rows = cells(made["ablation"])
    assert rows == [
        [f"`{id}`", *(["171.8", "109.9", "3,215"] * 2), equal]
        for id, equal in (("norm_quant", "yes"), ("act_quant", "NO"))
    ]
    assert len(cells(made["results"])) == 5


def test_the_tuners_winners_and_who_was_no_candidate(results: Callable[..., dict[str, str]]) -> None:
    shape = {"m": 8, "n": 128, "k": 256, "winner": "fast", "ratio": 0.5, "declined": {}, "excluded": {}}
    stays = shape | {
        "m": 9,
        "winner": "stock",
        "ratio": 1.0,
        "declined": {"fast": "a|b"},
        "excluded": {"odd": "3 of 4"},
    }
    effect = {"installed": True, "why": "", "first_ms": 10.0, "winners_ms": 9.0}
    model = {
        "seconds": 42.4,
        "shapes": [shape, stays, stays, {"failed": "no room"}],
        "pass_effect": {"batch 8": effect, "batch 9": effect | {"installed": False}},
        "second_process": {"tuning_seconds": 0.0123, "timed": 0},
    }
    failing = model | {
        "pass_effect": {"p": {"first_ms": None, "why": "broken"}},
        "second_process": {"failed": "dead"},
    }
    document = {"gpu": "NVIDIA H200", "sglang": "0.5.17", "resolution": "64x64", "tuned": {"a": model, "b": failing}}
    made = results(tuner=document)
    took = "10.000 -> 9.000 ms"
    tables = made["tuner"].split("\n\n")
    first, second = (cells(one)[1:] for one in tables[1:])
    assert first == [
        [
            "a",
            "4",
            "8x128x256: fast 0.500",
            f"batch 8: {took}; batch 9: {took}, not installed",
            "42",
            "0.012 (0 timed)",
        ],
        ["b", "4", "8x128x256: fast 0.500", "p: broken", "42", "dead"],
    ]
    assert second == [["`fast`", "a/b", "4"], ["`odd`", "other bytes", "4"]]
    assert "tuner" not in made["kernels"] + made["graph"]


def test_each_release_is_in_one_column_that_says_what_the_plan_says(generator: dict[str, Any]) -> None:
    header, *rows = cells(generator["releases"]())
    assert [row[0] for row in rows] == [f"`{feature.id}`" for feature in CATALOGUE]
    recorded = list(contracts.recorded())
    spans = [column.split(" to ") for column in header[1:]]
    covered = [recorded[recorded.index(span[0]) : recorded.index(span[-1]) + 1] for span in spans]
    assert [release for span in covered for release in span] == recorded
    columns = list(zip(*(row[1:] for row in rows), strict=True))
    assert all(one != other for one, other in pairwise(columns)), "a column could be merged"
    installed = contracts.installed_release()
    assert installed
    settings = envs.Settings(enabled=True, emulate=True)
    planned = make_plan(settings, installed, replace(environment.detect(), gpu="NVIDIA H200", sm=90))
    (column,) = (column for column, span in zip(columns, covered, strict=True) if installed.version in span)
    assert list(column) == [record.state for record in planned.records.values()]
    assert State.NATIVE in columns[-1]


def test_the_ledger_names_every_feature_once_with_all_that_it_replaces_and_relies_on(
    generator: dict[str, Any],
) -> None:
    sections = generator["patches"]().split("### ")[1:]
    ports = [(feature, port) for feature in CATALOGUE for port in feature.ports]
    for feature, port in ports:
        (section,) = (
            s for s in sections if s.startswith(f"{port.name}: ") and f"`{feature.id}`" in s.splitlines()[0]
        )
        replaced, _, relied_on = section.partition("Relies on:")
        assert f"- `{feature.id}`: {feature.why}" in replaced
        assert all(f"- `{site}`" in replaced for site in port.sites)
        assert all(f"- `{target}`" in relied_on for target in port.relies_on)
        assert f"Delete {feature.removal}." in section
    assert len(sections) == len({port for _, port in ports}), "features that share a port share a section"
