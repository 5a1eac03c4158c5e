"""The head fused with the loss, in chunks of rows, against head and loss in plain torch; alone and in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout
from engine.tensor_parallel import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from tests.vocabulary_cases import (
    DOUBLE,
    OPTIONS,
    RANKS,
    TIGHT,
    Mesh,
    arguments,
    ids_of,
    padded,
    part,
    plain_loss,
    targets_of,
    wave,
)
from tests.world import World, refusals

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
