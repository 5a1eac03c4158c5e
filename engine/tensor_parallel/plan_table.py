"""What a plan makes of a module, as a table of plain text, without processes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from engine.errors import LayoutError
from engine.placement import Part, Placement
from engine.tensor_parallel.resolve import Entry, resolve
from engine.tensor_parallel.styles import Plan

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component that is a number


def describe(plan: Plan, module: nn.Module, size: int = 2) -> str:
    """Return a table of what `parallelize` with `plan` makes of `module` over `size` ranks: a line for each parameter,
    with its whole shape, a rank's, and how it lies there; then the attributes that change. Layers that are alike, whose
    names differ in their first number, share a line.

    Works on a module on the meta device; nothing is sent or changed. Raises UsageError and LayoutError for a plan that
    `parallelize` would refuse.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise LayoutError(f"size={size!r}: the size of the tensor axis is an integer of at least 1")
    resolution = resolve(module, plan, size)
    rows = [(entry.name, *_cells(entry, size)) for entry in resolution.entries]
    head = ("parameter", "whole", f"each of {size}", "lies")
    text = _table([head, *_merged(rows)])
    if resolution.changes:
        changes = [(f"{c.module}.{c.attribute}", str(c.old), str(c.new), "") for c in resolution.changes]
        text += "\n\n" + _table([("attribute", "was", "is", ""), *_merged(changes)])
    return text


def _cells(entry: Entry, size: int) -> tuple[str, str, str]:
    shard = entry.placement.shape(entry.shape, size)
    lies = _lies(entry.placement, size) + (f"; tied to {entry.tied}" if entry.tied else "")
    return _shape(entry.shape), _shape(shard), lies


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(str(each) for each in shape) or "-"


def _lies(placement: Placement, size: int) -> str:
    if placement.dim is None:
        return "whole on each rank" + (", gradients summed" if placement.gradient == "sum" else "")
    text = f"dim {placement.dim} cut"
    if placement.parts:
        text += ": " + " + ".join(_part(part, size) for part in placement.parts)
    return text


def _part(part: Part, size: int) -> str:
    text = str(part.size)
    if part.heads is not None:
        text += f" in {part.heads} head{'s' if part.heads > 1 else ''}"
        if part.slices(size) < size:
            text += f", each on {size // part.slices(size)} ranks, gradients summed"
    missing = part.length(size) * part.slices(size) - part.size
    return f"{text}, padded with {missing}" if missing else text


def _merged(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows with those that differ only in the first number of their names in one line."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for name, *rest in rows:
        found = _NUMBER.search(name)
        pattern = name if found is None else name[: found.start()] + "\0" + name[found.end() :]
        numbers = groups.setdefault((pattern, *rest), [])
        if found is not None:
            numbers.append(int(found.group()))
    return [(pattern.replace("\0", _span(numbers)), *rest) for (pattern, *rest), numbers in groups.items()]


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"[{numbers[0]}-{numbers[-1]}]"
    return f"[{','.join(map(str, numbers))}]"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
