from echelon.laboratory.comparison import (
    Cause,
    CauseKind,
    Comparison,
    ValueDifference,
    ValueKind,
    listed,
)

DIFFERENCE = ValueDifference(
    step=1,
    kind=ValueKind.GRADIENT,
    name="<head>",
    rank=2,
    ranks=(2, 3),
    largest=0.5,
    relative=0.25,
    expected=2.0,
    observed=1.5,
)
CAUSE = Cause(kind=CauseKind.SUMMED, text="gradients are 2 times", advice="Divide them by 2")
DIFFERENT = Comparison(
    what="train",
    ranks=4,
    steps=3,
    differences=(DIFFERENCE,),
    causes=(CAUSE,),
    compared={ValueKind.GRADIENT: 8},
    largest={ValueKind.GRADIENT: 0.25},
)


def test_the_text_says_where_what_and_why() -> None:
    text = str(DIFFERENT)
    assert text.startswith("NOT the same: train on 4 ranks and one process, 3 steps in float64")
    assert "step 1, gradient '<head>', rank 2: 1.5 instead of 2" in text
    assert "ranks: 2, 3" in text
    assert str(CAUSE) in text
    assert "gradients: 8 compared" in text


def test_the_repr_is_the_verdict() -> None:
    assert repr(DIFFERENT) == f"<Comparison: {DIFFERENT.verdict}>"


def test_the_page_says_the_same_and_escapes_names() -> None:
    page = DIFFERENT._repr_html_()
    assert "NOT the same" in page
    assert "&lt;head&gt;" in page
    assert "<head>" not in page
    assert "gradients are 2 times" in page


def test_without_differences_they_are_the_same() -> None:
    same = Comparison(what="plan dp=1", ranks=1, steps=1)
    assert same.same
    assert same.first is None
    assert str(same) == "the same: plan dp=1 on 1 rank and one process, 1 step in float64"
    assert "<b>the same" in same._repr_html_()


def test_a_difference_of_rows_has_no_elements() -> None:
    rows = ValueDifference.of_step(2, ValueKind.ROWS, [1, 3])
    assert str(rows) == "step 2, rows of a batch, rank 1"
    assert rows.ranks == (1, 3)


def test_long_lists_of_names_are_shortened() -> None:
    assert listed("abcdef") == "a, b, c, d and 2 more"
