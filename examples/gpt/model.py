"""A GPT written with the engine's layers: what a user writes to train on any layout.

Shapes: B rows, S positions, H hidden, T tensor ranks, V vocabulary. A list of LayerSpecs is the model; the engine
cuts it into stages. The token embedding and the output projection share one matrix when `tied`. Weights are drawn
with standard deviation 0.02, the projections that end a residual branch with 0.02 / sqrt(2 * layers), as in GPT-2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide `hidden`, and be divided by the tensor axis."""
    sequence: int = 128
    """Positions in one row."""
    vocabulary: int = 256
    """Token ids; 256 for bytes."""
    tied: bool = True
    """Whether the output projection is the token embedding's matrix."""

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.sequence, self.vocabulary) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not divide into heads={self.heads}: use a multiple of {self.heads}"
            )


def normal(std: float) -> Callable[[Tensor], Tensor]:
    """Return an initialiser for `init=`: normal with this standard deviation."""
    return partial(nn.init.normal_, std=std)


class Embedding(nn.Module):
    """Token ids (B, S) to hidden states (B, S, H), with learned positions."""

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.token = VocabParallelEmbedding(config.vocabulary, config.hidden, tensor, init=normal(0.02), dtype=dtype)
        self.position = nn.Embedding(config.sequence, config.hidden, dtype=dtype)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.token(ids) + self.position.weight[: ids.shape[1]]
        return hidden


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised copy of the residual stream (B, S, H)."""

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.heads % tensor.size:
            raise ValueError(
                f"heads={config.heads} do not divide over tensor({tensor.size}): use a multiple of {tensor.size} heads"
            )
        hidden = config.hidden
        self.head_size = hidden // config.heads
        branch = normal(0.02 / math.sqrt(2 * config.layers))
        column = partial(ColumnParallelLinear, comm=tensor, init=normal(0.02), dtype=dtype)
        row = partial(RowParallelLinear, comm=tensor, init=branch, dtype=dtype)
        self.norm1 = nn.LayerNorm(hidden, dtype=dtype)
        self.query = column(hidden, hidden, bias=False)
        self.key = column(hidden, hidden, bias=False)
        self.value = column(hidden, hidden, bias=False)
        self.out = row(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden, dtype=dtype)
        self.up = column(hidden, 4 * hidden)
        self.down = row(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = self._heads(self.query(y)), self._heads(self.key(y)), self._heads(self.value(y))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, heads / T, S, head size)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mlp

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, H / T) to (B, heads / T, S, head size): a rank's part of the outputs is a part of the heads."""
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class Head(nn.Module):
    """Hidden states (B, S, H) to this rank's part of the logits (B, S, V / T)."""

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden, dtype=dtype)
        self.project = ColumnParallelLinear(
            config.hidden, config.vocabulary, tensor, bias=False, init=normal(0.02), dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.project(self.norm(x))
        return logits


def gpt_layers(
    config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None
) -> list[engine.LayerSpec]:
    """Return the layers of a GPT, for PipelineModel."""
    first, last = ({"embedding": "token.weight"}, {"embedding": "project.weight"}) if config.tied else ({}, {})
    return [
        engine.LayerSpec(Embedding, config, tensor, dtype, tied=first),
        *[engine.LayerSpec(Block, config, tensor, dtype) for _ in range(config.layers)],
        engine.LayerSpec(Head, config, tensor, dtype, tied=last),
    ]


def next_token_loss(tensor: engine.Communicator) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the loss for TrainStep: the sum of cross-entropies in nats, and the number of counted tokens (-100 is
    not).
    """

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return vocab_parallel_cross_entropy(logits, targets, tensor).sum(), (targets != -100).sum()

    return loss
