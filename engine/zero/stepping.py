"""One update of the parameters: bucket by bucket, each gathered while the next is updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.comm.work import Work
from engine.zero.buckets import FlatBucket
from engine.zero.inner import Inner


class Stepper:
    """Steps the buckets' optimizers, and gathers the result."""

    def __init__(self, inner: Inner, buckets: Sequence[FlatBucket], *, gathers: bool) -> None:
        """gathers: whether other data ranks need what this one updates."""
        self._inner, self._buckets, self._gathers = inner, buckets, gathers
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

    def _write(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.masters_to_parameters()
        work = bucket.start_gather() if self._gathers else None
        if work is not None:
            self._works[number] = work
