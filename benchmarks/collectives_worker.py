"""One rank of the collectives benchmark: measures every case, its ways (transport, algorithm, memory) in turn.

Before each timed call the ranks refill what the last one changed and meet; a call took as long as on the slowest rank.
The ways of a case alternate in rounds, every second one backwards, so that a machine's slow moment does not fall on one
of them, nor what one leaves behind always on the same next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import collectives_raw as raw
from benchmarks.collectives_case import (
    CHOSEN,
    MEMORIES,
    OPS,
    REGISTERING,
    SMALL,
    TORCH,
    Case,
    Row,
    Way,
    bandwidths,
    checked,
    iterations_for,
    percentile,
)  # fmt: skip
from benchmarks.collectives_meshes import open_meshes
from benchmarks.collectives_operations import Buffers, in_memory, make_buffers
from benchmarks.collectives_options import Settings
from engine import Communicator, Mesh
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
    with open_meshes(settings) as meshes:
        bench = Bench(settings, meshes)
        if bench.rank == 0:
            start()
        found = [row for case in settings.cases for row in bench.measure(case, report)]
        more = {
            "layout": str(settings.layout),
            "axis": settings.axis,
            "n": settings.n,
            "hosts": bench.hosts,
            "transports": list(settings.transports),
            "warmup": settings.warmup,
            "iterations": settings.iterations or "auto",
            "memory_copy_gbs": bench.copy_bandwidth(),
        }
        bench.close()
        return more, found


class Bench:
    """Measures on one axis of open meshes, one for each transport. All their ranks make the same calls."""

    def __init__(self, settings: Settings, meshes: Mapping[str, Mesh]) -> None:
        """Made inside the meshes' block."""
        self._settings = settings
        # Where the ranks meet before a call, whatever its transport: shared memory lets them go closest together.
        self._mesh = meshes.get(REGISTERING) or next(iter(meshes.values()))
        self._comms: dict[str, Communicator] = {name: getattr(mesh, settings.axis) for name, mesh in meshes.items()}
        comm: Communicator = getattr(self._mesh, settings.axis)
        self._place = comm.rank
        self.rank, self.hosts = self._mesh.rank, len(comm.hosts)
        self._raw = raw.raw_group(self._mesh, settings.axis) if comm.size > 1 else None
        self._operations = settings.operations

    def close(self) -> None:
        """Let go of torch's group, which must not outlive the mesh."""
        self._raw = None

    def measure(self, case: Case, report: Report) -> list[Row]:
        """Return a row for each way of a case."""
        settings = self._settings
        by_memory = self._buffers(case)
        buffers = [by_memory[way.memory] for way in case.ways]
        calls = [self._call(case, way, own) for way, own in zip(case.ways, buffers, strict=True)]
        pairs = list(zip(calls, buffers, strict=True))
        wrong = [self._wrong(*pair) for pair in pairs]
        took = [self._took(way, call) for way, call in zip(case.ways, calls, strict=True)]
        warm = [[self._timed(*pair) for _ in range(settings.warmup)] for pair in pairs]
        counts = [settings.iterations or iterations_for(percentile(each, 50)) for each in self._slowest(warm)]
        times: list[list[float]] = [[] for _ in pairs]
        for number in range(_ROUNDS):
            turns = list(zip(pairs, counts, times, strict=True))
            for pair, count, own in turns[::-1] if number % 2 else turns:
                share = count * (number + 1) // _ROUNDS - count * number // _ROUNDS
                own += [self._timed(*pair) for _ in range(share)]
        times = self._slowest(times)
        wrong = [max(before, self._wrong(*pair)) for before, pair in zip(wrong, pairs, strict=True)]
        rows = []
        for way, own_buffers, seconds, bad, name in zip(case.ways, buffers, times, wrong, took, strict=True):
            beside = settings.overlap and not OPS[case.op].empty
            more = self._overlap(case, way, own_buffers, percentile(seconds, 50)) if beside else {}
            rows.append(self._row(case, way, seconds, bad, name, more))
        if self.rank == 0:
            report(rows)
        return rows

    def copy_bandwidth(self) -> float:
        """Return the memory copy of one process in GB/s: rank 0's best time, the others asleep; 0 on other ranks."""
        best = math.inf
        self._mesh.world.barrier()
        if self.rank == 0:
            source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._mesh.device)
            target = torch.ones_like(source)
            best = min(self._clock(partial(target.copy_, source)) for _ in range(_COPIES))
        self._mesh.world.barrier()
        return _COPY_BYTES / best / 1e9

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _buffers(self, case: Case) -> dict[str, Buffers]:
        """Return this rank's buffers in each memory; what they must hold is kept once."""
        private = make_buffers(case, self._settings.n, self._place, self._mesh.device, self._settings.check)
        comms = {way.memory: self._comms[way.transport] for way in case.ways if way.algorithm != TORCH}
        found = {memory: in_memory(private, memory, case, comm) for memory, comm in comms.items()}
        return {**found, MEMORIES[0]: private}

    def _call(self, case: Case, way: Way, buffers: Buffers, async_op: bool = False) -> Timed:
        """Return one call; when asynchronous it gives what `wait` is called with."""
        x, out = buffers.x, buffers.out
        if way.algorithm != TORCH:
            algorithm = None if way.algorithm == CHOSEN else way.algorithm
            call = partial(self._operations[case.op], self._comms[way.transport], x, out, algorithm, async_op)
            return (lambda: call().wait) if async_op else call
        assert self._raw is not None
        start = partial(raw.RAW[case.op], self._raw, x, out, async_op)
        if async_op:
            return lambda: partial(raw.wait, start())
        return lambda: raw.wait(start())

    def _took(self, way: Way, call: Timed) -> str:
        """Return the algorithm that the engine takes by its own choice, by making the call; else nothing."""
        if way.algorithm != CHOSEN:
            return ""
        call()
        current = self._comms[way.transport].current
        return "native" if current is None else current.algorithm

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
        self, case: Case, way: Way, seconds: Sequence[float], wrong: int, took: str, more: dict[str, float]
    ) -> Row:
        n, device = self._settings.n, self._mesh.device
        transport = way.transport if way.algorithm == TORCH else self._comms[way.transport].transport
        t_min, t_p50 = min(seconds), percentile(seconds, 50)
        algbw, busbw = bandwidths(case.op, case.bytes, t_min if case.bytes <= SMALL else t_p50, n)
        compared, why = checked(case, n, self._settings.check)
        note = "; ".join(filter(None, (f"took {took}" if took else "", why)))
        return Row(
            case.op, devices.backend(device), transport, way.algorithm, device.type, case.dtype, n, case.bytes,
            case.count, case.in_place, t_min, t_p50, percentile(seconds, 95), percentile(seconds, 99), algbw, busbw,
            wrong if compared else None, note, way.memory, **more,
        )  # fmt: skip

    def _overlap(self, case: Case, way: Way, buffers: Buffers, seconds: float) -> dict[str, float]:
        """Put about as much matmul beside an operation as it takes alone. Medians of the slowest rank."""
        side = _MATMUL.get(self._mesh.device.type, 2048)
        a = torch.rand(side, side, device=self._mesh.device)
        product = torch.empty_like(a)
        torch.mm(a, a, out=product)
        once = min(self._clock(partial(torch.mm, a, a, out=product)) for _ in range(_COPIES))
        repeat = math.ceil(self._slowest([[seconds / once]])[0][0])
        start = self._call(case, way, buffers, async_op=True)

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
