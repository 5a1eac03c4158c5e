"""What every call of a communicator goes through: its record, the check before it, its end, its error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engine.comm.algorithms import plan_for
from engine.comm.algorithms.compress import Compressed
from engine.comm.algorithms.plan import Hosts, Plan, block
from engine.comm.algorithms.run import Messenger, Operation, start_plan, writes_only
from engine.comm.arguments import check_reduction, check_tensors, flat, mark_changed, write
from engine.comm.call import Call
from engine.comm.checks import Expected, check_call
from engine.comm.choice import NATIVE, OPERATIONS, Choice, Thresholds, algorithms_of
from engine.comm.ledger import Ledger, payload_bytes, wire_bytes
from engine.comm.monitor import Monitor
from engine.comm.transport import BackendError, Calls, Transport, Works
from engine.comm.work import Work
from engine.device import backend, reducible
from engine.errors import CommunicationError, UsageError, did_you_mean

_R = TypeVar("_R")
_NAN_SAFE = {"all_reduce": "pairwise", "reduce_scatter": "pairwise", "reduce": "tree"}
_PLANS = 4096  # plans that one group keeps; sizes may change with every call


@dataclass(frozen=True)
class Instruments:
    """What watches the communicators of a mesh, and how they choose."""

    ledger: Ledger = field(default_factory=Ledger)
    monitor: Monitor | None = None
    checks: bool = False
    choice: Choice = field(default_factory=Choice)


class Channel:
    """One group seen from one rank: who is in it, and the life of a call. `Communicator` adds the operations."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        *,
        where: str,
        transport: Transport | None,
        planned: bool = False,
        hosts: Hosts = (),
        space: int = 0,
        instruments: Instruments | None = None,
    ) -> None:
        """Made by `engine.init`. `where` says in errors who this rank is; a group of one needs no transport.
        space: its range of message tags, for which see `Messenger`.
        """
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.device = device
        self.hosts = hosts or (tuple(range(self.size)),)
        self.current: Call | None = None
        self.sequence = 0
        self.since = 0.0
        self.failed: Call | None = None  # the last call that failed
        self.failed_at = 0.0
        self.fault = ""  # why it did, where no other rank is to blame
        self._label = where.replace("{", "{{").replace("}", "}}") + f": {{}} on axis {name!r}"
        self._transport = transport
        self._messenger = None if transport is None else Messenger(transport, space)
        own = None if transport is None else transport.reducible
        self._reducible = reducible(device) if own is None else own
        # NCCL and HCCL ignore tags, so a header could be taken for a message there.
        self._tagged = backend(device) == "gloo"
        self._loses_nan = self._tagged and transport is not None and not transport.keeps_nan
        self._planned = planned
        self._closed = False
        self._expected: Expected = {}
        self._token: Tensor | None = None  # what a barrier sends, where something must be sent
        self._plans: dict[tuple[object, ...], tuple[Plan, bool]] = {}
        instruments = instruments or Instruments()
        self._ledger, self._monitor, self._checks = instruments.ledger, instruments.monitor, instruments.checks
        kind = backend(device) if transport is None or transport.name == "torch" else transport.name
        choice, group = instruments.choice, (self.size, len(self.hosts), kind)
        self._thresholds: dict[bool, dict[str, Thresholds]] = {
            asynchronous: {name: choice.thresholds(name, *group, asynchronous=asynchronous) for name in OPERATIONS}
            for asynchronous in (False, True)
        }

    @property
    def transport(self) -> str:
        """How bytes move: `torch`, `shm`, `hosts` (shm inside each, torch between), `local`, `plan` (no processes)."""
        if self._planned:
            return "plan"
        return self._transport.name if self._transport else "local"

    @property
    def overlaps(self) -> bool:
        """Whether collectives that are started together, with `async_op`, end sooner than one after the other."""
        return self._transport is None or self._transport.overlaps

    @property
    def checks(self) -> bool:
        """Whether mistakes are looked for that cost something to find, as `engine.init(checks=True)` asks."""
        return self._checks

    @property
    def reads_in_place(self) -> bool:
        """Whether the ranks read tensors of `allocate` where they lie."""
        return self._transport is not None and self._transport.reads_in_place

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size}, {self.transport} on {self.device})"

    def shares(self, x: Tensor) -> bool:
        """Whether `x` lies in memory that is one on all ranks (`allocate(..., shared=True)`). Not collective."""
        return self._transport is not None and self._transport.shares(x)

    def memory(self) -> dict[str, int]:
        """Return the bytes of shared memory that this rank has reserved for this group, by what for. Not collective."""
        return self._transport.memory() if self._transport is not None and not self._closed else {}

    def close(self) -> None:
        """Drop the process group. Called by Mesh.close; every later call that would send raises."""
        self._closed = True
        self._messenger = None
        if self._transport is not None:
            self._transport.close()

    # ---- the life of a call ----------------------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        x: Tensor,
        writes: Sequence[Tensor] = (),
        op: str | None = None,
        peer: int | None = None,
        algorithm: str | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> Call:
        """Return the record of a call on `x`, after checking the tensors and the reduction.

        With `checks`, the ranks compare their calls first: what they do not call alike is then an error on all, also
        where one of them would refuse it, or has nothing to send. (What is wrong with its own `out` is a rank's own.)
        """
        call = Call(self._label, name, x, op, peer)
        call.wire_dtype = wire_dtype
        if self._checks:
            self._compare(call, algorithm)
        if algorithm is not None and algorithm not in algorithms_of(name):
            known = algorithms_of(name)
            hint = did_you_mean(algorithm, known)
            raise UsageError(f"{call}: unknown algorithm {algorithm!r}{hint}: choose {', '.join(known)}")
        in_place = len(writes) == 1 and writes[0] is x
        check_tensors(call, () if in_place else (x,), writes, self.device)
        if op is not None:
            check_reduction(call, x, op, self.device, self._reducible)
        return call

    def _check_tensors(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        check_tensors(call, reads, writes, self.device)

    def _choose(self, call: Call, nbytes: int, algorithm: str | None, async_op: bool) -> str:
        """Return the algorithm of a call, the one that was asked for or the one that the table names."""
        asked = algorithm
        if algorithm is None:
            for limit, name in self._thresholds[async_op][call.name]:
                if nbytes <= limit:
                    algorithm = name
                    break
        assert algorithm is not None  # the last threshold is for any size
        if (
            asked is None
            and algorithm == NATIVE
            and call.op in ("max", "min")
            and self._loses_nan
            and call.x is not None
        ):
            # gloo's largest and smallest lose NaN, element by element.
            algorithm = _NAN_SAFE.get(call.name, NATIVE) if call.x.is_floating_point() else NATIVE
        call.algorithm = algorithm
        return algorithm

    def _plan(self, call: Call, count: int) -> tuple[Plan, bool]:
        """Return this rank's plan for a vector of `count` elements, and whether it changes its own block only."""
        key = (call.name, call.algorithm, count, call.peer)
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = plan_for(call.name, call.algorithm, self.rank, self.size, count, call.peer or 0, self.hosts)
            known = self._plans[key] = (plan, writes_only(plan, *block(count, self.size, self.rank)))
        return known

    def _running(
        self,
        plan: Plan,
        at: Callable[[int, int], Tensor],
        op: str,
        like: Tensor,
        initial: Callable[[], Tensor] | None = None,
    ) -> Works:
        """Start a plan over this group's messages, see `Running`."""
        assert self._messenger is not None
        return start_plan(self._messenger, plan, at, op, like, initial)

    def _planned_run(self, call: Call, vector: Tensor, op: str) -> Works:
        """Start the call's plan over the flat vector that it changes."""
        count = vector.numel()

        def at(start: int, stop: int) -> Tensor:
            return vector if stop - start == count else vector[start:stop]

        return self._running(self._plan(call, count)[0], at, op, vector)

    def _scatter(self, call: Call, wire: Tensor, into: Tensor, op: str) -> Works:
        """Start a reduce-scatter by plan: the own block lies in `into`, the others are read where they are unless the
        plan uses them for partial sums.
        """
        vector, own = flat(wire), flat(into)
        if vector.requires_grad:  # under no_grad, which may have ended when the sum is made
            vector = vector.detach()
        plan, own_only = self._plan(call, vector.numel())
        each = own.numel()
        first, last = self.rank * each, (self.rank + 1) * each
        held = own.data_ptr() == vector.data_ptr() + first * vector.element_size()
        if not own_only:
            write(own, vector[first:last])
            vector = vector.clone()

        def at(start: int, stop: int) -> Tensor:
            if start == first and stop == last:
                return own
            inside = first <= start and stop <= last
            return own[start - first : stop - first] if inside else vector[start:stop]

        initial = (lambda: vector[first:last]) if own_only and not held else None
        return self._running(plan, at, op, own, initial)

    def _gather(self, call: Call, wire: Tensor, target: Tensor) -> Works:
        """Start an all-gather by plan: the own block is sent from where it lies, and copied while it flies."""
        vector, source = flat(target), flat(wire)
        each = source.numel()
        first, last = self.rank * each, (self.rank + 1) * each

        def at(start: int, stop: int) -> Tensor:
            if start == first and stop == last:
                return source
            inside = first <= start and stop <= last
            return source[start - first : stop - first] if inside else vector[start:stop]

        works = self._running(self._plan(call, vector.numel())[0], at, "sum", vector)
        if source.data_ptr() != vector.data_ptr() + first * vector.element_size():
            write(vector[first:last], source)
        return works

    def _compressed(self, x: Tensor, wire: torch.dtype, out: Tensor, *, share: bool) -> Works:
        """Start a sum whose messages travel as `wire`."""
        assert self._messenger is not None
        return [Compressed(self._messenger, self.rank, self.size, x, wire, out, share=share)]

    def _run(
        self,
        call: Call,
        start: Callable[[Calls], Works],
        finish: Callable[[], _R],
        buffers: object,
        async_op: bool,
        changes: Tensor | None = None,
    ) -> _R | Work:
        """Start a call and, unless it is asynchronous, wait for it. `finish` makes the result once it is done.
        changes: what the backend writes, which autograd is told once it is under way.
        """
        transport = self._live(call)
        if call.messages is None:
            self.sequence += 1
            call.sequence = self.sequence
        self.current = call
        self.since = started = time.perf_counter()
        try:
            works = start(transport.queued() if async_op else transport)
            if changes is not None:
                mark_changed(changes)
            # Rounds after the first need this thread. If they ran in the caller's own order of waiting, ranks that
            # wait in different orders would wait for each other.
            if not async_op or (works and isinstance(works[0], Operation) and works[0].in_rounds):
                _settle(transport, works)
                works = []
        except BaseException as error:
            self._fail(call, error, started)
            raise
        if async_op:
            return Work(partial(self._wait, call, works, started), finish, buffers)
        self._end(call, started)
        return finish()

    def _wait(self, call: Call, works: Works, started: float) -> None:
        transport = self._live(call)
        self.current, self.since = call, started
        try:
            _settle(transport, works)
        except BaseException as error:
            self._fail(call, error, started)
            raise
        self._end(call, started)

    def _end(self, call: Call, started: float) -> None:
        if self._ledger.on:
            payload = payload_bytes(call, self.size)
            wire = wire_bytes(call, self.rank, self.size, lambda count: self._plan(call, count)[0])
            self._ledger.add(self.name, call.name, payload, wire, time.perf_counter() - started)
        call.end()

    def _compare(self, call: Call, algorithm: str | None = None) -> None:
        """Compare the call with the other ranks', where there are any."""
        if self._transport is None or self._closed:
            return
        started = time.perf_counter()
        call.sequence = self.sequence + 1
        self.current, self.since = call, started
        try:
            check_call(call, algorithm or "the table's choice", self._transport, self.device)
        except BaseException as error:
            self._fail(call, error, started)
            raise

    def _local(self, result: _R, async_op: bool) -> _R | Work:
        """Hand back what a group of one, or an empty tensor, gives without sending."""
        return Work(lambda: None, lambda: result, None) if async_op else result

    def _live(self, call: Call) -> Transport:
        if self._planned:
            raise UsageError(f"{call}: this mesh is a plan without processes; nothing can be sent on it")
        if self._closed:
            raise UsageError(f"{call}: the mesh is closed: communicate inside `with engine.init(...)`")
        if self._transport is None:
            raise UsageError(f"{call}: this group has one rank, so there is no peer to send to")
        return self._transport

    def _fail(self, call: Call, error: BaseException, started: float) -> None:
        """Note for whoever asks that a call has failed. Where a peer or the backend did, raise what this rank waited
        for and what the others are doing; any other error is this process's own, and the caller's to raise as it is.
        """
        peers = isinstance(error, BackendError)
        self.failed, self.failed_at = call, time.perf_counter()
        self.fault = "" if peers else f"{type(error).__name__}: {_reason(error)}"
        if not peers:
            return
        told = self._monitor.explain(self) if self._monitor is not None else ""
        members = f"ranks {', '.join(map(str, self.ranks))}" if len(self.ranks) <= 16 else f"{self.size} ranks"
        raise CommunicationError(
            f"{call.full()} failed after {self.failed_at - started:.1f} s, "
            + (f"call {call.sequence} " if call.sequence else "")
            + f"over {members}: {_reason(error)}. "
            + (told or "Another rank has stopped, left this call out or called it with other sizes")
        ) from error


def _settle(transport: Calls, works: Works) -> None:
    """Wait for what was started: the engine's own operation, or a transport's works."""
    if works and isinstance(works[0], Operation):
        works[0].wait()
    else:
        transport.wait(works)


def _reason(error: BaseException) -> str:
    """Return the backend's own words, without its source paths and advice."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", first).partition(". This is typically")[0].rstrip(". ")
