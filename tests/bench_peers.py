"""Systems that the training benchmark must refuse: they crash, are killed, hang, or train something else."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.data_parallel import accumulate, ddp, own_rows
from benchmarks.peers.gpt import adamw, gpt, mean_loss
from benchmarks.work import Work


def fail_in_the_first_timed_step(work: Work, device: torch.device, fail: Any) -> Any:
    step = ddp(work, device)
    numbers = iter(range(work.warm_up + work.steps))

    def failing(ids: torch.Tensor) -> torch.Tensor | None:
        if next(numbers) == work.warm_up and torch.distributed.get_rank() == 1:
            fail()
        return step(ids)

    return failing


def crash(work: Work, device: torch.device) -> Any:
    def fail() -> None:
        raise RuntimeError("the planted crash of rank 1")

    return fail_in_the_first_timed_step(work, device, fail)


def killed(work: Work, device: torch.device) -> Any:
    return fail_in_the_first_timed_step(work, device, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hang(_work: Work, _device: torch.device) -> Any:
    return lambda _ids: threading.Event().wait()


def stubborn(work: Work, device: torch.device) -> Any:
    """Hangs, will not be asked to end, and leaves its process id in the working folder."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(os.environ["STUBBORN_FOLDER"])
    (folder / str(os.getpid())).touch()
    return hang(work, device)


def other_loss(work: Work, device: torch.device) -> Any:
    step = ddp(work, device)
    return lambda ids: step(ids) * 1.0003


def _trained(work: Work, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def backward(inputs: torch.Tensor, targets: torch.Tensor, _last: bool) -> torch.Tensor:
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = accumulate(work, own_rows(work, ids), backward)
        optimizer.step()
        return loss

    return step


def no_all_reduce(work: Work, _device: torch.device) -> Any:
    """Each rank trains on its own rows."""
    model = gpt(work.model, work.seed)
    return _trained(work, model, adamw(model.parameters()))


def half_gradients(work: Work, _device: torch.device) -> Any:
    """Gradients are divided by the number of ranks twice."""
    model = nn.parallel.DistributedDataParallel(gpt(work.model, work.seed))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    return _trained(work, model, adamw(model.parameters()))


def untrained_norms(work: Work, _device: torch.device) -> Any:
    """The layer norms are left as they were."""
    model = nn.parallel.DistributedDataParallel(gpt(work.model, work.seed))
    return _trained(work, model, adamw([p for n, p in model.named_parameters() if "norm" not in n]))
