"""Tensor parallelism with torch's DTensor: Megatron's cut, the loss over sharded logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.peers import Step
from benchmarks.peers.data_parallel import accumulate
from benchmarks.peers.gpt import Attention, Block, adamw, gpt
from benchmarks.work import Work


class ApartAttention(Attention):
    """The same with a projection each for queries, keys and values: DTensor has no shard of all three."""

    def __init__(self, attention: Attention) -> None:
        """Takes the weights of `attention` over."""
        nn.Module.__init__(self)
        self.head_size = attention.head_size
        for name, module in attention.named_children():
            if name != "qkv":
                self.add_module(name, module)
        for name, weight in zip(("query", "key", "value"), attention.qkv.weight.detach().chunk(3), strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
            linear.weight.data.copy_(weight)
            self.add_module(name, linear)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name)(x) for name in ("query", "key", "value"))


def cut_blocks(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Cut the linear layers of every block of `model` over `mesh`."""
    columns = dict.fromkeys(("attention.query", "attention.key", "attention.value", "mlp.up"), ColwiseParallel())
    rows = dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel())
    for block in model:
        if isinstance(block, Block):
            block.attention = ApartAttention(block.attention)
            parallelize_module(block, mesh, {**columns, **rows})


def dtensor(work: Work, device: torch.device) -> Step:
    """parallelize_module over all ranks. Sharded and whole parameters need an optimizer each."""
    mesh = init_device_mesh(device.type, (work.layout.tensor,))
    model = gpt(work.model, work.seed).to(device)
    cut_blocks(model, mesh)
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
