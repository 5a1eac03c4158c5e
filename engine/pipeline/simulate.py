"""How long a schedule takes and how much it keeps, for given costs: a plan's programs run with a clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import LayoutError, UsageError
from engine.pipeline import rendezvous
from engine.pipeline.rendezvous import Event
from engine.pipeline.schedule import Compute, Message, Plan, Stages
from engine.pipeline.verify import verify

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What computations and messages take, in any unit of time, and what activations hold, in any unit of memory. A
    number, or one for each virtual stage.

    Raises UsageError for a negative or an infinite one.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    backward: PerStage | None = None
    """None: an input gradient and a weight gradient."""
    message: PerStage = 0.0
    """Time on the way between two ranks of an activation or gradient for the stage. Messages from one rank to another
    follow one another.
    """
    activation: PerStage = 1.0
    """What a forward keeps for its backward."""
    kept: PerStage | None = None
    """What of it stays between an input gradient and its weight gradient; None: all."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            each = [value] if isinstance(value, int | float) else value or []
            if not all(0 <= number < float("inf") for number in each):
                raise UsageError(f"{name}={value!r}: costs are at least 0, and finite")

    def of(self, name: str, stage: int) -> float:
        """Return the cost called `name` of a virtual stage."""
        value = getattr(self, name)
        return float(value) if isinstance(value, int | float) else float(value[stage])


@dataclass(frozen=True)
class Timeline:
    """What happened when. Times from 0."""

    stages: Stages
    ranks: tuple[tuple[Event, ...], ...]
    """Each rank's computations, in order."""
    messages: tuple[Event, ...]
    memory: tuple[float, ...]
    """The most that activations hold at once, by rank; empty where it was not measured."""

    @property
    def step(self) -> float:
        """When the last rank ends."""
        return max((events[-1].end for events in self.ranks if events), default=0.0)

    def busy(self, rank: int) -> float:
        """Return how long a rank computes."""
        return sum(event.end - event.start for event in self.ranks[rank])

    def scaled(self, time: float, memory: float) -> Timeline:
        """Return the same in other units, of which one of these holds so many."""

        def events(each: Sequence[Event]) -> tuple[Event, ...]:
            return tuple(Event(event.action, event.start * time, event.end * time) for event in each)

        held = tuple(value * memory for value in self.memory)
        return Timeline(self.stages, tuple(map(events, self.ranks)), events(self.messages), held)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they do not compute, from 0 to 1."""
        total = self.step * self.stages.ranks
        return 1.0 - sum(map(self.busy, range(self.stages.ranks))) / total if total else 0.0


def simulate(plan: Plan, stages: Stages, microbatches: int, costs: Costs | None = None) -> Timeline:
    """Return the timeline of a plan in which every action takes what `costs` says, by default 1, and messages nothing.

    Computations wait for their messages as the executor's would (`schedule.programs`). Raises UsageError for a plan
    that cannot run, LayoutError for costs that are not one for each virtual stage.
    """
    costs = costs or Costs()
    for name, value in vars(costs).items():
        if isinstance(value, Sequence) and len(value) != stages.count:
            raise LayoutError(f"{name} has {len(value)} costs for {stages.count} virtual stages: give one for each")

    def duration(action: Compute) -> float:
        if action.kind == "backward" and costs.backward is None:
            return costs.of("input_gradient", action.stage) + costs.of("weight_gradient", action.stage)
        return costs.of(action.kind, action.stage)

    def transfer(message: Message) -> float:
        return costs.of("message", message.stage)

    computed, messages = rendezvous.run(verify(plan, stages, microbatches), duration, transfer)
    return Timeline(stages, tuple(map(tuple, computed)), tuple(messages), tuple(_most(each, costs) for each in plan))


def _most(actions: Sequence[Compute], costs: Costs) -> float:
    """Return the most memory that a rank's activations hold at once."""
    held = most = 0.0
    for action in actions:
        whole = costs.of("activation", action.stage)
        kept = whole if costs.kept is None else costs.of("kept", action.stage)
        held += {"forward": whole, "input_gradient": kept - whole, "weight_gradient": -kept, "backward": -whole}[
            action.kind
        ]
        most = max(most, held)
    return most
