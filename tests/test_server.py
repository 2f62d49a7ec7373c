"""`sglang serve` with the plugin: stock's bytes over HTTP, and a `status` that tells the truth meanwhile."""

import contextlib
import json
import os
import signal
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import Server, http_error, tiny_qwen_image

from sglang_fastpath import __version__, server_route
from sglang_fastpath.features import CATALOGUE, QWEN_IMAGE

pytestmark = pytest.mark.engine

WORKER = "diffusion worker 0"
GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 4}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a cat", "size": "64x64", "seed": 0, **GUIDED},
    {"prompt": "a dog in the rain, seen from behind", "size": "64x96", "seed": 1, **GUIDED},
    {"prompt": "a cat", "size": "80x48", "seed": 2, "true_cfg_scale": 1},
    {"prompt": "x", "size": "64x64", "seed": 0, "num_inference_steps": 3, **GUIDED, "true_cfg_scale": 1.5},
    {"prompt": "a cat", "size": "64x64", "seed": 0, "n": 2, **GUIDED},
]
GUIDED_REQUEST = REQUESTS[0]
BLOCKS = 2
# The linears whose second call in a step is saved: in each block, image and text stream.
MODULATIONS = 2 * BLOCKS
DIFFUSION = [feature for feature in CATALOGUE if feature.serves("diffusion")]
FUSED = [feature.id for feature in CATALOGUE if feature.port_of("sglang_fastpath.patches.diffusion.qwen_image_block")]


@dataclass
class Servers:
    """The same model three times; `first_status` is what `status` said of `fastpath` before any request."""

    stock: Server
    fastpath: Server
    switched_off: Server
    first_status: dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one architecture with different weights."""
    folder = tmp_path_factory.getbasetemp()
    return tiny_qwen_image(folder, seed=0), tiny_qwen_image(folder, seed=1)


@pytest.fixture(scope="module")
def servers(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, model = tmp_path_factory.mktemp("servers"), checkpoints[0]
    off = {feature.env: "0" for feature in DIFFUSION}
    with contextlib.ExitStack() as stack:
        started = [
            Server(model, folder / "stock", plugin=False),
            Server(model, folder / "fastpath", plugin=True),
            Server(model, folder / "off", plugin=True, variables=off),
        ]
        for server in started:
            stack.callback(server.stop)
        stock, fastpath, switched_off = [server.wait() for server in started]
        yield Servers(stock, fastpath, switched_off, fastpath.status())


@pytest.fixture(scope="module")
def stock_images(servers: Servers) -> list[list[bytes]]:
    """Stock's answers to REQUESTS."""
    answers = [servers.stock.images(request) for request in REQUESTS]
    distinct = {image for images in answers for image in images}
    assert len(distinct) == sum(map(len, answers)) - 1, "all differ, but the first of n=2, which has the first's seed"
    return answers


def hits(server: Server) -> dict[str, int]:
    return {id: feature["hits"] for id, feature in server.status()[WORKER]["features"].items()}


def settle(server: Server) -> None:
    """Lets the guard check all that it will check on REQUESTS: its checks of a block call the modulation again, which
    counts as a hit of `cfg_mod_cache`. After two rounds each block has run in every form, on every kind of call."""
    for request in [*REQUESTS, *REQUESTS, GUIDED_REQUEST]:
        server.images(request)


def test_what_no_request_reached_is_never_hit(servers: Servers) -> None:
    emulated = [feature for feature in DIFFUSION if feature.measured and not feature.needs_a_gpu]
    for one in emulated:
        feature = servers.first_status[WORKER]["features"][one.id]
        assert (feature["state"], feature["planned"], feature["hits"]) == ("never hit", "active", 0)
    servers.fastpath.images(GUIDED_REQUEST)
    features = servers.fastpath.status()[WORKER]["features"]
    for one in emulated:
        lacking = one.lacks(QWEN_IMAGE)
        shown = features[one.id]["state"], features[one.id]["reason"]
        assert shown == (("unsupported", lacking) if lacking else ("active", "")), one.id


def test_images_are_stocks_and_hits_count_what_was_replaced(
    servers: Servers, stock_images: list[list[bytes]]
) -> None:
    for request, expected in zip(REQUESTS, stock_images, strict=True):
        assert servers.fastpath.images(request) == expected, request
    settle(servers.fastpath)
    for request, expected in zip(REQUESTS, stock_images, strict=True):
        before = hits(servers.fastpath)
        assert servers.fastpath.images(request) == expected, request
        steps, guided = request.get("num_inference_steps", 2), request["true_cfg_scale"] != 1
        counted = {id: count - before[id] for id, count in hits(servers.fastpath).items()}
        # How SGLang runs n=2 (as one batch or one after another) is its own business.
        runs = counted["norm_quant"] // (BLOCKS * steps * (2 if guided else 1))
        assert runs in {1, request.get("n", 1)}, request
        assert counted == {
            "cfg_mod_cache": MODULATIONS * steps * runs if guided else 0,
            **dict.fromkeys(FUSED, BLOCKS * steps * (2 if guided else 1) * runs),
            "step_graph": 0,
            **{feature.id: 0 for feature in CATALOGUE if not feature.measured or feature.lacks(QWEN_IMAGE)},
        }


def test_status_is_of_this_server_and_verdicts_are_admissions(servers: Servers) -> None:
    servers.fastpath.images(GUIDED_REQUEST)
    shown = servers.fastpath.status()
    assert shown.keys() == {"main", WORKER}
    assert shown["main"]["pid"] == servers.fastpath.process.pid
    assert (shown["main"]["serves"], shown[WORKER]["serves"]) == (False, True)
    assert {process["role"]: process for process in server_route.fetch(servers.fastpath.url)} == shown
    with pytest.raises(server_route.StatusUnavailableError, match="runs without the plugin"):
        server_route.fetch(servers.stock.url)
    assert all(process["emulated"] and process["sglang"] == "0.5.17" for process in shown.values())
    assert {verdict["verdict"] for verdict in shown[WORKER]["verdicts"]} == {"admitted"}
    assert {feature.id for feature in CATALOGUE} == shown[WORKER]["features"].keys()


def test_each_process_logs_one_line_and_each_feature_its_first_hit_once(servers: Servers) -> None:
    for request in REQUESTS:
        servers.fastpath.images(request)
    features = servers.fastpath.status()[WORKER]["features"]
    active = sum(feature["planned"] == "active" for feature in features.values())
    log = servers.fastpath.log
    for role, known in (("main", len(DIFFUSION)), (WORKER, len(CATALOGUE))):
        assert log.count(f"sglang-fastpath {__version__}: active {active}/{known} ({role})") == 1
    assert log.count(f"sglang-fastpath {__version__}: ") == 2
    for id, feature in features.items():
        assert log.count(f"sglang-fastpath: first hit of {id} ({WORKER})") == (1 if feature["hits"] else 0)
    assert f"sglang-fastpath {__version__}" not in servers.stock.log, "stock must be stock"
    assert "Loaded transformer: QwenImageTransformer2DModel (sgl-diffusion version)" in log


def test_two_clients_at_once_get_what_each_gets_alone(servers: Servers, stock_images: list[list[bytes]]) -> None:
    expected = list(zip(REQUESTS, stock_images, strict=True))

    def client(order: list[tuple[dict[str, Any], list[bytes]]]) -> list[dict[str, Any]]:
        return [request for request, images in order if servers.fastpath.images(request) != images]

    with ThreadPoolExecutor(2) as clients:
        wrong = list(clients.map(client, (expected * 2, expected[::-1] * 2)))
    assert wrong == [[], []]


def test_weights_updated_from_disk_are_the_ones_that_serve(
    servers: Servers, checkpoints: tuple[Path, Path], stock_images: list[list[bytes]]
) -> None:
    both = (servers.stock, servers.fastpath)
    before = stock_images[0]
    assert servers.fastpath.images(GUIDED_REQUEST) == before
    try:
        for server in both:
            server.load_weights(checkpoints[1])
        stock, fastpath = [server.images(GUIDED_REQUEST) for server in both]
        assert fastpath == stock
        assert fastpath != before
    finally:
        for server in both:
            server.load_weights(checkpoints[0])
    assert servers.fastpath.images(GUIDED_REQUEST) == before


def test_features_switched_off_by_their_variables_are_seen_off(
    servers: Servers, stock_images: list[list[bytes]]
) -> None:
    for request, expected in zip(REQUESTS, stock_images, strict=True):
        assert servers.switched_off.images(request) == expected
    shown = servers.switched_off.status()
    for feature in DIFFUSION:
        for role in ("main", WORKER):
            seen = shown[role]["features"][feature.id]
            assert (seen["state"], seen["reason"], seen["hits"]) == ("off", f"{feature.env}=0", 0)
        assert f"{feature.id} ({feature.env}=0)" in servers.switched_off.log
    assert shown[WORKER]["verdicts"] == []
    assert f"active 0/{len(CATALOGUE)} ({WORKER}); off: " in servers.switched_off.log
    assert "first hit" not in servers.switched_off.log


def test_a_status_folder_that_cannot_be_written_costs_one_warning_and_no_image(
    servers: Servers, stock_images: list[list[bytes]]
) -> None:
    folder = servers.fastpath.status_dir
    aside = folder.with_name("status-aside")
    settle(servers.fastpath)
    before = hits(servers.fastpath)["cfg_mod_cache"]
    folder.rename(aside)
    folder.touch()  # a file in its place stops even root, whom permissions do not
    try:
        for _ in range(2):
            assert servers.fastpath.images(GUIDED_REQUEST) == stock_images[0]
        assert servers.fastpath.log.count("status cannot be written") == 1
        assert servers.fastpath.status() == {}
    finally:
        folder.unlink()
        aside.rename(folder)
    assert servers.fastpath.images(GUIDED_REQUEST) == stock_images[0]
    assert hits(servers.fastpath)["cfg_mod_cache"] == before + 3 * 2 * MODULATIONS, (
        "what happened meanwhile is not lost"
    )


def test_a_killed_worker_is_an_error_for_the_client_and_ended_in_status(servers: Servers) -> None:
    """Ends `fastpath`'s worker, so it comes last."""
    server = servers.fastpath
    pid = server.status()[WORKER]["pid"]
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.images(GUIDED_REQUEST, timeout=60)
    code, body = http_error(raised.value)
    assert time.monotonic() - started < 30
    assert code == 503
    message = f"sglang-diffusionWorker-0 (pid {pid}) has ended (SIGKILL); restart the server"
    assert json.loads(body)["detail"] == message
    assert message in server.log
    assert {role: process["life"] for role, process in server.status().items()} == {
        "main": "running",
        WORKER: "ended",
    }
    server.process.terminate()
    assert server.process.wait(timeout=60) is not None, "no request that nobody will answer keeps the server up"
