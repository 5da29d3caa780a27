"""Fingerprints: the same bug, the same fingerprint, whatever the job, the scale and the record."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
from analysis.handmade import findings, made, op, recorded, recv, send
from corpus import Labelled, found, labelled, scanned

from dl2gpu.analysis.fingerprint import alike

FAMILIES = {
    # family: kinds of its findings (program order and post mortem may see different ones)
    "C01": {"order_inversion", "potential"},
    "C02": {"order_inversion", "potential"},
    "C07": {"init_cycle"},
    "C09": {"missing_participant"},
    "C10": {"mismatch"},
    "C26": {"missing_participant"},
    "C31": {"missing_participant"},
    "C35": {"mismatch"},
    "C39": {"missing_participant"},
    "C45": {"cycle", "potential"},
    "T01": {"stalled_rank"},
    "T07": {"in_flight"},
    "T08": {"crashed_rank"},
}


def variants(family: str) -> list[Labelled]:
    """The jobs of a family that have its bug."""
    pattern = re.compile(rf"{family}(?!-ok)(?:-[\w-]+)?_")
    return [job for job in labelled("cases") if pattern.match(job.name)]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_bug_in_all_its_variants(family: str) -> None:
    jobs = variants(family)
    if not jobs:
        pytest.skip("no labelled data (set DL2GPU_SHARED)")
    of_kind: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for job in jobs:
        report = found(scanned(job.scanned), job.name)
        # a record that shows nothing is a right answer for some
        assert report.findings or "healthy" in job.expect["kinds"], job.name
        for f in report.findings:
            of_kind[f["kind"]][f["fingerprint"]].append(job.name)
    assert of_kind.keys() == FAMILIES[family]
    for kind, jobs_of in of_kind.items():
        assert len(jobs_of) == 1, f"{kind}: {dict(jobs_of)}"
    assert len(jobs) >= 2


def test_different_bugs_differ() -> None:
    """Of the labelled bugs few share a fingerprint: those that wait at the same line for others."""
    names: dict[str, set[str]] = defaultdict(set)
    for family in FAMILIES:
        for job in variants(family):
            for f in found(scanned(job.scanned), job.name).findings:
                names[f["fingerprint"]].add(family)
    if not names:
        pytest.skip("no labelled data (set DL2GPU_SHARED)")
    assert {len(families) for families in names.values()} == {1}


def test_one_bug_in_all_forms_of_its_record() -> None:
    """Native, dumps with and without stacks, profiles: alike where they allow the same verdict."""
    cases = {job.expect["id"]: job for job in labelled("cases")}
    forms = [job for job in labelled("rendered") if job.expect["source_case"] in cases]
    if not forms:
        pytest.skip("no labelled data (set DL2GPU_SHARED)")
    compared = 0
    for form in forms:
        case = cases[form.expect["source_case"]]
        here, there = (
            {f["kind"]: f["fingerprint"] for f in found(scanned(job.scanned), job.name).findings}
            for job in (case, form)
        )
        for kind in here.keys() & there.keys():
            compared += 1
            assert alike(here[kind], there[kind]), f"{form.name}: {kind}"
        if len(here) == len(there) == 1 and {*here, *there} <= ABSENT:
            assert next(iter(here.values()))[:8] == next(iter(there.values()))[:8], form.name
    assert compared > 40


ABSENT = {"missing_participant", "crashed_rank", "stalled_rank"}
"""Kinds of which some records can only tell that somebody is absent."""


def test_without_call_sites_the_sort_decides() -> None:
    comms = {"g": [0, 1, 2]}
    bare = [[{k: v for k, v in o.items() if k != "site"} for o in ops] for ops in stuck(3)]
    (plain,), (known,) = marks(*bare, comms=comms), marks(*stuck(3), comms=comms)
    (other,) = marks(*stuck(3, line=2), comms=comms)
    (barrier,) = marks(*stuck(3, name="barrier"), comms=comms)
    assert plain.endswith("00000000")
    assert alike(plain, known)
    assert alike(plain, other)
    assert not alike(known, other)
    assert not alike(plain, barrier)


def test_where_the_code_is_mounted_does_not_count() -> None:
    def at(site: str) -> set[str]:
        return marks([op("all_reduce", "g", site=site)], [], comms={"g": [0, 1]})

    assert at("step src/train.py:7") == at("step /workspace/src/train.py:7")
    assert at("step src/train.py:7").isdisjoint(at("step src/train.py:8"))
    assert at("step src/train.py:7").isdisjoint(at("step src/eval.py:7"))


# --------------------------------------------------------------------------------------------------
# By hand


def marks(*ranks: list[dict[str, Any]], **keys: Any) -> set[str]:
    found_ = findings(made(*ranks, **keys))
    assert found_
    return {f["fingerprint"] for f in found_}


def stuck(n: int, *, line: int = 1, count: int = 4, name: str = "all_reduce") -> list[Any]:
    """n ranks wait at one line for a last one that has ended."""
    here = [op(name, "g", count=count, dtype="f32", site=f"step train.py:{line}")]
    return [*([here] * (n - 1)), []]


def test_neither_scale_nor_names_nor_sizes_nor_times() -> None:
    one = marks(*stuck(3), comms={"g": [0, 1, 2]})
    assert len(one) == 1
    assert one == marks(*stuck(9), comms={"g": list(range(9))})
    assert one == marks(*stuck(3, count=1000), comms={"g": [0, 1, 2]})
    assert one == marks(*stuck(3), comms={"g": [0, 1, 2], "another": [0]}, name="another night")
    later = [[o | {"t_created": 5} for o in ops] for ops in stuck(3)]
    assert one == marks(*later, comms={"g": [0, 1, 2]})


def test_another_line_or_operation_is_another_bug() -> None:
    comms = {"g": [0, 1, 2]}
    one = marks(*stuck(3), comms=comms)
    assert one.isdisjoint(marks(*stuck(3, line=2), comms=comms))
    assert one.isdisjoint(marks(*stuck(3, name="barrier"), comms=comms))


def test_frames_of_the_framework_do_not_count() -> None:
    """A recorder that writes the frames of PyTorch, too, sees the same bug."""
    site = "step train.py:1"
    inner = "all_reduce /opt/venv/lib/python3.11/site-packages/torch/distributed/c10d.py:2810"
    from dataclasses import replace

    import polars as pl

    from dl2gpu.analysis import analyse
    from dl2gpu.trace.schema import STACKS

    plain = made(*stuck(3), comms={"g": [0, 1, 2]})
    deep = replace(
        plain, stacks=pl.DataFrame({"stack": [0], "frames": [[inner, site]]}, schema=STACKS)
    )
    seen = [{f["fingerprint"] for f in analyse(t).findings} for t in (plain, deep)]
    assert seen[0] == seen[1]


def test_program_order_and_post_mortem_agree() -> None:
    """The same circle, from the whole program and from what was enqueued when it hung."""
    a = op("all_reduce", "a", site="f a.py:1")
    b = op("all_gather", "b", site="g b.py:2")
    comms = {"a": [0, 1], "b": [0, 1]}
    whole = marks([a, b], [b, a], comms=comms)
    hung = marks(recorded([a], 0), recorded([b], 0), comms=comms, exits="alive")
    assert whole == hung


def test_potential_is_not_the_real_thing() -> None:
    """Only under rendezvous, and always: another kind of finding, another fingerprint."""
    both_send = [[send(1 - r, site="x x.py:1"), recv(1 - r, site="y y.py:1")] for r in range(2)]
    must_wait = [[o | {"send_mode": "synchronous"} for o in ops] for ops in both_send]
    assert marks(*both_send).isdisjoint(marks(*must_wait))
