"""The simulator against closed formulas, and against timelines and memory worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from engine.errors import LayoutError, UsageError
from engine.pipeline import rendezvous
from engine.pipeline.schedule import Compute, Exchange, Message, Stages
from engine.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from engine.pipeline.simulate import Costs, Timeline, simulate

GRID = [(ranks, microbatches) for ranks in range(1, 8) for microbatches in (1, 2, 3, 5, 8, 12, 13)]
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.5), (2.0, 1.5, 1.0)]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_idle_for_one_way_there_and_one_back(schedule) -> None:
    for ranks, microbatches in GRID:
        stages = Stages(ranks)
        plan = schedule(stages, microbatches)
        for f, i, w in COSTS:
            timeline = simulate(plan, stages, microbatches, Costs(f, i, w))
            assert timeline.step == pytest.approx((microbatches + ranks - 1) * (f + i + w))
            assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)


def test_interleaved_divides_the_bubble_by_its_chunks() -> None:
    for ranks in range(2, 6):
        for chunks in (2, 3, 4):
            for microbatches in (ranks, 2 * ranks, 4 * ranks):
                stages = Stages(ranks, chunks)
                plan = interleaved(stages, microbatches)
                for f, i, w in COSTS:
                    timeline = simulate(plan, stages, microbatches, Costs(f / chunks, i / chunks, w / chunks))
                    assert timeline.step == pytest.approx((microbatches + (ranks - 1) / chunks) * (f + i + w))
                    expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
                    assert timeline.bubble == pytest.approx(expected, abs=1e-12)


def test_h1_idles_for_a_forward_and_an_input_gradient_less_a_weight_gradient_of_each_other_rank() -> None:
    for ranks, microbatches in GRID:
        if microbatches < ranks:
            continue
        stages = Stages(ranks)
        plan = zero_bubble(stages, microbatches)
        for f, i, w in COSTS:
            step = simulate(plan, stages, microbatches, Costs(f, i, w)).step
            assert step == pytest.approx(microbatches * (f + i + w) + (ranks - 1) * (f + i - w))


def test_v_idles_for_one_small_action_of_each_other_rank() -> None:
    for ranks in range(1, 8):
        for microbatches in range(2 * ranks - 1, 2 * ranks + 4):
            stages = Stages(ranks, 2, "v")
            timeline = simulate(zero_bubble_v(stages, microbatches), stages, microbatches)
            assert timeline.step == 6 * microbatches + ranks - 1


def test_memory_is_1f1bs_peak_for_the_zero_bubbles_and_everything_for_gpipe() -> None:
    half = Costs(activation=0.5)

    def memory(schedule, stages: Stages, costs: Costs | None = None) -> tuple[float, ...]:
        return simulate(schedule(stages, 8), stages, 8, costs).memory

    assert memory(one_f_one_b, Stages(4)) == (4, 3, 2, 1)
    assert memory(gpipe, Stages(4)) == (8, 8, 8, 8)
    assert memory(zero_bubble, Stages(4)) == (4, 4, 4, 4)
    # What waits for its weight gradient alone holds less: (P - s) activations and s of the smaller part.
    assert memory(zero_bubble, Stages(4), Costs(kept=0.25)) == (4, 3.25, 2.5, 1.75)
    assert memory(zero_bubble_v, Stages(4, 2, "v"), half) == (4, 4, 4, 4)
    assert memory(interleaved, Stages(4, 2), half) == (5.5, 4.5, 3.5, 2.5)
    uneven = Costs(activation=[1, 10, 100, 1000])
    assert memory(one_f_one_b, Stages(4), uneven) == (4, 30, 200, 1000)


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(event.action), event.start, event.end) for event in timeline.ranks[rank]]


def test_messages_and_uneven_stages_take_what_they_cost() -> None:
    # F to 1, its message to 1.25, F of stage 1 to 4.25, B to 6.25, the gradient to 6.75, B of stage 0 to 9.75.
    stages = Stages(2)
    costs = Costs(forward=[1, 3], input_gradient=[2, 1], weight_gradient=1, message=[0.5, 0.25])
    timeline = simulate(one_f_one_b(stages, 1), stages, 1, costs)
    assert times(timeline, 0) == [
        ("forward of stage 0, microbatch 0", 0, 1),
        ("backward of stage 0, microbatch 0", 6.75, 9.75),
    ]
    assert times(timeline, 1) == [
        ("forward of stage 1, microbatch 0", 1.25, 4.25),
        ("backward of stage 1, microbatch 0", 4.25, 6.25),
    ]
    assert [(str(e.action), e.start, e.end) for e in timeline.messages] == [
        ("activation for stage 1, microbatch 0, rank 0 to rank 1", 1, 1.25),
        ("gradient for stage 0, microbatch 0, rank 1 to rank 0", 6.25, 6.75),
    ]
    assert (timeline.step, timeline.busy(0), timeline.busy(1)) == (9.75, 4, 5)
    assert timeline.bubble == pytest.approx(float(1 - Fraction(36, 78)))


def test_a_message_moves_once_its_receive_is_posted() -> None:
    # Rank 0 is done at 1, 2, 3 and does not wait. Rank 1 posts each receive when it has nothing else to do.
    stages = Stages(2, 2)
    timeline = simulate(gpipe(stages, 3), stages, 3, Costs(message=2))
    assert [event.start for event in timeline.ranks[0][:3]] == [0, 1, 2]
    assert [event.start for event in timeline.ranks[1][:3]] == [3, 6, 9]


def test_messages_from_one_rank_to_another_follow_one_another() -> None:
    first, second = (Message("activation", 1, i, 0, 1) for i in range(2))
    f = [[Compute("forward", stage, i) for i in range(2)] for stage in range(2)]
    computed, messages = rendezvous.run(
        [
            (f[0][0], Exchange((), (first,), ()), f[0][1], Exchange((), (second,), (first, second))),
            (Exchange((first, second), (), (first,)), f[1][0], Exchange((), (), (second,)), f[1][1]),
        ],
        lambda _: 1.0,
        lambda _: 2.0,
    )
    assert [(event.start, event.end) for event in messages] == [(1, 3), (3, 5)]
    assert [(event.start, event.end) for event in computed[1]] == [(3, 4), (5, 6)]


def test_a_computation_starts_when_its_rank_and_all_that_it_needs_are_ready() -> None:
    """The longest way through the dependencies, computed without programs: right where nobody waits for a send."""
    for stages, schedule in ((Stages(3, 2), interleaved), (Stages(4), zero_bubble), (Stages(3, 2, "v"), zero_bubble_v)):
        costs = Costs(
            forward=[1 + s % 3 for s in range(stages.count)],
            input_gradient=[2 + s % 2 for s in range(stages.count)],
            weight_gradient=[1 + s % 4 for s in range(stages.count)],
        )
        plan = schedule(stages, 7)
        timeline = simulate(plan, stages, 7, costs)
        assert {e.action: e.end for events in timeline.ranks for e in events} == longest_ways(plan, stages, costs)


def longest_ways(plan, stages: Stages, costs: Costs) -> dict[Compute, float]:
    ends: dict[Compute, float] = {}
    before = {action: own[n - 1] if n else None for own in plan for n, action in enumerate(own)}
    left = [action for own in plan for action in own]
    named = {(a.kind, a.stage, a.microbatch): a for a in left}
    named |= {("gradient", a.stage, a.microbatch): a for a in left if a.kind in ("backward", "input_gradient")}
    while left:
        for action in list(left):
            s, i = action.stage, action.microbatch
            needs = [before[action]] if before[action] else []
            if action.kind == "forward":
                needs += [named["forward", s - 1, i]] if s else []
            elif action.kind != "weight_gradient" and s < stages.count - 1:
                needs.append(named["gradient", s + 1, i])
            if all(need in ends for need in needs):
                whole = ("input_gradient", "weight_gradient") if action.kind == "backward" else (action.kind,)
                start = max((ends[need] for need in needs), default=0.0)
                ends[action] = start + sum(costs.of(kind, s) for kind in whole)
                left.remove(action)
    return ends


def test_costs_that_cannot_be_are_refused() -> None:
    stages = Stages(2)
    with pytest.raises(LayoutError, match="forward has 3 costs for 2 virtual stages: give one for each"):
        simulate(one_f_one_b(stages, 2), stages, 2, Costs(forward=[1, 2, 3]))
    for wrong in ({"message": -1.0}, {"forward": [1, float("nan")]}, {"forward": float("inf")}):
        with pytest.raises(UsageError, match="costs are at least 0"):
            Costs(**wrong)
    with pytest.raises(UsageError, match="its forward has not run"):
        simulate(((Compute("backward", 0, 0),),), Stages(1), 1)
