"""all_to_all, gather and scatter on real ranks, against slices and joins in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine
from engine import Layout
from engine.comm import arguments
from engine.comm.arguments import Stretches, overlap
from tests.world import World, refusals, wait_until


def held(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 % 100 + rank * 100).view(shape).to(dtype)


def moved(mesh: engine.Mesh, dtype: torch.dtype) -> dict[str, Any]:
    comm, size, rank = mesh.data, mesh.data.size, mesh.data.rank
    wide = held(rank, 2, 3 * size, dtype=dtype)
    frame = torch.zeros(4, 6 * size, dtype=dtype)
    out = frame[::2, ::2]
    result: dict[str, Any] = {
        "rows": comm.all_to_all(held(rank, 2 * size, 3, dtype=dtype)),
        "columns": comm.all_to_all(wide, -1, out=out) is out,
        "frame": frame,
        "input": wide,
        "async": comm.all_to_all(held(rank, size, dtype=dtype), async_op=True).wait(),
        "empty": comm.all_to_all(torch.empty(0, size, dtype=dtype), 1),
        "gather": [comm.gather(held(rank, 3, 4, dtype=dtype).t(), dst) for dst in range(size)],
        "gathered_later": comm.gather(held(rank, 2, dtype=dtype), 1, async_op=True).wait(),
    }
    whole, frame = torch.zeros(size, 3, dtype=dtype), torch.zeros(6, 2 * size, dtype=dtype)
    own = whole[rank].copy_(held(rank, 3, dtype=dtype))
    columns = frame[::2, ::2].unbind(1)  # with gaps, and each among the others
    given: list[Any] = [
        comm.gather(own, 0, out=whole.unbind()),
        comm.gather(own, 1, out=columns if rank == 1 else None),
    ]
    result["gather_out"] = (given, whole.clone(), frame.clone())
    whole.zero_()
    result["gather_out_later"] = (
        comm.gather(held(rank, 3, dtype=dtype), 1, out=list(whole), async_op=True).wait(), whole,
    )  # fmt: skip
    parts = [held(10 * rank + peer, 2, 5, dtype=dtype) for peer in range(size)]
    into = torch.zeros(5, 2, dtype=dtype).t()
    result["scatter"] = [comm.scatter(parts if src == rank else None, into, src).clone() for src in range(size)]
    own = list(held(rank, size, 3, dtype=dtype).unbind())
    result["scatter_over_own"] = comm.scatter(own if rank == 1 else None, own[0], 1).clone()
    result["scattered_later"] = comm.scatter(parts if rank == 0 else None, into, 0, async_op=True).wait().clone()
    return result


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16], ids=str)
def test_parts_reach_their_ranks(world: World, size: int, dtype: torch.dtype) -> None:
    for rank, got in enumerate(world.run(Layout(data=size), moved, dtype)):
        rows = [held(r, 2 * size, 3, dtype=dtype).chunk(size)[rank] for r in range(size)]
        assert torch.equal(got["rows"], torch.cat(rows))
        columns = [held(r, 2, 3 * size, dtype=dtype).chunk(size, 1)[rank] for r in range(size)]
        assert got["columns"]
        assert torch.equal(got["frame"][::2, ::2], torch.cat(columns, 1))
        assert not got["frame"][1::2].any()
        assert not got["frame"][:, 1::2].any()
        assert torch.equal(got["input"], held(rank, 2, 3 * size, dtype=dtype))
        assert torch.equal(got["async"], torch.stack([held(r, size, dtype=dtype)[rank] for r in range(size)]))
        assert got["empty"].shape == (0, size)
        for dst, parts in enumerate(got["gather"]):
            assert (parts is None) == (rank != dst)
            if parts is not None:
                assert all(torch.equal(part, held(r, 3, 4, dtype=dtype).t()) for r, part in enumerate(parts))
        later = got["gathered_later"]
        assert (
            later is None
            if rank != 1
            else torch.equal(torch.stack(later), torch.stack([held(r, 2, dtype=dtype) for r in range(size)]))
        )
        every = torch.stack([held(r, 3, dtype=dtype) for r in range(size)])
        (in_place, strided), whole, frame = got["gather_out"]
        assert (in_place is None, strided is None) == (rank != 0, rank != 1)
        wanted = every if rank == 0 else torch.zeros_like(every)
        wanted[rank] = every[rank]  # its own, which it sent
        assert torch.equal(whole, wanted)
        assert torch.equal(frame[::2, ::2], every.t() if rank == 1 else torch.zeros(3, size, dtype=dtype))
        assert not frame[1::2].any()
        assert not frame[:, 1::2].any()
        if rank == 1:
            assert torch.equal(torch.stack(strided), every)
        later, whole = got["gather_out_later"]
        assert (later is None) == (rank != 1)
        assert torch.equal(whole, every if rank == 1 else torch.zeros_like(every))
        for src, part in enumerate(got["scatter"]):
            assert torch.equal(part, held(10 * src + rank, 2, 5, dtype=dtype))
        assert torch.equal(got["scatter_over_own"], held(1, size, 3, dtype=dtype)[rank])
        assert torch.equal(got["scattered_later"], held(rank, 2, 5, dtype=dtype))


def overwrite_after_waiting(mesh: engine.Mesh, count: int, allocated: bool, flags: str) -> list[bool]:
    """Send, wait, overwrite, over and over from the same tensor, while the other rank asks for it late."""
    comm, other = mesh.data, 1 - mesh.data.rank
    x = comm.allocate((count,)) if allocated else torch.empty(count)
    got = [torch.empty(count) for _ in range(4)]
    for turn, into in enumerate(got):
        x.copy_(held(comm.rank + 2 * turn, count))
        started = Path(flags, f"turn-{turn}")
        if comm.rank == turn % 2:
            wait_until(started.exists)
        work = comm.exchange([(x, other)], async_op=True)
        receive = comm.exchange(recvs=[(into, other)], async_op=True)
        started.touch()
        work.wait()
        x.fill_(-1.0)
        receive.wait()
    return [torch.equal(into, held(other + 2 * turn, count).float()) for turn, into in enumerate(got)]


@pytest.mark.parametrize("transport", ["torch", "shm"])
@pytest.mark.parametrize("allocated", [False, True], ids=["private", "allocated"])
@pytest.mark.parametrize("count", [5, 1000, 700_001], ids=["20 B", "4 kB", "2.8 MB"])
def test_what_was_sent_may_be_overwritten_once_its_wait_is_over(
    world: World, tmp_path: Path, count: int, allocated: bool, transport: str
) -> None:
    got = world.run(Layout(data=2), overwrite_after_waiting, count, allocated, str(tmp_path), transport=transport)
    assert got == [[True] * 4] * 2


def refused(mesh: engine.Mesh) -> list[str]:
    comm, x, wide = mesh.data, torch.zeros(4), torch.zeros(6)
    first = comm.rank == 0
    calls = [
        lambda: comm.all_to_all(torch.zeros(5)),
        lambda: comm.all_to_all(x, out=x),
        lambda: comm.all_to_all(x, out=torch.zeros(3)),
        lambda: comm.gather(x, 2),
        lambda: comm.scatter([x, x], x, -1),
    ]
    if first:
        calls += [
            lambda: comm.scatter(None, x, 0),
            lambda: comm.scatter([x], x, 0),
            lambda: comm.scatter([x, torch.zeros(3)], x, 0),
            lambda: comm.gather(x, 0, out=x),
            lambda: comm.gather(x, 0, out=[x]),
            lambda: comm.gather(x, 0, out=[x, torch.zeros(4, dtype=torch.float64)]),
            lambda: comm.gather(x, 0, out=[x, 3]),
            lambda: comm.gather(x, 0, out=[torch.zeros(4), torch.zeros(1).expand(4)]),
            lambda: comm.gather(x, 0, out=[torch.zeros(4), x]),
            lambda: comm.gather(x, 0, out=[wide[:4], x]),
            lambda: comm.gather(wide[:4], 0, out=[wide[1:5], x]),
            lambda: comm.gather(x, 0, out=[wide[:4], wide[2:]]),
            lambda: comm.gather(x, 0, out=[torch.zeros(4), torch.zeros(4, requires_grad=True)]),
        ]
    return refusals(calls)


def test_wrong_calls_are_refused_before_anything_is_sent(world: World) -> None:
    results = world.run(Layout(data=2), refused)
    expected = [
        "all_to_all on axis 'data': dim 0 of float32 (5,) does not divide by the group's 2 ranks",
        "out shares memory with the input",
        "out is float32 (3,), but float32 (4,) gives torch.float32 (4,)",
        "dst=2 is outside the group",
        "src=-1 is outside the group",
        "rank 0 is src and must give a list of 2 tensors, not None",
        "rank 0 is src and must give a list of 2 tensors, not 1 tensors",
        "the tensor for rank 1 is torch.float32 (3,), out is torch.float32 (4,)",
        "rank 0 is dst and must give a list of 2 tensors, not one tensor",
        "rank 0 is dst and must give a list of 2 tensors, not 1 tensors",
        "the tensor for rank 1 is torch.float64 (4,), x is torch.float32 (4,): all are alike",
        "gather on axis 'data': expected a tensor, got int",
        "share memory, so it cannot be written to",
        "the tensor for rank 1 in out shares memory with the input",
        "the tensor for rank 1 in out shares memory with the input",
        "the tensor for rank 0 in out shares memory with the input",
        "two tensors of out share memory",
        "takes part in a gradient",
    ]
    for texts in results:
        for text, part in zip(texts, expected, strict=False):
            assert part in text
    assert [len(texts) for texts in results] == [len(expected), 5]


def test_a_group_of_one_moves_to_itself() -> None:
    comm = engine.init(Layout(), device="cpu").data
    x = held(0, 2, 2)
    assert torch.equal(comm.all_to_all(x), x)
    assert comm.all_to_all(x) is not x
    gathered = comm.gather(x, 0)
    assert gathered is not None
    assert torch.equal(gathered[0], x)
    assert gathered[0] is not x
    into = torch.zeros_like(x)
    assert comm.gather(x, 0, out=[into]) == [into]
    assert torch.equal(into, x)
    assert comm.gather(x, 0, out=[x]) == [x]
    assert torch.equal(comm.scatter([x], torch.zeros(2, 2, dtype=x.dtype), 0), x)


# ---- what overlaps ---------------------------------------------------------------------------------------------------

MEMORY = torch.zeros(40)
PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 3)), max_size=8)


def views(pieces: list[tuple[int, int, int]]) -> list[Tensor]:
    """Pieces of one memory: the first element, how many, and the step between them."""
    return [MEMORY.as_strided((count,), (step,), start) for start, count, step in pieces]


@settings(max_examples=300)
@given(PIECES, PIECES)
def test_sorted_stretches_overlap_where_pairs_do(
    held: list[tuple[int, int, int]], asked: list[tuple[int, int, int]]
) -> None:
    xs = views(held)
    stretches = Stretches(xs)
    clash = any(overlap(a, b) for i, a in enumerate(xs) for b in xs[:i])
    assert stretches.clash() == clash
    if not clash:
        assert [stretches.overlap(x) for x in views(asked)] == [any(overlap(x, b) for b in xs) for x in views(asked)]


def test_two_thousand_messages_are_compared_in_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quadratic rule takes two million comparisons of pairs."""
    seen: list[int] = []
    look = arguments.stretch
    monkeypatch.setattr(arguments, "stretch", lambda x: seen.append(1) or look(x))
    comm = engine.plan_mesh(Layout(data=2), 0).data
    memory = torch.zeros(4000, 2)
    with pytest.raises(engine.EngineError, match="plan"):  # it would send now, and has no processes
        comm.exchange([(x, 1) for x in memory[::2]], [(x, 1) for x in memory[1::2]])
    assert 4000 <= len(seen) <= 8000
    with pytest.raises(engine.EngineError, match="two received tensors share memory"):
        comm.exchange([], [(x, 1) for x in (*memory, memory[1234])])
