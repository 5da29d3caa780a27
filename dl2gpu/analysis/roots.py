"""Why nothing moves: the ends of the wait-for graph, and who is merely waiting for them.

A stuck place waits, through others, for a cycle or for one of these roots: a node whose signatures
disagree, a node that lacks a rank which has ended, a rank without a record, a dead rank, a rank
that is alive and free. Each root, with the places that lead into it, is one cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis.waitfor import FATE, Graph, components, stands_at

__all__ = ["Cause", "find_causes"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cause:
    """One reason why a job does not move.

    Attributes:
        job: its number. kind: "cycle", "mismatch", "ended", "no_record", "late", "dead" or "free".
        vertices: the cycle's or the root's vertices.
        nodes: operations at the root (for a cycle: those inside it).
        ranks: absent ranks, or the ranks on the cycle (global numbers).
        waiting: global ranks that wait for it, directly or not.
        inferred: the chain to it needs a host block that the record does not show.
        events: operations at the root that belong to no node (wildcard receives).
    """

    job: int
    kind: str
    vertices: Array
    nodes: Array
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    inferred: bool
    events: tuple[int, ...] = ()


class _Reach:
    """Who leads into a set of vertices."""

    def __init__(self, g: Graph) -> None:
        from scipy.sparse import csr_matrix

        self.g = g
        n = g.size
        self._n = n
        self.back = csr_matrix((np.ones(len(g.src)), (g.dst, g.src)), shape=(n, n))
        self.forth = csr_matrix((np.ones(len(g.src)), (g.src, g.dst)), shape=(n, n))

    def _from(self, matrix: Any, seeds: Array) -> Array:
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order

        seen = np.zeros(self._n + 1, np.bool_)
        if len(seeds) > 1:
            # one more vertex leads to all seeds: one search, however many there are
            size = matrix.nnz + len(seeds)
            matrix = csr_matrix(
                (
                    np.ones(size, np.int8),
                    np.concatenate([matrix.indices, seeds]),
                    np.append(matrix.indptr, size),
                ),
                shape=(self._n + 1, self._n + 1),
            )
            seeds = np.array([self._n])
        for seed in seeds:
            seen[breadth_first_order(matrix, int(seed), return_predecessors=False)] = True
        return seen[: self._n]

    def into(self, seeds: Array) -> Array:
        return self._from(self.back, seeds)

    def out_of(self, seeds: Array) -> Array:
        return self._from(self.forth, seeds)


def place_ranks(g: Graph, mask: Array) -> Array:
    """Rank rows of the stuck places among the marked vertices."""
    lay = g.fix.layout
    mask = mask & g.stuck
    lanes = lay.lane_rank[mask[g.lane0 : g.queue0]]
    queues = lay.queue_rank[mask[g.queue0 : g.node0]]
    silent = np.flatnonzero(mask[g.rank0 :])
    return np.unique(np.concatenate([lanes, queues, silent]).astype(np.int64))


def _earliest(nodes: pl.DataFrame, disagree: Array) -> Array:
    """Of the nodes that disagree, the first of each communicator and channel.

    Operations that do not block their host pile up behind it; they disagree because it does.
    """
    if not len(disagree):
        return disagree
    lead = (
        nodes.lazy()
        .select("node", "job", "comm", "k", "src", "dst")
        .filter(pl.col("node").is_in(pl.Series(disagree.astype(np.int32)).implode()))
        .sort("job", "comm", "src", "dst", "k")
        .unique(["job", "comm", "src", "dst"], keep="first", maintain_order=True)
        .collect()
    )
    return lead["node"].to_numpy().astype(np.int64)


def find_causes(g: Graph) -> list[Cause]:
    """All causes in the graph of a shard, sorted by job."""
    if not g.stuck.any():
        return []
    m = g.program.matching
    ranks = m.prepared.ranks
    rank_number = ranks["rank"].to_numpy()
    rank_job = ranks["job"].to_numpy()
    node_job = m.nodes["job"].to_numpy() if m.nodes.height else np.zeros(0, np.int32)
    reach = _Reach(g)
    causes: list[Cause] = []

    def numbers(rows: Array) -> tuple[int, ...]:
        return tuple(sorted(int(x) for x in rank_number[rows]))

    def add(
        job: int, kind: str, vertices: Array, nodes: Array, absent: tuple[int, ...], inferred: bool,
        events: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        lead = reach.into(vertices)
        rows = place_ranks(g, lead)
        rows = rows[rank_job[rows] == job]
        causes.append(Cause(job, kind, vertices, nodes, absent, numbers(rows), inferred, events))

    open_node = g.stuck[g.node0 : g.rank0]
    rooted = np.zeros(g.size, np.bool_)

    # --- signatures that disagree
    blocks = m.nodes["blocks"].to_numpy() if m.nodes.height else np.zeros(0, bool)
    disagree = np.flatnonzero(open_node & blocks)
    rooted[g.node0 + disagree] = True
    for v in _earliest(m.nodes, disagree):
        add(int(node_job[v]), "mismatch", np.array([g.node0 + v]), np.array([v]), (), False)

    # --- ranks that have ended, ranks without a record, ranks that came too late
    for kind in ("finished", "no_record", "late"):
        lacking = g.absent.filter(pl.col("fate") == FATE[kind])
        if lacking.is_empty():
            continue
        sets = lacking.group_by("node").agg(pl.col("rank").sort()).sort("node")
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for v, absent in sets.iter_rows():
            groups.setdefault((int(node_job[v]), tuple(absent)), []).append(v)
            rooted[g.node0 + v] = True
        for (job, ranks_), members in sorted(groups.items()):
            at = np.array(members)
            name = "ended" if kind == "finished" else kind
            add(job, name, g.node0 + at, at, ranks_, False)

    # --- wildcard receives that nobody who is left can answer
    target = np.maximum(g.dst - g.rank0, 0)
    out = np.bincount(g.src, minlength=g.size)
    ended = (g.fate == FATE["finished"]) & (out[g.rank0 :] == 0)
    over = (g.dst >= g.rank0) & (g.src < g.node0) & ended[target]
    over &= np.bincount(g.src[over], minlength=g.size)[g.src] == out[g.src]
    for j in np.unique(rank_job[target[over]]):
        mine = over & (rank_job[target] == j)
        rows = np.unique(target[mine])
        rooted[g.rank0 + rows] = True
        stands = tuple(sorted({stands_at(g, int(v)) for v in np.unique(g.src[mine])}))
        none = np.zeros(0, np.int64)
        add(int(j), "ended", g.rank0 + rows, none, numbers(rows), False, stands)

    # --- ranks that died, ranks that are alive and free
    into = np.bincount(g.dst, minlength=g.size)[g.rank0 :]
    out = np.bincount(g.src, minlength=g.size)[g.rank0 :]
    waited = g.absent.select("node", "r")
    for kind, fate in (("dead", FATE["dead"]), ("free", FATE["free"])):
        rows = np.flatnonzero((into > 0) & (out == 0) & (g.fate == fate))
        for j in np.unique(rank_job[rows]):
            own = rows[rank_job[rows] == j]
            rooted[g.rank0 + own] = True
            at = (
                waited.filter(pl.col("r").is_in(own.astype(np.int64).tolist()))["node"]
                .unique().sort().to_numpy().astype(np.int64)
            )  # fmt: skip
            add(int(j), kind, g.rank0 + own, at, numbers(own), False)

    # --- cycles
    label, circular = components(g, with_inferred=True)
    sure_label, sure = components(g, with_inferred=False)
    for c in np.flatnonzero(circular):
        vertices = np.flatnonzero(label == c)
        certain = bool(sure[sure_label[vertices]].any())
        if not certain and (reach.out_of(vertices[:1]) & rooted).any():
            # a silent host may stand at any of its pending operations: where one of them leads to
            # another cause, that cause explains the silence and the circle is an artefact
            continue
        mask = np.zeros(g.size, np.bool_)
        mask[vertices] = True
        rows = place_ranks(g, mask)
        at = vertices[(vertices >= g.node0) & (vertices < g.rank0)] - g.node0
        add(int(rank_job[rows[0]]), "cycle", vertices, at, numbers(rows), not certain)
    return sorted(causes, key=lambda c: (c.job, c.kind, c.ranks, tuple(c.nodes.tolist())))
