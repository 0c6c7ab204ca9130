"""The compilation of the simulated device, and what is said where it cannot be."""

from pathlib import Path

import pytest

from echelon.errors import UnsupportedError
from echelon.testing.device import native
from tests.device.compiler import needs_compiler


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"no compiler here .*apt install g"):
        native._compile({}, tmp_path / "device.so")


def test_without_the_headers_of_python_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "HEADERS", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"no Python\.h: .*apt install python3-dev"):
        native._compile({}, tmp_path / "device.so")


@needs_compiler
def test_sources_that_do_not_compile_name_the_torch_and_the_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"does not compile with torch \d.*error: .*wrong"):
        native._compile({"a.cpp": b"wrong"}, tmp_path / "device.so")
    assert list(tmp_path.iterdir()) == []
