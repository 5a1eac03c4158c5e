"""Tensor parallelism with torch's DTensor: Megatron's cut, the loss over sharded logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.peers import Step
from benchmarks.peers.data_parallel import accumulate
from benchmarks.peers.gpt import Block, adamw, gpt
from benchmarks.work import Work


def cut_block(block: Block, mesh: DeviceMesh) -> None:
    """Cut a block's linear layers over `mesh`."""
    columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    parallelize_module(block, mesh, {**columns, **dict.fromkeys(("out", "down"), RowwiseParallel())})


def dtensor(work: Work, device: torch.device) -> Step:
    """parallelize_module over all ranks. Sharded and whole parameters need an optimizer each."""
    mesh = init_device_mesh(device.type, (work.layout.tensor,))
    model = gpt(work.model, work.seed).to(device)
    for block in list(model)[1:-1]:
        assert isinstance(block, Block)
        cut_block(block, mesh)
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"0.token": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(model[-1], mesh, {"project": logits})
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizers = [adamw(parameters) for parameters in kinds.values()]

    def backward(inputs: Tensor, targets: Tensor, _last: bool) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / work.microbatches).backward()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()

    def step(ids: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = accumulate(work, ids, backward)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return step
