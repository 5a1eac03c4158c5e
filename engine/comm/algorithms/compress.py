"""Sums whose messages travel in 16 bits: reduce-scatter and all-reduce with `wire_dtype`.

A message is the values in bf16, or in fp16 with a power-of-two scale for every `CHUNK` of them, taken from the chunk's
largest finite magnitude so that this lands in [2^14, 2^15) (below it, for magnitudes under 2^-111): no fp32 value up to
3.3e38 overflows (above it, as in bf16, rounding may give inf), and what fp16 loses is relative to the chunk's largest
value. inf and NaN travel as such. float64 values are taken to fp32 first. Sums are in fp32. Every contribution, the
owner's own too, is rounded once on its way, and in an all-reduce the sum once more: all ranks end with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.comm.algorithms.plan import block
from engine.comm.algorithms.run import Messenger, Operation
from engine.comm.arguments import flat, outside_autograd

CHUNK = 4096
WIRE_DTYPES = (torch.bfloat16, torch.float16)


def message_bytes(count: int, wire: torch.dtype) -> int:
    """Return the bytes of a message of `count` values."""
    return 2 * count + (4 * -(-count // CHUNK) if wire is torch.float16 else 0)


def pack(x: Tensor, wire: torch.dtype) -> Tensor:
    """Return the message, bytes (message_bytes,), for flat values `x`."""
    values = flat(x).to(torch.float32)
    if wire is torch.bfloat16:
        return values.to(wire).view(torch.uint8)
    chunks = -(-values.numel() // CHUNK)
    padded = torch.nn.functional.pad(values, (0, chunks * CHUNK - values.numel())).view(chunks, CHUNK)
    finite = torch.where(padded.isfinite(), padded.abs(), 0.0)
    exponents = (torch.frexp(finite.amax(1)).exponent - 15).clamp(-126, 127)
    scales = torch.ldexp(finite.new_ones(chunks), exponents)
    narrow = (padded / scales[:, None]).to(wire).view(-1)[: values.numel()]
    return torch.cat([scales.view(torch.uint8), narrow.view(torch.uint8)])


def unpack(message: Tensor, count: int, wire: torch.dtype) -> Tensor:
    """Return the fp32 values (count,) of a message."""
    if wire is torch.bfloat16:
        return message.view(wire).to(torch.float32)
    chunks = -(-count // CHUNK)
    scales, narrow = message[: 4 * chunks].view(torch.float32), message[4 * chunks :].view(wire)
    return narrow.to(torch.float32) * scales.repeat_interleave(CHUNK)[:count]


class Compressed(Operation):
    """One reduce-scatter or all-reduce under way; its first messages are sent at once."""

    def __init__(
        self, messenger: Messenger, rank: int, size: int, x: Tensor, wire: torch.dtype, out: Tensor, *, share: bool
    ) -> None:
        """x: the flat vector of this rank. out: flat memory for the sum of the own block or, with `share`, of all."""
        self._share = share
        self._messenger, self._rank, self._size, self._wire, self._out = messenger, rank, size, wire, out
        self.in_rounds = share or not messenger.moves_alone
        self._count = x.numel()
        self._tag = messenger.tag()
        self._own = pack(x[slice(*block(self._count, size, rank))], wire)
        others = [peer for peer in range(size) if peer != rank]
        sends = [(pack(x[slice(*block(self._count, size, peer))], wire), peer) for peer in others]
        self._incoming = [torch.empty_like(self._own) for _ in others]
        self._post(sends, list(zip(self._incoming, others, strict=True)))

    def wait(self) -> None:
        """Sum what arrived and, for an all-reduce, share the sum."""
        with outside_autograd(self._out):
            self._finish()

    def _finish(self) -> None:
        self._drain()
        start, stop = block(self._count, self._size, self._rank)
        total = torch.zeros(stop - start, dtype=torch.float32, device=self._out.device)
        # In rank order, so that the sum does not depend on who owns it.
        for message in [*self._incoming[: self._rank], self._own, *self._incoming[self._rank :]]:
            total += unpack(message, stop - start, self._wire)
        if not self._share:
            self._out.copy_(total)
            return
        shared = pack(total, self._wire)
        others = [peer for peer in range(self._size) if peer != self._rank]
        blocks = {peer: block(self._count, self._size, peer) for peer in range(self._size)}
        arriving = {
            peer: shared.new_empty(message_bytes(blocks[peer][1] - blocks[peer][0], self._wire)) for peer in others
        }
        self._post([(shared, peer) for peer in others], [(arriving[peer], peer) for peer in others])
        self._drain()
        for peer, (low, high) in blocks.items():
            self._out[low:high] = unpack(arriving.get(peer, shared), high - low, self._wire)

    def _post(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        self._buffers = sends
        kept = [[(x, peer) for x, peer in pairs if x.numel()] for pairs in (sends, receives)]
        self._works = self._messenger.start(kept[0], kept[1], self._tag)

    def _drain(self) -> None:
        self._messenger.wait(self._works)
