"""The training benchmark: this engine and its peers on the same work, in one run. See `--help`.

Every system trains the same GPT from the same weights on the same batches with the same optimizer, each job a torchrun
of its own, the systems in turn in every round. A run in which two systems' losses differ, or a system is absent or
fails, is no result: it ends with a line that says so and exit code 1 (2 for a wrong command).
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from rich.console import Console

from benchmarks import results
from benchmarks.job import JobError, run_job
from benchmarks.machine import summary
from benchmarks.peers import PEERS, Peer, check_installed, find_peer
from benchmarks.results import ENGINE, Case, LossError, Measured
from benchmarks.work import ACCUMULATE, MODELS, Work, parse_layout, parse_model, standard_set
from engine.errors import EngineError, UsageError

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    made = parser()
    options = made.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running job is ended too
    console = Console(highlight=False, width=max(Console().width, 110))
    try:
        work = standard(options, made) if options.standard else [(single(options), options.peers or ["plain"])]
        targets = files(options)
        old = results.read(options.compare) if options.compare else None
        peers = [{name: find_peer(name, each) for name in names} for each, names in work]
        for named in peers:
            for name, peer in named.items():
                check_installed(name, peer)
        console.print(summary(options.device), soft_wrap=True)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="train_step_"))
    try:
        cases = [
            run_case(console, each, named, options.rounds, folder) for (each, _), named in zip(work, peers, strict=True)
        ]
    except (JobError, LossError) as error:
        console.print()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted, nothing was written", file=sys.stderr)
        return 130
    shutil.rmtree(folder)
    show(console, cases, old)
    write(options, targets, cases, "python -m benchmarks.train_step " + shlex.join(arguments))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step", description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--standard", action="store_true", help="the cases of `make bench`, with all peers, instead of one layout")
    add("--layout", default="", help="axis sizes, such as data=2,tensor=2; axes left out are 1")
    add("--nproc", type=int, help="processes; must be what the layout needs")
    add("--model", default="default", help="default, heavy, or sizes: hidden=512,batch=8 or heavy,layers=8")
    add("--peers", type=names, help=f"comma-separated: {', '.join(PEERS)}, or module:function; default: plain")
    add("--schedule", default="1f1b", help="this engine's pipeline schedule")
    add("--stage", type=int, default=2, choices=(0, 1, 2), help="this engine's ZeRO stage")
    add(
        "--accumulate", choices=ACCUMULATE, help="how this engine adds up microbatches' gradients; default: its stage's"
    )
    add("--accumulation", type=int, help="microbatches of a step; default: up to 8 in a pipeline, else 1")
    add("--rounds", type=int, default=3, help="jobs of each system, in turn")
    add("--steps", type=int, default=5, help="timed steps of each job")
    add("--warm-up", type=int, default=2, help="steps before them")
    add("--device", default="cpu", choices=("cpu", "cuda", "npu"), help="where it runs")
    add("--limit", type=float, default=300.0, help="seconds that one job may take")
    add("--json", type=Path, help="write every step's seconds there, with versions, hardware and command")
    add("--plot", type=Path, help="draw a picture there (PNG)")
    add("--compare", type=Path, help="an older --json file: show what changed")
    return made


def names(text: str) -> list[str]:
    """Split a comma-separated list. Raises ArgumentTypeError for a name that is given twice."""
    found = [name for name in (each.strip() for each in text.split(",")) if name]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"a name is given twice in {text!r}")
    return found


def single(options: argparse.Namespace) -> Work:
    """Return the work that the options describe. Raises EngineError when it does not fit."""
    layout = parse_layout(options.layout)
    if options.nproc is not None:
        layout = layout.resolve(options.nproc)
    elif layout.data == -1:
        raise UsageError("--layout data=-1 fills up the processes: say how many with --nproc")
    if options.accumulation is not None and options.accumulation < 1:
        raise UsageError(f"--accumulation {options.accumulation}: a step has at least 1 microbatch")
    name = options.model if options.model in MODELS else "own sizes"
    work = Work(
        layout, parse_model(options.model), name, options.accumulation, options.schedule, options.stage,
        accumulate=options.accumulate,
    )  # fmt: skip
    return common(work, options)


def standard(options: argparse.Namespace, made: argparse.ArgumentParser) -> list[tuple[Work, list[str]]]:
    """Return the standard cases. Raises UsageError for an option that would be ignored."""
    fixed = ("layout", "nproc", "model", "peers", "schedule", "stage", "accumulate", "accumulation")
    given = [f"--{name}" for name in fixed if getattr(options, name) != made.get_default(name)]
    if given:
        raise UsageError(f"--standard has its own layouts, models and peers: leave out {', '.join(given)}")
    return [(common(work, options), peers) for work, peers in standard_set()]


def common(work: Work, options: argparse.Namespace) -> Work:
    """Return `work` with what one and many cases share."""
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: at least 1")
    return replace(work, device=options.device, steps=options.steps, warm_up=options.warm_up, limit=options.limit)


def run_case(console: Console, work: Work, peers: dict[str, Peer], rounds: int, folder: Path) -> Case:
    """Run every system `rounds` times in turn. Raises JobError or LossError."""
    systems = {name: Measured(name) for name in (ENGINE, *peers)}
    bounds = {name: Measured(name) for name in results.BOUNDS}
    tolerances = {name: peer.tolerance for name, peer in peers.items()}
    console.print(f"\n[bold]{work.name}[/bold], {results.plural(work.layout.world_size, 'process')}")
    for number in range(1, rounds + 1):
        print(f"round {number}/{rounds}:", end="", flush=True)
        # Forwards and backwards in turn: what warms up or slows down over a round favours nobody.
        turn = list(systems.items())
        for name, measured in turn if number % 2 else turn[::-1]:
            alone = name in peers and peers[name].alone
            result = run_job(name, work, 1 if alone else work.layout.world_size, folder)
            engine_losses = systems[ENGINE].losses or result["losses"]
            results.check_losses(name, result["losses"], engine_losses, tolerances.get(name, 1e-4))
            measured.add(result)
            for bound, seconds in result.get("bounds", {}).items():
                bounds[bound].seconds += seconds
            print(f"  {name} {statistics.median(result['seconds']):.3f} s", end="", flush=True)
        print()
    return Case(work, [*systems.values(), *bounds.values()])


def show(console: Console, cases: Sequence[Case], old: tuple[str, list[Case]] | None) -> None:
    """Print the table, what its columns mean, and what changed."""
    console.print()
    console.print(results.table(cases))
    console.print(results.NOTE)
    console.print(results.settings(cases), soft_wrap=True)
    if old is not None:
        console.print()
        console.print(results.comparison(old[1], cases))
        console.print(f"older run: {old[0]}", soft_wrap=True)


def files(options: argparse.Namespace) -> dict[str, Path]:
    """Return where the results go; the standard set is kept as dated files, numbered from the second of a day on.

    Raises UsageError where nothing can be written: better now than after the run.
    """
    targets: dict[str, Path] = {name: getattr(options, name) for name in ("json", "plot") if getattr(options, name)}
    if options.standard:
        stem, number = f"{date.today().isoformat()}_train_step", 1
        while (RESULTS / f"{stem}{f'_{number}' if number > 1 else ''}.txt").exists():
            number += 1
        dated = RESULTS / (stem + (f"_{number}" if number > 1 else ""))
        targets["table"] = dated.with_suffix(".txt")
        targets.setdefault("json", dated.with_suffix(".json"))
        targets.setdefault("plot", dated.with_suffix(".png"))
    check_writable(targets)
    return targets


def check_writable(targets: Mapping[str, Path]) -> None:
    """Raise UsageError for a picture that is no PNG, and where a file cannot be written."""
    if "plot" in targets and targets["plot"].suffix != ".png":
        raise UsageError(f"--plot {targets['plot']}: pictures are PNG, end the name in .png")
    for path in targets.values():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a"):
                pass
            if path.stat().st_size == 0:
                path.unlink()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def write(options: argparse.Namespace, targets: dict[str, Path], cases: Sequence[Case], command: str) -> None:
    """Write what was asked for."""
    if "json" in targets:
        results.save(targets["json"], cases, command)
    if "plot" in targets:
        results.plot(cases, targets["plot"])
    if "table" in targets:
        with targets["table"].open("w") as file:
            plain = Console(file=file, width=120)
            plain.print(f"{command}\n{summary(options.device)}", soft_wrap=True)
            show(plain, cases, None)
    for name, path in targets.items():
        print(f"{name}: {path}")


if __name__ == "__main__":
    sys.exit(main())
