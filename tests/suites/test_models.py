"""Jobs of real models: programs that are whole, faults with true labels, the same in every form."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import naive
import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import dl2gpu
from dl2gpu.analysis.verdict import analyse
from dl2gpu.planner.model import load, packaged, parse
from dl2gpu.suites import model_suite
from dl2gpu.suites.command import app
from dl2gpu.suites.dumps import write_dumps
from dl2gpu.suites.inject import FAULTS, Injected, inject
from dl2gpu.suites.model_suite import Entry, Suite
from dl2gpu.suites.scheme import Scheme, lowered
from dl2gpu.suites.settle import settle
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import OP, Trace, op_name, validate

TINY = parse({
    "name": "tiny", "batch": 8,
    "layer": [
        {"op": "embedding", "vocabulary": 64, "tokens": 16, "width": 32},
        {"op": "transformer", "name": "block", "heads": 4, "repeat": 2},
        {"op": "head", "classes": 64},
    ],
})  # fmt: skip
CIRCLES = {"cycle", "order_inversion", "init_cycle"}
SMALL = ("dp4", "dp3,pp2,m2", "tp4,pp2,m2", "dp4,ep2,zero1")
"""Layouts that the naive interpreter gets through in seconds."""


def made(scheme: str, fault: str, seed: int = 1) -> Injected | None:
    parsed = Scheme.parse(scheme)
    trace = lowered(TINY, parsed, 3)
    return inject(trace, parsed, 3, fault, np.random.default_rng(seed))


def calls(trace: Trace, rank: int) -> list[str]:
    texts = trace.strings.sort("code")["text"].to_list()
    mine = trace.events.filter((pl.col("rank") == rank) & (pl.col("op") != OP["wait"]))
    return [op_name(o, texts) for o in mine.sort("seq")["op"]]


# --------------------------------------------------------------------------------------------------
# Programs


@pytest.mark.parametrize(
    "text",
    [
        "dp8", "dp2,tp4", "tp4,pp2,m4", "dp4,pp2,m8,zero1", "dp2,tp2,pp2,m4,sp", "dp8,ep4,zero2",
        "dp2,cp2,tp2,sp", "dp8,m2,zero3", "dp4,pp2,m4,v1,gpipe", "dp4,ep2,cp2,tp2,pp2,m4",
        "dp2,pp2,v2,m4", "dp4,recompute,b2",
    ],
)  # fmt: skip
def test_schemes_are_healthy(text: str) -> None:
    model = parse(TINY.description | {"layer": [
        TINY.description["layer"][0], TINY.description["layer"][1] | {"repeat": 4},
        TINY.description["layer"][2],
    ]})  # fmt: skip
    scheme = Scheme.parse(text)
    assert Scheme.parse(str(scheme)) == scheme
    trace = validate(lowered(model, scheme, 3), text)
    assert trace.ranks.height == scheme.ranks
    assert settle(trace).done.all()
    assert analyse(trace).jobs["verdict"].to_list() == ["healthy"]


def test_experts_get_their_tokens_and_keep_their_gradients() -> None:
    dense = lowered(TINY, Scheme.parse("dp8"), 3)
    experts = lowered(TINY, Scheme.parse("dp8,ep4"), 3)
    assert "all_to_all" not in calls(dense, 0)
    # two layers: there and back, forward and backward, three steps
    assert calls(experts, 0).count("all_to_all") == 2 * 4 * 3
    stacks = experts.stacks.sort("stack")["frames"].list.first()
    names = experts.events.with_columns(site=stacks.gather(experts.events["stack"]))
    reduces = names.filter(pl.col("site").str.contains("reduce_gradients"))
    groups = dict(experts.comms.select("comm", "ranks").iter_rows())
    of_expert = reduces.filter(pl.col("site").str.contains(r"\.(up|down):"))
    assert {tuple(np.diff(groups[c])) for c in of_expert["comm"]} == {(4,)}  # 0 and 4, 1 and 5, ...
    assert {len(groups[c]) for c in reduces["comm"]} == {2, 4}


def test_scale_does_not_need_a_loop_over_ranks() -> None:
    trace = lowered("gpt2", Scheme.parse("dp64,tp4,pp4,m4"), 3)
    assert trace.ranks.height == 1024
    assert analyse(trace).jobs["verdict"].to_list() == ["healthy"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp8,xx2", "found 'xx2'"), ("dp", "found 'dp'"), ("sp3", "found 'sp3'"),
        ("dp8,dp4", "stands twice"), ("dp8,ep3", "ep to divide dp"), ("dp1", "2 to 65536 ranks"),
        ("dp2,zero4", "zero0 to zero3"), ("dp2,v2", "interleaved"), ("dp0", "1 or more"),
        ("dp100000,tp8", "2 to 65536"), ("", "found ''"),
    ],
)  # fmt: skip
def test_schemes_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Scheme.parse(text)


def test_models_that_cannot_be_cut_so() -> None:
    with pytest.raises(InputError, match="pieces"):
        lowered(TINY, Scheme.parse("pp64,m64"), 3)


def test_packaged_models_have_their_sizes() -> None:
    sizes = {"swin-t": 28, "swin-s": 50, "swin-b": 88, "swin-l": 197, "gpt3-175b": 175_000}
    for name, millions in sizes.items():
        assert name in packaged()
        assert load(name).parameters / 1e6 == pytest.approx(millions, rel=0.02)


# --------------------------------------------------------------------------------------------------
# Faults


@pytest.mark.parametrize("scheme", SMALL)
def test_labels_are_what_the_naive_interpreter_finds(scheme: str) -> None:
    """Whether the job stands still; and that its record ends where it stands."""
    done = 0
    for fault in FAULTS:
        one = made(scheme, fault)
        if one is None:
            continue
        done += 1
        facts = naive.progress(one.trace)
        stuck = bool(naive.stuck_places(facts))
        assert stuck == (fault not in ("healthy", "dtype")), fault
        settled = settle(one.trace)
        rows = one.trace.events.sort("rank", "seq").select("rank", "lane", "seq").rows()
        by_naive = [facts[key].completed for key in rows]
        assert settled.done.tolist() == by_naive, fault
    assert done >= 11


def test_every_fault_has_a_place_somewhere() -> None:
    for fault in FAULTS:
        assert any(made(s, fault) is not None for s in (*SMALL, "tp4,cp2,dp1,sp")), fault


@pytest.mark.parametrize("scheme", [*SMALL, "dp4,tp3", "dp4,cp4,sp", "dp2,tp2,pp2,m4,zero1"])
def test_analysis_finds_what_was_put_in(scheme: str) -> None:
    model = parse(TINY.description | {"layer": [
        TINY.description["layer"][0] | {"vocabulary": 96, "width": 48},
        TINY.description["layer"][1] | {"heads": 12}, TINY.description["layer"][2],
    ]})  # fmt: skip
    parsed = Scheme.parse(scheme)
    trace = lowered(model, parsed, 3)
    for fault in FAULTS:
        for seed in range(3):
            one = inject(trace, parsed, 3, fault, np.random.default_rng(seed))
            if one is not None:
                held(one, analyse(validate(one.trace, fault)), f"{fault}, {seed}")


def held(one: Injected, got: Any, what: str) -> None:
    job = got.jobs.row(0, named=True)
    kinds = {f["kind"] for f in got.findings} | {job["verdict"]}
    named = {r for f in got.findings for r in f["culprits"]}
    assert kinds & set(one.kinds), what
    assert job["deadlocked"] == one.deadlocked, what
    if kinds & CIRCLES:
        assert set(one.culprits or ()) <= named, what
    else:
        assert not named & set(one.innocent), what
        assert one.culprits is None or named == set(one.culprits), what


# --------------------------------------------------------------------------------------------------
# Suites


def suite(*forms: str, faults: tuple[str, ...] = tuple(FAULTS), **options: Any) -> Suite:
    schemes = (Scheme.parse("dp4,tp4"), Scheme.parse("dp4,pp2,m4"))
    return Suite("small", (Entry("gpt2", schemes, faults, forms, **options),))


@pytest.mark.parametrize(
    ("form", "flaws"),
    [
        ("parquet", ("none",)), ("fr", ("none", "ring", "missing", "untimed")),
        ("kineto", ("none", "missing", "untimed")),
    ],
)  # fmt: skip
def test_forms_are_read_and_judged_as_their_labels_say(
    tmp_path: Path, form: str, flaws: tuple[str, ...]
) -> None:
    labels = model_suite.write(suite(form, imperfections=flaws), tmp_path / "x")
    report = dl2gpu.scan([str(tmp_path / "x" / form)])
    assert set(report.inputs["status"]) == {"read"}
    jobs = {j["job"]: j for j in report.jobs.to_dicts()}
    findings: dict[str, list[dict[str, Any]]] = {}
    for f in report.findings.to_dicts():
        findings.setdefault(f["job"], []).append(f)
    assert set(jobs) == set(labels["job"])
    assert set(labels["imperfection"]) == set(flaws)
    for label in labels.to_dicts():
        name = label["job"]
        mine = findings.get(name, [])
        kinds = {f["kind"] for f in mine} | {jobs[name]["verdict"]}
        named = {r for f in mine for r in f["culprits"]}
        assert kinds & set(label["kinds"]), (name, kinds)
        if label["deadlocked"] is not None:
            assert (jobs[name]["deadlocked"] is True) == label["deadlocked"], name
        if not kinds & CIRCLES and label["suspects"] is not None:
            assert named <= set(label["suspects"]), (name, named)
        if not kinds & CIRCLES and label["culprits"] is not None:
            assert named == set(label["culprits"]), (name, named)


def test_same_definition_same_bytes(tmp_path: Path) -> None:
    def digest(folder: Path) -> dict[str, str]:
        return {
            p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file()
        }  # fmt: skip

    small = suite("parquet", "fr", "kineto", faults=("healthy", "skip"), imperfections=("missing",))
    for name in ("a", "b"):
        model_suite.write(small, tmp_path / name)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert len(digest(tmp_path / "a")) > 60


def test_definitions_of_the_repository() -> None:
    folder = Path(__file__).resolve().parents[2] / "datasets" / "suites"
    found = {p.stem: model_suite.read(p) for p in folder.glob("*.toml")}
    assert {"gpt2", "swin", "scale"} <= set(found)
    ranks = [s.ranks for f in found.values() for e in f.entries for s in e.schemes]
    assert (min(ranks), max(ranks)) == (8, 4096)
    for one in found.values():
        for entry in one.entries:
            assert load(entry.model).nodes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3 4", "expected a suite as TOML"),
        ("sed = 1", "found 'sed'"),
        ("seed = 1", r"expected tables \[\[job\]\]"),
        ('[[job]]\nmodel = "gpt2"\nschemes = []', "expected a list of texts"),
        ('[[job]]\nmodel = "gpt2"\nschemes = ["dp2"]\nfaults = ["xx"]', "found 'xx'"),
        ('[[job]]\nmodel = "gpt2"\nschemes = ["dp2"]\nforms = ["xx"]', "found 'xx'"),
        ('[[job]]\nschemes = ["dp2"]', "expected a model"),
        ('steps = 1\n[[job]]\nmodel = "gpt2"\nschemes = ["dp2"]', "3 to 1000 steps"),
    ],
)
def test_wrong_definitions(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        model_suite.read(path)


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    job = [str(tmp_path / "job"), "gpt2", "--scheme", "dp4,tp2", "--fault", "skip"]
    done = run(app, ["model", *job])
    assert done.exit_code == 0
    assert "1 jobs of 8 ranks" in done.output
    assert dl2gpu.scan([str(tmp_path / "job")]).jobs["deadlocked"].to_list() == [True]
    assert run(app, ["model", *job]).exit_code == 2  # the folder is not empty
    other = [str(tmp_path / "y"), "gpt2", "--scheme"]
    for wrong in (["dp4,qq2"], ["dp4,tp2", "--fault", "send"], ["dp4", "--fault", "xx"]):
        assert run(app, ["model", *other, *wrong]).exit_code == 2
    assert run(app, ["model", str(tmp_path / "z"), "no-model", "--scheme", "dp2"]).exit_code == 2
    assert run(app, ["suite", str(tmp_path / "none.toml"), str(tmp_path / "w")]).exit_code == 2


def dumps_of(tmp_path: Path, fault: str, **how: Any) -> list[dict[str, Any]]:
    scheme = Scheme.parse("dp4,tp2,pp4,m8")
    one = inject(lowered("gpt2", scheme, 3), scheme, 3, fault, np.random.default_rng(5))
    assert one is not None
    write_dumps(one.trace, settle(one.trace), tmp_path / fault, **how)
    return dl2gpu.scan([str(tmp_path / fault)]).findings.to_dicts()


@pytest.mark.parametrize("timed", [True, False])
def test_turned_collectives_of_dumps_are_told_as_such(tmp_path: Path, timed: bool) -> None:
    """All have come and agree, and yet it is not the network."""
    (finding,) = dumps_of(tmp_path, "order", timed=timed)
    assert finding["kind"] == "order_inversion"
    assert "share a queue of the device" in finding["summary"]


@pytest.mark.parametrize("fault", ["lost", "stall", "exit"])
def test_what_was_held_up_before_is_not_in_flight(tmp_path: Path, fault: str) -> None:
    """Dumps do not tell that a collective waits for a message that will not come."""
    found = dumps_of(tmp_path, fault)
    assert not [f for f in found if f["kind"] == "in_flight" or f["reason"] == "device"], found


def test_messages_aligned_by_a_guess_make_no_circle(tmp_path: Path) -> None:
    for ring in (40, 60, 80, 100):
        for f in dumps_of(tmp_path / str(ring), "stall", ring=ring):
            assert f["kind"] not in CIRCLES, (ring, f["summary"])
