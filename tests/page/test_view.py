"""A view is what its class has registered, and other objects get a sentence."""

import pytest

from echelon.errors import ArgumentError
from echelon.page import View, bytes_text, view_of


class Thing:
    """Has a view."""


def test_the_view_of_a_subclass_is_that_of_its_class() -> None:
    view_of.register(Thing)(lambda shown: View(title=type(shown).__name__))

    class Special(Thing):
        pass

    assert view_of(Special()).title == "Special"


def test_an_object_without_a_view_gets_a_sentence_with_what_has_one() -> None:
    with pytest.raises(ArgumentError, match=r"this is 3, a int; show a model in ec\.DDP"):
        view_of(3)


def test_bytes_have_the_largest_unit_that_fits() -> None:
    assert [bytes_text(n) for n in (1023, 1024, 1536)] == ["1023 B", "1.0 KiB", "1.5 KiB"]
