"""Round numbers on an axis, and points left out of a line that has too many. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STEPS = (1.0, 2.0, 5.0, 10.0)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most ``most`` multiples of 1, 2 or 5 times a power of ten, in ``low`` to ``high``.

    Example:
        >>> ticks(0.0, 97.0)
        [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first + 1 > most:
        return ticks(low, high, most - 1) if most > 2 else [low]
    return [i * step for i in range(first, last + 1)]


def number_text(value: float) -> str:
    """A number on an axis, as short as it can be.

    Example:
        >>> [number_text(value) for value in (0.0, 1500.0, 0.25, 2e6, 3e-5)]
        ['0', '1.5k', '0.25', '2M', '3e-05']
    """
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.4g}{letter}"
    return f"{value:.4g}" if abs(value) >= 1e-12 else "0"


def thinned(values: Sequence[float | None], limit: int = 600) -> list[int]:
    """The places of at most ``limit`` values: of each stretch its lowest and its highest.

    Example:
        >>> thinned([0.0, 5.0, 1.0, 2.0, 9.0, 3.0], limit=4)
        [0, 1, 3, 4]
    """
    if len(values) <= limit:
        return list(range(len(values)))
    stretches = max(1, limit // 2)
    places: set[int] = set()
    for stretch in range(stretches):
        start = stretch * len(values) // stretches
        stop = (stretch + 1) * len(values) // stretches
        known = [i for i in range(start, stop) if values[i] is not None]
        if known:
            places.add(min(known, key=lambda i: values[i] or 0.0))
            places.add(max(known, key=lambda i: values[i] or 0.0))
        else:
            places.add(start)  # a gap stays a gap
    return sorted(places)
