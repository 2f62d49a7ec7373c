"""The console script `sglang-fastpath`; every command that reports takes `--json`."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from sglang_fastpath import __version__, envs
from sglang_fastpath.features import BY_ID, CATALOGUE

if TYPE_CHECKING:
    from sglang_fastpath import ablation, benchmark

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_STYLES = {
    "active": "green",
    "native": "green",
    "ok": "green",
    "admitted": "green",
    "identical": "green",
    "running": "green",
    "off": "dim",
    "note": "dim",
    "ended": "yellow",
    "unsupported": "yellow",
    "drifted": "yellow",
    "never hit": "yellow",
    "error": "red",
    "parity-failed": "red",
    "DIFFERENT": "red",
}


def main() -> None:
    """Entry point of the console script."""
    app()


def styled(word: str) -> str:
    """A state or verdict in the colour that it has in every table."""
    style = _STYLES.get(word)
    return f"[{style}]{word}[/]" if style else word


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def table(title: str, *columns: str, names: int = 1) -> Table:
    """An empty table; its first `names` columns are never broken, since people copy names out of them."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=index < names)
    return made


@app.command()
def version() -> None:
    """Print the plugin's version."""
    print(__version__)


@app.command()
def features(as_json: AsJson = False) -> None:
    """The catalogue: every optimization, what it replaces and how to switch it."""
    if as_json:
        print_json([{**asdict(feature), "env": feature.env} for feature in CATALOGUE])
        return
    for f in CATALOGUE:
        shown = table(f"{f.id}: {f.title}", "", "")
        shown.show_header = False
        shown.add_row("why", f.why)
        shown.add_row("switch", f"{f.env}={'|'.join(f.choices)}")
        if f.default_off:
            shown.add_row("off by default", f.default_off)
        shown.add_row("parity", f.parity)
        for port in f.ports:
            native = f" (native since {port.native_since})" if port.native_since else ""
            shown.add_row(f"{port.name}{native}", "\n".join(port.sites))
        for model, reason in f.not_for.items():
            shown.add_row(model, f"not there: {reason}")
        console.print(shown)


@app.command()
def env(as_json: AsJson = False) -> None:
    """Every environment variable with its value here, and the facts about this machine."""
    from sglang_fastpath.environment import detect

    variables = [{**asdict(v), "set": os.environ.get(v.name)} for v in envs.VARIABLES]
    machine = asdict(detect())
    if as_json:
        print_json({"variables": variables, "machine": machine})
        return
    shown = table("Environment variables", "name", "set to", "default", "values", "meaning")
    for v in variables:
        shown.add_row(v["name"], v["set"] or "-", v["default"] or "-", v["values"], v["meaning"])
    console.print(shown)
    facts = table("Machine", "what", "here")
    for key, value in machine.items():
        for name, entry in value.items() if isinstance(value, dict) else [(key, value)]:
            facts.add_row(name, "-" if entry is None else str(entry))
    console.print(facts)


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option(help="A checkpoint folder to look at as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """What is installed and what would be active here, with reasons. Exit 1 if something asked for cannot run."""
    from sglang_fastpath.doctor import as_json as to_json
    from sglang_fastpath.doctor import examine

    findings = examine(os.environ, model)
    if as_json:
        print_json(to_json(findings))
    else:
        shown = table("sglang-fastpath doctor", "", "topic", "finding")
        for finding in findings:
            shown.add_row(styled(finding.level), finding.topic, finding.text)
        console.print(shown)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def status(
    all_processes: Annotated[bool, typer.Option("--all", help="Also processes that have ended.")] = False,
    url: Annotated[str | None, typer.Option(help="Ask this server, e.g. http://127.0.0.1:30000.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: the server's API key, if it has one.")] = None,
    as_json: AsJson = False,
) -> None:
    """What each process runs: per feature its state, hits, fallbacks with reasons, and parity verdicts.

    Of the user's processes on this machine, or with --url of one server. Exit 1 if that cannot be asked.
    """
    from sglang_fastpath import status as status_files

    if url is not None:
        _show_server(url, api_key, all_processes=all_processes, as_json=as_json)
        return
    if api_key is not None:
        sys.exit("sglang-fastpath: --api-key is for --url, which is missing")
    folder = _settings().status_dir
    found = status_files.read(folder, all_processes=all_processes)
    if as_json:
        print_json([process.as_json() for process in found])
        return
    if not found:
        ended = "" if all_processes else " is running (--all shows those that have ended)"
        console.print(f"No process with the plugin{ended}; looked in {folder}.")
    for process in found:
        show_process(process.life, process.document)


def _show_server(url: str, api_key: str | None, *, all_processes: bool, as_json: bool) -> None:
    from sglang_fastpath import server_route

    if all_processes:
        sys.exit("sglang-fastpath: --all is for this machine's status files; a server shows its own processes")
    try:
        processes = server_route.fetch(url, api_key=api_key)
    except server_route.StatusUnavailableError as error:
        sys.exit(f"sglang-fastpath: {error}")
    if as_json:
        print_json(processes)
        return
    if not processes:
        console.print(f"The server at {url} has the plugin, but its processes could not write their status.")
    for process in processes:
        show_process(process["life"], process)


def show_process(life: str, document: dict[str, Any]) -> None:
    """One process of `status` as a table."""
    emulated = "; FP8 linear emulated in torch" if document["emulated"] else ""
    title = f"{document['role']} (pid {document['pid']}, {styled(life)}), SGLang {document['sglang']}{emulated}"
    if not document["serves"]:
        console.print(f"{title}: no model in this process")
        return
    shown = table(title, "feature", "state", "hits", "fallbacks", "parity")
    for id, feature in document["features"].items():
        state = styled(feature["state"]) + (f" ({feature['reason']})" if feature["reason"] else "")
        fallbacks = "\n".join(f"{count} x {why}" for why, count in feature["fallbacks"].items()) or "-"
        shown.add_row(id, state, str(feature["hits"]), fallbacks, parity_of(id, document["verdicts"]))
    console.print(shown)
    if document["remark"]:
        console.print(f"[yellow]{document['remark']}[/]")


def parity_of(feature_id: str, verdicts: list[dict[str, Any]]) -> str:
    """The guard's verdicts on one feature: how many checks gave stock's bytes, how many signatures failed."""
    mine = [verdict for verdict in verdicts if verdict["feature"] == feature_id]
    failed = sum(verdict["verdict"] == "parity-failed" for verdict in mine)
    if failed:
        return f"[red]{failed} of {len(mine)} failed[/]"
    return f"[green]{sum(verdict['checks'] for verdict in mine)} equal[/]" if mine else "-"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ablate(
    context: typer.Context,
    model_path: Annotated[Path | None, typer.Option(help="A checkpoint folder that SGLang serves.")] = None,
    model: Annotated[
        str | None, typer.Option(help="qwen-image or flux2: that denoiser alone, random weights, no checkpoint.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="With --model: blocks of each kind, if not all.")] = None,
    heads: Annotated[int | None, typer.Option(help="With --model: heads of 128, if not the model's own.")] = None,
    text_tokens: Annotated[int | None, typer.Option(help="With --model: if not as many as it takes.")] = None,
    attention: Annotated[str, typer.Option(help="With --model: SGLang's attention backend.")] = "fa",
    features: Annotated[
        str | None, typer.Option(help="With --model-path: of the features these, a,b,...; two runs each.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where images, logs and status files go.")] = Path("ablation"),
    prompt: str = "a cat",
    negative_prompt: Annotated[str, typer.Option(help="Guidance needs one to run two passes a step.")] = "blurry",
    guidance: Annotated[float, typer.Option(help="SGLang's --true-cfg-scale.")] = 4.0,
    width: int = 1024,
    height: int = 1024,
    steps: int = 10,
    seed: int = 0,
    emulate: Annotated[
        bool, typer.Option(help="Emulate the FP8 linear in torch: for machines without a GPU.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run SGLang stock and with features switched; compare what comes out as bytes, show what each did.

    With --model-path its whole engine on one prompt, images compared; further options are passed on to
    `sglang generate`. With --model one denoiser in this process, latents compared after every step. Exit 1 if
    anything differs from stock's.
    """
    from sglang_fastpath import ablation

    if (model is None) == (model_path is None):
        sys.exit(
            "sglang-fastpath: ablate takes --model-path (a checkpoint) or --model (qwen-image, flux2), one of them"
        )
    wanted = None if features is None else [name.strip() for name in features.split(",")]
    if unknown := [name for name in wanted or () if name not in BY_ID]:
        sys.exit(f"sglang-fastpath: --features: no {unknown[0]!r}; known: {', '.join(BY_ID)}")
    if model is not None and wanted is not None:
        sys.exit("sglang-fastpath: --features is for --model-path; with --model every feature is ablated")
    if model is not None:
        full = _full_size(model)
        _ablate_denoiser(
            model,
            full.sized(layers, heads),
            (height, width),
            text_tokens or full.text_tokens,
            attention,
            steps,
            emulate=emulate,
            as_json=as_json,
        )
        return
    output.mkdir(parents=True, exist_ok=True)
    arguments = [
        *("--model-path", str(model_path), "--prompt", prompt, "--negative-prompt", negative_prompt),
        *("--true-cfg-scale", str(guidance), "--width", str(width), "--height", str(height)),
        *("--num-inference-steps", str(steps), "--seed", str(seed), *context.args),
    ]
    outcomes: list[ablation.Outcome] = []
    planned = [ablation.STOCK, ablation.EVERYTHING]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("", total=len(planned))
        while len(outcomes) < len(planned):
            variant = planned[len(outcomes)]
            bar.update(task, description=variant.name, total=len(planned))
            try:
                outcomes.append(ablation.run(variant, arguments, output, emulate=emulate))
            except ablation.AblationError as error:
                sys.exit(f"sglang-fastpath: {variant.name}: {error}")
            if variant is ablation.EVERYTHING:
                planned += ablation.with_features(outcomes[-1].workers, wanted)
            bar.advance(task)
    if as_json:
        print_json(
            [
                {
                    "variant": o.variant.name,
                    "image": o.image,
                    "identical": o.identical,
                    "workers": [worker.as_json() for worker in o.workers],
                }
                for o in outcomes
            ]
        )
    else:
        show_ablation(outcomes, emulate=emulate)
    if not all(outcome.identical for outcome in outcomes):
        raise typer.Exit(1)


def _ablate_denoiser(
    model: str,
    arch: dict[str, int],
    size: tuple[int, int],
    text_tokens: int,
    attention: str,
    steps: int,
    *,
    emulate: bool,
    as_json: bool,
) -> None:
    from sglang_fastpath import benchmark
    from sglang_fastpath.denoisers import PIXELS_PER_TOKEN

    if not emulate:
        _require_gpu("ablate --model without --emulate")
    workload = benchmark.Workload(
        model=model,
        arch=arch,
        image_hw=(size[0] // PIXELS_PER_TOKEN, size[1] // PIXELS_PER_TOKEN),
        text_tokens=text_tokens,
        attention="torch_sdpa" if emulate else attention,
        device="cpu" if emulate else "cuda",
    )
    progress = partial(Console(stderr=True).print, markup=False)
    outcomes = benchmark.run_parity(workload, steps=steps, emulate=emulate, report=progress)
    if as_json:
        print_json(outcomes)
    else:
        shown = table(f"Ablation of {model}", "variant", "latents", "feature", "state", "calls", names=3)
        for name, outcome in outcomes.items():
            same = styled("identical" if outcome["bitwise_equal"] else outcome["failed"] or "DIFFERENT")
            switched_on = {
                id: seen for id, seen in outcome["features"].items() if not seen["state"].startswith("off")
            }
            for id, seen in switched_on.items():
                shown.add_row(name, same, id, styled(seen["state"]), str(seen["hits"]))
                name, same = "", ""
        console.print(shown)
    if not all(outcome["bitwise_equal"] for outcome in outcomes.values()):
        raise typer.Exit(1)


def show_ablation(outcomes: "list[ablation.Outcome]", *, emulate: bool) -> None:
    """The ablation as a table: a row per variant, worker and feature."""
    shown = table("Ablation", "variant", "PNG", "feature", "state", "calls", "parity", names=5)
    notes: dict[str, None] = {}
    for outcome in outcomes:
        image = styled("identical" if outcome.identical else "DIFFERENT") if outcome.variant.plugin else "reference"
        if not outcome.workers:
            shown.add_row(outcome.variant.name, image, "-", "-", "-", "-")
        for worker in outcome.workers:
            for id, feature in worker.document["features"].items():
                parity = parity_of(id, worker.document["verdicts"])
                state = styled(feature["state"])
                shown.add_row(outcome.variant.name, image, id, state, str(feature["hits"]), parity)
                if feature["reason"]:
                    notes[f"{outcome.variant.name}: {id} {feature['state']}: {feature['reason']}"] = None
            if worker.document["remark"]:
                notes[f"{outcome.variant.name}: {worker.document['remark']}"] = None
    console.print(shown)
    for note in notes:
        console.print(note, style="dim")
    console.print(
        "PNG: the file against stock's, as bytes. calls: stock calls replaced. parity: checks with stock's bytes."
    )
    if emulate:
        console.print("The FP8 linear was emulated in torch (no GPU), in stock too; times would mean nothing.")


@app.command()
def quantize(
    source: Annotated[
        Path, typer.Argument(help="A bf16 diffusers checkpoint: a pipeline or its transformer folder.")
    ],
    destination: Annotated[Path, typer.Argument(help="Where the block-FP8 checkpoint goes; must not exist.")],
    include: Annotated[list[str], typer.Option(help="Glob of layers to quantize besides attention and MLP.")] = [],  # noqa: B006
    exclude: Annotated[list[str], typer.Option(help="Glob of layers to leave in bf16.")] = [],  # noqa: B006
    max_shard_size: Annotated[str, typer.Option(help="Size of an output file, and the memory needed.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Turn a bf16 diffusers checkpoint (Qwen-Image, FLUX.2) into block FP8 [128, 128] that stock SGLang loads."""
    from sglang_fastpath.loaders import quantize as loader

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        options = loader.QuantizeOptions(tuple(include), tuple(exclude), loader.parse_size(max_shard_size))
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None)

            def show(event: loader.ProgressEvent) -> None:
                where = f"shard {event.shard}/{event.shards}" if event.shard else event.item
                bar.update(
                    task,
                    description=f"{event.phase} {where}",
                    completed=event.done_bytes,
                    total=event.total_bytes,
                )

            report = loader.quantize_checkpoint(source, destination, options=options, progress=show)
    except loader.QuantizeError as error:
        sys.exit(f"sglang-fastpath: {error}")
    if as_json:
        print_json(asdict(report))
        return
    shown = table(f"{destination} ({report.model_class})", "what", "value")
    shown.add_row("layers in block FP8", str(len(report.quantized)))
    shown.add_row("linear layers kept", str(len(report.kept)))
    shown.add_row("bytes", f"{report.bytes_before:,} -> {report.bytes_after:,}")
    shown.add_row("largest relative error", f"{report.max_relative_error:.4f} ({report.worst_layer})")
    shown.add_row("shards", f"{report.shards} ({report.resumed_shards} from an interrupted run)")
    console.print(shown)
    for warning in report.warnings:
        console.print(f"[yellow]{warning}[/]")


@app.command()
def tune(
    model: Annotated[str | None, typer.Option(help="qwen-image, flux2, qwen3-8b, or a checkpoint's folder.")] = None,
    resolution: Annotated[str, typer.Option(help="WIDTHxHEIGHT in pixels, for a denoiser.")] = "1024x1024",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Text tokens of each prompt; of an LLM the batches to decode.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of each kind in the pass, if not all.")] = None,
    check: Annotated[
        bool, typer.Option(help="Time the whole pass with the winners; without that they are not installed.")
    ] = True,
    again: Annotated[bool, typer.Option("--again", help="Also what has been tuned before.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also why the other backends are no candidates.")
    ] = False,
    import_from: Annotated[
        Path | None, typer.Option("--import", help="First add what another machine of this kind exported.")
    ] = None,
    export_to: Annotated[Path | None, typer.Option("--export", help="Last write all that has been tuned.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest GEMM backend with stock's bytes for each shape of a model, and remember it.

    Without --model only --import and --export are done, which takes no GPU.
    """
    from sglang_fastpath import gemm_tuning, gemm_workload
    from sglang_fastpath.tuning_cache import ForeignFileError, TuningCache

    if model is None and not import_from and not export_to:
        sys.exit(f"sglang-fastpath: tune takes --model ({', '.join(gemm_workload.KNOWN)}), --import or --export")
    settings, notes = _settings(), Console(stderr=True, soft_wrap=True)
    cache = TuningCache(settings.cache_dir)
    try:
        workload = gemm_workload.find(model, resolution, tokens or []) if model else None
        if import_from:
            notes.print(f"{cache.load(import_from)} decisions imported from {import_from}")
        if workload:
            _require_gpu("tune --model")
            with _progress_bar() as progress:
                report = gemm_tuning.tune_on_gpu(
                    workload, settings, progress, layers=layers, check=check, again=again
                )
            if as_json:
                print_json(report.as_json())
            else:
                show_tuning(report.as_json(), explain=explain)
        if export_to:
            notes.print(f"{cache.export(export_to)} decisions written to {export_to}")
    except (gemm_workload.WorkloadError, ForeignFileError, OSError) as error:
        sys.exit(f"sglang-fastpath: {error}")


class _ProgressBar:
    """What `tune` shows while it works: `gemm_tuning.Progress`."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def begin(self, total: int) -> None:
        self._bar.reset(self._task, total=total)

    def working_on(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def _progress_bar() -> Iterator[_ProgressBar]:
    what = TextColumn("{task.description}", markup=False)
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _ProgressBar(bar)


def show_tuning(report: dict[str, Any], *, explain: bool) -> None:
    """What `tune` found as a table: a row a shape, and below it why backends were no candidates."""
    backends = report["backends"]
    title = f"{report['model']} ({report['profile']}), {report['seconds']:.1f} s; backends: {', '.join(backends)}"
    shown = table(title, "M x N x K", "linears", "stock", "winner", "ratio", "s", "installed")
    reasons: dict[str, dict[str, list[str]]] = {}
    for shape in report["shapes"]:
        size = f"{shape['m']}x{shape['n']}x{shape['k']}"
        if "failed" in shape:
            shown.add_row(size, shape["linears"], "-", "-", "-", "-", f"[red]{escape(shape['failed'])}[/]")
            continue
        wins = shape["winner"] != shape["first"]
        installed = shape["serving"] == shape["winner"] and wins
        shown.add_row(
            size,
            shape["linears"],
            shape["first"],
            f"[green]{shape['winner']}[/]" if wins else "-",
            f"{shape['ratio']:.3f}" if wins else "-",
            "cached" if shape["cached"] else f"{shape['seconds']:.1f}",
            "yes" if installed else escape(shape["verdict"]) or "no: the whole pass has not been timed",
        )
        for kind in ("declined", "excluded"):
            for backend, why in shape[kind].items():
                reasons.setdefault(backend, {}).setdefault(f"{kind}: {why}", []).append(size)
    console.print(shown)
    for label, verdict in report["pass_effect"].items():
        times = "" if verdict["first_ms"] is None else f" {verdict['first_ms']:.3f} -> {verdict['winners_ms']:.3f} ms"
        console.print(f"{label}:{times} {verdict['why']}", markup=False)
    if len(backends) == 1:
        env = BY_ID["gemm_tuner"].env
        console.print(f"{env}=all lets in every backend, when tuning and when serving.", style="dim")
    if explain:
        why = table("No candidates", "backend", "why", "shapes")
        for backend, found in reasons.items():
            for reason, sizes in found.items():
                why.add_row(backend, escape(reason), ", ".join(sizes))
        console.print(why)
    elif reasons:
        console.print("--explain says why the other backends were no candidates.", style="dim")


bench = typer.Typer(no_args_is_help=True, help="Measure on this machine's GPU, stock and fast interleaved.")
app.add_typer(bench, name="bench")


@bench.command("denoiser")
def bench_denoiser(
    model: Annotated[str, typer.Option(help="qwen-image or flux2.")] = "qwen-image",
    layers: Annotated[int | None, typer.Option(help="Blocks of each kind, if not all.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of guidance, two passes each.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all variants.")] = 3,
    text_tokens: Annotated[int | None, typer.Option(help="256 for Qwen-Image, 512 for FLUX.2, if not given.")] = None,
    attention: Annotated[str, typer.Option(help="SGLang's attention backend.")] = "fa",
    sustained_steps: Annotated[int, typer.Option(min=1, help="Steps in a row for the sustained time.")] = 6,
    ablation: Annotated[bool, typer.Option(help="Also each feature alone, and everything without it.")] = True,
    graph: Annotated[
        bool, typer.Option("--graph", help="Compare with CUDA graphs and torch.compile, stock's and ours, instead.")
    ] = False,
    variants: Annotated[
        str | None, typer.Option(help="With --graph: of its variants these, a,b,... and stock.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
) -> None:
    """A full-size denoiser with random weights: parity over a guidance run, times, kernel sums, launches.

    Exit 1 if what the plugin computes is not stock's, or not at all.
    """
    from sglang_fastpath import benchmark

    full = _full_size(model)
    names = _graph_variants(variants, graph=graph)
    _require_gpu()
    workload = benchmark.Workload(
        model=model,
        arch=full.sized(layers, None),
        text_tokens=text_tokens or full.text_tokens,
        attention=attention,
    )
    document = benchmark.describe(workload, _command())
    how: dict[str, Any] = {
        "steps": steps,
        "rounds": rounds,
        "sustained_steps": sustained_steps,
        "report": partial(Console(stderr=True).print, markup=False),
    }
    if graph:
        document |= benchmark.run_graphs(workload, names=names, **how)
    else:
        document |= benchmark.run(workload, ablation=ablation, **how)
    if output:
        benchmark.write(document, output)
    print_json(document)
    if benchmark.unequal(document):
        raise typer.Exit(1)


def _full_size(model: str) -> "benchmark.Model":
    from sglang_fastpath import benchmark

    if model not in benchmark.MODELS:
        sys.exit(f"sglang-fastpath: --model {model!r}: no such denoiser; known: {', '.join(benchmark.MODELS)}")
    return benchmark.MODELS[model]


def _command() -> str:
    """This command line, less where its result went."""
    words = iter(sys.argv[1:])
    return " ".join(["sglang-fastpath", *(word for word in words if word != "--output" or not next(words))])


def _graph_variants(listed: str | None, *, graph: bool) -> list[str] | None:
    """The names after --variants, or None for all."""
    if listed is None:
        return None
    if not graph:
        sys.exit(f"sglang-fastpath: --variants {listed}: only --graph has variants to choose from; add it")
    from sglang_fastpath.benchmark_variants import make_graph_variants

    names = [name.strip() for name in listed.split(",")]
    known = list(make_graph_variants())
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"sglang-fastpath: --variants: no {unknown[0]!r}; known: {', '.join(known)}")
    return names


@bench.command("tuner")
def bench_tuner(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="As `tune` takes it; each of qwen-image, flux2, qwen3-8b.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of each kind in the pass, if not all.")] = None,
    check: Annotated[bool, typer.Option(help="Time the whole pass with the winners.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
) -> None:
    """The GEMM tuner, every backend let in: what wins, what that does to a pass, what tuning costs, cold and cached.

    In a cache of its own, which is thrown away.
    """
    _require_gpu()
    from sglang_fastpath import benchmark, gemm_workload, tuner_benchmark

    command = _command()
    try:
        with _progress_bar() as progress:
            document = tuner_benchmark.run(
                models or gemm_workload.KNOWN, command, layers=layers, check=check, progress=progress
            )
    except gemm_workload.WorkloadError as error:
        sys.exit(f"sglang-fastpath: {error}")
    if output:
        benchmark.write(document, output)
    print_json(document)


@bench.command("kernels")
def bench_kernels(
    image_tokens: Annotated[int, typer.Option(min=1)] = 4096,
    text_tokens: Annotated[int, typer.Option(min=1)] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Heads of 128.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all kernels and the copy.")] = 20,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Each fused kernel: parity, then its bandwidth against a copy and its time against stock's chain."""
    _require_gpu()
    from sglang_fastpath import benchmark, kernel_benchmark

    size = kernel_benchmark.Size(image_tokens=image_tokens, text_tokens=text_tokens, heads=heads)
    command = _command()
    try:
        document = kernel_benchmark.run(size, command, rounds=rounds, report=Console(stderr=True).print)
    except kernel_benchmark.UnsupportedSizeError as error:
        sys.exit(f"sglang-fastpath: {error}")
    if output:
        benchmark.write(document, output)
    if as_json:
        print_json(document)
    else:
        show_kernels(document)
    if not all(kernel["bitwise_equal"] for kernel in document["kernels"].values()):
        raise typer.Exit(1)


@bench.command("llm")
def bench_llm(
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; Qwen3-8B has 36.")] = 36,
    features: Annotated[
        str | None, typer.Option(help="These features, a,b,...; default: all of the LLM path.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
) -> None:
    """Qwen3-8B's shapes in block FP8 with random weights: decode and prefill times, logits and tokens as bytes.

    Exit 1 if what the plugin computes is not stock's, or a feature replaced nothing.
    """
    from sglang_fastpath import benchmark, llm_benchmark

    known = [feature.id for feature in CATALOGUE if feature.path == "llm"]
    wanted = known if features is None else [name.strip() for name in features.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"sglang-fastpath: --features: no {unknown[0]!r}; known: {', '.join(known)}")
    _require_gpu()
    report = partial(Console(stderr=True).print, markup=False)
    try:
        document = llm_benchmark.run(llm_benchmark.Workload(layers=layers), features=wanted, report=report)
    except llm_benchmark.LlmBenchmarkError as error:
        sys.exit(f"sglang-fastpath: {error}")
    document |= {"commit": benchmark.commit(), "command": _command()}
    if output:
        benchmark.write(document, output)
    print_json(document)
    if not document["bitwise_equal"]:
        raise typer.Exit(1)


def show_kernels(document: dict[str, Any]) -> None:
    """The result of `bench kernels` as a table."""
    title = (
        f"Kernels, {document['gpu']}, SGLang {document['sglang']}; a copy reaches {document['copy_gb_s']:,.0f} GB/s"
    )
    shown = table(title, "kernel", "MB", "us", "GB/s", "% copy", "stock us", "speedup", names=7)
    for name, kernel in document["kernels"].items():
        shown.add_row(
            name,
            f"{kernel['bytes'] / 1e6:.1f}",
            f"{kernel['us']:.1f}",
            f"{kernel['gb_s']:,.0f}",
            f"{100 * kernel['of_copy']:.0f}",
            f"{kernel['stock_us']:.1f}",
            f"{kernel['speedup']:.2f}",
        )
    console.print(shown)
    differing = [name for name, kernel in document["kernels"].items() if not kernel["bitwise_equal"]]
    if differing:
        console.print(f"[red]Not stock's bytes: {', '.join(differing)}[/]")


def _require_gpu(what: str = "bench") -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"sglang-fastpath: {what} needs an NVIDIA GPU; torch.cuda.is_available() is False")


def _settings() -> envs.Settings:
    try:
        return envs.read()
    except envs.ConfigurationError as error:
        sys.exit(f"sglang-fastpath: {error}")


if __name__ == "__main__":
    main()
