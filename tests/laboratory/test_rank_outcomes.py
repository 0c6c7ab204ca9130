"""The failure of a test is that of the rank which caused it, and a report shows all ranks."""

import traceback
from pathlib import Path

import pytest
from torch.utils._pytree import tree_map

from echelon.errors import StateError
from echelon.laboratory.rank_outcomes import leave_out_echelon
from tests.laboratory.ranked_tests import is_in_order, run_tests

pytest_plugins = ["pytester"]


def test_failures_of_other_ranks_at_other_places_are_shown_too(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(5)
def test_it(world):
    if world.rank == 1:
        assert world.size == 1
    if world.rank == 2:
        raise KeyError("of rank 2")
"""
    is_in_order(
        run_tests(pytester, source),
        "rank ? of 5:",
        "*- rank ? of 5 failed, too -*",
        "*- all ranks -*",
        "ranks 0, 3, 4: finished",
        "rank 1: test_it.py:8: AssertionError: assert 5 == 1",
        "rank 2: test_it.py:10: KeyError: 'of rank 2'",
    )


@pytest.mark.slow
def test_a_skip_of_all_ranks_is_a_skip_and_of_some_says_whose(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_all(world):
    pytest.skip("no GPU")

@pytest.mark.ranks(3)
def test_some(world):
    if world.rank:
        pytest.skip("no peer")
    world.group.barrier()

@pytest.mark.ranks(2)
def test_unittest(world):
    raise unittest.SkipTest("old way")
"""
    result = run_tests(pytester, source, "-rs")
    result.assert_outcomes(skipped=3)
    is_in_order(result, "SKIPPED*: no GPU")
    result.stdout.re_match_lines([r"SKIPPED.*: ranks? (1|2|1, 2) of 3: no peer"])


def test_a_failure_beats_a_skip_of_another_rank(pytester: pytest.Pytester) -> None:
    source = """
import threading
skipped = threading.Event()

@pytest.mark.ranks(3)
def test_it(world):
    if world.rank == 0:
        skipped.set()
        pytest.skip("first")
    skipped.wait()
    time.sleep(0.1)
    assert world.rank == 1
"""
    result = run_tests(pytester, source, "--echelon-timeout=5")
    result.assert_outcomes(failed=1)
    is_in_order(result, "rank 2 of 3:", "E*assert 2 == 1")


def test_expected_failures_are_those_of_any_rank(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_mark(world):
    if world.rank == 1:
        1 / 0
    world.group.barrier()

@pytest.mark.ranks(2)
def test_call(world):
    if world.rank == 1:
        pytest.xfail("known")
    world.group.barrier()

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_passes(world):
    pass
"""
    result = run_tests(pytester, source, "-rx")
    result.assert_outcomes(xfailed=2, failed=1)
    is_in_order(result, "XFAIL*rank 1 of 2: known")


@pytest.mark.parametrize("code", ["", "0", "3", "'a sentence'"])
def test_a_rank_that_exits_fails_the_test_whatever_the_code(
    pytester: pytest.Pytester, code: str
) -> None:
    source = f"""
@pytest.mark.ranks(2)
def test_it(world):
    if world.rank == 1:
        sys.exit({code})
    world.group.barrier()

def test_after():
    pass
"""
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1, passed=1)
    is_in_order(result, "rank 1 of 2:", ">*sys.exit(*)", "E*SystemExit*")


@pytest.mark.slow
def test_a_keyboard_interrupt_and_pytest_exit_end_the_session(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world):
    if world.rank == 1:
        raise KeyboardInterrupt
    world.group.barrier()

def test_after():
    pass
"""
    result = run_tests(pytester, source, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result = run_tests(pytester, source.replace("raise KeyboardInterrupt", "pytest.exit('enough')"))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    is_in_order(result, "*Exit: enough*")


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_named_with_its_line_and_told_to_end(
    pytester: pytest.Pytester,
) -> None:
    source = """
import threading

@pytest.mark.ranks(3, timeout=0.3)
def test_it(world):
    while world.rank == 1:
        time.sleep(0.01)

def test_after():
    time.sleep(0.2)
    assert not [t for t in threading.enumerate() if t.name == "rank 1"]
"""
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1, passed=1)
    is_in_order(
        result,
        "E*CommTimeout: the end of the job waited 0.3 s for rank 1 in vain",
        "*test_it.py:* in test_it",
        "ranks 0, 2: finished",
        "rank 1: test_it.py:*: did not end",
    )


def test_a_table_of_many_ranks_stays_short(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(40)\ndef test_it(world):\n    assert world.rank < 0\n"
    result = run_tests(pytester, source)
    is_in_order(result, "rank 0: test_it.py:*", "and * more")
    assert len(result.outlines) < 60


def test_notes_of_an_error_stay_and_its_cause_is_shown(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world):
    try:
        {}["key"]
    except KeyError as error:
        problem = ValueError("no key")
        problem.add_note("a note of the user")
        raise problem from error
"""
    is_in_order(
        run_tests(pytester, source),
        "E*KeyError: 'key'",
        "The above exception was the direct cause*",
        "E*ValueError: no key",
        "E*a note of the user",
    )


@pytest.mark.parametrize(("kind", "is_kept"), [(StateError, False), (KeyError, True)])
def test_functions_of_torch_that_pass_on_an_error_of_ours_are_left_out(
    kind: type[Exception], is_kept: bool
) -> None:
    def fail(leaf: object) -> None:
        raise kind("no")

    with pytest.raises(kind) as raised:
        tree_map(fail, [1])
    leave_out_echelon(raised.value, Path(__file__))
    files = {frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)}
    assert __file__ in files
    assert any(tree_map.__code__.co_filename == file for file in files) == is_kept
