"""What was sent: calls, bytes and seconds for each axis and operation. Off until started, and then costs nothing.

payload: bytes of the whole vector of an operation, as nccl-tests counts them: of an all-gather's result, of a
reduce-scatter's input, else of the tensor; of messages, those that this rank sends. wire: bytes that this rank sends:
exactly, of messages and of algorithms that are made of them; else (`native`) what the ring that backends use sends, per
rank on average. That is also what counts over shm, where nothing is sent, and over hosts, where only leaders send.
Objects (broadcast_object) count as calls only, and what the checks send is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from engine.comm.algorithms.compress import message_bytes
from engine.comm.algorithms.plan import Plan, block, elements_sent
from engine.comm.call import Call


@dataclass
class Entry:
    """One axis and operation."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0
    """From the start of each call to its end on this rank, waiting for other ranks included."""


class Ledger:
    """Counts this rank's communication while it is on. Groups of one rank and empty tensors send nothing."""

    def __init__(self) -> None:
        self.on = False
        self.entries: dict[tuple[str, str], Entry] = {}

    def start(self) -> Ledger:
        """Count from here on. `with mesh.ledger: ...` counts inside the block."""
        self.on = True
        return self

    def stop(self) -> None:
        """Count no more; what was counted stays."""
        self.on = False

    def clear(self) -> None:
        """Forget what was counted."""
        self.entries.clear()

    def __enter__(self) -> Ledger:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def add(self, axis: str, operation: str, payload: int, wire: int, seconds: float) -> None:
        """Count one call."""
        entry = self.entries.setdefault((axis, operation), Entry())
        entry.calls += 1
        entry.payload_bytes += payload
        entry.wire_bytes += wire
        entry.seconds += seconds

    def wire_bytes_by_axis(self) -> dict[str, int]:
        """Return the bytes that this rank sent, by axis."""
        total: dict[str, int] = {}
        for (axis, _), entry in self.entries.items():
            total[axis] = total.get(axis, 0) + entry.wire_bytes
        return total

    def table(self) -> str:
        """Return everything as a table in plain text."""
        head = ("axis", "operation", "calls", "payload bytes", "wire bytes", "seconds")
        rows = [
            (axis, name, f"{e.calls:,}", f"{e.payload_bytes:,}", f"{e.wire_bytes:,}", f"{e.seconds:.4f}")
            for (axis, name), e in sorted(self.entries.items())
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        return "\n".join(
            "  ".join(
                text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in (head, *rows)
        )


def payload_bytes(call: Call, size: int) -> int:
    """Return the bytes of a call's whole vector; of messages, those that are sent."""
    if call.messages is not None:
        return sum(x.numel() * x.element_size() for x, _ in call.messages[0])
    if call.x is None:
        return 0
    own = call.x.numel() * call.x.element_size()
    return own * size if call.name in ("all_gather", "gather", "scatter") else own


def wire_bytes(call: Call, rank: int, size: int, plan_of: Callable[[int], Plan]) -> int:
    """Return the bytes that this rank sends for a call. plan_of: its plan for a vector of so many elements."""
    payload = payload_bytes(call, size)
    if call.messages is not None or call.x is None:
        return payload
    if call.wire_dtype is not None:
        return _compressed_bytes(call, rank, size)
    if call.name in ("gather", "scatter"):
        root = rank == call.peer
        part = payload // size
        return part * (size - 1) * root if call.name == "scatter" else part * (not root)
    if call.algorithm != "native":
        return elements_sent(plan_of(payload // call.x.element_size())) * call.x.element_size()
    return (2 if call.name in ("all_reduce", "any", "barrier") else 1) * (size - 1) * payload // size


def _compressed_bytes(call: Call, rank: int, size: int) -> int:
    assert call.x is not None
    assert call.wire_dtype is not None
    parts = [block(call.x.numel(), size, peer) for peer in range(size)]
    messages = [message_bytes(stop - start, call.wire_dtype) for start, stop in parts]
    first = sum(messages) - messages[rank]
    return first + (size - 1) * messages[rank] * (call.name == "all_reduce")
