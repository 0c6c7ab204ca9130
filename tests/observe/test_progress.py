import io

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
