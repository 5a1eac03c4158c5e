"""Inputs of the tests of a cut vocabulary, their shards, and the loss in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engine

Mesh, Comm = engine.Mesh, engine.Communicator
DOUBLE = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
RANKS = pytest.mark.parametrize("n", [1, 2, 4])


def wave(number: int, *shape: int) -> Tensor:
    """Values between -1 and 1, all different, different for each number."""
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=DOUBLE) * 0.7 + 1.3 * number).view(shape)


def padded(full: Tensor, ranks: int, dim: int, filling: float) -> list[Tensor]:
    """Return the shards of `ranks`, filled up behind the last element."""
    missing = -full.shape[dim] % ranks
    more = full.new_full([missing if d == dim % full.dim() else s for d, s in enumerate(full.shape)], filling)
    return list(torch.cat([full, more], dim).chunk(ranks, dim))


def part(full: Tensor, comm: Comm, dim: int, filling: float = 0.0) -> Tensor:
    """Return this rank's shard as a leaf of its own."""
    return padded(full, comm.size, dim, filling)[comm.rank].clone().requires_grad_()


def plain_loss(logits: Tensor, target: Tensor, smoothing: float = 0.0, z: float = 0.0, ignore: int = -100) -> Tensor:
    rows, ids = logits.flatten(0, -2), target.flatten()
    loss = F.cross_entropy(rows, ids, reduction="none", ignore_index=ignore, label_smoothing=smoothing)
    return (loss + z * rows.logsumexp(-1).square() * (ids != ignore)).view(target.shape)


VOCABULARIES = (10, 8, 5, 3)


def ids_of(vocabulary: int) -> Tensor:
    """Every id, some twice, (2, 8)."""
    return (torch.arange(16).view(2, 8) * 7 + 2) % vocabulary


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01, "ignore_index": 1},
    {"label_smoothing": 0.3, "z_loss": 1e-4},
]


def arguments(options: dict[str, Any]) -> tuple[float, float, int]:
    return options.get("label_smoothing", 0.0), options.get("z_loss", 0.0), options.get("ignore_index", -100)


def targets_of(vocabulary: int, options: dict[str, Any]) -> Tensor:
    target = ids_of(vocabulary)
    target[0, 3] = target[1, 0] = options.get("ignore_index", -100)
    return target
