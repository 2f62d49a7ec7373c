"""What each process says of itself: a JSON file a process, for `sglang-fastpath status` and the ablation.

Files lie in `Settings.status_dir`, readable by their user alone, replaced atomically. A disk that cannot be
written costs one warning, never a request.
"""

import contextlib
import json
import logging
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from sglang_fastpath import __version__
from sglang_fastpath.plan import Plan

FORMAT = 1
KEEP_SECONDS = 7 * 24 * 3600
_WRITE_INTERVAL_SECONDS = 1.0

logger = logging.getLogger("sglang_fastpath")


class StatusWriter:
    """Writes this process's status file when something happened, and at most once a second for mere counts.

    `serves` says whether a model runs in this process; a parent that only spawns workers hits no feature.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self.role = role
        self.remark = ""
        self.serves = False
        self._folder = folder
        self._started = psutil.Process().create_time()
        self._written_at = 0.0
        self._broken = False
        self._pending = False

    @property
    def path(self) -> Path:
        return self._folder / f"{os.getpid()}-{int(self._started * 1000)}.json"

    def write_soon(self, plan: Plan) -> None:
        """For counts on the hot path: writes only if the last write is a second old."""
        self._pending = True
        if time.monotonic() - self._written_at >= _WRITE_INTERVAL_SECONDS:
            self.write(plan)

    def catch_up(self, plan: Plan) -> None:
        """For idle loops: writes counts that came too soon after a write, once that is a second old."""
        if self._pending:
            self.write_soon(plan)

    def write(self, plan: Plan) -> None:
        """Replaces the status file. A failure is logged once and tried again at the next event."""
        self._written_at = time.monotonic()
        self._pending = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False) as file:
                json.dump(self._document(plan), file)
            Path(file.name).replace(self.path)
        except OSError as error:
            if not self._broken:
                logger.warning(
                    "status cannot be written to %s (%s); serving goes on. "
                    "Set SGLANG_FASTPATH_STATUS_DIR to a writable folder to see it.",
                    self._folder,
                    error,
                )
            self._broken = True
            with contextlib.suppress(OSError, UnboundLocalError):
                Path(file.name).unlink()

    def _document(self, plan: Plan) -> dict[str, Any]:
        serves = self.serves or any(record.hits for record in plan.records.values())
        features = {}
        for id, record in plan.records.items():
            state, reason = plan.observed(record) if serves else (record.state, record.reason)
            features[id] = {
                "state": state,
                "reason": reason,
                "planned": record.state,
                "hits": record.hits,
                "fallbacks": dict(record.fallbacks),
            }
        return {
            "format": FORMAT,
            "plugin": __version__,
            "sglang": plan.release,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "started": self._started,
            "updated": time.time(),
            "role": self.role,
            "serves": serves,
            "emulated": plan.settings.emulate,
            "remark": self.remark,
            "features": features,
            "verdicts": plan.guard.verdicts,
            "guard": plan.guard.counters,
        }


@dataclass(frozen=True)
class ProcessStatus:
    """One process's last word."""

    life: Literal["running", "ended"]
    document: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """As `sglang-fastpath status --json` and a server's /fastpath give it."""
        return {"life": self.life, **self.document}


def read(folder: Path, *, all_processes: bool = False) -> list[ProcessStatus]:
    """The processes that are running, oldest first; with `all_processes` also those that have ended.

    A process that ended while the one that started it still runs, a worker that died, is shown in any case. A
    damaged or foreign file is set aside with a warning (renamed to `*.damaged`); files of processes that ended more
    than a week ago are removed.
    """
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        document = _load(path)
        if document is None:
            continue
        life = _life(document)
        if life != "running" and time.time() - document["updated"] > KEEP_SECONDS:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            found.append(ProcessStatus(life, document))
    running = {status.document["pid"] for status in found if status.life == "running"}
    return sorted(
        (s for s in found if all_processes or s.life == "running" or s.document["parent"] in running),
        key=lambda status: status.document["started"],
    )


def _load(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"not a status file of format {FORMAT}")
        if missing := {"pid", "parent", "started", "updated", "role", "features", "verdicts"} - document.keys():
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is set aside: %s", path, error)
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(".damaged"))
        return None
    return document


def _life(document: dict[str, Any]) -> Literal["running", "ended"]:
    try:
        process = psutil.Process(document["pid"])
        # A process id is used again: the start time tells whether this is still the one that wrote the file.
        same = abs(process.create_time() - document["started"]) < 1
        return "running" if same and process.status() != psutil.STATUS_ZOMBIE else "ended"
    except psutil.NoSuchProcess:
        return "ended"
