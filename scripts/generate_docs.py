#!/usr/bin/env python3
"""Writes the tables in README.md and docs/ from the catalogue, the variables, the contracts and the results.

`generate_docs.py` rewrites what stands between `<!-- NAME -->` and `<!-- /NAME -->`; `--check` only says whether
anything would change (exit 1).
"""

import json
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

from sglang_fastpath import contracts, envs
from sglang_fastpath.features import CATALOGUE, Feature, Port

ROOT = Path(__file__).resolve().parent.parent
_README_COLUMNS = (("pass_ms", 1), ("sustained_ms", 1), ("kernel_ms", 1), ("launches", 0))
_NOT_MEASURED = "Not measured yet."


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def features() -> str:
    return table(
        ("feature", "what it does", "models", "parity", "switch"),
        ((f"`{f.id}`", f.title, _models(f), f.parity, _switch(f)) for f in CATALOGUE),
    )


def variables() -> str:
    return table(
        ("variable", "values", "default", "meaning"),
        ((f"`{v.name}`", v.values, f"`{v.default}`" if v.default else "-", v.meaning) for v in envs.VARIABLES),
    )


def releases() -> str:
    """A row a feature, a column for all consecutive releases in which every feature has the same state."""
    columns = {release: [_state(f, release) for f in CATALOGUE] for release in contracts.recorded()}
    spans = [(states, list(group)) for states, group in groupby(columns, key=columns.__getitem__)]
    header = [f"{group[0]} to {group[-1]}" if len(group) > 1 else group[0] for _, group in spans]
    return table(
        ("feature", *header),
        ((f"`{f.id}`", *(states[row] for states, _ in spans)) for row, f in enumerate(CATALOGUE)),
    )


def patches() -> str:
    """A section for each port: features that share one differ in why they are there."""
    sections = []
    for port in dict.fromkeys(port for f in CATALOGUE for port in f.ports):
        sharing = [f for f in CATALOGUE if port in f.ports]
        names = ", ".join(f"`{f.id}`" for f in sharing)
        why = "\n".join(f"- `{f.id}`: {f.why}" for f in sharing)
        removal = "\n\n".join(dict.fromkeys(f"Delete {f.removal}." for f in sharing))
        sections.append(
            f"### {port.name}: {names}\n\nWhy:\n\n{why}\n\nReplaces:\n\n{_listed(port.sites)}\n\n"
            f"Relies on:\n\n{_listed(port.relies_on)}\n\n{removal}"
        )
    return "\n\n".join(sections)


def results() -> str:
    """What `bench denoiser` found: two rows a result file."""
    rows = []
    for path, found in _result_files("stock"):
        for name in ("stock", "fast"):
            measured = found[name]
            rows.append(
                (
                    f"[{found['model']}]({_link(path)})",
                    found["gpu"],
                    found["sglang"],
                    found["attention"],
                    name,
                    _wall(measured),
                    _number(measured, "sustained_ms", 1),
                    f"{measured['kernel_ms']:.1f}",
                    f"{measured['floor_ms']:.1f}",
                    f"{measured['launches']:,}",
                    ("yes" if found["bitwise_equal"] else "NO") if name == "fast" else "-",
                )
            )
    header = ("model", "GPU", "SGLang", "attention", "", "wall ms a pass", "sustained ms", "kernel ms", "floor ms")
    return table((*header, "launches", "bitwise equal"), rows)


def measured() -> str:
    """The same for the README: a row a result file, stock -> fast."""
    rows = []
    for path, found in _result_files("stock"):
        stock, fast = found["stock"], found["fast"]
        rows.append(
            (
                f"[{found['model']}, SGLang {found['sglang']}, {found['attention']}]({path.relative_to(ROOT)})",
                found["gpu"],
                *(_change(stock, fast, key, digits) for key, digits in _README_COLUMNS),
                f"{stock['pass_ms'] / fast['pass_ms']:.2f}",
                "yes" if found["bitwise_equal"] else "NO",
            )
        )
    header = ("denoiser", "GPU", "wall ms a pass", "sustained ms", "kernel ms", "launches", "times faster (wall)")
    return table((*header, "bitwise equal"), rows)


def graph() -> str:
    """What `bench denoiser --graph` found: a table a result file, a row a variant."""
    sections = []
    for path, found in _result_files("variants"):
        title = (
            f"[{found['model']}]({_link(path)}), {found['gpu']}, SGLang {found['sglang']}, {found['attention']}. "
            f"Stock's floor: {_number(found, 'floor_ms', 1)} ms."
        )
        rows = [
            (
                f"`{name}`",
                _wall(one),
                _number(one, "sustained_ms", 1),
                _number(one, "host_ms", 2),
                _number(one, "launches", 0),
                _number(one, "kernels", 0),
                _number(one, "kernel_ms", 1),
                _number(one, "sustained_sm_mhz", 0),
                _number(one, "sustained_watts", 0),
                _number(one, "peak_reserved_gib", 1),
                *_verdict(found, name),
            )
            for name, one in found["variants"].items()
        ]
        header = (
            "",
            "wall ms a pass",
            "sustained ms",
            "host ms",
            "launches",
            "kernels",
            "kernel ms",
            "sustained MHz",
        )
        shown = table((*header, "sustained W", "peak GiB", *_VERDICT), rows)
        sections.append("\n\n".join((title, shown, *_remarks(found))))
    return "\n\n".join(sections) or _NOT_MEASURED


def measured_graph() -> str:
    """The same for the README: fewer columns, and by how much the best that stock can do is beaten."""
    sections = []
    for path, found in _result_files("variants"):
        link = path.relative_to(ROOT)
        title = f"[{found['model']}, SGLang {found['sglang']}, {found['attention']}]({link}), {found['gpu']}:"
        rows = [
            (
                f"`{name}`",
                _number(one, "pass_ms", 1),
                _number(one, "sustained_ms", 1),
                _number(one, "host_ms", 2),
                _number(one, "launches", 0),
                *_verdict(found, name),
            )
            for name, one in found["variants"].items()
        ]
        shown = table(("", "wall ms a pass", "sustained ms", "host ms", "launches", *_VERDICT), rows)
        sections.append("\n\n".join((title, shown, *_remarks(found))))
    return "\n\n".join(sections) or _NOT_MEASURED


_VERDICT = ("times stock eager", "times best stock variant", "bitwise equal")


def _verdict(found: dict[str, Any], name: str) -> tuple[str, ...]:
    """How many times faster than stock, eager and at its best (wall), and whether the bytes are stock's."""
    one, stock, best = found["variants"][name], found["variants"]["stock"], _best_stock(found)
    if "pass_ms" not in one:
        return "-", "-", "failed"
    return (
        f"{stock['pass_ms'] / one['pass_ms']:.2f}" if "pass_ms" in stock else "-",
        f"{found['variants'][best]['pass_ms'] / one['pass_ms']:.2f}" if best else "-",
        "yes" if one["bitwise_equal"] else "NO",
    )


def _best_stock(found: dict[str, Any]) -> str | None:
    """The fastest variant without our kernels. One in our graph counts, so that it is the hardest to beat."""
    stock = {
        name: one["pass_ms"]
        for name, one in found["variants"].items()
        if name.partition("+")[0] == "stock" and "pass_ms" in one
    }
    return min(stock, key=stock.__getitem__, default=None)


def _remarks(found: dict[str, Any]) -> list[str]:
    """Below a table: the comparison in words, how a variant was set up, why one failed."""
    variants, best = found["variants"], _best_stock(found)
    ours = variants.get("fast+graph", {})
    remarks = []
    if best and "pass_ms" in ours:
        peer, faster = variants[best], variants[best]["pass_ms"] / ours["pass_ms"]
        sustained = ""
        if peer.get("sustained_ms") and ours.get("sustained_ms"):
            sustained = f" ({peer['sustained_ms'] / ours['sustained_ms']:.2f} times sustained)"
        remarks.append(f"`fast+graph` is {faster:.2f} times as fast as the best stock variant, `{best}`{sustained}.")
    remarks += [f"`{name}`: {one['setup']}." for name, one in variants.items() if "setup" in one]
    for name, one in variants.items():
        if "failed" in one:
            reason = one["failed"].replace("`", "'")
            remarks.append(f"`{name}` failed: `{reason}`.")
    return ["\n".join(f"- {remark}" for remark in remarks)] if remarks else []


def _wall(one: dict[str, Any]) -> str:
    return f"{one['pass_ms']:.1f} ({one['min_ms']:.1f} to {one['max_ms']:.1f})" if "pass_ms" in one else "-"


def _number(one: dict[str, Any], key: str, digits: int) -> str:
    """`-` where the file is older than the key, or the run could not tell."""
    value = one.get(key)
    return "-" if value is None else f"{value:,.{digits}f}"


def _change(stock: dict[str, Any], fast: dict[str, Any], key: str, digits: int) -> str:
    before, after = (_number(one, key, digits) for one in (stock, fast))
    return "-" if before == after == "-" else f"{before} -> {after}"


def ablation() -> str:
    """What `bench denoiser` found of each feature alone and of everything without it: a table a result file."""
    sections = []
    for path, found in _result_files("stock"):
        measured = {id: feature for id, feature in found["features"].items() if "alone_ms" in feature}
        if not measured:
            continue
        rows = [
            (
                f"`{id}`",
                *(
                    cell
                    for how in ("alone", "without")
                    for cell in (
                        f"{feature[f'{how}_ms']:.1f}",
                        f"{feature[f'{how}_kernel_ms']:.1f}",
                        f"{feature[f'{how}_launches']:,}",
                    )
                ),
                "yes" if feature["alone_bitwise_equal"] and feature["without_bitwise_equal"] else "NO",
            )
            for id, feature in measured.items()
        ]
        columns = [
            f"{how}: {what}" for how in ("alone", "without it") for what in ("wall ms", "kernel ms", "launches")
        ]
        title = f"[{found['model']}]({_link(path)}), {found['gpu']}, SGLang {found['sglang']}:"
        sections.append(f"{title}\n\n{table(('feature', *columns, 'bitwise equal'), rows)}")
    return "\n\n".join(sections) or _NOT_MEASURED


def kernels() -> str:
    """What `bench kernels` found: a table a result file."""
    sections = [_kernel_table(path, found) for path, found in _result_files("kernels")]
    return "\n\n".join(sections) or _NOT_MEASURED


def _kernel_table(path: Path, found: dict[str, Any]) -> str:
    title = (
        f"[{found['gpu']}]({_link(path)}), SGLang {found['sglang']}, {found['image_tokens']} image and "
        f"{found['text_tokens']} text tokens, {found['heads']} heads. A copy reaches {found['copy_gb_s']:,.0f} GB/s."
    )
    rows = (
        (
            f"`{name}`",
            f"{kernel['bytes'] / 1e6:.1f}",
            f"{kernel['us']:.1f}",
            f"{kernel['gb_s']:,.0f}",
            f"{100 * kernel['of_copy']:.0f}",
            f"{kernel['stock_us']:.1f}",
            f"{kernel['speedup']:.2f}",
            "yes" if kernel["bitwise_equal"] else "NO",
        )
        for name, kernel in found["kernels"].items()
    )
    header = ("kernel", "MB", "us", "GB/s", "% of copy", "stock us", "speedup", "bitwise equal")
    return f"{title}\n\n{table(header, rows)}"


def tuner() -> str:
    """What `bench tuner` found: a table a result file, with a row for each pass, and who was no candidate."""
    return "\n\n".join(_tuner_tables(path, found) for path, found in _result_files("tuned")) or _NOT_MEASURED


def _tuner_tables(path: Path, found: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    declined: dict[tuple[str, str], int] = {}
    for model, one in found["tuned"].items():
        shapes = [shape for shape in one["shapes"] if "failed" not in shape]
        winners = [f"{s['m']}x{s['n']}x{s['k']}: {s['winner']} {s['ratio']:.3f}" for s in shapes if s["ratio"] < 1]
        effects = [
            f"{label}: {effect['first_ms']:.3f} -> {effect['winners_ms']:.3f} ms"
            + ("" if effect["installed"] else ", not installed")
            if effect["first_ms"]
            else f"{label}: {effect['why']}"
            for label, effect in one["pass_effect"].items()
        ]
        second = one["second_process"]
        again = second.get("failed") or f"{second['tuning_seconds']:.3f} ({second['timed']} timed)"
        cells = str(len(one["shapes"])), "; ".join(winners) or "none", "; ".join(effects) or "-"
        rows.append((model, *cells, f"{one['seconds']:.0f}", again))
        for shape in shapes:
            for kind in ("declined", "excluded"):
                for backend, why in shape[kind].items():
                    said = why if kind == "declined" else "other bytes"
                    declined[backend, said] = declined.get((backend, said), 0) + 1
    title = f"[{found['gpu']}]({_link(path)}), SGLang {found['sglang']}, {found['resolution']}:"
    header = ("model", "shapes", "winners (time over DeepGEMM's)", "whole pass", "tuning s", "second process s")
    reasons = [(f"`{name}`", why.replace("|", "/"), str(count)) for (name, why), count in declined.items()]
    tables = (table(header, rows), table(("backend", "why it was no candidate", "shapes"), reasons))
    return "\n\n".join((title, *tables))


def _result_files(key: str) -> list[tuple[Path, dict[str, Any]]]:
    """The result files that have `key`, which tells benchmarks apart: `stock`, `variants`, `kernels` or `tuned`."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
    found = ((path, json.loads(path.read_text())) for path in paths)
    return [(path, document) for path, document in found if key in document]


def _link(path: Path) -> Path:
    return Path("..") / path.relative_to(ROOT)


def _listed(targets: Iterable[str]) -> str:
    return "\n".join(f"- `{target}`" for target in targets)


def _models(feature: Feature) -> str:
    return ", ".join(
        f"{port.name} (native since {port.native_since})" if port.native_since else port.name
        for port in feature.ports
    )


def _switch(feature: Feature) -> str:
    return f"`{feature.env}=0`" if feature.measured else f"off; `{feature.env}=1`"


def _state(feature: Feature, release: str) -> str:
    states = {port.name: _port_state(port, release) for port in feature.ports}
    if not feature.measured:
        states = {name: "off" if state == "active" else state for name, state in states.items()}
    if len(set(states.values())) == 1:
        return next(iter(states.values()))
    return ", ".join(f"{state} in {name}" for name, state in states.items())


def _port_state(port: Port, release: str) -> str:
    if port.native_since and Version(release) >= Version(port.native_since):
        return "native"
    recorded = contracts.recorded()[release]
    missing = [target for target in port.contract if recorded.get(target) is None]
    return f"drifted ({missing[0]})" if missing else "active"


GENERATED: dict[str, Callable[[], str]] = {
    "features": features,
    "variables": variables,
    "releases": releases,
    "patches": patches,
    "results": results,
    "measured": measured,
    "graph": graph,
    "measured-graph": measured_graph,
    "ablation": ablation,
    "kernels": kernels,
    "tuner": tuner,
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
