"""A table of operations for the collectives benchmark in which one is broken: it must be found."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from benchmarks.collectives_operations import Call
from engine import Communicator
from engine.errors import UsageError


def one_element(operations: dict[str, Call]) -> dict[str, Call]:
    """Let the last rank's all-gather miss one element by one."""
    whole = operations["all_gather"]

    def all_gather(comm: Communicator, x: Tensor, out: Tensor, algorithm: str | None, async_op: bool) -> Any:
        returned = whole(comm, x, out, algorithm, async_op)
        if comm.rank == comm.size - 1:
            out[len(out) // 2] += 1
        return returned

    return {**operations, "all_gather": all_gather}


def refuse_to_load(operations: dict[str, Call]) -> dict[str, Call]:
    """Let the command be wrong on rank 1 alone."""
    if os.environ.get("RANK") == "1":
        raise UsageError("a planted wrong command")
    return operations


def refuse(operations: dict[str, Call]) -> dict[str, Call]:
    """Let rank 1 refuse its first all-gather."""

    def all_gather(comm: Communicator, x: Tensor, out: Tensor, algorithm: str | None, async_op: bool) -> Any:
        if comm.rank == 1:
            raise UsageError("a planted wrong call")
        return operations["all_gather"](comm, x, out, algorithm, async_op)

    return {**operations, "all_gather": all_gather}


def crash(operations: dict[str, Call]) -> dict[str, Call]:
    """Let rank 1 fail in its first all-gather."""

    def all_gather(comm: Communicator, x: Tensor, out: Tensor, algorithm: str | None, async_op: bool) -> Any:
        if comm.rank == 1:
            raise RuntimeError("the planted crash of rank 1")
        return operations["all_gather"](comm, x, out, algorithm, async_op)

    return {**operations, "all_gather": all_gather}
