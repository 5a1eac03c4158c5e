"""Layers and losses whose matrices are shared by the ranks of the tensor axis."""

from engine.tensor_parallel.embedding import VocabParallelEmbedding
from engine.tensor_parallel.head import vocab_parallel_linear_cross_entropy
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.lora import LoRALinear, lora
from engine.tensor_parallel.loss import vocab_parallel_cross_entropy
from engine.tensor_parallel.norm import SyncBatchNorm
from engine.tensor_parallel.random import Dropout, Streams

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "LoRALinear",
    "RowParallelLinear",
    "Streams",
    "SyncBatchNorm",
    "VocabParallelEmbedding",
    "lora",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
