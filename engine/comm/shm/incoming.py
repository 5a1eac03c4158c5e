"""The way in from one peer: what it puts into its mailbox, or says where to read, goes into the tensors asked for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from ctypes import memmove

import torch
from torch import Tensor

from engine.comm.shm import words
from engine.comm.shm.memory import map_segment
from engine.comm.shm.packets import ANNOUNCE, KEPT, PIECE, SLOTS, Message, drain
from engine.comm.shm.segments import Segments
from engine.comm.transport import BackendError


class Incoming:
    """The messages from one peer. Under the lock of `Mail`."""

    def __init__(
        self,
        peer: int,
        name: int,
        segments: Segments,
        read: list[int],
        say: Callable[[bytes], None],
        fail: Callable[[str], BackendError],
    ) -> None:
        """peer: its position in the group; name: its global number, for errors; read: slots of its mailbox that have
        been read, unknown to it; say: sends it a packet; fail: told why, when the messages of this rank have failed.
        """
        self._peer, self._name, self._segments, self._fail = peer, name, segments, fail
        self._read, self._say = read, say
        self._posted: dict[int, deque[Message]] = {}
        self._early: dict[int, deque[Message]] = {}
        self._arriving: Message | None = None
        self._slot = 0  # bytes of a slot of the peer's mailbox
        self._box: Tensor | None = None

    def post(self, message: Message) -> None:
        """Ask for a message; one that has come early is taken at once, whole or as far as it is there."""
        early = self._early.get(message.tag)
        if not early:
            self._posted.setdefault(message.tag, deque()).append(message)
            return
        came = early.popleft()
        self._match(message, came.x.dtype, came.x.numel())
        if came.ended:
            memmove(message.address, came.address, came.nbytes)
            message.ended = True
            return
        memmove(message.address, came.address, came.done)
        message.done = came.done
        self._arriving = message

    def announced(self, packet: bytes, fds: list[int]) -> None:
        """The peer says what comes, hands its mailbox over where it is new, and has put the first piece there."""
        _, tag, dtype, count, number, offset, slot, first, _ = ANNOUNCE.unpack(packet)
        kind = words.dtype_of(dtype)
        for fd in fds:
            self._slot, self._box = slot, map_segment(fd, SLOTS * slot)
            os.close(fd)
        posted = self._posted.get(tag)
        if posted:
            message = posted.popleft()
            self._match(message, kind, count)
        else:
            with torch.inference_mode(False):
                message = Message(torch.empty(count, dtype=kind, device="cpu"), tag, self._peer)
            self._early.setdefault(tag, deque()).append(message)
        if number < 0:
            self._arriving = message
            if first >= 0:
                self.take(first)
            return
        source = self._segments.of(self._peer, number, offset, message.nbytes)
        memmove(message.address, source.data_ptr(), message.nbytes)
        message.ended = True
        self._say(PIECE.pack(b"R", 0))

    def take(self, slot: int) -> None:
        """Take a piece out of a slot."""
        message, box = self._arriving, self._box
        assert message is not None
        assert box is not None
        count = min(self._slot, message.nbytes - message.done)
        memmove(message.address + message.done, box.data_ptr() + slot * self._slot, count)
        message.done += count
        self._read.append(slot)
        if len(self._read) > KEPT:
            self._say(PIECE.pack(b"A", drain(self._read)))
        if message.done == message.nbytes:
            message.ended = True
            self._arriving = None

    def close(self) -> None:
        self._box = None

    def _match(self, message: Message, dtype: torch.dtype, count: int) -> None:
        if message.x.dtype is dtype and message.x.numel() == count:
            return
        raise self._fail(
            f"rank {self._name} sent {count} {str(dtype).removeprefix('torch.')}, but the receive is of "
            f"{message.x.numel()} {str(message.x.dtype).removeprefix('torch.')}: both sides name the same tensor"
        )
