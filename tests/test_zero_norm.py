"""The largest absolute gradient as the norm that is clipped to, over all axes, as torch's clip_grad_norm_ has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine import LayerSpec, Layout
from engine.zero import ZeroOptimizer
from tests.test_zero_added import Block, batch, squared
from tests.world import World, refusals

CLIP = 0.02
STAGES = [0, 1, 2]


def frozen_first(model: nn.Module) -> None:
    """The first stage has nothing to train, and joins the reduction all the same."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))


def train(mesh: engine.Mesh) -> Any:
    found = []
    for stage in STAGES:
        model = engine.PipelineModel([LayerSpec(Block) for _ in range(3)], mesh, balance="uniform")
        frozen_first(model)
        start = engine.full_state_dict(model, mesh)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, bucket_mib=1e-4, lr=0.5)
        step = engine.TrainStep(
            model, optimizer, squared, mesh, microbatches=2, clip_grad_norm=CLIP, norm_type=math.inf
        )
        norms = []
        for number in range(2):
            x, y = (each.tensor_split(mesh.data.size)[mesh.data.rank] for each in batch(number))
            norms.append(step(x, y).grad_norm.item())
        found.append((start, norms, engine.full_state_dict(model, mesh)))
        optimizer.zero_grad()
        last = (
            [p for _, p in model.named_parameters() if p.requires_grad][-1:] if mesh.rank == mesh.world.size - 1 else []
        )
        for parameter in last:
            parameter.grad = torch.full_like(parameter, math.nan)
        found[-1] += (optimizer.finish_gradients(1.0, norm_type=math.inf).item(),)
    optimizer.zero_grad()
    return found, refusals(
        [
            lambda: optimizer.finish_gradients(1.0, norm_type=1.0),
            lambda: engine.TrainStep(model, optimizer, squared, mesh, norm_type=0.0),
            lambda: engine.TrainStep(model, optimizer, squared, mesh, norm_type=2.0 if mesh.rank else math.inf),
        ]
    )


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(pipeline=3), Layout(data=2, pipeline=2)], ids=str)
def test_the_largest_gradient_is_torchs_and_a_nan_of_one_rank_is_seen_by_all(world: World, layout: Layout) -> None:
    for found, (unknown, zero, apart) in world.run(layout, train):
        for start, norms, weights, broken in found:
            model = nn.Sequential(*(Block() for _ in range(3)))
            model.load_state_dict(start)
            frozen_first(model)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.5)
            for number, norm in enumerate(norms):
                optimizer.zero_grad()
                x, y = batch(number)
                (squared(model(x), y)[0] / 8).backward()
                wanted = nn.utils.clip_grad_norm_(trained, CLIP, norm_type=math.inf).item()
                assert wanted > CLIP
                assert norm == pytest.approx(wanted, rel=1e-12)
                optimizer.step()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-14)
            assert math.isnan(broken)
        assert "norm_type=1.0: choose 2.0, or float('inf')" in unknown
        assert "norm_type=0.0" in zero
        assert "TrainStep's options differs over axis 'world'" in apart


def of_many_equal_elements(mesh: engine.Mesh, stage: int) -> float:
    model = nn.Linear(2**11, 2**11, bias=False)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, lr=0.5)
    model.weight.grad = torch.full_like(model.weight, 0.1)
    return optimizer.finish_gradients(1.0).item()


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_many_float32_elements_is_exact_whatever_the_shards(
    world: World, layout: Layout, stage: int
) -> None:
    """torch.linalg.vector_norm of all of them at once is off by 2e-3."""
    wanted = layout.data * torch.tensor(0.1).item() * 2**11
    assert world.run(layout, of_many_equal_elements, stage) == pytest.approx([wanted] * layout.data, rel=3e-5)
