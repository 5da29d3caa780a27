"""The slow, obvious explorer: every interleaving of small steps, one after the other.

A step is one operation issued, started or completed by the rules of :mod:`naive`, one message taken
by a receive, or one send that takes room in a pool. Nothing waits until nothing else moves: a
receive may take what has come so far at any time, and a send may take room at any time. States
that were seen before are not entered again; that is all the cleverness there is.

For programs of one host thread a rank without device queues, and of a dozen operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from naive import Choices, Event, Key, _Program, _room_for

from dl2gpu.trace.schema import ANY, MODE, OP, SEND_MODE, Trace

State = tuple[frozenset[tuple[Key, str]], frozenset[tuple[Key, Key]], frozenset[Any]]
"""Facts (event, what), matches (receive, send), and the sends that took room; among these, of waits
for any or some, (wait, request) of what they have returned."""

MOST: Final = 400_000
"""States after which the program was too large."""


@dataclass(frozen=True)
class Pool:
    """A buffer that channels share: of each "sender", each "receiver", or the "job"."""

    room: int
    whose: str = "sender"


class Explorer(_Program):
    """One job, and one state of it at a time."""

    def __init__(self, trace: Trace, choices: Choices, pool: Pool | None, job: int = 0) -> None:
        self.pool = pool
        self.matches: dict[Key, Key] = {}
        self.granted: set[Any] = set()
        super().__init__(trace, choices, job)

    # -- messages: those to a mailbox are matched by steps, all others as in :mod:`naive`

    def _match_point_to_point(self) -> None:
        self.open_to = {
            (e["comm"], key[0])
            for key, e in self.events.items()
            if e["op"] in (OP["recv"], OP["probe"])
            and (e["peer"] == ANY or (e["tag"] == ANY and self.tags_matter))
        }
        closed = {
            key: e
            for key, e in self.events.items()
            if e["op"] not in (OP["send"], OP["recv"], OP["probe"]) or not self.boxed(key)
        }
        everything, self.events = self.events, closed
        super()._match_point_to_point()
        self.events = everything
        self.boxed_sends = [
            k for k, e in everything.items() if e["op"] == OP["send"] and self.boxed(k)
        ]
        for key in self.boxed_sends:
            self.queue_of[key] = [
                k for k in self.boxed_sends
                if k[0] == key[0] and everything[k]["peer"] == everything[key]["peer"]
                and everything[k]["comm"] == everything[key]["comm"]
                and self._tag(k) == self._tag(key)
            ]  # fmt: skip

    def boxed(self, key: Key) -> bool:
        e = self.events[key]
        to = e["peer"] if e["op"] == OP["send"] else key[0]
        return (e["comm"], to) in self.open_to

    def _tag(self, key: Key) -> int:
        return (self.events[key]["tag"] or 0) if self.tags_matter else 0

    def _fits(self, receive: Key, send: Key) -> bool:
        r, s = self.events[receive], self.events[send]
        wanted = r["tag"] if self.tags_matter else 0
        return (
            s["comm"] == r["comm"]
            and s["peer"] == receive[0]
            and r["peer"] in (ANY, send[0])
            and (wanted == ANY or (wanted or 0) == self._tag(send))
        )

    def _satisfied(self, key: Key, ready: Callable[[Key], bool]) -> bool:
        e = self.events[key]
        if not self.facts[key].completed and e["op"] in (OP["send"], OP["recv"], OP["probe"]):
            if e["op"] == OP["send"] and key in self.granted:
                return True
            if self.boxed(key):
                if e["op"] == OP["probe"]:
                    return any(True for _ in self.messages(key))
                if e["op"] == OP["recv"]:
                    return key in self.matches
                return (
                    self._buffered(e) or self._fits_channel(key, e, ready)
                    or key in self.matches.values()
                )  # fmt: skip
        return super()._satisfied(key, ready)

    def _fits_channel(self, key: Key, event: Event, ready: Callable[[Key], bool]) -> bool:
        if not self.boxed(key):
            return super()._fits_channel(key, event, ready)
        taken = set(self.matches.values())
        self.receive_for |= {k: k if k in taken else None for k in self.boxed_sends}
        return super()._fits_channel(key, event, ready)

    def _sizes_fit(self, send: Key, receive: Key) -> bool:
        return send == receive or super()._sizes_fit(send, receive)

    def messages(self, receive: Key) -> Iterator[Key]:
        """What this receive or probe could take now: of each sender the first that fits.

        Not what an earlier receive, that waits as well, could take.
        """
        taken = set(self.matches.values())
        seen = set()
        for send in self.boxed_sends:
            if send in taken or not self.facts[send].started or not self._fits(receive, send):
                continue
            if send[0] in seen:
                continue
            seen.add(send[0])
            if not any(
                other < receive
                and other[0] == receive[0]
                and self.events[other]["op"] == OP["recv"]
                and self.facts[other].started
                and other not in self.matches
                and self._fits(other, send)
                for other in self.events
            ):
                yield send

    # -- pools

    def _of(self, send: Key) -> Any:
        assert self.pool is not None
        return {"sender": send[0], "receiver": self.events[send]["peer"], "job": 0}[self.pool.whose]

    def _received(self, send: Key) -> bool:
        if self.boxed(send):
            return send in self.matches.values()
        receive = self.receive_for[send]
        return (
            receive is not None and self._sizes_fit(send, receive) and self.facts[receive].started
        )

    def room_for(self, send: Key) -> bool:
        assert self.pool is not None
        e = self.events[send]
        if e["op"] != OP["send"] or e["send_mode"] in (
            SEND_MODE["synchronous"], SEND_MODE["buffered"],
        ):  # fmt: skip
            return False
        if not self.facts[send].started or self._satisfied(send, self._has_started):
            return False
        for other in self.queue_of[send]:
            if other == send:
                break
            if self.facts[other].started and not self._satisfied(other, self._has_started):
                return False  # messages of a channel do not overtake
        held = [k for k in self.granted if not self._received(k) and self._of(k) == self._of(send)]
        used = sum(_room_for(self.events[k]) for k in held)
        return used + _room_for(e) <= self.pool.room

    # -- waits for any or some: what they return is a step

    def _open(self, key: Key) -> bool:
        e = self.events[key]
        return self._gives_back(e) and self._chooses(e) and e.get("returned") is None

    def _returned(self, key: Key) -> bool:
        return any(isinstance(g[0], tuple) and g[0] == key for g in self.granted)

    def _active(self, key: Key) -> frozenset[Key]:
        given = {
            g[1] for g in self.granted
            if isinstance(g[0], tuple) and g[0][:2] == key[:2] and g[0] < key
        }  # fmt: skip
        return super()._active(key) - given

    def _wait_satisfied(self, key: Key, event: Event) -> bool:
        if self._open(key):
            return self._returned(key) or not self._active(key)
        return super()._wait_satisfied(key, event)

    def returns(self, key: Key) -> list[frozenset[Key]]:
        """What an open wait that stands may return now."""
        fact = self.facts[key]
        if not (self._open(key) and fact.issued) or fact.completed or self._returned(key):
            return []
        done = sorted(t for t in self._active(key) if self.facts[t].completed)
        sizes = [1] if self.events[key]["mode"] == MODE["any"] else range(1, len(done) + 1)
        return [frozenset(part) for n in sizes for part in combinations(done, n)]

    # -- states and steps

    def state(self) -> State:
        facts = frozenset(
            (key, what)
            for key, fact in self.facts.items()
            for what in ("issued", "started", "completed")
            if getattr(fact, what)
        )
        return facts, frozenset(self.matches.items()), frozenset(self.granted)

    def enter(self, state: State) -> None:
        facts, matches, granted = state
        for fact in self.facts.values():
            fact.issued = fact.started = fact.completed = False
        for key, what in facts:
            setattr(self.facts[key], what, True)
        self.matches, self.granted = dict(matches), set(granted)

    def successors(self, state: State) -> list[State]:
        """Every state one small step away."""
        self.enter(state)
        out = []
        for key in self.events:
            for rule in (self._issue_one, self._start_one, self._complete_one):
                self.enter(state)
                rule(key)
                out.append(self.state())
        self.enter(state)
        takes = [
            (receive, send)
            for receive, e in self.events.items()
            if e["op"] == OP["recv"] and self.boxed(receive) and receive not in self.matches
            and self.facts[receive].started
            for send in self.messages(receive)
        ]  # fmt: skip
        out += [(state[0], state[1] | {pair}, state[2]) for pair in takes]
        for key, e in self.events.items():
            if e["op"] == OP["wait"]:
                out += [
                    (state[0], state[1], state[2] | {(key, t) for t in part})
                    for part in self.returns(key)
                ]
        if self.pool is not None:
            some = [send for send in self.events if self.room_for(send)]
            out += [(state[0], state[1], state[2] | {send}) for send in some]
        return [s for s in dict.fromkeys(out) if s != state]

    def _issue_one(self, key: Key) -> None:
        lane = self.lanes[key[:2]]
        if all(self._passed(k) for k in lane[: lane.index(key)] if k not in self.unit[key]):
            self.facts[key].issued = True
            self._start(self.unit[key])  # rule 2: a host operation starts when issued

    def _start_one(self, key: Key) -> None:
        self._start(self.unit[key])

    def _complete_one(self, key: Key) -> None:
        self._complete(self.unit[key])


def ends(trace: Trace, choices: Choices, pool: Pool | None = None, job: int = 0) -> set[State]:
    """The states in which nothing moves any more, over every interleaving.

    Raises:
        OverflowError: the program is too large for this.
    """
    explorer = Explorer(trace, choices, pool, job)
    first = explorer.state()
    seen, todo, out = {first}, [first], set()
    while todo:
        state = todo.pop()
        after = explorer.successors(state)
        if not after:
            out.add(state)
        for s in after:
            if s not in seen:
                seen.add(s)
                todo.append(s)
        if len(seen) > MOST:
            raise OverflowError(f"more than {MOST} states")
    return out


def completed(state: State) -> frozenset[Key]:
    """The events that completed in a state."""
    return frozenset(key for key, what in state[0] if what == "completed")


def confirms(
    trace: Trace, choices: Choices, pool: Pool | None, made: list[tuple[str, Any]]
) -> str | None:
    """Plays a schedule step by step: None if each step follows from those before it, and nothing
    moves at its end; else what is wrong.

    ``made``: ("issued" | "started" | "completed", event), ("take", (receive, send)), or
    ("room", send).
    """  # fmt: skip
    explorer = Explorer(trace, choices, pool)
    for number, (what, of) in enumerate(made):
        if what == "take":
            if of[1] not in set(explorer.messages(of[0])):
                return f"step {number}: {of[0]} cannot take {of[1]}"
            explorer.matches[of[0]] = of[1]
            continue
        if what == "room":
            if not explorer.room_for(of):
                return f"step {number}: no room for {of}"
            explorer.granted.add(of)
            continue
        rule = {
            "issued": explorer._issue_one, "started": explorer._start_one,
            "completed": explorer._complete_one,
        }[what]  # fmt: skip
        rule(of)
        if not getattr(explorer.facts[of], what):
            return f"step {number}: {of} cannot be {what}"
    if explorer.successors(explorer.state()):
        return "something still moves at the end"
    return None
