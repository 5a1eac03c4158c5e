"""With `checks=True` the tensor ranks compare values where shapes cannot tell a part from a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from engine.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from tests.test_tensor_linear import DOUBLE, TIGHT, Block, here, outcome, wave
from tests.world import World, refusals

Mesh = engine.Mesh
TARGET = torch.tensor([[1, 5, 2, 0], [3, 3, 1, 4]])


def mistakes(mesh: Mesh) -> list[str]:
    comm, rank = mesh.tensor, mesh.tensor.rank
    whole = wave(1, 2, 4, 8)
    part = whole.chunk(comm.size, 1)[rank]
    column, parted = (ColumnParallelLinear(8, 8, comm, dtype=DOUBLE, sequence_dim=dim) for dim in (None, 1))
    weight = wave(3, 8, 8).chunk(comm.size)[rank]

    def fused(hidden: Tensor, target: Tensor) -> Any:
        return vocab_parallel_linear_cross_entropy(hidden, weight, target, comm)

    return refusals(
        [
            lambda: vocab_parallel_cross_entropy(whole, TARGET, comm),
            lambda: parted(whole),
            lambda: column(part),
            lambda: column(part / part.norm()),
            lambda: fused(part, TARGET[:, : part.shape[1]]),
        ]
    )


@pytest.mark.parametrize("n", [2, 4])
def test_a_whole_for_a_part_and_a_part_for_a_whole_are_refused_on_every_rank(world: World, n: int) -> None:
    for got in world.run(Layout(tensor=n), mistakes, checks=True):
        assert got[:2] == [
            f"vocab_parallel_cross_entropy: logits: (2, 4, 8) is equal on all {n} ranks of axis 'tensor', where each "
            f"holds its part along dim 2: give the shard, as ColumnParallelLinear without gather_output returns it, or "
            f"use F.cross_entropy",
            f"ColumnParallelLinear(sequence_dim=1): its input: (2, 4, 8) is equal on all {n} ranks of axis 'tensor', "
            f"where each holds its part along dim 1: cut the sequence first, as "
            f"VocabParallelEmbedding(sequence_dim=...) does, or leave sequence_dim out",
        ]
        for text, who in zip(
            got[2:], ["ColumnParallelLinear"] * 2 + ["vocab_parallel_linear_cross_entropy"], strict=True
        ):
            assert text.startswith(
                f"{who}: its input: (2, {4 // n}, 8) differs between the ranks of axis 'tensor' (norms"
            )
            assert text.endswith("where each rank has a part of the positions, set sequence_dim")


def right(mesh: Mesh) -> tuple[list[dict[str, Any]], dict[Any, int]]:
    with mesh.ledger:
        found = use_rightly(mesh)
    return found, {key: entry.calls for key, entry in mesh.ledger.entries.items()}


def use_rightly(mesh: Mesh) -> list[dict[str, Any]]:
    """What is right, also where it looks alike: positions or columns that are all equal, values that are no numbers."""
    comm = mesh.tensor
    found = []
    for dim in (None, 1):
        torch.manual_seed(5)
        block, x = Block(comm, dim), here(wave(1, 4, 8, 8), mesh, dim)
        y = block(x)
        y.square().sum().backward()
        found.append(outcome(y, x, block))
        block(torch.ones(4, 8 if dim is None else 8 // comm.size, 8, dtype=DOUBLE))
        table = VocabParallelEmbedding(6, 8, comm, dtype=DOUBLE, sequence_dim=dim)
        head = ColumnParallelLinear(8, 6, comm, dtype=DOUBLE, sequence_dim=dim, bias=False)
        logits = head(table(TARGET))
        vocab_parallel_cross_entropy(logits, TARGET, comm)
        vocab_parallel_cross_entropy(logits * torch.nan, TARGET, comm)
        vocab_parallel_cross_entropy(torch.zeros_like(logits), TARGET, comm)
        vocab_parallel_linear_cross_entropy(table(TARGET), head.weight, TARGET, comm, sequence_dim=dim)
    return found


def test_what_is_right_passes_with_the_same_numbers_sent_and_found(world: World) -> None:
    for checked, unchecked in zip(
        world.run(Layout(tensor=2), right, checks=True), world.run(Layout(tensor=2), right, checks=False), strict=True
    ):
        assert checked[1] == unchecked[1], "what checks send is in no ledger"
        for one, two in zip(checked[0], unchecked[0], strict=True):
            for name, value in two.items():
                torch.testing.assert_close(one[name], value, **TIGHT, msg=name)
