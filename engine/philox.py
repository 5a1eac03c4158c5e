"""Philox4x32-10: random bits as a pure function of a key and a counter, so that any element's can be had by itself.

Integer arithmetic of torch on any device, the same bits on all. Not for secrets. Method and constants: Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, and its library Random123, whose known answers the
tests have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROUNDS = 10
WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LANES = 4

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(key: int, counter: Sequence[Tensor]) -> Words:
    """Return the four 32-bit words of each counter under a 64-bit key.

    counter: four int64 tensors of one shape with words in [0, 2**32), the lowest first; they are not changed. key: its
    lower half is the first key word. The result has the counter's shape, dtype and range.
    """
    a, b, c, d = (word.clone(memory_format=torch.contiguous_format) for word in counter)
    return _mix(key, a, b, c, d)


def _mix(key: int, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Words:
    """Return `philox` of these words, in their memory."""
    high = torch.empty_like(a)
    first, second = key & WORD, key >> 32 & WORD
    for _ in range(_ROUNDS):
        # A product of two words may pass 2**63: its 64 bits are right all the same, and so are the upper 32 of them
        # once the sign that the shift brings in is masked off. b and d may carry such bits above their word.
        a.mul_(_MULTIPLIERS[0])
        c.mul_(_MULTIPLIERS[1])
        torch.bitwise_right_shift(c, 32, out=high)
        b.bitwise_xor_(high).bitwise_xor_(first).bitwise_and_(WORD)
        torch.bitwise_right_shift(a, 32, out=high)
        d.bitwise_xor_(high).bitwise_xor_(second).bitwise_and_(WORD)
        a, b, c, d = b, c, d, a
        first, second = (first + _KEY_STEPS[0]) & WORD, (second + _KEY_STEPS[1]) & WORD
    return a, b.bitwise_and_(WORD), c, d.bitwise_and_(WORD)


def words(key: int, step: int, indices: Tensor) -> Words:
    """Return `philox` of the counters (64-bit index, 64-bit step), for int64 indices of any shape, at least 0."""
    low, high = torch.full_like(indices, step & WORD), torch.full_like(indices, step >> 32 & WORD)
    return _mix(key, indices & WORD, indices >> 32, low, high)


def block_at_least(
    threshold: int, key: int, step: int, shape: Sequence[int], first: Sequence[int], whole: Sequence[int],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Return which numbers of a block of a larger array are at least `threshold`: bool, of `shape`.

    The array has one number in [0, 2**32) for each element, a function of key, step and the element's place in it. The
    block has at least two dims and starts at `first`; the array is `whole` long in all dims but the first, which has
    no end. Each line along the last dim takes the four words of one counter after another, so only a block that starts
    or ends within four computes words in vain.
    """
    lines = torch.zeros(1, dtype=torch.int64, device=device)
    for size, start, full in zip(shape[:-1], first, whole, strict=False):
        here = torch.arange(start, start + size, device=device)
        lines = (lines.unsqueeze(-1) * full + here).flatten()
    begin, end, per_line = first[-1] // _LANES, -(-(first[-1] + shape[-1]) // _LANES), -(-whole[-1] // _LANES)
    found = torch.empty(len(lines), end - begin, _LANES, dtype=torch.bool, device=device)
    along = torch.arange(begin, end, device=device)
    # On a CPU as many counters at once as stay in its cache.
    at_once = max(1, (1 << 15 if device.type == "cpu" else 1 << 22) // max(1, end - begin))
    for some, out in zip(lines.split(at_once), found.split(at_once), strict=True):
        for lane, numbers in enumerate(words(key, step, some.unsqueeze(1) * per_line + along)):
            torch.ge(numbers, threshold, out=out[:, :, lane])
    return found.flatten(1).narrow(1, first[-1] % _LANES, shape[-1]).reshape(tuple(shape))


def uniform(key: int, numel: int, device: torch.device) -> Tensor:
    """Return float64 numbers in [0, 1), multiples of 2**-53; (numel,). Element i depends on key and i alone."""
    return torch.cat([*_pairs(key, numel, device)])[:numel]


def normal(key: int, numel: int, device: torch.device) -> Tensor:
    """Return float64 numbers of the standard normal distribution, (numel,), by the method of Box and Muller (1958)
    from the numbers of `uniform`. Element i depends on key and i alone.
    """
    parts = []
    for pairs in _pairs(key, numel, device):
        u, v = pairs.view(-1, 2).unbind(1)
        radius, angle = (-2 * (1 - u).log()).sqrt(), 2 * torch.pi * v
        parts.append(torch.stack([radius * angle.cos(), radius * angle.sin()], 1).flatten())
    return torch.cat(parts)[:numel]


def _pairs(key: int, numel: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the uniform numbers in runs of even length, at least `numel` of them: two words make one."""
    counters = torch.arange(-(-numel // 2), device=device)
    for some in counters.split(1 << 15 if device.type == "cpu" else 1 << 22):
        a, b, c, d = words(key, 0, some)
        yield torch.stack([(a >> 5) * 2**26 + (b >> 6), (c >> 5) * 2**26 + (d >> 6)], 1).flatten().double() * 2.0**-53
