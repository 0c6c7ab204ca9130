"""The page of the command line has what the commands print."""

import pytest

from tests.pages.command_line import PAGE, command_names, written_page


@pytest.mark.slow
def test_the_page_has_the_help_of_every_command() -> None:
    assert ["run"] in list(command_names())
    assert ["checkpoint", "convert"] in list(command_names())
    # After a change of a command: python -m tests.pages.command_line
    assert PAGE.read_text() == written_page()
