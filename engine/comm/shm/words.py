"""What ranks say when they meet: which operation each is in. A difference is an error on both sides, never a wrong sum.

A word is a head, equal on all ranks of one operation, and where its sender's tensor lies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from engine.comm.transport import BackendError

_HEAD = struct.Struct("<cBBiq")  # "c", operation, dtype, root, elements
_PLACE = struct.Struct("<qq")  # segment, offset in bytes; -1 for a tensor of the process's own
_OPERATIONS = ("barrier", "all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "all_to_all")
_REDUCTIONS = ("", "sum", "max", "min", "prod")
_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
HEAD = _HEAD.size


def head(name: str, op: str, dtype: torch.dtype, count: int, root: int) -> bytes:
    """Return the head of an operation's words."""
    number = _OPERATIONS.index(name) * len(_REDUCTIONS) + _REDUCTIONS.index(op)
    return _HEAD.pack(b"c", number, _NUMBERS[dtype], root, count)


def allocation(nbytes: int, *, shared: bool = False) -> bytes:
    """Return the head of an allocation's first word. shared: one for all ranks, which has a root."""
    return _HEAD.pack(b"a", 0, 0, 0 if shared else -1, nbytes)


def place(number: int, offset: int) -> bytes:
    """Return the rest of a word: where the sender's tensor lies."""
    return _PLACE.pack(number, offset)


def places(found: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return where every rank's tensor lies."""
    return [_PLACE.unpack_from(word, HEAD) for word in found]


def compare(found: Sequence[bytes], own: bytes, names: Sequence[int]) -> None:
    """Raise BackendError when a rank is in another operation than this one's."""
    for j, word in enumerate(found):
        if not word.startswith(own):
            raise BackendError(
                f"the ranks called different things: rank {names[j]} {describe(word)}, this rank {describe(own)}"
            )


def describe(word: bytes) -> str:
    """Return what a word says, for errors."""
    if len(word) < HEAD or word[:1] not in (b"c", b"a"):
        return "another part of allocate"
    kind, number, dtype, root, count = _HEAD.unpack_from(word)
    if kind == b"a":
        return f"allocate of {count} {'shared ' if root >= 0 else ''}bytes"
    name, op = _OPERATIONS[number // len(_REDUCTIONS)], _REDUCTIONS[number % len(_REDUCTIONS)]
    if name == "barrier":
        return name
    shown = str(_DTYPES[dtype]).removeprefix("torch.")
    return f"{name}{f'({op})' if op else ''} of {count} {shown}" + (f" with root {root}" if root >= 0 else "")


def number_of(dtype: torch.dtype) -> int:
    """Return the number by which words name a dtype."""
    return _NUMBERS[dtype]


def dtype_of(number: int) -> torch.dtype:
    """Return the dtype of a number."""
    return _DTYPES[number]
