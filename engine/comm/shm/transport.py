"""The transport of CPU ranks on one host: all operations over shared memory. See `Collectives` and `Mail`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.comm.order import InOrder
from engine.comm.shm.collectives import Collectives
from engine.comm.shm.links import Links, Sockets
from engine.comm.shm.mail import Mail
from engine.comm.shm.packets import Message
from engine.comm.shm.segments import Segments
from engine.comm.transport import Works

REDUCIBLE = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    }
)  # fmt: skip


class SharedMemoryTransport(InOrder):
    """Collectives and messages of one group whose ranks are all on this host."""

    name = "shm"
    reducible = REDUCIBLE
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
        self.collectives = Collectives(self._links, self._segments, staging // 2)
        self._mail = Mail(rank, sockets[1], names, limit, self._segments, staging // 2, self.fail)
        super().__init__(names, rank, self.collectives)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        return self._mail.start(sends, receives, tag, later=False)

    def exchange_later(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Works:
        return self._mail.start(sends, receives, tag, later=True)

    def wait(self, works: Works) -> None:
        messages = [work for work in works if isinstance(work, Message)]
        if messages:
            self._mail.wait(messages)
        self.wait_tasks(works)

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

        self.do(make)
        return made.pop()

    def shares(self, x: Tensor) -> bool:
        return self._segments.shares(x)

    def memory(self) -> dict[str, int]:
        """Return the bytes of shared memory that this rank has reserved: `staging` and `allocated`."""
        staging = self.collectives.staging_bytes
        return {"staging": staging + self._mail.box_bytes, "allocated": self._segments.reserved - staging}

    def tell(self, reason: str) -> None:
        self._links.abort(reason)
        self._mail.abort(reason)

    def close(self) -> None:
        self._links.shut()  # ends a call that the thread is in
        self.end()
        self._links.close()
        self._mail.close()
        self.collectives.close()
        self._segments.close()
