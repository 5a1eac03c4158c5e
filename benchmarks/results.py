"""What a training benchmark found: checked, as a table, as JSON, as a picture, and against an older run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import describe
from benchmarks.work import Work
from engine.errors import EngineError, UsageError

ENGINE = "engine"
BOUNDS = {"alone": "bound: one process alone", "together": "bound: no communication"}
NOTE = (
    "time/engine: above 1 is slower than this engine. This engine computes its gradient norm in every step; peers are "
    "left as their users run them. Bounds: this engine's own step with all communication removed, one process at a "
    "time (the slowest stage) and all at once. Memory: the most that one rank held at any time of a step, on a CPU its "
    "proportional set size, else the allocator's peak."
)


class LossError(EngineError):
    """Two systems that should do the same work do not."""


@dataclass
class Measured:
    """One system on one case, over all rounds."""

    system: str
    seconds: list[float] = field(default_factory=list)
    """Of each timed step, the slowest rank's."""
    losses: list[float] = field(default_factory=list)
    """Of each step, warm-up included; the same in every round. Empty for a bound."""
    memory_mib: float = 0.0
    """The most that one rank held; 0 for a bound."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def add(self, result: Mapping[str, Any]) -> None:
        """Take in one job's result."""
        self.seconds += result["seconds"]
        self.losses = result["losses"]
        self.memory_mib = max(self.memory_mib, result["memory_mib"])


@dataclass
class Case:
    """All systems on one piece of work; the first is this engine, the bounds come last."""

    work: Work
    systems: list[Measured]

    def find(self, name: str) -> Measured | None:
        """Return a system by its name."""
        return next((each for each in self.systems if each.system == name), None)


def check_losses(system: str, losses: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    """Raise LossError when a system's loss of any step is further than `tolerance`, relative, from this engine's."""
    for number, (mine, theirs) in enumerate(zip(wanted, losses, strict=True), start=1):
        difference = abs(mine - theirs) / max(abs(mine), 1e-30)
        if not difference <= tolerance:  # also NaN
            raise LossError(
                f"{system} does other work than this engine: its loss of step {number} is {theirs:.6f}, the engine's "
                f"{mine:.6f}: {difference:.1e} apart, at most {tolerance:g} is allowed"
            )


def table(cases: Sequence[Case]) -> Table:
    """Return all cases as one table, a row for each system."""
    shown = Table(title="One training step")
    for name in ("system", "median s", "min", "max", "tokens/s", "time/engine", "final loss", "memory MiB"):
        shown.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    for case in cases:
        work, base = case.work, case.systems[0].median
        shown.add_section()
        axes, _, model = work.name.partition(": ")
        shown.add_row(f"{axes}\n{model}, {plural(work.layout.world_size, 'process')}", style="bold")
        for each in case.systems:
            bound = not each.losses
            row = [f"  {BOUNDS.get(each.system, each.system)}"]
            row += [f"{value:.4f}" for value in (each.median, min(each.seconds), max(each.seconds))]
            row += ["" if bound else f"{work.tokens / each.median:,.0f}", f"{each.median / base:.2f}x"]
            row += ["", ""] if bound else [f"{each.losses[-1]:.5f}", f"{each.memory_mib:,.0f}"]
            shown.add_row(*row, style="dim" if bound else None)
    return shown


def plural(number: int, word: str) -> str:
    """Return `1 process`, `2 processes`."""
    return f"{number} {word}{'' if number == 1 else 'es'}"


def settings(cases: Sequence[Case]) -> str:
    """Return what the cases' names leave out: sizes, ZeRO stage, schedule, microbatches, steps."""
    lines = []
    for case in cases:
        work = case.work
        sizes = ", ".join(f"{name} {value}" for name, value in asdict(work.model).items() if name != "microbatches")
        zero = f"ZeRO {work.stage}" + (f" accumulating {work.accumulate}" if work.accumulate else "")
        lines.append(
            f"{work.name}: {sizes}; {plural(work.microbatches, 'microbatch')}; engine: {zero}, "
            f"{work.schedule}; {len(case.systems[0].seconds)} steps timed"
        )
    return "\n".join(lines)


def save(path: Path, cases: Sequence[Case], command: str) -> None:
    """Write everything as JSON: meta (versions, hardware, command), then the cases with every step's seconds."""
    document = {
        "meta": {"date": date.today().isoformat(), "command": command, **describe(cases[0].work.device)},
        "cases": [{"work": case.work.to_dict(), "systems": [asdict(each) for each in case.systems]} for case in cases],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> tuple[str, list[Case]]:
    """Read what `save` wrote: a line about date, hardware and versions, and the cases. Raises UsageError for a file
    that is missing or something else.
    """
    try:
        document = json.loads(path.read_text())
        meta = document["meta"]
        line = f"{path}: {meta['date']}, {meta['hardware']}, {meta['versions']}, code {meta.get('code', 'unknown')}"
        cases = [
            Case(Work.from_dict(case["work"]), [Measured(**each) for each in case["systems"]])
            for case in document["cases"]
        ]
        for each in (system for case in cases for system in case.systems):
            if not each.seconds or not all(isinstance(value, float) for value in (*each.seconds, *each.losses)):
                raise ValueError(f"{each.system} has no list of seconds")
        return line, cases
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no result of this benchmark: {error!r}") from error


def comparison(old: Sequence[Case], new: Sequence[Case]) -> Table:
    """Return what changed since an older run.

    Ratios to this engine in their own run carry over between machines and days; seconds do not.
    """
    shown = Table(title="Against the older run: median seconds, time over this engine's in the same run, memory in MiB")
    columns = ("case", "system", "old s", "new s", "change", "old time/engine", "new", "old MiB", "new MiB")
    for number, name in enumerate(columns):
        shown.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    pairs: dict[tuple[str, str], list[tuple[Measured, float] | None]] = {}
    for side, cases in enumerate((old, new)):
        for case in cases:
            for each in case.systems:
                both = pairs.setdefault((_identity(case.work), each.system), [None, None])
                both[side] = (each, each.median / case.systems[0].median)
    names = {_identity(case.work): case.work.name for case in (*old, *new)}
    for (identity, system), (before, after) in pairs.items():
        times, ratios, memory = zip(*(_figures(found) for found in (before, after)), strict=True)
        change = "new" if before is None else "gone"
        if before is not None and after is not None:
            change = f"{(after[0].median / before[0].median - 1) * 100:+.0f}%"
        shown.add_row(names[identity], system, *times, change, *ratios, *memory)
    return shown


def _identity(work: Work) -> str:
    """Return what makes two runs' cases the same work, however long they were measured."""
    return repr(replace(work, steps=1, warm_up=1, limit=1.0))


def _figures(found: tuple[Measured, float] | None) -> tuple[str, str, str]:
    if found is None:
        return "-", "-", "-"
    each, ratio = found
    return f"{each.median:.4f}", f"{ratio:.2f}x", f"{each.memory_mib:,.0f}" if each.losses else ""


def plot(cases: Sequence[Case], path: Path) -> None:
    """Draw a panel for each case: median step time of every system with its range, the bounds as lines. PNG."""
    from matplotlib.figure import Figure

    columns = min(2, len(cases))
    rows = math.ceil(len(cases) / columns)
    figure = Figure(figsize=(7.5 * columns, 0.9 + 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(cases) :]:
        panel.set_visible(False)
    for panel, case in zip(panels, cases, strict=False):
        systems = [each for each in case.systems if each.losses][::-1]
        medians = [each.median for each in systems]
        low = [each.median - min(each.seconds) for each in systems]
        high = [max(each.seconds) - each.median for each in systems]
        colours = ["tab:blue" if each.system == ENGINE else "lightgrey" for each in systems]
        style = {"ecolor": "dimgrey", "capsize": 3}
        panel.barh([each.system for each in systems], medians, xerr=[low, high], color=colours, error_kw=style)
        base = case.systems[0].median
        plate = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5}
        for y, each in enumerate(systems):
            panel.text(
                0.01 * max(medians), y, f"{each.median:.3f} s = {each.median / base:.2f}x", va="center", bbox=plate
            )
        for (name, label), line in zip(BOUNDS.items(), ("dotted", "dashed"), strict=True):
            bound = case.find(name)
            if bound is not None:
                panel.axvline(bound.median, color="tab:red", linestyle=line, label=label)
        panel.set_title(f"{case.work.name} ({plural(case.work.layout.world_size, 'process')})")
        panel.set_xlim(left=0)
        panel.set_xlabel("seconds of one training step: median, and the range of all steps")
    handles, labels = panels[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
