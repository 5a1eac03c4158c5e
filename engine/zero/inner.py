"""The user's optimizer over what one rank updates: runs of elements in flat memory, each of one parameter group."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.zero.buckets import FlatBucket
from engine.zero.groups import Named
from engine.zero.plan import ParameterInfo

_PIECE = 1 << 17  # elements that an optimizer which passes over memory several times updates at once: cache size


def make_inner(
    optimizer_class: type[torch.optim.Optimizer],
    placed: Sequence[tuple[dict[str, Any], list[Named]]],
    kwargs: Mapping[str, Any],
    buckets: Sequence[FlatBucket],
    infos: Sequence[ParameterInfo],
) -> torch.optim.Optimizer:
    """Build the optimizer over the elements of all buckets that this rank updates. placed: the parameter groups, whose
    options each run of elements keeps. infos: of the parameters, indexed by the buckets' plans.
    """
    members: list[list[Tensor]] = [[] for _ in placed]
    accepted = inspect.signature(optimizer_class).parameters
    longest = None
    if "foreach" in accepted and not {"foreach", "fused"} & kwargs.keys():
        # The runs are few and long. torch's own choice would also wake an NPU from a CPU run.
        kwargs = {**kwargs, "foreach": False}
        longest = _PIECE if buckets and buckets[0].flat.device.type == "cpu" else None
    for bucket in buckets:
        for run in bucket.plan.ranges(*bucket.updated, key=lambda index: infos[index].group):
            assert isinstance(run.key, int)
            for start in range(run.start, run.stop, longest or run.stop):
                stop = min(run.stop, start + longest) if longest else run.stop
                part = bucket.trained(start, stop)
                part.grad = bucket.gradient(start, stop)
                members[run.key].append(part)
    groups = [{**options, "params": parts} for (options, _), parts in zip(placed, members, strict=True)]
    return optimizer_class(groups, **kwargs)
