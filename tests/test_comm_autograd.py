"""Each differentiable pair against autograd in one process over all ranks' inputs at once, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from engine.comm import autograd as pairs
from engine.errors import LayoutError
from tests.world import World

SHAPE = (6, 6, 12)  # every dim divides by 2 and by 3
PAIRS = (
    "identity_all_reduce",
    "all_reduce_identity",
    "all_gather_reduce_scatter",
    "reduce_scatter_all_gather",
    "all_gather_split",
    "split_all_gather",
)


def wave(number: int, shape: tuple[int, ...]) -> Tensor:
    """Values between -1 and 1, all different, different for each number."""
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 0.7 + 1.3 * number).view(shape)


def use(y: Tensor, rank: int) -> Tensor:
    """What one rank makes of a value: a number that is not linear in it and different on every rank."""
    return (wave(10 + rank, tuple(y.shape)) * y + 0.5 * (rank + 1) * y * y * y).sum()


# For each pair: whether the input and the output are the same on every rank, and the plain forward of rank r.
REPLICATED_INPUT = {"identity_all_reduce", "split_all_gather"}
ALIKE_OUTPUT = {"all_reduce_identity", "all_gather_split"}  # every rank makes the same of it; counted once
PLAIN: dict[str, Callable[[list[Tensor], int, int], Tensor]] = {
    "identity_all_reduce": lambda xs, _dim, _r: xs[0],
    "all_reduce_identity": lambda xs, _dim, _r: torch.stack(xs).sum(0),
    "all_gather_reduce_scatter": lambda xs, dim, _r: torch.cat(xs, dim),
    "reduce_scatter_all_gather": lambda xs, dim, r: torch.stack(xs).sum(0).chunk(len(xs), dim)[r],
    "all_gather_split": lambda xs, dim, _r: torch.cat(xs, dim),
    "split_all_gather": lambda xs, dim, r: xs[0].chunk(len(xs), dim)[r],
}


def plainly(name: str, n: int, dim: int) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank's output, and the gradient of the total loss in every rank's input."""
    xs = [wave(r, SHAPE).requires_grad_() for r in range(1 if name in REPLICATED_INPUT else n)]
    inputs = xs * n if name in REPLICATED_INPUT else xs
    outputs = [PLAIN[name](inputs, dim, r) for r in range(n)]
    losses = [use(outputs[0], 0)] if name in ALIKE_OUTPUT else [use(y, r) for r, y in enumerate(outputs)]
    gradients = list(torch.autograd.grad(torch.stack(losses).sum(), xs))
    return [y.detach() for y in outputs], gradients * n if name in REPLICATED_INPUT else gradients


def run_pairs(mesh: engine.Mesh, dim: int, strided: bool) -> dict[str, Any]:
    comm, results = mesh.tensor, {}
    for name in PAIRS:
        value = wave(0 if name in REPLICATED_INPUT else comm.rank, SHAPE)
        if strided:
            value = torch.stack([value, -value], -1)[..., 0]
        x = value.detach().requires_grad_()
        pair = getattr(pairs, name)
        y = pair(x, comm) if "gather" not in name else pair(x, comm, dim)
        loss = use(y, 0 if name in ALIKE_OUTPUT else comm.rank)
        loss.backward()
        results[name] = (y.detach(), x.grad, torch.equal(x.detach(), value))
    return results


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_forward_and_backward_equal_one_process(world: World, n: int, dim: int, strided: bool) -> None:
    results = world.run(Layout(tensor=n), run_pairs, dim, strided)
    for name in PAIRS:
        outputs, gradients = plainly(name, n, dim)
        for rank in range(n):
            output, gradient, unchanged = results[rank][name]
            torch.testing.assert_close(output, outputs[rank], rtol=1e-13, atol=1e-13, msg=f"{name} forward")
            torch.testing.assert_close(gradient, gradients[rank], rtol=1e-12, atol=1e-12, msg=f"{name} backward")
            assert unchanged, f"{name} must leave its input alone"


def sum_inside_autograd(mesh: engine.Mesh) -> tuple[float, float, float]:
    """x is replicated, w_r = r + 1, y the sum of x * w_r, loss y squared."""
    comm = mesh.tensor
    x = torch.tensor(2.0, requires_grad=True)
    w = torch.tensor(comm.rank + 1.0, requires_grad=True)
    y = pairs.all_reduce_identity(pairs.identity_all_reduce(x, comm) * w, comm)
    (y**2).backward()
    return y.item(), w.grad.item(), x.grad.item()


def test_the_gradient_follows_the_paths_through_the_other_ranks(world: World) -> None:
    """A plain all-reduce gives 12 and 24 for x."""
    assert world.run(Layout(tensor=2), sum_inside_autograd) == [(6.0, 24.0, 36.0), (6.0, 24.0, 36.0)]


def round_trips(mesh: engine.Mesh) -> dict[str, Any]:
    """Pairs that undo each other, and expanded gradients, which have no memory of their own."""
    comm = mesh.tensor
    x = wave(0, SHAPE).requires_grad_()
    there_and_back = pairs.all_gather_split(pairs.split_all_gather(x, comm, 1), comm, 1)
    there_and_back.sum().backward()
    partial = wave(comm.rank, SHAPE).requires_grad_()
    whole = pairs.all_gather_split(pairs.reduce_scatter_all_gather(partial, comm, 0), comm, 0)
    (whole * wave(7, SHAPE)).sum().backward()
    mine = wave(comm.rank, SHAPE).requires_grad_()
    pairs.all_gather_reduce_scatter(mine, comm, 2).sum().backward()
    return {
        "same": there_and_back.detach(),
        "ones": x.grad,
        "sum": whole.detach(),
        "wave": partial.grad,
        "n": mine.grad,
    }


def test_a_reduce_scatter_and_an_all_gather_make_an_all_reduce(world: World) -> None:
    for got in world.run(Layout(tensor=3), round_trips):
        assert torch.equal(got["same"], wave(0, SHAPE))
        assert torch.equal(got["ones"], torch.ones(SHAPE, dtype=torch.float64))
        torch.testing.assert_close(got["sum"], sum(wave(r, SHAPE) for r in range(3)), rtol=1e-13, atol=1e-13)
        assert torch.equal(got["wave"], wave(7, SHAPE))
        assert torch.equal(got["n"], torch.full(SHAPE, 3.0, dtype=torch.float64))


def a_saved_tensor(mesh: engine.Mesh) -> tuple[Tensor, Tensor]:
    """exp needs its own output in backward: the pairs must not change it."""
    comm = mesh.tensor
    x = wave(comm.rank, (4,)).requires_grad_()
    y = pairs.all_reduce_identity(x.exp(), comm)
    y.sum().backward()
    return y.detach(), x.grad


def test_a_tensor_saved_for_backward_is_not_summed_over(world: World) -> None:
    for rank, (y, gradient) in enumerate(world.run(Layout(tensor=2), a_saved_tensor)):
        torch.testing.assert_close(y, wave(0, (4,)).exp() + wave(1, (4,)).exp())
        torch.testing.assert_close(gradient, wave(rank, (4,)).exp())


def needing_no_gradient(mesh: engine.Mesh) -> list[bool]:
    comm = mesh.tensor
    x = wave(comm.rank, SHAPE)
    leaf = wave(comm.rank, SHAPE).requires_grad_()
    with torch.no_grad():
        quiet = pairs.all_reduce_identity(leaf, comm)
    return [
        pairs.all_reduce_identity(x, comm).requires_grad,
        pairs.identity_all_reduce(x, comm).requires_grad,
        quiet.requires_grad,
        pairs.all_gather_split(leaf, comm, 0).requires_grad,
    ]


def test_only_an_input_with_a_gradient_makes_one(world: World) -> None:
    assert world.run(Layout(tensor=2), needing_no_gradient) == [[False, False, False, True]] * 2


def splitting_unevenly(mesh: engine.Mesh) -> list[str]:
    texts = []
    for pair in (pairs.split_all_gather, pairs.reduce_scatter_all_gather):
        try:
            pair(torch.ones(4, 5, requires_grad=True), mesh.tensor, 1)
        except LayoutError as error:
            texts.append(str(error))
    mesh.tensor.barrier()
    return texts


def test_a_dim_that_does_not_divide_is_refused_on_every_rank(world: World) -> None:
    for first, second in world.run(Layout(tensor=2), splitting_unevenly):
        assert first.startswith("dim 1 of shape (4, 5) over axis 'tensor': 5 does not divide by 2")
        assert "dim 1 of float32 (4, 5) does not divide by the group's 2 ranks" in second
