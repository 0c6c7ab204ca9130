"""A user who types commands for the debugger of ranks, and reads what it prints."""

import builtins

import pytest


class Typist:
    """Answers each prompt with the next command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._commands: list[str] = []
        self._capsys = capsys
        self.prompts: list[str] = []
        monkeypatch.setattr(builtins, "input", self._answer)
        monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)

    def types(self, *commands: str) -> None:
        """Type these commands; at their end, the input ends."""
        self._commands = list(commands)

    def _answer(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self._commands:
            raise EOFError
        command = self._commands.pop(0)
        if command == "^C":
            raise KeyboardInterrupt
        print(f"{prompt}{command}")
        return command

    def reads(self) -> str:
        """What was printed since the last time, with the commands."""
        assert not self._commands, "not all commands were asked for"
        return self._capsys.readouterr().out
