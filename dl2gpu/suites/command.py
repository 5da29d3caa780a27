"""``dl2gpu generate``: arguments in, calls out; heavy modules are loaded by the call."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Write labelled corpora.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Form(StrEnum):
    """What the files are."""

    parquet = "parquet"
    fr = "fr"


@app.callback()
def _root() -> None:
    """Write labelled corpora."""


@app.command(epilog="Example:  dl2gpu generate fleet corpus/ --jobs 10000 --events 100000000")
def fleet(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Jobs.")] = 100,
    events: Annotated[
        int, typer.Option(min=1, metavar="N", help="Operations of all jobs, about.")
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Same seed, same bytes.")] = 0,
    form: Annotated[
        Form, typer.Option(help="Native Parquet, or Flight Recorder pickles, a file a rank.")
    ] = Form.parquet,
    ranks: Annotated[
        str, typer.Option(metavar="LEAST:MOST", help="Ranks of a job: two powers of two.")
    ] = "8:4096",
) -> None:
    """A fleet of training jobs of many sizes, healthy and faulty, with a label for each.

    labels.parquet says for each job the verdict, the culprits, and whether it is deadlocked.
    """
    from dl2gpu.suites import fleet as suite

    least, _, most = ranks.partition(":")
    if not (least.isdigit() and most.isdigit()):
        raise typer.BadParameter(f"expected LEAST:MOST, found {ranks}", param_hint="--ranks")
    try:
        labels = suite.write(out, jobs, events, seed, form.value, ranks=(int(least), int(most)))
    except ValueError as error:
        typer.echo(f"dl2gpu: {error}", err=True)
        raise typer.Exit(2) from None
    total = int(labels["events"].sum())
    typer.echo(f"{out}: {labels.height} jobs, {total} events, {labels['ranks'].sum()} ranks")
    for name, n in labels["fault"].value_counts().sort("fault").iter_rows():
        typer.echo(f"  {name:<8} {n}")
