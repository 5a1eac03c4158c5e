"""Which algorithm a call takes: a table of thresholds, measured or built in. Pure, but for reading the file.

The file is what `python -m benchmarks.collectives --tune --out FILE` writes:

    {"version": 1, "rows": [{"op": "all_reduce", "size": 4, "hosts": 1, "up_to": 65536, "algorithm": "native"}, ...]}

A row holds for payloads of at most `up_to` bytes (null: any) that no row with a smaller one covers. A group takes the
rows of its own size and number of hosts; where there are none, the built-in rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.comm.algorithms import PLANS
from engine.errors import UsageError, did_you_mean

VERSION = 1
NATIVE = "native"
OPERATIONS = (*PLANS, "all_to_all")
_ANY = float("inf")
_FEW = 8  # ranks up to which a message to each costs less than rounds
_ONE_ROUND = {("reduce_scatter", "pairwise"), ("all_gather", "pairwise"), ("broadcast", "pairwise")}

Thresholds = tuple[tuple[float, str], ...]
"""(largest payload in bytes, algorithm), ascending; the last is for any."""
Key = tuple[str, int, int]
"""(operation, ranks, hosts)."""


def algorithms_of(operation: str) -> tuple[str, ...]:
    """Return the names that `algorithm=` takes for an operation."""
    return (NATIVE, *PLANS.get(operation, ()))


@dataclass(frozen=True)
class Choice:
    """How algorithms are chosen. Equal on every rank."""

    table: Mapping[Key, Thresholds] = field(default_factory=dict)
    """Measured thresholds."""
    forced: str | None = None
    """Take this one wherever an operation has it."""

    def __post_init__(self) -> None:
        known = sorted({name for operation in OPERATIONS for name in algorithms_of(operation)})
        if self.forced is not None and self.forced not in known:
            hint = did_you_mean(self.forced, known)
            raise UsageError(f"algorithm {self.forced!r} is unknown{hint}: choose {', '.join(known)}")

    def thresholds(self, operation: str, size: int, hosts: int, backend: str, *, asynchronous: bool) -> Thresholds:
        """Return what one group does for an operation.

        NCCL and HCCL keep to their own calls unless forced. An asynchronous call takes an algorithm of one round, which
        flies while the caller computes, or the backend's: the rounds after the first run in `wait`.
        """
        if self.forced is not None and self.forced in algorithms_of(operation):
            return ((_ANY, self.forced),)
        if backend != "gloo":
            return ((_ANY, NATIVE),)
        found = self.table.get((operation, size, hosts)) or default_thresholds(operation, size, hosts)
        if not asynchronous:
            return found
        return tuple((limit, name if (operation, name) in _ONE_ROUND else NATIVE) for limit, name in found)


def default_thresholds(operation: str, size: int, hosts: int) -> Thresholds:
    """Return the built-in rules for gloo, from measurements with 2, 3, 4 and 6 ranks on one host (docs/collectives.md).

    gloo's own calls are slow to start, since another thread runs them: short vectors go as few rounds of messages. Its
    reduce-scatter is an all-reduce and a slice, its all-gather copies: pairwise messages do neither.
    """
    few = size <= _FEW
    if operation in ("reduce_scatter", "all_gather"):
        return ((_ANY, "pairwise" if hosts == 1 else "hierarchical"),)
    if operation == "all_reduce":
        large = "hierarchical" if hosts > 1 else "pairwise" if few else NATIVE
        short = 1 << 16 if not few else 1 << 20 if size == 2 else 3 << 18
        between = few and size > 2 and hosts == 1
        middle: Thresholds = ((1 << 21, "pairwise"),) if between else ()
        return ((short, "doubling"), *middle, (1 << 25, NATIVE if hosts == 1 else large), (_ANY, large))
    if operation == "broadcast" and size > 2:
        return ((1 << 19, "pairwise"), (_ANY, "tree")) if few else ((1 << 23, NATIVE), (_ANY, "tree"))
    return ((_ANY, {"broadcast": "pairwise", "reduce": "tree"}.get(operation, NATIVE)),)


def read_choice(path: str | Path, forced: str | None = None) -> Choice:
    """Read a tuning file. Raises UsageError, naming the file, when it is missing, damaged or of another version."""
    try:
        document = json.loads(Path(path).read_text())
        version = document["version"]
        if not isinstance(document.get("rows"), list) or isinstance(version, bool):
            raise TypeError("version is a number, rows a list")
        table = _table(document["rows"]) if version == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise UsageError(
            f"tuning file {path} cannot be used: {error!r}: make it anew with "
            f"`python -m benchmarks.collectives --tune --out {path}`, or leave it out to take the built-in rules"
        ) from error
    if version != VERSION:
        raise UsageError(
            f"tuning file {path} is of version {version!r}, this engine reads {VERSION}: make it anew with "
            f"`python -m benchmarks.collectives --tune --out {path}`, or leave it out to take the built-in rules"
        )
    return Choice(table, forced)


def write_choice(path: str | Path, table: Mapping[Key, Thresholds], meta: Mapping[str, Any]) -> None:
    """Write a tuning file."""
    rows = [
        {"op": op, "size": size, "hosts": hosts, "up_to": None if limit == _ANY else int(limit), "algorithm": name}
        for (op, size, hosts), thresholds in table.items()
        for limit, name in thresholds
    ]
    Path(path).write_text(json.dumps({"version": VERSION, "meta": dict(meta), "rows": rows}, indent=1) + "\n")


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[Key, Thresholds]:
    found: dict[Key, list[tuple[float, str]]] = {}
    for key, threshold in map(_row, rows):
        found.setdefault(key, []).append(threshold)
    for key, thresholds in found.items():
        thresholds.sort()
        if len({limit for limit, _ in thresholds}) < len(thresholds) or thresholds[0][0] < 0:
            raise ValueError(f"the rows of {key} have an up_to twice, or below 0")
        if thresholds[-1][0] != _ANY:
            raise ValueError(f"no row of {key} holds for any size (up_to: null)")
    return {key: tuple(thresholds) for key, thresholds in found.items()}


def _row(row: Mapping[str, Any]) -> tuple[Key, tuple[float, str]]:
    operation, name = row["op"], row["algorithm"]
    if operation not in OPERATIONS or name not in algorithms_of(operation):
        raise ValueError(f"no algorithm {name!r} for {operation!r}")
    if not all(isinstance(row[name], int) for name in ("size", "hosts")):
        raise ValueError(f"size and hosts are whole numbers, not {row['size']!r} and {row['hosts']!r}")
    limit = _ANY if row["up_to"] is None else int(row["up_to"])
    return (operation, int(row["size"]), int(row["hosts"])), (limit, name)
