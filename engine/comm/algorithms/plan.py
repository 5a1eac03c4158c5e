"""What an algorithm is: for each rank a list of rounds, in each of which it sends and receives slices of one vector.

Pure data. Every rank of a group holds a vector of the same number of elements. All transfers of a round are started
together and end before the next round begins; between two ranks, messages match in the order in which they are listed.
A vector is cut into one block for each rank of a group, as equal as can be, the longer ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Transfer:
    """The elements [start, stop) of the vector, to or from a peer."""

    peer: int
    """Position inside the group."""
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives at the same time. Unless it reduces, no slice is both sent and received."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    reduce: bool = False
    """Whether what is received is reduced into the vector, in the listed order, or takes the place of what is there."""
    swaps: bool = False
    """Whether it reduces into what it sends, which must be sent before."""
    early: bool = False
    """Whether its receives may be started with the round before, see `with_early`."""


Plan = tuple[Round, ...]
Hosts = tuple[tuple[int, ...], ...]
"""The ranks of the group on each host, in rank order; a partition of the group."""


def block(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of one of `parts` blocks of `count` elements."""
    size, longer = divmod(count, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def round_of(
    sends: Sequence[tuple[int, tuple[int, int]]], receives: Sequence[tuple[int, tuple[int, int]]], *, reduce: bool
) -> Round:
    """Make a round of (peer, (start, stop)) pairs, without the empty ones."""
    kept = [
        tuple(Transfer(peer, start, stop) for peer, (start, stop) in pairs if start < stop)
        for pairs in (sends, receives)
    ]
    swaps = any(_overlap(one, other) for one in kept[0] for other in kept[1])
    return Round(kept[0], kept[1], reduce, swaps)


def with_early(rounds: Sequence[Round]) -> Plan:
    """Return the rounds, those marked whose receives may be started with the round before: a message whose receive
    waits for it leaves at once.

    What is received takes the place of what is there, so the round before must neither receive nor send that slice. It
    may send it to the very rank from which the new values come, where in every rank's plan those are sent in a later
    round than the old ones are received: then they cannot come too soon. That holds in all plans here, and is tested.
    """
    marked = [
        not each.reduce
        and bool(each.receives)
        and not any(_overlap(new, old) for new in each.receives for old in before.receives)
        and not any(_overlap(new, old) and new.peer != old.peer for new in each.receives for old in before.sends)
        for before, each in pairwise(rounds)
    ]
    return tuple(replace(each, early=early) for each, early in zip(rounds, [False, *marked], strict=bool(rounds)))


def _overlap(one: Transfer, other: Transfer) -> bool:
    return one.start < other.stop and other.start < one.stop


def elements_sent(plan: Plan) -> int:
    """Return how many elements the rank of this plan sends."""
    return sum(transfer.stop - transfer.start for each in plan for transfer in each.sends)
