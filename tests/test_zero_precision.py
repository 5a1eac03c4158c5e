"""Low precision: fp32 masters and sums, norms kept in fp32, loss scaling, rounded traffic; against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout
from engine.precision import LossScaler, cast_parameters
from engine.zero import ZeroOptimizer
from tests.test_zero_matrices_gpt import Smooth
from tests.world import World, refusals

MODES = [(0, "full"), (1, "full"), (2, "full"), (2, "shard")]
STEPS = 3
ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.float() - target).square().sum(), target.shape[0]


def rows(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator).to(dtype), torch.randn(16, 8, generator=generator)


def make_model(mesh: engine.Mesh, dtype: torch.dtype) -> nn.Module:
    model = engine.PipelineModel([LayerSpec(Layer) for _ in range(2)], mesh, balance="uniform")
    return model if dtype is torch.float32 else cast_parameters(model, dtype, keep_fp32=["*norm*"])


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, ADAMW),
    "AdamW fused": (torch.optim.AdamW, {**ADAMW, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "matrices": (torch.optim.AdamW, ADAMW),  # those of one dim; the others whole
}


def grouped(kind: str, named: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "optimizer": Smooth, "shard": "tensor", "lr": 0.01}]
    for name, p in named:
        groups[kind == "matrices" and p.dim() == 2]["params"].append((name, p))
    return [group for group in groups if group["params"]]


def train(
    mesh: engine.Mesh, dtype: torch.dtype, cases: list[tuple[int, str, int]], scale: Any, wire: Any, kind: str = "AdamW"
) -> list[Any]:
    found = []
    optimizer_class, options = KINDS[kind]
    for stage, accumulate, microbatches in cases:
        model = make_model(mesh, dtype)
        start = engine.full_state_dict(model, mesh)
        optimizer = ZeroOptimizer(
            model,
            optimizer_class,
            mesh,
            groups=grouped(kind, model.named_parameters()),
            stage=stage,
            accumulate=accumulate,
            bucket_mib=1e-4,
            wire_dtype=wire,
            **options,
        )
        step = engine.TrainStep(
            model, optimizer, squared, mesh, microbatches=microbatches, clip_grad_norm=1.0, loss_scale=scale
        )
        norms = []
        for number in range(STEPS):
            inputs, targets = (x.tensor_split(mesh.data.size)[mesh.data.rank] for x in rows(number, dtype))
            norms.append(step(inputs, targets).grad_norm.item())
        masters = {}
        for bucket in optimizer._buckets:
            own = bucket.trained(*bucket.updated)
            whole = own if stage == 0 else mesh.data.all_gather(own)
            for each in bucket.plan.slices:
                masters[optimizer._named[each.index][0]] = whole[each.start : each.stop].clone()
        found.append((start, norms, engine.full_state_dict(model, mesh), masters))
    return found


def train_plain(
    start: dict[str, Tensor], dtype: torch.dtype, data: int, microbatches: int, scale: float, kind: str = "AdamW"
) -> tuple[list[float], dict[str, Tensor]]:
    """fp32 masters and fp32 sums by hand, over the same parts of the batch."""
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        layer.linear.to(dtype)
        # LayerNorm in fp32 between low-precision layers, said explicitly.
        layer.norm.forward = lambda x, norm=layer.norm: nn.functional.layer_norm(
            x.float(), (8,), norm.weight, norm.bias
        ).to(dtype)
    model.load_state_dict(start)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizers = []
    for group in grouped(kind, masters.items()):
        own = [p for _, p in group["params"]]
        optimizer_class, options = KINDS[kind]
        optimizers.append(Smooth(own, lr=group["lr"]) if "lr" in group else optimizer_class(own, **options))
    norms = []
    for number in range(STEPS):
        sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for inputs, targets in zip(*(x.chunk(data * microbatches) for x in rows(number, dtype)), strict=True):
            model.zero_grad()
            (squared(model(inputs), targets)[0] * scale).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] += p.grad.float()
        for name, master in masters.items():
            master.grad = sums[name] / (16 * scale)
        norms.append(nn.utils.clip_grad_norm_(masters.values(), 1.0).item())
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return norms, masters


@pytest.mark.parametrize(
    ("layout", "dtype", "scale"),
    [
        (Layout(data=2), torch.bfloat16, None),
        (Layout(data=4), torch.float16, 1024.0),
        (Layout(data=2, pipeline=2, tensor=2), torch.bfloat16, None),
    ],
    ids=str,
)
def test_low_precision_equals_plain_training_with_fp32_masters(
    world: World, layout: Layout, dtype: torch.dtype, scale: float | None
) -> None:
    counts = (1, 4) if layout.pipeline == 1 else (2,)
    cases = [(*mode, count) for mode in MODES for count in counts]
    wanted: dict[int, Any] = {}
    for each in world.run(layout, train, dtype, cases, scale, None):
        for (_, _, count), (start, norms, weights, masters) in zip(cases, each, strict=True):
            if count not in wanted:
                wanted[count] = train_plain(start, dtype, layout.data, count, scale or 1.0)
            wanted_norms, right = wanted[count]
            assert norms == pytest.approx(wanted_norms, rel=1e-5)
            assert weights["0.norm.weight"].dtype is torch.float32
            for name, value in masters.items():
                torch.testing.assert_close(value, right[name].detach().view(-1), rtol=1e-5, atol=1e-7)
                assert weights[name].dtype is (torch.float32 if "norm" in name else dtype)
                assert torch.equal(weights[name].view(-1), value.to(weights[name].dtype))


PRECISIONS = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, 1024.0)]


@pytest.mark.parametrize("kind", list(KINDS)[1:])
@pytest.mark.parametrize(("dtype", "scale"), PRECISIONS, ids=str)
def test_both_ways_of_adding_up_in_every_precision_with_every_kind_of_optimizer(
    world: World, kind: str, dtype: torch.dtype, scale: float | None
) -> None:
    cases = [(2, "full", 4), (2, "shard", 4), (1, "full", 4)]
    results = world.run(Layout(data=2), train, dtype, cases, scale, None, kind)
    wanted_norms, right = train_plain(results[0][0][0], dtype, 2, 4, scale or 1.0, kind)
    for each in results:
        for case, (_, norms, _, masters) in zip(cases, each, strict=True):
            assert norms == pytest.approx(wanted_norms, rel=1e-5)
            for name, value in masters.items():
                wanted = right[name].detach().view(-1)
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")


def test_rounded_traffic_stays_within_its_bound(world: World) -> None:
    cases = [(stage, mode, 2) for stage, mode in MODES]
    exact = world.run(Layout(data=2), train, torch.bfloat16, cases, None, None)[0]
    rounded = world.run(Layout(data=2), train, torch.bfloat16, cases, None, torch.bfloat16)[0]
    for (_, norms, _, _), (_, others, _, _) in zip(exact, rounded, strict=True):
        assert norms != others
        assert others == pytest.approx(norms, rel=2 * 2**-8)


# ---- masters -------------------------------------------------------------------------------------------------------


def fine(mesh: engine.Mesh, stage: int) -> Any:
    """Steps far below what bf16 can tell from 1; then a load, and a change in place."""
    model = nn.Linear(3, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, lr=1e-4)

    def step(value: float) -> list[float]:
        optimizer.zero_grad()
        with optimizer.microbatch(last=True):
            (model.weight.sum() * value).backward()
        optimizer.finish_gradients(mesh.data.size)
        optimizer.step()
        return model.weight.flatten().tolist()

    steps = [step(1.0) for _ in range(60)]
    engine.load_full_state_dict(model, mesh, {"weight": torch.full((1, 3), 5.0)}, optimizer=optimizer)
    loaded = step(0.0)
    with torch.no_grad():
        model.weight[0, 0] = 7.0
    changed = step(0.0)
    return steps[0], steps[-1], loaded, changed


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masters_keep_small_updates_and_follow_loads_and_changes_in_place(world: World, stage: int) -> None:
    for first, last, loaded, changed in world.run(Layout(data=2), fine, stage):
        assert first == [1.0] * 3
        assert last == [torch.tensor(0.994).bfloat16().item()] * 3
        assert loaded == [5.0] * 3
        assert changed == [7.0, 5.0, 5.0]


def small_terms(mesh: engine.Mesh, accumulate: str) -> float:
    """1 and sixteen times 1/512: in bf16 each addition would be lost, over microbatches and over ranks."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, accumulate=accumulate, lr=1.0)
    for number in range(9):
        with optimizer.microbatch(last=number == 8):
            first = number == 0 and mesh.rank == 0
            (model.weight.sum() * (1.0 if first else 1 / 512 if number else 0.0)).backward()
    optimizer.finish_gradients()
    return optimizer.full_gradients()["weight"].item()


@pytest.mark.parametrize("accumulate", ["full", "shard"])
def test_sums_over_microbatches_and_ranks_are_in_fp32(world: World, accumulate: str) -> None:
    assert world.run(Layout(data=2), small_terms, accumulate) == [1.0 + 16 / 512] * 2


# ---- loss scaling --------------------------------------------------------------------------------------------------


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def raw_sum(output: Tensor, _target: Tensor) -> tuple[Tensor, int]:
    return output.float(), 1


def scaled(mesh: engine.Mesh) -> Any:
    """On rank 1 the third step's gradient, 8, overflows with the scale that the first two steps have grown."""
    model = Factor()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.125)
    scaler = LossScaler(initial=4096.0, interval=2)
    step = engine.TrainStep(model, optimizer, raw_sum, mesh, loss_scale=scaler)
    found = []
    for number in range(4):
        x = torch.full((1, 2), 8.0 if number == 2 and mesh.rank == 1 else 2.0**-12, dtype=torch.float16)
        result = step(x, torch.zeros(1))
        found.append((result.skipped.item(), result.loss_scale.item(), model.weight[0].item()))
    return found, scaler.state_dict(), result.grad_norm.item()


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(world: World) -> None:
    for found, state, norm in world.run(Layout(data=2), scaled):
        assert [skipped for skipped, _, _ in found] == [False, False, True, False]
        assert [scale for _, scale, _ in found] == [4096.0, 4096.0, 8192.0, 4096.0]
        assert found[2][2] == found[1][2]
        assert state == {"value": 4096.0, "good_steps": 1}
        assert norm == pytest.approx(2**0.5 * 2.0**-12)


def test_the_scaler_starts_grows_and_halves_as_torchs() -> None:
    ours, theirs = LossScaler(), torch.amp.GradScaler("cpu")
    assert ours.value == theirs._init_scale
    assert (ours._growth, ours._backoff, ours._interval) == (2.0, 0.5, 2000)
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    assert [ours.accept(good) for _ in range(2000)] == [True] * 2000
    assert ours.value == 2 * 65536
    assert not ours.accept(bad)
    assert ours.value == 65536.0
    fixed = LossScaler(8)
    assert not fixed.accept(torch.tensor(float("inf")))
    assert fixed.value == 8.0
    again = LossScaler()
    again.load_state_dict(ours.state_dict())
    assert repr(again) == repr(ours)
    shorter = LossScaler(interval=3)
    shorter.load_state_dict({"value": 8.0, "good_steps": 5})  # of a run with a longer one
    assert shorter.accept(good)
    assert shorter.state_dict() == {"value": 16.0, "good_steps": 0}


# ---- casting -------------------------------------------------------------------------------------------------------


def test_kept_modules_compute_in_fp32_inside_a_model_of_low_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.BatchNorm1d(8))
    plain = copy.deepcopy(model)
    objects = list(model.parameters())
    assert cast_parameters(model, torch.bfloat16, keep_fp32=["*.norm", "1"]) is model
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert model[0].norm.weight.dtype is model[1].running_mean.dtype is torch.float32
    x = torch.randn(4, 8)
    output = copy.deepcopy(model)(x.bfloat16())
    assert output.dtype is model[0].linear.weight.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), plain(x), rtol=0.05, atol=0.05)
    seen = []
    model[0].norm.register_forward_hook(lambda _m, args, out: seen.append((args[0].dtype, out.dtype)), prepend=True)
    model(x.bfloat16()).float().sum().backward()
    assert seen == [(torch.float32, torch.float32)]
    assert model[0].norm.weight.grad.dtype is torch.float32


def test_casts_scales_and_dtypes_that_cannot_work_are_refused() -> None:
    tied = nn.ModuleDict({"norm": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    tied["head"].weight = tied["norm"].weight
    mesh = engine.plan_mesh(Layout(), 0)
    odd = nn.Linear(2, 2).to(torch.complex64)
    options = {"lr": 0.1}
    assert refusals(
        [
            lambda: cast_parameters(Layer(), torch.float64),
            lambda: cast_parameters(Layer(), torch.bfloat16, keep_fp32=["nrm"]),
            lambda: cast_parameters(Layer(), torch.bfloat16, keep_fp32="norm"),
            lambda: cast_parameters(tied, torch.bfloat16, keep_fp32=["norm"]),
            lambda: LossScaler("auto"),  # type: ignore[arg-type]
            lambda: LossScaler(0.0),
            lambda: LossScaler(interval=0),
            lambda: ZeroOptimizer(odd, torch.optim.SGD, mesh, **options),
            lambda: ZeroOptimizer(Layer(), torch.optim.SGD, mesh, wire_dtype=torch.float32, **options),
        ]
    ) == [
        "cast_parameters to torch.float64: choose torch.bfloat16 or torch.float16",
        "keep_fp32: 'nrm' matches no module with parameters (did you mean 'norm'?): patterns are of full names, such "
        "as 'linear' or '*norm*'",
        "keep_fp32='norm' is one string: give a list of patterns, ['norm']",
        "keep_fp32: 'norm.weight' and 'head.weight' are one parameter, and only one stays in fp32: match both, or "
        "neither",
        "loss_scale='auto': give a finite number above 0, or 'dynamic'",
        "loss_scale=0.0: give a finite number above 0, or 'dynamic'",
        "loss scaling with initial=65536.0, growth=2.0, backoff=0.5, interval=0: the first is above 0, the next above "
        "1, the third between 0 and 1, the last at least 1",
        "'weight' is torch.complex64: trained parameters are one of torch.float16, torch.bfloat16, torch.float32, "
        "torch.float64",
        "wire_dtype=torch.float32: choose torch.bfloat16, torch.float16, or None for no rounding",
    ]
