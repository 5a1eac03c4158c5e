"""Ranks for multi-process tests: started once, alive for many tests, started afresh after anything went wrong.

Importing torch once per rank and test is what makes such suites slow; here a fork server imports it once. `World.run`
sends a module-level function to the ranks, opens a mesh there, and returns their results, or raises one WorldError:
the first cause, then every rank's traceback, and the stacks of ranks that hang. Ranks meet through a file, so no port
can clash.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import engine
from engine.errors import CommunicationError
from engine.layout import Layout

MESH_TIMEOUT = 60.0
TRANSPORT = os.environ.get("ENGINE_TRANSPORT") or "shm"
"""What ranks of one host take in this run of the suite, where a test names none."""
_GRACE = 10.0  # seconds that the other ranks get to report once one has failed


class WorldError(AssertionError):
    """A test's ranks failed. `cause` is the rank to look at first; `reports` has a line or a traceback for each."""

    def __init__(self, cause: int, reports: dict[int, str]) -> None:
        self.cause, self.reports = cause, reports
        first = f"first cause: rank {cause}: {reports[cause].strip().splitlines()[-1]}"
        super().__init__(
            first + "".join(f"\n\n--- rank {rank}\n{text.rstrip()}" for rank, text in sorted(reports.items()))
        )


@dataclass
class _Report:
    rank: int
    value: Any = None
    error: str | None = None
    consequence: bool = False
    when: float = field(default_factory=time.monotonic)


@dataclass
class _Rank:
    process: Any
    pipe: connection.Connection
    stacks: Path


def refusals(calls: Sequence[Callable[[], Any]]) -> list[str]:
    """Return the text of the engine's error that each call raises, or "no error"."""
    texts = []
    for call in calls:
        try:
            call()
        except engine.EngineError as error:
            texts.append(str(error))
        else:
            texts.append("no error")
    return texts


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once `condition()` holds: of what another process does, that this one cannot be told of otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.001)


class World:
    """Up to as many ranks as a test asks for. One at a time runs a test; not for use from several threads."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "engine"])
        self._folder = tempfile.TemporaryDirectory(prefix="engine-world-")
        self._ranks: list[_Rank] = []
        self._runs = 0

    def run(
        self,
        layout: Layout | int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 150.0,
        mesh: bool = True,
        **options: Any,
    ) -> list[Any]:
        """Call `function(mesh, *args)` on every rank of `layout`; return the results in rank order.

        `function` is at module level; arguments and results are pickled by value. With `mesh=False` no mesh is opened
        and the function gets (rank, size, path of a fresh store file, *args). `timeout`: seconds until the ranks are
        taken to hang. `options`: for `engine.init`; a test of one transport names it here.
        """
        size = layout if isinstance(layout, int) else layout.world_size
        while len(self._ranks) < size:
            self._start(len(self._ranks))
        self._runs += 1
        store = os.path.join(self._folder.name, f"store-{self._runs}")
        where = (layout if mesh else None, options, size, store)
        task = pickle.dumps((function.__module__, function.__qualname__, *where, args))
        for rank in self._ranks[:size]:
            rank.pipe.send_bytes(task)
        try:
            reports = self._collect(size, time.monotonic() + timeout)
        except BaseException:  # what is left in the pipes must not be taken for the next run's
            self.restart()
            raise
        failed = [report for report in reports if report.error is not None]
        if not failed:
            return [report.value for report in reports]
        self.restart()
        cause = min(failed, key=lambda report: (report.consequence, report.when))
        raise WorldError(cause.rank, {report.rank: str(report.error) for report in failed})

    def restart(self) -> None:
        """End all ranks, by their ids; the next run starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks = []

    def close(self) -> None:
        self.restart()
        self._folder.cleanup()

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe()
        stacks = Path(self._folder.name, f"stacks-{number}-{self._runs}")
        process = self._context.Process(target=_serve, args=(number, theirs, str(stacks)), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append(_Rank(process, ours, stacks))

    def _collect(self, size: int, deadline: float) -> list[_Report]:
        reports: dict[int, _Report] = {}
        while len(reports) < size:
            open_ranks = [rank for rank in range(size) if rank not in reports]
            pipes = {self._ranks[rank].pipe: rank for rank in open_ranks}
            ready = connection.wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in open_ranks:
                    reports[rank] = _Report(rank, error=self._stack(rank), consequence=len(reports) > 0)
            for pipe in ready:
                report = self._receive(pipes[pipe])
                reports[report.rank] = report
                if report.error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return [reports[rank] for rank in range(size)]

    def _receive(self, rank: int) -> _Report:
        try:
            report: _Report = pickle.loads(self._ranks[rank].pipe.recv_bytes())
            return report
        except EOFError:
            process = self._ranks[rank].process
            process.join()
            code = process.exitcode
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            return _Report(rank, error=f"rank {rank} {how}")

    def _stack(self, rank: int) -> str:
        """Make a hanging rank write its stacks, and return them."""
        path = self._ranks[rank].stacks
        os.kill(self._ranks[rank].process.pid, signal.SIGUSR1)
        give_up = time.monotonic() + 2
        text = ""
        # The main thread's stack comes last and goes out through this file.
        while time.monotonic() < give_up and not re.search(r"world\.py\", line \d+ in _serve", text):
            text = path.read_text()
            time.sleep(0.01)
        return f"{text}\nrank {rank} hangs: no answer within the test's time limit"


def _serve(number: int, pipe: connection.Connection, stacks: str) -> None:
    """Life of one rank: take tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dump = open(stacks, "w")  # noqa: SIM115 (open for the life of the process)
    faulthandler.register(signal.SIGUSR1, dump)
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        report = _Report(number)
        try:
            report.value = _execute(number, *pickle.loads(task))
        except BaseException as error:
            report.error = traceback.format_exc()
            report.consequence = isinstance(error, CommunicationError)
        report.when = time.monotonic()
        pipe.send_bytes(_pickled(report))


def _pickled(report: _Report) -> bytes:
    try:
        return pickle.dumps(report)
    except Exception:
        return pickle.dumps(_Report(report.rank, error=traceback.format_exc(), when=report.when))


def _execute(
    rank: int,
    module: str,
    name: str,
    layout: Layout | None,
    options: dict[str, Any],
    size: int,
    store: str,
    args: tuple[Any, ...],
) -> Any:
    function = getattr(importlib.import_module(module), name)
    torch.manual_seed(0)
    if layout is None:
        return function(rank, size, store, *args)
    if size == 1:
        with engine.init(layout, device="cpu", timeout=MESH_TIMEOUT) as mesh:
            return function(mesh, *args)
    with engine.init(
        layout,
        device="cpu",
        timeout=MESH_TIMEOUT,
        init_timeout=MESH_TIMEOUT,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        **options,
    ) as mesh:
        return function(mesh, *args)
