"""What the ranks of one group have mapped of each other: the staging that every group has, and what `allocate` gave."""

from __future__ import annotations

import os
import struct
import threading
import weakref
from bisect import bisect_right

import torch
from torch import Tensor

from engine.comm.shm import words
from engine.comm.shm.links import Links
from engine.comm.shm.memory import map_segment, reserve, shortage
from engine.comm.transport import BackendError
from engine.errors import MemoryShortageError

_FREED = struct.Struct("<q")
_LATE = 10.0  # seconds for which a message may be ahead of this rank's mapping of the memory that it lies in


class Segments:
    """The shared memory of one group. Everything here is collective unless it says otherwise."""

    def __init__(self, links: Links, name: str) -> None:
        """name: of the group, for errors."""
        self._links = links
        self._name = name
        self._next = 0
        self._mapped: dict[int, list[Tensor]] = {}  # by number of the segment: the bytes of every rank but this one
        self._own: dict[int, tuple[int, int]] = {}  # first and last address of this rank's part
        self._arrived = threading.Condition()  # told when a segment is mapped
        self._table: tuple[list[int], list[int]] = ([], [])  # the same sorted: first addresses, numbers
        self._freed: list[int] = []  # segments that this rank has let go, not yet told
        self._gone: dict[int, int] = {}  # how many ranks have let a segment go
        self.reserved = 0  # bytes of this rank
        self.used = False  # whether anything was ever allocated: the same on every rank

    def new(self, nbytes: int, what: str, *, keep: bool = False) -> tuple[int, list[Tensor]]:
        """Reserve `nbytes` on every rank, zeroed, and map them on every other. Returns the segment's number and the
        bytes of every rank. Unless `keep`, the segment lives as long as a tensor of this rank refers to it.

        Raises MemoryShortageError on every rank when one of them cannot have it; nothing is taken then.
        """
        links = self._links
        self._tell_freed(nbytes)
        lack = shortage(nbytes * links.size, f"{what} on axis {self._name!r} ({links.size} ranks)")
        self._agree(lack)
        fd, lack = -1, ""
        try:
            fd = reserve(nbytes, f"{what} on axis {self._name!r}")
        except MemoryShortageError as error:
            lack = str(error)
        try:
            self._agree(lack)
            found = links.hand_over(fd)
            try:
                parts = [map_segment(fd if j == links.rank else found[j], nbytes) for j in range(links.size)]
            finally:
                for each in found.values():
                    os.close(each)
        finally:
            if fd >= 0:
                os.close(fd)
        number = self._next
        self._next += 1
        own = parts[links.rank]
        self._register(number, own.data_ptr(), nbytes)
        self._mapped[number] = parts
        if not keep:
            self.used = True
            storage = own.untyped_storage()
            weakref.finalize(storage, self._forget, number).atexit = False
            # The tensor of this rank is the caller's: a reference here would keep it for good.
            self._mapped[number] = [torch.empty(0) if j == links.rank else part for j, part in enumerate(parts)]
        self.reserved += nbytes
        with self._arrived:
            self._arrived.notify_all()
        return number, parts

    def new_shared(self, nbytes: int, what: str) -> Tensor:
        """Reserve `nbytes` once, zeroed, by rank 0, and return them, mapped on every rank: what one writes all read.
        They live as long as a tensor of any rank refers to them.

        Raises MemoryShortageError on every rank when rank 0 cannot have it; nothing is taken then.
        """
        links = self._links
        self._tell_freed(nbytes, shared=True)
        fd, lack = -1, shortage(nbytes, f"{what} on axis {self._name!r}")
        self._agree(lack)
        if links.rank == 0:
            try:
                fd = reserve(nbytes, f"{what} on axis {self._name!r}")
            except MemoryShortageError as error:
                lack = str(error)
        try:
            self._agree(lack)
            found = links.hand_over(fd, root=0)
            fd = found.get(0, fd)
            memory = map_segment(fd, nbytes)
        finally:
            if fd >= 0:
                os.close(fd)
        if links.rank == 0:
            self.reserved += nbytes
            weakref.finalize(memory.untyped_storage(), self._let_go, nbytes).atexit = False
        return memory

    def find(self, x: Tensor) -> tuple[int, int]:
        """Return the segment in which `x` lies and its offset there, or (-1, 0). Not collective."""
        address = x.data_ptr()
        starts, numbers = self._table
        index = bisect_right(starts, address) - 1
        if index >= 0:
            first, last = self._own.get(numbers[index], (0, 0))
            if first <= address < last:
                return numbers[index], address - first
        return -1, 0

    def of(self, rank: int, number: int, start: int, nbytes: int) -> Tensor:
        """Return bytes of another rank's part of a segment. Not collective.

        A peer may be through with `new` and send a message from there while this rank, on another thread, is still
        mapping it.
        """
        if number not in self._mapped:
            with self._arrived:
                if not self._arrived.wait_for(lambda: number in self._mapped, _LATE):
                    raise BackendError(f"rank {self._links.names[rank]} sent memory that this rank has not mapped")
        return self._mapped[number][rank].narrow(0, start, nbytes)

    def close(self) -> None:
        """Drop every mapping of others' memory. Not collective; this rank's own stays while it is referred to."""
        self._mapped.clear()
        self._own.clear()
        self._table = ([], [])

    def _register(self, number: int, start: int, nbytes: int) -> None:
        self._own[number] = (start, start + nbytes)
        self._sort()

    def _sort(self) -> None:
        pairs = sorted((first, number) for number, (first, _) in self._own.items())
        # One assignment: a finalizer may run between any two lines, also of another thread.
        self._table = ([first for first, _ in pairs], [number for _, number in pairs])

    def _forget(self, number: int) -> None:
        """Called when the last tensor of this rank's part has gone."""
        span = self._own.pop(number, None)
        if span is not None:
            self.reserved -= span[1] - span[0]
            self._sort()
            self._freed.append(number)

    def _let_go(self, nbytes: int) -> None:
        """Called when the last tensor of rank 0's in a shared part has gone."""
        self.reserved -= nbytes

    def _tell_freed(self, nbytes: int, *, shared: bool = False) -> None:
        """Compare what is wanted, hear what every rank has let go, and drop the mappings of what all have."""
        freed = self._freed[:400]
        del self._freed[:400]  # a finalizer may add to the same list at any moment
        head = words.allocation(nbytes, shared=shared)
        found = self._links.meet(head + b"".join(_FREED.pack(number) for number in freed))
        words.compare(found, head, self._links.names)
        for word in found:
            for (number,) in _FREED.iter_unpack(word[len(head) :]):
                self._gone[number] = self._gone.get(number, 0) + 1
        for number in [number for number, ranks in self._gone.items() if ranks == self._links.size]:
            del self._gone[number]
            self._mapped.pop(number, None)

    def _agree(self, lack: str) -> None:
        for j, word in enumerate(self._links.meet(b"m" + lack.encode()[:2000])):
            if len(word) > 1:
                text = word[1:].decode(errors="replace")
                raise MemoryShortageError(text if text == lack else f"rank {self._links.names[j]}: {text}")
