"""The flat memory of one bucket: its parameters, its gradients, this data rank's shard of both, and their
collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.comm.work import Work
from engine.errors import UsageError
from engine.zero.plan import Bucket


class FlatBucket:
    """Parameters of one bucket, moved into one flat tensor of which each is a view.

    With `keep_gradients` the gradients have flat memory too, into which backward accumulates, and reducing happens in
    place; without it (ZeRO stage 2) they live in autograd's own tensors until they are copied into a borrowed buffer,
    and only the shard stays.
    """

    def __init__(
        self, plan: Bucket, parameters: Sequence[nn.Parameter], comm: Communicator, device: torch.device, *, stage: int
    ) -> None:
        """parameters: of the whole model, indexed by the plan. comm: the data axis."""
        self.plan, self.comm, self.stage = plan, comm, stage
        self.start, self.stop = plan.bounds(comm.rank)
        self.parameters = [(parameters[each.index], each) for each in plan.slices]
        self.flat = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
        with torch.no_grad():
            for parameter, each in self.parameters:
                view = self.flat[each.start : each.stop].view(parameter.shape)
                parameter.data = view.copy_(parameter.data)
        self.keep_gradients = stage < 2 or comm.size == 1
        length = plan.numel if self.keep_gradients else plan.shard
        self._gradients = torch.zeros(length, dtype=plan.dtype, device=device)
        self.zero_gradients()

    @property
    def shard(self) -> Tensor:
        """This rank's part of the parameters, a view."""
        return self.flat[self.start : self.stop]

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the reduced gradients of bucket elements [start, stop), a view; outside the shard only at stage 0."""
        offset = 0 if self.keep_gradients else self.start
        return self._gradients[start - offset : stop - offset]

    @property
    def reduced(self) -> Tensor:
        """All gradients that are valid here after reducing: everything at stage 0, else the shard."""
        return self._gradients if self.stage == 0 else self.gradient(self.start, self.stop)

    def zero_gradients(self) -> None:
        """Make every gradient zero, or None where backward is to allocate it."""
        if self.keep_gradients:
            self._gradients.zero_()
        for parameter, each in self.parameters:
            parameter.grad = self._view(each.start, each.stop, parameter) if self.keep_gradients else None

    def adopt_gradients(self) -> None:
        """Move gradients that were made outside the flat memory (after `model.zero_grad()`, or by hand) into it."""
        for parameter, each in self.parameters if self.keep_gradients else ():
            view = self._view(each.start, each.stop, parameter)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr() or parameter.grad.is_sparse:
                view.copy_(_dense(parameter.grad))
            parameter.grad = view

    def displaced(self) -> list[int]:
        """Return the indices of parameters that no longer lie in the flat memory: moved, cast or assigned since."""
        first, size = self.flat.data_ptr(), self.plan.dtype.itemsize
        return [each.index for p, each in self.parameters if p.numel() and p.data_ptr() != first + each.start * size]

    def start_reduction(self, borrowed: Tensor | None) -> Work:
        """Start summing the gradients over the data axis. `borrowed`: scratch for this bucket's gradients where none
        are kept.
        """
        if self.stage == 0:
            return self.comm.all_reduce(self._gradients, async_op=True)
        if self.keep_gradients:
            return self.comm.reduce_scatter(self._gradients, out=self._gradients[self.start : self.stop], async_op=True)
        assert borrowed is not None
        whole = borrowed[: self.plan.numel]
        for parameter, each in self.parameters:
            if parameter.grad is None:
                whole[each.start : each.stop].zero_()
            else:
                whole[each.start : each.stop].view(parameter.shape).copy_(_dense(parameter.grad))
            parameter.grad = None
        whole[self.plan.used :].zero_()
        return self.comm.reduce_scatter(whole, out=self._gradients, async_op=True)

    def start_gather(self) -> Work:
        """Start putting the shards of updated parameters together on every data rank."""
        return self.comm.all_gather(self.shard, out=self.flat, async_op=True)

    def whole_gradients(self) -> Tensor:
        """Return the reduced gradients of the whole bucket on every data rank. Collective over the data axis after
        stage 0.
        """
        return self._gradients if self.stage == 0 else self.comm.all_gather(self.gradient(self.start, self.stop))

    def _view(self, start: int, stop: int, like: Tensor) -> Tensor:
        return self._gradients[start:stop].view(like.shape)


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise UsageError(
            "a parameter has a sparse gradient, which buckets do not carry: build its nn.Embedding with sparse=False"
        )
    return gradient
