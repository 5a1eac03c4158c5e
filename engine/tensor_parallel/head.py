"""A language model's head and its loss in one: logits exist for one chunk of rows at a time, forward and backward.

Legend: N rows (tokens), H hidden size, V the vocabulary, T = comm.size. Forward keeps three numbers for each row;
backward makes a chunk's logits again, then their gradient in the same memory, and from that the gradients of hidden and
weight. Costs one more product with the weight than head and loss apart; for one row's mathematics see loss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.errors import DtypeError, LayoutError, UsageError
from engine.tensor_parallel.checks import check_input
from engine.tensor_parallel.loss import Criterion, Targets, is_half
from engine.tensor_parallel.product import autocast

CHUNK_BYTES = 64 * 2**20
"""Memory for a chunk's logits where no chunk_rows are given."""


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    bias: Tensor | None = None,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """Return vocab_parallel_cross_entropy(hidden weight^T + bias, target, comm, ...) without ever holding all logits.

    hidden: (..., H), equal on all ranks of `comm`; with `sequence_dim`, counted from the front, this rank's part of it
    along that dim, of which only the part is kept for backward. weight: (V / T rounded up, H) and bias: (V / T rounded
    up,), as ColumnParallelLinear(H, V, comm) holds them; rows behind the vocabulary may hold anything. All of one
    floating dtype; under torch.autocast of its dtype. target: (...), of any integer dtype, whole and equal on all
    ranks. Result: (...), not reduced, equal on all ranks, float32 for half precision, else of hidden's dtype.
    vocabulary, ignore_index, label_smoothing, z_loss: as in vocab_parallel_cross_entropy.

    chunk_rows: rows whose logits exist at a time; default: equal chunks of at most 64 MiB of logits. More rows make
    larger matrix products, and take chunk_rows * V / T elements of memory. In half precision logits and the sums over
    chunks are float32, the latter as large as two weights.

    All ranks of `comm` must call it with the same options. It sends the maximum and the sums of each row once forward,
    and the gradient of hidden once backward (all-reduce, with sequence_dim reduce-scatter, and then an all-gather of
    hidden each way).

    A model whose last layer returns hidden states has a head that it does not call, and takes the weight in the loss:

        class Last(nn.Module):
            def __init__(self, comm):
                super().__init__()
                self.norm, self.head = nn.LayerNorm(H), ColumnParallelLinear(H, V, comm, bias=False)

            def forward(self, x):
                return self.norm(x)

        def loss(hidden, target):  # of TrainStep, which divides by the global count
            rows = vocab_parallel_linear_cross_entropy(hidden, last.head.weight, target, mesh.tensor, vocabulary=V)
            return rows.sum(), (target != -100).sum()

    Raises, before anything is sent, UsageError for shapes and options that do not fit and, on a CPU, for a target
    outside the vocabulary; LayoutError for a vocabulary or a sequence that is not cut into such shards; DtypeError for
    dtypes that differ or do not fit.
    """
    call = "vocab_parallel_linear_cross_entropy"
    rows = _checked_shape(call, hidden, weight, bias, target, comm, sequence_dim)
    hidden, weight, bias = autocast(hidden), autocast(weight), None if bias is None else autocast(bias)
    if {hidden.dtype, weight.dtype} | ({bias.dtype} if bias is not None else set()) != {hidden.dtype}:
        raise DtypeError(
            f"{call}: hidden is {hidden.dtype}, weight {weight.dtype}"
            + ("" if bias is None else f", bias {bias.dtype}")
            + ": bring them to one dtype"
        )
    columns = weight.shape[0]
    total = columns * comm.size if vocabulary is None else vocabulary
    criterion = Criterion(call, comm, columns, total, ignore_index, label_smoothing, z_loss)
    target = criterion.checked(hidden, target)
    if chunk_rows is None:
        chunk_rows = _default_chunk(rows, columns, hidden.dtype)
    elif not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool) or chunk_rows < 1:
        raise UsageError(f"{call}: chunk_rows={chunk_rows!r}: a chunk has at least 1 row; None chooses by memory")
    if comm.checks and comm.size > 1:
        check_input(hidden, comm, sequence_dim, call)
    return apply(_HeadLoss, hidden, weight, bias, target, criterion, chunk_rows, sequence_dim)


def _checked_shape(
    call: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    comm: Communicator,
    sequence_dim: int | None,
) -> int:
    """Return the number of rows. Raises UsageError for shapes that do not belong together."""
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"{call}: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: "
            f"give (..., H) and (vocabulary / {comm.size}, H)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(
            f"{call}: a weight {tuple(weight.shape)} has a bias {tuple(weight.shape[:1])}, not {tuple(bias.shape)}"
        )
    shape = list(hidden.shape[:-1])
    if sequence_dim is not None:
        if not 0 <= sequence_dim < len(shape):
            raise UsageError(
                f"{call}: sequence_dim={sequence_dim}: hidden {tuple(hidden.shape)} has the dims 0 to "
                f"{len(shape) - 1} before its last"
            )
        shape[sequence_dim] *= comm.size
        length = target.shape[sequence_dim] if target.dim() == len(shape) else shape[sequence_dim]
        if length % comm.size:
            raise LayoutError(
                f"{call}: sequence_dim={sequence_dim} of target {tuple(target.shape)} over axis {comm.name!r}: "
                f"{length} does not divide by {comm.size}"
            )
    if tuple(target.shape) != tuple(shape):
        whole = "" if sequence_dim is None else f", the whole of what {comm.size} ranks hold along dim {sequence_dim}"
        raise UsageError(
            f"{call}: hidden {tuple(hidden.shape)} needs a target of shape {tuple(shape)}{whole}, "
            f"not {tuple(target.shape)}"
        )
    return target.numel()


def _default_chunk(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the rows of equal chunks whose logits, and their float32 copy in half precision, fit in CHUNK_BYTES."""
    most = max(1, CHUNK_BYTES // (columns * (dtype.itemsize + (4 if is_half(dtype) else 0))))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


class _Chunks:
    """The logits of one chunk of rows after another, each in the memory of the last. Padding, which may hold anything,
    is never multiplied: its logits are 0.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, length: int, real: int) -> None:
        """rows: (N, H); real: rows of the weight that are not padding."""
        self.rows, self.weight, self.length, self.real = rows, weight, length, real
        self.used, self.bias = weight[:real], None if bias is None else bias[:real]
        self.product = weight.new_empty(min(length, rows.shape[0]), weight.shape[0])
        self.product[:, real:].zero_()
        self.values = self.product.float() if is_half(weight.dtype) else self.product

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield first row, row behind the last, and the logits, at least in float32, for the caller to overwrite."""
        for start in range(0, self.rows.shape[0], self.length):
            stop = min(start + self.length, self.rows.shape[0])
            product = self.product[: stop - start]
            if self.bias is None:
                torch.mm(self.rows[start:stop], self.used.t(), out=product[:, : self.real])
            else:
                torch.addmm(self.bias, self.rows[start:stop], self.used.t(), out=product[:, : self.real])
            yield start, stop, product if self.values is self.product else self.values[: stop - start].copy_(product)

    def rounded(self, values: Tensor) -> Tensor:
        """Return a chunk's values in the weight's dtype."""
        return values if self.values is self.product else self.product[: values.shape[0]].copy_(values)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        criterion: Criterion,
        chunk_rows: int,
        sequence_dim: int | None,
    ) -> Tensor:
        at = criterion.locate(target.reshape(-1))
        chunks = _Chunks(_whole(hidden, criterion.comm, sequence_dim), weight, bias, chunk_rows, criterion.real)
        sums = chunks.values.new_empty(4 if criterion.label_smoothing else 3, target.numel())
        for start, stop, logits in chunks:
            sums[:, start:stop] = criterion.row_sums(logits, at.ids[start:stop], logits)[1]
        loss, slope = criterion.combine(sums, at)
        ctx.save_for_backward(hidden, weight, bias, sums[0].clone(), slope, at.ids, at.elsewhere, at.ignored)
        ctx.criterion, ctx.chunk_rows, ctx.sequence_dim = criterion, chunk_rows, sequence_dim
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, largest, slope, *located = ctx.saved_tensors
        criterion, at, grad = ctx.criterion, Targets(*located), grads[0].reshape(-1)
        whole = _whole(hidden, criterion.comm, ctx.sequence_dim)
        chunks = _Chunks(whole, weight, bias, ctx.chunk_rows, criterion.real)
        sums = _Gradients(chunks, *ctx.needs_input_grad[:3])
        for start, stop, logits in chunks:
            used, rows = criterion.unpadded(logits), at.rows(start, stop)
            shares = criterion.shares(used, largest[start:stop], used)
            criterion.gradient_into(logits, shares, slope[start:stop], rows, grad[start:stop])
            sums.add(start, stop, logits)
        of_hidden = None
        if sums.hidden is not None:
            of_hidden = _summed(sums.hidden, hidden, criterion.comm, ctx.sequence_dim)
        of_weight = None if sums.weight is None else sums.weight.to(weight.dtype)
        of_bias = None if sums.bias is None else sums.bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None


class _Gradients:
    """The wanted ones of the gradients of hidden, weight and bias, chunk by chunk."""

    def __init__(self, chunks: _Chunks, hidden: bool, weight: bool, bias: bool) -> None:
        exact = chunks.values.dtype
        self.chunks = chunks
        self.hidden = torch.empty_like(chunks.rows) if hidden else None
        self.weight = torch.zeros_like(chunks.weight, dtype=exact) if weight else None
        self.bias = chunks.weight.new_zeros(chunks.weight.shape[0], dtype=exact) if bias else None

    def add(self, start: int, stop: int, of_logits: Tensor) -> None:
        """Add what comes from rows [start, stop), whose logits have this gradient; (rows, columns)."""
        rows, product, real = self.chunks.rows[start:stop], self.chunks.rounded(of_logits), self.chunks.real
        if self.bias is not None:
            self.bias += of_logits.sum(dim=0)
        if self.hidden is not None:
            torch.mm(product[:, :real], self.chunks.used, out=self.hidden[start:stop])
        if self.weight is None:
            return
        if self.weight.dtype == product.dtype:
            self.weight[:real].addmm_(product[:, :real].t(), rows)
        else:
            self.weight[:real] += product[:, :real].t() @ rows


def _whole(hidden: Tensor, comm: Communicator, sequence_dim: int | None) -> Tensor:
    """Return all rows, (N, H)."""
    whole = hidden if sequence_dim is None else comm.all_gather(hidden, sequence_dim)
    return whole.reshape(-1, whole.shape[-1]).contiguous()


def _summed(partial: Tensor, hidden: Tensor, comm: Communicator, sequence_dim: int | None) -> Tensor:
    """Return the gradient of `hidden` from this rank's summand of it for all rows, (N, H), which is overwritten."""
    if sequence_dim is None:
        return comm.all_reduce(partial).view(hidden.shape)
    shape = list(hidden.shape)
    shape[sequence_dim] *= comm.size
    return comm.reduce_scatter(partial.view(shape), sequence_dim)
