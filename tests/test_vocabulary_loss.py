"""Cross-entropy over cut logits against plain torch, for any vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engine
from engine import Layout
from engine.tensor_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from tests.vocabulary_cases import (
    DOUBLE,
    OPTIONS,
    RANKS,
    TIGHT,
    VOCABULARIES,
    Mesh,
    arguments,
    padded,
    part,
    plain_loss,
    targets_of,
    wave,
)
from tests.world import World, refusals


def lose(mesh: Mesh, logits: Tensor, target: Tensor, filling: float, dtype: Any, options: dict[str, Any]) -> Any:
    """logits are whole, and padded with `filling`; returns loss, gradient, and calls and bytes of each direction."""
    x = part(logits.to(dtype), mesh.tensor, -1, filling)
    before = x.detach().clone()
    sent = []
    mesh.ledger.clear()
    with mesh.ledger:
        loss = vocab_parallel_cross_entropy(x, target, mesh.tensor, vocabulary=logits.shape[-1], **options)
        sent.append({key: (e.calls, e.payload_bytes) for key, e in mesh.ledger.entries.items()})
        mesh.ledger.clear()
        (loss * wave(6, *target.shape).to(loss.dtype)).sum().backward()
        sent.append({key: (e.calls, e.payload_bytes) for key, e in mesh.ledger.entries.items()})
    assert torch.equal(x.detach().nan_to_num(7.0), before.nan_to_num(7.0)), "the caller's logits were overwritten"
    return loss.detach(), x.grad, sent


ONE_TO_FOUR = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=DOUBLE)
SOFTMAX = torch.tensor([0.03205860, 0.08714432, 0.23688282, 0.64391426], dtype=DOUBLE)
HIT = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=DOUBLE)
LSE = 4.44018970


def literal(mesh: Mesh, shift: float, target: int, options: dict[str, Any]) -> tuple[float, Tensor]:
    x = part(ONE_TO_FOUR + shift, mesh.tensor, -1)
    loss = vocab_parallel_cross_entropy(x, torch.tensor([target]), mesh.tensor, **options)
    loss.sum().backward()
    return loss.item(), x.grad[0]


@RANKS
@pytest.mark.parametrize("shift", [0.0, 10000.0])
def test_the_literal_loss_with_smoothing_and_z_loss(world: World, n: int, shift: float) -> None:
    """Smoothing over the shard, or z-loss of a shard, gives other numbers on two ranks."""
    lse = LSE + shift
    for options, loss, gradient in (
        ({}, 1.44019, SOFTMAX - HIT),
        ({"label_smoothing": 0.1}, 1.49019, SOFTMAX - 0.9 * HIT - 0.025),
        ({"z_loss": 1e-4}, 1.44019 + 1e-4 * lse**2, SOFTMAX * (1 + 2e-4 * lse) - HIT),
    ):
        for rank, (got, of_logits) in enumerate(world.run(Layout(tensor=n), literal, shift, 2, options)):
            assert got == pytest.approx(loss, rel=1e-9, abs=5e-6)
            torch.testing.assert_close(of_logits, gradient.chunk(n)[rank], rtol=1e-7, atol=1e-7)
        for got, of_logits in world.run(Layout(tensor=n), literal, shift, -100, options):
            assert got == 0.0
            assert of_logits.abs().max() == 0.0


@RANKS
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_equal_plain_torch_whatever_lies_in_the_padding(
    world: World, n: int, vocabulary: int, options: dict[str, Any]
) -> None:
    logits = (20 * wave(4, 2, 8, vocabulary)).requires_grad_()
    target = targets_of(vocabulary, options)
    loss = plain_loss(logits, target, *arguments(options))
    (loss * wave(6, 2, 8)).sum().backward()
    gradients = padded(logits.grad, n, -1, 0.0)
    row_bytes = 16 * 8
    sums = 3 if "label_smoothing" in options else 2
    for filling in (1e4, -torch.inf, torch.nan):
        results = world.run(Layout(tensor=n), lose, logits.detach(), target, filling, DOUBLE, options)
        for rank, (got, gradient, sent) in enumerate(results):
            torch.testing.assert_close(got, loss.detach(), **TIGHT)
            torch.testing.assert_close(gradient, gradients[rank], **TIGHT)
            assert torch.equal(got, results[0][0]), "the same on every rank"
            assert sent == [{} if n == 1 else {("tensor", "all_reduce"): (2, (1 + sums) * row_bytes)}, {}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_logits_give_a_float32_loss(world: World, dtype: torch.dtype) -> None:
    options = OPTIONS[-1]
    exact = (8 * wave(8, 2, 8, 5)).to(dtype).double().requires_grad_()
    target = targets_of(5, options)
    loss = plain_loss(exact, target, *arguments(options))
    (loss * wave(6, 2, 8)).sum().backward()
    gradients = padded(exact.grad, 2, -1, 0.0)
    results = world.run(Layout(tensor=2), lose, exact.detach(), target, torch.nan, dtype, options)
    for rank, (got, gradient, _) in enumerate(results):
        assert (got.dtype, gradient.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(got.double(), loss.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient.double(), gradients[rank], rtol=1e-2, atol=1e-6)


def at_the_edges(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.tensor
    options = {"vocabulary": 5, "label_smoothing": 0.1, "z_loss": 0.1}
    logits = wave(3, 3, 5)
    logits[0, :2] = logits[1] = -torch.inf
    ignored = part(logits[:2], comm, -1)
    nothing = vocab_parallel_cross_entropy(ignored, torch.full((2,), -100), comm, **options)
    nothing.sum().backward()
    unsmoothed = part(logits[::2], comm, -1)
    finite = vocab_parallel_cross_entropy(unsmoothed, torch.tensor([4, 1]), comm, vocabulary=5, z_loss=0.1)
    finite.sum().backward()
    infinite = vocab_parallel_cross_entropy(part(logits[:1], comm, -1), torch.tensor([4]), comm, **options)
    return {
        "nothing": (nothing.tolist(), ignored.grad.abs().max().item()),
        "finite": (finite.detach(), unsmoothed.grad),
        "infinite": infinite.item(),
        "no rows": vocab_parallel_cross_entropy(part(logits[:0], comm, -1), torch.tensor([]).long(), comm, **options),
        "padding": refusals([lambda: vocab_parallel_cross_entropy(ignored, torch.tensor([5, 0]), comm, vocabulary=5)]),
    }


@RANKS
def test_the_loss_where_a_shard_or_a_row_is_minus_infinity(world: World, n: int) -> None:
    logits = wave(3, 3, 5)[::2].clone()
    logits[0, :2] = -torch.inf
    logits.requires_grad_()
    loss = plain_loss(logits, torch.tensor([4, 1]), z=0.1)
    loss.sum().backward()
    for rank, got in enumerate(world.run(Layout(tensor=n), at_the_edges)):
        assert got["nothing"] == ([0.0, 0.0], 0.0), "ignored rows, one of them with no finite logit"
        torch.testing.assert_close(got["finite"][0], loss.detach(), **TIGHT)
        torch.testing.assert_close(got["finite"][1], padded(logits.grad, n, -1, 0.0)[rank], **TIGHT)
        assert got["infinite"] == torch.inf, "smoothing wants a little of every id, as F.cross_entropy"
        assert got["no rows"].shape == (0,)
        assert got["padding"] == [
            "vocab_parallel_cross_entropy: target 5 is outside the vocabulary: ids go from 0 to 4"
        ], "also where padding has the number"


def test_what_the_loss_cannot_be_is_refused_before_anything_is_sent() -> None:
    comm = engine.plan_mesh(Layout(tensor=4), 1).tensor
    x, target = torch.zeros(2, 3), torch.tensor([0, 1])

    def call(logits: Tensor = x, ids: Tensor = target, **options: Any) -> Callable[[], Tensor]:
        return lambda: vocab_parallel_cross_entropy(logits, ids, comm, **options)

    calls = {
        "label_smoothing=1.0: give a share from 0 to below 1": call(label_smoothing=1.0),
        "label_smoothing=-0.1: give a share from 0 to below 1": call(label_smoothing=-0.1),
        "z_loss=-0.1: give a factor of at least 0": call(z_loss=-0.1),
        "z_loss=nan: give a factor of at least 0": call(z_loss=torch.nan),
        "vocabulary=8 over 4 ranks of axis 'tensor' is 2 columns on each, but this rank has 3: give its shard, and a "
        "vocabulary from 9 to 12": call(vocabulary=8),
        "vocabulary=13 over 4 ranks of axis 'tensor' is 4 columns on each": call(vocabulary=13),
        "vocabulary=0 over 4 ranks": call(vocabulary=0),
        "vocabulary=10 over 4 ranks of axis 'tensor' is 3 columns on each, but this rank has 10": call(
            torch.zeros(2, 10), vocabulary=10
        ),
        "target 10 is outside the vocabulary: ids go from 0 to 9": call(ids=target + 9, vocabulary=10),
        "torch.int64 is no floating dtype": call(x.long()),
        "a target of torch.float32 has no ids: give integers": call(ids=target.float()),
        "logits (2, 3) need a target of shape (2,), not (1, 2)": call(ids=target[None]),
    }
    for expected, text in zip(calls, refusals(list(calls.values())), strict=True):
        assert f"vocab_parallel_cross_entropy: {expected}" in text


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_both_losses_take_targets_of_any_integer_dtype(dtype: torch.dtype) -> None:
    comm = engine.plan_mesh(Layout(), 0).tensor
    hidden, weight, target = wave(1, 3, 6), wave(2, 200, 6), torch.tensor([1, 120, 7])
    ignored = -100 if dtype.is_signed else 300  # neither is a number of uint8, where -100 would be read as 156
    expected = F.cross_entropy(hidden @ weight.t(), target, reduction="none")
    for loss in (
        vocab_parallel_cross_entropy(hidden @ weight.t(), target.to(dtype), comm, ignore_index=ignored),
        vocab_parallel_linear_cross_entropy(hidden, weight, target.to(dtype), comm, ignore_index=ignored),
        vocab_parallel_linear_cross_entropy(hidden, weight, target.to(dtype), comm),
    ):
        torch.testing.assert_close(loss, expected, **TIGHT)
    high = torch.tensor([156], dtype=torch.uint8)
    expected = F.cross_entropy(hidden[:1] @ weight.t(), high.long(), reduction="none")
    torch.testing.assert_close(vocab_parallel_linear_cross_entropy(hidden[:1], weight, high, comm), expected, **TIGHT)


def test_second_derivatives_are_refused_not_wrong() -> None:
    comm = engine.plan_mesh(Layout(), 0).tensor
    x, weight = wave(1, 2, 4).requires_grad_(), wave(2, 4, 4)
    for loss in (
        vocab_parallel_cross_entropy(x, torch.tensor([0, 1]), comm),
        vocab_parallel_linear_cross_entropy(x, weight, torch.tensor([0, 1]), comm),
    ):
        (first,) = torch.autograd.grad(loss.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.sum().backward()


def overwrite_the_logits(mesh: Mesh) -> float:
    """Of 5 ids over 4 ranks the last has padding only."""
    x = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True)
    logits = x * 1.0
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 2, 4]), mesh.tensor, vocabulary=5)
    logits.detach().zero_()  # the loss keeps what it needs itself
    loss.sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def test_logits_may_be_overwritten_after_the_loss_on_every_rank(world: World) -> None:
    wanted = [6 / 5 - 1, 6 / 5 - 1, 3 / 5 - 1, 0.0]  # softmax of 3 rows, less the targets
    assert world.run(Layout(tensor=4), overwrite_the_logits) == pytest.approx(wanted)
