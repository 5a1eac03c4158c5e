"""The reduction of all buckets' gradients: where gradients arrive, when each bucket starts, in which order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from engine.weight_gradients import Sink, write_product
from engine.zero.buckets import FlatBucket, Write
from engine.zero.order import StartOrder


class Reducer:
    """Starts the reduction of each bucket, the model's last first, as `StartOrder` says, and ends them all.

    A bucket that keeps a shard is reduced in every microbatch; a whole one once, in the last, where started
    collectives pay; one that is `apart`, and all that is left, in `start_rest`.
    """

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        """buckets: more may be appended between steps, see `take_up`. Nothing is sent."""
        self._buckets = buckets
        self._ends: deque[Callable[[], None]] = deque()
        self._owed: deque[int] = deque()  # of the last backward, what is to be started yet
        self._ready = 0  # how many of these may be
        self._places: dict[int, tuple[int, int]] = {}
        self._sinks: dict[int, Sink] = {}
        self.take_up((), early=False)

    def take_up(self, positions: Sequence[int], *, early: bool) -> None:
        """Take the gradients of the buckets that were appended. positions: of every parameter in the model, as the
        plans index them, equal on every data rank: the later, the sooner a backward has its gradient. early: whether
        reductions start before a backward has ended.
        """
        self._order = StartOrder([[s.index for s in b.plan.slices] for b in self._buckets], early=early)
        firsts = [min(positions[each.index] for each in bucket.plan.slices) for bucket in self._buckets]
        self._turns = sorted(range(len(firsts)), key=lambda number: -firsts[number])
        this = weakref.ref(self)
        for number, bucket in enumerate(self._buckets):
            for place, (parameter, each) in enumerate(bucket.parameters):
                if each.index in self._places:
                    continue
                self._places[each.index] = number, place
                _let_go(parameter)
                hook = parameter.register_post_accumulate_grad_hook(partial(_arrived, this, each.index))
                self._sinks[id(parameter)] = Sink(partial(_handed_over, this, each.index), hook.id)
                weakref.finalize(self, hook.remove).atexit = False

    @contextmanager
    def microbatch(self, last: bool, stage: int | None) -> Iterator[None]:
        """Run one backward, of all or of one virtual stage; afterwards what it calls for has been started."""
        self.catch_up()
        turns = [n for n in self._turns if self._starts_in(self._buckets[n], last, stage)]
        self._owed.extend(turns)
        self._order.begin(turns)
        try:
            yield
        except BaseException:
            self._order.drop()
            self._ready = 0
            raise
        self._ready += len(self._order.end())
        while self._ready and self._owed:  # none is left where the gradients were dropped inside
            self._start_next()
        self._ready = 0

    def receive(self, index: int, write: Write) -> None:
        """Take the gradient of parameter `index` that `write` puts into a view, see `FlatBucket.receive`."""
        number, place = self._places[index]
        self._make_room(self._buckets[number])
        self._buckets[number].receive(place, write)
        self._started_by(index)

    def sinks(self) -> dict[int, Sink]:
        """Return, by `id(parameter)`, what adds a product to its gradient as a backward would. Parameters that are
        taken up later come into the same dict.
        """
        return self._sinks

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add a product to the gradient of parameter `index`, as autograd would; left and right as a Sink has them."""
        self.receive(index, lambda view, add: write_product(view, left, right, add=add))

    def keep(self, index: int) -> None:
        """Take the gradient of parameter `index` that backward has made."""
        number, place = self._places[index]
        bucket = self._buckets[number]
        self._make_room(bucket)
        if bucket.keep(place):
            self._started_by(index)

    def start_rest(self, more: Sequence[bool]) -> None:
        """Start what was not in this step, and once more the buckets for which some data rank has gradients that came
        after the last start: `more`, equal on every data rank.
        """
        for number in sorted(self._turns, key=lambda n: self._buckets[n].plan.apart):
            bucket = self._buckets[number]
            if bucket.whole and bucket.starts == 0:
                self._start(number)
            if more[number]:
                self._start(number)
            elif bucket.starts == 0:
                bucket.reduced.zero_()

    def catch_up(self) -> None:
        """Start what a backward that failed has not: another rank, on which it went further or did not fail, has."""
        while self._owed:
            self._start_next()

    def settle(self) -> None:
        """Wait for all that was started."""
        while self._ends:
            self._ends.popleft()()

    def drop(self) -> None:
        """Forget all gradients; a step is over, or given up. What was started, or is owed, is waited for."""
        for number in self._owed:
            for parameter, _ in self._buckets[number].parameters:
                parameter.grad = None  # also one that cannot be reduced
        self.catch_up()
        self.settle()
        for bucket in self._buckets:
            bucket.zero_gradients()

    def next_step(self) -> None:
        """A step's gradients are complete: what came in it is waited for in the next."""
        self._order.next_step()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _starts_in(self, bucket: FlatBucket, last: bool, stage: int | None) -> bool:
        if stage is not None and bucket.plan.stage != stage:
            return False
        if not bucket.whole:
            return True
        # Where nothing overlaps, one gradient reduction after all of backward is as good, and sees what a user did.
        return last and bucket.comm.size > 1 and bucket.comm.overlaps and not bucket.plan.apart and bucket.starts == 0

    def _started_by(self, index: int) -> None:
        self._ready += len(self._order.arrive(index))
        # Where nothing overlaps each start waits for the slowest rank: as few of them as the buffers allow.
        while self._ready and self._buckets[self._owed[0]].comm.overlaps:
            self._start_next()

    def _start_next(self) -> None:
        self._start(self._owed[0])
        self._owed.popleft()
        self._ready = max(0, self._ready - 1)

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        if not bucket.whole or bucket.starts:
            self._end_for(bucket)
        end = bucket.start_reduction()
        if end is not None:
            self._ends.append(end)

    def _make_room(self, bucket: FlatBucket) -> None:
        """Have a buffer free, where one is needed: reduce what may be, in its order."""
        self._end_for(bucket)
        if bucket.borrows and not bucket.pool_has_free:
            while self._ready:  # all at once: ranks that wait for each other do so once
                self._start_next()

    def _end_for(self, bucket: FlatBucket) -> None:
        """End reductions that were started until a buffer is free, where one is needed."""
        while bucket.borrows and self._ends and not bucket.pool_has_free:
            self._ends.popleft()()


def _let_go(parameter: Tensor) -> None:
    """Remove what an optimizer that was built before has left, which would go on taking the gradients where it is still
    alive (held by a scheduler); it can train no more, as the parameter's memory is another's now.
    """
    hooks = parameter._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, partial) and hook.func is _arrived]:
        del hooks[key]


def _arrived(reducer: weakref.ref[Reducer], index: int, _parameter: Tensor) -> None:
    """Run after backward has made a gradient. The parameter keeps this, which must not keep the buckets' memory."""
    alive = reducer()
    if alive is not None:
        with torch._C.DisableTorchFunction():  # nothing here is for a mode that catches products
            alive.keep(index)


def _handed_over(reducer: weakref.ref[Reducer], index: int, left: Tensor, right: Tensor) -> None:
    """Add what a Sink is given. The reducer keeps this, which must not keep the reducer."""
    alive = reducer()
    assert alive is not None, "a gradient came for an optimizer that is gone"
    alive.add_product(index, left, right)
