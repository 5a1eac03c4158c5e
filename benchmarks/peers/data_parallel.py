"""Data-parallel peers, and one plain process. Gradients are averaged over the data ranks, which have equal rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import Step
from benchmarks.peers.gpt import ADAMW, adamw, gpt, mean_loss
from benchmarks.work import Work


def own_rows(work: Work, ids: Tensor) -> Tensor:
    """Return this data rank's rows, where ranks are data ranks."""
    return ids[dist.get_rank() * work.rows :][: work.rows]


def accumulate(work: Work, ids: Tensor, backward: Callable[[Tensor, Tensor, bool], Tensor]) -> Tensor:
    """Run `backward(inputs, targets, last)` over the microbatches; return the mean of the losses."""
    parts = ids.chunk(work.microbatches)
    losses = [backward(part[:, :-1], part[:, 1:], i == len(parts) - 1) for i, part in enumerate(parts)]
    return torch.stack(losses).mean()


def _training(
    work: Work,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Callable[[Tensor], Tensor],
    unsynchronised: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """Return the usual loop: backward for every microbatch, gradients shared with the last one, step."""

    def backward(inputs: Tensor, targets: Tensor, last: bool) -> Tensor:
        with nullcontext() if last else unsynchronised():
            loss = mean_loss(model(inputs), targets)
            (loss / work.microbatches).backward()
        return loss.detach()

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = accumulate(work, rows(ids), backward)
        optimizer.step()
        return loss

    return step


def plain(work: Work, device: torch.device) -> Step:
    """One process, no parallelism: plain PyTorch."""
    model = gpt(work.model, work.seed).to(device)
    return _training(work, model, adamw(model.parameters()), lambda ids: ids)


def ddp(work: Work, device: torch.device) -> Step:
    """torch.nn.parallel.DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(gpt(work.model, work.seed).to(device))
    return _training(work, model, adamw(model.parameters()), lambda ids: own_rows(work, ids), model.no_sync)


def zero1(work: Work, device: torch.device) -> Step:
    """DDP with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(gpt(work.model, work.seed).to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    return _training(work, model, optimizer, lambda ids: own_rows(work, ids), model.no_sync)


def fsdp2(work: Work, device: torch.device) -> Step:
    """torch's fully_shard, each block a unit, parameters kept between forward and backward (so ZeRO-2)."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = gpt(work.model, work.seed).to(device)
    for block in list(model)[1:-1]:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)

    @contextmanager
    def unsynchronised() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return _training(work, model, adamw(model.parameters()), lambda ids: own_rows(work, ids), unsynchronised)


def deepspeed_zero2(work: Work, device: torch.device) -> Step:
    """DeepSpeed ZeRO stage 2."""
    import deepspeed

    model = gpt(work.model, work.seed).to(device)
    config = {
        "train_micro_batch_size_per_gpu": work.rows // work.microbatches,
        "gradient_accumulation_steps": work.microbatches,
        "zero_optimization": {"stage": 2, "overlap_comm": device.type != "cpu"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    trainer, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def backward(inputs: Tensor, targets: Tensor, _last: bool) -> Tensor:
        loss = mean_loss(trainer(inputs), targets)
        trainer.backward(loss)
        trainer.step()  # acts at the last microbatch only
        return loss.detach()

    return lambda ids: accumulate(work, own_rows(work, ids), backward)
