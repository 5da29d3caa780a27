"""What a finding says to a person: one summary, one piece of advice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dl2gpu.analysis.finding import Finding
from dl2gpu.text import ranks, user_frame

__all__ = ["advice_for", "ranks_text", "summary_of"]


def ranks_text(numbers: Iterable[int]) -> str:
    """Ranks folded; the first ones only where they are scattered."""
    text = ranks(numbers, "no rank")
    return text if text.count(",") < 7 else ", ".join(text.split(", ")[:6]) + ", ..."


def _at(f: Finding) -> str:
    """The operation at which it hangs, with its call site."""
    for step in (*f.details.get("unmatched", ()), *f.hangs_at):
        if step["op"] != "wait":
            where = user_frame(step["stack"])
            number = f" #{step['ordinal']}" if step["ordinal"] is not None else ""
            comm = f" of {step['label']}" if step["label"] else ""
            return f"{step['op']}{number}{comm}" + (f" at {where}" if where else "")
    return "an operation"


def summary_of(f: Finding) -> str:
    """The finding in one or two sentences."""
    who, others = ranks_text(f.culprits), _waiting_ranks(f)
    gone = ranks_text(f.details.get("missing_ranks", f.culprits))
    at = _at(f)
    waiting = f"{_start(others)} {'waits' if len(f.victims) == 1 else 'wait'} at {at}"
    if (told := _of_a_log(f, waiting, gone)) is not None:
        return told
    if f.kind == "potential":
        inner = str(f.details.get("kind", "cycle")).replace("_", " ")
        who = ranks_text(f.culprits or f.victims)
        return f"Not stuck as recorded. {_start(who)} could stop ({inner}) at {at}: {f.condition}."
    if f.kind in _CIRCLES:
        steps = [s for s in f.cycle if s["op"] != "wait"] or list(f.hangs_at)
        seen = dict.fromkeys(f"rank {s['rank']} in {s['op']} of {s['label']}" for s in steps)
        more = f" and {len(seen) - 4} more" if len(seen) > 4 else ""
        circle = f"{_CIRCLES[f.kind]}: {'; '.join(list(seen)[:4])}{more}"
        return f"{circle}, {f.condition}." if f.condition else f"{circle}."
    if f.kind == "mismatch":
        sides = " against ".join(_side(c) for c in f.details.get("signatures", [])[:3])
        aspects = ", ".join(f.details.get("aspects", [])) or "call"
        went = "" if f.deadlocked else " It went through, and the result is wrong."
        if f.deadlocked is None:
            went = " That may be why they wait: no record says what came before."
        return f"At one position the ranks disagree ({aspects}): {sides}.{went}"
    if f.kind == "missing_participant" and f.reason == "skipped_call":
        left = _start(who if f.culprits else gone)
        return f"{left} left out {_left_out(f)}that the others made; it shows at {at}."
    if f.kind == "missing_participant" and f.reason == "other_group":
        return f"{waiting} for {gone}, at work in a group of their own."
    if f.kind == "missing_participant" and f.reason == "stalled":
        return f"{waiting} for {gone}, without a sign that those will make the call."
    if f.kind == "missing_participant":
        return f"{waiting} for {gone}, which ended without it."
    if f.kind == "unmatched_p2p":
        return f"{_start(at)} has no partner."
    if f.kind == "crashed_rank":
        return f"{_start(who)} died. {waiting}."
    if f.kind == "stalled_rank" and f.reason == "device":
        return f"The device of {who} does not finish {at}, which others have completed."
    if f.kind == "stalled_rank":
        late = who if f.culprits else gone
        verb = "is" if len(f.culprits or f.details.get("missing_ranks", ())) == 1 else "are"
        return f"{_start(late)} {verb} alive with nothing pending. {waiting}."
    if f.kind == "in_flight":
        return f"All participants are present and agree at {at}, and it does not complete."
    return _unclear(f, at, waiting)


def _unclear(f: Finding, at: str, waiting: str) -> str:
    """What is not known, and why."""
    gone = ranks_text(f.details.get("missing_ranks", f.culprits))
    others = _waiting_ranks(f)
    if f.reason == "other_attempt":
        return f"{waiting} for {gone}, whose record is of another attempt of the job."
    if "uncompared_operations" in f.details:
        count, ranks = f.details["uncompared_operations"], f.details["uncompared_ranks"]
        return (
            f"{count} collective{'s' * (count != 1)} of {ranks_text(ranks)} could not be set "
            "against those of other ranks: the records are windows that do not tell their place in "
            "the run, or who takes part."
        )
    if "windows_ended" in f.details:
        ended = ranks_text(f.details["windows_ended"])
        return f"The record of {ended} ends before {at}: whether they came to it is not recorded."
    if f.reason == "window":
        return (
            f"{_start(others)} {'stands' if len(f.victims) == 1 else 'stand'} at {at} where the "
            "profile ends; what pends there may have completed later."
        )
    if f.reason == "lost_window":
        wait = "waits" if len(f.victims) == 1 else "wait"
        return (
            f"{_start(ranks_text(f.victims))} {wait} at {at}; which of their messages belong "
            "together cannot be told, since dumps have lost their beginning."
        )
    if f.reason == "few_ranks":
        n, of = f.details["present"], f.details["world"]
        return (
            f"Profiles of {n} of {of} ranks: these went on to their end; of the others nothing is "
            "known."
        )
    if f.reason == "cut_off":
        return "The job was stopped from outside; whether its ranks would have gone on is not said."
    if f.reason == "no_calls":
        return f"{_start(others)} have made the same calls, and none since the report before."
    if f.reason == "no_data":
        return f"{waiting} for {gone}, of which there is no usable record."
    return (
        f"{waiting} for {gone}; whether those are late or will never come, the record does not say."
    )


_ABSENT: Final[dict[str | None, str]] = {
    "not_called": "which had not come when the others gave up",
    "exited": "which is gone and left no word",
    "no_data": "of which no line says that it came",
}
"""What a log says of ranks that others waited for, by reason."""


def _of_a_log(f: Finding, waiting: str, gone: str) -> str | None:
    """Findings for which there is no more than the lines of a log."""
    who = ranks_text(f.culprits)
    if f.kind == "missing_participant" and f.reason in _ABSENT and "log" in f.details:
        return f"{waiting} for {gone}, {_ABSENT[f.reason]}."
    if f.kind == "crashed_rank" and "death" in f.details:
        whose = _start(who) if f.culprits else "A process"
        waits = f" {waiting}." if f.victims and f.hangs_at else ""
        return f"{whose} died: {f.details['death']}.{waits}"
    if f.kind == "stalled_rank" and f.reason == "watchdog":
        whose = f" of {who}" if f.culprits else ""
        return f"The watchdog{whose} got stuck for {f.details['seconds']} s: a lock or the driver."
    if f.kind == "stalled_rank" and f.reason == "busy":
        return f"{_start(who)} was still at work ({f.details['activity']}). {waiting}."
    if f.reason == "peers_unknown":
        return f"{waiting}; for whom, no line says."
    if f.reason == "numbers_differ":
        return f"{waiting}, others at other numbers of the group; why, no line says."
    if f.reason == "no_data" and "log" in f.details and not f.victims:
        return "Something failed; no line says where."
    return None


_CIRCLES: Final[dict[str, str]] = {
    "cycle": "Ranks wait for each other in a circle",
    "order_inversion": (
        "Ranks entered the same communicators in different orders and wait for each other"
    ),
    "init_cycle": "Ranks wait for each other in the creation of communicators",
}


def _left_out(f: Finding) -> str:
    """The call that was left out, as far as it is known."""
    expected = f.details.get("divergence", {}).get("expected", {})
    where = expected.get("site") or user_frame(expected.get("stack"))
    if where:
        return f"the {expected.get('op', 'call')} at {where} "
    if expected.get("op"):
        number = "" if expected.get("ordinal") is None else f" #{expected['ordinal']}"
        return f"the {expected['op']}{number} of {expected.get('label')} "
    return "a call "


def _waiting_ranks(f: Finding) -> str:
    return ranks_text(f.victims) if f.victims else "some ranks"


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


def _side(signature: dict[str, Any]) -> str:
    size = f" of {signature['count']}" if "count" in signature else ""
    return f"{signature['op']}{size} on {ranks_text(signature['ranks'])}"


_ADVICE: Final[dict[str, str]] = {
    "cycle": "Let one side receive first, or issue the send and the receive as one batch.",
    "order_inversion": (
        "Make every rank enter these communicators in the same order; look at the two call sites "
        "and at the host synchronisation between them."
    ),
    "init_cycle": (
        "Create communicators in one order that all ranks share, before the first use of any of "
        "them."
    ),
    "mismatch": (
        "Compare the two call sites: a branch that depends on rank, data or time lets ranks call "
        "different operations. Decide it on one rank and broadcast the decision."
    ),
    "missing_participant": (
        "Make every member of the group call the operation, or create the group without the ranks "
        "that do not. For uneven data use join() or agree on the number of steps."
    ),
    "unmatched_p2p": (
        "Add the missing partner or remove the call; check peer, tag and the order of the batch."
    ),
    "crashed_rank": (
        "Not a deadlock: find out why that rank died (its log, memory, exit code). The others only "
        "wait for it."
    ),
    "stalled_rank": (
        "Not a deadlock of the program: look at the named rank's host stack (data loading, "
        "checkpoint, compilation, a lock) or, for a device, at its GPU and driver log."
    ),
    "in_flight": (
        "Look at the network, the driver and the library (NCCL_DEBUG=INFO, RAS); no rank's program "
        "is at fault."
    ),
    "potential": (
        "Not stuck now. Remove the dependence on buffering, on overlap or on order before it bites "
        "at another size."
    ),
    "insufficient_evidence": (
        "Collect the missing records (all ranks, one attempt, a larger ring buffer) and scan again."
    ),
}


def advice_for(f: Finding) -> str:
    """What to do next; repairs that were found to work in the replay, smallest change first."""
    repairs = f.details.get("repairs", ())
    if not repairs:
        return _ADVICE[f.kind]
    many = len(f.details["repairs_hold_under"])
    told = "; or ".join(r["repair"] for r in repairs)
    return (
        f"{_ADVICE[f.kind]} Checked in the replay: {told}. With "
        f"{'this' if len(repairs) == 1 else 'any of these'} the job finishes in all {many} "
        "scenarios tried, as far as it is recorded."
    )
