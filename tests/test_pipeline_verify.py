"""The verifier: every named schedule in a grid and beyond, and broken plans and programs of every kind refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LayoutError, UsageError
from engine.pipeline.schedule import (
    PLACEMENTS,
    Compute,
    Exchange,
    Message,
    Program,
    Stages,
    forward_only,
    programs,
)
from engine.pipeline.schedules import IN_FLIGHT, SCHEDULES, one_f_one_b, zero_bubble
from engine.pipeline.verify import check_in_flight, check_programs, verify


def verify_where_it_fits(name: str, stages: Stages, microbatches: int) -> bool:
    """Whether the schedule takes such stages; then it must be right."""
    try:
        plan = SCHEDULES[name](stages, microbatches)
    except LayoutError:
        return False
    verify(plan, stages, microbatches, IN_FLIGHT[name])
    return True


def test_every_schedule_of_up_to_8_ranks_4_chunks_17_microbatches_is_right() -> None:
    verified = dict.fromkeys(SCHEDULES, 0)
    for ranks in range(1, 9):
        for chunks in range(1, 5):
            for stages in [Stages(ranks, chunks, placement) for placement in PLACEMENTS[: 1 if chunks == 1 else 2]]:
                for name in SCHEDULES:
                    verified[name] += sum(verify_where_it_fits(name, stages, m) for m in range(1, 18))
                for microbatches in range(18):
                    check_programs(programs(forward_only(stages, microbatches), stages), stages)
    # 8 ranks x 17 microbatches of: 1f1b and zero bubble 1 chunk, gpipe 1 and 2, 3, 4 in both placements, interleaved
    # 2, 3, 4 and all that one rank may have, V-ZB 2 in a V and one rank's.
    assert verified == {
        "1f1b": 8 * 17,
        "gpipe": 8 * 7 * 17,
        "interleaved": (7 * 3 + 7) * 17,
        "zero_bubble": 8 * 17,
        "zero_bubble_v": (7 + 3) * 17,
    }
    assert sum(verified.values()) == 1870


def test_h1_keeps_no_more_for_input_gradients_than_1f1b() -> None:
    for ranks in range(1, 9):
        for microbatches in range(1, 18):
            for rank, actions in enumerate(zero_bubble(Stages(ranks), microbatches)):
                waiting = [{"forward": 1, "input_gradient": -1}.get(action.kind, 0) for action in actions]
                assert max(itertools.accumulate(waiting)) == min(microbatches, ranks - rank)


SIZES = (st.integers(1, 24), st.integers(1, 6), st.integers(1, 70), st.sampled_from(PLACEMENTS))


@settings(max_examples=60)
@given(*SIZES)
def test_every_schedule_of_larger_sizes_is_right(ranks: int, chunks: int, microbatches: int, placement: str) -> None:
    ranks = min(ranks, 700 // (chunks * microbatches) + 1)
    for name in SCHEDULES:
        verify_where_it_fits(name, Stages(ranks, chunks, placement), microbatches)


@st.composite
def some_order(draw: st.DrawFn) -> tuple[Stages, int, tuple[tuple[Compute, ...], ...]]:
    """Return a plan that runs because it was run: ranks take what is ready at random."""
    stages = Stages(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from(PLACEMENTS)))
    microbatches, last = draw(st.integers(1, 4)), stages.count - 1
    left = {(kind, s, i) for kind in ("forward", "backward") for s in range(stages.count) for i in range(microbatches)}
    plan: list[list[Compute]] = [[] for _ in range(stages.ranks)]

    def is_ready(kind: str, s: int, i: int) -> bool:
        needs = {("forward", s - 1, i)} if kind == "forward" else {("forward", s, i), ("backward", s + 1, i)}
        return not needs & left

    assert last >= 0
    while left:
        kind, s, i = draw(st.sampled_from(sorted(each for each in left if is_ready(*each))))
        left.remove((kind, s, i))
        plan[stages.rank_of(s)].append(Compute(kind, s, i))
    return stages, microbatches, tuple(map(tuple, plan))


@settings(max_examples=150)
@given(some_order())
def test_any_order_that_can_be_is_accepted(drawn: tuple[Stages, int, tuple[tuple[Compute, ...], ...]]) -> None:
    stages, microbatches, plan = drawn
    verify(plan, stages, microbatches)


@settings(max_examples=150)
@given(some_order(), st.randoms())
def test_a_computation_left_out_or_listed_twice_is_refused(drawn: tuple, random: object) -> None:
    stages, microbatches, plan = drawn
    rank = random.randrange(stages.ranks)
    at = random.randrange(len(plan[rank]))
    for changed in (plan[rank][:at] + plan[rank][at + 1 :], plan[rank][: at + 1] + plan[rank][at:]):
        with pytest.raises(UsageError, match=rf"rank {rank}"):
            verify((*plan[:rank], changed, *plan[rank + 1 :]), stages, microbatches)


# ---- broken plans ----------------------------------------------------------------------------------------------------

TWO = Stages(2)


def changed(rank: int, *actions: Compute) -> tuple[tuple[Compute, ...], ...]:
    """1F1B of two ranks and two microbatches with other actions on one rank."""
    plan = list(one_f_one_b(TWO, 2))
    plan[rank] = actions
    return tuple(plan)


def f(stage: int, i: int) -> Compute:
    return Compute("forward", stage, i)


def b(stage: int, i: int) -> Compute:
    return Compute("backward", stage, i)


def w(stage: int, i: int) -> Compute:
    return Compute("weight_gradient", stage, i)


def g(stage: int, i: int) -> Compute:
    return Compute("input_gradient", stage, i)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (changed(1, b(1, 0), f(1, 0), f(1, 1), b(1, 1)),
         "rank 1, action 0 (backward of stage 1, microbatch 0): its forward has not run: list that before it"),
        (changed(1, f(1, 0), w(1, 0), g(1, 0), f(1, 1), b(1, 1)),
         "rank 1, action 1 (weight gradient of stage 1, microbatch 0): its input gradient has not run"),
        (changed(1, f(1, 0), g(1, 0), b(1, 0), f(1, 1), b(1, 1)),
         "rank 1, action 2 (backward of stage 1, microbatch 0): this has been computed already: list it once"),
        (changed(0, f(0, 0), f(0, 1), b(0, 0), b(0, 1), b(0, 1)),
         "rank 0, action 4 (backward of stage 0, microbatch 1): this has been computed already"),
        (changed(0, f(0, 0), f(0, 1), b(0, 0)), "rank 0 never computes the backward of stage 0, microbatch 1: list it"),
        (changed(1, f(1, 0), b(1, 0)), "rank 1 never computes the forward of stage 1, microbatch 1"),
        (changed(1, f(1, 0), b(1, 0), f(1, 1), g(1, 1)),
         "rank 1 never computes the weight gradient of stage 1, microbatch 1"),
        (changed(1, f(1, 0), b(1, 0), f(1, 2), b(1, 2)),
         "rank 1, action 2 (forward of stage 1, microbatch 2): this rank holds the stages 1, and microbatches go from "
         "0 to 1"),
        (changed(1, f(0, 0)), "rank 1, action 0 (forward of stage 0, microbatch 0): this rank holds the stages 1, and"),
        ((*one_f_one_b(TWO, 2), ()), "a list of actions for each of the 2 ranks, not 3 lists"),
        (None, "for each of the 2 ranks, not a NoneType"),
        (changed(0, "F0"), "rank 0, action 0 (F0): a schedule lists Compute(kind, stage, microbatch), of forward,"),
        (changed(0, Compute("warm_up", 0, 0)), "a schedule lists Compute(kind, stage, microbatch)"),
        ((5, ()), "rank 0: its actions are a int, not a list of Compute(kind, stage, microbatch)"),
    ],
)  # fmt: skip
def test_a_broken_plan_is_refused_with_the_action_at_fault(plan: object, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        verify(plan, TWO, 2)
    assert text in str(caught.value)


def test_ranks_that_wait_for_each_other_are_refused_and_named() -> None:
    # Rank 0 wants a gradient before it does the forward that rank 1 begins with.
    plan = ((f(0, 0), b(0, 0), f(0, 1), b(0, 1)), (f(1, 1), b(1, 1), f(1, 0), b(1, 0)))
    with pytest.raises(UsageError) as caught:
        verify(plan, TWO, 2)
    assert str(caught.value) == (
        "deadlock: rank 0 waits, before backward of stage 0, microbatch 0, for its receive of the gradient for stage "
        "0, microbatch 1, rank 1 to rank 0; rank 1 waits, before forward of stage 1, microbatch 1, for its receive of "
        "the activation for stage 1, microbatch 1, rank 0 to rank 1"
    )


def test_more_activations_than_promised_are_refused() -> None:
    check_in_flight(one_f_one_b(Stages(3), 5), [3, 2, 1])
    with pytest.raises(UsageError, match=r"rank 1, action 1 \(forward of stage 1, microbatch 1\): it makes 2 act"):
        check_in_flight(one_f_one_b(Stages(3), 5), [3, 1, 1])
    with pytest.raises(UsageError, match="at most 2"):  # weight gradients that wait keep their activations
        check_in_flight(zero_bubble(Stages(3), 5), [3, 2, 2])


# ---- broken programs -------------------------------------------------------------------------------------------------

UP = [Message("activation", 1, i, 0, 1) for i in range(2)]
DOWN = [Message("gradient", 0, i, 1, 0) for i in range(2)]


def program_with(rank: int, at: int, *instructions: Compute | Exchange) -> tuple[Program, ...]:
    """1F1B's programs of two ranks and two microbatches, with one instruction of one rank replaced."""
    derived = list(programs(one_f_one_b(TWO, 2), TWO))
    derived[rank] = (*derived[rank][:at], *instructions, *derived[rank][at + 1 :])
    return tuple(derived)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (program_with(1, 0), "rank 1, instruction 0 (forward of stage 1, microbatch 0): its activation has not arriv"),
        (program_with(0, 3, Exchange((DOWN[0],), (UP[1],), (UP[1],))),
         "rank 0, instruction 4 (backward of stage 0, microbatch 0): its gradient has not arrived: wait for it before"),
        (program_with(0, 3, Exchange((DOWN[0],), (UP[1],), (DOWN[0],))), "rank 0 never waits for the activation for "),
        (program_with(0, 0, Exchange((), (UP[0],), (UP[0],)), f(0, 0)), "rank 0, instruction 0: it sends the activ"),
        (program_with(0, 1, Exchange((), (), (UP[0],))), "rank 0, instruction 1: it waits for the activation"),
        (program_with(1, 0, Exchange((DOWN[0],), (), ())), "rank 1, instruction 0: it receives the gradient"),
    ],
)  # fmt: skip
def test_a_broken_program_is_refused(broken: tuple[Program, ...], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_programs(broken, TWO)
    assert text in str(caught.value)


def test_two_sends_that_both_wait_before_the_receives_are_posted_are_a_deadlock() -> None:
    send_first = Exchange((), (UP[1],), (UP[1],)), Exchange((DOWN[0],), (), (DOWN[0],))
    one_side = program_with(0, 3, *send_first)
    check_programs(one_side, TWO)  # rank 1 posts before it waits
    theirs = Exchange((), (DOWN[0],), (DOWN[0],)), Exchange((UP[1],), (), (UP[1],))
    with pytest.raises(
        UsageError, match=r"deadlock: rank 0 waits, before backward .*, for its send of the .*; rank 1 "
    ):
        check_programs((one_side[0], (*one_side[1][:3], *theirs, *one_side[1][4:])), TWO)


def test_receives_posted_in_another_order_than_sends_are_refused() -> None:
    sends = (f(0, 0), Exchange((), (UP[0],), ()), f(0, 1), Exchange((), (UP[1],), (UP[0], UP[1])))
    posts = Exchange((UP[1], UP[0]), (), (UP[1], UP[0]))
    with pytest.raises(UsageError) as caught:
        check_programs((sends, (posts, f(1, 0), f(1, 1))), TWO)
    assert str(caught.value) == (
        "messages out of order: rank 1 posted the receive of the activation for stage 1, microbatch 1, rank 0 to rank "
        "1, and the activation for stage 1, microbatch 0, rank 0 to rank 1 arrives"
    )
    check_programs((sends, (replace(posts, receives=(UP[0], UP[1])), f(1, 0), f(1, 1))), TWO)
