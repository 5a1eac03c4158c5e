"""How the ranks of a job find each other, before there is any group: who this process is, and whether all agree.

Nothing here can hang: every wait has a limit, and what is compared goes through the store, one sentence for all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from engine.errors import CommunicationError, EngineError, UsageError
from engine.layout import Layout

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FAULT = "cannot start"  # the key of a rank's record that holds why
_HEARING = timedelta(seconds=15)  # that a rank stays at most until the others know why it ends


def find_ranks(
    layout: Layout, store: Store | None, rank: int | None, world_size: int | None, init_timeout: float
) -> tuple[int, int, Store | None]:
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
            found = next(iter(rendezvous("env://", rank, world_size, timeout=limit)))[0]
        except (RuntimeError, TimeoutError) as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise CommunicationError(
                f"rank {rank} of {world_size} did not meet the others at {address} within {init_timeout:g} s: "
                f"{str(error).splitlines()[0]}. Start all ranks with one torchrun, or check MASTER_ADDR and MASTER_PORT"
            ) from error
        found.set_timeout(limit)
        return rank, world_size, found
    if len(missing) < len(_TORCHRUN):
        raise UsageError(
            f"torchrun's environment is incomplete, {', '.join(missing)} missing: "
            f"start with torchrun, or unset the rest"
        )
    needed = abs(layout.data) * layout.pipeline * layout.tensor
    if needed != 1:
        raise UsageError(
            f"{layout} needs several processes, but this one was started alone: "
            f"torchrun --standalone --nproc-per-node {needed} SCRIPT"
        )
    return 0, 1, None


def this_host() -> str:
    """Return a name that all processes of this machine share and no other machine has: Linux's id of this boot and of
    this network, where there are such, since host names repeat between containers, and containers on one machine do
    not reach each other's sockets.
    """
    try:
        network = os.stat("/proc/self/ns/net").st_ino
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{network}"
    except OSError:
        return socket.gethostname()


def cannot_start(rank: int, fault: Exception) -> str:
    """Return what the other ranks say of one that cannot start."""
    kind = "" if isinstance(fault, EngineError) else f"{type(fault).__name__}: "
    return f"rank {rank} cannot start: {kind}{fault}"


def agree(
    store: Store,
    rank: int,
    world_size: int,
    started: dict[str, object],
    init_timeout: float,
    fault: Exception | None = None,
) -> None:
    """Compare over the store what every rank was started with; rank 0 reads all and gives one verdict to all.

    fault: why this rank cannot start; raised here, after the others can hear it.
    """
    limit = timedelta(seconds=init_timeout)
    store.set(f"started/{rank}", json.dumps(started if fault is None else {_FAULT: cannot_start(rank, fault)}))
    verdict = ""
    if rank == 0:
        verdict = _verdict(store, world_size, started, limit) if fault is None else cannot_start(0, fault)
        store.set("verdict", verdict)
        if verdict:
            _wait_until_heard(store, world_size, everyone=fault is not None)
    else:
        if fault is None:
            verdict = _hear(store, rank, world_size, limit)
        if verdict or fault is not None:
            store.set(f"heard/{rank}", "")
    if fault is not None:
        raise fault
    if verdict.startswith("missing"):
        raise CommunicationError(verdict)
    if verdict:
        raise UsageError(verdict)


def _hear(store: Store, rank: int, world_size: int, limit: timedelta) -> str:
    """Return rank 0's verdict."""
    try:
        store.wait(["verdict"], limit + timedelta(seconds=5))
    except (RuntimeError, TimeoutError) as error:
        raise CommunicationError(
            f"rank {rank} of {world_size} waited {limit.total_seconds():g} s for rank 0, which has not joined: "
            f"start every rank, or raise init_timeout"
        ) from error
    return store.get("verdict").decode()


def _wait_until_heard(store: Store, world_size: int, *, everyone: bool) -> None:
    """Let the others read a verdict that ends this process: the store may live in it. everyone: also who has not
    joined yet.
    """
    others = [rank for rank in range(1, world_size) if everyone or store.check([f"started/{rank}"])]
    with contextlib.suppress(RuntimeError, TimeoutError):
        store.wait([f"heard/{rank}" for rank in others], _HEARING)


def _verdict(store: Store, world_size: int, started: dict[str, object], limit: timedelta) -> str:
    absent: list[int] = []
    try:
        store.wait([f"started/{other}" for other in range(world_size)], limit)
    except (RuntimeError, TimeoutError):
        absent = [other for other in range(world_size) if not store.check([f"started/{other}"])]
    others = [other for other in range(1, world_size) if other not in absent]
    records = {other: json.loads(store.get(f"started/{other}").decode()) for other in others}
    for theirs in records.values():
        if _FAULT in theirs:
            return str(theirs[_FAULT])
    if absent:
        return (
            f"missing ranks {absent}: {world_size - len(absent)} of {world_size} joined within "
            f"{limit.total_seconds():g} s: start every rank, or raise init_timeout"
        )
    for other, theirs in records.items():
        for key, mine in started.items():
            if theirs[key] != mine:
                return (
                    f"the ranks were started differently: {key} is {mine!r} on rank 0 and {theirs[key]!r} on rank "
                    f"{other}: start every rank with the same arguments"
                )
    return ""
