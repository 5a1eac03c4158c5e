"""What two ranks that share memory say to each other of messages, and what a rank knows of one message."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

# "D", tag, dtype, elements, segment, offset, bytes of a slot, the slot of the first piece
ANNOUNCE = struct.Struct("<ciBqqqqq")
PIECE = struct.Struct("<cq")  # "C", slot: a piece is there; "A", slot: it has been read; "R", 0: all has been read
ABORT = b"!"
SLOTS = 4  # of a mailbox


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
