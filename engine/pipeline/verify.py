"""Whether a schedule can run: checked without a process, before anything is sent. Pure.

Every error is a UsageError that names the rank and the action at fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from engine.errors import UsageError
from engine.pipeline import rendezvous
from engine.pipeline.schedule import KINDS, Compute, Exchange, Message, Plan, Program, Stages, programs

# What has been done for one stage and microbatch, and what each kind needs and leaves.
_NOTHING, _FORWARD, _INPUT_GRADIENT, _ALL = range(4)
_STEPS = {
    "forward": (_NOTHING, _FORWARD),
    "input_gradient": (_FORWARD, _INPUT_GRADIENT),
    "weight_gradient": (_INPUT_GRADIENT, _ALL),
    "backward": (_FORWARD, _ALL),
}
_LACKS = {_FORWARD: "forward", _INPUT_GRADIENT: "input gradient"}


def verify(
    plan: Plan,
    stages: Stages,
    microbatches: int,
    in_flight: Callable[[Stages, int, int], int] | None = None,
    *,
    ahead: bool = False,
) -> tuple[Program, ...]:
    """Return the ranks' programs of a plan, once all of this is sure: every rank computes each forward and each
    backward of its stages once, in an order that can be; messages meet in the order in which they are posted; no rank
    waits for ever, although a send ends only once its receive is posted; no more activations are alive than
    `in_flight(stages, microbatches, rank)`, where it is given. ahead: as in `schedule.programs`, if
    the plan can run so.

    Raises UsageError for what is not.
    """
    check_plan(plan, stages, microbatches)
    if in_flight is not None:
        check_in_flight(plan, [in_flight(stages, microbatches, rank) for rank in range(stages.ranks)])
    if ahead:
        derived = programs(plan, stages, ahead=True)
        with contextlib.suppress(UsageError):  # an order in which a send has to be waited for later than that
            check_programs(derived, stages)
            check_programs([posted_late(program, rank) for rank, program in enumerate(derived)], stages)
            return derived
    derived = programs(plan, stages)
    check_programs(derived, stages)
    return derived


def posted_late(program: Program, rank: int) -> Program:
    """Return a program as it runs while forms are not known yet: a receive can be posted only when it is waited for."""
    return tuple(
        Exchange(tuple(each for each in one.waits if each.receiver == rank), one.sends, one.waits)
        if isinstance(one, Exchange)
        else one
        for one in program
    )


def check_plan(plan: Plan, stages: Stages, microbatches: int) -> None:
    """Refuse a plan in which a rank does not compute each forward and each backward of its stages exactly once: a
    `backward` after its forward, or an `input_gradient` after it and a `weight_gradient` after that.
    """
    if not isinstance(plan, Sequence) or len(plan) != stages.ranks:
        given = f"{len(plan)} lists" if isinstance(plan, Sequence) else f"a {type(plan).__name__}"
        raise UsageError(f"a schedule gives a list of actions for each of the {stages.ranks} ranks, not {given}")
    for rank, actions in enumerate(plan):
        if not isinstance(actions, Sequence):
            raise UsageError(
                f"rank {rank}: its actions are a {type(actions).__name__}, not a list of Compute(kind, "
                f"stage, microbatch)"
            )
        done = {(stage, i): _NOTHING for stage in stages.on(rank) for i in range(microbatches)}
        for number, action in enumerate(actions):
            if not isinstance(action, Compute) or action.kind not in KINDS:
                place = f"rank {rank}, action {number} ({action})"
                raise UsageError(f"{place}: a schedule lists Compute(kind, stage, microbatch), of {', '.join(KINDS)}")
            key = (action.stage, action.microbatch)
            needs, leaves = _STEPS[action.kind]
            if done.get(key) != needs:
                fault = _fault(done.get(key), needs, stages.on(rank), microbatches)
                raise UsageError(f"rank {rank}, action {number} ({action}): {fault}")
            done[key] = leaves
        for (stage, i), state in done.items():
            if state != _ALL:
                what = {_NOTHING: "forward", _FORWARD: "backward", _INPUT_GRADIENT: "weight gradient"}[state]
                raise UsageError(f"rank {rank} never computes the {what} of stage {stage}, microbatch {i}: list it")


def _fault(state: int | None, needs: int, own: Sequence[int], microbatches: int) -> str:
    if state is None:
        return (
            f"this rank holds the stages {', '.join(map(str, own))}, and microbatches go from 0 to {microbatches - 1}"
        )
    if state < needs:
        return f"its {_LACKS[needs]} has not run: list that before it"
    return "this has been computed already: list it once"


def check_in_flight(plan: Plan, most: Sequence[int]) -> None:
    """Refuse a plan that keeps more activations than `most` by rank, each from its forward to the end of its backward
    or weight gradient.
    """
    for rank, actions in enumerate(plan):
        alive = 0
        for number, action in enumerate(actions):
            alive += {"forward": 1, "input_gradient": 0}.get(action.kind, -1)
            if alive > most[rank]:
                raise UsageError(
                    f"rank {rank}, action {number} ({action}): it makes {alive} activations alive, and the schedule "
                    f"promises at most {most[rank]}"
                )


def check_programs(programs: Sequence[Program], stages: Stages) -> None:
    """Refuse programs in which a computation lacks its input, a message is sent before it is made, or not waited for;
    in which messages arrive in another order than they are posted; or which never end.
    """
    for rank, program in enumerate(programs):
        _check_order(rank, program, stages)
    rendezvous.run(programs)


def _check_order(rank: int, program: Program, stages: Stages) -> None:
    here: set[tuple[str, int, int]] = set()
    """What is on this rank: (`activation`, s, i) and (`gradient`, s, i), as a message for stage s would bring them."""
    open_: set[Message] = set()
    own = set(stages.on(rank))
    for number, instruction in enumerate(program):
        if isinstance(instruction, Compute):
            stage, i = instruction.stage, instruction.microbatch
            if instruction.kind == "weight_gradient":
                continue
            forward = instruction.kind == "forward"
            kind, end, to = ("activation", 0, stage + 1) if forward else ("gradient", stages.count - 1, stage - 1)
            if stage != end and (kind, stage, i) not in here:
                raise UsageError(
                    f"rank {rank}, instruction {number} ({instruction}): its {kind} has not arrived: wait for it before"
                )
            here.add((kind, to, i))
            continue
        _check_exchange(rank, number, instruction, (own, here, open_))
    for message in open_:
        raise UsageError(f"rank {rank} never waits for the {message}: wait for it before the end")


def _check_exchange(
    rank: int, number: int, exchange: Exchange, state: tuple[set[int], set[tuple[str, int, int]], set[Message]]
) -> None:
    own, here, open_ = state
    for message in exchange.receives:
        if message.receiver != rank or message.stage not in own:
            raise UsageError(f"rank {rank}, instruction {number}: it receives the {message}, which is for another rank")
        open_.add(message)
    for message in exchange.sends:
        if message.sender != rank or (message.kind, message.stage, message.microbatch) not in here:
            raise UsageError(f"rank {rank}, instruction {number}: it sends the {message}, which it has not made")
        open_.add(message)
    for message in exchange.waits:
        if message not in open_:
            raise UsageError(f"rank {rank}, instruction {number}: it waits for the {message}, which it has not started")
        open_.discard(message)
        if message.receiver == rank:
            here.add((message.kind, message.stage, message.microbatch))
