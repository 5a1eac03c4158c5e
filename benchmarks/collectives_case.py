"""What the collectives benchmark measures, as data: sizes, dtypes, cases, rows, and nccl-tests' formulas.

Pure: no process group, no torch. `n` is the number of ranks of the measured group. The formulas are those of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; GB means 1e9 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.comm.choice import algorithms_of
from engine.errors import UsageError, did_you_mean

TORCH = "torch"
CHOSEN = "chosen"
TRANSPORTS = ("torch", "shm")
MEMORIES = ("private", "registered")
"""Where a call's tensors lie: anywhere, or in memory of `Communicator.allocate`, which shared memory reads in place."""
REGISTERING = "shm"
"""The transport to which that makes a difference."""
INEXACT = "inexact, not checked"
NO_VALUES = "moves no values"
SMALL = 1 << 20
"""Bytes up to which a time is compared by its minimum: small messages over gloo have two speeds. Above, the median."""

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST_PATTERN = 65521


@dataclass(frozen=True)
class Dtype:
    """What a benchmark must know of a dtype."""

    itemsize: int
    """Bytes of an element."""
    exact: int
    """Integers from 0 to this are exact in it, and so is every sum of them that stays there."""


DTYPES = {
    "float32": Dtype(4, 2**24),
    "float64": Dtype(8, 2**53),
    "float16": Dtype(2, 2**11),
    "bfloat16": Dtype(2, 2**8),
    "int8": Dtype(1, 2**7 - 1),
    "uint8": Dtype(1, 2**8 - 1),
    "int32": Dtype(4, 2**31 - 1),
    "int64": Dtype(8, 2**63 - 1),
}


@dataclass(frozen=True)
class Kind:
    """What is particular about an operation."""

    split: bool = False
    """The vector is n equal parts."""
    reduces: bool = False
    """Adds values, so the result is exact only where sums are."""
    in_place: tuple[bool, ...] = (False,)
    """The forms it has."""
    empty: bool = False
    """Has no vector: one case, of 0 bytes."""


OPS = {
    "all_reduce": Kind(reduces=True, in_place=(True,)),
    "broadcast": Kind(in_place=(True,)),
    "reduce": Kind(reduces=True, in_place=(True,)),
    "reduce_scatter": Kind(split=True, reduces=True, in_place=(False, True)),
    "all_gather": Kind(split=True, in_place=(False, True)),
    "all_to_all": Kind(split=True),
    "gather": Kind(split=True),
    "scatter": Kind(split=True),
    "send_recv": Kind(),
    "barrier": Kind(empty=True),
}


@dataclass(frozen=True)
class Way:
    """One way of making a case's call."""

    transport: str
    algorithm: str
    """TORCH: torch's own call, without the engine."""
    memory: str

    def __str__(self) -> str:
        return self.algorithm if self.algorithm == TORCH else f"{self.algorithm} over {self.transport}, {self.memory}"


@dataclass(frozen=True)
class Case:
    """One operation on one size, dtype and form; measured in each of its ways in turn."""

    op: str
    dtype: str
    count: int
    """Elements of the whole vector."""
    in_place: bool
    ways: tuple[Way, ...]

    @property
    def bytes(self) -> int:
        """Of the whole vector."""
        return self.count * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Row:
    """One measured case with one algorithm. Times are seconds, of the slowest rank."""

    op: str
    backend: str
    transport: str
    algorithm: str
    device: str
    dtype: str
    n: int
    bytes: int
    """Of the whole vector."""
    count: int
    in_place: bool
    t_min: float
    t_p50: float
    t_p95: float
    t_p99: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int | None
    """Elements that differ from what they must be, over all ranks; None: not checked, `note` says why."""
    note: str = ""
    memory: str = MEMORIES[0]
    """Results from before there was a choice do not have it."""
    t_matmul: float | None = None
    """With --overlap: the matmul alone."""
    t_together: float | None = None
    """With --overlap: the operation started, the matmul, the wait."""
    t_exposed: float | None = None
    """With --overlap: together - matmul, what of the operation the matmul did not hide."""

    @property
    def seconds(self) -> float:
        """The time that rows are compared by."""
        return self.t_min if self.bytes <= SMALL else self.t_p50

    @property
    def way(self) -> Way:
        """How the call was made."""
        return Way(self.transport, self.algorithm, self.memory)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the fields of --overlap only where it was measured."""
        return {name: value for name, value in asdict(self).items() if name[:2] != "t_" or value is not None}


@dataclass(frozen=True)
class Cost:
    """One way of calling an operation on one element, with --overhead. Times are seconds, of the slowest rank."""

    op: str
    backend: str
    device: str
    dtype: str
    bytes: int
    n: int
    transport: str
    """local: a group of one rank."""
    call: str
    """torch, native, or chosen: what the engine takes."""
    took: str
    """The algorithm that it was; local: a group of one rank."""
    watch: str
    """What was on: ledger, checks, or nothing."""
    calls: int
    t_min: float
    t_p50: float
    over_min_us: float | None
    """Microseconds above torch's own call; None where torch has no group."""
    over_p50_us: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


# ---- how things are spelt ----------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Read `4096`, `64K`, `16M`, `1G` (1024-based) as bytes."""
    found = re.fullmatch(r"(-?\d+)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        hint = ""
        if found is not None:
            hint = did_you_mean(found[1] + found[2][:1].upper(), [found[1] + unit for unit in "KMG"])
        raise UsageError(f"--sizes: {text!r} is no size{hint}: write bytes, or K, M, G of 1024: 4096, 64K, 16M")
    if int(found[1]) < 1:
        raise UsageError(f"--sizes: {text!r}: a size is at least 1 byte")
    return int(found[1]) * UNITS[found[2].upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in bytes, ascending: `1K:64M` (each twice the one before), `1K:64M:4` (four times), `1K,1M`."""
    sizes: set[int] = set()
    for part in text.split(","):
        first, *rest = part.split(":")
        low = parse_size(first)
        high = parse_size(rest[0]) if rest else low
        if len(rest) > 2 or (len(rest) == 2 and not re.fullmatch(r"\s*\d+\s*", rest[1])):
            raise UsageError(f"--sizes: {part!r}: a range is FROM:TO or FROM:TO:FACTOR, such as 1K:64M:4")
        factor = int(rest[1]) if len(rest) == 2 else 2
        if factor < 2:
            raise UsageError(f"--sizes: {part!r}: the factor is {factor}, but sizes grow by at least 2")
        if low > high:
            raise UsageError(f"--sizes: {part!r}: starts at {low} bytes, above its end {high}")
        while low <= high:
            sizes.add(low)
            low *= factor
    return tuple(sorted(sizes))


def parse_names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Read a comma-separated list of known names."""
    names = tuple(dict.fromkeys(name for name in (each.strip() for each in text.split(",")) if name))
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: unknown {name!r}{did_you_mean(name, known)}: choose {', '.join(known)}")
    if not names:
        raise UsageError(f"{option}: nothing is named: choose {', '.join(known)}")
    return names


def size_name(size: int) -> str:
    """Return `64K` for 65536: the largest unit that divides."""
    for unit in ("G", "M", "K"):
        if size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


# ---- what is run -------------------------------------------------------------------------------------------------


def select_algorithms(op: str, wanted: Sequence[str], n: int) -> tuple[str, ...]:
    """Return the algorithms that `op` is measured with. Raises UsageError for one that it has not.

    `all` is every one by name and torch's own call, `chosen` what the engine takes when none is named. A group of one
    has no torch group: `all` is without torch's call there.
    """
    every = (TORCH, *algorithms_of(op))
    found: dict[str, None] = {}
    for name in wanted:
        if name == "all":
            found.update(dict.fromkeys(every if n > 1 else every[1:]))
        elif name in (CHOSEN, *every):
            found[name] = None
        else:
            known = ("all", CHOSEN, *every)
            hint = did_you_mean(name, known)
            raise UsageError(f"--algorithms: {op} has no {name!r}{hint}: choose {', '.join(known)}")
    if n == 1 and TORCH in wanted:
        raise UsageError("--algorithms torch: a group of one rank has no torch group: raise --nproc, or leave it out")
    return tuple(found)


def ways(algorithms: Sequence[str], transports: Sequence[str], memories: Sequence[str]) -> tuple[Way, ...]:
    """Return every way that there is: torch's own call once, the engine's over each transport and in each memory."""
    found = [Way(TORCH, TORCH, MEMORIES[0])] if TORCH in algorithms else []
    for transport in transports:
        for memory in memories:
            if memory == MEMORIES[0] or transport == REGISTERING:
                found += [Way(transport, name, memory) for name in algorithms if name != TORCH]
    return tuple(found)


def plan(
    ops: Sequence[str],
    sizes: Sequence[int],
    dtypes: Sequence[str],
    algorithms: Sequence[str],
    n: int,
    transports: Sequence[str] = TRANSPORTS[:1],
    memories: Sequence[str] = MEMORIES[:1],
) -> Iterator[Case]:
    """Yield all cases. A vector has at least one element (of each rank's part) and otherwise at most `size` bytes; an
    operation without a vector is one case, of no bytes.
    """
    for op in ops:
        kind = OPS[op]
        names = select_algorithms(op, algorithms, n)
        if kind.empty:
            yield Case(op, "uint8", 0, False, ways(names, transports, MEMORIES[:1]))
            continue
        how = ways(names, transports, memories)
        for dtype in dtypes:
            parts = n if kind.split else 1
            counts = dict.fromkeys(parts * max(1, size // (DTYPES[dtype].itemsize * parts)) for size in sizes)
            for in_place in kind.in_place:
                yield from (Case(op, dtype, count, in_place, how) for count in counts)


# ---- formulas ----------------------------------------------------------------------------------------------------


def bandwidths(op: str, size: int, seconds: float, n: int) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s (1e9 bytes) of the whole vector's `size` bytes.

    algbw = size / time. busbw = algbw times what each rank's link must carry at least: 2 (n - 1) / n for all-reduce,
    (n - 1) / n for what is cut into n parts, 1 for the others.
    """
    algbw = size / seconds / 1e9
    if op == "all_reduce":
        return algbw, algbw * 2 * (n - 1) / n
    return algbw, algbw * (n - 1) / n if OPS[op].split else algbw


def modulus(op: str, dtype: str, n: int) -> int | None:
    """Return m: inputs are integers from 0 to m - 1, such that every result, and every partial sum, is exact.

    A prime, so that no block of a power of two repeats another; above n for a reduction, so that every rank gives
    another value. None where a reduction has no such m: there exactness ends.
    """
    limit = DTYPES[dtype].exact
    largest = min(limit // n if OPS[op].reduces else limit, _LARGEST_PATTERN)
    found = next((m for m in range(largest, 1, -1) if all(m % d for d in range(2, math.isqrt(m) + 1))), 1)
    return found if found > n or not OPS[op].reduces else None


def checked(case: Case, n: int, check: bool) -> tuple[bool, str]:
    """Return whether it is known how many elements are wrong, and the note that says why it is not, or that there are
    none to compare.
    """
    if OPS[case.op].empty:
        return True, NO_VALUES
    if modulus(case.op, case.dtype, n) is None:
        return False, INEXACT
    return (True, "") if check else (False, "not checked")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def iterations_for(seconds: float) -> int:
    """Return how often a call of so many seconds is timed: for about 0.2 s, at least 8 and at most 200 times."""
    return max(8, min(200, math.ceil(0.2 / max(seconds, 1e-9))))


def thresholds(times: Mapping[int, Mapping[str, float]], margin: float = 0.05) -> tuple[tuple[float, str], ...]:
    """Return (largest bytes, algorithm) from {bytes: {algorithm: seconds}}, neighbours with the same choice merged.

    The fastest wins, but `native` stays unless another is faster by at least `margin`, and so does the choice of the
    size before, so that noise between equals makes no rows. The last holds for any size.
    """
    found: list[tuple[float, str]] = []
    for size, each in sorted(times.items()):
        best = min(each, key=lambda name: each[name])
        if "native" in each and each[best] > each["native"] * (1 - margin):
            best = "native"
        before = found[-1][1] if found else best
        if before in each and each[best] > each[before] * (1 - margin):
            best = before
        if found and found[-1][1] == best:
            found.pop()
        found.append((size, best))
    return (*found[:-1], (math.inf, found[-1][1]))
