"""Messages between two ranks that share memory: a mailbox for each ordered pair, in memory of the sender.

A message is announced by a packet. One that lies in memory of `allocate` is read where it is; others go through the
mailbox's slots, piece by piece. Slots that have been read are given back together, or with the next message that goes
the other way. A message that arrives before its receive is asked for is taken out and kept, so that it is in nobody's
way.

Whoever waits moves all messages on. From the first asynchronous receive, or asynchronous send that is not through at
once, a thread does, so that messages also move while nobody waits. A send for which the mailbox has room needs none:
two threads that take turns at Python cost more than the copy.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.comm.arguments import flat
from engine.comm.shm.incoming import Incoming
from engine.comm.shm.links import Sockets
from engine.comm.shm.outgoing import LEAST, Outgoing
from engine.comm.shm.packets import ABORT, PIECE, SLOTS, Message
from engine.comm.shm.segments import Segments
from engine.comm.sockets import close_in_children
from engine.comm.transport import BackendError
from engine.errors import MemoryShortageError

_INT = struct.Struct("i")
_ROOM = socket.CMSG_LEN(_INT.size)  # for one descriptor
_TRUNCATED = int(socket.MSG_CTRUNC)
_SLOT = 1 << 18  # bytes of a slot, where the bound on staging allows it


@dataclass(eq=False)
class _Peer:
    """Both ways between this rank and another."""

    socket: socket.socket
    out: Outgoing
    into: Incoming
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
        most = staging // (SLOTS * len(names) * (len(names) - 1))
        slot = max(LEAST, min(_SLOT, most) // LEAST * LEAST)
        self._peers: dict[int, _Peer] = {}
        for j, peer in sorted(sockets.items()):
            read: list[int] = []
            out = Outgoing(peer, names[rank], names[j], segments, slot, read, self._fail)
            self._peers[j] = _Peer(peer, out, Incoming(j, names[j], segments, read, out.say, self._fail))
        self._by_socket = {peer.fileno(): j for j, peer in sockets.items()}
        self._poll = select.poll()  # of peers that are not gone
        for peer in sockets.values():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
        close_in_children(sockets.values())
        self._names, self._limit = names, limit
        self._own, self._failed = names[rank], failed
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
        return sum(peer.out.box_bytes for peer in self._peers.values())

    def start(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int, *, later: bool
    ) -> list[Message]:
        """Start messages of contiguous tensors. later: nobody may wait for a while, so a thread moves them."""
        out = [Message(flat(x), tag, j, out=True) for x, j in sends]
        into = [Message(flat(x), tag, j) for x, j in receives]
        with self._lock:
            if self._error:
                raise BackendError(self._error)
            try:
                for message in into:
                    self._peers[message.peer].into.post(message)
                for message in out:
                    self._peers[message.peer].out.add(message)
                for j in dict.fromkeys(message.peer for message in out):
                    peer = self._peers[j]
                    peer.out.put()
                    if peer.out.waits and self._thread is None and not self._moving:
                        self._read(j)  # slots may have come back since somebody waited last
            except Exception as error:  # what was started stays behind, so there can be no more
                self._failed(f"rank {self._own} could not start its messages: {error}")
                raise
            if later and (into or not all(message.ended for message in out)):
                self._have_served()
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
                peer.socket.send(ABORT + reason.encode()[:4000])

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._moved.notify_all()
        if self._thread is not None and self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake[1].send(b"c")
            self._thread.join(timeout=5.0)
            for end in self._wake:
                end.close()
        for peer in self._peers.values():
            peer.socket.close()
            peer.out.close()
            peer.into.close()

    # ---- moving ----------------------------------------------------------------------------------------------------

    def _have_served(self) -> None:
        """Have the thread move messages from now on."""
        if self._thread is None:
            self._wake = socket.socketpair()
            self._thread = threading.Thread(target=self._serve, name="engine-mail", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        """Move messages on until the mail is closed. Runs on a thread of its own."""
        assert self._wake is not None
        poll = select.poll()
        for number in (self._wake[0].fileno(), *self._by_socket):
            poll.register(number, select.POLLIN)
        with self._lock:
            while self._moving and not self._closing:
                self._moved.wait()  # two that poll would take each other's packets unheard
        while not self._closing:
            ready = poll.poll()
            with self._lock:
                for number, _ in ready:
                    if number == self._wake[0].fileno():
                        self._wake[0].recv(4096)
                        continue
                    j = self._by_socket[number]
                    try:
                        self._read(j)
                    except (BackendError, MemoryShortageError) as error:
                        self._error = self._error or str(error)
                    if self._peers[j].gone or self._error:
                        with contextlib.suppress(KeyError):
                            poll.unregister(number)
                self._moved.notify_all()

    def _move(self, seconds: float) -> None:
        """Wait until something comes from any peer, and handle it: the one that is waited for may wait for another.
        Others may start messages meanwhile, and wait for this one to move theirs.
        """
        self._moving = True
        try:
            self._lock.release()
            try:
                ready = self._poll.poll(max(1, int(seconds * 1000)))
            finally:
                self._lock.acquire()
            for number, _ in ready:
                self._read_one(self._by_socket[number])
        finally:
            self._moving = False
            self._moved.notify_all()

    def _read(self, j: int) -> None:
        """Handle every packet that has come from a peer."""
        while not self._peers[j].gone and self._read_one(j):
            pass

    def _read_one(self, j: int) -> bool:
        """Handle the next packet from a peer. Returns whether there was one."""
        peer = self._peers[j]
        try:
            packet, ancillary, flags, _ = peer.socket.recvmsg(4096, _ROOM)
            if flags & _TRUNCATED:
                raise self._fail(f"rank {self._own} cannot take a mailbox: it has too many open files (`ulimit -n`)")
            self._handle(peer, packet, [_INT.unpack(data)[0] for _, _, data in ancillary])
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass  # it left without reading all, which the kernel tells once; what it said comes next
        except (BackendError, MemoryShortageError):
            raise
        except Exception as error:  # else the others would wait
            raise self._fail(f"rank {self._own} failed by itself: {type(error).__name__}: {error}") from error
        return True

    def _handle(self, peer: _Peer, packet: bytes, fds: list[int]) -> None:
        if not packet:
            peer.gone = peer.out.deaf = True
            self._poll.unregister(peer.socket)
        elif packet[:1] == b"D":
            if packet[-1]:
                peer.out.given_back(packet[-1])
            peer.into.announced(packet, fds)
        elif packet[:1] == b"C":
            peer.into.take(PIECE.unpack(packet)[1])
        elif packet[:1] == b"A":
            peer.out.given_back(PIECE.unpack(packet)[1])
        elif packet[:1] == b"R":
            peer.out.read_through()
        else:
            self._error = self._error or packet[1:].decode(errors="replace")

    # ---- failing ---------------------------------------------------------------------------------------------------

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
            if not message.ended and (peer.gone or (message.out and peer.out.deaf)):
                name = self._names[message.peer]
                raise BackendError(f"rank {name} is gone: its process has ended, or has closed the mesh")


def _late(messages: Sequence[Message]) -> list[int]:
    """Return the peers whose messages are not through."""
    return sorted({message.peer for message in messages if not message.ended})
