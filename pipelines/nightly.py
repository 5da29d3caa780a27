"""The nightly scan of a fleet: what is new in a bucket, told once, followed over nights.

    python -m pipelines.nightly run --config nightly.toml

Each run scans the jobs of which a file is new or has changed, writes a folder for the night
(report, digest, pages), groups the findings by fingerprint with those of earlier nights, tells
webhooks what is new, and leaves metrics. It may be killed at any moment and run again: what was
analysed is kept, a folder appears whole or not at all, and a second run at the same time ends at
once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import polars as pl
import typer

import dl2gpu
from pipelines.fleet import metrics, notify
from pipelines.fleet.config import Config, ConfigError, load
from pipelines.fleet.digest import as_html, as_index, as_markdown, digest
from pipelines.fleet.groups import grouped
from pipelines.fleet.state import FINDINGS, JOBS, BusyError, Run, State, opened

__all__ = ["app", "nightly"]

TRIES: Final = 3
"""A file that could not be read is tried in so many runs, until it changes."""

Tell = Callable[[str], None]


def nightly(config: Config, night: str, tell: Tell = print) -> list[str]:
    """One run, and what an earlier one that was killed left to do.

    Args:
        config: of :func:`fleet.config.load`.
        night: the night's name, as 2026-11-30.
        tell: is told what happens, a line at a time.

    Returns:
        What could not be done (webhooks that took no message); empty where all was.

    Raises:
        BusyError: another run is under way.
        StateError: the state cannot be used.
        InputError: a path cannot be listed.
    """
    failures: list[str] = []
    with opened(config.state) as state:
        for run in state.unpublished():
            tell(f"run {run.name}: was killed before it was published; goes on")
            failures += _publish(config, state, run, None, tell)
        began = time.monotonic()
        paths, listed, todo = _todo(config, state, night)
        if todo.is_empty() and state.has(night):
            tell(f"night {night}: {listed.height:,} files, nothing new")
        else:
            run = state.begin(night)
            n = todo.height
            tell(f"run {run.name}: {listed.height:,} files, {n:,} of them of new or changed jobs")
            _analyse(config, state, run, paths, listed, todo)
            failures += _publish(config, state, run, time.monotonic() - began, tell)
        _forget(config, state, night, tell)
    return failures


# --------------------------------------------------------------------------------------------------
# Analysis


def _todo(config: Config, state: State, night: str) -> tuple[list[str], pl.DataFrame, pl.DataFrame]:
    """The paths of a night, all files below them, and those that are to be scanned."""
    paths = [path.replace("{night}", night) for path in config.scan.paths]
    listed = dl2gpu.listing(paths, job_pattern=config.scan.job_pattern)
    return paths, listed, _changed(listed, state.files(), night)


def _analyse(
    config: Config, state: State, run: Run, paths: list[str], listed: pl.DataFrame,
    todo: pl.DataFrame,
) -> None:  # fmt: skip
    """Scans what changed, and adds what was found to the state."""
    scan = config.scan
    hidden = _hidden(config, run)
    journal = hidden.with_name(f"{hidden.name}.parts")
    if todo.is_empty():
        report = dl2gpu.Report()
    else:
        report = dl2gpu.scan(
            paths, engine=scan.engine, cluster=scan.cluster, workers=scan.workers,
            job_pattern=scan.job_pattern, journal=journal, only=todo["path"].to_list(),
        )  # fmt: skip
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.parent.mkdir(parents=True, exist_ok=True)
    report.save(hidden, pages=False)  # the pages tell the history, too: they come with it
    jobs, findings = _rows(config, run, report)
    read = report.inputs.group_by("path").agg(bad=(pl.col("status") == "quarantined").any())
    files = todo.join(read, on="path", how="left", maintain_order="left").with_columns(
        tries=pl.when(pl.col("bad").fill_null(False)).then(pl.col("tries") + 1).otherwise(0),
        night=pl.lit(run.night),
    )
    gone: list[str] = []
    if paths == scan.paths:  # else the files of other nights are elsewhere, and not gone
        gone = state.files().join(listed, on="path", how="anti")["path"].to_list()
    state.add(run, files, gone, jobs, findings)
    shutil.rmtree(journal, ignore_errors=True)


def _changed(listed: pl.DataFrame, known: pl.DataFrame, night: str) -> pl.DataFrame:
    """Files of the jobs of which a file is new, has changed, or could not be read so far.

    What could not be read is tried again in another night.
    """
    both = listed.join(
        known.rename({"size": "was_size", "modified": "was_modified", "etag": "was_etag"}),
        on="path", how="left", maintain_order="left",
    )  # fmt: skip
    same = pl.lit(value=True)
    for column in ("size", "modified", "etag"):
        same &= pl.col(column).eq_missing(pl.col(f"was_{column}"))
    again = pl.col("tries").is_between(1, TRIES - 1) & (pl.col("night") != night)
    done = pl.col("tries").is_not_null() & same & ~again
    return both.with_columns(
        tries=pl.when(same).then(pl.col("tries")).fill_null(0), todo=~done
    ).filter(pl.col("todo").any().over("unit"))


def _rows(config: Config, run: Run, report: dl2gpu.Report) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Jobs and findings of a report as the state keeps them."""
    names = report.jobs["job"].unique().to_list()
    teams = pl.DataFrame(
        [(name, config.team_of(name)) for name in names],
        schema={"job": pl.String, "team": pl.String}, orient="row",
    )  # fmt: skip
    jobs = report.jobs.join(teams, on="job", how="left", maintain_order="left").with_columns(
        run=pl.lit(run.run)
    )
    world = jobs.select("job", "attempt", "world_size")
    minutes = config.price.detection_minutes
    findings = (
        report.findings.join(teams, on="job", how="left", maintain_order="left")
        .join(world, on=["job", "attempt"], how="left", nulls_equal=True, maintain_order="left")
        .with_columns(
            run=pl.lit(run.run),
            culprits=pl.format("[{}]", pl.col("culprits").cast(pl.List(pl.String)).list.join(",")),
            gpu_hours=pl.col("gpu_hours_lost"),
            saved=(pl.col("gpu_hours_lost") - pl.col("world_size") * minutes / 60).clip(0),
        )
    )
    return (
        jobs.select(pl.col(c).cast(t) for c, t in JOBS.items()),
        findings.select(pl.col(c).cast(t) for c, t in FINDINGS.items()),
    )


# --------------------------------------------------------------------------------------------------
# Publication


def _publish(
    config: Config, state: State, run: Run, seconds: float | None, tell: Tell
) -> list[str]:
    """Folder, pages, metrics and messages of a run that was analysed. May be done twice."""
    folder, hidden = config.folder / run.name, _hidden(config, run)
    if hidden.exists():
        findings = state.findings()
        report = dl2gpu.Report.load(hidden)
        statuses = dict(report.inputs.group_by("status").len().iter_rows())
        groups = grouped(run.run, state.runs(), findings, config)
        told = digest(
            run.name, run.night, groups, state.jobs(run.run),
            findings.filter(pl.col("run") == run.run), statuses, config,
        )  # fmt: skip
        report.save(
            hidden, history=_history(state, groups), price=config.price.gpu_hour or None,
            owners={job: team for job in report.jobs["job"] if (team := config.team_of(job))},
        )  # fmt: skip
        (hidden / "digest.json").write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
        (hidden / "digest.md").write_text(as_markdown(told), "utf-8")
        (hidden / "digest.html").write_text(as_html(told), "utf-8")
        if folder.exists():  # of a state that was moved away
            folder.rename(folder.with_name(f"{run.name}.before-{time.time_ns()}"))
        hidden.rename(folder)
    told = json.loads((folder / "digest.json").read_text("utf-8"))
    _replace(config.folder / "index.html", as_index(state.nights()))
    _point(config.folder / "latest", run.name)
    if config.output.metrics:
        text = metrics.exposition(told, time.time(), seconds or 0.0)
        _replace(Path(config.output.metrics), text)
    failures = _notify(config, state, run, told, tell)
    state.mark_published(run)
    tell(f"run {run.name}: {told['jobs']:,} jobs, {told['deadlocked']:,} deadlocked; {folder}")
    return failures


def _history(state: State, groups: pl.DataFrame) -> dl2gpu.History:
    """Nights and faults, for the overview of the report."""
    dates = pl.col("first_seen", "last_seen").str.to_date()
    faults = groups.with_columns(dates).select(
        "fingerprint", "status", "first_seen", "last_seen", "nights", "jobs",
        gpu_hours_lost="all_gpu_hours",
    )  # fmt: skip
    return dl2gpu.History(
        nights=state.verdicts().with_columns(pl.col("night").str.to_date()), faults=faults
    )


def _notify(config: Config, state: State, run: Run, told: dict[str, Any], tell: Tell) -> list[str]:
    failures = []
    for n, hook in enumerate(config.webhooks):
        key = f"{n}:{hook.url_env}:{hook.form}:{hook.team or ''}"
        body = notify.message(told, hook, config)
        if body is None or state.was_sent(run, key):
            continue
        try:
            notify.send(hook, body, config)
        except notify.NotifyError as e:
            tell(str(e))
            failures.append(str(e))
        else:
            state.mark_sent(run, key)
            tell(f"webhook {hook.url_env}: told of {len(told['groups'])} groups")
    return failures


def _hidden(config: Config, run: Run) -> Path:
    """Where the folder of a run grows: whoever lists the nights does not see it."""
    return config.folder / f".{run.name}.run"


def _replace(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")  # one name: what a killed run left is written over
    part.write_text(text, "utf-8")
    part.replace(path)


def _point(link: Path, name: str) -> None:
    """A link to the newest night, where the file system has links."""
    part = link.with_name(f".{link.name}.part")
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)
        part.symlink_to(name)
        part.replace(link)


def _forget(config: Config, state: State, night: str, tell: Tell) -> None:
    """Removes folders of old nights and what killed runs left behind."""
    today = dt.date.fromisoformat(night)
    first = str(today - dt.timedelta(days=config.output.keep_nights - 1))
    known = state.runs()
    old = known.filter((pl.col("night") < first) & (pl.col("published") == 1))["name"]
    for name in old:
        if (config.folder / name).is_dir():
            shutil.rmtree(config.folder / name)
            tell(
                f"run {name}: its folder is older than {config.output.keep_nights} nights: removed"
            )
    for left in config.folder.glob(".*.run*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    by_night = any("{night}" in path for path in config.scan.paths)
    horizon = str(today - dt.timedelta(days=config.output.keep_history_days))
    state.forget_before(horizon, files=by_night)


# --------------------------------------------------------------------------------------------------
# The program

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Scans what is new in a bucket, every night, and tells what was found.",
)  # fmt: skip

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="Configuration (TOML).")]
Night = Annotated[
    str | None, typer.Option("--night", help="Night to run for, as 2026-11-30; default today.")
]


@app.command()
def run(config: ConfigFile, night: Night = None) -> None:
    """Scan what is new since the last run, write the night's folder, tell what is new."""
    failures = nightly(load(config), _night(night), lambda line: typer.echo(line, err=True))
    if failures:
        raise SystemExit(1)


@app.command()
def check(config: ConfigFile) -> None:
    """Read the configuration and say what it means; nothing is scanned or written."""
    read = load(config)
    typer.echo(f"scans {', '.join(read.scan.paths)} with engine {read.scan.engine}")
    typer.echo(f"writes to {read.folder}, state in {read.state}")
    for hook in read.webhooks:
        there = "set" if os.environ.get(hook.url_env) else "NOT set"
        typer.echo(f"webhook {hook.url_env} ({there}): {hook.form}, on {', '.join(hook.on)}")
    for s in read.suppressions:
        ended = " (ended)" if s.until < dt.date.today() else ""  # noqa: DTZ011 - as people write it
        typer.echo(f"suppresses {s.fingerprint or s.kind or s.jobs} until {s.until}{ended}")


@app.command()
def show(config: ConfigFile, night: Night = None) -> None:
    """Print the digest of a night (default the latest) as Markdown."""
    folder = load(config).folder / (night or "latest")
    try:
        typer.echo((folder / "digest.md").read_text("utf-8"), nl=False)
    except OSError as e:
        raise ConfigError(f"{folder}: expected the digest of a run, found none") from e


@app.command()
def serve(
    config: ConfigFile,
    listen: Annotated[str, typer.Option(help="Address and port.")] = "127.0.0.1:9464",
) -> None:
    """Serve the metrics of the latest run to Prometheus until stopped."""
    from pipelines.fleet.serve import serve as forever

    forever(load(config), listen)


def _night(given: str | None) -> str:
    if given is None:
        return str(dt.date.today())  # noqa: DTZ011 - the night of the machine's clock
    try:
        return str(dt.date.fromisoformat(given))
    except ValueError as e:
        raise ConfigError(f"--night: expected a date as 2026-11-30, found {given!r}") from e


def main() -> None:
    """The program: errors as one line, exit status 2; 3 where another run is under way."""
    try:
        app()
    except BusyError as e:
        print(f"nightly: {e}", file=sys.stderr)
        raise SystemExit(3) from None
    except ValueError as e:  # ConfigError, StateError, InputError, EngineError, ReportError
        print(f"nightly: {e}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
