"""Ranks of the dumps of one job, from their names.

A Flight Recorder dump does not say which rank wrote it; the file name does, in whatever place its
writer, the launcher or somebody's script put the number. One reading is chosen for the whole
folder, so that ``node02_5`` and ``node03_0`` are not read by two rules. Where names allow several
readings or none, that is said and nothing is guessed: a wrong rank makes a wrong verdict.

Source: FORMATS.md section 2.2 for the names seen in the wild.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["RankNames", "ranks_from_names"]


@dataclass(frozen=True, slots=True)
class RankNames:
    """What the names say; both lists in the order of the names."""

    ranks: list[int | None]
    reason: list[str | None]
    """Why a name gives no rank. With a rank beside it: the file is a copy of another one by its
    name (``dump_3 (1)``), and their contents must tell which one counts."""


def ranks_from_names(
    names: Sequence[str],
    world: int | None = None,
    possible: Sequence[Collection[int] | None] | None = None,
) -> RankNames:
    """Ranks of the dumps of one job.

    A number after the word "rank" is taken if every name has one; else the number that varies over
    the names and is never the same twice. Of several such numbers, one that counts 0, 1, 2, ... is
    taken, then the last one.

    Args:
        names: paths of the files, "/" between parts; folders that all share do not count.
        world: number of ranks of the job, where it is known: no rank is that high.
        possible: for each file the ranks it can be (the members of the groups it lists), or None.

    Returns:
        A rank for each name, or None and the reason.
    """
    if not names:
        return RankNames([], [])
    parsed = [_parse(name) for name in _without_shared_folders(names)]
    allowed = _Allowed(world, list(possible) if possible is not None else [None] * len(names))
    if len(parsed) == 1:
        return _single(parsed[0], allowed)
    named = [p.after_rank for p in parsed]
    if all(r is not None for r in named) and allowed.all(named):
        return _explicit(names, parsed, named)
    chosen = _choose_position(parsed, allowed)
    if isinstance(chosen, str):
        return _partly(named, allowed, chosen)
    return _with_copies(names, parsed, chosen)


# --------------------------------------------------------------------------------------------------
# One name

_EXTENSION: Final = re.compile(
    r"\.(json|jsonl|ndjson|pkl|pickle|pt|bin|dat|dump|trace|txt|log|gz|zst|bz2|xz|bak|old|orig)$",
    re.IGNORECASE,
)
_COPY: Final = re.compile(r"( ?\(\d{1,3}\)|[ _.-]+copy(?:[ _-]?\d{1,3})?|~)$", re.IGNORECASE)
_AFTER_RANK: Final = re.compile(r"(?<![a-z])(local[-_. ]?)?ranks?[-_. =]{0,2}(\d+)", re.IGNORECASE)
_ADDRESS: Final = re.compile(r"\d{1,3}([-._])\d{1,3}\1\d{1,3}\1\d{1,3}")
_PLACE: Final = re.compile(
    # what a number after such a word counts is not ranks, unless nothing else varies
    r"(node|host|pod|pci|bus|gpu|cuda|device|dev|local|pid|slot|rack|step|iter|epoch|version|v|"
    r"attempt|restart|job|run|part|seq|time|date)[-_. ]?$",
    re.IGNORECASE,
)
_HIGHEST: Final = 10**6
"""Numbers from here on are times or identifiers, not ranks."""


@dataclass(frozen=True, slots=True)
class _Name:
    shape: str  # the name without extensions, with # for each number
    stem: str  # the name without extensions and signs of a copy
    copy: bool  # it has such a sign
    numbers: tuple[int, ...]
    place: tuple[bool, ...]  # for each number: it follows a word like "node"
    after_rank: int | None  # the number after the last word "rank"


def _parse(name: str) -> _Name:
    stem, copy = name, False
    while True:
        if match := _EXTENSION.search(stem):
            stem = stem[: match.start()]
        elif match := _COPY.search(stem):
            stem, copy = stem[: match.start()], True
        else:
            break
    spans = [m.span() for m in re.finditer(r"\d+", stem)]
    addresses = [m.span() for m in _ADDRESS.finditer(stem)]
    spans = [s for s in spans if not any(a <= s[0] and s[1] <= b for a, b in addresses)]
    marked = [m for m in _AFTER_RANK.finditer(stem) if not m.group(1)]
    return _Name(
        shape=re.sub(r"\d+", "#", stem),
        stem=stem,
        copy=copy,
        numbers=tuple(int(stem[a:b][:18]) for a, b in spans),
        place=tuple(_PLACE.search(stem[:a]) is not None for a, _ in spans),
        after_rank=int(marked[-1].group(2)[:18]) if marked else None,
    )


def _without_shared_folders(names: Sequence[str]) -> list[str]:
    parts = [name.split("/") for name in names]
    shared = 0
    if len(parts) > 1:
        shortest = min(len(p) for p in parts) - 1
        while shared < shortest and len({p[shared] for p in parts}) == 1:
            shared += 1
        return ["/".join(p[shared:]) for p in parts]
    base = parts[0][-1]
    if re.search(r"\d", base) or len(parts[0]) == 1 or not _AFTER_RANK.search(parts[0][-2]):
        return [base]
    return ["/".join(parts[0][-2:])]


@dataclass(frozen=True, slots=True)
class _Allowed:
    world: int | None
    possible: list[Collection[int] | None]

    def one(self, i: int, rank: int) -> bool:
        if rank >= (self.world if self.world is not None else _HIGHEST):
            return False
        known = self.possible[i]
        return not known or rank in known

    def all(self, ranks: Sequence[int | None]) -> bool:
        return all(r is not None and self.one(i, r) for i, r in enumerate(ranks))


# --------------------------------------------------------------------------------------------------
# Choosing

_ADVICE: Final = "say which with --job-pattern, as in '(?P<rank>[0-9]+)'"


def _single(name: _Name, allowed: _Allowed) -> RankNames:
    candidates = [name.after_rank] if name.after_rank is not None else []
    candidates += reversed(name.numbers)
    for rank in candidates:
        if allowed.one(0, rank):
            return RankNames([rank], [None])
    if not candidates:
        return RankNames([None], [f"the name has no number for the rank; {_ADVICE}"])
    found = ", ".join(map(str, name.numbers))
    limits = f"below {allowed.world}" if allowed.world is not None else "that can be a rank"
    if allowed.possible[0]:
        limits = "that is a member of its own groups"
    return RankNames([None], [f"expected a number {limits} in the name, found {found}; {_ADVICE}"])


def _explicit(names: Sequence[str], parsed: list[_Name], named: list[int | None]) -> RankNames:
    """Every name has a number after "rank"."""
    by_rank: dict[int | None, list[int]] = defaultdict(list)
    for i, rank in enumerate(named):
        by_rank[rank].append(i)
    clashes = [files for files in by_rank.values() if len({parsed[i].stem for i in files}) > 1]
    if any(len({parsed[i].shape for i in files}) == 1 for files in clashes):
        # node0_rank_0 and node1_rank_0: these are ranks within a node
        first = next(f for f in clashes if len({parsed[i].shape for i in f}) == 1)
        text = (
            f"{names[first[0]]} and {names[first[1]]} are both rank {named[first[0]]} by name: "
            f"ranks within a node, or several attempts? {_ADVICE}"
        )
        return RankNames([None] * len(names), [text] * len(names))
    result = _with_copies(names, parsed, named)
    for files in clashes:
        for i in files:
            others = ", ".join(names[j] for j in files if j != i)
            result.ranks[i] = None
            result.reason[i] = f"rank {named[i]} by name, as {others}: keep one of them"
    return result


def _with_copies(
    names: Sequence[str], parsed: list[_Name], ranks: Sequence[int | None]
) -> RankNames:
    """``ranks``, with a remark where several files have one name but for the sign of a copy."""
    same: dict[str, list[int]] = defaultdict(list)
    for i, p in enumerate(parsed):
        same[p.stem].append(i)
    reason: list[str | None] = [None] * len(names)
    for files in same.values():
        for i in files:
            if len(files) > 1:
                others = ", ".join(names[j] for j in files if j != i)
                reason[i] = f"by its name the same dump as {others}"
    return RankNames(list(ranks), reason)


def _choose_position(parsed: list[_Name], allowed: _Allowed) -> list[int | None] | str:
    """The ranks by the number that tells the files apart, or why there is none."""
    width = min(len(p.numbers) for p in parsed)
    if width == 0:
        return f"some names have no number for the rank; {_ADVICE}"
    one_shape = len({p.shape for p in parsed}) == 1
    # Counted from the end: what differs between hosts stands before the rank.
    positions = range(-width, 0) if one_shape else range(-1, -2, -1)
    stems = [p.stem for p in parsed]
    good: list[tuple[tuple[bool, bool, bool, int], list[int]]] = []
    varying = 0
    for at in positions:
        ranks = [p.numbers[at] for p in parsed]
        varying += len(set(ranks)) > 1
        if len(set(zip(ranks, stems, strict=True))) != len(set(stems)) or len(set(ranks)) != len(
            set(stems)
        ):
            continue
        if not allowed.all(ranks):
            continue
        dense = set(ranks) == set(range(len(set(ranks))))
        small = max(ranks) < max(1024, 64 * len(ranks))
        place = any(p.place[at] for p in parsed)
        good.append(((not place, dense, small, at), ranks))
    if good:
        return list(max(good, key=lambda g: g[0])[1])
    if not varying:
        return f"no number in the names tells the files apart; {_ADVICE}"
    return f"no number in the names is a different possible rank for every file; {_ADVICE}"


def _partly(named: list[int | None], allowed: _Allowed, why: str) -> RankNames:
    """No reading fits all names: those that say "rank" keep it where it is possible and unique."""
    counts = Counter(named)
    ranks: list[int | None] = []
    reason: list[str | None] = []
    for i, rank in enumerate(named):
        if rank is None:
            ranks.append(None)
            reason.append(why)
        elif not allowed.one(i, rank):
            ranks.append(None)
            reason.append(f"rank {rank} by name, which the content or the job's size rules out")
        elif counts[rank] > 1:
            ranks.append(None)
            reason.append(f"rank {rank} by name, as another file: keep one of them")
        else:
            ranks.append(rank)
            reason.append(None)
    return RankNames(ranks, reason)
