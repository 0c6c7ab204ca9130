"""What ranks print and log is apart by rank, in reports and in the fixtures of pytest."""

import pytest

from tests.laboratory.ranked_tests import is_in_order, run_tests

pytest_plugins = ["pytester"]


def test_output_and_records_have_a_section_for_each_rank(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world):
    print("to stdout", world.rank)
    print("to stderr", world.rank, file=sys.stderr)
    sys.stdout.buffer.write(b"bytes\\n")
    logging.getLogger("their").warning("record %d", world.rank)
    world.group.barrier()
    assert False
"""
    result = run_tests(pytester, source)
    for rank in range(2):
        is_in_order(
            result,
            f"*Captured stdout rank {rank} call*",
            f"to stdout {rank}",
            "bytes",
            f"*Captured stderr rank {rank} call*",
            f"to stderr {rank}",
            f"*Captured log rank {rank} call*",
            f"WARNING  their:test_it.py:10 record {rank}",
        )
    result.stdout.no_fnmatch_line("*Captured stdout call*")
    result.stdout.no_fnmatch_line("*Captured log call*")


def test_without_capture_each_line_shows_its_rank(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world):
    print("line of", world.rank)
    print("no end", end="")
"""
    result = run_tests(pytester, source, "-s")
    for rank in range(2):
        is_in_order(result, f"*[[]rank {rank}[]] line of {rank}")
        result.stdout.fnmatch_lines([f"*[[]rank {rank}[]] no end"])


@pytest.mark.parametrize("name", ["capsys", "capfd", "capsysbinary", "capfdbinary"])
def test_fixtures_of_output_have_that_of_their_rank(pytester: pytest.Pytester, name: str) -> None:
    source = f"""
@pytest.mark.ranks(3)
def test_it(world, {name}):
    for turn in range(2):
        print("rank", world.rank)
        print("turn", turn, file=sys.stderr)
        world.group.barrier()
        out, err = {name}.readouterr()
        if isinstance(out, bytes):
            out, err = out.decode(), err.decode()
        assert (out, err) == (f"rank {{world.rank}}\\n", f"turn {{turn}}\\n")
    with {name}.disabled():
        print("shown by", world.rank)
    world.group.barrier()
    print("later")
    assert {name}.readouterr().out.strip() in ("later", b"later")
"""
    result = run_tests(pytester, source)
    result.assert_outcomes(passed=1)


def test_caplog_has_the_records_of_its_rank_and_levels_are_put_back(
    pytester: pytest.Pytester,
) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world, caplog):
    caplog.set_level(logging.DEBUG)
    world.group.barrier()
    logging.debug("rank %d", world.rank)
    assert caplog.messages == [f"rank {world.rank}"]
    assert caplog.get_records("call") == caplog.records
    assert f"rank {world.rank}" in caplog.text
    caplog.clear()
    assert caplog.records == []
    world.group.barrier()

def test_after(caplog):
    assert logging.getLogger().level == logging.WARNING
    logging.warning("of the main thread")
    assert caplog.messages == ["of the main thread"]
"""
    run_tests(pytester, source).assert_outcomes(passed=2)


def test_other_threads_print_where_pytest_looks(pytester: pytest.Pytester) -> None:
    source = """
import threading

@pytest.mark.ranks(2)
def test_it(world):
    thread = threading.Thread(target=lambda: print("of a thread"))
    thread.start()
    thread.join()
    assert False
"""
    is_in_order(run_tests(pytester, source), "*Captured stdout call*", "of a thread")


def test_the_streams_are_put_back_after_a_failure(pytester: pytest.Pytester) -> None:
    source = """
before = []

@pytest.fixture(autouse=True)
def streams():
    before.append((sys.stdout, sys.stderr))

@pytest.mark.ranks(2)
def test_it(world):
    assert False

def test_after():
    assert "echelon" not in type(sys.stdout).__module__
    assert before[0] == (sys.stdout, sys.stderr)
"""
    run_tests(pytester, source).assert_outcomes(passed=1, failed=1)


def test_logging_that_is_switched_off_stays_so(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it(world): logging.warning('x')\n"
    run_tests(pytester, source, "-p", "no:logging").assert_outcomes(passed=1)
