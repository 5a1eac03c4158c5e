"""The collectives of one group of ranks, with the rules every backend forgets: strides, types, averages, clear errors.

Shapes below are local ones; `size` is the number of ranks of the group and every rank number is a position inside it.
All ranks of the group must make the same calls in the same order with equal shapes and dtypes; other ranks see
nothing. `algorithm` names the pattern in which ranks talk, None takes what the table of `engine.comm.choice` says; all
give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from engine.comm.agreement import Agreement
from engine.comm.algorithms.compress import WIRE_DTYPES
from engine.comm.arguments import (
    average,
    check_dim,
    check_peer,
    clash,
    flat,
    on_the_wire,
    overlap,
    plain,
    result_like,
    same_memory,
    scattered_shape,
    write,
)
from engine.comm.call import Call
from engine.comm.transport import Calls, Works
from engine.comm.work import Work
from engine.errors import DtypeError, UsageError

Op = Literal["sum", "mean", "max", "min", "prod"]
Wire = torch.dtype | None


class Communicator(Agreement):
    """The collectives of one group. `engine.init` makes one for each axis; pass it to whatever communicates.

    A rank has communicators of the groups that it is in and of no others, so nobody can call from outside a group.

    In-place calls act on the caller's own tensor, whatever its strides. A tensor that takes part in a gradient is
    refused: the differentiable pairs are in `engine.comm.autograd`. Tensor calls take `async_op=True` and then return
    a `Work`.

    Reductions: sum, mean, max, min, prod. mean is the sum, divided here by `size`, for floating and complex dtypes.
    bool is reduced as a truth value (sum and max: any, min and prod: all). uint8 sums wrap at 256, as in torch.

    Raises, all calls: UsageError, LayoutError or DtypeError for a call that cannot work, before anything is sent;
    CommunicationError when a peer fails or the time limit passes, which says what the other ranks are doing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """A copied model talks over the same group."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError(f"communicator {self.name!r} belongs to running processes and cannot be pickled")

    # ---- in place --------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        x: Tensor,
        op: Op = "sum",
        *,
        algorithm: str | None = None,
        wire_dtype: Wire = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        x: Tensor,
        op: Op = "sum",
        *,
        algorithm: str | None = None,
        wire_dtype: Wire = None,
        async_op: Literal[True],
    ) -> Work: ...
    def all_reduce(
        self,
        x: Tensor,
        op: Op = "sum",
        *,
        algorithm: str | None = None,
        wire_dtype: Wire = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Reduce `x` over the group, in place on every rank; returns it.

        wire_dtype: torch.bfloat16 or torch.float16 halves the bytes of a floating sum or mean: sums are in fp32, every
        contribution and the sum are rounded once to the wire's precision, and all ranks end with the same bits. With
        u = 2**-8 for bf16 and 2**-11 for fp16, and the ranks' values cut into chunks of 4096, each result is off by at
        most u times (the sum over ranks of the chunk's largest magnitude + that of the result), to first order.
        """
        call = self._call("all_reduce", x, (x,), op, None, algorithm, wire_dtype)
        if wire_dtype is not None:
            self._check_wire(call, wire_dtype, algorithm)
            return self._in_place(
                call, async_op, lambda _, wire, __: self._compressed(flat(wire), wire_dtype, flat(wire), share=True)
            )
        if self.size > 1 and self._choose(call, x.nbytes, algorithm, async_op) != "native":
            return self._in_place(call, async_op, lambda _, wire, wire_op: self._planned_run(call, flat(wire), wire_op))
        return self._in_place(call, async_op, lambda t, wire, wire_op: t.all_reduce(wire, wire_op))

    @overload
    def broadcast(
        self, x: Tensor, src: int, *, algorithm: str | None = None, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def broadcast(self, x: Tensor, src: int, *, algorithm: str | None = None, async_op: Literal[True]) -> Work: ...
    def broadcast(self, x: Tensor, src: int, *, algorithm: str | None = None, async_op: bool = False) -> Tensor | Work:
        """Fill `x` on every rank with the values of rank `src`; returns it. Any dtype."""
        call = self._call("broadcast", x, (x,), peer=src, algorithm=algorithm)
        check_peer(call, src, self.size, "src")
        nbytes = x.nbytes
        if self.size == 1 or nbytes == 0:
            return self._local(x, async_op)
        buffer = plain(x)
        native = self._choose(call, nbytes, algorithm, async_op) == "native"

        def start(t: Calls) -> Works:
            return t.broadcast(buffer, src) if native else self._planned_run(call, flat(buffer), "sum")

        def finish() -> Tensor:
            return x if buffer is x or self.rank == src else write(x, buffer)

        return self._run(call, start, finish, (x, buffer), async_op, changes=x)

    @overload
    def reduce(
        self, x: Tensor, dst: int, op: Op = "sum", *, algorithm: str | None = None, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def reduce(
        self, x: Tensor, dst: int, op: Op = "sum", *, algorithm: str | None = None, async_op: Literal[True]
    ) -> Work: ...
    def reduce(
        self, x: Tensor, dst: int, op: Op = "sum", *, algorithm: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Reduce `x` over the group into rank `dst`'s tensor; the others' stay as they were. Returns `x`."""
        call = self._call("reduce", x, (x,), op, dst, algorithm)
        check_peer(call, dst, self.size, "dst")
        if self.size > 1 and self._choose(call, x.nbytes, algorithm, async_op) != "native":
            return self._in_place(call, async_op, lambda _, wire, wire_op: self._planned_run(call, flat(wire), wire_op))
        return self._in_place(call, async_op, lambda t, buffer, wire_op: t.reduce(buffer, dst, wire_op))

    # ---- into another tensor ---------------------------------------------------------------------------------------

    @overload
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        algorithm: str | None = None,
        wire_dtype: Wire = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        algorithm: str | None = None,
        wire_dtype: Wire = None,
        async_op: Literal[True],
    ) -> Work: ...
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        algorithm: str | None = None,
        wire_dtype: Wire = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Reduce `x` over the group and return this rank's equal part along `dim`.

        `x`: the same shape on every rank, x.shape[dim] divisible by size. `out`: shape of `x` with x.shape[dim] /
        size at `dim`; it may be this rank's part of `x`. `x` is otherwise unchanged. wire_dtype: as in `all_reduce`,
        without the rounding of the sum. Raises LayoutError for a dim that does not divide.
        """
        call = self._call("reduce_scatter", x, () if out is None else (out,), op, None, algorithm, wire_dtype)
        if wire_dtype is not None:
            self._check_wire(call, wire_dtype, algorithm)
        dim = check_dim(call, x, dim)
        shape = scattered_shape(call, x, dim, self.size)
        result = result_like(call, x, shape, out)
        if x.numel() == 0:
            return self._local(result, async_op)
        if self.size == 1:
            return self._local(result if same_memory(result, x) else write(result, x), async_op)
        wire, wire_op = on_the_wire(plain(x if dim == 0 else x.movedim(dim, 0)), op)
        direct = dim == 0 and plain(result) is result
        target = result if direct else torch.empty_like(wire[: shape[dim]], dtype=x.dtype)
        if direct and out is not None and clash(result, wire, self.rank):
            raise UsageError(
                f"{call}: out shares memory with the input and is not this rank's part of it: give it its own"
            )
        into = on_the_wire(target, op)[0]
        native = wire_dtype is not None or self._choose(call, x.nbytes, algorithm, async_op) == "native"

        def start(t: Calls) -> Works:
            if wire_dtype is not None:
                return self._compressed(flat(wire), wire_dtype, flat(into), share=False)
            return t.reduce_scatter(into, wire, wire_op) if native else self._scatter(call, wire, into, wire_op)

        def finish() -> Tensor:
            average(target, op, self.size)
            return result if direct else write(result, target.movedim(0, dim))

        return self._run(call, start, finish, (wire, target, x), async_op, changes=result)

    @overload
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        out: Tensor | None = None,
        algorithm: str | None = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        out: Tensor | None = None,
        algorithm: str | None = None,
        async_op: Literal[True],
    ) -> Work: ...
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        out: Tensor | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Return every rank's `x`, joined along `dim` in rank order. Any dtype.

        `x`: the same shape on every rank. `out`: shape of `x` with size * x.shape[dim] at `dim`; `x` may be this
        rank's part of it.
        """
        call = self._call("all_gather", x, () if out is None else (out,), algorithm=algorithm)
        dim = check_dim(call, x, dim)
        shape = list(x.shape)
        shape[dim] *= self.size
        result = result_like(call, x, shape, out)
        if x.numel() == 0:
            return self._local(result, async_op)
        if self.size == 1:
            return self._local(result if same_memory(result, x) else write(result, x), async_op)
        wire = plain(x if dim == 0 else x.movedim(dim, 0))
        direct = dim == 0 and plain(result) is result
        target = result if direct else wire.new_empty((self.size * wire.shape[0], *wire.shape[1:]))
        if direct and out is not None and clash(wire, result, self.rank):
            raise UsageError(
                f"{call}: the input shares memory with out and is not this rank's part of it: give it its own"
            )
        native = self._choose(call, target.nbytes, algorithm, async_op) == "native"

        return self._run(
            call,
            lambda t: t.all_gather(target, wire) if native else self._gather(call, wire, target),
            lambda: result if direct else write(result, target.movedim(0, dim)),
            (wire, target),
            async_op,
            changes=result,
        )

    @overload
    def all_to_all(
        self, x: Tensor, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def all_to_all(self, x: Tensor, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[True]) -> Work: ...
    def all_to_all(
        self, x: Tensor, dim: int = 0, *, out: Tensor | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Send the j-th of `size` equal parts of `x` along `dim` to rank j; return what came, joined in rank order.

        `x`: the same shape on every rank, x.shape[dim] divisible by size. Any dtype. `out`: the shape of `x`, in memory
        of its own. Raises LayoutError for a dim that does not divide.
        """
        call = self._call("all_to_all", x, () if out is None else (out,))
        dim = check_dim(call, x, dim)
        scattered_shape(call, x, dim, self.size)
        result = result_like(call, x, list(x.shape), out)
        if out is not None and overlap(plain(out), plain(x)):
            raise UsageError(f"{call}: out shares memory with the input, which is still read: give it its own")
        if x.numel() == 0 or self.size == 1:
            return self._local(result if x.numel() == 0 else write(result, x), async_op)
        wire = plain(x if dim == 0 else x.movedim(dim, 0))
        direct = dim == 0 and plain(result) is result
        target = result if direct else torch.empty_like(wire)
        return self._run(
            call,
            lambda t: t.all_to_all(target, wire),
            lambda: result if direct else write(result, target.movedim(0, dim)),
            (wire, target),
            async_op,
            changes=result,
        )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _in_place(self, call: Call, async_op: bool, start: Callable[[Calls, Tensor, str], Works]) -> Tensor | Work:
        """Run a reduction of the call's tensor in place. `start` gets contiguous memory, and the op on the wire."""
        x, op = call.x, call.op
        assert x is not None
        assert op is not None
        if self.size == 1 or x.numel() == 0:
            return self._local(x, async_op)
        receives = call.name == "all_reduce" or call.peer == self.rank
        buffer = plain(x)
        if not receives and buffer is x and self._scratches(call):
            buffer = x.clone()
        wire, wire_op = on_the_wire(buffer, op)

        def finish() -> Tensor:
            if not receives:
                return x
            average(buffer, op, self.size)
            return x if buffer is x else write(x, buffer)

        changes = x if receives else None
        return self._run(call, lambda t: start(t, wire, wire_op), finish, (x, buffer, wire), async_op, changes)

    def _scratches(self, call: Call) -> bool:
        """Whether what a rank only contributes to a reduction is used as scratch space: by some backends, and by the
        branches of trees.
        """
        if call.algorithm == "native":
            return self._transport is None or not self._transport.keeps_inputs
        assert call.x is not None
        return any(each.receives for each in self._plan(call, call.x.numel())[0])

    def _check_wire(self, call: Call, wire: torch.dtype, algorithm: str | None) -> None:
        assert call.x is not None
        if wire not in WIRE_DTYPES:
            raise DtypeError(f"{call}: wire_dtype={wire}: choose torch.bfloat16 or torch.float16")
        if not call.x.is_floating_point() or call.op not in ("sum", "mean"):
            raise DtypeError(
                f"{call}: wire_dtype is for sums and means of floating dtypes, not {call.op} of {call.x.dtype}"
            )
        if algorithm is not None:
            raise UsageError(f"{call}: wire_dtype has an algorithm of its own: leave algorithm={algorithm!r} out")
