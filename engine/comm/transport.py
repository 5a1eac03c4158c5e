"""How bytes move: the few calls that a Communicator needs, and torch.distributed's process groups behind them.

Everything here takes plain contiguous tensors and ranks inside the group; checks, strides and averages are the
Communicator's. `TorchTransport` is the one place that knows torch's names, versions and backend habits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # torch.distributed has it, but does not export it

from engine.comm.arguments import flat

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
# gloo refuses the others with "Invalid scalar type", although moving needs no arithmetic: they travel as bytes.
_MOVABLE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_SHORT = 1 << 19  # bytes

Works = list[Any]


class BackendError(RuntimeError):
    """A peer or the backend failed: what a transport raises when it starts something or waits for it.

    Every transport raises this kind for a failure of communication and for nothing else: a communicator tells it as a
    peer's, and lets every other error pass as it is.
    """


class Calls(Protocol):
    """The operations of one group. Each starts, and returns the works to wait for, which may be none."""

    ranks: tuple[int, ...]
    """The group's global ranks in group order."""

    def barrier(self, token: Tensor) -> Works:
        """Meet. token: an element to send, for transports that must send something."""
        return self.all_reduce(token, "max")

    def all_reduce(self, x: Tensor, op: str) -> Works: ...
    def broadcast(self, x: Tensor, src: int) -> Works: ...
    def reduce(self, x: Tensor, dst: int, op: str) -> Works: ...
    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Works: ...
    def all_gather(self, out: Tensor, x: Tensor) -> Works: ...
    def all_to_all(self, out: Tensor, x: Tensor) -> Works: ...

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        """Start all sends and receives as one batch. Between two ranks, messages of one tag match in the order they
        are listed; NCCL and HCCL ignore tags. Returns the works of the sends, then of the receives, or one for all.
        """
        ...

    def wait(self, works: Works) -> None:
        """Wait for all of a batch that this transport started. Raises BackendError."""
        ...


class Transport(Calls, Protocol):
    """How one group moves bytes."""

    name: str
    reducible: frozenset[torch.dtype] | None = None
    """The dtypes that it reduces; None: those that the device's backend does."""
    keeps_nan: bool = False
    """Whether max and min of floats give NaN where one is."""
    keeps_inputs: bool = False
    """Whether a tensor that is only read stays as it is; else the caller gives a copy."""
    moves_alone: bool = True
    """Whether messages that have been started move while nobody waits for them."""
    early: bool = False
    """Whether a receive may be started while others, and sends, that were started before it are under way."""
    overlaps: bool = True
    """Whether collectives that are started together, or beside computing, end sooner than one after the other. Not
    where the processor moves the bytes that it also computes with.
    """
    reads_in_place: bool = False
    """Whether the ranks read each other's tensors in memory of `allocate` where they lie."""

    def queued(self) -> Calls:
        """Return the calls in a form that returns at once, whatever they do."""
        return self

    def allocate(self, nbytes: int, *, shared: bool = False) -> Tensor | None:
        """Return `nbytes` of zeroed memory that the ranks read without a copy, or None where there is no such memory.
        shared: the same memory on every rank. Every rank calls it.
        """
        del nbytes, shared
        return None

    def shares(self, x: Tensor) -> bool:
        """Whether `x` lies in memory that `allocate` made the same on every rank."""
        del x
        return False

    def memory(self) -> dict[str, int]:
        """Return the bytes of shared memory that this rank has reserved, by what for."""
        return {}

    def close(self) -> None:
        """Give everything back."""
        ...


def _blame(error: RuntimeError) -> None:
    """Raise BackendError for an error out of torch's process groups, which have no kind of their own for it."""
    # Memory that this process lacks is its own failure, also where a work's thread was the one to miss it.
    if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
        raise BackendError(str(error)) from error


def _bytes(x: Tensor) -> Tensor:
    """Return a view of contiguous `x` in a dtype that every backend moves."""
    return x if x.dtype in _MOVABLE else flat(x).view(torch.uint8)


def _real(x: Tensor) -> Tensor:
    """Return a view of `x` that can be summed: torch's groups have no complex numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


def _options(options: Any, **values: Any) -> Any:
    """Return a group's options for a call that is waited for by its work."""
    for name, value in {**values, "asyncOp": True}.items():
        setattr(options, name, value)
    return options


class TorchTransport(Transport):
    """Collectives of one process group."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group: dist.ProcessGroup | None = group
        self.ranks = tuple(ranks)
        # gloo starts messages one by one; the others must be told of a batch as one.
        self._single = self.early = dist.get_backend(group) == "gloo"
        self._pair = len(self.ranks) == 2
        self._summed = {name: _options(dist.AllreduceOptions(), reduceOp=op) for name, op in _OPS.items()}
        self._scattered = {name: _options(dist.ReduceScatterOptions(), reduceOp=op) for name, op in _OPS.items()}
        self._gathered = _options(AllgatherOptions())
        self._exchanged = _options(dist.AllToAllOptions())

    def all_reduce(self, x: Tensor, op: str) -> Works:
        return self._start("allreduce", [_real(x)], self._summed[op])

    def broadcast(self, x: Tensor, src: int) -> Works:
        return self._start("broadcast", [_bytes(x)], _options(dist.BroadcastOptions(), rootRank=src, rootTensor=0))

    def reduce(self, x: Tensor, dst: int, op: str) -> Works:
        options = _options(dist.ReduceOptions(), rootRank=dst, rootTensor=0, reduceOp=_OPS[op])
        return self._start("reduce", [_real(x)], options)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Works:
        return self._start("_reduce_scatter_base", _real(out), _real(x), self._scattered[op])

    def all_gather(self, out: Tensor, x: Tensor) -> Works:
        return self._start("_allgather_base", _bytes(out), _bytes(x), self._gathered)

    def all_to_all(self, out: Tensor, x: Tensor) -> Works:
        return self._start("alltoall_base", _bytes(out), _bytes(x), [], [], self._exchanged)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        """Start all sends and receives as one batch. Between two ranks, messages of one tag match in the order they
        are listed; NCCL and HCCL ignore tags. Returns the works of the sends, then of the receives, or one for all.
        """
        group = self.group
        if self._single and group is not None:
            # What dist.isend and irecv call in the end. On the way there a batch spends 30 microseconds on a message.
            try:
                # A message whose receive is there already is written by this thread, before it starts the others: for
                # two ranks and short ones that saves waking gloo's thread, for more it makes the others late.
                if self._pair and all(x.nbytes <= _SHORT for x, _ in sends):
                    receiving = [group.recv([_bytes(x)], peer, tag) for x, peer in receives]
                    return [group.send([_bytes(x)], peer, tag) for x, peer in sends] + receiving
                sending = [group.send([_bytes(x)], peer, tag) for x, peer in sends]
                return sending + [group.recv([_bytes(x)], peer, tag) for x, peer in receives]
            except RuntimeError as error:
                _blame(error)
                raise
        batch = [dist.P2POp(dist.isend, _bytes(x), self.ranks[peer], self.group, tag) for x, peer in sends]
        batch += [dist.P2POp(dist.irecv, _bytes(x), self.ranks[peer], self.group, tag) for x, peer in receives]
        try:
            return list(dist.batch_isend_irecv(batch)) if batch else []
        except RuntimeError as error:
            _blame(error)
            raise

    def wait(self, works: Works) -> None:
        """Wait for all of a batch that this transport started. The group's own time limit applies: one given here
        makes NCCL block the host.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            _blame(error)
            raise

    def _start(self, name: str, *arguments: Any) -> Works:
        """Start what torch.distributed's function of this kind starts in the end. Its way there costs more than the
        communicator: arguments checked once more, a record for its log.
        """
        try:
            return [getattr(self.group, name)(*arguments)]
        except RuntimeError as error:
            _blame(error)
            raise

    def close(self) -> None:
        self.group = None
