"""How bytes move: the few calls that a Communicator needs, and torch.distributed's process groups behind them.

Everything here takes plain contiguous tensors and ranks inside the group; checks, strides and averages are the
Communicator's. `TorchTransport` is the one place that knows torch's names, versions and backend habits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.arguments import flat

# torch 2.13 renamed the two; 2.7 has only the old names. For the benchmark's raw calls too.
torch_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
torch_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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


class TorchTransport(Transport):
    """Collectives of one process group."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group: dist.ProcessGroup | None = group
        self.ranks = tuple(ranks)
        # gloo starts messages one by one; the others must be told of a batch as one.
        self._single = dist.get_backend(group) == "gloo"

    def all_reduce(self, x: Tensor, op: str) -> Works:
        return self._start(dist.all_reduce, x, _OPS[op])

    def broadcast(self, x: Tensor, src: int) -> Works:
        return self._start(dist.broadcast, _bytes(x), self.ranks[src])

    def reduce(self, x: Tensor, dst: int, op: str) -> Works:
        return self._start(dist.reduce, x, self.ranks[dst], _OPS[op])

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Works:
        return self._start(torch_reduce_scatter, out, x, _OPS[op])

    def all_gather(self, out: Tensor, x: Tensor) -> Works:
        return self._start(torch_all_gather, _bytes(out), _bytes(x))

    def all_to_all(self, out: Tensor, x: Tensor) -> Works:
        return self._start(dist.all_to_all_single, _bytes(out), _bytes(x))

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
                receiving = [group.recv([_bytes(x)], peer, tag) for x, peer in receives]
                return [*(group.send([_bytes(x)], peer, tag) for x, peer in sends), *receiving]
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

    def _start(self, function: Callable[..., Any], *arguments: Any) -> Works:
        try:
            return [function(*arguments, group=self.group, async_op=True)]
        except RuntimeError as error:
            _blame(error)
            raise

    def close(self) -> None:
        self.group = None
