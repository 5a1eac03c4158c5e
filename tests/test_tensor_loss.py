"""Cross-entropy over cut logits against F.cross_entropy in one process, where the vocabulary divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import Layout
from engine.tensor_parallel import (
    vocab_parallel_cross_entropy,
)
from tests.test_tensor_parallel import DOUBLE, TIGHT, Mesh, error_of, with_gaps
from tests.vocabulary_cases import wave
from tests.world import World


def lose(mesh: Mesh, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100) -> dict[str, Any]:
    """logits and target are whole; the rank takes its part of the vocabulary."""
    x = logits.chunk(mesh.tensor.size, -1)[mesh.tensor.rank].detach().requires_grad_()
    loss = vocab_parallel_cross_entropy(x, target, mesh.tensor, ignore_index=ignore_index)
    (loss if weight is None else loss * weight).sum().backward()
    part = logits.chunk(mesh.tensor.size, -1)[mesh.tensor.rank]
    return {"loss": loss.detach(), "gradient": x.grad, "unchanged": torch.equal(x.detach(), part)}


LOGITS = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=DOUBLE)
# exp(1..4) / (exp(1) + exp(2) + exp(3) + exp(4)), the third less 1.
GRADIENT = [0.0320586, 0.0871443, 0.2368828 - 1, 0.6439143]


@pytest.mark.parametrize("shift", [0.0, 10000.0, -10000.0])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_loss_of_1_2_3_4_at_2_is_1_44019(world: World, n: int, shift: float) -> None:
    """A wrong version gives 2.13334 on two ranks."""
    for rank, got in enumerate(world.run(Layout(tensor=n), lose, LOGITS + shift, torch.tensor([2]), None)):
        assert got["loss"].item() == pytest.approx(1.44019, abs=5e-6)
        expected = torch.tensor(GRADIENT, dtype=DOUBLE).chunk(n)[rank]
        torch.testing.assert_close(got["gradient"][0], expected, rtol=0, atol=1e-7)
        assert got["unchanged"]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ignored_rows_have_no_loss_and_no_gradient(world: World, n: int) -> None:
    for got in world.run(Layout(tensor=n), lose, wave(3, 3, 4), torch.full((3,), -100), None):
        assert got["loss"].tolist() == [0.0, 0.0, 0.0]
        assert got["gradient"].abs().max() == 0.0
        assert got["unchanged"]


@pytest.mark.parametrize("ignore_index", [-100, 5, -1])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_loss_and_gradient_equal_cross_entropy_of_the_whole(world: World, n: int, ignore_index: int) -> None:
    logits = (20 * wave(4, 2, 5, 8)).requires_grad_()
    target = torch.tensor([[0, 7, 3, 4, 5], [5, 1, ignore_index, 6, 2]])
    weight = wave(6, 2, 5)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=ignore_index)
    (loss * weight.flatten()).sum().backward()
    results = world.run(Layout(tensor=n), lose, logits.detach(), target, weight, ignore_index)
    for rank, got in enumerate(results):
        assert got["loss"].shape == (2, 5)
        torch.testing.assert_close(got["loss"], loss.detach().view(2, 5), **TIGHT)
        torch.testing.assert_close(got["gradient"], logits.grad.chunk(n, -1)[rank], **TIGHT)
        assert torch.equal(got["loss"], results[0]["loss"]), "the same on every rank"


@pytest.mark.parametrize("n", [1, 2])
def test_logits_may_be_minus_infinity_on_a_whole_shard(world: World, n: int) -> None:
    logits = wave(7, 3, 8)
    logits[0, :4] = logits[1, 4:] = logits[2, 1::2] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([6, 1, 4])
    loss = F.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    for rank, got in enumerate(world.run(Layout(tensor=n), lose, logits.detach(), target, None)):
        torch.testing.assert_close(got["loss"], loss.detach(), **TIGHT)
        torch.testing.assert_close(got["gradient"], logits.grad.chunk(n, -1)[rank], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(world: World, dtype: torch.dtype) -> None:
    logits = (8 * wave(8, 3, 8)).to(dtype)
    target = torch.tensor([0, 5, 7])
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, target, reduction="none")
    loss.sum().backward()
    for rank, got in enumerate(world.run(Layout(tensor=2), lose, logits, target, None)):
        assert got["loss"].dtype == torch.float32
        torch.testing.assert_close(got["loss"].double(), loss.detach(), rtol=1e-6, atol=1e-6)
        assert got["gradient"].dtype == dtype
        torch.testing.assert_close(got["gradient"], exact.grad.chunk(2, -1)[rank].to(dtype), rtol=1e-2, atol=1e-6)


def lose_at_the_edges(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.tensor
    part = (20 * wave(9, 2, 3, 8)).chunk(comm.size, -1)[comm.rank]
    target = torch.tensor([[0, 7, 3], [-100, 6, 2]])
    gapped = with_gaps(part)
    assert not gapped.is_contiguous()
    return {
        "gapped": vocab_parallel_cross_entropy(gapped, target.t().contiguous().t(), comm),
        "dense": vocab_parallel_cross_entropy(part, target, comm),
        "int32": vocab_parallel_cross_entropy(part, target.int(), comm),
        "single": vocab_parallel_cross_entropy(part[0, 1], target[0, 1], comm),
        "no rows": tuple(vocab_parallel_cross_entropy(part[:0], target[:0], comm).shape),
        "high": error_of(lambda: vocab_parallel_cross_entropy(part, target + 1, comm)),
        "low": error_of(lambda: vocab_parallel_cross_entropy(part, target - 1, comm)),
        "shape": error_of(lambda: vocab_parallel_cross_entropy(part, target[0], comm)),
        "afterwards": comm.any(mesh.rank == 1),
    }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_loss_takes_any_strides_and_refuses_wrong_targets_on_every_rank(world: World, n: int) -> None:
    logits, target = 20 * wave(9, 2, 3, 8), torch.tensor([[0, 7, 3], [-100, 6, 2]])
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    for got in world.run(Layout(tensor=n), lose_at_the_edges):
        for call in ("gapped", "dense", "int32"):
            torch.testing.assert_close(got[call], expected, **TIGHT, msg=call)
        torch.testing.assert_close(got["single"], expected[0, 1], **TIGHT)
        assert got["no rows"] == (0, 3)
        text = "vocab_parallel_cross_entropy: target {} is outside the vocabulary: ids go from 0 to 7"
        assert got["high"] == ("UsageError", text.format(-99)), "-99 is as wrong as 8, and the lower is named"
        assert got["low"] == ("UsageError", text.format(-101))
        name, message = got["shape"]
        assert name == "UsageError"
        assert f"logits (2, 3, {8 // n}) need a target of shape (2, 3), not (3,)" in message
        assert got["afterwards"] is (n > 1)
