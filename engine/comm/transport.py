"""How bytes move: torch.distributed's process groups, behind the few calls a Communicator needs.

The one place that knows torch's names, versions and backend habits. Everything here takes plain contiguous tensors
and ranks inside the group, starts an operation at once and returns the works to wait for; checks, strides and
averages are the Communicator's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.arguments import flat

# torch 2.13 renamed the two; 2.7 has only the old names. For the benchmark's raw calls too.
torch_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
torch_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
# gloo refuses the others with "Invalid scalar type", although moving needs no arithmetic: they travel as bytes.
_MOVABLE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)

Works = list[Any]


def _bytes(x: Tensor) -> Tensor:
    """Return a view of contiguous `x` in a dtype that every backend moves."""
    return x if x.dtype in _MOVABLE else flat(x).view(torch.uint8)


class TorchTransport:
    """Collectives of one process group. `ranks` are the group's global ranks in group order."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group: dist.ProcessGroup | None = group
        self.ranks = tuple(ranks)
        # gloo starts messages one by one; the others must be told of a batch as one.
        self._single = dist.get_backend(group) == "gloo"

    def all_reduce(self, x: Tensor, op: str) -> Works:
        return [dist.all_reduce(x, _OPS[op], group=self.group, async_op=True)]

    def broadcast(self, x: Tensor, src: int) -> Works:
        return [dist.broadcast(_bytes(x), self.ranks[src], group=self.group, async_op=True)]

    def reduce(self, x: Tensor, dst: int, op: str) -> Works:
        return [dist.reduce(x, self.ranks[dst], _OPS[op], group=self.group, async_op=True)]

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Works:
        return [torch_reduce_scatter(out, x, _OPS[op], group=self.group, async_op=True)]

    def all_gather(self, out: Tensor, x: Tensor) -> Works:
        return [torch_all_gather(_bytes(out), _bytes(x), group=self.group, async_op=True)]

    def all_to_all(self, out: Tensor, x: Tensor) -> Works:
        return [dist.all_to_all_single(_bytes(out), _bytes(x), group=self.group, async_op=True)]

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        """Start all sends and receives as one batch. Between two ranks, messages of one tag match in the order they
        are listed; NCCL and HCCL ignore tags. Returns the works of the sends, then of the receives, or one for all.
        """
        group = self.group
        if self._single and group is not None:
            # What dist.isend and irecv call in the end. On the way there a batch spends 30 microseconds on a message.
            receiving = [group.recv([_bytes(x)], peer, tag) for x, peer in receives]
            return [*(group.send([_bytes(x)], peer, tag) for x, peer in sends), *receiving]
        batch = [dist.P2POp(dist.isend, _bytes(x), self.ranks[peer], self.group, tag) for x, peer in sends]
        batch += [dist.P2POp(dist.irecv, _bytes(x), self.ranks[peer], self.group, tag) for x, peer in receives]
        return list(dist.batch_isend_irecv(batch)) if batch else []

    def broadcast_object(self, value: object, src: int, device: torch.device) -> object:
        box = [value]
        dist.broadcast_object_list(box, self.ranks[src], group=self.group, device=device)
        return box[0]

    def wait(self, works: Works) -> None:
        """Wait for all of a batch. The group's own time limit applies: one given here makes NCCL block the host."""
        for work in works:
            work.wait()

    def close(self) -> None:
        self.group = None
