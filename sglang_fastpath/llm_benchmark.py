"""`sglang-fastpath bench llm`: a dense block-FP8 model in SGLang's own model runner, stock against the plugin.

Two processes, one after the other, on the same random weights at the shapes of Qwen3-8B: SGLang's `ModelRunner` with
decode in CUDA graphs and prefill eager, driven by the functions of `sglang.benchmark.one_batch`. Each writes what it
measured, the logits of a fixed batch and the tokens that it generates greedily; the parent compares those as bytes.

Attainment of the memory roofline: `bytes that a decode step must read (weights and KV) / (measured step time x
measured copy bandwidth)`. The embedding counts with the rows that are looked up, the KV cache as long as it is.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_fastpath import contracts, envs
from sglang_fastpath.features import CATALOGUE
from sglang_fastpath.guard import compare

HEAD = 128
FP8_LARGEST = 448.0
COPY_BYTES = 512 << 20
VOCABULARY = 151936


@dataclass(frozen=True)
class Workload:
    """A Qwen3 of these shapes (by default the 8B model's), and what is measured of it."""

    layers: int = 36
    hidden: int = 4096
    feed_forward: int = 12288
    q_heads: int = 32
    kv_heads: int = 8
    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 512
    steps: int = 48
    prefills: tuple[int, ...] = (1024, 8192, 32768)
    rounds: int = 3
    prompts: int = 32
    prompt_tokens: int = 128
    generated: int = 256
    attention: str = "fa3"

    def config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "head_dim": HEAD,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": 40960,
            "num_attention_heads": self.q_heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
            },
        }


class LlmBenchmarkError(RuntimeError):
    """A process of the benchmark failed; the message names it and ends with its log's last lines."""


def run(
    workload: Workload, *, features: Sequence[str] | None = None, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measures stock, then the plugin with `features` (all of the language models' unless given).

    Returns:
        `stock` and `fast` with their times, `features` with what became of each, `speedup` by point, and
        `bitwise_equal`, which holds if logits and tokens are stock's bytes.

    Raises:
        LlmBenchmarkError: if one of the two processes fails.
    """
    wanted = [feature.id for feature in CATALOGUE if feature.path == "llm"] if features is None else features
    with tempfile.TemporaryDirectory(prefix="sglang-fastpath-llm-") as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(workload.config()))
        stock, stock_outputs = _measure("stock", (), workload, model, report)
        fast, fast_outputs = _measure("fast", wanted, workload, model, report)
    differences = {name: compare(ours, stock_outputs[name]) for name, ours in fast_outputs.items()}
    shown = {name: str(difference) for name, difference in differences.items() if difference is not None}
    release = contracts.installed_release()
    served = fast.pop("features")
    stock.pop("features")
    return {
        "sglang": release.version if release else "none",
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "workload": asdict(workload),
        "bitwise_equal": not shown and all(feature["hits"] for feature in served.values()),
        "differences": shown,
        "features": served,
        "speedup": {
            kind: {
                size: round(stock[kind][size]["ms"] / fast[kind][size]["ms"], 3) if size in fast[kind] else None
                for size in stock[kind]
            }
            for kind in ("decode", "prefill")
        },
        "llm": {"stock": stock, "fast": fast},
    }


def _measure(
    name: str, features: Sequence[str], workload: Workload, model: Path, report: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One process: its numbers, and its logits and tokens."""
    folder = model.parent / name
    folder.mkdir()
    (folder / "workload.json").write_text(json.dumps(asdict(workload)))
    environ = {key: value for key, value in os.environ.items() if not key.startswith(envs.PREFIX)}
    environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", envs.STATUS_DIR: str(folder / "status")}
    if features:
        environ |= {envs.ENABLE: "1", envs.ONLY: ",".join(features)}
    command = [sys.executable, "-m", __name__, str(model), str(folder)]
    report(f"{name}: starting SGLang's model runner")
    begin = time.perf_counter()
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=file, text=True)
        assert process.stdout
        for line in process.stdout:
            if line.startswith("> "):
                report(f"{name}: {line[2:].rstrip()} ({time.perf_counter() - begin:.0f} s)")
            else:
                file.write(line)
                file.flush()
        returned = process.wait()
    if returned:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise LlmBenchmarkError(f"{name}: `{' '.join(command)}` ended with {returned}:\n{tail}")
    return json.loads((folder / "result.json").read_text()), load_file(folder / "outputs.safetensors")


# --- in the process of one variant ---------------------------------------------------------------------------------


def _say(line: str) -> None:
    print(f"> {line}", flush=True)


def fill(model: nn.Module, *, seed: int = 0) -> None:
    """Random weights in place, as a trained model's are: rows that come out of a linear have about unit variance.

    Dummy weights of SGLang are below what e4m3 can tell from 0, so that every activation would be 0.
    """
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator(parameter.device).manual_seed(seed + index)
            shape, device = parameter.shape, parameter.device
            if name.endswith("weight_scale_inv"):
                # The weights have a deviation of 64 and blocks of 128: [N / 128, K / 128].
                width = 128 * shape[1]
                random = 0.5 + torch.rand(shape, generator=generator, device=device)
                parameter.copy_(random / (64 * width**0.5))
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * torch.randn(shape, generator=generator, device=device))
            elif parameter.dtype == torch.float8_e4m3fn:
                random = 64 * torch.randn(shape, generator=generator, device=device)
                parameter.copy_(random.clamp_(-FP8_LARGEST, FP8_LARGEST).to(parameter.dtype))
            else:
                random = torch.randn(shape, generator=generator, device=device, dtype=parameter.dtype)
                parameter.copy_(random * (1 if "embed" in name else shape[1] ** -0.5))


def read_bytes(model: nn.Module, workload: Workload, batch: int) -> int:
    """What one decode step must read: every weight once, but for the embedding's rows that are not asked for, and
    the keys and values of `context` tokens of each request, in bf16."""
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    tokens = batch * (workload.context + workload.steps // 2)
    return weights + tokens * workload.layers * 2 * workload.kv_heads * HEAD * 2


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(8):
            destination.copy_(source)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 8)
    return 2 * COPY_BYTES / statistics.median(times)


class Runner:
    """SGLang's model runner with random weights, one batch at a time."""

    def __init__(self, model: Path, workload: Workload) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

        sizes = sorted({*workload.batches, workload.prompts})
        arguments = ServerArgs(
            model_path=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend=workload.attention,
            mem_fraction_static=0.6,
            max_running_requests=max(sizes),
            cuda_graph_bs_decode=sizes,
            cuda_graph_max_bs_decode=max(sizes),
            disable_prefill_cuda_graph=True,
        )
        set_global_server_args_for_scheduler(arguments)
        one_batch._set_envs_and_config(arguments)
        # What `latency_test` sets up before it loads a model.
        for initialize in (initialize_moe_config, initialize_fp8_gemm_config, initialize_fp4_gemm_config):
            initialize(arguments)
        one_batch.get_tokenizer = lambda *_, **__: None  # there is none: prompts are tokens
        self._one_batch, self.workload = one_batch, workload
        self._runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
        self.model: nn.Module = self._runner.torch_runner.model
        fill(self.model)

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor, Any]:
        """(next tokens, logits, batch) of new requests; those before are dropped."""
        self._runner.clear()
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts)
        tokens, logits, batch = self._runner.extend(requests)
        return tokens, logits, batch

    def decode(self, tokens: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        following, logits = self._runner.decode(tokens, batch)
        return following, logits


def draw_prompts(count: int, tokens: int, *, seed: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(2, VOCABULARY, (count, tokens), generator=generator).tolist()
    return prompts


def _outputs(runner: Runner) -> dict[str, Tensor]:
    """Logits of a fixed batch of unequal lengths, prefill and one step; tokens generated greedily."""
    workload = runner.workload
    prompts = [draw_prompts(1, length, seed=length)[0] for length in (1, 5, 127, 300)]
    tokens, prefill_logits, batch = runner.prefill(prompts)
    found = {"prefill_logits": prefill_logits.float().cpu()}
    found["decode_logits"] = runner.decode(tokens, batch)[1].float().cpu()
    tokens, _, batch = runner.prefill(draw_prompts(workload.prompts, workload.prompt_tokens, seed=1))
    generated = [tokens]
    for _ in range(workload.generated - 1):
        tokens, _ = runner.decode(tokens, batch)
        generated.append(tokens)
    found["tokens"] = torch.stack(generated, 1).long().cpu()
    if (found["tokens"] == found["tokens"][0, 0]).all() or not found["prefill_logits"].isfinite().all():
        raise LlmBenchmarkError("the model answers with one token or without a number: a comparison shows nothing")
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _decode_times(runner: Runner, batch_size: int, copy: float) -> dict[str, float]:
    """Milliseconds a step: the median of steps that are waited for, and of steps in a row."""
    workload = runner.workload
    tokens, _, batch = runner.prefill(draw_prompts(batch_size, workload.context, seed=batch_size))
    waited = []
    for step in range(workload.steps):
        if step == workload.steps // 2:
            torch.cuda.synchronize()
            row = time.perf_counter()
        begin = time.perf_counter()
        tokens, _ = runner.decode(tokens, batch)
        if step < workload.steps // 2:
            torch.cuda.synchronize()
            waited.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    in_a_row = (time.perf_counter() - row) / (workload.steps - workload.steps // 2)
    needed = read_bytes(runner.model, workload, batch_size)
    return {
        "ms": round(1e3 * statistics.median(waited[2:]), 4),
        "in_a_row_ms": round(1e3 * in_a_row, 4),
        "read_bytes": needed,
        "of_roofline": round(needed / (min(statistics.median(waited[2:]), in_a_row) * copy), 3),
    }


def _prefill_times(runner: Runner, tokens: int) -> dict[str, float]:
    times = []
    for number in range(1 + runner.workload.rounds):  # the first compiles
        prompts = draw_prompts(1, tokens, seed=number)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner.prefill(prompts)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"ms": round(1e3 * statistics.median(times[1:]), 3), "min_ms": round(1e3 * min(times[1:]), 3)}


def main(model: str, folder: str) -> None:
    """The process of one variant: writes `result.json` and `outputs.safetensors` into `folder`."""
    from sglang_fastpath import plan, plugin

    plugin.activate(path="llm")
    described: dict[str, Any] = json.loads(Path(folder, "workload.json").read_text())
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in described.items()}
    workload = Workload(**fields)
    runner = Runner(Path(model), workload)
    _say("loaded, graphs captured")
    outputs = _outputs(runner)
    save_file(outputs, Path(folder, "outputs.safetensors"))
    _say("logits and tokens")
    copy = copy_bandwidth()
    result: dict[str, Any] = {"copy_gb_s": round(copy / 1e9, 1)}
    result["decode"] = {str(size): _decode_times(runner, size, copy) for size in workload.batches}
    _say("decode " + ", ".join(f"{size}: {one['ms']} ms" for size, one in result["decode"].items()))
    result["prefill"] = {str(tokens): _prefill_times(runner, tokens) for tokens in workload.prefills}
    _say("prefill " + ", ".join(f"{size}: {one['ms']} ms" for size, one in result["prefill"].items()))
    current = plan.current()
    records = [record for record in current.records.values() if record.state != "off"] if current else []
    result["features"] = {
        record.feature.id: {
            "state": current.described(record) if current else "",
            "hits": record.hits,
            "fallbacks": dict(record.fallbacks),
        }
        for record in records
    }
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
