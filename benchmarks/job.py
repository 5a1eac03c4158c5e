"""Runs one torchrun job to its end: the result it wrote, or one line that says what went wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.work import Work
from engine.errors import EngineError

_GRACE = 45.0  # seconds for torchrun to end its ranks, which have sessions of their own; it kills them after 30


class JobError(EngineError):
    """A job that failed: crashed, ran past its limit, or wrote no result."""


def run_job(system: str, work: Work, processes: int, folder: Path) -> dict[str, Any]:
    """Start `system` in so many processes and return what rank 0 wrote.

    Logs go to `folder`, one file for each job. Raises JobError; no process is left then.
    """
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    log = folder / (re.sub(r"[^\w.-]", "_", system) + ".log")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = ["-m", "benchmarks.worker", system, json.dumps(work.to_dict()), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *launch, *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = process.wait(work.limit)
        except subprocess.TimeoutExpired:
            raise JobError(f"{system} ran past its limit of {work.limit:g} s (--limit); log: {log}") from None
        finally:
            end(process)
    if code != 0:
        raise JobError(f"{system} failed: {cause(log.read_text(errors='replace'))}; log: {log}")
    if not out.exists():
        raise JobError(f"{system} ended without a result; log: {log}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def cause(log: str) -> str:
    """Return why a torchrun job failed: a rank that was killed, else what the rank that failed first said."""
    summary = log[log.rfind("Failures:") if "Failures:" in log else log.rfind("Root Cause") :]
    failed = [(int(r), int(c)) for r, c in re.findall(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", summary)]
    for rank, code in failed:
        if code < 0 and -code != signal.SIGTERM:  # torchrun ends the others with SIGTERM
            return f"rank {rank} was ended by signal {-code} ({signal.Signals(-code).name})"
    said = [re.match(r"(?:\[rank(\d+)\]:)?\s*(.*)", line) for line in log.splitlines()]
    errors = [
        (int(found[1] or 0), found[2][:300])
        for found in said
        if found and re.match(r"([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)|error)\b:", found[2])
    ]
    errors = [each for each in errors if "torch.distributed.elastic" not in each[1]]
    first = failed[-1][0] if failed else None  # torchrun lists the root cause last
    own = [text for rank, text in errors if rank == first]
    if own:
        return f"rank {first}: {own[0]}"
    if errors:
        return f"rank {errors[0][0]}: {errors[0][1]}"
    return f"rank {first} ended with exit code {failed[-1][1]}" if failed else "it said nothing"


def end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
