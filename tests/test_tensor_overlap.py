"""What the parallel linear layers send and when, what they refuse, and how they go with autocast and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from engine import Layout
from engine.placement import Part
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.test_tensor_linear import DOUBLE, TIGHT, Block, here, outcome, wave
from tests.world import World, refusals

Mesh = engine.Mesh
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")

# ---- order of events -------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Writes down the shape of every matrix product's result."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.events.append(f"product {tuple(result.shape)}")
        return result


def record(comm: engine.Communicator, events: list[str]) -> None:
    """Make the communicator of this test write down what is started and waited for."""

    def recorded(name: str) -> Any:
        plain = getattr(comm, name)

        def call(*args: Any, **options: Any) -> Any:
            work = plain(*args, **options)
            if not options.get("async_op"):
                events.append(name)
                return work
            events.append(f"start {name}")
            wait = work.wait

            def finish() -> Any:
                events.append(f"wait {name}")
                return wait()

            work.wait = finish
            return work

        return call

    for name in COLLECTIVES:
        setattr(comm, name, recorded(name))


def backward_events(mesh: Mesh, dim: int | None, frozen: bool, needs_input: bool) -> list[list[str]]:
    events: list[str] = []
    layer = ColumnParallelLinear(8, 12, mesh.tensor, dtype=DOUBLE, sequence_dim=dim).requires_grad_(not frozen)
    layer.bias.requires_grad_(True)
    record(mesh.tensor, events)
    x = here(wave(1, 4, 2, 8), mesh, dim).requires_grad_(needs_input)
    y = layer(x)
    forward = list(events)
    events.clear()
    with Products(events):
        y.backward(wave(2, *y.shape))
    assert (layer.weight.grad is None) == frozen
    assert (x.grad is not None) == needs_input
    return [forward, events]


INPUT, WEIGHT = "product (8, 8)", "product (6, 8)"
WHOLE = {
    (False, True): [INPUT, "start all_reduce", WEIGHT, "wait all_reduce"],
    (True, True): [INPUT, "start all_reduce", "wait all_reduce"],
    (False, False): [WEIGHT],
    (True, False): [],
}
SPLIT = {
    (False, True): [
        "start all_gather",
        INPUT,
        "start reduce_scatter",
        "wait all_gather",
        WEIGHT,
        "wait reduce_scatter",
    ],
    (True, True): [INPUT, "start reduce_scatter", "wait reduce_scatter"],
    (False, False): ["start all_gather", "wait all_gather", WEIGHT],
    (True, False): [],
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("needs_input", [True, False], ids=["input gradient", "none"])
def test_the_input_gradient_flies_while_the_weight_gradient_is_computed(
    world: World, frozen: bool, needs_input: bool
) -> None:
    for dim, expected, forward in ((None, WHOLE, []), (0, SPLIT, ["all_gather"])):
        got = world.run(Layout(tensor=2), backward_events, dim, frozen, needs_input, transport="torch")
        assert got == [[forward, expected[frozen, needs_input]]] * 2
        # Over shared memory nothing is gained by starting early, so the same is done at once.
        got = world.run(Layout(tensor=2), backward_events, dim, frozen, needs_input, transport="shm")
        at_once = [each.removeprefix("start ") for each in expected[frozen, needs_input] if "wait" not in each]
        assert got == [[forward, at_once]] * 2


def pair_calls(mesh: Mesh, dim: int | None) -> list[str]:
    """All collectives of a block, forward and backward."""
    events: list[str] = []
    block = Block(mesh.tensor, dim)
    x = here(wave(1, 4, 8, 8), mesh, dim)
    record(mesh.tensor, events)
    block(x).sum().backward()
    return [each for each in events if "wait" not in each]


def test_a_block_sends_twice_and_gathers_its_shard_once_more(world: World) -> None:
    assert world.run(Layout(tensor=1), pair_calls, None) == [[]]
    assert world.run(Layout(tensor=2), pair_calls, None, transport="shm") == [["all_reduce", "all_reduce"]] * 2
    got = world.run(Layout(tensor=2), pair_calls, 1, transport="shm")
    assert got == [["all_gather", "reduce_scatter", "all_gather", "all_gather", "reduce_scatter"]] * 2


# ---- padding ---------------------------------------------------------------------------------------------------------


def run_padded(mesh: Mesh, gather: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = ColumnParallelLinear(
        4, 5, mesh.tensor, parts=[Part(5, padded=True)], gather_output=gather, dtype=DOUBLE, bias=True
    )
    padding = layer.placements["weight"].padding(mesh.tensor.rank, mesh.tensor.size)
    for parameter in layer.parameters():
        parameter.detach()[len(parameter) - padding :] = torch.nan  # it may hold anything
    x = wave(1, 3, 4).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    pads = [node for node in _nodes(y.grad_fn) if "Pad" in type(node).__name__]
    return {**outcome(y, x, layer), "pads": len(pads)}


def _nodes(node: Any) -> set[Any]:
    return set() if node is None else {node}.union(*(_nodes(each) for each, _ in node.next_functions))


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("gather", [False, True])
def test_padded_outputs_are_minus_infinity_without_a_gradient(world: World, n: int, gather: bool) -> None:
    """5 outputs over 4 ranks: 2, 2, 1 and none."""
    torch.manual_seed(5)
    plain = nn.Linear(4, 5, dtype=DOUBLE)
    x = wave(1, 3, 4).requires_grad_()
    y = plain(x)
    y.sum().backward()
    length = -(-5 // n)
    full = {"y": y.detach().T, "weight": plain.weight.grad, "bias": plain.bias.grad}
    for rank, got in enumerate(world.run(Layout(tensor=n), run_padded, gather)):
        held = len(full["y"][rank * length : (rank + 1) * length])
        for name, value in full.items():
            ours = got[name].T if name == "y" else got[name]
            if name == "y" and gather:
                torch.testing.assert_close(ours, value, **TIGHT)
                continue
            assert len(ours) == length
            torch.testing.assert_close(ours[:held], value[rank * length :][:held], **TIGHT, msg=name)
            assert (ours[held:] == (-torch.inf if name == "y" else 0.0)).all()
        torch.testing.assert_close(got["x"], x.grad, **TIGHT)
        assert got["pads"] == (held < length and not gather), "no pass over the outputs where nothing is padded"


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused_at_construction_with_the_numbers() -> None:
    comm = engine.plan_mesh(Layout(tensor=4), 0).tensor
    shared = [Part(8, heads=4), Part(4, heads=2)]
    texts = refusals(
        [
            lambda: ColumnParallelLinear(8, 16, comm, parts=(4, 8)),
            lambda: RowParallelLinear(16, 8, comm, parts=(4, 8)),
            lambda: ColumnParallelLinear(8, 16, comm, parts=(10, 6)),
            lambda: ColumnParallelLinear(8, 12, comm, parts=[Part(12, heads=6)]),
            lambda: ColumnParallelLinear(8, 12, comm, parts=shared, gather_output=True),
            lambda: RowParallelLinear(12, 8, comm, parts=shared),
            lambda: RowParallelLinear(10, 8, comm, parts=[Part(10, padded=True)]),
            lambda: ColumnParallelLinear(8, 13, comm, parts=[Part(5, padded=True), 8]),
            lambda: ColumnParallelLinear(8, 16, comm, gather_output=True, return_bias=True),
            lambda: ColumnParallelLinear(8, 16, comm, sequence_dim=-1),
            lambda: ColumnParallelLinear.from_linear(nn.Identity(), comm),  # type: ignore[arg-type]
            lambda: RowParallelLinear.from_linear(cut_linear(), comm),
            lambda: ColumnParallelLinear(8, 12, comm, parts=shared),
        ]
    )
    assert texts == [
        "ColumnParallelLinear: out_features over axis 'tensor': its parts are 4 + 8 = 12 elements, but dim 0 has "
        "16: let them sum to it",
        "RowParallelLinear: in_features over axis 'tensor': its parts are 4 + 8 = 12 elements, but dim 1 has "
        "16: let them sum to it",
        "ColumnParallelLinear: out_features over axis 'tensor': a part of 10 elements: 10 does not "
        "divide by 4: use a multiple of 4, or a size that divides 10",
        "ColumnParallelLinear: out_features over axis 'tensor': 6 heads do not divide over 4 ranks, nor 4 "
        "ranks over the heads: use a multiple or a divisor of 4 heads",
        f"ColumnParallelLinear: gather_output=True with {tuple(shared)}: ranks share heads, whose gradients would be "
        "counted several times: use at least 4 heads, or leave it out",
        f"RowParallelLinear: {tuple(shared)}: inputs are neither padded nor held by several ranks, which would count "
        "them several times: use parts that divide by 4",
        f"RowParallelLinear: {(Part(10, padded=True),)}: inputs are neither padded nor held by several ranks, which "
        "would count them several times: use parts that divide by 4",
        f"ColumnParallelLinear: {(Part(5, padded=True), Part(8))}: only a single part can be padded",
        "ColumnParallelLinear: gather_output=True gives the whole output, return_bias=True a shard of the bias to add "
        "to it: leave one of them out",
        "ColumnParallelLinear: sequence_dim=-1 is the dim of the features: give the dim of the sequence",
        "from_linear takes an nn.Linear, not a Identity",
        "from_linear: the weight has shape (2, 8), but the layer declares (8, 8): give a whole nn.Linear",
        "no error",
    ]


def cut_linear() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(linear.weight[:2].detach())
    return linear


def refuse_inputs(mesh: Mesh) -> Any:
    comm, events = mesh.tensor, []
    column = ColumnParallelLinear(8, 16, comm, sequence_dim=1)
    row = RowParallelLinear(16, 8, comm, sequence_dim=1)
    split = RowParallelLinear(16, 8, comm, split_input=True)
    record(comm, events)
    calls = [
        lambda: column(torch.ones(2, 4, 4)),
        lambda: column(torch.ones(2, 4, 3)),
        lambda: column(torch.ones(8)),
        lambda: column(torch.ones(())),
        lambda: row(torch.ones(2, 4, 16)),
        lambda: row(torch.ones(2, 5, 8)),
        lambda: split(torch.ones(2, 5, 8)),
    ]
    return refusals(calls), list(events)


def test_inputs_that_do_not_fit_are_refused_on_every_rank_before_anything_is_sent(world: World) -> None:
    over = "over axis 'tensor': its last dim must be"
    row = "RowParallelLinear: an input of shape"
    expected = [
        f"ColumnParallelLinear: an input of shape (2, 4, 4) {over} 8, in_features=8: this looks like the shard of one "
        "rank: the input is the whole, such as a row-parallel layer's output",
        f"ColumnParallelLinear: an input of shape (2, 4, 3) {over} 8, in_features=8",
        "ColumnParallelLinear: sequence_dim=1 is none of the dims before the last of an input of shape (8,): give an "
        "input of at least 2 dims",
        f"ColumnParallelLinear: an input of shape () {over} 8, in_features=8",
        f"{row} (2, 4, 16) {over} 8, in_features=16 / 2 ranks: this looks like the whole input: give this rank's part, "
        "or split_input=True",
        "RowParallelLinear: the sequence of an input of shape (2, 5, 8) over axis 'tensor': 5 does not divide by 2: "
        "use a multiple of 2, or a size that divides 5",
        f"{row} (2, 5, 8) {over} 16, in_features=16: this looks like the shard of one rank: leave split_input=True out",
    ]
    for texts, sent in world.run(Layout(tensor=2), refuse_inputs):
        for text, wanted in zip(texts, expected, strict=True):
            assert text == wanted
        assert sent == []


def differentiate_twice(mesh: Mesh) -> str:
    layer = ColumnParallelLinear(8, 16, mesh.tensor, dtype=DOUBLE)
    x = wave(1, 2, 8).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        grad.sum().backward()
    return str(caught.value)


def test_a_second_derivative_is_refused(world: World) -> None:
    for text in world.run(Layout(tensor=2), differentiate_twice):
        assert "once_differentiable" in text


def test_a_layer_shows_what_differs_from_the_default() -> None:
    comm = engine.plan_mesh(Layout(tensor=2), 0).tensor
    assert repr(ColumnParallelLinear(4, 6, comm, parts=(2, 4), gather_output=True, sequence_dim=1)) == (
        "ColumnParallelLinear(in_features=4, out_features=6 / 2, bias=True, parts=(2, 4), gather_output=True, "
        "sequence_dim=1)"
    )
    assert repr(RowParallelLinear(6, 4, comm, split_input=True, return_bias=True, bias=False)) == (
        "RowParallelLinear(in_features=6 / 2, out_features=4, bias=False, split_input=True, return_bias=True)"
    )


# ---- autocast and torch.compile --------------------------------------------------------------------------------------


def run_autocast(mesh: Mesh, dim: int | None, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(5)
    block = Block(mesh.tensor, dim, dtype)
    x = here(wave(1, 4, 8, 8).to(dtype), mesh, dim)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        up = block.up(x)
        y = block.down(F.gelu(up))
    y.float().square().sum().backward()
    return {
        "up": up.dtype,
        "dtypes": [p.grad.dtype for p in block.parameters() if p.grad is not None],
        "x": x.grad,
        "y": y.detach(),
        "up.weight": block.up.weight.grad,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_acts_as_on_nn_linear(world: World, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    block = Block(None, None, dtype)
    x = wave(1, 4, 8, 8).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        up = block.up(x)
        y = block.down(F.gelu(up))
    y.float().square().sum().backward()
    # bf16 keeps 8 bits, and a sum of two ranks' halves is rounded once more.
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-6}
    for dim in (None, 1):
        for rank, got in enumerate(world.run(Layout(tensor=2), run_autocast, dim, dtype)):
            assert got["up"] == up.dtype
            assert got["y"].dtype == y.dtype
            assert set(got["dtypes"]) == {dtype}
            cut = (lambda t: t) if dim is None else (lambda t, rank=rank: t.chunk(2, 1)[rank])
            torch.testing.assert_close(got["y"], cut(y.detach()), **near)
            torch.testing.assert_close(got["x"], cut(x.grad), **near)
            torch.testing.assert_close(got["up.weight"], block.up.weight.grad.chunk(2)[rank], **near)


def run_compiled(mesh: Mesh, backend: str, dim: int | None) -> list[dict[str, Any]]:
    found, traced, plain = [], [], mesh.tensor.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        traced.append(torch.compiler.is_compiling())
        return plain(*args, **options)

    mesh.tensor.all_reduce = all_reduce  # type: ignore[method-assign]
    for compiles in (False, True):
        torch.manual_seed(5)
        block = Block(mesh.tensor, dim)
        x = here(wave(1, 4, 8, 8), mesh, dim)
        y = (torch.compile(block, backend=backend) if compiles else block)(x)
        y.square().sum().backward()
        found.append(outcome(y, x, block))
    assert traced == [False] * (4 if dim is None and mesh.tensor.size > 1 else 0)
    return found


@pytest.mark.parametrize(("backend", "n", "dim"), [("aot_eager", 1, None), ("inductor", 2, None), ("aot_eager", 2, 1)])
def test_a_compiled_block_gives_the_same_numbers(world: World, backend: str, n: int, dim: int | None) -> None:
    """Once through the compiler's own kernels, which take seconds to build."""
    torch.manual_seed(5)
    plain = Block(None)
    x = wave(1, 4, 8, 8).requires_grad_()
    y = plain(x)
    y.square().sum().backward()
    for rank, (eager, compiled) in enumerate(world.run(Layout(tensor=n), run_compiled, backend, dim)):
        for name, value in eager.items():
            torch.testing.assert_close(compiled[name], value, **TIGHT, msg=name)
        for name, full in (("y", y.detach()), ("x", x.grad)):
            expected: Tensor = full if dim is None else full.chunk(n, dim)[rank]
            torch.testing.assert_close(compiled[name], expected, **TIGHT, msg=name)
        torch.testing.assert_close(compiled["up.weight"], plain.up.weight.grad.chunk(n)[rank], **TIGHT)
