"""The GPT of the benchmark in plain PyTorch: what peers wrap, and whose weights every system starts from.

The same arithmetic as `examples/gpt/model.py`, untied, and the same shapes; `engine_model.engine_names` has the names.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.work import Model

# With the usual eps of 1e-8, Adam divides a wrong scale of the gradients away, and no loss would show it.
ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "fused": True}


class Embedding(nn.Module):
    """Token ids (B, S) to hidden states (B, S, H)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.position = nn.Embedding(model.sequence, model.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))


class Attention(nn.Module):
    """Causal self-attention over (B, S, H), added to its input."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.hidden
        self.head_size = hidden // model.heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            y.view(*y.shape[:-1], -1, self.head_size).transpose(1, 2) for y in self.projected(self.norm(x))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, x + self.out(mixed.transpose(1, 2).flatten(2)))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        return cast(Tensor, self.qkv(x)).chunk(3, -1)


class MLP(nn.Module):
    """Two projections over (B, S, H), added to their input."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.hidden
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.down(F.gelu(self.up(self.norm(x)))))


class Block(nn.Module):
    """Attention and an MLP over (B, S, H): what peers wrap and cut by."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(model), MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.mlp(self.attention(x)))


class Head(nn.Module):
    """Hidden states (B, S, H) to logits (B, S, V)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.project = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.project(self.norm(x)))


def gpt(model: Model, seed: int) -> nn.Sequential:
    """Return the whole model, with weights drawn from `seed`: the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(Embedding(model), *(Block(model) for _ in range(model.layers)), Head(model))


def halves(model: nn.Sequential) -> list[nn.Module]:
    """Return the layers of `gpt` as finely as the engine's, which are the halves of blocks."""
    return [half for layer in model for half in (layer.children() if isinstance(layer, Block) else (layer,))]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits (B, S, V) against targets (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: object) -> torch.optim.AdamW:
    """Return the optimizer that every system uses."""
    return torch.optim.AdamW(cast(list[nn.Parameter], parameters), **ADAMW)
