"""Status files: private, atomic, honest about which process still runs, and never in the way."""

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fastpath import contracts, envs, status
from sglang_fastpath.plan import Plan, make_plan
from sglang_fastpath.status import StatusWriter


@pytest.fixture
def plan() -> Plan:
    return make_plan(envs.Settings(enabled=True), contracts.installed_release())


def test_what_is_written_is_read(tmp_path: Path, plan: Plan) -> None:
    writer = StatusWriter(tmp_path / "a" / "status", "diffusion worker 0")
    record = plan.records["cfg_mod_cache"]
    record.hit()
    record.fall_back("outside a denoising step")
    writer.write(plan)
    (process,) = status.read(tmp_path / "a" / "status")
    assert process.life == "running"
    assert process.document["role"] == "diffusion worker 0"
    assert process.document["guard"] == {"checks": 0, "admitted": 0, "failed": 0, "unchecked": {}}
    assert process.document["features"]["cfg_mod_cache"] == {
        "state": "active",
        "reason": "",
        "planned": "active",
        "hits": 1,
        "fallbacks": {"outside a denoising step": 1},
    }


@pytest.mark.parametrize(("serves", "state"), [(True, "never hit"), (False, "active")])
def test_a_process_without_a_model_reports_its_plan(tmp_path: Path, plan: Plan, serves: bool, state: str) -> None:
    writer = StatusWriter(tmp_path, "main")
    writer.serves = serves
    writer.write(plan)
    (process,) = status.read(tmp_path)
    assert process.document["features"]["cfg_mod_cache"]["state"] == state


def test_files_are_readable_by_their_user_alone(tmp_path: Path, plan: Plan) -> None:
    writer = StatusWriter(tmp_path / "status", "main")
    writer.write(plan)
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(writer.path.parent.stat().st_mode) == 0o700
    assert [path.name for path in writer.path.parent.iterdir()] == [writer.path.name], "no temporary file stays"


def kill_a_process_that_wrote(folder: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from sglang_fastpath import contracts, envs, status, plan\n"
        "p = plan.make_plan(envs.Settings(enabled=True), contracts.installed_release())\n"
        "status.StatusWriter(Path(sys.argv[1]), 'diffusion worker 0').write(p); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder)], check=False).returncode == -9


def test_a_process_that_died_is_not_shown_as_running(tmp_path: Path) -> None:
    kill_a_process_that_wrote(tmp_path)
    assert status.read(tmp_path) == []
    (dead,) = status.read(tmp_path, all_processes=True)
    assert dead.life == "ended"


def test_a_worker_that_died_under_a_running_parent_is_shown_as_ended(tmp_path: Path, plan: Plan) -> None:
    StatusWriter(tmp_path, "main").write(plan)
    kill_a_process_that_wrote(tmp_path)
    assert {p.document["role"]: p.life for p in status.read(tmp_path)} == {
        "main": "running",
        "diffusion worker 0": "ended",
    }


def test_a_reused_process_id_does_not_revive_a_status(tmp_path: Path, plan: Plan) -> None:
    writer = StatusWriter(tmp_path, "main")
    writer.write(plan)
    document = json.loads(writer.path.read_text())
    document["started"] -= 3600
    writer.path.write_text(json.dumps(document))
    assert status.read(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1}', "\x00\xff"])
def test_a_damaged_or_foreign_file_is_set_aside(tmp_path: Path, plan: Plan, content: str) -> None:
    writer = StatusWriter(tmp_path, "main")
    writer.write(plan)
    (tmp_path / "1-1.json").write_bytes(content.encode("latin-1"))
    assert [process.document["pid"] for process in status.read(tmp_path)] == [os.getpid()]
    assert (tmp_path / "1-1.damaged").exists()
    assert not (tmp_path / "1-1.json").exists()


def test_old_files_of_ended_processes_go(tmp_path: Path, plan: Plan) -> None:
    writer = StatusWriter(tmp_path, "main")
    writer.write(plan)
    document = json.loads(writer.path.read_text())
    document["started"] -= 3600
    document["updated"] -= status.KEEP_SECONDS + 1
    writer.path.write_text(json.dumps(document))
    assert status.read(tmp_path, all_processes=True) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    writer = StatusWriter(blocker / "status", "main")
    with caplog.at_level(logging.WARNING, logger="sglang_fastpath"):
        writer.write(plan)
        writer.write(plan)
    assert len(caplog.records) == 1
    assert "SGLANG_FASTPATH_STATUS_DIR" in caplog.text


def test_a_full_disk_costs_one_warning_and_leaves_nothing(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's own limit on file sizes stands in for a full disk: the write itself fails, half way."""
    import resource
    import signal

    writer = StatusWriter(tmp_path, "main")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with caplog.at_level(logging.WARNING, logger="sglang_fastpath"):
            writer.write(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == []
    writer.write(plan)
    assert len(status.read(tmp_path)) == 1, "once there is room again, the status comes back"


def test_mere_counts_are_written_at_most_once_a_second(tmp_path: Path, plan: Plan) -> None:
    writer = StatusWriter(tmp_path, "main")
    writer.write_soon(plan)
    first = writer.path.stat().st_mtime_ns
    for _ in range(100):
        writer.write_soon(plan)
    assert writer.path.stat().st_mtime_ns == first


def test_counts_that_came_too_soon_are_written_once_there_is_time(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model's last batch would be missing until the next request."""
    writer, record = StatusWriter(tmp_path, "scheduler"), plan.records["cfg_mod_cache"]

    def hits() -> int:
        counted: int = status.read(tmp_path)[0].document["features"]["cfg_mod_cache"]["hits"]
        return counted

    writer.write(plan)
    record.hit()
    writer.catch_up(plan)
    assert hits() == 0, "nothing was reported"
    writer.write_soon(plan)
    writer.catch_up(plan)
    assert hits() == 0, "the last write is not a second old"
    monkeypatch.setattr(status, "_WRITE_INTERVAL_SECONDS", 0.0)
    writer.catch_up(plan)
    assert hits() == 1
    first = writer.path.stat().st_ino
    writer.catch_up(plan)
    assert writer.path.stat().st_ino == first, "an idle loop does not write again and again"
