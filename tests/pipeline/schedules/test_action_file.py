"""Files that are no text of actions."""

import os

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.action_file import read_file


def test_a_text_is_read_with_the_line_ends_of_windows(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"0F0\r\n1F0\r\n")
    assert read_file(tmp_path / "a") == "0F0\n1F0\n"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"0F0\n\0", "line 2, column 1: byte 4 is 0x00"),
        (b"0F0,\xff", "line 1, column 5: byte 4 is 0xff"),
        ("0F0".encode("utf-16"), "UTF-16"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(tmp_path, data, sentence) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ArgumentError, match=sentence):
        read_file(tmp_path / "a")


def test_folders_pipes_and_missing_files_are_refused_at_once(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, sentence in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            read_file(path)
