"""What crosses from one stage to the next: taken apart into tensors for sending, described, and put together again.

A layer may return a tensor, or tuples, lists, dicts and named tuples, nested, of tensors and plain values. Its tensors
travel in the order of the tree; the rest is its `Form`, which is announced once for each kind of input: all pipeline
ranks see the same inputs, so equal inputs mean a form that both sides know already.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.comm.work import Work
from engine.errors import UsageError
from engine.pipeline.schedule import Message

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_SENT = frozenset(_DTYPES.values())
_PLAIN: dict[str, Callable[[str], Any]] = {
    "NoneType": lambda _: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "str": str,
}
_CONTAINERS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
_HEAD = 64  # numbers of an announcement's first message
_MAX_FORMS = 256

Tree = tuple[Any, ...]
"""One node as plain data, equal on both sides: ("tensor", index), (a plain value's type, its text), or (a container's
type, its keys, its nodes).
"""
_ONE_TENSOR: Tree = ("tensor", 0)


@dataclass(frozen=True)
class TensorMeta:
    """What a receiver must know of a tensor. `requires_grad`: whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{_name(self.dtype)} {self.shape}{' with a gradient' if self.requires_grad else ''}"


@dataclass(frozen=True)
class Form:
    """What a receiver must know of an output: its tree and its tensors, each once, in the order in which they come."""

    tree: Tree
    tensors: tuple[TensorMeta, ...]

    def __str__(self) -> str:
        return _text(self.tree, self.tensors)

    def differentiable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of `tensors`, this form's in order, of which the gradient comes back."""
        return [x for x, meta in zip(tensors, self.tensors, strict=True) if meta.requires_grad]


def take_apart(output: Any, device: torch.device, stage: int) -> tuple[Form, list[Tensor]]:
    """Return the form of what `stage` gives the next one, and its tensors: one that is there twice comes once.

    Raises UsageError, with the place in the tree, for what cannot be sent.
    """
    if type(output) is Tensor:  # most are
        tree, tensors = _ONE_TENSOR, [output]
        _check_tensor(output, device, stage, "output")
    else:
        tensors = []
        tree = _take(output, "output", tensors, {}, device, stage)
    trained = torch.is_grad_enabled()
    return Form(tree, tuple(TensorMeta(tuple(x.shape), x.dtype, trained and x.requires_grad) for x in tensors)), tensors


def put_together(tree: Tree, tensors: Sequence[Any]) -> Any:
    """Return the output that was taken apart, made of `tensors`."""
    kind, content, *nodes = tree
    if kind == "tensor":
        return tensors[content]
    if kind in _PLAIN:
        return _PLAIN[kind](content)
    values = [put_together(node, tensors) for node in nodes]
    if content is not None:
        keys = [put_together(key, ()) for key in content]
        return _CONTAINERS[kind](zip(keys, values, strict=True))
    cls = _CONTAINERS.get(kind) or _find_class(kind)
    return cls._make(values) if hasattr(cls, "_fields") else cls(values)


class Forms:
    """The forms that one rank and its neighbours have announced to each other, by boundary, so that both sides of each
    store the same in the same order.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._incoming: dict[int, dict[object, Form]] = defaultdict(dict)
        self._outgoing: dict[int, dict[object, Form]] = defaultdict(dict)

    def announce(self, key: object, form: Form, message: Message, later: list[Work] | None) -> None:
        """Tell the receiver an output's form the first time, and check it against what was told after that. `key`: what
        the form may depend on. With `later`, what is sent is put there to be waited for.
        """
        outgoing = self._outgoing[message.stage]
        known = outgoing.get(key)
        if known is None:
            for header in _encode(form, self._device):
                if later is None:
                    self._comm.send(header, message.receiver)
                else:
                    later.append(self._comm.exchange(sends=[(header, message.receiver)], async_op=True))
            _remember(outgoing, key, form)
        elif known != form:
            raise UsageError(
                f"stage {message.stage - 1}: for inputs of these shapes the output was {known} before and is {form} "
                f"now: what crosses a stage may depend on the inputs' shapes and plain values, not on tensors' values, "
                f"on other objects, or on what was frozen since. A number that changes goes into a tensor"
            )

    def learn(self, key: object, message: Message) -> Form:
        """Return the form that was announced for inputs like these; receive the announcement the first time."""
        incoming = self._incoming[message.stage]
        form = incoming.get(key)
        if form is None:
            form = _decode(lambda out: self._comm.recv(out, message.sender), self._device)
            _remember(incoming, key, form)
        return form

    def knows(self, key: object, message: Message) -> bool:
        """Whether the form of what comes for these inputs is known."""
        return key in self._incoming[message.stage]


# ---- taking apart ----------------------------------------------------------------------------------------------------


def _take(
    value: Any, path: str, tensors: list[Tensor], places: dict[int, int], device: torch.device, stage: int
) -> Any:
    """Return the node of `value`, and append its tensors. places: of the tensors that are there, by identity."""
    if isinstance(value, Tensor):
        place = places.get(id(value))
        if place is None:
            _check_tensor(value, device, stage, path)
            place = places[id(value)] = len(tensors)
            tensors.append(value)
        return ("tensor", place)
    kind = type(value).__name__
    if kind in _PLAIN and type(value).__module__ == "builtins":
        return (kind, value if kind == "str" else repr(value))
    name, keys = _container(value, path, stage)
    nodes = (_take(child, place, tensors, places, device, stage) for place, child in _children(value, path))
    return (name, keys, *nodes)


def _container(value: Any, path: str, stage: int) -> tuple[str, Tree | None]:
    """Return how the receiver finds the type of a container, and the keys of a dict."""
    cls = type(value)
    if _CONTAINERS.get(cls.__name__) is cls:
        if not isinstance(value, dict):
            return cls.__name__, None
        wrong = next((key for key in value if type(key).__name__ not in _PLAIN), None)
        if wrong is not None:
            _refuse(stage, path, f"has a key of type {type(wrong).__name__}", "use strings or numbers as keys")
        return cls.__name__, tuple(_take(key, path, [], {}, torch.device("cpu"), stage) for key in value)
    if not (isinstance(value, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "n_fields") or cls is torch.Size)):
        _refuse(
            stage,
            path,
            f"is of type {cls.__module__}.{cls.__qualname__}",
            "return tensors, None, bools, numbers and strings, in tuples, lists, dicts and named tuples",
        )
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _found(name) is not cls:
        _refuse(stage, path, f"is a {cls.__qualname__}, which is not found as {name}", "define it at a module's level")
    return name, None


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a container, with the place of each."""
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", child) for key, child in value.items())
    elif hasattr(value, "_fields"):
        yield from ((f"{path}.{field}", child) for field, child in zip(value._fields, value, strict=True))
    else:
        yield from ((f"{path}[{index}]", child) for index, child in enumerate(value))


def _check_tensor(x: Tensor, device: torch.device, stage: int, path: str) -> None:
    if type(x) is not Tensor and not isinstance(x, nn.Parameter):
        fix = "return a plain tensor, with as_subclass(torch.Tensor) or what its class offers"
        _refuse(stage, path, f"is a {type(x).__name__}, which would arrive as a plain tensor", fix)
    if x.layout is not torch.strided or x.is_nested:
        _refuse(stage, path, "is sparse or nested", "return it dense: to_dense(), to_padded_tensor(...)")
    if x.dtype not in _SENT:
        _refuse(stage, path, f"is of {_name(x.dtype)}", f"use one of {', '.join(_DTYPES)}")
    if x.device.type != device.type:
        _refuse(stage, path, f"lies on {x.device}, the mesh on {device}", f"move it with .to({str(device)!r})")


def _refuse(stage: int, path: str, fault: str, fix: str) -> NoReturn:
    raise UsageError(f"stage {stage}: {path} {fault}, and cannot be sent to the next stage: {fix}")


def _found(name: str) -> Any:
    """Return the class called `module:qualname` among the modules that are imported, or None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _find_class(name: str) -> Any:
    """Return the class called `module:qualname`, importing its module where only the sender has."""
    if _found(name) is None:
        importlib.import_module(name.partition(":")[0])
    return _found(name)


# ---- announcing ------------------------------------------------------------------------------------------------------


def _remember(known: dict[object, Form], key: object, form: Form) -> None:
    """Store `form`. Both sides of a pair store the same in the same order, so they also forget alike."""
    if len(known) >= _MAX_FORMS:
        known.clear()
    known[key] = form


def _encode(form: Form, device: torch.device) -> list[Tensor]:
    """Return the messages of an announcement: one of a fixed size with the length, and the rest where that is longer.
    Of int32, which every backend moves.
    """
    metas = [(meta.shape, _name(meta.dtype), meta.requires_grad) for meta in form.tensors]
    text = json.dumps([form.tree, metas]).encode()
    words = -(-len(text) // 4)
    numbers = [len(text), *struct.unpack(f"{words}i", text.ljust(4 * words))]
    numbers += [0] * (_HEAD - len(numbers))
    return [torch.tensor(part, dtype=torch.int32, device=device) for part in (numbers[:_HEAD], numbers[_HEAD:]) if part]


def _decode(receive: Callable[[Tensor], Tensor], device: torch.device) -> Form:
    """Return the form of which `receive(out)` fills the messages."""
    length, *numbers = receive(torch.empty(_HEAD, dtype=torch.int32, device=device)).tolist()
    more = -(-length // 4) - len(numbers)
    if more > 0:
        numbers += receive(torch.empty(more, dtype=torch.int32, device=device)).tolist()
    tree, metas = json.loads(struct.pack(f"{len(numbers)}i", *numbers)[:length])
    tensors = tuple(TensorMeta(tuple(shape), _DTYPES[dtype], trained) for shape, dtype, trained in metas)
    return Form(_as_tuples(tree), tensors)


def _as_tuples(tree: Any) -> Any:
    """JSON has lists only."""
    return tuple(map(_as_tuples, tree)) if isinstance(tree, list) else tree


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(tree: Tree, tensors: Sequence[TensorMeta]) -> str:
    kind, content, *nodes = tree
    if kind == "tensor":
        return str(tensors[content])
    if kind in _PLAIN:
        return repr(_PLAIN[kind](content))
    values = [_text(node, tensors) for node in nodes]
    if content is not None:
        values = [f"{_text(key, ())}: {value}" for key, value in zip(content, values, strict=True)]
    return f"{kind}({', '.join(values)})"
