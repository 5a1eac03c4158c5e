"""Sums that travel in 16 bits: what is kept, what is lost, and that all ranks end with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from engine.comm.algorithms.compress import CHUNK, message_bytes, pack, unpack
from tests.world import World, refusals

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def ragged(rank: int, count: int) -> Tensor:
    """Values over many magnitudes, other in every chunk."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** ((torch.arange(count) // CHUNK * 7 + rank) % 23 - 11).double()
    return (torch.randn(count, generator=generator).double() * scale).float()


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_message_keeps_the_wires_precision_of_each_chunk(wire: torch.dtype, count: int) -> None:
    x = ragged(3, count)
    message = pack(x, wire)
    assert message.numel() == message_bytes(count, wire)
    back = unpack(message, count, wire)
    for values, got in zip(x.split(CHUNK), back.split(CHUNK), strict=True):
        assert ((values - got).abs() <= UNIT[wire] * values.abs().max()).all() if count else True


def test_fp16_keeps_large_small_and_not_finite_values() -> None:
    for value in (1e5, 1e-9, 3e38, 1e-38, 65504.0, 65520.0, 1e-45):
        x = torch.tensor([value, -value / 2])
        torch.testing.assert_close(unpack(pack(x, torch.float16), 2, torch.float16), x, rtol=2.0**-11, atol=2.0**-149)
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e5, 0.0])
    back = unpack(pack(x, torch.float16), 5, torch.float16)
    torch.testing.assert_close(back, x, rtol=2.0**-11, atol=0, equal_nan=True)
    only = torch.tensor([float("nan"), float("inf")])
    torch.testing.assert_close(unpack(pack(only, torch.float16), 2, torch.float16), only, equal_nan=True)


def sums(mesh: engine.Mesh, count: int) -> dict[Any, Any]:
    comm, results = mesh.data, {}
    for wire in UNIT:
        x = ragged(comm.rank, count)
        results[wire, "all"] = comm.all_reduce(x.clone(), wire_dtype=wire)
        results[wire, "mean"] = comm.all_reduce(x.clone(), "mean", wire_dtype=wire)
        whole = ragged(comm.rank, count * comm.size)
        results[wire, "part"] = comm.reduce_scatter(whole, wire_dtype=wire)
        results[wire, "kept"] = torch.equal(whole, ragged(comm.rank, count * comm.size))
        strided = torch.zeros(count, 2)
        work = comm.all_reduce(strided[:, 0].copy_(x), wire_dtype=wire, async_op=True)
        results[wire, "strided"] = torch.equal(work.wait(), results[wire, "all"]) and not strided[:, 1].any()
        results[wire, "double"] = comm.all_reduce(x.double(), wire_dtype=wire)
        results[wire, "half"] = comm.all_reduce(torch.full((3,), 2.0, dtype=torch.bfloat16), wire_dtype=wire)
    return results


@pytest.mark.parametrize(("size", "count"), [(2, 3 * CHUNK), (3, 2 * CHUNK + 7), (5, 4), (5, 1)])
def test_sums_stay_within_the_bound_and_equal_on_all_ranks(world: World, size: int, count: int) -> None:
    results = world.run(Layout(data=size), sums, count)
    parts = torch.stack([ragged(r, count).double() for r in range(size)])
    wholes = torch.stack([ragged(r, count * size).double() for r in range(size)])
    for wire, unit in UNIT.items():
        bound = 1.01 * unit * (parts.abs().max() * size + parts.sum(0).abs().max())
        assert ((results[0][wire, "all"].double() - parts.sum(0)).abs() <= bound).all()
        for rank, result in enumerate(results):
            assert torch.equal(result[wire, "all"], results[0][wire, "all"])
            assert torch.equal(result[wire, "mean"], results[0][wire, "all"] / size)
            assert result[wire, "kept"]
            assert result[wire, "strided"]
            assert result[wire, "double"].dtype is torch.float64
            assert torch.equal(result[wire, "double"].float(), result[wire, "all"])
            assert result[wire, "half"].tolist() == [2.0 * size] * 3
            exact = wholes.sum(0).chunk(size)[rank]
            limit = 1.01 * unit * wholes.abs().amax(1).sum()
            assert ((result[wire, "part"].double() - exact).abs() <= limit).all()


def tight(mesh: engine.Mesh, count: int) -> Tensor:
    return mesh.data.all_reduce(ragged(mesh.data.rank, count), wire_dtype=torch.float16)


def test_the_bound_holds_in_each_chunk(world: World) -> None:
    """Chunks are those of a block, so a small chunk beside a huge one keeps its own precision."""
    size, chunks = 2, 6
    got = world.run(Layout(data=size), tight, chunks * CHUNK)[0].double()
    parts = [ragged(r, chunks * CHUNK).double() for r in range(size)]
    total = sum(parts, torch.zeros(chunks * CHUNK, dtype=torch.float64))
    for i in range(chunks):
        piece = slice(i * CHUNK, (i + 1) * CHUNK)
        largest = sum(float(part[piece].abs().max()) for part in parts) + float(total[piece].abs().max())
        assert float((got[piece] - total[piece]).abs().max()) <= 1.01 * UNIT[torch.float16] * largest


def special(mesh: engine.Mesh) -> list[list[float]]:
    comm, wire = mesh.data, torch.float16
    inf = float("inf")
    values = [
        [40000.0, 1e5],
        [1e-9, 2e-9],
        [inf, 1.0],
        [inf if comm.rank else -inf, 1.0],
        [float("nan"), 1.0],
        [0.0, 0.0],
    ]
    return [comm.all_reduce(torch.tensor(each), wire_dtype=wire).tolist() for each in values]


def test_fp16_sums_do_not_overflow_or_vanish(world: World) -> None:
    for got in world.run(Layout(data=2), special):
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor([80000.0, 2e5]), rtol=2.0**-10, atol=0)
        torch.testing.assert_close(torch.tensor(got[1]), torch.tensor([2e-9, 4e-9]), rtol=2.0**-10, atol=0)
        assert got[2] == [float("inf"), 2.0]
        assert got[3][0] != got[3][0]
        assert got[4][0] != got[4][0]
        assert got[4][1] == 2.0
        assert got[5] == [0.0, 0.0]


def refused(mesh: engine.Mesh) -> list[str]:
    comm, x = mesh.data, torch.ones(4)
    return refusals(
        [
            lambda: comm.all_reduce(x, wire_dtype=torch.float32),
            lambda: comm.all_reduce(x.int(), wire_dtype=torch.float16),
            lambda: comm.reduce_scatter(x, op="max", wire_dtype=torch.float16),
            lambda: comm.all_reduce(x, algorithm="ring", wire_dtype=torch.float16),
        ]
    )


def test_what_cannot_travel_in_16_bits_is_refused(world: World) -> None:
    for texts in world.run(Layout(data=2), refused):
        assert "wire_dtype=torch.float32: choose torch.bfloat16 or torch.float16" in texts[0]
        assert "wire_dtype is for sums and means of floating dtypes, not sum of torch.int32" in texts[1]
        assert "not max of torch.float32" in texts[2]
        assert "wire_dtype has an algorithm of its own: leave algorithm='ring' out" in texts[3]
