"""Runs lists of actions step by step and sees whether they end: shares no code with the checker.

A state is how far each rank has come, what was sent, and what has arrived. ``outcomes`` tries every
order in which ranks and transfers can move, ``outcome`` one order that it draws.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

# An action is (kind, stage, microbatch); a list has tuples of actions: pairs and batches.
Act = tuple[str, int, int]
Group = tuple[Act, ...]
Message = tuple[str, int, int]  # "F" or "B", stage that gives it, microbatch


def acts(text: str) -> Group:
    """Read ``2F0``, a pair, or several actions with + between them."""
    pattern = r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d*)"
    found = re.findall(pattern, text.replace("OVERLAP_F_B", ""))
    return tuple((kind, int(stage), int(i or -1)) for stage, kind, i in found)


def parse(rows: list[list[str]]) -> list[list[Group]]:
    """The lists of all ranks; empty cells are left out."""
    return [[acts(cell) for cell in row if cell] for row in rows]


@dataclass(frozen=True)
class State:
    """How far everything has come."""

    at: tuple[int, ...]  # how many groups each rank has finished
    open: tuple[bool, ...]  # whether a rank has issued the transfers of its present group
    sent: frozenset[Message] = frozenset()
    posted: frozenset[Message] = frozenset()
    arrived: frozenset[Message] = frozenset()
    # By rank and queue: the groups of messages that wait in it.
    queues: tuple[tuple[tuple[int, int], tuple[frozenset[Message], ...]], ...] = ()


def message(act: Act) -> Message:
    """What a send or a receive moves."""
    kind, stage, i = act
    if kind.startswith("SEND"):
        return kind[-1], stage, i
    return kind[-1], stage - 1 if kind == "RECV_F" else stage + 1, i


class Machine:
    """The lists, and the moves that a rule allows."""

    def __init__(self, lists: list[list[Group]], rule: str) -> None:
        self.lists, self.rule = lists, rule
        flat = [(rank, act) for rank, row in enumerate(lists) for group in row for act in group]
        self.home = {act[1]: rank for rank, act in flat}
        self.last = max(self.home)
        self._done: dict[tuple[int, int], frozenset[Act]] = {}
        self.lowered = any(act[0][:4] in ("SEND", "RECV") for _, act in flat)

    def begin(self) -> State:
        return State(at=(0,) * len(self.lists), open=(False,) * len(self.lists))

    def is_end(self, state: State) -> bool:
        return all(n == len(row) for n, row in zip(state.at, self.lists, strict=True))

    def done(self, state: State, rank: int) -> frozenset[Act]:
        """What a rank has computed."""
        key = rank, state.at[rank]
        if key not in self._done:
            groups = self.lists[rank][: state.at[rank]]
            self._done[key] = frozenset(act for group in groups for act in group)
        return self._done[key]

    def ready(self, state: State, rank: int, act: Act) -> bool:
        """Whether what a computation needs is there."""
        kind, stage, i = act
        done = self.done(state, rank)
        if kind == "F":
            return stage == 0 or self.there(state, rank, ("F", stage - 1, i))
        if kind in ("B", "I"):
            if ("F", stage, i) not in done:
                return False
            return stage == self.last or self.there(state, rank, ("B", stage + 1, i))
        return kind != "W" or ("I", stage, i) in done

    def there(self, state: State, rank: int, value: Message) -> bool:
        """Whether a rank has a value: computed there, or arrived."""
        kinds = ("F",) if value[0] == "F" else ("B", "I")
        home = self.home[value[1]]
        if home == rank or not self.lowered:
            return any((kind, *value[1:]) in self.done(state, home) for kind in kinds)
        return value in state.arrived

    def moves(self, state: State, first: int = 0) -> Iterator[State]:
        """Every state that one step leads to, those of the rank ``first`` first."""
        for rank in (*range(first, len(self.lists)), *range(first)):
            row = self.lists[rank]
            if state.at[rank] < len(row):
                yield from self.step(state, rank, row[state.at[rank]])
        if self.rule.endswith("queue"):
            yield from self.transfers(state)

    def step(self, state: State, rank: int, group: Group) -> Iterator[State]:
        is_transfer = group[0][0][:4] in ("SEND", "RECV")
        if not is_transfer:
            if all(self.ready(state, rank, act) for act in group):
                yield self.forward(state, rank)
            return
        if not state.open[rank]:
            yield self.issue(state, rank, group)
            return
        own = {message(act) for act in group if act[0].startswith("SEND")}
        if self.rule != "blocking" or own <= state.posted:
            yield self.forward(state, rank)

    def issue(self, state: State, rank: int, group: Group) -> State:
        """Post the sends and receives of a group."""
        done = self.done(state, rank)
        for kind, stage, i in group:
            if kind.startswith("SEND"):
                sources = ("F",) if kind == "SEND_F" else ("B", "I")
                if not any((source, stage, i) in done for source in sources):
                    return state  # it has nothing to send, for ever
        sends = frozenset(message(act) for act in group if act[0].startswith("SEND"))
        receives = frozenset(message(act) for act in group if act[0].startswith("RECV"))
        sent, posted = state.sent | sends, state.posted | receives
        state = replace(state, sent=sent, posted=posted)
        if self.rule.endswith("queue"):
            queues = dict(state.queues)
            by_queue: dict[tuple[int, int], set[Message]] = {}
            for act in group:
                by_queue.setdefault(self.queue(rank, act), set()).add(message(act))
            for name, members in by_queue.items():
                queues[name] = (*queues.get(name, ()), frozenset(members))
            state = replace(state, queues=tuple(sorted(queues.items())))
        else:
            state = replace(state, arrived=sent & posted)
        opened = list(state.open)
        opened[rank] = True
        return replace(state, open=tuple(opened))

    def queue(self, rank: int, act: Act) -> tuple[int, int]:
        if self.rule == "rank-queue":
            return rank, rank
        kind, stage, _ = act
        return rank, self.home[stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1]

    def transfers(self, state: State) -> Iterator[State]:
        """Move a message that is in the first group of a queue of each of its two ranks."""
        queues = dict(state.queues)
        heads: dict[Message, list[tuple[int, int]]] = {}
        for name, groups in queues.items():
            for member in groups[0] if groups else ():
                heads.setdefault(member, []).append(name)
        for moved, names in heads.items():
            if len(names) == 2:
                left = dict(queues)
                for name in names:
                    first = left[name][0] - {moved}
                    left[name] = (first, *left[name][1:]) if first else left[name][1:]
                queues_now = tuple(sorted(left.items()))
                yield replace(state, queues=queues_now, arrived=state.arrived | {moved})

    def forward(self, state: State, rank: int) -> State:
        at, opened = list(state.at), list(state.open)
        at[rank], opened[rank] = at[rank] + 1, False
        return replace(state, at=tuple(at), open=tuple(opened))


def outcomes(lists: list[list[Group]], rule: str) -> set[bool]:
    """Whether all ranks come to their end, for every order of steps."""
    machine = Machine(lists, rule)
    seen, stack, ends = set[State](), [machine.begin()], set[bool]()
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        following = [other for other in machine.moves(state) if other != state]
        if not following:
            ends.add(machine.is_end(state))
        stack.extend(following)
    return ends


def outcome(lists: list[list[Group]], rule: str, seed: int = 0) -> bool:
    """Whether all ranks come to their end, in an order of steps that is drawn."""
    machine, draw = Machine(lists, rule), random.Random(seed)
    state = machine.begin()
    following: State | None = state
    while following is not None:
        state = following
        moves = machine.moves(state, draw.randrange(len(lists)))
        following = next((other for other in moves if other != state), None)
    return machine.is_end(state)
