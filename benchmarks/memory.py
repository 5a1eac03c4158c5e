"""The memory benchmark: what a rank holds at each ZeRO stage, beside the formulas of the ZeRO paper. See `--help`.

The same GPT is trained with AdamW in fp32 on so many data ranks, with the same rows on each; after two steps the live
tensors are counted by who holds them. States that are not within 3 % of the formula make the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.job import JobError, run_job
from benchmarks.machine import describe, summary
from benchmarks.memory_kinds import BUCKET_MIB, OWNERS, TOLERANCE, formula
from benchmarks.work import Work, parse_model
from engine import Layout
from engine.errors import EngineError, UsageError

ROWS = 2  # of each data rank, so that activations do not depend on how many there are
NOTE = (
    "MiB of one rank, the largest of all; in brackets what the ZeRO paper's formula says. Gradients and buckets (the "
    "optimizer's other memory: buffers, padding) at the moment of the step at which both with the rest are most; "
    "activations: the most that autograd kept for the backward, at another moment. The paper has no formula for them."
)


@dataclass(frozen=True)
class Row:
    """One kind on so many ranks."""

    kind: str
    ranks: int
    elements: int
    """Of the model."""
    measured: dict[str, int]
    """Bytes by owner, the largest of all ranks."""
    every: list[dict[str, int]]
    """The same of each rank."""

    @property
    def formula(self) -> dict[str, float]:
        """Bytes by owner, as far as the paper says."""
        return formula(self.kind, self.elements, self.ranks)

    @property
    def states_off(self) -> float:
        """How far the measured states are from the formula, relative."""
        return abs(self.measured["states"] / self.formula["states"] - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    console = Console(highlight=False, width=max(Console().width, 130))
    try:
        if options.plot is not None and options.plot.suffix != ".png":
            raise UsageError(f"--plot {options.plot}: pictures are PNG, end the name in .png")
        model = parse_model(options.model)
        works = [
            Work(Layout(data=n), replace(model, batch=ROWS * n), options.model, limit=options.limit)
            for n in options.ranks
        ]
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="memory_"))
    rows: list[Row] = []
    try:
        for work in works:
            result = run_job("stages", work, work.layout.data, folder, worker="benchmarks.memory_worker")
            rows += [row(kind, work.layout.data, result["elements"], every) for kind, every in result["kinds"].items()]
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    command = "python -m benchmarks.memory " + shlex.join(arguments)
    console.print(f"{command}\n{summary('cpu')}\n", soft_wrap=True)
    console.print(table(rows))
    console.print(NOTE)
    write(options, rows, command)
    wrong = [each for each in rows if each.states_off > TOLERANCE]
    for each in wrong:
        print(f"error: {each.kind} on {each.ranks}: states {each.states_off:.1%} off the formula", file=sys.stderr)
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--ranks", type=counts, default="1,2,4,8", help="comma-separated numbers of data ranks")
    add("--model", default="default", help="default, heavy, or sizes: hidden=512 or heavy,layers=8; not batch")
    add("--limit", type=float, default=300.0, help="seconds that one job may take")
    add("--json", type=Path, help="write every rank's bytes there, with versions, hardware and command")
    add("--plot", type=Path, help="draw a picture there (PNG)")
    return made


def counts(text: str) -> list[int]:
    """Read `1,2,4`. Raises ArgumentTypeError for anything else."""
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rank counts such as 1,2,4")
    return found


def row(kind: str, ranks: int, elements: int, every: list[dict[str, int]]) -> Row:
    """Return one row, of what every rank measured."""
    return Row(kind, ranks, elements, {owner: max(each[owner] for each in every) for owner in OWNERS}, every)


def table(rows: Sequence[Row]) -> Table:
    """Return all rows, measured bytes with the formula's in brackets."""
    shown = Table(title=f"Memory of one rank, MiB; buckets of {BUCKET_MIB:g} MiB")
    for name in ("ranks", "", *OWNERS, "all", "states/formula"):
        shown.add_column(name, justify="left" if not name else "right", no_wrap=True)
    last = None
    for each in rows:
        if each.ranks != last:
            shown.add_section()
        said = each.formula
        cells = [
            f"{mib(each.measured[owner])} ({mib(said[owner])})" if owner in said else mib(each.measured[owner])
            for owner in OWNERS
        ]
        number = "" if each.ranks == last else str(each.ranks)
        ratio = f"{each.measured['states'] / said['states']:.4f}"
        shown.add_row(number, each.kind, *cells, mib(sum(each.measured.values())), ratio)
        last = each.ranks
    return shown


def mib(size: float) -> str:
    """Return bytes as MiB, with one digit."""
    return f"{size / 2**20:.1f}"


def write(options: argparse.Namespace, rows: Sequence[Row], command: str) -> None:
    """Write what was asked for."""
    if options.json is not None:
        meta = {"date": date.today().isoformat(), "command": command, **describe("cpu")}
        document = {"meta": meta, "rows": [{**asdict(each), "formula": each.formula} for each in rows]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"json: {options.json}")
    if options.plot is not None:
        plot(rows, options.plot)
        print(f"plot: {options.plot}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each kind and number of ranks, its parts stacked, the formula's sums as lines over them. PNG."""
    from matplotlib.figure import Figure

    ranks = list(dict.fromkeys(each.ranks for each in rows))
    figure = Figure(figsize=(2.0 + 2.6 * len(ranks), 5.2), layout="constrained")
    panels = figure.subplots(1, len(ranks), squeeze=False, sharey=True)[0]
    colours = dict(zip(OWNERS, ("tab:blue", "tab:orange", "tab:green", "tab:grey", "lightgrey"), strict=True))
    for panel, count in zip(panels, ranks, strict=True):
        own = [each for each in rows if each.ranks == count]
        names = [each.kind.removeprefix("stage ").replace(", ", "\n") for each in own]
        bottom = [0.0] * len(own)
        for owner in OWNERS:
            heights = [each.measured[owner] / 2**20 for each in own]
            panel.bar(names, heights, bottom=bottom, color=colours[owner], label=owner, width=0.7)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, each in enumerate(own):
            said = sum(each.formula.values()) / 2**20
            label = "formula: parameters + states + gradients" if place == 0 else None
            panel.plot([place - 0.42, place + 0.42], [said, said], color="black", linestyle="dashed", label=label)
        panel.set_title(f"{count} data rank{'s' if count > 1 else ''}")
        panel.set_xlabel("ZeRO stage")
    panels[0].set_ylabel("MiB of one rank")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
