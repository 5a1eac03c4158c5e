"""What the parallel linear layers cost where the tensor axis has one rank: forward and backward beside nn.Linear.

    python -m benchmarks.layer_overhead

Both run in turn in one process on one thread; the ratio is that of medians. Below 1 is noise.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import engine
from benchmarks.machine import summary
from engine import Layout
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear

SIZES = ((64, 128, 400), (256, 256, 200), (512, 512, 40))
"""Rows, hidden size, rounds."""


def measure(rows: int, hidden: int, rounds: int) -> tuple[float, float]:
    """Return seconds of a step of an MLP: plain, parallel."""
    comm = engine.plan_mesh(Layout(), 0).tensor
    plain = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
    parallel = nn.Sequential(
        ColumnParallelLinear(hidden, 4 * hidden, comm), nn.GELU(), RowParallelLinear(4 * hidden, hidden, comm)
    )
    x = torch.randn(rows, hidden, requires_grad=True)
    seconds: dict[nn.Module, list[float]] = {plain: [], parallel: []}
    for number in range(rounds):
        for model in (plain, parallel) if number % 2 else (parallel, plain):
            started = time.perf_counter()
            model(x).sum().backward()
            seconds[model].append(time.perf_counter() - started)
    return statistics.median(seconds[plain]), statistics.median(seconds[parallel])


def main() -> None:
    torch.set_num_threads(1)
    print(summary("cpu"))
    for rows, hidden, rounds in SIZES:
        plain, parallel = measure(rows, hidden, rounds)
        shape = f"{rows} rows, {hidden} -> {4 * hidden} -> {hidden}"
        print(
            f"{shape}: nn.Linear {plain * 1e3:.3f} ms, parallel {parallel * 1e3:.3f} ms, ratio {parallel / plain:.3f}"
        )


if __name__ == "__main__":
    main()
