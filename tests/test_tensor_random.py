"""Dropout masks that do not depend on the layout: alone, and in whole training runs beside plain PyTorch.

The masks of the reference are those of `tests.plain_philox`.
"""

from __future__ import annotations

import copy
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
from engine.errors import DtypeError, EngineError, UsageError
from engine.placement import replicated
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.random import Dropout, Streams, name_dropouts
from tests.plain_philox import mask_of
from tests.world import World, WorldError, refusals

DOUBLE = torch.float64
SEED = 7


def plan(tensor: int = 1, rank: int = 0) -> engine.Communicator:
    return engine.plan_mesh(Layout(tensor=tensor), rank).tensor


# ---- one dropout -----------------------------------------------------------------------------------------------------


def dropout(p: float, mode: str = "reproducible", comm: Any = None, name: str = "3.drop", **options: Any) -> Dropout:
    layer = Dropout(p, Streams(comm or plan(), seed=SEED, mode=mode), **options)
    layer.full_name = name
    return layer


@pytest.mark.parametrize("mode", ["plain", "reproducible"])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_a_dropout_scales_what_it_keeps(mode: str, dtype: torch.dtype) -> None:
    layer = dropout(0.3, mode)
    x = torch.linspace(1, 2, 8 * 50 * 10).view(10, 50, 8).permute(2, 1, 0).to(dtype).requires_grad_()
    assert not x.is_contiguous()
    with layer.streams.at(2, range(8)):
        y = layer(x)
        again = layer(x.detach().clone())
    kept = y != 0
    assert y.dtype == dtype
    assert 0.67 < kept.double().mean() < 0.73
    assert torch.allclose(y, x * kept / 0.7)
    assert torch.equal(again, y), "a function of the step and the rows, not of what was drawn before"
    y.sum().backward()
    assert torch.allclose(x.grad, kept.to(dtype) / 0.7)
    if mode == "reproducible":
        assert torch.equal(kept, mask_of("3.drop", 2, (8, 50, 10), 0.3, SEED))


@pytest.mark.parametrize("mode", ["plain", "reproducible"])
def test_edges_of_a_dropout(mode: str) -> None:
    x = torch.arange(1.0, 13.0).view(4, 3)
    for p, wanted in ((0, x), (0.0, x), (1, x * 0), (1.0, x * 0)):
        layer = dropout(p, mode)
        with layer.streams.at(0, range(4)):
            assert torch.equal(layer(x), wanted)
    layer = dropout(0.9, mode).eval()
    assert layer(x) is x, "outside training a dropout needs no step"
    layer.train()
    for shape in ((0, 3), (4, 0), (4, 0, 5)):
        with layer.streams.at(0, range(shape[0])):
            assert layer(torch.empty(shape)).shape == shape
    with layer.streams.at(0, range(4)):
        assert layer(torch.ones(4)).shape == (4,)
        assert layer(torch.ones(4, 1, 1, 1)).shape == (4, 1, 1, 1)
    twin = copy.deepcopy(layer)
    assert twin.streams is layer.streams
    assert repr(dropout(0.1, split_dim=-1)) == "Dropout(p=0.1, split_dim=-1)"


@pytest.mark.parametrize("mode", ["plain", "reproducible"])
def test_names_steps_rows_and_seeds_have_masks_of_their_own(mode: str) -> None:
    x = torch.ones(4, 250)
    masks = []
    for name, step, first in itertools.product(("a", "b"), (0, 1, 2**32), (0, 4)):
        layer = dropout(0.5, mode, name=name)
        with layer.streams.at(step, range(first, first + 4)):
            masks.append(layer(x) != 0)
    other = dropout(0.5, mode)
    other.streams.seed += 1
    with other.streams.at(0, range(4)):
        masks.append(other(x) != 0)
    for one, two in itertools.combinations(masks, 2):
        assert 0.42 < (one == two).double().mean() < 0.58


def test_a_reproducible_mask_does_not_depend_on_how_the_activation_is_cut_or_laid_out() -> None:
    shape, p, step = (6, 8, 10), 0.4, 5
    whole = mask_of("3.drop", step, shape, p, SEED)

    def kept(x: Tensor, rows: range, comm: Any = None, **options: Any) -> Tensor:
        layer = dropout(p, comm=comm, **options)
        with layer.streams.at(step, rows):
            return layer(x) != 0

    ones = torch.ones(shape)
    assert torch.equal(kept(ones, range(6)), whole)
    assert torch.equal(kept(ones[2:5], range(2, 5)), whole[2:5])
    assert torch.equal(kept(ones.flatten(0, 1), range(6)), whole.flatten(0, 1)), "rows and positions in one dim"
    assert torch.equal(kept(ones[2:5].flatten(0, 1), range(2, 5)), whole[2:5].flatten(0, 1))
    assert torch.equal(kept(ones.transpose(0, 1), range(6), row_dim=1), whole.transpose(0, 1))
    assert torch.equal(kept(ones.movedim(0, -1), range(6), row_dim=-1), whole.movedim(0, -1))
    for dim, size in ((1, 2), (1, 4), (2, 2), (-1, 5), (-2, 8)):
        parts = [kept(ones.chunk(size, dim)[rank], range(6), plan(size, rank), split_dim=dim) for rank in range(size)]
        assert torch.equal(torch.cat(parts, dim), whole)
    seconds = [
        kept(ones.transpose(0, 1).chunk(4)[rank], range(6), plan(4, rank), split_dim=0, row_dim=1) for rank in range(4)
    ]
    assert torch.equal(torch.cat(seconds), whole.transpose(0, 1)), "the layout (sequence, rows, hidden)"
    assert torch.equal(kept(torch.ones(5), range(3, 8)), mask_of("3.drop", step, (8, 1), p, SEED)[3:].flatten())


def draw_masks(mesh: engine.Mesh, mode: str) -> list[Tensor]:
    """Two dropouts in each region, the second after tensor rank 0 alone has drawn from torch's generator."""
    streams = Streams(mesh.tensor, seed=mesh.seed, mode=mode)
    model = nn.ModuleList([Dropout(0.5, streams), Dropout(0.5, streams, split_dim=1)])
    name_dropouts(model)
    masks = []
    for step in range(2):
        with streams.at(step, range(1)):
            masks += [layer(torch.ones(1, 1000)) != 0 for layer in model]
        if mesh.tensor.rank == 0:
            torch.rand(17)
    return masks


@pytest.mark.parametrize("mode", ["plain", "reproducible"])
def test_b26_masks_agree_where_tensor_ranks_hold_the_same_and_differ_where_they_hold_parts(
    world: World, mode: str
) -> None:
    first, second = world.run(Layout(tensor=2), draw_masks, mode)
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        assert 400 < one.sum() < 600
        if number % 2 == 0:
            assert torch.equal(one, two)
        else:
            assert 0.4 < (one == two).double().mean() < 0.6
    for masks in (first, second):
        for one, two in itertools.combinations(masks, 2):
            assert 0.4 < (one == two).double().mean() < 0.6


def test_a_compiled_block_has_the_same_masks() -> None:
    layer = dropout(0.3)
    block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), layer, nn.Linear(8, 6))
    compiled = torch.compile(block, backend="aot_eager")
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for step in range(3):
        with layer.streams.at(step, range(4)):
            assert torch.allclose(compiled(x), block(x))


# ---- training --------------------------------------------------------------------------------------------------------

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


def test_misuse_of_a_dropout_is_refused_with_the_numbers() -> None:
    x = torch.ones(4, 6)
    streams = Streams(plan(), seed=0)
    nameless = Dropout(0.5, streams)

    def inside(layer: Dropout, value: Tensor = x, rows: range = range(4), step: int = 0) -> None:
        with layer.streams.at(step, rows):
            layer(value)

    assert refusals(
        [
            lambda: Dropout(1.5, streams),
            lambda: Dropout(float("nan"), streams),
            lambda: Dropout(0.5, streams, split_dim=0),
            lambda: Streams(plan(), seed=0, mode="reproducable"),  # type: ignore[arg-type]
            lambda: dropout(0.5)(x),
            lambda: dropout(0.5, "plain")(x),
            lambda: inside(nameless),
            lambda: inside(dropout(0.5), rows=range(3)),
            lambda: inside(dropout(0.5), rows=range(0)),
            lambda: inside(dropout(0.5), rows=range(0, 8, 2)),
            lambda: inside(dropout(0.5), rows=range(-4, 0)),
            lambda: inside(dropout(0.5), step=-1),
            lambda: inside(dropout(0.5, split_dim=2)),
            lambda: inside(dropout(0.5, split_dim=-2)),
            lambda: inside(dropout(0.5), torch.tensor(1.0)),
            lambda: inside(dropout(0.5), torch.ones(4, 6, dtype=torch.int64)),
        ]
    ) == [
        "Dropout: p=1.5: a probability is between 0 and 1",
        "Dropout: p=nan: a probability is between 0 and 1",
        "Dropout: dim 0 holds the rows, which the tensor axis does not split: name another split_dim or row_dim",
        "mode='reproducable' (did you mean 'reproducible'?): choose plain or reproducible",
        *[
            "dropout '3.drop' in training mode outside a step would have one mask for all steps: train with TrainStep, "
            "or run forward and backward inside `with streams.at(step, rows):`"
        ]
        * 2,
        "this Dropout has no name yet: name_dropouts(model) gives it, as TrainStep does",
        "dropout '3.drop': dim 0 of shape (4, 6) has 4 rows, which are no multiple of the 3 rows under way "
        "(range(0, 3)): name the dim of the rows with row_dim=",
        "dropout '3.drop': dim 0 of shape (4, 6) has 4 rows, which are no multiple of the 0 rows under way "
        "(range(0, 0)): name the dim of the rows with row_dim=",
        "at(0, range(0, 8, 2)): steps count from 0, rows are a range(first, last + 1) from 0 on",
        "at(0, range(-4, 0)): steps count from 0, rows are a range(first, last + 1) from 0 on",
        "at(-1, range(0, 4)): steps count from 0, rows are a range(first, last + 1) from 0 on",
        "dropout '3.drop': shape (4, 6) has no dim 2",
        "dropout '3.drop': split_dim=-2 of shape (4, 6) is dim 0, that of the rows, which the tensor axis does not "
        "split",
        "dropout '3.drop': shape () has no dim 0",
        "Dropout: a floating tensor is scaled by 1 / (1 - p), torch.int64 cannot be",
    ]
    with pytest.raises(DtypeError):
        nameless.eval()(torch.ones(3, dtype=torch.int32))


def test_a_failing_block_leaves_the_streams_where_they_were() -> None:
    layer = dropout(0.5)
    x = torch.ones(2, 6)
    with layer.streams.at(0, range(2)):
        before = layer(x)
        with pytest.raises(RuntimeError, match="inside"), layer.streams.at(1, range(2)):
            raise RuntimeError("inside")
        assert torch.equal(layer(x), before)
    with pytest.raises(UsageError, match="outside a step"):
        layer(x)
    with layer.streams.at(0, range(2), once=True):
        layer(x)
        with pytest.raises(UsageError, match=r"dropout '3\.drop' is called twice in one forward"):
            layer(x)


class Wrapped(nn.Module):
    """Named as torch's own wrappers are, which add their attribute to all names below."""

    def __init__(self, inner: nn.Module, attribute: str):
        super().__init__()
        self.add_module(attribute, inner)


def test_names_are_full_names_without_what_wrappers_add() -> None:
    streams = Streams(plan(), seed=0)
    inner = nn.Sequential(nn.Identity(), Dropout(0.1, streams))
    drops = name_dropouts(
        nn.Sequential(Wrapped(inner, "_checkpoint_wrapped_module"), Wrapped(Dropout(0.2, streams), "_orig_mod"))
    )
    assert {name: layer.p for name, layer in drops.items()} == {"0.1": 0.1, "1": 0.2}
    assert [layer.full_name for layer in drops.values()] == ["0.1", "1"]
    assert list(name_dropouts(inner)) == ["1"]
    assert inner[1].full_name == "1", "the model that is trained names it"


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
