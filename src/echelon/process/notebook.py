"""Whether this process is the kernel of a notebook, and what its cells are called."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Whether code runs in the kernel of a notebook; a prompt of IPython is none."""
    ipython = sys.modules.get("IPython")
    if ipython is None:  # nobody but a kernel or a prompt of it imports it
        return False
    shell = ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def place_name(file: str) -> str:
    """What a file of code is called: ``cell In[3]`` if it is a cell of a notebook, else itself."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name = None if shell is None else shell.compile.format_code_name(file)
    return file if name is None else f"cell {name[1]}"
