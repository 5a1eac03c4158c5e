"""What a mistake ends in: with checks on, one sentence on every rank; without, a report of who is where."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm.autograd import all_gather_split, split_all_gather
from engine.errors import EngineError
from engine.placement import replicated
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.world import World

ROOT = Path(__file__).parent.parent


def text_of(call: Any) -> str:
    try:
        call()
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def open_checked(rank: int, size: int, store: str, **options: Any) -> engine.Mesh:
    layout = options.pop("layout", Layout(data=size))
    return engine.init(
        layout, device="cpu", store=dist.FileStore(store, size), rank=rank, world_size=size,
        **{"checks": True, "timeout": 20.0, **options},
    )  # fmt: skip


# ---- calls that differ, with checks ------------------------------------------------------------------------------


def differ(rank: int, size: int, store: str, case: str) -> tuple[str, float]:
    with open_checked(rank, size, store) as mesh:
        comm, odd = mesh.data, rank == 1
        x = torch.ones(8 if odd else 4)
        calls: dict[str, Any] = {
            "shape": lambda: comm.all_reduce(x),
            "dtype": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
            "op": lambda: comm.all_reduce(torch.ones(4), "max" if odd else "sum"),
            "src": lambda: comm.broadcast(torch.ones(4), 1 if odd else 0),
            "operation": lambda: comm.broadcast(torch.ones(4), 0) if odd else comm.all_reduce(torch.ones(4)),
            "algorithm": lambda: comm.all_reduce(torch.ones(4), algorithm="ring" if odd else "pairwise"),
            "wire": lambda: comm.all_reduce(torch.ones(4), wire_dtype=torch.bfloat16 if odd else None),
            "object": lambda: comm.broadcast_object(1, 0) if odd else comm.barrier(),
            "gather": lambda: comm.gather(torch.ones(4), 0 if odd else 1),
            "allocate": lambda: comm.allocate((-1 if odd else 4,)),
        }
        calls["empty"] = lambda: comm.all_reduce(torch.ones(0 if odd else 4))
        calls["indivisible"] = lambda: comm.reduce_scatter(torch.ones(5 if odd else 6))
        calls["unreducible"] = lambda: comm.all_reduce(torch.ones(4, dtype=torch.int16 if odd else torch.float32))
        first, second = torch.ones(4), torch.ones(2, 2)
        calls["order"] = lambda: [comm.all_reduce(each) for each in ((second, first) if odd else (first, second))]
        if case == "order":
            comm.all_reduce(torch.ones(3))
            comm.barrier()
        started = time.monotonic()
        text = text_of(calls[case])
        seconds = time.monotonic() - started
        assert comm.all_reduce(torch.ones(1)).item() == size, "the group still works"
        return text, seconds


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("shape", ["all_reduce(sum) of float32 (4,)", "all_reduce(sum) of float32 (8,)"]),
        ("dtype", ["of float32 (4,)", "of int32 (4,)"]),
        ("op", ["all_reduce(sum)", "all_reduce(max)"]),
        ("src", ["with src 0", "with src 1"]),
        ("operation", ["all_reduce(sum) of float32 (4,)", "broadcast of float32 (4,) with src 0"]),
        ("algorithm", ["by pairwise", "by ring"]),
        ("wire", ["all_reduce(sum) of float32 (4,) by", "as torch.bfloat16"]),
        ("object", ["broadcast_object with src 0", "barrier(max) of int32 ()"]),
        ("empty", ["of float32 (4,)", "of float32 (0,)"]),
        ("indivisible", ["reduce_scatter(sum) of float32 (6,)", "reduce_scatter(sum) of float32 (5,)"]),
        ("unreducible", ["of float32 (4,)", "of int16 (4,)"]),
        ("order", ["call 4 is all_reduce(sum) of float32 (4,)", "call 4 is all_reduce(sum) of float32 (2, 2)"]),
        ("gather", ["gather of float32 (4,) with dst 0", "with dst 1"]),
        ("allocate", ["allocate of float32 (4,)", "allocate of float32 (-1,)"]),
    ],
)
def test_different_calls_end_on_every_rank_with_each_sides_line(world: World, case: str, parts: list[str]) -> None:
    for text, seconds in world.run(3, differ, case, mesh=False):
        assert text.startswith("UsageError: rank ")
        assert "the ranks of the group call different things, nothing was sent" in text
        assert all(part in text for part in parts)
        assert "rank 1 (global 1): call " in text
        assert "0 (global 0), 2 (global 2): call " in text
        assert text.count("test_comm_checks.py:") == 2, "each side's source line"
        assert seconds < 15, "long before the limit of 20 s"


def alike(rank: int, size: int, store: str) -> Any:
    """Root and receivers call from different lines; everything else is the same call."""
    with open_checked(rank, size, store) as mesh:
        comm = mesh.data
        if rank == 0:
            comm.broadcast(torch.ones(4), 0)
        else:
            comm.broadcast(torch.zeros(4), 0)
        peer = 1 - rank
        got = comm.exchange([(torch.full((3,), float(rank)), peer)], [(torch.empty(3), peer)])[0]
        long = comm.all_gather(torch.ones([1] * 64))
        return got.tolist(), long.numel(), comm.all_to_all(torch.arange(4.0)).tolist(), mesh.checks


def test_equal_calls_pass(world: World) -> None:
    for rank, (got, numel, moved, checks) in enumerate(world.run(2, alike, mesh=False)):
        assert (got, numel, checks) == ([float(1 - rank)] * 3, 2, True)
        assert moved == [2.0 * rank, 2.0 * rank + 1] * 2


def waited_in_any_order(rank: int, size: int, store: str, transport: str, count: int) -> list[list[float]]:
    """Two messages from each of two peers, each asked for by a call of its own; the last call is waited for first."""
    with open_checked(rank, size, store, transport=transport) as mesh:
        peers = [p for p in range(size) if p != rank]
        works = []
        for number in range(2):
            for peer in peers:
                x = torch.full((count,), 10.0 * rank + number)
                works.append(mesh.data.exchange([(x, peer)], [(torch.empty(count), peer)], async_op=True))
        got = {index: works[index].wait()[0] for index in (3, 2, 1, 0)}
        return [[got[index].min().item(), got[index].max().item()] for index in range(4)]


@pytest.mark.parametrize("count", [3, 1 << 19])
@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_messages_of_equal_shape_keep_their_order_whichever_is_waited_for_first(
    world: World, transport: str, count: int
) -> None:
    for rank, got in enumerate(world.run(3, waited_in_any_order, transport, count, mesh=False)):
        peers = [p for p in range(3) if p != rank]
        assert got == [[10.0 * peer + number] * 2 for number in range(2) for peer in peers]


def mismatched_messages(rank: int, size: int, store: str, transport: str, count: int) -> str:
    with open_checked(rank, size, store, timeout=3.0, transport=transport) as mesh:
        if rank == 0:
            return text_of(lambda: mesh.data.send(torch.ones(count), 1))
        return text_of(lambda: mesh.data.recv(torch.empty(2, dtype=torch.float64), 0))


@pytest.mark.parametrize(
    ("transport", "count"),
    [("torch", 4), ("shm", 4), ("shm", 1 << 20)],
    ids=["torch", "shm", "shm-more-than-a-mailbox"],
)
def test_a_message_of_another_shape_is_refused_by_its_receiver(world: World, transport: str, count: int) -> None:
    """A message over shared memory may have left its sender before anybody refuses it: what comes early is kept."""
    texts = world.run(2, mismatched_messages, transport, count, mesh=False)
    assert f"rank 0 (global 0) sends float32 ({count},) at " in texts[1]
    assert "but this rank receives it into float64 (2,) at " in texts[1]
    assert texts[0].startswith("CommunicationError: ") or (transport == "shm" and texts[0] == "no error")


def test_checks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("ENGINE_CHECKS", value)
        with engine.init(Layout(), device="cpu") as mesh:
            assert mesh.checks is on
    with engine.init(Layout(), device="cpu", checks=True) as mesh:
        assert mesh.checks


def train_with(rank: int, size: int, store: str, case: str) -> str:
    with open_checked(rank, size, store, layout=Layout(pipeline=2, tensor=2)) as mesh:
        kinds = {"undeclared": (Layer, PartLayer), "declared": (Layer, DeclaredPartLayer)}.get(case, (Layer, Layer))
        model = engine.PipelineModel([engine.LayerSpec(kind, mesh.tensor) for kind in kinds], mesh)
        if case == "initialised":
            torch.manual_seed(0)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
        rows = torch.arange(16.0).view(4, 4).sin() + (rank if case == "rows" else 0)

        def train() -> None:
            optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
            step = engine.TrainStep(model, optimizer, lambda y, t: ((y - t).square().sum(), 1), mesh, microbatches=2)
            for _ in range(2):
                step(rows, rows)
            step.evaluate(rows, rows)

        return text_of(train)


class Layer(torch.nn.Module):
    def __init__(self, tensor: engine.Communicator) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, tensor)
        self.down = RowParallelLinear(8, 4, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class PartLayer(torch.nn.Module):
    """Sequence parallel along the rows, so each rank's norm sees a part of them."""

    def __init__(self, tensor: engine.Communicator) -> None:
        super().__init__()
        self.tensor, self.norm = tensor, torch.nn.LayerNorm(4)
        self.up = ColumnParallelLinear(4, 8, tensor, sequence_dim=0)
        self.down = RowParallelLinear(8, 4, tensor, sequence_dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.norm(split_all_gather(x, self.tensor, 0))
        return all_gather_split(self.down(self.up(part).relu()), self.tensor, 0)


class DeclaredPartLayer(PartLayer):
    def __init__(self, tensor: engine.Communicator) -> None:
        super().__init__(tensor)
        replicated(self.norm, gradient="sum")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("right", "no error"),
        ("rows", "the batch given to TrainStep, which all tensor and pipeline ranks share, differs over axis 'tensor'"),
        ("initialised", "is cut over the tensor axis, but its shards are equal on all 2 ranks"),
        ("undeclared", "differs "),
        ("declared", "no error"),
    ],
)
def test_training_with_checks(world: World, case: str, text: str) -> None:
    texts = world.run(4, train_with, case, mesh=False)
    for found in texts:
        assert text in found
    if case == "undeclared":  # on the second stage; the first hears of it
        assert all("a gradient of another rank differs over its tensor axis" in found for found in texts[:2])
        assert all("the gradient of '1.norm.weight' differs between the ranks of axis" in found for found in texts[2:])


# ---- hangs, without checks ---------------------------------------------------------------------------------------


def one_is_missing(rank: int, size: int, store: str) -> str:
    with open_checked(rank, size, store, checks=False, timeout=3.0) as mesh:
        for _ in range(2):
            mesh.data.all_reduce(torch.ones(3))
        if rank == 1:
            dist.FileStore(f"{store}.told", size).wait(["0", "2"], timedelta(seconds=30))
            return "was away"
        text = text_of(lambda: mesh.data.all_reduce(torch.ones(3), "max"))
        dist.FileStore(f"{store}.told", size).set(str(rank), "")
        return text


def test_a_timeout_says_who_waits_where_and_who_has_not_come(world: World) -> None:
    texts = world.run(3, one_is_missing, mesh=False)
    first = texts[0]
    assert first.startswith(
        "CommunicationError: rank 0 (data 0, pipeline 0, tensor 0): all_reduce(max) of float32 (3,)"
    )
    after = re.search(r"on axis 'data' failed after ([\d.]+) s", first)
    assert after, first
    assert 1.0 < float(after[1]) < 15.0, "3 s, or less where another rank's 3 s were over first"
    assert "call 4 over ranks 0, 1, 2: " in first
    assert (
        "rank 1 has not arrived: on this axis last seen in all_reduce(sum) of float32 (3,), call 3, finished" in first
    )
    assert "it is at " in first
    assert "test_comm_checks.py:" in first
    assert re.search(r"rank 2 (has arrived|failed too: |failed in all_reduce\(max\))", first), first


SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time, torch, engine, torch.distributed as dist
    rank, path, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    limit = 60 if case == "killed" else 6
    where = {"store": dist.FileStore(path, 3), "rank": rank, "world_size": 3}
    with engine.init(engine.Layout(data=3), device="cpu", timeout=limit, **where) as mesh:
        mesh.data.all_reduce(torch.ones(3))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
        mesh.data.all_reduce(torch.ones(3))
    """
)


@pytest.mark.parametrize(
    ("case", "text"),
    [("killed", "rank 1 is gone"), ("stopped", "rank 1 does not answer: it is stopped")],
)
def test_a_dead_peer_is_named_at_once_and_a_stopped_one_at_the_limit(tmp_path: Path, case: str, text: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), case], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        if case == "killed":
            ranks[1].wait(60)
        started = time.monotonic()
        errors = [ranks[rank].communicate(timeout=100)[1] for rank in (0, 2)]
        if case == "killed":
            assert time.monotonic() - started < 30, "long before the limit of 60 s"
        assert [ranks[0].returncode, ranks[2].returncode] == [1, 1]
        assert any(text in error for error in errors), errors
        for error in errors:
            assert "CommunicationError" in error
            assert text in error or "gone or stopped) and has left" in error
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
