"""What the pipeline benchmark found: a table of all schedules, its notes, and the picture of each timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.results import Case, Measured, plural
from engine.pipeline import measured as timelines
from engine.pipeline.plot import draw
from engine.pipeline.show import panels_of

REFERENCE = ("1f1b", "torch_pipeline")
"""Schedule and system that all others are held against."""
NAMES = {
    "torch_pipeline": "torch",
    "torch_pipeline_balanced": "torch, engine's cut",
}
NOTE = (
    "time/engine: above 1 is slower than this engine with the same schedule. torch 1f1b/time: above 1 is faster than "
    "torch's Schedule1F1B with its usual cut, an equal share of the blocks for each stage. The engine cuts by cost; "
    "`torch, engine's cut` has that cut too: what is left of a gain there is not the cut. Bubble: the part of the "
    "ranks' time without a computation, median of recorded steps, which are not timed; simulated with the measured "
    "costs, messages taking nothing. Activations: what a step held at most at the end of a computation more than at "
    "its start. Held: the most that was in use at any time of a step, more than before anything was built: weights, "
    "optimizer, gradients, activations and what is temporary, without what ranks share."
)


@dataclass
class System(Measured):
    """One system with one schedule, over all rounds; the bubbles and activations are this engine's only."""

    ranks_mib: list[float] = field(default_factory=list)
    """By rank, the most that was in use in a step; empty where it is not known."""
    bubble: float | None = None
    simulated_bubble: float | None = None
    activations_mib: list[float] = field(default_factory=list)
    """By rank; empty where it is not known."""
    simulated_activations_mib: list[float] = field(default_factory=list)

    def add(self, result: Mapping[str, Any]) -> None:
        """Take in one job's result."""
        super().add(result)
        self.ranks_mib = _most(self.ranks_mib, result["ranks_mib"])

    def add_steps(self, recorded: timelines.Measured) -> None:
        """Take in all steps that were recorded, over all rounds."""
        simulated = recorded.simulated()
        self.bubble, self.simulated_bubble = recorded.bubble(), simulated.bubble
        self.activations_mib = [value / 2**20 for value in recorded.timeline().memory]
        self.simulated_activations_mib = [value / 2**20 for value in simulated.memory if self.activations_mib]


def _most(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return list(map(max, one, other)) if one else list(other)


def named(schedule: str, system: str) -> str:
    """Return what a system is called beside others."""
    return f"{NAMES.get(system, system)}: {schedule}"


def reference(cases: Sequence[Case]) -> Measured | None:
    """Return what all systems are held against; None where it was not run."""
    schedule, system = REFERENCE
    return next((found for case in cases if case.work.schedule == schedule and (found := case.find(system))), None)


def table(cases: Sequence[Case]) -> Table:
    """Return all schedules as one table, a row for each system."""
    work = cases[0].work
    axes, _, model = work.name.partition(": ")
    title = f"{axes}, {model.partition(',')[0]}: {plural(work.microbatches, 'microbatch')}"
    shown = Table(title=f"Pipeline schedules, {title}")
    columns = (
        "system", "median s", "min", "max", "time/engine", "torch 1f1b/time", "bubble", "simulated",
        "activations MiB", "simulated", "held MiB", "loss",
    )  # fmt: skip
    for name in columns:
        shown.add_column(name, justify="left" if name == "system" else "right")
    best = reference(cases)
    for case in cases:
        shown.add_section()
        shown.add_row(case.work.schedule, style="bold")
        for each in case.systems:
            shown.add_row(*_row(each, case, best))
    return shown


def _row(each: Measured, case: Case, best: Measured | None) -> list[str]:
    assert isinstance(each, System)
    against = f"{best.median / each.median:.2f}x" if best is not None else "-"
    bubbles = ["" if value is None else f"{value:.1%}" for value in (each.bubble, each.simulated_bubble)]
    return [
        f"  {NAMES.get(each.system, each.system)}",
        *(f"{value:.4f}" for value in (each.median, min(each.seconds), max(each.seconds))),
        f"{each.median / case.systems[0].median:.2f}x", against, *bubbles,
        _by_rank(each.activations_mib), _by_rank(each.simulated_activations_mib), _by_rank(each.ranks_mib),
        f"{each.losses[-1]:.5f}",
    ]  # fmt: skip


def _by_rank(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in values)


def draw_timelines(recorded: Mapping[str, timelines.Measured], folder: Path) -> list[Path]:
    """Write this engine's timeline of each schedule, measured above simulated: a JSON and a PNG."""
    written = []
    for schedule, steps in recorded.items():
        numbers, picture = folder / f"{schedule}.json", folder / f"{schedule}.png"
        steps.save(numbers)
        draw(panels_of(steps), picture)
        written += [numbers, picture]
    return written
