"""Zero-bubble schedules, and users' with weight gradients apart: equal to one plain process in float64 to 1e-10
relative, and how many weight gradients wait on each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel
from engine.pipeline.schedule import Compute, Stages
from engine.weight_gradients import WeightGradients
from tests.test_pipeline_chunks import Case, check_against_plain, rows, squared
from tests.world import World


def weights_last(stages: Stages, microbatches: int) -> list[list[Compute]]:
    """A user's own: all weight gradients at the end, the first microbatch's last."""
    order, plan = range(microbatches), []
    for rank in range(stages.ranks):
        own = stages.on(rank)
        plan.append([Compute("forward", stage, i) for stage in own for i in order])
        plan[-1] += [Compute("input_gradient", stage, i) for stage in reversed(own) for i in order]
        plan[-1] += [Compute("weight_gradient", stage, i) for stage in own for i in reversed(order)]
    return plan


def mixed(stages: Stages, microbatches: int) -> list[list[Compute]]:
    """Whole backwards for even microbatches, weight gradients apart for odd ones."""
    plan: list[list[Compute]] = []
    for rank in range(stages.ranks):
        plan.append([Compute("forward", rank, i) for i in range(microbatches)])
        for i in range(microbatches):
            kinds = ("input_gradient", "weight_gradient") if i % 2 else ("backward",)
            plan[-1] += [Compute(kind, rank, i) for kind in kinds]  # type: ignore[arg-type]
    return plan


H1, V = {"schedule": "zero_bubble", "chunks": 1}, {"schedule": "zero_bubble_v", "placement": "v"}
CASES = [
    *(Case(layout=Layout(pipeline=2), microbatches=m, tied=m != 3, **H1) for m in (1, 3, 8)),
    *(Case(layout=Layout(pipeline=4), microbatches=m, tied=m == 3, **H1) for m in (1, 3, 8)),
    *(Case(layout=Layout(pipeline=2), microbatches=m, tied=m != 1, **V) for m in (1, 3, 8)),
    Case(layout=Layout(pipeline=3), microbatches=7, tied=True, balance=[7, 2, 5], **H1),
    Case(layout=Layout(pipeline=2), microbatches=3, tied=True, balance=[1, 6, 3, 4], **V),
    Case(layout=Layout(), microbatches=3, tied=True, **H1),
    Case(layout=Layout(data=2, pipeline=2), microbatches=3, tied=True, **H1),
    Case(layout=Layout(data=2, pipeline=2), microbatches=3, tied=False, stage=0, **V),
    Case(layout=Layout(pipeline=2, tensor=2), microbatches=3, tied=True, **H1),
    Case(layout=Layout(pipeline=2, tensor=2), microbatches=3, tied=False, **V),
    Case(layout=Layout(pipeline=2, tensor=2), microbatches=3, tied=False, sequence_parallel=True, **H1),
    Case(layout=Layout(pipeline=2, tensor=2), microbatches=3, tied=True, sequence_parallel=True, **V),
    Case(layout=Layout(data=2, pipeline=2, tensor=2), microbatches=3, tied=True, sequence_parallel=True, **H1),
    Case(weights_last, Layout(pipeline=2), 3, True, placement="v"),
    Case(mixed, Layout(pipeline=2), 5, True, chunks=1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_plain_pytorch(world: World, case: Case) -> None:
    check_against_plain(world, case)


# ---- what waits ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Three products: two caught, one through a compiled block."""

    def __init__(self, compiled: bool):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.block = torch.compile(self.inner, backend="aot_eager") if compiled else self.inner

    def inner(self, x: Tensor) -> Tensor:
        return self.third(self.norm(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.block(self.first(x)))


def watched(mesh: engine.Mesh, microbatches: int, compiled: bool, fails: bool) -> Any:
    model = PipelineModel([LayerSpec(Layer, compiled) for _ in range(mesh.layout.pipeline)], mesh, balance="uniform")
    start = engine.full_state_dict(model, mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=microbatches, schedule="zero_bubble")
    waiting: list[int] = []
    compute = WeightGradients.compute

    def watch(self: WeightGradients, key: Any) -> None:
        waiting.append(self.waiting)
        if fails and key == (0, 2):
            raise ZeroDivisionError("planted in a weight gradient")
        compute(self, key)

    WeightGradients.compute = watch  # type: ignore[method-assign]
    try:
        result = step(*rows(2 * microbatches))
    except ZeroDivisionError:
        waiting.clear()
        fails = False
        result = step(*rows(2 * microbatches))
    finally:
        WeightGradients.compute = compute  # type: ignore[method-assign]
    return waiting, start, result.loss.item(), result.grad_norm.item(), engine.full_state_dict(model, mesh)


def check_step(results: Any, microbatches: int) -> None:
    _, start, loss, norm, weights = results[0]
    plain = nn.Sequential(*(Layer(False) for _ in results))
    plain.load_state_dict(start)
    inputs, targets = rows(2 * microbatches)
    wanted = squared(plain(inputs), targets)[0] / (2 * microbatches)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item(), rel=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_rank_s_keeps_s_microbatches_and_the_current_one(world: World, compiled: bool) -> None:
    ranks, microbatches = (2, 4) if compiled else (4, 6)
    results = world.run(Layout(pipeline=ranks), watched, microbatches, compiled, False)
    check_step(results, microbatches)
    products = 2 if compiled else 3  # of one microbatch
    for rank, (waiting, *_) in enumerate(results):
        steady = [rank + 1] * (microbatches - rank)
        assert waiting == [products * count for count in (*steady, *range(rank, 0, -1))]


def test_a_step_after_one_that_failed_starts_clean(world: World) -> None:
    results = world.run(Layout(), watched, 3, False, True)
    check_step(results, 3)
    assert results[0][0] == [3, 3, 3]


def large(mesh: engine.Mesh) -> Any:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 4)).double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=3)
    taken: list[int] = []
    hand_over = WeightGradients.hand_over

    def watch(self: WeightGradients, weight: nn.Parameter, *factors: Any) -> Tensor | None:
        taken.append(weight.numel())
        return hand_over(self, weight, *factors)

    WeightGradients.hand_over = watch  # type: ignore[method-assign]
    try:
        step(*(x[mesh.data.rank * 6 :][:6] for x in rows(12)))
    finally:
        WeightGradients.hand_over = hand_over  # type: ignore[method-assign]
    return taken, start, {name: value.clone() for name, value in model.state_dict().items()}


def test_whole_backwards_add_the_gradients_of_large_weights_in_place(world: World) -> None:
    for taken, start, weights in world.run(Layout(data=2), large):
        assert taken == [512 * 512] * 3
        plain = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 4)).double()
        plain.load_state_dict(start)
        (squared(plain(rows(12)[0]), rows(12)[1])[0] / 12).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-11, atol=1e-12)
