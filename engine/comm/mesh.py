"""The mesh: one communicator for each axis and one for the world, opened by `init` and closed with it.

Every rank makes the same groups in the same order, an axis of size 1 has none, an axis that spans the world uses the
world's. Before any group is made, the ranks compare through the store what they were started with, so that a
difference or a missing rank is a sentence and not a hang.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

# Its functions keep the world group of the moment it is imported as a default argument, for good, and torch.optim
# imports it late: a group that outlives its close aborts the process at exit now and then. So before there is a
# group.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine import device as devices
from engine.comm.algorithms.run import host_tag
from engine.comm.channel import Instruments
from engine.comm.communicator import Communicator
from engine.comm.groups import ORDER, check_existing_group, hosts_of, make_groups, open_world, share
from engine.comm.hosts import HostsTransport
from engine.comm.ledger import Ledger
from engine.comm.monitor import Monitor, reachable_interface
from engine.comm.rendezvous import agree, find_ranks, this_host
from engine.comm.shm import Listener, SharedMemoryTransport, hosts_with_memory, open_groups, own_address
from engine.comm.start import Start, is_seconds, judge
from engine.comm.transport import BackendError, TorchTransport, Transport
from engine.errors import CommunicationError, UsageError
from engine.layout import AXES, Coordinate, Layout

_SPACES = 511  # with 4 communicators each and 2**20 tags, a tag stays below 2**31


class Mesh:
    """All communicators of one rank. Use it in a `with` block, or call `close`.

    `data`, `tensor`, `pipeline`, `world`: Communicator each. `layout`, `coordinate`, `rank`, `device`, `seed`,
    `checks`: what it was opened with. `ledger`: counts what is sent, once it is started.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        seed: int,
        communicators: dict[str, Communicator],
        groups: Mapping[str, TorchTransport],
        close_groups: Callable[[], None] | None,
        instruments: Instruments | None = None,
    ) -> None:
        """Made by `init` or `plan_mesh`. groups: torch's, by axis, whatever moves the bytes."""
        instruments = instruments or Instruments()
        self.ledger: Ledger = instruments.ledger
        self.checks = instruments.checks
        self._monitor = instruments.monitor
        self.layout = layout
        self.rank = rank
        self.coordinate: Coordinate = layout.coordinate(rank)
        self.device = device
        self.seed = seed
        self.data = communicators["data"]
        self.tensor = communicators["tensor"]
        self.pipeline = communicators["pipeline"]
        self.world = communicators["world"]
        self._groups = dict(groups)
        self._close_groups = close_groups
        self._device_mesh: DeviceMesh | None = None
        self._closed = False

    @property
    def planned(self) -> bool:
        """Whether this mesh is a plan without processes (see `plan_mesh`)."""
        return self.world.transport == "plan"

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh over the axes larger than 1, named pipeline, data, tensor in that order. Made on first
        read, from the groups that exist already; nothing is sent.

        Raises UsageError when the world is one process, on a plan, or after close.
        """
        if self._closed or self.planned or self.layout.world_size == 1:
            why = "is closed" if self._closed else "is a plan" if self.planned else "is one process"
            raise UsageError(f"device_mesh: this mesh {why}, so torch has no group to make a DeviceMesh of")
        if self._device_mesh is None:
            layout = self.layout
            names = [axis for axis in ("pipeline", "data", "tensor") if getattr(layout, axis) > 1]
            groups = [group for name in names if (group := self._groups[name].group) is not None]
            ranks = torch.arange(layout.world_size).view([getattr(layout, name) for name in names])
            self._device_mesh = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(names))
        return self._device_mesh

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes of shared memory that this rank has reserved for each communicator that has any: `staging`,
        for tensors that lie elsewhere, and `allocated`, by `Communicator.allocate`. Not collective.
        """
        used = {comm.name: comm.memory() for comm in (self.data, self.tensor, self.pipeline, self.world)}
        return {name: sizes for name, sizes in used.items() if sizes}

    def close(self) -> None:
        """Give the groups back; every rank calls it, nobody waits for another. Calling twice is harmless.

        No reference to a group may outlive torch's destroy: the process could abort at exit. So keep the mesh, not
        its groups.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._device_mesh = None
        if self._monitor is not None:
            self._monitor.close()  # first, so that who asks hears that this rank has left
        for comm in (self.tensor, self.data, self.pipeline, self.world):
            comm.close()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        if self._close_groups is not None:
            self._close_groups()
            self._close_groups = None

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """A copied model lives on the same mesh."""
        return self

    def __repr__(self) -> str:
        return f"Mesh({self.layout}, rank {self.rank}: {self.coordinate}, {self.device})"


def init(
    layout: Layout,
    *,
    device: str = "auto",
    timeout: float = 120.0,
    init_timeout: float = 300.0,
    seed: int = 0,
    checks: bool | None = None,
    transport: str | None = None,
    algorithm: str | None = None,
    tuning: str | os.PathLike[str] | None = None,
    host: str | None = None,
    staging_mib: int = 64,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Mesh:
    """Open the mesh. Every started process calls it once with the same arguments.

    layout: the axis sizes; data=-1 fills up. device: auto, cpu, cuda or npu. timeout: seconds that any collective may
    take. init_timeout: seconds to wait for all ranks to join. seed: seeds the layers of PipelineModel and the streams
    of TrainStep; torch's own generator is left alone. checks: compare every collective over its group before it runs;
    None: as ENGINE_CHECKS=1 says. transport: how bytes move: `torch`, torch's process groups, or `shm`, shared memory
    between ranks of one host, and torch's between hosts; None: ENGINE_TRANSPORT, or else shm where there is such
    (Linux, CPU). algorithm: take this one for every collective that has it; None: ENGINE_ALGORITHM. tuning: a file of
    measured choices between algorithms on gloo; None: ENGINE_COMM_TUNING, or else built-in rules. host: a name for the
    machine that this rank is on: ranks of one name share memory, if they can, and are a host for hierarchical
    algorithms; None: found out.
    staging_mib: MiB of shared memory that each group may take on a host, all its ranks together, for tensors that do
    not come from `Communicator.allocate`; taken on first use, less where memory is short. store, rank, world_size: all
    three together replace torchrun's environment.

    torch's default process group over the world is made, unless one exists: that one is then used, and left open by
    `close`. A layout of one process needs neither torchrun nor a group.

    Raises LayoutError when the sizes do not give the number of processes, UsageError when torchrun's environment is
    missing, an argument cannot work, the tuning file is damaged or the ranks were started with different arguments,
    CommunicationError when not all ranks joined in time. All on every rank: what one of them alone cannot start with is
    its own error there, and on the others a UsageError that quotes it.
    """
    patience = init_timeout if is_seconds(init_timeout) else 30.0  # to tell the others that it is wrong
    rank, world_size, store = find_ranks(layout, store, rank, world_size, patience)
    checks = os.environ.get("ENGINE_CHECKS", "0") not in ("", "0") if checks is None else checks
    own = judge(timeout, init_timeout, host, store, staging_mib, algorithm, tuning, device, transport, rank, world_size)
    started = {"device": device, "timeout": timeout, "init_timeout": init_timeout, "seed": seed, "checks": checks}
    started["staging_mib"] = staging_mib
    store = _compare(layout, rank, world_size, store, started, own, patience)
    layout = layout.resolve(world_size)
    devices.activate(own.device)
    devices.keep_freed_memory(own.device)
    instruments = Instruments(checks=checks, choice=own.choice)
    if world_size == 1:
        return _mesh(layout, rank, own.device, seed, {}, {}, None, instruments=instruments)
    name = this_host() if host is None else host
    shared = (timeout, staging_mib << 20) if own.transport == "shm" else None
    return _open(layout, rank, own.device, seed, timedelta(seconds=timeout), name, instruments, store, shared)


def _compare(
    layout: Layout,
    rank: int,
    world_size: int,
    store: Store | None,
    started: dict[str, object],
    own: Start,
    patience: float,
) -> Store | None:
    """Let all ranks hear what any of them cannot start with, and refuse different arguments. Returns this mesh's part
    of the store.
    """
    if world_size == 1:
        if own.fault is not None:
            raise own.fault
        return store
    # Compared before the sizes are judged: ranks that were given different layouts should hear that.
    started = {
        "layout": str(layout),
        **started,
        "torch": torch.__version__,
        "algorithms": repr(own.choice),
        "transport": own.transport,
    }
    if store is None:
        check_existing_group(rank, world_size, own.device, started, own.fault)
        return None
    store = PrefixStore(f"engine/{store.add(f'engine/open/{rank}', 1)}", store)
    agree(store, rank, world_size, started, patience, own.fault)
    return store


def _open(
    layout: Layout,
    rank: int,
    device: torch.device,
    seed: int,
    limit: timedelta,
    host: str,
    instruments: Instruments,
    store: Store | None,
    shared: tuple[float, int] | None,
) -> Mesh:
    """Make the groups, the monitor and the mesh over torch's default group, and warm the groups up. store: over
    which that group is made, None where there is one; shared: for shared memory its time limit and the bytes that each
    group may take.
    """
    if store is not None:
        open_world(store, rank, layout.world_size, device, limit)
    made: list[dist.ProcessGroup] = []
    monitor: Monitor | None = None
    inside: dict[str, Transport] = {}

    def close_groups() -> None:
        while made:
            dist.destroy_process_group(made.pop())
        if store is not None:
            dist.destroy_process_group()

    try:
        groups = make_groups(layout, rank, limit, device, made)
        world = groups["world"]
        names = share(host, world, device)
        monitor = Monitor(rank, reachable_interface(len(set(names)), os.environ.get("MASTER_ADDR")))
        instruments = replace(instruments, monitor=monitor)
        addresses = share(monitor.address, world, device)
        # Meshes may share a process group: rank 0's token tells this one's messages from another's.
        space = int(addresses[0].rpartition(":")[2][:4], 16) % _SPACES
        if shared is not None:
            inside = _share_memory(groups, rank, names, device, shared, space)
        mesh = _mesh(
            layout, rank, device, seed, {**groups, **inside}, groups, close_groups,
            instruments=instruments, names=names, space=space,
        )  # fmt: skip
        monitor.watch((mesh.world, mesh.data, mesh.tensor, mesh.pipeline), addresses)
        for comm in (mesh.world, *(getattr(mesh, axis) for axis in ORDER)):
            comm.barrier()
    except BaseException as error:
        for each in inside.values():
            each.close()
        close_groups()
        if monitor is not None:
            monitor.close()
        if isinstance(error, BackendError):
            raise CommunicationError(
                f"rank {rank} of {layout.world_size} lost another while opening: {error}"
            ) from error
        raise
    atexit.register(mesh.close)
    return mesh


def _space(space: int, name: str) -> int:
    """Return the range of message tags of one of the mesh's communicators."""
    return 4 * space + ("world", *AXES).index(name)


def _share_memory(
    groups: Mapping[str, TorchTransport],
    rank: int,
    names: Sequence[str],
    device: torch.device,
    shared: tuple[float, int],
    space: int,
) -> dict[str, Transport]:
    """Return this rank's transports for the groups of which some ranks share memory. names: the host of every global
    rank; shared: the time limit of a call and the bytes that each group may take; space: see `_mesh`.
    """
    listener = Listener()
    limit, staging = shared
    made: dict[str, SharedMemoryTransport] = {}
    try:
        addresses = share(own_address(listener), groups["world"], device)
        where = hosts_with_memory(names, addresses)
        here = {name: [r for r in group.ranks if where[r] == where[rank]] for name, group in groups.items()}
        made = open_groups(here, rank, listener, addresses, limit=limit, staging=staging)
    finally:
        listener.close()
    found: dict[str, Transport] = {}
    for name, group in groups.items():
        hosts = hosts_of(group.ranks, where)
        if len(hosts) == 1:
            found[name] = made[name]
        elif any(len(host) > 1 for host in hosts):
            tag = host_tag(_space(space, name))
            found[name] = HostsTransport(group.ranks.index(rank), hosts, made.get(name), group, tag)
    return found


def plan_mesh(layout: Layout, rank: int, *, seed: int = 0) -> Mesh:
    """Return the mesh that global rank `rank` of `layout` would get, without processes: its communicators refuse to
    send.

    For shapes, shards and plans of any layout in one process, on the CPU. Raises LayoutError for a rank outside the
    layout.
    """
    return _mesh(layout, rank, torch.device("cpu"), seed, {}, {}, None, planned=True)


def _mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    seed: int,
    transports: Mapping[str, Transport],
    groups: Mapping[str, TorchTransport],
    close_groups: Callable[[], None] | None,
    planned: bool = False,
    instruments: Instruments | None = None,
    names: Sequence[str] = (),
    space: int = 0,
) -> Mesh:
    """Make the communicators. names: the host of every global rank. space: the mesh's ranges of message tags."""
    coordinate = layout.coordinate(rank)
    where = f"rank {rank} ({coordinate})"
    communicators: dict[str, Communicator] = {}
    for axis in AXES:
        ranks = layout.ranks(axis, rank)
        communicators[axis] = Communicator(
            axis,
            ranks,
            getattr(coordinate, axis),
            device,
            where=where,
            transport=transports.get(axis),
            planned=planned and len(ranks) > 1,
            hosts=hosts_of(ranks, names),
            space=_space(space, axis),
            instruments=instruments,
        )
    everyone = range(layout.world_size)
    communicators["world"] = Communicator(
        "world",
        everyone,
        rank,
        device,
        where=where,
        transport=transports.get("world"),
        planned=planned,
        hosts=hosts_of(everyone, names),
        space=_space(space, "world"),
        instruments=instruments,
    )
    return Mesh(layout, rank, device, seed, communicators, groups, close_groups, instruments)
