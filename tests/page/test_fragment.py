"""What a cell shows is escaped, loads nothing, and has no ground of its own."""

from echelon.page import Picture, TextTable, View, ViewPart
from echelon.page.fragment import view_html

EVIL = "<script>alert('x')</script>"
VIEW = View(
    title=EVIL,
    facts=[(EVIL, EVIL)],
    parts=[
        ViewPart(title=EVIL, about=EVIL, content=EVIL),
        ViewPart(title="t", content=TextTable(heads=[EVIL], rows=[[EVIL]])),
        ViewPart(title="p", content=Picture(svg="<svg/>", text=EVIL)),
    ],
)


def test_every_text_is_escaped_and_a_picture_is_its_svg() -> None:
    html = view_html(VIEW)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 8
    assert "<svg/>" in html


def test_it_loads_nothing_and_takes_the_colours_of_the_notebook() -> None:
    html = view_html(VIEW)
    assert not any(word in html for word in ("http:", "https:", "src=", "@import", "<style"))
    assert "background: #" not in html
