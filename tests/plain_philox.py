"""The reference of random numbers: Philox and its masks in Python's own integers, one number at a time. Uses nothing of
`engine.philox`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.device import stream_seed


def words_of(key: int, index: int, step: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 as the paper has it, in Python's integers."""
    word = 2**32 - 1
    a, b, c, d = index & word, index >> 32, step & word, step >> 32
    k, m = key & word, key >> 32
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & word, (left >> 32) ^ d ^ m, left & word
        k, m = (k + 0x9E3779B9) & word, (m + 0xBB67AE85) & word
    return a, b, c, d


def mask_of(name: str, step: int, shape: tuple[int, ...], p: float, seed: int) -> Tensor:
    """The elements of a whole activation that dropout `name` keeps: four words of a counter for four in a line."""
    key, line = stream_seed("dropout", seed, name), -(-shape[-1] // 4)
    lines = [
        [words_of(key, number * line + i // 4, step)[i % 4] >= p * 2**32 for i in range(shape[-1])]
        for number in range(math.prod(shape[:-1]))
    ]
    return torch.tensor(lines).view(shape)
