"""Random communicating programs, healthy and broken, as traces.

A program is first written as one global sequence of steps (a collective, an exchange, a wait, ...)
that every rank follows in the same order, which cannot hang but for want of buffers. Then, in about
half of the programs, a few mistakes are made: an operation is dropped, moved, doubled, or changes
its kind, size, root, peer or communicator.

All choices come from one ``random.Random``. From Hypothesis' own generator (:func:`programs`) a
failing program shrinks; from a seed (:func:`from_seed`) thousands are made in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import polars as pl
from hypothesis import strategies as st

from dl2gpu.trace.schema import (
    ANY,
    DTYPE_BYTES,
    EVENTS,
    EXIT,
    MODE,
    SEND_MODE,
    STATE,
    StringTable,
    Trace,
    conform,
    dtype_code,
    empty,
    op_code,
)

Op = dict[str, Any]
"""One operation with the keys of TRACE_FORMAT.md: names are text, ``comm`` is a communicator id."""

_CODED: Final = {"mode": MODE, "send_mode": SEND_MODE, "state": STATE}


@dataclass
class Program:
    """One job: what each rank does. ``seq`` is the position in the rank's list unless given."""

    ops: dict[int, list[Op]]
    comms: dict[str, list[int]]
    backend: str | None = "nccl"
    world_size: int | None = None
    name: str = "job"
    exit: str = "finished"
    mistakes: list[str] = field(default_factory=list)


def trace_of(*programs: Program) -> Trace:
    """The event table of these programs, a job each.

    Columns that the programs leave out are null; ``blocking`` is true, ``state`` unknown and
    ``flags`` 0.
    """
    strings = StringTable()
    comms: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    jobs: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    for job, program in enumerate(programs):
        index = {}
        for ident, members in program.comms.items():
            index[ident] = len(comms)
            comms.append({"comm": len(comms), "job": job, "id": ident, "ranks": members})
        world = program.world_size
        jobs.append(
            {
                "job": job, "name": program.name, "folder": program.name, "attempt": 0,
                "world_size": world, "backend": program.backend, "source": "native",
                "waits": True, "p2p": True,
            }
        )  # fmt: skip
        ranks += [
            {
                "job": job, "rank": rank, "exit": EXIT[program.exit], "truncated": False,
                "lost_before": 0, "only_active": False,
            }
            for rank in sorted({*program.ops, *range(world or 0)})
        ]  # fmt: skip
        for rank, ops in program.ops.items():
            for position, op in enumerate(ops):
                row = {
                    "lane": 0, "seq": position, "blocking": True, "state": 0, "flags": 0,
                    **op, "job": job, "rank": rank,
                }  # fmt: skip
                row["op"] = op_code(op["op"], strings)
                for column, codes in _CODED.items():
                    if isinstance(row.get(column), str):
                        row[column] = codes[row[column]]
                for column in ("stream", "reduce_op"):
                    if row.get(column) is not None:
                        row[column] = strings.code(row[column])
                if row.get("dtype") is not None:
                    row["dtype"] = dtype_code(row["dtype"], strings)
                if row.get("bytes") is None:  # readers fill in what follows from the others
                    size = DTYPE_BYTES.get(op.get("dtype") or "")
                    count = row.get("count")
                    row["bytes"] = size * count if size and count is not None else None
                for column in ("comm", "new_comm"):
                    if row.get(column) is not None:
                        row[column] = index[row[column]]
                for column in ("peer", "tag", "recv_peer", "recv_tag"):
                    if row.get(column) == "any":
                        row[column] = ANY
                if row.get("requests") == "all":
                    row["requests"] = []
                rows.append(row)

    def table(name: str, of: list[dict[str, Any]]) -> pl.DataFrame:
        return conform(pl.DataFrame(of, infer_schema_length=None), name) if of else empty(name)

    return Trace(
        events=pl.DataFrame(
            {column: [row.get(column) for row in rows] for column in EVENTS}, schema=EVENTS
        ),
        jobs=table("jobs", jobs),
        ranks=table("ranks", ranks),
        comms=table("comms", comms),
        strings=strings.frame(),
    )


# --------------------------------------------------------------------------------------------------
# Steps of a healthy program

SYNCHRONISING: Final = (
    "all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "scan",
    "exscan", "all_gather_v", "all_to_all_v", "neighbour_alltoall",
)  # fmt: skip
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter", "gather_v", "scatter_v")


class _Writer:
    """Appends one step after another to all ranks it concerns."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.world = rng.randint(2, 6)
        self.backend = rng.choice(["nccl", "nccl", "gloo", "mpi", "mpi", None, "hccl"])
        self.tags = self.backend in ("gloo", "mpi")
        self.comms: dict[str, list[int]] = {"world": list(range(self.world))}
        for k in range(rng.randint(1, 3)):
            size = rng.randint(1, self.world)
            self.comms[f"c{k}"] = rng.sample(range(self.world), size)
        self.ops: dict[int, list[Op]] = {rank: [] for rank in range(self.world)}
        self.request = dict.fromkeys(range(self.world), 0)
        self.open: dict[int, list[int]] = {rank: [] for rank in range(self.world)}
        self.groups = 0
        # Where operations run: the host, a stream a communicator, or one shared stream.
        self.on_streams = 0.0 if self.backend == "mpi" else rng.choice([0.0, 0.5, 1.0])
        self.share_stream = rng.random() < 0.3
        self.second_lane = rng.random() < 0.2
        self.unknown = rng.choice([0.0, 0.0, 0.3])

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def comm(self, at_least: int = 1) -> str:
        fitting = [c for c, members in self.comms.items() if len(members) >= at_least]
        return self.rng.choice(fitting)

    def put(self, rank: int, op: Op, placed: Op) -> None:
        """Append ``op`` where ``placed`` says; with a request, if the host goes on behind it."""
        op = {**op, **placed}
        if op.get("stream") is not None or not op.get("blocking", True):
            self.request[rank] += 1
            op["request"] = self.request[rank]
            self.open[rank].append(op["request"])
        for key in ("count", "dtype", "bytes"):
            if key in op and self.chance(self.unknown):
                op[key] = None
        if op.get("count") is None and "count_out" in op and op["op"] == "sendrecv":
            op["count_out"] = None
        self.ops[rank].append(op)

    def place(self, comm: str, lane: int | None = None) -> Op:
        """Host and blocking, host and not blocking, or on a stream."""
        placed: Op = {"lane": int(self.second_lane and comm == "c0") if lane is None else lane}
        if self.chance(self.on_streams):
            placed["stream"] = "shared" if self.share_stream else f"s:{comm}"
        elif self.chance(0.4):
            placed["blocking"] = False
        return placed

    def size(self) -> Op:
        count, dtype = self.rng.choice([4, 8, 8, 1024]), self.rng.choice(["f32", "f32", "bf16"])
        size: Op = {"count": count, "dtype": dtype}
        if self.chance(0.5):
            size["bytes"] = count * {"f32": 4, "bf16": 2}[dtype]
        return size

    def collective(self) -> None:
        comm = self.comm()
        op: Op = {
            "op": self.rng.choice(SYNCHRONISING),
            "comm": comm,
        }
        if op["op"] != "barrier":
            op |= self.size()
        if op["op"] in ("all_reduce", "all_gather") and self.chance(0.15):
            op |= {"count": 0, "bytes": 0}
        if op["op"] in ("all_reduce", "reduce_scatter", "scan"):
            op["reduce_op"] = self.rng.choice(["sum", "max"])
        self._on_all(op)

    def rooted(self) -> None:
        comm = self.comm()
        op: Op = {
            "op": self.rng.choice(ROOTED),
            "comm": comm,
            "root": None if self.chance(0.1) else self.rng.choice(self.comms[comm]),
        }
        self._on_all(op | self.size())

    def _on_all(self, op: Op) -> None:
        placed = self.place(op["comm"])
        for rank in self.comms[op["comm"]]:
            varied = dict(op)
            if op["op"].endswith("_v"):
                varied["count"], varied["bytes"] = self.rng.choice([4, 8, 16]), None
            if op["op"] == "scatter" and rank != op["root"]:
                varied |= {"count": self.rng.choice([0, None]), "bytes": None}
                varied["count_out"] = 4
            # Hosts may differ in whether they wait at once.
            self.put(rank, varied, self.place(op["comm"]) if self.chance(0.1) else placed)

    def message(self) -> None:
        comm = self.comm(2)
        source, target = self.rng.sample(self.comms[comm], 2)
        tag = self.rng.choice([None, 0, 1])
        base = {"comm": comm, "tag": tag} | self.size()
        mode = self.rng.choice(["standard"] * 5 + ["synchronous", "buffered", "ready"])
        self.put(source, base | {"op": "send", "peer": target, "send_mode": mode}, self.place(comm))
        if self.chance(0.2):
            probe = {"op": "probe", "comm": comm, "peer": source, "tag": tag}
            self.put(target, probe, {"lane": 0})
        receive = base | {"op": "recv", "peer": source}
        if self.tags and self.chance(0.1):  # a wildcard that is known to have got this message
            receive |= {"peer": "any", "matched_peer": source}
            receive |= {"tag": "any", "matched_tag": tag or 0} if self.chance(0.5) else {}
        self.put(target, receive, self.place(comm))

    def both_send_first(self) -> None:
        """Safe only with buffers, or where the sends do not hold the host."""
        comm = self.comm(2)
        pair = self.rng.sample(self.comms[comm], 2)
        size = self.size() | {"comm": comm}
        for op in ("send", "recv"):
            for rank, other in (pair, pair[::-1]):
                self.put(rank, size | {"op": op, "peer": other}, self.place(comm))

    def exchange(self) -> None:
        """A ring in which each rank sends and receives as a batch, or by sendrecv."""
        comm = self.comm(2)
        ring = self.rng.sample(self.comms[comm], self.rng.randint(2, len(self.comms[comm])))
        size = self.size() | {"comm": comm}
        as_batch = self.chance(0.7)
        for k, rank in enumerate(ring):
            after, before = ring[(k + 1) % len(ring)], ring[k - 1]
            if not as_batch:
                both = size | {"op": "sendrecv", "peer": after, "recv_peer": before}
                if after == before and self.chance(0.5):
                    del both["recv_peer"]
                self.put(
                    rank,
                    both | {"count_out": size["count"] if self.chance(0.5) else None},
                    self.place(comm),
                )
                continue
            self.groups += 1
            placed = self.place(comm) | {"group": self.groups}
            members = [
                size | {"op": "send", "peer": after},
                size | {"op": "recv", "peer": before},
            ]
            self.rng.shuffle(members)
            for member in members:
                self.put(rank, member, placed)

    def fused(self) -> None:
        """Several collectives in one batch (ncclGroupStart)."""
        self.groups += 1
        comm = self.comm()
        placed = self.place(comm) | {"group": self.groups}
        for _ in range(self.rng.randint(2, 3)):
            op = {"op": "all_reduce", "comm": comm} | self.size()
            for rank in self.comms[comm]:
                self.put(rank, op, placed)

    def create(self) -> None:
        parent = self.comm(2)
        members = self.rng.sample(self.comms[parent], self.rng.randint(1, len(self.comms[parent])))
        new = f"n{len(self.comms)}"
        self.comms[new] = members
        split = self.chance(0.3)
        rest = [rank for rank in self.comms[parent] if rank not in members]
        if split and rest:
            self.comms[new + "b"] = rest
        for rank in self.comms[parent]:
            made = new + "b" if split and rank in rest else new
            op = {"op": "comm_create", "comm": parent, "new_comm": made, "split": split}
            self.put(rank, op, {"lane": 0})

    def wait(self) -> None:
        for rank in self.ops:
            if self.chance(0.6):
                self.wait_on(rank)

    def wait_on(self, rank: int) -> None:
        op: Op = {"op": "wait", "requests": "all", "mode": "all"}
        pending = self.open[rank]
        if pending and self.chance(0.6):
            op["requests"] = self.rng.sample(pending, self.rng.randint(1, len(pending)))
            op["mode"] = self.rng.choice(["all", "all", "any", "some"])
            if op["mode"] == "all":
                self.open[rank] = [r for r in pending if r not in op["requests"]]
                if self.chance(0.1):
                    op["requests"] = [*op["requests"], 999]
        placed: Op = {"lane": int(self.second_lane and self.chance(0.5))}
        if self.on_streams and self.chance(0.3):
            op["stream"] = "shared" if self.share_stream else self.rng.choice(["main", "s:world"])
        self.ops[rank].append(op | placed)


def random_program(rng: random.Random, name: str = "job") -> Program:
    """One program; about half of them are stuck under rendezvous."""
    w = _Writer(rng)
    steps: list[Callable[[], None]] = [
        w.collective, w.collective, w.rooted, w.message, w.message, w.both_send_first, w.exchange,
        w.exchange, w.fused, w.create, w.wait, w.wait,
    ]  # fmt: skip
    for _ in range(rng.randint(2, 9)):
        rng.choice(steps)()
    if rng.random() < 0.3:
        for rank in w.ops:
            w.wait_on(rank)
    if rng.random() < 0.2:
        for rank in w.ops:
            w.ops[rank].append({"op": "finalize", "lane": 0})
    program = Program(
        w.ops, w.comms, w.backend, w.world, name, rng.choice(["finished", "alive", "unknown"])
    )
    numbered = rng.random() < 0.3
    number_first = rng.random() < 0.5
    if numbered and number_first:
        _number(program, rng)
    if rng.random() < 0.6:
        wanted = rng.randint(1, 3)
        for _ in range(4 * wanted):
            wanted -= _make_mistake(program, rng)
            if not wanted:
                break
    _tidy(program, rng)
    if numbered and not number_first:
        _number(program, rng)
    if rng.random() < 0.25:
        _record_states(program, rng)
    return program


def _number(program: Program, rng: random.Random) -> None:
    """Ordinals as a source would give them: counted per communicator from some base."""
    base = {comm: rng.choice([0, 1, 1, 500]) for comm in program.comms}
    for ops in program.ops.values():
        count = dict(base)
        for op in ops:
            if "comm" in op and op["op"] not in ("send", "recv", "sendrecv", "probe"):
                op["ordinal"] = count[op["comm"]]
                count[op["comm"]] += 1


def _record_states(program: Program, rng: random.Random) -> None:
    """A post-mortem record: some prefix of each rank is recorded as completed, with gaps."""
    for ops in program.ops.values():
        until = rng.randint(0, len(ops))
        for position, op in enumerate(ops):
            done = position < until and rng.random() < 0.8
            op["state"] = "completed" if done else rng.choice(["unknown", "scheduled", "started"])


# --------------------------------------------------------------------------------------------------
# Mistakes


def _make_mistake(program: Program, rng: random.Random) -> bool:
    """One change at a random place; False where it does not apply there."""
    rank = rng.choice(sorted(program.ops))
    ops = program.ops[rank]
    if not ops:
        return False
    k = rng.randrange(len(ops))
    kind = rng.choice([*_ORDER_MISTAKES, *_FIELD_MISTAKES])
    if kind in _ORDER_MISTAKES:
        _ORDER_MISTAKES[kind](ops, k, rng)
    else:
        change = _FIELD_MISTAKES[kind](ops[k], program, rank, rng)
        if not change or all(ops[k].get(key) == value for key, value in change.items()):
            return False
        ops[k] |= change
    program.mistakes.append(f"{kind} at rank {rank}, position {k}")
    return True


def _swap(ops: list[Op], k: int, rng: random.Random) -> None:
    ops[k - 1], ops[k] = ops[k], ops[k - 1]


_ORDER_MISTAKES: Final[dict[str, Callable[[list[Op], int, random.Random], None]]] = {
    "drop": lambda ops, k, rng: ops.__delitem__(k),
    "cut": lambda ops, k, rng: ops.__delitem__(slice(k, None)),
    "swap": _swap,
    "move": lambda ops, k, rng: ops.insert(rng.randrange(len(ops)), ops.pop(k)),
    "double": lambda ops, k, rng: ops.insert(k, dict(ops[k])),
}


def _other_op(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    for alike in (
        ["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast"],
        ["gather", "scatter"],
        ["send", "recv"],
    ):
        if op["op"] in alike and "any" not in (op.get("peer"), op.get("tag")):
            return {"op": rng.choice(alike), "root": op.get("root")}
    return {}


def _other_count(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"count": op["count"] * rng.choice([2, 3]), "bytes": None} if op.get("count") else {}


def _no_count(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"count": 0, "bytes": 0} if op["op"] in ("all_reduce", "all_gather", "broadcast") else {}


def _other_dtype(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    if not op.get("dtype") or op["op"].endswith("_v"):
        return {}
    return {"dtype": rng.choice(["i32", "f64", "f16"]), "bytes": None}


def _other_root(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"root": rng.choice([*program.comms[op["comm"]], None])} if "root" in op else {}


def _other_peer(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    if not isinstance(op.get("peer"), int):
        return {}
    return {"peer": rng.choice(program.comms[op["comm"]])}


def _other_tag(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"tag": rng.choice([None, 0, 1, 2])} if isinstance(op.get("tag"), int) else {}


def _other_comm(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    if "comm" not in op or "root" in op or "peer" in op:
        return {}
    return {"comm": rng.choice([c for c, members in program.comms.items() if rank in members])}


def _other_blocking(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    # Half of a batch that holds the host is no batch that any library has.
    if op["op"] in ("wait", "finalize") or "group" in op:
        return {}
    return {"blocking": not op.get("blocking", True)}


def _other_stream(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"stream": rng.choice([None, "other"])}


def _other_new_comm(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"new_comm": rng.choice(sorted(program.comms))} if "new_comm" in op else {}


def _other_reduce_op(op: Op, program: Program, rank: int, rng: random.Random) -> Op:
    return {"reduce_op": "prod"} if "reduce_op" in op else {}


_FIELD_MISTAKES: Final[dict[str, Callable[[Op, Program, int, random.Random], Op]]] = {
    "op": _other_op,
    "count": _other_count,
    "zero": _no_count,
    "dtype": _other_dtype,
    "root": _other_root,
    "peer": _other_peer,
    "tag": _other_tag,
    "comm": _other_comm,
    "blocking": _other_blocking,
    "stream": _other_stream,
    "new_comm": _other_new_comm,
    "reduce_op": _other_reduce_op,
}
"""What an operation may get wrong: the new values, or nothing where it does not apply."""


def _tidy(program: Program, rng: random.Random) -> None:
    """Give what a recorder guarantees whatever the program did.

    ``seq`` grows, a batch is one run of one lane, an ordinal is borne once by a rank, and a request
    id that was doubled stays so only in some programs (MPI's persistent requests reuse theirs).
    """
    numbers = [
        (rank, op["comm"], op["ordinal"])
        for rank, ops in program.ops.items()
        for op in ops
        if "ordinal" in op
    ]
    if len(numbers) != len(set(numbers)):
        for ops in program.ops.values():
            for op in ops:
                op.pop("ordinal", None)
    for rank, ops in program.ops.items():
        seq = rng.choice([0, 0, 17])
        last: dict[int, tuple[Any, Any]] = {}
        fresh = 10_000
        used: set[int] = set()
        for op in ops:
            op["seq"] = seq
            seq += rng.choice([1, 1, 1, 5])
            before = last.get(op["lane"], (None, None))
            group = op.get("group")
            if group is not None and group == before[0]:
                op["group"] = before[1]
            elif group is not None:
                fresh += 1
                op["group"] = fresh + 1000 * rank
            last[op["lane"]] = (group, op.get("group"))
            request = op.get("request")
            if request is not None and request in used and rng.random() < 0.5:
                fresh += 1
                op["request"] = fresh
            used.add(request or 0)


# --------------------------------------------------------------------------------------------------
# Strategies, and the same program under other names


def from_seed(seed: int, n: int = 1) -> list[Program]:
    """``n`` programs, the same ones for the same seed."""
    return [random_program(random.Random(f"{seed}/{k}"), f"job-{k}") for k in range(n)]


def programs() -> st.SearchStrategy[Program]:
    """A program that Hypothesis can shrink."""
    return st.randoms(use_true_random=False).map(random_program)


def seeds() -> st.SearchStrategy[int]:
    """A seed for :func:`from_seed`: shown as a number, it makes the example again."""
    return st.integers(0, 2**32 - 1)


def smaller(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program with as few operations as possible that still ``fails``: drop one after another."""
    again = True
    while again:
        again = False
        for rank in program.ops:
            for k in range(len(program.ops[rank])):
                ops = {r: list(o) for r, o in program.ops.items()}
                del ops[rank][k]
                candidate = replace(program, ops=ops)
                if fails(candidate):
                    program, again = candidate, True
                    break
    return program


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The same trace with the rows of every table in another order."""
    return replace(
        trace,
        **{
            name: frame.sample(fraction=1.0, shuffle=True, seed=seed)
            for name, frame in trace.tables().items()
        },
    )


def renamed(trace: Trace, permutation: Sequence[int], seed: int = 0) -> Trace:
    """The same events under other names.

    Rank r becomes ``permutation[r]`` in every job; jobs and communicators get other names and
    numbers. ``permutation`` covers the ranks of the largest job; a job of n ranks takes the order
    of its first n values, so that its ranks stay below its world size.
    """
    rng = random.Random(seed)
    jobs = list(range(trace.jobs.height))
    comms = list(range(trace.comms.height))
    rng.shuffle(jobs)
    rng.shuffle(comms)
    size = {row["job"]: row["world_size"] or len(permutation) for row in trace.jobs.to_dicts()}

    def rank_of(job: int, rank: int | None) -> int | None:
        if rank is None or rank == ANY or rank >= size[job]:
            return rank
        first = permutation[: size[job]]
        return sorted(first).index(first[rank])

    def moved(frame: pl.DataFrame, table: str, columns: Iterable[str]) -> pl.DataFrame:
        rows = frame.to_dicts()
        for row in rows:
            for column in columns:
                row[column] = rank_of(row["job"], row[column])
            if table == "comms":
                row["ranks"] = [rank_of(row["job"], rank) for rank in row["ranks"]]
                row["id"] = f"renamed-{row['id']}"
            if table == "jobs":
                row["name"] = row["folder"] = f"renamed-{row['name']}"
            row["job"] = jobs[row["job"]]
            for column in ("comm", "new_comm"):
                if row.get(column) is not None:
                    row[column] = comms[row[column]]
        return pl.DataFrame(rows, schema=frame.schema)

    return replace(
        trace,
        events=moved(trace.events, "events", ("rank", "peer", "recv_peer", "root", "matched_peer")),
        jobs=moved(trace.jobs, "jobs", ()),
        ranks=moved(trace.ranks, "ranks", ("rank",)),
        comms=moved(trace.comms, "comms", ()),
        status=moved(trace.status, "status", ("rank",)),
    )
