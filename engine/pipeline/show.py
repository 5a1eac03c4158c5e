"""Draws the timeline of a schedule, simulated or measured.

    python -m engine.pipeline.show --schedule 1f1b --stages 4 --microbatches 8 --out 1f1b.png
    python -m engine.pipeline.show --measured timeline.json --out measured.png

Simulated times and memory are of one rank's layers, also where chunks share them: a forward takes 1, and what it keeps
is 1. A measured timeline, as `TrainStep.record` writes it, is drawn above the simulation of the same computations, each
of which takes its measured median there, and messages nothing: what the measured bubble has more is waiting for
messages, and unevenness.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import EngineError, UsageError
from engine.pipeline.measured import Measured, read
from engine.pipeline.plot import Panel, draw
from engine.pipeline.schedule import Stages
from engine.pipeline.schedules import MADE_FOR, SCHEDULES, schedule_named
from engine.pipeline.simulate import Costs, Timeline, simulate

_SIMULATED = ("schedule", "stages", "microbatches")


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
    least, placement = MADE_FOR.get(schedule, (1, "loop"))
    stages = Stages(ranks, least if chunks is None else chunks, placement)
    part = {
        name: costs.of(name, 0) / stages.chunks
        for name in ("forward", "input_gradient", "weight_gradient", "activation")
    }
    return simulate(named(stages, microbatches), stages, microbatches, Costs(**part, message=costs.message))


def title_of(schedule: str, microbatches: int, timeline: Timeline) -> str:
    """Return what is written above the picture."""
    return (
        f"{_sizes(schedule, microbatches, timeline.stages)}: "
        f"bubble {timeline.bubble:.1%}, a step takes {timeline.step:.4g}, "
        f"memory up to {max(timeline.memory):.4g} activations of a stage"
    )


def panels_of(measured: Measured) -> list[Panel]:
    """Return what is drawn of recorded steps: the one of median length, and the simulation of it."""
    sizes = _sizes(measured.schedule, measured.microbatches, measured.stages)
    simulated = "simulated with the measured costs, messages take nothing"
    panels = []
    for name, timeline in ((f"{sizes}: measured", measured.timeline()), (simulated, measured.simulated())):
        shown = timeline.scaled(1e3, 2**-20)
        held = f", memory up to {max(shown.memory):.4g} MiB" if shown.memory else ""
        title = f"{name}: bubble {shown.bubble:.1%}, a step takes {shown.step:.4g} ms{held}"
        panels.append(Panel(title, shown, "ms", "MiB"))
    return panels


def table_of(measured: Measured) -> str:
    """Return a table with a line for each rank, of the step of median length and of the simulation of it, and one of
    both for all ranks. Times in milliseconds, memory in MiB.
    """
    ranks = range(measured.stages.ranks)
    lines = [f"{'':9}{'rank':>5}{'busy ms':>10}{'idle ms':>10}{'bubble':>9}{'memory MiB':>13}"]
    for name, timeline in (("measured", measured.timeline()), ("simulated", measured.simulated())):
        shown = timeline.scaled(1e3, 2**-20)
        busy = [shown.busy(rank) for rank in ranks]
        rows = [(str(rank), busy[rank], shown.step, shown.memory[rank : rank + 1]) for rank in ranks]
        rows.append(("all", sum(busy), shown.step * len(busy), (max(shown.memory),) if shown.memory else ()))
        for number, (rank, computing, whole, memory) in enumerate(rows):
            held = f"{memory[0]:.1f}" if memory else "unknown"
            bubble = 1 - computing / whole if whole else 0.0
            lines.append(
                f"{'' if number else name:9}{rank:>5}{computing:10.2f}{whole - computing:10.2f}{bubble:9.1%}{held:>13}"
            )
    lines.append(f"bubble of {len(measured.steps)} recorded steps, median: {measured.bubble():.1%}")
    return "\n".join(lines)


def _sizes(schedule: str, microbatches: int, stages: Stages) -> str:
    chunks = f" of {stages.chunks} chunks" if stages.chunks > 1 else ""
    return f"{schedule}: {stages.ranks} stages{chunks}, {microbatches} microbatches"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.pipeline.show", description="Draw a pipeline schedule.")
    parser.add_argument("--measured", type=Path, help="a recorded timeline, in place of the options below")
    parser.add_argument("--schedule", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, help="ranks of the pipeline axis")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--chunks", type=int, help="virtual stages on each rank (default: what the schedule needs)")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .pdf or .svg")
    for name in ("forward", "input-gradient", "weight-gradient"):
        parser.add_argument(f"--{name}", type=float, help="time for all layers of a rank (default: 1)")
    parser.add_argument("--message", type=float, help="time of a message between ranks (default: 0)")
    return parser


def _shown(given: argparse.Namespace) -> tuple[list[Panel], str]:
    """Return what is drawn and what is printed. Raises UsageError for options that do not belong together."""
    named = {
        name: value for name, value in vars(given).items() if value is not None and name not in ("measured", "out")
    }
    if given.measured is not None:
        if named:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
            raise UsageError(f"--measured says what ran and how long it took: leave out {options}")
        measured = read(given.measured)
        return panels_of(measured), table_of(measured)
    missing = [f"--{name}" for name in _SIMULATED if name not in named]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: a schedule and its sizes are simulated, --measured is drawn")
    costs = {name: value for name, value in named.items() if name not in (*_SIMULATED, "chunks")}
    timeline = timeline_of(given.schedule, given.stages, given.microbatches, given.chunks, Costs(**costs))
    title = title_of(given.schedule, given.microbatches, timeline)
    return [Panel(title, timeline)], title


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the title or a table; return 2, with the reason on stderr, for what cannot be drawn."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        panels, text = _shown(given)
        draw(panels, given.out)
    except (EngineError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n{given.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
