"""What the fuzzing of readers begins with: small good inputs of each format, and its words.

Inputs that an earlier run found worth keeping lie in tests/data/fuzz/, a folder a target.
"""

# ruff: noqa: E501 - samples stand as they are

from __future__ import annotations

import io
import json
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import et_writer
import fr_writer
import polars as pl
from fuzz_mutate import varint
from kineto_writer import Rank, dumped

HERE: Final = Path(__file__).resolve().parent
KEPT: Final = HERE / "data" / "fuzz"
DEMO: Final = HERE.parent / "datasets" / "demo"
SMALL: Final = 12 << 10
"""Seeds are cut to so many bytes: small ones go round faster."""


def _head(path: Path) -> bytes:
    data = path.read_bytes()
    return data if len(data) <= SMALL else data[: data.rfind(b"\n", 0, SMALL) + 1]


def native() -> list[bytes]:
    return [_head(p) for p in sorted(DEMO.glob("*/*.jsonl"))[::3]] + [NATIVE_ALL.encode()]


NATIVE_ALL: Final = """\
{"kind":"header","format":"dl2gpu.trace","version":1,"job":"j","rank":0,"world_size":2,"backend":"mpi","attempt":1}
{"kind":"comm","id":"w","name":"world","desc":"d","ranks":[0,1]}
{"kind":"op","seq":0,"op":"send","peer":1,"tag":3,"comm":"w","count":4,"dtype":"f32","bytes":16,"mode":"ssend","blocking":false,"request":7,"stack":["f a.py:1"]}
{"kind":"op","seq":1,"op":"recv","peer":"any","tag":"any","comm":"w","blocking":false,"request":"r","lane":1}
{"kind":"op","seq":2,"op":"wait","requests":[7,"r"],"mode":"any"}
{"kind":"op","seq":3,"op":"comm_create","comm":"w","new_comm":"n"}
{"kind":"op","seq":4,"op":"all_to_all_v","comm":"w","ordinal":9,"splits":[1,2],"stream":"s","state":"started","t_created":5,"t_started":6,"group":2}
{"kind":"op","seq":5,"op":"reduce","comm":"w","root":1,"reduce_op":"sum","t_completed":9,"state":"completed"}
{"kind":"end","exit":"finished","t":10}
"""


def flight_recorder_documents() -> list[Any]:
    """Dumps of several versions, before they are pickled."""
    shared = [fr_writer.frame("f", "a.py", 1), fr_writer.frame("g", "b.py", 22)]
    found = []
    for version in (None, (1, 0), (1, 4), (2, 0), (2, 4), (2, 9), (2, 10)):
        make = fr_writer.entry
        entries = [
            make(0, cseq=1, version=version, frames=shared, started=5, completed=9),
            make(1, "nccl:broadcast", cseq=2, version=version, frames=shared, state="started"),
            make(2, "nccl:send 0->1", pseq=1, version=version, state="scheduled", frames=[]),
            make(3, "nccl:recv 0<-1", pseq=1, version=version, state="scheduled", dtype="Long"),
            make(4, "nccl:coalesced", cseq=2, op_id=7, version=version, sizes=(), dtype=()),
            make(5, "nccl:all_to_all", cseq=3, group=("3", "tp"), pg_id=1, version=version,
                 sizes=((2, 3), (4,)), duration=0.5),
            make(6, "gloo:all_gather", cseq=4, version=version, thread="9", state="scheduled"),
        ]  # fmt: skip
        groups = {"0": ("default_pg", [0, 1]), "3": ("tp", [0, 1])}
        status = {0: (4, 2, 1), 1: (3, -1, -1)}
        found.append(fr_writer.document(entries, version=version, groups=groups, status=status))
    return found


def flight_recorder() -> list[bytes]:
    return [fr_writer.dumps(d) for d in flight_recorder_documents()]


def flight_recorder_json() -> list[bytes]:
    whole = [fr_writer.json_form(d) for d in flight_recorder_documents() if isinstance(d, dict)]
    return [*whole, json.dumps(flight_recorder_documents()[0]).encode()]


def kineto() -> list[bytes]:
    found = []
    for rank in (0, 1):
        r = Rank(rank, 2, {"0": [0, 1], "7": [0, 1]})
        r.noise()
        r.call("allreduce", count=4096, thread=5)
        r.call("_allgather_base", "7", 512, out=1024, stream=28)
        r.wait("7")
        r.call("broadcast", "7", 10, args={"Rank": 1}, stream=28)
        r.batch(("send", 1 - rank), ("recv", 1 - rank))
        r.call("barrier", count=0)
        r.wait()
        found += [dumped(r.trace()), dumped(r.trace(info=False), 1)]
        found.append(dumped(r.trace()["traceEvents"]))
    return found


_OPS: Final = [
    et_writer.Op("allreduce", size=64),
    et_writer.Op("broadcast", place=1, size=8, dtype="long int"),
    et_writer.Op("all_to_allv", size=96, splits=([32, 64], [48, 48])),
    et_writer.Op("send", place=0, tag=5, wait=True),
    et_writer.Op("recv", place=1, tag=6, tid=2),
    et_writer.Op("_reduce_scatter_base", size=64, dtype="c10::BFloat16", tid=2),
]
SCHEMAS: Final = ("1.0.1", "1.0.3-chakra.0.0.4", "1.1.1-chakra.1.0.0", "1.1.1-newest")


def execution_trace() -> list[bytes]:
    job = et_writer.Job({"0": [0, 1], "7": [1, 0]})
    return [
        et_writer.execution_trace(rank, _OPS[:some], job, schema, indent)
        for rank, schema, some, indent in [
            *((0, s, 6, None) for s in SCHEMAS), (1, SCHEMAS[1], 2, 1), (1, SCHEMAS[3], 3, None),
        ]
    ]  # fmt: skip


def chakra() -> list[bytes]:
    tensor, types = "[[9, 10, 0, 1024, 2, 'cuda:0']]", "['Tensor(c10::BFloat16)']"
    node = et_writer.chakra_node

    def device(id_: int, kind: int = 7, deps: tuple[int, ...] = (), **more: Any) -> bytes:
        told: dict[str, Any] = {
            "is_cpu_op": False,
            "comm_size": 2048,
            "pg_name": "3",
            "stream": 20,
        } | more
        return node(id_, "ncclDevKernel_X", kind, deps, values=tensor, types=types, **told)

    traced = [
        node(1, "c10d::allreduce_(0)", 7, is_cpu_op=True), device(2, deps=(1,), comm_type=0),
        device(3, 5, (2,), comm_src=0, comm_dst=2, comm_tag=4),
        device(4, 6, (3, 2), packed=False, comm_src=2, comm_dst=0, comm_tag=5),
        device(5, deps=(4,), comm_type=5, involved_dim=[True, False]), node(6, "aten::add", 4, (5,)),
    ]  # fmt: skip
    program = [
        node(k, f"c{k}", 7, (k - 1,), comm_type=t, comm_size=64, is_cpu_op=False)
        for k, t in enumerate((0, 2, 7), 1)
    ]
    first = et_writer.metadata("0.0.4")
    return [
        et_writer.chakra(traced),
        et_writer.chakra(program, first),
        et_writer.chakra(traced[:1]),
    ]


def chakra_json() -> list[bytes]:
    nodes = [
        {"id": k, "name": n, "type": t, "data_deps": [k - 1], "attr": [
            {"name": "comm_type", "int64_val": "0"}, {"name": "is_cpu_op", "bool_val": False},
            {"name": "comm_size", "int64_val": 64}, {"name": "pg_name", "string_val": "0"},
            {"name": "comm_src", "int32_val": 0}, {"name": "comm_dst", "int32_val": 1},
        ]}
        for k, (n, t) in enumerate([("a", "COMM_COLL_NODE"), ("b", "COMM_SEND_NODE"),
                                    ("c", 6), ("d", "COMP_NODE")])
    ]  # fmt: skip
    other = [
        {"Id": 1, "Name": "x", "Type": "COMM_COLL_NODE", "comm_type": "ALL_REDUCE", "inputs":
         {"values": "[[1, 2, 0, 4, 4, 'cuda:0']]", "types": "['Tensor(float)']"}, "ctrl_deps": 0},
    ]  # fmt: skip
    return [json.dumps({"workload_graph": n}).encode() for n in (nodes, other)]


def clog() -> list[bytes]:
    head = "V|1|base_timestamp=1714234567.890\n"
    lines = """\
new_comm|comm=world|rank=1|world_size=4
split|parent=world|child=row|ranks=3,1
new_comm|comm=row|rank=1|world_size=2
C1|sig|all_reduce|in_count=64|out_count=64|dtype=f32|red_op=sum|async_op=f|comm=world
C1|Q|work_id=1|+0.001
C1|S|+0.002
C2|sig|broadcast|in_count=8|out_count=8|dtype=bf16|root=1|async_op=t|comm=world
C2|Q|work_id=2|+0.010
C1|Q|work_id=3|+0.012
C1|E|+0.013
C2|W|+0.022
C3|sig|send|in_count=4|out_count=0|dtype=f32|peer=0|async_op=t|comm=row
C3|Q|work_id=4|+0.1
C4|sig|all_to_all_v_single|in_splits=1,2|out_splits=2,1|dtype=i64|async_op=f|comm=row
G7|C4|Q|work_id=5|+0.3
C9|sig|batch_op_issue|num_ops=2|async_op=t|comm=world
C9|Q|work_id=9|+0.4
G4|R1|C1|S|+2.0
WARN|x
"""
    short = lines.splitlines(keepends=True)
    return [
        (head + t).encode() for t in (lines, "".join(short[:6]), lines.replace("rank=1", "rank=0"))
    ]


def param() -> list[bytes]:
    def item(comms: str, **fields: Any) -> dict[str, Any]:
        return {"comms": comms, "world_size": 2, "pg_id": 0, "startTime_ns": 1} | fields

    return [json.dumps([
        item("init", pg_id=4, global_ranks=[1, 0]), {"compute": "gemm", "mm_dim": 4},
        item("all_reduce", req=7, in_msg_size=64, out_msg_size=64, dtype="Float"),
        item("wait", req=7), item("broadcast", root=1, in_msg_size=8, dtype="Int"),
        item("all_to_allv", in_msg_size=12, out_msg_size=6, in_split=[1, 2], out_split=[1, 1],
             dtype="Long"),
        item("send", pg_id=4, dst_rank=1, src_rank=0, in_msg_size=3, dtype="Float"),
        item("recv", pg_id=4, dst_rank=0, src_rank=1, out_msg_size=3), item("barrier", req=[1, True]),
    ][:some]).encode() for some in (9, 3)]  # fmt: skip


def log() -> list[bytes]:
    found = [_head(p) for p in sorted((HERE / "data" / "logs").glob("*/*.log"))]
    return [data for data in found if data]


def ras() -> list[bytes]:
    kinds = ("AllReduce", "Broadcast", "AllGather", "Send", "Recv")
    ranks = [
        {"rank": r, "host": f"h{r}", "pid": 1000 + r, "cuda_dev": r, "nvml_dev": r,
         "status": {"init_state": 0, "async_error": r, "finalize_called": False,
                    "destroy_flag": False, "abort_flag": r == 2},
         "collective_counts": dict.fromkeys(kinds, 5 + r)}
        for r in range(3)
    ]  # fmt: skip
    gone = {"rank": 3, "host": "h", "pid": 9, "cuda_dev": 3, "status":
            {"unresponsive": True, "considered_dead": True}}  # fmt: skip
    report = json.dumps({
        "nccl_version": "2.28.7", "timestamp": "2025-03-13 22:47:51", "communicators_count": 1,
        "communicators": [{"hash": "0x5d00", "secondary_hash": "0x9f21:0x4c7", "size": 4,
                           "ranks": ranks, "missing_ranks": [gone]}],
        "ras": {"collection_time_sec": 0.004},
    })  # fmt: skip
    text = """\
NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH
    1         8         4         1         4        32   RUNNING  INCOMPLETE

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  30 ranks have launched up to operation 12
  2 ranks have launched up to operation 11
  Rank 4 -- GPU 4 managed by process 5004 on node 172.16.64.0
  Rank 5 -- GPU 5 managed by process 5005 on node 172.16.64.0

#1-0 (17a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 job process
  Process 5001 on node 172.16.64.1 managing GPU 1
"""
    return [report.encode(), text.encode(), (report + "\n" + report).encode(),
            ("SERVER PROTOCOL 2\nOK\n" + report).encode()]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Of several files


PARQUET_FILES: Final = ("", "jobs", "ranks", "comms", "stacks", "status")


def bundled(parts: list[bytes]) -> bytes:
    """Files as one input: each behind its length."""
    return b"".join(varint(len(p)) + p for p in parts)


def parquet() -> list[bytes]:
    from dl2gpu.trace import native_parquet
    from dl2gpu.trace.readers import read_trace

    found = []
    for job in ("two-groups-inverted", "uneven-batches", "ring-buffer-wrapped", "killed-rank"):
        trace = read_trace(str(DEMO / job))
        with tempfile.TemporaryDirectory() as folder:
            main = Path(folder) / "x.parquet"
            native_parquet.write(trace, main)
            names = [f"x.{n}.parquet" if n else "x.parquet" for n in PARQUET_FILES]
            files = [Path(folder) / name for name in names]
            found.append(bundled([p.read_bytes() if p.exists() else b"" for p in files]))
    return found


def otf2() -> list[bytes]:
    from importlib.util import module_from_spec, spec_from_file_location

    # the writer of archives lives with the reader's tests
    spec = spec_from_file_location("test_otf2_archives", HERE / "trace" / "test_otf2.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        top = module.example(Path(folder) / "a")
        return [archive_of(top)]


def archive_of(folder: Path) -> bytes:
    """A tar archive of a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, arcname=".")
    return out.getvalue()


def containers() -> list[bytes]:
    files = {
        f"{job}/{p.name}": _head(p)[:2000]
        for job in ("two-groups-inverted", "uneven-batches")
        for p in sorted((DEMO / job).iterdir())
    }
    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            for name, data in files.items():
                long = form != tarfile.USTAR_FORMAT and name.endswith("0.jsonl")
                info = tarfile.TarInfo("x" * 120 + name if long else name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            link = tarfile.TarInfo("a/link.jsonl")
            link.type, link.linkname = tarfile.SYMTYPE, "../../etc/passwd"
            archive.addfile(link)
        found.append(out.getvalue())
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as packed:
            for name, data in files.items():
                packed.writestr(name, data)
            packed.comment = b"c"
        found.append(out.getvalue())
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as packed:
        packed.writestr("a/inner.tar", found[0])
        packed.writestr("a/rank_0.jsonl", files[next(iter(files))])
    return [*found, inner.getvalue()]


def everything() -> list[bytes]:
    """One or two seeds of each format."""
    makers = (native, flight_recorder, flight_recorder_json, kineto, execution_trace, chakra,
              chakra_json, clog, param, log, ras, containers)  # fmt: skip
    return [seed for make in makers for seed in make()[-2:]]


SEEDS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "native": native,
    "parquet": parquet,
    "flight_recorder": flight_recorder,
    "flight_recorder_json": flight_recorder_json,
    "kineto": kineto,
    "execution_trace": execution_trace,
    "chakra": chakra,
    "chakra_json": chakra_json,
    "clog": clog,
    "param": param,
    "log": log,
    "ras": ras,
    "otf2": otf2,
    "containers": containers,
    "sniff": lambda: [seed[:4096] for seed in everything()],
    "discover": everything,
}


def kept(target: str) -> list[bytes]:
    """Inputs of earlier runs, by name."""
    return [p.read_bytes() for p in sorted((KEPT / target).glob("*"))]


_PICKLE: Final = [bytes([c]) for c in b"](}.NKMJGX\x8a\x88\x89\x85\x86\x87\x8c\x94hjqreasutlbcRioPQ\x93\x81"] + [
    b"\x80\x02", b"\x80\x04", b"\x8a\x08" + b"\xff" * 8, b"\x8a\xff", b"\x8b\x10\0\0\0", b"M\xff\xff",
    b"J\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"X\0\0\0\0", b"r\xff\xff\xff\x7f", b"j\0\0\0\x40",
    b"cos\nsystem\n", b"G\x7f\xf0" + b"\0" * 6, b"G\x7f\xf8" + b"\0" * 6, b"h\0", b"h\xff", b"q\0",
    b"\x95" + b"\xff" * 8, b"I99999999999\n", b"L5L\n", b"F1e999\n", b"2", b"0", b"1", b"\x98",
]  # fmt: skip
_LOG: Final = [
    b" NCCL INFO ", b" NCCL WARN ", b"[rank0]:", b"[rank99999999999]:", b"[default7]:", b"WorkNCCL(",
    b"SeqNum=", b"OpType=ALLREDUCE", b"OpType=", b"NumelIn=", b"Timeout(ms)=", b"Watchdog caught",
    b"comm 0x55 ", b"rank ", b"nranks ", b"cudaDev ", b"opCount ", b"Init START", b"Init COMPLETE",
    b"last enqueued NCCL work: ", b"last completed NCCL work: ", b"[missing ranks: 0, 1]",
    b"Stalled ops:", b"torchrun", b"Traceback (most recent call last):", b"Signal 9 (SIGKILL)",
    b"2025-02-30 25:61:61", b"2025-01-01 00:00:00,000", b"I0101 00:00:00.000000", b"\x1b[31m", b"\r",
    b"exitcode  : -9", b"process group ", b"PG GUID ", b"\xff\xfe", b"99999999999999999999",
]  # fmt: skip
_ARCHIVE: Final = [
    b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"ustar\x0000",
    b"ustar  \0", b"\xff\xff\xff\xff", b"\0" * 8, b"\xff" * 8, b"77777777777\0", b"\x80" + b"\xff" * 11,
    b"30 path=../../x\n", b"22 size=99999999999\n", b"GNU.sparse.size=9\n", b"L", b"K", b"x", b"g", b"S",
    b"\x01\0\x10\0", b"\x08\0", b"\x0e\0", b"\x0c\0", b"../", b"/etc/",
]  # fmt: skip
_COMMON: Final = [
    n.encode() for n in ("{", "}", "[", "]", ",", ":", '"', "null", "true", "0", "-1")
]


def tokens(target: str, seeds: list[bytes]) -> list[bytes]:
    """Words of a format: those of its seeds, and what is rare or odd in it."""
    words = {w for s in seeds for w in re.findall(rb'"[\w:. ]{1,40}"|[A-Za-z_]{3,30}|\d{2,20}', s)}
    more = {"flight_recorder": _PICKLE, "log": _LOG, "containers": _ARCHIVE,
            "sniff": [*_ARCHIVE, *_LOG, *_PICKLE]}  # fmt: skip
    return [*sorted(words)[:3000], *_COMMON, *more.get(target, []) * 3]


def table_odd(dtype: pl.DataType) -> list[Any]:
    """Values of a column's type that are at its edges."""
    if dtype.is_integer():
        return [None, -1, 0, 1, 99, -(2**31), 2**31 - 1]
    if isinstance(dtype, pl.List):
        whole = dtype.inner.is_integer()
        return [None, [], [0], [-1], [None], [2**31 - 1]] if whole else [None, []]
    return [None, "", "any", "x", "send", "wait", "\0"]
