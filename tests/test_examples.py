"""The examples, started as a user starts them."""

import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.launch.program import Program
from echelon.launch.simulated_job import run_threads
from echelon.observe import read_metrics
from tests.children import environ

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
CPU = torch.device("cpu")
SMALL = ["--steps", "12", "--eval-every", "6", "--batch-size", "8", "--context", "32"]
SMALL += ["--layers", "2", "--width", "32", "--heads", "2"]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Imports a module of the examples' folder, as a script there does."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def text(example: Any) -> ModuleType:
    module: ModuleType = example("text")
    return module


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """A text file that is long enough, and easy to learn."""
    path = tmp_path / "prose.txt"
    path.write_text("".join(f"line {i} of a text that repeats itself\n" for i in range(2000)))
    return path


@pytest.mark.parametrize(
    ("options", "code", "begins"), [([], 0, "loss of rank 0"), (["--rows", "65"], 1, "deadlock")]
)
def test_the_program_of_torch_distributed_prints_what_the_readme_shows(
    options: list[str],
    code: int,
    begins: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = EXAMPLES.parent
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run_threads(Program("examples/torch_ddp.py"), options, 8) == code
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if line]
    start = next(i for i, line in enumerate(lines) if line.startswith(begins))
    shown = (root / "README.md").read_text()
    assert "\n".join(lines[start : start + (3 if code else 1)]) + "\n" in shown


@pytest.mark.slow
def test_the_demo_learns_verifies_itself_and_leaves_its_report(tmp_path: Path, prose: Path) -> None:
    command = [sys.executable, "-m", "echelon", "run", "--ranks", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, *SMALL, "--data", str(prose), "--verify", "--trace"],
        cwd=tmp_path,
        env=environ(TMPDIR=str(tmp_path)),  # where logs would be left
        capture_output=True,
        text=True,
        timeout=110,
    )
    output = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.glob("echelon-run-*")) == []
    for line in output.splitlines():
        assert re.match(r"(text|verified|sample|step|def |[^\x1b]*$)", line)
    assert re.search(r"^step 1/12  loss \d\.\d{3} bits per byte  [\d,]+ tokens/s", output, re.M)
    match = re.search(r"differ by at most (\S+)$", output, re.M)
    assert match is not None
    assert float(match[1]) <= 1e-12

    run = tmp_path / "runs" / "gpt"
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "report.html", "trace.json"}
    lines = read_metrics(run)
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [6, 12]
    ranks = next(line["ranks"] for line in lines if line["kind"] == "ranks")
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[1]["memory"]["optimizer state"]["peak"] > 0
    pids = {row["pid"] for row in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert pids == {0, 1}


@pytest.mark.slow
def test_any_number_of_ranks_trains_the_same_model(
    tmp_path: Path, prose: Path, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.observe.run_output.write_report", lambda folder, **options: None)
    script, curves = example("train_gpt"), []
    pipeline = ["--technique", "pipeline", "--schedule", "zb-h1"]
    plan = ["--plan", "pp=2,shard=2", "--microbatches", "2"]
    for ranks, technique in ((1, []), (4, plan), (2, pipeline)):
        options = [*SMALL, "--data", str(prose), "--name", str(ranks), "--dtype", "float64"]
        options += ["--steps", "6", "--eval-every", "3", *technique]
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
        ec.run(script.main, ranks, args=(script.parse_args(),))
        lines = read_metrics(tmp_path / "runs" / str(ranks))
        curves.append([line["loss"] for line in lines if line["kind"] in ("step", "evaluation")])
    # Sums run in another order, and Adam divides by gradients that may be tiny.
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)
    assert curves[0] == pytest.approx(curves[2], rel=1e-9)
    # A pipeline leaves the last step as it was planned and as it was measured.
    (drawn,) = (line for line in lines if line["kind"] == "timelines")
    ran = {name: sorted(row[:2] for row in rows) for name, rows in drawn["timelines"].items()}
    assert ran["planned"] == ran["measured"]
    assert len(ran["planned"]) == 2 * 3 * 4  # stages; F, I, W; microbatches


@pytest.mark.slow
def test_a_training_goes_on_with_another_technique_from_its_checkpoint(
    tmp_path: Path, prose: Path, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.observe.run_output.write_report", lambda folder, **options: None)
    script, resuming = example("train_gpt"), example("resuming")

    def train(ranks: int, *technique: str, until: int = 9) -> None:
        """Up to a step, after which each rank is asked to save and exit."""
        options = [*SMALL, "--data", str(prose), "--dtype", "float64", *technique]
        options += ["--steps", "9", "--eval-every", "3", "--save-every", "9", "--resume", "auto"]
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
        request = SimpleNamespace(requested=lambda: True, exit_code=75)
        after = resuming.Checkpoints.after
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(
                resuming.Checkpoints,
                "after",
                lambda self, step, stop: after(self, step, request if step == until else None),
            )
            ec.run(script.main, ranks, args=(script.parse_args(),))

    def losses(*runs: str) -> list[float]:
        lines = [line for run in runs for line in read_metrics(tmp_path / "runs" / run)]
        return [line["loss"] for line in lines if line["kind"] == "step"]

    train(1, "--name", "whole")
    train(2, "--technique", "pipeline", until=3)
    train(4, "--plan", "pp=2,shard=2", "--microbatches", "2", until=6)
    train(2, "--technique", "fsdp")
    assert losses("gpt", "gpt-2", "gpt-3") == pytest.approx(losses("whole"), rel=1e-9)


def test_options_of_another_technique_are_refused(
    example: Any, prose: Path, monkeypatch: Any
) -> None:
    script = example("train_gpt")
    for options, words in (
        (["--chunks", "2"], "--chunks needs --technique pipeline, or a --plan with pp > 1"),
        (["--technique", "pipeline", "--layout", "rows"], "--layout needs --technique fsdp"),
        (["--plan", "dp=2", "--chunks", "2"], "--chunks needs --technique pipeline, or a --plan"),
        (["--plan", "shard=2", "--shard", "2"], "--shard and --plan say the same"),
        (["--plan", "dp=2", "--technique", "fsdp"], "--technique and --plan say the same"),
        (["--plan", "dp=4"], r"1 \* 4 \* 1 = 4 ranks, and there are 2"),
        (["--plan", "tp=2"], "give each of pp, dp, shard"),
    ):
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *SMALL, "--data", str(prose), *options])
        with pytest.raises(ec.ArgumentError, match=words):
            ec.run(script.main, 2, args=(script.parse_args(),))


def test_batches_of_the_ranks_end_to_end_are_the_batch_of_one_process(text: ModuleType) -> None:
    data = torch.arange(1000, dtype=torch.uint8)
    whole = text.batch(data, 8, 12, seed=1, step=5, rank=0, size=1)
    for size in (2, 3, 12):
        parts = [text.batch(data, 8, 12, seed=1, step=5, rank=r, size=size) for r in range(size)]
        for tensor, cut in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(tensor, torch.cat(cut))


def test_batches_depend_on_seed_and_step_and_targets_follow_tokens(text: ModuleType) -> None:
    data = torch.arange(1000, dtype=torch.uint8)
    inputs, targets = text.batch(data, 8, 4, seed=1, step=5, rank=0, size=1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ({"seed": 2, "step": 5}, {"seed": 1, "step": 6}):
        assert not torch.equal(inputs, text.batch(data, 8, 4, rank=0, size=1, **other)[0])


@pytest.mark.slow
def test_the_default_text_is_several_megabytes_of_python_without_tests(text: ModuleType) -> None:
    loaded = text.load_text(None, CPU)
    assert len(loaded.train) > 4e6
    assert 0.02 < len(loaded.held_out) / len(loaded.train) < 0.15
    assert 4 < loaded.unigram_entropy() < 5
    assert text.load_text(None, CPU) is loaded


def test_held_out_text_is_not_trained_on(text: ModuleType, tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>" * 200)
    loaded = text.load_text(str(tmp_path), CPU)
    train, held_out = (bytes(part.tolist()) for part in (loaded.train, loaded.held_out))
    assert len(train) + len(held_out) == 40 * 800
    assert not {held_out[i : i + 4] for i in range(0, len(held_out), 4)} & {
        train[i : i + 4] for i in range(0, len(train), 4)
    }


def test_a_folder_gives_its_text_files_only(text: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 9000)
    (tmp_path / "b.txt").write_text("ü" * 9000)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0" + bytes(9000))
    loaded = text.load_text(str(tmp_path), CPU)
    assert len(loaded.train) + len(loaded.held_out) == 9000 + 18000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: give a text file or a folder"),
        (b"", "holds 0 bytes of text; give at least"),
        (b"short", "holds 5 bytes of text; give at least"),
        (b"\x89PNG\0" * 9000, "is binary"),
        (b"\xff\xfe\xfd" * 9000, "is binary"),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(
    content: bytes | None, message: str, text: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ec.ArgumentError, match=message):
        text.load_text(str(path), CPU)


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_refused(path: str, text: ModuleType) -> None:
    with pytest.raises(ec.ArgumentError, match="--data is empty"):
        text.load_text(path, CPU)


@pytest.mark.parametrize("folder", [True, False])
def test_text_that_cannot_be_read_is_refused(
    folder: bool, text: ModuleType, prose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)  # root may read everything
    with pytest.raises(ec.ArgumentError, match=r"cannot read .*prose.txt: Permission denied"):
        text.load_text(str(prose.parent if folder else prose), CPU)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("batch_size", 7, "--batch-size 7 cannot be cut over 2 ranks: give a multiple of 2"),
        ("steps", 0, "--steps is 0"),
        ("eval_every", 0, "--eval-every is 0"),
        ("context", 10**6, "--context 1000000 needs longer text"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused(
    option: str,
    value: int,
    message: str,
    example: Any,
    prose: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = example("train_gpt")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--data", str(prose)])
    args = script.parse_args()
    setattr(args, option, value)
    with pytest.raises(ec.ArgumentError, match=message):
        ec.run(script.main, 2, args=(args,))


def test_the_model_sees_no_later_byte(example: Any) -> None:
    gpt = example("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=2, width=16, heads=2, context=8)).double()
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1
    same = (model(tokens) == model(changed % 256)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_a_sample_is_a_function_of_its_seed(example: Any) -> None:
    gpt = example("gpt")
    model = gpt.GPT(gpt.GPTConfig(layers=1, width=16, heads=2, context=8))
    first, again, other = (model.generate(b"def ", 20, seed=seed) for seed in (0, 0, 1))
    assert first.startswith(b"def ")
    assert len(first) == 24
    assert first == again != other


@pytest.mark.slow
@pytest.mark.parametrize("model", ["8b", "405b"])
def test_plans_of_a_llama_are_printed_with_the_reasons(
    model: str, example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_llama.py", model])
    example("plan_llama").main()
    best, others, refused = re.split("\nand why.*\n|\nThe nearest.*\n", capsys.readouterr().out)
    assert re.search(r"a step, [\d,]+ tokens/s, MFU 0\.[3-6]", best)
    assert ("ec.Plan(" in best) == (model == "8b")
    assert ("No ec.Plan: an ec.Plan has no tp" in best) == (model == "405b")
    # No plan that is kept from an axis is faster than the best of all.
    assert re.search(r"[+][\d.]+% time: ", others)
    assert "-" not in re.findall(r"([+-])[\d.]+% time", others)
    assert len(re.findall(r"rank \d+ would have [\d.]+ GiB (?:after|in) ", refused)) == 3
