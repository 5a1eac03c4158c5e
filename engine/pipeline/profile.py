"""How long each layer takes: a short run of one layer after another, by which stages are balanced.

No rank holds more than one layer at a time. Layers may communicate over any axis: all ranks run the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.mesh import Mesh
from engine.device import exact_dtype, random_stream, stream_seed, synchronize
from engine.errors import CommunicationError, UsageError
from engine.tree import map_tensors

_ROUNDS = 5


def layer_times(build: Callable[[int], nn.Module], names: Sequence[str], mesh: Mesh, sample: Any) -> tuple[float, ...]:
    """Return the seconds that a forward and backward of each layer take in the mode in which it is built, the same on
    every rank: of each rank's median over five rounds, after one that is not counted, the median over the ranks.

    build(i): makes layer i, on the CPU. names: the layers', for errors. sample: what layer 0 takes for one microbatch,
    a tensor, a tuple of arguments or a dict of keywords, of equal shapes on every rank; the other layers get what the
    one before returned. The loss is not run. Every rank of the mesh must call it, and each runs every layer.

    Raises UsageError on every rank for a plan without processes, layers or samples that differ between ranks, and a
    layer that fails, by its name.
    """
    if mesh.planned:
        raise UsageError(
            "balance='measured' runs the layers on every rank, and a plan has no processes: open the mesh with "
            "engine.init, or choose another balance"
        )
    mesh.world.check_equal("balance='measured': the layers, or the shapes of the sample,", (names, _shapes(sample)))
    times = torch.zeros(len(names), dtype=exact_dtype(mesh.device), device=mesh.device)
    x = map_tensors(sample, lambda tensor: tensor.detach().to(mesh.device))
    with random_stream(stream_seed("profile", mesh.seed), mesh.device), torch.enable_grad():
        for index, name in enumerate(names):
            fault = ""
            try:
                times[index], x = _timed(build(index).to(mesh.device), x, mesh.device, first=index == 0)
            except CommunicationError:  # of a peer, which says more
                raise
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            _refuse(fault, f"layer {index} ({name})", mesh)
    every = mesh.world.all_gather(times.view(1, -1))
    return tuple(every.median(dim=0).values.tolist())


def _refuse(fault: str, layer: str, mesh: Mesh) -> None:
    """Raise the first failing rank's error on every rank; with no fault anywhere, do nothing."""
    world = mesh.world
    if not world.any(bool(fault)):
        return
    failed = world.all_gather(torch.tensor([bool(fault)], dtype=torch.int32, device=mesh.device)).tolist()
    rank = failed.index(1)
    told = world.broadcast_object(fault, rank)
    raise UsageError(
        f"balance='measured' runs every layer forward and backward, but {layer} failed on rank {rank}: {told}. Give a "
        f"sample= that the layers can run, or another balance"
    )


def _timed(layer: nn.Module, x: Any, device: torch.device, *, first: bool) -> tuple[float, Any]:
    """Return the median time of a layer in seconds, and its output, detached."""
    taken, output = [], None
    with ExitStack() as stack:
        for module in layer.modules():
            rehearsal: Any = getattr(module, "rehearsal", None)
            if rehearsal is not None:  # of a module that else runs in a step only
                stack.enter_context(rehearsal())
        for _ in range(1 + _ROUNDS):
            layer.zero_grad(set_to_none=True)
            # A copy that is no leaf: a layer may change its input in place.
            given = map_tensors(x, lambda t: t.detach().clone().requires_grad_(t.requires_grad).clone())
            args = given if first and isinstance(given, tuple) else ()
            kwargs = given if first and isinstance(given, dict) else {}
            synchronize(device)
            start = time.perf_counter()
            output = layer(*args, **kwargs) if args or kwargs else layer(given)
            roots = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            synchronize(device)
            taken.append(time.perf_counter() - start)
            output = map_tensors(output, lambda t: t.detach().requires_grad_(t.requires_grad))
    return median(taken[1:]), output


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, find)
    return found


def _shapes(sample: Any) -> Any:
    return map_tensors(sample, lambda tensor: (tuple(tensor.shape), tensor.dtype))
