"""The comparison before a collective (`ENGINE_CHECKS=1`): do all ranks of the group make the same call?

Costs one small all-gather for each collective, and one small message before each message. Without it, the same mistakes
end in a time-out, an abort of the process, or wrong numbers, whatever the backend makes of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.comm.algorithms.run import Operation
from engine.comm.arguments import shape_of
from engine.comm.call import Call
from engine.comm.source import source_line
from engine.comm.transport import Calls
from engine.errors import UsageError

_WIDTH = 768  # bytes of what a rank says of its call


def check_call(call: Call, algorithm: str, transport: Calls, device: torch.device) -> None:
    """Compare `call` over the group. Raises UsageError on every rank, with each side's source line.

    The line is reported and not compared: a root and its receivers may call from different branches.
    """
    spoken = [call.sequence, call.describe(), algorithm]
    heard = _share(json.dumps([spoken, source_line(sys._getframe(1))]), transport, device)
    sayings = [json.loads(text) for text in heard]
    if all(each[0] == sayings[0][0] for each in sayings):
        return
    groups: dict[str, list[int]] = {}
    for other, (what, line) in enumerate(sayings):
        groups.setdefault(f"call {what[0]} is {what[1]} by {what[2]} at {line}", []).append(other)
    listed = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(f'{r} (global {transport.ranks[r]})' for r in ranks)}: {what}"
        for what, ranks in groups.items()
    )
    raise UsageError(
        f"{call}: the ranks of the group call different things, nothing was sent: {listed}: every rank of the "
        f"group must make the same calls in the same order"
    )


@dataclass(eq=False)
class _Expected:
    """A message that is to come: its header is under way, itself it is received once that has been compared."""

    call: Call
    line: str
    x: Tensor
    peer: int
    header: Tensor
    work: Any = None
    works: list[Any] = field(default_factory=list)


Expected = dict[int, deque[_Expected]]
"""By peer, the messages that no receive has been started for, in the order of their calls."""


class CheckedExchange(Operation):
    """Messages that carry their dtype and shape before them, so that a receiver refuses what does not fit.

    Everything is sent at once; a message is received only once its header has been compared, in `wait`, after those of
    earlier calls from the same peer: messages match in the order of the calls, whichever is waited for first.
    """

    def __init__(
        self,
        call: Call,
        transport: Calls,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        tag: int,
        header_tag: int,
        expected: Expected,
    ) -> None:
        """expected: of the group, for all of its exchanges."""
        self._tag = tag
        self._transport, self._expected = transport, expected
        line = source_line(sys._getframe(1))
        self._receives = [
            _Expected(call, line, x, peer, torch.empty(_WIDTH, dtype=torch.uint8)) for x, peer in receives
        ]
        own = [(_encode(json.dumps([shape_of(x), line])), peer) for x, peer in sends]
        works = transport.exchange(own, [(each.header, each.peer) for each in self._receives], header_tag)
        for each, work in zip(self._receives, works[len(own) :], strict=True):
            each.work = work
            expected.setdefault(each.peer, deque()).append(each)
        self._sent = [*works[: len(own)], *transport.exchange(sends, [], tag)]
        self._kept = (own, sends)

    def wait(self) -> None:
        """Raises UsageError on the receiving rank for a message that does not fit; its sender ends with an error when
        the receiver leaves, or at the time limit.
        """
        for each in self._receives:
            queue = self._expected[each.peer]
            while not each.works:
                self._receive(queue[0])
                queue.popleft()
        self._transport.wait([*(work for each in self._receives for work in each.works), *self._sent])

    def _receive(self, each: _Expected) -> None:
        """Compare a header, and start the receive of its message."""
        self._transport.wait([each.work])
        shape, theirs = json.loads(_decode(each.header))
        if shape != shape_of(each.x):
            raise UsageError(
                f"{each.call}: rank {each.peer} (global {self._transport.ranks[each.peer]}) sends {shape} at {theirs}, "
                f"but this rank receives it into {shape_of(each.x)} at {each.line}: dtype and shape must be the same"
            )
        each.works = self._transport.exchange([], [(each.x, each.peer)], self._tag)


def fingerprint(x: Tensor) -> str:
    """Return dtype, shape and a digest of the values of `x`: equal for equal tensors."""
    data = x.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    return f"{shape_of(x)} {hashlib.sha256(bytes(data.untyped_storage())).hexdigest()[:16]}"


def _share(text: str, transport: Calls, device: torch.device) -> list[str]:
    """Return every rank's text."""
    own = _encode(text).to(device)
    every = own.new_empty(len(transport.ranks) * _WIDTH)
    transport.wait(transport.all_gather(every, own))
    return [_decode(part) for part in every.cpu().split(_WIDTH)]


def _encode(text: str) -> Tensor:
    """Return the text in a fixed number of bytes. What is too long loses its source line's head, then its shape."""
    if len(text.encode()) > _WIDTH:
        spoken, line = json.loads(text)
        cut = len(text.encode()) - _WIDTH
        text = json.dumps([spoken, "..." + line[cut + 3 :]])
        if len(text.encode()) > _WIDTH:
            spoken = [str(each)[:200] for each in spoken] if isinstance(spoken, list) else spoken[:200]
            text = json.dumps([spoken, ""])
    data = text.encode().ljust(_WIDTH)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode(data: Tensor) -> str:
    return bytes(data.tolist()).decode().rstrip()
