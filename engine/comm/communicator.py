"""The collectives of one group of ranks, with the rules every backend forgets: strides, types, averages, clear errors.

Shapes below are local ones; `size` is the number of ranks of the group and every rank number is a position inside it.
All ranks of the group must make the same calls in the same order with equal shapes and dtypes; other ranks see
nothing. `algorithm` names the pattern in which ranks talk, None takes what the table of `engine.comm.choice` says; all
give the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from engine.comm.algorithms.compress import WIRE_DTYPES
from engine.comm.algorithms.plan import block
from engine.comm.arguments import (
    average,
    check_dim,
    check_peer,
    flat,
    mark_changed,
    on_the_wire,
    overlap,
    plain,
    result_like,
    same_memory,
    scattered_shape,
    write,
)
from engine.comm.call import Call
from engine.comm.messages import Messages
from engine.comm.objects import broadcast_object
from engine.comm.transport import Calls, Works
from engine.comm.work import Work
from engine.errors import DtypeError, UsageError

Op = Literal["sum", "mean", "max", "min", "prod"]
Wire = torch.dtype | None


class Communicator(Messages):
    """The collectives of one group. `engine.init` makes one for each axis; pass it to whatever communicates.

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
        if self.size > 1 and self._choose(call, x.numel() * x.element_size(), algorithm, async_op) != "native":
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
        if self.size == 1 or x.numel() == 0:
            return self._local(x, async_op)
        buffer = plain(x)
        mark_changed(x)
        native = self._choose(call, x.numel() * x.element_size(), algorithm, async_op) == "native"
        return self._run(
            call,
            lambda t: t.broadcast(buffer, src) if native else self._planned_run(call, flat(buffer), "sum"),
            lambda: x if buffer is x or self.rank == src else write(x, buffer),
            (x, buffer),
            async_op,
        )

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
        if self.size > 1 and self._choose(call, x.numel() * x.element_size(), algorithm, async_op) != "native":
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
        if direct and overlap(result, wire) and result.data_ptr() != wire[self.rank * shape[0] :].data_ptr():
            raise UsageError(
                f"{call}: out shares memory with the input and is not this rank's part of it: give it its own"
            )
        into = on_the_wire(target, op)[0]
        native = (
            wire_dtype is not None or self._choose(call, x.numel() * x.element_size(), algorithm, async_op) == "native"
        )

        def start(t: Calls) -> Works:
            if wire_dtype is not None:
                return self._compressed(flat(wire), wire_dtype, flat(into), share=False)
            return t.reduce_scatter(into, wire, wire_op) if native else self._scatter(call, wire, into, wire_op)

        def finish() -> Tensor:
            average(target, op, self.size)
            return result if direct else write(result, target.movedim(0, dim))

        return self._run(call, start, finish, (wire, target, x), async_op)

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
        if direct and overlap(result, wire) and wire.data_ptr() != result[self.rank * x.shape[0] :].data_ptr():
            raise UsageError(
                f"{call}: the input shares memory with out and is not this rank's part of it: give it its own"
            )
        native = self._choose(call, target.numel() * target.element_size(), algorithm, async_op) == "native"
        return self._run(
            call,
            lambda t: t.all_gather(target, wire) if native else self._gather(call, wire, target),
            lambda: result if direct else write(result, target.movedim(0, dim)),
            (wire, target),
            async_op,
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
        )

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of zeros on this group's device. Collectives of this group read it, and views of it, where it
        lies, when the ranks share memory (transport `shm`); elsewhere it is an ordinary tensor.

        All ranks of the group call it with the same shape and dtype. The memory goes back when nothing refers to it
        any more, on all ranks, and may outlive the mesh. Raises UsageError for a negative size, and MemoryShortageError
        on every rank, with what is needed and what is free, before anything is taken.
        """
        sizes = torch.Size(shape)
        call = Call(self._label, "allocate", None)
        if any(size < 0 for size in sizes):
            raise UsageError(f"{call}: shape {tuple(sizes)} has a negative size")
        nbytes = sizes.numel() * dtype.itemsize
        if nbytes and self._transport is not None and self.device.type == "cpu":
            box: list[Tensor | None] = []

            def start(_: Calls) -> Works:
                box.append(self._live(call).allocate(nbytes))
                return []

            memory = self._run(call, start, lambda: box[0], None, False)
            if isinstance(memory, Tensor):
                return memory.view(dtype).view(sizes)
        return torch.zeros(sizes, dtype=dtype, device=self.device)

    # ---- without tensors -------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return once every rank of the group has called."""
        self._agree("barrier", False)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on at least one rank of the group."""
        return self._agree("any", flag)

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Return rank `src`'s `value` (picklable; ignored elsewhere) on every rank."""
        call = Call(self._label, "broadcast_object", None, None, src)
        if self._checks:
            self._compare(call)
        check_peer(call, src, self.size, "src")
        if self.size == 1:
            return value
        box: list[Any] = []

        def start(transport: Calls) -> Works:
            box.append(broadcast_object(transport, value, src, self.rank, self.device))
            return []

        return self._run(call, start, lambda: box[0], None, False)

    def check_equal(self, what: str, value: object) -> None:
        """Check that `repr(value)` is the same on every rank of the group: a configuration, a list of names and shapes.

        Raises UsageError on every rank when it is not, naming the first rank that differs from rank 0 and both values.
        """
        if self.size == 1 or self._planned:
            return
        text = repr(value)
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int32, device=self.device)
        digests = self.all_gather(digest[None])
        different = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
        if not different:
            return
        first = self.broadcast_object(text, 0)
        other = self.broadcast_object(text, different[0])
        raise UsageError(
            f"{what} differs over axis {self.name!r}: rank {different[0]} (global {self.ranks[different[0]]}) has "
            f"{_around(other, first)}, rank 0 (global {self.ranks[0]}) has {_around(first, other)}: "
            f"start every rank with the same"
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
        if receives:
            mark_changed(x)
        elif buffer is x and (call.algorithm == "native" or any(r.receives for r in self._plan(call, x.numel())[0])):
            # A rank that only contributes gives a copy: backends, and the branches of trees, use it as scratch space.
            buffer = x.clone()
        wire, wire_op = on_the_wire(buffer, op)

        def finish() -> Tensor:
            if not receives:
                return x
            average(buffer, op, self.size)
            return x if buffer is x else write(x, buffer)

        return self._run(call, lambda t: start(t, wire, wire_op), finish, (x, buffer, wire), async_op)

    def _agree(self, name: str, flag: bool) -> bool:
        """Return whether `flag` is true anywhere, as a call named `name`."""
        box = torch.tensor(int(flag), dtype=torch.int32, device=self.device)
        if self.size == 1:
            return flag
        call = self._call(name, box, (box,), "max")
        return bool(self._run(call, lambda t: t.all_reduce(box, "max"), box.item, box, False))

    def _planned_run(self, call: Call, vector: Tensor, op: str) -> Works:
        """Start the call's plan over the flat vector that it changes."""
        plan, _ = self._plan(call, vector.numel())
        return self._running(plan, lambda start, stop: vector[start:stop], op, vector)

    def _scatter(self, call: Call, wire: Tensor, into: Tensor, op: str) -> Works:
        """Start a reduce-scatter by plan: the own block lies in `into`, the others are read where they are unless the
        plan uses them for partial sums.
        """
        vector, own = flat(wire), flat(into)
        plan, own_only = self._plan(call, vector.numel())
        first, last = block(vector.numel(), self.size, self.rank)
        initial: Tensor | None = vector[first:last]
        if not own_only:
            write(own, vector[first:last])
            vector, initial = vector.clone(), None

        def at(start: int, stop: int) -> Tensor:
            inside = first <= start and stop <= last
            return own[start - first : stop - first] if inside else vector[start:stop]

        return self._running(plan, at, op, own, initial)

    def _gather(self, call: Call, wire: Tensor, target: Tensor) -> Works:
        """Start an all-gather by plan: the own block is sent from where it lies, and copied while it flies."""
        vector, source = flat(target), flat(wire)
        first, last = block(vector.numel(), self.size, self.rank)

        def at(start: int, stop: int) -> Tensor:
            inside = first <= start and stop <= last
            return source[start - first : stop - first] if inside else vector[start:stop]

        works = self._running(self._plan(call, vector.numel())[0], at, "sum", vector)
        own = vector[first:last]
        if own.data_ptr() != source.data_ptr():
            write(own, source)
        return works

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


def _around(text: str, other: str, width: int = 160) -> str:
    """Return the part of `text` around its first difference from `other`."""
    if len(text) <= width:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, same - width // 2)
    return ("..." if start else "") + text[start : start + width] + ("..." if start + width < len(text) else "")
