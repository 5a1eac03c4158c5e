"""With `checks=True` ranks compare values where shapes tell nothing: a part for a whole, and rows of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import engine
from engine import LayerSpec, Layout
from engine.errors import EngineError
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


# ---- rows ------------------------------------------------------------------------------------------------------------


def sample(mesh: Mesh, by_data_rank: bool) -> tuple[list[list[int]], str]:
    """Return the rows of two epochs from torch's sampler, and what TrainStep says of the first batch."""
    size, rank = (mesh.data.size, mesh.data.rank) if by_data_rank else (mesh.world.size, mesh.world.rank)
    rows = torch.arange(8)
    sampler = DistributedSampler(rows, num_replicas=size, rank=rank, shuffle=True, seed=mesh.seed)
    loader = DataLoader(rows, batch_size=8 // size, sampler=sampler)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        (batch,) = loader
        epochs.append(batch.tolist())
    specs = [LayerSpec(nn.Linear, 1, 1, dtype=DOUBLE) for _ in range(2)]
    model = engine.PipelineModel(specs, mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, lambda y, t: ((y - t).square().sum(), t.numel()), mesh)
    x = torch.tensor(epochs[0], dtype=DOUBLE)[:, None]
    try:
        step(x, x)
    except EngineError as error:
        return epochs, str(error)
    return epochs, ""


@pytest.mark.parametrize("layout", [Layout(data=2, tensor=2), Layout(data=2, pipeline=2)], ids=str)
def test_b27_a_sampler_by_data_rank_gives_the_rows_of_a_data_rank_to_all_its_ranks(
    world: World, layout: Layout
) -> None:
    """And one by global rank, which trains on rows that do not belong together, is refused."""
    found = world.run(layout, sample, True, checks=True)
    of_data = {layout.coordinate(rank).data: rows for rank, (rows, _) in enumerate(found)}
    for rank, (rows, error) in enumerate(found):
        assert rows == of_data[layout.coordinate(rank).data]
        assert error == ""
    for epoch in range(2):
        assert sorted(of_data[0][epoch] + of_data[1][epoch]) == list(range(8))
    assert of_data[0][0] != of_data[0][1], "shuffled anew in each epoch"
    for _, error in world.run(layout, sample, False, checks=True):
        axis = "tensor" if layout.tensor > 1 else "pipeline"
        assert "the batch given to TrainStep, which all tensor and pipeline ranks share, differs" in error
        assert f"over axis '{axis}'" in error
