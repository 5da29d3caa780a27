"""Pipeline schedules: in which order each stage works, and when its messages pass.

A stage's order of work is fixed by the schedule. All stages are then played against each other with
unit times (forward 1, backward 2), which gives every message a moment: the end of the work that
made it. Each stage issues its messages by their moments, those of one moment as a batch. So all
messages of a job lie in one order that every stage's program keeps: taken in that order each of
them finds both ends ready, and no send needs a buffer.

Orders: GPipe (Huang et al., NeurIPS 2019): all forward, then all backward. 1F1B and its interleaved
form: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Message", "ScheduleError", "Work", "order", "play"]


class ScheduleError(ValueError):
    """A schedule cannot be carried out; says which stage waits for what."""


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """Forward or backward of one microbatch through one piece of the model."""

    backward: bool
    microbatch: int
    piece: int
    """Of the whole model; stage ``piece % stages``."""


@dataclass(frozen=True, slots=True)
class Message:
    """What ``made`` leaves for the next piece, or the one before."""

    made: Work
    source: int
    target: int
    """Stages."""


def order(schedule: str, stages: int, microbatches: int, pieces: int) -> list[list[Work]]:
    """The work of each stage, in order.

    Args:
        schedule: ``1f1b`` or ``gpipe``.
        stages: how many.
        microbatches: of a step.
        pieces: of a stage; above 1 for interleaved 1F1B.

    Raises:
        ScheduleError: the schedule is another, or the numbers do not fit.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise ScheduleError(f"schedule: expected 1f1b or gpipe, found {schedule!r}")
    if min(stages, microbatches, pieces) < 1:
        raise ScheduleError("stages, microbatches and pieces: expected 1 or more of each")
    if pieces > 1 and (schedule == "gpipe" or microbatches % stages):
        raise ScheduleError(
            f"interleaved: expected 1f1b and a multiple of {stages} microbatches, found {schedule} "
            f"and {microbatches}"
        )
    total = microbatches * pieces

    def works(stage: int, backward: bool) -> list[Work]:
        out = []
        for k in range(total):
            turn, rest = divmod(k, stages * pieces)
            chunk, first = divmod(rest, stages)
            if pieces == 1:
                chunk, micro = 0, k
            else:
                micro = turn * stages + first
            if backward:
                chunk = pieces - 1 - chunk
            out.append(Work(backward, micro, chunk * stages + stage))
        return out

    out = []
    for stage in range(stages):
        forward, backward = works(stage, backward=False), works(stage, backward=True)
        if schedule == "gpipe":
            out.append(forward + backward[::-1])
            continue
        if pieces == 1:
            warm = min(stages - 1 - stage, total)
        else:
            warm = min((stages - 1 - stage) * 2 + (pieces - 1) * stages, total)
        mine = forward[:warm]
        for k in range(total - warm):
            mine += [forward[warm + k], backward[k]]
        out.append(mine + backward[total - warm :])
    return out


def play(
    orders: list[list[Work]], pieces_in_all: int
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, Message]]]:
    """When everything happens.

    Returns:
        Start and end of each stage's works, in their order; and the messages with their moments,
        in one order of all: by moment, then by what made them.

    Raises:
        ScheduleError: the stages wait for each other.
    """
    stages = len(orders)
    ended: dict[Work, int] = {}
    at = [0] * stages
    free = [0] * stages
    times: list[list[tuple[int, int]]] = [[] for _ in orders]
    messages: list[tuple[int, Message]] = []
    moved = True
    while moved:
        moved = False
        for stage, works in enumerate(orders):
            while at[stage] < len(works):
                work = works[at[stage]]
                before = _before(work, pieces_in_all)
                if before is not None and before not in ended:
                    break
                start = max(free[stage], 0 if before is None else ended[before])
                end = start + (2 if work.backward else 1)
                times[stage].append((start, end))
                ended[work] = free[stage] = end
                at[stage] += 1
                moved = True
                after = work.piece + (-1 if work.backward else 1)
                if stages > 1 and 0 <= after < pieces_in_all:
                    messages.append((end, Message(work, stage, after % stages)))
    for stage, works in enumerate(orders):
        if at[stage] < len(works):
            raise ScheduleError(
                f"stage {stage} waits for ever before {works[at[stage]]}, for "
                f"{_before(works[at[stage]], pieces_in_all)}"
            )
    return times, sorted(messages, key=lambda m: (m[0], m[1].made))


def _before(work: Work, pieces_in_all: int) -> Work | None:
    """What must have ended first, on whichever stage."""
    if not work.backward:
        return Work(False, work.microbatch, work.piece - 1) if work.piece else None
    if work.piece == pieces_in_all - 1:
        return Work(False, work.microbatch, work.piece)
    return Work(True, work.microbatch, work.piece + 1)
