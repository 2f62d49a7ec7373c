"""`/fastpath`: what `sglang-fastpath status` shows of a server's processes, over the server's own port.

The route is put behind those that SGLang has, and behind the server's API key, if it has one; stock's routes and its
OpenAPI document stay as they are. It reads the status files of this machine: ranks on other machines are not in it.
"""

import functools
import json
import logging
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from sglang_fastpath import plan, status

logger = logging.getLogger("sglang_fastpath")

PATH = "/fastpath"
LLM_SERVER = "sglang.srt.entrypoints.http_server"
CREATE_APP = "sglang.multimodal_gen.runtime.entrypoints.http_server:create_app"
_SECONDS = 10.0


class StatusUnavailableError(RuntimeError):
    """A server's plan cannot be had over HTTP; the message names the address, the reason and what to do."""


def add_to(app: Any) -> Callable[[], None]:
    """Adds the route to a FastAPI application; returns the function that takes it out again.

    Where a request for it would reach a route that is there already, nothing is added, and one warning says so.
    """
    if taken := _taken_by(app):
        logger.warning("%s is not added to the server: %s answers there. Use `sglang-fastpath status`.", PATH, taken)
        return lambda: None
    app.add_api_route(PATH, _answer, methods=["GET"], include_in_schema=False)
    route = app.router.routes[-1]

    def remove() -> None:
        if route in app.router.routes:
            app.router.routes.remove(route)

    return remove


def add_to_llm_server() -> Callable[[], None]:
    """`add_to` for the language model server, whose application is made when its module is imported."""
    app = getattr(sys.modules[LLM_SERVER], "app", None)
    if app is None or not hasattr(app, "add_api_route"):
        logger.warning("%s is not added to the server: %s has no application to add it to", PATH, LLM_SERVER)
        return lambda: None
    return add_to(app)


def wrap_create_app(create_app: Callable[..., Any]) -> Callable[..., Any]:
    """The diffusion server's `create_app`, with the route added to what it returns."""

    @functools.wraps(create_app)
    def create_app_with_route(*args: Any, **kwargs: Any) -> Any:
        app = create_app(*args, **kwargs)
        add_to(app)
        return app

    return create_app_with_route


def _taken_by(app: Any) -> str | None:
    """The route that a request for ours would reach already, or None."""
    from starlette.routing import Match

    scope = {"type": "http", "method": "GET", "path": PATH, "root_path": "", "headers": []}
    for route in app.router.routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", None) or route)
    return None


def _answer() -> dict[str, Any]:
    """Not a coroutine: FastAPI runs it in a thread, and the server's event loop goes on meanwhile."""
    current = plan.current()
    folder = current.settings.status_dir if current else Path()
    return {"format": status.FORMAT, "processes": [p.as_json() for p in of_this_server(status.read(folder))]}


def of_this_server(found: list[status.ProcessStatus]) -> list[status.ProcessStatus]:
    """Those of `found` that belong to the server of which this process is one: others of the user run apart."""
    parents = {p.document["pid"]: p.document["parent"] for p in found if p.life == "running"}
    root = os.getpid()
    # A server with several HTTP workers: they are children of the process that was started, as the ranks are.
    while (above := parents.get(root, os.getppid() if root == os.getpid() else 0)) in parents:
        root = above
    family = {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
    return [p for p in found if p.document["pid"] in family or p.document["parent"] in family]


def fetch(url: str, *, api_key: str | None = None) -> list[dict[str, Any]]:
    """The processes of the server at `url` (http://HOST:PORT), as `sglang-fastpath status --json` prints them.

    Raises:
        StatusUnavailableError: if the server cannot be reached, wants another key, has no such route (it runs without
            the plugin), or answers something else.
    """
    if not url.startswith(("http://", "https://")):
        raise StatusUnavailableError(f"{url!r} is not a server's address: give one like http://127.0.0.1:30000")
    address = url.rstrip("/") + PATH
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=_SECONDS) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        raise StatusUnavailableError(_refused(address, error.code)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise StatusUnavailableError(
            f"{address} cannot be reached ({reason}): is the server up, and the address right?"
        ) from None
    try:
        document = json.loads(body)
        if document["format"] != status.FORMAT:
            raise StatusUnavailableError(
                f"{address} answers in format {document['format']!r}, this version reads {status.FORMAT}: "
                "install the server's version of sglang-fastpath here"
            )
        processes: list[dict[str, Any]] = list(document["processes"])
    except (ValueError, TypeError, KeyError):
        raise StatusUnavailableError(f"{address} answers, but not as sglang-fastpath does: {body[:80]!r}") from None
    return processes


def _refused(address: str, code: int) -> str:
    if code == 404:
        return (
            f"{address} is not there (HTTP 404): the server runs without the plugin; start it with --plugin fastpath"
        )
    if code in (401, 403):
        return f"{address} wants the server's API key (HTTP {code}): pass it with --api-key"
    return f"{address} answers with HTTP {code}: the server's log says why"
