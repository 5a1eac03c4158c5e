"""A table of any vocabulary over the tensor axis against nn.Embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.placement import Part, Placement, cut
from engine.tensor_parallel import (
    VocabParallelEmbedding,
)
from tests.vocabulary_cases import (
    DOUBLE,
    RANKS,
    TIGHT,
    VOCABULARIES,
    Mesh,
    ids_of,
    padded,
    wave,
)
from tests.world import World, refusals


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
