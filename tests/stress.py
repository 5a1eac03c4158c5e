"""Random calls on real ranks, every result compared exactly: `python -m tests.stress --operations 10000`.

All ranks draw the same calls from one seed, which is printed. Tensors hold small whole numbers, so every result is
known to the bit. Sizes, dtypes, strides, operations, who holds its tensor in memory of `allocate`, what is asynchronous
and when it is waited for are random. `make stress` runs this, `tests/test_shm_stress.py` a shorter one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import engine
from engine import Layout
from tests.world import World

RANKS = 4
REDUCED = (
    torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
MOVED = (*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
KINDS = (
    "all_reduce", "all_reduce", "all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all",
    "gather", "scatter", "exchange", "exchange", "barrier",
)  # fmt: skip
POOL = 6 << 20  # bytes of memory of `allocate` at a time
MOST = 1 << 20  # bytes of a tensor
PENDING = 12


class Stress:
    """The calls of one rank."""

    def __init__(self, comm: engine.Communicator, seed: int) -> None:
        self.comm = comm
        self.choose = random.Random(seed)
        self.own = random.Random(seed + 1 + comm.rank)  # for the order of waiting
        self.reduced = [dtype for dtype in REDUCED if dtype in comm._reducible]
        self.pending: list[tuple[str, Callable[[], Any], Callable[[Any], bool]]] = []
        self.pool = comm.allocate((POOL,), torch.uint8)
        self.used = 0
        self.number = 0
        self.wrong: list[str] = []

    def run(self, operations: int) -> list[str]:
        for self.number in range(operations):
            self.step()
            if len(self.pending) > self.choose.randrange(1, PENDING):
                self.settle()
        self.settle()
        return self.wrong

    def settle(self) -> None:
        """Wait for all that is under way, in an order of this rank's own."""
        self.own.shuffle(self.pending)
        for name, wait, right in self.pending:
            if not right(wait()):
                self.wrong.append(name)
        self.pending.clear()

    def count(self, item: int, parts: int) -> int:
        """Mostly small, at times as large as several pieces; most of them odd."""
        return max(1, int(2 ** self.choose.uniform(0, 20)) // item // parts) if self.choose.random() < 0.9 else 1

    def held(self, rank: int, count: int, dtype: torch.dtype, salt: int, op: str) -> Tensor:
        """From 0 to 4, for a product 1 and 2: sums, means and products of all ranks' are exact in every dtype."""
        start = (rank * 3 + salt) % 5
        values = _PATTERN[start : start + count]
        if dtype is torch.bool:  # of the five ranks that the pattern would have one differs, so not all sums are alike
            return (values == 4) == bool(salt % 2)
        return (values % 2 + 1 if op == "prod" else values).to(dtype)

    def place(self, x: Tensor, registered: bool, stride: int) -> Tensor:
        """Return a tensor like `x`, in memory of `allocate` or this process's, with gaps or none."""
        first, elements = self.used, x.numel() * stride
        self.used += -(-elements * x.element_size() // 16) * 16  # on every rank, so that all run out together
        if registered:
            memory = self.pool[first : first + elements * x.element_size()].view(x.dtype)
        else:
            memory = torch.empty(elements, dtype=x.dtype)
        view = memory.view(x.numel(), stride)[:, 0].view(x.shape)
        return view.copy_(x)

    def step(self) -> None:
        """Draw one call, the same on all ranks, and start it."""
        comm, choose, size, rank = self.comm, self.choose, self.comm.size, self.comm.rank
        kind = choose.choice(KINDS)
        dtype = choose.choice(self.reduced if kind in REDUCING else MOVED)
        parts = size if kind in ("reduce_scatter", "all_to_all", "all_gather", "gather", "scatter") else 1
        count, salt, root = self.count(dtype.itemsize, parts), choose.randrange(5), choose.randrange(size)
        op = choose.choice(ops_of(dtype)) if kind in REDUCING else "sum"
        mask, async_op = choose.choice((0, 15, choose.randrange(16))), choose.random() < 0.4
        stride = choose.choice((1, 1, 1, 2)) if count < 100_000 else 1
        registered = bool(mask >> rank & 1)
        if self.used + 2 * (MOST + 64) * stride > POOL:
            self.settle()
            self.used = 0
            if choose.random() < 0.3:
                del self.pool
                self.pool = comm.allocate((POOL,), torch.uint8)
        if kind == "barrier":
            comm.barrier()
            return
        whole = count * parts
        mine = [self.held(r, whole if kind in ("reduce_scatter", "all_to_all") else count, dtype, salt, op)
                for r in range(size)]  # fmt: skip
        x = self.place(mine[rank], registered, stride)
        given = None if kind in ("all_reduce", "broadcast") or (kind == "reduce" and rank == root) else mine[rank]
        start, wanted = self.call(kind, x, mine, op, root, count)
        name = f"{self.number}: {kind}({op}) of {x.numel()} {dtype}, root {root}, mask {mask:04b}, stride {stride}, "
        name += "async" if async_op else "sync"

        def right(result: Any) -> bool:
            if given is not None and kind != "exchange" and not same(x, given):
                return False
            if isinstance(result, list):
                result = torch.cat([each.reshape(-1) for each in result])
            return (result is None) == (wanted is None) and (wanted is None or same(result.reshape(-1), wanted))

        result = start(async_op)
        if async_op:
            self.pending.append((name, result.wait, right))
        elif not right(result):
            self.wrong.append(name)

    def call(
        self, kind: str, x: Tensor, mine: list[Tensor], op: str, root: int, count: int
    ) -> tuple[Callable[[bool], Any], Tensor | None]:
        """Return what starts a call, given whether it is asynchronous, and its result on this rank."""
        comm, size, rank = self.comm, self.comm.size, self.comm.rank
        step = 1 + root % (size - 1)
        after, before = (rank + step) % size, (rank - step) % size
        if kind == "all_reduce":
            return lambda later: comm.all_reduce(x, op, async_op=later), reduced(mine, op)
        if kind == "reduce":
            total = reduced(mine, op) if rank == root else mine[rank]
            return lambda later: comm.reduce(x, root, op, async_op=later), total
        if kind == "broadcast":
            return lambda later: comm.broadcast(x, root, async_op=later), mine[root]
        if kind == "reduce_scatter":
            own = reduced([part.view(size, count)[rank] for part in mine], op)
            return lambda later: comm.reduce_scatter(x, op=op, async_op=later), own
        if kind == "all_gather":
            return lambda later: comm.all_gather(x, async_op=later), torch.cat(mine)
        if kind == "all_to_all":
            mixed = torch.cat([part.view(size, count)[rank] for part in mine])
            return lambda later: comm.all_to_all(x, async_op=later), mixed
        if kind == "gather":
            return lambda later: comm.gather(x, root, async_op=later), torch.cat(mine) if rank == root else None
        if kind == "scatter":
            given = [mine[j] for j in range(size)] if rank == root else None
            out = torch.empty_like(mine[rank])
            return lambda later: comm.scatter(given, out, root, async_op=later), mine[rank]
        into = torch.empty_like(mine[before])
        return lambda later: comm.exchange([(x, after)], [(into, before)], async_op=later), mine[before]


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """What the engine reduces a dtype by."""
    if dtype.is_complex:
        return "sum", "mean"
    return ("sum", "max", "min", "prod", "mean") if dtype.is_floating_point else ("sum", "max", "min", "prod")


def reduced(parts: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(parts)
    if op in ("sum", "prod"):
        return getattr(stacked, op)(0, dtype=stacked.dtype)
    return stacked.mean(0) if op == "mean" else getattr(stacked, f"a{op}")(0)


def same(a: Tensor, b: Tensor) -> bool:
    """torch does not compare every dtype: these are equal where their bytes are."""
    if a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and a.dtype is b.dtype:
        a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


_PATTERN = (torch.arange(MOST + 8) % 5).to(torch.uint8)


def stress(mesh: engine.Mesh, seed: int, operations: int) -> list[str]:
    """Run the calls of one rank and return those that were wrong."""
    return Stress(mesh.data, seed).run(operations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--transport", default="shm")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"{options.operations} operations on {RANKS} ranks over {options.transport}, seed {seed}", flush=True)  # noqa: T201
    world, started = World(), time.monotonic()
    try:
        where: Any = {"transport": options.transport, "timeout": 600.0}
        found = world.run(Layout(data=RANKS), stress, seed, options.operations, **where)
    finally:
        world.close()
    wrong = sorted({each for rank in found for each in rank})
    sys.exit("\n".join(wrong[:20]) if wrong else print(f"all right, {time.monotonic() - started:.1f} s"))  # noqa: T201


if __name__ == "__main__":
    main()
