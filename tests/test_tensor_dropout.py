"""A dropout by itself: which elements it keeps, on whole activations and parts of them, and what it refuses."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.errors import DtypeError, UsageError
from engine.tensor_parallel.random import Dropout, Streams, name_dropouts
from tests.plain_philox import mask_of
from tests.world import World, refusals

DOUBLE = torch.float64
SEED = 7


def plan(tensor: int = 1, rank: int = 0) -> engine.Communicator:
    return engine.plan_mesh(Layout(tensor=tensor), rank).tensor


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
