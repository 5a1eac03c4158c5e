"""One call of a collective, as a record: what errors, checks, hang reports and the ledger say of it.

Made for every call, so it holds references and makes its texts only when they are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.comm.arguments import shape_of


class _Kind(NamedTuple):
    """What remains of a tensor."""

    dtype: torch.dtype
    shape: torch.Size


def _kinds(messages: Any) -> list[tuple[_Kind, int]]:
    return [(_Kind(x.dtype, x.shape), peer) for x, peer in messages]


class Call:
    """What is being called on which group. As text it names this rank, the operation and the axis."""

    __slots__ = ("algorithm", "done", "label", "messages", "name", "note", "op", "peer", "sequence", "wire_dtype", "x")

    def __init__(self, label: str, name: str, x: Tensor | None, op: str | None = None, peer: int | None = None) -> None:
        """label: says who calls on which axis, with a place for the operation; x: the tensor; op: the reduction; peer:
        the rank that sends or receives alone.
        """
        self.label = label
        self.name, self.op, self.peer = name, op, peer
        self.x = x
        self.algorithm = "native"
        self.wire_dtype: torch.dtype | None = None
        self.messages: tuple[Any, Any] | None = None
        self.note = ""
        self.sequence = 0
        self.done = False

    def end(self) -> None:
        """Note that the call is through, and let its tensors go: a record may stay for long."""
        self.done = True
        if self.x is not None:
            self.x = _Kind(self.x.dtype, self.x.shape)  # type: ignore[assignment]
        if self.messages is not None:
            sends, recvs = self.messages
            self.messages = (_kinds(sends), _kinds(recvs))

    def __str__(self) -> str:
        return self.label.format(self.name)

    def full(self) -> str:
        """Return the same with dtype and shape."""
        return self.label.format(self.describe())

    def describe(self) -> str:
        """Return operation, dtype and shape: `all_reduce(sum) of float32 (4,)`."""
        if self.messages is not None:
            sends, recvs = self.messages
            listed = [f"to {p} {shape_of(x)}" for x, p in sends] + [f"from {p} {shape_of(x)}" for x, p in recvs]
            return f"{self.name} ({', '.join(listed)})"
        text = self.name + self.note if self.op is None else f"{self.name}({self.op})"
        if self.x is not None:
            text += f" of {shape_of(self.x)}"
        if self.wire_dtype is not None:
            text += f" as {self.wire_dtype}"
        if self.peer is not None:
            text += f" with {'dst' if self.name in ('reduce', 'gather') else 'src'} {self.peer}"
        return text
