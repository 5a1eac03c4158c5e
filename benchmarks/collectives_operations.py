"""The operations under measurement: how the engine is called, the buffers, and what must come out.

Rank r's vector holds (31 i + r) mod m at element i, small integers of which every sum is exact (see
`collectives_case.modulus`); where a rank gives or takes a part, it is the r-th of n equal ones. The root is rank 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.collectives_case import DTYPES, MEMORIES, OPS, Case, modulus
from engine import Communicator
from engine.errors import UsageError

Call = Callable[[Communicator, Tensor, Tensor, str | None, bool], Any]
"""(communicator, input, output, algorithm or None, async_op); gives a Work when async_op, else anything. The result is
written into the output, which is made before anything is timed."""

_TILE = 1 << 16


@dataclass
class Buffers:
    """What one rank gives to an operation and what it must get."""

    x: Tensor
    """The input: the whole vector, or this rank's part."""
    out: Tensor
    """Where the result arrives; shares memory with `x` in place."""
    source: Tensor
    """The values that `x` has before each call."""
    expected: Tensor | None
    """What must be in `out`; None where nothing is known or this rank gets nothing."""
    in_place: bool

    def refill(self) -> None:
        """Undo what an in-place call did to its input."""
        if self.in_place:
            self.x.copy_(self.source)

    def poison(self) -> None:
        """Fill the output with what no result has, then refill the input."""
        self.out.fill_(DTYPES[str(self.out.dtype).removeprefix("torch.")].exact)
        self.x.copy_(self.source)

    def wrong(self) -> int:
        """Count the elements in the output that are not as expected."""
        return 0 if self.expected is None else int((self.out != self.expected).sum())


# ---- the engine's calls ------------------------------------------------------------------------------------------


def _all_reduce(comm: Communicator, x: Tensor, _out: Tensor, algorithm: str | None, async_op: bool) -> Any:
    if async_op:
        return comm.all_reduce(x, algorithm=algorithm, async_op=True)
    return comm.all_reduce(x, algorithm=algorithm)


def _broadcast(comm: Communicator, x: Tensor, _out: Tensor, algorithm: str | None, async_op: bool) -> Any:
    if async_op:
        return comm.broadcast(x, 0, algorithm=algorithm, async_op=True)
    return comm.broadcast(x, 0, algorithm=algorithm)


def _reduce(comm: Communicator, x: Tensor, _out: Tensor, algorithm: str | None, async_op: bool) -> Any:
    if async_op:
        return comm.reduce(x, 0, algorithm=algorithm, async_op=True)
    return comm.reduce(x, 0, algorithm=algorithm)


def _reduce_scatter(comm: Communicator, x: Tensor, out: Tensor, algorithm: str | None, async_op: bool) -> Any:
    if async_op:
        return comm.reduce_scatter(x, out=out, algorithm=algorithm, async_op=True)
    return comm.reduce_scatter(x, out=out, algorithm=algorithm)


def _all_gather(comm: Communicator, x: Tensor, out: Tensor, algorithm: str | None, async_op: bool) -> Any:
    if async_op:
        return comm.all_gather(x, out=out, algorithm=algorithm, async_op=True)
    return comm.all_gather(x, out=out, algorithm=algorithm)


def _all_to_all(comm: Communicator, x: Tensor, out: Tensor, _algorithm: str | None, async_op: bool) -> Any:
    return comm.all_to_all(x, out=out, async_op=True) if async_op else comm.all_to_all(x, out=out)


def _gather(comm: Communicator, x: Tensor, out: Tensor, _algorithm: str | None, async_op: bool) -> Any:
    parts = out.chunk(comm.size) if comm.rank == 0 else None
    return comm.gather(x, 0, out=parts, async_op=True) if async_op else comm.gather(x, 0, out=parts)


def _scatter(comm: Communicator, x: Tensor, out: Tensor, _algorithm: str | None, async_op: bool) -> Any:
    parts = x.chunk(comm.size) if comm.rank == 0 else None
    return comm.scatter(parts, out, 0, async_op=True) if async_op else comm.scatter(parts, out, 0)


def _send_recv(comm: Communicator, x: Tensor, out: Tensor, _algorithm: str | None, async_op: bool) -> Any:
    """Every rank sends to the next and receives from the one before."""
    sends, recvs = [(x, (comm.rank + 1) % comm.size)], [(out, (comm.rank - 1) % comm.size)]
    if async_op:
        return comm.exchange(sends, recvs, async_op=True)
    comm.exchange(sends, recvs)
    return None


def _barrier(comm: Communicator, _x: Tensor, _out: Tensor, _algorithm: str | None, _async_op: bool) -> Any:
    """Has neither tensors nor an asynchronous form."""
    comm.barrier()


OPERATIONS: dict[str, Call] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}


def load_operations(changed_by: str | None) -> dict[str, Call]:
    """Return the table of calls; `module:function` makes another of it, which is how a test plants a broken one."""
    if changed_by is None:
        return dict(OPERATIONS)
    module, _, function = changed_by.partition(":")
    try:
        change = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--operations {changed_by!r} cannot be loaded: {error}") from error
    made: dict[str, Call] = change(dict(OPERATIONS))
    return made


# ---- values ------------------------------------------------------------------------------------------------------


def pattern(rank: int, m: int) -> Tensor:
    """Return one period of rank `rank`'s vector: int64 (m,)."""
    return (torch.arange(m) * (31 % m or 1) + rank) % m


def fill(out: Tensor, period: Tensor, start: int) -> None:
    """Fill `out` with the periodic vector, from its element `start` on."""
    tile = period.roll(-(start % len(period))).repeat(max(1, _TILE // len(period))).to(out)
    for first in range(0, len(out), len(tile)):
        part = out[first : first + len(tile)]
        part.copy_(tile[: len(part)])


Empty = Callable[[int], Tensor]
"""Returns memory for so many elements of the case's dtype."""


def make_buffers(case: Case, n: int, rank: int, device: torch.device, check: bool) -> Buffers:
    """Return this rank's buffers, filled. Where sums are not exact nothing is expected."""
    m = modulus(case.op, case.dtype, n)
    x, out = _tensors(case, n, rank, lambda count: torch.empty(count, dtype=_dtype(case), device=device))
    fill(x, pattern(rank, m or 2), rank * len(x) if _gives_part(case) else 0)
    expected = expect(case, n, rank, m, torch.empty_like(out)) if check and m is not None else None
    return Buffers(x, out, x.clone(), expected, case.in_place)


def in_memory(made: Buffers, memory: str, case: Case, comm: Communicator) -> Buffers:
    """Return buffers with the same values whose tensors lie in another memory. Every rank of `comm` calls it."""
    if memory == MEMORIES[0]:
        return made
    x, out = _tensors(case, comm.size, comm.rank, lambda count: comm.allocate((count,), _dtype(case)))
    x.copy_(made.source)
    return Buffers(x, out, made.source, made.expected, made.in_place)


def _tensors(case: Case, n: int, rank: int, empty: Empty) -> tuple[Tensor, Tensor]:
    """Return input and output, each the whole vector or this rank's part. Every rank asks for the same memory."""
    part = case.count // n
    own = slice(rank * part, (rank + 1) * part)
    gives_part, gets_part = _gives_part(case), case.op in ("reduce_scatter", "scatter")
    if not case.in_place:
        return empty(part if gives_part else case.count), empty(part if gets_part else case.count)
    whole = empty(case.count)
    return whole[own] if gives_part else whole, whole[own] if gets_part else whole


def _gives_part(case: Case) -> bool:
    return case.op in ("all_gather", "gather")


def _dtype(case: Case) -> torch.dtype:
    found: torch.dtype = getattr(torch, case.dtype)
    return found


def expect(case: Case, n: int, rank: int, m: int, result: Tensor) -> Tensor | None:
    """Fill `result` with what rank `rank` must get; None where it gets nothing."""
    part = case.count // n
    if case.op in ("reduce", "gather") and rank != 0:
        return None
    if OPS[case.op].reduces:
        total = torch.stack([pattern(each, m) for each in range(n)]).sum(0)
        fill(result, total, rank * part if case.op == "reduce_scatter" else 0)
    elif case.op in ("all_gather", "gather", "all_to_all"):
        for peer, block in enumerate(result.chunk(n)):
            fill(block, pattern(peer, m), (rank if case.op == "all_to_all" else peer) * part)
    else:
        peer = (rank - 1) % n if case.op == "send_recv" else 0
        fill(result, pattern(peer, m), rank * part if case.op == "scatter" else 0)
    return result
