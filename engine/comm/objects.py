"""Python objects from one rank to all, over any transport."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor

from engine.comm.transport import Calls


def broadcast_object(transport: Calls, value: object, src: int, rank: int, device: torch.device) -> object:
    """Return rank `src`'s `value` on every rank: its length first, then its pickle."""
    data = pickle.dumps(value if rank == src else None)
    length = torch.tensor([len(data)], device=device)
    transport.wait(transport.broadcast(length, src))
    own = _bytes(data, device)
    whole = own if rank == src else own.new_zeros(int(length.item()))
    if rank != src and len(whole) == len(own):
        whole = own
    transport.wait(transport.broadcast(whole, src))
    return value if rank == src else pickle.loads(bytes(whole.cpu().numpy()))


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
