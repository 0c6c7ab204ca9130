from echelon.page import CHART_SCRIPT, CHART_STYLE
from echelon.page.colours import MEANINGS


def test_bars_of_each_meaning_have_its_colour() -> None:
    for meaning in MEANINGS:
        assert f".lanes i.{meaning} {{ --c: var(--{meaning}); }}" in CHART_STYLE


def test_neither_loads_anything() -> None:
    for text in (CHART_STYLE, CHART_SCRIPT):
        assert not any(word in text for word in ("http", "url(", "@import", "fetch(", "import("))
