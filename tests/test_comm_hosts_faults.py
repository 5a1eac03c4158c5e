"""Groups over several hosts whose ranks differ, fail or lack memory: an error on every rank of every host, and soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CommunicationError
from tests.test_comm_hosts import open_on
from tests.values import outcome
from tests.world import World, wait_until

SOON = 6.0  # seconds; measured are milliseconds, and what only a time limit ends takes 20


# ---- ranks that do different things ----------------------------------------------------------------------------------


def differ(rank: int, size: int, store: str, hosts: str, case: str) -> Any:
    """The last rank, alone on its host, does something else than the others."""
    with open_on(rank, size, store, hosts, "shm") as mesh:
        comm, odd, x, y = mesh.data, rank == size - 1, torch.ones(6), torch.ones(12)
        calls: dict[str, Callable[[], Any]] = {
            "count": lambda: comm.all_reduce(y if odd else x),
            "op": lambda: comm.all_reduce(x, "max" if odd else "sum"),
            "dtype": lambda: comm.all_reduce(x.view(torch.int32) if odd else x),
            "operation": lambda: comm.all_gather(x) if odd else comm.all_reduce(x),
            "gathered": lambda: comm.all_gather(y if odd else x),
            "scattered": lambda: comm.reduce_scatter(y if odd else x),
            "to all": lambda: comm.all_to_all(y if odd else x),
        }
        return outcome(calls[case])


DIFFERENT = {
    "count": ("all_reduce(sum) of 6 float32", "all_reduce(sum) of 12 float32"),
    "op": ("all_reduce(sum) of 6 float32", "all_reduce(max) of 6 float32"),
    "dtype": ("all_reduce(sum) of 6 float32", "all_reduce(sum) of 6 int32"),
    "operation": ("all_reduce(sum) of 6 float32", "all_gather of 6 float32"),
    "gathered": ("all_gather of 6 float32", "all_gather of 12 float32"),
    "scattered": ("reduce_scatter(sum) of 6 float32", "reduce_scatter(sum) of 12 float32"),
    "to all": ("all_to_all of 6 float32", "all_to_all of 12 float32"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_hosts_that_call_different_things_hear_so(world: World, case: str) -> None:
    """The ranks that meet across hosts name both; another on their host passes on what it was told."""
    first, second, odd = world.run(3, differ, "aab", case, mesh=False)
    for kind, text in (first, second, odd):
        assert kind == "CommunicationError"
        named = text.partition("the ranks called different things: ")[2].partition(". ")[0]
        assert all(name in named for name in DIFFERENT[case]), text


# ---- a host that fails -----------------------------------------------------------------------------------------------


def fail_on_one_host(rank: int, size: int, store: str, hosts: str, late: bool) -> tuple[str, float]:
    """The ranks of the first host differ; those of the second come before or after that. The first keep their meshes
    open: the others may not hear of it by their end.
    """
    with open_on(rank, size, store, hosts, "shm") as mesh:
        mesh.data.barrier()
        first = hosts[rank] == hosts[0]
        others = [r for r, host in enumerate(hosts) if (host == hosts[0]) != first]

        def they(did: str) -> bool:
            return all(Path(f"{store}.{did}-{r}").exists() for r in others)

        if late and not first:
            wait_until(lambda: they("heard"))
        if first and not late:
            wait_until(lambda: they("came"))
        Path(f"{store}.came-{rank}").touch()
        started = time.monotonic()
        try:
            mesh.data.all_reduce(torch.ones(5 if rank == 1 else 4))
            text = "no error"
        except CommunicationError as error:
            text = str(error)
        seconds = time.monotonic() - started
        Path(f"{store}.heard-{rank}").touch()
        if first:
            wait_until(lambda: they("heard"))
        return text, seconds


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_host_that_fails_tells_the_others_at_once(world: World, late: bool) -> None:
    *here, third, fourth = world.run(4, fail_on_one_host, "aabb", late, mesh=False)
    for text, seconds in here:
        assert "the ranks called different things: " in text
        assert seconds < SOON
    for text, seconds in (third, fourth):
        assert "rank 0, or another on its host, has failed" in text
        assert seconds < SOON


# ---- a host without memory -------------------------------------------------------------------------------------------


def allocate_too_much(rank: int, size: int, store: str, hosts: str) -> tuple[Any, list[float]]:
    with open_on(rank, size, store, hosts, "shm") as mesh:
        found = outcome(lambda: mesh.data.allocate((1 << 45,)).shape)
        return found, mesh.data.all_reduce(mesh.data.allocate((3,)).fill_(rank + 1)).tolist()


def test_memory_that_no_host_has_is_refused_on_every_rank_and_the_group_goes_on(world: World) -> None:
    """Also by a rank that is alone on its host, which shares nothing there."""
    for (kind, text), sums in world.run(3, allocate_too_much, "aab", mesh=False):
        assert kind == "MemoryShortageError"
        assert f"allocate of {4 << 45} bytes" in text
        assert sums == [6.0] * 3
