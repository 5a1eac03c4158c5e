"""Every elementwise optimizer of torch on flat shards, and torch's schedulers, equal plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import engine
from engine import Layout
from engine.device import CopyStream
from engine.zero import ZeroOptimizer
from tests.test_zero import batch, groups_of, small_model
from tests.world import World, refusals

STEPS = 5

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.05, "fused": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2, "lambd": 0.01}),
}
WITHOUT_DECAY = ("Rprop",)


def one_cycle(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
    return schedules.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=STEPS + 1)  # cycles momentum or betas too


def sequence(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
    parts = [schedules.LinearLR(optimizer, 0.1, 1.0, 2), schedules.ExponentialLR(optimizer, 0.7)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES: dict[str, tuple[str, Callable[[torch.optim.Optimizer], Any]]] = {
    "LambdaLR": ("SGD momentum", lambda o: schedules.LambdaLR(o, [lambda n: 0.5**n, lambda n: 1 / (n + 1)])),
    "CosineAnnealingLR": ("Adam", lambda o: schedules.CosineAnnealingLR(o, T_max=STEPS)),
    "OneCycleLR of momentum": ("SGD momentum", one_cycle),
    "OneCycleLR of betas": ("AdamW amsgrad", one_cycle),
    "ReduceLROnPlateau": ("SGD momentum", lambda o: schedules.ReduceLROnPlateau(o, factor=0.3, patience=0)),
    "SequentialLR": ("AdamW fused", sequence),
    "CyclicLR": ("SGD momentum", lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2)),
    "CosineAnnealingWarmRestarts": ("RMSprop", lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=2)),
}


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, schedules.ReduceLROnPlateau):
        scheduler.step((1.0, 0.5, 0.7, 0.4, 0.8)[step])
    elif scheduler is not None:
        scheduler.step()


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]


def chosen(model: nn.Module, case: str, named: bool) -> list[dict[str, Any]]:
    """Groups that change inside a bucket, and inside a shard; a weight decay where the class has one."""
    groups = groups_of(model, named)
    return [{k: v for k, v in g.items() if k != "weight_decay" or case not in WITHOUT_DECAY} for g in groups]


def train_plain(case: str, schedule: str | None) -> tuple[list[Any], dict[str, Tensor]]:
    model, (kind, options) = small_model(), OPTIMIZERS[case]
    optimizer = kind(chosen(model, case, named=False), **options)
    scheduler = SCHEDULES[schedule][1](optimizer) if schedule else None
    seen = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        advance(scheduler, step)
        seen.append(rates(optimizer))
    return seen, dict(model.state_dict())


def train_all(mesh: engine.Mesh, cases: list[tuple[str, str | None]], options: dict[str, Any]) -> list[Any]:
    results = []
    for case, schedule in cases:
        model, (kind, own) = small_model(), OPTIMIZERS[case]
        optimizer = ZeroOptimizer(model, kind, mesh, groups=chosen(model, case, named=True), **options, **own)
        scheduler = SCHEDULES[schedule][1](optimizer) if schedule else None
        seen = []
        for step in range(STEPS):
            inputs, targets = (x.tensor_split(mesh.data.size)[mesh.data.rank] for x in batch(step))
            optimizer.zero_grad()
            (model(inputs) - targets).square().sum().backward()
            optimizer.finish_gradients(12 * 3)
            optimizer.step()
            advance(scheduler, step)
            seen.append(rates(optimizer))
        results.append((seen, dict(model.state_dict())))
    return results


def compare(world: World, cases: list[tuple[str, str | None]], **options: Any) -> None:
    wanted = [train_plain(case, schedule) for case, schedule in cases]
    for of_rank in world.run(Layout(data=2), train_all, cases, options):
        for case, (rates_wanted, weights), (seen, found) in zip(cases, wanted, of_rank, strict=True):
            assert seen == rates_wanted, case
            for name, value in weights.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{case}: {name}")


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 1, "bucket_mib": 1e-4}], ids=str)
def test_every_elementwise_optimizer_of_torch_equals_plain_training(world: World, options: dict[str, Any]) -> None:
    compare(world, [(case, None) for case in OPTIMIZERS], **options)


def test_torchs_schedulers_work_unchanged(world: World) -> None:
    compare(world, [(case, schedule) for schedule, (case, _) in SCHEDULES.items()], stage=2)


def test_none_of_torchs_optimizers_is_forgotten() -> None:
    known = {kind for kind, _ in OPTIMIZERS.values()}
    others = {"Optimizer", "LBFGS", "SparseAdam", "Muon", "Adafactor"}  # the base, refused, of whole matrices
    every = {
        kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in others
    }
    assert every == known


# ---- states on the host ----------------------------------------------------------------------------------------------


def test_states_on_the_host_change_no_update(world: World) -> None:
    cases = [("AdamW fused", None), ("SGD momentum", "OneCycleLR of momentum"), ("RMSprop", None)]
    compare(world, cases, stage=2, offload=True, bucket_mib=1e-4)
    compare(world, cases[:1], stage=2, offload=True)


def with_masters(mesh: engine.Mesh) -> list[bool]:
    """Train bf16 parameters, one group of them whole, with masters here and on the host; load in between."""
    runs = []
    for offload in (False, True):
        model = small_model(torch.bfloat16)
        named = list(model.named_parameters())
        matrix = {"optimizer": torch.optim.Muon, "shard": "tensor", "lr": 0.01, "adjust_lr_fn": "match_rms_adamw"}
        groups = [
            {"params": [(n, p) for n, p in named if p.dim() < 2]},
            {"params": [(n, p) for n, p in named if p.dim() == 2], **matrix},
        ]
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, mesh, groups=groups, lr=1e-4, offload=offload, bucket_mib=1e-4
        )
        for step in range(4):
            inputs, targets = (x[mesh.data.rank :: mesh.data.size] for x in batch(step, dtype=torch.bfloat16))
            (model(inputs) - targets).square().mean().backward()
            optimizer.finish_gradients(mesh.data.size)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                state = {name: x * 0.5 for name, x in engine.full_state_dict(model, mesh).items()}
                engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)
        runs.append([x.clone() for x in model.state_dict().values()])
        runs[-1] += [x for values in optimizer.consolidate()["state"].values() for x in values.values()]
        assert all(x.dtype is torch.float32 for x in optimizer._inner.state)
    return [torch.equal(here, there) for here, there in zip(*runs, strict=True)]


def test_masters_on_the_host_round_as_those_on_the_device_also_of_whole_matrices(world: World) -> None:
    for equal in world.run(Layout(data=2), with_masters):
        assert len(equal) == 6 + 4 * 3 + 2
        assert all(equal)


def offloaded(mesh: engine.Mesh) -> Any:
    """Three buckets: the order of copies and updates; values written between steps; a load; whole matrices."""
    order: list[str] = []
    model = small_model()
    named = list(model.named_parameters())
    kinds = [
        {"params": [(n, p) for n, p in named if n != "3.weight"]},
        {"params": [(n, p) for n, p in named if n == "3.weight"], "optimizer": torch.optim.Muon, "shard": "tensor"},
    ]
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, groups=kinds, offload=True, bucket_mib=1e-4, lr=1.0)
    buckets = optimizer._host.buckets  # type: ignore[union-attr]
    for number, bucket in enumerate(buckets):
        for name, real in (("fetch", bucket.fetch), ("send", bucket.send)):

            def spy(name: str = f"{name} {number}", real: Any = real) -> None:
                if f"fetch {name[-1]}" != name or name not in order:
                    order.append(name)
                real()

            setattr(bucket, name, spy)
    for number, optimizers in enumerate(optimizer._inner._optimizers):
        for _, each in optimizers:
            each.register_step_pre_hook(lambda *_, number=number: order.append(f"update {number}"))

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.finish_gradients(mesh.data.size)
        optimizer.step()
        optimizer.zero_grad()

    step()
    first = list(order)
    with torch.no_grad():
        model[0].bias.fill_(5.0)
    step()
    by_hand = model[0].bias.tolist()
    engine.load_full_state_dict(model, mesh, {n: torch.full_like(x, 7.0) for n, x in model.state_dict().items()})
    step()
    flats = [(bucket.flat.data_ptr(), bucket.flat.data_ptr() + bucket.flat.nbytes) for bucket in optimizer._buckets]
    inside = any(low <= x.data_ptr() < high for x in optimizer._inner.state for low, high in flats)
    return len(buckets), first, by_hand, model[1].weight.tolist(), inside, (model[3].weight - 7).norm().item()


def test_copies_run_beside_the_update_of_another_bucket_and_written_values_are_taken_over(world: World) -> None:
    for count, order, by_hand, loaded, inside, change in world.run(Layout(data=2), offloaded):
        assert count >= 3
        for number in range(count - 1):
            assert order.index(f"fetch {number + 1}") < order.index(f"send {number}")
            assert order.index(f"send {number}") < order.index(f"send {number + 1}")
        for number in range(count):
            if f"update {number}" in order:  # a rank may have nothing to update of a bucket
                assert order.index(f"fetch {min(number + 1, count - 1)}") < order.index(f"update {number}")
                assert order.index(f"update {number}") < order.index(f"send {number}")
        assert by_hand == [4.0] * 7
        assert loaded == [6.0] * 7
        assert not inside, "updated where the model is"
        assert 0 < change < 1


def test_on_an_accelerator_copies_have_a_stream_that_waits_for_the_devices_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "copies" if isinstance(name, torch.device) else name

        def wait_stream(self, other: Any) -> None:
            calls.append(f"{self.name} wait for {other.name}")

        def wait_event(self, _: object) -> None:
            calls.append(f"{self.name} waits for the copy")

        def __enter__(self) -> None:
            calls.append("begin")

        def __exit__(self, *_: object) -> None:
            calls.append("end")

    class Event:
        def record(self, stream: Stream) -> None:
            calls.append(f"recorded on {stream.name}")

        def synchronize(self) -> None:
            calls.append("host waits for the copy")

    class Target:
        def copy_(self, _: object, non_blocking: bool = False) -> None:
            calls.append(f"copy, non_blocking={non_blocking}")

    parts = {"Stream": Stream, "Event": Event, "stream": lambda s: s, "current_stream": lambda _: Stream("computing")}
    for name, value in parts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    copied = CopyStream(torch.device("cuda", 0)).copy(Target(), torch.zeros(1))  # type: ignore[arg-type]
    copied.wait_on_device()
    copied.wait_on_host()
    assert calls == [
        "copies wait for computing",
        "begin",
        "copy, non_blocking=True",
        "recorded on copies",
        "end",
        "computing waits for the copy",
        "host waits for the copy",
    ]


def refused(mesh: engine.Mesh) -> list[str]:
    def make(**options: Any) -> None:
        ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, mesh, lr=0.1, **options)

    model = nn.Linear(2, 2)
    whole = [{"params": list(model.named_parameters()), "shard": "tensor"}]
    return refusals(
        [
            lambda: make(offload=1),
            lambda: make(offload=True, stage=1),
            lambda: ZeroOptimizer(model, torch.optim.SGD, mesh, groups=whole, offload=True, lr=0.1),
        ]
    )


def test_what_cannot_be_offloaded_is_refused(world: World) -> None:
    for texts in world.run(Layout(tensor=2), refused):
        assert texts == [
            "offload=1: give True or False",
            "offload=True is for stage 2, not stage=1: leave it out, or take stage=2",
            "offload=True updates on the host, where whole parameters cannot be gathered over tensor(2): leave it out, "
            "or use no group with 'shard': 'tensor'",
        ]
