"""Text that others have written, as it may be shown.

A terminal obeys what it is sent: it can be told to move, to hide lines, to change its title or to
answer as if the user had typed. So control characters of a text that came from somewhere else are
shown as their escapes.
"""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]

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


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
