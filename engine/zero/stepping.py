"""One update of the parameters: bucket by bucket, each gathered while the next is updated."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.comm.work import Work
from engine.zero.buckets import FlatBucket
from engine.zero.inner import Inner


class Stepper:
    """Steps the buckets' optimizers, and gathers the result."""

    def __init__(self, inner: Inner, buckets: Sequence[FlatBucket], *, gathers: bool) -> None:
        """buckets: more may be appended between steps. gathers: whether other data ranks need what this one updates."""
        self._inner, self._buckets, self._gathers = inner, buckets, gathers
        self._hooks: list[RemovableHandle] = []
        self._works: dict[int, Work] = {}

    def step(self) -> None:
        """Update the parameters, and gather them, or start it where started collectives pay."""
        overlaps = self._gathers and any(bucket.comm.overlaps for bucket in self._buckets)
        for number in range(len(self._buckets)):
            self._inner.step(number)
            if overlaps:
                self._write(number)
        # A gather that blocks would make every rank wait for the slowest at every bucket.
        for number in range(0 if overlaps else len(self._buckets)):
            self._write(number)

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until the parameters of `buckets`, or of all, are gathered."""
        for number in list(self._works) if buckets is None else buckets:
            work = self._works.pop(number, None)
            if work is not None:
                work.wait()

    def wait_before_use(self, model: nn.Module, indices: Mapping[int, int]) -> None:
        """Have each module of `model` with parameters of its own wait for them, and for those of the modules in it,
        before it runs or gives its state dict, in place of what an earlier call asked for. indices: of the parameters
        in the plans, by id.
        """
        while self._hooks:
            self._hooks.pop().remove()
        numbers = {s.index: number for number, bucket in enumerate(self._buckets) for s in bucket.plan.slices}
        this = weakref.ref(self)
        for module in model.modules():
            if not any(id(p) in indices for p in module.parameters(recurse=False)):
                continue
            needed = tuple(sorted({numbers[indices[id(p)]] for p in module.parameters() if id(p) in indices}))
            wait = partial(_wait_for, this, needed)
            for hook in (module.register_forward_pre_hook(wait), module.register_state_dict_pre_hook(wait)):
                self._hooks.append(hook)
                weakref.finalize(self, hook.remove).atexit = False

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _write(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.masters_to_parameters()
        work = bucket.start_gather() if self._gathers else None
        if work is not None:
            self._works[number] = work


def _wait_for(stepper: weakref.ref[Stepper], buckets: Sequence[int], *_: object) -> None:
    """Run before a module. The module keeps this, which must not keep the buckets' memory."""
    alive = stepper()
    if alive is not None:
        alive.wait(buckets)
