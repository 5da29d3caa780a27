"""Writes logs of jobs as launchers and versions of PyTorch leave them, for tests.

A :class:`Story` is what each rank prints, in order, with times and without prefixes; :func:`files`
lays it out: one file or one a rank, the prefixes of a launcher, colours, glue, CRLF, encodings.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

START = dt.datetime(2025, 3, 26, 10, tzinfo=dt.UTC)
TIMEOUT = 600


@dataclass
class Line:
    t: float
    """Seconds since the start of the job."""
    rank: int | None
    """None: of the launcher."""
    text: str
    raw: bool = False
    """As it is: with its own prefix, never labelled with a rank by the program."""


@dataclass
class Story:
    """Lines of one job, and what the report must say of it."""

    ranks: int
    lines: list[Line] = field(default_factory=list)

    def say(self, t: float, rank: int | None, text: str, *, raw: bool = False) -> Story:
        self.lines += [Line(t, rank, part, raw) for part in text.split("\n")]
        return self

    def steps(self, first: int, count: int, t: float = 0.0, ranks: Iterable[int] = (0,)) -> Story:
        for i in range(count):
            for rank in ranks:
                self.say(t + 2 * i, rank, step_line(first + i, t + 2 * i, rank))
        return self


def at(t: float) -> dt.datetime:
    return START + dt.timedelta(seconds=t)


def step_line(step: int, t: float, rank: int) -> str:
    stamp = at(t).strftime("%Y-%m-%d %H:%M:%S")
    loss = 3 - step / 1000
    return f"{stamp} | INFO | trainer:214 | rank={rank} step={step} loss={loss:.4f} tok/s=43000"


# --------------------------------------------------------------------------------------------------
# Lines of the watchdog, by age


def head(age: str, t: float, rank: int, level: str = "E") -> str:
    """What stands before a message of c10d."""
    if age == "old":
        return f"[{level} ProcessGroupNCCL.cpp:737] "
    if age == "2.3":
        return f"[rank{rank}]:[{level} ProcessGroupNCCL.cpp:523] "
    when = at(t)
    stamp = f"{when.month}{when.day:02d} {when:%H:%M:%S}.{when.microsecond:06d}123"
    return f"[rank{rank}]:[{level}{stamp} ProcessGroupNCCL.cpp:607] "


def work(age: str, seq: int | None, op: str, nin: int, nout: int, timeout: int = TIMEOUT) -> str:
    number = "" if seq is None else f"SeqNum={seq}, "
    size = "" if age == "old" else f", NumelIn={nin}, NumelOut={nout}"
    return f"WorkNCCL({number}OpType={op}{size}, Timeout(ms)={timeout * 1000})"


def group(age: str, pg: tuple[int, str], rank: int) -> str:
    number, desc = pg
    if age == "2.3":
        return f"[PG {number} Rank {rank}]"
    if age == "2.4":
        return f"[PG {number} ({desc}) Rank {rank}]"
    return f"[PG ID {number} PG GUID {number}({desc}) Rank {rank}]"


def status(age: str, seq: int, enqueued: int, completed: int) -> str:
    last = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    if age == "2.3":
        return f" Timeout at NCCL work: {seq}, {last}"
    if age in ("2.4", "2.5"):
        return (
            f" Exception (either an error or timeout) detected by watchdog at work: {seq}, {last}"
        )
    if age == "2.6":
        return (
            f"  failure detected by watchdog at work sequence id: {seq} PG status: "
            f"last enqueued work: {enqueued}, last completed work: {completed}"
        )
    return (
        f"  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: "
        f"{enqueued}, last started work: -1, last completed work: {completed}"
    )


AGES = ("old", "2.3", "2.4", "2.5", "2.6", "newest")
DEFAULT_PG = (0, "default_pg")


def timeout(
    s: Story, age: str, t: float, rank: int, seq: int, op: str, nin: int, nout: int | None = None,
    *, pg: tuple[int, str] = DEFAULT_PG, group_rank: int | None = None,
    completed: int | None = None,
) -> None:  # fmt: skip
    """A rank gives up waiting, with all that its version prints about it."""
    nout = nin if nout is None else nout
    mine = rank if group_rank is None else group_rank
    text = (
        f"[Rank {mine}] Watchdog caught collective operation timeout: "
        f"{work(age, seq, op, nin, nout)} ran for {TIMEOUT * 1000 + rank * 7} milliseconds before "
        "timing out."
    )
    s.say(t, rank, head(age, t, rank) + text, raw=True)
    if age == "old":
        s.say(t + 60, rank, "terminate called after throwing an instance of 'std::runtime_error'")
        s.say(t + 60, rank, f"  what():  {text}")
        return
    done = seq - 1 if completed is None else completed
    who = group(age, pg, mine)
    s.say(t, rank, head(age, t, rank) + who + status(age, seq, seq + 2, done), raw=True)
    s.say(t + 1, rank, head(age, t + 1, rank) + (
        f"{group(age, DEFAULT_PG, rank)} Received a dump signal due to a collective timeout from "
        "this local rank and we will try our best to dump the debug info. Last enqueued NCCL work: "
        f"{seq + 2}, last completed NCCL work: {done}.This is most likely caused by incorrect "
        "usages of collectives, e.g., wrong sizes used across ranks, the order of collectives is "
        "not same for all ranks or the scheduled collective, for some reason, didn't run. "
    ), raw=True)  # fmt: skip
    s.say(t + 60, rank, head(age, t + 60, rank) + (
        f"[Rank {mine}] Some NCCL operations have failed or timed out. Due to the asynchronous "
        "nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data."
    ), raw=True)  # fmt: skip
    s.say(
        t + 60, rank, head(age, t + 60, rank)
        + f"{who} Process group watchdog thread terminated with exception: {text}", raw=True,
    )  # fmt: skip


def observed(s: Story, age: str, t: float, rank: int, of: int, enqueued: int) -> None:
    """A rank is told that another one timed out."""
    who = group(age, DEFAULT_PG, rank)
    text = "Observed flight recorder dump signal from another rank via TCPStore."
    s.say(t, rank, head(age, t, rank) + f"{who} {text}", raw=True)
    s.say(t, rank, head(age, t, rank) + (
        f"{who} Received a dump signal due to a collective timeout from  rank {of} and we will try "
        f"our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed "
        f"NCCL work: {enqueued}.This is most likely caused by incorrect usages of collectives"
    ), raw=True)  # fmt: skip


def torchrun_failure(s: Story, t: float, rank: int, code: int, others: Iterable[int]) -> None:
    """What the elastic agent prints when a worker fails."""
    stamp = at(t).strftime("%m%d %H:%M:%S.%f")
    api = "2606 torch/distributed/elastic/multiprocessing/api.py"
    for other in others:
        s.say(t, None, f"W{stamp} {api}:897] Sending process {2000 + other} closing signal SIGTERM")
    s.say(t, None, (
        f"E{stamp} {api}:869] failed (exitcode: {code}) local_rank: {rank} (pid: {2000 + rank}) of "
        "binary: /opt/venv/bin/python\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60 + "\nFailures:\n  <NO_OTHER_FAILURES>\n"
        + "-" * 60 + "\nRoot Cause (first observed failure):\n[0]:\n"
        f"  time      : {at(t):%Y-%m-%d_%H:%M:%S}\n  host      : gpu-a11\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {2000 + rank})\n"
        "  error_file: <N/A>\n"
        f"  traceback : Signal {abs(code)} (SIG) received by PID {2000 + rank}\n" + "=" * 60
    ))  # fmt: skip


def traceback(s: Story, t: float, rank: int, error: str) -> None:
    s.say(t, rank, (
        'Traceback (most recent call last):\n  File "/workspace/train.py", line 212, in <module>\n'
        f"    main()\n{error}"
    ))  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Layout

Label = Callable[[Line], str]


def bare(line: Line) -> str:
    return line.text


def labelled(line: Line) -> str:
    """torchrun with log prefixes: lines of Python get them, those of c10d have their own."""
    if line.rank is None or line.text.startswith("[rank"):
        return line.text
    return f"[rank{line.rank}]: {line.text}"


def srun(line: Line) -> str:
    return line.text if line.rank is None else f"{line.rank}: {line.text}"


def mpirun(line: Line) -> str:
    return line.text if line.rank is None else f"[1,{line.rank}]<stderr>:{line.text}"


def container(line: Line) -> str:
    text = labelled(line)
    return f"{at(line.t):%Y-%m-%dT%H:%M:%S}.{int(line.t * 1e6) % 1000000:06d}Z stderr F {text}"


def ray(line: Line) -> str:
    if line.rank is None:
        return line.text
    return f"(RayTrainWorker pid={615 + line.rank}, ip=10.0.0.1) {labelled(line)}"


def docker(line: Line) -> str:
    kept = {
        "log": labelled(line) + "\n", "stream": "stderr",
        "time": f"{at(line.t):%Y-%m-%dT%H:%M:%S.%f}123Z",
    }  # fmt: skip
    return json.dumps(kept, separators=(",", ":"))


LAUNCHERS: dict[str, Label] = {
    "bare": bare, "labelled": labelled, "srun": srun, "mpirun": mpirun, "container": container,
    "ray": ray, "docker": docker,
}  # fmt: skip
NAMES_RANKS = ("labelled", "srun", "mpirun", "container", "ray", "docker")
"""Launchers by whose prefix a line of Python has its rank."""


def files(
    story: Story,
    launcher: str = "labelled",
    *,
    per_rank: bool = False,
    glue: Iterable[int] = (),
    colour: bool = False,
    newline: str = "\n",
    encoding: str = "utf-8",
    shuffle: Callable[[list[Line]], list[Line]] | None = None,
) -> dict[str, bytes]:
    """Name to content of the files of the job.

    ``glue``: places, modulo their number, at which a line of c10d follows another without a
    newline. ``shuffle``: another order of lines, the order within a rank kept.
    """
    order = sorted(story.lines, key=lambda line: line.t)
    if shuffle is not None:
        order = shuffle(order)
    parts: dict[str, list[Line]] = {}
    for line in order:
        name = "job.log"
        if per_rank:
            name = "agent.log" if line.rank is None else f"rank_{line.rank}.log"
        parts.setdefault(name, []).append(line)
    if per_rank:
        for rank in range(story.ranks):
            parts.setdefault(f"rank_{rank}.log", [])
    out = {}
    for name, lines in parts.items():
        text = ""
        cuts = set(glue)
        for number, line in enumerate(lines):
            shown = LAUNCHERS[launcher](line)
            if colour and launcher != "docker":  # which keeps colours within its text
                shown = f"\x1b[33m{shown}\x1b[0m"
            follows = lines[number + 1] if number + 1 < len(lines) else None
            joined = (
                follows is not None and number % 7 in cuts and line.raw and follows.raw
                and follows.text.startswith("[rank") and launcher in ("bare", "labelled")
            )  # fmt: skip
            text += shown + ("" if joined else newline)
        out[name] = text.encode(encoding, "replace")
    return out
