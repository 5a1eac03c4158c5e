"""One rank of the memory benchmark: `torchrun -m benchmarks.memory_worker stages WORK OUT`. Started by
`benchmarks.memory`.

Counted are the bytes of live tensors by who holds them, each byte once, not what the process has of the system: a
formula speaks of the former.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from benchmarks.memory_kinds import BUCKET_MIB, KINDS, OWNERS
from benchmarks.peers.gpt import ADAMW, gpt
from benchmarks.work import Work
from benchmarks.worker import batches
from engine.zero import ZeroOptimizer
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss

Span = tuple[int, int]


def main(work: Work, out: Path) -> None:
    """Measure every kind on this rank; rank 0 writes what all found as JSON: kind -> a dict of bytes for each rank."""
    torch.set_num_threads(1)
    with engine.init(work.layout, device=work.device, seed=work.seed) as mesh:
        found = {name: measure(work, mesh, options) for name, options in KINDS.items()}
        every = [mesh.world.broadcast_object(found, rank) for rank in range(mesh.world.size)]
        if mesh.rank == 0:
            kinds = {name: [each[name] for each in every] for name in KINDS}
            elements = sum(p.numel() for p in gpt(work.model, work.seed).parameters())
            out.write_text(json.dumps({"elements": elements, "kinds": kinds}))


def measure(work: Work, mesh: engine.Mesh, options: dict[str, Any]) -> dict[str, int]:
    """Train with these options of ZeroOptimizer; return this rank's bytes by owner, at the moment they were most."""
    sizes = work.model
    shape = {name: getattr(sizes, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    model = engine.PipelineModel(gpt_layers(GPTConfig(**shape, tied=False), mesh.tensor), mesh)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, bucket_mib=BUCKET_MIB, **options, **ADAMW)
    train = engine.TrainStep(model, optimizer, next_token_loss(mesh.tensor), mesh, microbatches=work.microbatches)
    first = mesh.data.rank * work.rows
    every = [ids[first : first + work.rows] for ids in batches(work, work.warm_up + 2)]
    *warm_up, one, other = [(ids[:, :-1].to(mesh.device), ids[:, 1:].to(mesh.device)) for ids in every]
    for inputs, targets in warm_up:
        train(inputs, targets)
    with saved_activations(model) as activations:
        train(*one)
    moments: list[dict[str, int]] = []
    with at_reductions(mesh, lambda sent: moments.append(by_owner(model, optimizer, [sent]))):
        train(*other)
    moments.append(by_owner(model, optimizer))
    most = max(moments, key=lambda each: sum(each.values()))
    return {**most, "activations": activations()}


def by_owner(model: nn.Module, optimizer: ZeroOptimizer, also: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes of the tensors that training keeps, each byte with the first owner that has it. also: what is
    just being sent, a buffer.
    """
    states = [value for state in optimizer._inner.state.values() for value in state.values()]
    held = list(tensors_of(optimizer))
    gradients = [x.grad for x in (*model.parameters(), *optimizer._inner.state) if x.grad is not None]
    owners = (list(model.parameters()), [x for x in states if isinstance(x, Tensor)], gradients, [*held, *also])
    sizes, spans, before = [], [], 0
    for tensors in owners:
        spans += [span(x) for x in tensors]
        sizes.append(covered(spans) - before)
        before += sizes[-1]
    return dict(zip(OWNERS, sizes, strict=False))


def tensors_of(root: object) -> Iterator[Tensor]:
    """Yield the tensors that an object of the engine keeps, through whatever objects of it."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, nn.Module | engine.Mesh | engine.Communicator):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif type(each).__module__.startswith(("engine.", "torch.optim")):
            waiting += vars(each).values()


def span(x: Tensor) -> Span:
    """Return the addresses [first, last) of a tensor's elements."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (length * x.element_size() if x.numel() else 0)


def covered(spans: Iterable[Span]) -> int:
    """Return the bytes that any of the spans covers."""
    total, end = 0, 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


@contextmanager
def at_reductions(mesh: engine.Mesh, look: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `look` with what the data axis reduces, before it does."""
    comm: Any = mesh.data
    real = {name: getattr(comm, name) for name in ("all_reduce", "reduce_scatter")}

    def looked(name: str) -> Callable[..., Any]:
        def call(x: Tensor, *arguments: Any, **options: Any) -> Any:
            look(x)
            return real[name](x, *arguments, **options)

        return call

    for name in real:
        setattr(comm, name, looked(name))
    try:
        yield
    finally:
        for name in real:
            delattr(comm, name)


@contextmanager
def saved_activations(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Return what tells the most bytes that autograd kept for the backward in the block, parameters left out."""
    own = [span(x) for x in model.parameters()]
    users: dict[int, int] = {}
    bytes_now = most = 0

    class Kept:
        def __init__(self, x: Tensor) -> None:
            self.tensor = x

    def pack(x: Tensor) -> Kept:
        nonlocal bytes_now, most
        kept, storage = Kept(x), x.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if any(first <= x.data_ptr() < last for first, last in own):
            return kept
        if not users.get(address):
            bytes_now += size
            most = max(most, bytes_now)
        users[address] = users.get(address, 0) + 1
        weakref.finalize(kept, drop, address, size).atexit = False
        return kept

    def drop(address: int, size: int) -> None:
        nonlocal bytes_now
        users[address] -= 1
        if not users[address]:
            bytes_now -= size

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield lambda: most


if __name__ == "__main__":
    main(Work.from_dict(json.loads(sys.argv[2])), Path(sys.argv[3]))
