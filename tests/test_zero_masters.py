"""fp32 masters of low-precision parameters: saved beside the state and loaded again, no bit is lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import engine
from engine import Layout
from engine.zero import ZeroOptimizer
from tests.world import World, refusals

BEFORE, AFTER = 3, 2  # steps before and after all is saved
CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "gather": "forward"},
    {"stage": 2},
    {"stage": 2, "offload": True},
    {"stage": 2, "groups": "whole"},
]


def make() -> nn.Sequential:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return engine.precision.cast_parameters(model, torch.bfloat16, keep_fp32=["2"])


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


def optimizer_of(
    model: nn.Module, kind: type[torch.optim.Optimizer], mesh: engine.Mesh, case: dict[str, Any]
) -> ZeroOptimizer:
    options = dict(case)
    if "groups" in options:
        options["groups"] = [{"params": list(model.named_parameters()), "shard": "tensor"}]
    return ZeroOptimizer(model, kind, mesh, lr=1e-3, bucket_mib=1e-4, **options)


def steps(mesh: engine.Mesh, model: nn.Module, optimizer: ZeroOptimizer, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        with optimizer.microbatch(last=True):
            model(rows(step, mesh.data.rank)).float().square().sum().backward()
        optimizer.finish_gradients(2.0)
        optimizer.step()


def run(mesh: engine.Mesh) -> list[Any]:
    found = []
    for case in CASES:
        model = make()
        optimizer = optimizer_of(model, torch.optim.AdamW, mesh, case)
        at_start = engine.full_state_dict(model, mesh, optimizer=optimizer)
        steps(mesh, model, optimizer, range(BEFORE))
        saved = engine.full_state_dict(model, mesh, optimizer=optimizer), optimizer.consolidate()
        rounded = engine.full_state_dict(model, mesh)
        steps(mesh, model, optimizer, range(BEFORE, BEFORE + AFTER))
        found.append((at_start, saved, rounded, engine.full_state_dict(model, mesh, optimizer=optimizer)))
    return found


def test_plain_torch_goes_on_from_the_masters_and_the_state_without_losing_a_bit(world: World) -> None:
    start = {name: value.float() for name, value in make().state_dict().items()}
    for results in world.run(Layout(data=2), run):
        for case, (at_start, (weights, state), rounded, after) in zip(CASES, results, strict=True):
            model = make()
            exact = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            assert all(torch.equal(at_start[name], value) for name, value in start.items()), case
            assert any(not torch.equal(weights[name], rounded[name].float()) for name in weights), case
            for name, value in weights.items():
                assert value.dtype is torch.float32
                assert torch.equal(value.to(rounded[name].dtype), rounded[name])
            exact.load_state_dict(weights)
            optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3, foreach=False)
            set_optimizer_state_dict(exact, optimizer, state)
            for step in range(BEFORE, BEFORE + AFTER):
                model.load_state_dict(exact.state_dict())
                optimizer.zero_grad()
                for rank in range(2):
                    model.zero_grad()
                    model(rows(step, rank)).float().square().sum().backward()
                    for p, own in zip(exact.parameters(), model.parameters(), strict=True):
                        p.grad = own.grad.float() / 2 if p.grad is None else p.grad + own.grad.float() / 2
                optimizer.step()
            for name, value in exact.state_dict().items():
                assert torch.equal(after[name], value), f"{case} {name}"


def resumed(mesh: engine.Mesh) -> Any:
    found = []
    for case in CASES:
        model = make()
        optimizer = optimizer_of(model, torch.optim.SGD, mesh, case)
        steps(mesh, model, optimizer, range(BEFORE))
        saved = engine.full_state_dict(model, mesh, optimizer=optimizer)
        steps(mesh, model, optimizer, range(BEFORE, BEFORE + AFTER))
        wanted = engine.full_state_dict(model, mesh, optimizer=optimizer)
        again = make()
        other = optimizer_of(again, torch.optim.SGD, mesh, case)
        steps(mesh, again, other, range(7, 8))  # masters of its own, that must go
        state = saved if mesh.data.rank == 0 else {name: torch.zeros_like(x) for name, x in saved.items()}
        given = {name: x.clone() for name, x in state.items()}
        engine.load_full_state_dict(again, mesh, state, optimizer=other)
        assert all(torch.equal(state[name], x) for name, x in given.items()), "the caller's state is only read"
        loaded = engine.full_state_dict(again, mesh, optimizer=other)
        steps(mesh, again, other, range(BEFORE, BEFORE + AFTER))
        ended = engine.full_state_dict(again, mesh, optimizer=other)
        found.append([all(torch.equal(a[n], b[n]) for n in a) for a, b in ((saved, loaded), (wanted, ended))])
        with torch.no_grad():
            again[0].bias.fill_(0.5)  # what was written since is what is saved
        found[-1].append(engine.full_state_dict(again, mesh, optimizer=other)["0.bias"].eq(0.5).all().item())
    return found, refusals([lambda: engine.full_state_dict(make(), mesh, optimizer=optimizer)])


def test_a_load_puts_the_masters_back_bit_for_bit(world: World) -> None:
    for found, (other,) in world.run(Layout(data=2), resumed):
        assert found == [[True, True, True]] * len(CASES)
        assert "built over another model" in other
