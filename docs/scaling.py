"""The tables of docs/scaling.md: a fleet's night on paper.

Nothing is measured here. The figures of our own come from docs/benchmarks.md, which this reads;
those of the hardware are published; the rest are assumptions, and named so::

    python docs/scaling.py                  # prints the tables
    python docs/scaling.py docs/scaling.md  # writes them into the page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

BENCHMARKS: Final = (Path(__file__).parent / "benchmarks.md").read_text(encoding="utf-8")


def measured(row: str, column: int = 1) -> float:
    """A figure of docs/benchmarks.md: of the row that begins with ``row``, a column after it."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|.*$", BENCHMARKS, re.MULTILINE)
    cell = line.strip("| ").split("|")[column]
    return float(re.sub(r"[^\d.]", "", cell))


def wall(ranks: int) -> float:
    return measured(str(ranks), 2)


# ---- measured on two cores of an AMD EPYC, no GPU (docs/benchmarks.md)
CORES_THERE: Final = 2
STORED: Final = measured("bytes of a dump, an entry")
TABLE: Final = measured("bytes of the event table, an event")
READ: Final = measured("ours, to the event table (text, communicators, matching of names)")
ANALYSED: Final = measured("9,983,989") * CORES_THERE / 9_983_989
"""Core-seconds an event."""
REPLAY: Final = 1 / (measured("replay, million events/s") * 1e6)
FIND: Final = measured("finding it, µs a file") * 1e-6
ROW: Final = measured("its row in the table of inputs, µs a file") * 1e-6
WRITE: Final = measured("writing the row, µs a file") * 1e-6
REPORT: Final = measured("bytes of report.json, a file")
(MANY,) = re.findall(r"4,096 ranks with 200 entries each .* take ([\d.]+) s", BENCHMARKS)


def fitted() -> tuple[float, float]:
    """Core-seconds (a file, an entry) of a whole scan, start-up taken out.

    Two differences of three measured scans, so two unknowns: 128 and 512 ranks of 2,000 entries,
    and 4,096 ranks of 200.
    """
    files, entries, seconds = 512 - 128, (512 - 128) * 2000, wall(512) - wall(128)
    files_2, entries_2, seconds_2 = 4096 - 512, 4096 * 200 - 512 * 2000, float(MANY) - wall(512)
    determinant = files * entries_2 - files_2 * entries
    a_file = (seconds * entries_2 - seconds_2 * entries) / determinant
    an_entry = (files * seconds_2 - files_2 * seconds) / determinant
    return a_file * CORES_THERE, an_entry * CORES_THERE


A_FILE, AN_ENTRY = fitted()

# ---- published
PCIE: Final = 64e9  # bytes/s a direction: PCIe Gen5 x16, half of NVIDIA's 128 GB/s
HBM: Final = 4.8e12  # NVIDIA H200 datasheet, HBM3e
HBM_BYTES: Final = 141e9  # the same
SMS: Final = 132  # streaming multiprocessors: NVIDIA Hopper architecture white paper, H100 SXM5
NVLINK: Final = 450e9  # bytes/s a direction: half of the datasheet's 900 GB/s
NIC: Final = 50e9  # 400 Gb/s
S3_NODE: Final = 12.5e9  # 100 Gb/s
S3_REQUESTS: Final = 5500  # GET a second and prefix: Amazon S3 User Guide
GPUS_A_NODE, CORES_A_NODE = 8, 112  # MLPerf Inference v4.1, NVIDIA's H200-SXM-141GBx8

# ---- assumed
JOBS, EVENTS = 8_600, 10**10
ENTRIES_A_FILE: Final = 2000
PREFIXES: Final = 16
LINK: Final = 0.8  # of a link's published rate
MEMORY: Final = 0.5  # of the HBM's
MATCH_BYTES: Final = 192 + 640  # an event: radix sort, then twenty passes over 16 + 16 bytes
REPLAY_BYTES: Final = 8 * 32  # an event: eight accesses to a sector of 32 bytes
STEP: Final = 2e-6  # one dependent step within a block
STUCK: Final = 0.1  # of the jobs
PLACES: Final = 3  # a rank: its host and two streams
WORKING: Final = 3  # times the event table
SHARD: Final = 512 << 20
MOVED: Final = 48 + 12  # bytes an event: keys and signature there, the match back
SYNC: Final = {"NVLink": 20e-6, "network": 50e-6}
SCENARIOS: Final = 100

FILES: Final = EVENTS // ENTRIES_A_FILE
BYTES: Final = EVENTS * STORED
REQUESTS: Final = FILES / (PREFIXES * S3_REQUESTS)
"""Seconds, one GET a file."""


def number(x: float) -> str:
    """Three digits at most; what they say is less."""
    if x >= 1000:
        return f"{float(f'{x:.3g}'):,.0f}"
    return f"{x:.3g}"


def seconds(x: float) -> str:
    if x >= 0.1:
        return f"{number(x)} s"
    return f"{number(x * 1e3)} ms" if x >= 1e-3 else f"{number(x * 1e6)} µs"


def size(x: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if x >= factor:
            return f"{number(x / factor)} {unit}"
    return f"{number(x)} B"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---")


def night() -> str:
    return table(
        ["the night", "", "from"],
        [
            ["jobs", f"{JOBS:,}", "assumed"],
            ["events", f"{EVENTS:,}", "assumed"],
            ["entries a file", f"{ENTRIES_A_FILE:,}", "assumed: ring buffers that are full"],
            ["files, one a rank", f"{FILES:,}", "events / entries a file"],
            ["ranks a job, mean", number(FILES / JOBS), "files / jobs"],
            ["bytes of dumps", size(BYTES), f"events x {STORED} B (measured)"],
            ["bytes as event tables", size(EVENTS * TABLE), f"events x {TABLE} B (measured)"],
            ["shards", number(BYTES / SHARD), "bytes of dumps / 512 MiB"],
            [
                "rows of inputs in report.json",
                size(FILES * REPORT),
                f"files x {REPORT:.0f} B (measured)",
            ],
        ],
    )


def work_by_stage() -> dict[str, float]:
    """Core-seconds of the night that can be divided among workers."""
    return {
        "opening files and what comes with each": FILES * A_FILE,
        "reading dumps to the event table": EVENTS / READ,
        "analysis (match, replay, components, verdict)": EVENTS * ANALYSED,
    }


def serial() -> float:
    """Seconds of the one process that finds the files and writes the report."""
    return FILES * (FIND + ROW + WRITE)


def cpu_work() -> str:
    stages = work_by_stage()
    how = [
        f"files x {A_FILE * 1e3:.2f} ms",
        f"events / {number(READ / 1e6)} M/s",
        f"events x {ANALYSED * 1e6:.3f} µs",
    ]
    total = sum(stages.values())
    rows = [
        [stage, seconds(s), f"{s / total:.0%}", by]
        for (stage, s), by in zip(stages.items(), how, strict=True)
    ]
    whole = FILES * A_FILE + EVENTS * AN_ENTRY
    return table(
        ["stage", "core-seconds", "share", "how"],
        [
            *rows,
            ["together", seconds(total), "100%", f"{total / 3600:.1f} core-hours"],
            ["check: by whole scans", seconds(whole), f"{whole / total:.0%}",
             f"files x {A_FILE * 1e3:.2f} ms + events x {AN_ENTRY * 1e6:.2f} µs"],
            ["one process: find files, table of inputs, report", seconds(serial()), "",
             f"files x {(FIND + ROW + WRITE) * 1e6:.1f} µs; not divided"],
        ],
    )  # fmt: skip


def bound(parts: dict[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def cpu_nodes() -> str:
    rows = []
    for nodes in (1, 8, 64):
        parts = {
            "fetching": BYTES / (nodes * S3_NODE),
            "the network": BYTES / (nodes * NIC),
            "requests": REQUESTS,
            "cores": sum(work_by_stage().values()) / (nodes * CORES_A_NODE),
            "the one process": serial(),
        }
        rows.append([str(nodes), f"{nodes * CORES_A_NODE:,}", *map(seconds, parts.values()),
                     bound(parts)])  # fmt: skip
    head = [
        "nodes", "cores", "fetching at 100 Gb/s a node", "at 400 Gb/s",
        f"requests, {PREFIXES} prefixes",
        "cores: files, reading, analysis", "the one process", "bound by",
    ]  # fmt: skip
    return table(head, rows)


def gpu_stages() -> dict[str, tuple[str, float, str]]:
    """Bytes, seconds on one GPU, and how, of the analysis of the night."""
    chain = JOBS / SMS * ENTRIES_A_FILE * STEP
    stuck = STUCK * FILES * PLACES
    return {
        "host to device": (size(EVENTS * TABLE), EVENTS * TABLE / (PCIE * LINK),
                           f"bytes / ({PCIE / 1e9:.0f} GB/s x {LINK})"),
        "matching: sort, joins": (
            size(EVENTS * MATCH_BYTES), EVENTS * MATCH_BYTES / (HBM * MEMORY),
            f"{MATCH_BYTES} B an event / ({HBM / 1e12} TB/s x {MEMORY})"),
        "replay, memory": (
            size(EVENTS * REPLAY_BYTES), EVENTS * REPLAY_BYTES / (HBM * MEMORY),
            f"{REPLAY_BYTES} B an event / ({HBM / 1e12} TB/s x {MEMORY})"),
        "replay, dependent steps": (
            "", chain,
            f"{JOBS:,} jobs / {SMS} blocks at once x {ENTRIES_A_FILE:,} x {STEP * 1e6:.0f} µs"),
        "components": (size(stuck * 64), stuck * 64 / (HBM * MEMORY),
                       f"{number(stuck)} stuck places x 64 B, one pass; launches not counted"),
    }  # fmt: skip


def gpu_work() -> str:
    stages = gpu_stages()
    rows = [[stage, moved, seconds(s), how] for stage, (moved, s, how) in stages.items()]
    return table(["stage, one GPU, the whole night", "bytes", "time", "how"], rows)


def gpu_seconds() -> float:
    """One GPU, copies and kernels overlapped."""
    copy, *kernels = (s for _, s, _ in gpu_stages().values())
    return max(copy, sum(kernels))


def gpu_night() -> str:
    rows = []
    for gpus in (1, 8, 64):
        cores = gpus * CORES_A_NODE // GPUS_A_NODE
        nodes = max(1, gpus // GPUS_A_NODE)
        stages = work_by_stage()
        analysis = stages.pop("analysis (match, replay, components, verdict)")
        host = sum(stages.values()) / cores
        fetch = max(BYTES / (nodes * S3_NODE), REQUESTS)
        on_gpu = gpu_seconds() / gpus
        with_gpu = max(host, on_gpu, fetch) + serial()
        without = max(host + analysis / cores, fetch) + serial()
        parts = {"fetching": fetch, "host cores": host, "GPU": on_gpu, "the one process": serial()}
        rows.append([
            str(gpus), str(cores), *map(seconds, (fetch, host, analysis / cores, on_gpu)),
            seconds(with_gpu), seconds(without), f"{without / with_gpu:.2f}", bound(parts),
        ])  # fmt: skip
    head = [
        "GPUs", "cores", "fetching", "host: files, reading", "analysis on these cores",
        "analysis on these GPUs", "night with GPUs", "night without", "gain", "bound by",
    ]  # fmt: skip
    return table(head, rows)


def what_if() -> str:
    one = max(
        gpu_stages()["host to device"][1] / SCENARIOS,
        gpu_stages()["replay, memory"][1] + gpu_stages()["replay, dependent steps"][1],
    )
    rows = []
    for gpus in (1, 8, 64):
        cores = gpus * CORES_A_NODE // GPUS_A_NODE
        cpu, gpu = EVENTS * REPLAY * SCENARIOS / cores, one * SCENARIOS / gpus
        rows.append([str(gpus), str(cores), seconds(cpu), seconds(gpu), f"{cpu / gpu:.0f}"])
    head = ["GPUs", "cores", f"{SCENARIOS} scenarios on these cores", "on these GPUs", "gain"]
    return table(head, rows)


def one_job() -> str:
    fits = HBM_BYTES / (TABLE * WORKING)
    rows = [["largest job on one GPU", f"{number(fits / 1e6)} M events",
             f"{HBM_BYTES / 1e9:.0f} GB / ({TABLE} B x {WORKING})"],
            ["that is, in full ring buffers", f"{number(fits / ENTRIES_A_FILE)} ranks",
             f"/ {ENTRIES_A_FILE:,}"]]  # fmt: skip
    events, steps = 10**9, 10_000
    rows.append(["a job that does not fit", f"{events:,} events",
                 f"assumed: 100,000 ranks x {steps:,}"])  # fmt: skip
    for gpus, link, rate in ((8, "NVLink", NVLINK), (8, "network", NIC)):
        out = events / gpus * MOVED * (gpus - 1) / gpus
        rows += [
            [f"shuffle out of each of {gpus} GPUs, {link}",
             f"{size(out)}, {seconds(out / (rate * LINK))}",
             f"events / {gpus} x {MOVED} B x {gpus - 1}/{gpus}; {rate / 1e9:.0f} GB/s x {LINK}"],
            [f"rounds of the replay, {link}", seconds(steps * SYNC[link]),
             f"{steps:,} dependent steps x {SYNC[link] * 1e6:.0f} µs"],
        ]  # fmt: skip
    rows.append(["reading it on the hosts of 8 GPUs", seconds(events / READ / CORES_A_NODE),
                 f"events / {number(READ / 1e6)} M/s / {CORES_A_NODE} cores"])  # fmt: skip
    rows.append(["analysing it on one CPU core, as now", seconds(events * ANALYSED),
                 f"events x {ANALYSED * 1e6:.3f} µs"])  # fmt: skip
    return table(["one job", "", "how"], rows)


def fixed_costs() -> str:
    """What a millisecond a shard comes to on one GPU, by size of the shard."""
    rows = [
        [f"{shard >> 20:,} MiB", number(round(BYTES / shard)),
         size(shard / STORED * TABLE * WORKING),
         seconds(BYTES / shard * 0.01), seconds(BYTES / shard * 0.1)]
        for shard in (SHARD, 8 * SHARD, 64 * SHARD)
    ]  # fmt: skip
    head = ["shard", "shards", "device memory, working", "at 10 ms each", "at 100 ms each"]
    return table(head, rows)


def assumed() -> str:
    return table(
        ["assumed", "", "used for"],
        [
            ["entries a file", f"{ENTRIES_A_FILE:,}", "files, and dependent steps a job"],
            ["prefixes of the bucket", str(PREFIXES), "requests"],
            ["cores", "as fast as those measured, all busy", "everything on hosts"],
            ["fetching, cores and GPU", "overlap", "the night"],
            ["reached of PCIe, NVLink, network card", f"{LINK:.0%}", "copies and shuffles"],
            ["reached of the HBM", f"{MEMORY:.0%}", "matching, replay, components"],
            ["bytes an event, matching", str(MATCH_BYTES),
             "radix sort of 8 + 4 B in 8 passes, 20 passes over 2 x 8 B; read and written"],
            ["bytes an event, replay", str(REPLAY_BYTES), "8 accesses to a sector of 32 bytes"],
            ["a dependent step within a block", f"{STEP * 1e6:.0f} µs", "replay"],
            ["a dependent step across GPUs", " and ".join(f"{s * 1e6:.0f} µs ({link})"
             for link, s in SYNC.items()), "replay of one job on several"],
            ["stuck jobs, places a rank", f"{STUCK:.0%}, {PLACES}", "components"],
            ["working memory", f"{WORKING} x the event table", "what fits on a GPU"],
            ["moved by a shuffle, an event", f"{MOVED} B",
             "keys and signature there, the match back"],
        ],
    )  # fmt: skip


TABLES: Final[dict[str, Callable[[], str]]] = {
    "night": night,
    "cpu-work": cpu_work,
    "cpu-nodes": cpu_nodes,
    "gpu-work": gpu_work,
    "gpu-night": gpu_night,
    "fixed-costs": fixed_costs,
    "what-if": what_if,
    "one-job": one_job,
    "assumed": assumed,
}


def written(page: str) -> str:
    """The page with its tables computed anew; each stands after a mark ``<!-- table: name -->``."""
    for name, make in TABLES.items():
        mark = f"<!-- table: {name} -->\n"
        before, after = page.split(mark)
        rest = re.sub(r"\A(\|.*\n)*", "", after)
        page = f"{before}{mark}{make()}\n{rest}"
    return page


def main() -> None:
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, make in TABLES.items():
        print(f"<!-- table: {name} -->\n{make()}\n")


if __name__ == "__main__":
    main()
