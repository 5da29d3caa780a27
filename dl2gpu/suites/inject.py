"""Faults put into the programs of whole jobs, and what they have to lead to.

A fault is made in the last step but one. The job then runs as far as it can (:mod:`settle`), and
each rank's record ends where its host stands. What a label claims follows from the fault alone, and
a test holds it against the naive interpreter on small jobs of the same kind:

* does the job stand still, and is that its own communication's fault (``deadlocked``);
* by which kinds of finding that may rightly be told (a call that is left out is a mismatch where
  the next one on the communicator differs, a missing participant where it does not, and a circle
  where the rank goes on and waits for those that wait for it);
* which ranks are at fault, where a record can tell (``culprits``); a circle may name all of its
  ranks, and the one at fault is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.suites.scheme import Scheme
from dl2gpu.suites.settle import settle
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import DTYPE_BYTES, EXIT, OP, Trace

__all__ = ["FAULTS", "Injected", "inject"]

Array = npt.NDArray[Any]

_ABSENT: Final = ("missing_participant", "mismatch", "order_inversion", "cycle")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a fault leads to: see the module."""

    deadlocked: bool | None
    kinds: tuple[str, ...]


FAULTS: Final[Mapping[str, Expected]] = {
    "healthy": Expected(False, ("healthy",)),
    "skip": Expected(True, _ABSENT),  # a rank leaves out one collective
    "module": Expected(True, _ABSENT),  # ... all those of a layer: a module that was not run
    "branch": Expected(True, ("mismatch",)),  # ... enters another operation: it depends on data
    "size": Expected(True, ("mismatch",)),  # a rank passes in twice as much
    "dtype": Expected(False, ("mismatch",)),  # ... other numbers of the same size: blocks nobody
    "group": Expected(True, _ABSENT),  # a rank uses another one of its groups
    "order": Expected(True, ("order_inversion", "cycle", "mismatch")),  # every other rank swaps two
    "checkpoint": Expected(True, _ABSENT),  # one rank alone enters a barrier of all
    "recv": Expected(True, ("unmatched_p2p", *_ABSENT)),  # left out
    "send": Expected(True, ("unmatched_p2p", *_ABSENT)),  # left out
    "uneven": Expected(True, ("missing_participant",)),  # a replica has a batch less, and ends
    "exit": Expected(True, ("missing_participant",)),  # a rank ends a step early
    "crash": Expected(False, ("crashed_rank",)),  # a rank dies
    "stall": Expected(False, ("stalled_rank",)),  # a rank is busy outside communication
    "lost": Expected(None, ("insufficient_evidence",)),  # a rank has left no record
}
"""The catalogue: what is done, whether the job is deadlocked, and the kinds that say so rightly."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A job with its fault, and its label."""

    trace: Trace
    fault: str
    rank: int | None
    """The rank at fault; None: nobody."""
    deadlocked: bool | None
    kinds: tuple[str, ...]
    culprits: tuple[int, ...] | None
    """Exactly these are at fault; None: of a group of two nobody can say which one is wrong."""
    innocent: tuple[int, ...]
    """Ranks that must not be named."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a job, as columns by row; rows of one rank are in program order."""

    trace: Trace
    row: Array  # of the events table
    rank: Array
    seq: Array
    op: Array
    comm: Array  # -1: none
    size: Array  # members of the communicator, 0: none
    stream: Array  # -1: the host
    count: Array
    batch: Array  # -1: none
    collective: Array
    layer: Array  # number of the block of the model in which it is issued, -1: none
    first: Array  # Int64[ranks]: seq with which the step begins

    def of(self, rank: int) -> Array:
        """Indices of the rows of a rank."""
        return np.flatnonzero(self.rank == rank)


def _step_of(trace: Trace, steps: int) -> _Step:
    """The last step but one; every step of a rank is as long."""
    events = trace.events.with_row_index("row").sort("rank", "seq")
    length = events.group_by("rank", maintain_order=True).agg(n=pl.len())["n"].to_numpy() // steps
    first = length * (steps - 2)
    rank, seq = events["rank"].to_numpy(), events["seq"].to_numpy()
    now = np.flatnonzero((seq >= first[rank]) & (seq < (first + length)[rank]))
    here = events[now]
    op = here["op"].to_numpy()
    comm = here["comm"].fill_null(-1).to_numpy()
    sizes = np.append(trace.comms.sort("comm")["ranks"].list.len().to_numpy(), 0)
    block = (
        (
            trace.stacks.sort("stack")
            .select(
                pl.col("frames").list.first().str.extract(r"^\w+ (\w+\.\d+)\.", 1).alias("layer")
            )
            .with_columns(n=pl.col("layer").rank("dense").cast(pl.Int64))
        )["n"]
        .fill_null(-1)
        .to_numpy()
    )
    return _Step(
        trace, here["row"].to_numpy(), here["rank"].to_numpy(), here["seq"].to_numpy(), op, comm,
        sizes[comm], here["stream"].fill_null(-1).to_numpy(), here["count"].fill_null(0).to_numpy(),
        here["group"].fill_null(-1).to_numpy(), op >= OP["all_reduce"],
        block[here["stack"].to_numpy()], first,
    )  # fmt: skip


@dataclass(slots=True)
class _Edit:
    """What a fault changes: rows of the step by index."""

    rank: int
    drop: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    change: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    """Column of events to rows and their values."""
    stops: dict[int, int] = field(default_factory=dict)
    """Ranks that issue nothing more, and from which ``seq`` on."""
    exits: dict[int, str] = field(default_factory=dict)
    """Of ranks that ended by themselves."""
    gone: bool = False
    """There is no record of the rank."""
    culprits: tuple[int, ...] | None = None
    innocent: tuple[int, ...] | None = None
    """None: all but the culprits, where they are known; else nobody."""


_TELLING: Final = 3
"""Members of a group in which one that is wrong can be told from the others."""

Maker = Callable[[_Step, Scheme, np.random.Generator], "_Edit | None"]


def _one(step: _Step, rng: np.random.Generator, wanted: Array) -> int | None:
    """A row among ``wanted``, of a group in which one can be told from the others if there is."""
    telling = wanted & (step.size >= _TELLING)
    rows = np.flatnonzero(telling if telling.any() else wanted)
    return int(rng.choice(rows)) if len(rows) else None


def _own(step: _Step) -> Array:
    """Rows of collectives of a group that is not everybody."""
    return np.asarray(step.collective & (step.size > 1) & (step.comm != 0))


def _fault_of(step: _Step, at: int, **what: Any) -> _Edit:
    rank = int(step.rank[at])
    known = bool(step.size[at] >= _TELLING)
    return _Edit(rank, culprits=(rank,) if known else None, **what)


def _skip(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    at = _one(step, rng, _own(step))
    return None if at is None else _fault_of(step, at, drop=np.array([at]))


def _module(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    at = _one(step, rng, _own(step) & (step.layer >= 0) & (step.stream == 0))
    if at is None:
        return None
    rows = (step.rank == step.rank[at]) & (step.layer == step.layer[at]) & _own(step)
    return _fault_of(step, at, drop=np.flatnonzero(rows))


_OTHER: Final = {
    OP["all_reduce"]: OP["all_gather"], OP["all_gather"]: OP["reduce_scatter"],
    OP["reduce_scatter"]: OP["all_reduce"], OP["all_to_all"]: OP["all_gather"],
}  # fmt: skip


def _branch(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    at = _one(step, rng, _own(step))
    if at is None:
        return None
    return _fault_of(step, at, change={"op": _value(at, _OTHER[int(step.op[at])])})


def _value(at: int, value: Any) -> tuple[Array, Array]:
    return np.array([at]), np.array([value])


def _size(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    at = _one(step, rng, _own(step))
    if at is None:
        return None
    columns = step.trace.events["count", "count_out", "bytes"][int(step.row[at])].row(0)
    names = ("count", "count_out", "bytes")
    change = {
        n: _value(at, 2 * v) for n, v in zip(names, columns, strict=True) if v is not None
    }  # fmt: skip
    return _fault_of(step, at, change=change)


def _dtype(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    codes = {name: code for code, name in enumerate(DTYPE_BYTES)}
    other = {codes["bf16"]: codes["f16"], codes["f32"]: codes["i32"]}
    dtype = step.trace.events["dtype"].fill_null(-1).to_numpy()[step.row]
    at = _one(step, rng, _own(step) & np.isin(dtype, list(other)))
    if at is None:
        return None
    return _fault_of(step, at, change={"dtype": _value(at, other[int(dtype[at])])})


def _group(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    at = _one(step, rng, _own(step))
    if at is None:
        return None
    mine = step.rank == step.rank[at]
    others = np.unique(step.comm[mine & _own(step) & (step.comm != step.comm[at])])
    if not len(others):
        return None
    other = int(rng.choice(others))
    edit = _fault_of(step, at, change={"comm": _value(at, other)})
    size = int(step.size[step.comm == other][0])
    if size < _TELLING:
        edit.culprits = None
    return edit


def _order(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme
    # the first collective of everybody, and the one before it on its queue, of a smaller group
    norm = np.flatnonzero(step.collective & (step.comm == 0))
    norm = norm[np.append(True, step.rank[norm][1:] != step.rank[norm][:-1])]
    before = norm - 1
    fits = (step.stream[before] == step.stream[norm]) & _own(step)[before]
    fits &= step.rank[before] == step.rank[norm]
    if not fits.any():
        return None
    at = int(rng.choice(before[fits]))
    rank = int(step.rank[at])
    members = np.sort(step.rank[before[fits & (step.comm[before] == step.comm[at])]])
    turned = members[np.flatnonzero(members == rank)[0] % 2 :: 2]
    if len(turned) in (0, len(members)):
        return None
    rows = before[fits & (step.comm[before] == step.comm[at]) & np.isin(step.rank[before], turned)]
    seq = np.concatenate([step.seq[rows + 1], step.seq[rows]])
    everybody = set(range(len(step.first)))
    return _Edit(
        rank, change={"seq": (np.concatenate([rows, rows + 1]), seq)},
        innocent=tuple(sorted(everybody - set(members.tolist()))),
    )  # fmt: skip


def _checkpoint(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    del scheme, rng
    mine = step.of(0)
    barrier = mine[step.collective[mine] & (step.comm[mine] == 0)][0]
    # nothing but the barrier, and the wait for it
    return _Edit(
        0, drop=np.setdiff1d(mine, [barrier, mine[-1]]),
        change={"op": _value(int(barrier), OP["barrier"])}, culprits=(0,),
    )  # fmt: skip


def _message(name: str) -> Maker:
    def make(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
        del scheme
        rows = np.flatnonzero(step.op == OP[name])
        if not len(rows):
            return None
        at = int(rng.choice(rows))
        rank = int(step.rank[at])
        peer = int(step.trace.events["peer"][int(step.row[at])])
        everybody = set(range(len(step.first)))
        # that the one has sent too little, or the other received too much, is the same record
        return _Edit(
            rank, drop=np.array([at]), innocent=tuple(sorted(everybody - {rank, peer}))
        )  # fmt: skip

    return make


def _uneven(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
    if scheme.data < 2:
        return None
    ranks = np.arange(len(step.first))
    inner = scheme.context * scheme.tensor
    replica = ranks % (scheme.data * inner) // inner
    mine = ranks[replica == rng.integers(scheme.data)].tolist()
    return _Edit(
        mine[0], stops={r: int(step.first[r]) for r in mine},
        exits=dict.fromkeys(mine, "finished"),
        innocent=tuple(sorted(set(ranks.tolist()) - set(mine))),
    )  # fmt: skip


def _whole(exit_: str, *, part: bool = False, gone: bool = False) -> Maker:
    """A rank ends, or does nothing, in the step, from its beginning or from somewhere in it."""

    def make(step: _Step, scheme: Scheme, rng: np.random.Generator) -> _Edit | None:
        del scheme
        rank = int(rng.integers(len(step.first)))
        rows = step.of(rank)
        at = int(rng.integers(len(rows) - 1)) if part else 0
        return _Edit(
            rank, stops={rank: int(step.seq[rows[at]])}, exits={rank: exit_}, gone=gone,
            culprits=() if gone else (rank,),
        )  # fmt: skip

    return make


_MAKERS: Final[Mapping[str, Maker]] = {
    "skip": _skip, "module": _module, "branch": _branch, "size": _size, "dtype": _dtype,
    "group": _group, "order": _order, "checkpoint": _checkpoint, "recv": _message("recv"),
    "send": _message("send"), "uneven": _uneven, "exit": _whole("finished"),
    "crash": _whole("crashed", part=True), "stall": _whole("alive"),
    "lost": _whole("alive", gone=True),
}  # fmt: skip


def inject(
    trace: Trace, scheme: Scheme, steps: int, fault: str, rng: np.random.Generator
) -> Injected | None:
    """A job with a fault in its last step.

    Args:
        trace: of :func:`scheme.lowered`: one job, in which nothing is wrong.
        scheme: its layout.
        steps: how many it has, 3 or more.
        fault: of :data:`FAULTS`.
        rng: decides where.

    Returns:
        The job and its label; None where its program has no place for such a fault.

    Raises:
        InputError: there is no such fault.
    """
    if fault not in FAULTS:
        raise InputError(f"fault: expected one of {', '.join(FAULTS)}; found {fault!r}")
    expected = FAULTS[fault]
    everybody = tuple(range(scheme.ranks))
    if fault == "healthy":
        return Injected(trace, fault, None, False, expected.kinds, (), everybody)
    step = _step_of(trace, steps)
    edit = _MAKERS[fault](step, scheme, rng)
    if edit is None:
        return None
    innocent = edit.innocent
    if innocent is None:
        innocent = () if edit.culprits is None else tuple(
            r for r in everybody if r not in edit.culprits
        )  # fmt: skip
    return Injected(
        _edited(trace, step, edit), fault, edit.rank, expected.deadlocked, expected.kinds,
        edit.culprits, innocent,
    )  # fmt: skip


def _edited(trace: Trace, step: _Step, edit: _Edit) -> Trace:
    events = trace.events
    for column, (rows, values) in edit.change.items():
        kind = events.schema[column]
        # most columns hold nulls, which arrays of numbers do not
        new = pl.DataFrame(
            {"row": step.row[rows].astype(np.uint32), "new": values},
            schema_overrides={"new": kind},
        )
        events = (
            events.with_row_index("row")
            .join(new, on="row", how="left", maintain_order="left")
            .with_columns(pl.coalesce("new", column).alias(column))
            .drop("row", "new")
        )
    gone = np.zeros(events.height, np.bool_)
    gone[step.row[edit.drop]] = True
    rank, seq = events["rank"].to_numpy(), events["seq"].to_numpy()
    for stopped, at in edit.stops.items():
        gone |= (rank == stopped) & (seq >= at)
    if edit.gone:
        gone |= rank == edit.rank
    lost = events.filter(pl.Series(gone)).select("rank", awaited="request").drop_nulls()
    waits = (
        events.with_row_index("row")
        .filter((pl.col("op") == OP["wait"]) & (pl.col("requests").list.len() > 0))
        .select("row", "rank", awaited=pl.col("requests").list.first())
        .join(lost, on=["rank", "awaited"], how="semi")
    )
    gone[waits["row"].to_numpy()] = True  # nothing is left to wait for
    kept = replace(trace, events=events.filter(~pl.Series(gone)).sort("rank", "seq"))
    found = settle(kept)
    over = kept.events.select("rank", ended=pl.Series(found.done)).group_by("rank").agg(
        pl.col("ended").all()
    )  # fmt: skip
    exits = dict.fromkeys(range(len(step.first)), "alive")
    exits |= dict.fromkeys(over.filter("ended")["rank"].to_list(), "finished") | edit.exits
    ranks = trace.ranks.with_columns(
        exit=pl.col("rank").replace_strict(
            list(exits), [EXIT[e] for e in exits.values()], return_dtype=pl.UInt8
        )
    )
    if edit.gone:
        ranks = ranks.filter(pl.col("rank") != edit.rank)
    return replace(kept, events=kept.events.filter(pl.Series(found.issued)), ranks=ranks)
