"""The flat memory of one bucket: its parameters, its gradients, this data rank's shard of both, and their
collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.comm.work import Work
from engine.errors import UsageError
from engine.zero.plan import Bucket


class FlatBucket:
    """Parameters of one bucket, moved into one flat tensor of which each is a view.

    With `keep_gradients` the gradients have flat memory too: each is moved there as soon as backward has made it, while
    it is still in the cache, and later backwards add to it. Reducing happens in place. Without it (ZeRO stage 2) they
    live in autograd's own tensors until they are copied into a borrowed buffer, and only the shard stays. Stage 2 keeps
    them where the ranks read each other's memory: lending and taking new memory in every step would cost more time than
    the sum, and no less memory at the end of the backward.
    """

    def __init__(
        self,
        plan: Bucket,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        device: torch.device,
        *,
        stage: int,
        share: bool = False,
    ) -> None:
        """parameters: of the whole model, indexed by the plan. comm: the data axis, all of whose ranks must call it.
        share: one copy of the parameters for all of them, which takes rank 0's values; complete after a meeting.
        """
        self.plan, self.comm, self.stage = plan, comm, stage
        self.start, self.stop = plan.bounds(comm.rank)
        self.parameters = [(parameters[each.index], each) for each in plan.slices]
        self.flat = comm.allocate((plan.numel,), plan.dtype, shared=share)
        self._address = self.flat.data_ptr()
        with torch.no_grad():
            for parameter, each in self.parameters:
                view = self.flat[each.start : each.stop].view(parameter.shape)
                parameter.data = view if share and comm.rank else view.copy_(parameter.data)
        self.keep_gradients = stage < 2 or comm.size == 1 or comm.reads_in_place
        if self.keep_gradients:
            self._gradients = comm.allocate((plan.numel,), plan.dtype)
            self._views = [self._gradients[s.start : s.stop].view(p.shape) for p, s in self.parameters]
            this = weakref.ref(self)
            for place, (parameter, _) in enumerate(self.parameters):
                hook = parameter.register_post_accumulate_grad_hook(partial(_keep, this, place))
                weakref.finalize(self, hook.remove).atexit = False
        else:
            self._gradients = torch.zeros(plan.shard, dtype=plan.dtype, device=device)
        self.zero_gradients()

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.flat.device

    @property
    def shard(self) -> Tensor:
        """This rank's part of the parameters, a view."""
        return self.flat[self.start : self.stop]

    @property
    def updated(self) -> tuple[int, int]:
        """The elements [start, stop) that this rank updates: all at stage 0, else its shard."""
        return (0, self.plan.used) if self.stage == 0 else (self.start, self.stop)

    def trained(self, start: int, stop: int) -> Tensor:
        """Return what the optimizer updates for bucket elements [start, stop), a view."""
        return self.flat[start:stop].detach()

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the reduced gradients of bucket elements [start, stop), a view; outside the shard only at stage 0."""
        offset = 0 if self.keep_gradients else self.start
        return self._gradients[start - offset : stop - offset]

    @property
    def reduced(self) -> Tensor:
        """All gradients that are valid here after reducing: everything at stage 0, else the shard."""
        return self._gradients if self.stage == 0 else self.gradient(self.start, self.stop)

    def zero_gradients(self) -> None:
        """Forget every gradient. The flat memory keeps its values, which the next backward overwrites."""
        for parameter, _ in self.parameters:
            parameter.grad = None

    def keep(self, place: int, parameter: Tensor) -> None:
        """Move the gradient that backward has made into the flat memory, unless it was added to what is there."""
        gradient, view = parameter.grad, self._views[place]
        if gradient is view or gradient is None or gradient.is_sparse or gradient.requires_grad:
            return  # what has a graph of its own, and what is refused, is looked at by `adopt_gradients`
        with torch.no_grad():
            view.copy_(gradient)
        parameter.grad = view

    def adopt_gradients(self) -> None:
        """Move gradients that were made outside the flat memory (by hand) into it, zeros for those that are missing."""
        for (parameter, _), view in zip(self.parameters, self._views if self.keep_gradients else (), strict=False):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(_dense(parameter.grad))
            parameter.grad = view

    def displaced(self) -> list[int]:
        """Return the indices of parameters that no longer lie in the flat memory: moved, cast or assigned since."""
        first, size = self.flat.data_ptr(), self.plan.dtype.itemsize
        return [each.index for p, each in self.parameters if p.numel() and p.data_ptr() != first + each.start * size]

    def moved(self) -> bool:
        """Whether the flat memory itself lies elsewhere than where it was allocated, its views with it."""
        return self.flat.data_ptr() != self._address

    def start_reduction(self, borrowed: Tensor | None) -> Work | None:
        """Sum the gradients over the data axis, or start it where started collectives pay. `borrowed`: scratch for this
        bucket's gradients where none are kept.
        """
        whole = self._gradients if self.keep_gradients else self._lent(borrowed)
        own = self.gradient(self.start, self.stop)
        if not self.comm.overlaps:
            if self.stage == 0:
                self.comm.all_reduce(whole)
            else:
                self.comm.reduce_scatter(whole, out=own)
            return None
        if self.stage == 0:
            return self.comm.all_reduce(whole, async_op=True)
        return self.comm.reduce_scatter(whole, out=own, async_op=True)

    def _lent(self, borrowed: Tensor | None) -> Tensor:
        """Move the gradients into borrowed memory, and return them."""
        assert borrowed is not None
        whole = borrowed[: self.plan.numel]
        for parameter, each in self.parameters:
            if parameter.grad is None:
                whole[each.start : each.stop].zero_()
            else:
                whole[each.start : each.stop].view(parameter.shape).copy_(_dense(parameter.grad))
            parameter.grad = None
        for start, stop in self.plan.padding:
            whole[start:stop].zero_()
        return whole

    def start_gather(self) -> Work | None:
        """Put the shards of updated parameters together on every data rank, or start it where that pays."""
        if self.comm.overlaps:
            return self.comm.all_gather(self.shard, out=self.flat, async_op=True)
        self.comm.all_gather(self.shard, out=self.flat)
        return None

    def whole_gradients(self) -> Tensor:
        """Return the reduced gradients of the whole bucket on every data rank. Collective over the data axis after
        stage 0.
        """
        return self._gradients if self.stage == 0 else self.comm.all_gather(self.gradient(self.start, self.stop))


def _keep(bucket: weakref.ref[FlatBucket], place: int, parameter: Tensor) -> None:
    """Run after backward has made a gradient. The parameter keeps this, which must not keep the bucket's memory."""
    alive = bucket()
    if alive is not None:
        alive.keep(place, parameter)


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise UsageError(
            "a parameter has a sparse gradient, which buckets do not carry: build its nn.Embedding with sparse=False"
        )
    return gradient
