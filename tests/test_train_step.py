"""TrainStep: averages over unequal counts, pipelines of every length, evaluation, prediction, randomness, misuse."""

from __future__ import annotations

import itertools
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout
from engine.errors import EngineError
from tests.world import World, WorldError, refusals


class Layer(nn.Module):
    """Draws in its constructor, so that LayerSpec's generator decides."""

    def __init__(self, width: int = 4, dropout: float = 0.0):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh())


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def make_step(mesh: engine.Mesh, layers: int = 4, loss: Any = squared, **options: Any) -> engine.TrainStep:
    dropout = options.pop("dropout", 0.0)
    lr = options.pop("lr", 0.1)
    model = engine.PipelineModel([LayerSpec(Layer, dropout=dropout) for _ in range(layers)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, stage=options.pop("stage", 2), lr=lr)
    return engine.TrainStep(model, optimizer, loss, mesh, **options)


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, 4, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def plain_copy(state: dict[str, Tensor]) -> nn.Sequential:
    layers = len({name.split(".")[0] for name in state})
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    model.load_state_dict(state)
    return model


# ---- averages ------------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """y = w * x, so that every gradient is a sum one can do by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counted = target != 0
    return ((output + target) * counted).sum(), counted.sum()


def average(mesh: engine.Mesh, inputs: Tensor, targets: Tensor, microbatches: int) -> tuple[float, float, float, float]:
    model = Linear()
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    step = engine.TrainStep(model, optimizer, masked, mesh, microbatches=microbatches)
    result = step(
        inputs.tensor_split(mesh.data.size)[mesh.data.rank], targets.tensor_split(mesh.data.size)[mesh.data.rank]
    )
    return result.loss.item(), result.grad_norm.item(), result.tokens.item(), model.weight.item()


@pytest.mark.parametrize(("data", "microbatches"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (4, 2)])
def test_neither_microbatches_nor_data_ranks_with_fewer_counted_rows_weigh_more(
    world: World, data: int, microbatches: int
) -> None:
    # Counted: one row with loss 6 of the first half, three with 1, 2, 3 of the second: (6 + 6) / 4, not (6 + 2) / 2.
    inputs = torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 2], dtype=torch.float64)
    targets = torch.tensor([6.0, 0, 0, 0, 1, 2, 3, 0], dtype=torch.float64)
    for loss, norm, tokens, weight in world.run(Layout(data=data), average, inputs, targets, microbatches):
        assert (loss, norm, tokens, weight) == (3.0, (1 + 2 * 3) / 4, 4.0, -(1 + 2 * 3) / 4)


def test_nothing_counted_gives_loss_zero_and_changes_nothing(world: World) -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    for result in world.run(Layout(data=2), average, torch.ones(4, dtype=torch.float64), zeros, 2):
        assert result == (0.0, 0.0, 0.0, 0.0)


# ---- pipelines -----------------------------------------------------------------------------------------------------


def train_and_look(mesh: engine.Mesh, microbatches: int, batch: int) -> Any:
    step = make_step(mesh, layers=5, microbatches=microbatches)
    start = engine.full_state_dict(step.model, mesh)
    losses = [step(*rows(batch, seed)).loss.item() for seed in range(2)]
    return start, losses, engine.full_state_dict(step.model, mesh)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 9])
def test_four_stages_and_any_number_of_microbatches_equal_one_process(world: World, microbatches: int) -> None:
    batch = microbatches * 2
    start, losses, weights = world.run(Layout(pipeline=4), train_and_look, microbatches, batch)[0]
    plain = plain_copy(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(2):
        inputs, targets = rows(batch, seed)
        optimizer.zero_grad()
        loss = squared(plain(inputs), targets)[0] / batch
        loss.backward()
        optimizer.step()
        assert losses[seed] == pytest.approx(loss.item(), rel=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-14)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
        return (a + b * factor) * self.scale


def feed(mesh: engine.Mesh) -> list[float]:
    model = engine.PipelineModel([LayerSpec(Add), LayerSpec(Layer)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2)
    x, y = rows(4)
    kinds: list[Any] = [(x, y), Pair(x, y), {"a": x, "b": y}, {"a": x, "b": y, "factor": 1.0}]
    return [step(inputs, y).loss.item() for inputs in kinds]


def test_tuples_are_arguments_and_dicts_are_keywords(world: World) -> None:
    for losses in world.run(Layout(pipeline=2), feed):
        assert len(set(losses)) == 1
        assert losses[0] > 0


def train_frozen(mesh: engine.Mesh) -> Any:
    model = engine.PipelineModel([LayerSpec(Layer) for _ in range(3)], mesh, balance="uniform")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    start = engine.full_state_dict(model, mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2)
    norm = step(*rows(4)).grad_norm.item()
    return start, norm, engine.full_state_dict(model, mesh)


def test_a_frozen_first_stage_keeps_its_weights_and_joins_the_norm(world: World) -> None:
    start, norm, weights = world.run(Layout(pipeline=3), train_frozen)[2]
    plain = plain_copy(start)
    plain[0].requires_grad_(False)
    inputs, targets = rows(4)
    (squared(plain(inputs), targets)[0] / 4).backward()
    trained = [p for p in plain.parameters() if p.requires_grad]
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(trained, 1e9).item(), rel=1e-12)
    assert torch.equal(weights["0.linear.weight"], start["0.linear.weight"])
    assert not torch.equal(weights["1.linear.weight"], start["1.linear.weight"])


class InPlace(nn.Module):
    """Changes its input in place, which torch allows for every layer but one that gets a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0).relu_())


def train_in_place(mesh: engine.Mesh) -> Any:
    first = LayerSpec(nn.Linear, 4, 4, dtype=torch.float64)
    specs = [first, LayerSpec(InPlace), LayerSpec(nn.Identity), LayerSpec(InPlace)]
    model = engine.PipelineModel(specs, mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=3)
    return [(r.loss.item(), r.grad_norm.item()) for r in (step(*rows(6, seed)) for seed in range(3))]


def test_a_stage_may_change_its_input_in_place_or_pass_it_through(world: World) -> None:
    alone = world.run(Layout(), train_in_place)[0]
    for found in world.run(Layout(pipeline=4), train_in_place):
        assert found == [pytest.approx(pair, rel=1e-12) for pair in alone]


def change_sequence(mesh: engine.Mesh) -> list[float]:
    step = make_step(mesh, microbatches=2, lr=0.0)
    losses = []
    for shape in [(2, 4), (4, 3, 4), (2, 4), (2, 5, 4)]:
        x = torch.ones(shape, dtype=torch.float64)
        losses.append(step(x, x * 2).loss.item() / x[0].numel())
        losses.append(step.evaluate(x, x * 2).loss.item() / x[0].numel())
    return losses


def test_shapes_may_change_from_step_to_step(world: World) -> None:
    losses = world.run(Layout(pipeline=2), change_sequence)[0]
    assert losses == pytest.approx([losses[0]] * 8, rel=1e-12)


# ---- evaluation and prediction -------------------------------------------------------------------------------------


def own_part(mesh: engine.Mesh, tensors: tuple[Tensor, Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
    return tensors[0].split(sizes)[mesh.data.rank], tensors[1].split(sizes)[mesh.data.rank]


def train_with_evaluations(mesh: engine.Mesh, sizes: list[int], evaluate: bool) -> Any:
    step = make_step(mesh, microbatches=2, dropout=0.3)
    step.model.get_submodule(str(step.model.layers[0])).dropout.eval()  # a mode of its own, to be put back
    found: dict[str, Any] = {"start": engine.full_state_dict(step.model, mesh), "losses": [], "evaluations": []}
    torch.manual_seed(11)
    for seed in range(3):
        found["losses"].append(step(*own_part(mesh, rows(8, seed), [8 // mesh.data.size] * mesh.data.size)).loss.item())
        if evaluate:
            result = step.evaluate(*own_part(mesh, rows(sum(sizes), 50), sizes))
            found["evaluations"].append((result.loss.item(), result.tokens.item()))
            found["weights"] = engine.full_state_dict(step.model, mesh)
    first = step.model.get_submodule(str(step.model.layers[0]))
    found["modes"] = (step.model.training, first.linear.training, first.dropout.training)
    found["random"] = torch.rand(2).tolist()
    return found


def test_evaluation_of_unequal_rows_is_exact_and_leaves_no_trace(world: World) -> None:
    with_it = world.run(Layout(data=2, pipeline=2), train_with_evaluations, [5, 0], True)
    without = world.run(Layout(data=2, pipeline=2), train_with_evaluations, [5, 0], False)
    assert with_it[0]["losses"] == without[0]["losses"]
    torch.manual_seed(11)
    untouched = torch.rand(2).tolist()
    for found in (*with_it, *without):
        assert found["modes"] == (True, True, False)
        assert found["random"] == untouched
    plain = plain_copy(with_it[0]["weights"]).eval()
    inputs, targets = rows(5, 50)
    expected = squared(plain(inputs), targets)[0].item() / 5
    for found in with_it:
        loss, tokens = found["evaluations"][-1]
        assert tokens == 5
        assert loss == pytest.approx(expected, rel=1e-12)


def predict_all(mesh: engine.Mesh) -> Any:
    step = make_step(mesh, microbatches=3)
    state = engine.full_state_dict(step.model, mesh)
    count = 7 if mesh.data.rank == 0 else 0
    other = step.evaluate(*rows(0), loss=lambda output, _: (output.sum() * 0 + 1, 0))
    return state, step.predict(rows(7)[0][:count]), other.loss.item(), other.tokens.item()


def test_predict_joins_the_microbatches_on_every_pipeline_rank(world: World) -> None:
    results = world.run(Layout(data=2, pipeline=2), predict_all)
    expected = plain_copy(results[0][0])(rows(7)[0])
    for rank, (_, output, loss, tokens) in enumerate(results):
        wanted = expected if rank in (0, 2) else expected[:0]
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=0)
        assert (loss, tokens) == (0.0, 0.0)


# ---- randomness ----------------------------------------------------------------------------------------------------


def masks(mesh: engine.Mesh) -> Any:
    seen: list[Tensor] = []

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.rand(50))
            return x * self.weight

    model = engine.PipelineModel([LayerSpec(Watch), LayerSpec(Watch)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh)
    for _ in range(2):
        step(torch.ones(2, 1), torch.ones(2, 1))
    return torch.stack(seen)


def test_random_streams_differ_by_data_rank_stage_and_step_and_agree_over_tensor(world: World) -> None:
    found = world.run(Layout(data=2, pipeline=2, tensor=2), masks)
    again = world.run(Layout(data=2, pipeline=2, tensor=2), masks)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for rank in (0, 2, 4, 6):
        assert torch.equal(found[rank], found[rank + 1])
    different = torch.cat([found[rank] for rank in (0, 2, 4, 6)])
    assert len(different) == 8
    assert len(torch.unique(different, dim=0)) == 8


# ---- wrong input ---------------------------------------------------------------------------------------------------


def misuse(mesh: engine.Mesh) -> list[str]:
    step = make_step(mesh, microbatches=3)
    x, y = rows(6)
    calls: list[Any] = [
        lambda: step(*rows(4)),
        lambda: step(x, y[:3]),
        lambda: step(None, None),
        lambda: make_step(mesh, microbatches=0),
        lambda: make_step(mesh, schedule="1fb1"),
        lambda: make_step(mesh, clip_grad_norm=0.0),
        lambda: make_step(mesh, microbatches=2 + mesh.rank),
        lambda: engine.TrainStep(nn.Linear(2, 2), step.optimizer, squared, mesh),
        lambda: engine.TrainStep(make_step(mesh).model, step.optimizer, squared, mesh),
    ]
    texts = refusals(calls)
    step(x, y)  # nothing was sent by any of them: the mesh still works
    return texts


def test_wrong_batches_and_options_are_one_clear_error_on_every_rank(world: World) -> None:
    results = world.run(Layout(pipeline=2), misuse)
    expected = [
        "a batch of 4 rows does not divide into 3 microbatches: give each data rank a multiple of 3 rows, or",
        "different numbers of rows, [6, 3]",
        "hold no tensor with rows",
        "microbatches=0: a step has at least 1",
        "schedule='1fb1' (did you mean '1f1b'?): choose 1f1b",
        "clip_grad_norm=0.0",
        "TrainStep's options differs over axis 'world': rank 1 (global 1) has",
        "pipeline(2) needs a PipelineModel, got Linear",
        "the optimizer was built over another model",
    ]
    for texts in results:
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def mean_loss(mesh: engine.Mesh) -> None:
    make_step(mesh, loss=lambda output, target: F.mse_loss(output, target))(*rows(2))


def test_a_loss_that_is_a_mean_is_refused(world: World) -> None:
    with pytest.raises(WorldError, match=r"must return \(sum, count\)"):
        world.run(Layout(), mean_loss)


def without_gradient(mesh: engine.Mesh) -> list[str]:
    x, y = rows(2)
    texts = []
    for loss, mode in ((lambda o, t: squared(o.detach(), t), torch.no_grad), (squared, torch.inference_mode)):
        step = make_step(mesh, loss=loss)
        try:
            with mode():
                step(x, y)
        except EngineError as error:
            texts.append(str(error))
    with torch.no_grad():  # no mistake: a step turns gradients on
        texts.append(str(make_step(mesh)(x, y).grad_norm.item() > 0))
    return texts


def test_a_loss_without_a_gradient_is_refused_instead_of_training_on_zeros(world: World) -> None:
    detached, inference, fine = world.run(Layout(data=2), without_gradient)[1]
    assert "the loss has no gradient" in detached
    assert "inference_mode" in inference
    assert fine == "True"


class Fails(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.calls = rank, 0
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rank == 3 and self.calls == 6:
            raise ZeroDivisionError("planted in the forward of one rank")
        return self.linear(x)


def train_until_one_fails(mesh: engine.Mesh) -> None:
    model = engine.PipelineModel([LayerSpec(Fails, mesh.rank) for _ in range(2)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=4)
    for seed in range(3):
        step(*rows(8, seed))


def test_one_rank_that_raises_mid_step_ends_all_ranks_and_is_named_first(world: World) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(Layout(data=2, pipeline=2), train_until_one_fails)
    assert caught.value.cause == 3
    assert "planted in the forward of one rank" in caught.value.reports[3]
    assert sorted(caught.value.reports) == [0, 1, 2, 3]
    assert all("CommunicationError: rank" in text for rank, text in caught.value.reports.items() if rank != 3)


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5, dtype=torch.float64)

    def forward(self, x: Tensor, _tag: Any) -> Tensor:
        return self.linear(x)


class Tag:
    """An object whose repr is its address."""


def step_with_objects(mesh: engine.Mesh, keeps: int) -> list[float]:
    model = engine.PipelineModel([LayerSpec(TakesAnything), LayerSpec(nn.Linear, 5, 4, dtype=torch.float64)], mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh)
    kept, losses = [], []
    for number in range(8):
        tag = Tag()
        if mesh.rank == keeps:
            kept.append(tag)
        losses.append(step((rows(3, 1)[0], tag), rows(3, 1)[1]).loss.item())
        losses.append(step((rows(3, 1)[0], number), rows(3, 1)[1]).loss.item())
    return losses


@pytest.mark.parametrize("keeps", [0, 1])
def test_an_object_with_its_address_in_its_repr_does_not_part_the_stages(world: World, keeps: int) -> None:
    for losses in world.run(Layout(pipeline=2), step_with_objects, keeps):
        assert losses[-1] < losses[0]
        assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@dataclass
class Rows:
    x: Tensor


def uncut(mesh: engine.Mesh) -> list[str]:
    step = make_step(mesh, microbatches=2)
    x, y = rows(4)
    calls = [
        lambda other=other: step(x, other)
        for other in (
            y.numpy(),
            Rows(y),
            UserDict(y=y),
            [[1.0], [2.0]],
            {"y": [1, 2]},
            (y, iter(y)),
            {"y": y, "more": {y}},
        )
    ]
    return [*refusals(calls), *refusals([lambda: step.predict({"x": Rows(x)})])]


def test_rows_in_containers_that_cannot_be_cut_are_refused_on_every_rank(world: World) -> None:
    for texts in world.run(Layout(pipeline=2), uncut):
        numbers = ["list of numbers"] * 2
        for text, kind in zip(
            texts, ("ndarray", "Rows", "UserDict", *numbers, "tuple_iterator", "set", "Rows"), strict=True
        ):
            assert f"a {kind} is not cut into microbatches" in text


def odd_counts(mesh: engine.Mesh) -> list[str]:
    counts = [-4, float("nan"), float("inf"), None, "3", torch.ones(2), torch.tensor(-1)]
    x, y = rows(2)
    texts = [
        refusals([lambda count=count: make_step(mesh, loss=lambda o, t: (squared(o, t)[0], count))(x, y)])[0]
        for count in counts
    ]
    make_step(mesh, loss=lambda o, t: (squared(o, t)[0], torch.tensor([2])))(x, y)
    return texts


def test_a_count_that_is_no_finite_number_from_zero_is_refused(world: World) -> None:
    assert all("the loss function's count is" in text for text in world.run(Layout(), odd_counts)[0])


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, y


class OneNumber(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def predict_wrong(mesh: engine.Mesh) -> list[str]:
    texts = []
    for last in (TwoOutputs, OneNumber):
        model = engine.PipelineModel([LayerSpec(Layer), LayerSpec(last)], mesh, balance="uniform")
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
        step = engine.TrainStep(model, optimizer, lambda o, _: (o[0].sum() if isinstance(o, tuple) else o, 1), mesh)
        texts += refusals([lambda step=step: step.predict(rows(2)[0])])
        step(*rows(2))  # every rank left predict together
    return texts


def test_a_prediction_that_is_not_one_tensor_of_rows_is_refused_on_every_stage(world: World) -> None:
    for pair, number in world.run(Layout(pipeline=2), predict_wrong):
        assert "the model returned tuple" in pair
        assert "the model returned tensors that cannot be joined: zero-dimensional" in number


def mixed_precision(mesh: engine.Mesh) -> list[float]:
    specs = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)]
    model = engine.PipelineModel(specs, mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    step = engine.TrainStep(model, optimizer, lambda o, t: squared(o.float(), t), mesh, microbatches=2)
    x, y = (tensor.float() for tensor in rows(4))
    losses = [step(x, y).loss.item()]
    with torch.autocast("cpu", torch.bfloat16):
        losses += [step(x, y).loss.item(), step.evaluate(x, y).loss.item()]
    return [*losses, step(x, y).loss.item()]


def test_steps_with_and_without_autocast_may_alternate(world: World) -> None:
    for full, half, evaluated, again in world.run(Layout(pipeline=2), mixed_precision):
        assert full == again != half == evaluated
        assert half == pytest.approx(full, rel=0.02)
