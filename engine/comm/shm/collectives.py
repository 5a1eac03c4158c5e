"""The collectives of ranks that share memory: each reads what it needs where the others have put it.

Tensors in memory of `allocate` are read where they lie ("direct"), with a meeting before and one after. Others, and
small ones, go through staging: each rank copies a piece of cache size into its slot, all meet, and each reads the
others' slots. There are two slots, used in turn, so one meeting for each piece is enough: whoever comes to a meeting
has read everything that was put out for the one before. A broadcast has two slots of its own, since only its root then
knows how far the others are.

Every element of a result is summed by one rank, or by all in the same order: all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.comm.algorithms.plan import block
from engine.comm.arguments import flat
from engine.comm.shm import words
from engine.comm.shm.links import Links
from engine.comm.shm.segments import Segments
from engine.errors import MemoryShortageError

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
LOW = (torch.bfloat16, torch.float16)
_STEP = 1 << 18  # bytes that a sum over more than two ranks handles at a time, so that they stay in the cache
_KEPT = 1024  # sizes whose views of the slots are kept
_DIRECT = 1 << 18  # bytes above which a second meeting costs less than a copy
_PIECE = 1 << 20  # bytes of a slot, where the bound on staging allows it
_LEAST = 1 << 12  # bytes of the smallest slot; a page
_WIDEST = 16  # bytes of the largest element
_BARRIER = words.head("barrier", "", torch.uint8, 0, -1)


class Collectives:
    """The collectives of one group. Tensors are contiguous; every call blocks; one call at a time.

    Raises BackendError when a peer fails or calls something else, MemoryShortageError when there is no memory for the
    staging.
    """

    def __init__(self, links: Links, segments: Segments, staging: int) -> None:
        """staging: bytes that the slots of all ranks together may take."""
        self._links = links
        self._segments = segments
        self._rank, self._size = links.rank, links.size
        self._others = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._staging = staging
        self._slot = 0  # bytes of a slot; 0 before the first use
        self._slots: list[list[Tensor]] = []  # [turn][rank], for what goes in
        self._sums: list[list[Tensor]] = []  # the same, for sums on their way out
        self._told: list[list[Tensor]] = []  # [turn][rank], for what a rank broadcasts
        self._turn = 0  # which slots the next meeting announces
        self._told_turns = [0] * self._size  # the same for the next piece that a rank broadcasts
        self._views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self._places: list[tuple[int, int]] = []  # where each rank's tensor lies, in a direct operation

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's slots."""
        return (len(self._slots) + len(self._told) + len(self._sums)) * self._slot

    def close(self) -> None:
        """Drop the slots."""
        self._slots, self._told, self._sums, self._slot = [], [], [], 0
        self._views.clear()

    # ---- operations ------------------------------------------------------------------------------------------------

    def barrier(self, token: Tensor) -> None:
        """Meet."""
        del token
        self._meet(_BARRIER)

    def all_reduce(self, x: Tensor, op: str) -> None:
        """Reduce `x` in place. Small: each rank sums all; large: each sums one block and reads the others' sums."""
        v = flat(x)
        head, nbytes = words.head("all_reduce", op, v.dtype, v.numel(), -1), v.numel() * v.element_size()
        self._ready(head)
        if nbytes <= self._slot and nbytes * (self._size - 1) <= _DIRECT:
            combine(v, self._gathered(head, v), op)
        elif self._direct(head, v):
            self._all_reduce_direct(head, v, op)
        elif self._size == 2:
            for a, b in self._pieces(v):
                combine(v[a:b], self._gathered(head, v[a:b]), op)
        else:
            self._reduce_pieces(head, v, op, keep=True)

    def broadcast(self, x: Tensor, src: int) -> None:
        """Fill `x` with rank `src`'s. It meets each of the others, who do not wait for each other."""
        v = flat(x)
        head = words.head("broadcast", "", v.dtype, v.numel(), src)
        self._ready(head)
        mine = self._rank == src
        if self._segments.used and v.numel() * v.element_size() > _DIRECT:
            word = head + words.place(*(self._segments.find(v) if mine else (-1, 0)))
            self._places = words.places(self._compare(self._links.meet(word, src), head))
            if self._places[src][0] >= 0:
                if not mine:
                    v.copy_(self._peer(src, v, 0, v.numel()))
                self._links.collect(head, src)
                return
        for a, b in self._pieces(v):
            piece, slot = v[a:b], _part(self._told[self._told_turns[src]][src], v, 0, b - a)
            self._told_turns[src] ^= 1
            if mine:
                slot.copy_(piece)
            self._compare(self._links.meet(head, src), head)
            if not mine:
                piece.copy_(slot)

    def reduce(self, x: Tensor, dst: int, op: str) -> None:
        """Reduce `x` into rank `dst`'s; the others' are only read."""
        v = flat(x)
        head = words.head("reduce", op, v.dtype, v.numel(), dst)
        self._ready(head)
        if self._size > 2 and v.numel() * v.element_size() > _DIRECT:
            self._reduce_pieces(head, v, op, keep=self._rank == dst)
            return
        for a, b in self._pieces(v):
            parts = self._gathered(head, v[a:b])
            if self._rank == dst:
                combine(v[a:b], parts, op)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None:
        """Reduce the rank's block of `x` into `out`."""
        v, own = flat(x), flat(out)
        head, part = words.head("reduce_scatter", op, v.dtype, v.numel(), -1), own.numel()
        self._ready(head)
        if v.numel() * v.element_size() > _DIRECT and self._direct(head, v):
            first = self._rank * part
            peers = [self._peer(j, v, first, part) for j in self._others]
            combine(own, [v[first : first + part], *peers], op)
            self._meet(head)
            return
        for a, b in self._block_pieces(v, part):
            combine(own[a:b], self._exchanged(head, v, part, a, b), op)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Join the ranks' `x` in `out`, of which `x` may be this rank's part."""
        v = flat(x)
        parts = flat(out).view(self._size, v.numel())
        head = words.head("all_gather", "", v.dtype, v.numel(), -1)
        self._ready(head)
        direct = out.numel() * v.element_size() > _DIRECT and self._direct(head, v)
        if direct:
            for j in self._others:
                parts[j].copy_(self._peer(j, v, 0, v.numel()))
            self._meet(head)
        else:
            for a, b in self._pieces(v):
                slots = self._gathered(head, v[a:b])
                for j in self._others:
                    parts[j, a:b].copy_(slots[j])
        if parts[self._rank].data_ptr() != v.data_ptr():
            parts[self._rank].copy_(v)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        """Give block j of `x` to rank j; `out` gets the blocks in rank order."""
        v = flat(x)
        part = v.numel() // self._size
        parts = flat(out).view(self._size, part)
        head = words.head("all_to_all", "", v.dtype, v.numel(), -1)
        self._ready(head)
        if v.numel() * v.element_size() > _DIRECT and self._direct(head, v):
            first = self._rank * part
            parts[self._rank].copy_(v[first : first + part])
            for j in self._others:
                parts[j].copy_(self._peer(j, v, first, part))
            self._meet(head)
            return
        for a, b in self._block_pieces(v, part):
            for j, piece in enumerate(self._exchanged(head, v, part, a, b)):
                parts[j, a:b].copy_(piece)

    # ---- parts of them ---------------------------------------------------------------------------------------------

    def _all_reduce_direct(self, head: bytes, v: Tensor, op: str) -> None:
        blocks = [block(v.numel(), self._size, j) for j in range(self._size)]
        first, last = blocks[self._rank]
        own = v[first:last]
        combine(own, [own, *(self._peer(j, v, first, last - first) for j in self._others)], op)
        self._meet(head)
        for j in self._others:
            first, last = blocks[j]
            v[first:last].copy_(self._peer(j, v, first, last - first))
        self._meet(head)

    def _reduce_pieces(self, head: bytes, v: Tensor, op: str, *, keep: bool) -> None:
        """Sum piece by piece: each rank its block of one, which the others read a meeting later. keep: whether this
        rank wants the sums.
        """
        pieces = self._pieces(v)
        before: tuple[int, int] | None = None
        for piece in (*pieces, None):
            if piece is not None:
                mine = v[piece[0] : piece[1]]
                slots = self._slots_for(mine)
                slots[self._rank].copy_(mine)
            turn = self._turn
            self._meet(head)
            if piece is not None:
                first, last = block(len(mine), self._size, self._rank)
                sums = _part(self._sums[turn][self._rank], v, first, last)
                combine(sums, [slots[j][first:last] for j in (self._rank, *self._others)], op)
            if before is not None and keep:
                a, b = before
                for j in range(self._size):
                    first, last = block(b - a, self._size, j)
                    v[a + first : a + last].copy_(_part(self._sums[turn ^ 1][j], v, first, last))
            before = piece

    def _gathered(self, head: bytes, v: Tensor) -> list[Tensor]:
        """Put a piece out, and return every rank's, once all have."""
        slots = self._slots_for(v)
        slots[self._rank].copy_(v)
        self._meet(head)
        return slots

    def _exchanged(self, head: bytes, v: Tensor, part: int, start: int, stop: int) -> list[Tensor]:
        """Put elements [start, stop) of every block of `v` out, and return this rank's block of every rank's."""
        count, turn = stop - start, self._turn
        if count == part:
            first = self._rank * part
            return [slot[first : first + part] for slot in self._gathered(head, v)]
        mine = _part(self._slots[turn][self._rank], v, 0, count * self._size)
        mine.view(self._size, count).copy_(v.view(self._size, part)[:, start:stop])
        self._meet(head)
        first = self._rank * count
        return [_part(self._slots[turn][j], v, first, first + count) for j in range(self._size)]

    def _direct(self, head: bytes, source: Tensor) -> bool:
        """Meet, and return whether every rank's tensor lies in shared memory. Without a meeting where nothing has been
        allocated.
        """
        if not self._segments.used:
            return False
        self._places = words.places(self._meet(head + words.place(*self._segments.find(source))))
        return all(number >= 0 for number, _ in self._places)

    def _peer(self, j: int, like: Tensor, start: int, count: int) -> Tensor:
        """Return elements of rank j's tensor, where it lies."""
        number, offset = self._places[j]
        item = like.element_size()
        return self._segments.of(j, number, offset + start * item, count * item).view(like.dtype)

    def _pieces(self, v: Tensor) -> list[tuple[int, int]]:
        return _cut(v.numel(), self._slot // v.element_size())

    def _block_pieces(self, v: Tensor, part: int) -> list[tuple[int, int]]:
        return _cut(part, self._slot // v.element_size() // self._size)

    def _slots_for(self, v: Tensor) -> list[Tensor]:
        """Return the start of every rank's slot, as tensors like `v`, for the next meeting."""
        key = (v.dtype, v.numel())
        known = self._views.get(key)
        if known is None:
            if len(self._views) >= _KEPT:
                self._views.clear()
            with torch.inference_mode(False):  # a view made inside that mode could not be written outside it
                known = self._views[key] = [[_part(slot, v, 0, v.numel()) for slot in slots] for slots in self._slots]
        return known[self._turn]

    def _meet(self, word: bytes) -> list[bytes]:
        found = self._compare(self._links.meet(word), word[: words.HEAD])
        self._turn ^= 1
        return found

    def _compare(self, found: list[bytes], head: bytes) -> list[bytes]:
        """Return what the ranks have said, unless one is in another operation."""
        for each in found:
            if not each.startswith(head):
                words.compare(found, head, self._links.names)
        return found

    def _ready(self, head: bytes) -> None:
        """Make the slots, smaller where memory is short. head: of the operation that is the first to need them."""
        if self._slot:
            return
        self._meet(head)  # else ranks that differ in their first call would hear of this allocation, not of that call
        kinds = 4 if self._size == 2 else 6
        least = -(-_WIDEST * self._size // _LEAST) * _LEAST  # an element for each rank
        slot = max(least, min(_PIECE, self._staging // (kinds * self._size)) // _LEAST * _LEAST)
        while True:
            try:
                _, parts = self._segments.new(kinds * slot, "staging", keep=True)
                break
            except MemoryShortageError:
                if slot == least:
                    raise
                slot = max(least, slot // 2 // _LEAST * _LEAST)
        rows = [[part[k * slot : (k + 1) * slot] for part in parts] for k in range(kinds)]
        self._slots, self._told, self._sums, self._slot = rows[:2], rows[2:4], rows[4:], slot


def combine(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Reduce equal vectors into `out`, which may be the first of them. Low precision is summed in float32."""
    reduce = _COMBINE[op]
    if len(parts) == 2:
        reduce(parts[0], parts[1], out=out)
        return
    for start, stop in _cut(out.numel(), _STEP // out.element_size()):
        into = out[start:stop]
        wide = out.dtype in LOW and op in ("sum", "prod")
        total = parts[0][start:stop].float() if wide else into
        reduce(total if wide else parts[0][start:stop], parts[1][start:stop], out=total)
        for part in parts[2:]:
            reduce(total, part[start:stop], out=total)
        if wide:
            into.copy_(total)


def _part(memory: Tensor, like: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes of memory as elements [start, stop) of a vector of the dtype of `like`."""
    item = like.element_size()
    return memory[start * item : stop * item].view(like.dtype)


def _cut(count: int, most: int) -> list[tuple[int, int]]:
    """Return [start, stop) of pieces of at most so many elements."""
    return [(start, min(start + most, count)) for start in range(0, count, most)]
