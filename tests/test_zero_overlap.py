"""Reductions that start during backward and gathers that end in the next forward, over gloo, which runs them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.tensor_parallel import SyncBatchNorm
from engine.zero import ZeroOptimizer
from tests.world import World, refusals

WIDTH = 8
BUCKET = WIDTH * WIDTH * 4 / 2**20  # one weight


def make(mesh: engine.Mesh, **options: Any) -> tuple[nn.Sequential, ZeroOptimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    return model, ZeroOptimizer(model, torch.optim.AdamW, mesh, **{"bucket_mib": BUCKET, "lr": 1e-2, **options})


def rows(mesh: engine.Mesh, number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + mesh.rank))


def starts(mesh: engine.Mesh, stage: int, accumulate: str) -> list[list[str]]:
    """What happens in each microbatch of the second step: weights whose gradients come, reductions that start."""
    model, optimizer = make(mesh, stage=stage, accumulate=accumulate)
    events: list[list[str]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events[-1].append(name[0]))
    for name in ("reduce_scatter", "all_reduce"):
        real = getattr(mesh.data, name)

        def spy(x: Tensor, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            if x.numel() >= WIDTH * WIDTH:
                events[-1].append("start" if kwargs["async_op"] else "whole")
            return real(x, *args, **kwargs)

        setattr(mesh.data, name, spy)
    for _ in range(2):
        events.clear()
        for number in range(2):
            events.append([])
            with optimizer.microbatch(last=number == 1):
                model(rows(mesh, number)).square().sum().backward()
                events[-1].append("end")
        events.append([])
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return events


@pytest.mark.parametrize(("stage", "accumulate"), [(0, "full"), (1, "full"), (2, "full"), (2, "shard")])
def test_a_bucket_is_reduced_as_soon_as_its_last_gradient_is_there(world: World, stage: int, accumulate: str) -> None:
    at_once = ["start", "3", "start", "2", "start", "1", "start", "0", "end"]
    only_last = ["3", "2", "1", "0", "end"]
    for first, second, after in world.run(Layout(data=2), starts, stage, accumulate, transport="torch"):
        assert first == (at_once if accumulate == "shard" else only_last)
        assert second == at_once
        assert after == []


def train(mesh: engine.Mesh, cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    found = []
    for options in cases:
        model, optimizer = make(mesh, **options)
        for number in range(4):
            for part in range(2):
                with optimizer.microbatch(last=part == 1):
                    model(rows(mesh, 2 * number + part)).square().sum().backward()
            optimizer.finish_gradients(6.0)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                engine.full_state_dict(model, mesh)
            if number == 2:
                with torch.no_grad():
                    model(rows(mesh, 100))
        found.append({name: value.clone() for name, value in engine.full_state_dict(model, mesh).items()})
    return found


@pytest.mark.parametrize("transport", ["torch", None])
def test_no_overlap_and_no_bucket_size_changes_a_bit_on_two_ranks(world: World, transport: str | None) -> None:
    modes = [(0, "full"), (1, "full"), (2, "full"), (2, "shard")]
    sizes = (1e-9, BUCKET, 2.5 * BUCKET, 25.0)
    cases = [{"stage": s, "accumulate": a, "bucket_mib": size} for s, a in modes for size in sizes]
    cases += [{**case, "gather": "forward"} for case in cases if case["stage"]]
    options = {} if transport is None else {"transport": transport}
    for each in world.run(Layout(data=2), train, cases, **options):
        for case, weights in zip(cases, each, strict=True):
            # One sum in another order: over ranks after microbatches, or before.
            like = each[-1] if case["accumulate"] == "shard" else each[0]
            assert all(torch.equal(weights[name], like[name]) for name in like), case
        for name in each[0]:
            torch.testing.assert_close(each[0][name], each[-1][name], rtol=1e-5, atol=1e-6)


def waiting(mesh: engine.Mesh) -> Any:
    """Which buckets are still on their way after a step, after a layer has run, and after each kind of read."""
    model, optimizer = make(mesh, stage=1, gather="forward")
    flying = optimizer._stepper._works
    found = []

    def step() -> None:
        model(rows(mesh, 0)).square().sum().backward()
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sorted(flying))

    step()
    x = model[0](rows(mesh, 1))
    found.append(sorted(flying))
    model[1](x)
    found.append(sorted(flying))
    reads = [
        lambda: engine.full_state_dict(model, mesh),
        lambda: engine.load_full_state_dict(model, mesh, dict(model.state_dict()), optimizer=optimizer),
        lambda: model(x),
        optimizer.wait_parameters,
        lambda: optimizer.finish_gradients(),
    ]
    for read in reads:
        step()
        read()
        found.append(sorted(flying))
    return found


def test_a_module_waits_for_its_own_buckets_and_every_read_for_all(world: World) -> None:
    for found in world.run(Layout(data=2), waiting, transport="torch"):
        assert found == [[0, 1, 2, 3], [1, 2, 3], [2, 3], *[[0, 1, 2, 3], []] * 5]


class Head(nn.Module):
    """Has a parameter of its own, and uses another module's without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * self.scale, self.inner.weight)


def inside(mesh: engine.Mesh) -> list[int]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Head())
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, bucket_mib=1e-9, gather="forward", lr=0.1)
    model(rows(mesh, 0)).sum().backward()
    optimizer.finish_gradients()
    optimizer.step()
    model[1](rows(mesh, 0))
    return sorted(optimizer._stepper._works)


def test_a_module_with_parameters_waits_for_those_inside_it_too(world: World) -> None:
    assert world.run(Layout(data=2), inside, transport="torch") == [[0, 1]] * 2


class Borrower(nn.Module):
    """Has no parameter of its own, and uses another module's without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight)


def evaluations(mesh: engine.Mesh) -> list[list[int]]:
    model = Borrower()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, gather="forward", lr=0.1)
    step = engine.TrainStep(model, optimizer, lambda output, _: (output.sum(), 1), mesh)
    found = []
    for read in (lambda x: step.evaluate(x, x), step.predict):
        step(rows(mesh, 0), rows(mesh, 0))
        found.append(sorted(optimizer._stepper._works))
        read(rows(mesh, 1))
        found.append(sorted(optimizer._stepper._works))
    return found


def test_an_evaluation_waits_for_all_parameters_whoever_uses_them(world: World) -> None:
    assert world.run(Layout(data=2), evaluations, transport="torch") == [[[0], [], [0], []]] * 2


def synchronized(mesh: engine.Mesh) -> Any:
    """The second rank's backward reaches the branches in another order, and one of them on one rank only."""
    torch.manual_seed(2)
    norms = [SyncBatchNorm(2, mesh.data, dtype=torch.float64) for _ in range(3)]
    model = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64), *norms, nn.Linear(2, 2, dtype=torch.float64)])
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, bucket_mib=1e-9, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(2, 2)
    for number in range(3):
        x = torch.randn(4, 2, generator=generator, dtype=torch.float64).chunk(2)[mesh.rank]
        with optimizer.microbatch(last=True):
            y = x
            for layer in model[1:4]:
                y = layer(y)
            y = model[0](y).square()
            (model[4](y) if (number + mesh.rank) % 2 else y).sum().backward()
        optimizer.finish_gradients()
        total = optimizer.full_gradients()["0.weight"]
        optimizer.step()
        optimizer.zero_grad()
    return total, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("transport", ["torch", None])
def test_reductions_do_not_cross_collectives_of_the_model_itself(world: World, transport: str | None) -> None:
    options = {} if transport is None else {"transport": transport}
    (total, weights), (other_total, others) = world.run(Layout(data=2), synchronized, **options)
    assert torch.equal(total, other_total)
    assert total.abs().sum() > 0
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def refused(mesh: engine.Mesh) -> list[str]:
    def build(**options: Any) -> Any:
        return lambda: make(mesh, **options)

    return refusals(
        [build(gather="late"), build(stage=0, gather="forward"), build(gather=("step", "forward")[mesh.rank])]
    )


def test_gathers_that_cannot_be_are_refused_on_every_rank(world: World) -> None:
    for late, nothing, apart in world.run(Layout(data=2), refused):
        assert late == "gather='late': choose 'step' (whole at the end of it) or 'forward' (whole where used)"
        assert "at stage 0 and with share_parameters=True nothing is gathered" in nothing
        assert "ZeroOptimizer's options differs" in apart
