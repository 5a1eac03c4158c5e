"""Sockets and forked children."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable


def close_in_children(sockets: Iterable[socket.socket]) -> None:
    """Let processes that this one forks, say a loader's workers, close its sockets: these must end when it does."""
    known = [weakref.ref(each) for each in sockets]

    def close() -> None:
        for reference in known:
            if (each := reference()) is not None:
                each.close()

    os.register_at_fork(after_in_child=close)
