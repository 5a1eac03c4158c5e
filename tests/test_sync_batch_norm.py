"""SyncBatchNorm on real ranks against nn.BatchNorm over the joined rows in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout
from engine.errors import DtypeError, UsageError
from engine.placement import placements_of
from engine.tensor_parallel import SyncBatchNorm
from tests.world import World, refusals

Mesh = engine.Mesh
DOUBLE = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
COUNTS = {1: (4,), 2: (3, 5), 3: (2, 1, 4), 4: (3, 5, 0, 2)}  # rows of each rank
PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}  # by dims behind the channels


def wave(number: int, *shape: int) -> Tensor:
    """Values between -1 and 1, all different, different for each number."""
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=DOUBLE) * 0.7 + 1.3 * number).view(shape)


def batch(turn: int, size: int, rest: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The joined rows, each channel of other mean and spread, and the gradient of the output."""
    shape = (sum(COUNTS[size]), 3, *rest)
    spread, shift = (torch.tensor(v, dtype=DOUBLE).view(3, *(1 for _ in rest)) for v in ([1, 2, 0.1], [0, -3, 5]))
    return wave(turn, *shape) * spread + shift, wave(turn + 10, *shape)


def layout_of(x: Tensor, memory: str) -> Tensor:
    """Return the same values in other memory."""
    if memory == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if memory == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if memory == "gaps":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def filled(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(1.5 + wave(number + 20, *parameter.shape))
    return norm


def three_steps(norm: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    outputs, inputs = [], []
    for x, grad in batches:
        x = x.detach().requires_grad_()
        y = norm(x)
        y.backward(grad)
        assert x.grad is not None
        outputs.append(y.detach())
        inputs.append(x.grad)
    norm.eval()
    with torch.no_grad():
        outputs.append(norm(batches[0][0]))
    gradients = {name: p.grad for name, p in norm.named_parameters()}
    return {"outputs": outputs, "inputs": inputs, "gradients": gradients, "buffers": dict(norm.named_buffers())}


def rows_of(comm: engine.Communicator, x: Tensor) -> Tensor:
    return x.split(COUNTS[comm.size])[comm.rank]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "eps": {"eps": 0.1, "momentum": 0.3},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
}


def each_case(mesh: Mesh, rest: tuple[int, ...], memories: list[str]) -> dict[str, Any]:
    comm, found = mesh.data, {}
    for name, options in OPTIONS.items():
        for memory in memories:
            norm = filled(SyncBatchNorm(3, comm, dtype=DOUBLE, **options))
            batches = [batch(turn, comm.size, rest) for turn in range(3)]
            parts = [tuple(layout_of(rows_of(comm, x), memory) for x in each) for each in batches]
            found[name, memory] = three_steps(norm, parts)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rest", [(), (5,), (4, 3), (2, 3, 2), (2, 1, 2, 2)], ids=str)
def test_every_number_is_that_of_one_batch_norm_over_the_joined_rows(
    world: World, size: int, rest: tuple[int, ...]
) -> None:
    memories = ["plain"] if len(rest) != 2 else ["plain", "channels_last", "transposed", "gaps"]
    results = world.run(Layout(data=size), each_case, rest, memories)
    for name, options in OPTIONS.items():
        flat = len(rest) > 3  # nn.BatchNorm has no more dims: the same channels' values in one
        plain = filled(PLAIN[1 if flat else len(rest)](3, dtype=DOUBLE, **options))
        batches = [batch(turn, size, rest) for turn in range(3)]
        want = three_steps(plain, [tuple(x.flatten(2) if flat else x for x in each) for each in batches])  # type: ignore[misc]
        for memory in memories:
            got = [each[name, memory] for each in results]
            for kind in ("outputs", "inputs"):
                for turn, whole in enumerate(want[kind]):
                    joined = torch.cat([each[kind][turn] for each in got])
                    torch.testing.assert_close(joined, whole.view(joined.shape), **TIGHT)
            for key, whole in want["gradients"].items():
                torch.testing.assert_close(sum(each["gradients"][key] for each in got), whole, **TIGHT)
            for key, whole in want["buffers"].items():
                torch.testing.assert_close(got[0]["buffers"][key], whole, **TIGHT)
                assert all(torch.equal(each["buffers"][key], got[0]["buffers"][key]) for each in got)


# ---- precision -------------------------------------------------------------------------------------------------------


def large_mean(rank: int) -> Tensor:
    """Values of float32 around a million, in steps of 1/16: rank 1's mean is larger by 1."""
    return (1e6 + (wave(rank, 64, 2, 5) * 32).round() / 16 + rank).float()


def far_from_zero(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    norm = SyncBatchNorm(2, mesh.data, momentum=1.0)
    x = large_mean(mesh.data.rank).requires_grad_()
    y = norm(x)
    y.backward(wave(mesh.data.rank + 5, *x.shape).float())
    assert x.grad is not None
    assert norm.running_var is not None
    return y.detach(), x.grad, norm.running_var


def test_a_large_mean_takes_no_digits_from_a_small_spread(world: World) -> None:
    x = torch.cat([large_mean(rank) for rank in range(2)]).double().requires_grad_()
    plain = nn.BatchNorm1d(2, momentum=1.0, dtype=DOUBLE)
    y = plain(x)
    y.backward(torch.cat([wave(rank + 5, 64, 2, 5) for rank in range(2)]))
    results = world.run(Layout(data=2), far_from_zero)
    for joined, whole in zip(
        (torch.cat(each) for each in list(zip(*results, strict=True))[:2]), (y, x.grad), strict=True
    ):
        torch.testing.assert_close(joined.double(), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][2].double(), plain.running_var, rtol=1e-6, atol=0)


def in_low_precision(mesh: Mesh, dtype: torch.dtype, parameters: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    norm = filled(SyncBatchNorm(3, mesh.data, dtype=parameters))
    x, grad = (rows_of(mesh.data, each).to(dtype) for each in batch(0, 2, (4, 3)))
    x.requires_grad_()
    y = norm(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad, norm.weight.grad


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_each_number_is_rounded_once_to_its_dtype(world: World, dtype: torch.dtype, parameters: torch.dtype) -> None:
    results = world.run(Layout(data=2), in_low_precision, dtype, parameters)
    plain = filled(nn.BatchNorm2d(3, dtype=parameters)).double()
    x, grad = (each.to(dtype).double() for each in batch(0, 2, (4, 3)))
    x.requires_grad_()
    y = plain(x)
    y.backward(grad)
    unit = torch.finfo(dtype).eps
    for index, whole in enumerate((y, x.grad)):
        joined = torch.cat([each[index] for each in results])
        assert joined.dtype == dtype
        torch.testing.assert_close(joined.double(), whole, rtol=unit, atol=1e-6 * float(whole.detach().abs().max()))
    assert results[0][2].dtype == parameters
    total = sum(each[2].double() for each in results)
    torch.testing.assert_close(total, plain.weight.grad, rtol=0, atol=2e-5 + 20 * torch.finfo(parameters).eps)


# ---- ranks that are not alike ----------------------------------------------------------------------------------------


def unlike(mesh: Mesh) -> tuple[Tensor | None, Tensor, bool]:
    """Rank 0's input needs no gradient, rank 1's does."""
    comm = mesh.data
    norm = filled(SyncBatchNorm(3, comm, dtype=DOUBLE))
    x, grad = (rows_of(comm, each) for each in batch(0, 2, (4,)))
    x.requires_grad_(comm.rank == 1)
    norm(x).backward(grad)
    norm.weight.requires_grad_(False)
    frozen = x.detach().clone().requires_grad_()
    norm(frozen).backward(grad)
    return x.grad, norm.weight.grad, frozen.grad is not None


def test_a_rank_whose_input_needs_no_gradient_takes_part_in_backward(world: World) -> None:
    x, grad = batch(0, 2, (4,))
    x.requires_grad_()
    plain = filled(nn.BatchNorm1d(3, dtype=DOUBLE))
    plain(x).backward(grad)
    assert x.grad is not None
    first, second = world.run(Layout(data=2), unlike)
    assert first[0] is None
    torch.testing.assert_close(second[0], x.grad.split(COUNTS[2])[1], **TIGHT)
    torch.testing.assert_close(first[1] + second[1], plain.weight.grad, **TIGHT)
    assert first[2]
    assert second[2]


def refused(mesh: Mesh) -> tuple[list[str], list[int], list[bool]]:
    comm = mesh.data
    norm, few = SyncBatchNorm(3, comm), SyncBatchNorm(3, comm)
    one = torch.ones(1 if comm.rank == 0 else 0, 3)
    texts = refusals(
        [
            lambda: norm(torch.ones(3)),
            lambda: norm(torch.ones(2, 4, 3)),
            lambda: norm(torch.ones(2, 3, dtype=torch.int64)),
            lambda: few(one),
            lambda: few(torch.ones(0, 3)),
        ]
    )
    assert few.num_batches_tracked is not None
    tracked = [int(few.num_batches_tracked)]
    each_has_one = few(torch.full((1, 3), float(comm.rank)))
    return texts, [*tracked, int(few.num_batches_tracked)], (each_has_one < 0).tolist()[0]


def test_wrong_inputs_and_too_few_values_are_refused(world: World) -> None:
    for rank, (texts, tracked, below) in enumerate(world.run(Layout(data=2), refused)):
        assert "axis 'data': an input of shape (3,): it must be (N, 3, ...)" in texts[0]
        assert "an input of shape (2, 4, 3): it must be (N, 3, ...)" in texts[1]
        assert "an input of torch.int64: it must be floating" in texts[2]
        assert "Expected more than 1 value per channel when training, got 1 on all ranks together" in texts[3]
        assert "Expected more than 1 value per channel when training, got 0 on all ranks together" in texts[4]
        assert tracked == [0, 1], "a batch that is refused leaves no trace"
        assert below == [rank == 0] * 3, "one value on each rank is enough"


def alone_in_eval(mesh: Mesh) -> list[Tensor]:
    """Only rank 0 runs it, so anything that is sent would hang. One row: no statistics of its own."""
    norm = SyncBatchNorm(3, mesh.data, dtype=DOUBLE).eval()
    bare = SyncBatchNorm(3, mesh.data, track_running_stats=False, dtype=DOUBLE).eval()
    x = batch(0, 2, (4,))[0]
    return [norm(x[:1]), norm(x[:0]), bare(x)] if mesh.data.rank == 0 else []


def test_nothing_is_sent_in_eval_mode(world: World) -> None:
    x = batch(0, 2, (4,))[0]
    one, none, bare = world.run(Layout(data=2), alone_in_eval)[0]
    torch.testing.assert_close(one, x[:1] / (1 + 1e-5) ** 0.5, **TIGHT)
    assert none.shape == (0, 3, 4)
    torch.testing.assert_close(bare, nn.BatchNorm1d(3, dtype=DOUBLE)(x), **TIGHT)


def twice(mesh: Mesh) -> str:
    norm = SyncBatchNorm(2, mesh.data)
    x = wave(mesh.data.rank, 3, 2).float().requires_grad_()
    (gradient,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_second_derivative_is_an_error_and_not_a_wrong_number(world: World) -> None:
    for text in world.run(Layout(data=2), twice):
        assert "once_differentiable" in text


# ---- convert ---------------------------------------------------------------------------------------------------------


def alone() -> engine.Communicator:
    return engine.init(Layout(), device="cpu").data


def test_convert_keeps_all_that_a_module_has() -> None:
    comm = alone()
    shared, frozen, late = nn.BatchNorm2d(3, eps=0.1, momentum=None), nn.BatchNorm3d(3, affine=False), nn.BatchNorm1d(3)
    shared(wave(0, 2, 3, 2, 2).float())
    late.requires_grad_(False).eval()
    late.weight = shared.weight
    calls: list[str] = []
    late.register_forward_hook(lambda *_: calls.append("hook"))
    model = nn.Sequential(shared, nn.Sequential(frozen, shared), nn.Linear(3, 3), late)
    before, ids = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    assert SyncBatchNorm.convert(model, comm) is model
    assert [type(model[i]) for i in (0, 2, 3)] == [SyncBatchNorm, nn.Linear, SyncBatchNorm]
    assert model[1][1] is model[0]
    assert (model[0].eps, model[0].momentum, model[0].training, model[3].training) == (0.1, None, True, False)
    assert [id(p) for p in model.parameters()] == ids
    assert (model[3].weight is model[0].weight, model[3].bias.requires_grad) == (True, False)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    model.load_state_dict(before)
    model[3](wave(1, 2, 3).float())
    assert calls == ["hook"]
    other = alone()
    SyncBatchNorm.convert(model, other)
    assert model[0].comm is comm, "what is converted stays"
    single = nn.BatchNorm1d(3)
    assert isinstance(SyncBatchNorm.convert(single, comm), SyncBatchNorm)
    assert isinstance(copy.deepcopy(single), SyncBatchNorm)
    assert "axis='data'" in repr(single)


class WithActivation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "other", [WithActivation(3), nn.SyncBatchNorm(3), nn.LazyBatchNorm2d(), nn.BatchNorm2d(3, eps=0.0)]
)
def test_a_batch_norm_that_may_do_something_else_is_refused_and_nothing_changed(other: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), other)
    with pytest.raises(UsageError, match=r"SyncBatchNorm\.convert: '1' "):
        SyncBatchNorm.convert(model, alone())
    assert type(model[0]) is nn.BatchNorm1d


def test_a_group_of_one_is_plain_and_sizes_are_checked() -> None:
    norm = SyncBatchNorm(3, alone())
    with pytest.raises(UsageError, match="Expected more than 1 value per channel"):
        norm(torch.ones(1, 3))
    with pytest.raises(DtypeError, match="must be floating"):
        norm(torch.ones(4, 3, dtype=torch.int32))
    assert norm(torch.ones(1, 3, 2)).shape == (1, 3, 2)
    for options in ({"num_features": 0}, {"num_features": 3, "eps": 0.0}):
        with pytest.raises(UsageError, match="SyncBatchNorm: num_features="):
            SyncBatchNorm(comm=alone(), **options)  # type: ignore[arg-type]
    assert all(each.dim is None and each.gradient == "equal" for each in placements_of(norm).values())


# ---- a training run --------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    """A small convolutional net with distinct weights; the first norm's input needs a gradient, the stem's does not."""
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3),
        nn.Flatten(), nn.Linear(27, 5), nn.BatchNorm1d(5),
    ).double()  # fmt: skip
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.5 * wave(number, *parameter.shape) + (parameter.dim() == 1))
    return model


def images(turn: int) -> tuple[Tensor, Tensor]:
    return wave(turn, 8, 2, 6, 6) * 2 + 0.5, (torch.arange(8) * 3 + turn) % 5


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), target.shape[0]


def train(mesh: Mesh, stage: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    model = SyncBatchNorm.convert(net(), mesh.data)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, lr=0.1, momentum=0.9)
    step = engine.TrainStep(model, optimizer, summed, mesh)
    losses, norms = [], []
    for turn in range(3):
        result = step(*(x.split(sizes)[mesh.data.rank] for x in images(turn)))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms, "state": engine.full_state_dict(model, mesh)}


def train_plainly() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for turn in range(3):
        x, target = images(turn)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "state": model.state_dict()}


@pytest.mark.parametrize(
    ("layout", "stage", "sizes"),
    [
        (Layout(data=2), 2, (4, 4)),
        (Layout(data=2), 0, (3, 5)),
        (Layout(data=2), 1, (8, 0)),
        (Layout(data=2, tensor=2), 2, (4, 4)),
    ],
    ids=str,
)
def test_training_gives_the_numbers_of_one_process(
    world: World, layout: Layout, stage: int, sizes: tuple[int, ...]
) -> None:
    want = train_plainly()
    for got in world.run(layout, train, stage, sizes):
        for kind in ("losses", "norms"):
            torch.testing.assert_close(torch.stack(got[kind]), torch.stack(want[kind]), rtol=1e-10, atol=0)
        assert got["state"].keys() == want["state"].keys()
        for key, value in want["state"].items():
            torch.testing.assert_close(got["state"][key], value, rtol=1e-10, atol=1e-12)
