"""What is left of ranks that end, however they end: no file, no memory, no process, no descriptor, no thread."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import engine
from engine import Layout
from tests.world import World, wait_until

Mesh = engine.Mesh
MIB = 1 << 20
KILLS = 50
SEED = 20261130


def busy(rank: int, size: int, store: str, seed: int, ready: Any) -> None:
    """Open a mesh and do all kinds of things until the end, which comes from outside."""
    torch.set_num_threads(1)
    ready.send("started")
    with contextlib.suppress(Exception), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)  # what survivors say for a few milliseconds
        where: Any = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size, "transport": "shm"}
        mesh = engine.init(Layout(data=size), device="cpu", timeout=60, **where)
        comm, choose = mesh.data, random.Random(seed)
        after, before = (rank + 1) % size, (rank - 1) % size
        ready.send("open")
        memory = comm.allocate((100_000,))
        while True:
            kind, count = choose.randrange(6), choose.choice([3, 1000, 100_000, 600_000])
            if kind == 0:
                comm.all_reduce(torch.ones(count))
            elif kind == 1:
                comm.all_reduce(memory)
            elif kind == 2:
                memory = comm.allocate((count,))
            elif kind == 3:
                comm.exchange([(torch.ones(count), after)], [(torch.empty(count), before)])
            elif kind == 4:
                comm.all_reduce(torch.ones(count), async_op=True).wait()
            else:
                comm.exchange([(torch.ones(count), after)], [(torch.empty(count), before)], async_op=True).wait()


def files() -> set[str]:
    """Everything in the places for shared memory and temporary files that could be of these processes."""
    found = {str(each) for each in Path("/dev/shm").iterdir()}
    return {each for each in found if "engine" in each or "torch" in each} | {
        str(each) for each in Path(tempfile.gettempdir()).iterdir() if each.name.startswith(("engine-", "torch_"))
        and not each.name.startswith("engine-world-")
    }  # fmt: skip


def shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def start_ranks(context: Any, size: int, store: str, seed: int) -> tuple[list[Any], list[Any]]:
    """Return the processes, once they run, and the pipes over which they say how far they are."""
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=busy, args=(rank, size, store, seed, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    for ours, theirs in pipes:
        theirs.close()
        assert ours.poll(60)
        assert ours.recv() == "started"
    return ranks, [ours for ours, _ in pipes]


def seconds_to_open(pipes: list[Any]) -> float:
    started = time.monotonic()
    for each in pipes:
        assert each.poll(60)
        assert each.recv() == "open"
    return time.monotonic() - started


def said_open(pipe: Any) -> bool:
    """Whether a rank that has ended had opened its mesh."""
    try:
        return bool(pipe.recv() == "open")
    except EOFError:
        return False


def test_nothing_is_left_of_ranks_that_were_killed_at_any_moment(world: World, tmp_path: Path) -> None:
    """Half of the rounds end while the mesh opens or has just opened, the others in the midst of their calls.

    A round holds 20 MiB and more, so what stayed of a few of them would show. Other programs on this machine may take
    and give back shared memory meanwhile, for which there are a margin and a while.
    """
    del world  # its fork server is this one's too, with torch imported
    choose = random.Random(SEED)
    context = multiprocessing.get_context("forkserver")
    before, memory = files(), shared_bytes()
    times: list[float] = []  # what opening took
    unopened = 0
    for number in range(KILLS):
        ranks, pipes = start_ranks(context, choose.choice([2, 3]), str(tmp_path / f"store-{number}"), SEED + number)
        if number % 2:
            time.sleep(choose.random() * 1.2 * statistics.median(times))
        else:
            times.append(seconds_to_open(pipes))
            time.sleep(choose.random() * 0.05)
        choose.shuffle(ranks)
        for each in ranks:
            each.kill()
        for each in ranks:
            each.join()
        assert [each.exitcode for each in ranks] == [-signal.SIGKILL] * len(ranks), "no process, and none ended before"
        unopened += number % 2 and not all(said_open(each) for each in pipes)
        for each in pipes:
            each.close()
    assert unopened >= KILLS // 10, "opening was hit"
    wait_until(lambda: files() <= before, 60)
    wait_until(lambda: shared_bytes() <= memory + 64 * MIB, 60)


def open_and_close(rank: int, size: int, store: str) -> Any:
    def cycle(number: int) -> None:
        where: Any = {"store": dist.FileStore(f"{store}-{number}", size), "rank": rank, "world_size": size}
        with engine.init(Layout(data=size), device="cpu", timeout=20, transport="shm", **where) as mesh:
            comm, other = mesh.data, 1 - rank
            comm.all_reduce(torch.ones(300_000))
            comm.all_reduce(torch.ones(3), async_op=True).wait()
            comm.exchange([(torch.ones(10), other)], [(torch.empty(10), other)], async_op=True).wait()
            comm.all_reduce(comm.allocate((200_000,)))

    def counts() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:engine")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps

    def settled(most: Any) -> Any:
        """gloo's threads and sockets end a moment after their group: wait for the count, not for a time."""
        with contextlib.suppress(AssertionError):  # told below, with both counts
            wait_until(lambda: all(now <= then for now, then in zip(counts(), most, strict=True)))
        return counts()

    seen = []
    for number in range(22):
        cycle(number)
        if number:  # the first brings what stays for good
            seen.append(counts())
    least = tuple(min(each) for each in zip(*seen, strict=True))
    return least, settled(least)


def test_twenty_meshes_leave_no_descriptor_no_thread_and_no_mapping(world: World) -> None:
    for least, last in world.run(2, open_and_close, mesh=False):
        assert all(now <= then for now, then in zip(last, least, strict=True)), (least, last)
        assert last[2] == 0
