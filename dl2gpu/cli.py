"""The command line: arguments in, calls out. Everything it does, the library does.

Heavy modules are imported inside the commands, so that ``dl2gpu --help`` answers at once.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from dl2gpu import __version__
from dl2gpu.suites.command import app as generate

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dl2gpu.report.model import Report

__all__ = ["app", "main"]

app = typer.Typer(
    name="dl2gpu",
    help="Reads communication traces of distributed training jobs and finds deadlocks.",
    epilog="Example:  dl2gpu scan traces/ --out report/",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(generate, name="generate")

FAIL_ON: Final = "cycle,order_inversion,init_cycle,mismatch,missing_participant,unmatched_p2p"


class Format(StrEnum):
    """What ``scan`` prints."""

    console = "console"
    json = "json"
    sarif = "sarif"
    junit = "junit"
    markdown = "markdown"


class Form(StrEnum):
    """What ``explain`` prints."""

    text = "text"
    markdown = "markdown"
    html = "html"
    dot = "dot"
    graphml = "graphml"
    perfetto = "perfetto"
    sarif = "sarif"
    junit = "junit"


class Engine(StrEnum):
    """Where the analysis runs."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress; the result and errors only.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more; errors come with their traceback.")
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"dl2gpu {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand != "record":  # a recorded program runs as it would alone
        from dl2gpu.engine.process import prepare

        prepare()


@app.command(epilog="Example:  dl2gpu scan traces/ --out report/ --fail-on cycle,mismatch")
def scan(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Folders or files, local or behind an fsspec URL."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write report.json, three Parquet tables, and web pages: index.html first.",
        ),
    ] = None,
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="On standard output: a summary, or the report in one of these forms and nothing "
            "else.",
        ),
    ] = Format.console,
    engine: Annotated[
        Engine, typer.Option(help="auto takes the GPU where there is a usable one.")
    ] = Engine.auto,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="threads of this process; local processes; cuda: one process a GPU; or the "
            "address of a Dask scheduler, tcp://host:8786.",
        ),
    ] = "threads",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Threads, or local processes; default: one a CPU core."
        ),
    ] = None,
    job_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="For unusual layouts: named groups job, rank and attempt are taken from the path.",
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option(metavar="JOB", help="Analyse this job only.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            help="What dl2gpu plan --out wrote: jobs with as many ranks are set against it.",
        ),
    ] = None,
    max_file_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest file, as stored and decompressed, such as 16GiB; default 8GiB.",
        ),
    ] = None,
    max_ratio: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Bytes after decompression for each stored byte; default 1000. More is taken for "
            "a decompression bomb.",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(metavar="KIND,...", help="Kinds of finding that make the exit status 1."),
    ] = FAIL_ON,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Analyse the traces of many jobs: who is stuck, who waits for whom, and why.

    Exit status: 0 nothing found;
    1 a finding of a kind named by --fail-on;
    2 wrong usage or nothing readable;
    3 inputs were quarantined and nothing else was found.
    """
    kinds = _kinds(fail_on)
    _check_pattern(job_pattern)
    _set_limits(max_file_size, max_ratio)
    with _errors(verbose):
        from dl2gpu.journal import forget, parts_of
        from dl2gpu.report.progress import progress
        from dl2gpu.report.save import check_target
        from dl2gpu.report.status import exit_status, nothing_readable
        from dl2gpu.scan import scan as run

        if out is not None:
            check_target(out)
        if verbose and engine is Engine.auto:
            from dl2gpu.engine.choose import missing

            _complain(f"engine auto: {'; '.join(missing()) or 'there is a usable GPU'}")
        with progress(quiet=quiet) as callback:
            report = run(
                paths,
                engine=engine.value,
                cluster=cluster,
                workers=workers,
                job_pattern=job_pattern,
                select=select,
                plan=plan,
                progress=callback,
                journal=None if out is None else parts_of(out),
            )
        if out is not None:
            report.save(out)
            forget(parts_of(out))
        _print_report(report, format_, None if out is None else str(out))
        if nothing_readable(report):
            files = report.inputs.height
            _complain(
                f"nothing readable in {', '.join(paths)}: expected traces, "
                f"found {files} other file{'' if files == 1 else 's'}"
            )
        raise typer.Exit(exit_status(report, kinds))


@app.command(epilog="Example:  dl2gpu explain report/ F1")
def explain(
    report: Annotated[
        Path, typer.Argument(metavar="REPORT", help="Folder of a saved report, or its report.json.")
    ],
    finding: Annotated[
        str | None,
        typer.Argument(
            metavar="[FINDING]", help="Its id, or the job's name; default: the gravest."
        ),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="text to read; markdown for a ticket; html, one page; dot, graphml: the wait-for "
            "graph; perfetto: a trace to look at; sarif, junit: all findings unless one is named.",
        ),
    ] = Form.text,
    pager: Annotated[
        bool | None,
        typer.Option(
            "--pager/--no-pager", help="Default: on a terminal, where the text is longer than it."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """One finding in full: cycle, call sites, last operations of each rank, evidence, advice."""
    with _errors(verbose):
        from dl2gpu.report.save import load

        if form is not Form.text:
            from dl2gpu.report.exports import export

            _write(export(load(report), form.value, finding).encode())
            return
        from dl2gpu.report.explain import explain as words
        from dl2gpu.report.pager import paged

        what = words(load(report), finding)
        if not paged(what, pager):
            _print(what)


@app.command(epilog="Example:  dl2gpu whatif traces/ --buffer 0,4KiB,1MiB,inf --fusion 1,2,4")
def whatif(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Folders or files, local or behind an fsspec URL."),
    ],
    buffer: Annotated[
        str, typer.Option(metavar="SIZES", help="Bytes that each channel buffers: 0,4KiB,inf.")
    ] = "0",
    messages: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Messages that each channel buffers.")
    ] = "0",
    eager: Annotated[
        str, typer.Option(metavar="SIZES", help="Messages up to this size need no receiver.")
    ] = "0",
    pool: Annotated[
        str, typer.Option(metavar="SIZES", help="Bytes of a buffer that channels share.")
    ] = "0",
    pool_of: Annotated[
        str, typer.Option(metavar="WHOM", help="Whose channels: of each sender, receiver, or job.")
    ] = "sender",
    queues: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS", help="Device queues that a rank's streams share; 0: independent."
        ),
    ] = "0",
    fusion: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Gradients fused: 1,2,4 at a time, 64MiB@5ms, or coordinated."
        ),
    ] = "1",
    orders: Annotated[
        str,
        typer.Option(metavar="LIST", help="Some of recorded, random, swapped, threads."),
    ] = "recorded",
    matches: Annotated[
        str, typer.Option(metavar="LIST", help="Of wildcards: recorded, all.")
    ] = "all",
    samples: Annotated[
        int, typer.Option(min=1, help="Orders tried of each job, where they are not as recorded.")
    ] = 32,
    scenarios: Annotated[
        int, typer.Option(min=2, help="Runs of a job and configuration where there are choices.")
    ] = 1024,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Try no more after so long; the result says so.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of orders and samples.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write whatif.json and whatif.parquet."),
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="json: the result on standard output.")
    ] = Format.console,
    engine: Annotated[Engine, typer.Option(help="Where the scenarios run.")] = Engine.auto,
    select: Annotated[str | None, typer.Option(metavar="JOB", help="This job only.")] = None,
    verbose: Verbose = False,
) -> None:
    """Try buffers, fusion, orders and matches: how probable is a deadlock under each?"""
    with _errors(verbose):
        from dl2gpu.analysis.explore import Budget
        from dl2gpu.report.whatif import saved, table, to_json
        from dl2gpu.whatif import axes_of, run

        axes = axes_of(
            buffer, messages, eager, pool, pool_of, queues, fusion, orders, matches, samples
        )
        result = run(paths, axes, Budget(scenarios, seconds), seed, engine.value, select)
        if out is not None:
            saved(result, out)
        if format_ is Format.json:
            _write(to_json(result))
        else:
            _print(table(result))


@app.command(epilog="Example:  dl2gpu replay traces/ --witness out/whatif.json --number 3")
def replay(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Folders or files, local or behind an fsspec URL."),
    ],
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Which one, where there are several.")
    ] = None,
    witness: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A whatif.json; its witness is played.")
    ] = None,
    number: Annotated[
        int | None, typer.Option(min=0, help="Which witness; default: the first.")
    ] = None,
    buffer: Annotated[str, typer.Option(metavar="SIZE", help="Bytes a channel buffers.")] = "0",
    eager: Annotated[
        str, typer.Option(metavar="SIZE", help="Messages up to this size need no receiver.")
    ] = "0",
    queues: Annotated[
        int, typer.Option(min=0, help="Device queues that a rank's streams share.")
    ] = 0,
    choices: Annotated[
        str, typer.Option(metavar="LIST", help="Which way each choice of a match goes: 1,0,2.")
    ] = "",
    ranks: Annotated[
        str, typer.Option(metavar="LIST", help="Ranks to show; default: those that stop.")
    ] = "",
    rows: Annotated[int, typer.Option(min=1, help="So many of the last rows.")] = 60,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write the schedule as a native trace."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Step through one job to where it stops, or through the schedule of a witness."""
    with _errors(verbose):
        from dl2gpu.analysis.witness import trace_of
        from dl2gpu.report.replay import replayed
        from dl2gpu.report.whatif import load_witness
        from dl2gpu.trace.native_write import write_jsonl
        from dl2gpu.whatif import numbers_of, plain_witness, play

        if witness is not None:
            named, chosen = load_witness(witness, number)
            job = job or named
        else:
            chosen = plain_witness(buffer, eager, queues, choices)
        label, schedule = play(paths, job, chosen)
        if out is not None:
            write_jsonl(trace_of(schedule), out)
        _print(replayed(schedule, label, numbers_of(ranks) or None, rows))


@app.command(epilog="Example:  dl2gpu convert traces/job7 job7.parquet")
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A trace that scan can read.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="What to write.")],
    verbose: Verbose = False,
) -> None:
    """Write any supported source as native Parquet or JSON Lines."""
    with _errors(verbose):
        from dl2gpu.trace.convert import convert as run

        run(src, dst)


@app.command(
    epilog="Example:  dl2gpu record --out traces/job7 -- torchrun --nproc-per-node 8 train.py",
    context_settings={"allow_interspersed_args": False},
)
def record(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="The program, with its arguments, after --.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="Folder of the job: one file a rank."),
    ],
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job; default: the folder's.")
    ] = None,
    hang: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Without progress for so long a rank hangs: its stacks are written; 0: never.",
        ),
    ] = 300.0,
    on_signal: Annotated[
        str, typer.Option(metavar="NAME", help="Write the stacks on this signal, too.")
    ] = "SIGUSR2",
    analyse: Annotated[
        bool, typer.Option("--analyse", help="Scan the records at a hang, and at the end.")
    ] = False,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Other machines record ranks of this job into DIR as well."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Run a PyTorch program and record its communication; the exit status is the program's."""
    with _errors(verbose):
        from dl2gpu.record.launch import run
        from dl2gpu.record.settings import Settings

        settings = Settings(str(out.resolve()), job, hang, on_signal or None, analyse)
        status = run(command, settings, shared=shared)
        if analyse:
            from dl2gpu.scan import scan as look

            _print_report(look([str(out)]), Format.console, None)
        raise typer.Exit(status)


@app.command(
    epilog="Example:  dl2gpu plan gpt2-xl --devices 8x4 --intra 300GBps --inter 25GBps "
    "--out plan.json"
)
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A packaged model, or a TOML file (docs/planner.md)."),
    ],
    devices: Annotated[
        str, typer.Option(metavar="NODESxDEVICES", help="Nodes, and devices of each.")
    ] = "1x8",
    intra: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth of a device in its node.")
    ] = "300GBps",
    inter: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth of a node to the others.")
    ] = "25GBps",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a device.")] = "80GiB",
    flops: Annotated[
        str, typer.Option(metavar="RATE", help="Peak of a device, operations a second.")
    ] = "312T",
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the peak that products reach.")
    ] = 0.5,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of a step; default: the model's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan as JSON.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture of the scheme as SVG.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write each rank's program in the native format."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Set fixed schemes beside it.")
    ] = True,
    verbose: Verbose = False,
) -> None:
    """Search a near-optimal parallel scheme for a model, and prove its program free of deadlock.

    Exit status: 0 found and healthy; 1 the program could stop; 2 wrong usage, or nothing fits.
    """
    with _errors(verbose):
        from dl2gpu.planner.command import cluster_of, run

        cluster = cluster_of(devices, intra, inter, memory, flops, efficiency)
        words, healthy = run(model, cluster, batch, compare, out, picture, trace)
        _print(words)
        raise typer.Exit(0 if healthy else 1)


@app.command(epilog="Example:  dl2gpu doctor")
def doctor(
    test: Annotated[
        bool,
        typer.Option(
            "--test/--no-test", help="Analyse a small corpus on every engine, and compare."
        ),
    ] = True,
    verbose: Verbose = False,
) -> None:
    """What this machine can do: versions, memory, GPUs, and a test of every engine."""
    with _errors(verbose):
        from dl2gpu.report.doctor import doctor as words

        _print(words(test))


def _kinds(fail_on: str) -> list[str]:
    from dl2gpu.report.words import MEANING

    kinds = [kind for kind in (part.strip() for part in fail_on.split(",")) if kind]
    known = [kind for kind in MEANING if kind != "healthy"]
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise typer.BadParameter(
            f"found {', '.join(unknown)}; expected some of {', '.join(known)}",
            param_hint="--fail-on",
        )
    return kinds


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise typer.BadParameter(
            f"expected a regular expression, found {pattern!r}: {error}", param_hint="--job-pattern"
        ) from None
    if not {"job", "rank", "attempt"} & set(groups):
        raise typer.BadParameter(
            f"expected a named group, as in (?P<job>...), (?P<rank>...) or (?P<attempt>...); "
            f"found none in {pattern!r}",
            param_hint="--job-pattern",
        )


def _set_limits(max_file_size: str | None, max_ratio: int | None) -> None:
    """In the environment, which holds for what is imported later and for the workers started."""
    if max_ratio is not None:
        os.environ["DL2GPU_MAX_RATIO"] = str(max_ratio)
    if max_file_size is None:
        return
    match = re.fullmatch(r"([1-9][0-9]{0,14}) ?(?:([KMGT])(i?)B?|B)?", max_file_size, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(
            f"expected a size such as 16GiB, 500MB or a number of bytes, found {max_file_size!r}",
            param_hint="--max-file-size",
        )
    power = " KMGT".index((match[2] or " ").upper())
    size = int(match[1]) * (1024 if match[3] else 1000) ** power
    os.environ["DL2GPU_MAX_FILE_BYTES"] = str(size)


def _print_report(report: Report, format_: Format, saved: str | None) -> None:
    if format_ is Format.json:
        _write(report.to_json())
    elif format_ is not Format.console:
        from dl2gpu.report.exports import export

        _write(export(report, format_.value).encode())
    else:
        from dl2gpu.report.console import summary

        _print(summary(report, saved))


def _print(what: RenderableType) -> None:
    from dl2gpu.report.console import rendered

    # A name that the terminal's encoding cannot show must not stop the report.
    _write(rendered(what).encode(sys.stdout.encoding or "utf-8", errors="backslashreplace"))


def _write(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        _reader_left()


def _reader_left() -> None:
    """``dl2gpu ... | head``: no error, and the exit status stays that of the scan."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    from dl2gpu.report.words import safe

    sys.stderr.write(f"dl2gpu: {safe(message, 1000)}\n")


@contextmanager
def _errors(verbose: bool) -> Iterator[None]:
    """Errors in one or two lines and exit status 2; 1 is kept for findings."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(130) from None
    except Exception as error:  # noqa: BLE001 - status 1 would claim a finding
        if verbose:
            traceback.print_exc()
        expected = isinstance(error, ValueError | OSError)
        words = str(error) if expected and str(error) else f"{type(error).__name__}: {error}"
        _complain(" ".join(words.split()))
        if not expected and not verbose:
            _complain("this is a fault of dl2gpu; --verbose shows where, for a report")
        raise typer.Exit(2) from None


def main() -> NoReturn:
    """Entry point of the command ``dl2gpu``. Does not return: the process ends with its status."""
    # importing makes objects by the hundred thousand, and no garbage to look for
    gc.set_threshold(200_000, 20, 20)
    status: object = 0
    try:
        app()
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int | None):
        _complain(str(status))
        status = 1
    # taking the interpreter and its libraries apart in order takes longer than many a scan
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status or 0)
