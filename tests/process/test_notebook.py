"""Only the kernel of a notebook is one; tests/launch/test_cell_output.py asks in a real one."""

import sys
from types import SimpleNamespace

import pytest

from echelon.process.notebook import in_notebook, place_name


def test_a_test_and_a_prompt_of_ipython_are_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    for shell, expected in ((None, False), (SimpleNamespace(), False)):
        fake = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", fake)
        assert in_notebook() is expected


def test_a_shell_with_a_kernel_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    assert in_notebook()


def test_only_the_file_of_a_cell_has_the_name_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert place_name("/a/b.py") == "/a/b.py"
    compiler = SimpleNamespace(format_code_name={"/tmp/1.py": ("Cell", "In[3]")}.get)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert place_name("/tmp/1.py") == "cell In[3]"
    assert place_name("/a/b.py") == "/a/b.py"
