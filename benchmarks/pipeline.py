"""The pipeline benchmark: this engine's schedules beside torch's of the same name, in one run. See `--help`.

Every schedule trains the same GPT from the same weights on the same batches with the same optimizer, each job a
torchrun of its own, all systems in turn in every round. For each it prints the time of a step, and what each rank held;
for this engine's also the bubble, measured and simulated. A run in which two losses differ, or a system fails, is no
result: it ends with a line that says so and exit code 1 (2 for a wrong command).
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks import pipeline_results, results
from benchmarks.job import JobError, run_job
from benchmarks.machine import summary
from benchmarks.peers import Peer, check_installed, find_peer
from benchmarks.pipeline_results import System, named
from benchmarks.pipeline_worker import OVERHEAD, TIMELINE
from benchmarks.results import ENGINE, Case, LossError
from benchmarks.train_step import check_writable, names
from benchmarks.work import MODELS, Work, parse_layout, parse_model
from engine.errors import EngineError, LayoutError, UsageError
from engine.layout import Layout
from engine.pipeline.measured import Measured, read
from engine.pipeline.schedules import SCHEDULES

WORKER = "benchmarks.pipeline_worker"
_TORCH = ["torch_pipeline", "torch_pipeline_balanced"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running job is ended too
    console = Console(highlight=False, width=max(Console().width, 160))
    try:
        works, left_out = works_of(options)
        peers = {name: find_peer(name, work) for work in works for name in options.peers}
        for name, peer in peers.items():
            check_installed(name, peer)
        targets = {name: getattr(options, name) for name in ("json", "plot") if getattr(options, name)}
        probes = {"timelines": options.timelines / "probe"} if options.timelines else {}
        check_writable({**targets, **probes})
        console.print(summary(options.device), soft_wrap=True)
        for line in left_out:
            console.print(line, soft_wrap=True)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="pipeline_"))
    try:
        cases, recorded = run_all(works, peers, options.rounds, folder)
        lines = [overhead(works[0], folder)] if options.overhead else []
    except (JobError, LossError) as error:
        console.print()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted, nothing was written", file=sys.stderr)
        return 130
    shutil.rmtree(folder)
    show(console, cases, lines)
    write(targets, cases, "python -m benchmarks.pipeline " + shlex.join(arguments))
    if options.timelines is not None:
        for path in pipeline_results.draw_timelines(recorded, options.timelines):
            print(f"timeline: {path}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--nproc", type=int, help="processes; the pipeline axis gets them all, unless --layout says otherwise")
    add("--layout", default="", help="axis sizes, such as pipeline=2; axes left out are 1")
    add("--model", default="default", help="default, heavy, or sizes: hidden=512,batch=8 or heavy,layers=8")
    add("--microbatches", type=int, default=8, help="microbatches of a step")
    add("--schedules", type=names, default=["1f1b"], help=f"all, or a comma-separated list: {', '.join(SCHEDULES)}")
    add("--peers", type=peer_names, default=_TORCH,
        help="torch (its schedule of the same name, with its usual cut and with this engine's), none, or a "
             "comma-separated list of the systems of benchmarks.train_step or module:function")  # fmt: skip
    add("--rounds", type=int, default=3, help="jobs of each system, in turn")
    add("--steps", type=int, default=5, help="timed steps of each job")
    add("--warm-up", type=int, default=2, help="steps before them")
    add("--device", default="cpu", choices=("cpu", "cuda", "npu"), help="where it runs")
    add("--limit", type=float, default=300.0, help="seconds that one job may take")
    add("--overhead", action="store_true", help="measure also what the executor takes for one action")
    add("--json", type=Path, help="write every step's seconds there, with versions, hardware and command")
    add("--plot", type=Path, help="draw all systems' step times there (PNG)")
    add("--timelines", type=Path, help="write this engine's timelines into this folder: SCHEDULE.json and .png")
    return made


def peer_names(text: str) -> list[str]:
    """Split a list of systems."""
    if text == "none":
        return []
    return [name for each in names(text) for name in (_TORCH if each == "torch" else [each])]


def works_of(options: argparse.Namespace) -> tuple[list[Work], list[str]]:
    """Return the work of each schedule, and for `all` a line about each that does not fit.

    Raises EngineError where the options fit nothing.
    """
    layout = parse_layout(options.layout)
    if options.nproc is not None:
        layout = layout.resolve(options.nproc) if options.layout else Layout(pipeline=options.nproc)
    if layout.data == -1 or layout.pipeline < 2:
        raise UsageError(f"{layout} has no pipeline to measure: give --nproc 2, or --layout pipeline=2")
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: at least 1")
    every = options.schedules == ["all"]
    name = options.model if options.model in MODELS else "own sizes"
    model, works, left_out = parse_model(options.model), [], []
    for schedule in SCHEDULES if every else options.schedules:
        try:
            work = Work(layout, model, f"{name}, {schedule}", options.microbatches, schedule, device=options.device)
        except LayoutError as error:
            if not every:
                raise
            left_out.append(f"{schedule} is left out: {error}")
            continue
        works.append(replace(work, steps=options.steps, warm_up=options.warm_up, limit=options.limit))
    if not works:
        raise UsageError("no schedule is left: " + "; ".join(left_out or ["--schedules names none"]))
    return works, left_out


def run_all(
    works: Sequence[Work], peers: dict[str, Peer], rounds: int, folder: Path
) -> tuple[list[Case], dict[str, Measured]]:
    """Run every system with every schedule `rounds` times in turn. Return what was found, and this engine's recorded
    steps by schedule. Raises JobError or LossError.
    """
    cases = [Case(work, [System(name) for name in (ENGINE, *peers)]) for work in works]
    turn = [(case.work, system) for case in cases for system in case.systems]
    wanted: list[float] = []
    recorded: dict[str, Measured] = {}
    for number in range(1, rounds + 1):
        print(f"round {number}/{rounds}:", flush=True)
        # Forwards and backwards in turn: what warms up or slows down over a round favours nobody.
        for work, system in turn if number % 2 else turn[::-1]:
            assert isinstance(system, System)
            name = system.system
            alone = name in peers and peers[name].alone
            result = run_job(name, work, 1 if alone else work.layout.world_size, folder, WORKER)
            wanted = wanted or result["losses"]
            tolerance = peers[name].tolerance if name in peers else 1e-4
            results.check_losses(named(work.schedule, name), result["losses"], wanted, tolerance)
            system.add(result)
            if name == ENGINE:
                found, before = read(folder / TIMELINE), recorded.get(work.schedule)
                steps = (*(before.steps if before else ()), *found.steps)
                recorded[work.schedule] = both = replace(found, steps=steps)
                system.add_steps(both)
            print(f"  {named(work.schedule, name)} {statistics.median(result['seconds']):.3f} s", flush=True)
    return cases, recorded


def overhead(work: Work, folder: Path) -> str:
    """Measure what the executor takes for one action, and return it as a line. Raises JobError."""
    seconds = run_job(OVERHEAD, work, work.layout.world_size, folder, WORKER)["seconds"]
    return (
        f"executor overhead per action: {seconds * 1e6:.1f} us ({work.schedule}, {work.microbatches} microbatches of "
        f"almost no work, messages removed, less the same forwards and backwards in a plain loop)"
    )


def show(console: Console, cases: Sequence[Case], lines: Sequence[str]) -> None:
    """Print the table, what its columns mean, and further lines."""
    console.print()
    console.print(pipeline_results.table(cases))
    console.print(pipeline_results.NOTE)
    for line in (results.settings(cases), *lines):
        console.print(line, soft_wrap=True)


def write(targets: dict[str, Path], cases: Sequence[Case], command: str) -> None:
    """Write what was asked for."""
    if "json" in targets:
        results.save(targets["json"], cases, command)
    if "plot" in targets:
        results.plot(cases, targets["plot"])
    for name, path in targets.items():
        print(f"{name}: {path}")


if __name__ == "__main__":
    sys.exit(main())
