import io
import re

import pytest
from rich.console import Console

from echelon.observe import Progress


def show(terminal: bool, steps: range, seconds_a_step: float = 1.0) -> str:
    """What is written for ``steps`` of 10, one each second."""
    output, now = io.StringIO(), [0.0]
    console = Console(file=output, force_terminal=terminal, width=200, soft_wrap=True)
    with Progress(
        10, unit="nats", console=console, interval_s=3.0, clock=lambda: now[0]
    ) as progress:
        for step in steps:
            now[0] += seconds_a_step
            progress.update(step, loss=2.5, tokens_per_s=1234.5, nbytes=3 * 2**20, left_s=65)
    return output.getvalue()


def test_a_pipe_gets_one_plain_line_an_interval_and_one_for_the_last_step() -> None:
    text = show(terminal=False, steps=range(1, 11))
    lines = text.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[0] == "step 1/10  loss 2.500 nats  1,234 tokens/s  3.0 MiB  1m 05s left"
    assert "\x1b" not in text


def test_a_terminal_gets_a_live_line() -> None:
    text = show(terminal=True, steps=range(1, 11))
    assert "\x1b[" in text
    assert "loss 2.500 nats" in text
    assert "100%" in text


def test_a_pipe_is_not_folded_at_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1) as progress:
        progress.note("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, "0% step 12/20000  loss 2.500 nats"),
        (72, "step 12/20000  loss 2.500 nats  123,456 tokens/s  3.0 MiB  1m 05s left"),
        (60, "step 12/20000  loss 2.500  123,456 tokens/s  1m 05s left"),
        (50, "12/20000  2.500  123,456 tok/s  1m 05s left"),
        (40, "12/20000 2.50 123.5k/s 1m 05s"),
    ],
)
def test_a_narrow_terminal_keeps_speed_and_time_left(width: int, shown: str) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    with Progress(20_000, unit="nats", console=console) as progress:
        progress.update(12, loss=2.5, tokens_per_s=123_456, nbytes=3 * 2**20, left_s=65)
    assert shown in output.getvalue()
    assert "123" in output.getvalue()
    assert "1m 05s" in output.getvalue()


def test_a_number_that_becomes_longer_and_shorter_does_not_make_the_bar_come_and_go() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    shapes = []
    with Progress(100, console=console) as progress:
        for step, speed in enumerate((9_999, 10_000, 9_999, 10_000), start=1):
            progress.update(step, loss=2.5, tokens_per_s=speed, nbytes=3, left_s=7)
            shapes.append(len(progress._bar.columns))
    assert shapes == [3, 1, 1, 1]


def test_no_line_is_wider_than_a_terminal_of_80_columns() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    with Progress(1_000_000, unit="bits per byte", console=console) as progress:
        for step in (1, 999_999):
            progress.update(step, loss=2.5, tokens_per_s=9e9, nbytes=2**40, left_s=1e6)
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", output.getvalue())
    assert max(map(len, lines)) <= 80


def test_a_pipe_gets_no_colour_whatever_the_terminal_of_the_user_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    with Progress(1) as progress:
        progress.update(1, loss=2.5, tokens_per_s=1.0, nbytes=1, left_s=0)
        progress.note("12 GiB [red]text[/red]")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]text[/red]" in shown
