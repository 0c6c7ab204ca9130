"""Lines that a user types for the debugger of a rank."""

import builtins
import io
import sys
import threading

import pytest

from echelon.laboratory.debugger_input import completing, read_line
from echelon.process.background_threads import run_in_background
from echelon.process.main_thread import serve, serving


def read_on_a_thread(output: io.StringIO, is_over: bool = False) -> tuple[list[str], list[str]]:
    """What a thread reads while the main thread serves it, and the errors there."""
    lines: list[str] = []
    errors: list[str] = []

    def read() -> None:
        try:
            lines.append(read_line("> ", output, lambda: is_over))
        except BaseException as error:
            errors.append(type(error).__name__)

    with serving():
        thread = run_in_background("reader", read)
        while thread.is_alive():
            serve()
            thread.join(0.01)
    return lines, errors


def test_the_main_thread_reads_and_prints_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()

    def answer(prompt: str) -> str:
        assert threading.current_thread() is threading.main_thread()
        assert sys.stdout is output
        return f"{prompt}yes"

    monkeypatch.setattr(builtins, "input", answer)
    assert read_on_a_thread(output) == (["> yes"], [])
    assert read_line("> ", output, lambda: False) == "> yes"


def test_the_end_of_the_input_is_raised_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert read_on_a_thread(io.StringIO()) == ([], ["EOFError"])


def test_ctrl_c_is_raised_in_the_main_thread_and_told_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    errors: list[str] = []

    def read() -> None:
        try:
            read_line("> ", io.StringIO(), lambda: False)
        except KeyboardInterrupt:
            errors.append("interrupted")

    thread = threading.Thread(target=read)
    with pytest.raises(KeyboardInterrupt), serving():
        thread.start()
        while thread.is_alive():
            serve()
    thread.join()
    assert errors == ["interrupted"]


def test_nobody_is_asked_when_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "input", lambda prompt: pytest.fail("asked"))
    assert read_on_a_thread(io.StringIO(), is_over=True) == ([], ["KeyboardInterrupt"])


def test_words_are_completed_in_the_body_only() -> None:
    readline = pytest.importorskip("readline")
    before = readline.get_completer()

    def complete(text: str, state: int) -> str | None:
        return None

    with completing(complete):
        assert readline.get_completer() is complete
    assert readline.get_completer() is before
