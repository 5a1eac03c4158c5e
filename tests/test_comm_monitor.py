"""The monitor's thread goes on, whoever calls it and whatever they say."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

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
