#!/usr/bin/env python3
"""`step_graph` over a long run on a GPU: bytes, host time and memory, written as JSON.

    soak_step_graph.py OUTPUT [--attention fa] [--layers 60] [--passes 2000] [--only guided|soak]

First a full-size denoiser: 20 steps of guidance with prompts of two lengths, another resolution, the first again;
every latent against stock. Then a small one: passes over 30 random (resolution, prompt length) pairs with room for 4
graphs; every 50th against eager, and the allocator's reserved memory. OUTPUT is written after each part, and says of
one that was cut short how far it came; a part that is left out keeps what OUTPUT says of it.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang_fastpath.patches.diffusion import step_graph
from torch import Tensor, nn

from sglang_fastpath import contracts, envs
from sglang_fastpath.benchmark import Workload, describe, write
from sglang_fastpath.benchmark_variants import Variant
from sglang_fastpath.denoisers import build_qwen_image, denoiser_inputs, start_runtime
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.guard import compare
from sglang_fastpath.guidance_loop import GuidanceLoop
from sglang_fastpath.plan import make_plan

STEPS = 20
RUNS: tuple[dict[str, Any], ...] = (
    {"image_hw": (64, 64), "text_tokens": 256, "negative_tokens": 77},
    {"image_hw": (52, 78), "text_tokens": 200, "negative_tokens": 77},
    {"image_hw": (64, 64), "text_tokens": 256, "negative_tokens": 77},
)
SETTLED_AFTER = 200
CHECK_EVERY = 50
REPORT_EVERY = 200
_STARTED = time.perf_counter()


def fast(*, graph: bool, graphs: int = 8) -> Variant:
    switches = {feature.id: graph or feature.id != "step_graph" for feature in CATALOGUE}
    settings = envs.Settings(enabled=True, switches=switches, graphs=graphs)
    return Variant(make_plan(settings, contracts.installed_release()), required=["step_graph"] if graph else [])


def report(line: str) -> None:
    print(f"{time.perf_counter() - _STARTED:6.1f} s  {line}", flush=True)


def guided_runs(denoiser: nn.Module) -> dict[str, Any]:
    """The three runs, stock and with graphs: equality of all latents, host time a pass, peaks of memory."""

    def play(variant: Variant, host: list[float], *, steps: int = STEPS) -> list[list[Tensor]]:
        def timed(run_pass: Any) -> Any:
            started = time.perf_counter()
            result = run_pass()
            host.append((time.perf_counter() - started) * 1e3)
            torch.cuda.synchronize()  # each pass starts on an idle GPU: a full queue would make the host wait
            return result

        with variant.applied():
            return [
                [latents.clone() for latents in GuidanceLoop(denoiser, steps=steps, around_pass=timed, **size)]
                for size in RUNS
            ]

    def watch_memory() -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peaks() -> dict[str, float]:
        return {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        }

    hosts: dict[str, list[float]] = {"stock": [], "fast": [], "fast+graph": []}
    watch_memory()
    stock = play(Variant(), hosts["stock"])
    memory = {"stock": peaks()}
    report("guided: stock")
    eager, graph = fast(graph=False), fast(graph=True)
    play(eager, [], steps=2)  # its first passes merge weights: the peak of those after is what compares
    watch_memory()
    play(eager, hosts["fast"], steps=2)
    memory["fast"] = peaks()
    report("guided: fast, eager")
    watch_memory()
    latents = play(graph, hosts["fast+graph"])
    memory["fast+graph"] = peaks()
    report("guided: fast, with graphs")
    graph.verify()
    replayed = hosts["fast+graph"][len(hosts["fast+graph"]) * 2 // 3 :]  # the third run: every graph is there
    assert graph.plan is not None
    record = graph.plan.records["step_graph"]
    graphs: Any = graph.plan.kept(step_graph.__name__, dict)
    return {
        "steps": STEPS,
        "runs": [{key: list(v) if isinstance(v, tuple) else v for key, v in size.items()} for size in RUNS],
        "bitwise_equal": compare(latents, stock) is None,
        "host_ms": {
            "stock": round(statistics.median(hosts["stock"]), 3),
            "fast": round(statistics.median(hosts["fast"]), 3),
            "fast+graph": round(statistics.median(replayed), 3),
            "fast+graph_mean": round(statistics.fmean(replayed), 3),
        },
        "memory": memory,
        "graphs_alive": graphs.alive,
        "hits": record.hits,
        "fallbacks": dict(record.fallbacks),
    }


def soak(denoiser: nn.Module, passes: int, write_so_far: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    rng = random.Random(0)
    pairs = [((rng.randint(8, 48), rng.randint(8, 48)), rng.randint(8, 300)) for _ in range(30)]
    inputs = [denoiser_inputs(denoiser, image_hw=hw, text_tokens=tokens) for hw, tokens in pairs]

    def call(number: int) -> Tensor:
        with torch.inference_mode(), set_forward_context(current_timestep=0, attn_metadata=None):
            result: Tensor = denoiser(**inputs[number])
        return result

    expected = [call(number).clone() for number in range(len(pairs))]
    report("soak: stock")
    variant = fast(graph=True, graphs=4)
    assert variant.plan is not None
    record = variant.plan.records["step_graph"]
    reserved: list[int] = []
    checked = unequal = 0

    def found() -> dict[str, Any]:
        return {
            "passes": len(reserved),
            "pairs": len(pairs),
            "graphs": 4,
            "checked": checked,
            "unequal": unequal,
            "reserved_gib_until_settled": round(max(reserved[:SETTLED_AFTER]) / 2**30, 3),
            "reserved_gib_after": round(max(reserved[SETTLED_AFTER:], default=0) / 2**30, 3),
            "hits": record.hits,
            "fallbacks": dict(record.fallbacks),
        }

    with variant.applied():
        for index in range(passes):
            number = rng.randrange(len(pairs))
            result = call(number)
            if index % CHECK_EVERY == 0:
                checked += 1
                unequal += compare(result, expected[number]) is not None
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
            if (index + 1) % REPORT_EVERY == 0:
                report(f"soak: {index + 1} passes, {record.hits} replayed, {reserved[-1] / 2**30:.3f} GiB reserved")
                write_so_far(found())
    variant.verify()
    return found()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--attention", default="fa")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--passes", type=int, default=2000)
    parser.add_argument("--only", choices=["guided", "soak"])
    options = parser.parse_args()
    start_runtime(attention_backend=options.attention)
    size: dict[str, Any] = {"joint_attention_dim": 3584, "fp8": True, "device": "cuda"}
    workload = Workload(arch={"layers": options.layers}, attention=options.attention)
    document = json.loads(options.output.read_text()) if options.output.is_file() else {}
    document |= describe(workload, f"{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}")

    def keep(part: str, found: dict[str, Any]) -> None:
        document[part] = found
        write(document, options.output)

    bad = False
    if options.only != "soak":
        denoiser = build_qwen_image(layers=options.layers, heads=24, **size)
        report("guided: built")
        guided = guided_runs(denoiser)
        keep("guided", guided)
        bad |= not guided["bitwise_equal"]
        del denoiser
        torch.cuda.empty_cache()
    if options.only != "guided":
        small = build_qwen_image(layers=4, heads=8, **size)
        soaked = soak(small, options.passes, lambda found: keep("soak", found))
        keep("soak", soaked)
        bad |= soaked["unequal"] > 0 or soaked["reserved_gib_after"] > soaked["reserved_gib_until_settled"]
    print(json.dumps(document, indent=2))
    sys.exit(bad)


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    main()
