"""One update of the parameters: bucket by bucket, each gathered while the next is updated, without those that got no
gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.work import Work
from engine.zero.buckets import FlatBucket


class Stepper:
    """Steps the inner optimizer, whose parameters are runs of the buckets' elements, and gathers the result."""

    def __init__(self, inner: torch.optim.Optimizer, buckets: Sequence[FlatBucket], *, gathers: bool) -> None:
        """gathers: whether other data ranks need what this one updates."""
        self._inner, self._buckets, self._gathers = inner, buckets, gathers
        self._left_out: frozenset[int] = frozenset()
        self._works: dict[int, Work] = {}
        self._home: dict[int, tuple[int, int, int]] = {}  # of a run, by id: its bucket, start and stop
        for group in inner.param_groups:
            for part in group["params"]:
                self._place(part)

    def leave_out(self, unused: Collection[int]) -> None:
        """Let the next steps pass over these parameters, as plain torch does over those without a gradient: no decay,
        no change of their state.
        """
        wanted = frozenset(unused)
        if wanted == self._left_out:
            return
        for group in self._inner.param_groups:
            group["params"] = [piece for part in group["params"] for piece in self._pieces(part, wanted)]
        self._left_out = wanted

    def step(self) -> None:
        """Update the parameters, and gather them, or start it where started collectives pay."""
        overlaps = self._gathers and any(bucket.comm.overlaps for bucket in self._buckets)
        if not overlaps or len(self._buckets) < 2:
            self._inner.step()
            for number in range(len(self._buckets)):
                self._write(number)
            return
        groups = self._inner.param_groups
        whole = [group["params"] for group in groups]
        try:
            for number in range(len(self._buckets)):
                for group, parts in zip(groups, whole, strict=True):
                    group["params"] = [part for part in parts if self._home.get(id(part), (0,))[0] == number]
                self._inner.step()
                self._write(number)
        finally:
            for group, parts in zip(groups, whole, strict=True):
                group["params"] = parts

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until the parameters of `buckets`, or of all, are gathered."""
        for number in list(self._works) if buckets is None else buckets:
            work = self._works.pop(number, None)
            if work is not None:
                work.wait()

    def wait_before_use(self, model: nn.Module, indices: Mapping[int, int]) -> None:
        """Have each module of `model` with parameters of its own wait for them, and for those of the modules in it,
        before it runs or gives its state dict. indices: of the parameters in the plans, by id.
        """
        numbers = {s.index: number for number, bucket in enumerate(self._buckets) for s in bucket.plan.slices}
        this = weakref.ref(self)
        for module in model.modules():
            if not any(id(p) in indices for p in module.parameters(recurse=False)):
                continue
            needed = tuple(sorted({numbers[indices[id(p)]] for p in module.parameters() if id(p) in indices}))
            wait = partial(_wait_for, this, needed)
            for hook in (module.register_forward_pre_hook(wait), module.register_state_dict_pre_hook(wait)):
                weakref.finalize(self, hook.remove).atexit = False

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _write(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.masters_to_parameters()
        work = bucket.start_gather() if self._gathers else None
        if work is not None:
            self._works[number] = work

    def _place(self, part: Tensor) -> None:
        """Find the bucket that holds a run."""
        for number, bucket in enumerate(self._buckets):
            first, last = bucket.updated
            offset = (part.data_ptr() - bucket.trained(first, last).data_ptr()) // part.element_size()
            if part.numel() and part.dtype is bucket.dtype and 0 <= offset < last - first:
                self._home[id(part)] = (number, first + offset, first + offset + part.numel())
                return

    def _pieces(self, part: Tensor, unused: frozenset[int]) -> list[Tensor]:
        """Return the run, cut where what is unused begins and ends, with gradients only where they are used."""
        if id(part) not in self._home:
            return [part]
        number, start, stop = self._home[id(part)]
        bucket = self._buckets[number]
        runs = bucket.plan.ranges(start, stop, key=lambda index: index in unused)
        pieces = [part] if len(runs) == 1 else self._cut(part, number, [(run.start, run.stop) for run in runs])
        for piece, run in zip(pieces, runs, strict=True):
            piece.grad = None if run.key else bucket.gradient(run.start, run.stop).view(piece.shape)
        return pieces

    def _cut(self, part: Tensor, number: int, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Replace a run by several, each with its part of the optimizer's state."""
        _, first, _ = self._home.pop(id(part))
        state = self._inner.state.pop(part, {})
        pieces = []
        for start, stop in runs:
            piece = self._buckets[number].trained(start, stop)
            self._home[id(piece)] = (number, start, stop)
            if state:
                self._inner.state[piece] = {
                    key: _part(value, part, start - first, stop - first) for key, value in state.items()
                }
            pieces.append(piece)
        return pieces


def _wait_for(stepper: weakref.ref[Stepper], buckets: Sequence[int], *_: object) -> None:
    """Run before a module. The module keeps this, which must not keep the buckets' memory."""
    alive = stepper()
    if alive is not None:
        alive.wait(buckets)


def _part(value: Any, of: Tensor, start: int, stop: int) -> Any:
    """Return the elements' own state where there is one for each, else a copy of what all had."""
    if not isinstance(value, Tensor):
        return value
    return value[start:stop] if value.shape == of.shape else value.clone()
