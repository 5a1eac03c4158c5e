"""The most memory that head and loss take, apart and fused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine import Layout
from engine.tensor_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from engine.tensor_parallel.head import CHUNK_BYTES
from tests.vocabulary_cases import (
    Mesh,
)
from tests.world import World


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that are still alive. Tensors on meta count too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            self._note(given, counts=False)  # made before, or counted already
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            self._note(made, counts=True)
        return result

    def _note(self, value: Any, counts: bool) -> None:
        if not isinstance(value, Tensor) or value.untyped_storage()._cdata in self._known:
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counts else 0
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Alone:
    """What a group of one rank does, for tensors on meta, which a mesh refuses."""

    name, size, rank, checks = "tensor", 1, 0, False

    def all_reduce(self, x: Tensor, *_: str) -> Tensor:
        return x


def head_and_loss(
    together: bool, tokens: int, vocabulary: int, device: str, dtype: torch.dtype, width: int = 8
) -> Callable[[], None]:
    """Return forward and backward of a head of hidden size `width` and its loss."""
    comm: Any = Alone() if device == "meta" else engine.plan_mesh(Layout(), 0).tensor
    hidden = torch.ones(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(vocabulary, width, device=device, dtype=dtype, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.int64, device=device)

    def run() -> None:
        if together:
            loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, comm)
        else:
            loss = vocab_parallel_cross_entropy(F.linear(hidden, weight), target, comm)
        loss.sum().backward()

    return run


def live_peak(together: bool, *case: Any) -> int:
    run = head_and_loss(together, *case)
    with LiveBytes() as live:
        run()
    return live.peak


@pytest.mark.parametrize("width", [8, 1024])
@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4 + 4), (torch.bfloat16, 4 + 4 + 2)], ids=str)
def test_at_128k_ids_and_4k_tokens_the_fused_peak_is_less_than_a_quarter(
    dtype: torch.dtype, bytes_each: int, width: int
) -> None:
    """On meta, where the same operations make the same tensors, but without memory. Apart, each of the 2^29 logits has
    an exponential and a gradient in single precision, and then the latter in half; together there is one chunk, and
    the gradients of weight and hidden states, which any way must hold.
    """
    case = (4096, 131072, "meta", dtype, width)
    apart, together = live_peak(False, *case), live_peak(True, *case)
    assert apart == pytest.approx(2**29 * bytes_each, rel=0.02)
    assert together < apart / 4
    weight = 131072 * width * (4 if dtype == torch.float32 else 4 + 2)  # the sum, and in half precision one chunk's
    assert together == pytest.approx(CHUNK_BYTES + weight + 4096 * width * dtype.itemsize, rel=0.02)


def high_water(_: Mesh, together: bool, *case: Any) -> int:
    """Return the bytes by which this process grew at most, as the kernel counts them."""
    head_and_loss(together, 8, 1024, "cpu", torch.float32)()
    run = head_and_loss(together, *case, "cpu", torch.float32)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts afresh at what there is
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's high-water mark of Linux")
def test_the_memory_that_the_kernel_counts_is_the_memory_of_the_tensors(world: World) -> None:
    """Real memory, at an eighth of the tokens."""
    case = (512, 131072)
    ((apart,), (together,)) = (world.run(Layout(), high_water, way, *case) for way in (False, True))
    assert apart == pytest.approx(live_peak(False, *case, "meta", torch.float32), rel=0.1)
    assert together == pytest.approx(live_peak(True, *case, "meta", torch.float32), rel=0.1)
    assert together < apart / 4


def padded_high_water(mesh: engine.Mesh) -> int:
    """What head and loss take on this rank at most; the last rank has a column of padding."""
    columns = 65536
    hidden, weight = torch.ones(512, 8, requires_grad=True), torch.ones(columns, 8, requires_grad=True)
    target = torch.zeros(512, dtype=torch.int64)

    def run() -> None:
        loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, mesh.tensor, vocabulary=2 * columns - 1)
        loss.sum().backward()

    run()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's high-water mark of Linux")
def test_padding_costs_no_memory(world: World) -> None:
    whole, padded = world.run(Layout(tensor=2), padded_high_water)
    assert padded == pytest.approx(whole, rel=0.1)
