"""Tests that are marked with ranks run once on each of them, and otherwise as pytest's tests do."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.laboratory.ranked_tests import PLUGIN, is_in_order, run_tests

PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"
pytest_plugins = ["pytester"]


def test_the_body_of_a_marked_test_runs_once_on_each_rank(pytester: pytest.Pytester) -> None:
    result = run_tests(
        pytester,
        """
seen = []

@pytest.mark.ranks(4)
def test_it(world):
    total = torch.tensor([world.rank])
    world.group.all_reduce(total)
    seen.append((world.rank, world.size, total.item()))

def test_after():
    assert sorted(seen) == [(rank, 4, 6) for rank in range(4)]
""",
    )
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_several_numbers_of_ranks_are_tests_of_their_own_that_k_selects(
    pytester: pytest.Pytester,
) -> None:
    source = """
@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("scale", [1, 10])
def test_it(world, scale):
    assert world.size * scale != 20
"""
    result = run_tests(pytester, source, "-v")
    result.assert_outcomes(passed=5, failed=1)
    is_in_order(result, "*test_it[[]1-3ranks[]]*PASSED*", "*test_it[[]10-2ranks[]]*FAILED*")
    selected = run_tests(pytester, source, "-k", "1rank or 3ranks")
    selected.assert_outcomes(passed=4, deselected=2)


def test_the_marks_are_described_and_strict_markers_accept_them(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, "", "--markers")
    is_in_order(result, "@pytest.mark.ranks(ranks, *", "@pytest.mark.faults(*")
    source = "@pytest.mark.ranks(1)\ndef test_it(): pass\n"
    run_tests(pytester, source, "--strict-markers").assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_mark_that_cannot_be_followed_is_a_sentence_while_tests_are_collected(
    pytester: pytest.Pytester,
) -> None:
    result = run_tests(pytester, "@pytest.mark.ranks(0)\ndef test_it(): pass\n")
    result.assert_outcomes(errors=1)
    is_in_order(result, "test_it.py::test_it: ranks of @pytest.mark.ranks is 0: give a number*")
    result = run_tests(pytester, "@pytest.mark.faults()\ndef test_it(): pass\n")
    is_in_order(result, "*@pytest.mark.faults needs @pytest.mark.ranks beside it")


def test_the_fixture_world_needs_the_mark(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, "def test_it(world): pass\n")
    result.assert_outcomes(errors=1)
    is_in_order(result, "*uses the fixture 'world' and runs on no ranks: mark it with *")


def test_a_test_without_the_fixture_gets_its_world_from_init(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(3)\ndef test_it():\n    assert ec.init().size == 3\n"
    run_tests(pytester, source).assert_outcomes(passed=1)


def test_the_option_replaces_the_world_of_all_marks(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2, world=["threads", "processes"])
def test_it(world):
    assert world.backend == "threads"
"""
    run_tests(pytester, source, "--echelon-world=threads").assert_outcomes(passed=1)


def test_the_option_gives_the_timeout_of_marks_without_one(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world):
    assert world.group.timeout == 7.5

@pytest.mark.ranks(2, timeout=3)
def test_marked(world):
    assert world.group.timeout == 3
"""
    run_tests(pytester, source, "--echelon-timeout=7.5").assert_outcomes(passed=2)


def test_fixtures_of_any_scope_are_set_up_once_in_the_main_thread(
    pytester: pytest.Pytester,
) -> None:
    source = """
import threading
log = []

def make(scope):
    @pytest.fixture(scope=scope)
    def fixture():
        log.append((scope, threading.current_thread() is threading.main_thread()))
        yield scope
        log.append(f"end of {scope}")
    return fixture

of_session, of_module, of_class, of_function = map(make, ["session", "module", "class", "function"])

@pytest.mark.ranks(4)
class TestIt:
    def test_it(self, world, of_session, of_module, of_class, of_function):
        assert (of_session, of_class) == ("session", "class")

def test_after():
    scopes = ["session", "module", "class", "function"]
    assert log == [*((s, True) for s in scopes), "end of function", "end of class"]
"""
    run_tests(pytester, source).assert_outcomes(passed=2)


def test_methods_of_classes_get_an_instance_on_each_rank(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(3)
class TestIt:
    @classmethod
    def setup_class(cls):
        cls.of_class = torch.zeros(1)

    def setup_method(self):
        self.of_method = torch.ones(1)

    def test_it(self, world):
        self.of_class += world.rank
        self.of_method += world.rank
        world.group.barrier()
        assert (self.of_class, self.of_method) == (world.rank, 1 + world.rank)
"""
    run_tests(pytester, source).assert_outcomes(passed=1)


def test_methods_of_a_unittest_case_find_their_world_in_self(pytester: pytest.Pytester) -> None:
    source = """
class TestIt(unittest.TestCase):
    def setUp(self):
        self.value = torch.zeros(1)

    @pytest.mark.ranks([2, 3])
    def test_passes(self):
        self.value += self.world.rank
        self.world.group.all_reduce(self.value)
        self.assertEqual(self.value, sum(range(self.world.size)))

    @pytest.mark.ranks(2)
    def test_fails(self):
        with self.subTest("on one rank"):
            self.assertEqual(self.world.rank, 0)
        self.world.group.barrier()

    @pytest.mark.ranks(2)
    def test_skips(self):
        self.skipTest("no time")

    @unittest.skip("never")
    @pytest.mark.ranks(2)
    def test_is_skipped(self):
        raise AssertionError

    @unittest.expectedFailure
    @pytest.mark.ranks(2)
    def test_fails_as_expected(self):
        self.assertEqual(self.world.rank, 0)
"""
    result = run_tests(pytester, source, "-rA")
    result.assert_outcomes(passed=1, failed=1, skipped=2, xfailed=1)
    is_in_order(
        result, "rank 1 of 2:", "*AssertionError: 1 != 0", "rank 0: test_it.py:*RankFailed*"
    )


def test_a_failure_is_shown_with_the_explanation_of_pytest_under_the_rank(
    pytester: pytest.Pytester,
) -> None:
    source = """
@pytest.mark.ranks(4)
def test_it(world):
    if world.rank == 2:
        assert {"a": 1, "b": 2} == {"a": 1, "b": 3}
    world.group.barrier()
"""
    result = run_tests(pytester, source)
    result.assert_outcomes(failed=1)
    is_in_order(
        result,
        "rank 2 of 4:",
        ">*assert {*} == {*}",
        "E*Differing items:",
        "E*{'b': 2} != {'b': 3}",
        "*- all ranks -*",
        "ranks 0, 1, 3: test_it.py:9: RankFailed: rank 2 raised AssertionError*",
        "rank 2: test_it.py:8: AssertionError*",
        "FAILED test_it.py::test_it - rank 2: AssertionError*",
    )
    assert "thread_world.py" not in result.stdout.str()


def test_tests_that_cannot_hang_fail_with_who_waits_for_whom(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(world):
    if world.rank == 0:
        world.group.barrier()
    else:
        world.group.recv(torch.zeros(1), 0)
"""
    start_s = time.monotonic()
    result = run_tests(pytester, source)
    assert time.monotonic() - start_s < 30.0  # its timeout is 60
    is_in_order(
        result,
        ">*world.group.barrier()",
        "E*DeadlockError: deadlock: no rank can go on",
        "E*rank 0 waits in barrier*test_it.py:8*for rank 1",
        "E*rank 1 waits in recv*test_it.py:10*for rank 0",
    )


@pytest.mark.slow
def test_the_full_trace_has_what_happened_inside(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it(world):\n    world.rank or world.group.barrier()\n"
    assert "thread_world.py" in run_tests(pytester, source, "--full-trace").stdout.str()


@pytest.mark.parametrize("style", ["short", "line", "native", "no", "long"])
def test_each_style_of_tracebacks_names_the_rank(pytester: pytest.Pytester, style: str) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it(world):\n    assert world.rank == 0\n"
    result = run_tests(pytester, source, f"--tb={style}")
    result.assert_outcomes(failed=1)
    is_in_order(result, "FAILED test_it.py::test_it - rank 1: *")


def test_faults_are_a_parametrisation(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
@pytest.mark.faults("raises", "returns early", "has another dtype", rank=1, at=1)
def test_names_them(world):
    world.group.barrier()
    world.group.all_reduce(torch.ones(2))

@pytest.mark.ranks(2)
@pytest.mark.faults("raises", at=7)
def test_makes_fewer_calls(world):
    world.group.barrier()
"""
    result = run_tests(pytester, source, "-v")
    result.assert_outcomes(passed=3, failed=1)
    is_in_order(
        result,
        "*test_names_them[[]returns_early[]] PASSED*",
        "*rank 0 raises at its call 7, and the test did not raise InjectedFault: *",
    )


def test_the_plugin_imports_neither_torch_nor_numpy() -> None:
    code = f"import {PLUGIN}, sys; print(sorted({{'torch', 'numpy', 'rich'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_session_without_ranks_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_it(): assert 'torch' not in sys.modules\n")
    pytester.runpytest_subprocess("-p", PLUGIN).assert_outcomes(passed=1)


def test_the_plugin_may_be_named_twice(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(f"pytest_plugins = [{PLUGIN!r}]")
    source = "@pytest.mark.ranks(2)\ndef test_it(world): pass\n"
    run_tests(pytester, source, "-p", PLUGIN).assert_outcomes(passed=1)


@pytest.mark.slow
def test_an_entry_point_besides_loads_the_plugin_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = pytester.mkdir("beside_1-1.dist-info")
    (info / "METADATA").write_text("Name: beside-1\nVersion: 1\n")
    entry = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["pytest11"]
    lines = "".join(f"{name} = {module}\n" for name, module in entry.items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    pytester.makeconftest(f"pytest_plugins = [{PLUGIN!r}]")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_it(world): assert world.size == 2\n"
    )
    for arguments in ((), ("-p", PLUGIN)):
        pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=1)
