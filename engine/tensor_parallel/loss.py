"""Cross-entropy over logits whose vocabulary is cut over the tensor axis, without gathering them.

With m the largest logit of a row, t its target, V the true vocabulary, s the label smoothing and z the z-loss:

    lse      = log(sum(exp(logits - m))) + m
    loss     = lse - (1 - s) logits[t] - s mean(logits) + z lse^2
    gradient = (1 + 2 z lse) softmax(logits) - (1 - s) onehot(t) - s / V

Each rank takes the softmax over its own columns; the ranks then send the maximum and the sums, a few numbers for each
row. Columns behind the true vocabulary are padding: never read, and without gradient. Smoothing as in
F.cross_entropy; z-loss as in PaLM (arXiv:2204.02311, section 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.errors import DtypeError, LayoutError, UsageError
from engine.tensor_parallel.checks import check_part
from engine.tensor_parallel.embedding import check_ids, local_ids


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return -log softmax(logits)[target] for every row, not reduced; 0 where the target is `ignore_index`.

    logits: (..., vocabulary / T rounded up), this rank's part, floating; never changed. target: (...), of any integer
    dtype, equal on all ranks of `comm`. Result: (...), equal on all ranks, float32 for half-precision logits, else of
    the logits' dtype. All ranks of `comm` must call it with the same options; it sends the maximum and two sums for
    each row (three with smoothing), and nothing in backward.

    vocabulary: the true one, where it does not divide by T and the last columns are padding, which may hold anything;
    default: all columns of all ranks. label_smoothing: the share of the target that is spread over the true vocabulary,
    as F.cross_entropy does. z_loss: adds z_loss * logsumexp(logits)^2 to each row that is not ignored.

    Raises, before anything is sent, UsageError for shapes and options that do not fit and, on a CPU, for a target
    outside the vocabulary; LayoutError for a vocabulary that is not cut into such shards; DtypeError for logits that
    are not floating or a target that is not integer.
    """
    call = "vocab_parallel_cross_entropy"
    if logits.shape[:-1] != target.shape:
        raise UsageError(
            f"{call}: logits {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(target.shape)}"
        )
    columns = logits.shape[-1]
    total = columns * comm.size if vocabulary is None else vocabulary
    criterion = Criterion(call, comm, columns, total, ignore_index, label_smoothing, z_loss)
    target = criterion.checked(logits, target)
    if comm.checks and comm.size > 1:
        fix = "give the shard, as ColumnParallelLinear without gather_output returns it, or use F.cross_entropy"
        check_part(logits, comm, -1, f"{call}: logits", fix)
    return apply(_CrossEntropy, logits, target, criterion)


@dataclass(frozen=True)
class Targets:
    """Which of this rank's columns each row wants. All of the target's shape."""

    ids: Tensor
    """Column of the target; 0 where another rank holds it or the row is ignored."""
    elsewhere: Tensor
    """Rows whose target is on another rank."""
    ignored: Tensor
    """Rows that do not count."""

    def rows(self, start: int, stop: int) -> Targets:
        """Return rows [start, stop) of flat targets."""
        return Targets(self.ids[start:stop], self.elsewhere[start:stop], self.ignored[start:stop])


@dataclass(frozen=True)
class Criterion:
    """The loss of a row and its gradient, in steps: `row_sums` and `gradient_into` are local to this rank and to the
    rows they are given, `combine` sends.
    """

    call: str
    """Who is named in errors."""
    comm: Communicator
    columns: int
    """Logits of a row that this rank holds, with padding."""
    vocabulary: int
    ignore_index: int
    label_smoothing: float
    z_loss: float

    def __post_init__(self) -> None:
        ranks, columns, total = self.comm.size, self.columns, self.vocabulary
        if total < 1 or -(-total // ranks) != columns:
            first = max(1, (columns - 1) * ranks + 1)
            raise LayoutError(
                f"{self.call}: vocabulary={total} over {ranks} ranks of axis {self.comm.name!r} is "
                f"{-(-total // ranks)} columns on each, but this rank has {columns}: give its shard, and a vocabulary "
                f"from {first} to {columns * ranks}"
            )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UsageError(f"{self.call}: label_smoothing={self.label_smoothing!r}: give a share from 0 to below 1")
        if not 0.0 <= self.z_loss < math.inf:
            raise UsageError(f"{self.call}: z_loss={self.z_loss!r}: give a factor of at least 0")

    def checked(self, values: Tensor, target: Tensor) -> Tensor:
        """Return the target in int64. Raises for dtypes that cannot be and, on a CPU, for ids outside the
        vocabulary.
        """
        if not values.is_floating_point():
            raise DtypeError(f"{self.call}: {values.dtype} is no floating dtype")
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise DtypeError(f"{self.call}: a target of {target.dtype} has no ids: give integers")
        target = target.long()  # first: a small dtype would take ignore_index for another number
        if target.device.type == "cpu":
            check_ids(target[target != self.ignore_index], self.vocabulary, f"{self.call}: target")
        return target

    @property
    def real(self) -> int:
        """How many of this rank's columns are not padding."""
        return min(self.columns, max(0, self.vocabulary - self.comm.rank * self.columns))

    def locate(self, target: Tensor) -> Targets:
        """Return where this rank's columns hold the targets."""
        ignored = target == self.ignore_index
        ids, elsewhere = local_ids(target.masked_fill(ignored, 0), self.columns, self.vocabulary, self.comm)
        return Targets(ids, elsewhere, ignored)

    def row_sums(self, logits: Tensor, ids: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return this rank's `shares`, and of each row (3 or 4, ...): the largest logit here, the sum over
        exp(logits - that), the logit at `ids`, with smoothing the sum of the logits less their largest.

        logits: (..., columns), single or double precision. out: where the shares are written, (..., columns) or the
        logits themselves; default: new memory.
        """
        hit = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        values, room = self.unpadded(logits), None if out is None else self.unpadded(out)
        # Of no columns at all there is no maximum, only the one that changes no other.
        largest = values.amax(dim=-1) if values.numel() else hit.new_full(hit.shape, -torch.inf)
        spread, top = [], largest  # of the values that the softmax is taken of
        if self.label_smoothing:
            base = largest.masked_fill(largest == -torch.inf, 0.0)
            values = room = torch.sub(values, base.unsqueeze(-1), out=room)
            spread, top = [values.sum(dim=-1)], largest - base
        shares = self.shares(values, top, room)
        # The largest logit's share is 1 / sum, since its exponential is 1.
        total = shares.amax(dim=-1).reciprocal() if values.numel() else hit
        total = total.masked_fill(largest == -torch.inf, 0.0)
        return shares, torch.stack([largest, total, hit, *spread])

    def shares(self, values: Tensor, largest: Tensor, out: Tensor | None) -> Tensor:
        """Return the softmax over this rank's columns alone, 0 in rows where all are -inf. values and out (may be the
        same): without padding; largest: of each row of them.
        """
        if not values.numel():
            return values.new_empty(values.shape)
        if values.is_contiguous():
            shares = torch.softmax(values, dim=-1, out=out)
        else:  # of rows with padding between them torch's kernel would make copies
            shares = torch.sub(values, largest.unsqueeze(-1), out=out).exp_()
            shares.div_(shares.sum(dim=-1, keepdim=True))
        empty = largest == -torch.inf
        if empty.device.type != "cpu" or empty.any():  # a look costs less than a pass, where it need not be waited for
            shares.masked_fill_(empty.unsqueeze(-1), 0.0)
        return shares

    def unpadded(self, x: Tensor) -> Tensor:
        """Return x, (..., columns), without padding: a view."""
        return x if self.real == self.columns else x.narrow(-1, 0, self.real)

    def combine(self, sums: Tensor, at: Targets) -> tuple[Tensor, Tensor]:
        """Return the loss of each row from the ranks' `row_sums`, and this rank's slope: by what its shares must be
        multiplied to be the gradient's softmax term. All ranks must call it; two all-reduces.
        """
        largest, total, hit = sums[:3]
        highest = self.comm.all_reduce(largest.clone(), "max")
        scale = (largest - highest).exp()
        parts = [total * scale, (hit - highest).masked_fill(at.elsewhere, 0.0)]
        if self.label_smoothing:
            parts.append(sums[3] + self.real * (largest - highest) if self.real else torch.zeros_like(total))
        reduced = self.comm.all_reduce(torch.stack(parts))
        total, log_total, share = reduced[0], reduced[0].log(), self.label_smoothing
        slope = parts[0] / total
        loss = log_total - (1.0 - share) * reduced[1]
        if self.label_smoothing:
            loss -= reduced[2] * (share / self.vocabulary)
        if self.z_loss:
            lse = log_total + highest
            loss += self.z_loss * lse.square()
            slope *= 1.0 + 2.0 * self.z_loss * lse
        return loss.masked_fill_(at.ignored, 0.0), slope.masked_fill_(at.ignored, 0.0)

    def gradient_into(self, out: Tensor, shares: Tensor, slope: Tensor, at: Targets, grad: Tensor) -> None:
        """Fill out, (..., columns), with the logits' gradient. `shares` may lie in it; grad: of the rows' losses."""
        scale = grad.masked_fill(at.ignored, 0.0)
        real = self.unpadded(out)
        torch.mul(shares, (slope * scale).unsqueeze(-1), out=real)
        if self.label_smoothing:
            real -= (scale * (self.label_smoothing / self.vocabulary)).unsqueeze(-1)
        if real is not out:
            out.narrow(-1, self.real, self.columns - self.real).zero_()
        hit = scale.masked_fill(at.elsewhere, 0.0) * (self.label_smoothing - 1.0)
        out.scatter_add_(-1, at.ids.unsqueeze(-1), hit.unsqueeze(-1))


def is_half(dtype: torch.dtype) -> bool:
    """Whether sums over values of this dtype are made in float32."""
    return dtype in (torch.float16, torch.bfloat16)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
        at = criterion.locate(target)
        own = logits.float() if is_half(logits.dtype) else None
        shares, sums = criterion.row_sums(logits if own is None else own, at.ids, own)
        loss, slope = criterion.combine(sums, at)
        ctx.save_for_backward(shares, slope, at.ids, at.elsewhere, at.ignored)
        ctx.criterion, ctx.dtype = criterion, logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        shares, slope, *at = ctx.saved_tensors
        grad = shares.new_empty((*slope.shape, ctx.criterion.columns))
        ctx.criterion.gradient_into(grad, shares, slope, Targets(*at), grads[0])
        return grad.to(ctx.dtype), None, None
