"""The whole use of the engine: a model of layers, an optimizer, a training step.

    torchrun --standalone --nproc-per-node 4 examples/minimal.py

4 processes are data(1) x pipeline(2) x tensor(2); 8 are data(2) x pipeline(2) x tensor(2), with the same losses.
"""

import torch
from torch import Tensor, nn

import engine
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class Block(nn.Module):
    """Two matrices around a ReLU, with a residual. Each tensor rank holds its part of both."""

    def __init__(self, width: int, tensor: engine.Communicator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = ColumnParallelLinear(width, 4 * width, tensor)
        self.down = RowParallelLinear(4 * width, width, tensor)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + change


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a sum and its count: the engine divides by the count of the whole global batch."""
    return (output - target).square().sum(), target.numel()


def main() -> None:
    """Every process runs this."""
    with engine.init(engine.Layout(data=-1, pipeline=2, tensor=2)) as mesh:
        blocks = [engine.LayerSpec(Block, 64, mesh.tensor) for _ in range(4)]
        layers = [engine.LayerSpec(nn.Linear, 16, 64), *blocks, engine.LayerSpec(nn.Linear, 64, 16)]
        model = engine.PipelineModel(layers, mesh)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=3e-3)
        step = engine.TrainStep(model, optimizer, squared_error, mesh, microbatches=2, clip_grad_norm=1.0)
        generator = torch.Generator().manual_seed(0)
        for number in range(101):
            inputs = torch.randn(64, 16, generator=generator)  # the global batch, the same on every rank
            targets = inputs.sort(dim=1).values  # the task: sort 16 numbers
            own = slice(mesh.data.rank, None, mesh.data.size)  # this data rank's rows
            result = step(inputs[own], targets[own])
            if mesh.rank == 0 and number % 10 == 0:
                print(f"step {number:3}  loss {result.loss.item():.3f}")


if __name__ == "__main__":
    main()
