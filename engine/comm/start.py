"""What a rank judges by itself before it meets the others: arguments, the choice of algorithms, its device.

Its error is not raised on the spot: `engine.init` lets the other ranks hear it first, who would wait for this one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from engine import device as devices
from engine.comm.choice import Choice, read_choice
from engine.comm.monitor import ADDRESS_BYTES
from engine.comm.shm import missing
from engine.errors import UsageError, did_you_mean

TRANSPORTS = ("torch", "shm")
_TOO_LONG = 1e9  # seconds: torch cannot count many more, nor infinitely many


@dataclass(frozen=True)
class Start:
    """What one rank found out by itself."""

    choice: Choice
    device: torch.device
    transport: str | None
    fault: Exception | None = None
    """Why it cannot start; the rest is what was known by then."""


def judge(
    timeout: float,
    init_timeout: float,
    host: str | None,
    store: Store | None,
    staging_mib: int,
    algorithm: str | None,
    tuning: str | os.PathLike[str] | None,
    device: str,
    transport: str | None,
    rank: int,
    world_size: int,
) -> Start:
    """Judge the arguments of `engine.init`, which it describes. Raises nothing: what is wrong is the result's fault."""
    choice, where = Choice(), torch.device("cpu")
    try:
        check_arguments(timeout, init_timeout, host, store, staging_mib)
        choice = choose(algorithm, tuning)
        where = select_device(device, rank, world_size)
        return Start(choice, where, choose_transport(transport, where))
    except Exception as error:
        return Start(choice, where, transport, error)


def is_seconds(value: object) -> bool:
    """Whether `value` is a number of seconds that can be waited for."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _TOO_LONG


def check_arguments(
    timeout: float, init_timeout: float, host: str | None, store: Store | None, staging_mib: int
) -> None:
    """Raise UsageError for arguments of `engine.init` that cannot work."""
    if not is_seconds(timeout) or not is_seconds(init_timeout):
        raise UsageError(
            f"timeout={timeout!r}, init_timeout={init_timeout!r}: both are seconds above 0 and below {_TOO_LONG:g}"
        )
    if host is not None and not 0 < len(host.encode()) <= ADDRESS_BYTES:
        raise UsageError(f"host={host!r}: a name of 1 to {ADDRESS_BYTES} bytes")
    if store is not None and dist.is_initialized():
        raise UsageError(
            "store= makes torch's default process group, but there is one already: leave store, rank and world_size "
            "out to use that one, or destroy it first"
        )
    whole = isinstance(staging_mib, int) and not isinstance(staging_mib, bool)
    if not whole or not 1 <= staging_mib <= 1 << 20:
        raise UsageError(
            f"staging_mib={staging_mib!r}: MiB of shared memory for each group, a whole number from 1 to {1 << 20}"
        )


def choose_transport(transport: str | None, device: torch.device) -> str:
    """Return how bytes move: by argument, by environment, or shared memory where this process and device have it."""
    asked = transport or os.environ.get("ENGINE_TRANSPORT") or None
    source = "transport" if transport else "the environment's ENGINE_TRANSPORT"
    if asked is not None and asked not in TRANSPORTS:
        hint = did_you_mean(asked, TRANSPORTS) if isinstance(asked, str) else ""
        raise UsageError(f"{source}={asked!r}{hint}: choose {', '.join(TRANSPORTS)}")
    lacks = "a device other than the CPU" if device.type != "cpu" else missing()
    if asked == "shm" and lacks:
        raise UsageError(
            f"{source}='shm' is for CPU ranks on Linux, and this process has {lacks}"
            if device.type != "cpu"
            else f"{source}='shm' needs {lacks}, which this system does not have: take 'torch'"
        )
    return "torch" if lacks else asked or "shm"


def choose(algorithm: str | None, tuning: str | os.PathLike[str] | None) -> Choice:
    """Return how algorithms are chosen: by argument, by environment, or by the built-in rules."""
    forced = algorithm or os.environ.get("ENGINE_ALGORITHM") or None
    path = tuning or os.environ.get("ENGINE_COMM_TUNING") or None
    return Choice(forced=forced) if path is None else read_choice(os.fspath(path), forced)


def select_device(device: str, rank: int, world_size: int) -> torch.device:
    """Return the device of this process."""
    return devices.select(device, int(os.environ.get("LOCAL_RANK", rank if world_size > 1 else 0)))
