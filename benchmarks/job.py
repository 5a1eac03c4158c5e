"""Runs one torchrun job to its end: the result it wrote, or one line that says what went wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.work import Work
from engine.errors import EngineError

_GRACE = 5.0  # seconds that torchrun gets to end its ranks
_LOST_A_PEER = r"Connection (reset|closed)|CommunicationError|failed after \d+\.\d s"

_NAMED = re.compile(r"error: ranks? (\d+)")


class JobError(EngineError):
    """A job that failed: crashed, ran past its limit, or wrote no result."""


def run_job(system: str, work: Work, processes: int, folder: Path, worker: str = "benchmarks.worker") -> dict[str, Any]:
    """Start `system` in so many processes and return what rank 0 wrote. worker: the module that is one rank of it.

    Logs go to `folder`, one file for each job. Raises JobError; no process is left then.
    """
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    log = folder / (re.sub(r"[^\w.-]", "_", system) + ".log")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = ["-m", worker, system, json.dumps(work.to_dict()), str(out)]
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
        (_speaker(found), found[2][:1000])
        for found in said
        if found and re.match(r"([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)|error)\b:", found[2])
    ]
    errors = [each for each in errors if "torch.distributed.elastic" not in each[1]]
    first = failed[-1][0] if failed else None  # torchrun lists the root cause last
    # What a rank says that lost its peer is no cause.
    errors.sort(key=lambda each: (re.search(_LOST_A_PEER, each[1]) is not None, each[0] != first))
    if errors:
        rank, text = errors[0]
        return text.removeprefix("error: ") if _NAMED.match(text) else f"rank {rank}: {text}"
    return f"rank {first} ended with exit code {failed[-1][1]}" if failed else "it said nothing"


def _speaker(said: re.Match[str]) -> int:
    """Return the rank that an error line is of: torch puts it before the line, the benchmarks into it."""
    named = _NAMED.match(said[2])
    return int(said[1] or (named[1] if named else 0))


def end(process: subprocess.Popen[Any]) -> None:
    """End torchrun and its ranks, which have sessions of their own: by asking, then by force. By their ids."""
    if process.poll() is not None:
        return
    ranks = _descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        ranks |= _descendants(process.pid)
        process.kill()
        process.wait()
    for pid, started in ranks.items():
        if _started(pid) == started:  # not another process with the id of one that has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + _GRACE  # one that the kernel holds in a call cannot be waited for
    while time.monotonic() < give_up and any(_started(pid) == started for pid, started in ranks.items()):
        time.sleep(0.01)


def _descendants(pid: int) -> dict[int, str]:
    """Return the processes below `pid`, each with its start time. Linux only; elsewhere none is found."""
    found: dict[int, str] = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found |= {child: _started(child), **_descendants(child)}
    return found


def _started(pid: int) -> str:
    """Return the start time of a process, in ticks (proc_pid_stat(5), field 22); empty when it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]
