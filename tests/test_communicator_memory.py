"""Whose memory a collective reads, fills and keeps: strides, parts of a tensor, handles, messages.

Every rank and element has its own value; results come back from the ranks and are compared here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from engine.comm.transport import Transport
from tests.values import held, reduced, waited
from tests.world import World
from tests.world import refusals as refusals_of

Mesh = engine.Mesh


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


class Pending(Transport):
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
    comm = engine.Communicator("data", (0, 1), 0, torch.device("cpu"), where="rank 0", transport=transport)
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
