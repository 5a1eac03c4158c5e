"""The named schedules, and how many activations each keeps. Pure.

Each is a function of the stages and the number of microbatches; F, I, W, B below are forward, input gradient, weight
gradient and full backward; P ranks, v chunks on each, M microbatches, all ranks' computations of equal cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.errors import LayoutError, UsageError, did_you_mean
from engine.pipeline.schedule import Compute, Schedule, Stages

Actions = tuple[Compute, ...]


def gpipe(stages: Stages, microbatches: int) -> tuple[Actions, ...]:
    """GPipe: every forward, then every backward, the last microbatch first; chunk after chunk.

    All M v activations of a rank are alive at once. Bubble: (P - 1) / (M + P - 1) with one chunk. Source: GPipe,
    arXiv:1811.06965, figure 2; with chunks: breadth-first pipeline parallelism, arXiv:2211.05953.
    """
    return tuple(
        (
            *(Compute("forward", stage, i) for stage in stages.on(rank) for i in range(microbatches)),
            *(Compute("backward", stage, i) for stage in stages.on(rank)[::-1] for i in reversed(range(microbatches))),
        )
        for rank in range(stages.ranks)
    )


def one_f_one_b(stages: Stages, microbatches: int) -> tuple[Actions, ...]:
    """1F1B: warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    Rank s of P warms up with min(M, P - 1 - s) forwards, so at most min(M, P - s) microbatches are alive on it,
    whatever M is. Bubble: (P - 1) / (M + P - 1). Source: PipeDream-Flush, arXiv:2006.09503, section 3.2. Raises
    LayoutError for more than one chunk.
    """
    _one_chunk("1f1b", stages)
    plan = []
    for stage in range(stages.ranks):
        forwards = [Compute("forward", stage, i) for i in range(microbatches)]
        backwards = [Compute("backward", stage, i) for i in range(microbatches)]
        plan.append(_in_turn(forwards, backwards, stages.ranks - 1 - stage))
    return tuple(plan)


def interleaved(stages: Stages, microbatches: int) -> tuple[Actions, ...]:
    """Interleaved 1F1B: P microbatches at a time go through one chunk after the other, and back the same way.

    Rank s warms up with 2 (P - 1 - s) + (v - 1) P forwards of a chunk, so at most one more activation is alive on it,
    each of 1 / v of its layers. Bubble: (P - 1) / (v M + P - 1) where P divides M; other M run as the next multiple
    would, without the microbatches that are not there. Source: Megatron-LM, arXiv:2104.04473, section 2.2. Raises
    LayoutError for one chunk on several ranks, and for a placement that is no loop.
    """
    ranks, chunks = stages.ranks, stages.chunks
    if ranks > 1 and (chunks == 1 or stages.placement != "loop"):
        raise LayoutError(
            f"interleaved needs at least 2 chunks on each rank, placed in a loop, not {_described(stages)}: build the "
            f"model with chunks=2, placement='loop', or choose another schedule"
        )
    plan = []
    for rank in range(ranks):
        whole = -(-microbatches // ranks) * ranks
        order = [
            (chunk, first + i) for first in range(0, whole, ranks) for chunk in range(chunks) for i in range(ranks)
        ]
        on = stages.on(rank)
        forwards = [Compute("forward", on[chunk], i) for chunk, i in order]
        backwards = [Compute("backward", on[chunks - 1 - chunk], i) for chunk, i in order]
        warm = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
        plan.append(_present(_in_turn(forwards, backwards, warm), microbatches))
    return tuple(plan)


def zero_bubble(stages: Stages, microbatches: int) -> tuple[Actions, ...]:
    """ZB-H1: 1F1B whose weight gradients wait, s of them on rank s, and fill the gaps at the end.

    At most min(M, P - s) activations of rank s wait for their input gradient, as in 1F1B, and at most min(M, P) for
    their weight gradient: 1F1B's peak. Bubble: (P - 1) (F + I - W) of M (F + I + W) + that, from M = P on. Source: Zero
    Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.2, figure 3. Raises LayoutError for more than one chunk.
    """
    _one_chunk("zero_bubble", stages)
    plan = []
    for stage in range(stages.ranks):
        forwards = [Compute("forward", stage, i) for i in range(microbatches)]
        gradients = [Compute("input_gradient", stage, i) for i in range(microbatches)]
        actions: list[Compute] = []
        for action in _in_turn(forwards, gradients, stages.ranks - 1 - stage):
            actions.append(action)
            if action.kind == "input_gradient" and action.microbatch >= stage:
                actions.append(Compute("weight_gradient", stage, action.microbatch - stage))
        left = range(max(0, microbatches - stage), microbatches)
        plan.append((*actions, *(Compute("weight_gradient", stage, i) for i in left)))
    return tuple(plan)


def zero_bubble_v(stages: Stages, microbatches: int) -> tuple[Actions, ...]:
    """ZB-V: two chunks in a V, so that the last stage is beside the first and the backward starts at once.

    At most min(2 M, 2 P) activations wait for their weight gradient, each of half a rank's layers: 1F1B's peak. Bubble:
    (P - 1) units of an F, I or W of a chunk, where these cost the same and M is at least 2 P - 1; fewer microbatches
    run as 2 P - 1 would, without those that are not there. Source: Pipeline Parallelism with Controllable Memory,
    arXiv:2405.15362, section 4. Raises LayoutError for anything but two chunks in a V.
    """
    ranks = stages.ranks
    if ranks == stages.chunks == 1:
        return zero_bubble(stages, microbatches)
    if stages.chunks != 2 or (ranks > 1 and stages.placement != "v"):
        raise LayoutError(
            f"zero_bubble_v needs 2 chunks on each rank, placed in a V, not {_described(stages)}: build the model with "
            f"chunks=2, placement='v', or choose another schedule"
        )
    whole = max(microbatches, 2 * ranks - 1)
    return tuple(_present(_one_v(stages, rank, whole), microbatches) for rank in range(ranks))


def _one_v(stages: Stages, rank: int, microbatches: int) -> list[Compute]:
    """Return rank `rank`'s actions of ZB-V, for at least 2 P - 1 microbatches."""
    ranks, (down, up) = stages.ranks, stages.on(rank)
    actions: list[Compute] = []
    done: dict[tuple[str, int], int] = {}

    def add(stage: int, *kinds: str) -> None:
        for kind in kinds:
            i = done.get((kind, stage), 0)
            actions.append(Compute(kind, stage, i))  # type: ignore[arg-type]
            done[kind, stage] = i + 1

    both = ("input_gradient", "weight_gradient")
    for _ in range(2 * (ranks - rank) - 1):
        add(down, "forward")
    for _ in range(rank):
        add(up, "forward")
        add(down, "forward")
    for _ in range(ranks - rank):
        add(up, "forward", *both)
    while done.get(("forward", up), 0) < microbatches:
        if done["forward", down] < microbatches:
            add(down, "forward")
        add(down, *both)
        add(up, "forward", *both)
    for _ in range(rank):
        add(down, "input_gradient")
        add(up, "input_gradient")
    for _ in range(ranks - rank):
        add(down, *both)
    for stage in (up, down):
        while done.get(("weight_gradient", stage), 0) < microbatches:
            add(stage, "weight_gradient")
    return actions


SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble_v,
}

MADE_FOR: dict[str, tuple[int, str]] = {"interleaved": (2, "loop"), "zero_bubble_v": (2, "v")}
"""By schedule: the chunks of a rank and their placement that it is made for, where these are not one in a loop."""

IN_FLIGHT: dict[str, Callable[[Stages, int, int], int]] = {
    "1f1b": lambda stages, microbatches, rank: min(microbatches, stages.ranks - rank),
    "gpipe": lambda stages, microbatches, _: microbatches * stages.chunks,
    "interleaved": lambda stages, microbatches, rank: min(
        microbatches * stages.chunks, 2 * (stages.ranks - 1 - rank) + (stages.chunks - 1) * stages.ranks + 1
    ),
    "zero_bubble": lambda stages, microbatches, _: min(microbatches, stages.ranks),
    "zero_bubble_v": lambda stages, microbatches, _: stages.chunks * min(microbatches, stages.ranks),
}
"""By schedule: (stages, microbatches, rank) -> the most activations that are alive on the rank, from the forward to the
end of the backward or weight gradient. What the docstrings promise, and `verify` holds them to.
"""


def schedule_named(name: str) -> Schedule:
    """Return the schedule called `name`. Raises UsageError for one that there is not."""
    if name not in SCHEDULES:
        raise UsageError(f"schedule={name!r}{did_you_mean(str(name), SCHEDULES)}: choose {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _in_turn(forwards: list[Compute], backwards: list[Compute], warm: int) -> Actions:
    """Return `warm` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm = min(warm, len(forwards))
    turns = zip(forwards[warm:], backwards, strict=False)
    return (*forwards[:warm], *(each for turn in turns for each in turn), *backwards[len(forwards) - warm :])


def _present(actions: Iterable[Compute], microbatches: int) -> Actions:
    """Leave out the microbatches that are not there. The order of the others stays one that every rank can keep."""
    return tuple(action for action in actions if action.microbatch < microbatches)


def _one_chunk(name: str, stages: Stages) -> None:
    if stages.chunks > 1:
        raise LayoutError(
            f"{name} has one chunk on each rank, not {_described(stages)}: build the model with chunks=1, or choose "
            f"interleaved or gpipe"
        )


def _described(stages: Stages) -> str:
    return f"{stages.chunks} on {stages.ranks} ranks, placement={stages.placement!r}"
