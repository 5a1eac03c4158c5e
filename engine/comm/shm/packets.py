"""What two ranks that share memory say to each other of messages, and what a rank knows of one message."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

# "D", tag, dtype, elements, segment, offset, bytes of a slot, the slot of the first piece, slots given back
ANNOUNCE = struct.Struct("<ciBqqqqqB")
# "C", slot: a piece is there; "A", slots: these have been read; "R", 0: all has been read. Slots: a bit for each.
PIECE = struct.Struct("<cq")
ABORT = b"!"
SLOTS = 6  # of a mailbox
KEPT = 2  # slots that a rank has read and keeps until it has something to say: a packet for each costs more than a slot


def drain(slots: list[int]) -> int:
    """Return slots as bits, and forget them."""
    bits = sum(1 << slot for slot in slots)
    slots.clear()
    return bits


@dataclass(eq=False)
class Message:
    """One message on its way out or in."""

    x: Tensor
    """A vector over contiguous memory."""
    tag: int
    peer: int
    out: bool = False
    done: int = 0
    """Bytes that have been put out or taken in."""
    ended: bool = False
    announced: bool = False

    def __post_init__(self) -> None:
        # Bytes are moved from address to address: views and copies of tensors take longer than a small message.
        self.nbytes = self.x.numel() * self.x.element_size()

    @property
    def address(self) -> int:
        return self.x.data_ptr()
