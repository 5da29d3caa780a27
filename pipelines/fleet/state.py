"""What earlier runs saw: files, jobs, findings and what was told of them, in one SQLite file.

Everything that a run adds is added in one transaction, so that a run that is killed leaves the
state of the run before it. A lock beside the file keeps a second run out; the system gives it back
when its holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

__all__ = ["BusyError", "Run", "State", "StateError", "opened"]

_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE runs(
  run INTEGER PRIMARY KEY, night TEXT NOT NULL, name TEXT NOT NULL UNIQUE,
  analysed INTEGER NOT NULL DEFAULT 0, published INTEGER NOT NULL DEFAULT 0,
  jobs INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE files(
  path TEXT PRIMARY KEY, size INTEGER, modified INTEGER, etag TEXT, tries INTEGER NOT NULL,
  night TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE jobs(
  run INTEGER NOT NULL, job TEXT NOT NULL, attempt INTEGER, verdict TEXT NOT NULL,
  deadlocked INTEGER, world_size INTEGER, events INTEGER, team TEXT
) STRICT;
CREATE INDEX jobs_of_run ON jobs(run);
CREATE TABLE findings(
  run INTEGER NOT NULL, id TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER, kind TEXT NOT NULL,
  evidence TEXT, reason TEXT, fingerprint TEXT NOT NULL, culprits TEXT, gpu_hours REAL, saved REAL,
  summary TEXT, advice TEXT, team TEXT
) STRICT;
CREATE INDEX findings_of_run ON findings(run);
CREATE TABLE sent(run INTEGER NOT NULL, message TEXT NOT NULL, PRIMARY KEY(run, message)) STRICT;
"""

FILES: Final = {
    "path": pl.String(),
    "size": pl.Int64(),
    "modified": pl.Int64(),
    "etag": pl.String(),
    "tries": pl.Int64(),
    "night": pl.String(),
}
"""A file as it was when it was last analysed; ``tries``: how often it could not be read."""
JOBS: Final = {
    "run": pl.Int64(),
    "job": pl.String(),
    "attempt": pl.Int64(),
    "verdict": pl.String(),
    "deadlocked": pl.Int64(),
    "world_size": pl.Int64(),
    "events": pl.Int64(),
    "team": pl.String(),
}
FINDINGS: Final = {
    "run": pl.Int64(),
    "id": pl.String(),
    "job": pl.String(),
    "attempt": pl.Int64(),
    "kind": pl.String(),
    "evidence": pl.String(),
    "reason": pl.String(),
    "fingerprint": pl.String(),
    "culprits": pl.String(),
    "gpu_hours": pl.Float64(),
    "saved": pl.Float64(),
    "summary": pl.String(),
    "advice": pl.String(),
    "team": pl.String(),
}
RUNS: Final = {
    "run": pl.Int64(),
    "night": pl.String(),
    "name": pl.String(),
    "analysed": pl.Int64(),
    "published": pl.Int64(),
    "jobs": pl.Int64(),
}
NIGHTS: Final = {
    "name": pl.String(),
    "jobs": pl.Int64(),
    "deadlocked": pl.Int64(),
    "fingerprints": pl.Int64(),
    "gpu_hours": pl.Float64(),
}


class StateError(ValueError):
    """The state cannot be used. Says what was expected and what was found."""


class BusyError(StateError):
    """Another run holds the state."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the nightly scan. ``name`` is its folder: the night, ``.2`` for a second run."""

    run: int
    night: str
    name: str
    analysed: bool = False
    published: bool = False


class State:
    """The opened state. Nothing is written but in :meth:`begin`, :meth:`add` and the marks."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def _frame(
        self, table: str, schema: dict[str, Any], where: str = "", *args: Any
    ) -> pl.DataFrame:
        rows = self._db.execute(f"SELECT {', '.join(schema)} FROM {table} {where}", args).fetchall()  # noqa: S608 - names of our own
        return pl.DataFrame(rows, schema=schema, orient="row")

    def files(self) -> pl.DataFrame:
        """Files as they were analysed, with the columns of :data:`FILES`."""
        return self._frame("files", FILES)

    def jobs(self, run: int) -> pl.DataFrame:
        """Jobs of one run."""
        return self._frame("jobs", JOBS, "WHERE run = ? ORDER BY rowid", run)

    def findings(self) -> pl.DataFrame:
        """Findings of all runs."""
        return self._frame("findings", FINDINGS, "ORDER BY rowid")

    def runs(self) -> pl.DataFrame:
        """All runs whose results are in the state."""
        return self._frame("runs", RUNS, "WHERE analysed = 1 ORDER BY run")

    def nights(self) -> pl.DataFrame:
        """Runs whose results are in the state, the newest first: :data:`NIGHTS`."""
        rows = self._db.execute(
            """
            SELECT name, jobs,
              (SELECT count(*) FROM jobs j WHERE j.run = r.run AND deadlocked = 1),
              (SELECT count(DISTINCT fingerprint) FROM findings f WHERE f.run = r.run),
              (SELECT coalesce(sum(gpu_hours), 0.0) FROM findings f WHERE f.run = r.run)
            FROM runs r WHERE analysed = 1 ORDER BY run DESC
            """
        ).fetchall()
        return pl.DataFrame(rows, schema=NIGHTS, orient="row")

    def verdicts(self) -> pl.DataFrame:
        """Jobs of each night by verdict: ``night``, ``verdict``, ``jobs``."""
        rows = self._db.execute(
            """
            SELECT night, verdict, count(*) FROM jobs JOIN runs USING (run)
            GROUP BY night, verdict ORDER BY night, verdict
            """
        ).fetchall()
        schema = {"night": pl.String(), "verdict": pl.String(), "jobs": pl.Int64()}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def unpublished(self) -> list[Run]:
        """Runs that were analysed, but died before their folder was there and everybody told."""
        rows = self._db.execute(
            "SELECT run, night, name FROM runs WHERE analysed = 1 AND published = 0 ORDER BY run"
        )
        return [Run(run, night, name, analysed=True) for run, night, name in rows]

    def has(self, night: str) -> bool:
        """Is there a run of this night that was analysed?"""
        found = self._db.execute("SELECT 1 FROM runs WHERE night = ? AND analysed = 1", (night,))
        return found.fetchone() is not None

    def begin(self, night: str) -> Run:
        """The run to do: one that was begun and killed, else a new one."""
        with self._db:
            row = self._db.execute(
                "SELECT run, night, name FROM runs WHERE analysed = 0 AND night = ?", (night,)
            ).fetchone()
            if row is not None:
                return Run(*row)
            # one that was begun in another night and never analysed: its files are found again
            self._db.execute("DELETE FROM runs WHERE analysed = 0")
            (n,) = self._db.execute(
                "SELECT count(*) FROM runs WHERE night = ?", (night,)
            ).fetchone()
            name = night if n == 0 else f"{night}.{n + 1}"
            (run,) = self._db.execute("SELECT coalesce(max(run), 0) + 1 FROM runs").fetchone()
            self._db.execute(
                "INSERT INTO runs(run, night, name) VALUES (?, ?, ?)", (run, night, name)
            )
        return Run(run, night, name)

    def add(
        self, run: Run, files: pl.DataFrame, gone: Sequence[str], jobs: pl.DataFrame,
        findings: pl.DataFrame,
    ) -> None:  # fmt: skip
        """What a run found, all of it or nothing. ``gone``: paths that are not there any more."""
        with self._db:
            for table, frame, schema in (
                ("files", files, FILES), ("jobs", jobs, JOBS), ("findings", findings, FINDINGS),
            ):  # fmt: skip
                marks = ", ".join("?" * len(schema))
                self._db.executemany(
                    f"INSERT OR REPLACE INTO {table}({', '.join(schema)}) VALUES ({marks})",  # noqa: S608 - names of our own
                    frame.select(list(schema)).iter_rows(),
                )
            self._db.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in gone])
            self._db.execute(
                "UPDATE runs SET analysed = 1, jobs = ? WHERE run = ?", (jobs.height, run.run)
            )

    def mark_published(self, run: Run) -> None:
        with self._db:
            self._db.execute("UPDATE runs SET published = 1 WHERE run = ?", (run.run,))

    def was_sent(self, run: Run, message: str) -> bool:
        found = self._db.execute(
            "SELECT 1 FROM sent WHERE run = ? AND message = ?", (run.run, message)
        )
        return found.fetchone() is not None

    def mark_sent(self, run: Run, message: str) -> None:
        with self._db:
            self._db.execute("INSERT OR IGNORE INTO sent VALUES (?, ?)", (run.run, message))

    def forget_before(self, night: str, *, files: bool) -> None:
        """Drops the history of earlier nights, and what is known of the ``files`` they read."""
        with self._db:
            old = "SELECT run FROM runs WHERE night < ? AND published = 1"
            for table in ("jobs", "findings", "sent", "runs"):
                self._db.execute(f"DELETE FROM {table} WHERE run IN ({old})", (night,))  # noqa: S608 - names of our own
            if files:
                self._db.execute("DELETE FROM files WHERE night < ?", (night,))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[State]:
    """The state in the file ``path``, held against other runs while the block lasts.

    Raises:
        BusyError: another run holds it.
        StateError: it is damaged, or of another version.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
    )
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            raise BusyError(f"{path}: another run holds it (process {holder or 'unknown'})") from e
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield from _connected(path)
    finally:
        os.close(lock)


def _connected(path: Path) -> Iterator[State]:
    db = sqlite3.connect(path, isolation_level="IMMEDIATE")
    try:
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            db.execute("PRAGMA synchronous = FULL")
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as e:
            raise StateError(
                f"{path}: expected the state of earlier runs, found something else ({e}); move it "
                "away to begin anew"
            ) from e
        if version not in (0, _VERSION):
            raise StateError(f"{path}: expected a state of version {_VERSION}, found {version}")
        yield State(db)
    finally:
        db.close()
