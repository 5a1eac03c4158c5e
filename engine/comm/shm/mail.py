"""Messages between two ranks that share memory: a mailbox for each ordered pair, in memory of the sender.

A message is announced by a packet. One that lies in memory of `allocate` is read where it is; others go through the
mailbox's slots, piece by piece, each given back once it is read. A message that arrives before its receive is asked for
is taken out and kept, so that it is in nobody's way.

Whoever waits moves all messages on. From the first asynchronous call on a thread does, so that messages also move
while nobody waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.comm.arguments import flat, outside_autograd
from engine.comm.shm import words
from engine.comm.shm.links import Sockets
from engine.comm.shm.memory import map_segment, reserve, shortage
from engine.comm.shm.segments import Segments
from engine.comm.sockets import close_in_children
from engine.comm.transport import BackendError
from engine.errors import MemoryShortageError

# "D", tag, dtype, elements, segment, offset, bytes of a slot, the slot of the first piece
_ANNOUNCE = struct.Struct("<ciBqqqqq")
_PIECE = struct.Struct("<cq")  # "C", slot: a piece is there; "A", slot: it has been read; "R", 0: all has been read
_ABORT = b"!"
_SLOTS = 4
_SLOT = 1 << 18  # bytes of a slot, where the bound on staging allows it
_LEAST = 1 << 12
_DIRECT = 1 << 16  # bytes from which on a message in shared memory is read where it is


@dataclass(eq=False)
class Message:
    """One message on its way out or in."""

    x: Tensor
    """A vector over contiguous memory."""
    tag: int
    peer: int
    out: bool = False
    done: int = 0
    """Bytes that have been put out or taken in."""
    ended: bool = False
    announced: bool = False


@dataclass(eq=False)
class _Peer:
    """The two mailboxes between this rank and another."""

    socket: socket.socket
    outgoing: deque[Message] = field(default_factory=deque)
    posted: dict[int, deque[Message]] = field(default_factory=dict)
    early: dict[int, deque[Message]] = field(default_factory=dict)
    arriving: Message | None = None
    slot: int = 0  # bytes of a slot of the box into which this rank puts
    box: Tensor | None = None
    free: list[int] = field(default_factory=list)
    their_slot: int = 0
    their_box: Tensor | None = None
    deaf: bool = False
    """Whether it hears no more; what it said before may still be there to read."""
    gone: bool = False
    """Whether it has ended, and all it said has been read."""


class Mail:
    """The messages of one group."""

    def __init__(
        self,
        rank: int,
        sockets: Sockets,
        names: Sequence[int],
        limit: float,
        segments: Segments,
        staging: int,
        failed: Callable[[str], None],
    ) -> None:
        """names: the ranks' global numbers, for errors; limit: seconds that a wait may take; staging: bytes that the
        mailboxes of all ranks together may take; failed: told why, when the messages of this rank have failed.
        """
        self._peers = {j: _Peer(peer) for j, peer in sorted(sockets.items())}
        self._by_socket = {peer.socket.fileno(): j for j, peer in self._peers.items()}
        for peer in sockets.values():
            peer.setblocking(False)
        close_in_children(sockets.values())
        self._names, self._limit, self._segments = names, limit, segments
        self._own, self._failed = names[rank], failed
        most = staging // (_SLOTS * len(names) * (len(names) - 1))
        self._slot = max(_LEAST, min(_SLOT, most) // _LEAST * _LEAST)
        self._error = ""
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._closing = False
        self._moving = False  # whether one of the threads that wait moves the messages of all

    @property
    def box_bytes(self) -> int:
        """Bytes of the mailboxes into which this rank puts."""
        return sum(_SLOTS * peer.slot for peer in self._peers.values())

    def start(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int, *, later: bool
    ) -> list[Message]:
        """Start messages of contiguous tensors. later: nobody may wait for a while, so a thread moves them."""
        out = [Message(flat(x), tag, j, out=True) for x, j in sends]
        into = [Message(flat(x), tag, j) for x, j in receives]
        with self._lock:
            if self._error:
                raise BackendError(self._error)
            if later and self._thread is None:
                self._wake = socket.socketpair()
                self._thread = threading.Thread(target=self._serve, name="engine-mail", daemon=True)
                self._thread.start()
            try:
                for message in into:
                    self._post(message)
                for message in out:
                    self._peers[message.peer].outgoing.append(message)
                for j in dict.fromkeys(message.peer for message in out):
                    self._put(j)
            except Exception as error:  # what was started stays behind, so there can be no more
                self._failed(f"rank {self._own} could not start its messages: {error}")
                raise
        return [*out, *into]

    def wait(self, messages: Sequence[Message]) -> None:
        """Return once these are through. Raises BackendError when a peer fails or the time limit passes."""
        deadline = time.monotonic() + self._limit
        with self._lock:
            while not all(message.ended for message in messages):
                self._check(messages)
                left = deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(f"rank {self._names[j]}" for j in _late(messages))
                    raise self._fail(f"timed out after {self._limit:g} s waiting for {late}")
                if self._thread is not None or self._moving:
                    self._moved.wait(left)
                else:
                    self._move(left)

    def abort(self, reason: str) -> None:
        """Have no more messages, and tell every peer that this rank has failed."""
        self._error = self._error or reason
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.send(_ABORT + reason.encode()[:4000])

    def close(self) -> None:
        self._closing = True
        if self._thread is not None and self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake[1].send(b"c")
            self._thread.join(timeout=5.0)
            for end in self._wake:
                end.close()
        for peer in self._peers.values():
            peer.socket.close()
            peer.box = peer.their_box = None

    # ---- moving ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Move messages on until the mail is closed. Runs on a thread of its own."""
        assert self._wake is not None
        poll = select.poll()
        for number in (self._wake[0].fileno(), *self._by_socket):
            poll.register(number, select.POLLIN)
        while not self._closing:
            for number, _ in poll.poll():
                if number == self._wake[0].fileno():
                    self._wake[0].recv(4096)
                    continue
                with self._lock:
                    j = self._by_socket[number]
                    try:
                        self._read(j)
                    except (BackendError, MemoryShortageError) as error:
                        self._error = self._error or str(error)
                    except Exception as error:  # else this thread would end unheard, and everybody wait
                        self._fail(f"rank {self._own} failed by itself: {type(error).__name__}: {error}")
                    if self._peers[j].gone or self._error:
                        with contextlib.suppress(KeyError):
                            poll.unregister(number)
                    self._moved.notify_all()

    def _move(self, seconds: float) -> None:
        """Wait until something comes from any peer, and handle it: the one that is waited for may wait for another.
        Others may start messages meanwhile, and wait for this one to move theirs.
        """
        poll = select.poll()
        for peer in self._peers.values():
            if not peer.gone:
                poll.register(peer.socket, select.POLLIN)
        self._moving = True
        try:
            self._lock.release()
            try:
                ready = poll.poll(max(1, int(seconds * 1000)))
            finally:
                self._lock.acquire()
            for number, _ in ready:
                self._read(self._by_socket[number])
        finally:
            self._moving = False
            self._moved.notify_all()

    def _read(self, j: int) -> None:
        """Handle every packet that has come from a peer."""
        peer = self._peers[j]
        while not peer.gone:
            try:
                packet, fds, flags, _ = socket.recv_fds(peer.socket, 4096, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left without reading all, which the kernel tells once; what it said comes next
            if flags & socket.MSG_CTRUNC:
                raise self._fail(f"rank {self._own} cannot take a mailbox: it has too many open files (`ulimit -n`)")
            if not packet:
                peer.gone = peer.deaf = True
            elif packet[:1] == b"D":
                self._announced(j, packet, fds)
            elif packet[:1] == b"C":
                self._take(j, _PIECE.unpack(packet)[1])
            elif packet[:1] == b"A":
                peer.free.append(_PIECE.unpack(packet)[1])
                self._put(j)
            elif packet[:1] == b"R":
                peer.outgoing.popleft().ended = True
                self._put(j)
            else:
                self._error = self._error or packet[1:].decode(errors="replace")

    # ---- out -------------------------------------------------------------------------------------------------------

    def _put(self, j: int) -> None:
        """Put out to a peer what its mailbox has room for."""
        peer = self._peers[j]
        while peer.outgoing and not peer.deaf:
            message = peer.outgoing[0]
            nbytes = message.x.numel() * message.x.element_size()
            if not message.announced and not self._announce(j, message, nbytes):
                return
            if message.done < 0:
                return  # read where it is; the peer will say when
            while message.done < nbytes and peer.free:
                self._send(j, _PIECE.pack(b"C", self._put_piece(peer, message, nbytes)))
            if message.done < nbytes:
                return
            peer.outgoing.popleft().ended = True

    def _put_piece(self, peer: _Peer, message: Message, nbytes: int) -> int:
        """Copy the next piece of a message into a free slot, and return which."""
        assert peer.box is not None
        slot = peer.free.pop(0)
        start, count = slot * peer.slot, min(peer.slot, nbytes - message.done)
        with outside_autograd(message.x):
            peer.box[start : start + count].copy_(message.x.view(torch.uint8)[message.done : message.done + count])
        message.done += count
        return slot

    def _announce(self, j: int, message: Message, nbytes: int) -> bool:
        """Say what comes, with its first piece if there is room, and hand the mailbox over where it is new."""
        peer = self._peers[j]
        number, offset = self._segments.find(message.x) if nbytes >= _DIRECT else (-1, 0)
        fds = []
        if number < 0 and peer.box is None:
            fds = [self._make_box(j)]
        first = self._put_piece(peer, message, nbytes) if number < 0 and peer.free else -1
        kind, count = words.number_of(message.x.dtype), message.x.numel()
        packet = _ANNOUNCE.pack(b"D", message.tag, kind, count, number, offset, peer.slot, first)
        try:
            if fds:
                try:
                    socket.send_fds(peer.socket, [packet], fds)
                finally:
                    os.close(fds[0])
            else:
                peer.socket.send(packet)
        except OSError:
            peer.deaf = True
            return False
        message.announced = True
        if number >= 0:
            message.done = -1
        return True

    def _make_box(self, j: int) -> int:
        """Reserve the mailbox towards a peer, smaller where memory is short, and return its descriptor."""
        peer, slot, what = self._peers[j], self._slot, f"a mailbox for rank {self._names[j]}"
        while slot > _LEAST and shortage(_SLOTS * slot, what):
            slot //= 2
        total = _SLOTS * slot
        try:
            if lack := shortage(total, what):
                raise MemoryShortageError(lack)
            fd = reserve(total, what)
        except MemoryShortageError as error:
            self._fail(f"rank {self._own} cannot send: {error}")
            raise
        peer.box, peer.slot, peer.free = map_segment(fd, total), slot, list(range(_SLOTS))
        return fd

    def _send(self, j: int, packet: bytes) -> None:
        try:
            self._peers[j].socket.send(packet)
        except OSError:
            self._peers[j].deaf = True

    # ---- in --------------------------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        """Ask for a message; one that has come early is taken at once, whole or as far as it is there."""
        j = message.peer
        peer = self._peers[j]
        early = peer.early.get(message.tag)
        if not early:
            peer.posted.setdefault(message.tag, deque()).append(message)
            return
        came = early.popleft()
        self._match(j, message, came.x.dtype, came.x.numel())
        if came.ended:
            with outside_autograd(message.x):
                message.x.copy_(came.x)
            message.ended = True
            return
        with outside_autograd(message.x):
            message.x.view(torch.uint8)[: came.done].copy_(came.x.view(torch.uint8)[: came.done])
        message.done = came.done
        peer.arriving = message

    def _announced(self, j: int, packet: bytes, fds: list[int]) -> None:
        peer = self._peers[j]
        _, tag, dtype, count, number, offset, slot, first = _ANNOUNCE.unpack(packet)
        kind = words.dtype_of(dtype)
        for fd in fds:
            peer.their_slot, peer.their_box = slot, map_segment(fd, _SLOTS * slot)
            os.close(fd)
        posted = peer.posted.get(tag)
        if posted:
            message = posted.popleft()
            self._match(j, message, kind, count)
        else:
            with torch.inference_mode(False):
                message = Message(torch.empty(count, dtype=kind, device="cpu"), tag, j)
            peer.early.setdefault(tag, deque()).append(message)
        if number < 0:
            peer.arriving = message
            if first >= 0:
                self._take(j, first)
            return
        with outside_autograd(message.x):
            nbytes = count * message.x.element_size()
            message.x.view(torch.uint8).copy_(self._segments.of(j, number, offset, nbytes))
        message.ended = True
        self._send(j, _PIECE.pack(b"R", 0))

    def _take(self, j: int, slot: int) -> None:
        """Take a piece out of a slot."""
        peer = self._peers[j]
        message, box = peer.arriving, peer.their_box
        assert message is not None
        assert box is not None
        total = message.x.numel() * message.x.element_size()
        count = min(peer.their_slot, total - message.done)
        with outside_autograd(message.x):
            message.x.view(torch.uint8)[message.done : message.done + count].copy_(
                box[slot * peer.their_slot : slot * peer.their_slot + count]
            )
        message.done += count
        self._send(j, _PIECE.pack(b"A", slot))
        if message.done == total:
            message.ended = True
            peer.arriving = None

    # ---- failing ---------------------------------------------------------------------------------------------------

    def _match(self, j: int, message: Message, dtype: torch.dtype, count: int) -> None:
        if message.x.dtype is dtype and message.x.numel() == count:
            return
        raise self._fail(
            f"rank {self._names[j]} sent {count} {str(dtype).removeprefix('torch.')}, but the receive is of "
            f"{message.x.numel()} {str(message.x.dtype).removeprefix('torch.')}: both sides name the same tensor"
        )

    def _fail(self, reason: str) -> BackendError:
        self._failed(reason)
        self._moved.notify_all()
        return BackendError(reason)

    def _check(self, messages: Sequence[Message]) -> None:
        """Raise when what is waited for cannot come."""
        if self._error:
            raise BackendError(self._error)
        for message in messages:
            peer = self._peers[message.peer]
            if not message.ended and (peer.gone or (message.out and peer.deaf)):
                name = self._names[message.peer]
                raise BackendError(f"rank {name} is gone: its process has ended, or has closed the mesh")


def _late(messages: Sequence[Message]) -> list[int]:
    """Return the peers whose messages are not through."""
    return sorted({message.peer for message in messages if not message.ended})
