"""The benchmark of the planner: what noise of published times leaves of a choice, and rows that
others have written."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests import test_benchmarks

folder_on_path = test_benchmarks.folder_on_path
NEAR = [[(1.0, 9.0), (1.01, 5.0), (1.02, 7.0)]]
FAR = [[(1.0, 9.0), (2.0, 5.0), (3.0, 7.0)]]


def test_a_choice_costs_what_the_chosen_plan_took_more_than_the_best() -> None:
    from planner import choice_of

    assert choice_of(NEAR[0]) == (pytest.approx(0.8), pytest.approx(-0.5))


def test_noise_costs_an_exact_prediction_regret_where_plans_are_near() -> None:
    from planner import exact_choice

    regret, correlation = exact_choice(NEAR, 0.03)
    assert 0.005 < regret < 0.06
    assert 0.1 < correlation < 0.7
    assert exact_choice(FAR, 0.03) == (0.0, pytest.approx(1.0))


def test_an_exact_prediction_without_noise_costs_nothing() -> None:
    from planner import exact_choice

    assert exact_choice(NEAR, 0.0) == (0.0, pytest.approx(1.0))


@pytest.fixture(scope="module")
def row() -> dict[str, str]:
    """One row that is judged."""
    path = test_benchmarks.FOLDER / "data" / "published_runs.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == "internevo-0002")


Printed = Callable[..., list[str]]


@pytest.fixture
def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Printed:
    """Gives the lines that the benchmark prints about a file with these rows of cells."""

    def lines(*rows: Iterable[str], encoding: str = "utf-8", delimiter: str = ",") -> list[str]:
        from planner import main

        path = tmp_path / "rows.csv"
        with path.open("w", encoding=encoding, newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        monkeypatch.setattr("sys.argv", ["planner.py", str(path)])
        try:
            main()
        except SystemExit:
            return capsys.readouterr().err.splitlines()[-1:]
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"layers": "many"}, "layers is 'many'; give a number"),
        ({"heads": "0"}, "heads is 0.0; it must be a number > 0"),
        ({"hidden": "2.5"}, "hidden is 2.5; give a whole number"),
        ({"gpus": ""}, "gpus is not said"),
        ({"step_s": "-1"}, "step_s is -1.0; it must be"),
        ({"step_s": "inf"}, "step_s is inf; it must be"),
        ({"gpu": "TPUv5"}, "device is 'TPUv5', which is not known"),
        ({"mlp": "maxout"}, "mlp is 'maxout'; use one of"),
        ({"recompute": "some"}, "recompute is 'some'; use one of"),
        ({"attention": ""}, "attention is ''; give flash or unfused"),
        ({"dtype": "fp32"}, "dtype is 'fp32'; use one of"),
        ({"dtype": "fp8"}, "dtype is fp8, and devices have the rates of 16 bits alone"),
        ({"ep": "8"}, "ep is more than 1"),
        ({"gpus": "64"}, "gpus is 64, and tp * cp * pp * dp is 16"),
        ({"gbs": "1000"}, "gbs is 1000, which mbs * dp, 32, does not divide"),
        ({"shard": "3"}, "shard is 3, which does not divide dp, 16"),
        ({"shard": ""}, "zero is '1', and shard is not said"),
        (
            {"pp": "2", "dp": "8", "shard": "8", "schedule": "dualpipe-v"},
            "schedule is 'dualpipe-v'",
        ),
        ({"pp": "8", "dp": "2", "shard": "2", "vpp": "8"}, "pp * vpp is 64, more than layers, 32"),
        ({"beyond": "1"}, "the row has more cells than there are columns"),
    ],
)
def test_a_row_that_describes_no_run_is_not_judged_and_the_reason_is_printed(
    printed: Printed, row: dict[str, str], cells: dict[str, str], reason: str
) -> None:
    # A cell without a column comes last.
    lines = printed(row, row.values(), {**row, **cells}.values())
    assert lines[1].split()[:3] == ["internevo", "1", "rows"]
    assert lines[-2] == "not judged: 1 rows"
    assert lines[-1].startswith(f"     1, the first is internevo-0002: {reason}")


def test_a_file_of_another_form_is_a_sentence(printed: Printed, row: dict[str, str]) -> None:
    assert "has 0 columns 'id'" in printed(row, row.values(), delimiter=";")[0]
    assert "has 0 columns 'zero'" in printed([name for name in row if name != "zero"])[0]
    assert "has 2 columns 'tp'" in printed([*row, "tp"], [*row.values(), "2"])[0]
    assert "cannot be read" in printed(row, row.values(), encoding="utf-16")[0]
    assert "has 0 columns 'id'" in printed()[0]
    # As some programs write it, with the mark of a byte order.
    lines = printed(row, row.values(), encoding="utf-8-sig")
    assert lines[1].split()[:3] == ["internevo", "1", "rows"]


def test_noise_is_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    from planner import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["planner.py", "--noise", "1000"])
        with pytest.raises(SystemExit):
            main()
    assert (
        "--noise is 1000.0; it must be a number of at least 0, up to 1" in capsys.readouterr().err
    )


def test_runs_with_other_attention_are_another_group(row: dict[str, str]) -> None:
    from published_runs import _run

    assert _run(row).plan_group == _run({**row, "tp": "2", "dp": "8", "shard": "8"}).plan_group
    assert _run(row).plan_group != _run({**row, "attention": "unfused"}).plan_group
    assert _run(row).plan_group != _run({**row, "compile": "yes"}).plan_group
