"""How messages are written: lists of ranks, and text of others that a terminal must not obey.

A terminal obeys what it is sent: it can be told to move, to hide lines, to change its title or to
answer as if the user had typed. So control characters of a text that came from somewhere else are
shown as their escapes.
"""

from __future__ import annotations

import io
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

MAX_ROWS = 12  # of a message that lists names; a model has thousands
NO_MAJORITY = "No majority says which rank is right."

# Control, format (such as those that reverse a line), surrogates, line and paragraph separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """``text`` with all that a terminal would obey escaped, but for ends of lines and tabs.

    Example:
        >>> printable("\\x1b[31mred\\n")
        '\\\\x1b[31mred\\n'
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_shown(character) for character in text)


def say(*lines: object) -> None:
    """Print lines for a person to standard error, as ``printable`` texts."""
    print(printable("\n".join(map(str, lines))), file=standard_error(), flush=True)


def standard_error() -> TextIO:
    """``sys.stderr``; where a program has closed it, or put None there, a stream to the same file.

    Programs do so to be silent, and what ended them must be told all the same.
    """
    if is_open(sys.stderr):
        return sys.stderr
    try:
        return open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    except OSError:  # the process has no such file
        return io.StringIO()


def is_open(stream: TextIO | None) -> bool:
    """Whether a standard stream is there and takes text; one of a program may have few methods."""
    return stream is not None and not getattr(stream, "closed", False)


def without_middle(text: str, length: int) -> str:
    """``text`` with at most ``length`` characters, of which its ends say the most.

    Example:
        >>> without_middle("abcdefghij", 8)
        'abcd … j'
    """
    mark, half = " … ", length // 2
    num_last = length - half - len(mark)
    return text if len(text) <= length else text[:half] + mark + text[len(text) - num_last :]


def printable_line(text: str) -> str:
    """``text`` as ``printable``, on one line: a name must not look like further lines.

    Example:
        >>> printable_line("weight\\nall is well")
        'weight\\\\nall is well'
    """
    return printable(text).replace("\n", "\\n")


def text_bytes(text: str) -> bytes:
    """``text`` in UTF-8, in which each character has a place.

    A name of a file that is in no encoding comes from the system with surrogates, of which UTF-8
    has none; it may be that of the script, and so in the place of every call.

    Example:
        >>> text_bytes("jos\\udce9/train.py")
        b'jos\\\\udce9/train.py'
    """
    return text.encode(errors="backslashreplace")


def message_of(error: BaseException) -> str:
    """What an exception says; and that its own code fails to say it, where it does.

    Example:
        >>> message_of(ValueError("boom"))
        'boom'
    """
    try:
        return str(error)
    except Exception as problem:  # of the user's code; the others must hear of the failure anyway
        return f"(its text raised {type(problem).__name__})"


def line_of(error: BaseException) -> str:
    """The class of an exception and the first line of what it says.

    Example:
        >>> line_of(ValueError("boom\\nand more")), line_of(KeyboardInterrupt())
        ('ValueError: boom', 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {message_of(error).partition(chr(10))[0]}".removesuffix(": ")


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def counted(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> counted(2, "race"), counted(0, "race")
        ('2 races', 'no races')
    """
    return f"{number or 'no'} {what if number == 1 else f'{what}s'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 2, 5``; long lists are cut."""
    if not ranks:
        return "other ranks"
    shown = ", ".join(map(str, ranks[:12])) + (", …" if len(ranks) > 12 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def rows_text(values: Mapping[int, str], compared: Callable[[str], str] = lambda text: text) -> str:
    """One row a rank; those that are not like most of them are marked.

    Where no value is that of more than half of the ranks, nobody knows which is right: no row is
    marked then, and a sentence says so.

    Args:
        compared: the part of a row that should be the same on all ranks.

    Example:
        >>> print(rows_text({0: "1", 1: "2", 2: "1"}))
          rank 0: 1
          rank 1: 2   <-- differs
          rank 2: 1
        >>> print(rows_text({0: "1", 1: "2"}))
          rank 0: 1
          rank 1: 2
        No majority says which rank is right.
    """
    usual, count = Counter(map(compared, values.values())).most_common(1)[0]
    has_majority = 2 * count > len(values)
    rows = [
        f"  rank {rank}: {text}"
        + ("   <-- differs" if has_majority and compared(text) != usual else "")
        for rank, text in sorted(values.items())
    ]
    return "\n".join(rows if has_majority else [*rows, NO_MAJORITY])


def misfit_counts(
    missing: Sequence[str], unexpected: Sequence[str], differing: Sequence[str]
) -> str:
    """How many names of a state do not fit, by kind.

    Example:
        >>> misfit_counts(["w", "b"], [], ["h: (2,) instead of (3,)"])
        '2 missing, 1 differing'
    """
    counts = {"missing": missing, "unexpected": unexpected, "differing": differing}
    return ", ".join(f"{len(names)} {kind}" for kind, names in counts.items() if names)


def misfit_text(missing: Sequence[str], unexpected: Sequence[str], differing: Sequence[str]) -> str:
    """What of a state does not fit, in one line: the counts, some of each kind, and what to do.

    Example:
        >>> misfit_text(["w"], ["v"], ["h: (2,) instead of (3,)"])
        '1 missing, 1 unexpected, 1 differing: w: missing; v: unexpected; h: (2,) instead of (3,)'
    """
    kinds = [
        [f"{name}: missing" for name in sorted(missing)],
        [f"{name}: unexpected" for name in sorted(unexpected)],
        sorted(differing),
    ]
    counts = misfit_counts(missing, unexpected, differing)
    rows, advice = fair_rows(kinds, MAX_ROWS), prefix_advice(missing, unexpected)
    return printable_line(f"{counts}: {'; '.join(rows)}{advice and '. '}{advice}")


def fair_rows(kinds: Sequence[Sequence[str]], limit: int) -> list[str]:
    """At most ``limit`` rows, of each kind as many as of the others; the last counts the rest.

    Example:
        >>> fair_rows([["a", "b", "c"], ["x"], []], 2)
        ['a', 'x', 'and 2 more']
    """
    num_shown = [0] * len(kinds)
    while sum(num_shown) < limit and num_shown != [*map(len, kinds)]:
        left = [i for i, rows in enumerate(kinds) if num_shown[i] < len(rows)]
        num_shown[min(left, key=lambda i: num_shown[i])] += 1
    rows = [row for kind, count in zip(kinds, num_shown, strict=True) for row in kind[:count]]
    num_left = sum(map(len, kinds)) - len(rows)
    return [*rows, f"and {num_left} more"] if num_left else rows


def prefix_advice(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do where the names of a state are those of the model behind a prefix; else empty.

    Names of a checkpoint have that of the model and a slash before them.

    Example:
        >>> print(prefix_advice(["w"], ["module.w"]).replace(": ", ":\\n", 1))
        Names there begin with 'module.', as a wrapper adds it:
        take it off, or load into torch.nn.ModuleDict({'module': model})
    """
    for name in missing[:1]:
        section, _, local = name.rpartition("/")
        of_section = [other for other in missing if other.rpartition("/")[0] == section]
        start = f"{section}/" if section else ""
        known = set(unexpected)
        for other in unexpected:
            prefix = other.removeprefix(start).removesuffix(local)
            if not (prefix.endswith(".") and other == f"{start}{prefix}{local}"):
                continue
            if all(start + prefix + key.removeprefix(start) in known for key in of_section):
                path = "".join(f"{{{part!r}: " for part in prefix.removesuffix(".").split("."))
                closing = "}" * prefix.count(".")
                return (
                    f"Names there begin with {prefix!r}, as a wrapper adds it: take it off, or "
                    f"load into torch.nn.ModuleDict({path}model{closing})"
                )
    return ""


def by_value(values: Mapping[int, str]) -> str:
    """``nan on ranks 0, 2; inf on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_text(at)}" for value, at in ranks.items())
