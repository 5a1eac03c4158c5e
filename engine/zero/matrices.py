"""Parameters that are updated whole, where each tensor rank holds a part: one of them gathers, steps and hands back.

Orthogonalising a shard is not a shard of the orthogonalised whole, so an optimizer of matrices (torch.optim.Muon) gets
the whole gradient and the whole parameter, and its state lives where it steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.placement import Placement
from engine.zero.buckets import FlatBucket
from engine.zero.offload import HostBucket
from engine.zero.plan import ParameterInfo, balanced


def matrix_work(shape: Sequence[int]) -> float:
    """Return what orthogonalising a whole parameter of this shape costs: m n min(m, n), its dims after the first taken
    as one.
    """
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    return float(numel * min(rows, numel // rows)) if numel else 0.0


@dataclass(frozen=True, eq=False)
class Matrix:
    """One whole parameter that this data rank updates, on the tensor rank that owns it and on the others."""

    index: int
    """Of the parameter, in the plan."""
    start: int
    """Its first element in the bucket."""
    placement: Placement
    owner: int
    """The tensor rank that steps it."""
    value: Tensor
    """What this tensor rank holds, a view of where the bucket is updated."""
    gradient: Tensor
    """Its reduced gradient, a view as well."""
    whole: Tensor | None
    """On the owner the whole parameter: what the optimizer updates."""
    whole_gradient: Tensor | None
    """On the owner its gradient: the parameter's `.grad`, unless it is left out."""


class BucketMatrices:
    """The whole parameters of one bucket that this data rank updates (at stage 0: all of them).

    Without tensor parallelism the optimizer works in the bucket itself. With it, the tensor ranks of one data rank
    share the work; an owner keeps two more tensors of the whole's size for every parameter that is cut.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        memory: FlatBucket | HostBucket,
        infos: Sequence[ParameterInfo],
        placements: Mapping[str, Placement],
        comm: Communicator,
        loads: list[float],
    ) -> None:
        """memory: where the bucket is updated; of a HostBucket without tensor parallelism only. infos: of the
        parameters, indexed by the bucket's plan. comm: the tensor axis, whose ranks must all make the
        same buckets. loads: what each tensor rank has to do for earlier buckets; brought up to date.
        """
        self._comm = comm
        low, high = bucket.updated
        held = [each for each in bucket.parameters if low <= each[1].start and each[1].stop <= high and each[0].numel()]
        owners = balanced([infos[each.index].work or 0.0 for _, each in held], loads)
        self.all: list[Matrix] = []
        for (parameter, each), owner in zip(held, owners, strict=True):
            placement = placements[infos[each.index].name]
            value = memory.trained(each.start, each.stop).view(parameter.shape)
            gradient = memory.gradient(each.start, each.stop).view(parameter.shape)
            whole = whole_gradient = None
            if owner == comm.rank:
                whole = value
                if placement.dim is not None and comm.size > 1:
                    whole = value.new_zeros(placement.full_shape(parameter.shape, comm.size))
                whole_gradient = whole.grad = gradient if whole is value else torch.zeros_like(whole)
            self.all.append(Matrix(each.index, each.start, placement, owner, value, gradient, whole, whole_gradient))

    def leave_out(self, unused: frozenset[int]) -> None:
        """Give the optimizers no gradient of these parameters, by their index, and of all others."""
        for each in self.all:
            if each.whole is not None:
                each.whole.grad = None if each.index in unused else each.whole_gradient

    def collect(self) -> None:
        """Give the owners the whole of what is cut: parameters and gradients. Every rank of the tensor axis must call
        it.
        """
        cut = [each for each in self.all if each.placement.dim is not None]
        if self._comm.size == 1 or not cut:
            return
        wholes = [each.whole for each in cut]
        self._fill(cut, [each.value for each in cut], wholes)
        self._fill(cut, [each.gradient for each in cut], [each.whole_gradient for each in cut])

    def hand_back(self) -> None:
        """Give every tensor rank its part of what the owners have updated. Every rank of the tensor axis must call
        it.
        """
        if self._comm.size == 1 or not self.all:
            return
        comm, size = self._comm, self._comm.size
        like = self.all[0].value
        send = like.new_zeros(size, self._width(self.all))
        for rank in range(size):
            own = [each.placement.shard(each.whole, rank, size) for each in self.all if each.whole is not None]
            _pack(own, send[rank])
        received = comm.all_to_all(send)
        for owner in range(size):
            _unpack(received[owner], [each.value for each in self.all if each.owner == owner])

    def _fill(self, cut: Sequence[Matrix], parts: Sequence[Tensor], wholes: Sequence[Tensor | None]) -> None:
        """Put every rank's parts together in the owners' wholes."""
        comm, size = self._comm, self._comm.size
        send = parts[0].new_zeros(size, self._width(cut))
        for owner in range(size):
            _pack([part for each, part in zip(cut, parts, strict=True) if each.owner == owner], send[owner])
        received = comm.all_to_all(send)
        shards = [[torch.empty_like(p) for p, whole in zip(parts, wholes, strict=True) if whole is not None]]
        shards += [[torch.empty_like(p) for p in shards[0]] for _ in range(size - 1)]
        for of_rank, row in zip(shards, received, strict=True):
            _unpack(row, of_rank)
        own = [(each, whole) for each, whole in zip(cut, wholes, strict=True) if whole is not None]
        for number, (each, whole) in enumerate(own):
            whole.copy_(each.placement.join([of_rank[number] for of_rank in shards]))

    def _width(self, matrices: Sequence[Matrix]) -> int:
        """Return the most elements that a rank holds of one owner's matrices."""
        held = [0] * self._comm.size
        for each in matrices:
            held[each.owner] += each.value.numel()
        return max(held)


def _pack(tensors: Sequence[Tensor], row: Tensor) -> None:
    if tensors:
        torch.cat([x.reshape(-1) for x in tensors], out=row[: sum(x.numel() for x in tensors)])


def _unpack(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for x, values in zip(
        tensors, row[: sum(x.numel() for x in tensors)].split([x.numel() for x in tensors]), strict=True
    ):
        x.copy_(values.view(x.shape))
