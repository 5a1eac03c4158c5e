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

_GRACE = 20.0  # seconds that torchrun gets to end its ranks


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
            _end(process)
    if code != 0:
        raise JobError(f"{system} failed with exit code {code}: {first_error(log.read_text())}; log: {log}")
    if not out.exists():
        raise JobError(f"{system} ended without a result; log: {log}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def first_error(log: str) -> str:
    """Return the line of a torchrun log in which the first rank to fail says why."""
    for line in log.splitlines():
        text = re.sub(r"^(\[rank\d+\]:?)?\s*", "", line)
        if not text.startswith("torch.distributed.elastic") and re.match(
            r"([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)|error)\b:?", text
        ):
            return text[:300]
    found = re.search(r"(exitcode\s*:.*)", log.partition("Root Cause")[2])
    return found[1] if found else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
