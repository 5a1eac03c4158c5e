"""Schedules as data: 1F1B's closed formulas, small plans literally, programs run in a rendezvous that knows no tags."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence

import pytest

from engine.errors import LayoutError, UsageError
from engine.pipeline.schedule import (
    Compute,
    Exchange,
    Instruction,
    Message,
    Schedule,
    Stages,
    forward_only,
    programs,
)
from engine.pipeline.schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_named,
    zero_bubble,
    zero_bubble_v,
)

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 18)]


def forward(stage: int, i: int) -> Compute:
    return Compute("forward", stage, i)


def backward(stage: int, i: int) -> Compute:
    return Compute("backward", stage, i)


# ---- where stages are ------------------------------------------------------------------------------------------------


def test_stages_go_round_in_a_loop_or_there_and_back() -> None:
    loop, v = Stages(3, 2), Stages(3, 3, "v")
    assert [loop.rank_of(stage) for stage in range(loop.count)] == [0, 1, 2, 0, 1, 2]
    assert [v.rank_of(stage) for stage in range(v.count)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [loop.on(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert v.on(1) == (1, 4, 7)
    with pytest.raises(LayoutError, match=r"chunks=0: .*at least 1 rank, and 1 chunk"):
        Stages(2, 0)
    with pytest.raises(UsageError, match=r"placement='lop' \(did you mean 'loop'\?\): choose loop, v"):
        Stages(2, 2, "lop")


# ---- what each stage computes ----------------------------------------------------------------------------------------


def test_each_stage_runs_each_forward_and_each_backward_once_forward_first() -> None:
    for stages, microbatches in GRID:
        plan = one_f_one_b(Stages(stages), microbatches)
        assert len(plan) == stages
        for stage, actions in enumerate(plan):
            everything = [kind(stage, i) for kind in (forward, backward) for i in range(microbatches)]
            assert Counter(actions) == Counter(everything), (stages, microbatches)
            for i in range(microbatches):
                assert actions.index(forward(stage, i)) < actions.index(backward(stage, i))


def test_both_directions_run_in_microbatch_order() -> None:
    for stages, microbatches in GRID:
        for actions in one_f_one_b(Stages(stages), microbatches):
            for kind in ("forward", "backward"):
                assert [a.microbatch for a in actions if a.kind == kind] == list(range(microbatches))


def test_the_warm_up_is_as_long_as_the_way_to_the_last_stage() -> None:
    for stages, microbatches in GRID:
        for stage, actions in enumerate(one_f_one_b(Stages(stages), microbatches)):
            first_backward = actions.index(backward(stage, 0))
            warm = min(microbatches, stages - 1 - stage)
            # The first backward follows the warm-up and, unless that was everything, the one forward in turn.
            assert first_backward == warm + (1 if warm < microbatches else 0), (stages, microbatches, stage)


def test_the_steady_state_takes_one_forward_and_one_backward_in_turn() -> None:
    for stages, microbatches in GRID:
        for stage, actions in enumerate(one_f_one_b(Stages(stages), microbatches)):
            warm = min(microbatches, stages - 1 - stage)
            steady = actions[warm : len(actions) - warm]
            assert [a.kind for a in steady] == ["forward", "backward"] * (microbatches - warm)


def test_activations_alive_are_bounded_by_the_depth_below_not_by_the_microbatches() -> None:
    for stages, microbatches in GRID:
        for stage, actions in enumerate(one_f_one_b(Stages(stages), microbatches)):
            alive = most = 0
            for action in actions:
                alive += 1 if action.kind == "forward" else -1
                most = max(most, alive)
            assert most == min(microbatches, stages - stage), (stages, microbatches, stage)


def test_evaluation_runs_every_forward_in_order_and_nothing_else() -> None:
    assert forward_only(Stages(2), 3) == tuple(tuple(forward(stage, i) for i in range(3)) for stage in range(2))
    assert forward_only(Stages(2, 2, "v"), 3)[0] == (
        *(forward(0, 0), forward(0, 1), forward(3, 0), forward(3, 1)),
        *(forward(0, 2), forward(3, 2)),
    )


def letters(actions: Sequence[Compute], stages: Sequence[int]) -> str:
    """Small letters for the second chunk: `F0 f0 b0`."""
    names = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}
    short = [f"{names[action.kind]}{action.microbatch}" for action in actions]
    return " ".join(s.lower() if a.stage == stages[-1] != stages[0] else s for s, a in zip(short, actions, strict=True))


def test_gpipe_of_two_ranks_is_this_one() -> None:
    assert [letters(each, (0,)) for each in gpipe(Stages(1), 3)] == ["F0 F1 F2 B2 B1 B0"]
    assert letters(gpipe(Stages(2, 2), 2)[1], (1, 3)) == "F0 F1 f0 f1 b1 b0 B1 B0"


def test_interleaved_of_two_ranks_two_chunks_four_microbatches_is_megatrons() -> None:
    # Megatron-LM (arXiv:2104.04473, figure 4), rank 0 warms up with 4 forwards of a chunk, rank 1 with 2.
    first, second = interleaved(Stages(2, 2), 4)
    assert letters(first, (0, 2)) == "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3"
    assert letters(second, (1, 3)) == "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3"
    assert letters(interleaved(Stages(2, 2), 3)[1], (1, 3)) == "F0 F1 f0 b0 f1 b1 F2 B0 B1 f2 b2 B2"


def test_zero_bubble_of_three_ranks_is_the_papers_h1() -> None:
    # arXiv:2401.10241, figure 3, with 3 devices: rank s defers s weight gradients.
    assert [letters(each, (0,)) for each in zero_bubble(Stages(3), 4)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zero_bubble_v_of_two_ranks_is_the_papers() -> None:
    # arXiv:2405.15362, V-ZB: its warm-up, then one forward and a whole backward of each chunk in turn.
    first, second = zero_bubble_v(Stages(2, 2, "v"), 4)
    assert letters(first, (0, 3)) == "F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3"
    assert letters(second, (1, 2)) == "F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3"


def test_a_schedule_that_does_not_fit_the_chunks_is_refused() -> None:
    for schedule in (one_f_one_b, zero_bubble):
        with pytest.raises(LayoutError, match=r"has one chunk on each rank, not 2 on 4 ranks, placement='loop': build"):
            schedule(Stages(4, 2), 8)
    for stages in (Stages(4), Stages(4, 2, "v")):
        with pytest.raises(LayoutError, match=r"interleaved needs at least 2 chunks .* in a loop, not"):
            interleaved(stages, 8)
    for stages in (Stages(4), Stages(4, 2), Stages(4, 3, "v"), Stages(1, 3)):
        with pytest.raises(LayoutError, match=r"zero_bubble_v needs 2 chunks .* in a V, not"):
            zero_bubble_v(stages, 8)
    accumulation = one_f_one_b(Stages(1), 2)
    assert interleaved(Stages(1), 2) == accumulation
    assert zero_bubble_v(Stages(1), 2) == zero_bubble(Stages(1), 2)


# ---- what each rank says ---------------------------------------------------------------------------------------------


def activation(stage: int, i: int, way: tuple[int, int]) -> Message:
    return Message("activation", stage, i, *way)


def gradient(stage: int, i: int, way: tuple[int, int]) -> Message:
    return Message("gradient", stage, i, *way)


def prompt(sends: tuple[Message, ...] = (), receives: tuple[Message, ...] = ()) -> Exchange:
    return Exchange(receives, sends, (*receives, *sends))


def test_the_programs_of_two_stages_and_two_microbatches_are_these() -> None:
    up = [activation(1, i, (0, 1)) for i in range(2)]
    down = [gradient(0, i, (1, 0)) for i in range(2)]
    assert programs(one_f_one_b(Stages(2), 2), Stages(2)) == (
        (
            forward(0, 0),
            prompt(sends=(up[0],)),
            forward(0, 1),
            prompt(sends=(up[1],), receives=(down[0],)),
            backward(0, 0),
            prompt(receives=(down[1],)),
            backward(0, 1),
        ),
        (
            prompt(receives=(up[0],)),
            forward(1, 0),
            backward(1, 0),
            prompt(sends=(down[0],), receives=(up[1],)),
            forward(1, 1),
            backward(1, 1),
            prompt(sends=(down[1],)),
        ),
    )


def test_with_chunks_a_send_is_waited_for_with_the_next_message_from_its_receiver() -> None:
    stages = Stages(2, 2)
    to_1, to_2, to_3 = activation(1, 0, (0, 1)), activation(2, 0, (1, 0)), activation(3, 0, (0, 1))
    back_2, back_1, back_0 = gradient(2, 0, (1, 0)), gradient(1, 0, (0, 1)), gradient(0, 0, (1, 0))
    assert programs(interleaved(stages, 1), stages) == (
        (
            forward(0, 0),
            Exchange((to_2,), (to_1,), (to_2, to_1)),
            forward(2, 0),
            Exchange((back_2,), (to_3,), (back_2, to_3)),
            backward(2, 0),
            Exchange((back_0,), (back_1,), (back_0, back_1)),
            backward(0, 0),
        ),
        (
            Exchange((to_1,), (), (to_1,)),
            forward(1, 0),
            Exchange((to_3,), (to_2,), (to_3, to_2)),
            forward(3, 0),
            backward(3, 0),
            Exchange((back_1,), (back_2,), (back_1, back_2)),
            backward(1, 0),
            Exchange((), (back_0,), (back_0,)),
        ),
    )
    # Rank 1 makes stage 2's input long before rank 0 has the time for it.
    looped = programs(gpipe(stages, 4), stages)
    waits = [set(each.sends) <= set(each.waits) for each in looped[1] if isinstance(each, Exchange) and each.sends]
    assert waits[:3] == [False] * 3


def test_messages_between_two_ranks_are_posted_as_they_are_sent_even_when_needed_otherwise() -> None:
    stages = Stages(2)
    plan = (
        (forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)),
        (forward(1, 1), forward(1, 0), backward(1, 0), backward(1, 1)),
    )
    first = programs(plan, stages)[1][0]
    assert isinstance(first, Exchange)
    assert first.receives == (activation(1, 0, (0, 1)), activation(1, 1, (0, 1)))


def test_one_chunk_waits_late_where_waiting_at_once_would_be_a_deadlock() -> None:
    stages = Stages(2)
    eager = tuple(forward(0, i) for i in range(5)) + tuple(backward(0, i) for i in range(5))
    one_by_one = tuple(kind(1, i) for i in range(5) for kind in (forward, backward))
    sends = [e for e in programs((eager, one_by_one), stages)[0] if isinstance(e, Exchange) and e.sends]
    assert any(not set(each.sends) <= set(each.waits) for each in sends)


def test_one_stage_says_nothing() -> None:
    alone = (forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1))
    assert programs(one_f_one_b(Stages(1), 2), Stages(1)) == (alone,)
    assert programs(forward_only(Stages(1), 2), Stages(1)) == ((forward(0, 0), forward(0, 1)),)
    assert programs(forward_only(Stages(3), 0), Stages(3)) == ((), (), ())


class Rendezvous:
    """Runs all ranks' programs as a backend without tags and without buffers would.

    An exchange posts its receives and starts its sends, and ends when what it waits for has met its counterpart. A
    message meets the other side's only while both are started, and between two ranks the oldest send meets the oldest
    receive, whatever they are meant to carry.
    """

    def __init__(self, programs: Sequence[Sequence[Instruction]], stages: Stages) -> None:
        self.programs, self.stages = programs, stages
        self.at = [0] * len(programs)
        self.sends: dict[tuple[int, int], deque[Message]] = {}  # by (from, to), started and not yet met
        self.receives: dict[tuple[int, int], deque[Message]] = {}
        self.met: list[set[Message]] = [set() for _ in programs]
        self.started = [False] * len(programs)
        self.has: list[set[tuple[str, int, int]]] = [set() for _ in programs]
        self.sent = 0
        self.finished: list[list[Compute]] = [[] for _ in programs]

    def run(self) -> None:
        while any(at < len(own) for at, own in zip(self.at, self.programs, strict=True)):
            before = (list(self.at), self.sent, list(self.started))
            for rank in range(len(self.programs)):
                self.advance(rank)
            self.meet()
            assert (self.at, self.sent, self.started) != before, f"deadlock at {self.at}"
        assert not any(self.sends.values())
        assert not any(self.receives.values())

    def advance(self, rank: int) -> None:
        while self.at[rank] < len(self.programs[rank]):
            instruction = self.programs[rank][self.at[rank]]
            if isinstance(instruction, Exchange):
                if not self.started[rank]:
                    self.start(rank, instruction)
                    return
                if not self.met[rank].issuperset(instruction.waits):
                    return
                for message in instruction.waits:
                    if message.receiver == rank:
                        self.has[rank].add((message.kind, message.stage, message.microbatch))
                self.started[rank] = False
            else:
                self.compute(rank, instruction)
            self.at[rank] += 1

    def start(self, rank: int, exchange: Exchange) -> None:
        assert exchange != Exchange(), "an empty exchange waits for nothing"
        self.started[rank] = True
        for message in exchange.sends:
            assert message.sender == rank
            made, source = ("forward", -1) if message.kind == "activation" else ("backward", 1)
            assert (made, message.stage + source, message.microbatch) in self.has[rank], "sent before it was computed"
            self.sends.setdefault((rank, message.receiver), deque()).append(message)
        for message in exchange.receives:
            assert message.receiver == rank
            self.receives.setdefault((message.sender, rank), deque()).append(message)

    def meet(self) -> None:
        for (source, target), waiting in self.sends.items():
            expected = self.receives.get((source, target), deque())
            while waiting and expected:
                sent, wanted = waiting.popleft(), expected.popleft()
                assert sent == wanted, "another message arrived"
                assert self.stages.rank_of(sent.stage) == target
                self.met[source].add(sent)
                self.met[target].add(sent)
                self.sent += 1

    def compute(self, rank: int, action: Compute) -> None:
        stage, i, last = action.stage, action.microbatch, self.stages.count - 1
        assert self.stages.rank_of(stage) == rank
        here = self.has[rank]
        if action.kind == "forward":
            assert stage == 0 or {("activation", stage, i), ("forward", stage - 1, i)} & here, "forward without input"
        else:
            assert ("forward", stage, i) in here
            assert stage == last or {("gradient", stage, i), ("backward", stage + 1, i)} & here, "without gradient"
        here.add((action.kind, stage, i))
        self.finished[rank].append(action)


@pytest.mark.parametrize(
    ("schedule", "directions"), [(one_f_one_b, 2), (gpipe, 2), (forward_only, 1)], ids=["1f1b", "gpipe", "forward"]
)
def test_programs_meet_without_tags_and_end(schedule: Schedule, directions: int) -> None:
    for ranks, microbatches in GRID:
        stages = Stages(ranks)
        plan = schedule(stages, microbatches)
        simulation = Rendezvous(programs(plan, stages), stages)
        simulation.run()
        # Each microbatch crosses each of the boundaries once in each direction.
        assert simulation.sent == directions * microbatches * (ranks - 1)
        assert [tuple(actions) for actions in simulation.finished] == [tuple(actions) for actions in plan]


@pytest.mark.parametrize("stages", [Stages(2, 2), Stages(4, 3), Stages(3, 2, "v"), Stages(1, 3)], ids=str)
def test_programs_of_chunks_meet_without_tags_and_end(stages: Stages) -> None:
    for schedule in (gpipe, forward_only, *((interleaved,) if stages.placement == "loop" else ())):
        for microbatches in (1, 2, 4, 5, 9):
            plan = schedule(stages, microbatches)
            simulation = Rendezvous(programs(plan, stages), stages)
            simulation.run()
            places = [stages.rank_of(stage) for stage in range(stages.count)]
            crossings = sum(a != b for a, b in itertools.pairwise(places))
            assert simulation.sent == (1 if schedule is forward_only else 2) * microbatches * crossings
            assert [tuple(actions) for actions in simulation.finished] == [tuple(actions) for actions in plan]


def test_the_simulation_sees_a_deadlock_and_a_swap() -> None:
    up, down = [activation(1, i, (0, 1)) for i in range(2)], gradient(0, 0, (1, 0))
    both_send_first = [
        (forward(0, 0), prompt(sends=(up[0],)), prompt(receives=(down,)), backward(0, 0)),
        (prompt(receives=(gradient(1, 7, (0, 1)),)), prompt(receives=(up[0],)), forward(1, 0)),
    ]
    with pytest.raises(AssertionError, match=r"another message arrived|deadlock"):
        Rendezvous(both_send_first, Stages(2)).run()
    swapped = [
        (forward(0, 0), forward(0, 1), prompt(sends=(up[1],)), prompt(sends=(up[0],))),
        (prompt(receives=(up[0],)), forward(1, 0), prompt(receives=(up[1],)), forward(1, 1)),
    ]
    with pytest.raises(AssertionError, match="another message arrived"):
        Rendezvous(swapped, Stages(2)).run()
    waiting = [
        (prompt(receives=(down,)), forward(0, 0), prompt(sends=(up[0],))),
        (prompt(receives=(up[0],)), forward(1, 0), backward(1, 0), prompt(sends=(down,))),
    ]
    with pytest.raises(AssertionError, match="deadlock"):
        Rendezvous(waiting, Stages(2)).run()


def test_a_schedule_is_found_by_name_and_a_misspelt_one_is_answered() -> None:
    assert schedule_named("1f1b") is one_f_one_b
    with pytest.raises(UsageError, match=r"^schedule='1f1B' \(did you mean '1f1b'\?\): choose .*1f1b"):
        schedule_named("1f1B")
