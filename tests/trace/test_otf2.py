"""OTF2 archives: what MPI calls become, and that a damaged archive hurts nobody."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dl2gpu.scan import scan
from dl2gpu.trace import otf2_archive
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.otf2_archive import read
from dl2gpu.trace.schema import EXIT, Trace, op_name, validate
from dl2gpu.trace.sniff import classify

otf2 = pytest.importorskip("otf2", reason="the package otf2 is not installed")


class Archive:
    """Writes an archive: the calls of each rank, at rising times."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.clock = folder, 1000
        self.trace = otf2.writer.Writer(str(folder), timer_resolution=1_000_000_000)
        d = self.trace.definitions
        node = d.system_tree_node("node")
        process = otf2.LocationGroupType.PROCESS
        self.locations = []
        for rank in range(ranks):
            group = d.location_group(
                f"MPI Rank {rank}", system_tree_parent=node, location_group_type=process
            )
            self.locations.append(
                d.location("Master thread", group=group, type=otf2.LocationType.CPU_THREAD)
            )
        self.group(otf2.GroupType.COMM_LOCATIONS, self.locations)
        self.world = self.comm("MPI_COMM_WORLD", range(ranks))
        self.regions: dict[str, Any] = {}

    def group(self, kind: Any, members: Any) -> Any:
        return self.trace.definitions.group(
            "", group_type=kind, paradigm=otf2.Paradigm.MPI, group_flags=otf2.GroupFlag.NONE,
            members=list(members),
        )  # fmt: skip

    def comm(self, name: str, ranks: Any) -> Any:
        group = self.group(otf2.GroupType.COMM_GROUP, ranks)
        return self.trace.definitions.comm(name, group=group)

    def call(self, rank: int, name: str, *inside: Callable[[Any, int], None]) -> None:
        """One MPI call of a rank, with the records that lie in it."""
        if name not in self.regions:
            self.regions[name] = self.trace.definitions.region(name, paradigm=otf2.Paradigm.MPI)
        writer = self.trace.event_writer_from_location(self.locations[rank])
        writer.enter(self.tick(), self.regions[name])
        for record in inside:
            record(writer, self.tick())
        writer.leave(self.tick(), self.regions[name])

    def tick(self) -> int:
        self.clock += 10
        return self.clock

    def collective(self, rank: int, name: str, kind: str, comm: Any, root: int = 2**32 - 1) -> None:
        op = getattr(otf2.CollectiveOp, kind)
        self.call(
            rank, name,
            lambda w, t: w.mpi_collective_begin(t),
            lambda w, t: w.mpi_collective_end(
                t, collective_op=op, communicator=comm, root=root, size_sent=8, size_received=8
            ),
        )  # fmt: skip

    def send(self, rank: int, peer: int, tag: int = 3, name: str = "MPI_Send") -> None:
        self.call(rank, name, self.sending(peer, tag))

    def recv(self, rank: int, peer: int, tag: int = 3) -> None:
        self.call(rank, "MPI_Recv", self.receiving(peer, tag))

    def sending(self, peer: int, tag: int) -> Callable[[Any, int], None]:
        return lambda w, t: w.mpi_send(
            t, receiver=peer, communicator=self.world, msg_tag=tag, msg_length=64
        )

    def receiving(self, peer: int, tag: int) -> Callable[[Any, int], None]:
        return lambda w, t: w.mpi_recv(
            t, sender=peer, communicator=self.world, msg_tag=tag, msg_length=64
        )

    def close(self) -> Path:
        self.trace.close()
        return self.folder


def load(folder: Path) -> tuple[Trace, Input]:
    file = TraceFile("job/traces.otf2", str(folder / "traces.otf2"), "otf2", "job")
    trace, inputs = read([file])
    return validate(trace), inputs[0]


def rows(trace: Trace, rank: int) -> list[dict[str, Any]]:
    names = trace.strings.sort("code")["text"].to_list()
    comms = dict(trace.comms.select("comm", "id").iter_rows())
    return [
        row | {"op": op_name(row["op"], names), "comm": comms.get(row["comm"])}
        for row in trace.events.filter(pl.col("rank") == rank).sort("seq").to_dicts()
    ]


def example(folder: Path) -> Path:
    a = Archive(folder, 3)
    sub = a.comm("rows", [2, 0])
    comm = a.world
    for rank in range(3):
        a.collective(rank, "MPI_Allreduce", "ALLREDUCE", comm)
    a.call(0, "MPI_Irecv", lambda w, t: w.mpi_irecv_request(t, request_id=7))
    a.call(0, "MPI_Issend", lambda w, t: w.mpi_isend(
        t, receiver=1, communicator=comm, msg_tag=5, msg_length=64, request_id=8))  # fmt: skip
    a.call(
        0, "MPI_Waitall",
        lambda w, t: w.mpi_isend_complete(t, request_id=8),
        lambda w, t: w.mpi_irecv(
            t, sender=2, communicator=comm, msg_tag=9, msg_length=64, request_id=7
        ),
    )  # fmt: skip
    a.recv(1, 0, tag=5)
    a.send(2, 0, tag=9)
    a.call(0, "MPI_Sendrecv", a.sending(1, 1), a.receiving(1, 2))
    a.call(1, "MPI_Sendrecv", a.sending(0, 2), a.receiving(0, 1))
    for rank in (0, 2):
        a.collective(rank, "MPI_Bcast", "BCAST", sub, root=1)
    for rank in range(3):
        a.call(rank, "MPI_Finalize")
    return a.close()


def test_calls(tmp_path: Path) -> None:
    trace, found = load(example(tmp_path / "a"))
    assert (found.status, found.reason) == ("read", None)
    zero = rows(trace, 0)
    assert [r["op"] for r in zero] == [
        "all_reduce", "recv", "send", "wait", "sendrecv", "broadcast", "finalize",
    ]  # fmt: skip
    assert [r["blocking"] for r in zero[:4]] == [True, False, False, True]
    assert (zero[1]["peer"], zero[1]["tag"], zero[1]["bytes"]) == (2, 9, 64)
    assert (zero[2]["peer"], zero[2]["tag"], zero[2]["send_mode"]) == (1, 5, 1)
    assert sorted(zero[3]["requests"]) == [7, 8]
    both = zero[4]
    assert (both["peer"], both["tag"], both["recv_peer"], both["recv_tag"]) == (1, 1, 1, 2)
    assert (zero[5]["comm"], zero[5]["root"]) == ("rows", 0)
    assert dict(trace.comms.select("id", "ranks").iter_rows())["rows"] == [2, 0]
    assert trace.ranks["exit"].to_list() == [EXIT["finished"]] * 3
    assert trace.jobs.row(0, named=True)["source"] == "otf2"
    times = trace.events.sort("rank", "seq")
    assert times["t_created"].is_null().sum() == 0
    assert (times["t_completed"] >= times["t_created"]).all()


def test_a_healthy_program_is_healthy(tmp_path: Path) -> None:
    example(tmp_path / "job")
    report = scan([str(tmp_path)])
    assert report.jobs["verdict"].to_list() == ["healthy"]
    said = dict(report.inputs.select("path", "status").iter_rows())
    assert said.pop("job/traces.otf2") == "read"
    assert set(said.values()) == {"ignored"}


def test_sends_that_only_buffers_saved_are_potential(tmp_path: Path) -> None:
    a = Archive(tmp_path / "job", 2)
    for rank in (0, 1):
        a.send(rank, 1 - rank)
    for rank in (0, 1):
        a.recv(rank, 1 - rank)
        a.call(rank, "MPI_Finalize")
    a.close()
    report = scan([str(tmp_path)])
    assert report.jobs["verdict"].to_list() == ["potential"]
    assert report.jobs["deadlocked"].to_list() != [True]


def test_a_record_without_its_end_accuses_nobody(tmp_path: Path) -> None:
    a = Archive(tmp_path / "job", 2)
    for rank in (0, 1):
        a.collective(rank, "MPI_Barrier", "BARRIER", a.world)
    a.collective(0, "MPI_Barrier", "BARRIER", a.world)
    a.send(0, 1)
    a.close()
    report = scan([str(tmp_path)])
    assert report.jobs["deadlocked"].to_list() != [True]
    assert set(report.findings["kind"]) <= {"insufficient_evidence"}


def test_posted_and_never_completed_is_left_out(tmp_path: Path) -> None:
    a = Archive(tmp_path / "a", 2)
    a.call(0, "MPI_Irecv", lambda w, t: w.mpi_irecv_request(t, request_id=1))
    a.call(0, "MPI_Ibarrier", lambda w, t: w.non_blocking_collective_request(t, request_id=2))
    a.call(0, "MPI_Wait", lambda w, t: w.non_blocking_collective_complete(
        t, collective_op=otf2.CollectiveOp.BARRIER, communicator=a.world, root=0, size_sent=0,
        size_received=0, request_id=2))  # fmt: skip
    trace, _ = load(a.close())
    assert [r["op"] for r in rows(trace, 0)] == ["barrier", "wait"]


# --------------------------------------------------------------------------------------------------
# Damage


@pytest.mark.parametrize("lost", ["traces.def", "traces/0.evt", "traces"])
def test_missing_parts_are_said(tmp_path: Path, lost: str) -> None:
    folder = example(tmp_path / "a")
    gone = folder / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    trace, found = load(folder)
    assert found.status == "quarantined"
    assert trace.events.is_empty()


@pytest.mark.parametrize("seed", range(8))
def test_damaged_archives_do_not_hurt(tmp_path: Path, seed: int) -> None:
    import random

    rng = random.Random(seed)
    folder = example(tmp_path / "a")
    for name in ("traces.def", "traces/0.evt", "traces/2.evt"):
        data = bytearray((folder / name).read_bytes())
        for _ in range(rng.randint(0, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (folder / name).write_bytes(bytes(data[: rng.randint(len(data) // 2, len(data))]))
    _, found = load(folder)
    assert found.status in {"read", "partial", "quarantined"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = example(tmp_path / "a")
    event = folder / "traces" / "0.evt"
    event.rename(tmp_path / "elsewhere")
    event.symlink_to(tmp_path / "elsewhere")
    _, found = load(folder)
    assert found.status == "quarantined"
    assert "regular file" in (found.reason or "")


def test_without_the_package_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otf2_archive, "find_spec", lambda name: None)
    _, found = load(example(tmp_path / "a"))
    assert found.status == "quarantined"
    assert "dl2gpu[otf2]" in (found.reason or "")


def test_sniffed(tmp_path: Path) -> None:
    folder = example(tmp_path / "a")
    assert classify((folder / "traces.otf2").read_bytes(), "traces.otf2").format == "otf2"
    assert classify((folder / "traces/0.evt").read_bytes(), "0.evt").status == "ignored"
