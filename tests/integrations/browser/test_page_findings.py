"""The check of pages finds each defect that it is for, and nothing on a page without one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.browser.page_findings import browser_path, open_browser, shown

pytestmark = pytest.mark.slow

HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>t</title><body>'
GOOD = """
<style>body { font: 15px sans-serif; color: #222; background: #fff; }</style>
<h1>Title</h1><p>A text that is long enough to be folded on a narrow page, which is no defect.</p>
<div style="overflow-x: auto" tabindex="0"><table style="width: 900px"><td>a<td>b</table></div>
<svg width="100" height="40"><text x="5" y="15">one</text><text x="5" y="35">two</text></svg>
<details><summary>more</summary><p>hidden</p></details><p>after it</p>
"""

DEFECTS = {
    "texts on each other": (
        '<div style="position: relative; height: 40px">'
        '<span style="position: absolute; top: 4px">first</span>'
        '<span style="position: absolute; top: 8px; left: 6px">second</span></div>',
        '"first" and "second" lie on each other',
    ),
    "texts of a drawing on each other": (
        '<svg width="200" height="40"><text x="5" y="15">tick</text>'
        '<text x="20" y="18">title</text></svg>',
        '"tick" and "title" lie on each other',
    ),
    "a page wider than the window": (
        '<div style="width: 700px">wide</div>',
        "the page is 7",
    ),
    "a text that stands out of the window": (
        '<p style="white-space: nowrap">' + "a long line " * 20 + "</p>",
        "in a window of 390",
    ),
    "a table that is cut off": (
        '<div style="overflow: hidden"><table style="width: 900px"><td>a</table></div>',
        "div is cut off",
    ),
    "a box that only a pointer can scroll": (
        '<section style="overflow-x: auto"><table style="width: 900px"><td>a</table></section>',
        "section scrolls, but the keyboard does not reach it",
    ),
    "a text that is too pale": (
        '<p style="color: #999">pale</p>',
        'the contrast of "pale" is 2.85',
    ),
    "a text that is pale by its opacity": (
        '<div style="opacity: 0.4"><p>faint</p></div>',
        'the contrast of "faint" is',
    ),
    "a text on stripes": (
        '<p style="background: repeating-linear-gradient(45deg, #000 0 3px, #fff 3px 6px)">s</p>',
        'the contrast of "s" is',
    ),
    "a text of a drawing that is too pale": (
        '<svg width="90" height="40"><text x="5" y="15" fill="#aaa">tick</text></svg>',
        'the contrast of "tick" is 2.32',
    ),
    "a text that is too small": ('<p style="font-size: 9px">tiny</p>', '"tiny" is 9 pixels high'),
    "a text that is folded away and too pale": (
        '<details><summary>s</summary><p style="color: #999">inside</p></details>',
        'the contrast of "inside" is 2.85',
    ),
    "an error of a script": ("<script>undefined_name()</script>", "error: undefined_name is not"),
    "a message of a script": ("<script>console.error('boom')</script>", "console: boom"),
    "something that is loaded": ('<img alt="" src="missing.png">', "missing.png"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as started:
        yield started


def findings(browser: Any, path: Path, body: str) -> list[str]:
    path.write_text(HEAD + GOOD + body)
    with shown(browser, path, 390, "light") as view:
        return view.findings()


def test_a_page_without_a_defect_has_no_findings(browser: Any, tmp_path: Path) -> None:
    assert findings(browser, tmp_path / "page.html", "") == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(browser: Any, tmp_path: Path, defect: str) -> None:
    body, finding = DEFECTS[defect]
    named = findings(browser, tmp_path / "page.html", body)
    assert [text for text in named if finding in text] != [], named


def test_without_a_browser_the_tests_fail_and_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="apt install chromium"):
        browser_path()
