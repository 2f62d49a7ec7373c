"""SGLang's whole engine as a user starts it: small checkpoints, `sglang serve` processes, images over HTTP."""

import base64
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sglang_fastpath import envs

ROOT = Path(__file__).parents[1]
START_SECONDS = 420.0
"""How long a start may take; about 40 on two idle cores."""
ANSWER_SECONDS = 120.0


class EngineError(AssertionError):
    """A process of SGLang did not do what was asked; the message ends with its log."""


def program(name: str) -> str:
    """A console script of the environment that the tests run in."""
    return str(Path(sys.executable).with_name(name))


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with no variable of the plugin but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(envs.PREFIX)}
    # One thread each: several engines share few cores, and tiny matrices gain nothing from more.
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def tiny_qwen_image(folder: Path, *, seed: int = 0, fp8: bool = True) -> Path:
    """A small Qwen-Image in `folder`, in block FP8 or bf16; made by the project's own tools unless it is there."""
    bf16 = folder / f"tiny-qwen-image-{seed}"
    if not bf16.exists():
        script = ROOT / "scripts" / "make_tiny_checkpoint.py"
        run([sys.executable, str(script), str(bf16), "--model", "qwen-image", "--seed", str(seed)])
    quantized = folder / f"tiny-qwen-image-{seed}-fp8"
    if fp8 and not quantized.exists():
        run([program("sglang-fastpath"), "quantize", str(bf16), str(quantized)])
    return quantized if fp8 else bf16


def tiny_qwen3(folder: Path, *, seed: int = 0) -> Path:
    """A small Qwen3 in block FP8 in `folder`; made by the project's own script unless it is there."""
    model = folder / f"tiny-qwen3-{seed}"
    if not model.exists():
        script = ROOT / "scripts" / "make_tiny_checkpoint.py"
        run([sys.executable, str(script), str(model), "--model", "qwen3", "--seed", str(seed)])
    return model


def run(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fails: bool = False,
    timeout: float = START_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its exit code must be 0, or with `fails` another one."""
    done = subprocess.run(
        command,
        env=environment(**(variables or {})),
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    if (done.returncode != 0) is not fails:
        output = (done.stdout + done.stderr)[-6000:]
        raise EngineError(f"`{' '.join(command)}` ended with {done.returncode}:\n{output}")
    return done


def read_status(status_dir: Path, *, ended: bool = False) -> dict[str, dict[str, Any]]:
    """What `sglang-fastpath status` says of the processes that write to `status_dir`, by their role."""
    command = [program("sglang-fastpath"), "status", "--json", *(["--all"] if ended else [])]
    shown = json.loads(run(command, variables={envs.STATUS_DIR: str(status_dir)}).stdout)
    by_role = {process["role"]: process for process in shown}
    assert len(by_role) == len(shown), "two processes claim the same role"
    return by_role


class Server:
    """One `sglang serve MODEL` process in a folder of its own, which holds its log and status files.

    Start several at once, then wait for each: they spend most of their start on imports, on one core.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        plugin: bool,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.status_dir = folder / "status"
        self._log_path = folder / "log.txt"
        port = free_ports(4)
        self.url = f"http://127.0.0.1:{port}"
        command = [*self._command(model, port), *(["--plugin", "fastpath"] if plugin else []), *arguments]
        switched = {envs.EMULATE: "1", **({envs.STATUS_DIR: str(self.status_dir)} if plugin else {})}
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=environment(**switched, **(variables or {})),
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @staticmethod
    def _command(model: Path, port: int) -> list[str]:
        """Starts the server at `port`; the three ports behind it are free, too."""
        command = [program("sglang"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        # The port after `port` is taken by SGLang's own broker.
        ports = ["--scheduler-port", str(port + 2), "--master-port", str(port + 3)]
        return [*command, *ports, "--warmup-mode", "off"]

    @property
    def log(self) -> str:
        text = self._log_path.read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def wait(self) -> "Server":
        """Returns once the server is healthy."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self
            time.sleep(0.25)
        raise EngineError(f"the server did not start (exit code {self.process.poll()}):\n{self.log[-6000:]}")

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The JSON answer to a POST.

        Raises:
            urllib.error.HTTPError: for an answer that is an error.
        """
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            decoded: dict[str, Any] = json.load(answer)
        return decoded

    def images(self, body: Mapping[str, Any], *, timeout: float = ANSWER_SECONDS) -> list[bytes]:
        """The PNG files that the server gives for a request, byte for byte."""
        defaults = {"num_inference_steps": 2, "response_format": "b64_json", "output_format": "png"}
        answer = self.post("/v1/images/generations", {**defaults, **body}, timeout=timeout)
        files = [base64.b64decode(image["b64_json"]) for image in answer["data"]]
        assert all(file.startswith(b"\x89PNG\r\n") for file in files)
        return files

    def load_weights(self, checkpoint: Path) -> None:
        answer = self.post("/update_weights_from_disk", {"model_path": str(checkpoint)})
        assert answer["success"], answer

    def status(self, *, ended: bool = False) -> dict[str, dict[str, Any]]:
        return read_status(self.status_dir, ended=ended)

    def stop(self) -> None:
        """Ends the server and everything that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            family = [*parent.children(recursive=True), parent]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(timeout=30)


class LlmServer(Server):
    """One `python -m sglang.launch_server --model-path MODEL --device cpu` process of two ranks, as `Server`."""

    def __init__(
        self, model: Path, folder: Path, *, plugin: bool, variables: Mapping[str, str] | None = None
    ) -> None:
        settings = {
            "SGLANG_ROPE_CACHE_FP32": "1",  # as on a GPU
            "SGLANG_CPU_OMP_THREADS_BIND": f"0|{(os.cpu_count() or 1) - 1}",  # or it wants a NUMA node for each
            "SGLANG_NCCL_SO_PATH": "none",  # where SGLang finds NCCL, it takes the ranks for GPUs
            **(variables or {}),
        }
        super().__init__(model, folder, plugin=plugin, arguments=["--tp-size", "2"], variables=settings)

    @staticmethod
    def _command(model: Path, port: int) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(port + 1)]
        # SGLang's attention for CPUs needs AMX; its scheduler would keep a core busy while it has nothing to do.
        command += ["--attention-backend", "torch_native", "--sleep-on-idle", "--skip-server-warmup"]
        return [*command, "--max-total-tokens", "4096", "--disable-cuda-graph"]

    def complete(self, prompt: str, *, tokens: int = 16) -> dict[str, Any]:
        """Text and log probabilities of the likeliest tokens, by the OpenAI route."""
        (choice,) = self.complete_all(prompt, tokens=tokens)
        return choice

    def complete_all(self, prompts: Any, *, tokens: int) -> list[dict[str, Any]]:
        """The same of several prompts (texts, or lists of tokens) in one call, in their order."""
        body = {"model": "x", "prompt": prompts, "max_tokens": tokens, "temperature": 0}
        choices = self.post("/v1/completions", {**body, "logprobs": 1, "ignore_eos": True})["choices"]
        return sorted(choices, key=lambda choice: choice["index"])


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free, below those that the kernel hands out by itself."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def http_error(error: urllib.error.HTTPError) -> tuple[int, str]:
    """The status code and the body of an answer that is an error."""
    return error.code, error.read().decode(errors="replace")
