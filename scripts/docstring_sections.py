"""Reads the sections of our docstrings as mkdocstrings reads them."""

import re
from typing import Any

import griffe

# Methods without an underscore that only other packages of echelon call.
INTERNAL = {"before_close", "disown", "explain", "finish", "holdings", "parameter_shards"}
INTERNAL |= {"prepare_close", "shared_over"}


class DocstringSections(griffe.Extension):
    """Lets ``Example:`` be a section of code, and the drawing after ``::`` one as well."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object that was read from a file."""
        if obj.name in INTERNAL:
            obj.public = False
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(
                r"^::\n", "", re.sub(r"(\w)::$", r"\1:", text, flags=re.M), flags=re.M
            )
