"""What each collective gives, on real ranks, against plain sums, slices and joins in one process.

Every rank and element has its own value; results come back from the ranks and are compared here.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine import Layout
from engine.errors import DtypeError, LayoutError, UsageError
from tests.values import OPS, held, outcome, reduced
from tests.world import World

Mesh = engine.Mesh
SIZES = [2, 3, 5, 7]


# ---- ranks are positions inside the group ------------------------------------------------------------------


def call_with_peers(mesh: Mesh, peer: int) -> dict[str, Any]:
    """Groups {0, 2} and {1, 3}; `peer` is the second or first member, everywhere."""
    comm, mine = mesh.data, float(mesh.rank)
    other = 1 - comm.rank
    results: dict[str, Any] = {
        "broadcast": comm.broadcast(torch.tensor([mine]), peer).item(),
        "reduce": comm.reduce(torch.tensor([mine]), peer).item(),
        "object": comm.broadcast_object({"from": mesh.rank}, peer),
        "exchange": comm.exchange([(torch.tensor([mine]), other)], [(torch.empty(1), other)])[0].item(),
        "gathered": comm.all_gather(torch.tensor([mine])).tolist(),
        "scattered": comm.reduce_scatter(torch.tensor([10.0, 20.0])).item(),
        "gather": comm.gather(torch.tensor([mine]), peer),
        "scatter": comm.scatter(
            [torch.tensor([10 * mine + part]) for part in range(2)] if comm.rank == peer else None, torch.empty(1), peer
        ).item(),
    }
    if comm.rank == peer:
        comm.send(torch.tensor([mine]), other)
        results["recv"] = None
    else:
        results["recv"] = comm.recv(torch.empty(1), peer).item()
    return results


@pytest.mark.parametrize("peer", [0, 1])
def test_peers_are_positions_inside_the_group(world: World, peer: int) -> None:
    for rank, got in enumerate(world.run(Layout(data=2, tensor=2), call_with_peers, peer)):
        group = [0, 2] if rank in (0, 2) else [1, 3]
        chosen, position = group[peer], group.index(rank)
        assert got == {
            "broadcast": chosen,
            "reduce": sum(group) if rank == chosen else rank,
            "object": {"from": chosen},
            "exchange": group[1 - position],
            "gathered": group,
            "scattered": [20.0, 40.0][position],
            "gather": [torch.tensor([float(member)]) for member in group] if rank == chosen else None,
            "scatter": 10.0 * chosen + position,
            "recv": None if rank == chosen else chosen,
        }


def call_anothers(mesh: Mesh) -> dict[str, Any]:
    """What a rank holds of the groups of ranks that it is not in."""
    names = ("data", "tensor", "pipeline", "world")
    communicators = [each for each in vars(mesh).values() if isinstance(each, engine.Communicator)]
    result = {
        "held": sorted(each.name for each in communicators),
        "member": all(each.ranks[each.rank] == mesh.rank for each in communicators),
        "outside": outcome(lambda: mesh.data.broadcast(torch.zeros(1), 2)),  # 2 is a rank of the world, not of a group
        "sums": None,
    }
    # Both groups of the axis call at the same time, each only its own: neither waits for the other's or hears of it.
    if mesh.tensor.rank == 0:
        result["sums"] = [mesh.data.all_reduce(torch.tensor(10.0**mesh.rank)).item() for _ in range(3)]
    assert result["held"] == sorted(names)
    mesh.world.barrier()
    return result


def test_a_rank_has_communicators_of_its_own_groups_only(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2, tensor=2), call_anothers)):
        assert got["member"]
        assert got["outside"][0] == "UsageError"
        assert "src=2 is outside the group" in got["outside"][1]
        assert got["sums"] == ([101.0] * 3 if rank in (0, 2) else None)


# ---- every axis of a cube ----------------------------------------------------------------------------------


def sum_over_axes(mesh: Mesh) -> dict[str, Any]:
    axes = ("data", "pipeline", "tensor", "world")
    sums = {axis: getattr(mesh, axis).all_reduce(torch.tensor(2.0**mesh.rank)).item() for axis in axes}
    return {"sums": sums, "ranks": {axis: getattr(mesh, axis).ranks for axis in axes}, "repr": repr(mesh.data)}


def test_each_axis_of_a_cube_joins_its_own_ranks(world: World) -> None:
    groups = {
        "tensor": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "data": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "pipeline": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "world": (tuple(range(8)),),
    }
    results = world.run(Layout(data=2, pipeline=2, tensor=2), sum_over_axes)
    for axis, table in groups.items():
        for group in table:
            for rank in group:
                assert results[rank]["ranks"][axis] == group
                assert results[rank]["sums"][axis] == sum(2.0**member for member in group), (axis, rank)
    assert results[3]["repr"] == "Communicator('data', rank 1 of 2, torch on cpu)"


# ---- every op, every group size --------------------------------------------------------------------------------------


def reduce_all_ways(mesh: Mesh) -> dict[str, Any]:
    comm, n = mesh.data, mesh.data.size
    results: dict[str, Any] = {}
    for op in OPS:
        results[f"all_reduce {op}"] = comm.all_reduce(held(comm.rank, 5), op)
        results[f"reduce_scatter {op}"] = comm.reduce_scatter(held(comm.rank, 2 * n, 3), op=op)
        for dst in range(n):
            results[f"reduce {op} {dst}"] = comm.reduce(held(comm.rank, 5), dst, op)
    for src in range(n):
        results[f"broadcast {src}"] = comm.broadcast(held(comm.rank, 2, 3), src)
        results[f"object {src}"] = comm.broadcast_object([comm.rank, None], src)
        results[f"any {src}"] = comm.any(comm.rank == src)
    results["any none"], results["any all"] = comm.any(False), comm.any(True)
    comm.barrier()
    results["0-d"] = comm.all_reduce(torch.tensor(float(comm.rank + 1)))
    return results


@pytest.mark.parametrize("n", SIZES)
def test_collectives_give_the_plain_answer(world: World, n: int) -> None:
    for rank, got in enumerate(world.run(Layout(data=n), reduce_all_ways)):
        for op in OPS:
            total = reduced([held(r, 5) for r in range(n)], op)
            torch.testing.assert_close(got[f"all_reduce {op}"], total, rtol=1e-14, atol=0)
            part = reduced([held(r, 2 * n, 3) for r in range(n)], op)[2 * rank : 2 * rank + 2]
            torch.testing.assert_close(got[f"reduce_scatter {op}"], part, rtol=1e-14, atol=0)
            for dst in range(n):
                own = total if dst == rank else held(rank, 5)
                torch.testing.assert_close(got[f"reduce {op} {dst}"], own, rtol=1e-14, atol=0)
        for src in range(n):
            assert torch.equal(got[f"broadcast {src}"], held(src, 2, 3))
            assert got[f"object {src}"] == [src, None]
            assert got[f"any {src}"] is True
        assert (got["any none"], got["any all"]) == (False, True)
        assert got["0-d"].shape == ()
        assert got["0-d"] == n * (n + 1) / 2


# ---- zero elements ---------------------------------------------------------------------------------------------------

EMPTY = [(0,), (0, 6), (6, 0), (6, 0, 6)]


def call_with_nothing(mesh: Mesh) -> dict[str, Any]:
    comm, results = mesh.data, {}
    other = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    for shape in EMPTY:
        x = torch.empty(shape)
        results[f"{shape} all_reduce"] = outcome(lambda x=x: tuple(comm.all_reduce(x).shape))
        results[f"{shape} reduce"] = outcome(lambda x=x: tuple(comm.reduce(x, 0, "mean").shape))
        results[f"{shape} broadcast"] = outcome(lambda x=x: tuple(comm.broadcast(x, 1).shape))
        results[f"{shape} async"] = outcome(lambda x=x: tuple(comm.all_reduce(x, async_op=True).wait().shape))
        results[f"{shape} exchange"] = outcome(
            lambda x=x: tuple(comm.exchange([(x, other)], [(torch.empty_like(x), before)])[0].shape)
        )
        for dim in range(x.dim()):
            results[f"{shape} scatter {dim}"] = outcome(lambda x=x, d=dim: tuple(comm.reduce_scatter(x, d).shape))
            results[f"{shape} gather {dim}"] = outcome(lambda x=x, d=dim: tuple(comm.all_gather(x, d).shape))
    comm.barrier()
    return results


@pytest.mark.parametrize("n", [1, 2, 3])
def test_zero_elements_are_carried_with_their_shape(world: World, n: int) -> None:
    for got in world.run(Layout(data=n), call_with_nothing):
        for shape in EMPTY:
            for call in ("all_reduce", "reduce", "broadcast", "async", "exchange"):
                if n > 1 or call not in ("broadcast", "exchange"):
                    assert got[f"{shape} {call}"] == shape, call
            for dim in range(len(shape)):
                part, whole = list(shape), list(shape)
                part[dim] //= n
                whole[dim] *= n
                assert got[f"{shape} scatter {dim}"] == tuple(part)
                assert got[f"{shape} gather {dim}"] == tuple(whole)


# ---- averages ----------------------------------------------------------------------------------------------


def average(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    mine = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0])][comm.rank]
    five = torch.arange(5.0) + 10 * comm.rank
    return {
        "pair": comm.all_reduce(mine.clone(), "mean").tolist(),
        "five": comm.all_reduce(five, "mean").tolist(),
        "part": comm.reduce_scatter(mine.clone(), op="mean").tolist(),
        "reduce": comm.reduce(mine.clone(), 0, "mean").tolist(),
        "again": comm.all_reduce(torch.tensor([mesh.rank + 1.0]), "mean").item(),
        "int64": outcome(lambda: comm.all_reduce(torch.tensor([1, 2]), "mean")),
    }


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, tensor=2)], ids=str)
def test_a_mean_is_divided_once_by_the_groups_size(world: World, layout: Layout) -> None:
    for rank, got in enumerate(world.run(layout, average)):
        position = rank // layout.tensor
        group = [rank, rank + layout.tensor] if position == 0 else [rank - layout.tensor, rank]
        assert got["pair"] == [1.5, 3.0]
        assert got["five"] == [5.0, 6.0, 7.0, 8.0, 9.0]
        assert got["part"] == [[1.5], [3.0]][position]
        assert got["reduce"] == [[1.5, 3.0], [2.0, 3.0]][position]
        assert got["again"] == sum(member + 1 for member in group) / 2
        name, text = got["int64"]
        assert name == "DtypeError"
        assert text.endswith("the mean of torch.int64 is no torch.int64: use sum, or a floating dtype")


# ---- check_equal -----------------------------------------------------------------------------------------------------


def compare_values(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    long = [f"layer {i}" for i in range(500)]
    different = [*long[:400], "layer four hundred" if comm.rank == 2 else "layer 400", *long[401:]]
    return {
        "equal": outcome(lambda: comm.check_equal("the sizes", {"a": (1, 2), "b": None})),
        "last": outcome(lambda: comm.check_equal("the seed", 5 if comm.rank == 2 else 4)),
        "first": outcome(lambda: comm.check_equal("the seed", 4 if comm.rank == 0 else 5)),
        "long": outcome(lambda: comm.check_equal("the layers", different)),
        "afterwards": comm.all_reduce(torch.tensor(float(mesh.rank))).item(),
    }


def test_a_difference_is_raised_on_every_rank_and_names_the_rank_that_differs(world: World) -> None:
    results = world.run(Layout(data=3, tensor=2), compare_values)
    for rank, got in enumerate(results):
        column = rank % 2  # the data groups are {0, 2, 4} and {1, 3, 5}
        assert got["equal"] is None
        assert got["last"] == (
            "UsageError",
            f"the seed differs over axis 'data': rank 2 (global {4 + column}) has 5, rank 0 (global {column}) has 4: "
            "start every rank with the same",
        )
        assert got["first"][1].startswith(
            f"the seed differs over axis 'data': rank 1 (global {2 + column}) has 5, rank 0 (global {column}) has 4"
        )
        name, text = got["long"]
        assert name == "UsageError"
        assert "'layer four hundred'" in text
        assert "'layer 400'" in text
        assert len(text) < 600, "only the surroundings of the difference are shown"
        assert got["afterwards"] == sum(range(column, 6, 2))


# ---- groups of one, copies, closing, plans ---------------------------------------------------------------------------


def test_a_group_of_one_is_local() -> None:
    with engine.init(Layout(), device="cpu") as mesh:
        for comm in (mesh.data, mesh.tensor, mesh.pipeline, mesh.world):
            assert (comm.transport, comm.size, comm.rank, comm.ranks) == ("local", 1, 0, (0,))
            x = held(0, 2, 3)
            for op in OPS:
                assert comm.all_reduce(x, op) is x
                assert comm.reduce(x, 0, op) is x
                assert torch.equal(comm.reduce_scatter(x, 1, op=op), x)
            assert comm.broadcast(x, 0) is x
            assert comm.all_reduce(x, async_op=True).wait() is x
            assert torch.equal(x, held(0, 2, 3))
            gathered = comm.all_gather(x, 1)
            gathered += 1
            comm.reduce_scatter(x)[0] = -1.0
            assert torch.equal(x, held(0, 2, 3)), "a result is a tensor of its own"
            out = torch.empty(3, 2, dtype=torch.float64).t()
            assert comm.all_gather(x, out=out) is out
            assert torch.equal(out, x)
            assert (comm.any(True), comm.any(False), comm.broadcast_object({1: 2}, 0)) == (True, False, {1: 2})
            comm.barrier()
            comm.check_equal("anything", object())
            with pytest.raises(DtypeError, match="int16"):
                comm.all_reduce(torch.ones(2, dtype=torch.int16))
            with pytest.raises(UsageError, match="peer 0 is this rank itself"):
                comm.send(x, 0)
            with pytest.raises(UsageError, match="peer=1 is outside the group"):
                comm.recv(x, 1)


class Talker(nn.Module):
    def __init__(self, comm: engine.Communicator) -> None:
        super().__init__()
        self.comm, self.weight = comm, nn.Parameter(torch.ones(2))


def copy_and_pickle(mesh: Mesh) -> dict[str, Any]:
    model = Talker(mesh.data)
    other = copy.deepcopy(model)
    return {
        "same": copy.deepcopy(mesh.data) is mesh.data and other.comm is mesh.data and other.weight is not model.weight,
        "mesh": copy.deepcopy(mesh) is mesh,
        "sum": other.comm.all_reduce(torch.tensor(mesh.rank + 1.0)).item(),
        "pickle": outcome(lambda: pickle.dumps(mesh.data)),
        "pickled model": outcome(lambda: pickle.dumps(model)),
    }


def test_a_communicator_is_copied_as_itself_and_never_pickled(world: World) -> None:
    for got in world.run(Layout(data=2), copy_and_pickle):
        assert got["same"] is True
        assert got["mesh"] is True
        assert got["sum"] == 3.0
        for call in ("pickle", "pickled model"):
            assert got[call] == (
                "UsageError",
                "communicator 'data' belongs to running processes and cannot be pickled",
            )


def use_after_closing(mesh: Mesh) -> list[Any]:
    comm = mesh.data
    before = comm.all_reduce(torch.tensor(mesh.rank + 1.0)).item()
    mesh.close()
    mesh.close()
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(torch.ones(2)),
        lambda: comm.all_gather(torch.ones(2), async_op=True),
        lambda: comm.broadcast_object(1, 0),
        lambda: comm.send(torch.ones(1), 1 - comm.rank),
        comm.barrier,
        lambda: mesh.world.any(True),
    ]
    return [before, [outcome(call) for call in calls]]


def test_a_closed_mesh_says_so(world: World) -> None:
    for before, after in world.run(Layout(data=2), use_after_closing):
        assert before == 3.0
        for name, text in after:
            assert name == "UsageError"
            assert text.endswith("the mesh is closed: communicate inside `with engine.init(...)`")


def test_a_plan_refuses_to_send_and_knows_every_shape() -> None:
    layout = Layout(data=3, pipeline=1, tensor=2)
    mesh = engine.plan_mesh(layout, 5)
    assert mesh.planned
    assert (mesh.tensor.ranks, mesh.tensor.rank, mesh.tensor.size, mesh.tensor.transport) == ((4, 5), 1, 2, "plan")
    assert (mesh.data.ranks, mesh.data.rank) == ((1, 3, 5), 2)
    x = held(0, 6)
    calls: list[Callable[[engine.Communicator], Any]] = [
        lambda comm: comm.all_reduce(x),
        lambda comm: comm.broadcast(x, 0),
        lambda comm: comm.reduce(x, 0, async_op=True),
        lambda comm: comm.all_gather(x),
        lambda comm: comm.reduce_scatter(x),
        lambda comm: comm.send(x, 0),
        lambda comm: comm.broadcast_object(1, 0),
        lambda comm: comm.barrier(),
        lambda comm: comm.any(True),
    ]
    for comm in (mesh.tensor, mesh.data, mesh.world):
        for call in calls:
            with pytest.raises(UsageError, match=r"this mesh is a plan without processes; nothing can be sent on it$"):
                call(comm)
    assert torch.equal(x, held(0, 6))
    assert mesh.pipeline.all_reduce(x) is x, "an axis of one is local in a plan too"
    with pytest.raises(LayoutError, match="rank 6 is outside"):
        engine.plan_mesh(layout, 6)
