"""What the ranks of one group have mapped of each other: the staging that every group has, and what `allocate` gave."""

from __future__ import annotations

import struct
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.comm.shm import words
from engine.comm.shm.links import Links, close_all
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
        self._own: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}  # addresses of this rank's part
        self._arrived = threading.Condition()  # told when a segment is mapped
        self._table: tuple[list[int], list[int]] = ([], [])  # the same sorted: first addresses, numbers
        self._dead: deque[int] = deque()  # segments that this rank has let go: finalizers append, on any thread
        self._freed: list[int] = []  # the same, not yet told to the others
        self._gone: dict[int, int] = {}  # how many ranks have let a segment go
        self._bytes = 0  # of this rank
        self._shared_dead: deque[int] = deque()  # bytes of shared parts that rank 0 has let go
        self._books = threading.Lock()
        self._shared: list[weakref.ref[torch.UntypedStorage]] = []  # memory that is one on all ranks
        self.used = False  # whether anything was ever allocated: the same on every rank

    def new(self, nbytes: int, what: str, *, keep: bool = False) -> tuple[int, list[Tensor]]:
        """Reserve `nbytes` on every rank, zeroed, and map them on every other. Returns the segment's number and the
        bytes of every rank. Unless `keep`, the segment lives as long as a tensor of this rank refers to it.

        Raises MemoryShortageError on every rank when one of them cannot have it; nothing is taken then.
        """
        links = self._links
        fd = self._reserve(nbytes, what)
        try:
            found = links.hand_over(fd)
            parts, lack = _map([fd if j == links.rank else found[j] for j in range(links.size)], nbytes, what)
            close_all(found.values())
        finally:
            close_all([fd])
        self._agree(lack)
        number = self._next
        self._next += 1
        own = parts[links.rank]
        self._bytes += nbytes
        if keep:
            self._mapped[number] = parts
        else:
            self.used = True
            storage = own.untyped_storage()
            self._own[number] = (own.data_ptr(), own.data_ptr() + nbytes, weakref.ref(storage))
            self._sort()
            weakref.finalize(storage, self._dead.append, number).atexit = False
            # The tensor of this rank is the caller's: a reference here would keep it for good.
            nothing = own.new_empty(0)
            self._mapped[number] = [nothing if j == links.rank else part for j, part in enumerate(parts)]
        with self._arrived:
            self._arrived.notify_all()
        return number, parts

    def new_shared(self, nbytes: int, what: str) -> Tensor:
        """Reserve `nbytes` once, zeroed, by rank 0, and return them, mapped on every rank: what one writes all read.
        They live as long as a tensor of any rank refers to them.

        Raises MemoryShortageError on every rank when rank 0 cannot have it; nothing is taken then.
        """
        links = self._links
        fd = self._reserve(nbytes, what, shared=True)
        try:
            found = links.hand_over(fd, root=0)
            fd = found.get(0, fd)
            memory, lack = _map([fd], nbytes, what)
        finally:
            close_all([fd])
        self._agree(lack)
        self._shared.append(weakref.ref(memory[0].untyped_storage()))
        if links.rank == 0:
            self._bytes += nbytes
            weakref.finalize(memory[0].untyped_storage(), self._shared_dead.append, nbytes).atexit = False
        return memory[0]

    def shares(self, x: Tensor) -> bool:
        """Whether `x` lies in memory that is one on all ranks. Not collective."""
        storage = x.untyped_storage()
        self._shared = [each for each in self._shared if each() is not None]
        return any(each() is storage for each in self._shared)

    def find(self, x: Tensor) -> tuple[int, int]:
        """Return the segment in which `x` lies and its offset there, or (-1, 0). Not collective.

        The address alone does not tell: torch may have moved the storage that it was, and given it to another.
        """
        address = x.data_ptr()
        starts, numbers = self._table
        index = bisect_right(starts, address) - 1
        if index >= 0:
            first, last, reference = self._own.get(numbers[index], (0, 0, None))
            storage, offset = reference() if reference else None, address - first
            here = address < last and storage is not None and storage.data_ptr() == first
            if here and x.untyped_storage() is storage and offset % x.element_size() == 0:
                return numbers[index], offset
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

    @property
    def reserved(self) -> int:
        """Bytes of this rank. Not collective."""
        self._collect()
        return self._bytes

    def _sort(self) -> None:
        pairs = sorted((first, number) for number, (first, _, _) in self._own.items())
        self._table = ([first for first, _ in pairs], [number for _, number in pairs])

    def _collect(self) -> None:
        """Take what finalizers have noted out of the books."""
        with self._books:
            while self._shared_dead:
                self._bytes -= self._shared_dead.popleft()
            while self._dead:
                number = self._dead.popleft()
                first, last, _ = self._own[number]
                self._bytes -= last - first
                self._freed.append(number)

    def _tell_freed(self, nbytes: int, *, shared: bool = False) -> None:
        """Compare what is wanted, hear what every rank has let go, and drop the mappings of what all have."""
        self._collect()
        with self._books:
            freed, self._freed = self._freed[:400], self._freed[400:]
            for number in freed:
                del self._own[number]
            self._sort()
        head = words.allocation(nbytes, shared=shared)
        found = self._links.meet(head + b"".join(_FREED.pack(number) for number in freed))
        words.compare(found, head, self._links.names)
        for word in found:
            for (number,) in _FREED.iter_unpack(word[len(head) :]):
                self._gone[number] = self._gone.get(number, 0) + 1
        for number in [number for number, ranks in self._gone.items() if ranks == self._links.size]:
            del self._gone[number]
            self._mapped.pop(number, None)

    def _reserve(self, nbytes: int, what: str, *, shared: bool = False) -> int:
        """Reserve `nbytes` on every rank or, shared, on rank 0, once all have heard that everybody can. Returns the
        descriptor, or -1 on a rank that reserves nothing.
        """
        links, where = self._links, f"{what} on axis {self._name!r}"
        self._tell_freed(nbytes, shared=shared)
        total = (nbytes, where) if shared else (nbytes * links.size, f"{where} ({links.size} ranks)")
        self._agree(shortage(*total))
        fd, lack = -1, ""
        if links.rank == 0 or not shared:
            try:
                fd = reserve(nbytes, where)
            except MemoryShortageError as error:
                lack = str(error)
        try:
            self._agree(lack)
        except BaseException:
            close_all([fd])
            raise
        return fd

    def _agree(self, lack: str) -> None:
        for j, word in enumerate(self._links.meet(b"m" + lack.encode()[:2000])):
            if len(word) > 1:
                text = word[1:].decode(errors="replace")
                raise MemoryShortageError(text if text == lack else f"rank {self._links.names[j]}: {text}")


def _map(descriptors: Sequence[int], nbytes: int, what: str) -> tuple[list[Tensor], str]:
    """Map segments, and return their bytes and why it could not be done, or an empty string."""
    if -1 in descriptors:
        return [], f"{what} needs a descriptor for each rank, and this process has too many open files (`ulimit -n`)"
    try:
        return [map_segment(each, nbytes) for each in descriptors], ""
    except RuntimeError as error:
        return [], f"{what} cannot be mapped: {str(error).splitlines()[0]} (`ulimit -v` bounds a process's addresses)"
