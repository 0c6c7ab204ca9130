"""Python processes that a test starts as a user does, with less time spent on their start.

Python looks for ``sitecustomize`` on its path, and imports it before anything else. The one of this
folder makes it look for garbage less often: while torch is imported it would find none.
"""

import os
from pathlib import Path

__all__ = ["environ"]


def environ(**variables: str) -> dict[str, str]:
    """The environment of a child: that of the test, and ``variables``."""
    known = {**os.environ, **variables}
    path = [str(Path(__file__).parent), *filter(None, [known.get("PYTHONPATH")])]
    return {**known, "PYTHONPATH": os.pathsep.join(path)}
