"""The trainers that echelon works inside of, and that an installation without extras lacks."""

from pathlib import Path

import pytest

HOSTS = frozenset({"accelerate", "lightning", "ray", "transformers"})


def skip_without_host(path: Path) -> None:
    """Skip the test of a page or a module of ``integrations`` whose trainer is not installed."""
    parent, _, below = path.with_suffix("").as_posix().rpartition("integrations/")
    host = below.partition("/")[0]
    if parent and host in HOSTS:
        pytest.importorskip(host, reason=f"the extra of {host} is not installed")
