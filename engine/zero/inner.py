"""The user's optimizers over what one rank updates: runs of elements in flat memory, each of one parameter group, and
whole parameters.

Each bucket has optimizers of its own, so that it can be stepped before another's gradients are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.placement import Placement
from engine.zero.buckets import FlatBucket
from engine.zero.groups import options_of
from engine.zero.matrices import BucketMatrices
from engine.zero.offload import HostBucket, HostBuckets
from engine.zero.plan import ParameterInfo

_PIECE = 1 << 17  # elements that an optimizer which passes over memory several times updates at once: cache size


@dataclass(frozen=True, eq=False)
class Kind:
    """One optimizer class with its options, and the parameter groups that it updates."""

    optimizer_class: type[torch.optim.Optimizer]
    groups: tuple[int, ...]
    options: tuple[dict[str, Any], ...]
    """Of every group."""
    kwargs: dict[str, Any]
    """Of the class."""
    chosen: bool
    """Whether how many tensors are updated at once (torch's `foreach`) was left to us."""

    def make(self, members: Mapping[int, Sequence[Tensor]]) -> torch.optim.Optimizer:
        """Return an optimizer over `members`, by group; a group without any is there all the same."""
        pairs = zip(self.groups, self.options, strict=True)
        groups = [{**options, "params": list(members.get(group, ()))} for group, options in pairs]
        return self.optimizer_class(groups, **self.kwargs)


@dataclass(frozen=True, eq=False)
class Piece:
    """What one optimizer updates as one tensor: a run of bucket elements, or a whole parameter."""

    tensor: Tensor
    group: int
    start: int
    """First element in the bucket."""
    stop: int
    """Behind the last; of a whole parameter that is cut over the tensor axis, of what this rank holds."""
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps for it; empty before the first step."""
        state: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return state


class Inner:
    """The optimizers of all buckets on one rank."""

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        infos: Sequence[ParameterInfo],
        tensor: Communicator,
        host: HostBuckets | None = None,
    ) -> None:
        """buckets: more may be appended between steps, see `add`; so may infos, which are of the parameters, indexed by
        the buckets' plans. tensor: the axis that placements speak of. host: where the optimizers work instead of in the
        buckets.
        """
        self._kinds: list[Kind] = []
        self.matrices: list[BucketMatrices | None] = []
        """Of every bucket; None where it holds runs of elements."""
        self.pieces: list[list[Piece]] = []
        """Of every bucket."""
        self._optimizers: list[list[tuple[Kind, torch.optim.Optimizer]]] = []
        self._host, self._buckets, self._infos, self._tensor = host, buckets, infos, tensor
        self._memory: Sequence[FlatBucket | HostBucket] = buckets if host is None else host.buckets
        self._left_out: frozenset[int] = frozenset()
        self._loads = [0.0] * tensor.size

    def add(self, kinds: Sequence[Kind], placements: Mapping[str, Placement]) -> None:
        """Make the optimizers of the buckets that have none, whose parameters are in the groups of `kinds`."""
        self._kinds += kinds
        for number in range(len(self.matrices), len(self._buckets)):
            bucket, memory = self._buckets[number], self._memory[number]
            matrices = None
            if bucket.plan.whole:
                matrices = BucketMatrices(bucket, memory, self._infos, placements, self._tensor, self._loads)
            self.matrices.append(matrices)
            self._add(self._runs(bucket, memory) if matrices is None else _wholes(matrices, self._infos))

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What the optimizers keep, by the tensor that they update."""
        return {piece.tensor: piece.state for pieces in self.pieces for piece in pieces}

    @property
    def memory(self) -> list[tuple[FlatBucket, FlatBucket | HostBucket]]:
        """Every bucket, and where it is updated."""
        return list(zip(self._buckets, self._memory, strict=True))

    def leave_out(self, unused: Collection[int]) -> None:
        """Let the next steps pass over these parameters, by their index in the plans, as plain torch does over those
        without a gradient: no decay, no change of their state.
        """
        wanted = frozenset(unused)
        if wanted == self._left_out:
            return
        self._left_out = wanted
        for number, matrices in enumerate(self.matrices):
            if matrices is None:
                self.pieces[number] = [each for piece in self.pieces[number] for each in self._cut(number, piece)]
            else:
                matrices.leave_out(wanted)

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the options of every parameter group, which a scheduler or the user may have changed."""
        for optimizers in self._optimizers:
            for kind, optimizer in optimizers:
                for group, inner in zip(kind.groups, optimizer.param_groups, strict=True):
                    inner.update(options_of(groups[group]))

    def step(self, bucket: int) -> None:
        """Update what this rank updates of one bucket. Every rank of the tensor axis must call it, for the buckets in
        one order.
        """
        matrices = self.matrices[bucket]
        if self._host is not None:
            self._host.start(bucket)
        if matrices is not None:
            matrices.collect()
        for _, optimizer in self._optimizers[bucket]:
            optimizer.step()
        if matrices is not None:
            matrices.hand_back()
        if self._host is not None:
            self._host.end(bucket)

    def _cut(self, number: int, piece: Piece) -> list[Piece]:
        """Return a run in pieces that are used or left out whole, each with its part of the state, and with a gradient
        where it is used.
        """
        memory = self._memory[number]
        runs = self._buckets[number].plan.ranges(piece.start, piece.stop, key=lambda index: index in self._left_out)
        pieces = [piece]
        if len(runs) > 1:
            state = piece.optimizer.state.pop(piece.tensor, {})
            pieces = [replace(piece, tensor=memory.trained(r.start, r.stop), start=r.start, stop=r.stop) for r in runs]
            for each in pieces if state else ():
                first, last = each.start - piece.start, each.stop - piece.start
                each.optimizer.state[each.tensor] = {
                    key: _part(value, piece.tensor, first, last) for key, value in state.items()
                }
            for group in piece.optimizer.param_groups:
                group["params"] = [
                    x
                    for held in group["params"]
                    for x in ([p.tensor for p in pieces] if held is piece.tensor else [held])
                ]
        for each, run in zip(pieces, runs, strict=True):
            each.tensor.grad = None if run.key else memory.gradient(each.start, each.stop)
        return pieces

    def _add(self, parts: Iterable[tuple[Tensor, int, int, int]]) -> None:
        """Make the optimizers of one bucket. parts: (tensor with its gradient, group, start, stop)."""
        members: dict[int, list[tuple[Tensor, int, int, int]]] = {}
        for part in parts:
            members.setdefault(part[1], []).append(part)
        pieces, optimizers = [], []
        for kind in self._kinds:
            own = {group: members[group] for group in kind.groups if group in members}
            if own:
                optimizer = kind.make({group: [part[0] for part in held] for group, held in own.items()})
                optimizers.append((kind, optimizer))
                pieces += [Piece(*part, optimizer) for held in own.values() for part in held]
        self._optimizers.append(optimizers)
        self.pieces.append(pieces)

    def _runs(self, bucket: FlatBucket, memory: FlatBucket | HostBucket) -> Iterable[tuple[Tensor, int, int, int]]:
        """Yield the runs of elements of one group each, in pieces where the optimizer passes over them repeatedly."""
        pieced = {group for kind in self._kinds if kind.chosen for group in kind.groups}
        for run in bucket.plan.ranges(*bucket.updated, key=lambda index: self._infos[index].group):
            assert isinstance(run.key, int)
            short = run.key in pieced and memory.device.type == "cpu"
            longest = _PIECE if short else run.stop - run.start
            for start in range(run.start, run.stop, longest):
                stop = min(run.stop, start + longest)
                part = memory.trained(start, stop)
                part.grad = memory.gradient(start, stop)
                yield part, run.key, start, stop


def _part(value: Any, of: Tensor, start: int, stop: int) -> Any:
    """Return the elements' own state where there is one for each, else a copy of what all had."""
    if not isinstance(value, Tensor):
        return value
    return value[start:stop] if value.shape == of.shape else value.clone()


def _wholes(matrices: BucketMatrices, infos: Sequence[ParameterInfo]) -> Iterable[tuple[Tensor, int, int, int]]:
    """Yield the whole parameters that this rank steps."""
    for each in matrices.all:
        if each.whole is not None:
            yield each.whole, infos[each.index].group, each.start, each.start + each.value.numel()


def kinds_of(
    optimizer_class: type[torch.optim.Optimizer],
    placed: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    *,
    first: int = 0,
) -> list[Kind]:
    """Return who updates which groups, the first group's first: a group that names another class has an optimizer by
    itself, whose options are the group's. placed: the groups, from number `first` on. kwargs: of `optimizer_class`,
    which updates the groups that name no other.
    """
    numbered = dict(enumerate(placed, first))
    named = [g for g, options in numbered.items() if options.get("optimizer", optimizer_class) is not optimizer_class]
    rest = [group for group in numbered if group not in named]
    kinds = []
    if rest:
        chosen = _chooses(optimizer_class, kwargs)
        options = tuple(options_of(numbered[group]) for group in rest)
        ours = {**kwargs, "foreach": False} if chosen else dict(kwargs)
        kinds.append(Kind(optimizer_class, tuple(rest), options, ours, chosen))
    for group in named:
        kind, own = numbered[group]["optimizer"], options_of(numbered[group])
        chosen = _chooses(kind, own)
        kinds.append(Kind(kind, (group,), ({},), {**own, "foreach": False} if chosen else own, chosen))
    return sorted(kinds, key=lambda kind: kind.groups)


def full_options(kinds: Sequence[Kind]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the options of every group of `kinds`, in order, the class's defaults among them, without parameters; and
    the defaults of the first one's class. Raises what the classes do for options that they do not take.
    """
    templates = [(kind, kind.make({})) for kind in kinds]
    by_group = {
        group: options_of(options)
        for kind, template in templates
        for group, options in zip(kind.groups, template.param_groups, strict=True)
    }
    return [by_group[group] for group in sorted(by_group)], templates[0][1].defaults


def _chooses(optimizer_class: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> bool:
    """Whether the class can update many tensors at once, and nobody said whether it should. The runs are few and long,
    so it should not; torch's own choice would also wake an NPU from a CPU run.
    """
    return "foreach" in inspect.signature(optimizer_class).parameters and not {"foreach", "fused"} & given.keys()
