"""Stages balanced by measured time, several models in one process, and one layer at least for each stage."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel, plan_mesh
from engine.errors import LayoutError
from engine.pipeline import partition, profile
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear, SyncBatchNorm, random
from tests.test_parity import worst_error
from tests.world import World, refusals

DOUBLE = torch.float64


class Busy(nn.Module):
    """Takes a known time forward, and as long again backward; counts the layers that are alive, and how they ran."""

    alive = most = 0

    def __init__(self, milliseconds: float, seen: list[Any], tensor: engine.Communicator | None = None) -> None:
        super().__init__()
        self.seconds, self.seen, self.comm = milliseconds / 1000, seen, tensor
        self.linear = nn.Linear(4, 4)
        Busy.alive += not self.linear.weight.is_meta
        Busy.most = max(Busy.most, Busy.alive)

    def __del__(self) -> None:
        Busy.alive -= 1

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if len(self.seen) % 6 == 0:
            spend(1.0)  # the first of six rounds, which is not counted
        self.seen.append((tuple(x.shape), scale, self.training, torch.is_grad_enabled()))
        return Work.apply(self.linear(x.mul_(scale)), self.seconds, self.comm)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, comm: Any) -> Tensor:
        ctx.seconds = seconds
        if comm is not None:  # only where all ranks of the axis run the layer does this end
            comm.barrier()
        spend(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        spend(ctx.seconds)
        return gradient, None, None


class Clock:
    """The clock by which the layers are measured: only they take time, whatever else runs on this machine."""

    def __init__(self, speed: float) -> None:
        self.now, self.speed = 0.0, speed

    def perf_counter(self) -> float:
        return self.now


def spend(seconds: float) -> None:
    clock: Any = profile.time
    clock.now += seconds * clock.speed


def measured(mesh: engine.Mesh, milliseconds: list[float]) -> Any:
    seen: list[Any] = []
    specs = [LayerSpec(Busy, each, seen, mesh.tensor, cost=1.0) for each in milliseconds]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Busy.alive = Busy.most = 0
    sample = {"x": torch.ones(2, 4), "scale": 1.0}
    with torch.no_grad(), mock.patch.object(profile, "time", Clock(1 + 0.1 * mesh.rank)):
        model = PipelineModel(specs, mesh, balance="measured", sample=sample)
    alive = (Busy.most, Busy.alive)
    same = PipelineModel(specs, mesh, balance=[len(stage) for stage in model.stages])
    state = same.state_dict()
    return {
        "stages": [list(stage) for stage in model.stages],
        "layers": list(model.layers),
        "costs": model.costs,
        "alive": alive,
        "runs": seen,
        "weights": all(torch.equal(state[name], value) for name, value in model.state_dict().items()),
        "random": torch.equal(torch.rand(3), expected),
        "gradients": [p.grad for p in model.parameters()],
        "sample": sample["x"].tolist(),
    }


@pytest.mark.parametrize(
    ("layout", "milliseconds", "stages"),
    [
        (Layout(pipeline=2), [0.5, 0.5, 0.5, 0.5, 0.5, 12], [[0, 1, 2, 3, 4], [5]]),
        (Layout(data=2, pipeline=2), [14, 0.5, 0.5, 0.5], [[0], [1, 2, 3]]),
        (Layout(pipeline=2, tensor=2), [0.5, 0.5, 14, 0.5], [[0, 1], [2, 3]]),
    ],
    ids=str,
)
def test_stages_are_cut_by_the_time_of_each_layer_the_same_on_every_rank(
    world: World, layout: Layout, milliseconds: list[float], stages: list[list[int]]
) -> None:
    results = world.run(layout, measured, milliseconds)
    for rank, result in enumerate(results):
        stage = layout.coordinate(rank).pipeline
        assert result["costs"] == results[0]["costs"]
        middle = 1 + 0.1 * ((layout.world_size - 1) // 2)  # of the ranks' clocks
        assert result["costs"] == pytest.approx([2 * each / 1000 * middle for each in milliseconds], rel=1e-10)
        assert (result["stages"], result["layers"]) == (stages, stages[stage])
        # One at a time: the whole model was never on a rank.
        assert result["alive"] == (max(1, len(stages[stage])), len(stages[stage]))
        assert result["weights"]
        assert result["random"]
        assert result["gradients"] == [None] * 2 * len(stages[stage])
        assert result["sample"] == [[1.0] * 4] * 2
        assert result["runs"] == [((2, 4), 1.0, True, True)] * 6 * len(milliseconds)


def of_all_kinds(mesh: engine.Mesh) -> Any:
    """Layers that talk over tensor and data, with both kinds of dropout, and a pair between two."""
    streams = random.Streams(mesh.tensor, seed=1, mode="reproducible")

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)

        def forward(self, ids: Tensor, offset: Tensor) -> Any:
            return self.table(ids) + offset, ids

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = ColumnParallelLinear(4, 8, mesh.tensor), RowParallelLinear(8, 4, mesh.tensor)
            self.norm = SyncBatchNorm(4, mesh.data)
            self.drop, self.plain = random.Dropout(0.5, streams, split_dim=-1), nn.Dropout(0.5)

        def forward(self, given: Any) -> Tensor:
            x, ids = given
            assert ids.dtype == torch.int64
            return self.plain(self.norm(self.down(self.drop(self.up(x)))))

    frozen = nn.Linear(4, 4).requires_grad_(False)
    specs = [LayerSpec(First), LayerSpec(Second), LayerSpec(lambda: frozen), LayerSpec(nn.Linear, 4, 2)]
    sample = (torch.tensor([1, 2, 3]), torch.ones(3, 4))
    model = PipelineModel(specs, mesh, balance="measured", chunks=2, sample=sample)
    seconds = model.costs
    return seconds, model.stages, [m.full_name for m in model.modules() if isinstance(m, random.Dropout)]


def test_layers_that_communicate_drop_and_pass_pairs_are_measured(world: World) -> None:
    results = world.run(Layout(data=2, tensor=2), of_all_kinds)
    for seconds, stages, names in results:
        assert (seconds, stages) == results[0][:2]
        assert len(seconds) == 4
        assert min(seconds) > 0
        assert stages == partition.by_cost(seconds, 2)
        assert set(names) <= {None}


def test_layers_are_measured_in_the_mode_in_which_they_are_built() -> None:
    seen = set()

    class Fixed(nn.Module):
        """Of one row, which a norm that learns would refuse."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()

        def forward(self, x: Tensor) -> Tensor:
            seen.add((self.training, self.norm.training))
            return self.norm(self.linear(x))

    with engine.init(Layout(), device="cpu") as mesh:
        PipelineModel([LayerSpec(Fixed)] * 2, mesh, balance="measured", chunks=2, sample=torch.ones(1, 4))
    assert seen == {(True, False)}


class Fails(nn.Module):
    def __init__(self, rank: int, where: str) -> None:
        super().__init__()
        self.rank, self.where, self.linear = rank, where, nn.Linear(4, 4)
        if where == "built" and rank == 1:
            raise ZeroDivisionError("planted where it is built")

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward" and self.rank == 1:
            raise ZeroDivisionError("planted in its forward")
        return self.linear(x)


def refuse(mesh: engine.Mesh) -> list[str]:
    plain = [LayerSpec(nn.Linear, 4, 4) for _ in range(3)]

    def build(specs: Any = plain, **options: Any) -> PipelineModel:
        return PipelineModel(specs, mesh, **{"balance": "measured", **options})

    ones = torch.ones(2, 4)
    texts = refusals(
        [
            lambda: build(),
            lambda: build(balance="uniform", sample=ones),
            lambda: build(balance=[1, 2], sample=ones),
            lambda: build(balance="mesured", sample=ones),
            lambda: build(plain[:1], sample=ones),
            lambda: build([*plain, LayerSpec(nn.Linear, 5, 4)], sample=ones),
            lambda: build([plain[0], LayerSpec(Fails, mesh.rank, "forward")], sample=ones),
            lambda: build([plain[0], LayerSpec(Fails, mesh.rank, "built")], sample=ones),
            lambda: build(sample=torch.ones(2 + mesh.rank, 4)),
            lambda: PipelineModel(plain, plan_mesh(Layout(pipeline=2), 0), balance="measured", sample=ones),
        ]
    )
    build(sample=ones)  # the mesh still works
    return texts


def test_what_cannot_be_measured_is_refused_on_every_rank_with_the_layers_name(world: World) -> None:
    expected = [
        "balance='measured' runs the layers, and needs sample=",
        "sample= is for balance='measured', and balance is 'uniform': leave it out",
        "sample= is for balance='measured', and balance is [1, 2]: leave it out",
        "balance='mesured' (did you mean 'measured'?): choose compute, uniform, measured",
        "1 layers cannot fill 2 pipeline stages",
        "layer 3 (Linear) failed on rank 0: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "layer 1 (Fails) failed on rank 1: ZeroDivisionError: planted in its forward. Give a sample=",
        "layer 1 (Fails) failed on rank 1: ZeroDivisionError: planted where it is built",
        "the shapes of the sample, differs over axis 'world': rank 1 (global 1) has",
        "a plan has no processes: open the mesh with engine.init",
    ]
    for texts in world.run(Layout(pipeline=2), refuse):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_costs_are_kept_where_they_were_needed_and_every_stage_has_a_layer() -> None:
    specs = [LayerSpec(nn.Linear, 4, size) for size in (4, 4, 4, 4)]
    mesh = plan_mesh(Layout(pipeline=4), 0)
    for balance, costs in (("compute", (16.0,) * 4), ("uniform", None), ([1, 1, 1, 1], None)):
        model = PipelineModel(specs, mesh, balance=balance)
        assert model.costs == costs
        assert [len(stage) for stage in model.stages] == [1] * 4
        with pytest.raises(LayoutError, match=r"3 layers cannot fill 4|adds up to 4 layers, the model has 3"):
            PipelineModel(specs[:3], mesh, balance=balance)
    # However lopsided the costs are, no stage is left empty.
    assert [len(stage) for stage in partition.by_cost([1e-9, 1e-9, 1.0, 1e-9], 4)] == [1] * 4
    assert [len(stage) for stage in partition.by_cost([0.0, 0.0, 0.0, 5.0, 0.0], 4)] == [1, 1, 1, 2]
    alone = PipelineModel(specs, plan_mesh(Layout(), 0), balance="measured", sample=torch.ones(1, 4))
    assert (alone.costs, [len(stage) for stage in alone.stages]) == (None, [4])


# ---- several models in one process -----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width, dtype=DOUBLE), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x).tanh())


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def rows(width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(12, width, generator=generator, dtype=DOUBLE) for _ in range(2))  # type: ignore[return-value]


OPTIONS: list[dict[str, Any]] = [
    {"width": 4, "layers": 4, "chunks": 1, "microbatches": 3, "schedule": "1f1b", "recompute": None},
    {"width": 6, "layers": 6, "chunks": 2, "microbatches": 2, "schedule": "interleaved", "recompute": "full"},
]


def train_models(mesh: engine.Mesh, order: list[int], p: float) -> Any:
    """Train the models in `order`, a step each time; return what each did, as if it were alone."""
    steps: dict[int, engine.TrainStep] = {}
    for number in sorted(set(order)):
        width, layers, chunks, microbatches, schedule, recompute = OPTIONS[number].values()
        tied = {"k": "linear.weight"}
        specs = [LayerSpec(Layer, width, p, tied=tied if i in (0, 2) else None) for i in range(layers)]
        model = PipelineModel(specs, mesh, balance="uniform", chunks=chunks, recompute=recompute)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.01)
        steps[number] = engine.TrainStep(
            model, optimizer, squared, mesh, microbatches=microbatches, schedule=schedule, clip_grad_norm=1.0
        )
    starts = {number: engine.full_state_dict(step.model, mesh) for number, step in steps.items()}
    numbers: dict[int, list[float]] = {number: [] for number in steps}
    for number in order:
        step = steps[number]
        inputs, targets = (x.chunk(mesh.data.size)[mesh.data.rank] for x in rows(OPTIONS[number]["width"], step.steps))
        done = step(inputs, targets)
        numbers[number] += [done.loss.item(), done.grad_norm.item(), step.evaluate(inputs, targets).loss.item()]
    return {n: (starts[n], numbers[n], engine.full_state_dict(step.model, mesh)) for n, step in steps.items()}


def test_two_models_on_one_mesh_train_in_turn_as_each_alone(world: World) -> None:
    layout = Layout(data=2, pipeline=2)
    both = world.run(layout, train_models, [0, 1, 1, 0, 1, 0], 0.0)
    dropping = world.run(layout, train_models, [0, 1, 1, 0, 1, 0], 0.3)
    for number in (0, 1):
        alone = world.run(layout, train_models, [number] * 3, 0.3)
        for got, wanted in zip(dropping, alone, strict=True):
            assert worst_error(list(got[number][1:]), list(wanted[number][1:])) == 0.0
        start, numbers, weights = both[0][number]
        plain = nn.Sequential(*(Layer(OPTIONS[number]["width"], 0.0) for _ in range(OPTIONS[number]["layers"])))
        plain[2].linear.weight = plain[0].linear.weight
        plain.load_state_dict(start)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for seed in range(3):
            optimizer.zero_grad()
            inputs, targets = rows(OPTIONS[number]["width"], seed)
            loss = squared(plain(inputs), targets)[0] / 12
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            after = squared(plain(inputs), targets)[0] / 12
            wanted = [loss.item(), norm.item(), after.item()]
            assert numbers[3 * seed : 3 * seed + 3] == pytest.approx(wanted, rel=1e-10)
        assert worst_error(weights, dict(plain.state_dict())) < 1e-10
