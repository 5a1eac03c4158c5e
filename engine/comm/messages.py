"""The calls of a communicator that are made of single messages: between two ranks, and to or from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from engine.comm.arguments import Stretches, check_peer, mark_changed, overlap, plain, same_memory, write
from engine.comm.call import Call
from engine.comm.channel import Channel
from engine.comm.checks import CheckedExchange
from engine.comm.transport import Calls, Works
from engine.comm.work import Work
from engine.errors import UsageError


class Messages(Channel):
    """The part of `Communicator` that sends messages."""

    # ---- to and from one rank --------------------------------------------------------------------------------------

    @overload
    def gather(
        self, x: Tensor, dst: int, *, out: Sequence[Tensor] | None = None, async_op: Literal[False] = False
    ) -> list[Tensor] | None: ...
    @overload
    def gather(self, x: Tensor, dst: int, *, out: Sequence[Tensor] | None = None, async_op: Literal[True]) -> Work: ...
    def gather(
        self, x: Tensor, dst: int, *, out: Sequence[Tensor] | None = None, async_op: bool = False
    ) -> list[Tensor] | Work | None:
        """Return every rank's `x`, of the same shape, as a list on rank `dst`, and None elsewhere. Any dtype.

        `out`: only on `dst`, the tensors of that list, one for each rank, each of the shape and dtype of `x` and in
        memory of its own, but that the one for `dst` may be `x`; ignored elsewhere.
        """
        call = self._call("gather", x, peer=dst)
        check_peer(call, dst, self.size, "dst")
        if self.rank != dst:
            wire = plain(x)
            if x.numel() == 0:
                return self._local(None, async_op)
            return self._run(
                call, lambda t: t.exchange([(wire, dst)], [], self._new_tag()), lambda: None, wire, async_op
            )
        parts = [x.new_empty(x.shape) for _ in range(self.size)] if out is None else list(out)
        buffers = parts if out is None else self._targets(call, out, x)
        if not same_memory(parts[dst], x):
            write(parts[dst], x)
        if self.size == 1 or x.numel() == 0:
            return self._local(parts, async_op)
        arriving = [(buffer, peer) for peer, buffer in enumerate(buffers) if peer != dst]

        def finish() -> list[Tensor]:
            for buffer, peer in arriving:
                if buffer is not parts[peer]:
                    write(parts[peer], buffer)
            return parts

        return self._run(call, lambda t: t.exchange([], arriving, self._new_tag()), finish, (parts, buffers), async_op)

    @overload
    def scatter(
        self, xs: Sequence[Tensor] | None, out: Tensor, src: int, *, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def scatter(self, xs: Sequence[Tensor] | None, out: Tensor, src: int, *, async_op: Literal[True]) -> Work: ...
    def scatter(self, xs: Sequence[Tensor] | None, out: Tensor, src: int, *, async_op: bool = False) -> Tensor | Work:
        """Fill `out` on rank j with the j-th of rank `src`'s tensors `xs`, one for each rank; returns it. Any dtype.

        `xs`: only on `src`, each of the shape and dtype of `out`; ignored elsewhere.
        """
        call = self._call("scatter", out, (out,), peer=src)
        check_peer(call, src, self.size, "src")
        if self.rank == src:
            self._check_parts(call, xs, out, "src")
        if out.numel() == 0:
            return self._local(out, async_op)
        if self.rank == src:
            assert xs is not None
            wires = [(plain(x), peer) for peer, x in enumerate(xs) if peer != src]
            # What lies where the own part arrives must not change before it has left.
            wires = [(x.clone() if overlap(x, out) else x, peer) for x, peer in wires]
            own = xs[src]
            write(out, own if same_memory(own, out) or not overlap(own, out) else own.clone())
            if self.size == 1:
                return self._local(out, async_op)
            return self._run(call, lambda t: t.exchange(wires, [], self._new_tag()), lambda: out, wires, async_op)
        buffer = plain(out)
        mark_changed(out)
        return self._run(
            call,
            lambda t: t.exchange([], [(buffer, src)], self._new_tag()),
            lambda: out if buffer is out else write(out, buffer),
            (out, buffer),
            async_op,
        )

    # ---- point to point --------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        """Send `x` to rank `dst`, which must call `recv`. Blocks until it does: two ranks that both send first never
        end, use `exchange`.
        """
        self.exchange(sends=[(x, dst)])

    def recv(self, out: Tensor, src: int) -> Tensor:
        """Fill `out` with what rank `src` sends, and return it. Shape and dtype must be the sender's."""
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
        change before `wait`.
        """
        call = self._messages(sends, recvs)
        into = [(x, plain(x), peer) for x, peer in recvs]
        wire = [(plain(x), peer) for x, peer in sends if x.numel()]
        if len(into) + len(wire) > 1:
            filled = Stretches(buffer for _, buffer, _ in into)
            if filled.clash():
                raise UsageError(f"{call}: two received tensors share memory: give each its own")
            # A message must not change before it has left: one that lies where another arrives travels as a copy.
            wire = [(x.clone() if filled.overlap(x) else x, peer) for x, peer in wire]
        arriving = [(buffer, peer) for _, buffer, peer in into if buffer.numel()]
        for x, _ in recvs:
            mark_changed(x)
        if not wire and not arriving and (self.size == 1 or self._transport is not None):
            return self._local([x for x, _ in recvs], async_op)
        call.messages = (wire, arriving)
        return self._run(
            call,
            lambda t: self._start_messages(call, t, wire, arriving),
            lambda: [x if buffer is x else write(x, buffer) for x, buffer, _ in into],
            (wire, into),
            async_op,
        )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _new_tag(self) -> int:
        assert self._messenger is not None
        return self._messenger.tag()

    def _start_messages(
        self,
        call: Call,
        transport: Calls,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> Works:
        messenger = self._messenger
        assert messenger is not None
        if self._checks and self._tagged:
            tags = (messenger.message_tag, messenger.header_tag)
            return [CheckedExchange(call, transport, sends, receives, *tags, self._expected)]
        return transport.exchange(sends, receives, messenger.message_tag)

    def _messages(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> Call:
        """Return the record of an exchange, after checking it."""
        call = Call(self._label, "exchange", None)
        call.messages = (sends, recvs)
        self._check_tensors(call, [x for x, _ in sends], [x for x, _ in recvs])
        for _, peer in (*sends, *recvs):
            check_peer(call, peer, self.size, "peer")
            if peer == self.rank:
                raise UsageError(f"{call}: peer {peer} is this rank itself: copy the tensor instead")
        return call

    def _check_parts(self, call: Call, parts: object, like: Tensor, role: Literal["src", "dst"]) -> None:
        """Check the list that a root gives: to read, as `src`, or to be filled, as `dst`. All are like `like`."""
        if not isinstance(parts, Sequence) or len(parts) != self.size:
            other = "one tensor" if isinstance(parts, Tensor) else str(parts)
            given = f"{len(parts)} tensors" if isinstance(parts, Sequence) else other
            raise UsageError(
                f"{call}: rank {self.rank} is {role} and must give a list of {self.size} tensors, not {given}"
            )
        self._check_tensors(call, *((parts, ()) if role == "src" else ((), parts)))
        for peer, x in enumerate(parts):
            if x.shape != like.shape or x.dtype != like.dtype:
                raise UsageError(
                    f"{call}: the tensor for rank {peer} is {x.dtype} {tuple(x.shape)}, "
                    f"{'out' if role == 'src' else 'x'} is {like.dtype} {tuple(like.shape)}: all are alike"
                )

    def _targets(self, call: Call, out: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """Return the memory into which the parts of a gather arrive, after checking `out`, and tell autograd."""
        self._check_parts(call, out, x, "dst")
        buffers = [plain(part) for part in out]
        for peer, buffer in enumerate(buffers):
            if overlap(buffer, x) and not (peer == self.rank and same_memory(out[peer], x)):
                raise UsageError(
                    f"{call}: the tensor for rank {peer} in out shares memory with the input, and is not this rank's "
                    f"own part: give it its own"
                )
        if Stretches(buffers).clash():
            raise UsageError(f"{call}: two tensors of out share memory: give each its own")
        for part in out:
            mark_changed(part)
        return buffers
