"""How many times as long torch's own call takes as the engine's, from the rows of one run: torch's time / ours.

Pure. The tables are Markdown, so that they can be pasted into docs/collectives.md as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.collectives_case import CHOSEN, OPS, TORCH, UNITS, Row, Way, size_name

GOAL = (
    ("reduce_scatter", "registered"),
    ("all_gather", "registered"),
    ("all_reduce", "registered"),
    ("all_reduce", "private"),
    ("broadcast", "private"),
)
"""(operation, memory) over which the mean is taken: what a training step calls, where the engine can lay it."""
GOAL_SIZES = tuple(number * UNITS[unit] for number, unit in ((1, "K"), (64, "K"), (1, "M"), (64, "M")))
_GOAL_TRANSPORT = "shm"
_UNITS = {"G": "GiB", "M": "MiB", "K": "KiB"}


@dataclass(frozen=True)
class Ratio:
    """One row of the engine's against torch's own call on the same case."""

    row: Row
    by_size: float
    """Of t_min up to 1 MiB, of t_p50 above."""
    by_median: float
    """Of t_p50."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        names = ("op", "transport", "algorithm", "memory", "dtype", "n", "bytes", "in_place")
        return {**{name: getattr(self.row, name) for name in names}, "ratio": self.by_size, "ratio_p50": self.by_median}


@dataclass(frozen=True)
class Mean:
    """The geometric mean over `GOAL` x `GOAL_SIZES`, of one dtype and algorithm; operations in their first form."""

    dtype: str
    algorithm: str
    by_size: float | None
    """None while any is missing."""
    by_median: float | None
    missing: tuple[str, ...]
    """What was not measured."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        found = {"dtype": self.dtype, "transport": _GOAL_TRANSPORT, "algorithm": self.algorithm}
        return {**found, "ratio": self.by_size, "ratio_p50": self.by_median, "missing": list(self.missing)}


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Return a ratio for each row of the engine's that torch's own call was measured beside."""
    raw = {_case(row): row for row in rows if row.algorithm == TORCH}
    pairs = [(row, raw[_case(row)]) for row in rows if row.algorithm != TORCH and _case(row) in raw]
    return [Ratio(row, torchs.seconds / row.seconds, torchs.t_p50 / row.t_p50) for row, torchs in pairs]


def means(found: Sequence[Ratio]) -> list[Mean]:
    """Return the mean for each dtype. It is of what the engine takes, or where that is not measured, of `native`."""
    made = []
    for dtype in dict.fromkeys(each.row.dtype for each in found if each.row.bytes):
        own = [each for each in found if each.row.dtype == dtype and each.row.transport == _GOAL_TRANSPORT]
        algorithm = CHOSEN if not own or any(each.row.algorithm == CHOSEN for each in own) else "native"
        at = {_place(each.row): each for each in own if each.row.algorithm == algorithm}
        wanted = [(op, memory, size, OPS[op].in_place[0]) for op, memory in GOAL for size in GOAL_SIZES]
        here = [at[key] for key in wanted if key in at]
        missing = tuple(f"{op} {memory} {_size(size)}" for op, memory, size, in_place in wanted
                        if (op, memory, size, in_place) not in at)  # fmt: skip
        by_size, by_median = _mean([each.by_size for each in here]), _mean([each.by_median for each in here])
        made.append(Mean(dtype, algorithm, None if missing else by_size, None if missing else by_median, missing))
    return made


def to_dict(found: Sequence[Ratio]) -> dict[str, Any]:
    """Return ratios and means as plain values."""
    return {"rows": [each.to_dict() for each in found], "geometric_mean": [each.to_dict() for each in means(found)]}


def markdown(found: Sequence[Ratio]) -> str:
    """Return for each dtype both tables, and the mean where all of it was measured; and what has no size."""
    if not found:
        return "Nothing of the engine's was measured beside torch's own call."
    parts = []
    for mean in means(found):
        own = [each for each in found if each.row.dtype == mean.dtype and each.row.bytes]
        head = f"{own[0].row.n} ranks, {mean.dtype}: torch's own call / the engine's, above 1 the engine is faster."
        parts.append(f"{head} By t_min up to 1 MiB, by t_p50 above:")
        parts.append(_table(own, median=False))
        parts.append("All by medians:")
        parts.append(_table(own, median=True))
        if mean.by_size is not None and mean.by_median is not None:
            goal = ", ".join(" ".join(each) for each in GOAL)
            parts.append(
                f"Geometric mean of `{mean.algorithm}` over {_GOAL_TRANSPORT}, {goal} at "
                f"{', '.join(map(_size, GOAL_SIZES))}: **{mean.by_size:.2f}**, by medians **{mean.by_median:.2f}**."
            )
    empty = [each for each in found if not each.row.bytes]
    parts += [
        f"{each.row.n} ranks, {each.row.op} over {each.row.transport}, `{each.row.algorithm}`: "
        f"{each.by_size:.2f}, by medians {each.by_median:.2f}."
        for each in empty
    ]
    return "\n\n".join(parts)


def _table(found: Sequence[Ratio], *, median: bool) -> str:
    """Return a line for each operation, form and way, a column for each size."""
    sizes = sorted({each.row.bytes for each in found})
    values: dict[tuple[str, bool, Way], dict[int, float]] = {}
    for each in found:
        line = values.setdefault((each.row.op, each.row.in_place, each.row.way), {})
        line[each.row.bytes] = each.by_median if median else each.by_size
    lines = [
        f"| operation | place | transport | algorithm | memory | {' | '.join(map(_size, sizes))} |",
        "|---" * (5 + len(sizes)) + "|",
    ]
    for (op, in_place, way), line in values.items():
        cells = [f"{line[size]:.2f}" if size in line else "" for size in sizes]
        how = f"{'in' if in_place else 'out'} | {way.transport} | `{way.algorithm}` | {way.memory}"
        lines.append(f"| {op} | {how} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _size(size: int) -> str:
    """Return `64 KiB` for 65536."""
    name = size_name(size)
    return f"{name[:-1]} {_UNITS[name[-1]]}" if name[-1] in _UNITS else f"{name} B"


def _case(row: Row) -> tuple[object, ...]:
    return row.op, row.dtype, row.bytes, row.in_place, row.n, row.device


def _place(row: Row) -> tuple[str, str, int, bool]:
    return row.op, row.memory, row.bytes, row.in_place


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / max(1, len(values)))
