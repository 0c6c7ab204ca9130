"""Sizes for which the formulas of schedules hold, and exact fractions to compare with."""

from fractions import Fraction

# p ranks, m microbatches, v chunks; equal stages with F = I = W


def first_group(p: int, m: int) -> int:
    return -(-m // max(1, m // p))


def sizes(least: int = 0) -> list[tuple[int, int]]:
    """From 2 to 8 ranks; fewer microbatches than ranks, multiples, neighbours of both, up to 40."""
    return [
        (p, m)
        for p in (2, 3, 5, 8)
        for m in sorted({1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 3, 40})
        if m >= max(1, least * p)
    ]


def close(found: float, wanted: Fraction) -> bool:
    return abs(found - wanted) < 1e-12
