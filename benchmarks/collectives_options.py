"""The command line of the collectives benchmark: its options, and the checks that end a wrong one at once."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks import collectives_results as results
from benchmarks.collectives_case import (
    DTYPES,
    MEMORIES,
    OPS,
    REGISTERING,
    TORCH,
    TRANSPORTS,
    Case,
    Row,
    parse_names,
    parse_sizes,
    plan,
    size_name,
)
from benchmarks.collectives_operations import Call, load_operations
from benchmarks.work import parse_layout
from engine import device as devices
from engine.comm.algorithms import PLANS
from engine.comm.shm import missing
from engine.comm.start import choose_transport
from engine.errors import UsageError, did_you_mean
from engine.layout import Layout

AXES = ("data", "tensor", "pipeline", "world")
PROCESSES_PER_CORE = 8
_OVERHEAD = ("nproc", "layout", "axis", "iterations", "warmup", "device", "json", "overhead", "result", "transports")
_ELEMENT = 4  # bytes
BUFFERS = 4  # of the largest size, on each rank: input, its copy, result, what is expected
_REGISTERED = 2  # more: input and result
_STANDARD_OPS = "all_reduce,broadcast,reduce_scatter,all_gather,all_to_all,send_recv"


@dataclass(frozen=True)
class Settings:
    """A checked command line."""

    layout: Layout
    axis: str
    n: int
    """Ranks of the measured group."""
    transports: tuple[str, ...]
    """A mesh for each."""
    registered: bool
    """Whether memory of `allocate` is measured."""
    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    device: str
    """cpu, cuda or npu."""
    iterations: int | None
    """Timed calls; None: by the time of one."""
    warmup: int
    check: bool
    overlap: bool
    ratios: bool
    """Tell how many times as long torch's own call takes."""
    overhead: str | None
    """With --overhead, which measures one element and no cases: the axis of one rank that is measured too."""
    operations: Mapping[str, Call]
    """How the engine is called."""
    baseline: tuple[Row, ...] | None
    """Only where rows are compared with it: in the process that starts the ranks, or else on rank 0."""
    tolerance: float
    csv: Path | None
    json: Path | None
    plot: Path | None
    tune: Path | None
    """Write a tuning file there."""
    result: Path | None
    """Rank 0 of a job that we started writes all rows there, and the process that started it does the rest."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong like everything else here: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser(description: str) -> argparse.ArgumentParser:
    """Return the options."""
    made = Parser(
        prog="python -m benchmarks.collectives", description=description, allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--nproc", type=int, help="processes to start; default: as the layout needs, or 4")
    add("--layout", default="", help="axis sizes, such as data=2,tensor=2; default: all processes on the axis")
    add("--axis", default="data", help=f"whose groups are measured, all at once: {', '.join(AXES)}")
    add("--ops", default=_STANDARD_OPS, help=f"all, or a list of: {', '.join(OPS)}")
    add("--sizes", default="1K:64M", help="bytes of the whole vector: FROM:TO, FROM:TO:FACTOR or a list, K = 1024")
    add("--dtypes", default="float32,bfloat16", help=f"a list of: {', '.join(DTYPES)}")
    add("--transports", help=f"a list of: {', '.join(TRANSPORTS)}; default: what engine.init takes; --overhead: all")
    add("--memory", default="private", help=f"where tensors lie: {', '.join(MEMORIES)} (shm: Communicator.allocate)")
    add("--algorithms", default="all", help="all, chosen (what the engine takes), torch (its own call), or names")
    add("--iterations", default="auto", help="timed calls; auto: about 0.2 s of them, 8 to 200")
    add("--warmup", type=int, default=3, help="calls before them")
    add("--check", action="store_true", help="compare every element; a wrong one makes the exit code 1")
    add("--overlap", action="store_true", help="put a matmul beside each operation; adds t_exposed to the rows")
    add("--ratios", action="store_true", help="end with tables of torch's time / ours, in Markdown and in the --json")
    add("--overhead", action="store_true", help="instead: what the communicator costs over torch, for one element")
    add("--device", default="cpu", help="auto, cpu, cuda or npu")
    add("--csv", type=Path, help="write the rows there")
    add("--json", type=Path, help="write the rows there, with versions, hardware and command")
    add("--plot", type=Path, help="draw time and bus bandwidth against size there (PNG)")
    add("--baseline", type=Path, help="an older --json: exit code 1 when a row is slower than there")
    add("--tolerance", type=float, default=0.1, help="how much slower, as a part of the older time")
    add(
        "--tune",
        action="store_true",
        help="measure all algorithms (first dtype) and write each size's fastest to --out; implies --check",
    )
    add("--out", type=Path, help="the tuning file, for ENGINE_COMM_TUNING or engine.init(tuning=...)")
    add("--operations", help=argparse.SUPPRESS, default=None)
    add("--result", type=Path, help=argparse.SUPPRESS, default=None)
    return made


def check(options: argparse.Namespace, started: int | None) -> Settings:
    """Return the settings. `started`: ranks of the torchrun job that this process is one of, None outside one.

    Raises EngineError for everything that cannot work; nothing has run then.
    """
    parse_names("--axis", options.axis, AXES)
    layout = _layout(options, started)
    n = layout.world_size if options.axis == "world" else getattr(layout, options.axis)
    device = _device(options.device, layout.world_size, started)
    overhead = _overhead(options, layout, n) if options.overhead else None
    transports = _transports(options, n, device)
    memories = _memories(options, transports, n)
    sizes = parse_sizes(options.sizes) if overhead is None else (_ELEMENT,)
    registered = MEMORIES[1] in memories
    _check_memory(sizes[-1], layout.world_size, BUFFERS + _REGISTERED * registered, device, started)
    cases = _cases(options, sizes, n, device, transports, memories) if overhead is None else ()
    if options.warmup < 1:
        raise UsageError(f"--warmup {options.warmup}: at least 1")
    if not (math.isfinite(options.tolerance) and options.tolerance >= 0):
        raise UsageError(f"--tolerance {options.tolerance}: 0 or more, 0.1 is 10 % slower")
    _check_ratios(options, cases)
    if options.plot is not None and cases and not any(case.bytes for case in cases):
        raise UsageError(f"--plot: {cases[0].op} has no sizes to draw against: add another to --ops")
    for name in ("csv", "json", "plot", "out"):
        _check_writable(name, getattr(options, name))
    return Settings(
        layout, options.axis, n, transports, registered, cases, sizes, device,
        _iterations(options.iterations), options.warmup,
        options.check or options.tune, options.overlap, options.ratios, overhead, load_operations(options.operations),
        _baseline(options, cases, n, device, started), options.tolerance,
        options.csv, options.json, options.plot, _tuning_file(options, device, n), options.result,
    )  # fmt: skip


def _layout(options: argparse.Namespace, started: int | None) -> Layout:
    """Return the layout, for the processes that are to be started or were."""
    nproc = options.nproc
    if started is not None and nproc not in (None, started):
        raise UsageError(f"--nproc {nproc}: this is a rank of a job of {started} processes: leave --nproc out")
    nproc = started if started is not None else nproc
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc}: at least 1")
    layout = parse_layout(options.layout) if options.layout else Layout(**{_AXIS_OF[options.axis]: nproc or 4})
    if nproc is not None or layout.data == -1:
        layout = layout.resolve(nproc or 4)
    cores = len(os.sched_getaffinity(0))
    if started is None and layout.world_size > PROCESSES_PER_CORE * cores:
        raise UsageError(
            f"--nproc {layout.world_size}: at most {PROCESSES_PER_CORE} processes for each of this machine's {cores} "
            f"cores: start at most {PROCESSES_PER_CORE * cores}"
        )
    return layout


_AXIS_OF = {"world": "data", "data": "data", "tensor": "tensor", "pipeline": "pipeline"}


def _overhead(options: argparse.Namespace, layout: Layout, n: int) -> str:
    """Return an axis of one rank. Raises UsageError for an option that would be ignored, and for other layouts."""
    known = parser("")
    given = [name for name, value in vars(options).items() if value != known.get_default(name)]
    ignored = [f"--{name}" for name in given if name not in _OVERHEAD]
    if ignored:
        raise UsageError(f"--overhead measures one element and takes none of {', '.join(ignored)}: leave it out")
    if n == 1:
        raise UsageError(f"--overhead: axis {options.axis} has one rank, where torch has no call: raise --nproc")
    single = next((axis for axis in AXES if getattr(layout, axis, 0) == 1), None)
    if single is None:
        raise UsageError(f"--overhead measures a group of one rank too, but {layout} has none: leave an axis at 1")
    return single


def _device(wanted: str, ranks: int, started: int | None) -> str:
    """Return the kind of device, after checking that this host has one for each of its ranks."""
    last = ranks - 1 if started is None else int(os.environ.get("LOCAL_RANK", 0))
    return devices.select(wanted, last).type


def _transports(options: argparse.Namespace, n: int, device: str) -> tuple[str, ...]:
    """Return the transports that are measured. Raises UsageError for one that there is not."""
    if options.transports is None:
        if options.tune:
            return (TORCH,)
        if options.overhead and device == "cpu" and not missing():
            return TRANSPORTS
        return (choose_transport(None, torch.device(device)),)
    names = parse_names("--transports", options.transports, TRANSPORTS)
    for name in names:
        choose_transport(name, torch.device(device))
    if options.tune and names != (TORCH,):
        raise UsageError("--tune chooses between algorithms over torch; shm has calls of its own: --transports torch")
    if n == 1 and len(names) > 1:
        raise UsageError(f"--transports {options.transports}: a group of one rank has none: raise --nproc, or name one")
    return names


def _memories(options: argparse.Namespace, transports: Sequence[str], n: int) -> tuple[str, ...]:
    """Return where tensors lie. Raises UsageError for a memory that no transport reads, or for one left with none."""
    names = parse_names("--memory", options.memory, MEMORIES)
    if MEMORIES[1] in names and (n == 1 or REGISTERING not in transports):
        raise UsageError(
            f"--memory {MEMORIES[1]} is for transport {REGISTERING} and several ranks, not for {', '.join(transports)} "
            f"and n = {n}: name {REGISTERING} in --transports, or leave it out"
        )
    others = [name for name in transports if name != REGISTERING]
    if MEMORIES[0] not in names and others:
        raise UsageError(f"--memory {options.memory}: transport {others[0]} has no other than {MEMORIES[0]}: name both")
    return names


def _check_memory(size: int, ranks: int, buffers: int, device: str, started: int | None) -> None:
    here = ranks if started is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cpu" and here * buffers * size > memory:
        raise UsageError(
            f"--sizes: {here} ranks x {buffers} buffers x {size_name(size)} = {here * buffers * size / 2**30:,.0f} "
            f"GiB, but this machine has {memory / 2**30:.1f} GiB: at most {memory // (here * buffers) >> 20}M"
        )


def _cases(
    options: argparse.Namespace,
    sizes: tuple[int, ...],
    n: int,
    device: str,
    transports: Sequence[str],
    memories: Sequence[str],
) -> tuple[Case, ...]:
    tunable = tuple(op for op in OPS if op in PLANS)
    known = tunable if options.tune else tuple(OPS)
    wanted = "all" if options.tune and options.ops == _STANDARD_OPS else options.ops
    ops = known if wanted.strip() == "all" else parse_names("--ops", wanted, known)
    if n == 1 and "send_recv" in ops:
        if wanted.strip() != "all" and options.ops != _STANDARD_OPS:
            raise UsageError("--ops send_recv: a group of one rank has no peer: raise --nproc, or leave it out")
        ops = tuple(op for op in ops if op != "send_recv")
    dtypes = parse_names("--dtypes", options.dtypes, tuple(DTYPES))[: 1 if options.tune else None]
    for dtype in dtypes:
        sums = [op for op in ops if OPS[op].reduces]
        if sums and getattr(torch, dtype) not in devices.reducible(torch.device(device)):
            raise UsageError(f"--dtypes {dtype}: {device} cannot {sums[0]} it: choose others, or other --ops")
    algorithms = tuple(filter(None, (each.strip() for each in options.algorithms.split(","))))
    if not algorithms:
        raise UsageError("--algorithms: nothing is named: choose all, chosen, torch, or names")
    cases = plan(ops, sizes, dtypes, algorithms, n, transports, memories)
    return tuple(each for each in cases if not options.tune or each.in_place == OPS[each.op].in_place[0])


def _iterations(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--iterations {text!r}{did_you_mean(text, ('auto',))}: auto, or a number of at least 1")
    return int(text)


def _check_ratios(options: argparse.Namespace, cases: Sequence[Case]) -> None:
    """Refuse --ratios where there is nothing to divide."""
    raw = {way.algorithm == TORCH for case in cases for way in case.ways}
    if options.ratios and raw != {True, False}:
        raise UsageError(
            f"--ratios divides torch's time by ours, and --algorithms {options.algorithms} does not measure both here: "
            f"name torch and chosen, over at least two ranks"
        )


def _tuning_file(options: argparse.Namespace, device: str, n: int) -> Path | None:
    if options.tune != (options.out is not None):
        raise UsageError("--tune and --out FILE go together: the one measures, the other says where it is written")
    if options.tune and device != "cpu":
        raise UsageError(f"--tune is for gloo: on {device} the engine always takes the backend's own calls")
    if options.tune and (n == 1 or options.algorithms != "all"):
        why = "a group of one rank has no choice" if n == 1 else f"it measures all, not {options.algorithms}"
        raise UsageError(f"--tune: {why}: raise --nproc, and leave --algorithms out")
    return options.out if options.tune else None


def _baseline(
    options: argparse.Namespace, cases: Sequence[Case], n: int, device: str, started: int | None
) -> tuple[Row, ...] | None:
    """Read the older run where it is needed. Raises UsageError for one that has nothing of what is to be measured."""
    judges = started is None or (options.result is None and int(os.environ.get("RANK", 0)) == 0)
    if options.baseline is None or not judges:
        return None
    rows = results.read(options.baseline)
    # Where a group has another transport than was asked for, its rows say so.
    spread = started is not None and int(os.environ.get("LOCAL_WORLD_SIZE", started)) < started
    instead = ("local",) if n == 1 else (TORCH,) if spread else ()
    planned = {
        (case.op, replace(way, transport=transport), case.dtype, case.bytes, case.in_place)
        for case in cases
        for way in case.ways
        for transport in (way.transport, *instead)
    }
    # torch's own call is the same whatever is asked of the engine: alone it would judge nothing of it.
    ours = {key for key in planned if key[1].algorithm != TORCH} or planned
    if not any(
        (row.op, row.way, row.dtype, row.bytes, row.in_place) in ours and (row.n, row.device) == (n, device)
        for row in rows
    ):
        raise UsageError(
            f"--baseline {options.baseline}: this run measures none of its {len(rows)} rows: name the ops, sizes, "
            f"dtypes, transports, algorithms, memory, device and number of ranks that are in it"
        )
    return rows


def _check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written after the run, by opening it. Rank 0 writes, so it alone tries."""
    if path is None or int(os.environ.get("RANK", 0)) != 0:
        return
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"--{option} {path} cannot be written: {error}: name a file in a folder that can") from error
    if not there:
        path.unlink()
