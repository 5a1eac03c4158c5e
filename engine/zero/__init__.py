"""Data parallelism with gradients in buckets and sharded optimizer state."""

from engine.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
