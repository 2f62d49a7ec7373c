#!/usr/bin/env python3
"""What `step_graph` promises over a long run, shown on a GPU: bytes, host time and memory, written as JSON.

    soak_step_graph.py OUTPUT [--attention fa] [--layers 60] [--soak-layers 2] [--passes 2000] [--only guided|soak]

`guided`, a Qwen-Image at full size: 20 steps of guidance with prompts of two lengths, another resolution, the first
again. Every latent is stock's; a pass that is replayed keeps the host for less than 2 ms; with four graphs alive the
device holds at most 1.15 times what it holds eagerly.

`soak`, one as wide but of few blocks: 2,000 passes over 30 random pairs of resolution and prompt length, with room
for 4 graphs. Every 50th is compared with stock; after the first 200 reserved memory does not grow.

About two minutes on an H200, and as long again where DeepGEMM has to compile its kernels first. OUTPUT is written as
soon as there is something to write; a part that is left out keeps what OUTPUT says of it. `unmet` says what did not
hold, and the exit status is 1 then.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang_fastpath.patches.diffusion import step_graph
from torch import Tensor, nn

from sglang_fastpath import contracts, envs
from sglang_fastpath.benchmark import MODELS, Workload, describe, write
from sglang_fastpath.benchmark_variants import Variant, make_graph_variants
from sglang_fastpath.denoisers import denoiser_inputs, start_runtime
from sglang_fastpath.guard import compare
from sglang_fastpath.plan import make_plan

STEPS = 20
RUNS: tuple[dict[str, Any], ...] = (
    {"image_hw": (64, 64), "text_tokens": 256, "negative_tokens": 77},
    {"image_hw": (52, 78), "text_tokens": 200, "negative_tokens": 77},
    {"image_hw": (64, 64), "text_tokens": 256, "negative_tokens": 77},
)
HOST_MS = 2.0
TIMES_EAGER_PEAK = 1.15
GRAPHS = 4
PAIRS = 30
SETTLED_AFTER = 200
CHECK_EVERY = 50
LONGEST_BURST = 4
SWEEPS = 5

Part = Callable[[Callable[[dict[str, Any]], None]], dict[str, Any]]
"""Gets a function that keeps what is known so far, returns what was found in the end."""

_started = time.perf_counter()


def report(line: str) -> None:
    print(f"{time.perf_counter() - _started:6.1f} s  {line}", flush=True)


# --- the device ----------------------------------------------------------------------------------------------------


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rest() -> None:
    """Nothing cached, and peaks from now on."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, float]:
    return {"peak_gib": gib(torch.cuda.max_memory_allocated()), "reserved_gib": gib(torch.cuda.max_memory_reserved())}


def gib(number: float) -> float:
    return round(number / 2**30, 3)


def graphs_of(variant: Variant) -> Any:
    """The plan's `StepGraphs`; there are some once the plan has been applied."""
    assert variant.plan is not None
    return variant.plan.kept(step_graph.__name__, lambda: None)


# --- guidance at full size -----------------------------------------------------------------------------------------


def guided(
    denoiser: nn.Module, eager: Variant, graph: Variant, *, steps: int = STEPS, runs: Sequence[dict[str, Any]] = RUNS
) -> Part:
    """`eager` and `graph` are the plugin's without graphs and with them."""

    def play(variant: Variant, steps: int, size: dict[str, Any], host: list[float]) -> list[Tensor]:
        """The latents after each step; adds the milliseconds that each pass keeps the host, from an idle GPU on."""

        def timed(run_pass: Callable[[], Tensor]) -> Tensor:
            synchronize()
            started = time.perf_counter()
            result = run_pass()
            host.append((time.perf_counter() - started) * 1e3)
            return result

        with variant.applied():
            return [latents.clone() for latents in variant.loop(denoiser, steps=steps, around_pass=timed, **size)]

    def found(keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        for variant in (eager, graph):
            variant.prepare(denoiser)
        document: dict[str, Any] = {
            "steps": steps,
            "runs": [{key: list(v) if isinstance(v, tuple) else v for key, v in size.items()} for size in runs],
            "memory": {},
            "host_ms": {},
        }
        distinct = [size for index, size in enumerate(runs) if size not in runs[:index]]
        stock, host = [], list[float]()
        rest()
        for size in distinct:
            stock.append(play(Variant(), steps, size, host))
            report(f"  stock: {size}")
        document["memory"]["stock"] = peaks()
        document["host_ms"]["stock"] = {"median": round(statistics.median(host), 3)}
        keep(document)

        for _ in range(2):  # its first passes merge weights: the peak of those after is what compares
            host = []
            rest()
            for size in distinct:
                play(eager, 3, size, host)
        document["memory"]["fast"] = peaks()
        document["host_ms"]["fast"] = {"median": round(statistics.median(host), 3)}
        report("  fast, eager")
        keep(document)

        rest()
        document["bitwise_equal"] = []
        for size in runs:
            host = []
            difference = compare(play(graph, steps, size, host), stock[distinct.index(size)])
            document["bitwise_equal"].append(difference is None)
            report(f"  fast+graph: {difference or 'bitwise equal'}")
        graphs = graphs_of(graph)
        document["memory"]["fast+graph"] = {**peaks(), "pool_gib": gib(graphs.pool_bytes), "graphs": graphs.alive}
        document["host_ms"]["fast+graph"] = {  # of the last run, in which every pass is a replay
            "mean": round(statistics.fmean(host), 3),
            "median": round(statistics.median(host), 3),
            "max": round(max(host), 3),
        }
        document |= counts(graph)
        keep(document)
        graph.verify()
        return document

    return found


def counts(variant: Variant) -> dict[str, Any]:
    assert variant.plan is not None
    record = variant.plan.records["step_graph"]
    failed = [verdict for verdict in variant.plan.guard.verdicts if verdict["verdict"] != "admitted"]
    return {"hits": record.hits, "fallbacks": dict(record.fallbacks), "parity_failed": failed}


def unmet_by_guided(found: dict[str, Any], needed_graphs: int = GRAPHS) -> Iterator[str]:
    if not all(found["bitwise_equal"]):
        yield f"latents that are not stock's: {found['bitwise_equal']}"
    if found["parity_failed"]:
        yield f"{len(found['parity_failed'])} signatures failed their parity"
    if (mean := found["host_ms"]["fast+graph"]["mean"]) >= HOST_MS:
        yield f"a replayed pass keeps the host for {mean} ms"
    memory = found["memory"]
    graph = memory["fast+graph"]
    if graph["graphs"] < needed_graphs:
        yield f"{graph['graphs']} graphs alive"
    # Between replays nobody has allocated what the pool holds. While a capture runs it counts twice here.
    held = {"peak_gib": graph["peak_gib"] + graph["pool_gib"], "reserved_gib": graph["reserved_gib"]}
    for measure, most in held.items():
        eagerly = min(memory["stock"][measure], memory["fast"][measure])
        if most > TIMES_EAGER_PEAK * eagerly:
            yield f"{measure}: {most:.3f} with graphs, {eagerly} eagerly"


# --- many graphs, one after another --------------------------------------------------------------------------------


def soak(denoiser: nn.Module, graph: Variant, *, passes: int, pairs: Sequence[tuple[tuple[int, int], int]]) -> Part:
    """`pairs` of (height, width) in tokens and text tokens; `graph` has room for fewer graphs."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    def call(inputs: dict[str, Any]) -> Tensor:
        with torch.inference_mode(), set_forward_context(current_timestep=0, attn_metadata=None):
            result: Tensor = denoiser(**inputs)
        return result

    def found(keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        graph.prepare(denoiser)
        # Of each pair several inputs: a graph that did not read them anew would pass for right with one.
        inputs = [
            [
                denoiser_inputs(denoiser, image_hw=hw, text_tokens=tokens, seed=seed, timestep=300.0 + 200 * seed)
                for seed in range(3)
            ]
            for hw, tokens in pairs
        ]
        expected = [[call(each) for each in alike] for alike in inputs]
        report(f"  stock: {len(pairs)} pairs")
        rest()
        reserved: list[int] = []
        document: dict[str, Any] = {
            "pairs": [[*hw, tokens] for hw, tokens in pairs],
            "passes": 0,
            "checked": 0,
            "checked_replays": 0,
            "unequal": [],
            "reserved_gib": [],
        }
        assert graph.plan is not None
        record, guard = graph.plan.records["step_graph"], graph.plan.guard
        with graph.applied():
            for index, pair in enumerate(schedule(len(pairs), passes)):
                number = index % len(inputs[pair])
                before = record.hits, guard.checks
                result = call(inputs[pair][number])
                reserved.append(torch.cuda.memory_reserved())
                if index % CHECK_EVERY == 0:
                    document["checked"] += 1
                    document["checked_replays"] += (record.hits - 1, guard.checks) == before
                    if difference := compare(result, expected[pair][number]):
                        document["unequal"].append(f"pass {index}, pair {pair}: {difference}")
                if (index + 1) % SETTLED_AFTER == 0 or index + 1 == passes:
                    document["passes"] = index + 1
                    starts = range(0, len(reserved), SETTLED_AFTER)
                    document["reserved_gib"] = [gib(max(reserved[at : at + SETTLED_AFTER])) for at in starts]
                    document |= {"most_graphs": graph.plan.settings.graphs, **counts(graph), "checks": guard.checks}
                    keep(document)
                    report(f"  {index + 1} passes, at most {document['reserved_gib'][-1]} GiB reserved")
        graph.verify()
        return document

    return found


def schedule(pairs: int, passes: int) -> Iterator[int]:
    """Which pair each pass is of: first every pair a few times over, then bursts of random ones.

    A burst's first pass captures anew, as a rule; those after it are replays.
    """
    rng = random.Random(0)
    order = [number for sweep in range(SWEEPS) for number in rng.sample(range(pairs), pairs)]
    while len(order) < passes:
        order += [rng.randrange(pairs)] * rng.randint(1, LONGEST_BURST)
    return iter(order[:passes])


def random_pairs(number: int) -> list[tuple[tuple[int, int], int]]:
    rng = random.Random(1)
    return [((rng.randint(8, 48), rng.randint(8, 48)), rng.randint(8, 300)) for _ in range(number)]


def unmet_by_soak(found: dict[str, Any], passes: int) -> Iterator[str]:
    if found["passes"] < passes:
        yield f"only {found['passes']} passes"
    if found["unequal"]:
        yield f"not stock's bytes: {found['unequal']}"
    if not found["checked_replays"]:
        yield "no pass that was compared with stock was a replay"
    if found["parity_failed"]:
        yield f"{len(found['parity_failed'])} signatures failed their parity"
    settled, *after = found["reserved_gib"]
    if after and max(after) > settled:
        yield f"reserved memory grew from {settled} to {max(after)} GiB after {SETTLED_AFTER} passes"


# --- both ----------------------------------------------------------------------------------------------------------


def run(
    document: dict[str, Any], output: Path, parts: dict[str, tuple[Part, Callable[[dict[str, Any]], Iterator[str]]]]
) -> list[str]:
    """Runs one part after another, whatever becomes of those before, and returns what did not hold.

    What `document` says of other parts stays.
    """
    document["unmet"] = [what for what in document.get("unmet", []) if what.partition(":")[0] not in parts]
    for name, (part, unmet) in parts.items():
        report(name)
        started = time.perf_counter()
        document.pop(name, None)

        def keep(found: dict[str, Any], name: str = name) -> None:
            document[name] = found
            write(document, output)

        try:
            document[name] = part(keep)
            document["unmet"] += [f"{name}: {what}" for what in unmet(document[name])]
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            document[name] = {**document.get(name, {}), "failed": reason}
            document["unmet"].append(f"{name}: {reason}")
        document[name]["seconds"] = round(time.perf_counter() - started, 1)
        write(document, output)
    for what in document["unmet"]:
        report(f"UNMET {what}")
    found: list[str] = document["unmet"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--attention", default="fa")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--soak-layers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2000)
    parser.add_argument("--only", choices=["guided", "soak"])
    options = parser.parse_args()
    start_runtime(attention_backend=options.attention)
    model = MODELS["qwen-image"]
    workload = Workload(arch={"layers": options.layers}, attention=options.attention)
    document: dict[str, Any] = json.loads(options.output.read_text()) if options.output.is_file() else {}
    document |= describe(workload, f"{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}")

    def build(layers: int) -> nn.Module:
        report(f"building a denoiser of {layers} blocks")
        return model.build(**model.arch | {"layers": layers}, fp8=True, device="cuda")

    def guided_at_full_size(keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        variants = make_graph_variants(("fast", "fast+graph"))
        return guided(build(options.layers), variants["fast"], variants["fast+graph"])(keep)

    def soak_of_few_blocks(keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        plan = make_plan(envs.Settings(enabled=True, graphs=GRAPHS), contracts.installed_release())
        graph = Variant(plan, required=["step_graph"])
        return soak(build(options.soak_layers), graph, passes=options.passes, pairs=random_pairs(PAIRS))(keep)

    parts: dict[str, tuple[Part, Callable[[dict[str, Any]], Iterator[str]]]] = {
        "guided": (guided_at_full_size, unmet_by_guided),
        "soak": (soak_of_few_blocks, lambda found: unmet_by_soak(found, options.passes)),
    }
    chosen = {name: part for name, part in parts.items() if options.only in (None, name)}
    unmet = run(document, options.output, chosen)
    sys.exit(bool(unmet))


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    main()
