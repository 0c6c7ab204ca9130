"""What is replaced is there before and after, and what we have not written stays."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.process import atomic_files
from echelon.process.atomic_files import (
    draft_folder,
    exchange,
    move_new,
    remove_folder,
    replace_file,
    replace_folder,
    sweep_drafts,
)

NAMES = [
    "a",
    "with a space",
    "ü\n\x1b[1m",
    ".hidden",
    "x" * 250,
    b"\xff".decode(errors="surrogateescape"),
]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_file_and_a_folder_of_any_name_are_replaced_whole(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for data in (b"old", b"new" * 10**6):
        replace_file(path, data)
        assert (path.read_bytes(), names(tmp_path)) == (data, {name})
    path.unlink()
    for text in ("old", "new"):
        with draft_folder(path) as draft:
            (draft / "file").write_text(text)
            replace_folder(draft, path, is_ours=lambda folder: (folder / "file").is_file())
        assert ((path / "file").read_text(), names(tmp_path)) == (text, {name})
    remove_folder(path)
    assert names(tmp_path) == set()


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("mine")
    (link := tmp_path / "link").symlink_to(victim)
    replace_file(link, b"new")
    assert (victim.read_text(), link.read_text(), link.is_symlink()) == ("mine", "new", False)
    (folder := tmp_path / "folder").mkdir()
    (to_folder := tmp_path / "to").symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        remove_folder(to_folder)
    assert folder.is_dir()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_replaced_by_one(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(path := tmp_path / "a")
    with pytest.raises(OSError, match=r"is a folder|is no ordinary file"):
        replace_file(path, b"new")
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_leaves_the_file_before_and_nothing_else(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(path := tmp_path / "a", b"old")

    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="echelon-") as info:
        replace_file(path, b"new")
    assert info.value.errno == code
    assert (path.read_bytes(), names(tmp_path)) == (b"old", {"a"})


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV])
def test_without_an_exchange_nothing_is_replaced_or_lost(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_renameat2", lambda *_: code)
    (path := tmp_path / "a").mkdir()
    (path / "old").touch()
    with (
        pytest.raises(OSError, match=r"does not exchange|cross-device") as info,
        draft_folder(path) as draft,
    ):
        replace_folder(draft, path, is_ours=lambda _: True)
    assert info.value.filename == str(path)
    assert (names(tmp_path), names(path)) == ({"a"}, {"old"})


def test_what_comes_into_the_place_meanwhile_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "a").mkdir()
    (path / "ours").touch()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").touch()
    first = exchange

    def late(draft: Path, target: Path) -> None:
        monkeypatch.setattr(atomic_files, "exchange", first)
        path.rename(tmp_path / "away")
        (tmp_path / "theirs").rename(path)
        first(draft, target)

    monkeypatch.setattr(atomic_files, "exchange", late)
    with pytest.raises(FileExistsError), draft_folder(path) as draft:
        (draft / "ours").touch()
        replace_folder(draft, path, is_ours=lambda folder: (folder / "ours").exists())
    assert (names(tmp_path), names(path)) == ({"a", "away"}, {"data"})
    with pytest.raises(FileExistsError, match="is there already"):
        move_new(tmp_path / "away", path)


def test_drafts_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path, number = tmp_path / "a", "0" * 32
    for mine in ("a.echelon-1", ".a.echelon-notes", f"a.echelon-{number}", f".b.echelon-{number}"):
        (tmp_path / mine).mkdir()
    os.mkfifo(tmp_path / f".a.echelon-{number[:-1]}1")
    (tmp_path / f".a.echelon-{number[:-1]}2").symlink_to(tmp_path)
    (tmp_path / f".a.echelon-{number[:-1]}3").mkdir()
    (tmp_path / f".a.echelon-{number[:-1]}4").touch()
    stay = names(tmp_path) - {f".a.echelon-{number[:-1]}{i}" for i in (3, 4)}
    code = (
        "import sys, pathlib; from echelon.process.atomic_files import draft_folder\n"
        f"with draft_folder(pathlib.Path({str(path)!r})) as draft:\n"
        "    print(draft.name, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as living:
        assert living.stdout is not None
        draft = living.stdout.readline().strip()
        sweep_drafts(tmp_path, "a")
        assert names(tmp_path) == {*stay, draft}
        living.kill()
    replace_file(path, b"")
    assert names(tmp_path) == {*stay, "a"}


def test_many_writers_of_one_file_each_write_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    versions = {bytes([i]) * 100_000 for i in range(4)}
    errors: list[BaseException] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(25):
                replace_file(path, data, sync=False)
                assert path.read_bytes() in versions
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert names(tmp_path) == {"a"}
