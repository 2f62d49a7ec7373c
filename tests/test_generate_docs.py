"""The generated parts of the documents: what is in them, and that they are what the catalogue and the results say."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglang_fastpath import contracts, envs
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
        return {name: generator[name]() for name in ("results", "ablation", "kernels")}

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
    assert [row[7] for row in (stock, fast)] == [f"{denoiser[name]['floor_ms']:.1f}" for name in ("stock", "fast")]
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
    planned = make_plan(envs.Settings(enabled=True, emulate=True), installed)
    (column,) = (column for column, span in zip(columns, covered, strict=True) if installed.version in span)
    assert list(column) == [record.state for record in planned.records.values()]
    assert State.NATIVE in columns[-1]


def test_the_ledger_names_every_feature_once_with_all_that_it_replaces_and_relies_on(
    generator: dict[str, Any],
) -> None:
    sections = generator["patches"]().split("### ")[1:]
    for feature in CATALOGUE:
        (section,) = (section for section in sections if f"`{feature.id}`" in section.splitlines()[0])
        replaced, _, relied_on = section.partition("Relies on:")
        assert f"- `{feature.id}`: {feature.why}" in replaced
        assert all(f"- `{site}`" in replaced for site in feature.sites)
        assert all(f"- `{target}`" in relied_on for target in feature.relies_on)
        assert section.rstrip().endswith(f"Delete {feature.removal}.")
    assert len(sections) == len({feature.patch for feature in CATALOGUE})
