"""Pipeline schedules as data: what each rank computes in which order, and the messages that follow from it. Pure.

A schedule is a function (stages, microbatches) -> for each stage, its actions in order. `program` derives the
messages: between two computations of a stage there is one exchange, which sends what the first made and receives what
the second needs. All messages of an exchange start together, so neighbours that send to each other cannot deadlock,
and each direction of a pair carries its microbatches in order, which backends without tags (NCCL, HCCL) need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Compute:
    """One stage's forward or backward of one microbatch."""

    kind: Literal["forward", "backward"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}"


@dataclass(frozen=True)
class Message:
    """The activation (from stage - 1 to stage + 1) or gradient (the other way) of one microbatch, to or from `peer`."""

    kind: Literal["activation", "gradient"]
    microbatch: int
    peer: int


@dataclass(frozen=True)
class Exchange:
    """Messages that a stage starts together and waits for together."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


Instruction = Compute | Exchange
Schedule = Callable[[int, int], Sequence[Sequence[Compute]]]


def one_f_one_b(stages: int, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """1F1B: warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    Stage s of P warms up with min(M, P - 1 - s) forwards, so at most min(M, P - s) microbatches are alive on it,
    whatever M is. Source: PipeDream-Flush, arXiv:2006.09503, section 3.2.
    """
    plan = []
    for stage in range(stages):
        warm = min(microbatches, stages - 1 - stage)
        actions = [Compute("forward", i) for i in range(warm)]
        for i in range(microbatches - warm):
            actions += [Compute("forward", warm + i), Compute("backward", i)]
        actions += [Compute("backward", i) for i in range(microbatches - warm, microbatches)]
        plan.append(tuple(actions))
    return tuple(plan)


def forward_only(stages: int, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """Every forward in order: evaluation."""
    return tuple(tuple(Compute("forward", i) for i in range(microbatches)) for _ in range(stages))


SCHEDULES: dict[str, Schedule] = {"1f1b": one_f_one_b}


def schedule_named(name: str) -> Schedule:
    """Return the schedule called `name`. Raises UsageError for an unknown one."""
    if name not in SCHEDULES:
        raise UsageError(f"schedule={name!r}{did_you_mean(str(name), SCHEDULES)}: choose {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def program(schedule: Schedule, stages: int, microbatches: int, stage: int) -> tuple[Instruction, ...]:
    """Return what the rank of `stage` does, computations and exchanges, in order."""
    actions = schedule(stages, microbatches)[stage]
    instructions: list[Instruction] = []
    done: Compute | None = None
    for action in (*actions, None):
        exchange = Exchange(
            sends=_sends(done, stage, stages) if done else (),
            receives=_receives(action, stage, stages) if action else (),
        )
        if exchange != Exchange():
            instructions.append(exchange)
        if action is not None:
            instructions.append(action)
        done = action
    return tuple(instructions)


def _sends(done: Compute, stage: int, stages: int) -> tuple[Message, ...]:
    if done.kind == "forward":
        return (Message("activation", done.microbatch, stage + 1),) if stage + 1 < stages else ()
    return (Message("gradient", done.microbatch, stage - 1),) if stage > 0 else ()


def _receives(action: Compute, stage: int, stages: int) -> tuple[Message, ...]:
    if action.kind == "forward":
        return (Message("activation", action.microbatch, stage - 1),) if stage > 0 else ()
    return (Message("gradient", action.microbatch, stage + 1),) if stage + 1 < stages else ()
