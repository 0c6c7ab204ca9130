"""Of a progress bar a terminal shows the last state, and a pipe gets the final one."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launch.rank_output import Screen
from echelon.launch.written_rows import FinishedRows, MarkedRows, OpenRows, WrittenRows
from tests.processes import run_python

BARS: dict[str, tuple[str, str]] = {  # what is written, and what a pipe gets of it
    "lines": ("a\nb\n\n c\n", "a\nb\n\n c\n"),
    "a bar": ("begin\n\r  0%|   |\r 50%|#  |\r100%|###|\nend\n", "begin\n100%|###|\nend\n"),
    "a bar that goes away": ("\r 50%|#|\r100%|#|\r       \rend\n", "end\n"),
    "a bar that erases": ("\r 50%|#|\r\x1b[Kdone\nend\n", "done\nend\n"),
    "a bar of a shorter text": ("\r12345\rabc\n", "abc45\n"),
    "a bar without an end": ("x\n\r 10%\r 20%", "x\n 20%\n"),
    "ends of lines of Windows": ("a\r\nb\r\n", "a\nb\n"),
    "a bar in a bar": (
        "".join(f"\r{i} of 2\n\rinner {j}\x1b[A" for i in range(3) for j in range(3))
        + "\r2 of 2\n",
        "2 of 2\ninner 2\n",
    ),
    "a question": ("name: ", "name: "),
}


# A piece that ends below an outer bar shows that bar.
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in BARS for size in (1, 3, 1000) if size > 3 or "in a bar" not in name],
)
def test_a_pipe_gets_the_final_state_of_each_row_however_it_is_cut(name: str, size: int) -> None:
    text, expected = BARS[name]
    stream = io.StringIO()
    rows = FinishedRows(stream)
    for start in range(0, len(text), size):
        rows.write(text[start : start + size])
    rows.end()
    assert stream.getvalue() == expected


def test_what_only_grows_is_shown_at_once() -> None:
    stream = io.StringIO()
    rows = FinishedRows(stream)
    for text, shown in [
        ("load", "load"),
        ("ing ", "loading "),
        ("done\nnext", "loading done\nnext"),
    ]:
        rows.write(text)
        assert stream.getvalue() == shown
    rows.write("\rover\n")
    assert stream.getvalue() == "loading done\nnext\nover\n"


def seen(text: str) -> list[str]:
    """The rows of a terminal to which ``text`` was written."""
    rows = WrittenRows()
    finished = rows.take(text)
    return [row for row in f"{finished}{rows.end()}".split("\n") if row]


def test_a_terminal_has_a_row_for_each_rank_below_the_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = io.StringIO()
    open_rows = OpenRows(terminal)
    ranks = [MarkedRows(terminal, f"[{rank}] ", open_rows) for rank in range(2)]
    for percent in (10, 20):
        for rank in ranks:
            rank.write(f"\r {percent}%|" + "#" * 30)
    assert seen(terminal.getvalue()) == ["[0]  20%|##########", "[1]  20%|##########"]
    ranks[1].write("\n")
    ranks[0].write("\r30%\x1b[K")
    assert seen(terminal.getvalue())[-1] == "[0] 30%"
    assert terminal.getvalue().count("[1]  20%|" + "#" * 30 + "\n") == 1
    for rank in ranks:
        rank.end()
    assert seen(terminal.getvalue())[-1] == "[0] 30%"
    assert terminal.getvalue().endswith("[0] 30%\n")


TQDM = """
import sys, time
{imports}
for i in {loop}: pass
print("trained", file=sys.stderr)
"""
LIBRARIES: dict[str, tuple[str, str]] = {
    "tqdm": ("from tqdm import tqdm", "tqdm(range(400), mininterval=0, ascii=True)"),
    "rich": ("from rich.progress import track", "track(range(400), 'Working')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("tee", [(), ("--tee",)], ids=["rank 0", "tee"])
def test_a_bar_of_a_rank_is_one_line_of_a_pipe(
    tee: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    imports, loop = LIBRARIES[name]
    (tmp_path / "train.py").write_text(TQDM.format(imports=imports, loop=loop))
    words = ("-m", "echelon", "run", "--ranks", "1", *tee, str(tmp_path / "train.py"))
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    bars = [line for line in f"{done.stdout}{done.stderr}".splitlines() if "100%" in line]
    assert len(bars) == 1
    assert "400/400" in bars[0] or name == "rich"
    assert len(done.stderr.splitlines()) <= 3
    assert "\r" not in done.stdout + done.stderr


def write_log(folder: Path) -> Callable[[str], None]:
    path = folder / "run" / "attempt_0" / "0"
    path.mkdir(parents=True)

    def write(text: str) -> None:
        with open(path / "stderr.log", "a", newline="") as log:
            log.write(text)

    return write


def test_a_traceback_behind_a_bar_is_held_back_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    write = write_log(tmp_path)
    screen = Screen(tmp_path, live=True)
    write("\r 10%|#  | 1/9 [00:00]\r 20%|## | 2/9 [00:00]Traceback (most recent call last):\n  x\n")
    screen.show()
    screen.close_attempt(failed=True)
    assert errors.getvalue() == " 20%|## | 2/9 [00:00]\n"
