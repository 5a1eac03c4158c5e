"""One rank of a benchmark job: `torchrun -m benchmarks.worker SYSTEM WORK OUT`. Started by `benchmarks.train_step`.

Every system runs in here, under the same clock: all ranks meet, then each times its own step; the step took as long
as the slowest rank. The loss and the memory are taken outside the timed part.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from benchmarks.engine_model import engine_model, engine_names
from benchmarks.peers import SHARED, Step, find_peer, load
from benchmarks.peers.gpt import ADAMW, gpt
from benchmarks.silence import silenced
from benchmarks.work import Work
from engine import device as devices
from engine.errors import UsageError
from examples.gpt.model import next_token_loss

ENGINE = "engine"


def main(system: str, work: Work, out: Path) -> None:
    """Run one job as one rank; rank 0 writes what was measured as JSON."""
    torch.set_num_threads(1)
    if system in (ENGINE, SHARED):
        with engine.init(work.layout, device=work.device, seed=work.seed) as mesh:
            if system == SHARED:
                shared = replace(work, share_parameters=True)
                result = measure(shared, engine_step(shared, mesh), mesh.device)
            else:
                result = run_engine(work, mesh)
            write(result, out)
        return
    run_peer(system, work, measure, out)


def run_peer(
    system: str, work: Work, measured: Callable[[Work, Step, torch.device], dict[str, Any]], out: Path
) -> None:
    """Build a peer's system over torch's default process group, and write what `measured` finds."""
    device = devices.select(work.device, int(os.environ.get("LOCAL_RANK", 0)))
    devices.activate(device)
    with _default_group(device):
        result = measured(work, load(find_peer(system, work).build)(work, device), device)
        write(result, out)
        # A peer whose objects keep the group past its end would abort the process.
        trim()


def run_engine(work: Work, mesh: engine.Mesh) -> dict[str, Any]:
    """Measure this engine, and its bounds."""
    step = engine_step(work, mesh)
    return {**measure(work, step, mesh.device), "bounds": bounds(work, step, mesh)}


def engine_step(work: Work, mesh: engine.Mesh) -> Step:
    """Build this engine's system, with the weights that every other starts from."""
    return stepping(work, mesh, engine_trainer(work, mesh))


def engine_trainer(work: Work, mesh: engine.Mesh) -> engine.TrainStep:
    """Build this engine's trainer."""
    model = engine_model(work, mesh)
    engine.load_full_state_dict(model, mesh, engine_names(gpt(work.model, work.seed).state_dict()))
    options = {"stage": work.stage, "accumulate": work.accumulate, "share_parameters": work.share_parameters, **ADAMW}
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, **options)
    loss = next_token_loss(mesh.tensor)
    return engine.TrainStep(model, optimizer, loss, mesh, microbatches=work.microbatches, schedule=work.schedule)


def stepping(work: Work, mesh: engine.Mesh, train: engine.TrainStep) -> Step:
    """Return the trainer's step over a global batch."""
    first = mesh.data.rank * work.rows

    def step(ids: Tensor) -> Tensor:
        own = ids[first : first + work.rows]
        return train(own[:, :-1], own[:, 1:]).loss

    return step


def measure(work: Work, step: Step, device: torch.device) -> dict[str, Any]:
    """Run the warm-up and the timed steps. Returns the seconds of each timed step (the slowest rank's), the losses of
    all steps, and the most memory that one rank held, in MiB.

    Memory is sampled during one more step, which is not timed: reading it stops the process for a moment.
    """
    trim()
    devices.reset_peak_memory(device)
    seconds, losses, memory = [], [], 0.0
    for ids in batches(work, work.warm_up + work.steps):
        own, loss = timed(step, ids.to(device), device)
        every = gather((own, None if loss is None else float(loss), memory_mib(device)))
        seconds.append(max(each[0] for each in every))
        found = [each[1] for each in every if each[1] is not None]
        if not found:
            raise UsageError("no rank's step returned a loss")
        losses.append(sum(found) / len(found))
        memory = max(memory, *(each[2] for each in every))
    with sampling(lambda: memory_mib(device), 0.002) as samples:
        timed(step, next(batches(work, 1)).to(device), device)
    memory = max(memory, *(each for each in gather(max(samples))))
    return {"seconds": seconds[work.warm_up :], "losses": losses, "memory_mib": memory}


def bounds(work: Work, step: Step, mesh: engine.Mesh) -> dict[str, list[float]]:
    """Time this engine's step without communication, after `measure`.

    alone: one process at a time does its share, the others asleep; of the pipeline's stages the one with the largest
    median. together: all processes at once.
    """
    every = list(batches(work, work.warm_up + work.steps))
    here = mesh.coordinate
    alone = []
    for stage in range(work.layout.pipeline):
        own: list[float] = []
        if (here.pipeline, here.data, here.tensor) == (stage, 0, 0):
            with silenced(mesh):
                own = [timed(step, ids.to(mesh.device), mesh.device, meet=False)[0] for ids in every]
        alone.append(max(gather(own), key=len)[work.warm_up :])
    together = []
    for ids in every:
        barrier()
        with silenced(mesh):
            own_seconds = timed(step, ids.to(mesh.device), mesh.device, meet=False)[0]
        together.append(max(gather(own_seconds)))
    return {"alone": max(alone, key=statistics.median), "together": together[work.warm_up :]}


def batches(work: Work, steps: int) -> Iterator[Tensor]:
    """Yield the same global batches in every job: ids (batch, sequence + 1).

    Two batches in turn, so that the loss falls: a system that trains a part of the model wrongly then shows it.
    """
    generator = torch.Generator().manual_seed(work.seed + 1)
    shape = (work.model.batch, work.model.sequence + 1)
    two = [torch.randint(work.model.vocabulary, shape, generator=generator) for _ in range(2)]
    for number in range(steps):
        yield two[number % 2]


def memory_mib(device: torch.device) -> float:
    """Return what this process holds, in MiB: on an accelerator the allocator's peak, else the proportional set size,
    in which a page that n processes share counts 1/n.
    """
    if device.type != "cpu":
        return devices.peak_memory_mib(device)
    return proportional_set_size(Path("/proc/self/smaps_rollup").read_text()) / 2**20


@contextmanager
def sampling(read: Callable[[], float], pause: float) -> Iterator[list[float]]:
    """Read the memory all through the block, on a thread of its own that sleeps `pause` seconds in between."""
    samples = [read()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(pause):
            samples.append(read())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def proportional_set_size(rollup: str) -> int:
    """Return the bytes of the Pss line of a smaps_rollup file (proc_pid_smaps(5))."""
    line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def timed(step: Step, ids: Tensor, device: torch.device, meet: bool = True) -> tuple[float, Tensor | None]:
    """Return this rank's seconds for one step, and what it returns. meet: all ranks meet before."""
    if meet:
        barrier()
    devices.synchronize(device)
    started = time.perf_counter()
    loss = step(ids)
    devices.synchronize(device)
    return time.perf_counter() - started, loss


def write(result: dict[str, Any], out: Path) -> None:
    """Write a job's result, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        out.write_text(json.dumps(result))


def barrier() -> None:
    """Let all ranks meet."""
    if dist.is_initialized():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Return every rank's value on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def _default_group(device: torch.device) -> Iterator[None]:
    """torch's default process group, as a peer's user would open it; none for one process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    dist.init_process_group(devices.backend(device), **devices.group_arguments(device))
    try:
        yield
    finally:
        dist.destroy_process_group()


def trim() -> None:
    """Drop what is no longer used, and give its memory back to the system."""
    gc.collect()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main(sys.argv[1], Work.from_dict(json.loads(sys.argv[2])), Path(sys.argv[3]))
