"""The calls of a communicator that carry no tensor of the caller's: a meeting, a flag, an object, new memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.comm.arguments import check_peer
from engine.comm.call import Call
from engine.comm.messages import Messages
from engine.comm.objects import broadcast_object
from engine.comm.transport import Calls, Works
from engine.errors import MemoryShortageError, UsageError


class Agreement(Messages):
    """The part of `Communicator` in which all ranks agree on something."""

    def barrier(self) -> None:
        """Return once every rank of the group has called."""
        if self.size == 1:
            return
        token = self._token
        if token is None:
            token = self._token = torch.zeros((), dtype=torch.int32, device=self.device)
        call = Call(self._label, "barrier", token, "max")
        if self._checks:
            self._compare(call)
        self._run(call, lambda t: t.barrier(token), lambda: None, token, False)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on at least one rank of the group."""
        if self.size == 1:
            return flag
        box = torch.tensor(int(flag), dtype=torch.int32, device=self.device)
        call = self._call("any", box, (box,), "max")
        return bool(self._run(call, lambda t: t.all_reduce(box, "max"), box.item, box, False))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, shared: bool = False) -> Tensor:
        """Return a tensor of zeros on this group's device. Collectives of this group read it, and views of it, where it
        lies, when the ranks share memory (transport `shm`); elsewhere it is an ordinary tensor.

        shared: one tensor for the whole group, which every rank has mapped: what one writes, all read, and it takes
        memory once. The ranks agree among themselves on who writes when, with `barrier` between; collectives into it
        make no sense. Only where the ranks share memory (`reads_in_place`), or for a group of one.

        All ranks of the group call it with the same shape and dtype. The memory goes back when nothing refers to it
        any more, on all ranks, and may outlive the mesh. Raises UsageError for a negative size or `shared` without
        shared memory, and MemoryShortageError on every rank, with what is needed and what is free, before anything is
        taken.
        """
        call = Call(self._label, "allocate", None)
        if isinstance(shape, int) or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"{call}: shape is a sequence of sizes and dtype a torch.dtype, not {shape!r} and {dtype!r}"
            )
        sizes = torch.Size(shape)
        call.note = f" of {str(dtype).removeprefix('torch.')} {tuple(sizes)}{' shared' if shared else ''}"
        if self._checks:
            self._compare(call)
        if any(size < 0 for size in sizes):
            raise UsageError(f"{call}: shape {tuple(sizes)} has a negative size")
        if shared and self.size > 1 and not self._planned and not self.reads_in_place:
            raise UsageError(
                f"{call}: shared=True needs ranks that share memory, and transport {self.transport!r} on "
                f"{self.device.type} does not: take transport='shm', CPU ranks on one host"
            )
        nbytes = sizes.numel() * dtype.itemsize
        if nbytes >= 1 << 62:
            raise MemoryShortageError(f"{call}: {nbytes} bytes are more than any machine has")
        if nbytes and self._transport is not None and self.device.type == "cpu":
            box: list[Tensor | None] = []

            def start(_: Calls) -> Works:
                box.append(self._live(call).allocate(nbytes, shared=shared))
                return []

            memory = self._run(call, start, lambda: box[0], None, False)
            if isinstance(memory, Tensor):
                return memory.view(dtype).view(sizes)
        return torch.zeros(sizes, dtype=dtype, device=self.device)

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Return rank `src`'s `value` (picklable; ignored elsewhere) on every rank."""
        call = Call(self._label, "broadcast_object", None, None, src)
        if self._checks:
            self._compare(call)
        check_peer(call, src, self.size, "src")
        if self.size == 1:
            return value
        box: list[Any] = []

        def start(transport: Calls) -> Works:
            box.append(broadcast_object(transport, value, src, self.rank, self.device))
            return []

        return self._run(call, start, lambda: box[0], None, False)

    def compared(self, numbers: Tensor) -> Tensor:
        """Return every rank's `numbers` (n,), for a check of values, as (ranks, n). As all that checks send, it is not
        in the ledger. All ranks of the group call it with as many numbers of one dtype.
        """
        every = numbers.new_empty(self.size * numbers.numel())
        call = self._call("all_gather", numbers, (every,))
        counts, self._ledger.on = self._ledger.on, False
        try:
            self._run(call, lambda t: t.all_gather(every, numbers), lambda: None, every, False)
        finally:
            self._ledger.on = counts
        return every.view(self.size, -1)

    def check_equal(self, what: str, value: object) -> None:
        """Check that `repr(value)` is the same on every rank of the group: a configuration, a list of names and shapes.

        Raises UsageError on every rank when it is not, naming the first rank that differs from rank 0 and both values.
        """
        if self.size == 1 or self._planned:
            return
        text = repr(value)
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int32, device=self.device)
        every = self.compared(digest)
        different = (every != every[0]).any(dim=1).nonzero().flatten().tolist()
        if not different:
            return
        first = self.broadcast_object(text, 0)
        other = self.broadcast_object(text, different[0])
        raise UsageError(
            f"{what} differs over axis {self.name!r}: rank {different[0]} (global {self.ranks[different[0]]}) has "
            f"{_around(other, first)}, rank 0 (global {self.ranks[0]}) has {_around(first, other)}: "
            f"start every rank with the same"
        )


def _around(text: str, other: str, width: int = 160) -> str:
    """Return the part of `text` around its first difference from `other`."""
    if len(text) <= width:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, same - width // 2)
    return ("..." if start else "") + text[start : start + width] + ("..." if start + width < len(text) else "")
