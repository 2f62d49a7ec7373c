"""What the GEMM tuner has decided, on disk: an SQLite file in `$XDG_CACHE_HOME/sglang-fastpath`.

A row is one decision. Its key is all that the decision holds for: the machine (architecture, device, the version of
every library that has a part), the problem (shape, dtypes, granularity and layout of the scales, alignment, output),
the profile, and the accuracy class. Another version of anything is another key, so that nothing old is ever found.

Any number of processes may write at the same time, and any of them may be killed: SQLite's transactions see to that.
Every row carries a digest of itself. A file that is damaged, or that somebody else made, is renamed to `*.damaged`
with one warning and a new one is begun; one that cannot be read or written costs one warning. Either way what is not
found has not been tuned, and stock's backend runs.
"""

import fcntl
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sglang_fastpath.gemm_problem import Problem
from sglang_fastpath.gemm_tuner import Decision, Machine

FILE = "gemm-tuning-1.sqlite"
"""The number is that of the format: another plugin's file of another format lies beside it."""
EXPORT_FORMAT = "sglang-fastpath gemm tuning 1"
_APPLICATION_ID = 0x5347_4650
_BUSY_SECONDS = 60.0
_COLUMNS = ("machine", "problem", "profile", "parity", "document")

logger = logging.getLogger("sglang_fastpath")

T = TypeVar("T")


class ForeignFileError(ValueError):
    """A file that is not what this module writes; the message says which and why."""


class _Damaged(Exception):
    """The file holds something else than what was written here."""


class Row(NamedTuple):
    """A decision as text; `document` is JSON."""

    machine: str
    problem: str
    profile: str
    parity: str
    document: str

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join(map(str, self)).encode()).hexdigest()

    def decision(self) -> Decision:
        """Raises ValueError if the texts are not those of a decision."""
        return Decision.from_json(Problem.parse(self.problem), json.loads(self.document))


# The last is what Python makes of damaged text, in a row or in SQLite's own message.
_DAMAGE = (_Damaged, sqlite3.DatabaseError, UnicodeDecodeError)


class TuningCache:
    """The decisions in one folder. Each call opens and closes the file, so it may be kept across forks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._complained = False

    def read(self, machine: Machine, profile: str, parity: str) -> dict[Problem, Decision]:
        """Every decision for this machine, profile and accuracy class."""

        def select(db: sqlite3.Connection) -> dict[Problem, Decision]:
            key = machine_key(machine), profile, parity
            rows = _rows(db, "WHERE machine = ? AND profile = ? AND parity = ?", key)
            return {made.problem: made for made in map(_decided, rows)}

        return self._try(select, {}, write=False)

    def write(self, machine: Machine, profile: str, parity: str, decisions: Iterable[Decision]) -> None:
        """Keeps the decisions, in place of earlier ones on the same problems; all of them or none."""
        key = machine_key(machine)
        self._put(
            [Row(key, made.problem.key, profile, parity, json.dumps(made.as_json())) for made in decisions],
        )

    def export(self, path: Path) -> int:
        """Writes every decision to a JSON file that `load` takes, on whatever machine; returns how many."""
        rows: list[Row] = self._try(_rows, [], write=False)
        entries = [{**row._asdict(), "digest": row.digest} for row in rows]
        path.write_text(json.dumps({"format": EXPORT_FORMAT, "decisions": entries}, indent=1) + "\n")
        return len(rows)

    def load(self, path: Path) -> int:
        """Adds the decisions of a file that `export` wrote; returns how many. Those of other machines do no harm.

        Raises:
            ForeignFileError: it is another file, or has been altered; nothing is added then.
        """
        try:
            document = json.loads(path.read_text())
            if not isinstance(document, dict) or document.get("format") != EXPORT_FORMAT:
                raise ValueError(f"its format is not {EXPORT_FORMAT!r}")
            rows = []
            for entry in document["decisions"]:
                row = Row(**{name: str(entry[name]) for name in _COLUMNS})
                if entry.get("digest") != row.digest:
                    raise ValueError(f"the decision on {row.problem[:60]} has been altered")
                row.decision()
                rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForeignFileError(f"{path} holds no exported tuning: {error}; export it again") from None
        self._put(rows)
        return len(rows)

    def _put(self, rows: list[Row]) -> None:
        statement = "INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?, ?, ?)"
        self._try(lambda db: db.executemany(statement, [(*row, row.digest) for row in rows]), None, write=True)

    def _try(self, use: Callable[[sqlite3.Connection], T], otherwise: T, *, write: bool) -> T:
        """Runs `use` in a transaction. A damaged file is set aside and `use` has a second try, with a new one."""
        failure: Exception | None = None
        for _ in range(2):
            try:
                return self._use(use, otherwise, write=write)
            except (OSError, sqlite3.OperationalError) as error:
                failure = error  # busy, read-only, no space: the file itself is sound
                break
            except _DAMAGE as error:
                failure = error
                self._set_aside(error)
        if not self._complained:
            logger.warning("%s cannot be used (%s): what was tuned is not found, or not kept", self.path, failure)
        self._complained = True
        return otherwise

    def _use(self, use: Callable[[sqlite3.Connection], T], otherwise: T, *, write: bool) -> T:
        if write:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # SQLite would make it readable by everybody
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        elif not self.path.exists():
            return otherwise
        with closing(sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)) as db:
            # A byte that is no UTF-8 shall be found by the digest, as any other.
            db.text_factory = lambda text: text.decode(errors="replace")
            db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            if _is_new(db):
                if not write:
                    return otherwise
                _begin(db)
            result = use(db)
            db.execute("COMMIT")
            return result

    def _set_aside(self, error: Exception) -> None:
        aside = self.path.with_suffix(".damaged")
        with suppress(OSError), self._locked():
            # Another process may have met the same file and begun a new one by now.
            with suppress(*_DAMAGE):
                self._use(_read_all, None, write=False)
                return
            self.path.with_name(f"{FILE}-journal").unlink(missing_ok=True)  # it belongs to that file alone
            self.path.replace(aside)
            logger.warning(
                "%s is set aside as %s: %s. Its shapes are not tuned any more", self.path, aside.name, error
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def machine_key(machine: Machine) -> str:
    """All of it, as JSON in one order."""
    return json.dumps(asdict(machine), sort_keys=True)


def _is_new(db: sqlite3.Connection) -> bool:
    """Whether the file is empty. Raises _Damaged if what it holds is not ours."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if not tables and not application:
        return True
    if application != _APPLICATION_ID:
        raise _Damaged("another program's database")
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise _Damaged(found)
    return False


def _begin(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    columns = ", ".join(f"{name} TEXT NOT NULL" for name in (*_COLUMNS, "digest"))
    db.execute(f"CREATE TABLE decisions ({columns}, PRIMARY KEY ({', '.join(_COLUMNS[:4])})) WITHOUT ROWID")


def _rows(db: sqlite3.Connection, where: str = "", values: tuple[Any, ...] = ()) -> list[Row]:
    rows = []
    for *texts, digest in db.execute(f"SELECT {', '.join(_COLUMNS)}, digest FROM decisions {where}", values):
        row = Row(*texts)
        if row.digest != digest:
            raise _Damaged("a decision is not the one that was written")
        rows.append(row)
    return rows


def _read_all(db: sqlite3.Connection) -> None:
    for row in _rows(db):
        _decided(row)


def _decided(row: Row) -> Decision:
    try:
        return row.decision()
    except ValueError as error:
        raise _Damaged(str(error)) from None
