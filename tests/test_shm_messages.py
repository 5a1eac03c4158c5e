"""Messages over shared memory: larger and smaller than a slot and a mailbox, early, late, crossing and in rings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from tests.values import outcome
from tests.world import World

Mesh = engine.Mesh
SLOT, BOX = 256 << 10, 6 * (256 << 10)
SIZES = [1, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT + 7, BOX - 1, BOX, BOX + 1, 3 * BOX + 5]


def held(rank: int, count: int, salt: int = 0) -> Tensor:
    return ((torch.arange(count) * (2 * rank + 3) + 11 * rank + salt) % 251).to(torch.uint8)


def around_a_ring(mesh: Mesh, async_op: bool) -> list[str]:
    """Everyone sends to the next and receives from the one before; then in both directions at once."""
    comm, size, rank = mesh.data, mesh.data.size, mesh.data.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    wrong = []
    for count in SIZES:
        sends = [(held(rank, count), after), (held(rank, count, 1), before), (held(rank, 3, 2), after)]
        receives = [
            (torch.zeros(count, dtype=torch.uint8), before),
            (torch.zeros(count, dtype=torch.uint8), after),
            (torch.zeros(3, dtype=torch.uint8), before),
        ]
        given = comm.exchange(sends, receives, async_op=async_op)
        got = given.wait() if async_op else given
        wanted = [held(before, count), held(after, count, 1), held(before, 3, 2)]
        wrong += [f"{count}: {i}" for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if not torch.equal(a, b)]
        wrong += [f"{count}: sent" for (x, _), salt in zip(sends, (0, 1, 2), strict=True)
                  if not torch.equal(x, held(rank, x.numel(), salt))]  # fmt: skip
    return wrong


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_of_any_size_cross_in_a_ring(world: World, size: int, async_op: bool) -> None:
    for wrong in world.run(Layout(data=size), around_a_ring, async_op, transport="shm"):
        assert wrong == []


def posted_late(mesh: Mesh, async_op: bool) -> list[bool]:
    """Rank 1 asks for its messages long after they came; small ones are out before it does."""
    comm, found = mesh.data, []
    for count in (5, SLOT + 1, BOX + 1, 3 * BOX):
        if comm.rank == 0:
            work: Any = comm.exchange([(held(0, count), 1), (held(0, count, 1), 1)], async_op=async_op)
            if async_op:
                work.wait()
        else:
            time.sleep(0.05)
            got = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
            for each in got:
                work = comm.exchange(recvs=[(each, 0)], async_op=async_op)
                if async_op:
                    work.wait()
            found += [torch.equal(got[0], held(0, count)), torch.equal(got[1], held(0, count, 1))]
    return found


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_receive_may_be_posted_late(world: World, async_op: bool) -> None:
    assert world.run(Layout(data=2), posted_late, async_op, transport="shm")[1] == [True] * 8


def mixed_with_rings(mesh: Mesh, count: int) -> list[str]:
    """Messages of calls, of the engine's own algorithms and of narrow sums are under way at once, each with a tag of
    its own, and come in other orders than they are asked for.
    """
    comm, size, rank = mesh.data, mesh.data.size, mesh.data.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    wrong, total = [], size * (size + 1) / 2
    for turn in range(3):
        sent = comm.exchange([(held(rank, count, turn), after)], async_op=True)
        summed = comm.all_reduce(torch.full((count // 4,), rank + 1.0), algorithm="ring")
        narrow = comm.all_reduce(torch.full((count // 4,), rank + 1.0), wire_dtype=torch.bfloat16, async_op=True)
        gathered = comm.all_gather(torch.full((count // 4,), float(rank)), algorithm="ring", async_op=True)
        rooted = comm.gather(held(rank, 100, turn), 0, async_op=True)
        into = torch.zeros(count, dtype=torch.uint8)
        got = comm.exchange(recvs=[(into, before)])[0]
        sent.wait()
        if not torch.equal(got, held(before, count, turn)):
            wrong.append(f"{turn}: exchange")
        if not bool((summed == total).all()):
            wrong.append(f"{turn}: ring")
        if not torch.equal(gathered.wait(), torch.arange(float(size)).repeat_interleave(count // 4)):
            wrong.append(f"{turn}: gathered")
        if not bool((narrow.wait() == total).all()):
            wrong.append(f"{turn}: narrow")
        parts = rooted.wait()
        if rank == 0 and not all(torch.equal(part, held(r, 100, turn)) for r, part in enumerate(parts)):
            wrong.append(f"{turn}: gather")
    return wrong


@pytest.mark.parametrize("count", [1000, 3 * BOX])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_early_messages_of_other_tags_are_in_nobodys_way(world: World, size: int, count: int) -> None:
    for wrong in world.run(Layout(data=size), mixed_with_rings, count, transport="shm"):
        assert wrong == []


def many_small(mesh: Mesh) -> bool:
    """More messages than a mailbox or a socket holds, all before the first is asked for, in both directions."""
    comm, peer, number = mesh.data, 1 - mesh.data.rank, 500
    work = comm.exchange([(held(comm.rank, 9, i), peer) for i in range(number)], async_op=True)
    comm.barrier()
    into = [torch.zeros(9, dtype=torch.uint8) for _ in range(number)]
    comm.exchange(recvs=[(each, peer) for each in into])
    work.wait()
    return all(torch.equal(each, held(peer, 9, i)) for i, each in enumerate(into))


def test_hundreds_of_messages_wait_for_their_receives(world: World) -> None:
    assert world.run(Layout(data=2), many_small, transport="shm") == [True, True]


# ---- several threads that wait ---------------------------------------------------------------------------------------


def aside(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call on a thread; its result, or its error, comes into the list."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(outcome(call)))
    thread.start()
    return thread, found


def send_while_another_waits(mesh: Mesh) -> Any:
    """Rank 1 answers only what it has got, so rank 0's thread waits for what its main thread has yet to send."""
    comm, x = mesh.data, torch.zeros(10, dtype=torch.uint8)
    if comm.rank == 1:
        comm.recv(x, 0)
        comm.send(x + 1, 0)
        return torch.equal(x, held(0, 10))
    thread, got = aside(lambda: comm.recv(x, 1))
    time.sleep(0.2)  # most often long enough for the thread to be waiting
    comm.send(held(0, 10), 1)
    thread.join()
    return torch.equal(got[0], held(0, 10) + 1)


def test_a_thread_may_send_while_another_waits(world: World) -> None:
    assert world.run(Layout(data=2), send_while_another_waits, transport="shm") == [True, True]


def wait_on_two_threads(mesh: Mesh, order: tuple[int, int]) -> bool:
    """One thread moves the messages of both until its own has come; then the other has to go on by itself."""
    comm = mesh.data
    if comm.rank:
        time.sleep(0.3 if comm.rank == 1 else 0.5)
        comm.send(held(comm.rank, 1000), 0)
        return True
    waits = []
    for peer in order:
        waits.append((peer, *aside(lambda peer=peer: comm.recv(torch.zeros(1000, dtype=torch.uint8), peer))))
        time.sleep(0.1)
    for _, thread, _ in waits:
        thread.join()
    return all(torch.equal(got[0], held(peer, 1000)) for peer, _, got in waits)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_messages_of_a_thread_move_after_the_other_has_its_own(world: World, order: tuple[int, int]) -> None:
    assert world.run(Layout(data=3), wait_on_two_threads, order, transport="shm") == [True] * 3


# ---- another default device ------------------------------------------------------------------------------------------


def with_another_default(mesh: Mesh) -> list[Any]:
    """Rank 0's message is early: it comes while rank 1 waits for rank 2's."""
    comm = mesh.data
    with torch.device("meta"):
        memory = comm.allocate((4,))
        found = [str(memory.device), comm.all_reduce(memory.fill_(comm.rank + 1)).tolist()]
        x = torch.arange(4.0, device="cpu")
        if comm.rank != 1:
            time.sleep(0.1 if comm.rank == 2 else 0.0)
            comm.send(x + 10 * comm.rank, 1)
            return found
        return [*found, *(comm.recv(torch.zeros(4, device="cpu"), peer).tolist() for peer in (2, 0))]


def test_the_callers_default_device_is_nothing_to_the_engine(world: World) -> None:
    found = ["cpu", [6.0] * 4]
    messages = [[20.0, 21.0, 22.0, 23.0], [0.0, 1.0, 2.0, 3.0]]
    assert world.run(Layout(data=3), with_another_default, transport="shm") == [found, [*found, *messages], found]
