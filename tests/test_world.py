"""The ranks of the suite themselves: results, first causes, deaths, hangs, and fresh ranks afterwards."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import engine
from engine import Layout
from tests.world import World, WorldError


def triple(mesh: engine.Mesh, number: int) -> Any:
    return mesh.rank, number * 3, torch.full((2,), float(mesh.rank)), os.getpid()


def die(mesh: engine.Mesh, how: int) -> None:
    mesh.world.barrier()  # the other has its mesh
    if mesh.rank == 1:
        os.kill(os.getpid(), how)
    mesh.world.barrier()


def hang(mesh: engine.Mesh) -> None:
    if mesh.rank == 0:
        a_function_that_hangs()


def a_function_that_hangs() -> None:
    while True:
        time.sleep(0.05)


def test_ranks_stay_alive_between_tests_and_return_in_rank_order(world: World) -> None:
    first, second = world.run(Layout(data=3), triple, 5), world.run(Layout(tensor=3), triple, 6)
    assert [result[:2] for result in first] == [(0, 15), (1, 15), (2, 15)]
    assert [result[1] for result in second] == [18, 18, 18]
    assert torch.equal(first[2][2], torch.tensor([2.0, 2.0]))
    assert [result[3] for result in first] == [result[3] for result in second]


@pytest.mark.parametrize("how", [signal.SIGABRT, signal.SIGKILL])
def test_a_rank_that_dies_is_the_cause_and_the_next_run_has_fresh_ranks(world: World, how: int) -> None:
    before = world.run(Layout(data=2), triple, 1)
    with pytest.raises(WorldError) as caught:
        world.run(Layout(data=2), die, how)
    assert caught.value.cause == 1
    assert f"rank 1 died of {signal.Signals(how).name}" in str(caught.value).splitlines()[0]
    assert "CommunicationError" in caught.value.reports[0]
    after = world.run(Layout(data=2), triple, 1)
    assert {result[3] for result in before}.isdisjoint(result[3] for result in after)


def test_a_rank_that_hangs_shows_where_and_is_replaced(world: World) -> None:
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world.run(Layout(data=2), hang, timeout=3.0)
    assert time.monotonic() - started < 20
    assert caught.value.cause == 0
    assert "a_function_that_hangs" in caught.value.reports[0]
    assert [result[1] for result in world.run(Layout(data=2), triple, 2)] == [6, 6]


def bad_result(mesh: engine.Mesh) -> Any:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error_of_its_own_run_only(world: World) -> None:
    with pytest.raises(WorldError, match="pickle"):
        world.run(Layout(data=2), bad_result)
    assert [result[1] for result in world.run(Layout(data=2), triple, 3)] == [9, 9]
