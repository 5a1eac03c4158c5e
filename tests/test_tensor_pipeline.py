"""Adapters on cut layers and the head fused with the loss, in the stages of a pipeline, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout
from engine.placement import Part, replicated
from engine.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    lora,
    vocab_parallel_linear_cross_entropy,
)
from tests.test_tensor_linear import ADAMW, DOUBLE, TO_1E10
from tests.test_tensor_lora import PlainLoRA, filled
from tests.world import World

Mesh, Comm = engine.Mesh, engine.Communicator
VOCABULARY, HIDDEN, STEPS = 11, 8, 3


class Table(nn.Module):
    def __init__(self, comm: Comm | None, dim: int | None) -> None:
        super().__init__()
        self.table: nn.Module = nn.Embedding(VOCABULARY, HIDDEN, dtype=DOUBLE)
        if comm is not None:
            self.table = VocabParallelEmbedding(VOCABULARY, HIDDEN, comm, dtype=DOUBLE, sequence_dim=dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Adapted(nn.Module):
    def __init__(self, comm: Comm | None, dim: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=DOUBLE)
        if comm is None:
            self.up: nn.Module = PlainLoRA(nn.Linear(HIDDEN, 12, dtype=DOUBLE), 3, 6.0)
            self.down: nn.Module = PlainLoRA(nn.Linear(12, HIDDEN, dtype=DOUBLE), 2, 1.0)
            return
        if dim is not None:
            replicated(self.norm, gradient="sum")
        self.up = lora(ColumnParallelLinear(HIDDEN, 12, comm, dtype=DOUBLE, sequence_dim=dim), 3, 6.0)
        self.down = lora(RowParallelLinear(12, HIDDEN, comm, dtype=DOUBLE, sequence_dim=dim), 2, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Last(nn.Module):
    """Returns hidden states; the loss takes the head's weight."""

    def __init__(self, comm: Comm | None, dim: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=DOUBLE)
        self.head: nn.Module = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=DOUBLE)
        if comm is not None:
            if dim is not None:
                replicated(self.norm, gradient="sum")
            parts = [Part(VOCABULARY, padded=True)]
            self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, comm, parts=parts, bias=False, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(48).view(8, 6) * 7 + step) % VOCABULARY
    targets = ids.roll(-1, 1)
    targets[step, 2:] = -100
    return ids, targets


def train(mesh: Mesh, dim: int | None, tied: bool, schedule: str) -> dict[str, Any]:
    comm = mesh.tensor
    tie = ({"words": "table.weight"}, {"words": "head.weight"}) if tied else ({}, {})
    blocks = [LayerSpec(Adapted, comm, dim) for _ in range(2)]
    specs = [LayerSpec(Table, comm, dim, tied=tie[0]), *blocks, LayerSpec(Last, comm, dim, tied=tie[1])]
    model = engine.PipelineModel(specs, mesh, balance="uniform")
    start = filled(engine.full_state_dict(model, mesh))
    engine.load_full_state_dict(model, mesh, start)

    def loss(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weight = model.get_parameter("3.head.weight")
        rows = vocab_parallel_linear_cross_entropy(
            hidden, weight, target, comm, vocabulary=VOCABULARY, z_loss=0.01, chunk_rows=5, sequence_dim=dim
        )
        return rows.sum(), (target != -100).sum()

    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, **ADAMW)
    step = engine.TrainStep(model, optimizer, loss, mesh, microbatches=2, schedule=schedule, clip_grad_norm=0.5)
    numbers, gradients = [], {}
    finish = optimizer.finish_gradients

    def finish_and_look(*args: Any) -> Tensor:
        norm = finish(*args)
        gradients.update({} if gradients else optimizer.full_gradients())
        return norm

    optimizer.finish_gradients = finish_and_look  # type: ignore[method-assign]
    for number in range(STEPS):
        result = step(*(x.chunk(mesh.data.size)[mesh.data.rank] for x in batch(number)))
        numbers += [result.loss.item(), result.grad_norm.item()]
    return {"start": start, "numbers": numbers, "gradients": gradients, "end": engine.full_state_dict(model, mesh)}


def train_plainly(start: dict[str, Tensor], tied: bool) -> dict[str, Any]:
    table, last = Table(None, None), Last(None, None)
    model = nn.Sequential(table, Adapted(None, None), Adapted(None, None), last)
    model.load_state_dict(start)
    if tied:
        last.head.weight = table.table.weight
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **ADAMW)
    numbers, gradients = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        ids, target = batch(number)
        logits = last.head(model(ids)).flatten(0, 1)
        kept = target.flatten() != -100
        loss = F.cross_entropy(logits, target.flatten()) + 0.01 * logits.logsumexp(-1).square()[kept].mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained.values(), 0.5)
        numbers += [loss.item(), norm.item()]
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items()}
        optimizer.step()
    return {"numbers": numbers, "gradients": gradients, "end": model.state_dict()}


@pytest.mark.parametrize(
    ("layout", "dim", "tied", "schedule"),
    [
        (Layout(pipeline=2, tensor=2), None, False, "1f1b"),
        (Layout(pipeline=2, tensor=2), 1, True, "1f1b"),
        (Layout(pipeline=2, tensor=2), 1, True, "zero_bubble"),
        (Layout(data=2, pipeline=2, tensor=2), 1, False, "gpipe"),
    ],
    ids=str,
)
def test_adapters_and_the_fused_head_train_in_a_pipeline_as_in_one_process(
    world: World, layout: Layout, dim: int | None, tied: bool, schedule: str
) -> None:
    results = world.run(layout, train, dim, tied, schedule)
    wanted = train_plainly(results[0]["start"], tied)
    assert all(bool(value.any()) for name, value in wanted["gradients"].items() if name.endswith((".a", ".b")))
    for got in results:
        assert got["numbers"] == pytest.approx(wanted["numbers"], rel=1e-10)
        assert set(got["gradients"]) == set(wanted["gradients"]), "what is frozen has none"
        for name, value in wanted["gradients"].items():
            torch.testing.assert_close(got["gradients"][name], value, **TO_1E10, msg=name)
        for name, value in wanted["end"].items():
            torch.testing.assert_close(got["end"][name], value, **TO_1E10, msg=name)
            assert torch.equal(value, got["start"][name]) == (".base." in name), name
