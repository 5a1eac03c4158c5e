"""Memory and time of a language model's head and loss, apart and fused, forward and backward, in one process on a CPU.

    python -m benchmarks.head_memory --tokens 4096 --vocabulary 131072 --hidden 1024

Memory is what the kernel counts: how much the process grew at most, with the gradients of weight and hidden states,
which any way must hold in the end. Each way has a process of its own, one after the other. Linux only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import engine
from benchmarks.machine import summary
from engine import Layout
from engine.tensor_parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

WAYS = ("apart", "fused")


def measure(way: str, tokens: int, vocabulary: int, hidden_size: int) -> tuple[float, float]:
    """Return the MiB by which memory grew at most, and seconds, in float32."""
    comm = engine.plan_mesh(Layout(), 0).tensor
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).requires_grad_()
    target = torch.randint(vocabulary, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts afresh at what there is
    before, started = _status("VmRSS"), time.perf_counter()
    if way == "fused":
        loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, comm)
    else:
        loss = vocab_parallel_cross_entropy(F.linear(hidden, weight), target, comm)
    loss.mean().backward()
    seconds = time.perf_counter() - started
    return _status("VmHWM") - before, seconds


def _status(name: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("vocabulary", 131072), ("hidden", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(summary("cpu"))
    gradients = 4 * given.hidden * (given.tokens + given.vocabulary) / 2**20
    print(f"{given.tokens} tokens, vocabulary {given.vocabulary}, hidden {given.hidden}, float32")
    found = []
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measure, (way, given.tokens, given.vocabulary, given.hidden)))
        mib, seconds = found[-1]
        print(f"{way:>5}: {mib:8.0f} MiB, of them {gradients:.0f} of gradients, {seconds:6.1f} s")
    print(f"fused / apart: memory {found[1][0] / found[0][0]:.3f}, time {found[1][1] / found[0][1]:.2f}")


if __name__ == "__main__":
    main()
