"""What is refused before anything is sent, and how calls sit in autograd.

Every rank and element has its own value; results come back from the ranks and are compared here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from engine.errors import LayoutError, UsageError
from tests.values import held, outcome
from tests.world import World

Mesh = engine.Mesh


# ---- refused before anything is sent ---------------------------------------------------------------------------------


def call_wrongly(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    x = held(comm.rank, 4)
    leaf = held(comm.rank, 4).requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "gradient": lambda: comm.all_reduce(leaf),
        "gradient of a result": lambda: comm.broadcast(leaf * 2, 0),
        "gradient of an input": lambda: comm.all_gather(leaf),
        "gradient of an out": lambda: comm.all_gather(x, out=torch.zeros(8, dtype=x.dtype).requires_grad_()),
        "gradient sent": lambda: comm.exchange(sends=[(leaf, 1 - comm.rank)]),
        "device": lambda: comm.all_reduce(torch.empty(4, device="meta")),
        "device of out": lambda: comm.all_gather(x, out=torch.empty(8, dtype=x.dtype, device="meta")),
        "op": lambda: comm.all_reduce(x, "summ"),
        "op of reduce_scatter": lambda: comm.reduce_scatter(x, op="avg"),
        "src": lambda: comm.broadcast(x, 2),
        "src below 0": lambda: comm.broadcast(x, -1),
        "dst": lambda: comm.reduce(x, 7),
        "object src": lambda: comm.broadcast_object(x, 2),
        "send": lambda: comm.send(x, 2),
        "recv from itself": lambda: comm.recv(x, comm.rank),
        "shape of out": lambda: comm.all_gather(x, out=torch.empty(4, dtype=x.dtype)),
        "dtype of out": lambda: comm.reduce_scatter(x, out=torch.empty(2)),
        "division": lambda: comm.reduce_scatter(held(0, 3, 5), 1),
        "dim": lambda: comm.all_gather(x, 1),
        "dim of 0-d": lambda: comm.reduce_scatter(torch.tensor(1.0)),
        "sparse": lambda: comm.all_reduce(x.to_sparse()),
        "no tensor": lambda: comm.all_reduce([1.0, 2.0]),  # type: ignore[call-overload]
        "overlap": lambda: comm.broadcast(held(comm.rank, 1).expand(3), 0),
        "None": lambda: comm.broadcast(None, 0),  # type: ignore[call-overload]
    }
    results: dict[str, Any] = {}
    for name, call in calls.items():
        before = x.clone()
        results[name] = outcome(call)
        assert torch.equal(x, before)
        results[f"{name} afterwards"] = comm.all_reduce(torch.tensor([comm.rank + 1.0])).item()
    with torch.no_grad():
        results["no_grad"] = comm.all_reduce(leaf) is leaf
    results["leaf"] = leaf.detach()
    return results


@pytest.fixture(scope="module")
def refusals(world: World) -> list[dict[str, Any]]:
    return world.run(Layout(data=2), call_wrongly)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        ("gradient", UsageError, "the tensor float64 (4,) takes part in a gradient, which this call would lose"),
        ("gradient of a result", UsageError, "takes part in a gradient"),
        ("gradient of an input", UsageError, "use engine.comm.autograd, or detach() it"),
        ("gradient of an out", UsageError, "takes part in a gradient"),
        ("gradient sent", UsageError, "takes part in a gradient"),
        ("device", UsageError, "the tensor float32 (4,) lies on meta, the group on cpu: move it with .to('cpu')"),
        ("device of out", UsageError, "lies on meta, the group on cpu"),
        ("op", UsageError, "unknown op 'summ' (did you mean 'sum'?): choose sum, mean, max, min, prod"),
        ("op of reduce_scatter", UsageError, "unknown op 'avg'"),
        ("src", UsageError, "src=2 is outside the group: its ranks are 0 to 1, positions inside the group"),
        ("src below 0", UsageError, "src=-1 is outside the group"),
        ("dst", UsageError, "dst=7 is outside the group"),
        ("object src", UsageError, "src=2 is outside the group"),
        ("send", UsageError, "peer=2 is outside the group"),
        ("recv from itself", UsageError, "is this rank itself: copy the tensor instead"),
        ("shape of out", UsageError, "gives torch.float64 (8,)"),
        ("dtype of out", UsageError, "gives torch.float64 (2,)"),
        ("division", LayoutError, "dim 1 of float64 (3, 5) does not divide by the group's 2 ranks"),
        ("dim", UsageError, "dim 1 is outside a tensor of shape (4,)"),
        ("dim of 0-d", UsageError, "dim 0 is outside a tensor of shape ()"),
        ("sparse", UsageError, "tensors are not carried: call to_dense() first"),
        ("no tensor", UsageError, "expected a tensor, got list"),
        ("overlap", UsageError, "broadcast"),
        ("None", UsageError, "expected a tensor, got NoneType"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(
    refusals: list[dict[str, Any]], call: str, kind: type[Exception], text: str
) -> None:
    for got in refusals:
        name, message = got[call]
        assert name == kind.__name__
        assert text in message
        assert got[f"{call} afterwards"] == 3.0, "the ranks are still in step"


def test_an_error_names_the_rank_its_coordinate_the_call_and_the_axis(refusals: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(refusals):
        assert got["op"][1].startswith(f"rank {rank} (data {rank}, pipeline 0, tensor 0): all_reduce on axis 'data': ")


def test_without_gradients_a_parameter_is_taken(refusals: list[dict[str, Any]]) -> None:
    for got in refusals:
        assert got["no_grad"] is True
        assert torch.equal(got["leaf"], held(0, 4) + held(1, 4))


# ---- gradients notice ------------------------------------------------------------------------------------------------


def change_a_saved_tensor(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data
    other = 1 - comm.rank
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda y: comm.all_reduce(y),
        "all_reduce async": lambda y: comm.all_reduce(y, async_op=True).wait(),
        "all_reduce strided": lambda y: comm.all_reduce(y[::2]),
        "broadcast": lambda y: comm.broadcast(y, 0),
        "broadcast strided": lambda y: comm.broadcast(y[1::2], 0),
        "reduce": lambda y: comm.reduce(y, 0),
        "recv": lambda y: comm.exchange([(y.clone(), other)], [(y, other)]),
        "gather out": lambda y: comm.all_gather(y[:2].clone(), out=y),
        "scatter out": lambda y: comm.reduce_scatter(torch.cat([y, y]), out=y),
        "nothing": lambda y: comm.all_gather(y),
    }
    results = {}
    for name, call in calls.items():
        x = held(comm.rank, 4).requires_grad_()
        y = x.exp()  # its backward needs y itself
        with torch.no_grad():
            call(y.detach())
        results[name] = outcome(lambda y=y, x=x: torch.autograd.grad(y.sum(), x)[0])
        comm.barrier()
    return results


def test_autograd_notices_that_a_saved_tensor_was_communicated_into(world: World) -> None:
    results = world.run(Layout(data=2), change_a_saved_tensor)
    for rank, got in enumerate(results):
        for call, result in got.items():
            if call == "nothing" or (call == "reduce" and rank == 1):
                torch.testing.assert_close(result, held(rank, 4).exp(), msg=f"{call} must leave the tensor alone")
            elif call.startswith("broadcast") and rank == 0:
                # The source's values stay: raising and the right gradient are both right.
                assert isinstance(result, tuple) or torch.equal(result, held(0, 4).exp())
            else:
                assert isinstance(result, tuple), f"{call}: the gradient was computed from changed values: {result}"
                assert "modified by an inplace operation" in result[1]


def inside_inference_mode(mesh: Mesh) -> list[Any]:
    with torch.inference_mode():
        x = held(mesh.data.rank, 4)
        mesh.data.all_reduce(x)
        y = held(mesh.data.rank, 4)
        mesh.data.broadcast(y[::2], 1)
        return [x.clone(), y.clone(), mesh.data.any(mesh.rank == 1)]


def test_calls_work_in_inference_mode(world: World) -> None:
    for rank, (x, y, flag) in enumerate(world.run(Layout(data=2), inside_inference_mode)):
        expected = held(rank, 4)
        expected[::2] = held(1, 4)[::2]
        assert torch.equal(x, held(0, 4) + held(1, 4))
        assert torch.equal(y, expected)
        assert flag is True
