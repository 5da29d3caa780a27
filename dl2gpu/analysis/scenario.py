"""Scenarios: one reading of what a trace leaves open, as people and as kernels see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from dl2gpu.analysis import choice_kernel as ck
from dl2gpu.engine.arrays import Array

__all__ = ["Scenario", "table_of"]


@dataclass(frozen=True)
class Scenario:
    """One reading of what the trace leaves open (DESIGN.md section 6).

    Attributes:
        eager_bytes: standard sends up to this size complete without a receiver; 0 is rendezvous.
        one_stream: all device queues of a rank are one.
        flip_lanes: ranks with this bit set in their number fill their queues with the host threads
            in reverse order; any two ranks differ in some bit. -1: none.
        atomic_batch: an incomplete batch holds back the partners of its matched members.
        early_release: rooted collectives let go those who need nobody (rule 4).
        use_states: recorded completions are facts (rule 7).
        use_records: so is what a record of issued operations shows to be passed by its host.
        wild_high: wildcards take the highest sender that fits, not the lowest.
        queues: the device queues of a rank are so many (0: each stream has its own), which its
            streams share in turn.
        buffer_messages, buffer_bytes: each channel buffers so many standard sends, of so many bytes
            together (0: no limit of this kind; both 0: nothing is buffered). An empty message takes
            one byte.
        pool_bytes: room for standard sends that channels share; 0: none. A pool makes choices.
        pool: whose it is: of the "sender", the "receiver" or the "job".
        chosen: wildcards are matched one by one, by the choices below.
        given: the first choices, by number among those there are.
        policy: of the others: "first", "last", or "seeded" by ``seed``.
    """

    eager_bytes: int = 0
    one_stream: bool = False
    flip_lanes: int = -1
    atomic_batch: bool = False
    early_release: bool = False
    use_states: bool = True
    use_records: bool = False
    wild_high: bool = False
    queues: int = 0
    buffer_messages: int = 0
    buffer_bytes: int = 0
    pool_bytes: int = 0
    pool: str = "sender"
    chosen: bool = False
    given: tuple[int, ...] = ()
    policy: str = "first"
    seed: int = 0

    INFINITE: ClassVar[int] = (1 << 63) - 1

    @property
    def reading(self) -> tuple[bool, int, int]:
        """What lays out lanes and queues: the same for all scenarios of one launch."""
        return self.one_stream, self.flip_lanes, self.queues


POLICY: Final = {"first": ck.CHOOSE_FIRST, "last": ck.CHOOSE_LAST, "seeded": ck.CHOOSE_SEEDED}


_NO_LIMIT: Final = 1 << 62
"""Bytes of a buffer from which it holds anything: below, the bytes of two fit a word."""


def table_of(scenarios: Sequence[Scenario]) -> tuple[Array, int]:
    """(int64[scenarios * width], width): the rows of integers that the kernels take.

    Raises:
        ValueError: a scenario makes choices and takes recorded completions as facts.
    """
    width = ck.PARAMETERS + max((len(s.given) for s in scenarios), default=0)
    table = np.zeros((len(scenarios), width), np.int64)
    for row, s in zip(table, scenarios, strict=True):
        facts = int(s.use_states) + 2 * int(s.use_records)
        if facts and (s.chosen or s.pool_bytes):
            raise ValueError(
                "scenario: expected use_states and use_records false where matches are chosen or a "
                "pool is shared, found true: what is recorded was chosen already"
            )
        messages, size, pool = s.buffer_messages, s.buffer_bytes, s.pool_bytes
        # without a limit there is nothing to add up: messages may be of unknown size
        if pool >= _NO_LIMIT:
            messages, size, pool = s.INFINITE, 0, 0
        elif size >= _NO_LIMIT:
            messages, size = messages or s.INFINITE, 0
        wild = ck.WILD_CHOSEN if s.chosen else ck.WILD_HIGH if s.wild_high else ck.WILD_LOW
        row[: ck.PARAMETERS] = (
            s.eager_bytes, s.early_release, s.atomic_batch, wild, messages, size, pool,
            POLICY[s.policy], s.seed, facts, len(s.given),
        )  # fmt: skip
        row[ck.PARAMETERS : ck.PARAMETERS + len(s.given)] = s.given
    return table.ravel(), width
