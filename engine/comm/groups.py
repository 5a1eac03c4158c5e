"""torch's process groups of a mesh, made by all ranks in one order, and what is said over them before it opens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from engine import device as devices
from engine.comm.algorithms.plan import Hosts
from engine.comm.communicator import Communicator
from engine.comm.monitor import ADDRESS_BYTES
from engine.comm.rendezvous import cannot_start
from engine.comm.transport import TorchTransport
from engine.errors import UsageError
from engine.layout import Axis, Layout

# Groups are made and warmed in this order by all ranks.
ORDER: tuple[Axis, ...] = ("tensor", "data", "pipeline")


def hosts_of(ranks: Sequence[int], names: Sequence[str]) -> Hosts:
    """Return the positions inside a group that share a host, for each host."""
    if not names:
        return (tuple(range(len(ranks))),)
    here = [names[rank] for rank in ranks]
    return tuple(tuple(i for i, name in enumerate(here) if name == host) for host in dict.fromkeys(here))


def share(text: str, world: TorchTransport, device: torch.device) -> list[str]:
    """Return every rank's text, of at most ADDRESS_BYTES bytes."""
    data = bytearray(text.encode()[:ADDRESS_BYTES].ljust(ADDRESS_BYTES))
    own = torch.frombuffer(data, dtype=torch.uint8).to(device)
    every = own.new_empty(len(world.ranks) * ADDRESS_BYTES)
    world.wait(world.all_gather(every, own))
    return [bytes(part.tolist()).decode().rstrip() for part in every.cpu().split(ADDRESS_BYTES)]


def make_groups(
    layout: Layout, rank: int, timeout: timedelta, device: torch.device, made: list[dist.ProcessGroup]
) -> dict[str, TorchTransport]:
    """Make the groups of every axis, all ranks in one order; return this rank's, and the world's."""
    own = {"world": world_transport(layout.world_size)}
    for axis in ORDER:
        if getattr(layout, axis) == 1:
            continue
        if getattr(layout, axis) == layout.world_size:
            own[axis] = world_transport(layout.world_size)
            continue
        for ranks in layout.groups(axis):
            # new_group would take torch's own time limit, not the world's.
            group = dist.new_group(list(ranks), timeout=timeout, backend=devices.backend(device))
            if rank in ranks:
                made.append(group)
                own[axis] = TorchTransport(group, ranks)
    return own


def open_world(store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Make torch's default group over `store`."""
    arguments = devices.group_arguments(device)
    dist.init_process_group(
        devices.backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout, **arguments
    )


def check_existing_group(
    rank: int, world_size: int, device: torch.device, started: dict[str, object], fault: Exception | None
) -> None:
    """Check that torch's default group serves the device, and that all of its ranks can start and were started alike.
    fault: why this one cannot.
    """
    backend = devices.backend(device)
    if backend not in dist.get_backend_config():
        raise fault or UsageError(
            f"torch's default process group is on {dist.get_backend_config()}, but device {device} needs {backend}: "
            f"make it with that backend, or let engine.init make it"
        )
    devices.activate(device)
    transport = world_transport(world_size)
    world = Communicator("world", range(world_size), rank, device, where=f"rank {rank}", transport=transport)
    faulty = world.all_gather(torch.tensor([fault is not None], device=device)).nonzero().flatten().tolist()
    if faulty:
        told = world.broadcast_object("" if fault is None else cannot_start(rank, fault), faulty[0])
        raise fault or UsageError(told)
    world.check_equal("what engine.init was called with", started)
    world.close()


def world_transport(world_size: int) -> TorchTransport:
    group = dist.group.WORLD
    if group is None:
        raise UsageError("torch's default process group is gone: it was destroyed while the mesh was being opened")
    return TorchTransport(group, range(world_size))
