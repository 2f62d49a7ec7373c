"""The engine without a long-lived server: `sglang generate`, `DiffGenerator`, the ablation, tensor parallelism; and
what a wrong command line gives."""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from engine import START_SECONDS, Server, free_ports, program, read_status, run, tiny_qwen_image

from sglang_fastpath import __version__, envs
from sglang_fastpath.features import BY_ID, CATALOGUE, QWEN_IMAGE

pytestmark = pytest.mark.engine

WORKERS = ("diffusion worker 0", "diffusion worker 1")
ABLATED = ("cfg_mod_cache", "norm_quant")
BLOCK = [feature.id for feature in CATALOGUE if feature.port_of("sglang_fastpath.patches.diffusion.qwen_image_block")]
SAMPLING: dict[str, Any] = {
    "prompt": "a cat",
    "negative_prompt": "blurry",
    "true_cfg_scale": 4.0,
    "num_inference_steps": 2,
    "seed": 0,
    "width": 64,
    "height": 96,
}
REQUEST = {name: value for name, value in SAMPLING.items() if name not in ("width", "height")} | {"size": "64x96"}
API_SCRIPT = """
import json, sys
from pathlib import Path
from sglang.multimodal_gen import DiffGenerator

if __name__ == "__main__":
    options, sampling = map(json.loads, sys.argv[1:])
    with DiffGenerator.from_pretrained(**options) as generator:
        generator.generate(sampling_params_kwargs=sampling)
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image(tmp_path_factory.getbasetemp())


@pytest.fixture
def two_ranks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Stock's server and the plugin's, with tensor parallelism over two workers, which are busy even when idle."""
    folder, parallel = tmp_path_factory.mktemp("two-ranks"), ["--num-gpus", "2", "--tp-size", "2"]
    with contextlib.ExitStack() as stack:
        stock = Server(checkpoint, folder / "stock", plugin=False, arguments=parallel)
        stack.callback(stock.stop)
        fastpath = Server(checkpoint, folder / "fastpath", plugin=True, arguments=parallel)
        stack.callback(fastpath.stop)
        yield stock.wait(), fastpath.wait()


def test_tensor_parallel_ranks_give_stocks_bytes_and_the_same_verdicts(two_ranks: tuple[Server, Server]) -> None:
    stock, fastpath = two_ranks
    for seed in (0, 1):
        assert fastpath.images({**REQUEST, "seed": seed}) == stock.images({**REQUEST, "seed": seed})
    shown = fastpath.status()
    assert shown.keys() == {"main", *WORKERS}
    first, second = (shown[role] for role in WORKERS)
    assert first["pid"] != second["pid"]
    assert first["features"] == second["features"]
    assert first["features"]["cfg_mod_cache"]["state"] == "active"
    for id in BLOCK:
        seen = first["features"][id]
        assert (seen["state"], seen["hits"]) == ("never hit", 0)
        assert seen["fallbacks"].keys() == {"tensor parallelism over 2 ranks"}
    assert first["verdicts"] == second["verdicts"]
    assert {verdict["verdict"] for verdict in first["verdicts"]} == {"admitted"}
    for role in WORKERS:
        assert len(re.findall(rf"sglang-fastpath {__version__}: active \d+/\d+ \({role}\)", fastpath.log)) == 1
        assert fastpath.log.count(f"sglang-fastpath: first hit of cfg_mod_cache ({role})") == 1


class Runs:
    """Three ways into the engine, run side by side: the ablation, the Python API and a model that SGLang does not
    recognise by its path."""

    def __init__(self, checkpoint: Path, unrecognised: Path, folder: Path) -> None:
        self.ablation_folder = folder / "ablation"
        self.api_folder = folder / "api"
        self.fallback_folder = folder / "fallback"
        with ThreadPoolExecutor() as pool:
            ablation = pool.submit(self._ablate, checkpoint)
            api = pool.submit(self._call_api, checkpoint)
            fallback = pool.submit(self._fall_back, unrecognised)
            self.ablation: list[dict[str, Any]] = json.loads(ablation.result().stdout)
            self.api, self.fallback = api.result(), fallback.result()

    def _ablate(self, model: Path) -> CompletedProcess[str]:
        """Of two features: each costs two starts of the engine. All are ablated on one denoiser, in one process."""
        shape = ["--width", str(SAMPLING["width"]), "--height", str(SAMPLING["height"]), "--steps", "2"]
        options = ["--output", str(self.ablation_folder), "--emulate", "--json", *shape, *ports()]
        options += ["--features", ",".join(ABLATED)]
        command = [program("sglang-fastpath"), "ablate", "--model-path", str(model), *options]
        return run(command, timeout=(2 + 2 * len(CATALOGUE)) * START_SECONDS)

    def _call_api(self, model: Path) -> CompletedProcess[str]:
        self.api_folder.mkdir()
        script = self.api_folder / "generate.py"
        script.write_text(API_SCRIPT)
        port = free_ports(2)
        options = {"model_path": str(model), "num_gpus": 1, "master_port": port, "scheduler_port": port + 1}
        where = {"output_path": str(self.api_folder), "output_file_name": "image.png", "save_output": True}
        return run(
            [sys.executable, str(script), json.dumps(options), json.dumps({**SAMPLING, **where})],
            variables={envs.ENABLE: "1", envs.EMULATE: "1", envs.STATUS_DIR: str(self.api_folder / "status")},
            cwd=self.api_folder,
        )

    def _fall_back(self, model: Path) -> CompletedProcess[str]:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in SAMPLING.items()]
        options += ["--output-path", str(self.fallback_folder), "--output-file-name", "image.png", *ports()]
        return run(
            [program("sglang"), "generate", "--model-path", str(model), "--plugin", "fastpath", *options],
            variables={envs.STATUS_DIR: str(self.fallback_folder / "status")},
        )


def ports() -> list[str]:
    """Options that keep engines that start at the same moment from taking each other's default ports."""
    port = free_ports(2)
    return ["--master-port", str(port), "--scheduler-port", str(port + 1)]


@pytest.fixture(scope="module")
def runs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    # In bf16: the diffusers library does not read block FP8.
    bf16 = tiny_qwen_image(tmp_path_factory.getbasetemp(), fp8=False)
    unrecognised = shutil.copytree(bf16, folder / "my-model")
    return Runs(checkpoint, unrecognised, folder)


EMULATED = [
    feature for feature in CATALOGUE if feature.measured and not feature.needs_a_gpu and not feature.lacks(QWEN_IMAGE)
]


def test_the_ablation_shows_every_variant_identical_and_what_each_feature_did(runs: Runs) -> None:
    variants = {outcome["variant"]: outcome for outcome in runs.ablation}
    assert variants.keys() == {
        "stock",
        "fastpath",
        *(f"{how} {id}" for how in ("without", "only") for id in ABLATED),
    }
    images = {Path(outcome["image"]).read_bytes() for outcome in runs.ablation}
    assert len(images) == 1, "what it calls identical must be identical"
    assert all(outcome["identical"] for outcome in runs.ablation)
    assert variants["stock"]["workers"] == []
    (worker,) = variants["fastpath"]["workers"]
    assert (worker["role"], worker["life"], worker["emulated"]) == (WORKERS[0], "ended", True)
    for feature in EMULATED:
        (worker,) = variants["fastpath"]["workers"]
        seen = worker["features"][feature.id]
        assert seen["state"] == "active" and seen["hits"] > 0
    for feature in (BY_ID[id] for id in ABLATED):
        (worker,) = variants[f"only {feature.id}"]["workers"]
        assert [id for id, seen in worker["features"].items() if seen["hits"]] == [feature.id]
        (worker,) = variants[f"without {feature.id}"]["workers"]
        seen = worker["features"][feature.id]
        assert (seen["state"], seen["reason"], seen["hits"]) == ("off", f"{feature.env}=0", 0)
        assert {verdict["feature"] for verdict in worker["verdicts"]}.isdisjoint({feature.id})


def test_the_python_api_has_the_plugin_in_its_worker_and_stocks_bytes(runs: Runs) -> None:
    stock = runs.ablation_folder / "stock.png"
    assert (runs.api_folder / "image.png").read_bytes() == stock.read_bytes()
    worker = read_status(runs.api_folder / "status", ended=True)[WORKERS[0]]
    for feature in EMULATED:
        seen = worker["features"][feature.id]
        assert seen["state"] == "active" and seen["hits"] > 0
    assert read_status(runs.api_folder / "status") == {}, "nothing of it runs any more"


def test_the_fallback_to_diffusers_is_remarked_on_and_still_gives_an_image(runs: Runs) -> None:
    log = runs.fallback.stdout + runs.fallback.stderr
    assert "DiffusersExecutionStage" in log, "SGLang did not fall back: this test shows nothing"
    assert log.count("nothing is accelerated: SGLang fell back to the diffusers backend") == 1
    assert "--model-id" in log
    assert (runs.fallback_folder / "image.png").read_bytes().startswith(b"\x89PNG\r\n")
    worker = read_status(runs.fallback_folder / "status", ended=True)[WORKERS[0]]
    assert worker["remark"].startswith("nothing is accelerated")
    for feature in CATALOGUE:
        seen = worker["features"][feature.id]
        assert (seen["state"], seen["hits"]) == ("unsupported" if feature.measured else "off", 0)
    assert f"active 0/{len(CATALOGUE)} (diffusion worker 0); off: " in log


LLM_SERVER = [sys.executable, "-m", "sglang.launch_server", "--model-path", "MODEL"]
STOPPED: dict[str, tuple[list[str], dict[str, str]]] = {
    "generate, unknown plugin": (
        [program("sglang"), "generate", "--model-path", "MODEL", "--prompt", "x", "--plugin", "unknown"],
        {},
    ),
    "serve, unknown plugin": ([program("sglang"), "serve", "MODEL", "--plugin=unknown"], {}),
    "launch_server, unknown plugin": ([*LLM_SERVER, "--plugin", "unknown"], {}),
    "launch_server, no accelerator": (
        [*LLM_SERVER, "--plugin", "fastpath"],
        {envs.STATUS_DIR: "MODEL/README/status"},
    ),
    "generate, misspelt variable": (
        [program("sglang"), "generate", "--model-path", "MODEL", "--prompt", "x"],
        {f"{envs.PREFIX}_CFG_MOD_CASHE": "0"},
    ),
}


@pytest.fixture(scope="module")
def stopped(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of STOPPED, none of which gets to load a model, wrote before it ended with an error."""
    folder = tmp_path_factory.mktemp("stopped")
    model = shutil.copytree(checkpoint, folder / checkpoint.name)
    (model / "README").touch()

    def output(case: tuple[list[str], dict[str, str]]) -> str:
        command, variables = case
        filled = [word.replace("MODEL", str(model)) for word in command]
        done = run(
            filled,
            variables={name: value.replace("MODEL", str(model)) for name, value in variables.items()},
            fails=True,
        )
        return done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(STOPPED, pool.map(output, STOPPED.values()), strict=True))


@pytest.mark.parametrize("name", ["generate", "serve", "launch_server"])
def test_an_unknown_plugin_is_an_error_that_names_the_known_ones(stopped: dict[str, str], name: str) -> None:
    last_line = stopped[f"{name}, unknown plugin"].strip().splitlines()[-1]
    assert last_line.endswith("error: --plugin unknown: no such plugin; known: fastpath")


def test_the_llm_server_takes_the_flag_and_says_so_before_it_misses_an_accelerator(stopped: dict[str, str]) -> None:
    log = stopped["launch_server, no accelerator"]
    features = [feature.id for feature in CATALOGUE if feature.path in ("llm", "both")]
    assert re.search(rf"sglang-fastpath {__version__}: active \d+/{len(features)} \(main\)", log)
    assert "No accelerator" in log.strip().splitlines()[-1]
    assert log.count("status cannot be written to") == 1, "a folder below a file: nobody can make that"


def test_a_misspelt_variable_stops_the_engine_and_names_the_nearest(stopped: dict[str, str]) -> None:
    last_line = stopped["generate, misspelt variable"].strip().splitlines()[-1]
    assert "SGLANG_FASTPATH_CFG_MOD_CASHE is not a variable" in last_line
    assert "Did you mean SGLANG_FASTPATH_CFG_MOD_CACHE?" in last_line
