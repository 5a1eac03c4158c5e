"""Runs plans over a transport's messages. It decides nothing: the plan says who sends what to whom.

The first round is started at once and the rest in `wait`, so a plan of one round flies while the caller computes. Each
operation has a tag of its own, so several may be under way, and be waited for in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from engine.comm.algorithms.plan import Plan, Round
from engine.comm.arguments import outside_autograd
from engine.comm.transport import TorchTransport, Works

_KEPT = 2  # scratch buffers that stay with a group between operations
_COMBINE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda into, x: into.add_(x),
    "prod": lambda into, x: into.mul_(x),
    "max": lambda into, x: torch.maximum(into, x, out=into),
    "min": lambda into, x: torch.minimum(into, x, out=into),
}


class Messenger:
    """The messages of one group's algorithms: their tags and their scratch memory."""

    def __init__(self, transport: TorchTransport) -> None:
        self._transport = transport
        # Never 0, which is point-to-point calls'; every rank starts the same operations in the same order.
        self._tags = cycle(range(1, 1 << 20))
        self._free: list[Tensor] = []

    def tag(self) -> int:
        """Return the next operation's tag."""
        return next(self._tags)

    def start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int) -> Works:
        """Start messages."""
        return self._transport.exchange(sends, receives, tag)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return scratch memory of at least so many bytes: a fresh page costs more than sending it."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take scratch memory back; the largest stay."""
        self._free = sorted([*self._free, buffer], key=Tensor.numel)[-_KEPT:]


class Running:
    """One operation under way."""

    def __init__(
        self, messenger: Messenger, plan: Plan, at: Callable[[int, int], Tensor], op: str, like: Tensor
    ) -> None:
        """Start the first round. at(start, stop): the memory of these elements; op: how what arrives is reduced; like:
        has the vector's dtype and device.
        """
        self._messenger, self._at, self._like = messenger, at, like
        self._combine = _COMBINE[op]
        self._tag = messenger.tag()
        self._rounds = iter([each for each in plan if each.sends or each.receives])
        self._scratch: Tensor | None = None
        self._next()

    def wait(self) -> None:
        """Run what is left, on the calling thread."""
        while self._round is not None:
            with outside_autograd(self._like):
                self._finish(self._round)
            self._next()

    def _next(self) -> None:
        self._round = next(self._rounds, None)
        if self._round is None:
            return
        self._outgoing = [(self._at(t.start, t.stop), t.peer) for t in self._round.sends]
        if self._round.reduce:
            self._incoming = self._parts(self._round)
        else:
            self._incoming = [self._at(t.start, t.stop) for t in self._round.receives]
        receives = [(x, t.peer) for x, t in zip(self._incoming, self._round.receives, strict=True)]
        self._works = self._messenger.start(self._outgoing, receives, self._tag)

    def _parts(self, each: Round) -> list[Tensor]:
        """Return scratch memory for what a round receives."""
        lengths = [t.stop - t.start for t in each.receives]
        width = self._like.element_size()
        self._scratch = self._messenger.take(sum(lengths) * width, self._like.device)
        return list(self._scratch[: sum(lengths) * width].view(self._like.dtype).split(lengths))

    def _finish(self, each: Round) -> None:
        receives = len(each.receives)
        apart = len(self._works) == len(each.sends) + receives  # NCCL gives one work for all
        pending = self._works[len(each.sends) :] if apart else []
        if not apart:
            for work in self._works:
                work.wait()
        for index, transfer in enumerate(each.receives):
            if apart:
                pending[index].wait()
            if each.reduce:
                self._combine(self._at(transfer.start, transfer.stop), self._incoming[index])
        if apart:
            for work in self._works[: len(each.sends)]:
                work.wait()
        if self._scratch is not None:
            self._messenger.give(self._scratch)
            self._scratch = None


def writes_only(plan: Plan, start: int, stop: int) -> bool:
    """Whether a plan changes nothing of the vector outside [start, stop)."""
    return all(start <= t.start and t.stop <= stop for each in plan for t in each.receives)
