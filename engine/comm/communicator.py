"""The collectives of one group of ranks, with the rules every backend forgets: strides, types, averages, clear errors.

Shapes below are local ones; `size` is the number of ranks of the group and every rank number is a position inside it.
All ranks of the group must make the same calls in the same order with equal shapes and dtypes; other ranks see
nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from engine.comm.arguments import (
    average,
    check_dim,
    check_peer,
    check_reduction,
    check_tensors,
    mark_changed,
    on_the_wire,
    overlap,
    plain,
    result_like,
    same_memory,
    scattered_shape,
    shape_of,
    write,
)
from engine.comm.transport import TorchTransport, Works
from engine.comm.work import Work
from engine.errors import CommunicationError, EngineError, UsageError

_R = TypeVar("_R")
Op = Literal["sum", "mean", "max", "min", "prod"]


class Communicator:
    """The collectives of one group. `engine.init` makes one for each axis; pass it to whatever communicates.

    In-place calls act on the caller's own tensor, whatever its strides. A tensor that takes part in a gradient is
    refused: the differentiable pairs are in `engine.comm.autograd`. Tensor calls take `async_op=True` and then return
    a `Work`.

    Reductions: sum, mean, max, min, prod. mean is the sum, divided here by `size`, for floating and complex dtypes.
    bool is reduced as a truth value (sum and max: any, min and prod: all). uint8 sums wrap at 256, as in torch.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        *,
        where: str,
        transport: TorchTransport | None,
        planned: bool = False,
    ) -> None:
        """Made by `engine.init`. `where` says in errors who this rank is; a group of one needs no transport."""
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.device = device
        self._where = where
        self._transport = transport
        self._planned = planned
        self._closed = False

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def transport(self) -> str:
        """How bytes move: `torch`, `local` for a group of one, `plan` for a mesh without processes."""
        if self._planned:
            return "plan"
        return self._transport.name if self._transport else "local"

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size}, {self.transport} on {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """A copied model talks over the same group."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError(f"communicator {self.name!r} belongs to running processes and cannot be pickled")

    # ---- in place --------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(self, x: Tensor, op: Op = "sum", *, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor, op: Op = "sum", *, async_op: Literal[True]) -> Work: ...
    def all_reduce(self, x: Tensor, op: Op = "sum", *, async_op: bool = False) -> Tensor | Work:
        """Reduce `x` over the group, in place on every rank; returns it.

        Raises DtypeError for a dtype that the backend does not reduce, UsageError for a wrong call (nothing is sent
        then), CommunicationError when a peer fails or the time limit passes.
        """
        self._check("all_reduce", x, writes=[x], op=op)
        return self._reduce_in_place("all_reduce", x, op, async_op, lambda t, buffer, o: t.all_reduce(buffer, o))

    @overload
    def broadcast(self, x: Tensor, src: int, *, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def broadcast(self, x: Tensor, src: int, *, async_op: Literal[True]) -> Work: ...
    def broadcast(self, x: Tensor, src: int, *, async_op: bool = False) -> Tensor | Work:
        """Fill `x` on every rank with the values of rank `src`; returns it. Any dtype. Raises as `all_reduce`."""
        check_peer(self._check("broadcast", x, writes=[x]), src, self.size, "src")
        if self.size == 1 or x.numel() == 0:
            return self._local(x, async_op)
        buffer = plain(x)
        mark_changed(x)
        return self._start(
            f"broadcast from {src} of {shape_of(x)}",
            lambda t: t.broadcast(buffer, src),
            lambda: x if buffer is x or self.rank == src else write(x, buffer),
            (x, buffer),
            async_op,
        )

    @overload
    def reduce(self, x: Tensor, dst: int, op: Op = "sum", *, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def reduce(self, x: Tensor, dst: int, op: Op = "sum", *, async_op: Literal[True]) -> Work: ...
    def reduce(self, x: Tensor, dst: int, op: Op = "sum", *, async_op: bool = False) -> Tensor | Work:
        """Reduce `x` over the group into rank `dst`'s tensor; the others' stay as they were. Returns `x`. Raises as
        `all_reduce`.
        """
        check_peer(self._check("reduce", x, writes=[x], op=op), dst, self.size, "dst")
        return self._reduce_in_place("reduce", x, op, async_op, lambda t, buffer, o: t.reduce(buffer, dst, o), dst)

    # ---- into another tensor ---------------------------------------------------------------------------------------

    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = 0, *, op: Op = "sum", out: Tensor | None = None, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, x: Tensor, dim: int = 0, *, op: Op = "sum", out: Tensor | None = None, async_op: Literal[True]
    ) -> Work: ...
    def reduce_scatter(
        self, x: Tensor, dim: int = 0, *, op: Op = "sum", out: Tensor | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Reduce `x` over the group and return this rank's equal part along `dim`.

        `x`: the same shape on every rank, x.shape[dim] divisible by size. `out`: shape of `x` with x.shape[dim] /
        size at `dim`; it may be this rank's part of `x`. `x` is otherwise unchanged. Raises as `all_reduce`, and
        LayoutError for a dim that does not divide.
        """
        label = self._check("reduce_scatter", x, writes=[] if out is None else [out], op=op)
        dim = check_dim(label, x, dim)
        shape = scattered_shape(label, x, dim, self.size)
        result = result_like(label, x, shape, out)
        if x.numel() == 0:
            return self._local(result, async_op)
        if self.size == 1:
            return self._local(result if same_memory(result, x) else write(result, x), async_op)
        wire, wire_op = on_the_wire(plain(x.movedim(dim, 0)), op)
        target = result if dim == 0 and plain(result) is result else torch.empty_like(wire[: shape[dim]], dtype=x.dtype)

        def finish() -> Tensor:
            average(target, op, self.size)
            return result if target is result else write(result, target.movedim(0, dim))

        return self._start(
            f"reduce_scatter({op}) of {shape_of(x)} along dim {dim}",
            lambda t: t.reduce_scatter(on_the_wire(target, op)[0], wire, wire_op),
            finish,
            (wire, target, x),
            async_op,
        )

    @overload
    def all_gather(
        self, x: Tensor, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def all_gather(self, x: Tensor, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[True]) -> Work: ...
    def all_gather(
        self, x: Tensor, dim: int = 0, *, out: Tensor | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Return every rank's `x`, joined along `dim` in rank order. Any dtype.

        `x`: the same shape on every rank. `out`: shape of `x` with size * x.shape[dim] at `dim`; `x` may be this
        rank's part of it. Raises as `all_reduce`.
        """
        label = self._check("all_gather", x, writes=[] if out is None else [out])
        dim = check_dim(label, x, dim)
        shape = list(x.shape)
        shape[dim] *= self.size
        result = result_like(label, x, shape, out)
        if x.numel() == 0:
            return self._local(result, async_op)
        if self.size == 1:
            return self._local(result if same_memory(result, x) else write(result, x), async_op)
        wire = plain(x.movedim(dim, 0))
        direct = dim == 0 and plain(result) is result
        target = result if direct else wire.new_empty((self.size * wire.shape[0], *wire.shape[1:]))
        return self._start(
            f"all_gather of {shape_of(x)} along dim {dim}",
            lambda t: t.all_gather(target, wire),
            lambda: result if direct else write(result, target.movedim(0, dim)),
            (wire, target),
            async_op,
        )

    # ---- point to point --------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to rank `dst`, which must call `recv`. Blocks until it does: two ranks that both send first never
        end, use `exchange`. Raises as `all_reduce`.
        """
        self.exchange(sends=[(x, dst)])

    def recv(self, out: Tensor, src: int) -> Tensor:
        """Fill `out` with what rank `src` sends, and return it. Shape and dtype must be the sender's. Raises as
        `all_reduce`.
        """
        self.exchange(recvs=[(out, src)])
        return out

    @overload
    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]] = (),
        recvs: Sequence[tuple[Tensor, int]] = (),
        *,
        async_op: Literal[False] = False,
    ) -> list[Tensor]: ...
    @overload
    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]] = (),
        recvs: Sequence[tuple[Tensor, int]] = (),
        *,
        async_op: Literal[True],
    ) -> Work: ...
    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]] = (),
        recvs: Sequence[tuple[Tensor, int]] = (),
        *,
        async_op: bool = False,
    ) -> list[Tensor] | Work:
        """Start all sends and receives together and return the received tensors: pairs in both directions cannot
        deadlock.

        `sends`: (tensor, destination), `recvs`: (tensor to fill, source). Messages from one rank to another arrive in
        the order in which both sides list them. Only the ranks that are named take part. A sent tensor must not
        change before `wait`. Raises as `all_reduce`.
        """
        label = self._check("exchange", *(x for x, _ in sends), writes=[x for x, _ in recvs])
        for _, peer in (*sends, *recvs):
            check_peer(label, peer, self.size, "peer")
            if peer == self.rank:
                raise UsageError(f"{label}: peer {peer} is this rank itself: copy the tensor instead")
        into = [(x, plain(x), peer) for x, peer in recvs]
        filled = [buffer for _, buffer, _ in into]
        if any(overlap(a, b) for i, a in enumerate(filled) for b in filled[:i]):
            raise UsageError(f"{label}: two received tensors share memory: give each its own")
        # A message must not change before it has left: one that lies where another arrives travels as a copy.
        wire = [(plain(x), peer) for x, peer in sends if x.numel()]
        wire = [(x.clone() if any(overlap(x, buffer) for buffer in filled) else x, peer) for x, peer in wire]
        for x, _ in recvs:
            mark_changed(x)
        listed = [f"to {p} {shape_of(x)}" for x, p in sends] + [f"from {p} {shape_of(x)}" for x, p in recvs]
        return self._start(
            f"exchange ({', '.join(listed)})",
            lambda t: t.exchange(wire, [(buffer, p) for _, buffer, p in into if buffer.numel()]),
            lambda: [x if buffer is x else write(x, buffer) for x, buffer, _ in into],
            (wire, into),
            async_op,
        )

    # ---- without tensors -------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return once every rank of the group has called. Raises CommunicationError as the others."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on at least one rank of the group. Raises CommunicationError as the others."""
        box = torch.tensor(int(flag), dtype=torch.int32, device=self.device)
        return bool(self.all_reduce(box, "max").item())

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Return rank `src`'s `value` (picklable; ignored elsewhere) on every rank. Raises as `all_reduce`."""
        check_peer(self._label("broadcast_object"), src, self.size, "src")
        if self.size == 1:
            return value
        started = time.monotonic()
        try:
            return self._live("broadcast_object").broadcast_object(value, src, self.device)
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise self._failure(f"broadcast_object from {src}", error, time.monotonic() - started) from error

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

    def close(self) -> None:
        """Drop the process group. Called by Mesh.close; every later call that would send raises."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    def _reduce_in_place(
        self,
        name: str,
        x: Tensor,
        op: str,
        async_op: bool,
        start: Callable[[TorchTransport, Tensor, str], Works],
        dst: int | None = None,
    ) -> Tensor | Work:
        if self.size == 1 or x.numel() == 0:
            return self._local(x, async_op)
        receives = dst is None or dst == self.rank
        # A rank that only contributes gives a copy: backends use the tensor as scratch space.
        buffer = plain(x)
        if receives:
            mark_changed(x)
        elif buffer is x:
            buffer = x.clone()
        wire, wire_op = on_the_wire(buffer, op)

        def finish() -> Tensor:
            if not receives:
                return x
            average(buffer, op, self.size)
            return x if buffer is x else write(x, buffer)

        what = f"{name}({op}) of {shape_of(x)}" + ("" if dst is None else f" to {dst}")
        return self._start(what, lambda t: start(t, wire, wire_op), finish, (x, buffer), async_op)

    def _start(
        self,
        what: str,
        start: Callable[[TorchTransport], Works],
        finish: Callable[[], _R],
        buffers: object,
        async_op: bool,
    ) -> _R | Work:
        transport = self._live(what)
        started = time.monotonic()
        try:
            works = start(transport)
        except RuntimeError as error:
            raise self._failure(what, error, time.monotonic() - started) from error
        work = Work(partial(self._wait, what, works, started), finish, buffers)
        if async_op:
            return work
        result: _R = work.wait()
        return result

    def _local(self, result: _R, async_op: bool) -> _R | Work:
        """Hand back what a group of one, or an empty tensor, gives without sending."""
        return Work(lambda: None, lambda: result, None) if async_op else result

    def _wait(self, what: str, works: Works, started: float) -> None:
        try:
            if works:
                self._live(what).wait(works)
        except RuntimeError as error:
            raise self._failure(what, error, time.monotonic() - started) from error

    def _live(self, what: str) -> TorchTransport:
        if self._planned:
            raise UsageError(f"{self._label(what)}: this mesh is a plan without processes; nothing can be sent on it")
        if self._closed:
            raise UsageError(f"{self._label(what)}: the mesh is closed: communicate inside `with engine.init(...)`")
        if self._transport is None:
            raise UsageError(f"{self._label(what)}: this group has one rank, so there is no peer to send to")
        return self._transport

    def _check(self, name: str, *reads: Tensor, writes: Sequence[Tensor] = (), op: str | None = None) -> str:
        """Check a call's tensors, the first of which is reduced by `op`; return who calls what, for further errors."""
        label = self._label(name)
        check_tensors(label, reads, writes, self.device)
        if op is not None:
            check_reduction(label, reads[0], op, self.device)
        return label

    def _label(self, what: str) -> str:
        return f"{self._where}: {what} on axis {self.name!r}"

    def _failure(self, what: str, error: Exception, seconds: float) -> CommunicationError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CommunicationError(
            f"{self._label(what)} failed after {seconds:.1f} s: {reason}. Another rank has stopped, left this call out "
            f"or called it with other sizes: the first error of ranks {', '.join(map(str, self.ranks))} tells the cause"
        )


def _around(text: str, other: str, width: int = 160) -> str:
    """Return the part of `text` around its first difference from `other`."""
    if len(text) <= width:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, same - width // 2)
    return ("..." if start else "") + text[start : start + width] + ("..." if start + width < len(text) else "")
