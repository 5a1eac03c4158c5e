"""What the communicator costs over torch's own call: an all-reduce of one float32 element, so that little else counts.

Measured are torch's call, the engine's over each transport (`native`, and what its table chooses), the same with the
ledger on and with checks on, and a group of one rank, which sends nothing. They alternate in one run in blocks of calls
one after another, so that gloo's slow mode falls on all; a call took as long as on the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.table import Table

from benchmarks import collectives_raw as raw
from benchmarks.collectives_case import CHOSEN, REGISTERING, TORCH, Cost, percentile
from benchmarks.collectives_meshes import open_meshes
from benchmarks.collectives_options import Settings
from engine import Communicator, Mesh
from engine import device as devices
from engine.comm.ledger import Ledger

BENCHMARK = "collectives_overhead"
BLOCKS = 30
CALLS = 100
"""Of a block, when --iterations is auto."""
NOTE = (
    "# Times: the slowest rank's, per call. over torch: what a call takes more than torch's own on the same group; a "
    "group of one rank has none.\n# Checks compare every call over the group first, which is a collective of its own."
)


@dataclass
class Variant:
    """One way of making the call, and how long its calls took on this rank."""

    call: str
    watch: str
    n: int
    make: Callable[[], Any]
    comm: Communicator | None = None
    """None: torch's own call."""
    ledger: Ledger | None = None
    """On while it is timed."""
    seconds: list[float] = field(default_factory=list)
    took: str = TORCH
    """The algorithm of the last call; local: a group of one rank."""

    @property
    def transport(self) -> str:
        """How its bytes move."""
        return TORCH if self.comm is None else self.comm.transport


def run(settings: Settings, start: Callable[[], None]) -> tuple[dict[str, Any], list[Cost]]:
    """Measure as one rank of the job. Every rank calls it and gets (more for meta, a row for each variant).

    `start` is called on rank 0 once the job is up.
    """
    with open_meshes(settings, checks=False) as meshes, open_meshes(settings, checks=True) as checked:
        mesh = meshes.get(REGISTERING) or next(iter(meshes.values()))  # over which the ranks meet, as for the cases
        if mesh.rank == 0:
            start()
        made = variants(settings, meshes, checked)
        for each in made:
            timed(each, settings.warmup, mesh)
            each.seconds.clear()
        calls = settings.iterations or BLOCKS * CALLS
        for block in range(BLOCKS):
            share = calls * (block + 1) // BLOCKS - calls * block // BLOCKS
            for each in made if block % 2 else made[::-1]:  # what speeds up or slows down over a block favours nobody
                timed(each, share, mesh)
        rows = costs(made, mesh)
        more = {
            "benchmark": BENCHMARK,
            "layout": str(settings.layout),
            "axis": settings.axis,
            "axis_of_one": settings.overhead,
            "n": rows[0].n,
            "hosts": len(mesh.world.hosts),
            "transports": list(settings.transports),
            "warmup": settings.warmup,
            "iterations": calls,
            "blocks": BLOCKS,
        }
        made.clear()  # torch's group must not outlive the mesh
        return more, rows


def variants(settings: Settings, meshes: Mapping[str, Mesh], checked: Mapping[str, Mesh]) -> list[Variant]:
    """Return what is measured; torch's own call is the first. Meshes by transport, without checks and with."""
    assert settings.overhead is not None
    first = settings.transports[0]
    x = torch.zeros(1, dtype=torch.float32, device=meshes[first].device)  # sums of which stay 0
    group = raw.raw_group(meshes[first], settings.axis)
    found = [Variant(TORCH, "", len(group.ranks), partial(raw.all_reduce, group, x, x, False))]
    several = [(name, settings.axis, ("native", None)) for name in settings.transports]
    for name, axis, algorithms in (*several, (first, settings.overhead, (None,))):
        for watch, over in (("", meshes[name]), ("ledger", meshes[name]), ("checks", checked[name])):
            comm: Communicator = getattr(over, axis)
            ledger = over.ledger if watch == "ledger" else None
            for algorithm in algorithms:
                make = partial(comm.all_reduce, x, algorithm=algorithm)
                found.append(Variant(algorithm or CHOSEN, watch, comm.size, make, comm, ledger))
    return found


def timed(variant: Variant, count: int, mesh: Mesh) -> None:
    """Time so many calls, one after another, from a moment at which all ranks are here."""
    wait = None if mesh.device.type == "cpu" else partial(devices.synchronize, mesh.device)
    mesh.world.barrier()
    with variant.ledger or nullcontext():
        for _ in range(count):
            started = time.perf_counter()
            variant.make()
            if wait is not None:
                wait()
            variant.seconds.append(time.perf_counter() - started)
    if variant.comm is not None and count:
        variant.took = "local" if variant.comm.current is None else variant.comm.current.algorithm


def costs(made: Sequence[Variant], mesh: Mesh) -> list[Cost]:
    """Return the rows: each call as long as on the slowest rank. Every rank calls it."""
    own = torch.tensor([each.seconds for each in made], dtype=devices.exact_dtype(mesh.device)).to(mesh.device)
    slowest = mesh.world.all_reduce(own, "max", algorithm="native").cpu().tolist()
    times = [(min(seconds), percentile(seconds, 50)) for seconds in slowest]
    rows = []
    for each, (t_min, t_p50) in zip(made, times, strict=True):
        over = [(t_min - times[0][0]) * 1e6, (t_p50 - times[0][1]) * 1e6] if each.n > 1 else [None, None]
        backend, kind = devices.backend(mesh.device), mesh.device.type
        head = ("all_reduce", backend, kind, "float32", 4, each.n, each.transport, each.call, each.took, each.watch)
        rows.append(Cost(*head, len(each.seconds), t_min, t_p50, *over))
    return rows


def table(rows: Sequence[Cost]) -> Table:
    """Return the rows as a table, in microseconds."""
    shown = Table(title="all_reduce of one float32 element")
    names = ("ranks", "transport", "call", "with", "t_min us", "t_p50 us", "over torch: min us", "p50 us")
    for number, name in enumerate(names):
        shown.add_column(name, justify="left" if number in (1, 2, 3) else "right", no_wrap=True)
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and (before.transport != row.transport or (row.n > 1 and before.watch != row.watch)):
            shown.add_section()
        call = f"{row.call} ({row.took})" if row.took != row.call else row.call
        over = ["" if row.call == TORCH or us is None else f"{us:+.1f}" for us in (row.over_min_us, row.over_p50_us)]
        shown.add_row(
            str(row.n), row.transport, call, row.watch, f"{row.t_min * 1e6:.1f}", f"{row.t_p50 * 1e6:.1f}", *over
        )
    return shown
