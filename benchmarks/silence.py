"""A mesh that says nothing: the bounds of a training step are its own compute, with all communication removed.

Where a collective would bring other ranks' values, the rank's own stand in, so sizes, dtypes and the work done on
them stay what they are and no value is random memory. What comes out is not a training step's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from engine import Mesh
from engine.comm.algorithms.run import Messenger
from engine.comm.choice import OPERATIONS
from engine.comm.transport import Transport

_AXES = ("data", "tensor", "pipeline", "world")


class SilentTransport(Transport):
    """Moves nothing, whatever the real one is."""

    name = "silent"

    def __init__(self, real: Transport, rank: int) -> None:
        self.ranks = real.ranks
        self._rank = rank

    def all_reduce(self, x: Tensor, op: str) -> list[Any]:  # noqa: ARG002 (the transport's signature)
        return []

    def broadcast(self, x: Tensor, src: int) -> list[Any]:  # noqa: ARG002
        return []

    def reduce(self, x: Tensor, dst: int, op: str) -> list[Any]:  # noqa: ARG002
        return []

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> list[Any]:  # noqa: ARG002
        own = x.chunk(len(self.ranks))[self._rank].view_as(out)
        if own.data_ptr() != out.data_ptr():
            out.copy_(own)
        return []

    def all_gather(self, out: Tensor, x: Tensor) -> list[Any]:
        own = out.chunk(len(self.ranks))[self._rank].view_as(x)
        if own.data_ptr() != x.data_ptr():
            own.copy_(x)
        return []

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],  # noqa: ARG002
        receives: Sequence[tuple[Tensor, int]],
        tag: int = 0,  # noqa: ARG002
    ) -> list[Any]:
        for x, _ in receives:
            x.zero_()
        return []

    def all_to_all(self, out: Tensor, x: Tensor) -> list[Any]:
        out.copy_(x)
        return []

    def wait(self, works: list[Any]) -> None:  # noqa: ARG002
        return None

    def close(self) -> None:
        return None


@contextmanager
def silenced(mesh: Mesh) -> Iterator[None]:
    """Let nothing be sent over any axis of `mesh` inside the block.

    What a first step learns from its peers (the shapes between stages) must have been learnt before. What ranks compare
    with each other is not compared.
    """
    communicators = [getattr(mesh, axis) for axis in _AXES]
    real = [(comm._transport, comm._messenger, comm._thresholds) for comm in communicators]
    try:
        for comm in communicators:
            if comm._transport is not None:
                comm._transport = silent = SilentTransport(comm._transport, comm.rank)
                comm._messenger = Messenger(silent, 0)  # for what is never left to the backend
                native = dict.fromkeys(OPERATIONS, ((float("inf"), "native"),))
                comm._thresholds = {False: native, True: native}
                vars(comm)["check_equal"] = lambda _what, _value: None
        yield
    finally:
        for comm, each in zip(communicators, real, strict=True):
            comm._transport, comm._messenger, comm._thresholds = each
            vars(comm).pop("check_equal", None)
