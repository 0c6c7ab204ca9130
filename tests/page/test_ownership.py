"""The picture of ownership has a box for each range, as wide as its bytes."""

import xml.etree.ElementTree as ElementTree

from echelon.page import Extent, OwnedBuffer, ownership

NAME = "{http://www.w3.org/2000/svg}"
BARS = [
    OwnedBuffer(
        name="a <b>",
        extents=[
            Extent(label="w[0:6]", nbytes=24, owner=0),
            Extent(label="w[6:8]", nbytes=8, owner=1),
            Extent(label="nothing", nbytes=0, owner=2),
        ],
    ),
    OwnedBuffer(name="c", extents=[Extent(label="b", nbytes=16, owner=None)]),
]


def test_boxes_are_as_wide_as_their_bytes_and_tell_what_they_are() -> None:
    svg = ElementTree.fromstring(ownership(BARS).svg)
    widths = [float(rect.attrib["width"]) + 1 for rect in svg.iter(f"{NAME}rect")]
    assert [round(width / widths[1], 2) for width in widths] == [3, 1, 2]
    titles = [title.text for title in svg.iter(f"{NAME}title")]
    assert titles == ["w[0:6]: rank 0, 24 B", "w[6:8]: rank 1, 8 B", "b: all ranks, 16 B"]
    assert "a <b>" in [text.text for text in svg.iter(f"{NAME}text")]


def test_the_text_has_the_owner_of_each_sixtieth_and_a_star_for_all() -> None:
    first, second = ownership(BARS).text.splitlines()
    assert first == f"a <b>  |{'0' * 45}|{'1' * 15}|  32 B"
    assert second == f"c      |{'*' * 30}|  16 B"


def test_without_buffers_there_is_an_empty_picture() -> None:
    assert ownership([]).text == ""
