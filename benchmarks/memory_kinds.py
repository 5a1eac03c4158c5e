"""What the memory benchmark compares, and what the ZeRO paper says of it. Pure.

Formulas: section 5 of arXiv:1910.02054. It counts 2 bytes for parameters and gradients and K = 12 for the states of
Adam, master weights among them; here all is fp32, 4 bytes each and K = 8, so nothing else changes.
"""

from __future__ import annotations

from typing import Any

OWNERS = ("parameters", "states", "gradients", "buckets", "activations")
"""In the order in which a byte that several hold is counted."""
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, full": {"stage": 2, "accumulate": "full"},
}
"""Options of ZeroOptimizer, by the name in the table: stage 2 accumulates shards by itself."""
BUCKET_MIB = 2.0  # of gradients; far below the model, as 25 MiB are of one that needs ZeRO
VALUE, ADAM = 4, 8  # bytes of one element: of a parameter or gradient, and of Adam's two averages
TOLERANCE = 0.03


def formula(kind: str, elements: int, ranks: int) -> dict[str, float]:
    """Return the paper's bytes of each rank, for a model of so many elements on so many data ranks."""
    stage = KINDS[kind]["stage"]
    return {
        "parameters": VALUE * elements,
        "states": ADAM * elements / (ranks if stage >= 1 else 1),
        "gradients": VALUE * elements / (ranks if stage >= 2 else 1),
    }
