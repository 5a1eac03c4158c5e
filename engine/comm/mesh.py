"""The mesh: one communicator for each axis and one for the world, opened by `init` and closed with it.

Every rank makes the same groups in the same order, an axis of size 1 has none, an axis that spans the world uses the
world's. Before any group is made, the ranks compare through the store what they were started with, so that a
difference or a missing rank is a sentence and not a hang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine import device as devices
from engine.comm.communicator import Communicator
from engine.comm.transport import TorchTransport
from engine.errors import CommunicationError, LayoutError, UsageError
from engine.layout import AXES, Axis, Coordinate, Layout

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Groups are made and warmed in this order by all ranks.
_ORDER: tuple[Axis, ...] = ("tensor", "data", "pipeline")


class Mesh:
    """All communicators of one rank. Use it in a `with` block, or call `close`.

    `data`, `tensor`, `pipeline`, `world`: Communicator each. `layout`, `coordinate`, `rank`, `device`, `seed`: what
    it was opened with.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        seed: int,
        communicators: dict[str, Communicator],
        close_groups: Callable[[], None] | None,
    ) -> None:
        """Made by `init` or `plan_mesh`."""
        self.layout = layout
        self.rank = rank
        self.coordinate: Coordinate = layout.coordinate(rank)
        self.device = device
        self.seed = seed
        self.data = communicators["data"]
        self.tensor = communicators["tensor"]
        self.pipeline = communicators["pipeline"]
        self.world = communicators["world"]
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
            groups = [getattr(self, name)._transport.group for name in names]
            ranks = torch.arange(layout.world_size).view([getattr(layout, name) for name in names])
            self._device_mesh = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(names))
        return self._device_mesh

    def close(self) -> None:
        """Give the groups back; every rank calls it, nobody waits for another. Calling twice is harmless.

        No reference to a group may outlive torch's destroy: the process could abort at exit. So keep the mesh, not
        its groups.
        """
        if self._closed:
            return
        self._closed = True
        self._device_mesh = None
        for comm in (self.tensor, self.data, self.pipeline, self.world):
            comm.close()
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
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Mesh:
    """Open the mesh. Every started process calls it once with the same arguments.

    layout: the axis sizes; data=-1 fills up. device: auto, cpu, cuda or npu. timeout: seconds that any collective may
    take. init_timeout: seconds to wait for all ranks to join. seed: seeds the layers of PipelineModel and the streams
    of TrainStep; torch's own generator is left alone. store, rank, world_size: all three together replace torchrun's
    environment.

    torch's default process group over the world is made, unless one exists: that one is then used, and left open by
    `close`. A layout of one process needs neither torchrun nor a group.

    Raises LayoutError when the sizes do not give the number of processes, UsageError when torchrun's environment is
    missing or the ranks were started with different arguments, CommunicationError when not all ranks joined in time.
    All on every rank.
    """
    if timeout <= 0 or init_timeout <= 0:
        raise UsageError(f"timeout={timeout}, init_timeout={init_timeout}: both are seconds above 0")
    rank, world_size, store = _who(layout, store, rank, world_size, init_timeout)
    try:
        layout, fit = layout.resolve(world_size), ""
    except LayoutError as error:
        fit = str(error)
        if world_size == 1:
            raise
    where = torch.device("cpu") if fit else devices.select(device, int(os.environ.get("LOCAL_RANK", rank)))
    if world_size == 1:
        devices.activate(where)
        return _mesh(layout, rank, where, seed, None, {}, None)

    if store is not None:
        opening = store.add(f"engine/open/{rank}", 1)
        store = dist.PrefixStore(f"engine/{opening}", store)
        started = {
            "layout": str(layout),
            "device": where.type,
            "timeout": timeout,
            "seed": seed,
            "torch": torch.__version__,
        }
        _agree(store, rank, world_size, started, init_timeout)
    if fit:
        raise LayoutError(fit)
    devices.activate(where)
    made: list[dist.ProcessGroup] = []
    limit = timedelta(seconds=timeout)
    if store is not None:
        arguments = devices.group_arguments(where)
        dist.init_process_group(
            devices.backend(where), store=store, rank=rank, world_size=world_size, timeout=limit, **arguments
        )
    owns_world = store is not None

    def close_groups() -> None:
        while made:
            dist.destroy_process_group(made.pop())
        if owns_world:
            dist.destroy_process_group()

    try:
        transports = _groups(layout, rank, limit, where, made)
        world = TorchTransport(_world_group(), range(world_size))
        mesh = _mesh(layout, rank, where, seed, world, transports, close_groups)
        for comm in (mesh.world, *(getattr(mesh, axis) for axis in _ORDER)):
            comm.barrier()
    except BaseException:
        close_groups()
        raise
    return mesh


def plan_mesh(layout: Layout, rank: int, *, seed: int = 0) -> Mesh:
    """Return the mesh that global rank `rank` of `layout` would get, without processes: its communicators refuse to
    send.

    For shapes, shards and plans of any layout in one process, on the CPU. Raises LayoutError for a rank outside the
    layout.
    """
    return _mesh(layout, rank, torch.device("cpu"), seed, None, {}, None, planned=True)


def _mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    seed: int,
    world: TorchTransport | None,
    transports: dict[Axis, TorchTransport],
    close_groups: Callable[[], None] | None,
    planned: bool = False,
) -> Mesh:
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
        )
    everyone = range(layout.world_size)
    communicators["world"] = Communicator(
        "world", everyone, rank, device, where=where, transport=world, planned=planned
    )
    return Mesh(layout, rank, device, seed, communicators, close_groups)


def _groups(
    layout: Layout, rank: int, timeout: timedelta, device: torch.device, made: list[dist.ProcessGroup]
) -> dict[Axis, TorchTransport]:
    """Make the groups of every axis, all ranks in one order; return this rank's."""
    own: dict[Axis, TorchTransport] = {}
    for axis in _ORDER:
        if getattr(layout, axis) == 1:
            continue
        if getattr(layout, axis) == layout.world_size:
            own[axis] = TorchTransport(_world_group(), layout.ranks(axis, rank))
            continue
        for ranks in layout.groups(axis):
            # new_group would take torch's own time limit, not the world's.
            group = dist.new_group(list(ranks), timeout=timeout, backend=devices.backend(device))
            if rank in ranks:
                made.append(group)
                own[axis] = TorchTransport(group, ranks)
    return own


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise UsageError("torch's default process group is gone: it was destroyed while the mesh was being opened")
    return group


def _who(
    layout: Layout, store: dist.Store | None, rank: int | None, world_size: int | None, init_timeout: float
) -> tuple[int, int, dist.Store | None]:
    """Find out who this process is. The store is None where a default group exists already, or for a lone process."""
    given = [value is not None for value in (store, rank, world_size)]
    if any(given):
        if store is None or rank is None or world_size is None:
            raise UsageError(
                "store, rank and world_size replace torchrun's environment together: give all three or none"
            )
        if not 0 <= rank < world_size:
            raise UsageError(f"rank={rank}, world_size={world_size}: ranks go from 0 to world_size - 1")
        return rank, world_size, store
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), None
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if not missing:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world_size == 1:
            return rank, 1, None
        limit = timedelta(seconds=init_timeout)
        try:
            found = next(iter(dist.rendezvous("env://", rank, world_size, timeout=limit)))[0]
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(
                f"rank {rank} of {world_size} found no store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
                f"{init_timeout:g} s: {str(error).splitlines()[0]}. Start all ranks with one torchrun, or check MASTER_ADDR and MASTER_PORT"
            ) from error
        found.set_timeout(limit)
        return rank, world_size, found
    if len(missing) < len(_TORCHRUN):
        raise UsageError(
            f"torchrun's environment is incomplete: {', '.join(missing)} missing; start with torchrun, or unset the rest"
        )
    if (layout.data if layout.data != -1 else 1) * layout.pipeline * layout.tensor != 1:
        raise UsageError(
            f"{layout} needs several processes, but this one was started alone: "
            f"torchrun --standalone --nproc-per-node {abs(layout.data) * layout.pipeline * layout.tensor} SCRIPT"
        )
    return 0, 1, None


def _agree(store: dist.Store, rank: int, world_size: int, started: dict[str, object], init_timeout: float) -> None:
    """Compare over the store what every rank was started with; rank 0 reads all and gives one verdict to all."""
    limit = timedelta(seconds=init_timeout)
    store.set(f"started/{rank}", json.dumps(started))
    if rank != 0:
        try:
            store.wait(["verdict"], limit + timedelta(seconds=5))
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(
                f"rank {rank} of {world_size} waited {init_timeout:g} s for rank 0, which has not joined: start every rank, or raise init_timeout"
            ) from error
        verdict = store.get("verdict").decode()
    else:
        verdict = _verdict(store, world_size, started, limit)
        store.set("verdict", verdict)
    if verdict.startswith("missing"):
        raise CommunicationError(verdict)
    if verdict:
        raise UsageError(verdict)


def _verdict(store: dist.Store, world_size: int, started: dict[str, object], limit: timedelta) -> str:
    try:
        store.wait([f"started/{other}" for other in range(world_size)], limit)
    except (RuntimeError, TimeoutError):
        absent = [other for other in range(world_size) if not store.check([f"started/{other}"])]
        return (
            f"missing ranks {absent}: {world_size - len(absent)} of {world_size} joined within {limit.total_seconds():g} s: "
            f"start every rank, or raise init_timeout"
        )
    for other in range(1, world_size):
        theirs = json.loads(store.get(f"started/{other}").decode())
        for key, mine in started.items():
            if theirs[key] != mine:
                return (
                    f"the ranks were started differently: {key} is {mine!r} on rank 0 and {theirs[key]!r} on rank {other}: "
                    f"start every rank with the same arguments"
                )
    return ""
