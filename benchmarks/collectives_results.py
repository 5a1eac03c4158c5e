"""What the collectives benchmark found: as aligned lines, JSON, CSV, a tuning file, and against an older run."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.collectives_case import OPS, SMALL, TORCH, Cost, Row, thresholds
from benchmarks.machine import describe
from engine.comm.choice import write_choice
from engine.errors import UsageError

BENCHMARK = "collectives"
# Only these may be recorded: an environment holds secrets.
ENVIRONMENT = (
    "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "ENGINE_TRANSPORT", "ENGINE_ALGORITHM", "ENGINE_COMM_TUNING",
    "ENGINE_CHECKS", "NCCL_SOCKET_IFNAME", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS",
    "NCCL_BUFFSIZE", "HCCL_SOCKET_IFNAME", "HCCL_ALGO", "HCCL_BUFFSIZE", "HCCL_INTRA_PCIE_ENABLE",
    "HCCL_INTRA_ROCE_ENABLE", "HCCL_OP_EXPANSION_MODE",
)  # fmt: skip
_HEADER = (
    ("op", "dtype", "bytes", "count", "transport", "algorithm", "memory", "place",
     "t_min", "t_p50", "t_p95", "t_p99", "algbw", "busbw", "torch/this", "#wrong"),
    ("", "", "(B)", "(elements)", "", "", "", "", "(us)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "(time)", ""),
)  # fmt: skip
_WIDTHS = (14, 8, 11, 11, 9, 18, 10, 5, 10, 10, 10, 10, 7, 7, 10, 6)
_LEFT = (0, 1, 4, 5, 6, 7)
LEGEND = (
    "# bytes: the whole vector (input of reduce_scatter, result of all_gather). memory: the tensors' own, or "
    "registered, of Communicator.allocate.\n"
    "# place: in, or out of place. Times: the slowest rank's, per call.\n"
    "# GB = 1e9 bytes; algbw = bytes / t, busbw as in nccl-tests; both of t_min up to 1 MiB and of t_p50 above. "
    "torch/this: above 1 is faster than torch's own call."
)


# ---- lines -------------------------------------------------------------------------------------------------------


def header() -> str:
    """Return the two lines above the table."""
    return "\n".join("# " + _line(cells) for cells in _HEADER)


def lines(rows: Sequence[Row]) -> str:
    """Return a line for each row of one case."""
    raw = next((row for row in rows if row.algorithm == TORCH), None)
    return "\n".join("  " + _line(_cells(row, raw)) for row in rows)


def _cells(row: Row, raw: Row | None) -> list[str]:
    times = [f"{value * 1e6:.1f}" for value in (row.t_min, row.t_p50, row.t_p95, row.t_p99)]
    ratio = f"{raw.seconds / row.seconds:.2f}" if raw is not None else "-"
    note = row.note
    if row.t_exposed is not None and row.t_matmul is not None and row.t_together is not None:
        both = f"matmul {row.t_matmul * 1e6:.1f} us, together {row.t_together * 1e6:.1f}"
        note = f"exposed {row.t_exposed * 1e6:.1f} us ({both}){'; ' if note else ''}{note}"
    how = [row.transport, row.algorithm, row.memory, "in" if row.in_place else "out"]
    cells = [row.op, row.dtype, str(row.bytes), str(row.count), *how, *times]
    cells += [f"{row.algbw_gbs:.3f}", f"{row.busbw_gbs:.3f}", ratio, "-" if row.wrong is None else str(row.wrong)]
    return [*cells, note]


def _line(cells: Sequence[str]) -> str:
    shown = [
        text.ljust(width) if number in _LEFT else text.rjust(width)
        for number, (text, width) in enumerate(zip(cells, _WIDTHS, strict=False))
    ]
    return "  ".join([*shown, *cells[len(_WIDTHS) :]]).rstrip()


# ---- files -------------------------------------------------------------------------------------------------------


def meta(command: str, device: str, **more: Any) -> dict[str, Any]:
    """Return what a result says about its run: versions, hardware, command, named parts of the environment."""
    return {
        "benchmark": BENCHMARK,
        "date": date.today().isoformat(),
        "command": command,
        **describe(device),
        "environment": environment(os.environ),
        **more,
    }


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that may be recorded."""
    return {name: given[name] for name in ENVIRONMENT if name in given}


def save_json(path: Path, meta: Mapping[str, Any], rows: Sequence[Row] | Sequence[Cost], **more: Any) -> None:
    """Write `{"meta": ..., "rows": [...], **more}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "rows": [row.to_dict() for row in rows], **more}, indent=1) + "\n")


def save_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the same rows under a line of names; what is null in JSON is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row.to_dict())))
        writer.writeheader()
        writer.writerows(row.to_dict() for row in rows)


def read(path: Path) -> tuple[Row, ...]:
    """Read the rows that `save_json` wrote. Raises UsageError for a file that is missing or something else."""
    try:
        document = json.loads(path.read_text())
        if document["meta"]["benchmark"] != BENCHMARK:
            raise ValueError(f"it is a result of {document['meta']['benchmark']!r}")
        return tuple(_row(each) for each in document["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no result of this benchmark: {error!r}") from error


def _row(values: Mapping[str, Any]) -> Row:
    row = Row(**values)
    sizes = [] if OPS[row.op].empty else [row.bytes, row.count]
    numbers = [row.n, *sizes, row.t_min, row.t_p50]
    if not all(isinstance(value, (int, float)) and value > 0 for value in numbers):
        raise ValueError(f"row {dict(values)} has no sizes and times above 0")
    return row


# ---- what follows from rows --------------------------------------------------------------------------------------


def _key(row: Row) -> tuple[object, ...]:
    names = ("op", "backend", "transport", "algorithm", "device", "dtype", "n", "bytes", "in_place", "memory")
    return tuple(getattr(row, name) for name in names)


def slower(old: Sequence[Row], new: Sequence[Row], tolerance: float) -> tuple[int, list[str]]:
    """Compare what both runs measured: t_min up to 1 MiB, t_p50 above.

    Returns how many rows were compared, and a line for each that takes more than 1 + tolerance times as long now.
    """
    before = {_key(row): row for row in old}
    found = []
    pairs = [(before[_key(row)], row) for row in new if _key(row) in before]
    for earlier, row in pairs:
        if row.seconds > earlier.seconds * (1 + tolerance):
            found.append(
                f"{row.op} {row.way}: {row.dtype} n={row.n} {row.bytes} B {'in' if row.in_place else 'out of'} "
                f"place: {'t_min' if row.bytes <= SMALL else 't_p50'} {earlier.seconds * 1e6:.1f} -> "
                f"{row.seconds * 1e6:.1f} us, {row.seconds / earlier.seconds:.2f}x"
            )
    return len(pairs), found


def save_tuning(path: Path, meta: Mapping[str, Any], rows: Sequence[Row], hosts: int) -> None:
    """Write the fastest algorithm of each operation and size as the engine's tuning file."""
    times: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        if row.algorithm != TORCH:
            times.setdefault(row.op, {}).setdefault(row.bytes, {})[row.algorithm] = row.seconds
    table = {(op, rows[0].n, hosts): thresholds(each) for op, each in times.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_choice(path, table, meta)
