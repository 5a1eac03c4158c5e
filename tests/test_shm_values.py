"""What the shared-memory transport computes and moves: every op and dtype, sizes around its pieces, any strides.

The right values are plain PyTorch's in one process, on all ranks' inputs; each rank checks its own.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from engine.comm.shm.transport import SharedMemoryTransport
from tests.values import OPS
from tests.world import World

Mesh = engine.Mesh
REDUCIBLE = sorted(SharedMemoryTransport.reducible or (), key=str)
LOW = (torch.float16, torch.bfloat16)
COUNTS = [0, 1, 3, 1000, "larger than a slot"]
SIZES = [2, 3, 5]
# Slots of 64 or 128 KiB: several pieces of each tensor stay small enough to compare many.
STAGING_MIB = 1
LARGE = 300 << 10


def has_meaning(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("sum", "mean")
    return dtype.is_floating_point or op != "mean"


def number_of(count: int | str, dtype: torch.dtype) -> int:
    return count if isinstance(count, int) else LARGE // dtype.itemsize + 7


def mine(rank: int, count: int, dtype: torch.dtype, op: str) -> Tensor:
    """What a rank holds. In low precision few bits each, so that a sum or product of five is exact in float32, and not
    in bf16 or fp16.
    """
    random = torch.Generator().manual_seed(1000 * rank + count + OPS.index(op))
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=random).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        first, last = (0, 256) if dtype is torch.uint8 else (-100, 101)
        return torch.randint(first, last, (count,), generator=random).to(dtype)
    if dtype in LOW:
        low, high = (9, 16) if op == "prod" else (-128, 128)
        return torch.randint(low, high, (count,), generator=random).to(dtype) / 16
    x = torch.randn(count, generator=random, dtype=dtype)
    if op in ("max", "min") and count > 2 and rank == 1:
        x[2] = float("nan")
    return x


def right(parts: list[Tensor], op: str) -> tuple[Tensor, Tensor | float]:
    """The plain answer, and by how much a result may differ from it: by nothing, but in sums and products that the
    order of the ranks changes.
    """
    stacked, dtype = torch.stack(parts), parts[0].dtype
    if dtype is torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0), 0.0
    if op in ("max", "min"):
        return getattr(stacked, f"a{op}")(0), 0.0
    if dtype in LOW:
        total = (stacked.float().prod(0) if op == "prod" else stacked.float().sum(0)).to(dtype)
        return (total / len(parts) if op == "mean" else total), 0.0
    if op == "prod":
        total = stacked.prod(0, dtype=dtype)
        return total, len(parts) * torch.finfo(dtype).eps * total.abs() if dtype.is_floating_point else 0.0
    total = stacked.sum(0, dtype=dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return total, 0.0
    bound = len(parts) * torch.finfo(dtype).eps * stacked.abs().sum(0)
    return (total / len(parts), bound / len(parts)) if op == "mean" else (total, bound)


def same(got: Tensor, wanted: Tensor, bound: Tensor | float) -> bool:
    if got.dtype is not wanted.dtype or got.shape != wanted.shape:
        return False
    if isinstance(bound, Tensor):
        return bool(((got - wanted).abs() <= bound).all())
    return bool(((got == wanted) | (got.isnan() & wanted.isnan())).all())


def digest(x: Tensor) -> str:
    return hashlib.sha256(
        torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8).numpy()
    ).hexdigest()


def reduce_everything(mesh: Mesh, dtype: torch.dtype) -> tuple[list[str], dict[str, str]]:
    """Every reduction of a dtype. Returns what came out wrong, and digests of the sums on this rank."""
    comm, size, rank = mesh.data, mesh.data.size, mesh.data.rank
    wrong, digests = [], {}
    for op in (op for op in OPS if has_meaning(dtype, op)):
        for each in COUNTS:
            count = number_of(each, dtype)
            parts = [mine(r, count, dtype, op) for r in range(size)]
            wanted, bound = right(parts, op)
            results = {
                "all_reduce": comm.all_reduce(parts[rank].clone(), op),
                "async": comm.all_reduce(parts[rank].clone(), op, async_op=True).wait(),
            }
            frame = torch.zeros(count, 3, dtype=dtype)
            frame[:, 1] = parts[rank]
            results["strided"] = comm.all_reduce(frame[:, 1], op).clone()
            if frame[:, 0].any() or frame[:, 2].any():
                wrong.append(f"{op} {each}: beside the strided tensor")
            for dst in {0, size - 1}:
                given = parts[rank].clone()
                found = comm.reduce(given, dst, op)
                if rank == dst:
                    results[f"reduce to {dst}"] = found
                elif digest(given) != digest(parts[rank]):
                    wrong.append(f"{op} {each}: reduce to {dst} changed an input")
            wrong += [f"{op} {each}: {name}" for name, got in results.items() if not same(got, wanted, bound)]
            digests[f"{op} {each}"] = digest(results["all_reduce"])
            if digests[f"{op} {each}"] not in (digest(results["strided"]), digest(results["async"])):
                wrong.append(f"{op} {each}: the bits depend on the strides")
            # Rank r's block j is its vector seen from place j on.
            blocks = [torch.stack([part.roll(j) for j in range(size)]) for part in parts]
            given = blocks[rank].clone()
            wanted, bound = right([block[rank] for block in blocks], op)
            if not same(comm.reduce_scatter(given, op=op)[0], wanted, bound):
                wrong.append(f"{op} {each}: reduce_scatter")
            if digest(given) != digest(blocks[rank]):
                wrong.append(f"{op} {each}: reduce_scatter changed its input")
            if not same(comm.reduce_scatter(given.t().contiguous(), 1, op=op)[:, 0], wanted, bound):
                wrong.append(f"{op} {each}: reduce_scatter of dim 1")
    return wrong, digests


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_every_reduction_of_every_dtype(world: World, dtype: torch.dtype, size: int) -> None:
    results = world.run(Layout(data=size), reduce_everything, dtype, transport="shm", staging_mib=STAGING_MIB)
    for wrong, digests in results:
        assert wrong == []
        assert digests == results[0][1], "the same bits on every rank"


GLOO = [dtype for dtype in REDUCIBLE if dtype is not torch.int16]


def reduce_pairs(mesh: Mesh) -> dict[str, str]:
    comm, found = mesh.data, {}
    for dtype in GLOO:
        for op in (op for op in OPS if has_meaning(dtype, op)):
            for each in COUNTS:
                x = mine(comm.rank, number_of(each, dtype), dtype, op)
                found[f"{dtype} {op} {each}"] = digest(comm.all_reduce(x, op).nan_to_num(7.0))
    return found


def test_two_ranks_get_the_bits_that_gloo_gives(world: World) -> None:
    ours = world.run(Layout(data=2), reduce_pairs, transport="shm", staging_mib=STAGING_MIB)
    gloo = world.run(Layout(data=2), reduce_pairs, transport="torch")
    assert ours[0] == ours[1] == gloo[0] == gloo[1]


# ---- moving ----------------------------------------------------------------------------------------------------------


def dtypes() -> Iterator[torch.dtype]:
    """Every dtype that torch copies on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of those that are on trial, or on their way out
        for dtype in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str):
            try:
                torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).clone()
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            yield dtype


MOVED = list(dtypes())


def raw(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bytes at all, but for truth values."""
    random = torch.Generator().manual_seed(100 * rank + seed)
    top = 2 if dtype is torch.bool else 256
    return torch.randint(0, top, (count * dtype.itemsize,), generator=random).to(torch.uint8).view(dtype)


def move_everything(mesh: Mesh) -> list[str]:
    """Every operation that only moves. Compared as bytes: NaN equals itself."""
    comm, size, rank = mesh.data, mesh.data.size, mesh.data.rank
    wrong = []

    def check(what: str, got: Tensor, wanted: Tensor) -> None:
        if got.dtype is not wanted.dtype or digest(got) != digest(wanted):
            wrong.append(what)

    for dtype in MOVED:
        for each in (1, 3, 1000, "larger than a slot") if size < 5 else (3, 1000):
            count = number_of(each, dtype)
            parts = [raw(r, count, dtype) for r in range(size)]
            grids = [raw(r, count * size, dtype, 1).view(size, count) for r in range(size)]
            own, grid, name = parts[rank], grids[rank], f"{dtype} {each}"
            after, before = (rank + 1) % size, (rank - 1) % size
            for src in {0, size - 1}:
                check(f"{name} broadcast", comm.broadcast(own.clone(), src), parts[src])
            check(f"{name} all_gather", comm.all_gather(own), torch.cat(parts))
            mixed = torch.cat([g[rank : rank + 1] for g in grids])
            check(f"{name} all_to_all", comm.all_to_all(grid), mixed)
            gathered = comm.gather(own, 1)
            if gathered is not None:
                check(f"{name} gather", torch.cat(gathered), torch.cat(parts))
            given = list(grid.unbind()) if rank == 1 else None
            check(f"{name} scatter", comm.scatter(given, torch.empty_like(own), 1), grids[1][rank])
            got = comm.exchange([(own, after)], [(torch.empty_like(own), before)])[0]
            check(f"{name} exchange", got, parts[before])
            frame = torch.empty(count, 2, dtype=dtype)
            frame[:, 0].copy_(own)
            check(f"{name} strided broadcast", comm.broadcast(frame[:, 0], 0).contiguous(), parts[0])
            frame[:, 0].copy_(own)
            check(f"{name} strided all_gather", comm.all_gather(frame[:, 0]), torch.cat(parts))
            check(f"{name} own input", own, raw(rank, count, dtype))
            check(f"{name} own grid", grid.view(-1), raw(rank, count * size, dtype, 1))
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_of_torch_is_moved(world: World, size: int) -> None:
    assert {torch.bool, torch.float8_e5m2, torch.complex32, torch.uint16} < set(MOVED)
    for wrong in world.run(Layout(data=size), move_everything, transport="shm", staging_mib=STAGING_MIB):
        assert wrong == []
