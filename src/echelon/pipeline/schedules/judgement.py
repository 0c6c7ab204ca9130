"""Judges a schedule that anybody wrote: legal or not, and the circle of waits, drawn as text.

``check`` asks whether a schedule runs on any transport of echelon. ``judge`` asks the same of each
rule by itself, of lists that are incomplete, and says where in the text a circle is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon import checks
from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline.schedules.action_file import read_file
from echelon.pipeline.schedules.action_lists import ActionLists, Source, mistake, read
from echelon.pipeline.schedules.check import coverage
from echelon.pipeline.schedules.ir import Schedule, placed_parts
from echelon.pipeline.schedules.passes import add_transfers_in_sweeps
from echelon.pipeline.schedules.waits import (
    Wait,
    WaitCause,
    WaitRule,
    crossed_messages,
    find_circle,
)

HELD, AWAITED = "■", "□"
_NEIGHBOURS = 2  # actions that are drawn on both sides of a marked one
_ALWAYS_DRAWN = 12  # a list that is not longer is drawn whole

USUAL_RULES = (WaitRule.BLOCKING, WaitRule.EAGER, WaitRule.PAIR_QUEUE)


@dataclass(frozen=True, kw_only=True)
class ScheduleVerdict:
    """What ``judge`` found. ``str`` of it is what ``echelon schedule check`` prints.

    Attributes:
        lists: the actions that were judged; ``lists.orders`` has them by rank.
        problem: the first action that is missing, too much or misplaced; None if there is none.
            Then there are no circles.
        circles: by rule: the waits of a circle, or None where the schedule is legal.
        notes: sentences about what was judged, and about what is not a matter of waiting.

    Example:
        >>> verdict = judge("0F0,0B0\\n1F0,1B0")
        >>> verdict.is_legal, verdict.num_ranks, verdict.problem
        (True, 2, None)
    """

    lists: ActionLists = field(repr=False)
    problem: ScheduleError | None
    circles: Mapping[WaitRule, tuple[Wait, ...] | None]
    notes: tuple[str, ...]

    @property
    def is_legal(self) -> bool:
        """Whether nothing is missing or misplaced, and no rank waits for ever under any rule."""
        return self.problem is None and not any(self.circles.values())

    @property
    def num_ranks(self) -> int:
        """How many ranks have a list."""
        return len(self.lists.orders)

    def __str__(self) -> str:
        return "\n".join([*self._heading(), "", *self._rulings(), *self._drawings()])

    def _heading(self) -> list[str]:
        parts = [part for _, _, _, part in placed_parts(self.lists.orders)]
        stages = len({part.stage for part in parts})
        microbatches = len({part.microbatch for part in parts if part.microbatch is not None})
        counts = [
            _counted(self.num_ranks, "rank"),
            _counted(stages, "stage"),
            _counted(microbatches, "microbatch", "microbatches"),
            _counted(sum(map(len, self.lists.orders)), "action"),
        ]
        return [f"{', '.join(counts)}; read as {self.lists.form}", *self.notes]

    def _rulings(self) -> list[str]:
        if self.problem is not None:
            return [f"not legal: {_placed(self.lists, self.problem)}"]
        width = max(len(rule.words) for rule in self.circles)
        return [
            f"{rule.words:<{width}}  "
            + ("legal" if circle is None else f"NOT LEGAL: {circle_in_short(circle)}")
            for rule, circle in self.circles.items()
        ]

    def _drawings(self) -> list[str]:
        """Each circle once, with the rules that it breaks."""
        rules: dict[tuple[Wait, ...], list[WaitRule]] = {}
        for rule, circle in self.circles.items():
            if circle is not None:
                rules.setdefault(circle, []).append(rule)
        lines = []
        for circle, broken in rules.items():
            title = " and ".join(rule.words for rule in broken)
            lines += ["", f"{title}: these wait for each other", ""]
            drawn = [*_rows(self.lists, circle), "", *_ladder(self.lists, circle)]
            lines += [f"  {line}".rstrip() for line in drawn]
        return lines


def judge(
    source: Source | Path,
    rules: Collection[WaitRule | str] = USUAL_RULES,
    *,
    batched: bool = False,
) -> ScheduleVerdict:
    """Say whether a schedule is legal under each rule of how sends and receives behave.

    Args:
        source: the text of a CSV or of printed lists, a ``Path`` to a file with it, a ``Schedule``,
            or lists by rank of actions, of PyTorch's actions, or of their text. Lists without sends
            and receives get them where PyTorch's runtime places them. Where ``...`` stands for
            actions, what is left out is taken to go well.
        rules: under which to judge.
        batched: whether sends and receives that follow each other are issued as one batch, as
            ``torch.distributed.batch_isend_irecv`` does.

    Raises:
        ArgumentError: it is no list of actions (the message has line and column), or a rule is
            unknown.

    Example:
        >>> verdict = judge('''
        ... rank 0: [... 0SendF1, 2RecvF0, 2F0]
        ... rank 1: [... 1SendF0, 1RecvF1, 1F1]
        ... ''', ["blocking", "eager"])
        >>> print(*str(verdict).splitlines()[3:5], sep="\\n")
        blocking sends  NOT LEGAL: rank 0 at 0SEND_F1, rank 1 at 1SEND_F0
        eager sends     legal
    """
    chosen = _rules(rules)
    checks.flag("batched", batched)
    text = read_file(source) if isinstance(source, Path) else source
    lists = read(text, batched=batched)
    problem = mistake(lists)
    if problem is not None:
        return ScheduleVerdict(lists=lists, problem=problem, circles={}, notes=_notes(lists))
    notes = [*_notes(lists)]
    if not lists.has_transfers:
        circle = find_circle(lists, WaitRule.EAGER)
        if circle is not None:
            same = dict.fromkeys(chosen, circle)
            return ScheduleVerdict(lists=lists, problem=None, circles=same, notes=tuple(notes))
        if not lists.is_excerpt:
            lowered = add_transfers_in_sweeps(Schedule.from_orders(lists.orders))
            lists = replace(read(lowered), form=lists.form)
            notes.append(
                "sends and receives are not in it; they are taken to stand where PyTorch's runtime "
                "places them, and indices count them"
            )
    circles = {rule: find_circle(lists, rule) for rule in chosen}
    return ScheduleVerdict(lists=lists, problem=None, circles=circles, notes=tuple(notes))


def _rules(rules: Collection[WaitRule | str]) -> list[WaitRule]:
    names = [rule.value for rule in WaitRule]
    if isinstance(rules, str) or not isinstance(rules, Collection) or not rules:
        raise ArgumentError(f"rules is {rules!r:.80}; give a list of some of {', '.join(names)}")
    for rule in rules:
        if rule not in names:
            raise ArgumentError(f"there is no rule {rule!r:.80}; give some of {', '.join(names)}")
    return [WaitRule(rule) for rule in dict.fromkeys(rules)]


def _notes(lists: ActionLists) -> tuple[str, ...]:
    """What is to know beside the verdict."""
    notes = []
    if lists.is_excerpt:
        notes.append("an excerpt: what is left out is taken to go well")
    crossed = crossed_messages(lists)
    if crossed is not None:
        notes.append(crossed)
    if not lists.is_excerpt:
        try:
            coverage(Schedule.from_orders(lists.orders))
        except ScheduleError as error:
            notes.append(f"not a matter of waiting: {_placed(lists, error)}")
    return tuple(notes)


def _placed(lists: ActionLists, error: ScheduleError) -> str:
    """What an error says, with its place in the text."""
    where = [] if error.rank is None else [f"rank {error.rank}"]
    if error.rank is not None and error.index is not None:
        where.append(lists.place(error.rank, error.index))
    if error.action is not None:
        where.append(error.action)
    return f"{', '.join(where)}{': ' if where else ''}{error.problem}"


def _counted(number: int, noun: str, nouns: str | None = None) -> str:
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


# --- the drawing of a circle ---------------------------------------------------------------------


def circle_in_short(circle: Sequence[Wait]) -> str:
    """The actions of a circle on one line.

    Example:
        >>> from echelon.pipeline.schedules.action_lists import read
        >>> from echelon.pipeline.schedules.waits import WaitRule, find_circle
        >>> lists = read("[... 0SendF1, 2RecvF0, 2F0]\\n[... 1SendF0, 1RecvF1, 1F1]")
        >>> print(circle_in_short(find_circle(lists, WaitRule.BLOCKING)))
        rank 0 at 0SEND_F1, rank 1 at 1SEND_F0
    """
    shown = [f"rank {wait.rank} at {wait.action}" for wait in circle[:4]]
    if len(circle) > len(shown):
        shown.append(f"{len(circle) - len(shown)} more")
    return ", ".join(shown)


def _marks(circle: Sequence[Wait]) -> dict[int, dict[int, str]]:
    """By rank and position: whether the action waits or is waited for."""
    marks: dict[int, dict[int, str]] = {}
    for wait in circle:
        marks.setdefault(wait.for_rank, {}).setdefault(wait.for_position, AWAITED)
        marks.setdefault(wait.rank, {})[wait.position] = HELD
    return dict(sorted(marks.items()))


def _drawn(length: int, marked: Sequence[int]) -> list[int | None]:
    """The positions of a list that are drawn; None where some are left out."""
    near = {
        position
        for mark in marked
        for position in range(mark - _NEIGHBOURS, mark + _NEIGHBOURS + 1)
    }
    drawn: list[int | None] = []
    for position in range(length):
        if length <= _ALWAYS_DRAWN or position in near:
            drawn.append(position)
        elif drawn[-1:] != [None]:
            drawn.append(None)
    return drawn


def _rows(lists: ActionLists, circle: Sequence[Wait]) -> list[str]:
    """The lists of the ranks in a circle, with its actions marked."""
    marks = _marks(circle)
    width = len(str(max(marks)))
    lines = []
    for rank, marked in marks.items():
        order = lists.orders[rank]
        actions, below = "", ""
        for position in _drawn(len(order), sorted(marked)):
            text = "…" if position is None else str(order[position])
            mark = marked.get(position, "") if position is not None else ""
            actions += f" {text}"
            below += f" {mark:<{len(text)}}"
        lines += [f"rank {rank:>{width}} │{actions}", f"{'':{width + 5}} │{below}".rstrip()]
    return [*lines, f"{'':{width + 5}}   {HELD} waits   {AWAITED} is waited for"]


def _ladder(lists: ActionLists, circle: Sequence[Wait]) -> list[str]:
    """Two lines for each wait, with the way back at the side."""
    lines = []
    for number, wait in enumerate(circle):
        following = circle[(number + 1) % len(circle)]
        is_last = number == len(circle) - 1
        head, cause = _sentences(lists, wait, following)
        lines.append(f"{'┌─▶' if number == 0 else '│  '} {head}")
        lines.append(f"{'└──' if is_last else '│  '}     {cause}")
    return lines


def _sentences(lists: ActionLists, wait: Wait, following: Wait) -> tuple[str, str]:
    """Who waits where, and for what."""
    here = f"({lists.place(wait.rank, wait.position)})"
    there = f"{wait.for_action} ({lists.place(wait.for_rank, wait.for_position)})"
    if wait.cause is WaitCause.QUEUE:
        cause = f"behind {there}"
        if following.rank != wait.for_rank:
            cause += f", whose other end is {following.action} of rank {following.rank}"
        return f"rank {wait.rank} has {wait.action} {here} in its queue", cause
    head = f"rank {wait.rank} waits at {wait.action} {here}"
    if wait.cause is WaitCause.ARRIVE:
        return head, f"for its {there}"
    cause = f"for {there} of rank {wait.for_rank}"
    if (following.rank, following.position) != (wait.for_rank, wait.for_position):
        cause += f", which comes after {following.action}"
    return head, cause
