"""JSON that is no text in places: readers take what is left, and tables hold it."""

from __future__ import annotations

import json
from importlib import import_module

import polars as pl
import pytest
from fuzz_seeds import chakra_json, execution_trace, flight_recorder_json, param
from hypothesis import given
from hypothesis import strategies as st

from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.json_text import lenient, without_halves
from dl2gpu.trace.readers import READERS
from dl2gpu.trace.schema import validate


@given(st.text(max_size=30))
def test_whole_text_stays(text: str) -> None:
    for escaped in (True, False):
        told = json.dumps([text], ensure_ascii=escaped)
        assert lenient(told) == [text]


@given(
    st.lists(st.sampled_from(["\\ud83d", "\\ude00", "\\\\", "\\n", "u", "\\uD800", "d83d", "é"]))
)
def test_halves_become_marks_of_the_same_length(parts: list[str]) -> None:
    told = '["' + "".join(parts) + '"]'
    kept = without_halves(told)
    assert len(kept) == len(told)
    expected = json.loads(told)[0]
    # what json puts together of two halves is whole; each other one is a mark
    assert lenient(told)[0] == "".join(
        "\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in expected
    )
    pl.Series([lenient(told)[0]])


@pytest.mark.parametrize(
    ("format_", "data", "old"),
    [
        ("flight_recorder", flight_recorder_json()[4], b"default_pg"),
        ("flight_recorder", flight_recorder_json()[4], b"nccl:broadcast"),
        ("execution_trace", execution_trace()[2], b"c10d::broadcast_"),
        ("execution_trace", execution_trace()[2], b"cuda:nccl"),
        ("param", param()[0], b"broadcast"),
        ("param", param()[0], b"Float"),
        ("chakra", chakra_json()[0], b'"a"'),
    ],
)
def test_half_a_surrogate_in_a_name_costs_nothing_else(
    format_: str, data: bytes, old: bytes
) -> None:
    assert old in data
    new = b'"\\ud800"' if old.startswith(b'"') else b"x\\ud800"
    read = import_module(READERS[format_]).read
    files = [TraceFile(f"j/rank_{k}", f"{k}", format_, "j") for k in range(2)]
    stored = [data, data.replace(old, new)]
    trace, inputs = read(files, lambda file: stored[int(file.url)])
    validate(trace)
    assert {i.status for i in inputs} <= {"read", "partial"}
    assert inputs[0].events == inputs[1].events
