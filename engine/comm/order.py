"""Operations that block, run one after another: at once, or on a thread for whoever must not wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from engine.comm.arguments import outside_autograd
from engine.comm.transport import BackendError, Calls, Transport, Works
from engine.errors import EngineError, MemoryShortageError


class Blocking(Protocol):
    """Collectives of one group that return when they are done."""

    def barrier(self, token: Tensor) -> None: ...
    def all_reduce(self, x: Tensor, op: str) -> None: ...
    def broadcast(self, x: Tensor, src: int) -> None: ...
    def reduce(self, x: Tensor, dst: int, op: str) -> None: ...
    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None: ...
    def all_gather(self, out: Tensor, x: Tensor) -> None: ...
    def all_to_all(self, out: Tensor, x: Tensor) -> None: ...


class _Run(Calls):
    """The calls, each run by `do`."""

    def __init__(self, ranks: tuple[int, ...], blocking: Blocking) -> None:
        self.ranks = ranks
        self._blocking = blocking

    def do(self, what: Callable[..., None], *arguments: Any) -> Works:
        raise NotImplementedError

    def barrier(self, token: Tensor) -> Works:
        return self.do(self._blocking.barrier, token)

    def all_reduce(self, x: Tensor, op: str) -> Works:
        return self.do(self._blocking.all_reduce, x, op)

    def broadcast(self, x: Tensor, src: int) -> Works:
        return self.do(self._blocking.broadcast, x, src)

    def reduce(self, x: Tensor, dst: int, op: str) -> Works:
        return self.do(self._blocking.reduce, x, dst, op)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Works:
        return self.do(self._blocking.reduce_scatter, out, x, op)

    def all_gather(self, out: Tensor, x: Tensor) -> Works:
        return self.do(self._blocking.all_gather, out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Works:
        return self.do(self._blocking.all_to_all, out, x)


class InOrder(_Run, Transport):
    """A transport whose collectives block. The thread for the others is made by the first of them."""

    def __init__(self, ranks: Sequence[int], own: int, blocking: Blocking) -> None:
        """ranks: global, own: which of them this is."""
        super().__init__(tuple(ranks), blocking)
        self._own = own
        self._later = _Later(self, blocking)
        self._worker: _Worker | None = None
        self._broken = ""

    def queued(self) -> Calls:
        return self._later

    def do(self, what: Callable[..., None], *arguments: Any) -> Works:
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

    def exchange_later(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Works:
        """Start messages for which nobody may wait for a while."""
        raise NotImplementedError

    def tell(self, reason: str) -> None:
        """Tell the other ranks, now or when they come, that this one has failed."""
        raise NotImplementedError

    def wait_tasks(self, works: Works) -> None:
        """Wait for the calls among these that are on the thread."""
        for work in works:
            if isinstance(work, Task):
                work.wait()

    def fail(self, reason: str) -> None:
        """Have no more calls: the ranks may be out of step."""
        if not self._broken:
            self._broken = reason
            self.tell(reason)

    def end(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.close()

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
            own = not isinstance(error, EngineError | BackendError)
            rank = self.ranks[self._own]
            self.fail(f"rank {rank} failed by itself: {type(error).__name__}: {error}" if own else str(error))
            raise


class _Later(_Run):
    """The calls of a transport, on its thread."""

    def __init__(self, transport: InOrder, blocking: Blocking) -> None:
        super().__init__(transport.ranks, blocking)
        self._transport = transport

    def do(self, what: Callable[..., None], *arguments: Any) -> Works:
        return self._transport.enqueue(what, *arguments)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        return self._transport.exchange_later(sends, receives, tag)

    def wait(self, works: Works) -> None:
        self._transport.wait(works)


class Task:
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
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.left = 0  # calls that are not through
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="engine-order", daemon=True)
        self._thread.start()

    def add(self, run: Callable[[], None]) -> Task:
        task = Task(run)
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
            del task  # and with it the tensors that it holds
