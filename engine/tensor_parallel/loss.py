"""Cross-entropy over logits whose vocabulary is cut over the tensor axis, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.errors import UsageError
from engine.tensor_parallel.embedding import check_ids, local_ids


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, comm: Communicator, *, ignore_index: int = -100
) -> Tensor:
    """Return -log softmax(logits)[target] for every row, not reduced; 0 where the target is `ignore_index`.

    logits: (..., vocabulary / T), this rank's part, floating; never changed. target: (...), integer, equal on all
    ranks of `comm`. Result: (...), equal on all ranks, float32 for half-precision logits, else of the logits' dtype.
    All ranks of `comm` must call it; it sends the maximum and two sums for each row, and nothing in backward. With m
    the maximum over the whole vocabulary, the loss is log(sum(exp(logits - m))) + m - logits[target] and its gradient
    softmax(logits) - onehot(target).

    Raises UsageError for shapes that do not fit and, on a CPU, for a target outside the vocabulary.
    """
    if logits.shape[:-1] != target.shape:
        raise UsageError(
            f"vocab_parallel_cross_entropy: logits {tuple(logits.shape)} need a target of shape "
            f"{tuple(logits.shape[:-1])}, not {tuple(target.shape)}"
        )
    if logits.device.type == "cpu":
        check_ids(target[target != ignore_index], logits.shape[-1] * comm.size, "vocab_parallel_cross_entropy: target")
    return apply(_CrossEntropy, logits, target, comm, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, comm: Communicator, ignore_index: int) -> Tensor:
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        largest = comm.all_reduce(values.amax(dim=-1), "max") if values.numel() else values.sum(dim=-1)
        exponentials = (values - largest.unsqueeze(-1)).exp_()
        ignored = target == ignore_index
        shard = logits.shape[-1]
        ids, elsewhere = local_ids(target.masked_fill(ignored, 0), shard, shard * comm.size, comm)
        hit = values.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - largest
        sums = torch.stack([exponentials.sum(dim=-1), hit.masked_fill(elsewhere, 0.0)])
        total, wanted = comm.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), ids, elsewhere, ignored)
        ctx.dtype = logits.dtype
        loss: Tensor = (total.log() - wanted).masked_fill_(ignored, 0.0)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, ids, elsewhere, ignored = ctx.saved_tensors
        scale = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        grad = softmax * scale
        grad.scatter_add_(-1, ids.unsqueeze(-1), -scale.masked_fill(elsewhere.unsqueeze(-1), 0.0))
        return grad.to(ctx.dtype), None, None, None
