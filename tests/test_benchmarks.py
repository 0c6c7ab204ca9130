"""The benchmarks run, measure in alternation, and leave a complete JSON file and nothing else."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import becomes_true, has_ended, run_python

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the folder import each other by their bare names; forget them afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).parent == FOLDER:
            del sys.modules[name]


def written(main: Callable[..., None], tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The JSON that a benchmark leaves, started in this process."""
    output = tmp_path / "result.json"
    main(**options, output=output)
    records: dict[str, Any] = json.loads(output.read_text())
    return records


class Recorder:
    """A group of one rank that notes when it is asked to line up."""

    rank = 0

    def __init__(self) -> None:
        self.log: list[str] = []

    def barrier(self) -> None:
        self.log.append("|")

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item]

    def logs(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(name)


def test_variants_take_turns_and_each_round_begins_with_another() -> None:
    from pairs import Variant, alternate

    meeting = Recorder()
    variants = [Variant(name, meeting.logs(name)) for name in "ABC"]
    samples = alternate(meeting, variants, num_rounds=3)
    assert "".join(meeting.log) == "|A|B|C" + "|B|C|A" + "|C|A|B" + "|"
    assert [len(samples.seconds[name]) for name in "ABC"] == [3, 3, 3]


def test_a_rank_that_is_left_out_lines_up_and_waits() -> None:
    from pairs import Variant, alternate

    meeting = Recorder()
    variants = [
        Variant("A", meeting.logs("A"), frozenset({1})),
        Variant("B", meeting.logs("B")),
    ]
    samples = alternate(meeting, variants, num_rounds=2, num_calls=2)
    assert "".join(meeting.log) == "||BB" + "|BB|" + "|"
    assert samples.seconds["A"] == [0.0, 0.0]


def test_a_ratio_is_the_median_of_the_pairs_and_not_a_ratio_of_medians() -> None:
    from pairs import Samples

    samples = Samples({"ours": [1.0, 2.0, 30.0], "theirs": [4.0, 10.0, 60.0]})
    assert samples.ratios("theirs", "ours") == [4.0, 5.0, 2.0]
    assert samples.ratio("theirs", "ours") == 4.0
    assert samples.difference_s("theirs", "ours") == 8.0
    assert samples.median_s("theirs") / samples.median_s("ours") == 5.0


def test_rounds_in_which_the_host_took_processors_away_are_left_out_if_enough_remain() -> None:
    from pairs import Samples

    times = [1.0, 9.0, 2.0, 3.0, 4.0, 5.0]
    stolen = [0.0, 0.3, 0.01, 0.0, 0.0, 0.005]
    samples = Samples({"ours": times}, {"ours": times}, stolen)
    assert samples.quiet().seconds == {"ours": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert samples.quiet().num_rounds == 5
    assert Samples.of(samples.record()) == samples
    few = Samples({"ours": times}, {"ours": times}, [0.3, *stolen[1:]])
    assert few.quiet() is few


def test_each_round_notes_what_the_host_took() -> None:
    from pairs import Variant, alternate

    samples = alternate(Recorder(), [Variant("A", lambda: None)], num_rounds=2)
    assert len(samples.stolen) == 2
    assert all(0 <= share <= 1 for share in samples.stolen)


@pytest.mark.parametrize(
    ("kind", "bound", "reached"),
    [
        ("FASTER", 3.9, True),
        ("FASTER", 4.1, False),
        ("WITHIN", 0.26, True),
        ("WITHIN", 0.24, False),
        ("SECONDS", 2.1, True),
        ("SECONDS", 1.9, False),
    ],
)
def test_a_bar_is_reached_when_its_sentence_is_true(kind: str, bound: float, reached: bool) -> None:
    from bars import Bar, Kind, judge
    from pairs import Samples

    samples = Samples({"ours": [1.0, 2.0, 3.0], "theirs": [4.0, 8.0, 12.0]})
    bar = Bar(task="t", name="ours", kind=Kind[kind], bound=bound, peer="theirs")
    assert [outcome.reached for outcome in judge(bar, samples)] == [reached]


def test_a_bar_against_a_peer_that_was_not_measured_is_left_out() -> None:
    from bars import Bar, Kind, judge
    from pairs import Samples

    bar = Bar(task="t", name="ours", kind=Kind.FASTER, bound=1.0, peer="MPICH")
    assert judge(bar, Samples({"ours": [1.0]})) == []


def test_the_gpt_has_33_7_million_parameters() -> None:
    from models import GPT, GPTConfig

    model = GPT(GPTConfig())
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 33.7


@pytest.mark.slow
def test_collectives_measures_all_operations_against_gloo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import collectives

    options = {"size": [4096, 65536], "ranks": [2], "seconds": 0.01, "mpi": False}
    result = written(collectives.main, tmp_path, **options, quick=True)
    assert len(result["cases"]) == 5 * 2 + 1
    for case in result["cases"]:
        assert {"echelon", "gloo"} <= case["seconds"].keys()
        assert all(min(s) > 0 and len(s) >= 5 for s in case["seconds"].values())
    assert result["versions"]["torch"]
    assert result["machine"]["cores"] >= 1
    assert len(result["simulated"]["seconds"]) == 1
    assert [bar["task"] for bar in result["bars"]].count("all_reduce 4 KiB") == 2
    assert "gloo / window" in capsys.readouterr().out


@pytest.mark.slow
def test_ddp_measures_all_variants_and_compares_their_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import ddp

    options = {"task": ["many-small"], "layers": 4, "seconds": 0.01, "memory": False}
    result = written(ddp.main, tmp_path, **options)
    [task] = result["tasks"]
    assert len(task["seconds"]) == 5
    assert all(min(s) > 0 and len(s) >= 3 for s in task["seconds"].values())
    assert task["same_weights"]["largest_difference"] < 1e-4
    assert "≥ 1.5× faster than PyTorch DDP" in capsys.readouterr().out


@pytest.mark.slow
def test_fsdp_weighs_a_tiny_unit_and_counts_what_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsdp

    options = {"task": ["tiny"], "layers": 3, "seconds": 0.01, "quick": True}
    result = written(fsdp.main, tmp_path, **options)
    [task] = result["tasks"]
    assert task["num_units"] == 3
    unit = 3 * (8 * 8 + 8) * 4
    assert task["traffic"]["echelon FSDP"] == [3 + 2, 3 * unit + 19]  # a barrier, and flags
    assert task["traffic"]["FSDP2"] == [3 * 3, 3 * 3 * unit]  # two gathers and a reduction
    assert task["traffic"]["one process alone"] == [0, 0]
    assert [bar["unit"] for bar in result["bars"]] == ["ms", "×"]
    assert "CPU ms a unit" in capsys.readouterr().out


@pytest.mark.slow
def test_pipelines_are_compared_with_torchs_on_the_same_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pipeline

    options = {"task": ["tiny"], "seconds": 0.01, "sleep": False}
    result = written(pipeline.main, tmp_path, **options, quick=True)
    [task] = result["tasks"]
    assert task["same_weights"]["largest_difference"] < 1e-6
    assert task["saved_nbytes"]["echelon 1f1b"] == task["saved_nbytes"]["PyTorch 1F1B"]
    # One message a microbatch each way, and how many rows the ranks were given.
    assert [calls for calls, _ in task["traffic"]["echelon 1f1b"]] == [2 * 16 + 1] * 2
    assert [bar["variant"] for bar in result["bars"]] == ["echelon 1f1b"]
    assert "PyTorch 1F1B / it" in capsys.readouterr().out


@pytest.mark.slow
def test_sleeping_stages_sleep_as_long_as_the_simulation_says() -> None:
    import sleeping_stages

    record = sleeping_stages.measure(sleeping_stages.Case("zb-h1", 2, 2))
    assert record["simulated_s"] <= record["measured_s"] < 2 * record["simulated_s"]


def test_many_simulated_ranks_take_a_step_of_one_process(tmp_path: Path) -> None:
    import many_ranks

    result = written(many_ranks.main, tmp_path, ranks=3, layers=1, width=32)
    assert result["largest_difference"] < 1e-5
    assert result["bars"][0]["reached"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # processes that import torch take turns
def test_turns_are_measured_with_and_without_groups_of_torch(tmp_path: Path) -> None:
    import rank_turns

    cases = written(rank_turns.main, tmp_path, turns=16, rounds=2)["cases"]
    assert [(case["ranks"], case["with_groups"]) for case in cases] == [
        (2, False), (8, False), (2, True), (8, True),
    ]  # fmt: skip
    assert all(0 < seconds < 1 for case in cases for seconds in case["seconds"])


@pytest.mark.slow
def test_tests_of_many_ranks_are_measured_beside_those_that_spawn(tmp_path: Path) -> None:
    import pytest_ranks

    result = written(pytest_ranks.main, tmp_path, tests=3, ranks=2, sample=1, rounds=1)
    assert result["bars"][0]["reached"]
    assert result["spawn_per_test_s"][0] > result["echelon_s"][0] / 100


@pytest.mark.slow
def test_the_share_of_a_guard_is_measured_with_and_without_a_norm(tmp_path: Path) -> None:
    import guards

    result = written(guards.main, tmp_path, steps=2, batch=[1], layers=1)
    cases = result["cases"]
    assert [(case["wrapper"], case["with_norm"]) for case in cases] == [
        ("DDP", False), ("DDP", True), ("FSDP", False), ("FSDP", True),
    ]  # fmt: skip
    assert all(0 < share < 1 for case in cases for rank in case["shares"] for share in rank)
    assert len(result["bars"]) == 4


@pytest.mark.slow
def test_a_black_box_is_measured_with_one_checkpoint_in_each_round(tmp_path: Path) -> None:
    import blackbox

    result = written(blackbox.main, tmp_path, rounds=2, steps=2, batch=1, layers=1)
    assert [case["wrapper"] for case in result["cases"]] == ["DDP", "FSDP"]
    for case in result["cases"]:
        assert {len(times) for times in case["seconds"].values()} == {2}
        assert [len(kept) for kept in case["kept_s"]] == [2, 2]  # the second step of each round
        for clock in ("wall", "processor"):
            assert 0 < case[clock]["kept_s"] < case[clock]["step_s"]
    assert len(result["bars"]) == 12


@pytest.mark.slow
def test_verdicts_are_counted_in_each_world_and_their_cost_is_added_up(tmp_path: Path) -> None:
    import held_up

    # The slow ranks sleep for 0.35 s in each step; what each technique says is tested elsewhere.
    options = {"rounds": 1, "layers": 1, "batch": 1, "technique": ["DDP"]}
    result = written(held_up.main, tmp_path, runs=1, world=["threads", "gloo"], **options)
    costs, verdicts = result["cases"][:2], result["cases"][2:]
    assert [case["wrapper"] for case in costs] == ["DDP", "FSDP"]
    assert all(0 < case["share"] < 1 for case in costs)
    assert all(rank["changes"] > 10 for case in costs for rank in case["ranks"])
    assert [(case["world"], case["technique"]) for case in verdicts] == [
        ("threads", "DDP"), ("gloo", "DDP"),
    ]  # fmt: skip
    for case in verdicts:
        assert {name: len(runs) for name, runs in case["verdicts"].items()} == {
            "slow": 1, "usual": 1,
        }  # fmt: skip
        assert {tuple(cost[:2]) for cost in case["verdicts"]["slow"][0]} == held_up.EXPECTED
    assert len(result["bars"]) == 2 + 2 * 2


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    from ranks import run_to_end

    note = tmp_path / "pid"
    with pytest.raises(TimeoutError, match=r"sh ran longer than 0\.5 s"):
        run_to_end(["sh", "-c", f"sleep 60 & echo $! > {note}; wait"], limit_s=0.5)
    assert becomes_true(lambda: has_ended(int(note.read_text())), 5.0)


def test_a_command_ends_with_the_benchmark_that_started_it() -> None:
    program = "import ranks; ranks.run_to_end(['sh', '-c', 'echo $$; exec sleep 60'], 60)"
    benchmark = subprocess.Popen([sys.executable, "-c", program], stdout=-1, cwd=FOLDER, text=True)
    with benchmark:
        assert benchmark.stdout is not None
        command = int(benchmark.stdout.readline())
        benchmark.kill()
    assert becomes_true(lambda: has_ended(command), 5.0)


FREED_ELSEWHERE = """
import threading
import torch
from allocated import count_allocations, peak_of

held = [torch.zeros(250)]

def step():
    held.append(torch.zeros(250_000))
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    held.append(torch.zeros(250_000))

count_allocations()
print(peak_of(step), peak_of(held.clear), peak_of(lambda: torch.zeros(250)))
"""


@pytest.mark.slow
def test_memory_that_another_thread_frees_is_not_counted_any_more() -> None:
    done = run_python("-c", FREED_ELSEWHERE, cwd=FOLDER)
    assert done.stdout == "1000000 0 1000\n"


def test_every_case_of_memory_is_a_plan() -> None:
    from memory_cases import cases

    assert len({str(case) for case in cases() if case.plan.num_ranks <= 8}) == 69
