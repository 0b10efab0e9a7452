"""How many generated inputs a law is tried on."""

from typing import Any

from hypothesis import settings

USUAL = 100
"""What ``make test`` tries where a test says no number; ``make fuzz`` tries more."""


def examples(count: int, **more: Any) -> settings:
    """Settings that try a law on ``count`` inputs, and by ``make fuzz`` on as many times more."""
    return settings(max_examples=count * settings.default.max_examples // USUAL, **more)
