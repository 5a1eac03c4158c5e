"""Tensors of `allocate`, which other ranks read where they lie: results, what stays as it was, and how long it lives.

Every rank and element has its own value; what lies around a view must stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from tests.world import World

Mesh = engine.Mesh
COUNTS = [1000, 200_004]  # of float32: below and above what is read where it lies
EDGE = 5  # elements on either side of a view


def held(rank: int, count: int, salt: int = 0) -> Tensor:
    """Whole numbers, so that sums are exact."""
    return ((torch.arange(count) * (2 * rank + 3) + 7 * rank + salt) % 101).float()


class Places:
    """Makes tensors in memory of `allocate`, or in this process's own, and watches what lies around them."""

    def __init__(self, comm: engine.Communicator, most: int) -> None:
        size = most + 2 * EDGE
        self._bases = {(True, which): comm.allocate((size,)) for which in (0, 1)}
        self._bases |= {(False, which): torch.zeros(size) for which in (0, 1)}
        self._watched: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}

    def put(self, x: Tensor, registered: bool, which: int = 0) -> Tensor:
        base, end = self._bases[registered, which], EDGE + x.numel()
        self._watched[registered, which] = around = base[:EDGE], base[end : end + EDGE]
        for each in around:
            each.fill_(-3.0)
        return base[EDGE:end].copy_(x)

    def intact(self) -> bool:
        return all(bool((each == -3).all()) for around in self._watched.values() for each in around)


class Case:
    """One count, with the tensors of the ranks in a mask's bits in memory of `allocate`."""

    def __init__(self, comm: engine.Communicator, places: Places, mask: int, count: int) -> None:
        self.comm, self.places, self.count = comm, places, count
        self.here = bool(mask >> comm.rank & 1)
        self.parts = [held(r, count) for r in range(comm.size)]
        self.whole = [held(r, count * comm.size, 1) for r in range(comm.size)]
        self.own, self.joined = self.parts[comm.rank], torch.cat(self.parts)
        self.wrong: list[str] = []
        self._name = f"mask {mask:b}, {count}:"

    def given(self, x: Tensor) -> Tensor:
        """Return `x` in this rank's kind of memory."""
        return self.places.put(x, self.here)

    def out(self, count: int, *, registered: bool) -> Tensor:
        """Return a place for a result."""
        return self.places.put(torch.zeros(count), registered, 1)

    def check(self, what: str, got: Tensor, wanted: Tensor) -> None:
        if not torch.equal(got, wanted):
            self.wrong.append(f"{self._name} {what}")
        if not self.places.intact():
            self.wrong.append(f"{self._name} {what} wrote beside its tensor")


def reduce_and_broadcast(case: Case) -> None:
    comm, own, check = case.comm, case.own, case.check
    stacked = torch.stack(case.parts)
    for op, total in (("sum", stacked.sum(0)), ("max", stacked.amax(0)), ("mean", stacked.sum(0) / comm.size)):
        check(f"all_reduce {op}", comm.all_reduce(case.given(own), op), total)
        check(f"all_reduce {op} async", comm.all_reduce(case.given(own), op, async_op=True).wait(), total)
        check(f"reduce {op}", comm.reduce(case.given(own), 1, op), total if comm.rank == 1 else own)
    for src in range(comm.size):
        check(f"broadcast {src}", comm.broadcast(case.given(own), src), case.parts[src])


def reduce_scatter(case: Case) -> None:
    comm, check, whole = case.comm, case.check, case.whole[case.comm.rank]
    summed = torch.stack(case.whole).sum(0).view(comm.size, case.count)[comm.rank]
    given = case.given(whole)
    check("reduce_scatter", comm.reduce_scatter(given), summed)
    check("reduce_scatter's input", given, whole)
    kept = whole.clone().view(comm.size, case.count)
    kept[comm.rank] = summed
    part = given.view(comm.size, case.count)[comm.rank]
    check("reduce_scatter into its part", comm.reduce_scatter(given, out=part), summed)
    check("reduce_scatter beside its part", given, kept.view(-1))
    given, out = case.given(whole), case.out(case.count, registered=case.here)
    check("reduce_scatter into out", comm.reduce_scatter(given, out=out), summed)


def all_gather(case: Case) -> None:
    comm, own, check, total = case.comm, case.own, case.check, case.count * case.comm.size
    given = case.given(own)
    check("all_gather", comm.all_gather(given), case.joined)
    check("all_gather's input", given, own)
    out = case.given(torch.zeros(total))
    part = out.view(comm.size, case.count)[comm.rank].copy_(own)
    check("all_gather of its part", comm.all_gather(part, out=out), case.joined)
    given, out = case.given(own), case.out(total, registered=not case.here)
    check("all_gather into out", comm.all_gather(given, out=out), case.joined)


def move(case: Case) -> None:
    comm, own, check, size, rank = case.comm, case.own, case.check, case.comm.size, case.comm.rank
    mixed = torch.cat([each.view(size, case.count)[rank] for each in case.whole])
    given, out = case.given(case.whole[rank]), case.out(case.count * size, registered=case.here)
    check("all_to_all", comm.all_to_all(given, out=out), mixed)
    check("all_to_all's input", given, case.whole[rank])
    after, before = (rank + 1) % size, (rank - 1) % size
    given, out = case.given(own), case.out(case.count, registered=case.here)
    check("exchange", comm.exchange([(given, after)], [(out, before)])[0], case.parts[before])
    check("exchange's input", given, own)
    given = case.given(own)
    check("exchange in place", comm.exchange([(given, after)], [(given, before)])[0], case.parts[before])
    gathered = comm.gather(case.given(own), 0)
    if gathered is not None:
        check("gather", torch.cat(gathered), case.joined)


def call_everything(mesh: Mesh, masks: list[int]) -> list[str]:
    """Return what went wrong in every operation, for every mask and count."""
    places, wrong = Places(mesh.data, max(COUNTS) * mesh.data.size), []
    for mask in masks:
        for count in COUNTS:
            case = Case(mesh.data, places, mask, count)
            for calls in (reduce_and_broadcast, reduce_scatter, all_gather, move):
                calls(case)
            wrong += case.wrong
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_any_rank_may_hold_its_tensor_in_allocated_memory(world: World, size: int) -> None:
    masks = list(range(1 << size)) if size == 2 else [0b000, 0b111, 0b010, 0b101]
    for wrong in world.run(Layout(data=size), call_everything, masks, transport="shm"):
        assert wrong == []


# ---- how long it lives -----------------------------------------------------------------------------------------------

MIB = 1 << 20


def mappings() -> int:
    """How many segments this process has mapped."""
    with open("/proc/self/maps") as file:
        return sum("memfd:engine" in line for line in file)


def let_go(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    comm.all_reduce(torch.ones(5))  # makes the staging
    gc.collect()  # what earlier tests have left in this process
    found: dict[str, Any] = {"before": (mesh.memory()["data"]["allocated"], mappings())}
    x = comm.allocate((MIB,), torch.uint8)
    other = comm.allocate((MIB // 4,))
    found["zeros"] = not x.any() and not other.any() and other.dtype is torch.float32
    found["both"] = (mesh.memory()["data"]["allocated"], mappings())
    view = x[10:20].view(2, 5)[1]
    del x
    gc.collect()
    found["view"] = mesh.memory()["data"]["allocated"]
    view.fill_(1)
    found["sum"] = comm.all_reduce(view).tolist()
    del view
    comm.barrier()  # the record of a group's last call refers to its tensor
    gc.collect()
    found["gone"] = mesh.memory()["data"]["allocated"]
    again = comm.allocate((MIB,), torch.uint8)
    found["mapped"] = mappings()
    found["again"] = not again.any()
    del other, again
    gc.collect()
    comm.barrier()
    last = comm.allocate((1,))
    found["end"] = (mesh.memory()["data"]["allocated"], mappings())
    mesh.close()
    last += 2.0
    found["closed"] = (last.item(), mappings())
    del last
    gc.collect()
    found["left"] = mappings()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_memory_goes_back_with_its_last_view_and_outlives_the_mesh(world: World, size: int) -> None:
    for got in world.run(Layout(data=size), let_go, transport="shm"):
        start, mapped = got["before"]
        assert start == 0
        assert got["zeros"]
        assert got["both"] == (2 * MIB, mapped + 2 * size)
        assert got["view"] == 2 * MIB, "a view holds it"
        assert got["sum"] == [size] * 5
        assert got["gone"] == MIB
        assert got["mapped"] == mapped + 2 * size, "what all have let go is unmapped at the next allocate"
        assert got["again"]
        assert got["end"] == (4, mapped + size)
        assert got["closed"] == (2.0, 1), "its own stays, all others go"
        assert got["left"] == 0


def keep_on_one(mesh: Mesh) -> tuple[bool, list[float]]:
    """Rank 1 keeps its tensor; the others drop theirs, and use the memory's number again."""
    comm = mesh.data
    x = comm.allocate((200_000,))
    if comm.rank != 1:
        del x
    gc.collect()
    comm.barrier()
    for _ in range(3):
        y = comm.allocate((200_000,))
        y.fill_(comm.rank + 1.0)
        comm.all_reduce(y)
    kept = comm.rank != 1 or not x.any()
    source = x.fill_(5.0) if comm.rank == 1 else torch.zeros(200_000)
    comm.broadcast(source, 1)
    return kept, [y[0].item(), source[-1].item()]


def test_a_rank_may_keep_what_the_others_have_dropped(world: World) -> None:
    for kept, values in world.run(Layout(data=3), keep_on_one, transport="shm"):
        assert kept
        assert values == [6.0, 5.0]


def mapped_at(address: int, count: int) -> Tensor:
    """Return float32 that lie at an address that is free."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    fixed = 0x100000  # MAP_FIXED_NOREPLACE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    where = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(4 * count), 3, flags, -1, ctypes.c_long(0))
    assert where == address, "the address is not free"
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def move_away(mesh: Mesh, count: int) -> tuple[bool, list[bool]]:
    """torch moves a tensor of `allocate`, and what comes to lie at its old address is not in that memory."""
    comm, strategy = mesh.data, torch.multiprocessing.get_sharing_strategy()
    x = comm.allocate((count,))
    address = x.data_ptr()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other leaves mapped memory where it is
    try:
        x.fill_(comm.rank + 1).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    y, parts = mapped_at(address, count), [held(r, count) for r in range(comm.size)]
    total = torch.stack(parts).sum(0)
    found = [torch.equal(comm.all_reduce(y.copy_(parts[comm.rank])), total)]
    gathered = comm.all_gather(y.copy_(parts[comm.rank]))
    found.append(torch.equal(gathered, torch.cat(parts)))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = comm.exchange([(y.copy_(parts[comm.rank]), after)], [(torch.empty(count), before)])[0]
    found.append(torch.equal(got, parts[before]))
    found.append(bool((comm.all_reduce(x) == comm.size * (comm.size + 1) / 2).all()))
    return x.data_ptr() != address, found


def test_what_lies_where_a_moved_tensor_was_is_not_taken_for_it(world: World) -> None:
    try:
        for moved, right in world.run(Layout(data=2), move_away, 1 << 18, transport="shm"):
            assert moved
            assert right == [True] * 4
    finally:
        world.restart()  # torch's manager of shared files lives as long as the ranks that asked for it


def drop_between_any_lines(mesh: Mesh) -> tuple[int, list[float]]:
    """Tensors go, as the collector would let them go, one at every line that the books of memory are kept in."""
    comm = mesh.data
    gc.collect()
    spare: list[Tensor] = []
    kept: list[Tensor] = []

    def drop(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("shm/segments.py"):
            return None
        if event == "line" and spare:
            spare.pop()
        return drop

    for turn in range(8):
        spare.extend(comm.allocate((16,)) for _ in range(40))
        comm.barrier()  # the record of a group's last call refers to its tensor
        sys.settrace(drop)
        try:
            for _ in range(4):
                kept.append(comm.allocate((16,)).fill_(comm.rank + turn))
                comm.memory()
        finally:
            sys.settrace(None)
    with contextlib.suppress(IndexError):
        while True:
            spare.pop()
    comm.barrier()
    return comm.memory()["allocated"], [comm.all_reduce(each)[-1].item() for each in kept]


def test_memory_may_go_at_any_moment_of_an_allocation(world: World) -> None:
    for allocated, sums in world.run(Layout(data=2), drop_between_any_lines, transport="shm"):
        assert allocated == 32 * 16 * 4
        assert sums == [2.0 * turn + 1 for turn in range(8) for _ in range(4)]


# ---- modes -----------------------------------------------------------------------------------------------------------


def in_modes(mesh: Mesh, count: int) -> dict[str, Any]:
    comm, rank, size = mesh.data, mesh.data.rank, mesh.data.size
    after, before = (rank + 1) % size, (rank - 1) % size
    with torch.inference_mode():
        first = comm.all_reduce(torch.full((count,), rank + 1.0))  # the first use of slots and mailboxes of this size
        comm.exchange([(torch.ones(count), after)], [(torch.empty(count), before)])
        kind = comm.allocate((count,)).is_inference()
        inference = torch.full((count,), rank + 1.0)
        gathered_inside = comm.all_gather(inference)
    found = {
        "inside": [
            first[0].item(),
            gathered_inside[-1].item(),
            kind,
            torch.equal(comm.all_reduce(inference.clone()), first),
        ]
    }
    registered = comm.allocate((count,))
    modes: dict[str, Callable[[], Any]] = {
        "plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode
    }  # fmt: skip
    for name, mode in modes.items():
        for kind, make in {
            "normal": lambda: torch.full((count,), rank + 1.0),
            "inference": inference.clone,
            "registered": lambda: registered.fill_(rank + 1.0),
        }.items():
            if kind == "inference":
                with torch.inference_mode():
                    x = make()
            else:
                x = make()
            with mode():
                results = [
                    comm.all_reduce(x)[:1].clone(),
                    comm.all_gather(x[:2])[:1].clone(),
                    comm.broadcast(x, 1)[:1].clone(),
                    comm.exchange([(x, after)], [(torch.empty(count), before)])[0][:1].clone(),
                    comm.exchange([(torch.ones(count), after)], [(x, before)])[0][:1].clone(),
                    comm.all_reduce(x, async_op=True).wait()[:1].clone(),
                    comm.reduce_scatter(torch.stack([x] * size))[0, :1].clone(),
                    comm.reduce(x, 0, "max")[:1].clone(),
                ]
            found[f"{name} {kind}"] = [each.item() for each in results]
    parameter = torch.nn.Parameter(torch.full((count,), rank + 1.0))
    with torch.no_grad():
        comm.all_reduce(parameter)
    (parameter * 2).sum().backward()
    found["parameter"] = [parameter[0].item(), parameter.grad[0].item()]  # type: ignore[index]
    leaf = registered.fill_(1.0).detach().requires_grad_()
    (leaf * 3).sum().backward()
    found["leaf"] = [leaf.grad[0].item(), comm.all_reduce(leaf.grad)[0].item()]
    return found


@pytest.mark.parametrize("count", [100, 300_000])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_in_any_mode_on_tensors_of_any(world: World, size: int, count: int) -> None:
    total = size * (size + 1) / 2
    for got in world.run(Layout(data=size), in_modes, count, transport="shm"):
        assert got.pop("inside") == [total, size, True, True]
        assert got.pop("parameter") == [total, 2.0]
        assert got.pop("leaf") == [3.0, 3.0 * size]
        for name, values in got.items():
            assert values == [total] * 4 + [1.0, size, size * size, size], name
