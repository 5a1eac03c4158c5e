"""Which layers go to which stage: contiguous runs of layers, at least one for each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from engine.errors import LayoutError


def uniform(layers: int, stages: int) -> tuple[range, ...]:
    """Cut `layers` layers into runs whose lengths differ by at most one, the longer ones first.

    Raises LayoutError when there are fewer layers than stages.
    """
    _enough(layers, stages)
    short, longer = divmod(layers, stages)
    return explicit([short + (stage < longer) for stage in range(stages)], layers, stages)


def explicit(counts: Sequence[int], layers: int, stages: int) -> tuple[range, ...]:
    """Cut by the given number of layers for each stage. Raises LayoutError when they do not add up."""
    if len(counts) != stages:
        raise LayoutError(f"balance={list(counts)} names {len(counts)} stages, the layout has {stages}")
    if any(count < 1 for count in counts):
        raise LayoutError(f"balance={list(counts)}: every stage needs at least one layer")
    if sum(counts) != layers:
        raise LayoutError(f"balance={list(counts)} adds up to {sum(counts)} layers, the model has {layers}")
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def by_cost(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut so that the costliest stage costs least, and among those cuts so that the sum of the stages' squared costs
    is least.

    Raises LayoutError when there are fewer layers than stages.
    """
    layers = len(costs)
    _enough(layers, stages)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]

    @cache
    def smallest(layer: int, left: int) -> float:
        """The least possible cost of the costliest of `left` stages that hold the layers from `layer` on."""
        if left == 1:
            return sums[layers] - sums[layer]
        return min(max(sums[end] - sums[layer], smallest(end, left - 1)) for end in range(layer + 1, layers - left + 2))

    limit = smallest(0, stages) * (1 + 1e-12)

    @cache
    def evenest(layer: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The least sum of squares within `limit`, and the ends of the stages."""
        options = []
        for end in range(layer + 1, layers - left + 2) if left > 1 else [layers]:
            cost = sums[end] - sums[layer]
            rest, ends = evenest(end, left - 1) if left > 1 else (0.0, ())
            options.append((cost * cost + rest if cost <= limit else float("inf"), (end, *ends)))
        return min(options)

    ends = evenest(0, stages)[1]
    return tuple(range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True))


def _enough(layers: int, stages: int) -> None:
    if layers < stages:
        raise LayoutError(f"{layers} layers cannot fill {stages} pipeline stages: use at most {layers}, or add layers")
