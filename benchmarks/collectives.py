"""The collectives microbenchmark: every operation and algorithm of the engine beside torch's own call. See `--help`.

Starts a torchrun job of --nproc ranks on this machine; inside one (RANK and WORLD_SIZE are set) it is a rank of it, so
it also runs on accelerators and across hosts: `torchrun ... -m benchmarks.collectives ...`. Conventions are those of
nccl-tests: a size is that of the whole vector, algbw = bytes / time, busbw = algbw times what a rank's link must carry,
GB = 1e9 bytes. Exit code 1: a wrong element, a row slower than --baseline, or a failed job; 2: a wrong command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import collectives_ratios as ratios
from benchmarks import collectives_results as results
from benchmarks.collectives_case import Cost, Row
from benchmarks.collectives_options import Settings, check, parser
from benchmarks.collectives_ranks import Ranks
from benchmarks.job import JobError, cause, end
from benchmarks.machine import summary
from engine.errors import EngineError

_MODULE = "benchmarks.collectives"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one rank of it, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return run_rank(arguments)
    try:
        settings = read(arguments, None)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        document = start_job(settings, arguments)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    meta = {**document["meta"], "command": command_line(arguments)}
    if settings.overhead is not None:
        return finish_overhead(settings, meta, [Cost(**each) for each in document["rows"]])
    return finish(settings, meta, [Row(**each) for each in document["rows"]])


def read(arguments: Sequence[str], started: int | None) -> Settings:
    """Return the checked command line. `started`: ranks of the job that this process is one of. Raises EngineError."""
    return check(parser((__doc__ or "").split("\n\n", 1)[1]).parse_args(arguments), started)


def run_rank(arguments: Sequence[str]) -> int:
    """Be one rank of a torchrun job, and return its exit code. A command that is wrong on one rank ends all.

    Rank 0 prints, and writes what was asked for or, when started by us, the result that we read.
    """
    settings, wrong = None, ""
    try:
        ranks = Ranks.find()
        try:
            settings = read(arguments, ranks.size)
        except EngineError as error:
            wrong = str(error)
        if ranks.refuse(wrong) or settings is None:
            return 2
    except EngineError as error:  # the ranks did not meet
        print(f"error: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 1
    try:
        return measure(settings, arguments, ranks.rank)
    except EngineError as error:
        ranks.say(str(error))
        return 1


def measure(settings: Settings, arguments: Sequence[str], rank: int) -> int:
    """Measure as one rank, and return its exit code. Raises EngineError."""
    if settings.overhead is not None:
        return measure_overhead(settings, arguments, rank)
    from benchmarks.collectives_worker import run

    more, rows = run(
        settings,
        lambda: print(heading(settings), flush=True),
        lambda found: print(results.lines(found), flush=True),
    )
    if rank != 0:
        return 0
    meta = results.meta(command_line(arguments), settings.device, **more)
    if settings.result is None:
        return finish(settings, meta, rows)
    results.save_json(settings.result, meta, rows)
    return 0


def measure_overhead(settings: Settings, arguments: Sequence[str], rank: int) -> int:
    """Measure what a call costs as one rank, and return its exit code. Raises EngineError."""
    from benchmarks.collectives_overhead import run

    more, rows = run(settings, lambda: print(where(settings), flush=True))
    if rank != 0:
        return 0
    meta = results.meta(command_line(arguments), settings.device, **more)
    if settings.result is None:
        return finish_overhead(settings, meta, rows)
    results.save_json(settings.result, meta, rows)
    return 0


def where(settings: Settings) -> str:
    """Return the machine and the ranks."""
    return (
        f"# {summary(settings.device)}\n"
        f"# {settings.layout} = {settings.layout.world_size} ranks; axis {settings.axis}, n = {settings.n}; "
        f"transport {', '.join(settings.transports)}"
    )


def heading(settings: Settings) -> str:
    """Return what stands above the table."""
    lines = [where(settings), results.LEGEND]
    if settings.n == 1:
        lines.append("# a group of one rank has no torch group and no peer: without torch's own calls and send_recv")
    return "\n".join([*lines, results.header()])


def start_job(settings: Settings, arguments: Sequence[str]) -> dict[str, Any]:
    """Start the ranks and return what rank 0 wrote; its table goes to this output. Raises JobError."""
    folder = Path(tempfile.mkdtemp(prefix="collectives_"))
    out, log = folder / "result.json", folder / "errors.log"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.layout.world_size)]
    command = [sys.executable, *launch, "-m", _MODULE, *without_nproc(arguments), "--result", str(out)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env={"OMP_NUM_THREADS": "1", **os.environ})
        try:
            code = process.wait()
        finally:
            end(process)
    if code != 0:
        raise JobError(f"the job failed: {cause(log.read_text(errors='replace'))}; log: {log}")
    if not out.exists():
        raise JobError(f"the job ended without a result; log: {log}")
    document: dict[str, Any] = json.loads(out.read_text())
    shutil.rmtree(folder)
    return document


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a rank. torchrun reads its command to the end, and takes --nproc for its own."""
    nproc = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    nproc.add_argument("--nproc")
    return nproc.parse_known_args(arguments)[1]


def command_line(arguments: Sequence[str]) -> str:
    """Return what the user typed."""
    return f"python -m {_MODULE} {shlex.join(arguments)}"


def finish(settings: Settings, meta: dict[str, Any], rows: Sequence[Row]) -> int:
    """Write what was asked for, say what is wrong or slower, and return the exit code."""
    found = ratios.ratios(rows) if settings.ratios else []
    if settings.json is not None:
        more = {"ratios": ratios.to_dict(found)} if settings.ratios else {}
        results.save_json(settings.json, meta, rows, **more)
        print(f"# rows with versions and hardware: {settings.json}")
    if settings.csv is not None:
        results.save_csv(settings.csv, rows)
        print(f"# rows: {settings.csv}")
    if settings.plot is not None:
        from benchmarks.collectives_plot import plot

        plot(settings.plot, meta, rows)
        print(f"# picture: {settings.plot}")
    if settings.ratios:
        print(f"\n{ratios.markdown(found)}\n")
    sound = _sound(settings, rows)
    if settings.tune is not None and sound:
        results.save_tuning(settings.tune, meta, rows, meta["hosts"])
        print(f"# tuning file: {settings.tune} (ENGINE_COMM_TUNING={settings.tune})")
    return 0 if _fast(settings, rows) and sound else 1


def finish_overhead(settings: Settings, meta: dict[str, Any], rows: Sequence[Cost]) -> int:
    """Show what a call costs, write what was asked for, and return the exit code."""
    from rich.console import Console

    from benchmarks.collectives_overhead import NOTE, table

    Console(highlight=False, width=max(Console().width, 120)).print(table(rows))
    print(NOTE)
    if settings.json is not None:
        results.save_json(settings.json, meta, rows)
        print(f"# rows with versions and hardware: {settings.json}")
    return 0


def _sound(settings: Settings, rows: Sequence[Row]) -> bool:
    """Say how many elements are wrong; return whether none is."""
    if not settings.check:
        print("# values were not checked (--check)")
        return True
    bad = [row for row in rows if row.wrong]
    unchecked = sum(row.wrong is None for row in rows)
    print(f"# {len(rows)} rows: {len(bad)} with wrong elements, {unchecked} not checked (their notes say why)")
    for row in bad:
        place = "in" if row.in_place else "out of"
        print(
            f"error: {row.op} {row.way}: {row.dtype} {row.bytes} B {place} place: {row.wrong} elements are wrong",
            file=sys.stderr,
        )
    return not bad


def _fast(settings: Settings, rows: Sequence[Row]) -> bool:
    """Say what is slower than the baseline; return whether nothing is."""
    if settings.baseline is None:
        return True
    compared, found = results.slower(settings.baseline, rows, settings.tolerance)
    print(
        f"# {compared} of {len(rows)} rows are in the baseline; slower by more than {settings.tolerance:.0%}:", end=" "
    )
    print(len(found))
    for line in found:
        print(f"error: slower: {line}", file=sys.stderr)
    if not compared:
        print("error: the baseline has no row of this run: measure the same ops, sizes, ranks", file=sys.stderr)
    return bool(compared) and not found


if __name__ == "__main__":
    sys.exit(main())
