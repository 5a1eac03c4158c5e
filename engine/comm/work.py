"""The handle of a started operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Work:
    """A started operation. `wait` returns its result; the handle keeps every buffer alive until then."""

    def __init__(self, wait: Callable[[], None], finish: Callable[[], Any], buffers: object) -> None:
        """Made by a Communicator. `wait` blocks until the backend is done, `finish` makes the result of it."""
        self._wait: Callable[[], None] | None = wait
        self._finish = finish
        self._buffers = buffers
        self._result: Any = None

    def wait(self) -> Any:
        """Wait until the operation is done and return its result. Waiting again returns the same result.

        Raises CommunicationError when a peer is gone or the time limit has passed.
        """
        if self._wait is not None:
            self._wait()
            self._result = self._finish()
            self._wait = self._buffers = None
        return self._result
