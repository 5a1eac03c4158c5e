"""Asynchronous calls and messages over shared memory: their order, any order of waiting, and their threads."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

import engine
from engine import Layout
from tests.world import World

Mesh = engine.Mesh


def many(mesh: Mesh, seed: int) -> list[str]:
    """A hundred calls of all kinds on one communicator, waited for in an order of each rank's own."""
    comm, size, rank = mesh.data, mesh.data.size, mesh.data.rank
    choose, own = random.Random(seed), random.Random(seed + 1 + rank)
    works: list[tuple[str, Any, torch.Tensor]] = []
    for number in range(100):
        kind = choose.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "exchange", "all_to_all"])
        count = choose.choice([1, 10, 5000, 200_000])
        x = torch.full((size, count), float(rank + number))
        ranks = torch.arange(float(size)).view(size, 1) + number
        total = ranks.sum().item()
        after, before = (rank + 1) % size, (rank - 1) % size
        if kind == "all_reduce":
            work, wanted = comm.all_reduce(x, async_op=True), torch.full_like(x, total)
        elif kind == "all_gather":
            work, wanted = comm.all_gather(x[:1], async_op=True), ranks.expand(size, count)
        elif kind == "reduce_scatter":
            work, wanted = comm.reduce_scatter(x, async_op=True), torch.full((1, count), total)
        elif kind == "broadcast":
            work, wanted = comm.broadcast(x, number % size, async_op=True), torch.full_like(x, number % size + number)
        elif kind == "all_to_all":
            work, wanted = comm.all_to_all(x, async_op=True), ranks.expand(size, count)
        else:
            into = torch.empty(count)
            work = comm.exchange([(x[0], after)], [(into, before)], async_op=True)
            wanted = torch.full((count,), float(before + number))
        works.append((f"{number} {kind} of {count}", work, wanted))
    own.shuffle(works)
    wrong = []
    for name, work, wanted in works:
        result = work.wait()
        got = result[0] if isinstance(result, list) else result
        if not torch.equal(got, wanted):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_many_calls_keep_their_order_and_are_waited_for_in_any(world: World, size: int) -> None:
    for seed in (1, 2):
        for wrong in world.run(Layout(data=size), many, seed, transport="shm"):
            assert wrong == []


def sync_after_async(mesh: Mesh) -> list[Any]:
    """The second call is over when it returns, so the first is too."""
    comm = mesh.data
    found: list[Any] = []
    for count in (3, 300_000):
        first, second = torch.full((count,), comm.rank + 1.0), torch.full((count,), 10.0)
        work = comm.all_reduce(first, async_op=True)
        comm.all_reduce(second)
        found += [first[0].item(), first[-1].item(), second[-1].item()]
        work.wait()
        memory = [comm.all_reduce(torch.ones(5), async_op=True), comm.allocate((4,)).sum().item()]
        found += [memory[0].wait()[0].item(), memory[1]]
    return found


def test_a_call_after_asynchronous_ones_comes_after_them(world: World) -> None:
    for got in world.run(Layout(data=3), sync_after_async, transport="shm"):
        assert got == [6.0, 6.0, 30.0, 3.0, 0.0] * 2


def side_by_side(mesh: Mesh) -> list[float]:
    """The ranks start on two axes in different orders, and wait in different orders."""
    axes = [mesh.data, mesh.tensor]
    orders = [axes, axes[::-1]] if mesh.rank % 2 else [axes[::-1], axes]
    found = []
    for _ in range(5):
        started = {
            comm.name: [comm.all_reduce(torch.full((n,), 2.0**mesh.rank), async_op=True) for n in (3, 100_000)]
            for comm in orders[0]
        }
        waited = {comm.name: [work.wait() for work in started[comm.name][::-1]] for comm in orders[1]}
        found += [x[-1].item() for name in ("data", "tensor") for x in waited[name]]
    return found


def test_two_communicators_are_waited_for_in_different_orders(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2, tensor=2), side_by_side, transport="shm")):
        data, tensor = (5.0, 10.0)[rank % 2], (3.0, 12.0)[rank // 2]
        assert got == [data, data, tensor, tensor] * 5


def own_threads() -> list[str]:
    return sorted({each.name for each in threading.enumerate()} & {"engine-order", "engine-mail"})


def threads(mesh: Mesh) -> list[list[str]]:
    comm, size = mesh.data, mesh.data.size
    after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
    comm.all_reduce(torch.ones(300_000))
    comm.exchange([(torch.ones(300_000), after)], [(torch.empty(300_000), before)])
    comm.all_reduce(torch.ones(10), algorithm="ring")
    comm.allocate((10,))
    found = [own_threads()]
    comm.all_reduce(torch.ones(10), async_op=True).wait()
    found.append(own_threads())
    sent = comm.exchange([(torch.ones(10), after)], async_op=True)  # there is room for it: it is through at once
    found.append(own_threads())
    received = comm.exchange(recvs=[(torch.empty(10), before)], async_op=True)
    received.wait()
    sent.wait()
    comm.exchange([(torch.ones(300_000), after)], [(torch.empty(300_000), before)])
    sent = comm.exchange([(torch.ones(600_000), after)], async_op=True)
    comm.recv(torch.empty(600_000), before)
    sent.wait()
    found.append(own_threads())
    mesh.close()
    found.append(own_threads())
    return found


def test_threads_come_with_the_first_call_that_needs_them_and_go_with_the_mesh(world: World) -> None:
    for got in world.run(Layout(data=3), threads, transport="shm"):
        assert got == [[], ["engine-order"], ["engine-order"], ["engine-mail", "engine-order"], []]


def moves_while_nobody_waits(mesh: Mesh) -> bool:
    """Messages and collectives that have been started end while the ranks do something else."""
    comm, size, count = mesh.data, mesh.data.size, 2_000_000
    after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
    into, x = torch.zeros(count), torch.ones(count)
    works = [
        comm.exchange([(torch.full((count,), 7.0), after)], [(into, before)], async_op=True),
        comm.all_reduce(x, async_op=True),
    ]
    deadline = time.monotonic() + 20
    while (into[-1] != 7 or x[-1] != size) and time.monotonic() < deadline:
        time.sleep(0.01)
    there = bool((into[-1] == 7) and (x[-1] == size))
    for work in works:
        work.wait()
    comm.barrier()
    return there and bool((into == 7).all()) and bool((x == size).all())


def received_while_meeting_elsewhere(mesh: Mesh) -> float:
    """The receiver waits for the sender in another group before it waits for the message, which is larger than a
    mailbox; the sender the other way round.
    """
    comm, into, count = mesh.data, torch.empty(2_000_000), 2_000_000
    if comm.rank == 0:
        work = comm.exchange(recvs=[(into, 1)], async_op=True)
        mesh.world.barrier()
        work.wait()
    else:
        comm.exchange(sends=[(torch.full((count,), 3.0), 0)], async_op=True).wait()
        into.fill_(3.0)
        mesh.world.barrier()
    return into.sum().item() / count


@pytest.mark.parametrize("checks", [False, True])
def test_a_large_message_arrives_before_it_is_waited_for(world: World, checks: bool) -> None:
    found = world.run(Layout(data=2), received_while_meeting_elsewhere, transport="shm", checks=checks, timeout=30.0)
    assert found == [3.0, 3.0]


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_started_ends_while_nobody_waits(world: World, size: int) -> None:
    assert all(world.run(Layout(data=size), moves_while_nobody_waits, transport="shm"))


def close_under_way(mesh: Mesh) -> list[str]:
    """Nobody waits for the last calls; closing ends them and their threads."""
    comm = mesh.data
    for _ in range(20):
        comm.all_reduce(torch.ones(100_000), async_op=True)
    mesh.close()
    return own_threads()


def test_a_mesh_is_closed_over_calls_that_nobody_waited_for(world: World) -> None:
    assert world.run(Layout(data=2), close_under_way, transport="shm") == [[], []]
