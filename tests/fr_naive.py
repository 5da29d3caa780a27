"""Slow, obvious mapping of Flight Recorder dumps to events, one entry at a time.

Written from FORMATS.md alone and sharing no code with the reader: it unpickles (files of our own
only!), walks over the entries, and gives plain dicts with names instead of codes. The reader is
compared with it on every real and written dump.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

OPS = {
    "all_reduce": "all_reduce allreduce allreduce_coalesced all_reduce_coalesced all_reduce_sparse",
    "barrier": "barrier all_reduce_barrier",
    "broadcast": "broadcast _broadcast_oop",
    "reduce": "reduce _reduce_oop",
    "all_gather": "all_gather allgather _all_gather_base _allgather_base all_gather_single "
    "all_gather_into_tensor_coalesced allgather_into_tensor_coalesced ALLGATHER_coalesced",
    "all_gather_v": "all_gather_v",
    "reduce_scatter": "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced "
    "reduce_scatter_single REDUCE_SCATTER_coalesced",
    "reduce_scatter_v": "reduce_scatter_v",
    "gather": "gather gather_single",
    "scatter": "scatter",
    "all_to_all": "all_to_all alltoall all_to_all_single",
    "all_to_all_v": "all_to_allv all_to_all_v_single",
    "send": "send",
    "recv": "recv",
    "coalesced": "coalesced batch_op_issue",
    "comm_create": "split init new_window",
}
OP_OF = {word: op for op, words in OPS.items() for word in words.split()}
DTYPES = {
    "Float": ("f32", 4), "float": ("f32", 4), "Half": ("f16", 2), "c10::Half": ("f16", 2),
    "BFloat16": ("bf16", 2), "c10::BFloat16": ("bf16", 2), "Long": ("i64", 8),
    "long int": ("i64", 8), "Int": ("i32", 4), "int": ("i32", 4), "Byte": ("u8", 1),
    "long": ("i64", 8), "unsigned char": ("u8", 1), "Double": ("f64", 8), "double": ("f64", 8),
    "Bool": ("bool", 1),
}  # fmt: skip


def load(data: bytes) -> dict[str, Any]:
    """A dump as a dict, whatever it was written in."""
    content = pickle.loads(data) if data[:1] == b"\x80" else json.loads(data)
    return {"entries": content} if isinstance(content, list) else content


def ranks_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        if "..." in value:
            return ()
        return tuple(int(x) for x in value.strip("[] ").split(",") if x.strip())
    return tuple(value)


def config_of(content: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    out = {}
    for name, group in content.get("pg_config", {}).items():
        if isinstance(group, dict):
            out[str(name)] = (group["desc"], ranks_of(group["ranks"]))
        else:
            out[str(name)] = ("", ranks_of(group))
    return out


def numbers(status: Mapping[str, Any]) -> tuple[int, int, int]:
    e, s, c = (int(status[f"last_{w}_collective"]) for w in ("enqueued", "started", "completed"))
    return e, s, c


def job_events(dumps: Mapping[int, bytes]) -> list[dict[str, Any]]:
    """Events of one job, from the dumps of its ranks, in the order of ranks and records."""
    contents = {rank: load(data) for rank, data in dumps.items()}
    configs = {rank: config_of(c) for rank, c in contents.items()}
    highest = max(
        [
            *contents,
            *(r for config in configs.values() for _, ranks in config.values() for r in ranks),
        ]
    )
    known = {
        (name, desc, ranks)
        for config in configs.values()
        for name, (desc, ranks) in config.items()
        if name and ranks
    }
    out = []
    for rank, content in contents.items():
        out += _rank_events(rank, content, configs[rank], known, highest + 1)
    _roots(out)
    return out


def _rank_events(
    rank: int, content: dict[str, Any], config: dict[str, Any], known: set[Any], world: int
) -> list[dict[str, Any]]:
    entries = content.get("entries", [])
    version = tuple(map(int, content["version"].split("."))) if "version" in content else (0, 0)
    status = {int(k): numbers(v) for k, v in content.get("pg_status", {}).items()}
    weak = (
        bool(status)
        and all(s == -1 for _, s, _ in status.values())
        and not any(e["state"] == "completed" for e in entries)
    )
    records = [e.get("record_id", i) for i, e in enumerate(entries)]
    holes = bool(records) and records[-1] - records[0] != len(records) - 1
    nothing_done = not any(e["state"] == "completed" or e.get("retired") for e in entries)
    only_active = holes or (nothing_done and any(c > 0 for *_, c in status.values()))
    broken = only_active or (bool(records) and records[0] > 0)
    threads: list[Any] = []
    events = []
    by_group: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for record, e in zip(records, entries, strict=True):
        event = _event(rank, record, e, version, config, known, world)
        thread = e.get("thread_id")
        if thread not in threads:
            threads.append(thread)
        event["lane"] = threads.index(thread)
        if event["host"] or weak:
            if e.get("retired") and e["state"] != "completed":
                event["state"] = "completed"
                event["flags"].add("state_unreliable")
            if event["host"]:
                event["flags"].add("state_unreliable")
        events.append(event)
        by_group[str(e.get("process_group", e["pg_id"]))].append(event)
    for group in by_group.values():
        _batches(group)
        if not broken and version <= (2, 4):
            _take_out_steps(group)
    for event in events:
        _stream(event)
    return [e for e in events if not e["folded"]]


def _event(
    rank: int, record: int, e: dict[str, Any], version: Any, config: Any, known: Any, world: int
) -> dict[str, Any]:
    name = e["profiling_name"]
    backend, rest = name.split(":", 1) if ":" in name else ("", name)
    word = rest.split(" ")[0]
    op = OP_OF.get(word, word)
    host = backend in {"gloo", "c10d"}
    flags = {"blocking_inferred" if host else "stream_inferred"}
    if word not in OP_OF:
        flags.add("unknown_op")
    group, desc = e.get("process_group", (str(e["pg_id"]), ""))
    own_desc, members = config.get(group, ("", ()))
    if members and (own_desc == desc or not desc or not own_desc):
        desc = own_desc or desc
    else:
        others = [r for n, d, r in known if (n, d) == (group, desc) and rank in r]
        members = others[0] if len(others) == 1 else ()
    listed = any(d == "default_pg" for _, d, _ in known)
    if not members and (desc == "default_pg" or (group == "0" and not desc)) and not listed:
        members = tuple(range(world))
        flags.add("synthetic_comm")
    p2p = op in {"send", "recv"}
    end = word in {"coalesced", "batch_op_issue"} or (
        word.endswith("_coalesced") and word.isupper()
    )
    end = end or word in {"ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"}
    given, got = e["input_sizes"], e["output_sizes"]
    swapped = op == "scatter" and not host
    if swapped:
        given, got = got, given
    count = sum(map(prod, given)) if given and op != "barrier" else None
    count_out = sum(map(prod, got)) if got and op != "barrier" and not p2p else None
    if count_out == (sum(map(prod, given)) if given else 0) and given:
        count_out = None
    root = None
    if op in {"scatter", "gather"} and len(members) > 1:
        many, one = (given, got) if op == "scatter" else (got, given)
        whole, part = sum(map(prod, many)), sum(map(prod, one))
        flat = host and len(many) == 1 and part > 0 and whole == len(members) * part
        if len(many) == len(members) or flat:
            root = rank
    dtype, size = None, None
    for spelled in [*e.get("input_dtypes", [])[:1], *e.get("output_dtypes", [])[:1]]:
        if dtype is None and spelled not in {"", "Undefined"}:
            dtype, size = DTYPES[spelled]
    if op == "barrier":
        dtype = size = None
    if len(set(e.get("input_dtypes", []))) > 1:
        size = None
    splits = None
    if op.startswith("all_to_all"):
        if version < (2, 4):
            flags.add("sizes_incomparable")
        if len(e["input_sizes"]) > 1 and len(e["input_sizes"]) == len(members):
            splits = [prod(s) for s in e["input_sizes"]]
    if end:
        flags.add("sizes_incomparable")
    peer = None
    if p2p and " " in rest:
        a, b = rest.split(" ")[1].replace("<-", "->").split("->")
        inside = 0 <= int(a) < len(members) and 0 <= int(b) < len(members)
        if inside and members[int(a)] == rank:
            peer = members[int(b)]
    created = e.get("time_created_ns", e.get("time_created_us", 0) * 1000)
    return {
        "rank": rank, "seq": record, "op": op, "comm": (group, desc, tuple(members)),
        "ordinal": None if p2p else e.get("collective_seq_id", e.get("seq_id")), "peer": peer,
        "count": count, "count_out": count_out, "dtype": dtype,
        "bytes": None if count is None or size is None else count * size, "splits": splits,
        "root": root, "group": None, "state": e["state"], "t_created": created or None,
        "t_started": e.get("time_discovered_started_ns") or None,
        "t_completed": e.get("time_discovered_completed_ns") or None,
        "stack": [f"{f['name']} {f['filename']}:{f['line']}" for f in e["frames"]]
        if "frames" in e else None,
        "flags": flags,
        # for the steps below
        "host": host, "end": end, "p2p": p2p, "folded": False, "is_p2p": e.get("is_p2p", False),
        "numbers": (e.get("collective_seq_id", e.get("seq_id")), e.get("p2p_seq_id")),
        "stream": None,
    }  # fmt: skip


def _batches(group: list[dict[str, Any]]) -> None:
    """Coalesced groups of one communicator: members share both numbers, the end record follows."""
    run: list[dict[str, Any]] = []

    def close(end: dict[str, Any] | None) -> None:
        if end is not None and run:
            end["folded"] = True
            for member in run:
                member["group"] = end["seq"]
                for key in ("state", "t_started", "t_completed"):
                    member[key] = end[key]
        elif end is not None and end["is_p2p"]:
            end["ordinal"] = None
        elif len(run) > 1 and not run[0]["host"] and len({m["p2p"] for m in run}) == 1:
            number = run[0]["numbers"][1] if run[0]["p2p"] else run[0]["numbers"][0]
            if number and number > 0:
                for member in run:
                    member["group"] = run[-1]["seq"]
                    member["flags"].add("partial_group")
        run.clear()

    for event in group:
        if run and event["numbers"] != run[0]["numbers"]:
            close(None)
        if event["end"]:
            close(event)
        else:
            run.append(event)
    close(None)


def _take_out_steps(group: list[dict[str, Any]]) -> None:
    """Up to 2.4 a p2p launch may have moved the collectives' counter: count those steps out."""
    previous = steps = 0
    for event in group:
        number = event["numbers"][0]
        if event["p2p"] and number > previous:
            steps += 1
        if not event["p2p"] and event["ordinal"] is not None:
            event["ordinal"] -= steps
        previous = number


def _stream(event: dict[str, Any]) -> None:
    if event["host"]:
        return
    event["stream"] = event["comm"]
    if event["p2p"] and event["group"] is None and event["peer"] is not None:
        lo, hi = sorted((event["rank"], event["peer"]))
        event["stream"] = (event["comm"], lo, hi)


def _roots(events: list[dict[str, Any]]) -> None:
    calls: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["op"] in {"scatter", "gather"}:
            calls[event["comm"], event["ordinal"], event["op"]].append(event)
    for members in calls.values():
        roots = {m["root"] for m in members} - {None}
        for m in members:
            m["root"] = roots.copy().pop() if len(roots) == 1 else None
            if m["root"] is not None:
                m["flags"].add("root_inferred")
