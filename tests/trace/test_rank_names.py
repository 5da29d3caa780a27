"""Ranks from file names: every spelling seen in the wild, and no guess where names do not tell."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2gpu.trace.rank_names import ranks_from_names

CLEAR: dict[str, tuple[list[str], list[int]]] = {
    "default": ([f"nccl_trace_rank_{r}" for r in (0, 1, 10, 2)], [0, 1, 10, 2]),
    "newer default": (["comm_lib_trace_rank_12", "comm_lib_trace_rank_3"], [12, 3]),
    "dump": (["_dump_12", "_dump_0", "_dump_7"], [12, 0, 7]),
    "container": (
        [f"nccl_trace_rank_container-node0{n}_{r}" for n, r in ((2, 5), (1, 0), (2, 4), (1, 1))],
        [5, 0, 4, 1],
    ),
    "node with zero": ([f"nccl_trace_rank_node-07_{r}" for r in range(4)], [0, 1, 2, 3]),
    "host and pci": ([f"host{r // 2}.pci{3 + r % 2}_rank_{r}" for r in range(4)], [0, 1, 2, 3]),
    "pci alone varies too": ([f"host0.pci{3 + r}_rank_{r}" for r in range(3)], [0, 1, 2]),
    "json": (["rank_12.json", "rank_3.json"], [12, 3]),
    "pickle": (["trace_0.pkl", "trace_1.pkl"], [0, 1]),
    "folders": (["rank_0/nccl_trace", "rank_1/nccl_trace"], [0, 1]),
    "folders with hosts": (["node3_rank_12/fr", "node4_rank_13/fr"], [12, 13]),
    "deep job folder": (["runs/7/a_0", "runs/7/a_1"], [0, 1]),
    "short": (["fr_3.json", "fr_5.json"], [3, 5]),
    "rank first": (["rank3_trace.json.gz", "rank0_trace.json.gz"], [3, 0]),
    "time behind the rank": (["rank3_1700000003.pkl", "rank4_1700000001.pkl"], [3, 4]),
    "number first": (["0-trace.pkl", "1-trace.pkl", "3-trace.pkl"], [0, 1, 3]),
    "date in front": (["fr_20260301_120000_0", "fr_20260301_120001_1"], [0, 1]),
    "pid behind": (["trace_0_41235", "trace_1_41236", "trace_2_41239"], [0, 1, 2]),
    "different hosts": (["gpu-a100-x7_0", "login_1", "n2_2"], [0, 1, 2]),
    "zero padded": (["dump.007", "dump.008"], [7, 8]),
    "ip address": (["fr-10.0.3.17-rank-1", "fr-10.0.3.18-rank-0"], [1, 0]),
    "one dump a node": (["node0/nccl_trace", "node1/nccl_trace"], [0, 1]),
    "version inside": (["fr_v2_0.json", "fr_v2_1.json"], [0, 1]),
    "only rank 0 and 1 of attempts": (["a2_rank0", "a2_rank1"], [0, 1]),
    "capital": (["Trace-Rank 3.pkl", "Trace-Rank 4.pkl"], [3, 4]),
    "single": (["nccl_trace_rank_5"], [5]),
    "single with host": (["nccl_trace_rank_node-07_3"], [3]),
    "single with date": (["rank3_20260301.json"], [3]),
    "single in a rank folder": (["job17/rank_2/nccl_trace"], [2]),
}


@pytest.mark.parametrize("case", CLEAR)
def test_clear_names(case: str) -> None:
    names, ranks = CLEAR[case]
    result = ranks_from_names(names)
    assert result.ranks == ranks
    assert result.reason == [None] * len(names)


@pytest.mark.parametrize("case", CLEAR)
def test_order_of_names_does_not_matter(case: str) -> None:
    names, ranks = CLEAR[case]
    order = list(range(len(names)))
    random.Random(1).shuffle(order)
    assert ranks_from_names([names[i] for i in order]).ranks == [ranks[i] for i in order]


@pytest.mark.parametrize(
    "names",
    [
        ["node0_rank_0", "node0_rank_1", "node1_rank_0", "node1_rank_1"],  # ranks within a node
        ["node0_rank_0", "node0_rank_1", "node1_rank_0"],  # the same, one dump missing
        ["node0_gpu0", "node0_gpu1", "node1_gpu0", "node1_gpu1"],
        ["a/trace", "b/trace"],
        ["nccl_trace", "comm_lib_trace"],
        ["fr-10.0.3.17-0", "fr-10.0.3.18-0"],  # the address is no rank
        ["dump_1700000003", "dump_1700000007"],  # times are no ranks
        ["node0/local_rank_0", "node0/local_rank_1", "node1/local_rank_0", "node1/local_rank_1"],
    ],
)
def test_no_guess(names: list[str]) -> None:
    result = ranks_from_names(names)
    assert result.ranks == [None] * len(names)
    assert all(r and "--job-pattern" in r for r in result.reason)


def test_single_name_without_number() -> None:
    result = ranks_from_names(["jobs/run_7/nccl_trace"])
    assert result.ranks == [None]
    assert "no number" in str(result.reason[0])


def test_copies_keep_their_rank_and_say_so() -> None:
    names = ["_dump_3", "_dump_3 (1)", "_dump_4", "_dump_4~"]
    result = ranks_from_names(names)
    assert result.ranks == [3, 3, 4, 4]
    assert all(result.reason)
    assert "_dump_3 (1)" in str(result.reason[0])
    names = ["rank_3.json", "rank_3 (1).json", "rank_4.json"]
    result = ranks_from_names(names)
    assert result.ranks == [3, 3, 4]
    assert result.reason[2] is None


def test_stray_file_costs_only_its_own_rank() -> None:
    names = ["nccl_trace_rank_0", "nccl_trace_rank_1", "old/saved_nccl_trace_rank_1"]
    result = ranks_from_names(names)
    assert result.ranks == [0, None, None]
    assert "keep one" in str(result.reason[1])


def test_name_without_a_rank_among_others() -> None:
    result = ranks_from_names(["nccl_trace_rank_0", "nccl_trace_rank_1", "nccl_trace"])
    assert result.ranks == [0, 1, None]
    assert result.reason[:2] == [None, None]
    assert result.reason[2] is not None


def test_world_rules_readings_out() -> None:
    names = ["t_5_0", "t_6_1"]
    assert ranks_from_names(names).ranks == [0, 1]
    names = ["t_0_9", "t_1_8"]
    assert ranks_from_names(names, world=2).ranks == [0, 1]
    assert ranks_from_names(["x_3"], world=2).ranks == [None]
    assert "below 2" in str(ranks_from_names(["x_3"], world=2).reason[0])
    assert ranks_from_names(["x_1_3"], world=2).ranks == [1]


def test_members_rule_readings_out() -> None:
    names = ["t_4_0", "t_5_1"]
    assert ranks_from_names(names, possible=[{4, 5}, {4, 5}]).ranks == [4, 5]
    assert ranks_from_names(names, possible=[{0, 1}, None]).ranks == [0, 1]
    result = ranks_from_names(["rank_0", "rank_1"], possible=[{0, 1}, {7}])
    assert result.ranks == [0, None]
    assert "rules out" in str(result.reason[1])


@given(
    st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True),
    st.from_regex(r"[a-z_]{0,8}([0-9]{1,3}[a-z_]{1,4})?", fullmatch=True),
    st.sampled_from(["", ".json", ".pkl", ".json.gz"]),
)
def test_trailing_numbers(ranks: list[int], prefix: str, extension: str) -> None:
    names = [f"{prefix}_{r}{extension}" for r in ranks]
    assert ranks_from_names(names).ranks == ranks


@given(st.lists(st.text("ranktoe_-./ 0123456789()~", max_size=14), max_size=6, unique=True))
def test_never_invents(names: list[str]) -> None:
    result = ranks_from_names(names)
    for name, rank, reason in zip(names, result.ranks, result.reason, strict=True):
        if rank is None:
            assert reason
        else:
            assert rank in {int(n) for n in re.findall(r"\d+", name)}
    given_ranks = [r for r, why in zip(result.ranks, result.reason, strict=True) if why is None]
    assert len([r for r in given_ranks if r is not None]) == len(
        {r for r in given_ranks if r is not None}
    )
