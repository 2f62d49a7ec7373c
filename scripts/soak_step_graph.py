#!/usr/bin/env python3
"""`step_graph` over a long run on a GPU: bytes, host time and memory, written as JSON.

    soak_step_graph.py OUTPUT [--attention fa] [--layers 60] [--passes 2000]

First a full-size denoiser: 20 steps of guidance with prompts of two lengths, another resolution, the first again;
every latent against stock. Then a small one: passes over 30 random (resolution, prompt length) pairs with room for 4
graphs; every 50th against eager, and the allocator's reserved memory.
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
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


def fast(*, graph: bool, graphs: int = 8) -> Variant:
    switches = {feature.id: graph or feature.id != "step_graph" for feature in CATALOGUE}
    settings = envs.Settings(enabled=True, switches=switches, graphs=graphs)
    return Variant(make_plan(settings, contracts.installed_release()), required=["step_graph"] if graph else [])


def guided_runs(denoiser: nn.Module) -> dict[str, Any]:
    """The three runs, stock and with graphs: equality of all latents, host time a pass, peaks of memory."""

    def play(variant: Variant, host: list[float]) -> list[list[Tensor]]:
        def timed(run_pass: Any) -> Any:
            started = time.perf_counter()
            result = run_pass()
            host.append((time.perf_counter() - started) * 1e3)
            torch.cuda.synchronize()  # each pass starts on an idle GPU: a full queue would make the host wait
            return result

        with variant.applied():
            return [
                [latents.clone() for latents in GuidanceLoop(denoiser, steps=STEPS, around_pass=timed, **size)]
                for size in RUNS
            ]

    peaks: dict[str, dict[str, float]] = {}
    latents: dict[str, list[list[Tensor]]] = {}
    hosts: dict[str, list[float]] = {}
    for name, variant in (("stock", Variant()), ("fast", fast(graph=False)), ("fast+graph", fast(graph=True))):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        host: list[float] = []
        hosts[name] = host
        latents[name] = play(variant, host)
        if name == "fast":  # its first passes merged weights: the peak of those after is what compares
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            play(variant, [])
        peaks[name] = {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        }
        variant.verify()
    replayed = hosts["fast+graph"][len(hosts["fast+graph"]) * 2 // 3 :]  # the third run: every graph is there
    assert variant.plan is not None
    record = variant.plan.records["step_graph"]
    return {
        "steps": STEPS,
        "runs": [{key: list(v) if isinstance(v, tuple) else v for key, v in size.items()} for size in RUNS],
        "bitwise_equal": {name: compare(latents[name], latents["stock"]) is None for name in ("fast", "fast+graph")},
        "host_ms": {
            "stock": round(statistics.median(hosts["stock"]), 3),
            "fast": round(statistics.median(hosts["fast"][-STEPS:]), 3),
            "fast+graph": round(statistics.median(replayed), 3),
            "fast+graph_mean": round(statistics.fmean(replayed), 3),
        },
        "memory": peaks,
        "hits": record.hits,
        "fallbacks": dict(record.fallbacks),
    }


def soak(denoiser: nn.Module, passes: int) -> dict[str, Any]:
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    rng = random.Random(0)
    pairs = [((rng.randint(8, 48), rng.randint(8, 48)), rng.randint(8, 300)) for _ in range(30)]
    inputs = [denoiser_inputs(denoiser, image_hw=hw, text_tokens=tokens) for hw, tokens in pairs]

    def call(number: int) -> Tensor:
        with torch.inference_mode(), set_forward_context(current_timestep=0, attn_metadata=None):
            result: Tensor = denoiser(**inputs[number])
        return result

    expected = [call(number).clone() for number in range(len(pairs))]
    variant = fast(graph=True, graphs=4)
    reserved, unequal = [], 0
    with variant.applied():
        for index in range(passes):
            number = rng.randrange(len(pairs))
            result = call(number)
            if index % CHECK_EVERY == 0:
                unequal += compare(result, expected[number]) is not None
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    variant.verify()
    assert variant.plan is not None
    record = variant.plan.records["step_graph"]
    return {
        "passes": passes,
        "pairs": len(pairs),
        "graphs": 4,
        "checked": len(range(0, passes, CHECK_EVERY)),
        "unequal": unequal,
        "reserved_gib_until_settled": round(max(reserved[:SETTLED_AFTER]) / 2**30, 3),
        "reserved_gib_after": round(max(reserved[SETTLED_AFTER:]) / 2**30, 3),
        "hits": record.hits,
        "fallbacks": dict(record.fallbacks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--attention", default="fa")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--passes", type=int, default=2000)
    options = parser.parse_args()
    start_runtime(attention_backend=options.attention)
    size: dict[str, Any] = {"joint_attention_dim": 3584, "fp8": True, "device": "cuda"}
    workload = Workload(arch={"layers": options.layers}, attention=options.attention)
    document = describe(workload, f"{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}")
    document["guided"] = guided_runs(build_qwen_image(layers=options.layers, heads=24, **size))
    torch.cuda.empty_cache()
    document["soak"] = soak(build_qwen_image(layers=4, heads=8, **size), options.passes)
    write(document, options.output)
    print(document)
    guided, soaked = document["guided"], document["soak"]
    grown = soaked["reserved_gib_after"] > soaked["reserved_gib_until_settled"]
    sys.exit(not all(guided["bitwise_equal"].values()) or soaked["unequal"] > 0 or grown)


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    main()
