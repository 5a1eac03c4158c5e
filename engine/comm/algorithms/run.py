"""Runs plans over a transport's messages. It decides nothing: the plan says who sends what to whom.

The first round is started at once and the rest run in `wait`, so a plan of one round flies while the caller computes.
Receives that may be early are started with the round before, where the transport has messages that wait for no others.
Each operation has a tag of its own, so on gloo several may be under way, and be waited for in any order; NCCL and HCCL
ignore tags, and a forced algorithm must be waited for in the same order on every rank there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.comm.algorithms.plan import Plan, Round
from engine.comm.arguments import outside_autograd
from engine.comm.transport import Transport, Works

_TAGS = (1 << 20) - 3
_KEPT = 2  # scratch buffers that stay with a group between operations
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Operation:
    """What the engine runs itself over a transport's messages, in the place of the transport's own work."""

    in_rounds = False  # whether it goes on only while somebody waits

    def wait(self) -> None:
        """Run what is left, on the calling thread. Raises BackendError when a message fails, anything else for this
        process's own reasons.
        """
        raise NotImplementedError


def host_tag(space: int) -> int:
    """Return the tag of messages between the leaders of hosts, in a group's range of tags."""
    return (space << 20) + _TAGS + 2


class Messenger:
    """The messages of one group's algorithms: their tags and their scratch memory."""

    def __init__(self, transport: Transport, space: int) -> None:
        """space: which of 2048 ranges of tags is this group's: one process group may carry several communicators."""
        self.start, self.wait = transport.exchange, transport.wait
        self.moves_alone, self.early = transport.moves_alone, transport.early
        self._base = space << 20
        self._last_tag = 0
        self._free: list[Tensor] = []

    def tag(self) -> int:
        """Return the next operation's tag; every rank starts the same operations in the same order."""
        self._last_tag = self._last_tag % _TAGS + 1
        return self._base + self._last_tag

    @property
    def message_tag(self) -> int:
        """The tag of point-to-point calls."""
        return self._base

    @property
    def header_tag(self) -> int:
        """The tag of what the checks send before a message."""
        return self._base + _TAGS + 1

    def take(self, count: int, like: Tensor) -> Tensor:
        """Return scratch memory for so many elements of the kind of `like`: a fresh page costs more than sending it."""
        for index, buffer in enumerate(self._free):
            if buffer.dtype is like.dtype and buffer.numel() >= count:
                return self._free.pop(index)
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def give(self, buffer: Tensor) -> None:
        """Take scratch memory back; the last used stay."""
        self._free.append(buffer)
        if len(self._free) > _KEPT:
            del self._free[0]


def start_plan(
    messenger: Messenger,
    plan: Plan,
    at: Callable[[int, int], Tensor],
    op: str,
    like: Tensor,
    initial: Callable[[], Tensor] | None = None,
) -> Works:
    """Start a plan, see `Running`, and return what to wait for: its messages themselves where they are all it has."""
    if messenger.moves_alone and (not plan or (len(plan) == 1 and not plan[0].reduce)):
        tag = messenger.tag()  # also where this rank has nothing to send
        if not plan:
            return []
        sends = [(at(t.start, t.stop), t.peer) for t in plan[0].sends]
        return messenger.start(sends, [(at(t.start, t.stop), t.peer) for t in plan[0].receives], tag)
    return [Running(messenger, plan, at, op, like, initial)]


class Running(Operation):
    """One operation under way, round by round."""

    def __init__(
        self,
        messenger: Messenger,
        plan: Plan,
        at: Callable[[int, int], Tensor],
        op: str,
        like: Tensor,
        initial: Callable[[], Tensor] | None = None,
    ) -> None:
        """Start the first round. at(start, stop): the memory of these elements; op: how what arrives is reduced; like:
        has the vector's dtype and device. initial(): what the first that arrives is reduced with, where the vector's
        memory does not hold it yet; asked for once the messages are under way.
        """
        self._messenger, self._at, self._like, self._initial = messenger, at, like, initial
        self._combine = _COMBINE[op]
        self._tag = messenger.tag()
        self._plan, self._number = plan, -1
        self.in_rounds = len(plan) > 1 or not messenger.moves_alone
        self._scratch: Tensor | None = None
        self._ahead: Works | None = None  # receives of the next round
        self._next()

    def wait(self) -> None:
        if self._like.requires_grad or self._like.is_inference():  # entering a mode costs more than a small sum
            with outside_autograd(self._like):
                self._drain()
        else:
            self._drain()

    def _drain(self) -> None:
        while self._number < len(self._plan):
            self._finish(self._plan[self._number])
            self._next()

    def _next(self) -> None:
        self._number += 1
        if self._number == len(self._plan):
            return
        each, at, start = self._plan[self._number], self._at, self._messenger.start
        # Kept until they are sent: whoever starts a message need not hold its memory.
        self._outgoing = [(at(t.start, t.stop), t.peer) for t in each.sends]
        if self._ahead is not None:
            self._works = start(self._outgoing, [], self._tag) + self._ahead
            self._ahead = None
        else:
            self._incoming = self._parts(each) if each.reduce else [at(t.start, t.stop) for t in each.receives]
            receives = [(x, t.peer) for x, t in zip(self._incoming, each.receives, strict=True)]
            self._works = start(self._outgoing, receives, self._tag)
        after = self._plan[self._number + 1] if self._number + 1 < len(self._plan) else None
        if after is not None and after.early and self._messenger.early:
            self._ahead = start([], [(at(t.start, t.stop), t.peer) for t in after.receives], self._tag)

    def _parts(self, each: Round) -> list[Tensor]:
        """Return memory for what a round receives to reduce: scratch, but for what comes to a place still unused."""
        receives = each.receives
        first: list[Tensor] = []
        if self._initial is not None and receives:
            first, receives = [self._at(receives[0].start, receives[0].stop)], receives[1:]
        if not receives:
            return first
        lengths = [t.stop - t.start for t in receives]
        total = sum(lengths)
        self._scratch = scratch = self._messenger.take(total, self._like)
        if len(lengths) == 1 and scratch.numel() == total:
            return [*first, scratch]
        return [*first, *scratch[:total].split(lengths)]

    def _finish(self, each: Round) -> None:
        works, sends = self._works, len(each.sends)
        apart = len(works) == sends + len(each.receives)  # NCCL gives one work for all
        wait = self._messenger.wait
        if not apart:
            wait(works)
        elif each.swaps:  # what arrives last is waited for first: one sleep
            wait(works[sends:])
            wait(works[:sends])
        for index, transfer in enumerate(each.receives):
            if apart and not each.swaps:
                wait(works[sends + index : sends + index + 1])
            if each.reduce:
                into = self._at(transfer.start, transfer.stop)
                self._combine(into if self._initial is None else self._initial(), self._incoming[index], out=into)
                self._initial = None
        if apart and not each.swaps:
            wait(works[:sends])
        if self._scratch is not None:
            self._messenger.give(self._scratch)
            self._scratch = None


def writes_only(plan: Plan, start: int, stop: int) -> bool:
    """Whether a plan changes nothing of the vector outside [start, stop)."""
    return all(start <= t.start and t.stop <= stop for each in plan for t in each.receives)
