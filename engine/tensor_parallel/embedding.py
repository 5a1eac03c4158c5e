"""An embedding table whose rows are shared by the ranks of the tensor axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.comm.autograd import all_reduce_identity
from engine.comm.communicator import Communicator
from engine.errors import UsageError
from engine.placement import Placement, divide
from engine.tensor_parallel.linear import Init, keep_shard


class VocabParallelEmbedding(nn.Module):
    """Rows of a table, looked up by id, with the vocabulary cut over the tensor axis.

    Input: integer ids of any shape (...), equal on all ranks of `comm`; output (..., embedding_dim), summed over
    `comm`: each id's row comes from the rank that holds it. `weight`: (num_embeddings / T, embedding_dim). All ranks
    of `comm` must run it.
    """

    is_table = True  # looked up, not multiplied: not counted as work when layers are balanced over stages

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Communicator,
        *,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the full table as nn.Embedding would (standard normal), or fill it with `init(weight)`, and keep this
        rank's rows.

        All ranks of `comm` must have torch's generator in the same state. Raises LayoutError when num_embeddings does
        not divide by T.
        """
        super().__init__()
        divide(num_embeddings, comm.size, f"VocabParallelEmbedding: num_embeddings over axis {comm.name!r}")
        self.num_embeddings, self.embedding_dim, self.comm = num_embeddings, embedding_dim, comm
        self.placements = {"weight": Placement(dim=0)}
        weight = torch.empty(num_embeddings, embedding_dim, dtype=dtype)
        with torch.no_grad():
            nn.init.normal_(weight) if init is None else init(weight)
        self.weight = keep_shard(weight, self.placements["weight"], comm)

    def forward(self, ids: Tensor) -> Tensor:
        """Raises UsageError for an id outside the vocabulary (on an accelerator the device's own assertion fires)."""
        check_ids(ids, self.num_embeddings, "VocabParallelEmbedding: id")
        if self.comm.size == 1:
            return F.embedding(ids, self.weight)
        local, elsewhere = local_ids(ids, self.weight.shape[0], self.num_embeddings, self.comm)
        rows = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return all_reduce_identity(rows, self.comm)

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings} / {self.comm.size}, embedding_dim={self.embedding_dim}"


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Raise UsageError for an id outside 0 .. size - 1. Only on a CPU, where looking costs no synchronisation."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise UsageError(f"{what} {low if low < 0 else high} is outside the vocabulary: ids go from 0 to {size - 1}")


def local_ids(ids: Tensor, shard: int, total: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return ids counted from this rank's first row, 0 where another rank holds the row, and the mask of those.

    An id outside the vocabulary is nobody's: it stays out of range, so that the look-up itself fails on every device.
    """
    local = ids - comm.rank * shard
    elsewhere = ((local < 0) | (local >= shard)) & (ids >= 0) & (ids < total)
    return local.masked_fill(elsewhere, 0), elsewhere
