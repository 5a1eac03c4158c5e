"""What a pipeline schedule is, as data: what each rank computes in which order, and the messages that follow. Pure.

A schedule is a function (stages, microbatches) -> for each rank, its computations in order; `schedules.py` has the
named ones. `programs` derives the messages: between two computations of a rank there is at most one exchange, which
posts the receives of what the next one needs, or the one after that, starts the send of what the last one made, and
then waits. Messages from
one rank to another are posted in the order in which they are sent, which backends without tags (NCCL, HCCL) need: with
chunks, activations and gradients share the way between two ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from engine.errors import LayoutError, UsageError, did_you_mean

Kind = Literal["forward", "input_gradient", "weight_gradient", "backward"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PLACEMENTS = ("loop", "v")


@dataclass(frozen=True)
class Stages:
    """The virtual stages of a pipeline, numbered along the model, and the ranks that hold them: `chunks` on each.

    Raises LayoutError for sizes below 1, UsageError for an unknown placement.
    """

    ranks: int
    """Ranks of the pipeline axis."""
    chunks: int = 1
    """Virtual stages on each rank."""
    placement: str = "loop"
    """`loop`: stage s is on rank s mod ranks. `v`: every other round goes back, so that with two chunks rank 0 holds
    the first stage and the last.
    """

    def __post_init__(self) -> None:
        for name in ("ranks", "chunks"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"{name}={size!r}: a pipeline has at least 1 rank, and 1 chunk of the layers on each")
        if self.placement not in PLACEMENTS:
            hint = did_you_mean(str(self.placement), PLACEMENTS)
            raise UsageError(f"placement={self.placement!r}{hint}: choose {', '.join(PLACEMENTS)}")

    @property
    def count(self) -> int:
        """Virtual stages of all ranks together."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds virtual stage `stage`."""
        round_, position = divmod(stage, self.ranks)
        return self.ranks - 1 - position if self.placement == "v" and round_ % 2 else position

    def on(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank, ascending."""
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)


@dataclass(frozen=True)
class Compute:
    """One computation of one virtual stage on one microbatch.

    A `backward` is the input gradient and the weight gradient in one; a schedule lists either it or the two.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} of stage {self.stage}, microbatch {self.microbatch}"


class Message(NamedTuple):
    """An activation on its way to the next virtual stage, or a gradient on its way to the one before; equal values at
    both ends.
    """

    kind: Literal["activation", "gradient"]
    stage: int
    """The virtual stage that it is for."""
    microbatch: int
    sender: int
    """Rank of the pipeline axis, as is `receiver`."""
    receiver: int

    def __str__(self) -> str:
        way = f"rank {self.sender} to rank {self.receiver}"
        return f"{self.kind} for stage {self.stage}, microbatch {self.microbatch}, {way}"


@dataclass(frozen=True)
class Exchange:
    """What a rank says between two computations, in this order: posts, sends, waits."""

    receives: tuple[Message, ...] = ()
    """Receives that are posted."""
    sends: tuple[Message, ...] = ()
    """Sends that are started. A send ends once its receive is posted."""
    waits: tuple[Message, ...] = ()
    """Messages, started here or earlier, that must have ended before the next computation."""


Instruction = Compute | Exchange
Plan = Sequence[Sequence[Compute]]
Program = tuple[Instruction, ...]
Schedule = Callable[[Stages, int], Plan]


def forward_only(stages: Stages, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """Every forward: evaluation. As many microbatches as there are ranks go through all chunks before the next do, so
    that no more than these wait between two stages.
    """
    groups = [range(i, min(i + stages.ranks, microbatches)) for i in range(0, microbatches, stages.ranks)]
    return tuple(
        tuple(Compute("forward", stage, i) for group in groups for stage in stages.on(rank) for i in group)
        for rank in range(stages.ranks)
    )


def programs(plan: Plan, stages: Stages, *, ahead: bool = False) -> tuple[Program, ...]:
    """Return what each rank does, computations and exchanges, in order. plan: one that `verify.check_plan` passes, or
    `forward_only`'s.

    ahead: every receive is posted one computation before it is needed, and every send waited for one computation after
    it is started, so that messages move meanwhile. It takes the memory of a message each way.

    Otherwise, with one chunk and whole backwards, a rank waits in each exchange for all that it starts: neighbours then
    need each other's messages, and one call that blocks costs least. With chunks, and where that would end in a
    deadlock, a send is waited for late: once the receiver is known to have taken it, with the first message that it
    sent after that, or at the end. A message may be needed much later, and meanwhile there is something to compute.
    """
    routes = _Routes(plan, stages)
    if ahead:
        return tuple(routes.program(rank, late=True, ahead=True) for rank in range(stages.ranks))
    if stages.chunks == 1 and not any(action.kind == "weight_gradient" for actions in plan for action in actions):
        prompt = tuple(routes.program(rank, late=False) for rank in range(stages.ranks))
        if _meets(prompt):
            return prompt
    return tuple(routes.program(rank, late=True) for rank in range(stages.ranks))


class _Routes:
    """Where the messages of a plan are made and where they are needed."""

    def __init__(self, plan: Plan, stages: Stages) -> None:
        self.plan = plan
        self.ranks = [stages.rank_of(stage) for stage in range(stages.count)]
        self.made = [[self._made(action) for action in actions] for actions in plan]
        """By rank and computation: the message that carries its result away."""
        self.posts: list[list[list[Message]]] = [[[] for _ in actions] for actions in plan]
        """By rank and computation: the receives that are posted before it."""
        self.sent_after: dict[Message, int] = {}
        self.taken_before: dict[Message, int] = {}
        queues: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        for rank, messages in enumerate(self.made):
            for index, message in enumerate(messages):
                if message is not None:
                    self.sent_after[message] = index
                    queues[rank, message.receiver].append(message)
        for rank, actions in enumerate(plan):
            for index, action in enumerate(actions):
                needed = self._needed(action)
                while needed is not None and needed not in self.taken_before:
                    # What was sent before it on the same way comes before it.
                    message = queues[needed.sender, rank].popleft()
                    self.posts[rank][index].append(message)
                    self.taken_before[message] = index

    def program(self, rank: int, *, late: bool, ahead: bool = False) -> Program:
        """Return a rank's instructions, with its sends waited for at once or late, its receives posted ahead or not."""
        instructions: list[Instruction] = []
        left: dict[int, deque[Message]] = defaultdict(deque)  # sends that are not waited for, by receiver
        actions = self.plan[rank]
        for index in range(len(actions) + 1):
            last = index == len(actions)
            needed = () if last else tuple(self.posts[rank][index])
            receives = self._ahead(rank, index) if ahead else needed
            made = self.made[rank][index - 1] if index else None
            sends = () if made is None else (made,)
            waits = [*needed, *(() if late else sends)]
            if late:
                if made is not None:
                    left[made.receiver].append(made)
                if last or ahead:
                    waits += [each for queue in left.values() for each in queue if last or each is not made]
                    left = defaultdict(deque, {made.receiver: deque([made])} if made else {})
                else:
                    waits += self._known(needed, left)
            if receives or sends or waits:
                instructions.append(Exchange(receives, sends, tuple(waits)))
            if not last:
                instructions.append(actions[index])
        return tuple(instructions)

    def _ahead(self, rank: int, index: int) -> tuple[Message, ...]:
        """Return the receives to post before a computation for the next one, before the first one for both."""
        posts = self.posts[rank]
        return tuple(message for each in posts[index + 1 if index else 0 : index + 2] for message in each)

    def _known(self, received: Sequence[Message], left: dict[int, deque[Message]]) -> list[Message]:
        """Return, and take out of `left`, the sends that had been taken when these messages were sent back."""
        known = []
        for message in received:
            queue, since = left[message.sender], self.sent_after[message]
            while queue and self.taken_before[queue[0]] <= since:
                known.append(queue.popleft())
        return known

    def _made(self, action: Compute) -> Message | None:
        if action.kind == "forward":
            return self._between("activation", action.stage, action.stage + 1, action.microbatch)
        if action.kind == "weight_gradient":
            return None
        return self._between("gradient", action.stage, action.stage - 1, action.microbatch)

    def _needed(self, action: Compute) -> Message | None:
        if action.kind == "forward":
            return self._between("activation", action.stage - 1, action.stage, action.microbatch)
        if action.kind == "weight_gradient":
            return None
        return self._between("gradient", action.stage + 1, action.stage, action.microbatch)

    def _between(
        self, kind: Literal["activation", "gradient"], source: int, target: int, microbatch: int
    ) -> Message | None:
        """Return the message between two stages; None beyond either end, and between two of one rank."""
        if not (0 <= source < len(self.ranks) and 0 <= target < len(self.ranks)):
            return None
        sender, receiver = self.ranks[source], self.ranks[target]
        return None if sender == receiver else Message(kind, target, microbatch, sender, receiver)


def _meets(programs: Sequence[Program]) -> bool:
    """Whether the exchanges of all ranks end, where each waits for all that it starts."""
    exchanges = [deque(each for each in program if isinstance(each, Exchange)) for program in programs]
    open_: list[set[Message]] = [set() for _ in programs]
    started: set[Message] = set()  # by one side
    ready = deque(range(len(programs)))
    while ready:
        rank = ready.popleft()
        while not open_[rank] and exchanges[rank]:
            exchange = exchanges[rank].popleft()
            for message in (*exchange.receives, *exchange.sends):
                if message not in started:
                    started.add(message)
                    open_[rank].add(message)
                    continue
                peer = message.sender + message.receiver - rank
                open_[peer].discard(message)
                if not open_[peer]:
                    ready.append(peer)
    return not any(open_)
