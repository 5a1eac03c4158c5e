"""What a person sees of a run: progress while it goes on, then the curve, the samples and the table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text as RichText

import engine

_PLAIN_LINES = 20  # at most about so many, where the output is no terminal


@dataclass(frozen=True)
class Record:
    """One training step; a line of metrics.jsonl."""

    step: int
    """From 1."""
    loss: float
    """Mean over the global batch, nats per byte."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens_per_second: float
    """Bytes of the global batch through the time of this step."""
    valid_loss: float | None = None
    """Mean over the held-out rows after this step, nats per byte; None where it was not evaluated."""


@dataclass(frozen=True)
class Summary:
    """The whole run; summary.json."""

    layout: dict[str, int]
    """Sizes of the axes data, pipeline and tensor."""
    world_size: int
    """Processes."""
    parameters: int
    """Of the full model, a tied one counted once."""
    steps: int
    """Optimizer steps."""
    loss_first: float
    """Training loss of the first step, nats per byte."""
    loss_last: float
    """Training loss of the last step, nats per byte."""
    valid_loss: float
    """Loss on the held-out text after the last step, nats per byte."""
    tokens_per_second: float
    """Bytes trained on, through the time of all steps."""
    seconds: float
    """From the opened mesh to the last evaluation."""
    peak_memory_mib: float
    """Most memory that one rank has held."""
    comm_bytes_per_step: dict[str, int]
    """Bytes that all ranks together sent in the last step, by axis; `world` is the loss and the gradient norm."""


class Progress:
    """Shows and stores the records of a run: a bar on a terminal, else a plain line now and then. For rank 0."""

    def __init__(self, console: Console, steps: int, metrics: Path) -> None:
        self._console, self._steps = console, steps
        self._file = metrics.open("w")
        self._bar: RichProgress | None = None
        self._started = time.perf_counter()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=self._steps)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._file.close()

    def add(self, record: Record) -> None:
        """Store one record and show it."""
        line = {key: value for key, value in asdict(record).items() if value is not None}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = f"loss {record.loss:.3f}  {record.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=shown)
        elif record.step in (1, self._steps) or record.step % max(1, self._steps // _PLAIN_LINES) == 0:
            left = (time.perf_counter() - self._started) / record.step * (self._steps - record.step)
            print(f"step {record.step}/{self._steps}  {shown}  {left:.0f} s left", flush=True)
        if record.valid_loss is not None:
            self._console.print(f"step {record.step}  validation loss {record.valid_loss:.3f} nats per byte")


def save_curve(records: Sequence[Record], layout: engine.Layout, path: Path) -> None:
    """Draw training and validation loss over the steps as a PNG picture."""
    from matplotlib.figure import Figure  # only rank 0 needs it, and it takes long to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [r.step for r in records],
        [r.loss for r in records],
        color="tab:blue",
        linewidth=0.8,
        alpha=0.8,
        label="training",
    )
    points = [(r.step, r.valid_loss) for r in records if r.valid_loss is not None]
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, losses, color="tab:orange", marker="o", markersize=5, label="validation (held-out text)")
    axes.annotate(f"{losses[-1]:.2f}", points[-1], textcoords="offset points", xytext=(0, 14), ha="right")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"GPT on {layout}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, records[-1].step * 1.02)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def show_samples(console: Console, samples: Sequence[str]) -> None:
    """Print sampled text, with other control characters than line breaks made visible."""
    for sample in samples:
        clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in sample)
        console.print(Panel(RichText(clean), title="sample", title_align="left"))


def show_table(console: Console, summary: Summary, layout: engine.Layout, folder: Path) -> None:
    """Print the outcome for the person who watched."""
    table = Table(title="Training finished", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    bits = summary.valid_loss / math.log(2)
    for name, value in (
        ("layout", f"{layout} = {summary.world_size} processes"),
        ("parameters", f"{summary.parameters:,}"),
        ("steps", f"{summary.steps:,}"),
        ("training loss", f"{summary.loss_first:.3f} -> {summary.loss_last:.3f} nats per byte"),
        ("validation loss", f"{summary.valid_loss:.3f} nats per byte = {bits:.2f} bits per byte"),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s (a token is a byte)"),
        ("time", f"{summary.seconds:.1f} s"),
        ("sent in a step", ", ".join(f"{axis} {b / 2**20:.2f} MiB" for axis, b in summary.comm_bytes_per_step.items())),
        ("peak memory", f"{summary.peak_memory_mib:.0f} MiB in one process"),
        ("loss curve", str(folder / "loss.png")),
        *([("samples", str(folder / "sample.txt"))] if (folder / "sample.txt").exists() else []),
        ("weights", str(folder / "model.pt")),
        ("numbers", f"{folder / 'summary.json'}, {folder / 'metrics.jsonl'}"),
        ("logs", str(folder / "logs")),
    ):
        table.add_row(name, value)
    console.print(table)
