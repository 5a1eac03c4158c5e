"""The parity reference: the same GPT in plain PyTorch, in one process. Uses nothing of `engine` and nothing of
`examples`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, sequence: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1]))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, key_heads: int):
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, hidden + 2 * (hidden // heads) * key_heads, bias=False)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        size = h // self.heads
        parts = self.qkv(self.norm(x)).split([h, size * self.key_heads, size * self.key_heads], -1)
        q, k, v = (y.view(b, s, -1, size).transpose(1, 2) for y in parts)
        k, v = (z.repeat_interleave(self.heads // self.key_heads, 1) for z in (k, v))
        scores = (q @ k.transpose(-2, -1)) / (h // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, h))


class MLP(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


def plain_gpt(
    *, vocabulary: int, hidden: int, heads: int, sequence: int, layers: int, tied: bool, key_heads: int | None = None
) -> nn.Sequential:
    model = nn.Sequential(
        Embedding(vocabulary, hidden, sequence),
        *(half for _ in range(layers) for half in (Attention(hidden, heads, key_heads or heads), MLP(hidden))),
        Head(vocabulary, hidden),
    )
    if tied:
        model[-1].project.weight = model[0].token.weight
    return model


def train_plain(
    model: nn.Sequential,
    batches: list[tuple[Tensor, Tensor]],
    *,
    clip: float | None,
    optimizer: Any = torch.optim.AdamW,
    **options: Any,
) -> dict[str, Any]:
    """Train on the global batches and return what a parallel run must equal: losses, norms, gradients, weights."""
    optim = optimizer(model.parameters(), **options)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for inputs, targets in batches:
        optim.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        result["losses"].append(loss.item())
        result["norms"].append(norm.item())
        result["gradients"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optim.step()
    result["weights"] = {n: p.detach().clone() for n, p in model.state_dict().items()}
    return result
