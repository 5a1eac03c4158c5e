"""What a rank keeps between a forward and its backward, in bytes that malloc has given out: what its graph needs of the
microbatches in flight, min(M, P - stage) of them for 1F1B, and no output that has been sent.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel
from engine.pipeline.executor import Executor
from engine.pipeline.schedule import Stages
from engine.pipeline.schedules import one_f_one_b
from tests.world import World

ROWS, WIDTH = 1 << 14, 8
UNIT = ROWS * WIDTH * 8
"""Bytes of one microbatch's activation between two layers."""


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def in_use() -> int:
    """Return the bytes that malloc has given out to this process."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


class Layer(nn.Module):
    """Its graph keeps its input and the product, not what it returns. Notes what is in use once both are there."""

    found: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        product = x * self.scale
        self.found.append(in_use())
        return product @ self.weight


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def units(mesh: engine.Mesh, microbatches: int, schedule: str, ahead: bool, evaluate: bool = False) -> list[float]:
    """Return, for each forward of a step, what has been taken since the step began, in activations."""
    model = PipelineModel([LayerSpec(Layer)] * mesh.layout.pipeline, mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    with mock.patch.object(Executor, "ahead", ahead):
        step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=microbatches, schedule=schedule)
        return taken(step, microbatches, evaluate)


def taken(step: engine.TrainStep, microbatches: int, evaluate: bool) -> list[float]:
    x = torch.ones(microbatches * ROWS, WIDTH, dtype=torch.float64)
    Layer.found = []
    step(x, x)  # mailboxes, gradients, forms
    Layer.found, before = [], in_use()
    if evaluate:
        step.evaluate(x, x)
    else:
        step(x, x)
    return [(each - before) / UNIT for each in Layer.found]


def run(world: World, ranks: int, *args: Any) -> list[list[float]]:
    # Over shm a message that comes early is taken out of the mailbox and kept, by the clock and not by the plan.
    return world.run(Layout(pipeline=ranks), units, *args, transport="torch")


def close(found: list[float], wanted: list[int]) -> bool:
    return found == [pytest.approx(each, abs=0.1) for each in wanted]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (4, 3), (4, 6)])
def test_1f1b_keeps_what_the_graphs_of_its_warm_up_need(world: World, ranks: int, microbatches: int) -> None:
    for stage, found in enumerate(run(world, ranks, microbatches, "1f1b", False)):
        # The first stage's input is the batch, which was there before.
        each = 1 if stage == 0 else 2
        alive = [min(i + 1, ranks - stage) for i in range(microbatches)]
        assert max(alive) == min(microbatches, ranks - stage)
        assert close(found, [each * count for count in alive]), (stage, found)


def test_messages_ahead_take_one_more_each_way(world: World) -> None:
    plan = one_f_one_b(Stages(4), 6)
    for stage, found in enumerate(run(world, 4, 6, "1f1b", True)):
        wanted = []
        for before, action, after in zip((None, *plan[stage]), plan[stage], (*plan[stage][1:], None), strict=False):
            if action.kind == "forward":
                alive = min(action.microbatch + 1, 4 - stage) * (1 if stage == 0 else 2)
                ends = {"forward": 3, "backward": 0}  # whose results go nowhere
                leaves = before is not None and stage != ends[before.kind]
                comes = after is not None and stage != 3 - ends[after.kind]
                wanted.append(alive + leaves + comes)
        assert close(found, wanted), (stage, found, wanted)


def test_gpipe_keeps_every_microbatch_and_evaluation_one(world: World) -> None:
    for stage, found in enumerate(run(world, 2, 4, "gpipe", False)):
        # The loss keeps a difference of each microbatch.
        assert close(found, [i + 1 if stage == 0 else 3 * i + 2 for i in range(4)]), (stage, found)
    for stage, found in enumerate(run(world, 2, 4, "1f1b", False, True)):
        assert close(found, [1 if stage == 0 else 2] * 4), (stage, found)
