"""Runs all ranks' programs with a clock and no process, as a backend without tags and without buffers would. Pure.

A message moves once its receive is posted and its send started, whichever comes later, and after those before it from
the same rank to the same: there the oldest send meets the oldest receive, whatever they are meant to carry. What
`verify` knows of deadlocks and `simulate` of time comes from here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import UsageError
from engine.pipeline.schedule import Compute, Exchange, Message, Program


@dataclass(frozen=True)
class Event:
    """One computation, or one message on its way, from `start` to `end`."""

    action: Compute | Message
    start: float
    end: float


def run(
    programs: Sequence[Program],
    duration: Callable[[Compute], float] = lambda _: 0.0,
    transfer: Callable[[Message], float] = lambda _: 0.0,
) -> tuple[list[list[Event]], list[Event]]:
    """Return each rank's computations in its order, and all messages as they met, with their times.

    Raises UsageError, naming the action, where another message arrives than the one that was posted, and where no rank
    gets any further.
    """
    state = _Run(programs, duration, transfer)
    while state.ready:
        state.advance(state.ready.popleft())
    stuck = [rank for rank, program in enumerate(programs) if state.at[rank] < len(program)]
    if stuck:
        raise UsageError("deadlock: " + "; ".join(state.where(rank) for rank in stuck))
    return state.computed, state.messages


class _Run:
    def __init__(
        self,
        programs: Sequence[Program],
        duration: Callable[[Compute], float],
        transfer: Callable[[Message], float],
    ) -> None:
        self.programs, self.duration, self.transfer = programs, duration, transfer
        self.ready = deque(range(len(programs)))
        self.at = [0] * len(programs)
        self.entered = [False] * len(programs)  # whether the exchange at which a rank stands has started
        self.clock = [0.0] * len(programs)
        self.sends: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)  # that have met nobody
        self.posts: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self.free: dict[tuple[int, int], float] = defaultdict(float)  # when the way between two ranks is free again
        self.ended: dict[Message, float] = {}
        self.waiting: dict[Message, list[int]] = defaultdict(list)
        self.computed: list[list[Event]] = [[] for _ in programs]
        self.messages: list[Event] = []

    def advance(self, rank: int) -> None:
        """Run a rank until it waits for a message that has not met its counterpart."""
        program = self.programs[rank]
        while self.at[rank] < len(program):
            instruction = program[self.at[rank]]
            if isinstance(instruction, Exchange):
                if not self.entered[rank]:
                    self.start(rank, instruction)
                for message in instruction.waits:
                    if message not in self.ended:
                        self.waiting[message].append(rank)
                        return
                    self.clock[rank] = max(self.clock[rank], self.ended[message])
                self.entered[rank] = False
            else:
                start = self.clock[rank]
                self.clock[rank] = start + self.duration(instruction)
                self.computed[rank].append(Event(instruction, start, self.clock[rank]))
            self.at[rank] += 1

    def start(self, rank: int, exchange: Exchange) -> None:
        self.entered[rank] = True
        for message in exchange.receives:
            self.posts[message.sender, rank].append((message, self.clock[rank]))
            self.meet((message.sender, rank))
        for message in exchange.sends:
            self.sends[rank, message.receiver].append((message, self.clock[rank]))
            self.meet((rank, message.receiver))

    def meet(self, way: tuple[int, int]) -> None:
        sends, posts = self.sends[way], self.posts[way]
        while sends and posts:
            (sent, since), (posted, ready) = sends.popleft(), posts.popleft()
            if sent != posted:
                raise UsageError(
                    f"messages out of order: rank {way[1]} posted the receive of the {posted}, and the {sent} arrives"
                )
            start = max(since, ready, self.free[way])
            self.free[way] = self.ended[sent] = start + self.transfer(sent)
            self.messages.append(Event(sent, start, self.ended[sent]))
            self.ready.extend(self.waiting.pop(sent, ()))

    def where(self, rank: int) -> str:
        instruction = self.programs[rank][self.at[rank]]
        assert isinstance(instruction, Exchange)
        lacking = next(message for message in instruction.waits if message not in self.ended)
        before = next((a for a in self.programs[rank][self.at[rank] :] if isinstance(a, Compute)), "its end")
        what = "send" if lacking.sender == rank else "receive"
        return f"rank {rank} waits, before {before}, for its {what} of the {lacking}"
