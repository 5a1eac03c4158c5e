"""The monitor: its thread goes on, whoever calls it and whatever they say; a report tells what can belong to it."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.comm import monitor as monitoring
from engine.comm.call import Call
from engine.comm.monitor import Monitor, reachable_interface


def say(address: str, data: bytes) -> bytes:
    host, port, _ = address.rsplit(":", 2)
    with socket.create_connection((host, int(port)), timeout=5) as peer:
        with contextlib.suppress(OSError):  # it may have hung up already
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            return peer.recv(1 << 16)
        return b""


def ask(address: str) -> Any:
    token = address.rsplit(":", 1)[1]
    answer = say(address, json.dumps({"token": token, "from": 1, "where": True}).encode() + b"\n")
    return json.loads(answer)


def test_garbage_gets_no_answer_and_ends_nothing() -> None:
    monitor = Monitor(0, "127.0.0.1")
    try:
        for data in (
            b"",
            b"\n",
            b"[]\n",
            b"{}\n",
            b"GET / HTTP/1.1\n",
            b"\xff\xfe\n",
            b"x" * 70000,
            b'{"token": "no"}\n',
        ):
            assert say(monitor.address, data) == b""
        assert ask(monitor.address)["axes"] == {}
    finally:
        monitor.close()


def test_one_host_listens_on_the_loopback() -> None:
    assert reachable_interface(1, "10.0.0.1") == "127.0.0.1"
    assert reachable_interface(2, None) == "127.0.0.1"


# ---- what a report tells -----------------------------------------------------------------------------------------


@pytest.fixture
def monitors() -> Iterator[list[Monitor]]:
    """Four ranks' monitors in one process, so on one clock."""
    made = [Monitor(rank, "127.0.0.1") for rank in range(4)]
    yield made
    for each in made:
        each.close()


def channel(name: str, *ranks: int, started: float = 0.0, done: bool = False, failed: float | None = None) -> Any:
    """One rank's side of a group in its fifth call, which began `started` seconds from now and failed at `failed`."""
    now = time.perf_counter()
    call = Call(f"rank: {{}} on axis {name!r}", "all_reduce", None, "sum")
    call.sequence, call.done = 5, done
    return SimpleNamespace(
        name=name, ranks=ranks, size=len(ranks), sequence=5, current=call, since=now + started, fault="",
        failed=None if failed is None else call, failed_at=0.0 if failed is None else now + failed,
    )  # fmt: skip


def watch(monitors: list[Monitor], channels: dict[int, list[Any]]) -> None:
    addresses = [each.address for each in monitors]
    for rank, each in enumerate(monitors):
        each.watch(channels.get(rank, []), addresses)


def test_a_failure_elsewhere_is_told_while_it_can_be_the_cause_and_not_later(monitors: list[Monitor]) -> None:
    tensor, data = channel("tensor", 2, 3), channel("data", 0, 1)
    watch(monitors, {0: [data], 1: [channel("data", 0, 1)], 2: [tensor]})
    monitors[2].explain(tensor)
    words = "rank 2 failed in all_reduce(sum) on axis 'tensor', call 5"
    assert words in monitors[0].explain(data)
    later = channel("data", 0, 1, started=60.0)
    assert monitors[0].explain(later) == "rank 1 has arrived"


def test_a_peer_that_failed_before_and_went_on_is_described_as_it_is_now(monitors: list[Monitor]) -> None:
    old = channel("tensor", 1, 3)
    watch(monitors, {1: [channel("data", 0, 1)], 3: [old]})
    monitors[1].explain(channel("tensor", 1, 3))
    assert "rank 1 failed in all_reduce(sum) on axis 'tensor', call 5" in monitors[0].explain(channel("data", 0, 1))
    assert monitors[0].explain(channel("data", 0, 1, started=60.0)) == "rank 1 has arrived"


def test_the_last_words_of_a_rank_that_is_gone_are_told_with_their_age(monitors: list[Monitor]) -> None:
    watch(monitors, {})
    monitors[1].explain(channel("tensor", 1, 3))
    monitors[1].close()
    text = monitors[0].explain(channel("data", 0, 1, started=60.0))
    assert text == (
        "rank 1 is gone: its process has ended, or has closed the mesh; 60 s before this call it failed in "
        "all_reduce(sum) on axis 'tensor', call 5"
    )


@pytest.mark.parametrize(
    ("failed", "text"),
    [
        (-1.0, "rank 1 failed too: all_reduce(sum) on axis 'data' for 29.0 s"),
        (-10.0, "rank 1 has not arrived: on this axis last seen in all_reduce(sum), call 5, not finished; it is at "),
    ],
)
def test_a_failed_call_of_a_peer_counts_only_if_it_is_of_this_time(
    monitors: list[Monitor], failed: float, text: str
) -> None:
    own = channel("data", 0, 1, started=-5.0)
    own.current.sequence = 6
    watch(monitors, {1: [channel("data", 0, 1, started=-30.0, failed=failed)]})
    assert monitors[0].explain(own).startswith(text)


def test_many_stopped_ranks_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "_ANSWER", 1.0)
    own = Monitor(0, "127.0.0.1")
    # A stopped process looks like this: the system takes connections, nobody reads them.
    stopped = [socket.create_server(("127.0.0.1", 0)) for _ in range(63)]
    try:
        addresses = [own.address, *(f"127.0.0.1:{each.getsockname()[1]}:token" for each in stopped)]
        own.watch([], addresses)
        started = time.monotonic()
        text = own.explain(channel("world", *range(64)))
        assert time.monotonic() - started < 6.0, "2 s, twice the time for an answer; in turns of 16 it takes 8 s"
        assert text.count("does not answer: it is stopped") == 63
    finally:
        own.close()
        for each in stopped:
            each.close()


def test_no_garbage_is_collected_while_frames_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collection runs may let another thread start a thread, which Python 3.11 then never ends."""
    during = []
    plain = sys._current_frames

    def frames() -> dict[int, Any]:
        during.append(gc.isenabled())
        return plain()

    monkeypatch.setattr(sys, "_current_frames", frames)
    assert gc.isenabled()
    found = monitoring._frame_of(threading.get_ident())
    assert found is not None
    assert found.f_code.co_name == "frames"
    assert during == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        monitoring._frame_of(threading.get_ident())
        assert not gc.isenabled(), "who has switched it off keeps it off"
    finally:
        gc.enable()
