"""An embedding table whose rows are shared by the ranks of the tensor axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.comm.autograd import all_reduce_identity, reduce_scatter_all_gather
from engine.comm.communicator import Communicator
from engine.errors import LayoutError, UsageError
from engine.placement import Part, cut, divide
from engine.tensor_parallel.linear import Init, keep_shard


class VocabParallelEmbedding(nn.Module):
    """Rows of a table, looked up by id, with the vocabulary cut over the tensor axis.

    Input: integer ids of any shape (...), equal on all ranks of `comm`; output (..., embedding_dim), summed over
    `comm`: each id's row comes from the rank that holds it. With `sequence_dim` the output is this rank's part of that
    along the dim (reduce-scatter), as sequence parallelism goes on with.

    `weight`: (num_embeddings / T rounded up, embedding_dim). Rows behind the last id are zero, are never looked up, and
    are in no full state dict. All ranks of `comm` must run it.
    """

    is_table = True  # looked up, not multiplied: not counted as work when layers are balanced over stages
    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Communicator,
        *,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
        sequence_dim: int | None = None,
    ) -> None:
        """Draw the full (num_embeddings, embedding_dim) table as nn.Embedding would (standard normal), or fill it with
        `init(weight)`, and keep this rank's rows. num_embeddings: any, also fewer than ranks. sequence_dim: of the ids,
        counted from the front.

        All ranks of `comm` must have torch's generator in the same state. Raises UsageError for a sequence_dim below 0.
        """
        super().__init__()
        weight = torch.empty(num_embeddings, embedding_dim, dtype=dtype)
        with torch.no_grad():
            nn.init.normal_(weight) if init is None else init(weight)
        self._hold(weight, comm, sequence_dim, None)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Communicator, *, sequence_dim: int | None = None
    ) -> VocabParallelEmbedding:
        """Return a table with the weights of `embedding`, of which this rank keeps its rows, in their dtype, on their
        device and with their requires_grad. A padding_idx is kept: its row gets no gradient. Draws and sends nothing;
        the weights must be equal on all ranks of `comm`.

        Raises UsageError for an embedding with max_norm, scale_grad_by_freq or sparse, LayoutError for a weight that is
        not of the declared shape.
        """
        given = {name: getattr(embedding, name) for name in ("max_norm", "scale_grad_by_freq", "sparse")}
        unsupported = [f"{name}={value}" for name, value in given.items() if value is not None and value is not False]
        if unsupported:
            raise UsageError(
                f"VocabParallelEmbedding.from_embedding: {', '.join(unsupported)} is not supported over axis "
                f"{comm.name!r}: rows lie on different ranks; make the nn.Embedding without"
            )
        declared = (embedding.num_embeddings, embedding.embedding_dim)
        if tuple(embedding.weight.shape) != declared:
            raise LayoutError(
                f"VocabParallelEmbedding.from_embedding: the weight has shape {tuple(embedding.weight.shape)}, but the "
                f"embedding declares {declared}: give a whole nn.Embedding"
            )
        table = cls.__new__(cls)
        nn.Module.__init__(table)
        table._hold(embedding.weight.detach(), comm, sequence_dim, embedding.padding_idx)
        table.weight.requires_grad_(embedding.weight.requires_grad)
        return table.train(embedding.training)

    def _hold(self, full: Tensor, comm: Communicator, sequence_dim: int | None, padding_idx: int | None) -> None:
        if sequence_dim is not None and sequence_dim < 0:
            raise UsageError(f"VocabParallelEmbedding: sequence_dim={sequence_dim}: count dims of the ids from 0")
        self.num_embeddings, self.embedding_dim = full.shape
        self.comm, self.sequence_dim, self.padding_idx = comm, sequence_dim, padding_idx
        self.placements = {"weight": cut(0, [Part(self.num_embeddings, padded=True)], comm.size)}
        self.weight = keep_shard(full, self.placements["weight"], comm)

    def forward(self, ids: Tensor) -> Tensor:
        """Raises UsageError for an id outside the vocabulary (on an accelerator the device's own assertion fires) and
        for ids without the sequence_dim, LayoutError where that dim does not divide by T.
        """
        if self.sequence_dim is not None:
            self._check_sequence(ids, self.sequence_dim)
        check_ids(ids, self.num_embeddings, "VocabParallelEmbedding: id")
        if self.comm.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        rows = self.weight.shape[0]
        local, elsewhere = local_ids(ids, rows, self.num_embeddings, self.comm)
        without = None if self.padding_idx is None else self.padding_idx - self.comm.rank * rows
        if without is not None and not 0 <= without < rows:
            without = None
        found = F.embedding(local, self.weight, without).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_dim is None:
            return all_reduce_identity(found, self.comm)
        return reduce_scatter_all_gather(found, self.comm, self.sequence_dim)

    def _check_sequence(self, ids: Tensor, dim: int) -> None:
        if dim >= ids.dim():
            raise UsageError(f"VocabParallelEmbedding: ids {tuple(ids.shape)} have no sequence_dim={dim}")
        what = f"VocabParallelEmbedding: sequence_dim={dim} of ids {tuple(ids.shape)} over axis {self.comm.name!r}"
        divide(ids.shape[dim], self.comm.size, what)

    def extra_repr(self) -> str:
        more = {"padding_idx": self.padding_idx, "sequence_dim": self.sequence_dim}
        listed = "".join(f", {name}={value}" for name, value in more.items() if value is not None)
        return f"num_embeddings={self.num_embeddings} / {self.comm.size}, embedding_dim={self.embedding_dim}{listed}"


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Raise UsageError for an id outside 0 .. size - 1. Only on a CPU, where looking costs no synchronisation."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise UsageError(f"{what} {low if low < 0 else high} is outside the vocabulary: ids go from 0 to {size - 1}")


def local_ids(ids: Tensor, shard: int, total: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return ids counted from this rank's first row, 0 where another rank holds the row, and the mask of those.

    An id outside the vocabulary is nobody's, also where a padded row has its number: it stays out of range, so that the
    look-up itself fails on every device.
    """
    local, outside = ids - comm.rank * shard, (ids < 0) | (ids >= total)
    elsewhere = ((local < 0) | (local >= shard)) & ~outside
    return local.masked_fill(elsewhere, 0).masked_fill(outside, shard), elsewhere
