"""Hugging Face models with dropout from Streams: on every layout the numbers of the plain model with the same masks.

The plain model's masks are those of `tests.plain_philox`, by the names below in the order in which its code drops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import engine
from engine import Layout
from engine.tensor_parallel import Streams, huggingface_dropouts, huggingface_plan, parallelize
from tests.plain_philox import mask_of
from tests.test_huggingface import ADAMW, batch, build, float32_lifted, next_token
from tests.world import World, refusals

P, STEPS = 0.2, 2
BLOCKS = {
    "gpt2": ("transformer.h.{}.", ("attn.weights_dropout", "attn.resid_dropout", "mlp.dropout")),
    "llama": ("model.layers.{}.", ("self_attn.weights_dropout",)),
    "bert": (
        "bert.encoder.layer.{}.",
        ("attention.self.weights_dropout", "attention.output.dropout", "output.dropout"),
    ),
}
FIRST = {"gpt2": ["transformer.drop"], "llama": [], "bert": ["bert.embeddings.dropout"]}


def with_dropout(kind: str, attention: str = "sdpa") -> nn.Module:
    """Return a model in training mode that drops everywhere where its configuration lets it."""
    model = build(kind, attention, config=dict.fromkeys(_PROBABILITIES[kind], P))
    return model.train()


_PROBABILITIES = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


class Dropped(TorchFunctionMode):
    """Where torch drops, drop the next of `names`."""

    def __init__(self, names: list[str], step: int) -> None:
        super().__init__()
        self.names, self.step = names, step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return args[0] * mask_of(self.names.pop(0), self.step, tuple(args[0].shape), P, 0) / (1 - P)


def train_plainly(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = with_dropout(kind, "eager")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    prefix, names = BLOCKS[kind]
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, target = batch(step)
        order = [*FIRST[kind], *(prefix.format(block) + name for block in range(2) for name in names)]
        with float32_lifted(kind), Dropped(order, step):
            loss = F.cross_entropy(model(ids).logits.flatten(0, 1), target.flatten())
            loss.backward()
        assert not order, "the code drops in other places than named above"
        losses.append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


def train(mesh: engine.Mesh, kind: str, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    model = with_dropout(kind)
    parallelize(model, mesh.tensor, huggingface_plan(model))
    huggingface_dropouts(model, Streams(mesh.tensor, seed=mesh.seed, mode="reproducible"))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, **ADAMW)
    step = engine.TrainStep(model, optimizer, next_token, mesh, microbatches=microbatches)
    losses = []
    with float32_lifted(kind):
        for number in range(STEPS):
            ids, target = (each.chunk(mesh.data.size)[mesh.data.rank] for each in batch(number))
            losses.append(step({"input_ids": ids}, target).loss.item())
    return losses, engine.full_state_dict(model, mesh)


@pytest.mark.parametrize(
    ("kind", "layout", "microbatches"),
    [
        ("gpt2", Layout(tensor=2), 1),
        ("gpt2", Layout(data=2, tensor=2), 2),
        ("llama", Layout(tensor=4), 1),
        ("bert", Layout(), 2),
        ("bert", Layout(tensor=4), 1),
    ],
    ids=str,
)
def test_all_dropout_is_that_of_one_process_on_every_layout(
    world: World, kind: str, layout: Layout, microbatches: int
) -> None:
    losses, weights = train_plainly(kind)
    for got, state in world.run(layout, train, kind, microbatches):
        assert got == pytest.approx(losses, rel=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_what_drops_nothing_stays_and_what_is_unknown_is_refused() -> None:
    streams = Streams(engine.plan_mesh(Layout(tensor=2), 0).tensor, seed=0)
    model = huggingface_dropouts(build("llama"), streams)
    assert model.config._attn_implementation == "sdpa"
    model = huggingface_dropouts(with_dropout("gpt2").eval(), streams)
    assert model.config._attn_implementation == "engine_streams"
    plain = with_dropout("gpt2", "eager").eval()
    ids = batch(0)[0]
    assert torch.equal(model(ids).logits, plain(ids).logits), "in eval mode nothing is dropped"
    assert list(model.state_dict()) == list(plain.state_dict())
    upcast = build("gpt2", config={"reorder_and_upcast_attn": True})
    assert refusals(
        [lambda: huggingface_dropouts(nn.Linear(2, 2), streams), lambda: huggingface_dropouts(upcast, streams)]
    ) == [
        "huggingface_dropouts: a Linear of model_type='None': known are bert, gpt2, llama, mistral, qwen2, qwen3; in "
        "other models write engine.tensor_parallel.Dropout",
        "huggingface_dropouts: GPT-2's reorder_and_upcast_attn=True is attention of its own: unset it",
    ]
