"""The GPT of the benchmark in plain PyTorch: what peers wrap, and whose weights every system starts from.

One nn.Sequential, so names and shapes are those of `engine.full_state_dict`. The same arithmetic as
`examples/gpt/model.py`, untied.
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


class Block(nn.Module):
    """Causal self-attention and an MLP over (B, S, H)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.hidden
        self.head_size = hidden // model.heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            y.view(*y.shape[:-1], -1, self.head_size).transpose(1, 2) for y in self.projected(self.norm1(x))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.down(F.gelu(self.up(self.norm2(x)))))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        return cast(Tensor, self.qkv(x)).chunk(3, -1)


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


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits (B, S, V) against targets (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: object) -> torch.optim.AdamW:
    """Return the optimizer that every system uses."""
    return torch.optim.AdamW(cast(list[nn.Parameter], parameters), **ADAMW)
