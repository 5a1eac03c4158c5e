"""When the reduction of a bucket may start: once all its gradients of a backward are there, in one fixed order. Pure.

The order is the same on every data rank, whatever arrives when; what arrives, and how often, is not. So a bucket waits
for those before it, and for as many arrivals of each parameter as the step before had in one backward; what is not
complete when the backward ends starts then. Every rank so starts the same buckets in the same order. Gradients that
come after their bucket has started are the caller's to keep for its next start.
"""

from __future__ import annotations

from collections.abc import Sequence


class StartOrder:
    """The buckets of one backward after another."""

    def __init__(self, buckets: Sequence[Sequence[int]], *, early: bool = True) -> None:
        """buckets: the parameters of each. early: whether buckets start before the backward has ended."""
        self._early = early
        self._members = [tuple(members) for members in buckets]
        self._bucket_of = {index: number for number, members in enumerate(buckets) for index in members}
        self._expected = dict.fromkeys(self._bucket_of, 1)
        self._most: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._waiting: list[int] = []  # of this backward, the next one last
        self._missing: dict[int, int] = {}

    def begin(self, buckets: Sequence[int]) -> None:
        """A backward begins, after which `buckets` will have been started, in this order."""
        self._waiting = list(reversed(buckets))
        self._seen = {index: 0 for number in buckets for index in self._members[number]}
        self._missing = {n: sum(self._expected[index] > 0 for index in self._members[n]) for n in buckets}

    def arrive(self, index: int) -> list[int]:
        """A gradient of parameter `index` is there. Return the buckets to start now."""
        if index not in self._seen:
            return []
        self._seen[index] += 1
        if self._seen[index] == self._expected[index]:
            self._missing[self._bucket_of[index]] -= 1
        ready = []
        while self._early and self._waiting and self._missing[self._waiting[-1]] == 0:
            ready.append(self._waiting.pop())
        return ready

    def end(self) -> list[int]:
        """The backward has ended. Return the buckets to start now."""
        for index, count in self._seen.items():
            self._most[index] = max(self._most.get(index, 0), count)
        left = self._waiting[::-1]
        self._waiting, self._seen = [], {}
        return left

    def drop(self) -> None:
        """The backward has failed: nothing of it is to be started."""
        self._waiting, self._seen = [], {}

    def next_step(self) -> None:
        """A step is over: its most arrivals of each parameter in one backward are what is waited for from here on."""
        self._expected.update(self._most)
        self._most = {}
