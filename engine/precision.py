"""Which dtypes train, what their sums are in, what stays in fp32, and the scaling of losses for fp16 gradients."""

from __future__ import annotations

import torch

LOW = (torch.float16, torch.bfloat16)
TRAINED = (*LOW, torch.float32, torch.float64)
"""Dtypes that a trained parameter may have."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of gradients, and of masters, of parameters of `dtype`: fp32 for fp16 and bf16."""
    return torch.float32 if dtype in LOW else dtype
