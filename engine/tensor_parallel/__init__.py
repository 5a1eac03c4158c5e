"""Layers and losses whose matrices are shared by the ranks of the tensor axis; plans that cut a module into them."""

from engine.tensor_parallel.embedding import VocabParallelEmbedding
from engine.tensor_parallel.head import vocab_parallel_linear_cross_entropy
from engine.tensor_parallel.huggingface import huggingface_plan
from engine.tensor_parallel.huggingface_dropout import huggingface_dropouts
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.lora import LoRALinear, lora
from engine.tensor_parallel.loss import vocab_parallel_cross_entropy
from engine.tensor_parallel.norm import SyncBatchNorm
from engine.tensor_parallel.plan import parallelize
from engine.tensor_parallel.plan_table import describe
from engine.tensor_parallel.random import Dropout, Streams
from engine.tensor_parallel.styles import Column, Divided, Plan, Replicated, Row, Sharded, Vocab

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "Divided",
    "Dropout",
    "LoRALinear",
    "Plan",
    "Replicated",
    "Row",
    "RowParallelLinear",
    "Sharded",
    "Streams",
    "SyncBatchNorm",
    "Vocab",
    "VocabParallelEmbedding",
    "describe",
    "huggingface_dropouts",
    "huggingface_plan",
    "lora",
    "parallelize",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
