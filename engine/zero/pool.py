"""Memory for the gradients of buckets that keep only a shard of them: borrowed while a bucket fills and is reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.comm.communicator import Communicator


class BufferPool:
    """Flat buffers of one size for each dtype. Those of `allocate` are taken once, at construction; where a backward
    fills more buckets at a time, more are taken and kept.
    """

    def __init__(self, comm: Communicator, wanted: Sequence[tuple[torch.dtype, int]], *, shared: int) -> None:
        """wanted: the dtype and elements of each bucket that will borrow in turn. shared: how many at a time, at most,
        in memory that the ranks of `comm` read where it lies. Every rank of it must call it.
        """
        self._device = comm.device
        self._free: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        self._sizes: dict[torch.dtype, int] = {}
        for dtype in dict.fromkeys(dtype for dtype, _ in wanted):
            sizes = [numel for each, numel in wanted if each is dtype]
            self._sizes[dtype] = max(sizes)
            self._free[dtype] = [comm.allocate((max(sizes),), dtype) for _ in range(min(shared, len(sizes)))]

    def has_free(self, dtype: torch.dtype) -> bool:
        """Whether a buffer can be borrowed without taking memory."""
        return bool(self._free[dtype])

    def borrow(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a buffer of at least `numel` elements, with any values in it."""
        free = self._free[dtype]
        place = next((i for i in reversed(range(len(free))) if free[i].numel() >= numel), None)
        if place is not None:
            return free.pop(place)
        return torch.empty(max(numel, self._sizes.get(dtype, 0)), dtype=dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Take back what was borrowed."""
        self._free[buffer.dtype].append(buffer)
