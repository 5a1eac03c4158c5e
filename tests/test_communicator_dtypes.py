"""Which dtypes are reduced and moved, and which are refused by name.

Every rank and element has its own value; results come back from the ranks and are compared here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import engine
from engine import Layout
from engine.errors import DtypeError
from tests.values import OPS, held, outcome
from tests.world import World

Mesh = engine.Mesh


# ---- dtypes ------------------------------------------------------------------------------------------------

REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
MOVED = (*REDUCED, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn)
REFUSED = (torch.int16, torch.uint16, torch.float8_e4m3fn)


def has_meaning(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("sum", "mean")
    return dtype.is_floating_point or op != "mean"


def typed(rank: int, dtype: torch.dtype) -> Tensor:
    """[1, 2, 0, 5] on rank 0 and [2, 2, 0, 0] on rank 1."""
    return torch.tensor([[1.0, 2.0, 0.0, 5.0], [2.0, 2.0, 0.0, 0.0]][rank]).to(dtype)


def combined(dtype: torch.dtype, op: str) -> Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, True, False, op in ("sum", "max")])
    literal = {
        "sum": [3, 4, 0, 5],
        "mean": [1.5, 2, 0, 2.5],
        "max": [2, 2, 0, 5],
        "min": [1, 2, 0, 0],
        "prod": [2, 4, 0, 0],
    }
    return torch.tensor(literal[op]).to(dtype)


def reduce_dtypes(mesh: Mesh) -> dict[str, Any]:
    comm, results = mesh.data, {}
    for dtype in (*REDUCED, *REFUSED):
        for op in OPS:
            x = typed(comm.rank, dtype)
            results[f"{dtype} {op}"] = (
                outcome(lambda x=x, o=op: comm.all_reduce(x.clone(), o)),
                outcome(lambda x=x, o=op: comm.reduce(x.clone(), 1, o)),
                outcome(lambda x=x, o=op: comm.reduce_scatter(x.clone(), op=o)),
            )
            results[f"{dtype} {op} afterwards"] = comm.any(comm.rank == 1)
    return results


def test_each_dtype_is_reduced_rightly_or_refused_by_name_before_anything_is_sent(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), reduce_dtypes)):
        for dtype in (*REDUCED, *REFUSED):
            for op in OPS:
                everywhere, at_one, part = got[f"{dtype} {op}"]
                assert got[f"{dtype} {op} afterwards"] is True
                if dtype in REDUCED and has_meaning(dtype, op):
                    total = combined(dtype, op)
                    expected = (total, total if rank == 1 else typed(0, dtype), total[2 * rank : 2 * rank + 2])
                    for call, result, wanted in zip(
                        ("all_reduce", "reduce", "reduce_scatter"), (everywhere, at_one, part), expected, strict=True
                    ):
                        assert isinstance(result, Tensor), f"{call} {op} of {dtype}: {result}"
                        assert result.dtype == dtype
                        assert torch.equal(result, wanted), f"{call} {op} of {dtype}"
                else:
                    for name, text in (everywhere, at_one, part):
                        assert name == DtypeError.__name__
                        assert str(dtype) in text
                        assert "cpu" in text or dtype in REDUCED, "names the backend's device"


def test_the_dtype_error_says_which_dtypes_are_reduced(world: World) -> None:
    _, text = world.run(Layout(data=2), reduce_dtypes)[1]["torch.int16 sum"][0]
    assert text == (
        "rank 1 (data 1, pipeline 0, tensor 0): all_reduce on axis 'data': the backend of cpu does not reduce "
        "torch.int16: use one of bfloat16, bool, complex128, complex64, float16, float32, float64, int32, int64, int8, "
        "uint8"
    )
    assert issubclass(DtypeError, TypeError)


def move_dtypes(mesh: Mesh) -> dict[str, Any]:
    comm, results = mesh.data, {}
    other = 1 - comm.rank
    for dtype in MOVED:
        x = held(comm.rank, 3).to(dtype)
        moved = (
            comm.broadcast(x.clone(), 1),
            comm.all_gather(x),
            comm.exchange([(x, other)], [(torch.empty_like(x), other)])[0],
            comm.all_gather(torch.stack([x, x])[:, 1:], 1),
        )
        # As bytes, because pickle does not carry every dtype back.
        results[str(dtype)] = [(str(result.dtype), result.view(torch.uint8)) for result in moved]
    return results


def test_every_dtype_is_moved(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), move_dtypes)):
        for dtype in MOVED:
            parts = [held(r, 3).to(dtype).view(torch.uint8) for r in range(2)]
            pairs = [torch.stack([held(r, 3).to(dtype)] * 2)[:, 1:].contiguous().view(torch.uint8) for r in range(2)]
            expected = [parts[1], torch.cat(parts), parts[1 - rank], torch.cat(pairs, 1)]
            for (kind, result), wanted in zip(got[str(dtype)], expected, strict=True):
                assert kind == str(dtype)
                assert torch.equal(result, wanted), dtype


def conjugated(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.data

    def mine() -> Tensor:
        return torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (comm.rank + 1)

    return {
        "all_reduce": outcome(lambda: comm.all_reduce(mine().conj()).resolve_conj()),
        "broadcast": outcome(lambda: comm.broadcast(mine().conj(), 1).resolve_conj()),
        "all_gather": outcome(lambda: comm.all_gather(mine().conj()).resolve_conj()),
        "reduce_scatter": outcome(lambda: comm.reduce_scatter(mine().conj()).resolve_conj()),
        "exchange": outcome(
            lambda: comm.exchange([(mine().conj(), 1 - comm.rank)], [(mine(), 1 - comm.rank)])[0].resolve_conj()
        ),
    }


def test_lazily_conjugated_views_are_carried_by_value(world: World) -> None:
    first = torch.tensor([1 - 2j, 3 + 1j], dtype=torch.complex128)
    for rank, got in enumerate(world.run(Layout(data=2), conjugated)):
        expected = {
            "all_reduce": 3 * first,
            "broadcast": 2 * first,
            "all_gather": torch.cat([first, 2 * first]),
            "reduce_scatter": 3 * first[rank : rank + 1],
            "exchange": (2 - rank) * first,
        }
        for call, wanted in expected.items():
            assert isinstance(got[call], Tensor), f"{call}: {got[call]}"
            assert torch.equal(got[call], wanted), call


def negated(mesh: Mesh) -> dict[str, Any]:
    """The imaginary part of a conjugated scalar is contiguous and lazily negated: -2 on rank 0, -3 on rank 1."""
    comm = mesh.data

    def mine() -> Tensor:
        x = torch.tensor([1 + (comm.rank + 2) * 1j], dtype=torch.complex128).conj().imag
        assert x.is_neg()
        return x

    return {
        "all_reduce": comm.all_reduce(mine(), "max").item(),
        "broadcast": comm.broadcast(mine(), 1).item(),
        "reduce": comm.reduce(mine(), 1).item(),
        "all_gather": comm.all_gather(mine()).tolist(),
        "exchange": comm.exchange([(mine(), 1 - comm.rank)], [(mine(), 1 - comm.rank)])[0].item(),
    }


def test_lazily_negated_views_are_carried_by_value(world: World) -> None:
    for rank, got in enumerate(world.run(Layout(data=2), negated)):
        assert got == {
            "all_reduce": -2.0,
            "broadcast": -3.0,
            "reduce": (-2.0, -5.0)[rank],
            "all_gather": [-2.0, -3.0],
            "exchange": (-3.0, -2.0)[rank],
        }


# ---- many flags ------------------------------------------------------------------------------------------------------


class Alike:
    """A transport of 256 ranks that all hold what this one holds, reduced in the dtype that is handed to it."""

    name, ranks = "alike", tuple(range(256))

    def all_reduce(self, x: Tensor, op: str) -> list[Any]:
        x.copy_(getattr(torch.stack([x.clone()] * 256), {"max": "amax", "min": "amin"}.get(op, op))(0).to(x.dtype))
        return []

    def exchange(self, *_: Any) -> list[Any]:
        raise AssertionError("the flags of 256 ranks are reduced by the backend's own call")

    def wait(self, works: list[Any]) -> None:
        assert not works


def test_256_flags_do_not_overflow_to_none() -> None:
    transport: Any = Alike()
    comm = engine.Communicator("data", range(256), 3, torch.device("cpu"), where="rank 3", transport=transport)
    x = torch.ones(1, dtype=torch.uint8)
    transport.all_reduce(x, "sum")
    assert x.item() == 0, "the mistake that this test is for"
    assert (comm.any(True), comm.any(False)) == (True, False)
    for op in ("sum", "max", "min", "prod"):
        for value in (True, False):
            assert comm.all_reduce(torch.tensor([value]), op, algorithm="native").tolist() == [value], op
