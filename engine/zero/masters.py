"""The fp32 masters of low-precision parameters as whole tensors, and back: for saving and loading, not for a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.zero.buckets import FlatBucket
from engine.zero.offload import HostBucket
from engine.zero.plan import Slice

Memory = Sequence[tuple[FlatBucket, FlatBucket | HostBucket]]
"""Every bucket, and where it is updated."""


def whole_masters(memory: Memory) -> dict[int, Tensor]:
    """Return, by `id(parameter)`, the masters, whole over the data axis, all of whose ranks must call it. Of a value
    that was written into a parameter since the last step, that value.
    """
    found: dict[int, Tensor] = {}
    for bucket, updated in memory:
        if bucket.dtype is bucket.plan.dtype:
            continue
        low, high = bucket.updated
        rounded = bucket.flat[low:high]
        own = updated.trained(low, high).to(rounded.device)
        own = torch.where(rounded == own.to(rounded.dtype), own, rounded.to(own.dtype))
        whole = own if bucket.stage == 0 else bucket.comm.all_gather(own)
        for parameter, each in bucket.parameters:
            found[id(parameter)] = whole[each.start : each.stop].view(parameter.shape)
    return found


def set_masters(memory: Memory, values: Mapping[int, Tensor]) -> None:
    """Put these values, by `id(parameter)` and of the parameter's shape, into the masters that this rank updates, once
    the parameters are the same values, rounded. Nothing is sent.
    """
    for bucket, updated in memory:
        for parameter, low, high, each in _updated(bucket):
            if id(parameter) in values:
                flat = values[id(parameter)].reshape(-1)
                updated.trained(low, high).copy_(flat[low - each.start : high - each.start])


def _updated(bucket: FlatBucket) -> Iterator[tuple[nn.Parameter, int, int, Slice]]:
    """Yield the bucket elements that this rank updates of each parameter."""
    first, last = bucket.updated
    for parameter, each in bucket.parameters:
        low, high = max(first, each.start), min(last, each.stop)
        if low < high:
            yield parameter, low, high, each
