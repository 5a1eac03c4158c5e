"""Optimizer states, and the values that are updated, in the host's memory: gradients come, updated parameters go back.

Two buffers for gradients take turns: while the host updates one bucket, the next one's gradient is on its way, and so
are the parameters of the one before. On a CPU the same copies are made, at once. Method: ZeRO-Offload,
arXiv:2101.06840.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device import Copied, CopyStream, host_empty
from engine.zero.buckets import FlatBucket


class HostBucket:
    """What one rank updates of one bucket, on the host: the values for good, the gradient in a lent buffer."""

    def __init__(self, bucket: FlatBucket, buffer: Tensor, stream: CopyStream) -> None:
        """buffer: host memory for the gradient, which another bucket may use once this one is updated."""
        self._low, high = bucket.updated
        self._parameters = [parameter for parameter, _ in bucket.parameters]
        self._gradient, self._target = bucket.gradient(self._low, high), bucket.flat[self._low : high]
        self._buffer = buffer[: high - self._low]
        self._values = host_empty(high - self._low, self._gradient.dtype, bucket.flat.device).zero_()
        self._stream = stream
        self._fetched: Copied | None = None
        self._sent: Copied | None = None
        self._versions: list[int] = []  # none: the first step takes the values, which are then there on every rank

    @property
    def device(self) -> torch.device:
        """Where the optimizer works."""
        return self._values.device

    def trained(self, start: int, stop: int) -> Tensor:
        """Return what the optimizer updates for bucket elements [start, stop), a view."""
        return self._values[start - self._low : stop - self._low]

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the gradients of bucket elements [start, stop), a view; valid from `wait` to the next step."""
        return self._buffer[start - self._low : stop - self._low]

    def remember(self) -> None:
        """Take the parameters for what this optimizer made of them, as far as their version counters tell."""
        self._versions = [parameter._version for parameter in self._parameters]

    def fetch(self) -> None:
        """Start bringing the gradient, unless it is under way."""
        if self._fetched is None:
            self._fetched = self._stream.copy(self._buffer, self._gradient)

    def wait(self) -> None:
        """Return once the gradient is here, and the values may be written. Values that were changed elsewhere since the
        last step are taken over: those that differ from what was sent, so that rounding loses nothing.
        """
        self.sent()
        if [parameter._version for parameter in self._parameters] != self._versions:
            found = self._target.to(self.device)
            same = found == self._values.to(found.dtype)
            torch.where(same, self._values, found.to(self._values.dtype), out=self._values)
        assert self._fetched is not None
        self._fetched.wait_on_host()
        self._fetched = None

    def sent(self) -> None:
        """Return once the values that were last sent may be written."""
        if self._sent is not None:
            self._sent.wait_on_host()

    def send(self) -> None:
        """Start taking the updated values back; what the device does from now on sees them."""
        self._sent = self._stream.copy(self._target, self._values)
        self._sent.wait_on_device()


class HostBuckets:
    """The host's side of all buckets."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, CopyStream(device)
        self.buckets: list[HostBucket] = []

    def add(self, buckets: Sequence[FlatBucket]) -> None:
        """Add buckets, which have two buffers of their own."""
        longest: dict[torch.dtype, int] = {}
        for bucket in buckets:
            dtype = bucket.gradient(bucket.start, bucket.start).dtype
            longest[dtype] = max(longest.get(dtype, 0), bucket.plan.shard)
        buffers = {dtype: [host_empty(n, dtype, self._device) for _ in range(2)] for dtype, n in longest.items()}
        for number, bucket in enumerate(buckets):
            pair = buffers[bucket.gradient(bucket.start, bucket.start).dtype]
            self.buckets.append(HostBucket(bucket, pair[number % 2], self._stream))

    def start(self, number: int) -> None:
        """Return when bucket `number` can be updated here, with the next one's gradient on its way."""
        for each in self.buckets[number : number + 2]:
            each.fetch()
        self.buckets[number].wait()

    def end(self, number: int) -> None:
        """Start taking bucket `number` back."""
        self.buckets[number].send()

    def remember(self) -> None:
        """See `HostBucket.remember`, for all; after a step, when the parameters' version counters were raised."""
        for bucket in self.buckets:
            bucket.remember()
