"""Ranks that are processes import the test, explain its failures, and leave what they print."""

import logging
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.laboratory.process_rank import StartOfRank
from echelon.launch import function_pickle
from tests.laboratory.ranked_tests import is_in_order, run_tests

pytest_plugins = ["pytester"]

MARK = "pytestmark = pytest.mark.ranks(2, world='processes', timeout=5)\n"


@pytest.mark.slow
def test_bodies_run_in_processes_with_the_values_of_fixtures(pytester: pytest.Pytester) -> None:
    source = """
import os, random
pid = os.getpid()

@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)

@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

@pytest.mark.parametrize("double", [lambda x: 2 * x], ids=["double"])
def test_it(world, model, optimizer, double, tmp_path):
    assert world.backend == "shm" and world.size == 2
    assert os.getppid() != 1 and tmp_path.is_dir()
    assert optimizer.param_groups[0]["params"][0] is model.weight
    total = torch.tensor([double(world.rank)])
    world.group.all_reduce(total)
    assert total == 2

@pytest.fixture
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_FIXTURE", "yes")
    monkeypatch.chdir(tmp_path)
    random.seed(3)
    return random.Random(3).random(), str(tmp_path)

def test_state(world, state, monkeypatch):
    assert os.environ["OF_FIXTURE"] == "yes"
    assert (random.random(), os.getcwd()) == state
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert os.getpid() == 7
"""
    run_tests(pytester, MARK + source).assert_outcomes(passed=2)


@pytest.mark.slow
def test_methods_run_in_processes_with_what_was_set_up(pytester: pytest.Pytester) -> None:
    source = """
class TestMethods:
    @classmethod
    def setup_class(cls):
        cls.of_class = torch.zeros(1)

    def setup_method(self):
        self.of_method = torch.ones(1)

    def test_it(self, world, capsys, caplog):
        self.of_class += world.rank
        self.of_method += world.rank
        assert (self.of_class, self.of_method) == (world.rank, 1 + world.rank)
        print("rank", world.rank)
        assert capsys.readouterr().out == f"rank {world.rank}\\n"
        logging.warning("rank %d", world.rank)
        assert caplog.messages == [f"rank {world.rank}"]

class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.numbers = [1, 2]

    def setUp(self):
        self.value = torch.zeros(1)

    def test_it(self):
        self.value += self.world.rank
        self.assertEqual((self.value.item(), self.numbers), (self.world.rank, [1, 2]))

def test_imports_by_init():
    assert ec.init().size == 2
"""
    run_tests(pytester, MARK + source).assert_outcomes(passed=3)


@pytest.mark.slow
def test_failures_are_explained_and_output_is_by_rank(pytester: pytest.Pytester) -> None:
    source = """
def check(value):
    assert value == {"a": 1}

def test_fails(world):
    print("printed by", world.rank)
    logging.getLogger("their").warning("record %d", world.rank)
    if world.rank == 1:
        check({"a": 2})
    world.group.barrier()
"""
    result = run_tests(pytester, MARK + source)
    result.assert_outcomes(failed=1)
    is_in_order(
        result,
        "rank 1 of 2:",
        ">*check({*",
        "test_it.py:13:*",
        "E*Differing items:",
        "E*{'a': 2} != {'a': 1}",
        "*- all ranks -*",
        "rank 0: test_it.py:14: RankFailed: rank 1 raised AssertionError*",
        "rank 1: test_it.py:7: AssertionError*",
        "*Captured stdout rank 1 call*",
        "printed by 1",
        "*Captured log rank 1 call*",
        "WARNING  their:test_it.py:11 record 1",
    )
    assert "function_pickle" not in result.stdout.str()


@pytest.mark.slow
def test_endings_of_pytest_and_deaths_come_from_processes_too(pytester: pytest.Pytester) -> None:
    source = """
import os

def test_skips(world):
    if world.rank == 1:
        pytest.skip("no peer")
    world.group.barrier()

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_fails_as_expected(world):
    1 / 0

def test_xfails(world):
    pytest.xfail("known")

def test_exits(world):
    if world.rank == 1:
        sys.exit(0)

def test_stops(world):
    breakpoint()

def test_dies(world):
    print("its last words")
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    world.group.barrier()

@pytest.mark.faults("is killed", "raises", rank=1, at=1)
def test_faults(world):
    for _ in range(3):
        world.group.barrier()
"""
    result = run_tests(pytester, MARK + source, "-rsx")
    result.assert_outcomes(skipped=1, xfailed=2, failed=3, passed=2)
    is_in_order(
        result,
        "*test_exits*",
        "rank 1 of 2:",
        "E*SystemExit: 0",
        "*test_stops*",
        "E*UnsupportedError: breakpoint() is in a test on ranks that are processes*",
        "*test_dies*",
        "rank 1 of 2:",
        "E*RankFailed: rank 1 was killed by SIGKILL*",
        "rank 1: did not end",
        "*Captured stdout rank 1 call*",
        "its last words",
        "SKIPPED*rank 1 of 2: no peer",
    )


def test_a_module_that_no_name_leads_to_is_imported_by_its_file(pytester: pytest.Pytester) -> None:
    source = MARK + "class Mine: pass\n\ndef test_it(world):\n    assert type(Mine()) is Mine\n"
    run_tests(pytester, source, "--import-mode=importlib").assert_outcomes(passed=1)


@pytest.mark.slow
def test_fixtures_of_pytest_are_those_of_the_pytest_of_the_rank(pytester: pytest.Pytester) -> None:
    source = """
import os

@pytest.fixture
def output(capfd):
    return capfd

def test_descriptors(world, output, caplog):
    os.write(2, b"rank %d" % world.rank)
    assert output.readouterr().err == f"rank {world.rank}"
    caplog.set_level("DEBUG")
    logging.debug("of rank %d", world.rank)
    assert caplog.messages == [f"of rank {world.rank}"]

def test_bytes(world, capsysbinary):
    print(world.rank, end="")
    assert capsysbinary.readouterr().out == b"%d" % world.rank
    print("and more")
    world.group.barrier()
    assert world.rank == 1
"""
    result = run_tests(pytester, MARK + source)
    result.assert_outcomes(passed=1, failed=1)
    is_in_order(result, "rank 0 of 2:", "E*assert 0 == 1", "*Captured stdout rank 0*", "and more")


@pytest.mark.slow
def test_failures_outside_of_the_test_and_in_unittest_are_shown(pytester: pytest.Pytester) -> None:
    source = """
class TestIt(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(self.world.rank, 0)

def test_exits(world):
    pytest.exit("enough")
"""
    result = run_tests(pytester, MARK + source)
    result.assert_outcomes(failed=1)
    is_in_order(result, "rank 1 of 2:", ">*self.assertEqual(*", "E*1 != 0", "*Exit: enough*")
    assert "unittest" not in result.stdout.str().split("all ranks")[0].split("rank 1 of 2:")[1]
    source = """
import multiprocessing

if multiprocessing.parent_process() is not None:
    raise RuntimeError("not here")

def test_it(world):
    pass
"""
    result = run_tests(pytester, MARK + source)
    result.assert_outcomes(failed=1)
    is_in_order(
        result,
        "rank ? of 2:",
        "test_it.py:9: in <module>",
        "E*RuntimeError: not here",
        "ranks 0, 1: test_it.py:9: RuntimeError: not here",
    )
    assert "importlib" not in result.stdout.str()


def test_a_rank_begins_with_the_state_that_fixtures_have_given_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = StartOfRank.here()
    try:
        with warnings.catch_warnings():
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("ECHELON_TEST_OF_STATE", "set")
            warnings.filterwarnings("error", "no such thing", FutureWarning)
            logging.getLogger().setLevel(logging.INFO)
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            start = function_pickle.loads(function_pickle.dumps(StartOfRank.here()))
            drawn = (torch.rand(1), random.random(), np.random.rand())
        monkeypatch.undo()
        before.restore()
        with warnings.catch_warnings():
            start.restore()
            assert Path.cwd() == tmp_path
            assert os.environ["ECHELON_TEST_OF_STATE"] == "set"
            assert logging.getLogger().level == logging.INFO
            assert (torch.rand(1), random.random(), np.random.rand()) == drawn
            assert torch.get_default_dtype() == torch.float64
            assert torch.are_deterministic_algorithms_enabled()
            with pytest.raises(FutureWarning):
                warnings.warn("no such thing", FutureWarning, stacklevel=1)
    finally:
        before.restore()
