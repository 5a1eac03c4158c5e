"""What a training benchmark does, as data: the model's sizes, the layout, and how both are spelt on a command line.

Pure: no process group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from engine.errors import LayoutError, UsageError, did_you_mean
from engine.layout import AXES, Layout
from engine.pipeline.schedule import Stages
from engine.pipeline.schedules import MADE_FOR, schedule_named


@dataclass(frozen=True)
class Model:
    """Sizes of the GPT that every system trains, and of its global batch."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 256
    """Width of the residual stream."""
    heads: int = 8
    """Attention heads."""
    sequence: int = 128
    """Tokens in a row."""
    batch: int = 16
    """Rows of the global batch."""
    vocabulary: int = 4096
    """Token ids."""
    microbatches: int = 8
    """Parts of a data rank's rows in a pipeline; the next smaller number that divides the rows."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise UsageError(f"--model {name}={value}: every size is at least 1")
        if self.hidden % self.heads:
            raise UsageError(f"--model hidden={self.hidden} does not divide into heads={self.heads}")


ACCUMULATE = ("full", "shard")
MODELS = {
    "default": Model(),
    # Many parameters for few tokens: what a step costs is what it sends.
    "heavy": Model(hidden=768, batch=4, sequence=64),
}


@dataclass(frozen=True)
class Work:
    """One case: everything that a system needs to know to do its share."""

    layout: Layout
    model: Model
    model_name: str = "default"
    """As the user spelt it."""
    accumulation: int | None = None
    """Microbatches of a step; None: the model's in a pipeline, else 1."""
    schedule: str = "1f1b"
    """This engine's pipeline schedule; it says how many chunks each rank has, and where."""
    stage: int = 2
    """This engine's ZeRO stage."""
    accumulate: str | None = None
    """How this engine adds up the gradients of microbatches, `full` or `shard`; None: as its stage does by itself."""
    share_parameters: bool = False
    """Whether this engine's data ranks hold one copy of the parameters in common."""
    device: str = "cpu"
    """cpu, cuda or npu."""
    warm_up: int = 2
    """Steps before the timed ones."""
    steps: int = 5
    """Timed steps of each job."""
    seed: int = 0
    """Of weights and data."""
    limit: float = field(default=300.0, compare=False)
    """Seconds that one job may take."""

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf"):
            raise UsageError(f"--limit {self.limit}: seconds above 0")
        for name in ("warm_up", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1")
        if self.model.batch % self.layout.data:
            raise LayoutError(
                f"a batch of {self.model.batch} rows does not divide over data({self.layout.data}): "
                f"choose --model batch= a multiple of {self.layout.data}"
            )
        schedule_named(self.schedule)
        if self.accumulate not in (None, *ACCUMULATE):
            raise UsageError(f"--accumulate {self.accumulate}: choose {' or '.join(ACCUMULATE)}")
        sizes, tensor = self.model, self.layout.tensor
        if sizes.heads % tensor or sizes.vocabulary % tensor:
            raise LayoutError(
                f"heads={sizes.heads} and vocabulary={sizes.vocabulary} must divide over tensor({tensor}): "
                f"choose others with --model"
            )
        stages, chunks = self.stages.count, self.stages.chunks
        if sizes.layers % stages:
            times = f" x {chunks} chunks of {self.schedule}" if chunks > 1 else ""
            raise LayoutError(
                f"{sizes.layers} layers do not divide over pipeline({self.layout.pipeline}){times}, as the peers cut "
                f"them: choose --model layers= a multiple of {stages}"
            )
        if self.rows % self.microbatches:
            raise LayoutError(
                f"{self.rows} rows of each data rank do not divide into {self.microbatches} microbatches: "
                f"choose an --accumulation that divides {self.rows}"
            )

    @property
    def stages(self) -> Stages:
        """The virtual stages that the schedule is made for."""
        return Stages(self.layout.pipeline, *MADE_FOR.get(self.schedule, (1, "loop")))

    @property
    def rows(self) -> int:
        """Rows of the global batch that one data rank trains on."""
        return self.model.batch // self.layout.data

    @property
    def microbatches(self) -> int:
        """Equal parts of a data rank's rows."""
        if self.accumulation is not None:
            return self.accumulation
        if self.layout.pipeline == 1:
            return 1
        return next(n for n in range(min(self.model.microbatches, self.rows), 0, -1) if self.rows % n == 0)

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all data ranks."""
        return self.model.batch * self.model.sequence

    @property
    def name(self) -> str:
        """A short name, for tables: `data 2, tensor 2: default`, with the schedule where it is not 1F1B."""
        sizes = [f"{axis} {getattr(self.layout, axis)}" for axis in AXES if getattr(self.layout, axis) > 1]
        schedule = f", {self.schedule}" if self.layout.pipeline > 1 and self.schedule != "1f1b" else ""
        return f"{', '.join(sizes) or 'one process'}{schedule}: {self.model_name}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Work:
        """Return what `to_dict` was made of."""
        return cls(**{**values, "layout": Layout(**values["layout"]), "model": Model(**values["model"])})


def parse_layout(text: str) -> Layout:
    """Read `data=2,tensor=2`; axes left out are 1."""
    return Layout(**_integers("--layout", text, AXES))


def parse_model(text: str) -> Model:
    """Read `default`, `heavy`, or changes to one of them: `heavy,layers=8`, `hidden=512,batch=8`."""
    first, _, rest = text.partition(",")
    if "=" in first:
        first, rest = "default", text
    if first not in MODELS:
        raise UsageError(
            f"--model {first!r}{did_you_mean(first, MODELS)}: choose {' or '.join(MODELS)}, or size=number"
        )
    return replace(MODELS[first], **_integers("--model", rest, [each.name for each in fields(Model)]))


def _integers(option: str, text: str, known: Any) -> dict[str, int]:
    """Read `name=number,name=number`. Raises UsageError for another spelling, an unknown name or one given twice."""
    values: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        found = re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", part)
        if found is None:
            raise UsageError(f"{option}: {part!r} is not spelt name=number")
        name, number = found[1], int(found[2])
        if name not in known:
            raise UsageError(f"{option}: unknown {name!r}{did_you_mean(name, known)}: choose {', '.join(known)}")
        if name in values:
            raise UsageError(f"{option}: {name} is given twice")
        values[name] = number
    return values


def standard_set() -> list[tuple[Work, list[str]]]:
    """Return the cases of `make bench`, each with the peers that do the same work."""
    data, default, heavy = ["ddp", "zero1", "fsdp2", "deepspeed"], MODELS["default"], MODELS["heavy"]
    return [
        (Work(Layout(data=2), default), data),
        (Work(Layout(data=2), heavy, "heavy"), data),
        (Work(Layout(data=4), default), data),
        (Work(Layout(data=4), heavy, "heavy"), data),
        (Work(Layout(tensor=2), default), ["dtensor"]),
        (Work(Layout(pipeline=2), default), ["torch_1f1b"]),
        (Work(Layout(pipeline=2), default, schedule="zero_bubble"), ["torch_1f1b"]),
        (Work(Layout(pipeline=4), default), ["torch_1f1b"]),
        (Work(Layout(pipeline=4), default, schedule="zero_bubble"), ["torch_1f1b"]),
        (Work(Layout(data=2, pipeline=2, tensor=2), default), ["torch_3d"]),
    ]
