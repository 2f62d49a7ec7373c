"""/fastpath: where it is added, whose processes it shows, and what `status --url` makes of a server's answers."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from sglang_fastpath import cli, contracts, envs, plan, server_route, status
from sglang_fastpath.plan import Plan, make_plan
from sglang_fastpath.status import StatusWriter


@pytest.fixture
def current(tmp_path: Path) -> Plan:
    """This process's plan, written to its status file."""
    new = make_plan(envs.Settings(enabled=True, status_dir=tmp_path), contracts.installed_release())
    plan.install(new)
    StatusWriter(tmp_path, "main").write(new)
    return new


def application() -> FastAPI:
    app = FastAPI()
    app.add_api_route("/health", lambda: {"stock": True}, methods=["GET"])
    return app


def test_the_route_shows_the_status_files_and_leaves_no_trace(current: Plan, tmp_path: Path) -> None:
    app = application()
    routes, schema = list(app.router.routes), app.openapi()
    app.openapi_schema = None
    remove = server_route.add_to(app)
    assert app.router.routes[:-1] == routes
    client = TestClient(app)
    assert client.get("/health").json() == {"stock": True}
    shown = client.get("/fastpath").json()
    assert shown == {"format": status.FORMAT, "processes": [p.as_json() for p in status.read(tmp_path)]}
    assert shown["processes"][0]["pid"] == os.getpid()
    assert app.openapi() == schema
    remove()
    assert app.router.routes == routes
    assert client.get("/fastpath").status_code == 404


@pytest.mark.parametrize("path", ["/fastpath", "/{anything:path}"])
def test_it_is_not_added_where_a_route_answers_already(path: str, caplog: pytest.LogCaptureFixture) -> None:
    app = application()
    app.add_api_route(path, lambda: {"stock": True}, methods=["GET"])
    with caplog.at_level(logging.WARNING, logger="sglang_fastpath"):
        server_route.add_to(app)()
    assert f"/fastpath is not added to the server: {path} answers there" in caplog.text
    assert TestClient(app).get("/fastpath").json() == {"stock": True}


def test_a_wrapped_create_app_adds_it(current: Plan) -> None:
    app = server_route.wrap_create_app(lambda arguments: application())("x")
    assert TestClient(app).get("/fastpath").json()["processes"]


def test_only_this_servers_processes_are_shown(current: Plan, tmp_path: Path) -> None:
    """A child that runs, one that has died, and a process of another server in the same folder."""
    script = (
        "import os, sys; from pathlib import Path; from sglang_fastpath import contracts, envs, status, plan\n"
        "p = plan.make_plan(envs.Settings(enabled=True), contracts.installed_release())\n"
        "status.StatusWriter(Path(sys.argv[1]), sys.argv[2]).write(p); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    child = subprocess.Popen([*command, "rank 0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    subprocess.run([*command, "rank 1"], stdin=subprocess.DEVNULL, check=True)
    assert child.stdin and child.stdout
    child.stdout.readline()
    foreign = json.loads(next(tmp_path.glob(f"{os.getpid()}-*.json")).read_text()) | {"role": "foreign"}
    import psutil

    init = psutil.Process(1)
    foreign |= {"pid": 1, "parent": 0, "started": init.create_time()}
    (tmp_path / "1-1.json").write_text(json.dumps(foreign))
    try:
        found = status.read(tmp_path)
        assert {p.document["role"] for p in found} == {"main", "rank 0", "rank 1", "foreign"}
        mine = server_route.of_this_server(found)
        assert {(p.document["role"], p.life) for p in mine} == {
            ("main", "running"),
            ("rank 0", "running"),
            ("rank 1", "ended"),
        }
    finally:
        child.communicate()


class Answers(BaseHTTPRequestHandler):
    """Answers by the first part of the path; notes the key that it is given."""

    key: str | None = None

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        type(self).key = self.headers["Authorization"]
        code = int(kind) if kind.isdigit() else 200
        body = {"html": b"<html>", "list": b"[1]", "newer": b'{"format": 99, "processes": []}'}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body.get(kind, b'{"format": 1, "processes": []}'))

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def printed(*arguments: str, expect: int = 1) -> str:
    """In one line, however wide the terminal is taken for."""
    result = CliRunner().invoke(cli.app, ["status", *arguments])
    assert result.exit_code == expect, result.output
    return " ".join(f"{result.output} {result.exception or ''}".split())


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/404", "the server runs without the plugin; start it with --plugin fastpath"),
        ("/401", "wants the server's API key (HTTP 401): pass it with --api-key"),
        ("/403", "wants the server's API key (HTTP 403)"),
        ("/500", "answers with HTTP 500: the server's log says why"),
        ("/html", "answers, but not as sglang-fastpath does: b'<html>'"),
        ("/list", "answers, but not as sglang-fastpath does: b'[1]'"),
        ("/newer", "answers in format 99, this version reads 1: install the server's version"),
    ],
)
def test_an_answer_that_is_no_status_is_an_error_that_says_what_to_do(address: str, path: str, says: str) -> None:
    shown = printed("--url", address + path)
    assert f"sglang-fastpath: {address}{path}/fastpath" in shown
    assert says in shown


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:99999999", "http://"])
def test_a_server_that_cannot_be_reached_is_named(url: str) -> None:
    shown = printed("--url", url)
    assert f"{url.rstrip('/')}/fastpath cannot be reached (" in shown and "is the server up" in shown


def test_what_is_no_address_or_belongs_to_files_is_refused() -> None:
    assert "'127.0.0.1:30000' is not a server's address: give one like http" in printed("--url", "127.0.0.1:30000")
    assert "--all is for this machine's status files" in printed("--url", "http://127.0.0.1:1", "--all")
    assert "--api-key is for --url" in printed("--api-key", "x")


def test_the_key_is_sent_and_a_server_without_status_files_says_so(address: str) -> None:
    shown = printed("--url", f"{address}/", "--api-key", "a key", expect=0)
    assert "has the plugin, but its processes could not write their status" in shown
    assert Answers.key == "Bearer a key"
    assert json.loads(CliRunner().invoke(cli.app, ["status", "--url", address, "--json"]).stdout) == []
    assert Answers.key is None
