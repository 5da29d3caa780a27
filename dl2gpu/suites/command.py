"""``dl2gpu generate``: arguments in, calls out; heavy modules are loaded by the call."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import polars as pl

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


class AnyForm(StrEnum):
    """What the files of a model's job are."""

    parquet = "parquet"
    fr = "fr"
    kineto = "kineto"


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


@app.command(
    epilog="Example:  dl2gpu generate model job/ gpt2-xl --scheme dp16,tp5,pp4,m8 --fault skip"
)
def model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model of `dl2gpu plan`, or its TOML file.")
    ],
    scheme: Annotated[
        str,
        typer.Option(
            metavar="SCHEME",
            help="dp, tp, pp, cp, ep: ranks; m, v: microbatches, pieces of a stage; b: samples; "
            "zero0-3; sp, gpipe, recompute.",
        ),
    ],
    fault: Annotated[
        list[str] | None, typer.Option(help="What goes wrong; may be given several times.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, max=1000, metavar="N", help="Of the job.")] = 3,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Same seed, same bytes.")] = 0,
    form: Annotated[
        AnyForm, typer.Option(help="Native Parquet, Flight Recorder pickles, profiler traces.")
    ] = AnyForm.parquet,
) -> None:
    """A training job of a real model, with its message sizes, healthy or with a fault.

    Faults: healthy, skip, module, branch, size, dtype, group, order, checkpoint, recv, send,
    uneven, exit, crash, stall, lost.
    """
    from dl2gpu.suites import model_suite
    from dl2gpu.suites.inject import FAULTS
    from dl2gpu.suites.scheme import Scheme
    from dl2gpu.trace.inputs import InputError

    faults = tuple(fault or ["healthy"])
    unknown = [f for f in faults if f not in FAULTS]
    if unknown:
        raise typer.BadParameter(
            f"expected {', '.join(FAULTS)}; found {unknown[0]}", param_hint="--fault"
        )
    try:
        entry = model_suite.Entry(name, (Scheme.parse(scheme),), faults, (form.value,))
        labels = model_suite.write(model_suite.Suite(name, (entry,), seed, steps), out)
        if labels.height < len(faults):
            left = sorted(set(faults) - set(labels["fault"]))
            raise InputError(f"{scheme}: its program has no place for {', '.join(left)}")
    except InputError as error:
        typer.echo(f"dl2gpu: {error}", err=True)
        raise typer.Exit(2) from None
    _said(out, labels)


@app.command(epilog="Example:  dl2gpu generate suite datasets/suites/gpt2.toml corpus/")
def suite(
    definition: Annotated[Path, typer.Argument(metavar="TOML", help="Models, schemes, faults.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
) -> None:
    """The labelled jobs of a definition: every scheme with every fault, in every form."""
    from dl2gpu.suites import model_suite
    from dl2gpu.trace.inputs import InputError

    try:
        labels = model_suite.write(model_suite.read(definition), out)
    except InputError as error:
        typer.echo(f"dl2gpu: {error}", err=True)
        raise typer.Exit(2) from None
    _said(out, labels)


def _said(out: Path, labels: pl.DataFrame) -> None:
    sizes = labels["ranks"].unique().sort().to_list()
    ranks = f"{sizes[0]} to {sizes[-1]} ranks" if len(sizes) > 1 else f"{sizes[0]} ranks"
    typer.echo(f"{out}: {labels.height} jobs of {ranks}, {labels['events'].sum()} events")
    for name, n in labels["fault"].value_counts().sort("fault").iter_rows():
        typer.echo(f"  {name:<10} {n}")
