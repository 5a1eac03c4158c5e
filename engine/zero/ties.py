"""Tied parameters whose copies live on several pipeline stages: one value, one gradient.

The copies' gradients are summed before anything is reduced over the data axis: afterwards each rank would hold other
elements of them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.placement import Tied


def share(tie: Tied, x: Tensor, pipeline: Communicator, how: Literal["copy", "sum"]) -> None:
    """Give every copy of `x` the owner's value, or the sum over the stages, added in stage order: bitwise equal
    everywhere.

    Every stage of `tie` must call it; the others must not. Two stages of a longer pipeline talk without the ones
    between.
    """
    owner, *others = tie.stages
    if pipeline.rank != owner:
        if how == "sum":
            pipeline.send(x, owner)
        pipeline.recv(x, owner)
        return
    if how == "sum":
        parts = pipeline.exchange(recvs=[(torch.empty_like(x), stage) for stage in others])
        for part in parts:
            x.add_(part)
    pipeline.exchange(sends=[(x, stage) for stage in others])
