"""The tuner's cache on disk: processes that write at once or die while they do, files that are damaged or foreign."""

import json
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gemm_contest import H200
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Decision
from sglang_fastpath.tuning_cache import FILE, ForeignFileError, TuningCache

KEY = (H200, "denoiser", "bitwise")
ROUNDS = 500

# Writes a decision a round: argument 1 the folder, 2 the N of its problems, 3 how many.
WRITER = f"""
import sys
from pathlib import Path
from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Decision, Machine
from sglang_fastpath.tuning_cache import TuningCache
machine = Machine({H200.sm}, {H200.device!r}, {dict(H200.libraries)!r})
cache, n, rounds = TuningCache(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for m in range(1, rounds + 1):
    decision = Decision(Problem(m, n, 128), "a", "b", 0.5, 0.0, {{"b": float(m)}}, installed=True)
    cache.write(machine, "denoiser", "bitwise", [decision])
"""


def decision(m: int = 5, winner: str = "b", **fields) -> Decision:
    return Decision(Problem(m, 128, 256), "a", winner, 0.5, 0.01, {"a": 2.0, "b": 1.0}, {"c": "K"}, **fields)


def filled(folder: Path, count: int = 40) -> TuningCache:
    cache = TuningCache(folder)
    cache.write(*KEY, [decision(m) for m in range(1, count + 1)])
    return cache


def start_writer(folder: Path, n: int, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(n), str(rounds)], stdout=subprocess.PIPE, text=True
    )


def read_silently(folder: Path, caplog: pytest.LogCaptureFixture) -> dict[Problem, Decision]:
    caplog.clear()
    known = TuningCache(folder).read(*KEY)
    assert caplog.records == []
    return known


# --- reading and writing -------------------------------------------------------------------------------------------


def test_what_was_written_is_read_and_a_later_decision_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "new" / "folder")
    assert cache.read(*KEY) == {}
    assert not (tmp_path / "new").exists(), "reading leaves no trace"
    cache.write(*KEY, [decision(5), decision(6)])
    cache.write(*KEY, [decision(5, winner="a", installed=False)])
    known = TuningCache(cache.path.parent).read(*KEY)
    assert known == {one.problem: one for one in (decision(5, winner="a", installed=False), decision(6))}


def test_every_part_of_a_problem_is_part_of_the_key(tmp_path: Path) -> None:
    plain = Problem(5, 128, 256)
    problems = [
        plain,
        Problem(6, 128, 256),
        Problem(5, 256, 256),
        Problem(5, 128, 128),
        Problem(5, 128, 256, dtypes=("float8_e4m3fn", "int32", "float8_e4m3fn", "int32")),
        Problem(5, 128, 256, granularity=("1x32", "128x128")),
        Problem(5, 128, 256, layout=("k", "k", "k", "k", "k")),
        Problem(5, 128, 256, alignment=4),
        Problem(5, 128, 256, out="float16"),
    ]
    cache = TuningCache(tmp_path)
    for index, problem in enumerate(problems):
        cache.write(*KEY, [Decision(problem, "a", "a", 1.0, float(index))])
    assert {problem: one.noise for problem, one in cache.read(*KEY).items()} == {
        problem: float(index) for index, problem in enumerate(problems)
    }


def test_the_files_are_their_users_alone(tmp_path: Path) -> None:
    cache = filled(tmp_path / "folder")
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writers = [start_writer(tmp_path, n, ROUNDS) for n in (128, 256)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        now = len(read_silently(tmp_path, caplog))
        assert now >= seen, "a decision has gone"
        seen = now
        time.sleep(0.05)
    assert [writer.wait() for writer in writers] == [0, 0]
    known = read_silently(tmp_path, caplog)
    expected = {Problem(m, n, 128): float(m) for n in (128, 256) for m in range(1, ROUNDS + 1)}
    assert {problem: one.microseconds["b"] for problem, one in known.items()} == expected
    assert not list(tmp_path.glob("*.damaged"))


def test_a_process_killed_while_it_writes_leaves_whole_decisions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Several at once, each stopped after another while: in the first one's creation of the file, in a commit."""
    chance = random.Random(0)
    killed = 0
    for _ in range(3):
        writers = [start_writer(tmp_path, 128 * n, 100_000) for n in range(1, 5)]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.1))
            os.kill(writer.pid, signal.SIGKILL)
            killed += writer.wait() == -signal.SIGKILL
        known = read_silently(tmp_path, caplog)
        for problem, one in known.items():
            assert one.microseconds == {"b": float(problem.m)}
        for n in range(1, 5):
            written = sorted(problem.m for problem in known if problem.n == 128 * n)
            assert written == list(range(1, len(written) + 1)), "one was lost in the middle"
    assert killed == 12
    TuningCache(tmp_path).write(*KEY, [decision()])
    assert decision().problem in read_silently(tmp_path, caplog)


# --- files that are not what they should be ------------------------------------------------------------------------


def truncate_to(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


def foreign_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE decisions (machine, problem, profile, parity, document, digest)")
    db.close()


def altered_row(column: str, value: str | bytes) -> Callable[[Path], None]:
    def alter(path: Path) -> None:
        with sqlite3.connect(path) as db:
            db.execute(f"UPDATE decisions SET {column} = ? WHERE problem LIKE '%\"m\": 7%'", (value,))
        db.close()

    return alter


def no_text(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE decisions SET document = CAST(x'fffe' AS TEXT)")
    db.close()


def another_winner(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute('UPDATE decisions SET document = replace(document, \'"winner": "b"\', \'"winner": "a"\')')
    db.close()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated to a few bytes": truncate_to(0.001),
    "truncated to a tenth": truncate_to(0.1),
    "truncated to a half": truncate_to(0.5),
    "truncated by a page": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "text": lambda path: path.write_text("not a database\n" * 1000),
    "garbage": lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a header with garbage behind": lambda path: path.write_bytes(
        path.read_bytes()[:100] + random.Random(2).randbytes(20_000)
    ),
    "another program's database": foreign_database,
    "a decision that somebody changed": another_winner,
    "a decision that is none": altered_row("document", "{}"),
    "a decision that is no text": altered_row("document", b"\xff\xfe"),
    "a decision in bytes that are no text": no_text,
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("use", ["read", "write", "export"])
def test_a_damaged_or_foreign_file_is_set_aside_with_one_warning(
    name: str, use: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path).path
    DAMAGES[name](path)
    damaged = path.read_bytes()
    cache = TuningCache(tmp_path)
    if use == "write" and "decision" not in name:
        cache.write(*KEY, [decision(5)])
        assert cache.read(*KEY) == {decision(5).problem: decision(5)}
    elif use == "export":
        assert cache.export(tmp_path / "exported.json") == 0
    else:
        assert cache.read(*KEY) == {}, "nothing of it is believed"
        assert cache.read(*KEY) == {}
        cache.write(*KEY, [decision(5)])
        assert cache.read(*KEY) == {decision(5).problem: decision(5)}
    assert path.with_suffix(".damaged").read_bytes() == damaged
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "set aside" in warnings[0] and str(path) in warnings[0]


def test_an_empty_file_is_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    os.truncate(tmp_path / FILE, 0)
    assert read_silently(tmp_path, caplog) == {}
    TuningCache(tmp_path).write(*KEY, [decision(5)])
    assert len(read_silently(tmp_path, caplog)) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), byte=st.integers(1, 255))
@example(at=0.25, byte=128)  # makes text that is not UTF-8
def test_no_flipped_byte_makes_another_decision(at: float, byte: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    cache = filled(folder, 12)
    expected = cache.read(*KEY)
    data = bytearray(cache.path.read_bytes())
    data[int(at * (len(data) - 1))] ^= byte
    cache.path.write_bytes(data)
    for problem, one in TuningCache(folder).read(*KEY).items():
        assert expected[problem] == one


def test_a_damaged_file_that_another_process_has_replaced_is_left_alone(tmp_path: Path, caplog) -> None:
    cache = filled(tmp_path)
    before = cache.path.read_bytes()
    cache._set_aside(ValueError("as seen a moment ago"))
    assert cache.path.read_bytes() == before
    assert caplog.records == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_still_read(tmp_path: Path, caplog) -> None:
    filled(tmp_path, 3)
    tmp_path.chmod(0o500)
    (tmp_path / FILE).chmod(0o400)
    try:
        assert len(read_silently(tmp_path, caplog)) == 3, "as in an image that it was shipped with"
    finally:
        tmp_path.chmod(0o700)


def test_what_cannot_be_kept_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = TuningCache(tmp_path / "file" / "folder")
    for _ in range(3):
        cache.write(*KEY, [decision()])
        assert cache.read(*KEY) == {}
    assert len(caplog.records) == 1 and "cannot be used" in caplog.text


def test_a_file_that_another_program_holds_is_not_set_aside(tmp_path: Path, caplog, monkeypatch) -> None:
    from sglang_fastpath import tuning_cache

    monkeypatch.setattr(tuning_cache, "_BUSY_SECONDS", 0.05)
    cache = filled(tmp_path, 3)
    holder = sqlite3.connect(cache.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert cache.read(*KEY) == {}
    cache.write(*KEY, [decision(50)])
    assert len(caplog.records) == 1 and "locked" in caplog.text
    holder.close()
    assert len(TuningCache(tmp_path).read(*KEY)) == 3
    assert not list(tmp_path.glob("*.damaged"))


# --- shipping a profile --------------------------------------------------------------------------------------------


def test_an_exported_profile_is_the_same_where_it_is_imported(tmp_path: Path) -> None:
    cache = filled(tmp_path / "here", 3)
    cache.write(H200, "decode", "ulp", [decision(9, installed=True, verdict="the whole pass")])
    exported, there = tmp_path / "profile.json", TuningCache(tmp_path / "there")
    assert cache.export(exported) == 4
    there.write(*KEY, [decision(1, winner="a"), decision(77)])
    assert there.load(exported) == 4
    assert there.read(*KEY) == cache.read(*KEY) | {decision(77).problem: decision(77)}
    assert there.read(H200, "decode", "ulp") == cache.read(H200, "decode", "ulp")
    assert TuningCache(tmp_path / "nowhere").export(tmp_path / "empty.json") == 0
    assert there.load(tmp_path / "empty.json") == 0


def flip_winner(document: dict) -> None:
    document["decisions"][1]["document"] = document["decisions"][1]["document"].replace('"b"', '"a"', 1)


@pytest.mark.parametrize(
    "alter",
    [
        lambda document: document.pop("format"),
        lambda document: document.pop("decisions"),
        lambda document: document["decisions"].append("text"),
        lambda document: document["decisions"][0].pop("profile"),
        flip_winner,
    ],
)
def test_an_altered_profile_is_refused_as_a_whole(tmp_path: Path, alter: Callable[[dict], object]) -> None:
    exported = tmp_path / "profile.json"
    filled(tmp_path / "here", 3).export(exported)
    document = json.loads(exported.read_text())
    alter(document)
    exported.write_text(json.dumps(document))
    there = TuningCache(tmp_path / "there")
    with pytest.raises(ForeignFileError, match=r"profile\.json holds no exported tuning"):
        there.load(exported)
    assert there.read(*KEY) == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\x00", b'{"format": 1}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ForeignFileError):
        TuningCache(tmp_path).load(tmp_path / "other")
