"""Where ZeroOptimizer's memory lies when the ranks share memory: read in place, and given back."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine import Layout
from engine.zero import ZeroOptimizer
from tests.world import World

SHARED = os.environ.get("ENGINE_TRANSPORT", "shm") == "shm"
pytestmark = pytest.mark.skipif(not SHARED, reason="about memory that ranks share")

SIDE = 512  # a weight of 1 MiB in float32: too large for what small tensors take


def big_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))


def train(mesh: engine.Mesh, model: nn.Module, optimizer: ZeroOptimizer, steps: int) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 * number + mesh.data.rank)
        for _ in range(2):
            model(torch.randn(4, SIDE, generator=generator)).square().sum().backward()
        optimizer.finish_gradients(mesh.data.size, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


def staged(mesh: engine.Mesh, stage: int) -> Any:
    """Return the bytes that three steps copy through the data axis's slots, and what is left of memory afterwards."""
    model = big_model()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, lr=1e-3)
    train(mesh, model, optimizer, 1)
    collectives = mesh.data._transport.collectives  # type: ignore[union-attr]
    copied: list[int] = []
    for name in ("_slots_for", "_exchanged"):
        real = getattr(collectives, name)

        def spy(*arguments: Any, real: Any = real) -> Any:
            copied.append(max(x.numel() for x in arguments if isinstance(x, torch.Tensor)))
            return real(*arguments)

        setattr(collectives, name, spy)
    train(mesh, model, optimizer, 3)
    in_steps, while_there = list(copied), mesh.memory()["data"]["allocated"]
    del model, optimizer
    gc.collect()
    return in_steps, while_there, mesh.memory()["data"]["allocated"]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_copies_nothing_through_staging_and_the_memory_goes_back(world: World, ranks: int, stage: int) -> None:
    parameters = 2 * (SIDE * SIDE + SIDE)
    for copied, while_there, after in world.run(Layout(data=ranks), staged, stage):
        assert copied == [5, 5, 5]  # whether each of four parameters got a gradient, and what is left of one bucket
        assert while_there == 2 * 4 * parameters  # the parameters and their gradients
        assert after == 0


def dropped(mesh: engine.Mesh) -> tuple[int, int, int]:
    """Only the optimizer goes: its gradients' memory with it, the parameters' stays and can be used."""
    model = big_model()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1e-3)
    train(mesh, model, optimizer, 1)
    both = mesh.memory()["data"]["allocated"]
    del optimizer
    gc.collect()
    left = mesh.memory()["data"]["allocated"]
    model(torch.ones(2, SIDE)).sum().backward()
    again = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1e-3)
    train(mesh, model, again, 1)
    gc.collect()
    return both, left, mesh.memory()["data"]["allocated"]


def test_an_optimizer_that_goes_takes_its_gradients_along_and_another_can_follow(world: World) -> None:
    for both, left, again in world.run(Layout(data=2), dropped):
        assert left == both // 2
        assert again == both
