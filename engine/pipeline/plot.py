"""A timeline as a picture: a row for each rank, a box for each computation, and what is idle between them.

The colours differ in lightness too, and are told apart by the colour-blind (after Okabe and Ito, 2008).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import UsageError
from engine.pipeline.rendezvous import Event
from engine.pipeline.schedule import KINDS, Kind
from engine.pipeline.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Kind, str] = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "input_gradient": "#E69F00",
    "weight_gradient": "#A8DCC8",
}
IDLE = "#EDEDED"
_ROW = 0.86  # height of a rank's boxes, of 1
_POINTS = 72.0  # of an inch


@dataclass(frozen=True)
class Panel:
    """A timeline in a picture."""

    title: str
    timeline: Timeline
    unit: str = "forwards of one rank's layers"
    """Of its times."""
    memory: str = ""
    """Unit of its memory."""


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw timelines, one below the other and all to one scale, as a picture of the kind that `path` ends in, such as
    .png or .pdf.

    Raises UsageError without matplotlib, or for a kind of picture that it does not make.
    """
    figure = figure_of(panels)
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"{path.name} is no kind of picture that can be drawn: end it in .png, .pdf or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def figure_of(panels: Sequence[Panel]) -> Figure:
    """Return timelines as a matplotlib figure with axes for each, as wide as its boxes need for their microbatches'
    numbers.

    Of several chunks, a box has a dark foot that is the higher the later its chunk comes in the model. Raises
    UsageError without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a picture needs matplotlib: pip install 'engine3d[examples]', or matplotlib by itself")
    from matplotlib.figure import Figure

    timelines = [panel.timeline for panel in panels]
    step = max(timeline.step for timeline in timelines)
    boxes = [event for timeline in timelines for events in timeline.ranks for event in events]
    lengths = sorted(event.end - event.start for event in boxes if event.end > event.start)
    # Of measured boxes a few may be as narrow as you like: nearly all have room for their number.
    narrow = lengths[len(lengths) // 20] if lengths else 1.0
    width = min(max(8.0, 0.24 * step / narrow), 26.0)
    height = sum(1.0 + 0.52 * timeline.stages.ranks for timeline in timelines)
    figure = Figure(figsize=(width + 2.2, 0.7 + height), layout="constrained")
    columns = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[t.stages.ranks + 1 for t in timelines])
    for axes, panel in zip(columns[:, 0], panels, strict=True):
        _draw_panel(axes, panel, step, width * _POINTS / step if step else 0.0)
    _legend(figure, timelines[0], boxes)
    return figure


def _draw_panel(axes: Axes, panel: Panel, step: float, points: float) -> None:
    """Draw a timeline on an axis of time that is `step` long; points: the width of a unit of time on paper."""
    timeline = panel.timeline
    ranks, own = timeline.stages.ranks, timeline.step
    for rank, events in enumerate(timeline.ranks):
        axes.barh(rank, own, height=_ROW, color=IDLE, edgecolor="#C8C8C8", hatch="////", linewidth=0)
        _draw_rank(axes, timeline, rank, events, points)
        if own:
            held = f", memory {timeline.memory[rank]:.4g} {panel.memory}".rstrip() if timeline.memory else ""
            axes.text(own + step * 0.006, rank, f"{timeline.busy(rank) / own:.0%} busy{held}", va="center", fontsize=8)
    axes.set_xlim(0, step or 1.0)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [_name(timeline, rank) for rank in range(ranks)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time, in {panel.unit}", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(panel.title, fontsize=10, loc="left")


def _draw_rank(axes: Axes, timeline: Timeline, rank: int, events: Sequence[Event], points: float) -> None:
    """Draw the boxes of a rank; points: the width of a unit of time on paper."""
    own = timeline.stages.on(rank)
    for event in events:
        action, length = event.action, event.end - event.start
        kind: Kind = getattr(action, "kind")  # noqa: B009 (of a Compute)
        axes.barh(rank, length, left=event.start, height=_ROW, color=COLOURS[kind], edgecolor="white", linewidth=0.6)
        foot = 0.2 * own.index(action.stage) / max(1, len(own) - 1)
        if foot:
            axes.barh(
                rank + _ROW / 2 - foot * _ROW / 2, length, left=event.start, height=foot * _ROW, color="#222222",
                edgecolor="white", linewidth=0.6,
            )  # fmt: skip
        text = str(action.microbatch)
        size = min(9.0, length * points / (0.62 * len(text) + 0.35))
        if size >= 3.5:
            axes.text(
                event.start + length / 2, rank - foot * _ROW / 2, text, ha="center", va="center", fontsize=size,
                color="white" if kind == "forward" else "black",
            )  # fmt: skip


def _legend(figure: Figure, timeline: Timeline, events: Sequence[Event]) -> None:
    from matplotlib.patches import Patch

    present = {getattr(event.action, "kind", None) for event in events}
    handles = [Patch(color=COLOURS[kind], label=kind.replace("_", " ")) for kind in KINDS if kind in present]
    handles.append(Patch(facecolor=IDLE, edgecolor="#C8C8C8", hatch="////", label="idle", linewidth=0))
    if timeline.stages.chunks > 1:
        handles.append(Patch(color="#222222", label="foot: a later chunk"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _name(timeline: Timeline, rank: int) -> str:
    if timeline.stages.chunks == 1:
        return f"rank {rank}"
    return f"rank {rank}\nstages {', '.join(map(str, timeline.stages.on(rank)))}"
