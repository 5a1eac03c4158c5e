"""The way out to one peer: a mailbox in memory of this rank, filled slot by slot as the peer gives slots back."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from ctypes import memmove

from torch import Tensor

from engine.comm.shm import words
from engine.comm.shm.memory import map_segment, reserve, shortage
from engine.comm.shm.packets import ANNOUNCE, PIECE, SLOTS, Message, drain
from engine.comm.shm.segments import Segments
from engine.comm.transport import BackendError
from engine.errors import MemoryShortageError

LEAST = 1 << 12  # bytes of a slot
_DIRECT = 1 << 16  # bytes from which on a message in shared memory is read where it is


class Outgoing:
    """The messages to one peer, in the order in which they were started. Under the lock of `Mail`."""

    def __init__(
        self,
        socket: socket.socket,
        own: int,
        name: int,
        segments: Segments,
        most: int,
        read: list[int],
        fail: Callable[[str], BackendError],
    ) -> None:
        """own, name: this rank's global number and the peer's, for errors; most: bytes that a slot may have; read:
        slots of the peer's mailbox that have been read, unknown to it; fail: told why, when the messages of this rank
        have failed.
        """
        self._socket, self._own, self._name, self._segments = socket, own, name, segments
        self._most, self._read, self._fail = most, read, fail
        self._waiting: deque[Message] = deque()
        self._box: Tensor | None = None
        self._slot = 0  # bytes of a slot
        self._free: list[int] = []
        self.deaf = False
        """Whether the peer hears no more; what it said before may still be there to read."""

    @property
    def box_bytes(self) -> int:
        """Bytes of the mailbox."""
        return SLOTS * self._slot

    @property
    def waits(self) -> bool:
        """Whether a message is not all put out."""
        return bool(self._waiting)

    def add(self, message: Message) -> None:
        """Put a message behind the others; `put` starts it."""
        self._waiting.append(message)

    def given_back(self, slots: int) -> None:
        """The peer has read slots, a bit for each."""
        self._free += [slot for slot in range(SLOTS) if slots >> slot & 1]
        self.put()

    def read_through(self) -> None:
        """The peer has read the first message where it lies."""
        self._waiting.popleft().ended = True
        self.put()

    def put(self) -> None:
        """Put out what the mailbox has room for."""
        while self._waiting and not self.deaf:
            message = self._waiting[0]
            if not message.announced and not self._announce(message):
                return
            if message.done < 0:
                return  # read where it is; the peer will say when
            while message.done < message.nbytes and self._free:
                self.say(PIECE.pack(b"C", self._put_piece(message)))
            if message.done < message.nbytes:
                return
            self._waiting.popleft().ended = True

    def say(self, packet: bytes) -> None:
        """Send a packet, unless the peer hears no more."""
        try:
            self._socket.send(packet)
        except OSError:
            self.deaf = True

    def close(self) -> None:
        self._box = None

    def _put_piece(self, message: Message) -> int:
        """Copy the next piece of a message into a free slot, and return which."""
        assert self._box is not None
        slot = self._free.pop()  # the last that came back is the likeliest to be in a cache
        start, count = slot * self._slot, min(self._slot, message.nbytes - message.done)
        memmove(self._box.data_ptr() + start, message.address + message.done, count)
        message.done += count
        return slot

    def _announce(self, message: Message) -> bool:
        """Say what comes, with its first piece if there is room, and hand the mailbox over where it is new."""
        number, offset = self._segments.find(message.x) if message.nbytes >= _DIRECT else (-1, 0)
        fds = []
        if number < 0 and self._box is None:
            fds = [self._make_box()]
        first = self._put_piece(message) if number < 0 and self._free else -1
        kind, count = words.number_of(message.x.dtype), message.x.numel()
        packet = ANNOUNCE.pack(b"D", message.tag, kind, count, number, offset, self._slot, first, drain(self._read))
        try:
            if fds:
                try:
                    socket.send_fds(self._socket, [packet], fds)
                finally:
                    os.close(fds[0])
            else:
                self._socket.send(packet)
        except OSError:
            self.deaf = True
            return False
        message.announced = True
        if number >= 0:
            message.done = -1
        return True

    def _make_box(self) -> int:
        """Reserve the mailbox, smaller where memory is short, and return its descriptor."""
        slot, what = self._most, f"a mailbox for rank {self._name}"
        while slot > LEAST and shortage(SLOTS * slot, what):
            slot //= 2
        total = SLOTS * slot
        try:
            if lack := shortage(total, what):
                raise MemoryShortageError(lack)
            fd = reserve(total, what)
        except MemoryShortageError as error:
            self._fail(f"rank {self._own} cannot send: {error}")
            raise
        self._box, self._slot, self._free = map_segment(fd, total), slot, list(range(SLOTS))
        return fd
