"""Pipelines in which a rank does something else than the others: every rank ends, in time, with an error that names it,
and a fresh mesh in the same processes trains on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel
from engine.errors import CommunicationError
from tests.world import World, refusals


class Fails(nn.Module):
    """Multiplies by a weight; raises in the backward number `when`."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.when, self.calls = when, 0

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self.count)
        return y

    def count(self, _gradient: Tensor) -> None:
        self.calls += 1
        if self.calls == self.when:
            raise ZeroDivisionError("planted in the backward of one stage")


def summed(output: Tensor, _target: Tensor) -> tuple[Tensor, int]:
    return output.sum(), output.numel()


def make_step(mesh: engine.Mesh, when: int = 0, layers: int = 3, schedule: str = "1f1b") -> engine.TrainStep:
    chunks = layers // mesh.layout.pipeline
    specs = [LayerSpec(Fails, when) for _ in range(layers)]
    model = PipelineModel(specs, mesh, balance="uniform", chunks=chunks)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    return engine.TrainStep(model, optimizer, summed, mesh, microbatches=4, schedule=schedule)


def rows(count: int = 4, *more: int) -> Tensor:
    return torch.ones(count, *more, 4, dtype=torch.float64)


def fail_and_start_again(rank: int, size: int, path: str, schedule: str) -> list[Any]:
    options: dict[str, Any] = {"device": "cpu", "rank": rank, "world_size": size, "store": dist.FileStore(path, size)}
    found: list[Any] = []
    layers = 3 if schedule == "1f1b" else 6
    for fails in (True, False):
        try:
            with engine.init(Layout(pipeline=size), timeout=20.0, **options) as mesh:
                step = make_step(mesh, 2 if fails and rank == 1 else 0, layers, schedule)
                found += [step(rows(), rows()).loss.item(), step.evaluate(rows(3), rows(3)).loss.item()]
        except (ZeroDivisionError, CommunicationError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_after_an_error_in_the_middle_of_a_schedule_a_fresh_mesh_trains(world: World, schedule: str) -> None:
    results = world.run(3, fail_and_start_again, schedule, mesh=False)
    value = 2.0 ** (3 if schedule == "1f1b" else 6)
    for rank, (error, *losses) in enumerate(results):
        assert losses == [value, value]
        if rank == 1:
            assert error == "ZeroDivisionError: planted in the backward of one stage"
        else:
            assert error.startswith(f"CommunicationError: rank {rank}")
            assert "rank 1" in error.partition("failed after")[2]


def differ(mesh: engine.Mesh) -> list[Any]:
    step = make_step(mesh)
    last = mesh.rank == mesh.pipeline.size - 1
    for shape in ((8,), (4,), (8, 3)):
        step(rows(*shape), rows(*shape))  # all of these are known
    with mesh.ledger as ledger:
        x = rows(8) if last else rows(4)
        calls = [lambda: step(x, x), lambda: step.evaluate(x, x), lambda: step.predict(x)]
        y = rows(8, 3) if last else rows(8)
        texts = refusals([*calls, lambda: step(y, y)])
    again = step(rows(), rows()).loss.item()
    return [*texts, ("pipeline", "exchange") in ledger.entries, again]


def test_a_batch_whose_shapes_differ_over_the_pipeline_is_refused_before_anything_is_computed(world: World) -> None:
    for *texts, exchanged, loss in world.run(Layout(pipeline=3), differ):
        for text in texts:
            assert "the batch that all pipeline ranks share, by its shapes and plain values, differs over" in text
            assert "rank 2 (global 2) has (4, ((torch.float64, (2," in text
        assert not exchanged
        assert loss == 8.0


def stop_early(rank: int, size: int, path: str, leaves: bool) -> str:
    store = dist.FileStore(path, size)
    text = ""
    limit = 20.0 if leaves else 4.0  # only that of a rank that stays is waited for
    with engine.init(
        Layout(pipeline=size), device="cpu", timeout=limit, rank=rank, world_size=size, store=store
    ) as mesh:
        step = make_step(mesh, layers=2)
        try:
            for _ in range(2 if rank else 3):
                step(rows(), rows())
        except CommunicationError as error:
            text = str(error)
            store.set("told", "")
        if rank and not leaves:
            store.wait(["told"])
    return text


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_whose_batches_end_earlier_is_named(world: World, leaves: bool) -> None:
    text, nothing = world.run(2, stop_early, leaves, mesh=False)
    assert nothing == ""
    assert text.startswith("rank 0")
    assert "rank 1" in text.partition("failed after")[2], text
