"""The transport of CPU ranks on several hosts: shared memory inside each, the backend's messages between their leaders.

The first rank of a host leads it. Each collective brings the host's part to the leader, lets the leaders exchange, and
hands the result out inside the host, so that a host's part crosses once to each other host. All results are the same
bits on all ranks: a sum is made by one rank, or from the same parts in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.comm.algorithms.plan import Hosts
from engine.comm.arguments import flat
from engine.comm.order import InOrder, Task
from engine.comm.shm import words
from engine.comm.shm.collectives import LOW, combine
from engine.comm.shm.memory import shortage
from engine.comm.shm.transport import REDUCIBLE, SharedMemoryTransport
from engine.comm.transport import BackendError, Transport, Works
from engine.errors import MemoryShortageError


class _OverHosts:
    """The collectives. Tensors are contiguous; every call blocks."""

    def __init__(
        self, rank: int, hosts: Hosts, local: SharedMemoryTransport | None, across: Transport, tag: int
    ) -> None:
        self._rank, self._hosts = rank, hosts
        self._home = next(host for host in hosts if rank in host)
        self._leader = self._home[0]
        self._leaders = [host[0] for host in hosts]
        self._local = None if local is None else local.collectives
        self._across, self._tag = across, tag
        self._last: list[object] = []  # words that nobody may take any more, and their works: gloo drops what has none

    def barrier(self, token: Tensor) -> None:
        self.all_reduce(token, "max")

    def all_reduce(self, x: Tensor, op: str) -> None:
        v = self._wide(flat(x), op)
        head = words.head("all_reduce", op, v.dtype, v.numel(), -1)
        if self._local is not None:
            self._local.reduce(v, 0, op)
        if self._rank == self._leader:
            self._sum(head, v, [(v, leader) for leader in self._others], op)
        self._hand_out(v)
        _put(flat(x), v)

    def broadcast(self, x: Tensor, src: int) -> None:
        v = flat(x)
        head = words.head("broadcast", "", v.dtype, v.numel(), src)
        root = next(host for host in self._hosts if src in host)
        if self._home == root and self._local is not None:
            self._local.broadcast(v, self._home.index(src))
        if self._rank == root[0]:
            self._exchange(head, [(v, leader) for leader in self._others], [])
        elif self._rank == self._leader:
            self._exchange(head, [], [(v, root[0])])
        if self._home != root:
            self._hand_out(v)

    def reduce(self, x: Tensor, dst: int, op: str) -> None:
        v = self._wide(flat(x), op)
        head = words.head("reduce", op, v.dtype, v.numel(), dst)
        v = v.clone() if self._rank != dst and v.data_ptr() == x.data_ptr() else v
        root = next(host for host in self._hosts if dst in host)
        if self._local is not None:
            self._local.reduce(v, 0, op)
        if self._rank == root[0]:
            self._sum(head, v, [], op)
        elif self._rank == self._leader:
            self._exchange(head, [(v, root[0])], [])
        if self._home == root:
            self._hand_out(v)
        if self._rank == dst:
            _put(flat(x), v)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None:
        own = flat(out)
        wide = self._wide(flat(x), op)
        head = words.head("reduce_scatter", op, wide.dtype, wide.numel(), -1)
        rows = (wide.clone() if wide.data_ptr() == x.data_ptr() else wide).view(-1, own.numel())
        if self._local is not None:
            self._local.reduce(rows, 0, op)
        sums = torch.stack([rows[rank] for rank in self._home])
        if self._rank == self._leader:
            sends = [(torch.stack([rows[r] for r in host]), host[0]) for host in self._hosts if host != self._home]
            self._sum(head, flat(sums), sends, op)
        self._hand_out(sums)
        own.copy_(sums[self._home.index(self._rank)])

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        v = flat(x)
        rows = flat(out).view(-1, v.numel())
        head = words.head("all_gather", "", v.dtype, v.numel(), -1)
        blobs = {host[0]: v.new_empty(len(host), v.numel()) for host in self._hosts}
        mine = blobs[self._leader]
        if self._local is None:
            mine[0] = v
        else:
            self._local.all_gather(mine, v)
        if self._rank == self._leader:
            theirs = [(blobs[leader], leader) for leader in self._others]
            self._exchange(head, [(mine, leader) for leader in self._others], theirs)
        for host in self._hosts:
            if host != self._home:
                self._hand_out(blobs[host[0]])
            for rank, row in zip(host, blobs[host[0]], strict=True):
                rows[rank].copy_(row)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        size = len(self._across.ranks)
        sends, parts = flat(x).view(size, -1), flat(out).view(size, -1)
        head = words.head("all_to_all", "", x.dtype, x.numel(), -1)
        others = [peer for peer in range(size) if peer != self._rank]
        self._exchange(head, [(sends[peer], peer) for peer in others], [(parts[peer], peer) for peer in others])
        parts[self._rank].copy_(sends[self._rank])

    def fail(self) -> None:
        """As the leader of a host, let the other leaders end the exchange that they are in, or come to."""
        if self._rank == self._leader:
            word = _word(b"!" * words.HEAD)
            self._last.append(word)
            with contextlib.suppress(BackendError):
                self._last.append(self._across.exchange([(word, leader) for leader in self._others], [], self._tag))

    def close(self) -> None:
        """Drop what is under way for good: a work must not outlive its process group."""
        self._last.clear()

    def _wide(self, v: Tensor, op: str) -> Tensor:
        """Return what is reduced in place of `v`: low precision is summed in float32 over all hosts."""
        return v.float() if v.dtype in LOW and op in ("sum", "prod") else v

    @property
    def _others(self) -> list[int]:
        return [leader for leader in self._leaders if leader != self._rank]

    def _sum(self, head: bytes, own: Tensor, sends: Sequence[tuple[Tensor, int]], op: str) -> None:
        """Reduce what the other leaders send into `own`, in the order of the leaders; `sends` go to them meanwhile."""
        parts = {leader: own.clone() if leader == self._rank else torch.empty_like(own) for leader in self._leaders}
        self._exchange(head, sends, [(parts[leader], leader) for leader in self._others])
        combine(own, list(parts.values()), op)

    def _hand_out(self, x: Tensor) -> None:
        """Give the leader's tensor to the others of its host."""
        if self._local is not None:
            self._local.broadcast(x, 0)

    def _exchange(
        self, head: bytes, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send and receive between hosts, once those that send have said the same head: that they are in the same
        operation, and that their host has not failed.
        """
        word = _word(head)
        heard = {peer: torch.empty_like(word) for _, peer in receives}
        spoken = [(word, peer) for peer in dict.fromkeys(peer for _, peer in sends)]
        works = self._across.exchange(spoken, [(each, peer) for peer, each in heard.items()], self._tag)
        self._across.wait(works[len(spoken) :])  # first: one that has failed does not listen
        for peer, each in heard.items():
            said, name = bytes(each.tolist()), self._across.ranks[peer]
            if said != head:
                self._last += [word, works]  # which are under way for good
                if said.startswith(b"!"):
                    raise BackendError(f"rank {name}, or another on its host, has failed")
                raise BackendError(
                    f"the ranks called different things: rank {name} {words.describe(said)}, this rank "
                    f"{words.describe(head)}"
                )
        self._across.wait(works[: len(spoken)])
        self._across.wait(self._across.exchange(sends, receives, self._tag))


class HostsTransport(InOrder):
    """Collectives of one group that lies on several hosts; messages and all-to-all are the backend's."""

    name = "hosts"
    reducible = REDUCIBLE
    keeps_nan = True
    keeps_inputs = True

    def __init__(
        self, rank: int, hosts: Hosts, local: SharedMemoryTransport | None, across: Transport, tag: int
    ) -> None:
        """hosts: the group's ranks on each host. local: over the ranks of this rank's, None where it is alone there.
        across: over the whole group. tag: of the messages between leaders, used for nothing else.
        """
        self._over = _OverHosts(rank, hosts, local, across, tag)
        super().__init__(across.ranks, rank, self._over)
        self._local, self._across = local, across
        self.early = across.early

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Works:
        return self._across.exchange(sends, receives, tag)

    def exchange_later(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Works:
        return self._across.exchange(sends, receives, tag)

    def wait(self, works: Works) -> None:
        self.wait_tasks(works)
        self._across.wait([work for work in works if not isinstance(work, Task)])

    def allocate(self, nbytes: int, *, shared: bool = False) -> Tensor:
        del shared  # no memory spans hosts: `reads_in_place` says so, and the communicator refuses it
        made: list[Tensor] = []
        lack = ""

        def make() -> None:
            if self._local is not None:
                made.append(self._local.allocate(nbytes))
            else:
                made.append(_zeros(nbytes))

        try:
            self.do(make)  # in its turn: calls that are queued use the same meeting points
        except MemoryShortageError as error:
            lack = str(error)
        short = torch.tensor([bool(lack)], dtype=torch.uint8, device="cpu")
        self.all_reduce(short, "max")
        if lack or short.item():
            raise MemoryShortageError(lack or f"another host cannot give {nbytes} bytes of shared memory")
        return made.pop()

    def memory(self) -> dict[str, int]:
        return {} if self._local is None else self._local.memory()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        self.end()
        self._over.close()

    def tell(self, reason: str) -> None:
        if self._local is not None:
            self._local.fail(reason)
        self._over.fail()


def _put(x: Tensor, sums: Tensor) -> None:
    """Put sums where they belong, unless they were made there."""
    if sums.data_ptr() != x.data_ptr():
        x.copy_(sums)


def _word(said: bytes) -> Tensor:
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)


def _zeros(nbytes: int) -> Tensor:
    """Return memory of this process, for a rank that is alone on its host."""
    if lack := shortage(nbytes, f"allocate of {nbytes} bytes"):
        raise MemoryShortageError(lack)
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
