"""The engine's errors.

Every one is an EngineError and also the built-in kind a caller would expect, so both `except` styles work.
A message states the rule, all the numbers, and what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class LayoutError(EngineError, ValueError):
    """Sizes that do not fit: axes and ranks, heads and tensor ranks, batch and microbatches."""


class UsageError(EngineError, ValueError):
    """A call with arguments, or in an order, that cannot work."""


class DtypeError(EngineError, TypeError):
    """A dtype or reduction that the backend does not carry; nothing was sent."""


class CommunicationError(EngineError, RuntimeError):
    """A peer or the backend failed, or a collective ran past its time limit."""


class MemoryShortageError(EngineError, MemoryError):
    """The machine, or a limit on it, has less memory than was asked for; nothing was taken."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name nearest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
