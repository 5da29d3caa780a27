"""Links: what a collective costs between the devices of a grid.

The time of a message of n bytes is alpha + n beta. Devices of a node share fast links; a node's
network interfaces are shared by all the rings that leave the node at the same time.

A collective on k devices takes (n: bytes of a device's whole operand; of the whole result for
all_gather):

* ring: all_reduce 2 (k-1) alpha + 2 (k-1)/k n beta; reduce_scatter and all_gather half of that
  (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  JPDC 2009);
* all_to_all, pairwise: (k-1) alpha + (k-1)/k n beta (Thakur, Rabenseifner and Gropp, "Optimization
  of collective communication operations in MPICH", IJHPCA 2005);
* two trees: all_reduce 2 log2 k alpha + 2 n beta (Sanders, Speck and Traeff, "Two-tree algorithms
  for full bandwidth broadcast, reduction and scan", Parallel Computing 2009), where that is less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Final

import numpy as np

__all__ = ["Cluster", "Link", "bytes_sent", "grid_links", "seconds"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of equal nodes. Bandwidths in bytes a second, one direction; times in seconds."""

    nodes: int
    per_node: int
    intra: float = 300e9
    """Of a device to its neighbour in the node."""
    inter: float = 25e9
    """Of all the network interfaces of a node together."""
    intra_latency: float = 3e-6
    inter_latency: float = 10e-6
    flops: float = 312e12
    """Peak of a device, operations a second."""
    efficiency: float = 0.5
    """Share of the peak that large products reach: an assumption, to be measured."""
    memory_bandwidth: float = 2e12
    memory: float = 80 * 2**30
    """Bytes of a device."""
    overlap: float = 0.9
    """Share of the backward computation that gradient communication may hide behind."""

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Link:
    """alpha and beta of the neighbours on a ring: seconds, and seconds a byte."""

    alpha: float
    beta: float


@lru_cache(maxsize=4096)
def grid_links(cluster: Cluster, shape: tuple[int, ...]) -> tuple[Link, ...]:
    """The link of each dimension of a grid; the last dimension runs over neighbouring ranks.

    All groups of a dimension communicate at once. The rings that leave a node share its network.
    """
    ranks = np.arange(int(np.prod(shape)))
    where = ranks.reshape(shape)
    out = []
    for axis, size in enumerate(shape):
        after = np.roll(where, -1, axis).ravel()
        leaves = ranks // cluster.per_node != after // cluster.per_node
        if size == 1 or not leaves.any():
            out.append(Link(cluster.intra_latency, 1 / cluster.intra))
            continue
        most = int(np.bincount(ranks[leaves] // cluster.per_node).max())
        slowest = min(cluster.intra, cluster.inter / most)
        out.append(Link(cluster.inter_latency, 1 / slowest))
    return tuple(out)


_TURNS: Final = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


def seconds(op: str, size: int, n: int, link: Link) -> float:
    """Time of a collective of ``size`` devices; ``n`` and formulas as in the module's text."""
    turns = _TURNS[op]
    ring = turns * ((size - 1) * link.alpha + (size - 1) / size * n * link.beta)
    if op == "all_reduce":
        return min(ring, 2 * ceil(log2(size)) * link.alpha + 2 * n * link.beta)
    return ring


def bytes_sent(op: str, size: int, n: int) -> int:
    """Bytes that all ``size`` devices of a group send together, by ring: an exact count.

    Every byte of the operand passes size - 1 of the ring's links, twice for all_reduce; of an
    all_to_all's n bytes on each of the devices all but its own share leave it.
    """
    return _TURNS[op] * (size - 1) * n
