"""Times one training step of the example's GPT on several layouts, on this CPU: `python -m benchmarks.train_step`.

The same model, global batch and optimizer on every layout, each as a torchrun job of its own, in rounds that
alternate between the layouts; medians over all rounds. It shows what a layout costs on one host, not how the engine
compares with others. On a machine with fewer cores than processes, ratios mean overhead, not scaling.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import engine
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss

MODEL = GPTConfig(layers=4, hidden=128, heads=4, sequence=128, vocabulary=256)
BATCH = 16
WARM_UP = 3
LAYOUTS = (
    engine.Layout(),
    engine.Layout(data=2),
    engine.Layout(tensor=2),
    engine.Layout(pipeline=2),
    engine.Layout(data=2, pipeline=2, tensor=2),
)


def measure(layout: engine.Layout, steps: int, out: Path) -> None:
    """Train `steps` steps as one rank of a job; rank 0 writes the seconds of each, after the warm-up, and the last
    loss.
    """
    with engine.init(layout, device="cpu") as mesh:
        model = engine.PipelineModel(gpt_layers(MODEL, mesh.tensor), mesh)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=1e-3, fused=True)
        step = engine.TrainStep(model, optimizer, next_token_loss(mesh.tensor), mesh, microbatches=4)
        generator = torch.Generator().manual_seed(0)
        rows = BATCH // mesh.data.size
        own = slice(mesh.data.rank * rows, (mesh.data.rank + 1) * rows)
        seconds = []
        for _ in range(WARM_UP + steps):
            ids = torch.randint(MODEL.vocabulary, (BATCH, MODEL.sequence + 1), generator=generator)[own]
            mesh.world.barrier()
            started = time.perf_counter()
            loss = step(ids[:, :-1], ids[:, 1:]).loss.item()
            seconds.append(time.perf_counter() - started)
        if mesh.rank == 0:
            out.write_text(json.dumps({"seconds": seconds[WARM_UP:], "loss": loss}))


def run_job(layout: engine.Layout, steps: int, folder: Path) -> tuple[list[float], float]:
    """Return the seconds and the last loss of one torchrun job. Raises CalledProcessError when it fails."""
    out = folder / "result.json"
    sizes = f"{layout.data},{layout.pipeline},{layout.tensor}"
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.world_size)]
    work = ["-m", "benchmarks.train_step", "--worker", sizes, "--steps", str(steps), "--out", str(out)]
    subprocess.run([sys.executable, "-m", *launch, *work], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result = json.loads(out.read_text())
    return result["seconds"], result["loss"]


def main() -> None:
    """Measure all layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all layouts (default: %(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        data, pipeline, tensor = map(int, arguments.worker.split(","))
        measure(engine.Layout(data=data, pipeline=pipeline, tensor=tensor), arguments.steps, arguments.out)
        return
    seconds: dict[engine.Layout, list[float]] = {layout: [] for layout in LAYOUTS}
    losses: dict[engine.Layout, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for layout in LAYOUTS:
                print(f"round {number + 1} of {arguments.rounds}: {layout}", flush=True)
                times, losses[layout] = run_job(layout, arguments.steps, Path(folder))
                seconds[layout] += times
    show(seconds, losses)


def show(seconds: dict[engine.Layout, list[float]], losses: dict[engine.Layout, float]) -> None:
    """Print one row for each layout."""
    table = Table(
        title=f"Training step: {MODEL.layers} layers, hidden {MODEL.hidden}, batch {BATCH} x {MODEL.sequence}"
    )
    for name in ("layout", "processes", "median s", "min", "max", "tokens/s", "to one process", "last loss"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    alone = statistics.median(seconds[LAYOUTS[0]])
    for layout, times in seconds.items():
        median = statistics.median(times)
        row = [str(layout), str(layout.world_size), f"{median:.3f}", f"{min(times):.3f}", f"{max(times):.3f}"]
        speed = f"{BATCH * MODEL.sequence / median:,.0f}"
        table.add_row(*row, speed, f"{median / alone:.2f}x", f"{losses[layout]:.5f}")
    Console().print(table)
    print(f"torch {torch.__version__}, gloo, {os.cpu_count()} cores, one thread in each process")


if __name__ == "__main__":
    main()
