"""Ranks that run out of descriptors: an error on every rank that says so, and never a lost message."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import engine
from engine import Layout
from engine.comm.shm import memory
from tests.values import outcome
from tests.world import World

Mesh = engine.Mesh


@contextlib.contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Leave this process so many descriptors and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def held_by_this_process(mesh: Mesh) -> Any:
    with open("/proc/self/maps") as file:
        return mesh.memory(), sum("memfd:engine" in line for line in file), len(os.listdir("/proc/self/fd"))


def allocate_with_few(mesh: Mesh, rank: int, free: int, shared: bool) -> dict[str, Any]:
    comm, available = mesh.data, memory.available
    comm.all_reduce(torch.ones(3))
    before = held_by_this_process(mesh)
    memory.available = lambda: (1 << 40, "MemAvailable")  # asking opens a file
    try:
        with descriptors(free) if comm.rank == rank else contextlib.nullcontext():
            found: dict[str, Any] = {"error": outcome(lambda: comm.allocate((1000,), shared=shared).shape)}
    finally:
        memory.available = available
    found["same"] = held_by_this_process(mesh) == before
    found["afterwards"] = comm.all_reduce(comm.allocate((1000,)).fill_(comm.rank + 1))[-1].item()
    return found


@pytest.mark.parametrize(
    ("rank", "free", "shared", "reason"),
    [
        (1, 0, False, "needs a descriptor, and the kernel refused: Too many open files"),
        (1, 1, False, "needs a descriptor for each rank, and this process has too many open files (`ulimit -n`)"),
        (1, 2, False, "cannot be mapped: "),
        (0, 0, True, "needs a descriptor, and the kernel refused: Too many open files"),
        (1, 0, True, "needs a descriptor for each rank, and this process has too many open files (`ulimit -n`)"),
        (1, 1, True, "cannot be mapped: "),
    ],
)
def test_memory_without_a_descriptor_is_refused_on_every_rank(
    world: World, rank: int, free: int, shared: bool, reason: str
) -> None:
    for own, got in enumerate(world.run(Layout(data=2), allocate_with_few, rank, free, shared, transport="shm")):
        kind, text = got["error"]
        assert kind == "MemoryShortageError"
        assert "allocate of 4000 bytes" in text
        assert reason in text
        assert (f"rank {rank}: " in text) == (own != rank)
        assert got["same"], "nothing was taken"
        assert got["afterwards"] == 3.0


def send_with_few(mesh: Mesh, free: int) -> list[Any]:
    """Rank 0 cannot open its mailbox, and goes on sending when it could; rank 1 must not take that for the first."""
    comm, x = mesh.data, torch.empty(10)
    if comm.rank == 1:
        return [outcome(lambda: comm.recv(x, 0).tolist()) for _ in range(2)]
    with descriptors(free):
        found = [outcome(lambda: comm.send(torch.full((10,), 1.0), 1))]
    return [*found, outcome(lambda: comm.send(torch.full((10,), 2.0), 1))]


@pytest.mark.parametrize("free", [0, 1])
def test_after_a_message_that_could_not_start_there_are_no_others(world: World, free: int) -> None:
    told = "rank 0 could not start its messages: "
    (first, second), received = world.run(Layout(data=2), send_with_few, free, transport="shm")
    assert "oo many open files" in first[1]
    for kind, text in (second, *received):
        assert kind == "CommunicationError"
        assert told in text
        assert "oo many open files" in text


def receive_with_none(mesh: Mesh) -> Any:
    comm = mesh.data
    if comm.rank == 0:
        comm.barrier()
        return outcome(lambda: comm.exchange([(torch.ones(10), 1)], [(torch.empty(10), 1)]))
    with descriptors(0):
        comm.barrier()
        return outcome(lambda: comm.recv(torch.empty(10), 0).tolist())


def test_a_mailbox_that_a_rank_has_no_room_for_is_named_on_both_sides(world: World) -> None:
    for kind, text in world.run(Layout(data=2), receive_with_none, transport="shm"):
        assert kind == "CommunicationError"
        assert "rank 1 cannot take a mailbox: it has too many open files (`ulimit -n`)" in text
