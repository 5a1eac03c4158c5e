"""Every algorithm on real ranks gives what the backend's own call gives: any size, count, dtype, strides, hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import engine
from engine import Layout
from engine.comm.choice import OPERATIONS, algorithms_of
from engine.device import reducible
from tests.world import World, refusals

SIZES = [2, 3, 5, 6, 7]
CPU = torch.device("cpu")


def held(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Distinct small values, whose sums and products over 7 ranks every dtype holds exactly."""
    if dtype is torch.bool:
        return (torch.arange(count) + rank) % 3 == 0
    return ((torch.arange(count) * 5 + rank * 3) % 3).to(dtype)


def expected(op: str, parts: list[Tensor]) -> Tensor:
    stacked = torch.stack(parts)
    if stacked.dtype is torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    if op in ("sum", "mean"):
        return stacked.sum(0, dtype=stacked.dtype) / (len(parts) if op == "mean" else 1)
    return stacked.prod(0, dtype=stacked.dtype) if op == "prod" else getattr(stacked, f"a{op}")(0)


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["sum", "mean"]
    return ["sum", "max", "min", "prod", *(["mean"] if dtype.is_floating_point else [])]


def compare_all(mesh: engine.Mesh, dtype: torch.dtype, counts: list[int]) -> list[str]:
    """Return what was wrong, for every operation, algorithm and reduction."""
    comm, size, rank, wrong = mesh.data, mesh.data.size, mesh.data.rank, []

    def check(what: str, got: Tensor | None, want: Tensor) -> None:
        if got is None or got.dtype != want.dtype or not torch.equal(got, want):
            wrong.append(f"rank {rank}: {what}: {got} is not {want}")

    for count in counts:
        whole = count * size
        parts = [held(r, whole, dtype) for r in range(size)]
        for name in algorithms_of("all_reduce"):
            for op in ops_for(dtype):
                got = comm.all_reduce(held(rank, count, dtype), op, algorithm=name)
                check(f"all_reduce {name} {op} {count}", got, expected(op, parts)[:count].to(dtype))
        for name in algorithms_of("reduce_scatter"):
            for op in ops_for(dtype):
                x = held(rank, whole, dtype)
                got = comm.reduce_scatter(x, op=op, algorithm=name)
                check(
                    f"reduce_scatter {name} {op} {count}",
                    got,
                    expected(op, parts).to(dtype).chunk(size)[rank] if count else got,
                )
                check(f"reduce_scatter {name} leaves its input", x, held(rank, whole, dtype))
        for name in algorithms_of("all_gather"):
            got = comm.all_gather(held(rank, count, dtype), algorithm=name)
            check(f"all_gather {name} {count}", got, torch.cat([held(r, count, dtype) for r in range(size)]))
        for root in range(size):
            for name in algorithms_of("broadcast"):
                got = comm.broadcast(held(rank, count, dtype), root, algorithm=name)
                check(f"broadcast {name} from {root} {count}", got, held(root, count, dtype))
            for name in algorithms_of("reduce"):
                x = held(rank, count, dtype)
                comm.reduce(x, root, algorithm=name)
                want = expected("sum", parts)[:count].to(dtype) if rank == root else held(rank, count, dtype)
                check(f"reduce {name} to {root} {count}", x, want)
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_gives_the_plain_answer(world: World, size: int) -> None:
    assert not any(world.run(Layout(data=size), compare_all, torch.float64, [0, 1, 5, 64]))


@pytest.mark.parametrize("dtype", sorted(reducible(CPU), key=str), ids=str)
def test_every_dtype_that_gloo_sums(world: World, dtype: torch.dtype) -> None:
    assert not any(world.run(Layout(data=3), compare_all, dtype, [4]))


def on_hosts(rank: int, size: int, store: str, hosts: list[str]) -> Any:
    with engine.init(
        Layout(data=size), device="cpu", timeout=20, store=dist.FileStore(store, size), rank=rank, world_size=size,
        host=hosts[rank],
    ) as mesh:  # fmt: skip
        return mesh.data.hosts, compare_all(mesh, torch.float32, [1, 8])


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abc", "abaab", "aaabbcc"])
def test_hierarchical_algorithms_on_forced_hosts(world: World, hosts: str) -> None:
    groups = tuple(tuple(i for i, h in enumerate(hosts) if h == host) for host in dict.fromkeys(hosts))
    for found, wrong in world.run(len(hosts), on_hosts, list(hosts), mesh=False):
        assert found == groups
        assert wrong == []


def bits(mesh: engine.Mesh) -> dict[str, bytes]:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(mesh.rank))
    return {
        name: mesh.data.all_reduce(x.clone(), algorithm=name).numpy().tobytes() for name in algorithms_of("all_reduce")
    }


@pytest.mark.parametrize("size", [2, 4, 7])
def test_all_ranks_end_with_the_same_bits_and_two_with_the_backends(world: World, size: int) -> None:
    results = world.run(Layout(data=size), bits)
    assert all(result == results[0] for result in results)
    if size == 2:
        assert len(set(results[0].values())) == 1


def in_flight(mesh: engine.Mesh) -> list[Any]:
    """Start many, wait backwards; views with gaps, outputs and inputs that lie in one another."""
    comm, works = mesh.data, []
    for name in algorithms_of("all_reduce"):
        works.append(comm.all_reduce(held(comm.rank, 400, torch.float64)[::2], algorithm=name, async_op=True))
    for name in algorithms_of("reduce_scatter"):
        x = held(comm.rank, 12 * comm.size, torch.float64)
        works.append(comm.reduce_scatter(x, out=x.chunk(comm.size)[comm.rank], algorithm=name, async_op=True))
    for name in algorithms_of("all_gather"):
        whole = torch.full((comm.size * 6, 2), -1.0, dtype=torch.float64).t()
        own = whole.chunk(comm.size, 1)[comm.rank].copy_(held(comm.rank, 12, torch.float64).view(2, 6))
        works.append(comm.all_gather(own, 1, out=whole, algorithm=name, async_op=True))
    for name in algorithms_of("broadcast"):
        works.append(comm.broadcast(held(comm.rank, 9, torch.float64), 1, algorithm=name, async_op=True))
    return [work.wait() for work in reversed(works)][::-1]


@pytest.mark.parametrize("size", [2, 5])
def test_many_in_flight_waited_for_in_any_order(world: World, size: int) -> None:
    parts = [held(r, 400, torch.float64) for r in range(size)]
    for rank, results in enumerate(world.run(Layout(data=size), in_flight)):
        want: list[Tensor] = [expected("sum", parts)[::2]] * len(algorithms_of("all_reduce"))
        scattered = expected("sum", [held(r, 12 * size, torch.float64) for r in range(size)]).chunk(size)[rank]
        want += [scattered] * len(algorithms_of("reduce_scatter"))
        gathered = torch.cat([held(r, 12, torch.float64).view(2, 6) for r in range(size)], 1)
        want += [gathered] * len(algorithms_of("all_gather"))
        want += [held(1, 9, torch.float64)] * len(algorithms_of("broadcast"))
        for got, wanted in zip(results, want, strict=True):
            assert torch.equal(got, wanted)


def misnamed(mesh: engine.Mesh) -> list[str]:
    x = torch.ones(2)
    return refusals(
        [
            lambda: mesh.data.all_reduce(x, algorithm="rign"),
            lambda: mesh.data.broadcast(x, 0, algorithm="ring"),
            lambda: mesh.data.all_gather(x, algorithm="tree"),
        ]
    )


def test_an_unknown_algorithm_is_named(world: World) -> None:
    for texts in world.run(Layout(data=2), misnamed):
        assert "all_reduce on axis 'data': unknown algorithm 'rign' (did you mean 'ring'?): choose native, " in texts[0]
        assert "broadcast on axis 'data': unknown algorithm 'ring'" in texts[1]
        assert "choose native, pairwise, ring, hierarchical" in texts[2]


def test_every_operation_has_the_native_algorithm() -> None:
    assert all(algorithms_of(operation)[0] == "native" for operation in OPERATIONS)
