"""Calls that must not take each other's messages, memory or values, in any order of starting and waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm.algorithms import PLANS
from engine.comm.choice import algorithms_of
from tests.world import World, refusals


def over_one_group(mesh: engine.Mesh, algorithm: str | None) -> list[Any]:
    """data spans the world, so both communicators lie on one process group; ranks start and wait in other orders."""
    options: dict[str, Any] = {"wire_dtype": torch.bfloat16} if algorithm is None else {"algorithm": algorithm}
    a, b = torch.full((4,), 1.0 + mesh.rank), torch.full((4,), 100.0 + 100 * mesh.rank)
    works = [mesh.data.all_reduce(a, async_op=True, **options), mesh.world.all_reduce(b, async_op=True, **options)]
    for work in works if mesh.rank == 0 else works[::-1]:
        work.wait()
    gathers = [mesh.data, mesh.world] if mesh.rank == 0 else [mesh.world, mesh.data]
    started = {c.name: c.all_gather(torch.tensor([len(c.name) + mesh.rank]), async_op=True) for c in gathers}
    peer = 1 - mesh.rank
    into = {c.name: torch.empty(1) for c in gathers}
    sent = [
        c.exchange([(torch.tensor([float(len(c.name))]), peer)], [(into[c.name], peer)], async_op=True) for c in gathers
    ]
    for work in sent:
        work.wait()
    return [a.tolist(), b.tolist(), started["data"].wait().tolist(), started["world"].wait().tolist(), into]


@pytest.mark.parametrize("algorithm", ["pairwise", "ring", "halving_doubling", None])
def test_communicators_over_one_process_group_keep_their_messages(world: World, algorithm: str | None) -> None:
    for got in world.run(Layout(data=2), over_one_group, algorithm):
        assert got == [
            [3.0] * 4,
            [300.0] * 4,
            [4, 5],
            [5, 6],
            {"data": torch.tensor([4.0]), "world": torch.tensor([5.0])},
        ]


def two_meshes(rank: int, size: int, store: str) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        with engine.init(Layout(data=2), device="cpu") as one, engine.init(Layout(data=2), device="cpu") as two:
            works = [
                mesh.data.all_gather(torch.tensor([10 * n + rank]), async_op=True) for n, mesh in ((1, one), (2, two))
            ]
            return one.data._messenger._base != two.data._messenger._base, [work.wait().tolist() for work in works]
    finally:
        dist.destroy_process_group()


def test_two_meshes_over_one_default_group(world: World) -> None:
    for apart, got in world.run(2, two_meshes, mesh=False):
        assert apart
        assert got == [[10, 11], [20, 21]]


def rooted_beside_messages(mesh: engine.Mesh) -> Any:
    comm = mesh.data
    if comm.rank == 0:
        buffer = torch.empty(3)
        work = comm.exchange(recvs=[(buffer, 1)], async_op=True)
        gathered = comm.gather(torch.full((3,), 100.0), 0)
        part = comm.scatter([torch.zeros(3), torch.full((3,), 5.0)], torch.empty(3), 0)
        work.wait()
        return buffer.tolist(), [x.tolist() for x in gathered or []], part.tolist()
    comm.gather(torch.full((3,), 200.0), 0)
    part = comm.scatter(None, torch.empty(3), 0)
    comm.exchange(sends=[(torch.full((3,), 7.0), 0)])
    return part.tolist()


def test_gather_and_scatter_take_no_message_of_an_exchange(world: World) -> None:
    first, second = world.run(Layout(data=2), rooted_beside_messages)
    assert first == ([7.0] * 3, [[100.0] * 3, [200.0] * 3], [0.0] * 3)
    assert second == [5.0] * 3


def waited_backwards_on_one(mesh: engine.Mesh) -> Any:
    comm, results = mesh.data, []
    for options in ({"wire_dtype": torch.bfloat16}, *({"algorithm": name} for name in algorithms_of("all_reduce"))):
        xs = [torch.full((5,), float(comm.rank + i)) for i in range(3)]
        works = [comm.all_reduce(x, async_op=True, **options) for x in xs]
        if comm.rank == 0:
            comm.barrier()
        for work in works[::-1] if comm.rank == 1 else works:
            work.wait()
        if comm.rank != 0:
            comm.barrier()
        results += [x[0].item() for x in xs]
    return results


def test_ranks_may_wait_in_different_orders(world: World) -> None:
    for got in world.run(Layout(data=3), waited_backwards_on_one):
        assert got == [3.0, 6.0, 9.0] * (1 + len(algorithms_of("all_reduce")))


def with_nan(mesh: engine.Mesh, count: int) -> list[bool]:
    comm = mesh.data
    x = torch.full((count,), float("nan") if comm.rank == 0 else 1.0)
    results = [comm.all_reduce(x.clone(), op) for op in ("max", "min")]
    results.append(comm.all_reduce(x.clone(), "max", async_op=True).wait())
    results.append(comm.reduce_scatter(torch.cat([x] * comm.size), op="max"))
    return [bool(result.isnan().all()) for result in results]


@pytest.mark.parametrize("count", [1000, 1 << 20])
def test_the_largest_of_a_nan_is_nan_at_any_size(world: World, count: int) -> None:
    assert all(all(got) for got in world.run(Layout(data=2), with_nan, count))


def overlapping(mesh: engine.Mesh) -> list[str]:
    comm, base = mesh.data, torch.arange(12.0)
    other = (comm.rank + 1) % comm.size * 4
    calls = [
        lambda: comm.reduce_scatter(base, out=base[other:][:4]),
        lambda: comm.reduce_scatter(base[:9], out=base[comm.rank * 3 + 1 :][:3]),
        lambda: comm.all_gather(base[other:][:4], out=base),
    ]
    return refusals(calls)


def test_out_is_the_own_part_or_apart(world: World) -> None:
    for texts in world.run(Layout(data=3), overlapping):
        assert "out shares memory with the input and is not this rank's part of it" in texts[0]
        assert "out shares memory with the input and is not this rank's part of it" in texts[1]
        assert "the input shares memory with out and is not this rank's part of it" in texts[2]


def scattered_over_a_view(mesh: engine.Mesh) -> list[float]:
    base = torch.arange(8.0).view(4, 2)
    parts = [base.view(-1)[i % 2 * 4 :][:4] for i in range(3)]
    return mesh.data.scatter(parts if mesh.rank == 0 else None, base[:, 0], 0).tolist()


def test_scatter_sends_what_was_there_before_its_own_part_came(world: World) -> None:
    assert world.run(Layout(data=3), scattered_over_a_view) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def narrow_in_odd_modes(mesh: engine.Mesh) -> list[float]:
    comm = mesh.data
    with torch.inference_mode():
        x, out = torch.ones(8), torch.empty(4)
    comm.all_reduce(x, wire_dtype=torch.bfloat16)
    comm.reduce_scatter(torch.ones(8), out=out, wire_dtype=torch.float16)
    parameter = torch.nn.Parameter(torch.ones(8))
    with torch.no_grad():
        work = comm.reduce_scatter(parameter, wire_dtype=torch.float16, async_op=True)
        comm.all_reduce(parameter, wire_dtype=torch.bfloat16)
    return [x[0].item(), out[0].item(), work.wait()[0].item(), parameter[0].item()]


def test_narrow_sums_of_inference_tensors_and_parameters(world: World) -> None:
    assert world.run(Layout(data=2), narrow_in_odd_modes) == [[2.0] * 4] * 2


def planned_in_odd_modes(mesh: engine.Mesh) -> list[tuple[str, list[float]]]:
    """Inference tensors outside their mode; parameters under no_grad, one waited for after it."""
    comm, found = mesh.data, []
    for name in PLANS["reduce_scatter"]:
        with torch.inference_mode():
            x, out = torch.ones(6), torch.empty(2)
        comm.reduce_scatter(x, out=out, algorithm=name)
        parameter = torch.nn.Parameter(torch.ones(6))
        with torch.no_grad():
            work = comm.reduce_scatter(parameter, algorithm=name, async_op=True)
            other = torch.nn.Parameter(torch.ones(6))
            inside = comm.reduce_scatter(other, out=other[2 * comm.rank :][:2], algorithm=name).clone()
        found.append((f"reduce_scatter {name}", [out[0].item(), work.wait()[0].item(), inside[0].item()]))
    for name in PLANS["all_reduce"]:
        with torch.inference_mode():
            x = torch.ones(6)
        comm.all_reduce(x, algorithm=name)
        parameter = torch.nn.Parameter(torch.ones(6))
        with torch.no_grad():
            comm.all_reduce(parameter, algorithm=name)
        found.append((f"all_reduce {name}", [x[0].item(), parameter[5].item()]))
    return found


def test_planned_sums_of_inference_tensors_and_parameters(world: World) -> None:
    for found in world.run(Layout(data=3), planned_in_odd_modes):
        assert {name: set(values) for name, values in found} == {name: {3.0} for name, _ in found}


def groups_made(rank: int, size: int, store: str) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Open a cube and return which groups this rank had made, in order, and its sums over the axes."""
    made, new_group = [], dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    dist.new_group = noted
    try:
        where: Any = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size}
        with engine.init(Layout(data=2, pipeline=2, tensor=2), device="cpu", timeout=30, **where) as mesh:
            axes = ("data", "tensor", "pipeline")
            return made, {axis: getattr(mesh, axis).all_reduce(torch.tensor(float(rank))).item() for axis in axes}
    finally:
        dist.new_group = new_group


def test_every_rank_makes_the_same_groups_in_the_same_order(world: World) -> None:
    tensor = [(0, 1), (2, 3), (4, 5), (6, 7)]
    data = [(0, 2), (1, 3), (4, 6), (5, 7)]
    pipeline = [(0, 4), (1, 5), (2, 6), (3, 7)]
    for rank, (made, sums) in enumerate(world.run(8, groups_made, mesh=False)):
        assert made == tensor + data + pipeline, rank
        groups = {"data": data, "tensor": tensor, "pipeline": pipeline}
        assert sums == {axis: float(sum(next(g for g in table if rank in g))) for axis, table in groups.items()}
