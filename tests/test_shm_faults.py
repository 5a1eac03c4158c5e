"""Ranks that die, stop, fail or do something else: an error on every rank, soon, with a name, and never a wrong sum."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm.shm import collectives, segments
from engine.errors import CommunicationError, EngineError
from tests.world import World, WorldError, wait_until

Mesh = engine.Mesh
LARGE = 400_000  # of float32: in several pieces
SOON = 6.0  # seconds; measured are milliseconds, and what only a time limit ends takes 20


def open_mesh(rank: int, size: int, store: str, timeout: float = 20.0) -> Mesh:
    where: Any = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size, "transport": "shm"}
    return engine.init(Layout(data=size), device="cpu", timeout=timeout, **where)


def calls_of(mesh: Mesh) -> dict[str, Callable[[], Any]]:
    comm, victim = mesh.data, 1
    return {
        "all_reduce": lambda: comm.all_reduce(torch.ones(3)),
        "large all_reduce": lambda: comm.all_reduce(torch.ones(LARGE)),
        "recv": lambda: comm.recv(torch.empty(3), victim),
        "send": lambda: comm.send(torch.ones(LARGE), victim),
        "allocate": lambda: comm.allocate((100,)),
        "barrier": comm.barrier,
        "async all_reduce": lambda: comm.all_reduce(torch.ones(3), async_op=True).wait(),
        "async recv": lambda: comm.exchange(recvs=[(torch.empty(3), victim)], async_op=True).wait(),
        "ring": lambda: comm.all_reduce(torch.ones(LARGE), algorithm="ring"),
    }


# ---- a rank that dies ------------------------------------------------------------------------------------------------


def wait_for_the_dead(rank: int, size: int, store: str, case: str) -> None:
    """Rank 1 dies while the others wait for it. They raise how long after that they heard."""
    with open_mesh(rank, size, store) as mesh:
        mesh.data.all_reduce(torch.ones(3))
        death = Path(f"{store}.death")
        waiting = [Path(f"{store}.waiting-{r}") for r in range(size) if r != 1]
        if rank == 1:
            wait_until(lambda: all(each.exists() for each in waiting))
            death.with_suffix(".part").write_text(str(time.monotonic()))
            death.with_suffix(".part").rename(death)
            os.kill(os.getpid(), signal.SIGKILL)
        call = calls_of(mesh)[case]
        Path(f"{store}.waiting-{rank}").touch()
        try:
            call()
        except CommunicationError as error:
            seconds = time.monotonic() - float(death.read_text())
            raise AssertionError(f"heard after {seconds:.3f} s: {error}") from None


@pytest.mark.parametrize(
    "case",
    ["all_reduce", "large all_reduce", "recv", "send", "allocate", "barrier", "async all_reduce", "async recv", "ring"],
)
def test_a_killed_rank_is_named_at_once_by_all_that_wait(world: World, case: str) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(3, wait_for_the_dead, case, mesh=False)
    reports = caught.value.reports
    assert "rank 1 died of SIGKILL" in reports[1]
    for rank in (0, 2):
        heard = re.search(r"AssertionError: heard after ([\d.]+) s: (.*)", reports[rank])
        assert heard, reports[rank]
        assert float(heard[1]) < SOON
        assert "rank 1 is gone" in heard[2]


def die_with_a_child(rank: int, size: int, store: str) -> tuple[str, float]:
    """Both ranks have forked, as a loader does for its workers; rank 1's child lives on when rank 1 is killed."""
    told = Path(f"{store}.told")
    with open_mesh(rank, size, store) as mesh:
        mesh.data.all_reduce(torch.ones(3))
        child = os.fork()
        if not child:
            try:
                wait_until(told.exists, 40)
            finally:
                os._exit(0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            mesh.data.all_reduce(torch.ones(3))
        except CommunicationError as error:
            text, seconds = str(error), time.monotonic() - started
        else:
            text, seconds = "no error", 0.0
        told.touch()
        os.waitpid(child, 0)
        raise AssertionError(f"heard after {seconds:.3f} s: {text}")


def test_a_killed_rank_is_gone_although_its_child_lives(world: World) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(2, die_with_a_child, mesh=False)
    assert "rank 1 died of SIGKILL" in caught.value.reports[1]
    heard = re.search(r"AssertionError: heard after ([\d.]+) s: (.*)", caught.value.reports[0])
    assert heard, caught.value.reports[0]
    assert float(heard[1]) < SOON
    assert "rank 1 is gone" in heard[2]
    assert "does not answer" not in heard[2]


# ---- a rank that stops -----------------------------------------------------------------------------------------------


def wait_for_the_stopped(rank: int, size: int, store: str) -> tuple[str, float]:
    told = Path(f"{store}.told")
    with open_mesh(rank, size, store, timeout=2.0) as mesh:
        pids = mesh.data.all_gather(torch.tensor([os.getpid()])).tolist()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 lets it go on
        started = time.monotonic()
        try:
            mesh.data.all_reduce(torch.ones(LARGE))
        except CommunicationError as error:
            text, seconds = str(error), time.monotonic() - started
        else:
            text, seconds = "no error", 0.0
        if rank == 2:
            told.touch()
        if rank == 0:
            wait_until(told.exists)
            os.kill(pids[1], signal.SIGCONT)
        return text, seconds


def test_a_stopped_rank_is_reported_at_the_time_limit(world: World) -> None:
    first, second, third = world.run(3, wait_for_the_stopped, mesh=False)
    for text, seconds in (first, third):
        assert "all_reduce(sum) of float32 (400000,) on axis 'data' failed after 2." in text or "rank 1" in text
        assert 1.5 < seconds < 25  # the stopped rank is given a while to say where it is, and to be told
        assert "rank 1" in text
    assert "timed out after 2 s waiting for rank 1" in first[0]
    assert "rank 1 does not answer: it is stopped, or its host is" in first[0]
    assert second[0] != "no error", "what the others gave up is no result"


# ---- ranks that do different things ----------------------------------------------------------------------------------


def differ(rank: int, size: int, store: str, case: str, count: int, allocated: bool) -> list[Any]:
    with open_mesh(rank, size, store, timeout=5.0) as mesh:
        comm, odd = mesh.data, rank == 1
        memory = comm.allocate((3 * size * count,)) if allocated else torch.empty(3 * size * count)
        x = memory[: size * count].fill_(rank + 1.0)
        y = memory[size * count : 3 * size * count].fill_(rank + 1.0)
        calls: dict[str, Callable[[], Any]] = {
            "operation": lambda: comm.broadcast(x, 0) if odd else comm.all_reduce(x),
            "scatter or gather": lambda: comm.reduce_scatter(x) if odd else comm.all_gather(x),
            "count": lambda: comm.all_reduce(y if odd else x),
            "half a count": lambda: comm.all_to_all(y if odd else x),
            "dtype": lambda: comm.all_reduce(x.view(torch.int32) if odd else x),
            "op": lambda: comm.all_reduce(x, "max" if odd else "sum"),
            "root": lambda: comm.broadcast(x, 1 if odd else 0),
            "dst": lambda: comm.reduce(x, 2 if odd else 0),
            "barrier": lambda: comm.barrier() if odd else comm.all_gather(x),
            "allocate": lambda: comm.allocate((count,)) if odd else comm.all_reduce(x),
            "bytes": lambda: comm.allocate((count + odd,)),
        }
        try:
            calls[case]()
        except EngineError as error:
            first: Any = str(error)
        else:
            first = None
        try:
            comm.all_reduce(torch.ones(2))
        except EngineError as error:
            return [first, type(error).__name__]
        return [first, "no error"]


DIFFERENT = {
    "operation": ("all_reduce(sum)", "broadcast"),
    "scatter or gather": ("all_gather", "reduce_scatter(sum)"),
    "count": ("all_reduce(sum) of {} float32", "all_reduce(sum) of {} float32"),
    "half a count": ("all_to_all of {} float32", "all_to_all of {} float32"),
    "dtype": ("float32", "int32"),
    "op": ("all_reduce(sum)", "all_reduce(max)"),
    "root": ("with root 0", "with root 1"),
    "dst": ("with root 0", "with root 2"),
    "barrier": ("all_gather", "barrier"),
    "allocate": ("all_reduce(sum)", "allocate of {} bytes"),
    "bytes": ("allocate of {} bytes", "allocate of {} bytes"),
}


@pytest.mark.parametrize(("count", "allocated"), [(4, False), (200_000, False), (200_000, True)])
@pytest.mark.parametrize("case", DIFFERENT)
def test_different_calls_are_an_error_on_every_rank_that_names_both(
    world: World, case: str, count: int, allocated: bool
) -> None:
    numbers = {"count": (3 * count, 6 * count), "half a count": (3 * count, 6 * count),
               "allocate": (0, 4 * count), "bytes": (4 * count, 4 * count + 4)}  # fmt: skip
    ours, odd = (text.format(number) for text, number in zip(DIFFERENT[case], numbers.get(case, (0, 0)), strict=True))
    for text, afterwards in world.run(3, differ, case, count, allocated, mesh=False):
        assert text is not None, "no result where the ranks differ"
        named = text.partition("the ranks called different things: ")[2].partition(". ")[0]  # before the report
        assert ours in named
        assert odd in named
        assert afterwards == "CommunicationError", "the group is out of step for good"


# ---- a rank that fails by itself -------------------------------------------------------------------------------------


def fail_inside(rank: int, size: int, store: str, kind: str, async_op: bool) -> list[str]:
    """Rank 1 fails in the middle of its own sum. Afterwards another mesh works in the same processes."""
    found = []
    with open_mesh(rank, size, store) as mesh:
        combine, errors = collectives.combine, {"KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}
        if rank == 1:

            def broken(*_: Any) -> None:
                raise errors[kind]("planted")

            collectives.combine = broken
        try:
            result: Any = mesh.data.all_reduce(torch.ones(LARGE), async_op=async_op)
            if async_op:
                result.wait()
            mesh.data.barrier()
            found.append("no error")
        except BaseException as error:
            found.append(f"{type(error).__name__}: {error}")
        finally:
            collectives.combine = combine
    with open_mesh(rank, size, f"{store}.again") as mesh:
        found.append(str(mesh.data.all_reduce(torch.full((LARGE,), rank + 1.0))[-1].item()))
    return found


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["ValueError", "KeyboardInterrupt"])
def test_an_error_in_the_middle_reaches_the_others_and_another_mesh_works(
    world: World, kind: str, async_op: bool
) -> None:
    first, second, third = world.run(3, fail_inside, kind, async_op, mesh=False)
    assert second == [f"{kind}: planted", "6.0"]
    for error, again in (first, third):
        assert error.startswith("CommunicationError: ")
        assert f"rank 1 failed by itself: {kind}: planted" in error
        assert again == "6.0"


def leave_in_the_middle(rank: int, size: int, store: str) -> str:
    with open_mesh(rank, size, store) as mesh:
        if rank == 1:
            return "left"
        try:
            mesh.data.all_reduce(torch.ones(3))
        except CommunicationError as error:
            return str(error)
        return "no error"


def test_a_rank_that_closes_its_mesh_is_named(world: World) -> None:
    first, second, third = world.run(3, leave_in_the_middle, mesh=False)
    assert second == "left"
    assert "rank 1 is gone: its process has ended, or has closed the mesh" in first
    assert "rank 1 is gone: its process has ended, or has closed the mesh" in third


# ---- the thread that moves messages ----------------------------------------------------------------------------------


def send_ahead_of_mapping(rank: int, size: int, store: str) -> float:
    """Rank 1 takes its time to map what all have allocated; rank 0 is through, and sends from there."""
    with open_mesh(rank, size, store) as mesh:
        comm, map_segment = mesh.data, segments.map_segment
        comm.exchange([(torch.ones(1), 1 - rank)], [(torch.empty(1), 1 - rank)], async_op=True).wait()
        if rank == 1:

            def slowly(fd: int, nbytes: int) -> torch.Tensor:
                time.sleep(0.2)
                return map_segment(fd, nbytes)

            segments.map_segment = slowly
        try:
            x = comm.allocate((LARGE,))
        finally:
            segments.map_segment = map_segment
        if rank == 0:
            comm.send(x.fill_(3.0), 1)
        else:
            comm.recv(x, 0)
        return x[-1].item()


def test_a_message_may_be_ahead_of_the_memory_that_it_lies_in(world: World) -> None:
    assert world.run(2, send_ahead_of_mapping, mesh=False) == [3.0, 3.0]


def fail_while_moving(rank: int, size: int, store: str, on_the_thread: bool) -> tuple[str, float]:
    with open_mesh(rank, size, store) as mesh:
        comm, of = mesh.data, segments.Segments.of
        comm.barrier()
        if rank == 1:

            def broken(*_: Any) -> torch.Tensor:
                raise ValueError("planted")

            segments.Segments.of = broken  # type: ignore[method-assign]
        started = time.monotonic()
        try:
            x = comm.allocate((LARGE,))
            if rank == 0:
                comm.send(x, 1)
            elif on_the_thread:
                comm.exchange(recvs=[(x, 0)], async_op=True).wait()
            else:
                comm.recv(x, 0)
        except CommunicationError as error:
            return str(error), time.monotonic() - started
        finally:
            segments.Segments.of = of  # type: ignore[method-assign]
        return "no error", 0.0


@pytest.mark.parametrize("on_the_thread", [True, False], ids=["thread", "waiting"])
def test_an_error_of_whoever_moves_messages_reaches_both_sides(world: World, on_the_thread: bool) -> None:
    for text, seconds in world.run(2, fail_while_moving, on_the_thread, mesh=False):
        assert "rank 1 failed by itself: ValueError: planted" in text
        assert seconds < SOON
