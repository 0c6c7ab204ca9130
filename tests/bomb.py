"""An object whose pickle runs code, to see that nobody unpickles it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Bomb:
    """Makes a file where it is unpickled.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mknod, (self.path,)
