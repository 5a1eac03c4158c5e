"""The transport of CPU ranks on one host: all operations over shared memory. See `Collectives` and `Mail`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from engine.comm.arguments import outside_autograd
from engine.comm.shm.collectives import Collectives
from engine.comm.shm.links import Links, Sockets
from engine.comm.shm.mail import Mail, Message
from engine.comm.shm.segments import Segments
from engine.comm.transport import BackendError, Calls, Transport, Works
from engine.errors import EngineError, MemoryShortageError

_REDUCIBLE = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    }
)  # fmt: skip


class _Calls(Calls):
    """The operations, as the transport runs them at once and as it runs them later."""

    def __init__(self, ranks: tuple[int, ...], collectives: Collectives, mail: Mail) -> None:
        self.ranks = ranks
        self._collectives, self._mail = collectives, mail

    def _do(self, what: Callable[..., None], *arguments: Any) -> Works:
        raise NotImplementedError

    def barrier(self) -> Works:
        return self._do(self._collectives.barrier)

    def all_reduce(self, x: Tensor, op: str) -> Works:
        return self._do(self._collectives.all_reduce, x, op)

    def broadcast(self, x: Tensor, src: int) -> Works:
        return self._do(self._collectives.broadcast, x, src)

    def reduce(self, x: Tensor, dst: int, op: str) -> Works:
        return self._do(self._collectives.reduce, x, dst, op)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Works:
        return self._do(self._collectives.reduce_scatter, out, x, op)

    def all_gather(self, out: Tensor, x: Tensor) -> Works:
        return self._do(self._collectives.all_gather, out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Works:
        return self._do(self._collectives.all_to_all, out, x)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        return self._mail.start(sends, receives, tag, later=self._later)

    def wait(self, works: Works) -> None:
        messages = [work for work in works if isinstance(work, Message)]
        if messages:
            self._mail.wait(messages)
        for work in works:
            if not isinstance(work, Message):
                work.wait()

    _later = False  # whether nobody may wait for what is started


class SharedMemoryTransport(_Calls, Transport):
    """Collectives and messages of one group whose ranks are all on this host. Collectives end before they return;
    `queued` gives the same calls that return at once.
    """

    name = "shm"
    reducible = _REDUCIBLE
    keeps_nan = True
    keeps_inputs = True
    moves_alone = False
    overlaps = False
    reads_in_place = True

    def __init__(
        self, name: str, rank: int, names: Sequence[int], sockets: tuple[Sockets, Sockets], limit: float, staging: int
    ) -> None:
        """name: of the group, names: the global numbers of its ranks, both for errors. sockets: to the other ranks, for
        meetings and for messages. limit: seconds that a call may take. staging: bytes that the group may take on this
        host for tensors that do not lie in shared memory: half for collectives, half for messages.
        """
        self._links = Links(rank, sockets[0], names, limit)
        self._segments = Segments(self._links, name)
        super().__init__(
            tuple(names),
            Collectives(self._links, self._segments, staging // 2),
            Mail(sockets[1], names, limit, self._segments, staging // 2),
        )
        self._queued = _Queued(self, self._collectives, self._mail)
        self._worker: _Worker | None = None
        self._broken = ""

    def queued(self) -> Calls:
        """Return the same calls, which run one after another on a thread that the first one starts."""
        return self._queued

    def allocate(self, nbytes: int, *, shared: bool = False) -> Tensor:
        """Return `nbytes` of zeroed memory, which the other ranks read without a copy; with `shared`, the same memory
        on every rank. Every rank calls it.
        """
        made: list[Tensor] = []

        def make() -> None:
            what = f"allocate of {nbytes} bytes"
            if shared:
                made.append(self._segments.new_shared(nbytes, what))
            else:
                made.append(self._segments.new(nbytes, what)[1][self._links.rank])

        self._do(make)
        return made.pop()

    def memory(self) -> dict[str, int]:
        """Return the bytes of shared memory that this rank has reserved: `staging` and `allocated`."""
        staging = self._collectives.staging_bytes
        return {"staging": staging + self._mail.box_bytes, "allocated": self._segments.reserved - staging}

    def close(self) -> None:
        self._links.shut()  # ends a call that the thread is in
        if self._worker is not None:
            self._worker.close()
        self._links.close()
        self._mail.close()
        self._collectives.close()
        self._segments.close()

    def _do(self, what: Callable[..., None], *arguments: Any) -> Works:
        """Run a call now, after those that are queued."""
        if self._worker is not None and self._worker.left:
            self._worker.add(lambda: self._run(what, *arguments)).wait()
        else:
            self._run(what, *arguments)
        return []

    def enqueue(self, what: Callable[..., None], *arguments: Any) -> Works:
        """Run a call on the thread."""
        if self._worker is None:
            self._worker = _Worker()
        return [self._worker.add(lambda: self._run(what, *arguments))]

    def _run(self, what: Callable[..., None], *arguments: Any) -> None:
        if self._broken:
            raise BackendError(f"an earlier call of this group has failed: {self._broken}")
        x = arguments[0] if arguments else None
        try:
            with outside_autograd(x) if isinstance(x, Tensor) else contextlib.nullcontext():
                what(*arguments)
        except MemoryShortageError:
            raise  # raised on every rank alike, so they are still in step
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            if not isinstance(error, EngineError | BackendError):
                self._broken = f"rank {self.ranks[self._links.rank]} failed by itself: {type(error).__name__}: {error}"
            self._links.abort(self._broken)
            raise


class _Queued(_Calls):
    """The calls of a transport, on its thread."""

    _later = True

    def __init__(self, transport: SharedMemoryTransport, collectives: Collectives, mail: Mail) -> None:
        super().__init__(transport.ranks, collectives, mail)
        self._do = transport.enqueue  # type: ignore[method-assign]


class _Task:
    """A call on the thread."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._over.release()

    def wait(self) -> None:
        with self._over:
            if self._error is not None:
                raise self._error


class _Worker:
    """A thread that runs calls one after another."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self.left = 0  # calls that are not through
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="engine-shm", daemon=True)
        self._thread.start()

    def add(self, run: Callable[[], None]) -> _Task:
        task = _Task(run)
        with self._lock:
            self.left += 1
        self._tasks.put(task)
        return task

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            with self._lock:
                self.left -= 1
