"""Writes the MPI calls of an OTF2 archive as native JSON Lines, one file a rank.

A program of its own, run by :mod:`otf2_archive`: the OTF2 library is compiled code that reads
untrusted files, and what it does to its process must stay there. It imports nothing of dl2gpu.

    python otf2_export.py ARCHIVE.otf2 FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

_COLLECTIVES: Final = {
    "BARRIER": "barrier", "BCAST": "broadcast", "GATHER": "gather", "GATHERV": "gather_v",
    "SCATTER": "scatter", "SCATTERV": "scatter_v", "ALLGATHER": "all_gather",
    "ALLGATHERV": "all_gather_v", "ALLTOALL": "all_to_all", "ALLTOALLV": "all_to_all_v",
    "ALLTOALLW": "all_to_all_v", "ALLREDUCE": "all_reduce", "REDUCE": "reduce",
    "REDUCE_SCATTER": "reduce_scatter_v", "REDUCE_SCATTER_BLOCK": "reduce_scatter", "SCAN": "scan",
    "EXSCAN": "exscan",
}  # fmt: skip
_ROOTED: Final = frozenset({"broadcast", "gather", "gather_v", "scatter", "scatter_v", "reduce"})
_MODES: Final = {"ssend": "synchronous", "bsend": "buffered", "rsend": "ready"}
_MOST_RANKS: Final = 1 << 20


def _name(value: Any) -> str:
    """Name of an enumeration's value: the library's are no Python enumerations."""
    return str(value).rpartition(".")[2]


class Rank:
    """The calls of one process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[dict[str, Any]] = []
        self.lanes: dict[int, Lane] = {}
        self.comms: dict[str, list[int]] = {}
        self.ended = False


class Lane:
    """A host thread: what it is in, and the receives that it has posted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[tuple[str, int]] = []
        self.here: list[dict[str, Any]] = []
        """Rows of the call that the thread is in."""
        self.waited: list[int] = []
        self.posted: dict[int, dict[str, Any]] = {}

    def call(self) -> str:
        return self.calls[-1][0] if self.calls else ""


class Export:
    """Turns the events of an archive into rows."""

    def __init__(self, trace: Any) -> None:
        self.resolution = int(trace.timer_resolution) or 1
        clock = trace.definitions.clock_properties
        self.offset = int(clock.global_offset)
        start = int(clock.realtime_timestamp)
        self.start = start if 0 < start < 1 << 62 else 0
        self.rank_of: dict[int, int] = {}
        members: list[Any] = []
        for group in trace.definitions.groups:
            if _name(group.group_type) == "COMM_LOCATIONS" and _name(group.paradigm) == "MPI":
                members = list(group.members)
        if not members:
            raise ValueError("the archive defines no MPI processes")
        for number, location in enumerate(members[:_MOST_RANKS]):
            self.rank_of[id(location.group)] = number
        self.ranks = {number: Rank(number) for number in self.rank_of.values()}
        self.seen: dict[int, tuple[str, list[int]]] = {}
        self.names: set[str] = set()

    def comm(self, comm: Any, rank: Rank) -> tuple[str, list[int]]:
        """Name and members of a communicator; its line is written for each rank that uses it."""
        key = id(comm)
        if key not in self.seen:
            kind = _name(comm.group.group_type)
            members = [self.rank_of.get(id(m.group), -1) for m in comm.group.members or ()]
            name = str(comm.name) or "unnamed"
            if name in self.names:
                name = f"{name}#{comm._ref}"
            self.names.add(name)
            self.seen[key] = (name, [] if kind == "COMM_SELF" or -1 in members else members)
        name, members = self.seen[key]
        if _name(comm.group.group_type) == "COMM_SELF":
            name, members = f"{name} of rank {rank.number}", [rank.number]
        rank.comms.setdefault(name, members)
        return name, members

    def time(self, ticks: int) -> int:
        return self.start + (int(ticks) - self.offset) * 10**9 // self.resolution

    def add(self, location: Any, event: Any) -> None:
        number = self.rank_of.get(id(location.group))
        if number is None:
            return
        rank = self.ranks[number]
        lane = rank.lanes.get(id(location))
        if lane is None:
            lane = rank.lanes[id(location)] = Lane(len(rank.lanes))
        handle = getattr(self, f"on_{type(event).__name__}", None)
        if handle is not None:
            handle(rank, lane, event)

    def row(self, rank: Rank, lane: Lane, event: Any, **fields: Any) -> dict[str, Any]:
        begun = lane.calls[-1][1] if lane.calls else event.time
        row = {"kind": "op", "seq": len(rank.rows), "lane": lane.number} | fields
        row["t_created"] = self.time(begun)
        rank.rows.append(row)
        lane.here.append(row)
        return row

    def message(self, rank: Rank, event: Any, peer: Any) -> dict[str, Any]:
        name, members = self.comm(event.communicator, rank)
        known = isinstance(peer, int) and 0 <= peer < len(members)
        out = {"comm": name, "tag": int(event.msg_tag), "bytes": int(event.msg_length)}
        return out | ({"peer": members[peer]} if known else {})

    # --- events, named as OTF2 names them

    def on_Enter(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        name = str(event.region.name)
        if name.startswith("MPI_"):
            lane.calls.append((name[4:].lower(), event.time))
            lane.here, lane.waited = [], []
            if name == "MPI_Finalize":
                self.row(rank, lane, event, op="finalize")

    def on_Leave(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        name = str(event.region.name)
        if not name.startswith("MPI_") or not lane.calls:
            return
        call = lane.call()
        if lane.waited:
            requests = list(dict.fromkeys(lane.waited))
            self.row(rank, lane, event, op="wait", requests=requests)
        if call.startswith("sendrecv"):
            _join(rank, lane)
        for row in lane.here:
            row["t_completed"] = self.time(event.time)
        rank.ended |= call == "finalize"
        lane.calls.pop()
        lane.here, lane.waited = [], []

    def on_ProgramEnd(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802, ARG002
        rank.ended = True

    def on_MpiSend(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        mode = _MODES.get(lane.call())
        more = {"send_mode": mode} if mode else {}
        self.row(rank, lane, event, op="send", **self.message(rank, event, event.receiver), **more)

    def on_MpiRecv(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        self.row(rank, lane, event, op="recv", **self.message(rank, event, event.sender))

    def on_MpiIsend(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        mode = _MODES.get(lane.call().removeprefix("i"))
        more = {"send_mode": mode} if mode else {}
        self.row(
            rank, lane, event, op="send", blocking=False, request=int(event.request_id), **more,
            **self.message(rank, event, event.receiver),
        )  # fmt: skip

    def on_MpiIrecvRequest(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        request = int(event.request_id)
        lane.posted[request] = self.row(
            rank, lane, event, op="recv", blocking=False, request=request
        )

    def on_MpiIrecv(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        request = int(event.request_id)
        row = lane.posted.pop(request, None)
        if row is not None:
            row |= self.message(rank, event, event.sender)
            row["t_completed"] = self.time(event.time)
        self._completed(lane, request)

    def on_MpiIsendComplete(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802, ARG002
        self._completed(lane, int(event.request_id))

    def on_MpiCollectiveEnd(self, rank: Rank, lane: Lane, event: Any) -> None:  # noqa: N802
        fields = self.collective(rank, event)
        if fields is not None:
            self.row(rank, lane, event, **fields)

    def on_NonBlockingCollectiveRequest(  # noqa: N802
        self, rank: Rank, lane: Lane, event: Any
    ) -> None:
        request = int(event.request_id)
        lane.posted[request] = self.row(
            rank, lane, event, op="collective", blocking=False, request=request
        )

    def on_NonBlockingCollectiveComplete(  # noqa: N802
        self, rank: Rank, lane: Lane, event: Any
    ) -> None:
        request = int(event.request_id)
        row, fields = lane.posted.pop(request, None), self.collective(rank, event)
        if row is not None and fields is not None:
            row |= fields
        self._completed(lane, request)

    def collective(self, rank: Rank, event: Any) -> dict[str, Any] | None:
        kind = _name(event.collective_op)
        if kind.startswith(("DESTROY", "DEALLOCATE")):
            return None  # the standard lets these return early
        name, members = self.comm(event.communicator, rank)
        op = _COLLECTIVES.get(kind, f"mpi_{kind.lower()}")
        out: dict[str, Any] = {"op": op, "comm": name}
        root = event.root
        if op in _ROOTED and isinstance(root, int) and 0 <= root < len(members):
            out["root"] = members[root]
        return out

    def _completed(self, lane: Lane, request: int) -> None:
        if lane.call().startswith(("wait", "test")):
            lane.waited.append(request)

    def write(self, folder: Path) -> None:
        for rank in self.ranks.values():
            head = {
                "kind": "header", "format": "dl2gpu.trace", "version": 1, "rank": rank.number,
                "world_size": len(self.ranks), "backend": "mpi", "source": "otf2",
            }  # fmt: skip
            lines: list[dict[str, Any]] = [head]
            lines += [
                {"kind": "comm", "id": name, "ranks": members, "name": name}
                for name, members in rank.comms.items()
            ]
            # what was posted and never seen to complete: with whom, or on what, is not recorded
            lines += [r for r in rank.rows if r["op"] != "collective" and _told(r)]
            lines.append({"kind": "end", "exit": "finished" if rank.ended else "window"})
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"rank_{rank.number}.jsonl").write_text(text, encoding="utf-8")


def _told(row: dict[str, Any]) -> bool:
    return row["op"] not in {"send", "recv"} or "comm" in row


def _join(rank: Rank, lane: Lane) -> None:
    """MPI_Sendrecv is one operation: the send and the receive that were recorded in it."""
    sends = [r for r in lane.here if r["op"] == "send"]
    receives = [r for r in lane.here if r["op"] == "recv"]
    if len(sends) == len(receives) == 1 and sends[0].get("comm") == receives[0].get("comm"):
        send, receive = sends[0], receives[0]
        send["op"] = "sendrecv"
        if "peer" in receive:
            send["recv_peer"] = receive["peer"]
        send["recv_tag"] = receive["tag"]
        rank.rows.remove(receive)
        lane.here.remove(receive)


def main(anchor: str, folder: str) -> None:
    """Exports the archive of ``anchor`` into ``folder``."""
    import otf2

    with otf2.reader.open(anchor) as trace:
        export = Export(trace)
        for location, event in trace.events:
            export.add(location, event)
        export.write(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:3])
