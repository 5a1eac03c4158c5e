"""The flat memory of one bucket: its parameters, their fp32 masters, their gradients, this data rank's shard of each,
and their collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.comm.work import Work
from engine.errors import UsageError
from engine.precision import sum_dtype
from engine.zero.plan import Bucket, ParameterInfo, plan_buckets
from engine.zero.pool import BufferPool

_BUFFERS = 3  # of each dtype, for the gradients of buckets that keep only a shard of them

Write = Callable[[Tensor, bool], object]
"""Puts a gradient into the tensor it is given: added to what is there (True), or over it."""


class FlatBucket:
    """Parameters of one bucket, moved into one flat tensor of which each is a view.

    Gradients have flat memory too, in fp32 or wider: each is put where it is reduced from as soon as it is made, while
    it is still in the cache. With `whole`, that is memory for all of them, where they are also reduced in place.
    Without, it is a borrowed buffer, from the first gradient that comes until the bucket is reduced; only the shard of
    the sum stays, and each reduction adds to it. What comes after a whole bucket has been reduced is kept in a borrowed
    buffer as well, until it is reduced too.
    """

    def __init__(
        self,
        plan: Bucket,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        pool: BufferPool,
        *,
        stage: int,
        whole: bool,
        wire_dtype: torch.dtype | None = None,
        share: bool = False,
    ) -> None:
        """parameters: of the whole model, indexed by the plan. comm: the data axis, all of whose ranks must call it.
        pool: where buffers are borrowed. wire_dtype: of gradients on their way, see `Communicator.reduce_scatter`.
        share: one copy of the parameters for all of them, which takes rank 0's values; complete after a meeting.
        """
        self.plan, self.comm, self.stage, self.whole = plan, comm, stage, whole
        self.start, self.stop = plan.bounds(comm.rank)
        self.parameters = [(parameters[each.index], each) for each in plan.slices]
        self.flat = comm.allocate((plan.numel,), plan.dtype, shared=share)
        self._address = self.flat.data_ptr()
        with torch.no_grad():
            for parameter, each in self.parameters:
                view = self.flat[each.start : each.stop].view(parameter.shape)
                parameter.data = view if share and comm.rank else view.copy_(parameter.data)
        self.dtype = sum_dtype(plan.dtype)
        self._masters: Tensor | None = None
        self._pool, self._wire = pool, wire_dtype
        if whole:
            self._gradients = comm.allocate((plan.numel,), self.dtype)
        else:
            self._gradients = torch.zeros(plan.shard, dtype=self.dtype, device=comm.device)
        self._views = self._split(self._gradients) if whole else []
        # A whole bucket's gradients are the parameters' own `grad`, where their dtype allows it.
        self._shows = whole and self.dtype is plan.dtype
        self._lent: Tensor | None = None
        self._filled = [False] * len(self.parameters)
        self.touched = [False] * len(self.parameters)
        """Which parameters got a gradient in this step."""
        self.starts = 0
        """How many reductions were started in this step; equal on every data rank."""
        self.zero_gradients()

    # ---- parameters ------------------------------------------------------------------------------------------------

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

    def make_masters(self) -> None:
        """Keep what this rank updates of low-precision parameters in fp32 too, once all ranks' values are there."""
        if self.dtype is not self.plan.dtype:
            self._masters = self.flat[slice(*self.updated)].to(self.dtype)

    def trained(self, start: int, stop: int) -> Tensor:
        """Return what the optimizer updates for bucket elements [start, stop), a view: of the masters where there are
        any, else of the parameters.
        """
        if self._masters is None:
            return self.flat[start:stop].detach()
        first = self.updated[0]
        return self._masters[start - first : stop - first]

    def masters_to_parameters(self) -> None:
        """Round the masters into the parameters that this rank updates."""
        if self._masters is not None:
            self.flat[slice(*self.updated)].copy_(self._masters)

    def parameters_to_masters(self) -> None:
        """Take over the parameters' values that are not the masters' own, rounded: those that were written since."""
        if self._masters is not None:
            own = self.flat[slice(*self.updated)]
            torch.where(own == self._masters.to(own.dtype), self._masters, own.to(self.dtype), out=self._masters)

    def displaced(self) -> list[int]:
        """Return the indices of parameters that no longer lie in the flat memory: moved, cast or assigned since."""
        first, size = self.flat.data_ptr(), self.plan.dtype.itemsize
        return [each.index for p, each in self.parameters if p.numel() and p.data_ptr() != first + each.start * size]

    def moved(self) -> bool:
        """Whether the flat memory itself lies elsewhere than where it was allocated, its views with it."""
        return self.flat.data_ptr() != self._address

    def start_gather(self) -> Work | None:
        """Put the shards of updated parameters together on every data rank, or start it where that pays."""
        if self.comm.overlaps:
            return self.comm.all_gather(self.shard, out=self.flat, async_op=True)
        self.comm.all_gather(self.shard, out=self.flat)
        return None

    # ---- gradients arrive ------------------------------------------------------------------------------------------

    @property
    def borrows(self) -> bool:
        """Whether the next gradient that comes needs a borrowed buffer."""
        return self._lent is None and not (self.whole and self.starts == 0)

    @property
    def pool_has_free(self) -> bool:
        """Whether a buffer can be borrowed without taking memory."""
        return self._pool.has_free(self.dtype)

    @property
    def left(self) -> bool:
        """Whether gradients wait in a borrowed buffer."""
        return self._lent is not None

    def keep(self, place: int) -> bool:
        """Move the gradient that backward has made into the flat memory, unless it was added to what is there. Return
        whether there was one that can be moved: of others `adopt_gradients` takes care.
        """
        parameter = self.parameters[place][0]
        gradient = parameter.grad
        if self._is_sum(place, gradient):
            self.touched[place] = True
            return True
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            return False
        self._move(place, parameter, gradient)
        return True

    def receive(self, place: int, write: Write) -> None:
        """Have `write` put a gradient of the parameter at `place` of the plan where it is reduced from: it gets a view
        of the parameter's shape, fp32 or wider, and whether to add to it.
        """
        parameter, _ = self.parameters[place]
        shows = self._shows and self.starts == 0
        if self.borrows:
            self._lent = self._pool.borrow(self.dtype, self.plan.numel)
        view = self._view(place)
        if shows and parameter.grad is not None and parameter.grad is not view:
            self._move(place, parameter, _dense(parameter.grad))  # made by hand
        filled = parameter.grad is view if shows else self._filled[place]
        with torch.no_grad():
            write(view, filled)
        self._filled[place] = self.touched[place] = True
        if shows:
            parameter.grad = view

    def adopt_gradients(self) -> None:
        """Take in gradients that were made by hand. Raises UsageError for a sparse one."""
        for place, (parameter, _) in enumerate(self.parameters):
            if parameter.grad is not None:
                self._move(place, parameter, _dense(parameter.grad))

    def fill(self) -> None:
        """Put zeros where no gradient has come since the last start."""
        for place, (parameter, _) in enumerate(self.parameters):
            shows = self._shows and self.starts == 0
            view = self._view(place)
            if not (parameter.grad is view if shows else self._filled[place]):
                view.zero_()
            self._filled[place] = True
            if shows:
                parameter.grad = view

    def zero_gradients(self) -> None:
        """Forget every gradient. The flat memory keeps its values, which the next backward overwrites."""
        for parameter, _ in self.parameters:
            parameter.grad = None
        if self._lent is not None:
            self._pool.give_back(self._lent)
            self._lent = None
        count, self.starts = len(self.parameters), 0
        self._filled, self.touched = [False] * count, [False] * count

    # ---- gradients are reduced -------------------------------------------------------------------------------------

    def start_reduction(self) -> Callable[[], None] | None:
        """Sum what has come since the last start over the data axis and add it to this step's sum; or start it where
        started collectives pay, and return what ends it. Raises UsageError for a sparse gradient.
        """
        self.adopt_gradients()  # what `keep` has left where it was
        if self.borrows:
            self._lent = self._pool.borrow(self.dtype, self.plan.numel)
        self.fill()
        lent, self._lent = self._lent, None
        source = self._gradients if lent is None else lent[: self.plan.numel]
        if lent is not None:
            for start, stop in self.plan.padding:
                source[start:stop].zero_()
        for parameter, _ in self.parameters:
            parameter.grad = None  # what comes now must not be added to memory that is being read
        self._filled = [False] * len(self.parameters)
        first = self.starts == 0
        self.starts += 1
        total = self.reduced
        out = total if first else source if self.stage == 0 else source[self.start : self.stop]
        work = self._sum(source, out)

        def end() -> None:
            if work is not None:
                work.wait()
            if not first:
                total.add_(out)
            if lent is not None:
                self._pool.give_back(lent)

        if work is not None:
            return end
        end()
        return None

    def _sum(self, source: Tensor, out: Tensor) -> Work | None:
        """Sum `source` over the data axis into `out`: itself at stage 0, else memory of the size of the shard."""
        comm, wire = self.comm, self._wire
        if not comm.overlaps:
            if self.stage == 0:
                comm.all_reduce(source, wire_dtype=wire)
            else:
                comm.reduce_scatter(source, out=out, wire_dtype=wire)
            return None
        if self.stage == 0:
            return comm.all_reduce(source, wire_dtype=wire, async_op=True)
        return comm.reduce_scatter(source, out=out, wire_dtype=wire, async_op=True)

    def show(self) -> None:
        """Make the sum the parameters' own gradients again, where every rank has all of it."""
        if self._shows and (self.stage == 0 or self.comm.size == 1):
            for place, (parameter, _) in enumerate(self.parameters):
                parameter.grad = self._views[place]

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the reduced gradients of bucket elements [start, stop), a view; outside the shard only at stage 0."""
        offset = 0 if self.whole else self.start
        return self._gradients[start - offset : stop - offset]

    @property
    def reduced(self) -> Tensor:
        """All gradients that are valid here after reducing: everything at stage 0, else the shard."""
        return self._gradients if self.stage == 0 else self.gradient(self.start, self.stop)

    def local(self, place: int) -> Tensor:
        """Return this rank's gradient of one parameter, in its shape, before it is reduced; of whole buckets, after
        `fill`.
        """
        return self._views[place]

    def reduced_parts(self) -> list[tuple[int, Tensor]]:
        """Return of each parameter, by its index, the reduced gradients that are here: equal parts on all tensor
        ranks.
        """
        first, last = self.updated
        bounds = [(s.index, max(first, s.start), min(last, s.stop)) for s in self.plan.slices]
        return [(index, self.gradient(low, max(low, high))) for index, low, high in bounds]

    def whole_gradients(self) -> Tensor:
        """Return the reduced gradients of the whole bucket on every data rank. Collective over the data axis after
        stage 0.
        """
        return self._gradients if self.stage == 0 else self.comm.all_gather(self.gradient(self.start, self.stop))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _move(self, place: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._is_sum(place, gradient):
            self.touched[place] = True
            return
        parameter.grad = None
        self.receive(place, lambda view, add: view.add_(gradient) if add else view.copy_(gradient))

    def _is_sum(self, place: int, gradient: Tensor | None) -> bool:
        """Whether a parameter's gradient is the flat memory itself, to which backward has added in place."""
        return self._shows and self.starts == 0 and gradient is self._views[place]

    def _view(self, place: int) -> Tensor:
        if self._lent is None:
            return self._views[place]
        parameter, each = self.parameters[place]
        return self._lent[each.start : each.stop].view(parameter.shape)

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [flat[each.start : each.stop].view(parameter.shape) for parameter, each in self.parameters]


def make_buckets(
    infos: Sequence[ParameterInfo],
    named: Sequence[tuple[str, nn.Parameter]],
    comm: Communicator,
    options: Mapping[str, Any],
    *,
    first: int,
    share: bool,
) -> list[FlatBucket]:
    """Return the buckets of the parameters from number `first` on, see FlatBucket. infos: of all, as `named`. options:
    of ZeroOptimizer. Every rank of `comm` must call it.
    """
    stage, wire_dtype = options["stage"], options["wire_dtype"]
    plans = plan_buckets(infos, options["bucket_mib"] * 2**20, comm.size, first=first)
    keep_all = stage < 2 or options["accumulate"] == "full" or comm.size == 1
    whole = [keep_all or plan.apart for plan in plans]
    parameters = [parameter for _, parameter in named]
    borrowing = [(sum_dtype(plan.dtype), plan.numel) for plan, w in zip(plans, whole, strict=True) if not w]
    # One is filled while those before are reduced; where nothing overlaps, the ranks meet once for all that are full.
    pool = BufferPool(comm, borrowing, shared=_BUFFERS)
    return [
        FlatBucket(plan, parameters, comm, pool, stage=stage, whole=w, wire_dtype=wire_dtype, share=share)
        for plan, w in zip(plans, whole, strict=True)
    ]


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise UsageError(
            "a parameter has a sparse gradient, which buckets do not carry: build its nn.Embedding with sparse=False"
        )
    return gradient
