"""Dropout masks that do not depend on the layout: whole training runs beside plain PyTorch.

The masks of the reference are those of `tests.plain_philox`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engine
from engine import LayerSpec, Layout
from engine.comm.autograd import (
    all_gather_reduce_scatter,
    all_gather_split,
    all_reduce_identity,
    identity_all_reduce,
    reduce_scatter_all_gather,
    split_all_gather,
)
from engine.errors import EngineError
from engine.placement import replicated
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.random import Dropout, Streams
from tests.plain_philox import mask_of
from tests.world import World, WorldError

DOUBLE = torch.float64

HIDDEN, HEADS, WIDE, SEQUENCE, P, STEPS = 12, 4, 20, 8, 0.3, 3


class Block(nn.Module):
    """Attention and MLP, with dropout on the attention's weights (heads split), inside the MLP (features split) and
    on both branches (replicated, or with `sequence` split along the positions).
    """

    def __init__(self, streams: Streams, sequence: bool = False, recompute: bool | None = None):
        super().__init__()
        comm = self.comm = streams.comm
        self.sequence, self.recompute = sequence, recompute
        self.norm = nn.LayerNorm(HIDDEN, dtype=DOUBLE)
        if sequence:
            replicated(self.norm, gradient="sum")
        self.query, self.key, self.value = (
            ColumnParallelLinear(HIDDEN, HIDDEN, comm, bias=False, dtype=DOUBLE) for _ in range(3)
        )
        self.out = RowParallelLinear(HIDDEN, HIDDEN, comm, bias=False, dtype=DOUBLE)
        self.up = ColumnParallelLinear(HIDDEN, WIDE, comm, dtype=DOUBLE)
        self.down = RowParallelLinear(WIDE, HIDDEN, comm, bias=False, dtype=DOUBLE)
        self.attention_drop = Dropout(P, streams, split_dim=1)
        self.wide_drop = Dropout(P, streams, split_dim=-1)
        along = 1 if sequence else None
        self.branch_drop, self.last_drop = Dropout(P, streams, split_dim=along), Dropout(P, streams, split_dim=along)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute)

    def spread(self, x: Tensor) -> Tensor:
        return all_gather_reduce_scatter(x, self.comm, 1) if self.sequence else identity_all_reduce(x, self.comm)

    def combine(self, x: Tensor) -> Tensor:
        return reduce_scatter_all_gather(x, self.comm, 1) if self.sequence else all_reduce_identity(x, self.comm)

    def body(self, x: Tensor) -> Tensor:
        y = self.spread(self.norm(x))
        parts = (F.linear(y, layer.weight) for layer in (self.query, self.key, self.value))
        query, key, value = (z.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for z in parts)
        weights = self.attention_drop((query @ key.transpose(-2, -1) / 2).softmax(-1))  # (B, heads / T, S, S)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        x = x + self.branch_drop(self.combine(F.linear(mixed, self.out.weight)))
        wide = self.wide_drop(F.gelu(F.linear(self.spread(x), self.up.weight, self.up.bias)))
        return x + self.last_drop(self.combine(F.linear(wide, self.down.weight)))


class First(nn.Module):
    """Makes the activations need a gradient, without which torch's reentrant checkpoint has none."""

    def __init__(self, comm: engine.Communicator, sequence: bool):
        super().__init__()
        self.comm, self.sequence = comm, sequence
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return split_all_gather(y, self.comm, 1) if self.sequence else y


class Last(nn.Module):
    def __init__(self, comm: engine.Communicator, sequence: bool):
        super().__init__()
        self.comm, self.sequence = comm, sequence

    def forward(self, x: Tensor) -> Tensor:
        return all_gather_split(x, self.comm, 1) if self.sequence else x


class PlainFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class PlainBlock(nn.Module):
    """The same in plain PyTorch; `masks(name)` gives the mask of a whole activation."""

    def __init__(self, number: int, masks: Any):
        super().__init__()
        self.number, self.masks = number, masks
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN, bias=False)

    def drop(self, name: str, x: Tensor) -> Tensor:
        return x * self.masks(f"{self.number}.{name}", tuple(x.shape)) / (1 - P)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query, key, value = parts
        weights = self.drop("attention_drop", (query @ key.transpose(-2, -1) / 2).softmax(-1))
        x = x + self.drop("branch_drop", self.out((weights @ value).transpose(1, 2).flatten(2)))
        return x + self.drop("last_drop", self.down(self.drop("wide_drop", F.gelu(self.up(x)))))


@dataclass(frozen=True)
class Case:
    layout: Layout
    microbatches: int = 1
    schedule: str = "1f1b"
    sequence: bool = False
    recompute: bool | None = None
    """use_reentrant of torch's checkpoint."""

    def __str__(self) -> str:
        size = f"d{self.layout.data}p{self.layout.pipeline}t{self.layout.tensor}"
        again = {None: "", True: "-reentrant", False: "-recompute"}[self.recompute]
        schedule = "" if self.schedule == "1f1b" else f"-{self.schedule}"
        return f"{size}-m{self.microbatches}{schedule}{'-sequence' * self.sequence}{again}"


CASES = [
    Case(Layout()),
    Case(Layout(), 2, recompute=False),
    Case(Layout(tensor=2)),
    Case(Layout(tensor=2), 2, sequence=True),
    Case(Layout(tensor=2), recompute=False),
    Case(Layout(tensor=4), 2),
    Case(Layout(tensor=4), sequence=True, recompute=False),
    Case(Layout(data=2), 2),
    Case(Layout(data=4), recompute=True),
    Case(Layout(pipeline=2)),
    Case(Layout(pipeline=2), 2),
    Case(Layout(pipeline=2), 4, "gpipe", recompute=False),
    Case(Layout(pipeline=2), 2, "interleaved", recompute=False),
    Case(Layout(data=2, tensor=2), 2, sequence=True),
    Case(Layout(pipeline=2, tensor=2), 2, "gpipe"),
    Case(Layout(pipeline=2, tensor=2), 4, sequence=True, recompute=True),
    Case(Layout(data=2, pipeline=2, tensor=2), 2, recompute=False),
]


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.numel()


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    size = (rows, SEQUENCE, HIDDEN)
    wave = torch.arange(math.prod(size), dtype=DOUBLE).view(size)
    return torch.sin(wave * 0.7 + step), torch.cos(wave * 0.3 - step)


def build(mesh: engine.Mesh, case: Case, mode: str, sgd: bool = False) -> engine.TrainStep:
    streams = Streams(mesh.tensor, seed=mesh.seed, mode=mode)
    blocks = [LayerSpec(Block, streams, case.sequence, case.recompute) for _ in range(2)]
    first, last = (LayerSpec(layer, mesh.tensor, case.sequence) for layer in (First, Last))
    chunks = 2 if case.schedule == "interleaved" else 1
    model = engine.PipelineModel([first, *blocks, last], mesh, balance="uniform", chunks=chunks)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD if sgd else torch.optim.AdamW, mesh, lr=1e-2)
    options = {"microbatches": case.microbatches, "schedule": case.schedule}
    return engine.TrainStep(model, optimizer, squared, mesh, **options)


def train(mesh: engine.Mesh, case: Case, mode: str, cuts: tuple[int, ...] = ()) -> dict[str, Any]:
    """Three steps. cuts: where the global rows are cut between the data ranks; equal parts by default."""
    step = build(mesh, case, mode)
    result: dict[str, Any] = {"start": engine.full_state_dict(step.model, mesh), "numbers": [], "gradients": []}
    finish = step.optimizer.finish_gradients

    def finish_and_look(*args: Any) -> Tensor:
        norm = finish(*args)
        result["gradients"].append(step.optimizer.full_gradients())
        return norm

    step.optimizer.finish_gradients = finish_and_look
    for number in range(STEPS):
        inputs, targets = (x.tensor_split(cuts or mesh.data.size)[mesh.data.rank] for x in batch(number))
        done = step(inputs, targets)
        result["numbers"].append((done.loss.item(), done.grad_norm.item()))
    result["weights"] = engine.full_state_dict(step.model, mesh)
    return result


def train_plainly(start: dict[str, Tensor], masks: dict[Any, Tensor]) -> dict[str, Any]:
    step = 0

    def mask(name: str, shape: tuple[int, ...]) -> Tensor:
        if (name, step) not in masks:
            masks[name, step] = mask_of(name, step, shape, P, 0)
        return masks[name, step]

    model = nn.Sequential(PlainFirst(), PlainBlock(1, mask), PlainBlock(2, mask)).double()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result: dict[str, Any] = {"numbers": [], "gradients": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        result["numbers"].append((loss.item(), norm.item()))
        result["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    result["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
    return result


def worst(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest difference, relative to the largest magnitude of the tensor it is in."""
    pairs = [(torch.tensor(got["numbers"], dtype=DOUBLE), torch.tensor(wanted["numbers"], dtype=DOUBLE))]
    for mine, theirs in zip(
        [*got["gradients"], got["weights"]], [*wanted["gradients"], wanted["weights"]], strict=True
    ):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in mine]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.fixture(scope="module")
def masks() -> dict[Any, Tensor]:
    """Those of the whole run by (name, step), made when first asked for."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_with_dropout_is_the_same_on_every_layout(world: World, case: Case, masks: dict[Any, Tensor]) -> None:
    results = world.run(case.layout, train, case, "reproducible")
    wanted = train_plainly(results[0]["start"], masks)
    for result in results:
        assert worst(result, wanted) < 1e-10


def test_data_ranks_with_different_numbers_of_rows_have_the_masks_of_their_rows(
    world: World, masks: dict[Any, Tensor]
) -> None:
    results = world.run(Layout(data=3), train, Case(Layout(data=3), 2), "reproducible", (2, 6))
    wanted = train_plainly(results[0]["start"], masks)
    assert worst(results[0], wanted) < 1e-10


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(pipeline=2, tensor=2)], ids=str)
def test_plain_streams_are_the_same_with_recompute(world: World, layout: Layout) -> None:
    kept, again, reentrant = (
        world.run(layout, train, Case(layout, 2, recompute=recompute), "plain")[0] for recompute in (None, False, True)
    )
    assert worst(again, kept) < 1e-14
    assert worst(reentrant, kept) < 1e-14
    assert not torch.equal(kept["weights"]["1.up.weight"], kept["start"]["1.up.weight"])


class Watched(nn.Module):
    """A dropout that keeps what it dropped."""

    def __init__(self, streams: Streams, **options: Any):
        super().__init__()
        self.linear = nn.Linear(100, 100, dtype=DOUBLE)
        self.drop = Dropout(0.5, streams, **options)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x).abs() + 1)
        if self.training:
            self.masks.append(y.detach() != 0)
        return y


def watch(mesh: engine.Mesh, rows: tuple[int, ...]) -> list[Tensor]:
    streams = Streams(mesh.tensor, seed=mesh.seed)
    model = Watched(streams)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1e-3)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2)
    x = torch.ones(rows[mesh.data.rank], 100, dtype=DOUBLE)
    for _ in range(2):
        step(x, x)
        step.evaluate(x, x)
        step.predict(x)
    return model.masks


def test_plain_masks_differ_between_steps_microbatches_and_data_ranks(world: World) -> None:
    masks = [mask for found in world.run(Layout(data=2), watch, (8, 4)) for mask in found]
    assert [len(mask) for mask in masks] == [4] * 4 + [2] * 4
    for one, two in itertools.combinations(masks, 2):
        least = min(len(one), len(two))
        assert 0.35 < (one[:least] == two[:least]).double().mean() < 0.65


def resume(mesh: engine.Mesh, mode: str) -> tuple[Tensor, Tensor]:
    case = Case(mesh.layout, 2)
    whole, first, second = (build(mesh, case, mode, sgd=True) for _ in range(3))
    for number in range(STEPS):
        whole(*batch(number))
    for number in range(2):
        first(*batch(number))
    state = engine.full_state_dict(first.model, mesh)
    engine.load_full_state_dict(second.model, mesh, state, optimizer=second.optimizer)
    second.steps = first.steps
    second(*batch(2))
    return tuple(engine.full_state_dict(step.model, mesh)["1.down.weight"] for step in (whole, second))


@pytest.mark.parametrize("mode", ["plain", "reproducible"])
def test_the_number_of_the_step_is_all_that_a_resumed_run_needs(world: World, mode: str) -> None:
    for whole, resumed in world.run(Layout(tensor=2), resume, mode):
        assert torch.equal(whole, resumed)


# ---- misuse ----------------------------------------------------------------------------------------------------------


def differ(mesh: engine.Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Dropout(0.1, Streams(mesh.tensor, seed=mesh.rank)))
    engine.TrainStep(model, engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh), squared, mesh)


def call_twice(mesh: engine.Mesh) -> str:
    shared = Dropout(0.1, Streams(mesh.tensor, seed=mesh.seed))
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    step = engine.TrainStep(model, engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh), squared, mesh)
    try:
        step(torch.ones(2, 4), torch.ones(2, 4))
    except EngineError as error:
        return str(error)
    return "no error"


def test_misuse_in_a_training_step_is_refused(world: World) -> None:
    with pytest.raises(WorldError, match=r"the dropouts of TrainStep's model differs over axis 'tensor'.*seed=1"):
        world.run(Layout(tensor=2), differ)
    assert world.run(Layout(), call_twice) == ["dropout '1' is called twice in one forward: give each place a Dropout"]
