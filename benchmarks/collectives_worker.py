"""One rank of the collectives benchmark: measures every case, its algorithms in turn.

Before each timed call the ranks meet and refill what the last one changed; a call took as long as on the slowest
rank. The algorithms of a case alternate in rounds, so that a machine's slow moment does not fall on one of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import engine
from benchmarks import collectives_raw as raw
from benchmarks.collectives_case import (
    CHOSEN,
    SMALL,
    TORCH,
    Case,
    Row,
    bandwidths,
    checked,
    iterations_for,
    percentile,
)  # fmt: skip
from benchmarks.collectives_operations import Buffers, make_buffers
from benchmarks.collectives_options import Settings
from engine import Mesh
from engine import device as devices

_ROUNDS = 4
_COPIES = 5
_COPY_BYTES = 64 << 20  # more than a processor caches
_MATMUL = {"cpu": 192}
"""Side of the matrices of --overlap."""

Report = Callable[[list[Row]], None]
Start = Callable[[], None]
Timed = Callable[[], Any]


def run(settings: Settings, start: Start, report: Report) -> tuple[dict[str, Any], list[Row]]:
    """Measure all cases as one rank of the job. Every rank calls it and gets (more for meta, all rows).

    `start` is called on rank 0 once the job is up, `report` with the rows of each case.
    """
    with engine.init(settings.layout, device=settings.device) as mesh:
        if mesh.rank == 0:
            start()
        bench = Bench(settings, mesh)
        found = [row for case in settings.cases for row in bench.measure(case, report)]
        comm = getattr(mesh, settings.axis)
        more = {
            "layout": str(settings.layout),
            "axis": settings.axis,
            "n": comm.size,
            "hosts": len(comm.hosts),
            "warmup": settings.warmup,
            "iterations": settings.iterations or "auto",
            "memory_copy_gbs": bench.copy_bandwidth(),
        }
        bench.close()
        return more, found


class Bench:
    """Measures on one axis of an open mesh. All ranks of the mesh make the same calls."""

    def __init__(self, settings: Settings, mesh: Mesh) -> None:
        """Made inside the mesh's block."""
        self._settings = settings
        self._mesh = mesh
        self._comm = getattr(mesh, settings.axis)
        self._raw = raw.raw_group(mesh, settings.axis) if self._comm.size > 1 else None
        self._operations = settings.operations

    def close(self) -> None:
        """Let go of torch's group, which must not outlive the mesh."""
        self._raw = None

    def measure(self, case: Case, report: Report) -> list[Row]:
        """Return a row for each algorithm of a case."""
        settings, comm = self._settings, self._comm
        buffers = make_buffers(case, comm.size, comm.rank, self._mesh.device, settings.check)
        calls = {name: self._call(case, name, buffers) for name in case.algorithms}
        wrong = [self._wrong(call, buffers) for call in calls.values()]
        took = self._took(calls[CHOSEN]) if CHOSEN in calls else ""
        warm = [[self._timed(call, buffers) for _ in range(settings.warmup)] for call in calls.values()]
        counts = [settings.iterations or iterations_for(percentile(each, 50)) for each in self._slowest(warm)]
        times: list[list[float]] = [[] for _ in calls]
        for number in range(_ROUNDS):
            for call, count, own in zip(calls.values(), counts, times, strict=True):
                share = count * (number + 1) // _ROUNDS - count * number // _ROUNDS
                own += [self._timed(call, buffers) for _ in range(share)]
        times = self._slowest(times)
        wrong = [max(before, self._wrong(call, buffers)) for before, call in zip(wrong, calls.values(), strict=True)]
        rows = []
        for name, seconds, bad in zip(calls, times, wrong, strict=True):
            more = self._overlap(case, name, buffers, percentile(seconds, 50)) if settings.overlap else {}
            rows.append(self._row(case, name, seconds, bad, took if name == CHOSEN else "", more))
        if self._mesh.rank == 0:
            report(rows)
        return rows

    def copy_bandwidth(self) -> float:
        """Return the memory copy of one process in GB/s: rank 0's best time, the others asleep; 0 on other ranks."""
        best = math.inf
        self._mesh.world.barrier()
        if self._mesh.rank == 0:
            source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._mesh.device)
            target = torch.ones_like(source)
            best = min(self._clock(partial(target.copy_, source)) for _ in range(_COPIES))
        self._mesh.world.barrier()
        return _COPY_BYTES / best / 1e9

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _call(self, case: Case, name: str, buffers: Buffers, async_op: bool = False) -> Timed:
        """Return one call of an algorithm; when asynchronous it gives what `wait` is called with."""
        x, out = buffers.x, buffers.out
        if name != TORCH:
            algorithm = None if name == CHOSEN else name
            call = partial(self._operations[case.op], self._comm, x, out, algorithm, async_op)
            return (lambda: call().wait) if async_op else call
        assert self._raw is not None
        start = partial(raw.RAW[case.op], self._raw, x, out, async_op)
        if async_op:
            return lambda: partial(raw.wait, start())
        return lambda: raw.wait(start())

    def _took(self, call: Timed) -> str:
        """Return the algorithm that the engine takes for a call, by making it."""
        call()
        return "native" if self._comm.current is None else self._comm.current.algorithm

    def _timed(self, call: Timed, buffers: Buffers) -> float:
        """Return this rank's seconds of one call."""
        buffers.refill()
        self._mesh.world.barrier()
        return self._clock(call)

    def _clock(self, call: Timed) -> float:
        devices.synchronize(self._mesh.device)
        started = time.perf_counter()
        call()
        devices.synchronize(self._mesh.device)
        return time.perf_counter() - started

    def _wrong(self, call: Timed, buffers: Buffers) -> int:
        """Return how many elements are wrong, over all ranks, after one call into an output that held none of them."""
        buffers.poison()
        self._mesh.world.barrier()
        call()
        devices.synchronize(self._mesh.device)
        return self._total(buffers.wrong())

    def _slowest(self, own: list[list[float]]) -> list[list[float]]:
        """Return each time's largest over all ranks."""
        flat = torch.tensor([value for each in own for value in each], dtype=devices.exact_dtype(self._mesh.device))
        flat = self._mesh.world.all_reduce(flat.to(self._mesh.device), "max", algorithm="native").cpu()
        return [part.tolist() for part in flat.split([len(each) for each in own])]

    def _total(self, wrong: int) -> int:
        box = torch.tensor([float(wrong)], dtype=devices.exact_dtype(self._mesh.device), device=self._mesh.device)
        return int(self._mesh.world.all_reduce(box, algorithm="native").item())

    def _row(
        self, case: Case, name: str, seconds: Sequence[float], wrong: int, took: str, more: dict[str, float]
    ) -> Row:
        comm, kind = self._comm, self._mesh.device.type
        t_min, t_p50 = min(seconds), percentile(seconds, 50)
        algbw, busbw = bandwidths(case.op, case.bytes, t_min if case.bytes <= SMALL else t_p50, comm.size)
        compared, why = checked(case, comm.size, self._settings.check)
        note = "; ".join(filter(None, (f"took {took}" if took else "", why)))
        return Row(
            case.op, devices.backend(self._mesh.device), "torch" if name == TORCH else comm.transport, name, kind,
            case.dtype, comm.size, case.bytes, case.count, case.in_place, t_min, t_p50, percentile(seconds, 95),
            percentile(seconds, 99), algbw, busbw, wrong if compared else None, note, **more,
        )  # fmt: skip

    def _overlap(self, case: Case, name: str, buffers: Buffers, seconds: float) -> dict[str, float]:
        """Put about as much matmul beside an operation as it takes alone. Medians of the slowest rank."""
        side = _MATMUL.get(self._mesh.device.type, 2048)
        a = torch.rand(side, side, device=self._mesh.device)
        product = torch.empty_like(a)
        torch.mm(a, a, out=product)
        once = min(self._clock(partial(torch.mm, a, a, out=product)) for _ in range(_COPIES))
        repeat = math.ceil(self._slowest([[seconds / once]])[0][0])
        start = self._call(case, name, buffers, async_op=True)

        def matmul() -> None:
            for _ in range(repeat):
                torch.mm(a, a, out=product)

        def together() -> None:
            wait = start()
            matmul()
            wait()

        count = self._settings.iterations or max(8, iterations_for(seconds) // 4)
        pairs = [(self._timed(matmul, buffers), self._timed(together, buffers)) for _ in range(count)]
        alone, both = (
            percentile(each, 50) for each in self._slowest([list(each) for each in zip(*pairs, strict=True)])
        )
        return {"t_matmul": alone, "t_together": both, "t_exposed": both - alone}
