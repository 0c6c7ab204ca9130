"""A colour has one meaning, which also those who see few colours can tell from others."""

import itertools

from echelon.page.colours import MEANINGS, colour_style
from echelon.pipeline.schedules.render import COLOURS


def linear(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def oklab(text: str) -> tuple[float, float, float]:
    """Source: Ottosson, "A perceptual color space for image processing", 2020."""
    r, g, b = (linear(int(text[i : i + 2], 16)) for i in (1, 3, 5))
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_no_two_meanings_look_alike_on_either_ground() -> None:
    for ground in range(2):
        colours = {meaning: oklab(shade[ground]) for meaning, shade in MEANINGS.items()}
        for (first, a), (second, b) in itertools.combinations(colours.items(), 2):
            distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
            assert distance > 0.04, (first, second, ground)


def test_actions_have_the_hues_of_drawings_of_schedules() -> None:
    for meaning in ("forward", "backward", "inputs", "weights"):
        _, a, b = oklab(MEANINGS[meaning].light)
        _, other_a, other_b = oklab(COLOURS[meaning])
        assert abs(a - other_a) < 0.04
        assert abs(b - other_b) < 0.04


def test_the_style_has_all_colours_for_both_grounds() -> None:
    style = colour_style()
    assert style.count("--forward: ") == 2
    assert all(style.count(f"--{meaning}: ") == 2 for meaning in MEANINGS)
