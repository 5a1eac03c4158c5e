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
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.placement import Part, replicated
from engine.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide `hidden`, and be divided by the tensor axis."""
    key_heads: int | None = None
    """Heads of keys and values, each for heads / key_heads of the queries' (grouped-query attention); null: as many.
    Fewer than the tensor axis has ranks are held by several of them.
    """
    sequence: int = 128
    """Positions in one row."""
    vocabulary: int = 256
    """Token ids; 256 for bytes."""
    tied: bool = True
    """Whether the output projection is the token embedding's matrix."""
    sequence_parallel: bool = False
    """Whether each tensor rank keeps a part of the positions between the projections; the axis must divide
    `sequence`."""

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.keys, self.sequence, self.vocabulary) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not divide into heads={self.heads}: use a multiple of {self.heads}"
            )
        if self.heads % self.keys:
            raise ValueError(
                f"heads={self.heads} do not divide by key_heads={self.keys}: use a divisor of {self.heads}"
            )

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.key_heads is None else self.key_heads


def normal(std: float) -> Callable[[Tensor], Tensor]:
    """Return an initialiser for `init=`: normal with this standard deviation."""
    return partial(nn.init.normal_, std=std)


def sequence_dim(config: GPTConfig, tensor: engine.Communicator) -> int | None:
    """Return the dim of activations (B, S, H) that is cut over the tensor axis between the projections, if any."""
    return 1 if config.sequence_parallel and tensor.size > 1 else None


def own_part(module: Module, config: GPTConfig) -> Module:
    """Return the module, declared as used by each tensor rank on its own positions where these are cut."""
    if config.sequence_parallel:
        replicated(module, gradient="sum")
    return module


def projections(
    config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None
) -> tuple[Callable[..., ColumnParallelLinear], Callable[..., RowParallelLinear]]:
    """Return what makes the projections into a residual branch, and out of it."""
    dim = sequence_dim(config, tensor)
    branch = normal(0.02 / math.sqrt(2 * config.layers))
    return (
        partial(ColumnParallelLinear, comm=tensor, init=normal(0.02), dtype=dtype, sequence_dim=dim),
        partial(RowParallelLinear, comm=tensor, init=branch, dtype=dtype, sequence_dim=dim),
    )


class Embedding(nn.Module):
    """Token ids (B, S) to hidden states (B, S, H), with learned positions."""

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dim = sequence_dim(config, tensor)
        self.token = VocabParallelEmbedding(
            config.vocabulary, config.hidden, tensor, init=normal(0.02), dtype=dtype, sequence_dim=dim
        )
        self.position = own_part(nn.Embedding(config.sequence, config.hidden, dtype=dtype), config)
        nn.init.normal_(self.position.weight, std=0.02)
        self.tensor = tensor if dim is not None else None

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position.weight[: ids.shape[1]]
        if self.tensor is not None:
            positions = positions.chunk(self.tensor.size)[self.tensor.rank]
        hidden: Tensor = self.token(ids) + positions
        return hidden


class Attention(nn.Module):
    """The first half of a block: causal self-attention on a normalised copy of the residual stream (B, S, H), added to
    it.

    Queries, keys and values are one projection of three parts, so that a rank has its heads of each, and the gradient
    of their common input is summed once.
    """

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.heads % tensor.size:
            raise ValueError(
                f"heads={config.heads} do not divide over tensor({tensor.size}): use a multiple of {tensor.size} heads"
            )
        hidden = config.hidden
        self.head_size = hidden // config.heads
        self.norm = own_part(nn.LayerNorm(hidden, dtype=dtype), config)
        keys = Part(config.keys * self.head_size, heads=config.keys)
        parts = (Part(hidden, heads=config.heads), keys, keys)
        into, out = projections(config, tensor, dtype)
        self.qkv = into(hidden, hidden + 2 * keys.size, bias=False, parts=parts)
        self.out = out(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv(self.norm(x)).split(self.qkv.part_sizes, -1)
        query, key, value = map(self._heads, projected)  # (B, heads / T, S, head size), keys' heads may be fewer
        grouped = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + attended

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, H / T) to (B, heads / T, S, head size): a rank's part of the outputs is a part of the heads."""
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class MLP(nn.Module):
    """The second half of a block, in the same way."""

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        hidden = config.hidden
        self.norm = own_part(nn.LayerNorm(hidden, dtype=dtype), config)
        into, out = projections(config, tensor, dtype)
        self.up = into(hidden, 4 * hidden)
        self.down = out(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        mlp: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + mlp


class Head(nn.Module):
    """Hidden states (B, S, H) to this rank's part of the logits (B, S, V / T)."""

    def __init__(self, config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = own_part(nn.LayerNorm(config.hidden, dtype=dtype), config)
        self.project = ColumnParallelLinear(
            config.hidden,
            config.vocabulary,
            tensor,
            bias=False,
            init=normal(0.02),
            dtype=dtype,
            parts=[Part(config.vocabulary, padded=True)],
            sequence_dim=sequence_dim(config, tensor),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.project(self.norm(x))
        return logits


def gpt_layers(
    config: GPTConfig, tensor: engine.Communicator, dtype: torch.dtype | None = None
) -> list[engine.LayerSpec]:
    """Return the layers of a GPT, for PipelineModel. The halves of a block are layers of their own, so that stages can
    be cut between them.
    """
    first, last = ({"embedding": "token.weight"}, {"embedding": "project.weight"}) if config.tied else ({}, {})
    return [
        engine.LayerSpec(Embedding, config, tensor, dtype, tied=first),
        *[engine.LayerSpec(half, config, tensor, dtype) for _ in range(config.layers) for half in (Attention, MLP)],
        engine.LayerSpec(Head, config, tensor, dtype, tied=last),
    ]


def next_token_loss(
    tensor: engine.Communicator, vocabulary: int | None = None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the loss for TrainStep: the sum of cross-entropies in nats, and the number of counted tokens (-100 is
    not). vocabulary: where it does not divide over the tensor axis.
    """

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = vocab_parallel_cross_entropy(logits, targets, tensor, vocabulary=vocabulary)
        return losses.sum(), (targets != -100).sum()

    return loss
