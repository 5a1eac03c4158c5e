"""What the ranks of the collectives benchmark tell each other outside the mesh: that one cannot go on, and why.

An error of one rank must reach the person, once and with that rank's number, and a command that is wrong on one rank
must end all. It goes through torch's store of the job, since a wrong command is found before there is any group.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from engine.comm.rendezvous import find_ranks
from engine.errors import CommunicationError
from engine.layout import Layout

_JOIN = 300.0  # seconds that a rank waits for the others, as long as engine.init does
_PRINT = timedelta(seconds=5)  # that a rank waits until another has printed, or has heard
_STORE_ERRORS = (RuntimeError, TimeoutError)


class Ranks:
    """The ranks of a torchrun job, seen from one of them."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        """store: torch's store of the job, None for a lone rank. `find` makes one from torchrun's environment."""
        self.rank, self.size, self._store = rank, size, store

    @classmethod
    def find(cls) -> Ranks:
        """Return this job's ranks. Raises EngineError where torchrun's environment is incomplete, or none meet."""
        return cls(*find_ranks(Layout(data=-1), None, None, None, _JOIN))

    def refuse(self, error: str) -> bool:
        """Tell the others why this rank cannot run the command, an empty text if it can; return whether any cannot.

        All ranks call it. Rank 0 prints each text once, with the ranks that gave it unless all did. Raises
        CommunicationError on every rank when some do not come.
        """
        if self._store is None:
            self._print_all([error])
            return bool(error)
        self._store.set(f"collectives/error/{self.rank}", error)
        if self.rank == 0:
            errors = self._collect()
            self._print_all(errors)  # before any rank can leave: torchrun then ends the others
            self._store.set("collectives/errors", json.dumps(errors))
            with suppress(*_STORE_ERRORS):  # the store may be this process's
                self._store.wait([f"collectives/heard/{other}" for other in range(1, self.size)], _PRINT)
        else:
            self._wait(["collectives/errors"], timedelta(seconds=_JOIN + 5), "rank 0 has not joined")
            errors = json.loads(self._store.get("collectives/errors").decode())
            self._store.set(f"collectives/heard/{self.rank}", "")
        return any(errors)

    def say(self, error: str) -> None:
        """Print what this rank failed with, unless another has printed the same words."""
        key = f"collectives/said/{hashlib.sha256(error.encode()).hexdigest()}"
        try:
            first = self._store is None or self._store.add(key, 1) == 1
        except _STORE_ERRORS:
            first = True  # the store has gone with its host: better twice than not at all
        if first:
            _print(_line(error, [self.rank]))
        if self._store is not None:
            with suppress(*_STORE_ERRORS):
                if first:
                    self._store.set(f"{key}/done", "")
                else:  # to leave first would end the one that prints
                    self._store.wait([f"{key}/done"], _PRINT)

    def _collect(self) -> list[str]:
        """Return every rank's error."""
        self._wait([f"collectives/error/{other}" for other in range(self.size)], timedelta(seconds=_JOIN), "")
        return [self._store.get(f"collectives/error/{other}").decode() for other in range(self.size)]

    def _wait(self, keys: Sequence[str], limit: timedelta, why: str) -> None:
        try:
            self._store.wait(list(keys), limit)
        except _STORE_ERRORS as error:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            why = why or f"missing ranks {absent}: {self.size - len(absent)} of {self.size} joined"
            raise CommunicationError(f"{why} within {limit.total_seconds():g} s: start every rank") from error

    def _print_all(self, errors: Sequence[str]) -> None:
        for text in dict.fromkeys(filter(None, errors)):
            ranks = [rank for rank, each in enumerate(errors) if each == text]
            line = f"error: {text}" if len(ranks) == self.size else _line(text, ranks)
            _print(line)


def _print(line: str) -> None:
    print(line + "\n", end="", file=sys.stderr, flush=True)  # in one piece, since other ranks may print too


def _line(error: str, ranks: Sequence[int]) -> str:
    """Return the line of an error; the engine's own often name their rank."""
    if error.startswith(f"rank {ranks[0]} "):
        return f"error: {error}"
    return f"error: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {error}"
