"""Draws the simulated timeline of a schedule.

    python -m engine.pipeline.show --schedule 1f1b --stages 4 --microbatches 8 --out 1f1b.png

Times and memory are of one rank's layers, also where chunks share them: a forward takes 1, and what it keeps is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import EngineError, UsageError
from engine.pipeline.plot import draw
from engine.pipeline.schedule import Stages
from engine.pipeline.schedules import SCHEDULES, schedule_named
from engine.pipeline.simulate import Costs, Timeline, simulate

# Chunks and placement that a schedule is made for, where it is for more than one chunk.
_MADE_FOR = {"interleaved": (2, "loop"), "zero_bubble_v": (2, "v")}


def timeline_of(
    schedule: str, ranks: int, microbatches: int, chunks: int | None = None, costs: Costs | None = None
) -> Timeline:
    """Return the timeline of a named schedule. chunks: on each rank; None: as many as the schedule is made for. costs:
    numbers, of all layers of a rank; each chunk takes its equal part.

    Raises UsageError for an unknown name, LayoutError for sizes that do not fit the schedule.
    """
    named, costs = schedule_named(schedule), costs or Costs()
    if microbatches < 1:
        raise UsageError(f"microbatches={microbatches}: a step has at least 1")
    least, placement = _MADE_FOR.get(schedule, (1, "loop"))
    stages = Stages(ranks, least if chunks is None else chunks, placement)
    part = {
        name: costs.of(name, 0) / stages.chunks
        for name in ("forward", "input_gradient", "weight_gradient", "activation")
    }
    return simulate(named(stages, microbatches), stages, microbatches, Costs(**part, message=costs.message))


def title_of(schedule: str, microbatches: int, timeline: Timeline) -> str:
    """Return what is written above the picture."""
    stages = timeline.stages
    chunks = f" of {stages.chunks} chunks" if stages.chunks > 1 else ""
    return (
        f"{schedule}: {stages.ranks} stages{chunks}, {microbatches} microbatches: "
        f"bubble {timeline.bubble:.1%}, a step takes {timeline.step:.4g}, "
        f"memory up to {max(timeline.memory):.4g} activations of a stage"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the title; return 2, with the reason on stderr, for what cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m engine.pipeline.show", description="Draw a pipeline schedule.")
    parser.add_argument("--schedule", required=True, help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, required=True, help="ranks of the pipeline axis")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--chunks", type=int, help="virtual stages on each rank (default: what the schedule needs)")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .pdf or .svg")
    for name in ("forward", "input-gradient", "weight-gradient"):
        parser.add_argument(f"--{name}", type=float, default=1.0, help="time for all layers of a rank (default: 1)")
    parser.add_argument("--message", type=float, default=0.0, help="time of a message between ranks (default: 0)")
    given = parser.parse_args(arguments)
    try:
        costs = Costs(given.forward, given.input_gradient, given.weight_gradient, given.message)
        timeline = timeline_of(given.schedule, given.stages, given.microbatches, given.chunks, costs)
        title = title_of(given.schedule, given.microbatches, timeline)
        draw(timeline, title, given.out)
    except (EngineError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    sys.stdout.write(f"{title}\n{given.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
