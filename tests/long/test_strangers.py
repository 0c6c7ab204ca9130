"""More of what another user of the host tries; the rest is in ``tests/regressions``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.jobs import Job
from tests.processes import free_port
from tests.regressions.test_strangers import (
    RIGHT,
    SCRIPT,
    bare_ranks,
    check_a_first_connection,
    check_a_rewritten_store,
    ends,
    needs_root,
    results,
    stranger,
)


@needs_root
@pytest.mark.slow
def test_a_stranger_who_rewrites_all_stores_changes_nothing_over_shared_memory(
    tmp_path: Path,
) -> None:
    check_a_rewritten_store("shm", tmp_path)


@needs_root
@pytest.mark.slow
def test_a_stranger_who_connects_to_the_other_rank_first_loses_the_connection(
    tmp_path: Path,
) -> None:
    check_a_first_connection("connect", 0, tmp_path)


@needs_root
@pytest.mark.slow
def test_what_a_stranger_writes_for_the_screen_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    port = free_port()
    with stranger("text", str(port)):
        (error,) = ends(bare_ranks(tmp_path, port), 0)
    assert "\x1b" not in error
    assert "\x07" not in error
    assert r"WorldError: \x1b[2J\x1b[31m[bold red]pay here[/]\x07" in error


def test_ranks_with_a_secret_of_the_user_meet_in_a_sealed_store(
    tmp_path: Path,
) -> None:
    ranks = bare_ranks(tmp_path, free_port(), ECHELON_SECRET="5c" * 32)
    assert ends(ranks, 0, 1) == ["", ""]
    assert results(tmp_path) == [RIGHT, RIGHT]


@needs_root
@pytest.mark.slow
def test_what_a_stranger_writes_into_a_sealed_store_is_refused_by_its_key(tmp_path: Path) -> None:
    port = free_port()
    with stranger("plan", str(port)):
        errors = ends(bare_ranks(tmp_path, port, ECHELON_SECRET="5c" * 32), 0, 1)
    said = "the value of 'plan' in the store was not written by a rank of this job"
    assert f"AuthenticationError: {said}" in errors[1]
    assert f"WorldError: {said}" in errors[0]


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("how", ["length", "ready"])
def test_a_head_of_a_message_with_a_huge_length_is_refused_or_ends_the_job_by_name(
    how: str, late: int, tmp_path: Path
) -> None:
    """gloo ends a process that is sent a longer message than it expects; nothing else happens."""
    options = ("--timeout", "4")
    with (
        stranger(how) as his,
        Job(tmp_path, SCRIPT, "gloo", str(tmp_path), str(late), his, options=options) as job,
    ):
        code, _, errors = job.end()
    if code == 0:
        assert results(tmp_path) == [RIGHT, RIGHT]
    else:
        assert "was killed by SIGABRT" in errors[0]
