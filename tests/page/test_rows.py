import re

from echelon.page import Bar, BarRows, Row


def html(*bars: Bar, **options: object) -> str:
    rows = [Row(name="rank_0 <a>", bars=bars, total="3 <s>", group="g")]
    return BarRows(rows=rows, legend={"forward": "F"}, **options).html()


def test_bars_have_their_share_of_the_longest_row() -> None:
    shown = html(
        Bar(start=0.0, end=1.0, meaning="forward"), Bar(start=3.0, end=4.0, meaning="backward")
    )
    assert re.findall(r'<i class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%"', shown) == [
        ("forward", "0.00", "25.00"),
        ("backward", "75.00", "25.00"),
    ]


def test_an_axis_may_be_longer_than_all_rows() -> None:
    shown = html(Bar(start=0.0, end=1.0, meaning="forward"), axis="ms", end=10.0)
    assert "width:10.00%" in shown
    assert ">10</span>" in shown


def test_texts_are_escaped_and_names_may_be_folded_at_their_underscores() -> None:
    shown = html(Bar(start=0.0, end=1.0, meaning="forward", text="<x>", tip='"y"'))
    for text in ("rank_<wbr>0 &lt;a&gt;", "3 &lt;s&gt;", "&lt;x&gt;", "&quot;y&quot;"):
        assert text in shown


def test_what_took_no_time_has_no_bar() -> None:
    assert '<i class="forward" style="left' not in html(Bar(start=1.0, end=1.0, meaning="forward"))
