"""What each collective does to whose memory, on real ranks, against plain sums, slices and joins in one process.

Every rank and element has its own value; results come back from the ranks and are compared here.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.errors import DtypeError, LayoutError, UsageError
from tests.world import World
from tests.world import refusals as refusals_of

Mesh = engine.Mesh
SIZES = [2, 3, 5, 7]
OPS = ("sum", "mean", "max", "min", "prod")


def held(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What `rank` holds: no two elements and no two ranks alike, products exact."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) % 11 + 1) * (rank + 2) + torch.arange(numel) * 0.25).view(shape).to(dtype)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The plain answer."""
    stacked = torch.stack(parts)
    if op in ("sum", "prod"):
        return getattr(stacked, op)(0, dtype=stacked.dtype)
    return stacked.mean(0) if op == "mean" else getattr(stacked, f"a{op}")(0)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the call's result, or the name and text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def waited(result: Any) -> Any:
    """Wait if `result` is a Work."""
    return result.wait() if hasattr(result, "wait") else result


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
            "recv": None if rank == chosen else chosen,
        }


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


# ---- strided memory ----------------------------------------------------------------------------------------

# Views of a 12 x 36 tensor; every dim of each divides by 2 and by 3.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda base: base,
    "column": lambda base: base[:, 5],
    "every second row": lambda base: base[::2],
    "transposed": lambda base: base.t(),
    "chunk along dim 1": lambda base: base.chunk(2, 1)[1],
    "gaps in both dims": lambda base: base[::2, 1::3],
    "permuted": lambda base: base.view(6, 6, 12).permute(2, 0, 1),
    "one row": lambda base: base[7],
}


def reduce_views(mesh: Mesh, how: str, async_op: bool) -> dict[str, Any]:
    """The whole memory after a call on a view of it, and whether the caller's own tensor came back."""
    comm = mesh.data
    results: dict[str, Any] = {}
    for name, view in VIEWS.items():
        for op in ("sum", "mean", "max") if "reduce" in how else ("",):
            base = held(comm.rank, 12, 36)
            x = view(base)
            if how == "all_reduce":
                result = comm.all_reduce(x, op, async_op=async_op)
            elif how == "reduce":
                result = comm.reduce(x, 1, op, async_op=async_op)
            else:
                result = comm.broadcast(x, 1, async_op=async_op)
            results[f"{name} {op}"] = (base, waited(result) is x)
    return results


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("how", ["all_reduce", "reduce", "broadcast"])
def test_in_place_calls_fill_the_callers_view_and_nothing_else(world: World, n: int, async_op: bool, how: str) -> None:
    results = world.run(Layout(data=n), reduce_views, how, async_op)
    for rank, got in enumerate(results):
        for name, view in VIEWS.items():
            for op in ("sum", "mean", "max") if "reduce" in how else ("",):
                parts = [view(held(r, 12, 36)) for r in range(n)]
                expected = held(rank, 12, 36)
                if how == "broadcast":
                    view(expected).copy_(parts[1])
                elif how == "all_reduce" or rank == 1:
                    view(expected).copy_(reduced(parts, op))
                memory, own = got[f"{name} {op}"]
                torch.testing.assert_close(memory, expected, rtol=1e-14, atol=0, msg=f"{how} {op} of {name}")
                assert own, "the caller's own tensor is returned"


def scatter_and_gather_views(mesh: Mesh, async_op: bool) -> dict[str, Any]:
    comm = mesh.data
    n, results = comm.size, {}
    for name, view in VIEWS.items():
        for dim in range(view(held(0, 12, 36)).dim()):
            base = held(comm.rank, 12, 36)
            scattered = waited(comm.reduce_scatter(view(base), dim, async_op=async_op))
            gathered = waited(comm.all_gather(view(base), dim, async_op=async_op))
            memory = torch.full((scattered.numel(), 3), -7.0, dtype=torch.float64)
            out = memory[:, 1].view(scattered.shape)
            same = waited(comm.reduce_scatter(view(base), dim, out=out, async_op=async_op)) is out
            wide = torch.full((*gathered.shape, 2), -7.0, dtype=torch.float64)
            same &= waited(comm.all_gather(view(base), dim, out=wide[..., 1], async_op=async_op)).data_ptr() == (
                wide[..., 1].data_ptr()
            )
            results[f"{name} {dim}"] = (base, scattered, gathered, memory, wide, same, n)
    return results


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_reduce_scatter_and_all_gather_read_and_fill_strided_memory_along_every_dim(
    world: World, n: int, async_op: bool
) -> None:
    results = world.run(Layout(data=n), scatter_and_gather_views, async_op)
    for name, view in VIEWS.items():
        parts = [view(held(r, 12, 36)) for r in range(n)]
        for dim in range(parts[0].dim()):
            for rank, got in enumerate(results):
                base, scattered, gathered, memory, wide, same, _ = got[f"{name} {dim}"]
                assert torch.equal(base, held(rank, 12, 36)), "the input is unchanged"
                part = reduced(parts, "sum").chunk(n, dim)[rank]
                torch.testing.assert_close(scattered, part, rtol=1e-14, atol=0, msg=f"{name} {dim}")
                assert torch.equal(gathered, torch.cat(parts, dim)), f"{name} {dim}"
                torch.testing.assert_close(memory[:, 1].view(part.shape), part, rtol=1e-14, atol=0)
                assert torch.equal(wide[..., 1], torch.cat(parts, dim))
                assert set(memory[:, ::2].unique().tolist()) == {-7.0}, "the neighbours of out are untouched"
                assert wide[..., 0].unique().tolist() == [-7.0]
                assert same, "out itself is returned"


def reduce_into_own_part(mesh: Mesh, async_op: bool) -> dict[str, Any]:
    """out is this rank's part of x, and x is this rank's part of out, along every dim of a 3-d tensor."""
    comm, n = mesh.data, mesh.data.size
    results = {}
    for dim in range(3):
        for op in ("sum", "mean"):
            shape = [2, 3, 4]
            shape[dim] = 2 * n
            x = held(comm.rank, *shape)
            part = x.chunk(n, dim)[comm.rank]
            got = waited(comm.reduce_scatter(x, dim, op=op, out=part, async_op=async_op))
            results[f"scatter {dim} {op}"] = (got is part, part.clone())
        whole = torch.full(shape, -7.0, dtype=torch.float64)
        own = whole.chunk(n, dim)[comm.rank]
        own.copy_(held(comm.rank, *shape).chunk(n, dim)[comm.rank])
        got = waited(comm.all_gather(own, dim, out=whole, async_op=async_op))
        results[f"gather {dim}"] = (got is whole, whole)
    return results


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_part_of_the_tensor_may_be_reduced_into_and_gathered_from(world: World, n: int, async_op: bool) -> None:
    for rank, got in enumerate(world.run(Layout(data=n), reduce_into_own_part, async_op)):
        for dim in range(3):
            shape = [2, 3, 4]
            shape[dim] = 2 * n
            parts = [held(r, *shape) for r in range(n)]
            for op in ("sum", "mean"):
                own, part = got[f"scatter {dim} {op}"]
                assert own
                expected = reduced(parts, op).chunk(n, dim)[rank]
                torch.testing.assert_close(part, expected, rtol=1e-14, atol=0, msg=f"dim {dim} {op}")
            own, whole = got[f"gather {dim}"]
            assert own
            assert torch.equal(whole, torch.cat([parts[r].chunk(n, dim)[r] for r in range(n)], dim))


def negative_dims(mesh: Mesh) -> tuple[Tensor, Tensor]:
    x = held(mesh.data.rank, 3, 4)
    return mesh.data.reduce_scatter(x, -1), mesh.data.all_gather(x, -2)


def test_a_negative_dim_counts_from_the_end(world: World) -> None:
    parts = [held(r, 3, 4) for r in range(2)]
    for rank, (scattered, gathered) in enumerate(world.run(Layout(data=2), negative_dims)):
        assert torch.equal(scattered, (parts[0] + parts[1])[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(gathered, torch.cat(parts, 0))


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


# ---- dtypes ------------------------------------------------------------------------------------------------

REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
MOVED = (*REDUCED, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn)
REFUSED = (torch.int16, torch.uint16, torch.float8_e4m3fn)


def has_meaning(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("sum", "mean")
    return dtype.is_floating_point or op != "mean"


def typed(rank: int, dtype: torch.dtype) -> Tensor:
    """[1, 2, 0, 5] on rank 0 and [2, 2, 0, 0] on rank 1."""
    return torch.tensor([[1.0, 2.0, 0.0, 5.0], [2.0, 2.0, 0.0, 0.0]][rank]).to(dtype)


def combined(dtype: torch.dtype, op: str) -> Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, True, False, op in ("sum", "max")])
    literal = {
        "sum": [3, 4, 0, 5],
        "mean": [1.5, 2, 0, 2.5],
        "max": [2, 2, 0, 5],
        "min": [1, 2, 0, 0],
        "prod": [2, 4, 0, 0],
    }
    return torch.tensor(literal[op]).to(dtype)


def reduce_dtypes(mesh: Mesh) -> dict[str, Any]:
    comm, results = mesh.data, {}
    for dtype in (*REDUCED, *REFUSED):
        for op in OPS:
            x = typed(comm.rank, dtype)
            results[f"{dtype} {op}"] = (
                outcome(lambda x=x, o=op: comm.all_reduce(x.clone(), o)),
                outcome(lambda x=x, o=op: comm.reduce(x.clone(), 1, o)),
                outcome(lambda x=x, o=op: comm.reduce_scatter(x.clone(), op=o)),
            )
            results[f"{dtype} {op} afterwards"] = comm.any(comm.rank == 1)
    return results


def test_each_dtype_is_reduced_rightly_or_refused_by_name_before_anything_is_sent(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), reduce_dtypes)):
        for dtype in (*REDUCED, *REFUSED):
            for op in OPS:
                everywhere, at_one, part = got[f"{dtype} {op}"]
                assert got[f"{dtype} {op} afterwards"] is True
                if dtype in REDUCED and has_meaning(dtype, op):
                    total = combined(dtype, op)
                    expected = (total, total if rank == 1 else typed(0, dtype), total[2 * rank : 2 * rank + 2])
                    for call, result, wanted in zip(
                        ("all_reduce", "reduce", "reduce_scatter"), (everywhere, at_one, part), expected, strict=True
                    ):
                        assert isinstance(result, Tensor), f"{call} {op} of {dtype}: {result}"
                        assert result.dtype == dtype
                        assert torch.equal(result, wanted), f"{call} {op} of {dtype}"
                else:
                    for name, text in (everywhere, at_one, part):
                        assert name == DtypeError.__name__
                        assert str(dtype) in text
                        assert "cpu" in text or dtype in REDUCED, "names the backend's device"


def test_the_dtype_error_says_which_dtypes_are_reduced(world: World) -> None:
    _, text = world.run(Layout(data=2), reduce_dtypes)[1]["torch.int16 sum"][0]
    assert text == (
        "rank 1 (data 1, pipeline 0, tensor 0): all_reduce on axis 'data': the backend of cpu does not reduce "
        "torch.int16: use one of bfloat16, bool, complex128, complex64, float16, float32, float64, int32, int64, int8, "
        "uint8"
    )
    assert issubclass(DtypeError, TypeError)


def move_dtypes(mesh: Mesh) -> dict[str, Any]:
    comm, results = mesh.data, {}
    other = 1 - comm.rank
    for dtype in MOVED:
        x = held(comm.rank, 3).to(dtype)
        moved = (
            comm.broadcast(x.clone(), 1),
            comm.all_gather(x),
            comm.exchange([(x, other)], [(torch.empty_like(x), other)])[0],
            comm.all_gather(torch.stack([x, x])[:, 1:], 1),
        )
        # As bytes, because pickle does not carry every dtype back.
        results[str(dtype)] = [(str(result.dtype), result.view(torch.uint8)) for result in moved]
    return results


def test_every_dtype_is_moved(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), move_dtypes)):
        for dtype in MOVED:
            parts = [held(r, 3).to(dtype).view(torch.uint8) for r in range(2)]
            pairs = [torch.stack([held(r, 3).to(dtype)] * 2)[:, 1:].contiguous().view(torch.uint8) for r in range(2)]
            expected = [parts[1], torch.cat(parts), parts[1 - rank], torch.cat(pairs, 1)]
            for (kind, result), wanted in zip(got[str(dtype)], expected, strict=True):
                assert kind == str(dtype)
                assert torch.equal(result, wanted), dtype


def conjugated(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data

    def mine() -> Tensor:
        return torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (comm.rank + 1)

    return {
        "all_reduce": outcome(lambda: comm.all_reduce(mine().conj()).resolve_conj()),
        "broadcast": outcome(lambda: comm.broadcast(mine().conj(), 1).resolve_conj()),
        "all_gather": outcome(lambda: comm.all_gather(mine().conj()).resolve_conj()),
        "reduce_scatter": outcome(lambda: comm.reduce_scatter(mine().conj()).resolve_conj()),
        "exchange": outcome(
            lambda: comm.exchange([(mine().conj(), 1 - comm.rank)], [(mine(), 1 - comm.rank)])[0].resolve_conj()
        ),
    }


def test_lazily_conjugated_views_are_carried_by_value(world: World) -> None:
    first = torch.tensor([1 - 2j, 3 + 1j], dtype=torch.complex128)
    for rank, got in enumerate(world.run(Layout(data=2), conjugated)):
        expected = {
            "all_reduce": 3 * first,
            "broadcast": 2 * first,
            "all_gather": torch.cat([first, 2 * first]),
            "reduce_scatter": 3 * first[rank : rank + 1],
            "exchange": (2 - rank) * first,
        }
        for call, wanted in expected.items():
            assert isinstance(got[call], Tensor), f"{call}: {got[call]}"
            assert torch.equal(got[call], wanted), call


def negated(mesh: Mesh) -> dict[str, Any]:
    """The imaginary part of a conjugated scalar is contiguous and lazily negated: -2 on rank 0, -3 on rank 1."""
    comm = mesh.data

    def mine() -> Tensor:
        x = torch.tensor([1 + (comm.rank + 2) * 1j], dtype=torch.complex128).conj().imag
        assert x.is_neg()
        return x

    return {
        "all_reduce": comm.all_reduce(mine(), "max").item(),
        "broadcast": comm.broadcast(mine(), 1).item(),
        "reduce": comm.reduce(mine(), 1).item(),
        "all_gather": comm.all_gather(mine()).tolist(),
        "exchange": comm.exchange([(mine(), 1 - comm.rank)], [(mine(), 1 - comm.rank)])[0].item(),
    }


def test_lazily_negated_views_are_carried_by_value(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), negated)):
        assert got == {
            "all_reduce": -2.0,
            "broadcast": -3.0,
            "reduce": (-2.0, -5.0)[rank],
            "all_gather": [-2.0, -3.0],
            "exchange": (-3.0, -2.0)[rank],
        }


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


# ---- asynchronous handles ----------------------------------------------------------------------------------


def start_and_drop(mesh: Mesh) -> dict[str, Any]:
    """The caller keeps nothing but the handles."""
    comm, n = mesh.data, 4 * 2**20
    works = {
        "contiguous": comm.all_reduce(torch.full((n,), comm.rank + 1.0), async_op=True),
        "strided": comm.all_reduce(torch.full((n // 4, 2), comm.rank + 1.0)[:, 1], "mean", async_op=True),
        "scatter": comm.reduce_scatter(torch.full((n // 4,), comm.rank + 1.0), async_op=True),
        "gather": comm.all_gather(torch.full((n // 4,), comm.rank + 1.0), async_op=True),
        "broadcast": comm.broadcast(torch.full((n // 4,), comm.rank + 1.0), 1, async_op=True),
        "exchange": comm.exchange(
            sends=[(torch.full((n // 4,), comm.rank + 1.0), 1 - comm.rank)],
            recvs=[(torch.empty(n // 4), 1 - comm.rank)],
            async_op=True,
        ),
    }
    gc.collect()
    litter = [torch.full((n // 4,), -9.0) for _ in range(4)]
    results = {}
    for name, work in reversed(works.items()):
        first = work.wait()
        tensor = first[0] if isinstance(first, list) else first
        before = tensor.clone()
        again = work.wait()
        again = again[0] if isinstance(again, list) else again
        results[name] = (
            sorted(set(tensor.tolist())),
            again is tensor and torch.equal(again, before),
            len(litter),
        )
    return results


def test_a_handle_keeps_its_buffers_and_gives_one_result(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), start_and_drop)):
        values = {name: value for name, (value, _, _) in got.items()}
        assert values == {
            "contiguous": [3.0],
            "strided": [1.5],
            "scatter": [3.0],
            "gather": [1.0, 2.0],
            "broadcast": [2.0],
            "exchange": [2.0 - rank],
        }
        assert all(same for _, same, _ in got.values()), "waiting twice changes nothing"


class Pending:
    """A transport of two ranks that starts everything, finishes nothing and keeps no reference."""

    name = "pending"

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []

    def take(self, *tensors: Tensor) -> list[Any]:
        self.given += [weakref.ref(x) for x in tensors]
        return []

    def all_reduce(self, x: Tensor, *_: Any) -> list[Any]:
        return self.take(x)

    def broadcast(self, x: Tensor, *_: Any) -> list[Any]:
        return self.take(x)

    def reduce(self, x: Tensor, *_: Any) -> list[Any]:
        return self.take(x)

    def reduce_scatter(self, out: Tensor, x: Tensor, *_: Any) -> list[Any]:
        return self.take(out, x)

    def all_gather(self, out: Tensor, x: Tensor) -> list[Any]:
        return self.take(out, x)

    def exchange(self, sends: Any, receives: Any, tag: int = 0) -> list[Any]:  # noqa: ARG002
        return self.take(*(x for x, _ in (*sends, *receives)))

    def wait(self, works: list[Any]) -> None:
        """Called for real works only, of which there are none."""


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, ::2]], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    ("start", "tensors"),
    [
        (lambda comm, x: comm.all_reduce(x, async_op=True), 1),
        (lambda comm, x: comm.broadcast(x, 0, async_op=True), 1),
        (lambda comm, x: comm.reduce(x, 1, async_op=True), 1),
        (lambda comm, x: comm.reduce_scatter(x, 1, async_op=True), 2),
        (lambda comm, x: comm.all_gather(x, async_op=True), 2),
        (lambda comm, x: comm.exchange([(x, 1), (x * 2, 1)], [(x * 3, 1)], async_op=True), 3),
    ],
    ids=["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "exchange"],
)
def test_everything_a_backend_was_given_lives_until_wait(start: Any, tensors: int, view: Any) -> None:
    transport = Pending()
    comm = engine.Communicator("data", (0, 1), 0, torch.device("cpu"), where="rank 0", transport=transport)  # type: ignore[arg-type]
    work = start(comm, view(held(0, 4, 8)))
    gc.collect()
    assert len(transport.given) == tensors
    assert all(each() is not None for each in transport.given)
    work.wait()


def start_several(mesh: Mesh) -> list[Any]:
    comm = mesh.data
    calls = ((3, "sum"), (1000, "max"), (1, "mean"), (77, "min"))
    works = [comm.all_reduce(held(comm.rank, size), op, async_op=True) for size, op in calls]
    return [work.wait() for work in reversed(works)][::-1]


def test_several_calls_in_flight_keep_their_own_results(world: World) -> None:
    for got in world.run(Layout(data=3), start_several):
        for result, size, op in zip(got, (3, 1000, 1, 77), ("sum", "max", "mean", "min"), strict=True):
            torch.testing.assert_close(result, reduced([held(r, size) for r in range(3)], op), rtol=1e-14, atol=0)


# ---- point to point ----------------------------------------------------------------------------------------


def cross(mesh: Mesh, size: int) -> Tensor:
    comm = mesh.pipeline
    peer = 1 - comm.rank
    return comm.exchange(sends=[(held(comm.rank, size), peer)], recvs=[(held(9, size), peer)])[0]


@pytest.mark.parametrize("size", [10, 131072], ids=["10 elements", "1 MB"])
def test_both_directions_cross_without_a_deadlock(world: World, size: int) -> None:
    for rank, got in enumerate(world.run(Layout(pipeline=2), cross, size)):
        assert torch.equal(got, held(1 - rank, size))


MESSAGES = [(3,), (2, 4), (), (0, 2), (1000,)]


def message(source: int, target: int, number: int) -> Tensor:
    return held(source, *MESSAGES[number]) + 100 * target + 0.5 * number


def everyone_to_everyone(mesh: Mesh, async_op: bool) -> list[Tensor]:
    """Several messages for every ordered pair, listed by one side peer by peer and by the other message by message."""
    comm = mesh.data
    peers = [p for p in range(comm.size) if p != comm.rank]
    sends = [(message(comm.rank, p, k), p) for p in peers for k in range(len(MESSAGES))]
    receives = [(torch.empty(MESSAGES[k], dtype=torch.float64), p) for k in range(len(MESSAGES)) for p in peers]
    return waited(comm.exchange(sends, receives, async_op=async_op))


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_messages_of_a_pair_arrive_in_the_order_listed(world: World, n: int, async_op: bool) -> None:
    for rank, got in enumerate(world.run(Layout(data=n), everyone_to_everyone, async_op)):
        expected = [message(p, rank, k) for k in range(len(MESSAGES)) for p in range(n) if p != rank]
        assert len(got) == len(expected)
        for result, wanted in zip(got, expected, strict=True):
            assert torch.equal(result, wanted)


def pass_views_along(mesh: Mesh) -> dict[str, Any]:
    """Rank 0 sends, the last receives, whoever is between does not take part."""
    comm, results = mesh.data, {}
    for name, view in VIEWS.items():
        base = held(comm.rank, 12, 36)
        x = view(base)
        own: Any = None
        if comm.rank == 0:
            comm.send(x, comm.size - 1)
        elif comm.rank == comm.size - 1:
            own = comm.recv(x, 0) is x
        results[name] = (base, own)
    return results


@pytest.mark.parametrize("n", [2, 3])
def test_send_and_recv_read_and_fill_strided_memory(world: World, n: int) -> None:
    results = world.run(Layout(data=n), pass_views_along)
    for rank, got in enumerate(results):
        for name, view in VIEWS.items():
            expected = held(rank, 12, 36)
            if rank == n - 1:
                view(expected).copy_(view(held(0, 12, 36)))
            memory, own = got[name]
            assert torch.equal(memory, expected), name
            assert own is (True if rank == n - 1 else None)


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


# ---- refused before anything is sent ---------------------------------------------------------------------------------


def call_wrongly(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    x = held(comm.rank, 4)
    leaf = held(comm.rank, 4).requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "gradient": lambda: comm.all_reduce(leaf),
        "gradient of a result": lambda: comm.broadcast(leaf * 2, 0),
        "gradient of an input": lambda: comm.all_gather(leaf),
        "gradient of an out": lambda: comm.all_gather(x, out=torch.zeros(8, dtype=x.dtype).requires_grad_()),
        "gradient sent": lambda: comm.exchange(sends=[(leaf, 1 - comm.rank)]),
        "device": lambda: comm.all_reduce(torch.empty(4, device="meta")),
        "device of out": lambda: comm.all_gather(x, out=torch.empty(8, dtype=x.dtype, device="meta")),
        "op": lambda: comm.all_reduce(x, "summ"),
        "op of reduce_scatter": lambda: comm.reduce_scatter(x, op="avg"),
        "src": lambda: comm.broadcast(x, 2),
        "src below 0": lambda: comm.broadcast(x, -1),
        "dst": lambda: comm.reduce(x, 7),
        "object src": lambda: comm.broadcast_object(x, 2),
        "send": lambda: comm.send(x, 2),
        "recv from itself": lambda: comm.recv(x, comm.rank),
        "shape of out": lambda: comm.all_gather(x, out=torch.empty(4, dtype=x.dtype)),
        "dtype of out": lambda: comm.reduce_scatter(x, out=torch.empty(2)),
        "division": lambda: comm.reduce_scatter(held(0, 3, 5), 1),
        "dim": lambda: comm.all_gather(x, 1),
        "dim of 0-d": lambda: comm.reduce_scatter(torch.tensor(1.0)),
        "sparse": lambda: comm.all_reduce(x.to_sparse()),
        "no tensor": lambda: comm.all_reduce([1.0, 2.0]),  # type: ignore[call-overload]
        "overlap": lambda: comm.broadcast(held(comm.rank, 1).expand(3), 0),
        "None": lambda: comm.broadcast(None, 0),  # type: ignore[call-overload]
    }
    results: dict[str, Any] = {}
    for name, call in calls.items():
        before = x.clone()
        results[name] = outcome(call)
        assert torch.equal(x, before)
        results[f"{name} afterwards"] = comm.all_reduce(torch.tensor([comm.rank + 1.0])).item()
    with torch.no_grad():
        results["no_grad"] = comm.all_reduce(leaf) is leaf
    results["leaf"] = leaf.detach()
    return results


@pytest.fixture(scope="module")
def refusals(world: World) -> list[dict[str, Any]]:
    return world.run(Layout(data=2), call_wrongly)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        ("gradient", UsageError, "the tensor float64 (4,) takes part in a gradient, which this call would lose"),
        ("gradient of a result", UsageError, "takes part in a gradient"),
        ("gradient of an input", UsageError, "use engine.comm.autograd, or detach() it"),
        ("gradient of an out", UsageError, "takes part in a gradient"),
        ("gradient sent", UsageError, "takes part in a gradient"),
        ("device", UsageError, "the tensor float32 (4,) lies on meta, the group on cpu: move it with .to('cpu')"),
        ("device of out", UsageError, "lies on meta, the group on cpu"),
        ("op", UsageError, "unknown op 'summ' (did you mean 'sum'?): choose sum, mean, max, min, prod"),
        ("op of reduce_scatter", UsageError, "unknown op 'avg'"),
        ("src", UsageError, "src=2 is outside the group: its ranks are 0 to 1, positions inside the group"),
        ("src below 0", UsageError, "src=-1 is outside the group"),
        ("dst", UsageError, "dst=7 is outside the group"),
        ("object src", UsageError, "src=2 is outside the group"),
        ("send", UsageError, "peer=2 is outside the group"),
        ("recv from itself", UsageError, "is this rank itself: copy the tensor instead"),
        ("shape of out", UsageError, "gives torch.float64 (8,)"),
        ("dtype of out", UsageError, "gives torch.float64 (2,)"),
        ("division", LayoutError, "dim 1 of float64 (3, 5) does not divide by the group's 2 ranks"),
        ("dim", UsageError, "dim 1 is outside a tensor of shape (4,)"),
        ("dim of 0-d", UsageError, "dim 0 is outside a tensor of shape ()"),
        ("sparse", UsageError, "tensors are not carried: call to_dense() first"),
        ("no tensor", UsageError, "expected a tensor, got list"),
        ("overlap", UsageError, "broadcast"),
        ("None", UsageError, "expected a tensor, got NoneType"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(
    refusals: list[dict[str, Any]], call: str, kind: type[Exception], text: str
) -> None:
    for got in refusals:
        name, message = got[call]
        assert name == kind.__name__
        assert text in message
        assert got[f"{call} afterwards"] == 3.0, "the ranks are still in step"


def test_an_error_names_the_rank_its_coordinate_the_call_and_the_axis(refusals: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(refusals):
        assert got["op"][1].startswith(f"rank {rank} (data {rank}, pipeline 0, tensor 0): all_reduce on axis 'data': ")


def test_without_gradients_a_parameter_is_taken(refusals: list[dict[str, Any]]) -> None:
    for got in refusals:
        assert got["no_grad"] is True
        assert torch.equal(got["leaf"], held(0, 4) + held(1, 4))


# ---- gradients notice ------------------------------------------------------------------------------------------------


def change_a_saved_tensor(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    other = 1 - comm.rank
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda y: comm.all_reduce(y),
        "all_reduce async": lambda y: comm.all_reduce(y, async_op=True).wait(),
        "all_reduce strided": lambda y: comm.all_reduce(y[::2]),
        "broadcast": lambda y: comm.broadcast(y, 0),
        "broadcast strided": lambda y: comm.broadcast(y[1::2], 0),
        "reduce": lambda y: comm.reduce(y, 0),
        "recv": lambda y: comm.exchange([(y.clone(), other)], [(y, other)]),
        "gather out": lambda y: comm.all_gather(y[:2].clone(), out=y),
        "scatter out": lambda y: comm.reduce_scatter(torch.cat([y, y]), out=y),
        "nothing": lambda y: comm.all_gather(y),
    }
    results = {}
    for name, call in calls.items():
        x = held(comm.rank, 4).requires_grad_()
        y = x.exp()  # its backward needs y itself
        with torch.no_grad():
            call(y.detach())
        results[name] = outcome(lambda y=y, x=x: torch.autograd.grad(y.sum(), x)[0])
        comm.barrier()
    return results


def test_autograd_notices_that_a_saved_tensor_was_communicated_into(world: World) -> None:
    results = world.run(Layout(data=2), change_a_saved_tensor)
    for rank, got in enumerate(results):
        for call, result in got.items():
            if call == "nothing" or (call == "reduce" and rank == 1):
                torch.testing.assert_close(result, held(rank, 4).exp(), msg=f"{call} must leave the tensor alone")
            elif call.startswith("broadcast") and rank == 0:
                # The source's values stay: raising and the right gradient are both right.
                assert isinstance(result, tuple) or torch.equal(result, held(0, 4).exp())
            else:
                assert isinstance(result, tuple), f"{call}: the gradient was computed from changed values: {result}"
                assert "modified by an inplace operation" in result[1]


def inside_inference_mode(mesh: Mesh) -> list[Any]:
    with torch.inference_mode():
        x = held(mesh.data.rank, 4)
        mesh.data.all_reduce(x)
        y = held(mesh.data.rank, 4)
        mesh.data.broadcast(y[::2], 1)
        return [x.clone(), y.clone(), mesh.data.any(mesh.rank == 1)]


def test_calls_work_in_inference_mode(world: World) -> None:
    for rank, (x, y, flag) in enumerate(world.run(Layout(data=2), inside_inference_mode)):
        expected = held(rank, 4)
        expected[::2] = held(1, 4)[::2]
        assert torch.equal(x, held(0, 4) + held(1, 4))
        assert torch.equal(y, expected)
        assert flag is True


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


def swap_in_place(mesh: engine.Mesh) -> tuple[bool, str]:
    x = torch.full((1_000_003,), float(mesh.rank))
    right = True
    for turn in range(10):
        mesh.data.exchange(sends=[(x, 1 - mesh.rank)], recvs=[(x, 1 - mesh.rank)])
        right = right and bool((x == (mesh.rank + turn + 1) % 2).all())
    buffer = torch.zeros(4)
    return right, refusals_of(
        [lambda: mesh.data.exchange(recvs=[(buffer[:3], 1 - mesh.rank), (buffer[2:], 1 - mesh.rank)])]
    )[0]


def test_exchange_swaps_in_place_and_refuses_two_messages_for_one_memory(world: World) -> None:
    for right, text in world.run(Layout(data=2), swap_in_place):
        assert right
        assert "two received tensors share memory" in text
