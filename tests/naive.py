"""The slow, obvious reference: DESIGN.md section 4, read literally.

Repeated passes over all events of one job apply the rules until a pass changes nothing. Nothing is
shared with the product but the constants of the event table. Where the design leaves a point open,
the choice is stated beside the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dl2gpu.trace.schema import ANY, DTYPE_BYTES, FLAG, MODE, OP, OP_CLASS, SEND_MODE, STATE, Trace

Key = tuple[int, int, int]
"""(rank, lane, seq): one event of a job."""

Event = dict[str, Any]
"""A row of the event table."""

INFINITE: Final = math.inf

BROADCAST_LIKE: Final = {OP["broadcast"], OP["scatter"], OP["scatter_v"]}
REDUCE_LIKE: Final = {OP["reduce"], OP["gather"], OP["gather_v"]}
EQUAL_SIZES: Final = {
    OP[name]
    for name in (
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
        *("gather", "scan", "exscan"),
    )
}
"""Operations whose members pass in equally much."""
DTYPE_SIZES: Final = tuple(DTYPE_BYTES.values())


@dataclass(frozen=True)
class Choices:
    """What the rules leave to the library or the hardware: one scenario."""

    eager_bytes: float = 0
    """Standard sends of up to so many bytes are buffered; 0: none, all are rendezvous."""
    buffer_messages: float = 0
    """Each channel buffers so many standard sends; 0: that many is no limit."""
    buffer_bytes: float = 0
    """Each channel buffers standard sends of so many bytes together; both 0: none."""
    streams: str = "independent"
    """``"one"``: all streams of a rank run on one hardware queue."""
    atomic_batch: bool = False
    """An incomplete batch holds back the partners of its matched members."""
    early_release: bool = False
    """The side of a rooted collective that need not wait leaves early (buffered reading)."""
    use_states: bool = True
    """What the trace says is completed is completed (post mortem)."""


@dataclass
class Fact:
    """How far one event got; ``place`` is ``"host"`` or the code of its stream."""

    place: str | int
    issued: bool = False
    started: bool = False
    completed: bool = False


def progress(trace: Trace, choices: Choices = Choices(), job: int = 0) -> dict[Key, Fact]:
    """The least fixpoint of the rules: for each event of ``job``, how far it gets.

    Raises:
        ValueError: a wildcard receive whose match is not recorded; its outcome is a choice of its
            own, which this reference does not make.
    """
    return _Program(trace, choices, job).run()


def stuck_places(facts: dict[Key, Fact]) -> set[tuple[int, str | int]]:
    """(rank, ``"host"`` or stream) with unfinished work. What was not issued is its host's work."""
    return {
        (key[0], fact.place if fact.issued else "host")
        for key, fact in facts.items()
        if not fact.completed
    }


def recorded_order(key: Key) -> tuple[int, int, int]:
    """Order of a rank's events over all its lanes: seq, then lane.

    Within a lane that is the program's order. Between lanes it is what the recorder saw, and
    decides how lanes fill a stream, a channel, and the numbers of a communicator.
    """
    rank, lane, seq = key
    return rank, seq, lane


def is_collective(event: Event) -> bool:
    first, _ = OP_CLASS["synchronising"]
    return bool(event["op"] >= first)


def size_in_bytes(event: Event, received: bool = False) -> int | None:
    """Recorded bytes, else elements times the size of the type; None if that is not known.

    ``received`` asks for the receiving half of a sendrecv, whose ``count_out`` may differ.
    """
    if event["flags"] & FLAG["sizes_incomparable"]:
        return None
    count, dtype, size = event["count"], event["dtype"], event["bytes"]
    element = None if dtype is None or dtype >= len(DTYPE_SIZES) else DTYPE_SIZES[dtype]
    if size is None and count is not None and element is not None:
        size = count * element
    if received and event["count_out"] is not None:
        if element is None and size is not None and count and size % count == 0:
            element = size // count
        size = None if element is None else event["count_out"] * element
    return None if size is None else int(size)


def _room_for(event: Event) -> float:
    """What a message takes in a buffer; of unknown size: more than any buffer has."""
    size = size_in_bytes(event)
    return INFINITE if size is None else max(size, 1)


class _Program:
    """One job: its events, who matches whom, and the facts so far."""

    def __init__(self, trace: Trace, choices: Choices, job: int) -> None:
        self.choices = choices
        rows = [row for row in trace.events.to_dicts() if row["job"] == job]
        by_key = {(row["rank"], row["lane"], row["seq"]): row for row in rows}
        self.events: dict[Key, Event] = {
            key: by_key[key] for key in sorted(by_key, key=recorded_order)
        }
        self.facts = {
            key: Fact("host" if event["stream"] is None else event["stream"])
            for key, event in self.events.items()
        }
        about = next(row for row in trace.jobs.to_dicts() if row["job"] == job)
        self.backend = about["backend"]
        self.tags_matter = self.backend in ("gloo", "mpi")
        self.nccl_like = not self.tags_matter
        seen = {rank for rank, _, _ in self.events}
        seen |= {row["rank"] for row in trace.ranks.to_dicts() if row["job"] == job}
        world = about["world_size"]
        self.world = set(range(world)) if world is not None else seen
        self.members = {
            # A communicator with unknown members: those that use it.
            row["comm"]: set(row["ranks"])
            or {key[0] for key, event in self.events.items() if event["comm"] == row["comm"]}
            for row in trace.comms.to_dicts()
        }
        self.known_passed: set[Key] = set()
        self._lay_out_lanes_and_streams()
        self._match_collectives()
        self._match_point_to_point()

    # ----------------------------------------------------------------------------------------------
    # Layout: what comes before what

    def _lay_out_lanes_and_streams(self) -> None:
        lanes: dict[tuple[int, int], list[Key]] = {}
        streams: dict[tuple[int, Any], list[Key]] = {}
        for key, event in self.events.items():
            lanes.setdefault(key[:2], []).append(key)
            if event["stream"] is not None:
                # Lanes that share a stream fill it in the recorded order.
                stream = "the one" if self.choices.streams == "one" else event["stream"]
                streams.setdefault((key[0], stream), []).append(key)
        self.lanes = lanes

        # A batch: neighbours in a lane with the same group. An event without one is its own unit.
        self.unit: dict[Key, tuple[Key, ...]] = {}
        for lane in lanes.values():
            runs: list[list[Key]] = []
            for key in lane:
                group = self.events[key]["group"]
                same = runs and group is not None and group == self.events[runs[-1][-1]]["group"]
                if same:
                    runs[-1].append(key)
                else:
                    runs.append([key])
            for run in runs:
                for key in run:
                    self.unit[key] = tuple(run)

        self.ahead_on_stream: dict[Key, list[Key]] = {key: [] for key in self.events}
        for queue in streams.values():
            for place, key in enumerate(queue):
                self.ahead_on_stream[key] = [k for k in queue[:place] if k not in self.unit[key]]

    # ----------------------------------------------------------------------------------------------
    # Matching

    def _match_collectives(self) -> None:
        """Members of a collective: same communicator, same ordinal (rule 3)."""
        self.collective_of: dict[Key, tuple[Any, ...]] = {}
        self.collective: dict[tuple[Any, ...], dict[int, Key]] = {}
        counted: dict[tuple[int, Any], int] = {}
        repeated: dict[tuple[Any, ...], int] = {}
        for key, event in self.events.items():
            if not is_collective(event):
                continue
            if self._dropped(event):
                continue  # the library makes no call: it has no number, and is absent for others
            # finalize runs over the whole job, whatever communicator it names.
            comm = "world" if event["op"] == OP["finalize"] else event["comm"]
            counted[key[0], comm] = counted.get((key[0], comm), 0) + 1
            ordinal = event["ordinal"]
            if ordinal is None:
                ordinal = counted[key[0], comm]
            # Members of a batch may bear one number: then the k-th of them matches the k-th.
            same = (key[0], comm, ordinal)
            repeated[same] = repeated.get(same, 0) + 1
            slot = (comm, ordinal, repeated[same])
            self.collective_of[key] = slot
            self.collective.setdefault(slot, {})[key[0]] = key
        self.compatible = {
            slot: self._compatible([self.events[key] for key in present.values()])
            for slot, present in self.collective.items()
        }

    def _dropped(self, event: Event) -> bool:
        """NCCL ignores a collective over no elements (TRACE_FORMAT.md, zero-count collective)."""
        return self.nccl_like and event["count"] == 0 and not event["count_out"]

    def _match_point_to_point(self) -> None:
        """The k-th send of a channel goes with its k-th receive (rule 5)."""
        self.send_for: dict[Key, Key | None] = {}  # receive, or probe -> its send
        self.receive_for: dict[Key, Key | None] = {}  # send -> its receive
        sends: dict[tuple[Any, ...], list[Key]] = {}
        receives: dict[tuple[Any, ...], list[Key]] = {}
        probes: list[tuple[Key, tuple[Any, ...], int]] = []
        for key, event in self.events.items():
            if event["op"] in (OP["send"], OP["sendrecv"]):
                channel = self._channel(event, key[0], event["peer"], event["tag"])
                sends.setdefault(channel, []).append(key)
            if event["op"] in (OP["recv"], OP["sendrecv"], OP["probe"]):
                exchange = event["op"] == OP["sendrecv"]
                source, tag = event["peer"], event["tag"]
                if exchange and event["recv_peer"] is not None:
                    source = event["recv_peer"]  # null: the peer that it sends to
                if exchange and event["recv_tag"] is not None:
                    tag = event["recv_tag"]
                if event["matched_peer"] is not None:
                    source = event["matched_peer"]
                if event["matched_tag"] is not None:
                    tag = event["matched_tag"]
                if source == ANY or (tag == ANY and self.tags_matter):
                    raise ValueError(f"event {key}: a wildcard whose match is not recorded")
                channel = self._channel(event, source, key[0], tag)
                if event["op"] == OP["probe"]:
                    # It sees the message that the next receive of the channel will take.
                    probes.append((key, channel, len(receives.get(channel, []))))
                else:
                    receives.setdefault(channel, []).append(key)
        self.queue_of: dict[Key, list[Key]] = {}  # send -> all sends of its channel, in order
        for channel, queue in sends.items():
            others = receives.get(channel, [])
            for k, key in enumerate(queue):
                self.queue_of[key] = queue
                self.receive_for[key] = others[k] if k < len(others) else None
        for channel, queue in receives.items():
            others = sends.get(channel, [])
            for k, key in enumerate(queue):
                self.send_for[key] = others[k] if k < len(others) else None
        for key, channel, k in probes:
            others = sends.get(channel, [])
            self.send_for[key] = others[k] if k < len(others) else None

    def _channel(self, event: Event, source: Any, target: Any, tag: Any) -> tuple[Any, ...]:
        if source is None or target is None:
            # An unknown peer matches nothing: a channel of its own.
            return ("unknown", event["rank"], event["lane"], event["seq"])
        if self.tags_matter:
            return (event["comm"], source, target, tag or 0)
        return (event["comm"], source, target)

    # ----------------------------------------------------------------------------------------------
    # The fixpoint

    def run(self) -> dict[Key, Fact]:
        if self.choices.use_states:
            self._apply_states()
        while self._one_pass():
            pass
        return self.facts

    def _one_pass(self) -> bool:
        before = sum(f.issued + f.started + f.completed for f in self.facts.values())
        for lane in self.lanes.values():
            self._issue(lane)
        for key in self.events:
            self._start(self.unit[key])
            self._complete(self.unit[key])
        return before < sum(f.issued + f.started + f.completed for f in self.facts.values())

    def _apply_states(self) -> None:
        """Rule 7: what was recorded as completed is so.

        Its host had then issued and passed everything earlier in the lane (rule 1 backwards), even
        what is not recorded as completed. A wait that was passed has completed; what state another
        operation is in remains for the rules to say.
        """
        for key, event in self.events.items():
            if event["state"] == STATE["completed"]:
                self._completed(key)
                for earlier in self.lanes[key[:2]]:
                    if earlier < key:
                        self.facts[earlier].issued = True
                        self.known_passed.add(earlier)
                        passed = self.events[earlier]
                        if passed["op"] == OP["wait"] and passed["stream"] is None:
                            self._completed(earlier)

    def _completed(self, key: Key) -> None:
        fact = self.facts[key]
        fact.issued = fact.started = fact.completed = True

    def _passed(self, key: Key) -> bool:
        """Rule 1: does the host go on behind this event?"""
        event, fact = self.events[key], self.facts[key]
        if key in self.known_passed:
            return True
        if event["stream"] is None and event["blocking"]:
            return fact.completed
        return fact.issued

    def _issue(self, lane: list[Key]) -> None:
        """Rule 1: issued when every earlier event of the lane has been passed.

        The host issues a batch without waiting in between, and waits behind its last member.
        """
        for place, key in enumerate(lane):
            unit = self.unit[key]
            if all(self._passed(earlier) for earlier in lane[:place] if earlier not in unit):
                self.facts[key].issued = True

    def _start(self, unit: tuple[Key, ...]) -> None:
        """Rule 2: when issued and at the head of its stream; a batch as a unit.

        A member that is recorded as completed needs nothing more, even behind unfinished work.
        """
        if all(
            self.facts[key].completed
            or (
                self.facts[key].issued
                and all(self.facts[ahead].completed for ahead in self.ahead_on_stream[key])
            )
            for key in unit
        ):
            for key in unit:
                self.facts[key].started = True

    def _complete(self, unit: tuple[Key, ...]) -> None:
        """Rules 3 to 6 for one event; a batch completes when all its members can."""
        if all(self.facts[key].started and self._satisfied(key, self._offered) for key in unit):
            for key in unit:
                self.facts[key].completed = True

    def _has_started(self, key: Key) -> bool:
        return self.facts[key].started

    def _offered(self, key: Key) -> bool:
        """Has this event started, as its partners see it?

        Rule 2 leaves open whether an incomplete batch holds back the partners of its matched
        members. If it does, a batch shows itself only when each of its members has a partner that
        has started (by itself; whether that partner's batch is complete is not asked again).
        """
        unit = self.unit[key]
        if self.facts[key].completed or len(unit) == 1 or not self.choices.atomic_batch:
            return self.facts[key].started
        return all(
            self.facts[member].started and self._satisfied(member, self._has_started)
            for member in unit
        )

    # ----------------------------------------------------------------------------------------------
    # What an event that has started still needs

    def _satisfied(self, key: Key, ready: Callable[[Key], bool]) -> bool:
        """Can this event complete, given which of its partners are ``ready``?"""
        event = self.events[key]
        if self.facts[key].completed:
            return True
        if event["op"] == OP["wait"]:
            return self._wait_satisfied(key, event)
        if event["op"] == OP["probe"]:
            send = self.send_for[key]
            return send is not None and ready(send)
        if event["op"] == OP["send"]:
            return self._send_satisfied(key, event, ready)
        if event["op"] == OP["recv"]:
            return self._receive_satisfied(key, ready)
        if event["op"] == OP["sendrecv"]:
            return self._send_satisfied(key, event, ready) and self._receive_satisfied(key, ready)
        return self._collective_satisfied(key, event, ready)

    def _wait_satisfied(self, key: Key, event: Event) -> bool:
        """Rule 6. A host that goes on behind its wait (it only asks) waits for nothing."""
        if event["stream"] is None and not event["blocking"]:
            return True
        if self._chooses(event):
            # Requests that nobody has are left out; with none left there is nothing to wait for.
            active = self._active(key)
            done = sum(self.facts[target].completed for target in active)
            return done >= self._needs(key, active)
        return all(self.facts[target].completed for target in self._waits_for(key, event))

    @staticmethod
    def _chooses(event: Event) -> bool:
        return bool(event["requests"]) and event["mode"] in (MODE["any"], MODE["some"])

    def _gives_back(self, event: Event) -> bool:
        """A wait of an MPI host that stays: what it returns, it returns for good."""
        return bool(
            self.backend == "mpi"
            and event["op"] == OP["wait"]
            and event["stream"] is None
            and event["blocking"]
        )

    def _active(self, key: Key) -> frozenset[Key]:
        """Requests of a wait for any or some that count: returned, or not given back before."""
        event = self.events[key]
        own = set(self._waits_for(key, event))
        if event.get("returned") is not None:
            return frozenset(t for t in own if self.events[t]["request"] in event["returned"])
        if not self._gives_back(event):
            return frozenset(own)
        for earlier in self.lanes[key[:2]]:
            other = self.events[earlier]
            if not (earlier < key and self._gives_back(other)):
                continue
            if not self._chooses(other):
                own -= set(self._waits_for(earlier, other))
            elif other.get("returned") is not None:
                own -= self._active(earlier)
        return frozenset(own)

    def _needs(self, key: Key, active: frozenset[Key]) -> int:
        """How many must be complete: one more than earlier waits took of them for sure."""
        event = self.events[key]
        if event.get("returned") is not None:
            return len(active)
        if not self._gives_back(event):
            return min(1, len(active))
        taken = 0
        for earlier in self.lanes[key[:2]]:
            other = self.events[earlier]
            open_ = self._chooses(other) and other.get("returned") is None
            if earlier < key and self._gives_back(other) and open_:
                part = self._active(earlier)
                taken += bool(part) and part <= active
        return min(1 + taken, len(active))

    def _waits_for(self, key: Key, event: Event) -> Iterator[Key]:
        earlier = [other for other in self.lanes[key[:2]] if other < key]
        if not event["requests"]:  # "all": whatever was handed over from this lane
            for other in earlier:
                if self.events[other]["stream"] is not None or not self.events[other]["blocking"]:
                    yield other
            return
        for request in event["requests"]:
            here = [other for other in earlier if self.events[other]["request"] == request]
            elsewhere = [
                other
                for other, target in self.events.items()
                if target["request"] == request and other[0] == key[0] and other[1] != key[1]
            ]
            if here or elsewhere:
                yield (here or elsewhere)[-1]

    def _buffered(self, event: Event) -> bool:
        """Rule 5: does this send complete without its receive?"""
        mode = event["send_mode"] or SEND_MODE["standard"]
        if mode == SEND_MODE["synchronous"]:
            return False
        limit = self.choices.eager_bytes
        if mode == SEND_MODE["buffered"] or limit == INFINITE:
            return True
        size = size_in_bytes(event)
        return limit > 0 and size is not None and size <= limit

    def _fits_channel(self, key: Key, event: Event, ready: Callable[[Key], bool]) -> bool:
        """Rule 5: is there room in the channel's buffer for this send?

        Standard sends ahead of it count until their receives are ready, and the messages fit.
        """
        most, room = self.choices.buffer_messages, self.choices.buffer_bytes
        if not most and not room:
            return False
        if event["send_mode"] in (SEND_MODE["synchronous"], SEND_MODE["buffered"]):
            return False
        held, load = 0, 0.0
        for other in self.queue_of[key]:
            if other == key:
                break
            if self.events[other]["send_mode"] in (SEND_MODE["synchronous"], SEND_MODE["buffered"]):
                continue
            receive = self.receive_for[other]
            if receive is None or not self._sizes_fit(other, receive) or not ready(receive):
                held += 1
                load += _room_for(self.events[other])
        return (not most or held < most) and (not room or load + _room_for(event) <= room)

    def _send_satisfied(self, key: Key, event: Event, ready: Callable[[Key], bool]) -> bool:
        """Rule 5. A buffered send does not learn that its receive has the wrong size."""
        if self._buffered(event) or self._fits_channel(key, event, ready):
            return True
        receive = self.receive_for[key]
        return receive is not None and self._sizes_fit(key, receive) and ready(receive)

    def _receive_satisfied(self, key: Key, ready: Callable[[Key], bool]) -> bool:
        """Rule 5."""
        send = self.send_for[key]
        return send is not None and self._sizes_fit(send, key) and ready(send)

    def _sizes_fit(self, send: Key, receive: Key) -> bool:
        """NCCL needs equal sizes; a gloo or MPI receive may be larger than what comes.

        Bytes decide where both sides know them, else elements; an unknown size fits.
        """
        sender, receiver = self.events[send], self.events[receive]
        exchange = receiver["op"] == OP["sendrecv"]
        sent, room = size_in_bytes(sender), size_in_bytes(receiver, received=exchange)
        if sent is None or room is None:
            sent, room = sender["count"], receiver["count"]
            if exchange and receiver["count_out"] is not None:
                room = receiver["count_out"]
        if sent is None or room is None:
            return True
        return bool(sent == room if self.nccl_like else sent <= room)

    def _collective_satisfied(self, key: Key, event: Event, ready: Callable[[Key], bool]) -> bool:
        """Rules 3 and 4."""
        if self._dropped(event):
            return True
        members = self.world if event["op"] == OP["finalize"] else self.members[event["comm"]]
        if members == {key[0]}:
            return True
        present = self.collective[self.collective_of[key]]
        if not self.compatible[self.collective_of[key]]:
            return False  # an incompatible collective completes for nobody

        def has_come(rank: int) -> bool:
            return rank in present and (rank == key[0] or ready(present[rank]))

        roots = {self.events[member]["root"] for member in present.values()} - {None}
        if self.choices.early_release and roots:
            (root,) = roots
            if event["op"] in BROADCAST_LIKE:
                return key[0] == root or has_come(root)
            if event["op"] in REDUCE_LIKE and key[0] != root:
                return True
        return all(has_come(rank) for rank in members)

    def _compatible(self, events: list[Event]) -> bool:
        """Rule 3: do the signatures agree? Null is unknown, and fits everything."""

        def agree(values: list[Any]) -> bool:
            return len(set(values) - {None}) <= 1

        if not agree([e["op"] for e in events]) or not agree([e["root"] for e in events]):
            return False
        if events[0]["op"] == OP["comm_create"]:
            # With split, each colour makes a communicator of its own.
            return agree([e["new_comm"] for e in events if not e["split"]])
        # Bytes decide where all know them, else elements. Another type of the same size in all
        # blocks nobody; nor does another reduce_op.
        sized = [
            (e["count"], size_in_bytes(e))
            for e in events
            if e["op"] in EQUAL_SIZES
            and not e["flags"] & FLAG["sizes_incomparable"]
            and not (e["op"] == OP["gather"] and e["count"] == 0)
        ]
        counts, sizes = [c for c, _ in sized], [b for _, b in sized]
        return agree(sizes) and (None not in sizes or agree(counts))
