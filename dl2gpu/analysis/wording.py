"""What a finding says to a person: one summary, one piece of advice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.names import Names

__all__ = ["advice_for", "ranks_text", "summary_of"]


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks folded: "rank 3", "ranks 0-2, 5", "128 ranks (0-63, 70, ...)"."""
    sorted_ranks = sorted(set(ranks))
    if not sorted_ranks:
        return "no rank"
    runs: list[list[int]] = []
    for r in sorted_ranks:
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    parts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    if len(sorted_ranks) == 1:
        return f"rank {parts[0]}"
    if len(parts) > 6:
        return f"{len(sorted_ranks)} ranks ({', '.join(parts[:5])}, ...)"
    return f"ranks {', '.join(parts)}"


def _at(f: Finding) -> str:
    """The operation at which it hangs, with its call site."""
    for step in f.hangs_at:
        if step["op"] != "wait":
            where = Names.site_of(step["stack"])
            number = f" #{step['ordinal']}" if step["ordinal"] is not None else ""
            comm = f" of {step['comm']}" if step["comm"] else ""
            return f"{step['op']}{number}{comm}" + (f" at {where}" if where else "")
    return "an operation"


def summary_of(f: Finding, job: str) -> str:
    """The finding in one or two sentences."""
    who, others = ranks_text(f.culprits), ranks_text(f.victims)
    if f.kind == "potential":
        inner = f.details.get("kind", "cycle").replace("_", " ")
        return f"Not stuck as recorded. {ranks_text(f.culprits)} could stop in a {inner} at {_at(f)}: {f.condition}."
    if f.kind in ("cycle", "order_inversion", "init_cycle"):
        steps = [s for s in f.cycle if s["op"] != "wait"] or list(f.hangs_at)
        what = "; ".join(
            dict.fromkeys(f"rank {s['rank']} in {s['op']} of {s['comm']}" for s in steps[:4])
        )
        lead = {
            "cycle": "Ranks wait for each other in a circle",
            "order_inversion": "Ranks entered the same communicators in different orders and wait for each other",
            "init_cycle": "Ranks wait for each other in the creation of communicators",
        }[f.kind]
        return f"{lead}: {what}."
    if f.kind == "mismatch":
        classes = f.details.get("signatures", [])
        sides = " against ".join(
            f"{c['op']}" + (f" of {c['count']}" if "count" in c else "") + f" on {ranks_text(c['ranks'])}"
            for c in classes[:3]
        )
        aspects = ", ".join(f.details.get("aspects", []))
        went = "" if f.deadlocked else " It went through, and the result is wrong."
        return f"At one position the ranks disagree ({aspects}): {sides}.{went}"
    if f.kind == "missing_participant":
        gone = ranks_text(f.details.get("missing_ranks", f.culprits))
        if f.reason == "skipped_call":
            return f"{who if f.culprits else gone} left out a call that the others made; it shows at {_at(f)}."
        if f.reason == "other_group":
            return f"{others} wait at {_at(f)} for {gone}, which go on in a group of their own."
        return f"{others} wait at {_at(f)} for {gone}, which ended without it."
    if f.kind == "unmatched_p2p":
        return f"{_at(f)} has no partner."
    if f.kind == "crashed_rank":
        return f"{who} died; {others} wait at {_at(f)}."
    if f.kind == "stalled_rank":
        if f.reason == "device":
            return f"The device of {who} does not finish {_at(f)}, which others have completed."
        return f"{who} is alive with nothing pending; {others} wait at {_at(f)}."
    if f.kind == "in_flight":
        return f"All participants are present and agree at {_at(f)}, and it does not complete."
    if f.reason == "no_data":
        gone = ranks_text(f.details.get("missing_ranks", ()))
        return f"{others} wait at {_at(f)} for {gone}, of which there is no usable record."
    if f.reason == "other_attempt":
        return "The records come from different attempts of the job and cannot be compared."
    return f"{others} wait at {_at(f)} for {ranks_text(f.details.get('missing_ranks', ()))}; whether those are late or will never come, the record does not say."


_ADVICE: Final[dict[str, str]] = {
    "cycle": "Let one side receive first, or issue the send and the receive as one batch.",
    "order_inversion": "Make every rank enter these communicators in the same order; look at the two call sites and at the host synchronisation between them.",
    "init_cycle": "Create communicators in one order that all ranks share, before the first use of any of them.",
    "mismatch": "Compare the two call sites: a branch that depends on rank, data or time lets ranks call different operations. Decide it on one rank and broadcast the decision.",
    "missing_participant": "Make every member of the group call the operation, or create the group without the ranks that do not. For uneven data use join() or agree on the number of steps.",
    "unmatched_p2p": "Add the missing partner or remove the call; check peer, tag and the order of the batch.",
    "crashed_rank": "Not a deadlock: find out why that rank died (its log, memory, exit code). The others only wait for it.",
    "stalled_rank": "Not a deadlock of the program: look at the named rank's host stack (data loading, checkpoint, compilation, a lock) or, for a device, at its GPU and driver log.",
    "in_flight": "Look at the network, the driver and the library (NCCL_DEBUG=INFO, RAS); no rank's program is at fault.",
    "potential": "Not stuck now. Remove the dependence on buffering, on overlap or on order before it bites at another size.",
    "insufficient_evidence": "Collect the missing records (all ranks, one attempt, a larger ring buffer) and scan again.",
}


def advice_for(f: Finding) -> str:
    """What to do next."""
    return _ADVICE[f.kind]
