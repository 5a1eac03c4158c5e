"""Runs a pipeline program: interprets its instructions over one stage's module, and nothing else.

It decides no order: `schedule.program` did. It keeps the activations between a microbatch's forward and its backward,
and announces an activation's shape once: all pipeline ranks see the same inputs, so equal inputs mean a shape that
both sides know already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.errors import UsageError
from engine.pipeline.schedule import Compute, Exchange, Instruction, Message

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 12
_MAX_SHAPES = 256


@dataclass(frozen=True)
class TensorMeta:
    """What a receiver must know of an activation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: the arguments of the first layer, the target of the loss, and what identifies their shapes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    signature: object


LossTotal = Callable[[Any, int], Tensor]
Around = Callable[[Compute], AbstractContextManager[None]]


class Executor:
    """Runs programs over one stage. One for each model; remembers the shapes that were announced."""

    def __init__(self, module: nn.Module, comm: Communicator, device: torch.device) -> None:
        """comm: the pipeline axis, whose rank is the stage."""
        self.module, self.comm, self.device = module, comm, device
        self._incoming: dict[object, TensorMeta] = {}
        self._outgoing: dict[object, TensorMeta] = {}

    def run(
        self,
        program: Sequence[Instruction],
        microbatches: Sequence[Microbatch],
        finish: LossTotal,
        around: Around = lambda _: nullcontext(),
    ) -> None:
        """Execute `program`. `finish(output, i)`: called on the last stage with microbatch i's output; returns what
        backward starts from. `around(action)`: a context for each forward and backward.

        Every rank of the pipeline axis must run the program of its stage, over microbatches of equal shapes.
        Gradients are added to the parameters' own. Raises CommunicationError when a peer fails.
        """
        state = _Run(self, microbatches, finish)
        for instruction in program:
            if isinstance(instruction, Exchange):
                state.exchange(instruction)
                continue
            with around(instruction):
                if instruction.kind == "forward":
                    state.forward(instruction)
                else:
                    state.backward(instruction)

    @property
    def is_first(self) -> bool:
        """Whether this stage takes the inputs."""
        return self.comm.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.comm.rank == self.comm.size - 1

    def announce(self, key: object, output: Tensor, peer: int) -> TensorMeta:
        """Tell `peer` an output's shape the first time, and check it against what was told after that."""
        meta = TensorMeta(tuple(output.shape), output.dtype, output.requires_grad)
        known = self._outgoing.get(key)
        if known is None:
            self.comm.send(_encode(meta, self.device), peer)
            _remember(self._outgoing, key, meta)
        elif known != meta:
            raise UsageError(
                f"stage {self.comm.rank}: for inputs of these shapes the output was {known} before and is {meta} now: "
                f"what crosses a stage may depend on the inputs' shapes and plain values, not on tensors' values, on "
                f"other objects, or on what was frozen since"
            )
        return meta

    def learn(self, key: object, peer: int) -> TensorMeta:
        """Return the shape that `peer` announced for inputs like these; receive the announcement the first time."""
        meta = self._incoming.get(key)
        if meta is None:
            header = torch.empty(_MAX_DIMS + 3, dtype=torch.int32, device=self.device)
            meta = _decode(self.comm.recv(header, peer))
            _remember(self._incoming, key, meta)
        return meta

    def knows(self, key: object) -> bool:
        """Whether the shape of the activation that comes for these inputs is known."""
        return key in self._incoming


class _Enter(torch.autograd.Function):
    """Hands a received activation to the stage's layers as any layer's output: one that may be changed in place, which
    a leaf of the graph may not. Its gradient arrives at the leaf."""

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        # The same memory, but no view of the leaf in autograd's eyes.
        return leaf.new_empty(0).set_(leaf.untyped_storage(), 0, leaf.shape, leaf.stride())

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Run:
    """The tensors of one run of a program."""

    def __init__(self, executor: Executor, microbatches: Sequence[Microbatch], finish: LossTotal) -> None:
        self.executor, self.microbatches, self.finish = executor, microbatches, finish
        self.inputs: dict[int, Tensor] = {}  # received activations, leaves of this stage's graph
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}  # received, of the outputs
        self.metas: dict[int, TensorMeta] = {}
        kind = executor.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.mode = (torch.is_grad_enabled(), autocast)  # what an output's kind depends on besides its inputs

    def forward(self, action: Compute) -> None:
        i, batch = action.microbatch, self.microbatches[action.microbatch]
        if self.executor.is_first:
            output = self.executor.module(*batch.args, **batch.kwargs)
        else:
            received = self.inputs[i] if torch.is_grad_enabled() else self.inputs.pop(i)
            output = self.executor.module(apply(_Enter, received))
        if self.executor.is_last:
            output = self.finish(output, i)
        elif not isinstance(output, Tensor):
            raise UsageError(
                f"stage {self.executor.comm.rank}: the last layer of a stage must return one tensor, "
                f"not {type(output).__name__}"
            )
        self.outputs[i] = output

    def backward(self, action: Compute) -> None:
        i = action.microbatch
        output, gradient = self.outputs.pop(i), self.gradients.pop(i, None)
        if output.requires_grad:
            torch.autograd.backward([output], None if gradient is None else [gradient])
        elif self.executor.is_last and self._is_trained(i):
            raise UsageError("the loss has no gradient, although parameters require one: it was detached on the way")

    def _is_trained(self, i: int) -> bool:
        """Whether anything that this stage used for microbatch `i` requires a gradient."""
        received = i in self.inputs and self.inputs[i].requires_grad
        return received or any(parameter.requires_grad for parameter in self.executor.module.parameters())

    def exchange(self, exchange: Exchange) -> None:
        comm = self.executor.comm
        sends = [
            (tensor, message.peer) for message in exchange.sends if (tensor := self._outgoing(message)) is not None
        ]
        unknown = [m for m in exchange.receives if m.kind == "activation" and not self.executor.knows(self._key(m))]
        if unknown:
            # Its shape comes first, and can only be waited for once what this stage owes is sent.
            comm.exchange(sends=sends)
            sends = []
        receives = [(tensor, m.peer) for m in exchange.receives if (tensor := self._incoming(m)) is not None]
        comm.exchange(sends=sends, recvs=receives)
        if not torch.is_grad_enabled():
            for message in exchange.sends:
                self.outputs.pop(message.microbatch, None)

    def _key(self, message: Message) -> object:
        return (self.microbatches[message.microbatch].signature, *self.mode)

    def _outgoing(self, message: Message) -> Tensor | None:
        if message.kind == "activation":
            output = self.outputs[message.microbatch]
            self.metas[message.microbatch] = self.executor.announce(self._key(message), output, message.peer)
            return output.detach()
        source = self.inputs.pop(message.microbatch)
        if not source.requires_grad:
            return None
        return torch.zeros_like(source) if source.grad is None else source.grad

    def _incoming(self, message: Message) -> Tensor | None:
        i = message.microbatch
        if message.kind == "activation":
            meta = self.executor.learn(self._key(message), message.peer)
            self.inputs[i] = torch.empty(meta.shape, dtype=meta.dtype, device=self.executor.device)
            received = self.inputs[i].detach()
            self.inputs[i].requires_grad_(meta.requires_grad)
            return received
        meta = self.metas.pop(i)
        if not meta.requires_grad:
            return None
        self.gradients[i] = torch.empty(meta.shape, dtype=meta.dtype, device=self.executor.device)
        return self.gradients[i]


def _remember(known: dict[object, TensorMeta], key: object, meta: TensorMeta) -> None:
    """Store `meta`. Both sides of a pair store the same in the same order, so they also forget alike."""
    if len(known) >= _MAX_SHAPES:
        known.clear()
    known[key] = meta


def _encode(meta: TensorMeta, device: torch.device) -> Tensor:
    if meta.dtype not in _DTYPES:
        raise UsageError(
            f"an activation of {meta.dtype} cannot cross a stage: use one of {', '.join(map(str, _DTYPES))}"
        )
    if len(meta.shape) > _MAX_DIMS:
        raise UsageError(f"an activation of {len(meta.shape)} dims: at most {_MAX_DIMS} can cross a stage")
    shape = list(meta.shape) + [0] * (_MAX_DIMS - len(meta.shape))
    header = [len(meta.shape), _DTYPES.index(meta.dtype), int(meta.requires_grad), *shape]
    return torch.tensor(header, dtype=torch.int32, device=device)


def _decode(header: Tensor) -> TensorMeta:
    dims, dtype, requires_grad, *shape = header.tolist()
    return TensorMeta(tuple(shape[:dims]), _DTYPES[dtype], bool(requires_grad))
