"""Answers, while the training thread waits, where this rank is: so that a hang ends in names and not in a time-out.

A thread in every process listens on a socket; the addresses are exchanged once, when the mesh opens. Nothing is
published per call: a rank is asked only when another's call has failed, and answers from the records that its
communicators keep of their last call anyway. Whoever fails leaves word with the others first, so that the ranks that
fail because of it can tell consequence from cause.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Any

from engine.comm.sockets import close_in_children
from engine.comm.source import source_line

if TYPE_CHECKING:
    from engine.comm.call import Call
    from engine.comm.channel import Channel

_ANSWER = 2.0  # seconds that a rank gets to answer: it needs its interpreter for a moment
_ASKED = 64  # ranks that one report asks at most
_MARGIN = 2.0  # seconds before a call in which another rank's failure can still be its cause
_LIMIT = 1 << 16  # bytes of one message
_BRIEF = 300  # letters of one call
ADDRESS_BYTES = 128
_READING = threading.Lock()  # one at a time, so that one does not switch collection on for another


class Monitor:
    """The listening thread of one process, and the addresses of the others'."""

    def __init__(self, rank: int, interface: str) -> None:
        """interface: the address to listen on, which the other ranks can reach."""
        self._rank = rank
        self._token = secrets.token_hex(8)
        self._opener = threading.get_ident()  # the thread that trains
        self._channels: list[Channel] = []
        self._notices: dict[int, tuple[float, str]] = {}  # the last words of ranks that failed, and when they came
        self._addresses: list[str] = []
        self._socket = socket.create_server(
            (interface, 0), family=socket.AF_INET6 if ":" in interface else socket.AF_INET, backlog=64
        )
        close_in_children([self._socket])  # or a child would keep the address of a rank that has ended
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="engine-monitor", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port:token, for the other ranks."""
        host, port = self._socket.getsockname()[:2]
        return f"{host}:{port}:{self._token}"

    def watch(self, channels: Iterable[Channel], addresses: Sequence[str]) -> None:
        """Take in this rank's communicators and every rank's address."""
        self._channels, self._addresses = list(channels), list(addresses)

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            socket.create_connection(self._socket.getsockname()[:2], timeout=1.0).close()
        self._thread.join(timeout=5.0)
        self._socket.close()

    # ---- asking ----------------------------------------------------------------------------------------------------

    def explain(self, channel: Channel) -> str:
        """Return what the other ranks of a failed call are doing, and leave word with them that this one failed."""
        call = channel.current
        if call is None or not self._addresses:
            return ""
        others = [rank for rank in channel.ranks if rank != self._rank][:_ASKED]
        # All at once: a stopped rank takes the whole time that it gets to answer.
        with ThreadPoolExecutor(max_workers=_ASKED) as pool:
            answers = dict(zip(others, pool.map(self._ask, others), strict=True))
            lines = [self._line(rank, answers[rank], channel) for rank in others]
            own = f"failed in {_brief(call)} on axis {channel.name!r}, call {call.sequence}"
            gone = [f"rank {rank}" for rank in others if isinstance(answers[rank], str)]
            word = own + (f" ({', '.join(gone)} gone or stopped)" if gone else "")
            elsewhere = [rank for rank in range(len(self._addresses)) if rank != self._rank][:_ASKED]
            list(pool.map(lambda rank: self._send(rank, {"notice": word}), elsewhere))
        notices = dict(self._notices)
        recent = [rank for rank, (when, _) in notices.items() if rank not in others and when >= channel.since - _MARGIN]
        left = channel.size - 1 - len(others)
        lines += [f"rank {rank} {notices[rank][1]}" for rank in recent[:4]]
        return "; ".join([*lines, *([f"{left} more ranks were not asked"] if left else [])])

    def _line(self, rank: int, answer: dict[str, Any] | str, channel: Channel) -> str:
        """Return what one rank does, seen from this one's failed call."""
        when, words = self._notices.get(rank, (-math.inf, ""))
        before = channel.since - when
        if before <= _MARGIN:
            return f"rank {rank} {words}" + (" and has left" if isinstance(answer, str) else "")
        if isinstance(answer, str):
            # It may have left because of what it failed in long ago, or have gone on: whoever reads this can judge.
            return f"rank {rank} {answer}" + (f"; {before:.0f} s before this call it {words}" if words else "")
        call = channel.current
        theirs = answer["axes"].get(channel.name)
        assert call is not None
        here = f"it is at {answer['at']}"
        if answer["failed"] and answer["ago"] <= time.perf_counter() - channel.since + _MARGIN:
            how = f"by itself, {answer['fault']}" if answer["fault"] else "too"
            return f"rank {rank} failed {how}: {answer['failed']}"
        if call.sequence and theirs and theirs["sequence"] >= call.sequence:
            return f"rank {rank} has arrived"
        last = f"last seen in {theirs['call']}, {theirs['state']}" if theirs and theirs["call"] else "not seen yet"
        waits = f", waits in {answer['waits']}" if answer["waits"] else ""
        word = "has not arrived" if call.sequence else "is elsewhere"
        return f"rank {rank} {word}: on this axis {last}{waits}; {here}"

    def _ask(self, rank: int) -> dict[str, Any] | str:
        """Return a rank's answer, or why there is none."""
        answer = self._send(rank, {"where": True})
        if isinstance(answer, str):
            return answer
        return answer if "axes" in answer else "answers nonsense"

    def _send(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | str:
        host, port, token = self._addresses[rank].rsplit(":", 2)
        try:
            with socket.create_connection((host, int(port)), timeout=_ANSWER) as peer:
                peer.settimeout(_ANSWER)
                peer.sendall(json.dumps({"token": token, "from": self._rank, **message}).encode() + b"\n")
                answer: dict[str, Any] = json.loads(_line_from(peer))
                return answer
        except TimeoutError:
            return "does not answer: it is stopped, or its host is"
        except (ConnectionError, ValueError):
            return "is gone: its process has ended, or has closed the mesh"
        except OSError as error:
            return f"cannot be reached at {host}:{port}: {error.strerror}"

    # ---- answering -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if self._closing:
                peer.close()
                return
            # On a thread of its own: one that says nothing must not keep the others from being heard.
            threading.Thread(target=self._reply, args=(peer,), name="engine-monitor-reply", daemon=True).start()

    def _reply(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(Exception):  # whoever calls, and whatever it says
            message = json.loads(_line_from(peer))
            if isinstance(message, dict) and message.get("token") == self._token:
                peer.sendall(json.dumps(self._answer(message)).encode() + b"\n")

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if "notice" in message:
            self._notices[int(message["from"])] = (time.perf_counter(), str(message["notice"]))
            return {}
        waiting = [c for c in self._channels if c.current is not None and not c.current.done]
        latest = max(waiting, key=lambda c: c.since, default=None)
        waits = failed = fault = ""
        ago, now = 0.0, time.perf_counter()
        if latest is not None and latest.current is not None:
            text = f"{_brief(latest.current)} on axis {latest.name!r} for "
            if latest.failed is latest.current:
                failed, fault = f"{text}{latest.failed_at - latest.since:.1f} s", latest.fault[:_BRIEF]
                ago = now - latest.failed_at
            else:
                waits = f"{text}{now - latest.since:.1f} s"
        return {
            "axes": {channel.name: _state(channel) for channel in self._channels},
            "waits": waits,
            "failed": failed,
            "fault": fault,
            "ago": ago,
            "at": self._where(),
        }

    def _where(self) -> str:
        """Return the line of the user's code in which the training thread is."""
        return source_line(_frame_of(self._opener))


def _frame_of(thread: int) -> FrameType | None:
    """Return where a thread is. Without garbage collection meanwhile: up to Python 3.11 it may let another thread run
    that starts a thread, which waits for the list of threads that is being read here, for ever
    (https://github.com/python/cpython/issues/106883).
    """
    with _READING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


def _brief(call: Call) -> str:
    """Return what is called; an exchange of a thousand messages not in full."""
    text = call.describe()
    return text if len(text) <= _BRIEF else text[:_BRIEF] + "..."


def _state(channel: Channel) -> dict[str, Any]:
    call = channel.current
    if call is None:
        return {"sequence": 0, "call": "", "state": ""}
    state = "finished" if call.done else "not finished"
    return {"sequence": channel.sequence, "call": f"{_brief(call)}, call {call.sequence}", "state": state}


def _line_from(peer: socket.socket) -> bytes:
    """Read up to the end of a line, in the time that a rank gets. Raises ValueError when it is too long or cut off."""
    data, end = b"", time.monotonic() + _ANSWER
    while not data.endswith(b"\n"):
        peer.settimeout(max(0.001, end - time.monotonic()))
        part = peer.recv(4096)
        data += part
        if not part or len(data) > _LIMIT:
            raise ValueError("no whole line")
    return data


def reachable_interface(hosts: int, towards: str | None) -> str:
    """Return the address of this host that other ranks can reach: the loopback where all are on one host or nothing
    better is known, else the one that faces `towards`.
    """
    if hosts == 1 or towards is None:
        return "127.0.0.1"
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
