"""CPU, CUDA and Ascend NPU: the only file that knows them apart.

Which device a rank uses, which backend carries its collectives, what that backend can reduce, seeds, memory.
Facts about Ascend are from torch_npu 2.7.1 and 2.13 (their sources and vendor documents); they were not run here.
A CPU run touches no accelerator module.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.errors import UsageError, did_you_mean

KINDS = ("cpu", "cuda", "npu")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_REDUCIBLE = {
    "gloo": _FLOATS | _INTEGERS | {torch.float64, torch.bool, torch.complex64, torch.complex128},
    "nccl": _FLOATS | _INTEGERS | {torch.float64, torch.bool, torch.complex64, torch.complex128},
    # uint8 and bool pass in all-reduce but not in reduce-scatter, fp64 in neither, int64 is slow on A2 and missing in
    # A3's default mode: only what is right everywhere.
    "hccl": _FLOATS | {torch.int32},
}


def select(device: str, local_rank: int) -> torch.device:
    """Return this rank's device: `auto` takes npu, then cuda, then cpu.

    Raises UsageError for an unknown kind, an absent accelerator, or more ranks on this host than accelerators.
    """
    if device == "auto":
        device = next((kind for kind in ("npu", "cuda") if _count(kind) > 0), "cpu")
    if device not in KINDS:
        hint = did_you_mean(device, ("auto", *KINDS))
        raise UsageError(f"device={device!r}{hint}: choose auto, {', '.join(KINDS)}")
    if device == "cpu":
        return torch.device("cpu")
    count = _count(device)
    if local_rank >= count:
        raise UsageError(
            f"device={device!r}: local rank {local_rank} needs its own accelerator, but this host shows {count}: "
            f"start at most {count} ranks here, or use device='cpu'"
        )
    return torch.device(device, local_rank)


def activate(device: torch.device) -> None:
    """Make `device` the current one. Called before any group is made: a backend guesses the device otherwise."""
    if device.type != "cpu":
        _module(device.type).set_device(device)


def keep_freed_memory(device: torch.device) -> None:
    """Let what a training step frees on a CPU serve the next one, up to 64 MiB, in place of going back to the system.

    glibc's malloc raises its thresholds for that to the size of the largest block of at most 32 MiB that it has freed
    (mallopt(3), M_MMAP_THRESHOLD), unless the user has set them: so one such block is taken, untouched, and freed.
    Without, a step of the benchmarks' GPT took 19,000 page faults in the process with the head, a tenth of its time.
    """
    if device.type == "cpu":
        torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8, device=device)


def backend(device: torch.device) -> str:
    """Return the name of the torch.distributed backend that serves `device`."""
    return _BACKENDS[device.type]


def group_arguments(device: torch.device) -> dict[str, Any]:
    """Return the extra arguments of init_process_group.

    NCCL gets `device_id`. HCCL must not: torch's DeviceMesh would then call split_group, which HCCL does not have.
    """
    return {"device_id": device} if device.type == "cuda" else {}


def reducible(device: torch.device) -> frozenset[torch.dtype]:
    """Return the dtypes that the backend of `device` can sum."""
    return _REDUCIBLE[backend(device)]


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float in which `device` can sum over ranks: float64, on HCCL float32."""
    return torch.float64 if torch.float64 in reducible(device) else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done; nothing to do on a CPU."""
    if device.type != "cpu":
        _module(device.type).synchronize(device)


def stream_seed(*parts: object) -> int:
    """Return a 63-bit seed made of `parts`: equal on every machine for equal parts, unrelated for others."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def random_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Run the block with torch's generators (CPU, and `device`'s) seeded by `seed`; afterwards they are as before."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(_module(device.type).default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory this process has held, in MiB: on an accelerator the allocator's peak, on a CPU the
    resident set's (getrusage), which counts pages shared with other processes in each of them."""
    if device.type != "cpu":
        return float(_module(device.type).max_memory_allocated(device)) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def reset_peak_memory(device: torch.device) -> None:
    """Let an accelerator's `peak_memory_mib` count from here on; a CPU's cannot be reset."""
    if device.type != "cpu":
        _module(device.type).reset_peak_memory_stats(device)


def mark(device: torch.device) -> Any:
    """Return a point in time for `seconds_between`: on a CPU now, else when what is queued on `device` by now is done
    (an event: the queue is not waited for).
    """
    if device.type == "cpu":
        return time.perf_counter()
    event = _module(device.type).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Return the seconds from one mark to another of the same device, which must have been waited for."""
    if isinstance(first, float):
        return float(last - first)
    return float(first.elapsed_time(last)) / 1e3


def live_memory(device: torch.device) -> int | None:
    """Return the bytes that are in use now: an accelerator's tensors, on a CPU all that malloc has given to this
    process. None where that is not known: on a CPU without glibc 2.33 or later. Takes about a microsecond.
    """
    if device.type != "cpu":
        return int(_module(device.type).memory_allocated(device))
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None
    found = mallinfo()
    return int(found.uordblks) + int(found.hblkhd)


class _MallocInfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _mallinfo() -> Callable[[], Any] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


def describe(device: torch.device) -> str:
    """Return what the hardware calls itself: an accelerator's name, else the processor's."""
    if device.type != "cpu":
        return str(_module(device.type).get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def host_empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return flat host memory for copies to and from `device`: pinned where that is an accelerator. Unfilled."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


class Copied:
    """A copy between host and device that was started."""

    def __init__(self, event: Any = None, device: torch.device | None = None) -> None:
        """event: the accelerator's, recorded behind the copy; None for one that is done."""
        self._event, self._device = event, device

    def wait_on_host(self) -> None:
        """Return once the copy is done."""
        if self._event is not None:
            self._event.synchronize()

    def wait_on_device(self) -> None:
        """Let what the device is given from now on begin after the copy; returns at once."""
        if self._event is not None and self._device is not None:
            _module(self._device.type).current_stream(self._device).wait_event(self._event)


class CopyStream:
    """Copies between host and device beside the device's other work, in their order; on a CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if device.type == "cpu" else _module(device.type).Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying `source`, as the device's work queued so far leaves it, to `target`. Host memory must be pinned
        (`host_empty`), and none of both may be freed or written before the copy is done.
        """
        if self._stream is None:
            target.copy_(source)
            return Copied()
        module = _module(self._device.type)
        self._stream.wait_stream(module.current_stream(self._device))
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = module.Event()
            event.record(self._stream)
        return Copied(event, self._device)


def _module(kind: str) -> Any:
    """Return torch.cuda or torch.npu."""
    if kind == "npu":
        importlib.import_module("torch_npu")
    return getattr(torch, kind)


def _count(kind: str) -> int:
    """Return how many accelerators of `kind` this host shows; 0 when its package is missing."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        return 0
    module = _module(kind)
    return int(module.device_count()) if module.is_available() else 0
