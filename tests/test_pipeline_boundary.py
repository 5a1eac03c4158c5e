"""What crosses a stage boundary: trees of tensors and plain values, equal to plain PyTorch on every layout; and what
cannot cross.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel
from engine.errors import UsageError
from engine.pipeline.boundary import _decode, _encode, put_together, take_apart
from tests.world import World, WorldError

TOLERANCE = 1e-11
HERE = torch.device("cpu")
WIDTH = 6


class State(NamedTuple):
    hidden: Tensor
    extras: dict[str, Any]


def linear(outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, dtype=torch.float64)


# Eight layers, each of which makes what the next one needs, so that a cut may be anywhere between them. Shapes are
# (rows, sequence, WIDTH), masks (rows, sequence).


class Start(nn.Module):
    """Ids -> a dict: hidden, a mask, positions of every row, the table itself for a later head, plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Any:
        hidden = F.embedding(ids, self.table)
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        plain = (None, True, 3, -0.5, "gelu")
        return {"hidden": hidden, "mask": ids != 0, "positions": positions, "table": self.table, "plain": plain}


class Carry(nn.Module):
    """A dict -> a named tuple; hidden twice, once as the skip connection: its gradients must be summed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: dict[str, Any]) -> Any:
        assert x["plain"] == (None, True, 3, -0.5, "gelu")
        assert type(x["plain"][1]) is bool
        hidden = self.linear(x["hidden"]) * (1 + x["positions"].unsqueeze(-1))
        return State(hidden, {"skip": [hidden, x["hidden"]], **x})


class Pass(nn.Module):
    """Everything through, and in transposed memory."""

    def forward(self, x: State) -> Any:
        assert x.extras["skip"][0] is x.hidden
        return x._replace(hidden=x.hidden.transpose(0, 1))


class Masked(nn.Module):
    """Changes a received mask and hidden in place; a 0-d and an empty tensor; an output that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = linear(), linear()

    def forward(self, x: State) -> Any:
        mask = x.extras["mask"].clone()
        mask[:, -1] = True
        hidden = self.linear(x.hidden.transpose(0, 1)).tanh() * mask.unsqueeze(-1)
        return (hidden, mask, hidden.sum(), hidden[:0], self.other(hidden), x.extras["skip"], x.extras["table"])


class Skipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Any) -> Any:
        hidden, mask, total, empty, _unused, skip, table = x
        hidden = self.linear(hidden) + skip[0] * 0.5 + skip[1] + 0.01 * total + empty.sum()
        # Two parts of one tensor, and one of them frozen.
        left, right = hidden.split([2, WIDTH - 2], dim=-1)
        return OrderedDict(parts=[left, right], copy=hidden.detach(), mask=mask, table=table)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Any) -> Any:
        assert list(x) == ["parts", "copy", "mask", "table"]
        assert not x["copy"].requires_grad
        hidden = torch.cat(x["parts"], -1) + x["copy"].sin()
        return [self.linear(hidden).relu(), x["mask"], x["table"]]


class Detached(nn.Module):
    """Uses a gradient-carrying item without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Any) -> Any:
        hidden, mask, table = x
        return self.linear(hidden) + hidden.detach().cos(), (mask, {0: table})


class Head(nn.Module):
    def forward(self, x: Any) -> Tensor:
        hidden, (mask, tables) = x
        return (hidden @ tables[0].T) * mask.unsqueeze(-1)


LAYERS = (Start, Carry, Pass, Masked, Skipped, Joined, Detached, Head)


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return loss, (target != -100).sum()


def batch(rows: int, sequence: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, (rows, sequence + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].masked_fill(ids[:, 1:] == 2, -100)


def shapes(data: int) -> list[tuple[str, int, int]]:
    """What is done, global rows, and the length of the sequence: training of four microbatches, and evaluations."""
    kinds = [("train", 8, 4), ("evaluate", 7, 4), ("train", 4, 3), ("train", 8, 4), ("evaluate", 2, 6), ("train", 4, 3)]
    return [(kind, rows * (data if kind == "train" else 1), sequence) for kind, rows, sequence in kinds]


def train(mesh: engine.Mesh, schedule: str, chunks: int, frozen: int) -> Any:
    model = PipelineModel([LayerSpec(each) for each in LAYERS], mesh, balance="uniform", chunks=chunks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.split(".")[0]) >= frozen)
    start = engine.full_state_dict(model, mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.01)
    step = engine.TrainStep(model, optimizer, summed, mesh, microbatches=4, schedule=schedule)
    losses = []
    here, ranks = mesh.data.rank, mesh.data.size
    for seed, (kind, rows, sequence) in enumerate(shapes(ranks)):
        inputs, targets = (x.tensor_split(ranks)[here] for x in batch(rows, sequence, seed))
        result = step(inputs, targets) if kind == "train" else step.evaluate(inputs, targets)
        losses.append((result.loss.item(), result.grad_norm.item() if kind == "train" else 0.0))
    return start, losses, engine.full_state_dict(model, mesh)


def train_plain(start: dict[str, Tensor], data: int, frozen: int) -> tuple[list[Any], dict[str, Tensor]]:
    """The same with one nn.Sequential, microbatch by microbatch: one layer sums over all the rows that it sees."""
    plain = nn.Sequential(*(each() for each in LAYERS))
    plain.load_state_dict(start)
    plain[:frozen].requires_grad_(False)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    found = []
    for seed, (kind, rows, sequence) in enumerate(shapes(data)):
        inputs, targets = batch(rows, sequence, seed)
        loss = count = 0
        parts = data * 4 if kind == "train" else min(rows, data * 4)
        for x, y in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
            part = summed(plain(x), y)
            loss, count = loss + part[0], count + part[1]
        norm = 0.0
        if kind == "train":
            optimizer.zero_grad()
            (loss / count).backward()
            norm = nn.utils.clip_grad_norm_(trained, 1e9).item()
            optimizer.step()
        found.append(((loss / count).item(), norm))
    return found, dict(plain.state_dict())


CASES = [
    (Layout(), "1f1b", 1, 0),
    (Layout(pipeline=2), "1f1b", 1, 0),
    (Layout(pipeline=4), "1f1b", 1, 0),
    (Layout(pipeline=4), "gpipe", 2, 0),
    (Layout(pipeline=2), "interleaved", 2, 0),
    (Layout(data=2, pipeline=2), "interleaved", 4, 0),
    (Layout(data=2, pipeline=2), "gpipe", 1, 0),
    (Layout(pipeline=4), "1f1b", 1, 3),
]


@pytest.mark.parametrize(("layout", "schedule", "chunks", "frozen"), CASES, ids=str)
def test_trees_cross_wherever_the_cut_lies(
    world: World, layout: Layout, schedule: str, chunks: int, frozen: int
) -> None:
    results = world.run(layout, train, schedule, chunks, frozen)
    start, _, weights = results[0]
    losses, wanted = train_plain(start, layout.data, frozen)
    for _, found, _ in results:
        assert found == [pytest.approx(pair, rel=TOLERANCE) for pair in losses]
    torch.testing.assert_close(weights, wanted, rtol=TOLERANCE, atol=TOLERANCE)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return (x[0] * self.weight, *x[1:]) if isinstance(x, tuple) else (x * self.weight, x > 0)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Any) -> Tensor:
        return x[0] * self.weight * x[1]


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def sent(mesh: engine.Mesh, frozen: bool) -> int:
    model = PipelineModel([LayerSpec(Scale), LayerSpec(Scale), LayerSpec(Last)], mesh, balance="uniform")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith("0.")))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=3)
    x = torch.ones(6, 4, dtype=torch.float64)
    step(x, x)  # the forms are announced
    with mesh.ledger as ledger:
        step(x, x)
    return ledger.entries["pipeline", "exchange"].wire_bytes


def test_gradients_come_back_for_floats_that_require_one_and_for_nothing_else(world: World) -> None:
    floats, mask = 2 * 4 * 8, 2 * 4
    up, down = 3 * (floats + mask), 3 * floats
    assert world.run(Layout(pipeline=3), sent, False) == [up, up + down, down]
    assert world.run(Layout(pipeline=3), sent, True) == [up, up, down]


class Counts(nn.Module):
    """Returns a buffer, which it changes again in the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight, self.count.add_(1)


class Counted(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0] * 0 + x[1]


def counted(mesh: engine.Mesh) -> list[float]:
    found: list[float] = []

    def note(output: Tensor, _target: Tensor) -> tuple[Tensor, int]:
        found.append(output[0, 0].item())
        return output.sum(), 1

    model = PipelineModel([LayerSpec(Counts), LayerSpec(Counted)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, note, mesh, microbatches=4, schedule="gpipe")
    x = torch.ones(8, 4, dtype=torch.float64)
    step(x, x)
    step.evaluate(x, x)
    return found


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_a_buffer_that_changes_while_it_is_sent_arrives_as_it_was(world: World, transport: str) -> None:
    assert world.run(Layout(pipeline=2), counted, transport=transport)[1] == [1, 2, 3, 4, 5, 6, 7, 8]


# ---- taking apart and putting together -------------------------------------------------------------------------------


def test_an_output_comes_back_as_it_was_and_its_form_through_an_announcement() -> None:
    x, y = torch.randn(2, 3, requires_grad=True) * 2, torch.ones((), dtype=torch.bool)
    output = {
        "a": (x, [y, x, None], State(x, {})),
        7: OrderedDict(z=float("nan"), inf=-float("inf"), text="é\"'\n" * 99, yes=True, number=1 << 70),
        None: [(), {}, torch.Size([2, 3]), torch.ones(0, 5, dtype=torch.int16), x.detach().max(dim=1)],
        True: {False: 0.1},
    }
    form, tensors = take_apart(output, HERE, 0)
    assert [(meta.shape, meta.requires_grad) for meta in form.tensors[:3]] == [
        ((2, 3), True),
        ((), False),
        ((0, 5), False),
    ]
    messages = _encode(form, HERE)
    assert messages[0].numel() == 64
    assert len(messages) == 2
    arriving = iter(messages)
    again = _decode(lambda out: out.copy_(next(arriving)), HERE)
    assert again == form
    assert take_apart(output, HERE, 0)[0] == form  # also with a NaN in it
    back = put_together(again.tree, tensors)
    assert list(back) == list(output)
    assert back["a"][0] is back["a"][1][1] is back["a"][2].hidden is x
    assert (type(back["a"][2]), type(back[7]), type(back[None][2])) == (State, OrderedDict, torch.Size)
    assert type(back[None][4]) is type(x.max(dim=1))
    assert repr(back[7]) == repr(output[7])
    assert back[True] == {False: 0.1}
    assert str(take_apart((x, {"n": 2}), HERE, 0)[0]) == "tuple(float32 (2, 3) with a gradient, dict('n': 2))"
    assert take_apart([x, 1], HERE, 0)[0] != take_apart([x, True], HERE, 0)[0] != take_apart((x, 1), HERE, 0)[0]
    with torch.no_grad():
        assert not take_apart(nn.Parameter(x), HERE, 0)[0].tensors[0].requires_grad


class Wrapped(Tensor):
    pass


@dataclass
class Record:
    x: Tensor


class Flag(int):
    pass


def local_tuple() -> Any:
    class Hidden(NamedTuple):
        x: Tensor

    return Hidden(torch.ones(1))


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"mask": [ONE, Record(ONE)]}, "output['mask'][1] is of type tests.test_pipeline_boundary.Record, and cannot"),
        (State(ONE, {"a": UserDict()}), "output.extras['a'] is of type collections.UserDict"),
        ((ONE, {ONE}), "output[1] is of type builtins.set"),
        ([Flag(3)], "output[0] is of type tests.test_pipeline_boundary.Flag"),
        ({(1, 2): ONE}, "output has a key of type tuple, and cannot be sent to the next stage: use strings or numbers"),
        (ONE.as_subclass(Wrapped), "output is a Wrapped, which would arrive as a plain tensor"),
        ([ONE.to_sparse()], "output[0] is sparse or nested, and cannot be sent to the next stage: return it dense"),
        ((ONE.to(torch.float8_e5m2),), "output[0] is of float8_e5m2, and cannot be sent to the next stage: use one of"),
        ([ONE, ONE.to("meta")], "output[1] lies on meta, the mesh on cpu, and cannot be sent"),
        (local_tuple(), "which is not found as tests.test_pipeline_boundary:local_tuple.<locals>.Hidden"),
        (lambda: None, "output is of type builtins.function"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_place(output: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        take_apart(output, HERE, 3)
    assert str(caught.value).startswith("stage 3: output")
    assert text in str(caught.value)


class Returns(nn.Module):
    """Returns what `make(call)` makes of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.make, self.calls = make, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.make(x * self.weight, self.calls)


def with_object(x: Tensor, calls: int) -> Any:
    return (x, {"mask": [None, Record(x)]}) if calls == 4 else (x, {"mask": [None, None]})


def with_number(x: Tensor, calls: int) -> Any:
    return x, calls > 3


def first(x: Any, _calls: int) -> Any:
    return x


class First(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0]


def train_wrong(mesh: engine.Mesh, make: Any) -> None:
    model = PipelineModel([LayerSpec(Returns, make), LayerSpec(First)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2)
    x = torch.ones(4, 4, dtype=torch.float64)
    for _ in range(3):
        step(x, x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (with_object, "UsageError: stage 0: output[1]['mask'][1] is of type tests.test_pipeline_boundary.Record"),
        (
            with_number,
            "UsageError: stage 0: for inputs of these shapes the output was tuple(float64 (2, 4) with a gradient, "
            "False) before and is tuple(float64 (2, 4) with a gradient, True) now",
        ),
    ],
)
def test_an_output_that_cannot_be_sent_ends_all_ranks(world: World, make: Any, text: str) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(Layout(pipeline=2), train_wrong, make)
    assert caught.value.cause == 0
    assert text in caught.value.reports[0]
    assert "CommunicationError: rank 1" in caught.value.reports[1]
    assert "rank 0" in caught.value.reports[1].splitlines()[-1]


# ---- inputs and targets ----------------------------------------------------------------------------------------------


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one


def differences(mesh: engine.Mesh, width: int, schedule: str) -> list[float]:
    """Return every microbatch's loss, where this rank computes it, of a model that gives back what it gets."""
    found: list[float] = []

    def difference(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        loss = (output - target).square().sum()
        found.append(loss.item())
        return loss, target.shape[0]

    model = PipelineModel([LayerSpec(Same) for _ in range(4)], mesh, balance="uniform")
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    step = engine.TrainStep(model, optimizer, difference, mesh, microbatches=4, schedule=schedule)
    for seed in range(2):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        step(x, x)
        step.evaluate(x[1:], x[1:])
    return found


@pytest.mark.parametrize(("ranks", "width", "schedule"), [(2, 1 << 17, "1f1b"), (4, 3, "gpipe"), (4, 3, "1f1b")])
def test_every_microbatch_meets_its_own_target(world: World, ranks: int, width: int, schedule: str) -> None:
    *others, last = world.run(Layout(pipeline=ranks), differences, width, schedule)
    assert not any(others)
    assert last == [0.0] * 16
