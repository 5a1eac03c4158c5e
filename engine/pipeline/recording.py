"""Records when a rank's computations began and ended, and puts the ranks' clocks in line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.comm.mesh import Mesh
from engine.comm.rendezvous import this_host
from engine.device import live_memory, mark, seconds_between, synchronize
from engine.errors import UsageError
from engine.pipeline.executor import Around
from engine.pipeline.measured import Computed, Measured, Step
from engine.pipeline.schedule import Compute, Stages


class Recording:
    """The training steps of one `with step.record() as recording:`."""

    def __init__(self, mesh: Mesh, schedule: str, stages: Stages, microbatches: int) -> None:
        """schedule: what it is called. stages, microbatches: what it is of."""
        self._mesh, self._schedule, self._stages, self._microbatches = mesh, schedule, stages, microbatches
        self._steps: list[tuple[float, tuple[Computed, ...]]] = []

    @contextmanager
    def step(self, around: Around) -> Iterator[Around]:
        """Record one step, whose computations run inside what this gives; `around` is entered inside that.

        Every rank of the pipeline axis must call it: they meet first, and times count from there. A step that fails is
        not kept. On an accelerator events are recorded in its current stream, so nothing is waited for before the end.
        """
        device = self._mesh.device
        taken: list[tuple[Compute, tuple[Any, Any], tuple[int | None, int | None]]] = []

        @contextmanager
        def recorded(action: Compute) -> Iterator[None]:
            held, start = live_memory(device), mark(device)
            with around(action):
                yield
            taken.append((action, (start, mark(device)), (held, live_memory(device))))

        synchronize(device)
        self._mesh.pipeline.barrier()
        met, zero, before = time.perf_counter(), mark(device), live_memory(device)
        yield recorded
        synchronize(device)
        computed = []
        for action, (start, end), (first, last) in taken:
            held = None if before is None or first is None or last is None else (first - before, last - before)
            computed.append(Computed(action, seconds_between(zero, start), seconds_between(zero, end), held))
        self._steps.append((met, tuple(computed)))

    def gather(self) -> Measured:
        """Return the steps recorded so far, of all ranks of this pipeline.

        Every rank of the pipeline axis must call it. Ranks of one machine have one clock; on several, what the ranks'
        leaving a barrier differs by is an error of the times. Raises UsageError on every rank where no step was
        recorded, or not as many on each.
        """
        comm = self._mesh.pipeline
        every = [comm.broadcast_object((this_host(), self._steps), rank) for rank in range(comm.size)]
        counts = [len(steps) for _, steps in every]
        if max(counts) == 0:
            raise UsageError("nothing is recorded: train at least one step inside `with step.record()`")
        if len(set(counts)) > 1:
            raise UsageError(f"the pipeline's ranks recorded {counts} steps: record the same ones on every rank")
        one_clock = len({host for host, _ in every}) == 1
        steps: list[Step] = []
        for number in range(counts[0]):
            met = [recorded[number][0] for _, recorded in every]
            late = [each - min(met) if one_clock else 0.0 for each in met]
            ranks = (_shifted(recorded[number][1], by) for (_, recorded), by in zip(every, late, strict=True))
            steps.append(tuple(ranks))
        return Measured(self._schedule, self._stages, self._microbatches, tuple(steps))

    def save(self, path: str | Path) -> None:
        """Write the steps recorded so far as JSON: the first rank does, those of its pipeline. `python -m
        engine.pipeline.show --measured` draws them.

        Every rank of the mesh must call it. Raises UsageError as `gather`, and OSError on the first rank.
        """
        measured = self.gather()
        if self._mesh.rank == 0:
            measured.save(Path(path))


def _shifted(computed: tuple[Computed, ...], by: float) -> tuple[Computed, ...]:
    return tuple(
        Computed(each.action, round(each.start + by, 9), round(each.end + by, 9), each.held) for each in computed
    )
