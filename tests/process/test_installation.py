"""What ranks replace in their process is there while any of them runs."""

from contextlib import ExitStack

import pytest

from echelon.process.replacement import Installation


def test_every_rank_installs_and_the_last_one_removes() -> None:
    log: list[str] = []
    installation = Installation(lambda: log.append("install"), lambda: log.append("remove"))
    with ExitStack() as first:
        first.enter_context(installation.needed())
        with installation.needed():
            assert log == ["install", "install"]
        assert log == ["install", "install"]
    assert log == ["install", "install", "remove"]


def test_a_rank_that_raises_has_ended_too() -> None:
    log: list[str] = []
    installation = Installation(lambda: None, lambda: log.append("remove"))
    with pytest.raises(KeyError), installation.needed():
        raise KeyError
    assert log == ["remove"]
