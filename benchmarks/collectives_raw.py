"""torch.distributed's own calls on the engine's groups, without the engine: what its times are compared with.

Every rank of the group calls; ranks are positions inside the group. Each function makes one operation, or
with `async_op` starts it, and returns the works to `wait` for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine import Mesh

# torch 2.13 renamed the two; 2.7 has only the old names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Works = list[Any]


@dataclass(frozen=True)
class RawGroup:
    """torch's group of an axis. Must be dropped before the mesh closes."""

    group: Any
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """This rank's position."""


def raw_group(mesh: Mesh, axis: str) -> RawGroup:
    """Return torch's group of a mesh axis of several ranks."""
    comm = getattr(mesh, axis)
    group = dist.group.WORLD if axis == "world" else mesh.device_mesh.get_group(axis)
    return RawGroup(group, comm.ranks, comm.rank)


def all_reduce(at: RawGroup, x: Tensor, _out: Tensor, async_op: bool) -> Works:
    return [dist.all_reduce(x, group=at.group, async_op=async_op)]


def broadcast(at: RawGroup, x: Tensor, _out: Tensor, async_op: bool) -> Works:
    return [dist.broadcast(x, at.ranks[0], group=at.group, async_op=async_op)]


def reduce(at: RawGroup, x: Tensor, _out: Tensor, async_op: bool) -> Works:
    return [dist.reduce(x, at.ranks[0], group=at.group, async_op=async_op)]


def reduce_scatter(at: RawGroup, x: Tensor, out: Tensor, async_op: bool) -> Works:
    return [_reduce_scatter(out, x, group=at.group, async_op=async_op)]


def all_gather(at: RawGroup, x: Tensor, out: Tensor, async_op: bool) -> Works:
    return [_all_gather(out, x, group=at.group, async_op=async_op)]


def all_to_all(at: RawGroup, x: Tensor, out: Tensor, async_op: bool) -> Works:
    return [dist.all_to_all_single(out, x, group=at.group, async_op=async_op)]


def gather(at: RawGroup, x: Tensor, out: Tensor, async_op: bool) -> Works:
    parts = list(out.chunk(len(at.ranks))) if at.rank == 0 else None
    return [dist.gather(x, parts, at.ranks[0], group=at.group, async_op=async_op)]


def scatter(at: RawGroup, x: Tensor, out: Tensor, async_op: bool) -> Works:
    parts = list(x.chunk(len(at.ranks))) if at.rank == 0 else None
    return [dist.scatter(out, parts, at.ranks[0], group=at.group, async_op=async_op)]


def send_recv(at: RawGroup, x: Tensor, out: Tensor, _async_op: bool) -> Works:
    after, before = (at.ranks[(at.rank + step) % len(at.ranks)] for step in (1, -1))
    send, receive = dist.P2POp(dist.isend, x, after, at.group), dist.P2POp(dist.irecv, out, before, at.group)
    return list(dist.batch_isend_irecv([send, receive]))


def barrier(at: RawGroup, _x: Tensor, _out: Tensor, async_op: bool) -> Works:
    return [dist.barrier(at.group, async_op=async_op)]


RAW: dict[str, Callable[[RawGroup, Tensor, Tensor, bool], Works]] = {
    each.__name__: each
    for each in (
        all_reduce, broadcast, reduce, reduce_scatter, all_gather, all_to_all, gather, scatter, send_recv,
        barrier,
    )
}  # fmt: skip


def wait(works: Works) -> None:
    """Wait for all of them; a call that was not asynchronous left None."""
    for work in works:
        if work is not None:
            work.wait()
