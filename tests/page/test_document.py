"""A page is one file, and what it says is text."""

from echelon.page import definitions, facts, page, section, table


def test_a_page_has_its_title_twice_and_its_sections_in_order() -> None:
    text = page("a <run>", "2 & more", [section("First", "", "<svg/>"), section("then", "why", "")])
    assert text.count("a &lt;run&gt;") == 2
    assert "<p>2 &amp; more</p>" in text
    assert text.index("<h2>First</h2><svg/>") < text.index("<h2>then</h2><p>why</p>")
    assert "<script>" not in text
    assert "<script>draw()</script>" in page("a", "", [], script="draw()")


def test_texts_are_escaped() -> None:
    assert table(["<a>"], [["<b>"]]).count("&lt;") == 2
    for made in (facts([("<b>", "<a>")]), definitions([("<a>", "<b>")])):
        assert made.count("&lt;") == 2


def test_only_a_page_whose_drawings_are_fit_for_it_follows_a_dark_scheme() -> None:
    assert "prefers-color-scheme: dark" in page("a", "", [], dark=True)
    assert "prefers-color-scheme: dark" not in page("a", "", [])
