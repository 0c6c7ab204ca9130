"""echelon plan: the table, one plan explained, JSON, exit codes and mistakes."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.planner.measured_cluster import as_cluster
from tests.planner.sizes import DEVICE, MODEL, cluster
from tests.planner.test_measured_cluster import RATES
from tests.processes import run_python

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
LLAMA = MODELS / "llama-3-8b.json"


def call(*arguments: object, columns: int = 200) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["plan", *map(str, arguments)], env={"COLUMNS": str(columns), "TERM": "dumb"}
    )
    return result.exit_code, result.output


def test_the_best_plans_are_a_table_with_what_bounds_them() -> None:
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--best", 3)
    assert "No ec.Plan" not in call(*arguments)[1]  # plans that echelon runs are the default
    code, output = call(*arguments, "--axes", "all")
    assert code == 0
    assert "8.03 B parameters on 8 H100-SXM" in output
    assert "attention 3" in output
    # Plans of the fastest axes have tp or cp; with --axes plan there is nothing to say of them.
    assert len(output.splitlines()) == 6
    assert output.splitlines()[-1].startswith("An ec.Plan does not say all of these")
    options = ("--global-batch", 16, "--best", 3, "--axes", "plan")
    code, output = call(LLAMA, "--cluster", "8 H100", *options)
    assert (code, len(output.splitlines())) == (0, 5)


def test_the_name_of_a_device_is_printed_as_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    device = {**asdict(DEVICE), "name": "A100 [SXM][/]"}
    path.write_text(json.dumps({**asdict(cluster(1, 8)), "device": device}))
    code, output = call(LLAMA, "--cluster", path, "--global-batch", 16, "--fix", "tp=8")
    assert (code, "8 A100 [SXM][/]: " in output) == (0, True)


@pytest.mark.slow
def test_plans_are_found_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from echelon.cli import app; "
        f"CliRunner().invoke(app, ['plan', {str(LLAMA)!r}, '--cluster', '8 H100', "
        "'--global-batch', '16']); sys.exit('torch' in sys.modules)"
    )
    assert run_python("-c", code).returncode == 0


def test_the_terms_of_a_plan_add_up() -> None:
    code, output = call(
        LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--explain", 1, "--fix", "pp=2"
    )
    assert code == 0
    assert "pp=2" in output.splitlines()[0]
    parts = [float(line.split()[-1].rstrip("%")) for line in output.splitlines() if "%" in line]
    assert sum(parts) == pytest.approx(100, abs=1)


def test_json_has_the_axes_the_terms_and_the_bytes() -> None:
    code, output = call(LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--json", "--best", 2)
    plans = json.loads(output)["plans"]
    assert code == 0
    assert len(plans) == 2
    for plan in plans:
        assert sum(plan["seconds"].values()) == pytest.approx(plan["step_s"])
        assert sum(plan["bytes"].values()) == pytest.approx(plan["peak_gib"] * 2**30)


def test_where_nothing_fits_the_nearest_plans_are_named_with_rank_moment_and_bytes() -> None:
    code, output = call(MODELS / "llama-3-405b.json", "--cluster", "8 H100", "--global-batch", 8)
    first, *nearest = output.splitlines()
    assert code == 1
    assert first.startswith("None of")
    *nearest, more = nearest
    assert more.startswith("No number of H100-SXM would do with this batch")
    assert len(nearest) == 3
    for line in nearest:
        assert re.search(r"rank \d would have [\d.]+ GiB (after|in) .* of \d+ \(.*\), of", line)


def test_json_has_the_nearest_where_nothing_fits() -> None:
    model, limit = MODELS / "llama-3-405b.json", ("--cluster", "8 H100", "--global-batch", 8)
    code, output = call(model, *limit, "--fix", "tp=8", "--json")
    record = json.loads(output)
    assert (code, record["plans"]) == (1, [])
    assert record["refused"][0]["needs"] > record["refused"][0]["limit"]


def test_a_page_beside_json_leaves_the_output_to_programs(tmp_path: Path) -> None:
    fixed = ["--cluster", "8 H100", "--global-batch", "16", "--fix", "tp=8"]
    command = ["plan", str(LLAMA), *fixed, "--json", "--html", str(tmp_path / "plans.html")]
    result = CliRunner().invoke(app, command)
    assert json.loads(result.stdout)["plans"][0]["tp"] == 8
    assert "plans.html" in result.stderr


def test_a_narrow_table_cuts_no_plan_off() -> None:
    fixed = ["--cluster", "8 H100", "--global-batch", "16", "--fix", "tp=8", "--price", "2"]
    for more in ([], ["--scale", "8"]):
        options = [*fixed[: 6 if more else 8], *more]
        result = CliRunner().invoke(app, ["plan", str(LLAMA), *options], env={"COLUMNS": "40"})
        assert (result.exit_code, "\u2026" in result.output) == (0, False)


@pytest.mark.slow
def test_plans_that_do_not_fit_are_shown_where_they_are_asked_for() -> None:
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--axes", "plan")
    _, output = call(*arguments, "--refused", 2)
    assert output.count(" would have ") == 2
    assert "dp=8 recompute: rank 0 would have" in call(*arguments, "--refused", 50)[1]
    _, printed = call(*arguments, "--refused", 2, "--json")
    [nearest, _] = json.loads(printed)["refused"]
    assert nearest["needs"] == sum(nearest["bytes"].values()) > nearest["limit"]
    assert (nearest["rank"], nearest["moment"].split()[0]) == (4, "after")
    axes = ("plan", "schedule", "sharded", "recompute", "offload")
    first = ["pp=2,dp=4 recompute", "1f1b", "nothing", "full", "none"]
    assert [nearest[axis] for axis in axes] == first


@pytest.mark.parametrize("form", [(), ("--json",), ("--explain", 1)])
def test_every_plan_is_looked_at_only_for_those_that_do_not_fit(
    form: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody asked for the plans that do not fit")

    monkeypatch.setattr("echelon.planner.ranked_plans.survey", refuse)
    assert call(LLAMA, "--cluster", "8 H100", "--global-batch", 16, *form)[0] == 0


def test_a_plan_is_explained_by_its_number() -> None:
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 16)
    first, second = json.loads(call(*arguments, "--json", "--best", 2)[1])["plans"]
    assert first["step_s"] < second["step_s"]
    for number, plan in ((1, first), (2, second)):
        _, output = call(*arguments, "--explain", number)
        assert output.startswith(f"plan {number}: {plan['plan']}")


def test_a_plan_is_explained_with_the_options_of_ec_plan() -> None:
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--explain", 1)
    _, output = call(*arguments, "--fix", "shard=8", "--fix", "tp=1")
    assert "ec.Plan(shard=8, strategy=ec.Strategy." in output
    _, other = call(*arguments, "--fix", "tp=2")
    assert "No ec.Plan: an ec.Plan has no tp" in other


def test_a_schedule_may_be_given() -> None:
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 64, "--json", "--fix", "pp=2")
    plans = json.loads(call(*arguments, "--fix", "schedule=zb-h1")[1])["plans"]
    assert {plan["schedule"] for plan in plans} == {"zb-h1"}


def test_only_what_an_ec_plan_says_is_looked_at_with_axes_plan() -> None:
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--json")
    plans = json.loads(call(*arguments, "--axes", "plan", "--best", 50)[1])["plans"]
    assert all(plan["call"].startswith("ec.Plan(") for plan in plans)
    assert {(plan["tp"], plan["cp"], plan["ep"]) for plan in plans} == {(1, 1, 1)}
    every = json.loads(call(*arguments, "--axes", "all", "--best", 200)[1])["plans"]
    assert {plan["call"] is None for plan in every} == {True, False}


@pytest.mark.slow
def test_the_goal_is_what_the_table_begins_with() -> None:
    arguments = (LLAMA, "--cluster", "2x8 H100", "--global-batch", 64, "--json", "--axes", "plan")
    fast = json.loads(call(*arguments)[1])["plans"]
    small = json.loads(call(*arguments, "--goal", "memory")[1])["plans"]
    cheap = json.loads(call(*arguments, "--goal", "cost", "--price", 2)[1])["plans"]
    assert [plan["step_s"] for plan in fast] == sorted(plan["step_s"] for plan in fast)
    assert [plan["peak_gib"] for plan in small] == sorted(plan["peak_gib"] for plan in small)
    costs = [plan["cost_of_million_tokens"] for plan in cheap]
    assert costs == sorted(costs)
    first = cheap[0]
    hourly = 2 * first["devices"]
    assert costs[0] == pytest.approx(hourly / 3600 / first["tokens_per_second"] * 1e6)
    assert {plan["devices"] for plan in fast} == {16}


def test_a_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "plans.html"
    arguments = (LLAMA, "--cluster", "8 H100", "--global-batch", 16)
    code, output = call(*arguments, "--fix", "pp=2", "--axes", "plan", "--html", page)
    assert code == 0
    assert str(page) in output
    content = page.read_text()
    assert "<h2>The schedule</h2>" in content
    assert "<h2>Time and memory</h2>" in content


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cluster", "8 H900"), "device is 'H900'"),
        (("--cluster", "8 H100", "--fix", "pp=x"), "--fix is 'pp=x'"),
        (("--cluster", "8 H100", "--fix", "zz=2"), "fixed has 'zz'"),
        (("--cluster", "8 H100", "--fix", "schedule=zz"), "schedule is 'zz'; use one of"),
        (("--cluster", "8 H100", "--stack", "horovod"), "stack is 'horovod'"),
        (("--cluster", "8 H100", "--explain", "0"), "--explain is 0"),
        (("--cluster", "3 H100", "--fix", "pp=7"), "no plan divides 3 devices"),
        (("--cluster", "8 H100 @ 0 Gb/s"), "network is 0.0; it must be a number of at least 1"),
        (("--cluster", "8 H100", "--goal", "speed"), "goal is 'speed'"),
        (("--cluster", "8 H100", "--goal", "cost"), "no price of a device for an hour"),
        (("--cluster", "8 H100", "--price", "0"), "price is 0.0"),
        (("--cluster", "8 H100", "--axes", "none"), "axes is 'none'"),
        (("--cluster", "8 H100", "--max-memory", "0"), "--max-memory is 0.0"),
        (("--cluster", "8 H100", "--max-memory", "1e300"), "--max-memory is 1e+300"),
        (("--cluster", "8 H100", "--fix", f"pp={'9' * 5000}"), "--fix is 'pp=999"),
        (("--cluster", "8 H100", "--html", "/nowhere/page.html"), "cannot be written"),
    ],
)
def test_mistakes_are_said(arguments: tuple[str, ...], sentence: str) -> None:
    code, output = call(LLAMA, "--global-batch", 16, *arguments)
    assert code == 2
    assert sentence in " ".join(output.replace("│", " ").split())


def test_the_machine_at_hand_can_be_measured_instead_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = as_cluster([RATES, RATES], memory=64e9)
    monkeypatch.setattr(
        "echelon.planner.measured_cluster.measure_cluster",
        lambda ranks: measured if ranks == 2 else None,
    )
    model = tmp_path / "small.json"
    model.write_text(json.dumps(asdict(MODEL)))
    code, output = call(model, "--measure", 2, "--global-batch", 8, "--json")
    assert code == 0, output
    best = json.loads(output)["plans"][0]
    assert best["dp"] * best["shard"] * best["pp"] * best["tp"] * best["cp"] == 2
    code, output = call(LLAMA, "--measure", 2, "--cluster", "8 H100", "--global-batch", 8)
    assert (code, "give --cluster, or --measure" in output) == (2, True)


def test_a_table_in_80_columns_breaks_no_word() -> None:
    arguments = (LLAMA, "--cluster", "8x8 H100", "--global-batch", 256, "--price", 2)
    output = call(*arguments, columns=80)[1]
    assert max(map(len, output.splitlines())) <= 80
    assert set(output.split()) - set(call(*arguments, columns=300)[1].split()) == set()


def test_where_nothing_fits_it_says_how_many_devices_would_do() -> None:
    for hosts, fits in ((1, False), (32, False), (64, True)):
        place = f"{hosts}x8 H100"
        arguments = (MODELS / "llama-3-405b.json", "--cluster", place, "--global-batch", 512)
        code, output = call(*arguments, "--best", 1)
        assert (code == 0) == fits
        assert ("A plan fits 512 H100-SXM: 64 hosts of such." in output) != fits
