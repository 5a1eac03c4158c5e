"""Runs a pipeline program: interprets its instructions over one rank's stages, and nothing else.

It decides no order: `schedule.programs` did. It keeps the activations between a microbatch's forward and its backward,
and announces an activation's shape once: all pipeline ranks see the same inputs, so equal inputs mean a shape that
both sides know already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.comm.work import Work
from engine.errors import UsageError
from engine.pipeline.layers import PipelineModel
from engine.pipeline.schedule import Compute, Exchange, Instruction, Message, Stages
from engine.weight_gradients import WeightGradients

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
Key = tuple[int, int]
"""A virtual stage and a microbatch."""


class Executor:
    """Runs programs over one rank's stages. One for each model; remembers the shapes that were announced."""

    def __init__(self, module: nn.Module, comm: Communicator, device: torch.device) -> None:
        """module: a PipelineModel, or with pipeline = 1 any. comm: the pipeline axis."""
        self.module, self.comm, self.device = module, comm, device
        self.virtual, self.parts = Stages(1), dict[int, Callable[..., Any]]({0: module})
        if isinstance(module, PipelineModel):
            self.virtual, self.parts = module.virtual, module.parts()
        # By virtual stage, so that both sides of each boundary store the same in the same order.
        self._incoming: dict[int, dict[object, TensorMeta]] = defaultdict(dict)
        self._outgoing: dict[int, dict[object, TensorMeta]] = defaultdict(dict)

    def run(
        self,
        program: Sequence[Instruction],
        microbatches: Sequence[Microbatch],
        finish: LossTotal,
        around: Around = lambda _: nullcontext(),
        weight_gradients: WeightGradients | None = None,
    ) -> None:
        """Execute `program`. `finish(output, i)`: called on the last stage with microbatch i's output; returns what
        backward starts from. `around(action)`: a context for each forward and backward. `weight_gradients`: takes those
        of the layers that it knows; a program that computes some apart needs it. None: all are autograd's.

        Every rank of the pipeline axis must run its program of one plan, over microbatches of equal shapes.
        Gradients are added to the parameters' own. Raises CommunicationError when a peer fails.
        """
        state = _Run(self, microbatches, finish, weight_gradients)
        try:
            for instruction in program:
                if isinstance(instruction, Exchange):
                    state.exchange(instruction)
                    continue
                with around(instruction):
                    state.compute(instruction)
        finally:
            if weight_gradients is not None:
                weight_gradients.clear()  # what waits where the program failed

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline axis that computes the loss."""
        return self.virtual.rank_of(self.virtual.count - 1)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.comm.rank == self.last_rank

    def announce(self, key: object, output: Tensor, message: Message, later: list[Work] | None) -> TensorMeta:
        """Tell the receiver an output's shape the first time, and check it against what was told after that. With
        `later`, what is sent is put there to be waited for.
        """
        meta = TensorMeta(tuple(output.shape), output.dtype, output.requires_grad)
        outgoing = self._outgoing[message.stage]
        known = outgoing.get(key)
        if known is None:
            header = _encode(meta, self.device)
            if later is None:
                self.comm.send(header, message.receiver)
            else:
                later.append(self.comm.exchange(sends=[(header, message.receiver)], async_op=True))
            _remember(outgoing, key, meta)
        elif known != meta:
            raise UsageError(
                f"stage {message.stage - 1}: for inputs of these shapes the output was {known} before and is {meta} "
                f"now: what crosses a stage may depend on the inputs' shapes and plain values, not on tensors' values, "
                f"on other objects, or on what was frozen since"
            )
        return meta

    def learn(self, key: object, message: Message) -> TensorMeta:
        """Return the shape that was announced for inputs like these; receive the announcement the first time."""
        incoming = self._incoming[message.stage]
        meta = incoming.get(key)
        if meta is None:
            header = torch.empty(_MAX_DIMS + 3, dtype=torch.int32, device=self.device)
            meta = _decode(self.comm.recv(header, message.sender))
            _remember(incoming, key, meta)
        return meta

    def knows(self, key: object, message: Message) -> bool:
        """Whether the shape of the activation that comes for these inputs is known."""
        return key in self._incoming[message.stage]


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

    def __init__(
        self,
        executor: Executor,
        microbatches: Sequence[Microbatch],
        finish: LossTotal,
        weight_gradients: WeightGradients | None,
    ) -> None:
        self.executor, self.microbatches, self.finish = executor, microbatches, finish
        self.weight_gradients = weight_gradients
        self.inputs: dict[Key, Tensor] = {}  # received activations, leaves of their stage's graph
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}  # received, of the outputs
        self.metas: dict[Key, TensorMeta] = {}
        self.works: dict[Message, list[Work]] = {}  # sends that are waited for later
        kind = executor.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.mode = (torch.is_grad_enabled(), autocast)  # what an output's kind depends on besides its inputs

    def compute(self, action: Compute) -> None:
        if action.kind == "weight_gradient":
            assert self.weight_gradients is not None
            self.weight_gradients.compute((action.stage, action.microbatch))
        elif action.kind != "forward":
            self.backward(action)
        elif self.weight_gradients is None:
            self.forward(action)
        else:
            with self.weight_gradients.catching():
                self.forward(action)

    def forward(self, action: Compute) -> None:
        stage, i, batch = action.stage, action.microbatch, self.microbatches[action.microbatch]
        part = self.executor.parts[stage]
        if stage == 0:
            output = part(*batch.args, **batch.kwargs)
        else:
            received = self.inputs[stage, i] if torch.is_grad_enabled() else self.inputs.pop((stage, i))
            output = part(apply(_Enter, received))
        if stage == self.executor.virtual.count - 1:
            output = self.finish(output, i)
        elif not isinstance(output, Tensor):
            raise UsageError(
                f"stage {stage}: the last layer of a stage must return one tensor, not {type(output).__name__}"
            )
        elif stage + 1 in self.executor.parts:
            # A copy, as a message makes one: the next layer may change it in place.
            self.inputs[stage + 1, i] = output.detach().clone().requires_grad_(output.requires_grad)
            if not torch.is_grad_enabled():
                return
        self.outputs[stage, i] = output

    def backward(self, action: Compute) -> None:
        key = (action.stage, action.microbatch)
        output, gradient = self.outputs.pop(key), self.gradients.pop(key, None)
        if output.requires_grad and self.weight_gradients is not None:
            self.weight_gradients.backward(output, gradient, key if action.kind == "input_gradient" else None)
        elif output.requires_grad:
            torch.autograd.backward([output], None if gradient is None else [gradient])
        elif action.stage == self.executor.virtual.count - 1 and self._is_trained(key):
            raise UsageError("the loss has no gradient, although parameters require one: it was detached on the way")
        if action.stage - 1 in self.executor.parts:
            own = self._input_gradient(key)
            if own is not None:
                self.gradients[action.stage - 1, action.microbatch] = own

    def _is_trained(self, key: Key) -> bool:
        """Whether anything that this rank used for a microbatch requires a gradient."""
        received = key in self.inputs and self.inputs[key].requires_grad
        return received or any(parameter.requires_grad for parameter in self.executor.module.parameters())

    def exchange(self, exchange: Exchange) -> None:
        """Start the messages and wait. Where all that starts is waited for, as one batch; else sends start one by one,
        to be waited for one by one, and receives, which are waited for here, follow.
        """
        comm = self.executor.comm
        if not {*exchange.receives, *exchange.sends} <= {*exchange.waits}:
            self._start_sends(exchange.sends)
            for message in exchange.receives:
                if (tensor := self._incoming(message)) is not None:
                    comm.recv(tensor, message.sender)
            self._end_sends(exchange.waits)
            return
        self._end_sends(exchange.waits)
        sends = [(tensor, m.receiver) for m in exchange.sends if (tensor := self._outgoing(m)) is not None]
        unknown = [m for m in exchange.receives if m.kind == "activation" and not self.executor.knows(self._key(m), m)]
        if unknown:
            # Its shape comes first, and can only be waited for once what this stage owes is sent.
            comm.exchange(sends=sends)
            sends = []
        receives = [(tensor, m.sender) for m in exchange.receives if (tensor := self._incoming(m)) is not None]
        comm.exchange(sends=sends, recvs=receives)
        self._sent(exchange.sends)

    def _start_sends(self, messages: Sequence[Message]) -> None:
        for message in messages:
            works = self.works[message] = []
            if (tensor := self._outgoing(message, works)) is not None:
                works.append(self.executor.comm.exchange(sends=[(tensor, message.receiver)], async_op=True))

    def _end_sends(self, messages: Sequence[Message]) -> None:
        ended = [message for message in messages if message in self.works]
        for message in ended:
            for work in self.works.pop(message):
                work.wait()
        self._sent(ended)

    def _sent(self, messages: Sequence[Message]) -> None:
        if not torch.is_grad_enabled():
            for message in messages:
                self.outputs.pop((message.stage - 1, message.microbatch), None)

    def _key(self, message: Message) -> object:
        return (self.microbatches[message.microbatch].signature, *self.mode)

    def _outgoing(self, message: Message, later: list[Work] | None = None) -> Tensor | None:
        if message.kind == "activation":
            key = (message.stage - 1, message.microbatch)
            output = self.outputs[key]
            self.metas[key] = self.executor.announce(self._key(message), output, message, later)
            return output.detach()
        return self._input_gradient((message.stage + 1, message.microbatch))

    def _input_gradient(self, key: Key) -> Tensor | None:
        """Return the gradient of a stage's input, after its backward; None where it needs none."""
        source = self.inputs.pop(key)
        if not source.requires_grad:
            return None
        return torch.zeros_like(source) if source.grad is None else source.grad

    def _incoming(self, message: Message) -> Tensor | None:
        key = (message.stage, message.microbatch)
        if message.kind == "activation":
            meta = self.executor.learn(self._key(message), message)
            self.inputs[key] = torch.empty(meta.shape, dtype=meta.dtype, device=self.executor.device)
            received = self.inputs[key].detach()
            self.inputs[key].requires_grad_(meta.requires_grad)
            return received
        meta = self.metas.pop(key)
        if not meta.requires_grad:
            return None
        self.gradients[key] = torch.empty(meta.shape, dtype=meta.dtype, device=self.executor.device)
        return self.gradients[key]


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
