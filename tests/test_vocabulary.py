"""A vocabulary of any size over the tensor axis: table, loss, and the head fused with the loss, against plain torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine import Layout
from engine.placement import Part, Placement, cut
from engine.tensor_parallel import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from engine.tensor_parallel.head import CHUNK_BYTES
from tests.world import World, refusals

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


# ---- table -----------------------------------------------------------------------------------------------------------

VOCABULARIES = (10, 8, 5, 3)


def ids_of(vocabulary: int) -> Tensor:
    """Every id, some twice, (2, 8)."""
    return (torch.arange(16).view(2, 8) * 7 + 2) % vocabulary


def tables(mesh: Mesh, vocabulary: int) -> dict[str, Any]:
    torch.manual_seed(vocabulary)
    table = VocabParallelEmbedding(vocabulary, 3, mesh.tensor, dtype=DOUBLE)
    drawn = torch.get_rng_state()
    y = table(ids_of(vocabulary))
    (y * wave(1, 2, 8, 3)).sum().backward()
    state = engine.full_state_dict(table, mesh)
    engine.load_full_state_dict(table, mesh, {"weight": 2 * state["weight"]})
    return {
        "weight": table.weight.detach() / 2,
        "generator": drawn,
        "y": y.detach(),
        "gradient": table.weight.grad,
        "placement": table.placements["weight"],
        "state": state["weight"],
        "again": engine.full_state_dict(table, mesh)["weight"],
        "error": refusals([lambda: table(torch.tensor([0, vocabulary])), lambda: table(torch.tensor([-1, 0]))]),
    }


@RANKS
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_table_of_any_size_is_drawn_looked_up_and_saved_as_nn_embedding(
    world: World, n: int, vocabulary: int
) -> None:
    torch.manual_seed(vocabulary)
    plain = nn.Embedding(vocabulary, 3, dtype=DOUBLE)
    drawn = torch.get_rng_state()
    y = plain(ids_of(vocabulary))
    (y * wave(1, 2, 8, 3)).sum().backward()
    weights, gradients = padded(plain.weight.detach(), n, 0, 0.0), padded(plain.weight.grad, n, 0, 0.0)
    for rank, got in enumerate(world.run(Layout(tensor=n), tables, vocabulary)):
        assert torch.equal(got["weight"], weights[rank]), "doubled by loading; rows of no id are zero"
        assert torch.equal(got["generator"], drawn)
        assert torch.equal(got["y"], y.detach())
        torch.testing.assert_close(got["gradient"], gradients[rank], **TIGHT)
        assert got["placement"] == cut(0, [Part(vocabulary, padded=True)], n)
        assert vocabulary % n or got["placement"] == Placement(0), "one that divides is placed as it was"
        assert torch.equal(got["state"], plain.weight.detach()), "padding is in no state dict"
        assert torch.equal(got["again"], 2 * plain.weight.detach())
        text = "VocabParallelEmbedding: id {} is outside the vocabulary: ids go from 0 to {}"
        assert got["error"] == [text.format(i, vocabulary - 1) for i in (vocabulary, -1)], "also where a padded row is"


def scattered(mesh: Mesh, dim: int) -> tuple[Tensor, Tensor, dict[tuple[str, str], int]]:
    comm = mesh.tensor
    torch.manual_seed(5)
    table = VocabParallelEmbedding(5, 3, comm, dtype=DOUBLE, sequence_dim=dim)
    with mesh.ledger:
        y = table(ids_of(5).view(4, 4))
        (y * wave(1, 4, 4, 3).chunk(comm.size, dim)[comm.rank]).sum().backward()
    calls = {key: entry.calls for key, entry in mesh.ledger.entries.items()}
    return y.detach(), table.weight.grad, calls


@RANKS
@pytest.mark.parametrize("dim", [0, 1])
def test_a_table_gives_each_rank_its_part_of_the_sequence(world: World, n: int, dim: int) -> None:
    torch.manual_seed(5)
    plain = nn.Embedding(5, 3, dtype=DOUBLE)
    y = plain(ids_of(5).view(4, 4))
    (y * wave(1, 4, 4, 3)).sum().backward()
    for rank, (part_of_y, gradient, calls) in enumerate(world.run(Layout(tensor=n), scattered, dim)):
        assert torch.equal(part_of_y, y.detach().chunk(n, dim)[rank])
        torch.testing.assert_close(gradient, padded(plain.weight.grad, n, 0, 0.0)[rank], **TIGHT)
        assert calls == ({} if n == 1 else {("tensor", "reduce_scatter"): 1, ("tensor", "all_gather"): 1})


def taken_over(mesh: Mesh, padding_idx: int | None, frozen: bool) -> dict[str, Any]:
    plain = given_embedding(padding_idx, frozen)
    before = torch.get_rng_state()
    table = VocabParallelEmbedding.from_embedding(plain.eval(), mesh.tensor)
    untouched = torch.equal(torch.get_rng_state(), before)
    y = table(ids_of(5))
    if not frozen:
        (y * wave(1, 2, 8, 3)).sum().backward()
    own = table.weight.untyped_storage().data_ptr() != plain.weight.untyped_storage().data_ptr()
    return {
        "weight": table.weight.detach(),
        "y": y.detach(),
        "gradient": table.weight.grad,
        "kept": (untouched, own, not table.training, table.weight.requires_grad, table.padding_idx),
        "text": repr(table),
    }


def given_embedding(padding_idx: int | None, frozen: bool) -> nn.Embedding:
    plain = nn.Embedding(5, 3, padding_idx=padding_idx, dtype=DOUBLE)
    with torch.no_grad():
        plain.weight.copy_(wave(2, 5, 3))  # the row of padding_idx too, as in a checkpoint
    return plain.requires_grad_(not frozen)


@RANKS
@pytest.mark.parametrize(("padding_idx", "frozen"), [(None, False), (0, False), (3, False), (-1, False), (2, True)])
def test_an_embedding_is_taken_over_with_its_padding_idx(
    world: World, n: int, padding_idx: int | None, frozen: bool
) -> None:
    plain = given_embedding(padding_idx, frozen)
    y = plain(ids_of(5))
    if not frozen:
        (y * wave(1, 2, 8, 3)).sum().backward()
        assert padding_idx is None or plain.weight.grad[padding_idx].abs().max() == 0
    for rank, got in enumerate(world.run(Layout(tensor=n), taken_over, padding_idx, frozen)):
        assert torch.equal(got["weight"], padded(plain.weight.detach(), n, 0, 0.0)[rank])
        assert torch.equal(got["y"], y.detach())
        assert got["kept"] == (True, True, True, not frozen, plain.padding_idx)
        assert (f"padding_idx={plain.padding_idx}" in got["text"]) == (padding_idx is not None)
        if frozen:
            assert got["gradient"] is None
        else:
            torch.testing.assert_close(got["gradient"], padded(plain.weight.grad, n, 0, 0.0)[rank], **TIGHT)


def test_what_a_table_cannot_do_is_refused_before_anything_is_sent() -> None:
    comm = engine.plan_mesh(Layout(tensor=4), 1).tensor
    take = VocabParallelEmbedding.from_embedding
    table = VocabParallelEmbedding(10, 4, comm, sequence_dim=1)
    texts = refusals(
        [
            lambda: take(nn.Embedding(8, 4, max_norm=1.0), comm),
            lambda: take(nn.Embedding(8, 4, scale_grad_by_freq=True, sparse=True), comm),
            lambda: VocabParallelEmbedding(8, 4, comm, sequence_dim=-1),
            lambda: table(torch.zeros(4, 6, dtype=torch.int64)),
            lambda: table(torch.zeros(4, dtype=torch.int64)),
        ]
    )
    for text, expected in zip(
        texts,
        [
            "VocabParallelEmbedding.from_embedding: max_norm=1.0 is not supported over axis 'tensor': rows",
            "scale_grad_by_freq=True, sparse=True is not supported",
            "VocabParallelEmbedding: sequence_dim=-1: count dims of the ids from 0",
            "VocabParallelEmbedding: sequence_dim=1 of ids (4, 6) over axis 'tensor': 6 does not divide by 4: use a",
            "VocabParallelEmbedding: ids (4,) have no sequence_dim=1",
        ],
        strict=True,
    ):
        assert expected in text


# ---- loss ------------------------------------------------------------------------------------------------------------


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


# ---- head and loss ---------------------------------------------------------------------------------------------------

HIDDEN = 6


def head_inputs(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (2, 8, H), weight and bias."""
    return wave(1, 2, 8, HIDDEN), 4 * wave(2, vocabulary, HIDDEN), wave(3, vocabulary)


def fused(
    mesh: Mesh, vocabulary: int, options: dict[str, Any], chunks: list[int | None], how: dict[str, Any]
) -> list[dict[str, Any]]:
    """One result for each size of a chunk. how: bias, which inputs are frozen, sequence_dim."""
    comm, dim = mesh.tensor, how.get("sequence_dim")
    results = []
    for chunk_rows in chunks:
        hidden, weight, bias = head_inputs(vocabulary)
        x = hidden.clone() if dim is None else hidden.chunk(comm.size, dim)[comm.rank].clone()
        leaves = {"hidden": x.requires_grad_(), "weight": part(weight, comm, 0, torch.nan)}
        if how.get("bias"):
            leaves["bias"] = part(bias, comm, 0, torch.nan)
        for name in how.get("frozen", ()):
            leaves[name].requires_grad_(False)
        saved: list[tuple[int, ...]] = []
        mesh.ledger.clear()
        with (
            mesh.ledger,
            torch.autograd.graph.saved_tensors_hooks(partial(noted, saved), same),
        ):
            loss = vocab_parallel_linear_cross_entropy(
                x if not how.get("strided") else x.transpose(0, 1).contiguous().transpose(0, 1),
                leaves["weight"],
                targets_of(vocabulary, options),
                comm,
                bias=leaves.get("bias"),
                vocabulary=vocabulary,
                chunk_rows=chunk_rows,
                sequence_dim=dim,
                **options,
            )
            (loss * wave(6, 2, 8)).sum().backward()
        calls = {name: e.calls for (_, name), e in mesh.ledger.entries.items()}
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
        results.append({"loss": loss.detach(), "gradients": gradients, "calls": calls, "saved": saved})
    return results


def noted(saved: list[tuple[int, ...]], x: Tensor) -> Tensor:
    saved.append(tuple(x.shape))
    return x


def same(x: Any) -> Any:
    return x


def plain_head(vocabulary: int, options: dict[str, Any], bias: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of head and loss in plain torch."""
    hidden, weight, shift = (x.requires_grad_() for x in head_inputs(vocabulary))
    loss = plain_loss(
        F.linear(hidden, weight, shift if bias else None), targets_of(vocabulary, options), *arguments(options)
    )
    (loss * wave(6, 2, 8)).sum().backward()
    found = {"hidden": hidden.grad, "weight": weight.grad}
    return loss.detach(), {**found, "bias": shift.grad} if bias else found


def check_fused(
    world: World, n: int, vocabulary: int, options: dict[str, Any], chunks: list[Any], how: Any
) -> list[Any]:
    loss, gradients = plain_head(vocabulary, options, how.get("bias", False))
    results = world.run(Layout(tensor=n), fused, vocabulary, options, chunks, how)
    for rank, got in enumerate(results):
        for result in got:
            torch.testing.assert_close(result["loss"], loss, **TIGHT)
            assert set(result["gradients"]) == set(gradients)
            for name, full in gradients.items():
                expected = full if name == "hidden" else padded(full, n, 0, 0.0)[rank]
                if name == "hidden" and "sequence_dim" in how:
                    expected = full.chunk(n, how["sequence_dim"])[rank]
                if name in how.get("frozen", ()):
                    assert result["gradients"][name] is None
                else:
                    torch.testing.assert_close(result["gradients"][name], expected, **TIGHT, msg=f"{name} {chunks}")
    return results


@RANKS
@pytest.mark.parametrize("vocabulary", [8, 5, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fused_head_and_loss_equal_plain_torch_for_any_chunk(
    world: World, n: int, vocabulary: int, options: dict[str, Any]
) -> None:
    for got in check_fused(world, n, vocabulary, options, [1, 3, 7, 16, 99, None], {"bias": vocabulary == 5}):
        for result in got:
            assert result["calls"] == ({} if n == 1 else {"all_reduce": 3}), "two for all chunks, one backward"
            assert max(torch.Size(shape).numel() for shape in result["saved"]) <= 2 * 8 * HIDDEN


@RANKS
@pytest.mark.parametrize("dim", [0, 1])
def test_fused_head_takes_its_part_of_the_sequence(world: World, n: int, dim: int) -> None:
    if dim == 0 and n == 4:
        n = 2  # there are two rows
    for got in check_fused(world, n, 5, OPTIONS[3], [3, None], {"sequence_dim": dim, "bias": True}):
        for result in got:
            sent = {"all_gather": 2, "all_reduce": 2, "reduce_scatter": 1}
            assert result["calls"] == ({} if n == 1 else sent)
            shape = [2, 8, HIDDEN]
            shape[dim] //= n
            assert tuple(shape) in result["saved"], "only the shard is kept for backward"
            assert n == 1 or (2, 8, HIDDEN) not in result["saved"]
            assert n == 1 or (16, HIDDEN) not in result["saved"]


@pytest.mark.parametrize(
    "how",
    [
        {"frozen": ("weight",)},
        {"frozen": ("hidden",)},
        {"frozen": ("weight", "bias"), "bias": True},
        {"frozen": ("bias", "hidden"), "bias": True},
        {"strided": True},
    ],
    ids=str,
)
def test_fused_head_with_frozen_inputs_and_any_strides(world: World, how: dict[str, Any]) -> None:
    for got in check_fused(world, 2, 5, OPTIONS[1], [3], how):
        assert got[0]["calls"] == {"all_reduce": 2 if "hidden" in how.get("frozen", ()) else 3}


def halves(mesh: Mesh, dtype: torch.dtype, autocast: bool) -> list[tuple[Tensor, ...]]:
    """Loss and gradients, fused in chunks and head and loss apart."""
    comm, target = mesh.tensor, targets_of(8, {})
    results = []
    for chunk_rows in (3, None):
        hidden, weight, bias = (x.to(torch.float32 if autocast else dtype) for x in head_inputs(8))
        x, w, b = hidden.requires_grad_(), part(weight, comm, 0), part(bias, comm, 0)
        with torch.autocast("cpu", dtype, enabled=autocast):
            if chunk_rows is None:
                y = F.linear(engine.comm.autograd.identity_all_reduce(x, comm), w, b)
                loss = vocab_parallel_cross_entropy(y, target, comm, z_loss=0.01)
            else:
                loss = vocab_parallel_linear_cross_entropy(
                    x, w, target, comm, bias=b, z_loss=0.01, chunk_rows=chunk_rows
                )
        loss.sum().backward()
        results.append((loss.detach(), x.grad, w.grad, b.grad))
    return results


@pytest.mark.parametrize("autocast", [False, True], ids=["stored", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_head_in_half_precision_equals_head_and_loss_apart(
    world: World, dtype: torch.dtype, autocast: bool
) -> None:
    for together, apart in world.run(Layout(tensor=2), halves, dtype, autocast):
        assert together[0].dtype == torch.float32
        torch.testing.assert_close(together[0], apart[0], rtol=1e-6, atol=1e-6)
        for got, expected in zip(together[1:], apart[1:], strict=True):
            assert got.dtype == expected.dtype == (torch.float32 if autocast else dtype)
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_what_the_fused_head_cannot_take_is_refused_before_anything_is_sent() -> None:
    comm = engine.plan_mesh(Layout(tensor=4), 1).tensor
    x, weight, target = torch.zeros(2, 3, 6), torch.zeros(3, 6), torch.zeros(2, 3, dtype=torch.int64)

    def call(h: Tensor = x, w: Tensor = weight, ids: Tensor = target, **options: Any) -> Callable[[], Tensor]:
        return lambda: vocab_parallel_linear_cross_entropy(h, w, ids, comm, **options)

    calls = {
        "hidden (2, 3, 6) and weight (3, 5) do not fit: give (..., H) and (vocabulary / 4, H)": call(w=weight[:, :5]),
        "a weight (3, 6) has a bias (3,), not (4,)": call(bias=torch.zeros(4)),
        "hidden (2, 3, 6) needs a target of shape (2, 3), not (6,)": call(ids=target.flatten()),
        "sequence_dim=2: hidden (2, 3, 6) has the dims 0 to 1 before its last": call(sequence_dim=2),
        "sequence_dim=1 of target (2, 10) over axis 'tensor': 10 does not divide by 4": call(
            ids=target.new_zeros(2, 10), sequence_dim=1
        ),
        "needs a target of shape (2, 12), the whole of what 4 ranks hold along dim 1, not (2, 8)": call(
            ids=target.new_zeros(2, 8), sequence_dim=1
        ),
        "hidden is torch.float32, weight torch.bfloat16: bring them to one dtype": call(w=weight.bfloat16()),
        "hidden is torch.float32, weight torch.float32, bias torch.float64: bring": call(bias=torch.zeros(3).double()),
        "torch.int64 is no floating dtype": call(x.long(), weight.long()),
        "vocabulary=13 over 4 ranks of axis 'tensor' is 4 columns on each, but this rank has 3": call(vocabulary=13),
        "target 10 is outside the vocabulary: ids go from 0 to 9": call(ids=target + 10, vocabulary=10),
        "label_smoothing=2.0: give a share": call(label_smoothing=2.0),
        "chunk_rows=0: a chunk has at least 1 row": call(chunk_rows=0),
        "chunk_rows=1.5: a chunk has at least 1 row": call(chunk_rows=1.5),
    }
    for expected, text in zip(calls, refusals(list(calls.values())), strict=True):
        assert text.startswith("vocab_parallel_linear_cross_entropy: ")
        assert expected in text


def test_fused_head_of_no_rows_and_of_one() -> None:
    comm = engine.plan_mesh(Layout(), 0).tensor
    hidden, weight, _ = head_inputs(5)
    x, w = hidden[:0].clone().requires_grad_(), weight.clone().requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(x, w, torch.empty(0, 8, dtype=torch.int64), comm)
    loss.sum().backward()
    assert loss.shape == (0, 8)
    assert x.grad.shape == (0, 8, HIDDEN)
    assert torch.equal(w.grad, torch.zeros_like(w))
    one = vocab_parallel_linear_cross_entropy(hidden[0, 0], w, torch.tensor(3), comm)
    torch.testing.assert_close(one, F.cross_entropy(w @ hidden[0, 0], torch.tensor(3)), **TIGHT)


# ---- training --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Returns hidden states; the table is the head's weight too."""

    def __init__(self, table: nn.Module, scale: nn.Module) -> None:
        super().__init__()
        self.table, self.scale = table, scale

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.scale(self.table(ids)))


ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def batches(vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    return [((ids_of(vocabulary) + k) % vocabulary, targets_of(vocabulary, {}).roll(k, 1)) for k in range(3)]


def trained(mesh: Mesh, vocabulary: int, stage: int) -> tuple[list[float], dict[str, Tensor], float]:
    torch.manual_seed(3)
    table = VocabParallelEmbedding(vocabulary, HIDDEN, mesh.tensor, dtype=DOUBLE)
    model = Tied(table, nn.LayerNorm(HIDDEN, dtype=DOUBLE))

    def loss(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        rows = vocab_parallel_linear_cross_entropy(
            hidden, table.weight, target, mesh.tensor, vocabulary=vocabulary, chunk_rows=3
        )
        return rows.sum(), (target != -100).sum()

    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, **ADAMW)
    step = engine.TrainStep(model, optimizer, loss, mesh, clip_grad_norm=0.1)
    numbers = []
    for ids, target in batches(vocabulary):
        size, here = mesh.data.size, mesh.data.rank
        result = step(ids.chunk(size)[here], target.chunk(size)[here])
        numbers += [result.loss.item(), result.grad_norm.item()]
    behind = table.placements["weight"].padding(mesh.tensor.rank, mesh.tensor.size)
    rest = table.weight.detach()[table.weight.shape[0] - behind :]
    return numbers, engine.full_state_dict(model, mesh), rest.abs().sum().item()


@pytest.mark.parametrize(
    ("layout", "stage"), [(Layout(tensor=2), 0), (Layout(tensor=4), 2), (Layout(data=2, tensor=2), 2)], ids=str
)
@pytest.mark.parametrize("vocabulary", [5, 3])
def test_training_a_padded_tied_head_equals_plain_training(
    world: World, layout: Layout, stage: int, vocabulary: int
) -> None:
    torch.manual_seed(3)
    table = nn.Embedding(vocabulary, HIDDEN, dtype=DOUBLE)
    model = Tied(table, nn.LayerNorm(HIDDEN, dtype=DOUBLE))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    numbers = []
    for ids, target in batches(vocabulary):
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(model(ids), table.weight).flatten(0, 1), target.flatten())
        loss.backward()
        numbers += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
    for got, state, rest in world.run(layout, trained, vocabulary, stage):
        assert got == pytest.approx(numbers, rel=1e-10)
        assert rest == 0.0, "padding stays zero"
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10, msg=name)


# ---- memory ----------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that are still alive. Tensors on meta count too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            self._note(given, counts=False)  # made before, or counted already
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            self._note(made, counts=True)
        return result

    def _note(self, value: Any, counts: bool) -> None:
        if not isinstance(value, Tensor) or value.untyped_storage()._cdata in self._known:
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counts else 0
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Alone:
    """What a group of one rank does, for tensors on meta, which a mesh refuses."""

    name, size, rank, checks = "tensor", 1, 0, False

    def all_reduce(self, x: Tensor, *_: str) -> Tensor:
        return x


def head_and_loss(together: bool, tokens: int, vocabulary: int, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """Return forward and backward of a head of hidden size 8 and its loss."""
    comm: Any = Alone() if device == "meta" else engine.plan_mesh(Layout(), 0).tensor
    hidden = torch.ones(tokens, 8, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(vocabulary, 8, device=device, dtype=dtype, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.int64, device=device)

    def run() -> None:
        if together:
            loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, comm)
        else:
            loss = vocab_parallel_cross_entropy(F.linear(hidden, weight), target, comm)
        loss.sum().backward()

    return run


def live_peak(together: bool, *case: Any) -> int:
    run = head_and_loss(together, *case)
    with LiveBytes() as live:
        run()
    return live.peak


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4 + 4), (torch.bfloat16, 4 + 4 + 2)], ids=str)
def test_at_128k_ids_and_4k_tokens_the_fused_peak_is_less_than_a_quarter(dtype: torch.dtype, width: int) -> None:
    """On meta, where the same operations make the same tensors, but without memory. Apart, each of the 2^29 logits has
    an exponential and a gradient in single precision, and then the latter in half; together there is one chunk, and
    the weight's gradient.
    """
    case = (4096, 131072, "meta", dtype)
    apart, together = live_peak(False, *case), live_peak(True, *case)
    assert apart == pytest.approx(2**29 * width, rel=0.02)
    assert together < apart / 4
    weight = 131072 * 8 * (4 if dtype == torch.float32 else 4 + 2)  # the sum, and in half precision one chunk's
    assert together == pytest.approx(CHUNK_BYTES + weight, rel=0.02)


def high_water(_: Mesh, together: bool, *case: Any) -> int:
    """Return the bytes by which this process grew at most, as the kernel counts them."""
    head_and_loss(together, 8, 1024, "cpu", torch.float32)()
    run = head_and_loss(together, *case, "cpu", torch.float32)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts afresh at what there is
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's high-water mark of Linux")
def test_the_memory_that_the_kernel_counts_is_the_memory_of_the_tensors(world: World) -> None:
    """Real memory, at an eighth of the tokens."""
    case = (512, 131072)
    ((apart,), (together,)) = (world.run(Layout(), high_water, way, *case) for way in (False, True))
    assert apart == pytest.approx(live_peak(False, *case, "meta", torch.float32), rel=0.1)
    assert together == pytest.approx(live_peak(True, *case, "meta", torch.float32), rel=0.1)
    assert together < apart / 4
