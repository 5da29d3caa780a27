"""What findings hold for their pictures: small, in order, and the graph that the analysis saw."""

from __future__ import annotations

import json
from typing import Any

from analysis.handmade import NS, START, made, only, op, recorded, recv, send, wait
from hypothesis import HealthCheck, Phase, example, given, settings
from programs import from_seed, seeds, shuffled, trace_of

from dl2gpu.analysis import analyse
from dl2gpu.analysis.neighbourhood import FIELDS, STATUS

SETTINGS = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a seed cannot shrink
)

Details = dict[str, Any]


def ring(n: int, victims: int = 0) -> Details:
    """Each rank of a ring receives before it sends; others wait for rank 0."""
    ranks = [[recv((r - 1) % n), send((r + 1) % n)] for r in range(n)]
    ranks += [[recv(0)] for _ in range(victims)]
    graph: Details = only(made(*ranks))["details"]["graph"]
    return graph


def of_role(graph: Details, role: str) -> list[Details]:
    return [g for g in graph["groups"] if g["role"] == role]


def events(f: Details) -> list[dict[str, Any]]:
    """Rows of the timeline with names for numbers."""
    line = f["details"]["timeline"]
    rows = [dict(zip(line["fields"], row, strict=True)) for row in line["events"]]
    for row in rows:
        for key in ("op", "comm", "site", "stream"):
            row[key] = None if row[key] is None else line["texts"][row[key]]
        row["status"] = STATUS[row["status"]]
    return rows


def test_circle_in_its_order() -> None:
    graph = ring(5)
    assert [g["ranks"] for g in graph["groups"]] == [[[r, r]] for r in (0, 4, 3, 2, 1)]
    assert graph["edges"] == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]
    assert {graph["texts"][g["op"]] for g in graph["groups"]} == {"recv"}
    assert (graph["inferred"], graph["places"]) == (False, 5)


def test_middle_of_a_long_circle_is_one_group() -> None:
    graph = ring(200)
    groups = of_role(graph, "cycle")
    assert [g["count"] for g in groups] == [1] * 8 + [185] + [1] * 7
    assert graph["edges"] == [[i, (i + 1) % 16] for i in range(16)]
    assert len(json.dumps(graph)) < 3000


def test_victims_that_stand_alike_are_one_group() -> None:
    """Whatever the number of ranks, the graph has the same boxes and arrows."""
    pictures = []
    for n in (4, 512):
        ops = [[recv(1), send(1), op("barrier", "late")], [recv(0), send(0)]]
        ops += [[op("barrier", "rest")] for _ in range(2, n - 1)]
        ops += [[op("barrier", "late"), op("barrier", "rest")]]
        comms = {"rest": list(range(2, n)), "late": [0, n - 1]}
        pictures.append(only(made(*ops, comms=comms))["details"]["graph"])
    for graph, n in zip(pictures, (4, 512), strict=True):
        assert [(g["role"], g["count"]) for g in graph["groups"]] == [
            ("cycle", 1), ("cycle", 1), ("waits", n - 3), ("waits", 1),
        ]  # fmt: skip
        assert graph["edges"] == [[0, 1], [1, 0], [2, 3], [3, 0]]
        assert graph["groups"][2]["ranks"] == [[2, n - 2]]


def test_scattered_ranks_and_many_communicators_stay_small() -> None:
    """Pairs of ranks that each wait in a communicator of their own, for one rank that has ended."""
    n = 600
    comms = {f"pair_{r}": [0, r] for r in range(1, n)}
    ops = [[op("barrier", f"pair_{r}", site=f"step a.py:{r % 7}")] for r in range(1, n)]
    found = analyse(made([], *ops, comms=comms)).findings
    graph = max(
        (f["details"]["graph"] for f in found), key=lambda g: sum(x["count"] for x in g["groups"])
    )
    assert len(graph["groups"]) <= 42
    assert all(len(g["ranks"]) <= 8 for g in graph["groups"])
    assert len(json.dumps(graph)) < 6000


def test_what_is_waited_for_in_the_end() -> None:
    ops = [[op("all_reduce")], [op("all_reduce")], []]
    (root,) = of_role(only(made(*ops))["details"]["graph"], "root")
    assert root["fate"] == "ended"
    assert root["ranks"] == [[2, 2]]
    dead = only(made(*ops, exits={0: "alive", 1: "alive", 2: "crashed"}))["details"]["graph"]
    assert of_role(dead, "root")[0]["fate"] == "dead"
    assert dead["edges"] == [[0, 1]]


def test_sides_of_a_mismatch_behind_their_waits() -> None:
    """Each side is shown with the operation for which its wait stands."""
    a = [op("all_reduce", blocking=False, request=1), wait(1)]
    b = [op("broadcast", root=0, blocking=False, request=1), wait(1)]
    f = only(made(a, a, a, b))
    graph = f["details"]["graph"]
    names = {graph["texts"][g["op"]]: g["count"] for g in of_role(graph, "waits")}
    assert names == {"all_reduce": 3, "broadcast": 1}
    assert all(g["waits"] == 1 for g in of_role(graph, "waits"))
    assert of_role(graph, "root")[0]["fate"] == "mismatch"


def test_places_of_the_graph_are_those_of_the_cycle() -> None:
    """Host and device: a host that waits for its own stream is a place by itself."""
    a = [op("all_reduce", "x", stream="s", blocking=False), wait(), op("barrier", "y")]
    b = [op("barrier", "y"), op("all_reduce", "x", stream="s", blocking=False), wait()]
    f = only(made(a, b, comms={"x": [0, 1], "y": [0, 1]}))
    shown = [(g["ranks"][0][0], g["place"]) for g in of_role(f["details"]["graph"], "cycle")]
    assert shown == [(s["rank"], s["place"]) for s in f["cycle"]]
    assert len(shown) == 3


def test_timeline_shows_where_it_parts_and_where_it_hangs() -> None:
    steps = [op("all_reduce", site="step a.py:1") for _ in range(40)]
    left = steps[:10] + steps[11:]  # one call left out, which shows at the end only
    f = only(made([*steps, op("barrier")], [*steps, op("barrier")], [*left, op("barrier")]))
    rows = events(f)
    assert f["details"]["timeline"]["fields"] == list(FIELDS)
    assert {r["rank"] for r in rows} == {0, 1, 2}
    hanging = {(h["rank"], h["seq"]) for h in f["hangs_at"]}
    assert {(r["rank"], r["seq"]) for r in rows if r["status"] == "stands"} == hanging
    first = f["first_divergence"]
    assert (first["rank"], first["seq"]) in {(r["rank"], r["seq"]) for r in rows}
    assert max(sum(r["rank"] == rank for r in rows) for rank in range(3)) <= 16


def test_times_are_relative_to_the_first() -> None:
    ops = [op("all_reduce"), op("all_reduce"), op("all_reduce")]
    a, b = recorded(ops, 2), recorded(ops[:2], 2, start=START + 7)
    f = only(made(a, b, exits="alive", job_facts={"source": "flight_recorder", "waits": False}))
    assert f["details"]["timeline"]["base_ns"] == START
    first = events(f)[0]
    assert (first["created"], first["completed"]) == (0, NS // 2)
    assert min(r["created"] for r in events(f) if r["rank"] == 1) == 7
    assert [r["status"] for r in events(f) if r["rank"] == 0] == ["done", "done", "stands"]


def test_many_alike_are_shown_by_few() -> None:
    f = only(made(*[[op("barrier")] for _ in range(64)], []))
    line = f["details"]["timeline"]
    assert len({row[0] for row in line["events"]}) <= 4
    assert sum(line["alike"].values()) == 64 - len({r["rank"] for r in events(f)} - {64})


@example(715419)  # two places of one fault, of which one has a circle
@given(seeds())
@SETTINGS
def test_pictures_of_random_programs(seed: int) -> None:
    """Bounded, in range, of the finding's own ranks, and the same whatever the order of rows."""
    trace = trace_of(*from_seed(seed, 30))
    found = analyse(trace).findings
    again = analyse(shuffled(trace, seed)).findings
    assert [f["details"] for f in found] == [f["details"] for f in again]
    for f in found:
        graph = f["details"].get("graph")
        line = f["details"].get("timeline")
        named = {*f["culprits"], *f["victims"], *(h["rank"] for h in f["hangs_at"])}
        if graph is not None:
            groups, texts = graph["groups"], graph["texts"]
            assert len(groups) <= 42
            assert all(0 <= x < len(groups) for edge in graph["edges"] for x in edge)
            assert all(0 <= g[k] < len(texts) for g in groups for k in ("op", "comm") if k in g)
            assert [g["role"] for g in groups] == sorted(
                (g["role"] for g in groups), key=["cycle", "waits", "root"].index
            )
            circle = [g["ranks"][0][0] for g in groups if g["role"] == "cycle"]
            assert circle == [s["rank"] for s in f["cycle"]]
            assert {(a, b) for a, b in graph["edges"]} >= {
                (i, (i + 1) % len(circle)) for i in range(len(circle)) if len(circle) > 1
            }
            # whoever waits, waits for something that is shown
            assert {a for a, _ in graph["edges"]} >= {
                i for i, g in enumerate(groups) if g["role"] == "waits"
            }
        if line is not None:
            assert len(line["events"]) <= 128
            first = {f["first_divergence"]["rank"]} if f["first_divergence"] else set()
            known = named | first | {*f["details"].get("missing_ranks", ())}
            assert {row[0] for row in line["events"]} & known
            assert all(None in row or row[9] in range(4) for row in line["events"])
