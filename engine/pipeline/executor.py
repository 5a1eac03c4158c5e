"""Runs a pipeline program: interprets its instructions over one rank's stages, and nothing else.

It decides no order: `schedule.programs` did. It keeps a stage's graph between a microbatch's forward and its backward;
what crosses a stage is taken apart and put together by `boundary`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.comm.work import Work
from engine.errors import UsageError
from engine.pipeline.batches import Microbatch
from engine.pipeline.boundary import Form, Forms, put_together, take_apart
from engine.pipeline.layers import PipelineModel
from engine.pipeline.schedule import Compute, Exchange, Instruction, Message, Stages
from engine.weight_gradients import WeightGradients

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
        self.forms = Forms(comm, device)

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
        Gradients are added to the parameters' own. Raises UsageError for an output that cannot cross a stage, and, on
        every rank before anything is computed, for shapes that differ over the axis; CommunicationError when a peer
        fails.
        """
        if self.device.type == "cpu":  # elsewhere this would wait for the device; with checks, whole rows are compared
            told = (len(microbatches), tuple(dict.fromkeys(each.signature for each in microbatches)))
            self.comm.check_equal("the batch that all pipeline ranks share, by its shapes and plain values,", told)
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

    def forget(self) -> None:
        """Forget the shapes that were announced: other parameters are trained. Every rank of the axis must call it."""
        self.forms = Forms(self.comm, self.device)

    @property
    def ahead(self) -> bool:
        """Whether programs should post receives ahead: where messages move beside computing. Not on accelerators, whose
        backends let the messages of a group follow one another: a receive that is posted ahead would hold up the send
        that its sender waits for.
        """
        return self.device.type == "cpu" and self.comm.size > 1 and self.comm.overlaps

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline axis that computes the loss."""
        return self.virtual.rank_of(self.virtual.count - 1)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.comm.rank == self.last_rank


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
    """The tensors of one run of a program. Of an output only its place in the graph is kept once it is sent."""

    def __init__(
        self,
        executor: Executor,
        microbatches: Sequence[Microbatch],
        finish: LossTotal,
        weight_gradients: WeightGradients | None,
    ) -> None:
        self.executor, self.microbatches, self.finish = executor, microbatches, finish
        self.weight_gradients = weight_gradients
        self.last = executor.virtual.count - 1
        self.arrived: dict[Key, tuple[Form, list[Tensor]]] = {}  # what a stage's forward takes
        self.inputs: dict[Key, list[Tensor]] = {}  # what of it requires a gradient: leaves of the stage's graph
        self.outputs: dict[Key, tuple[Form, list[Tensor]]] = {}  # not sent yet
        self.roots: dict[Key, list[GradientEdge]] = {}  # what a stage's backward starts from
        self.gradients: dict[Key, list[Tensor]] = {}  # of the roots, but for the loss
        self.returns: dict[Key, list[Tensor]] = {}  # gradients of a stage's inputs, not sent yet
        self.forms: dict[Key, Form] = {}  # of outputs whose gradients have not been asked for
        self.posts: list[Message] = []  # receives that cannot be posted yet
        self.works: dict[Message, list[Work]] = {}  # what is waited for later
        self.buffers: set[int] | None = None  # where the model's buffers lie, once that is asked for
        kind = executor.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.trains = torch.is_grad_enabled()
        self.mode = (self.trains, autocast)  # what an output's form depends on besides its inputs

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
        output = part(*batch.args, **batch.kwargs) if stage == 0 else part(self._enter((stage, i)))
        if stage == self.last:
            total = self.finish(output, i)
            if self.trains:
                self.roots[stage, i] = [get_gradient_edge(total)] if total.requires_grad else []
            return
        form, tensors = take_apart(output, self.executor.device, stage)
        if self.trains:
            self.roots[stage, i] = [get_gradient_edge(x) for x in form.differentiable(tensors)]
        if stage + 1 in self.executor.parts:
            # Copies, as messages make them: the next layer may change them in place.
            self.arrived[stage + 1, i] = (form, [x.detach().clone() for x in tensors])
        else:
            self.outputs[stage, i] = (form, [self._leaving(x) for x in tensors])
            if self.trains:
                self.forms[stage, i] = form

    def backward(self, action: Compute) -> None:
        key = (action.stage, action.microbatch)
        roots, gradients = self.roots.pop(key), self.gradients.pop(key, None)
        if roots and self.weight_gradients is not None:
            self.weight_gradients.backward(roots, gradients, key if action.kind == "input_gradient" else None)
        elif roots:
            torch.autograd.backward(roots, gradients)
        elif action.stage == self.last and self._is_trained(key):
            raise UsageError("the loss has no gradient, although parameters require one: it was detached on the way")
        if action.stage:
            own = self._input_gradients(key)
            here = self.gradients if action.stage - 1 in self.executor.parts else self.returns
            here[action.stage - 1, action.microbatch] = own

    def _enter(self, key: Key) -> Any:
        """Return what a stage's first layer takes, as the previous layer returned it."""
        form, tensors = self.arrived.pop(key)
        if self.trains:
            leaves = self.inputs[key] = [x.requires_grad_() for x in form.differentiable(tensors)]
            tensors = [apply(_Enter, x) if x.requires_grad else x for x in tensors] if leaves else tensors
        return put_together(form.tree, tensors)

    def _leaving(self, x: Tensor) -> Tensor:
        """Return what is sent of an output: its own memory, or where that is a buffer's, which the layers may change
        before it has left, a copy.
        """
        if x.grad_fn is None:
            if self.buffers is None:
                self.buffers = {each.untyped_storage().data_ptr() for each in self.executor.module.buffers()}
            if x.untyped_storage().data_ptr() in self.buffers:
                return x.detach().clone()
        return x.detach()

    def _is_trained(self, key: Key) -> bool:
        """Whether anything that this rank used for a microbatch requires a gradient."""
        return bool(self.inputs.get(key)) or any(p.requires_grad for p in self.executor.module.parameters())

    def _input_gradients(self, key: Key) -> list[Tensor]:
        """Return the gradients of a stage's input, after its backward; zeros for what the stage did not use."""
        source = self.inputs.pop(key)
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in source]

    def exchange(self, exchange: Exchange) -> None:
        """Start the messages and wait. Where just what starts here is waited for, as one batch; else one by one."""
        comm = self.executor.comm
        if {*exchange.receives, *exchange.sends} != {*exchange.waits}:
            for message in exchange.sends:
                works = self.works[message] = []
                if tensors := self._outgoing(message, works):
                    works.append(comm.exchange(sends=[(x, message.receiver) for x in tensors], async_op=True))
            self.posts += exchange.receives
            self._post(exchange.waits)
            for message in exchange.waits:
                for work in self.works.pop(message, ()):
                    work.wait()
            return
        sends = [(x, m.receiver) for m in exchange.sends for x in self._outgoing(m)]
        if not all(map(self._knows, exchange.receives)):
            # A form comes first, and can only be waited for once what this stage owes is sent.
            comm.exchange(sends=sends)
            sends = []
        receives = [(x, m.sender) for m in exchange.receives for x in self._incoming(m)]
        comm.exchange(sends=sends, recvs=receives)

    def _post(self, waits: Sequence[Message]) -> None:
        """Post the receives of which the forms are known, and of the others those that are waited for: they block. What
        one rank sends is posted in its order. Where all are waited for, nothing is gained by posting ahead of waiting.
        """
        comm = self.executor.comm
        ahead = not {*self.posts} <= {*waits}
        left: list[Message] = []
        for message in self.posts:
            if not (message in waits or self._knows(message)) or any(message.sender == other.sender for other in left):
                left.append(message)
            elif tensors := self._incoming(message):
                receives = [(x, message.sender) for x in tensors]
                if ahead:
                    self.works[message] = [comm.exchange(recvs=receives, async_op=True)]
                else:
                    comm.exchange(recvs=receives)
        self.posts = left

    def _knows(self, message: Message) -> bool:
        """Whether the form of what a message brings is known: of a gradient once its stage's forward has run."""
        if message.kind == "gradient":
            return (message.stage, message.microbatch) in self.forms
        return self.executor.forms.knows(self._key(message), message)

    def _key(self, message: Message) -> object:
        return (self.microbatches[message.microbatch].signature, *self.mode)

    def _outgoing(self, message: Message, later: list[Work] | None = None) -> list[Tensor]:
        """Return, and keep no longer, the tensors of a message to send, after announcing their form."""
        if message.kind == "gradient":
            return self.returns.pop((message.stage, message.microbatch))
        form, tensors = self.outputs.pop((message.stage - 1, message.microbatch))
        self.executor.forms.announce(self._key(message), form, message, later)
        return tensors

    def _incoming(self, message: Message) -> list[Tensor]:
        """Return the tensors into which a message arrives."""
        key, device = (message.stage, message.microbatch), self.executor.device
        if message.kind == "activation":
            form = self.executor.forms.learn(self._key(message), message)
            tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in form.tensors]
            self.arrived[key] = (form, tensors)
            return tensors
        metas = [meta for meta in self.forms.pop(key).tensors if meta.requires_grad]
        self.gradients[key] = [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas]
        return self.gradients[key]
