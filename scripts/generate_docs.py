#!/usr/bin/env python3
"""Writes the tables in README.md and docs/ from the catalogue, the variables and the contracts.

`generate_docs.py` rewrites what stands between `<!-- NAME -->` and `<!-- /NAME -->`; `--check` only says whether
anything would change (exit 1).
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.version import Version

from sglang_fastpath import contracts, envs
from sglang_fastpath.features import CATALOGUE, Feature

ROOT = Path(__file__).resolve().parent.parent


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def features() -> str:
    return table(
        ("feature", "what it does", "parity", "switch", "native since"),
        ((f"`{f.id}`", f.title, f.parity, f"`{f.env}=0`", f.native_since or "-") for f in CATALOGUE),
    )


def variables() -> str:
    return table(
        ("variable", "values", "default", "meaning"),
        ((f"`{v.name}`", v.values, f"`{v.default}`" if v.default else "-", v.meaning) for v in envs.VARIABLES),
    )


def releases() -> str:
    return table(
        ("SGLang", *(f"`{f.id}`" for f in CATALOGUE)),
        ((release, *(_state(f, release) for f in CATALOGUE)) for release in contracts.recorded()),
    )


def patches() -> str:
    sections = []
    for f in CATALOGUE:
        sites = "\n".join(f"- `{site}`" for site in f.sites)
        relies = "\n".join(f"- `{target}`" for target in f.relies_on)
        sections.append(
            f"### `{f.id}`\n\nWhy: {f.why}\n\nReplaces:\n\n{sites}\n\nRelies on:\n\n{relies}\n\nDelete {f.removal}."
        )
    return "\n\n".join(sections)


def results() -> str:
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.json")):
        found = json.loads(path.read_text())
        for name in ("stock", "fast"):
            measured = found[name]
            rows.append(
                (
                    f"[{found['model']}]({Path('..') / path.relative_to(ROOT)})",
                    found["gpu"],
                    found["sglang"],
                    name,
                    f"{measured['pass_ms']:.1f} ({measured['min_ms']:.1f} to {measured['max_ms']:.1f})",
                    f"{measured['kernel_ms']:.1f}",
                    f"{found['floor_ms']:.1f}",
                    f"{measured['launches']:,}",
                    ("yes" if found["bitwise_equal"] else "NO") if name == "fast" else "-",
                )
            )
    header = ("model", "GPU", "SGLang", "", "wall ms a pass", "kernel ms", "floor ms", "launches", "bitwise equal")
    return table(header, rows)


def _state(feature: Feature, release: str) -> str:
    if feature.native_since and Version(release) >= Version(feature.native_since):
        return "native"
    recorded = contracts.recorded()[release]
    missing = [target for target in feature.contract if recorded.get(target) is None]
    return f"drifted ({missing[0]})" if missing else "active"


GENERATED: dict[str, Callable[[], str]] = {
    "features": features,
    "variables": variables,
    "releases": releases,
    "patches": patches,
    "results": results,
}


def regenerate(text: str) -> str:
    """The document with every generated block made anew."""
    for name, make in GENERATED.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = False
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        new = regenerate(text)
        if new != text:
            stale = True
            print(f"{path.relative_to(ROOT)}: {'stale: run scripts/generate_docs.py' if check else 'written'}")
            if not check:
                path.write_text(new)
    sys.exit(check and stale)


if __name__ == "__main__":
    main()
