"""Fewer key heads than tensor ranks, behind norms that work in float32, in Hugging Face's Qwen3 and in a model of one's
own: what is trained, frozen, adapted and split over the sequence, against the same model in one process.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout
from engine.placement import Part
from engine.tensor_parallel import Column, Plan, Replicated, Row, describe, huggingface_plan, lora, parallelize
from tests.test_huggingface import ADAMW, batch, build, next_token, wave
from tests.test_tensor_lora import PlainLoRA, filled
from tests.world import World, refusals

Mesh = engine.Mesh
POSITIONS = 4  # of each of the 8 rows: 32 tokens, by which a division rounds nothing, before backward or after it


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10, msg=name)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---- training --------------------------------------------------------------------------------------------------------


def train(mesh: Mesh, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build(kind)
    model = copy.deepcopy(parallelize(model, mesh.tensor, huggingface_plan(model)))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, **ADAMW)
    step = engine.TrainStep(model, optimizer, next_token, mesh, microbatches=2, clip_grad_norm=1.0)
    norms = []
    for number in range(3):
        ids, target = (each[:, :POSITIONS].chunk(mesh.data.size)[mesh.data.rank] for each in batch(number))
        norms.append(step({"input_ids": ids}, target).grad_norm.item())
    return norms, engine.full_state_dict(model, mesh)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3, 2 key heads", Layout(tensor=4)), ("qwen3, one key head", Layout(data=2, tensor=2))],
    ids=str,
)
def test_norms_and_weights_of_three_steps_are_those_of_one_process(world: World, kind: str, layout: Layout) -> None:
    plain = build(kind)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        ids, target = (each[:, :POSITIONS] for each in batch(number))
        F.cross_entropy(plain(ids).logits.flatten(0, 1), target.flatten()).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
    for got, state in world.run(layout, train, kind):
        assert got == pytest.approx(norms, rel=1e-10)
        close(state, plain.state_dict())


# ---- adapters, frozen weights, the gradient of the input -------------------------------------------------------------


def adapt(model: nn.Module, comm: engine.Communicator | None) -> nn.Module:
    """Adapt the first layer's key projection. Of the second only what is not on the keys' way is trained."""
    if comm is not None:
        parallelize(model, comm, huggingface_plan(model))
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_proj = PlainLoRA(first.k_proj, 3, 6.0) if comm is None else lora(first.k_proj, 3, 6.0)
    second.k_proj.requires_grad_(False)
    second.k_norm.requires_grad_(False)
    return model


def run_adapted(mesh: Mesh, kind: str) -> dict[str, Any]:
    model = adapt(build(kind), mesh.tensor)
    state = filled(adapt(build(kind), None).state_dict())
    engine.load_full_state_dict(model, mesh, state)
    x = wave(2, 6, 32).requires_grad_()
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    logits = model(inputs_embeds=x).logits
    (logits * wave(*logits.shape)).sum().backward()
    norm = optimizer.finish_gradients().item()
    return {"logits": logits.detach(), "x": x.grad, "gradients": optimizer.full_gradients(), "norm": norm}


@pytest.mark.parametrize(("kind", "n"), [("qwen3, 2 key heads", 4), ("qwen3, one key head", 2)], ids=str)
def test_adapters_inputs_and_what_lies_beside_frozen_norms_have_their_gradients(
    world: World, kind: str, n: int
) -> None:
    plain = adapt(build(kind), None)
    plain.load_state_dict(filled(plain.state_dict()))
    x = wave(2, 6, 32).requires_grad_()
    logits = plain(inputs_embeds=x).logits
    (logits * wave(*logits.shape)).sum().backward()
    wanted = gradients_of(plain)
    norm = torch.cat([each.flatten() for each in wanted.values()]).norm().item()
    for got in world.run(Layout(tensor=n), run_adapted, kind):
        close({"logits": got["logits"], "x": got["x"]}, {"logits": logits.detach(), "x": x.grad})
        unused = got["gradients"].pop("model.embed_tokens.weight")
        assert not unused.any()
        close(got["gradients"], wanted)
        assert got["norm"] == pytest.approx(norm, rel=1e-10)


# ---- a sequence that is split between the matrices -------------------------------------------------------------------


class Rounding(nn.Module):
    """A norm of each head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(wave(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.normalize(x.float(), dim=-1).double()


class Attention(nn.Module):
    """4 query heads of 4 over `heads` key heads, of as many positions as the projections return: Hugging Face's takes
    as many as it is given.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4 * n) for n in (4, heads, heads))
        self.out, self.q_norm, self.k_norm = nn.Linear(16, 8), Rounding(), Rounding()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)) for each in (self.q, self.k, self.v))
        heads = (each.transpose(1, 2) for each in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def attention(heads: int) -> Attention:
    torch.manual_seed(3)
    return Attention(heads).double()


def run_split(mesh: Mesh, heads: int) -> dict[str, Tensor]:
    model, keys = attention(heads), Column(parts=[Part(4 * heads, heads=heads)], sequence_dim=1)
    styles = {"q": Column(sequence_dim=1), "k": keys, "v": keys, "out": Row(sequence_dim=1)}
    norms = {"q_norm": Replicated(gradient="sum"), "k_norm": Replicated(gradient="sum", heads=heads)}
    parallelize(model, mesh.tensor, Plan({**styles, **norms}))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    x, up = (each.chunk(mesh.tensor.size, 1)[mesh.tensor.rank] for each in (wave(2, 8, 8), wave(2, 8, 8).cos()))
    x = x.clone().requires_grad_()
    y = model(x)
    (y * up).sum().backward()
    assert x.grad is not None
    norm = optimizer.finish_gradients()
    found = {"y": y.detach(), "x": x.grad}
    whole = {name: mesh.tensor.all_gather(each.contiguous(), 1) for name, each in found.items()}
    return {**whole, "norm": norm, **optimizer.full_gradients()}


@pytest.mark.parametrize(("heads", "n"), [(1, 2), (1, 4), (2, 4)])
def test_gradients_under_sequence_parallelism_are_those_of_one_process(world: World, heads: int, n: int) -> None:
    plain, x = attention(heads), wave(2, 8, 8).requires_grad_()
    y = plain(x)
    (y * wave(2, 8, 8).cos()).sum().backward()
    assert x.grad is not None
    wanted = gradients_of(plain)
    norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
    for got in world.run(Layout(tensor=n), run_split, heads):
        close(got, {"y": y.detach(), "x": x.grad, "norm": norm, **wanted})


# ---- what is refused -------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.norm(x)


def test_heads_that_a_plan_cannot_share_are_refused() -> None:
    comm, model = engine.plan_mesh(Layout(tensor=4), 0).tensor, nn.Sequential(Pair())

    def plan(key: str, heads: int) -> Plan:
        return Plan({key: Replicated(gradient="sum", heads=heads)})

    paired = parallelize(nn.Sequential(Pair()), comm, plan("0", 2))
    texts = refusals(
        [
            lambda: Replicated(heads=2),
            lambda: Replicated(gradient="sum", heads=0),
            lambda: Replicated(gradient="sum", heads=True),
            lambda: parallelize(model, comm, plan("0.norm.weight", 2)),
            lambda: describe(plan("0.norm", 3), model, 4),
            lambda: paired(torch.ones(2, 4)),
        ]
    )
    for text, wanted in zip(
        texts,
        [
            "Replicated(heads=2): each rank works on its own heads, so its gradient is a part of a sum: add gradient",
            "Replicated(heads=0): give the number of heads of the whole, at least 1",
            "Replicated(heads=True): give the number",
            "plan key '0.norm.weight': it names parameters, and heads=2 is for the module that returns the heads",
            "plan key '0.norm': 3 heads do not divide over 4 ranks, nor 4 ranks over the heads",
            "a plan gives Pair heads=2, but it returns a tuple: leave heads out",
        ],
        strict=True,
    ):
        assert wanted in text
    assert not model[0].norm._forward_hooks
    assert not parallelize(model, comm, plan("0.norm", 4))[0].norm._forward_hooks, "each rank has heads of its own"
