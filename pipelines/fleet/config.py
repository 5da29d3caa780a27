"""The nightly scan's one configuration file (TOML), checked before anything is done."""

from __future__ import annotations

import datetime as dt
import fnmatch
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "Config",
    "ConfigError",
    "Notify",
    "Output",
    "Owner",
    "Price",
    "Scan",
    "Suppression",
    "Webhook",
    "load",
]

Status = Literal["new", "regressed", "known", "gone"]


class ConfigError(ValueError):
    """The configuration cannot be used. Says where, what was expected, and what was found."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the configuration: a key that it does not know is a mistake, and is told."""


class Scan(_Strict, frozen=True):
    """``[scan]``: what is read, and how. ``{night}`` in a path is the night, as 2026-11-30."""

    paths: list[str]
    job_pattern: str | None = None
    engine: Literal["auto", "cpu", "gpu"] = "auto"
    cluster: str = "threads"
    workers: int | None = None


class Output(_Strict, frozen=True):
    """``[output]``: a folder for each night, and the state beside them."""

    folder: str
    state: str | None = None
    """SQLite file; default ``state.sqlite`` in the folder."""
    keep_nights: int = 30
    """Folders of nights that are kept; the state keeps the history."""
    keep_history_days: int = 400
    metrics: str | None = None
    """Prometheus text file, for node_exporter's textfile collector."""


class Price(_Strict, frozen=True):
    """``[price]``: what a GPU-hour costs, and how soon a hang would be noticed by this tool."""

    gpu_hour: float = 0.0
    currency: str = "USD"
    detection_minutes: float = 10.0


class Groups(_Strict, frozen=True):
    """``[groups]``: how findings are followed over nights."""

    gone_after: int = 3
    """A fingerprint is gone when so many runs that saw jobs did not see it."""


class Owner(_Strict, frozen=True):
    """``[[owners]]``: jobs whose names match belong to a team; the first that matches counts."""

    jobs: str
    team: str


class Suppression(_Strict, frozen=True):
    """``[[suppressions]]``: findings that nobody is to be told of, until a date, for a reason."""

    until: dt.date
    reason: str
    fingerprint: str | None = None
    kind: str | None = None
    jobs: str = "*"

    def covers(self, fingerprint: str, kind: str, job: str) -> bool:
        return (
            (self.fingerprint is None or fingerprint.startswith(self.fingerprint))
            and self.kind in (None, kind)
            and fnmatch.fnmatchcase(job, self.jobs)
        )


class Webhook(_Strict, frozen=True):
    """``[[webhooks]]``: where a digest is sent, by the name of the variable that holds the address.

    The address is a secret: it is written down nowhere.
    """

    url_env: str
    form: Literal["json", "slack"] = "json"
    on: tuple[Status, ...] = ("new", "regressed")
    team: str | None = None
    """Only findings of jobs of this team."""


class Notify(_Strict, frozen=True):
    """``[notify]``: how often a message is tried."""

    tries: int = 5
    timeout_s: float = 10.0
    link: str | None = None
    """Address at which people find the folder of the nights."""


class Config(_Strict, frozen=True):
    """The whole file."""

    scan: Scan
    output: Output
    price: Price = Price()
    groups: Groups = Groups()
    notify: Notify = Notify()
    owners: tuple[Owner, ...] = ()
    suppressions: tuple[Suppression, ...] = ()
    webhooks: tuple[Webhook, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.output.folder)

    @property
    def state(self) -> Path:
        return Path(self.output.state) if self.output.state else self.folder / "state.sqlite"

    def team_of(self, job: str) -> str | None:
        """The team that owns a job."""
        return next((o.team for o in self.owners if fnmatch.fnmatchcase(job, o.jobs)), None)


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def load(path: str | os.PathLike[str]) -> Config:
    """The configuration in the file ``path``.

    Raises:
        ConfigError: it cannot be read, is no TOML, or a value is not what it has to be.
    """
    where = os.fspath(path)
    try:
        raw: dict[str, Any] = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise ConfigError(f"{where}: cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{where}: expected UTF-8, found other bytes at {e.start}") from e
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{where}: expected TOML: {e}") from e
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {_said(str(e))}") from e
    for key, problem in _problems(config):
        raise ConfigError(f"{where}: {key}: {problem}")
    return config


def _said(message: str) -> str:
    """A message of msgspec (what was expected, then " - at `$.key`") with the key first."""
    text, _, at = message.partition(" - at `$")
    key = at.rstrip("`").lstrip(".")
    return f"{key}: {text}" if key else text


def _problems(config: Config) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []

    def check(good: bool, key: str, problem: str) -> None:
        if not good:
            out.append((key, problem))

    scan, output = config.scan, config.output
    check(bool(scan.paths), "scan.paths", "expected one path or more, found none")
    for path in scan.paths:
        check(bool(path.strip()), "scan.paths", "expected a path, found an empty text")
        rest = path.replace("{night}", "")
        check(
            "{" not in rest and "}" not in rest, "scan.paths",
            f"expected {{night}} as the only word in braces, found {path!r}",
        )  # fmt: skip
    if scan.job_pattern is not None:
        try:
            names = re.compile(scan.job_pattern).groupindex
        except re.error as e:
            out.append(("scan.job_pattern", f"expected a regular expression, found an error: {e}"))
        else:
            known = bool({"job", "rank", "attempt"} & set(names))
            check(known, "scan.job_pattern", "expected a named group, as in (?P<job>...)")
    check(scan.workers is None or scan.workers > 0, "scan.workers", "expected 1 or more")
    check(bool(output.folder), "output.folder", "expected a folder, found an empty text")
    check(output.keep_nights > 0, "output.keep_nights", "expected 1 or more")
    check(output.keep_history_days > 0, "output.keep_history_days", "expected 1 or more")
    for key in ("gpu_hour", "detection_minutes"):
        value = getattr(config.price, key)
        check(0 <= value < float("inf"), f"price.{key}", f"expected 0 or more, found {value}")
    check(config.groups.gone_after > 0, "groups.gone_after", "expected 1 or more")
    check(config.notify.tries > 0, "notify.tries", "expected 1 or more")
    check(0 < config.notify.timeout_s < float("inf"), "notify.timeout_s", "expected more than 0")
    for n, one in enumerate(config.suppressions):
        key = f"suppressions[{n}]"
        check(bool(one.reason.strip()), f"{key}.reason", "expected a reason, found an empty text")
        check(
            not (one.fingerprint is None and one.kind is None and one.jobs == "*"), key,
            "expected a fingerprint, a kind or a pattern of jobs: this would suppress everything",
        )  # fmt: skip
        check(
            one.fingerprint is None or bool(re.fullmatch(r"[0-9a-f]{8}|[0-9a-f]{16}",
                                                         one.fingerprint)),
            f"{key}.fingerprint", "expected 16 hexadecimal digits, or the first 8",
        )  # fmt: skip
    for n, hook in enumerate(config.webhooks):
        check(
            bool(_NAME.fullmatch(hook.url_env)), f"webhooks[{n}].url_env",
            "expected the name of an environment variable (the address itself is a secret)",
        )  # fmt: skip
    return out
