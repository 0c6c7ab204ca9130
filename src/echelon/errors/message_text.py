"""How messages are written: lists of ranks, and text of others that a terminal must not obey.

A terminal obeys what it is sent: it can be told to move, to hide lines, to change its title or to
answer as if the user had typed. So control characters of a text that came from somewhere else are
shown as their escapes.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

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


def by_value(values: Mapping[int, str]) -> str:
    """``nan on ranks 0, 2; inf on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_text(at)}" for value, at in ranks.items())
