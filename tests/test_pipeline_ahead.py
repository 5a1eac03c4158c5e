"""Programs that post receives one computation ahead and wait for sends one later: what they are, that they end, and
what messages then cost; and gradients that are reduced while other stages compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel
from engine.errors import LayoutError
from engine.pipeline import rendezvous
from engine.pipeline.schedule import Compute, Exchange, Message, Program, Stages, forward_only, programs
from engine.pipeline.schedules import SCHEDULES, gpipe, one_f_one_b
from engine.pipeline.verify import check_programs, posted_late, verify
from tests.world import World


def forward(stage: int, i: int) -> Compute:
    return Compute("forward", stage, i)


def backward(stage: int, i: int) -> Compute:
    return Compute("backward", stage, i)


def test_the_programs_of_two_stages_and_two_microbatches_are_these() -> None:
    up = [Message("activation", 1, i, 0, 1) for i in range(2)]
    down = [Message("gradient", 0, i, 1, 0) for i in range(2)]
    assert programs(one_f_one_b(Stages(2), 2), Stages(2), ahead=True) == (
        (
            forward(0, 0),
            Exchange((down[0],), (up[0],), ()),
            forward(0, 1),
            Exchange((down[1],), (up[1],), (down[0], up[0])),
            backward(0, 0),
            Exchange((), (), (down[1], up[1])),
            backward(0, 1),
        ),
        (
            Exchange((up[0],), (), (up[0],)),
            forward(1, 0),
            Exchange((up[1],), (), ()),
            backward(1, 0),
            Exchange((), (down[0],), (up[1],)),
            forward(1, 1),
            Exchange((), (), (down[0],)),
            backward(1, 1),
            Exchange((), (down[1],), (down[1],)),
        ),
    )


def test_every_schedule_ends_also_while_forms_are_not_known() -> None:
    checked = fell_back = 0
    for (name, schedule), ranks, chunks, placement, microbatches in itertools.product(
        SCHEDULES.items(), range(1, 6), (1, 2, 3), ("loop", "v"), (1, 2, 3, 4, 7, 11)
    ):
        stages = Stages(ranks, chunks, placement)
        try:
            plan = schedule(stages, microbatches)
        except LayoutError:
            continue
        found = verify(plan, stages, microbatches, ahead=True)
        checked += 1
        if found != programs(plan, stages, ahead=True):
            assert name in ("gpipe", "zero_bubble_v"), stages  # a send is not taken for long
            fell_back += 1
        evaluation = programs(forward_only(stages, microbatches), stages, ahead=True)
        check_programs(evaluation, stages)
        check_programs([posted_late(program, rank) for rank, program in enumerate(evaluation)], stages)
    assert checked > 400
    assert 0 < fell_back < checked / 10


def test_a_plan_whose_sends_are_taken_too_late_runs_without() -> None:
    stages = Stages(2, 2)
    plan = gpipe(stages, 9)
    assert verify(plan, stages, 9, ahead=True) == programs(plan, stages)


def free(program: Program, rank: int) -> Program:
    """The same order with every receive posted at the start and every send waited for at the end."""
    exchanges = [each for each in program if isinstance(each, Exchange)]
    receives = tuple(message for each in exchanges for message in each.receives)
    sends = tuple(message for each in exchanges for message in each.sends)
    body = [
        Exchange((), each.sends, tuple(m for m in each.waits if m.receiver == rank))
        if isinstance(each, Exchange)
        else each
        for each in program
    ]
    return (Exchange(receives), *body, Exchange((), (), sends))


def test_messages_cost_what_they_cost_where_nothing_waits_for_them_in_vain() -> None:
    stages = Stages(4)
    plan = one_f_one_b(stages, 8)

    def step(derived: Sequence[Program]) -> float:
        computed, _ = rendezvous.run(derived, lambda _: 1.0, lambda _: 0.5)
        return max(events[-1].end for events in computed)

    ahead, at_once = programs(plan, stages, ahead=True), programs(plan, stages)
    assert step(ahead) == step([free(program, rank) for rank, program in enumerate(ahead)]) < step(at_once)


# ---- gradients -------------------------------------------------------------------------------------------------------


def reductions(mesh: engine.Mesh, schedule: str, placement: str) -> list[Any]:
    """What happens in the second step: the stages whose weight gradients are made, and reductions that start."""
    specs = [LayerSpec(nn.Linear, 4, 4, bias=False) for _ in range(4)]
    model = PipelineModel(specs, mesh, balance="uniform", chunks=2, placement=placement)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, accumulate="full", bucket_mib=1e-9, lr=0.1)

    def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), target.shape[0]

    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2, schedule=schedule)
    events: list[Any] = []
    microbatch, reduce_scatter = optimizer.microbatch, mesh.data.reduce_scatter

    def noted(**options: Any) -> Any:
        events.append(options["stage"])
        return microbatch(**options)

    def started(*args: Any, **options: Any) -> Any:
        events.append("start")
        return reduce_scatter(*args, **options)

    optimizer.microbatch, mesh.data.reduce_scatter = noted, started  # type: ignore[method-assign]
    x = torch.ones(4, 4)
    step(x, 2 * x)
    events.clear()
    step(x, 2 * x)
    return events


@pytest.mark.parametrize(("schedule", "placement"), [("interleaved", "loop"), ("zero_bubble_v", "v")])
def test_a_stages_gradients_are_reduced_while_the_others_compute(world: World, schedule: str, placement: str) -> None:
    results = world.run(Layout(data=2, pipeline=2), reductions, schedule, placement, transport="torch")
    for rank, events in enumerate(results):
        first, other = Stages(2, 2, placement).on(rank // 2)
        assert sorted(map(str, events)) == sorted([str(first), str(other)] * 2 + ["start"] * 2)
        for stage in (first, other):
            last = len(events) - 1 - events[::-1].index(stage)
            assert events[last + 1] == "start", events
