"""The picture of the collectives benchmark: for each operation, time and bus bandwidth against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives_case import CHOSEN, MEMORIES, TORCH, Row, Way, size_name

# Told apart by the colour-blind too (Okabe and Ito); torch's own call is black, the engine's use of it blue. An
# algorithm that is drawn over several transports or memories has its colour once, the others take what is left.
_COLOURS = {
    TORCH: "black",
    "native": "#0072B2",
    "chosen": "#CC79A7",
    "pairwise": "#D55E00",
    "ring": "#009E73",
    "doubling": "#BCBD22",
    "halving_doubling": "#E69F00",
    "hierarchical": "#56B4E9",
    "tree": "#8C564B",
    "scatter_all_gather": "#7F3C8D",
}
_SPARE = (
    "#17BECF", "#882255", "#332288", "#EE8866", "#44BB99", "#4477AA", "#FFAABB", "#66AA55", "#AAAA00",
    "#99DDFF", "#BBCC33", "#AA3377", "#777777",
)  # fmt: skip
_MARKERS = "osv^D*Px"
_COLUMNS = 5
"""Operations side by side; more go below."""


def plot(path: Path, meta: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Draw a column of two panels for each operation, a line for each way, and the memory copy as the limit.

    An operation of no bytes has no place in it; at least one row has some.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = [row for row in rows if row.bytes]
    ops = list(dict.fromkeys(row.op for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    ways = list(dict.fromkeys(row.way for row in rows))
    colours = _colours(ways)
    markers = {dtype: _MARKERS[number % len(_MARKERS)] for number, dtype in enumerate(dtypes)}
    columns = min(_COLUMNS, len(ops))
    blocks = -(-len(ops) // columns)
    figure = Figure(figsize=(max(9.0, 4.0 * columns), 1.2 + 7.0 * blocks), layout="constrained")
    panels = figure.subplots(2 * blocks, columns, squeeze=False)
    for panel in panels.flatten():
        panel.set_visible(False)
    for number, op in enumerate(ops):
        block, column = divmod(number, columns)
        times, speeds = panels[2 * block][column], panels[2 * block + 1][column]
        here = [row for row in rows if row.op == op]
        _draw(times, speeds, here, colours, markers, meta["memory_copy_gbs"])
        _scales(times, speeds, rows, meta["memory_copy_gbs"])
        times.set_title(op, fontsize=13, fontweight="bold")
        if column == 0:
            times.set_ylabel("time of a call, slowest rank (µs)\nminimum up to 1 MiB, median above")
            speeds.set_ylabel("bus bandwidth (GB/s, 1e9 bytes)")
    handles = [Line2D([], [], color=colours[way], label=_label(way), linewidth=_width(way) + 0.5) for way in ways]
    if len(dtypes) > 1:
        handles += [Line2D([], [], color="grey", marker=markers[each], linestyle="", label=each) for each in dtypes]
    styles = {row.in_place: "--" if row.in_place and _both(rows, row.op) else "-" for row in rows}
    if "--" in styles.values():
        handles.append(Line2D([], [], color="grey", linestyle="--", label="in place, where an operation has both"))
    handles.append(
        Line2D(
            [],
            [],
            color="red",
            linestyle=":",
            linewidth=2,
            label=f"limit: memory copy, {meta['memory_copy_gbs']:.1f} GB/s",
        )
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(2, int(figure.get_figwidth() / 3.6)), fontsize=10
    )
    figure.suptitle(_title(meta, rows), fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw(
    times: Any,
    speeds: Any,
    rows: Sequence[Row],
    colours: Mapping[Way, str],
    markers: Mapping[str, str],
    limit: float,
) -> None:
    """Fill the two panels of one operation."""
    for key in dict.fromkeys((row.way, row.dtype, row.in_place) for row in rows):
        own = sorted((row for row in rows if (row.way, row.dtype, row.in_place) == key), key=lambda row: row.bytes)
        style = {
            "color": colours[key[0]],
            "marker": markers[key[1]],
            "linestyle": "--" if key[2] and _both(rows, own[0].op) else "-",
            "markersize": 4,
            "linewidth": _width(key[0]),
            "alpha": 0.6 if key[2] and _both(rows, own[0].op) else 1.0,
        }
        sizes = [row.bytes for row in own]
        times.plot(sizes, [row.seconds * 1e6 for row in own], **style)
        shown = [(row.bytes, row.busbw_gbs) for row in own if row.busbw_gbs > 0]
        speeds.plot([size for size, _ in shown], [speed for _, speed in shown], **style)
    ends = [min(row.bytes for row in rows), max(row.bytes for row in rows)]
    times.plot(ends, [size / limit / 1e3 for size in ends], color="red", linestyle=":", linewidth=2)
    speeds.plot(ends, [limit, limit], color="red", linestyle=":", linewidth=2)


def _scales(times: Any, speeds: Any, rows: Sequence[Row], limit: float) -> None:
    """Give the two panels of one operation the axes that all have, so that they can be compared."""
    sizes = sorted({row.bytes for row in rows})
    ticks = [1 << power for power in range(sizes[0].bit_length() - 1, sizes[-1].bit_length())]
    ticks = ticks[:: -(-len(ticks) // 6)]
    for panel in (times, speeds):
        panel.set_visible(True)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
        panel.set_xticks(ticks, [size_name(size) for size in ticks])
        panel.grid(which="major", color="#DDDDDD", linewidth=0.7)
        panel.set_axisbelow(True)
    seconds = [row.seconds * 1e6 for row in rows]
    times.set_ylim(min(seconds) / 2, max(seconds) * 2)
    speed = [row.busbw_gbs for row in rows if row.busbw_gbs > 0]
    speeds.set_ylim(min([*speed, limit]) / 2, max([*speed, limit]) * 2)
    speeds.set_xlabel("bytes of the whole vector (K = 1024)")


def _title(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return what was measured, and where. The backend is that of torch's groups: shared memory has none."""
    dtypes = dict.fromkeys(row.dtype for row in rows)
    one = f", {next(iter(dtypes))}" if len(dtypes) == 1 else ""
    transports = dict.fromkeys(f"torch ({row.backend})" if row.transport == TORCH else row.transport for row in rows)
    over = " and ".join(transports)
    return (
        f"Collectives over {rows[0].n} ranks{one}: {over}, {meta['hardware']}, {meta['cores']} cores\n"
        f"torch {meta['versions']['torch']}, {meta['date']}"
    )


def _both(rows: Sequence[Row], op: str) -> bool:
    return len({row.in_place for row in rows if row.op == op}) == 2


def _colours(ways: Sequence[Way]) -> dict[Way, str]:
    """Return a colour for each way, no two alike as far as there are colours."""
    found: dict[Way, str] = {}
    for way in ways:
        own = _COLOURS.get(way.algorithm)
        if own is not None and own not in found.values():
            found[way] = own
    every = [*_COLOURS.values(), *_SPARE]
    left = [colour for colour in every if colour not in found.values()] or every
    rest = [way for way in ways if way not in found]
    return found | {way: left[number % len(left)] for number, way in enumerate(rest)}


def _width(way: Way) -> float:
    return 1.5 if way.memory == MEMORIES[0] else 2.5


def _label(way: Way) -> str:
    if way.algorithm == TORCH:
        return "torch's own call, without the engine"
    name = "the engine's choice" if way.algorithm == CHOSEN else way.algorithm
    return f"{name} over {way.transport}{'' if way.memory == MEMORIES[0] else f', {way.memory}'}"
