"""Systems that the training benchmark must refuse: one that crashes, one that trains something else, one that hangs."""

from __future__ import annotations

import threading
from typing import Any

import torch

from benchmarks.peers.data_parallel import ddp
from benchmarks.work import Work


def crash(work: Work, device: torch.device) -> Any:
    step = ddp(work, device)
    calls = iter(range(work.warm_up + work.steps))

    def crashing(ids: torch.Tensor) -> torch.Tensor | None:
        if next(calls) == work.warm_up and torch.distributed.get_rank() == 1:
            raise RuntimeError("the planted crash of rank 1")
        return step(ids)

    return crashing


def other_loss(work: Work, device: torch.device) -> Any:
    step = ddp(work, device)
    return lambda ids: step(ids) * 1.0003


def hang(work: Work, device: torch.device) -> Any:
    return lambda _ids: threading.Event().wait()
