"""Schedules as data: 1F1B's closed formulas, and every program run in a rendezvous simulation that knows no tags."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest

from engine.errors import UsageError
from engine.pipeline.schedule import (
    Compute,
    Exchange,
    Instruction,
    Message,
    Schedule,
    forward_only,
    one_f_one_b,
    program,
    schedule_named,
)

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 18)]


def forward(i: int) -> Compute:
    return Compute("forward", i)


def backward(i: int) -> Compute:
    return Compute("backward", i)


# ---- what each stage computes ----------------------------------------------------------------------------------------


def test_each_stage_runs_each_forward_and_each_backward_once_forward_first() -> None:
    for stages, microbatches in GRID:
        plan = one_f_one_b(stages, microbatches)
        assert len(plan) == stages
        for actions in plan:
            everything = Counter([forward(i) for i in range(microbatches)] + [backward(i) for i in range(microbatches)])
            assert Counter(actions) == everything, (stages, microbatches)
            for i in range(microbatches):
                assert actions.index(forward(i)) < actions.index(backward(i))


def test_both_directions_run_in_microbatch_order() -> None:
    for stages, microbatches in GRID:
        for actions in one_f_one_b(stages, microbatches):
            for kind in ("forward", "backward"):
                assert [a.microbatch for a in actions if a.kind == kind] == list(range(microbatches))


def test_the_warm_up_is_as_long_as_the_way_to_the_last_stage() -> None:
    for stages, microbatches in GRID:
        for stage, actions in enumerate(one_f_one_b(stages, microbatches)):
            first_backward = actions.index(backward(0))
            warm = min(microbatches, stages - 1 - stage)
            # The first backward follows the warm-up and, unless that was everything, the one forward in turn.
            assert first_backward == warm + (1 if warm < microbatches else 0), (stages, microbatches, stage)


def test_the_steady_state_takes_one_forward_and_one_backward_in_turn() -> None:
    for stages, microbatches in GRID:
        for stage, actions in enumerate(one_f_one_b(stages, microbatches)):
            warm = min(microbatches, stages - 1 - stage)
            steady = actions[warm : len(actions) - warm]
            assert [a.kind for a in steady] == ["forward", "backward"] * (microbatches - warm)


def test_activations_alive_are_bounded_by_the_depth_below_not_by_the_microbatches() -> None:
    for stages, microbatches in GRID:
        for stage, actions in enumerate(one_f_one_b(stages, microbatches)):
            alive = most = 0
            for action in actions:
                alive += 1 if action.kind == "forward" else -1
                most = max(most, alive)
            assert most == min(microbatches, stages - stage), (stages, microbatches, stage)


def test_evaluation_runs_every_forward_in_order_and_nothing_else() -> None:
    assert forward_only(2, 3) == ((forward(0), forward(1), forward(2)), (forward(0), forward(1), forward(2)))


# ---- what each stage says --------------------------------------------------------------------------------------------


def activation(i: int, peer: int) -> Message:
    return Message("activation", i, peer)


def gradient(i: int, peer: int) -> Message:
    return Message("gradient", i, peer)


def test_the_program_of_two_stages_and_two_microbatches_is_this_one() -> None:
    assert program(one_f_one_b, 2, 2, 0) == (
        forward(0),
        Exchange(sends=(activation(0, 1),)),
        forward(1),
        Exchange(sends=(activation(1, 1),), receives=(gradient(0, 1),)),
        backward(0),
        Exchange(receives=(gradient(1, 1),)),
        backward(1),
    )
    assert program(one_f_one_b, 2, 2, 1) == (
        Exchange(receives=(activation(0, 0),)),
        forward(0),
        backward(0),
        Exchange(sends=(gradient(0, 0),), receives=(activation(1, 0),)),
        forward(1),
        backward(1),
        Exchange(sends=(gradient(1, 0),)),
    )


def test_one_stage_says_nothing() -> None:
    assert program(one_f_one_b, 1, 2, 0) == (forward(0), backward(0), forward(1), backward(1))
    assert program(forward_only, 1, 2, 0) == (forward(0), forward(1))
    assert program(forward_only, 3, 0, 1) == ()


class Rendezvous:
    """Runs all stages' programs as a backend without tags and without buffers would.

    An exchange starts all its messages together and ends when each has met its counterpart. A message meets the other
    side's only while both are started, and between two stages the oldest send meets the oldest receive, whatever they
    are meant to carry.
    """

    def __init__(self, programs: Sequence[Sequence[Instruction]]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.sends: dict[tuple[int, int], deque[Message]] = {}  # by (from, to), started and not yet met
        self.receives: dict[tuple[int, int], deque[Message]] = {}
        self.open = [0] * len(programs)  # messages of the current exchange that have met nobody
        self.started = [False] * len(programs)
        self.has: list[set[tuple[str, int]]] = [set() for _ in programs]
        self.sent = 0
        self.finished: list[list[Compute]] = [[] for _ in programs]

    def run(self) -> None:
        while any(at < len(own) for at, own in zip(self.at, self.programs, strict=True)):
            before = (list(self.at), self.sent, list(self.started))
            for stage in range(len(self.programs)):
                self.advance(stage)
            self.meet()
            assert (self.at, self.sent, self.started) != before, f"deadlock at {self.at}"
        assert not any(self.sends.values())
        assert not any(self.receives.values())

    def advance(self, stage: int) -> None:
        while self.at[stage] < len(self.programs[stage]):
            instruction = self.programs[stage][self.at[stage]]
            if isinstance(instruction, Exchange):
                if not self.started[stage]:
                    self.start(stage, instruction)
                    return
                if self.open[stage]:
                    return
                self.started[stage] = False
            else:
                self.compute(stage, instruction)
            self.at[stage] += 1

    def start(self, stage: int, exchange: Exchange) -> None:
        assert exchange != Exchange(), "an empty exchange waits for nothing"
        self.started[stage] = True
        self.open[stage] = len(exchange.sends) + len(exchange.receives)
        for message in exchange.sends:
            made = "forward" if message.kind == "activation" else "backward"
            assert (made, message.microbatch) in self.has[stage], "sent before it was computed"
            self.sends.setdefault((stage, message.peer), deque()).append(message)
        for message in exchange.receives:
            self.receives.setdefault((message.peer, stage), deque()).append(message)

    def meet(self) -> None:
        for (source, target), waiting in self.sends.items():
            expected = self.receives.get((source, target), deque())
            while waiting and expected:
                sent, wanted = waiting.popleft(), expected.popleft()
                assert (sent.kind, sent.microbatch) == (wanted.kind, wanted.microbatch), "another message arrived"
                assert target == source + (1 if sent.kind == "activation" else -1)
                self.has[target].add((sent.kind, sent.microbatch))
                self.open[source] -= 1
                self.open[target] -= 1
                self.sent += 1

    def compute(self, stage: int, action: Compute) -> None:
        i, last = action.microbatch, len(self.programs) - 1
        if action.kind == "forward":
            assert stage == 0 or ("activation", i) in self.has[stage], "forward without its input"
        else:
            assert ("forward", i) in self.has[stage]
            assert stage == last or ("gradient", i) in self.has[stage], "backward without its gradient"
        self.has[stage].add((action.kind, i))
        self.finished[stage].append(action)


@pytest.mark.parametrize(("schedule", "directions"), [(one_f_one_b, 2), (forward_only, 1)], ids=["1f1b", "forward"])
def test_programs_meet_without_tags_and_end(schedule: Schedule, directions: int) -> None:
    for stages, microbatches in GRID:
        simulation = Rendezvous([program(schedule, stages, microbatches, stage) for stage in range(stages)])
        simulation.run()
        # Each microbatch crosses each of the boundaries once in each direction.
        assert simulation.sent == directions * microbatches * (stages - 1)
        plan = schedule(stages, microbatches)
        assert [tuple(actions) for actions in simulation.finished] == [tuple(actions) for actions in plan]


def test_the_simulation_sees_a_deadlock_and_a_swap() -> None:
    both_send_first = [
        (forward(0), Exchange(sends=(activation(0, 1),)), Exchange(receives=(gradient(0, 1),)), backward(0)),
        (Exchange(receives=(gradient(7, 0),)), Exchange(receives=(activation(0, 0),)), forward(0)),
    ]
    with pytest.raises(AssertionError, match=r"another message arrived|deadlock"):
        Rendezvous(both_send_first).run()
    swapped = [
        (forward(0), forward(1), Exchange(sends=(activation(1, 1),)), Exchange(sends=(activation(0, 1),))),
        (Exchange(receives=(activation(0, 0),)), forward(0), Exchange(receives=(activation(1, 0),)), forward(1)),
    ]
    with pytest.raises(AssertionError, match="another message arrived"):
        Rendezvous(swapped).run()
    waiting = [
        (Exchange(receives=(gradient(0, 1),)), forward(0), Exchange(sends=(activation(0, 1),))),
        (Exchange(receives=(activation(0, 0),)), forward(0), backward(0), Exchange(sends=(gradient(0, 0),))),
    ]
    with pytest.raises(AssertionError, match="deadlock"):
        Rendezvous(waiting).run()


def test_a_schedule_is_found_by_name_and_a_misspelt_one_is_answered() -> None:
    assert schedule_named("1f1b") is one_f_one_b
    with pytest.raises(UsageError, match=r"^schedule='1f1B' \(did you mean '1f1b'\?\): choose .*1f1b"):
        schedule_named("1f1B")
