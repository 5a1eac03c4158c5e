"""Memory that several processes map: reserved before it is used, without a name in any file system.

A segment is an anonymous file of the kernel (memfd). Its pages are reserved at once, so that a machine with too little
memory says so here and not by a signal in the middle of a sum; they go back when the last process has dropped its
mapping, however it ended.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import MemoryShortageError

_CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20


def reserve(nbytes: int, what: str) -> int:
    """Reserve `nbytes` of shared memory and return its descriptor, which the caller closes.

    what: named in the error. Raises MemoryShortageError when the kernel refuses, for want of memory or for a limit on
    the size of files (`ulimit -f`).
    """
    try:
        fd = os.memfd_create("engine", os.MFD_CLOEXEC)
    except OSError as error:
        raise MemoryShortageError(f"{what} needs a descriptor, and the kernel refused: {error.strerror}") from error
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        found, where = available()
        raise MemoryShortageError(
            f"{what} needs {_mib(nbytes)} of shared memory, and the kernel refused: {error.strerror}; {_mib(found)} "
            f"are free ({where}): {_FIX}"
        ) from error
    return fd


def map_segment(fd: int, nbytes: int) -> Tensor:
    """Map a segment and return its bytes. The mapping lasts as long as the memory of the tensor is referred to, and
    needs the descriptor no more.
    """
    with torch.inference_mode(False):
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, nbytes)
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[arg-type]


def shortage(nbytes: int, what: str) -> str:
    """Return why `nbytes` cannot be had on this machine now, or an empty string."""
    found, where = available()
    if nbytes <= found:
        return ""
    return f"{what} needs {_mib(nbytes)} of shared memory on this host, {_mib(found)} are free ({where}): {_FIX}"


_FIX = "use fewer ranks per host or smaller tensors, raise the limit, or set ENGINE_TRANSPORT=torch"


def available() -> tuple[int, str]:
    """Return how many bytes this process may still take, and what says so: the machine, or its memory cgroup."""
    found, where = _machine(), "MemAvailable"
    for limit, use, name in _limits():
        left = max(0, limit - use)
        if left < found:
            found, where = left, f"memory cgroup {name}: limit {_mib(limit)}, in use {_mib(use)}"
    return found, where


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _limits() -> list[tuple[int, int, str]]:
    """Return limit, use and name of every memory cgroup that this process is in."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, use = _CGROUP, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, use = _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            if root != each and root not in each.parents:
                break
            try:
                values = [(each / name).read_text().strip() for name in (limit, use)]
            except OSError:
                continue
            if all(value.isdigit() for value in values):
                found.append((int(values[0]), int(values[1]) - _reclaimable(each), f"/{each.relative_to(root)}"))
    return found


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files in a cgroup's use, which the kernel takes back first."""
    try:
        pairs = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get("inactive_file", 0))


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f} MiB"
