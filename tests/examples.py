"""How many generated inputs, or seeds, a law is tried on."""

from typing import Any

from hypothesis import settings

USUAL = 50
"""Inputs that ``make test`` tries where a test says no number; ``make fuzz`` tries more."""


def examples(count: int, **more: Any) -> settings:
    """Settings that try a law on ``count`` inputs, and by ``make fuzz`` on as many times more."""
    return settings(max_examples=_scaled(count), **more)


def seeds(count: int, first: int = 0) -> range:
    """``count`` seeds of runs that a law is tried on, and by ``make fuzz`` as many times more."""
    return range(first, first + _scaled(count))


def _scaled(count: int) -> int:
    return count * settings.default.max_examples // USUAL
