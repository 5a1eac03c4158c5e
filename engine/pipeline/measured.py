"""Steps of a pipeline as they ran: what all ranks computed when, from and to JSON, beside what a simulation says. Pure.

`recording` measures them. A file is one object: schedule, microbatches, stages (ranks, chunks, placement), unit, and
steps; a step is a list for each rank of its computations in order, an object each:

    {"kind": "forward", "stage": 0, "microbatch": 0, "start": 0.0012, "end": 0.0154, "held": [0, 4194304]}
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError, UsageError
from engine.pipeline.rendezvous import Event
from engine.pipeline.schedule import Compute, Stages
from engine.pipeline.simulate import Costs, Timeline, simulate
from engine.pipeline.verify import check_plan

_UNIT = "seconds from the meeting of all ranks; bytes more than then"


@dataclass(frozen=True)
class Computed:
    """One computation as it ran. Times in seconds, from the moment in which all ranks met before the step."""

    action: Compute
    start: float
    end: float
    held: tuple[int, int] | None = None
    """How many bytes more than at that moment the rank held at the start and at the end; None where that was not known.
    """


Step = tuple[tuple[Computed, ...], ...]
"""Each rank's computations in order."""


@dataclass(frozen=True)
class Measured:
    """Recorded steps of one pipeline, in which every rank did the same computations in the same order."""

    schedule: str
    stages: Stages
    microbatches: int
    steps: tuple[Step, ...]

    def timeline(self, step: int | None = None) -> Timeline:
        """Return what happened in a step, in seconds and bytes; None: in the step of median length."""
        if step is None:
            lengths = [max(rank[-1].end for rank in ranks) for ranks in self.steps]
            step = lengths.index(statistics.median_low(lengths))
        ranks = self.steps[step]
        events = tuple(tuple(Event(each.action, each.start, each.end) for each in rank) for rank in ranks)
        known = all(each.held is not None for rank in ranks for each in rank)
        memory = tuple(float(max(max(each.held or (0,)) for each in rank)) for rank in ranks) if known else ()
        return Timeline(self.stages, events, (), memory)

    def bubble(self) -> float:
        """Return the median of the steps' bubbles, from 0 to 1."""
        return statistics.median(self.timeline(step).bubble for step in range(len(self.steps)))

    def costs(self) -> Costs:
        """Return what computations took and forwards kept, the median by kind and stage over all steps."""
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        kept: dict[tuple[str, int], list[float]] = defaultdict(list)
        for each in (each for ranks in self.steps for rank in ranks for each in rank):
            key = (each.action.kind, each.action.stage)
            seconds[key].append(each.end - each.start)
            if each.held is not None:
                kept[key].append(each.held[1] - each.held[0])

        def medians(found: Mapping[tuple[str, int], list[float]], kind: str) -> list[float]:
            return [statistics.median(found[kind, s]) if (kind, s) in found else 0.0 for s in range(self.stages.count)]

        activation = [max(0.0, value) for value in medians(kept, "forward")]
        left = zip(activation, medians(kept, "input_gradient"), strict=True)
        return Costs(
            **{kind: medians(seconds, kind) for kind in ("forward", "input_gradient", "weight_gradient", "backward")},
            activation=activation,
            kept=[min(max(0.0, whole + change), whole) for whole, change in left],
        )

    def simulated(self) -> Timeline:
        """Return the same plan in which each computation takes its median and messages take nothing."""
        return simulate(self.plan, self.stages, self.microbatches, self.costs())

    @property
    def plan(self) -> tuple[tuple[Compute, ...], ...]:
        """Each rank's computations in order."""
        return tuple(tuple(each.action for each in rank) for rank in self.steps[0])

    def save(self, path: Path) -> None:
        """Write everything as JSON; the folder is made."""
        head = {
            "schedule": self.schedule, "microbatches": self.microbatches, "stages": asdict(self.stages), "unit": _UNIT,
        }  # fmt: skip
        steps = _listed(
            (_listed((_listed(map(_to_json, rank), 3) for rank in ranks), 2) for ranks in self.steps), indent=1
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{json.dumps(head)[:-1]},\n "steps": {steps}}}\n')


def read(path: Path) -> Measured:
    """Read what `save` wrote. Raises UsageError for a file that is missing or holds something else."""
    try:
        document = json.loads(path.read_text())
        stages, microbatches = Stages(**document["stages"]), int(document["microbatches"])
        steps = tuple(tuple(tuple(map(_from_json, rank)) for rank in ranks) for ranks in document["steps"])
        found = Measured(str(document["schedule"]), stages, microbatches, steps)
        _check(found)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        reason = error if isinstance(error, EngineError) else repr(error)
        raise UsageError(f"{path} is no recorded timeline: {reason}") from error
    return found


def _check(found: Measured) -> None:
    if not found.steps:
        raise UsageError("it has no step")
    listed, least = sum(map(len, found.plan)), found.stages.count * found.microbatches
    if not 0 < least <= listed:
        raise UsageError(f"it has {found.microbatches} microbatches, {found.stages} and {listed} computations")
    check_plan(found.plan, found.stages, found.microbatches)
    for number, ranks in enumerate(found.steps):
        if tuple(tuple(each.action for each in rank) for rank in ranks) != found.plan:
            raise UsageError(f"step {number} has other computations than step 0, or in another order")
        for rank, computed in enumerate(ranks):
            times = [time for each in computed for time in (each.start, each.end)]
            if not all(map(math.isfinite, times)):
                raise UsageError(f"step {number}, rank {rank}: its times are not all numbers")
            if times != sorted(times) or min(times) < 0:
                raise UsageError(f"step {number}, rank {rank}: its times go back")


def _listed(parts: Iterable[str], indent: int) -> str:
    """Return a JSON list with a line for each part."""
    separator = "\n" + " " * indent
    return f"[{separator}{f',{separator}'.join(parts)}]"


def _to_json(each: Computed) -> str:
    return json.dumps({**asdict(each.action), "start": each.start, "end": each.end, "held": each.held})


def _from_json(values: Mapping[str, Any]) -> Computed:
    held: Sequence[int] | None = values["held"]
    action = Compute(values["kind"], int(values["stage"]), int(values["microbatch"]))
    return Computed(
        action, float(values["start"]), float(values["end"]), None if held is None else (int(held[0]), int(held[1]))
    )
