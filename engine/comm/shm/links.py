"""The sockets between the ranks of one host: where they meet, and over which they hand each other memory.

Abstract Unix sockets, so no file is left behind; packets, so a message arrives whole or not at all. Waiting blocks in
the kernel, since there may be more ranks than cores. A peer that has ended is the end of its socket, which the kernel
tells at once, also after `kill -9`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from engine.comm.sockets import close_in_children
from engine.comm.transport import BackendError
from engine.errors import UsageError

_HELLO = struct.Struct("<16siii")  # token, number of the communicator, kind of socket, rank in it
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid
_SLICE = 0.25  # seconds after which a wait looks whether a peer has ended
_PACKET = 4096
_ABORT = b"!"
KINDS = 2
MEET, MAIL = range(KINDS)

Sockets = dict[int, socket.socket]


def missing() -> str:
    """Return what this system lacks for shared memory, or an empty string."""
    parts = {
        "memfd_create": hasattr(os, "memfd_create"),
        "posix_fallocate": hasattr(os, "posix_fallocate"),
        "SO_PEERCRED": hasattr(socket, "SO_PEERCRED"),
        "/proc/self/fd": os.path.isdir("/proc/self/fd"),
    }
    return ", ".join(name for name, there in parts.items() if not there)


class Listener:
    """Where the other ranks of this host reach this process while the mesh opens."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(8).hex().encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0engine-" + self._token)
        self._socket.listen(4096)

    @property
    def address(self) -> str:
        """For the other ranks of this host."""
        return self._token.decode()

    def close(self) -> None:
        self._socket.close()

    def connect(
        self, groups: Sequence[tuple[int, int, Mapping[int, str]]], seconds: float
    ) -> list[tuple[Sockets, Sockets]]:
        """Connect this process with the others of every group, each as (number of the group, own rank in it, address
        by rank); the number is the same on all of its ranks. Returns for each group the sockets by rank, of either
        kind.

        Raises BackendError when a rank does not come within `seconds`, UsageError, on the ranks that it concerns, for a
        process of another user.
        """
        try:
            return self._connect(groups, seconds)
        except UsageError as error:
            for address in {each for _, _, addresses in groups for each in addresses.values()}:
                _refuse(address, str(error))
            raise

    def _connect(
        self, groups: Sequence[tuple[int, int, Mapping[int, str]]], seconds: float
    ) -> list[tuple[Sockets, Sockets]]:
        made: dict[int, tuple[Sockets, Sockets]] = {number: ({}, {}) for number, _, _ in groups}
        expected = set()
        for number, own, addresses in groups:
            for rank, address in addresses.items():
                for kind in range(KINDS):
                    if rank < own:
                        try:
                            made[number][kind][rank] = _call(address, number, kind, own)
                        except BackendError:
                            self._hear_refusals()  # a rank that will not come has said so before it left
                            raise
                    elif rank > own:
                        expected.add((number, kind, rank))
        deadline = time.monotonic() + seconds
        while expected:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                number, _, rank = min(expected)
                raise BackendError(f"rank {rank} of group {number} did not connect within {seconds:g} s") from None
            token, number, kind, rank = self._hello(peer)
            if token != self._token or (number, kind, rank) not in expected:
                peer.close()  # not one of this mesh
                continue
            _check_owner(peer)
            expected.remove((number, kind, rank))
            made[number][kind][rank] = peer
        return list(made.values())

    def _hear_refusals(self) -> None:
        """Raise UsageError if a caller that is already here says why it will not be one of the mesh."""
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                peer, _ = self._socket.accept()
                with peer:
                    self._hello(peer)

    def _hello(self, peer: socket.socket) -> tuple[bytes, int, int, int]:
        """Return what a caller says of itself. Raises UsageError when it says why it will not be one of the mesh."""
        peer.settimeout(5.0)  # it says so as soon as it has connected
        try:
            data = peer.recv(_PACKET)
            if data.startswith(_ABORT + self._token):
                raise UsageError(data[1 + len(self._token) :].decode(errors="replace"))
            token, number, kind, rank = _HELLO.unpack(data)
        except (OSError, struct.error):
            return b"", -1, -1, -1
        return token, number, kind, rank


def _call(address: str, number: int, kind: int, own: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.connect(b"\0engine-" + address.encode())
        _check_owner(peer)
        peer.send(_HELLO.pack(address.encode(), number, kind, own))
    except OSError as error:
        peer.close()
        raise BackendError(f"a rank of this host has left while the mesh opened: {error.strerror}") from error
    return peer


def _refuse(address: str, reason: str) -> None:
    """Let a rank that may wait for this one know why it will not come."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(b"\0engine-" + address.encode())
        peer.send(_ABORT + address.encode() + reason.encode()[:2000])


def _check_owner(peer: socket.socket) -> None:
    """Refuse a process of another user: whoever holds a segment can write it."""
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        peer.close()
        raise UsageError(
            f"the ranks of this host run as different users ({os.geteuid()} and {uid}) and cannot share memory: start "
            f"them as one user, or set ENGINE_TRANSPORT=torch"
        )


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors; -1 is none."""
    for each in descriptors:
        if each >= 0:
            os.close(each)


class Links:
    """The meeting point of one group."""

    def __init__(self, rank: int, sockets: Sockets, names: Sequence[int], limit: float) -> None:
        """sockets: by rank in the group. names: the ranks' global numbers, for errors. limit: seconds that a meeting
        may take.
        """
        self.rank = rank
        self.size = len(names)
        self.names = names
        self._limit = limit
        self._sockets = sockets
        for peer in sockets.values():
            peer.setblocking(True)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_SLICE * 1e6)))
        close_in_children(sockets.values())
        self._send = [(j, sockets[j].send) for j in sorted(sockets)]
        self._receive = [(j, sockets[j].recv) for j in sorted(sockets)]
        self._send_to = {j: [(j, send)] for j, send in self._send}
        self._receive_from = {j: [(j, receive)] for j, receive in self._receive}

    def meet(self, word: bytes, root: int = -1) -> list[bytes]:
        """Give every rank a word of at most a few kilobytes and return theirs, in rank order, once all have come.

        With `root`, that rank meets every other, and the others only it: they do not wait for each other, and the words
        of those that they do not meet are their own. Raises BackendError when a peer has ended or failed, or the time
        limit has passed.
        """
        self._post(word, root)
        return self._hear(word, root)

    def collect(self, word: bytes, root: int) -> None:
        """Give `root` a word; it alone waits, for everybody's. Raises as `meet` does."""
        if self.rank == root:
            self._hear(word, root)
        else:
            self._post(word, root)

    def hand_over(self, fd: int, root: int = -1) -> dict[int, int]:
        """Give every peer a descriptor, and return theirs by rank, -1 for one that this process has no room for; the
        caller closes them. A meeting of its own. With `root`, only that rank gives one.
        """
        found: dict[int, int] = {}
        try:
            for j, _ in self._send if root in (-1, self.rank) else ():
                socket.send_fds(self._sockets[j], [b"fd"], [fd])
            for j, _ in self._receive:
                if root not in (-1, j):
                    continue
                deadline = 0.0
                while j not in found:
                    try:
                        word, fds, flags, _ = socket.recv_fds(self._sockets[j], _PACKET, 1)
                    except BlockingIOError:
                        deadline = self._patience(deadline, [peer for peer, _ in self._receive if peer >= j])
                        continue
                    except ConnectionResetError:
                        continue
                    if word[:1] == _ABORT:
                        raise BackendError(word[1:].decode(errors="replace"))
                    if not fds and not flags & socket.MSG_CTRUNC:
                        raise self._gone(j)
                    found[j] = fds[0] if fds else -1
        except BaseException as error:
            close_all(found.values())
            if isinstance(error, OSError):
                raise BackendError(f"memory could not be handed over: {error.strerror}") from error
            raise
        return found

    def abort(self, reason: str) -> None:
        """Tell every peer, now or when it comes, that this rank has failed."""
        word = _ABORT + reason.encode()[: _PACKET - 100]
        for peer in self._sockets.values():
            with contextlib.suppress(OSError):
                peer.send(word, socket.MSG_DONTWAIT)

    def shut(self) -> None:
        """End whatever waits here; the other ranks hear that this one has left."""
        for peer in self._sockets.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for peer in self._sockets.values():
            peer.close()

    def _post(self, word: bytes, root: int) -> None:
        for j, send in self._send if root in (-1, self.rank) else self._send_to[root]:
            try:
                send(word)
            except OSError as error:
                raise self._gone(j) from error

    def _hear(self, word: bytes, root: int) -> list[bytes]:
        """Return the next word of everybody whom this rank meets, and its own."""
        words = [word] * self.size
        awaited = self._receive if root in (-1, self.rank) else self._receive_from[root]
        deadline = 0.0
        for j, receive in awaited:
            while True:
                try:
                    answer = receive(_PACKET)
                    break
                except BlockingIOError:
                    pass  # a slice of the wait is over
                except ConnectionResetError:
                    continue  # it left without reading all, which the kernel tells once; what it said comes next
                deadline = self._patience(deadline, [peer for peer, _ in awaited if peer >= j])
            if not answer:
                raise self._gone(j)
            if answer[:1] == _ABORT:
                raise BackendError(answer[1:].decode(errors="replace"))
            words[j] = answer
        return words

    def _patience(self, deadline: float, waiting: Sequence[int]) -> float:
        """Return the deadline of a wait for these peers that has taken a slice, unless it has passed or one of them has
        ended meanwhile.
        """
        now = time.monotonic()
        deadline = deadline or now + self._limit - _SLICE
        poll = select.poll()
        by_number = {self._sockets[j].fileno(): j for j in waiting}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, event in poll.poll(0):
            if event & (select.POLLHUP | select.POLLERR):
                j = by_number[number]
                left = self._peek(j)
                if left is not None and left[:1] == _ABORT:
                    raise BackendError(left[1:].decode(errors="replace"))
                if not left:  # else it came, and ended afterwards
                    raise self._gone(j)
        if now >= deadline:
            late = ", ".join(f"rank {self.names[j]}" for j in waiting if self._peek(j) is None)
            raise BackendError(f"timed out after {self._limit:g} s waiting for {late}")
        return deadline

    def _peek(self, j: int) -> bytes | None:
        """Return a peer's next word without taking it, empty at its end, None where there is none yet."""
        while True:
            try:
                return self._sockets[j].recv(_PACKET, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue

    def _gone(self, j: int) -> BackendError:
        """Return the error for a peer that has ended; its last word says more, where there is one."""
        for _ in range(4):  # a reset, a word for this meeting, the last word, the end
            with contextlib.suppress(OSError):
                word = self._sockets[j].recv(_PACKET, socket.MSG_DONTWAIT)
                if word[:1] == _ABORT:
                    return BackendError(word[1:].decode(errors="replace"))
        return BackendError(f"rank {self.names[j]} is gone: its process has ended, or has closed the mesh")
