"""The transport of CPU ranks on several hosts: shared memory inside each, the backend's messages between their leaders.

The first rank of a host leads it. Each collective brings the host's part to the leader, lets the leaders exchange, and
hands the result out inside the host, so that each byte crosses once per pair of hosts. All results are the same bits on
all ranks: a sum is made by one rank, or from the same parts in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.comm.algorithms.plan import Hosts
from engine.comm.arguments import flat
from engine.comm.order import InOrder, Task
from engine.comm.shm.collectives import LOW, combine
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
        self._last: list[Tensor] = []  # words that nobody may take any more

    def barrier(self, token: Tensor) -> None:
        self.all_reduce(token, "max")

    def all_reduce(self, x: Tensor, op: str) -> None:
        v = self._wide(flat(x), op)
        if self._local is not None:
            self._local.reduce(v, 0, op)
        if self._rank == self._leader:
            self._sum(v, [(v, leader) for leader in self._others], op)
        self._hand_out(v)
        _put(flat(x), v)

    def broadcast(self, x: Tensor, src: int) -> None:
        v = flat(x)
        root = next(host for host in self._hosts if src in host)
        if self._home == root and self._local is not None:
            self._local.broadcast(v, self._home.index(src))
        if self._rank == root[0]:
            self._exchange([(v, leader) for leader in self._others], [])
        elif self._rank == self._leader:
            self._exchange([], [(v, root[0])])
        if self._home != root:
            self._hand_out(v)

    def reduce(self, x: Tensor, dst: int, op: str) -> None:
        v = self._wide(flat(x), op)
        v = v.clone() if self._rank != dst and v.data_ptr() == x.data_ptr() else v
        root = next(host for host in self._hosts if dst in host)
        if self._local is not None:
            self._local.reduce(v, 0, op)
        if self._rank == root[0]:
            self._sum(v, [], op)
        elif self._rank == self._leader:
            self._exchange([(v, root[0])], [])
        if self._home == root:
            self._hand_out(v)
        if self._rank == dst:
            _put(flat(x), v)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None:
        own = flat(out)
        wide = self._wide(flat(x), op)
        rows = (wide.clone() if wide.data_ptr() == x.data_ptr() else wide).view(-1, own.numel())
        if self._local is not None:
            self._local.reduce(rows, 0, op)
        sums = torch.stack([rows[rank] for rank in self._home])
        if self._rank == self._leader:
            sends = [(torch.stack([rows[r] for r in host]), host[0]) for host in self._hosts if host != self._home]
            self._sum(flat(sums), sends, op)
        self._hand_out(sums)
        own.copy_(sums[self._home.index(self._rank)])

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        v = flat(x)
        rows = flat(out).view(-1, v.numel())
        blobs = {host[0]: v.new_empty(len(host), v.numel()) for host in self._hosts}
        mine = blobs[self._leader]
        if self._local is None:
            mine[0] = v
        else:
            self._local.all_gather(mine, v)
        if self._rank == self._leader:
            theirs = [(blobs[leader], leader) for leader in self._others]
            self._exchange([(mine, leader) for leader in self._others], theirs)
        for host in self._hosts:
            if host != self._home:
                self._hand_out(blobs[host[0]])
            for rank, row in zip(host, blobs[host[0]], strict=True):
                rows[rank].copy_(row)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        self._across.wait(self._across.all_to_all(out, x))

    def fail(self) -> None:
        """As the leader of a host, let the other leaders end the exchange that they are in, or come to."""
        if self._rank == self._leader:
            word = torch.ones(1, dtype=torch.uint8)
            self._last.append(word)
            with contextlib.suppress(BackendError):
                self._across.exchange([(word, leader) for leader in self._others], [], self._tag)

    def _wide(self, v: Tensor, op: str) -> Tensor:
        """Return what is reduced in place of `v`: low precision is summed in float32 over all hosts."""
        return v.float() if v.dtype in LOW and op in ("sum", "prod") else v

    @property
    def _others(self) -> list[int]:
        return [leader for leader in self._leaders if leader != self._rank]

    def _sum(self, own: Tensor, sends: Sequence[tuple[Tensor, int]], op: str) -> None:
        """Reduce what the other leaders send into `own`, in the order of the leaders; `sends` go to them meanwhile."""
        parts = {leader: own.clone() if leader == self._rank else torch.empty_like(own) for leader in self._leaders}
        self._exchange(sends, [(parts[leader], leader) for leader in self._others])
        combine(own, list(parts.values()), op)

    def _hand_out(self, x: Tensor) -> None:
        """Give the leader's tensor to the others of its host."""
        if self._local is not None:
            self._local.broadcast(x, 0)

    def _exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive between leaders, once none of them says that its host has failed."""
        word = torch.zeros(1, dtype=torch.uint8)
        words = {leader: torch.zeros(1, dtype=torch.uint8) for _, leader in receives}
        spoken = [(word, leader) for leader in dict.fromkeys(leader for _, leader in sends)]
        heard = [(each, leader) for leader, each in words.items()]
        works = self._across.exchange(spoken, heard, self._tag)
        self._across.wait(works[len(spoken) :])  # first: one that has failed does not listen
        failed = [self._across.ranks[leader] for leader, each in words.items() if each.item()]
        if failed:
            self._last.append(word)  # which is under way for good
            raise BackendError(f"a rank on the host of rank {failed[0]} has failed")
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
        made: Tensor | None = None
        lack = ""
        try:
            made = self._local.allocate(nbytes) if self._local is not None else torch.zeros(nbytes, dtype=torch.uint8)
        except MemoryShortageError as error:
            lack = str(error)
        short = torch.tensor([bool(lack)], dtype=torch.uint8)
        self.all_reduce(short, "max")
        if lack or made is None or short.item():
            raise MemoryShortageError(lack or f"another host cannot give {nbytes} bytes of shared memory")
        return made

    def memory(self) -> dict[str, int]:
        return {} if self._local is None else self._local.memory()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        self.end()

    def tell(self, reason: str) -> None:
        if self._local is not None:
            self._local.fail(reason)
        self._over.fail()


def _put(x: Tensor, sums: Tensor) -> None:
    """Put sums where they belong, unless they were made there."""
    if sums.data_ptr() != x.data_ptr():
        x.copy_(sums)
