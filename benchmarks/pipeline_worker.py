"""One rank of a job of the pipeline benchmark: `torchrun -m benchmarks.pipeline_worker SYSTEM WORK OUT`.

What `benchmarks.worker` measures, and what each rank held; of this engine also some steps that are recorded, after the
timed ones. The system `overhead` measures the executor alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from benchmarks import worker
from benchmarks.peers import Step
from benchmarks.silence import silenced
from benchmarks.work import Work
from engine.device import live_memory
from engine.pipeline.batches import Microbatch
from engine.pipeline.schedule import Compute

OVERHEAD = "overhead"
TIMELINE = "timeline.json"
"""What this engine's job writes beside its result."""
RECORDED = 3
"""Steps of a job that are recorded."""
_RUNS = 200


def main(system: str, work: Work, out: Path) -> None:
    """Run one job as one rank; rank 0 writes what was measured as JSON."""
    torch.set_num_threads(1)
    before = live_memory(torch.device("cpu")) if work.device == "cpu" else 0

    def measured(work: Work, step: Step, device: torch.device) -> dict[str, Any]:
        return {**worker.measure(work, step, device), "ranks_mib": held_mib(work, step, device, before or 0)}

    if system not in (worker.ENGINE, OVERHEAD):
        worker.run_peer(system, work, measured, out)
        return
    with engine.init(work.layout, device=work.device, seed=work.seed) as mesh:
        if system == OVERHEAD:
            worker.write({"seconds": overhead(work, mesh)}, out)
            return
        train = worker.engine_trainer(work, mesh)
        step = worker.stepping(work, mesh, train)
        result = measured(work, step, mesh.device)
        with train.record() as recording:
            for ids in worker.batches(work, RECORDED):
                step(ids.to(mesh.device))
        recording.save(out.with_name(TIMELINE))
        worker.write(result, out)


def held_mib(work: Work, step: Step, device: torch.device, before: int) -> list[float]:
    """Return by rank the most that was in use during one more step, in MiB more than `before` bytes; empty where it is
    not known.

    Unlike the resident set, it does not keep what earlier steps held.
    """

    def read() -> float:
        return float(live_memory(device) or 0)

    with worker.sampling(read, 0.0002) as samples:
        worker.timed(step, next(worker.batches(work, 1)).to(device), device)
    every = worker.gather(max(samples))
    return [(most - before) / 2**20 for most in every] if all(every) else []


class Scale(nn.Module):
    """A layer of almost no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times a number, x (1,)."""
        return x * self.weight


@dataclass(frozen=True)
class Trivial:
    """A pipeline of stages of almost no work."""

    run: Callable[[], None]
    """This rank's program, by the executor."""
    plain: Callable[[], None]
    """The same forwards and backwards in a loop, in the same order."""
    actions: int
    """How many these are."""
    optimizer: engine.zero.ZeroOptimizer
    """Of the pipeline's parameters; its gradients are what both make."""


def overhead(work: Work, mesh: engine.Mesh) -> float:
    """Return what the executor takes for one computation, in seconds: its run of this rank's program of stages of
    almost no work, all messages removed, less the same forwards and backwards in a plain loop. The most of any rank;
    the medians of many runs, one rank after the other.
    """
    trivial = trivial_pipeline(work, mesh)
    trivial.run()  # the shapes are learnt
    own = 0.0
    for rank in range(mesh.world.size):
        worker.barrier()
        if rank == mesh.rank:
            with silenced(mesh):
                own = (_median(trivial.run) - _median(trivial.plain)) / trivial.actions
    return float(max(worker.gather(own)))


def trivial_pipeline(work: Work, mesh: engine.Mesh) -> Trivial:
    """Build it, for the work's schedule and microbatches."""
    stages = work.stages
    specs = [engine.LayerSpec(Scale, cost=1.0) for _ in range(stages.count)]
    model = engine.PipelineModel(specs, mesh, chunks=stages.chunks, placement=stages.placement)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    options: dict[str, Any] = {"microbatches": work.microbatches, "schedule": work.schedule}
    train = engine.TrainStep(model, optimizer, lambda output, _: (output.sum(), 1), mesh, **options)
    executor, program, parts = train._executor, train._training, model.parts()
    batches = [Microbatch((torch.ones(1),), {}, None, "the same") for _ in range(work.microbatches)]
    actions = [each for each in program if isinstance(each, Compute)]

    def plain() -> None:
        outputs: dict[tuple[int, int], Tensor] = {}
        for each in actions:
            key = (each.stage, each.microbatch)
            if each.kind == "forward":
                outputs[key] = parts[each.stage](torch.ones(1, requires_grad=each.stage > 0))
            elif each.kind != "weight_gradient":
                torch.autograd.backward([outputs.pop(key)], [torch.ones(1)])

    def run() -> None:
        executor.run(program, batches, lambda output, _: output, weight_gradients=train._weight_gradients)

    return Trivial(run, plain, len(actions), optimizer)


def _median(run: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main(sys.argv[1], Work.from_dict(json.loads(sys.argv[2])), Path(sys.argv[3]))
