"""Generates short texts about who is who, for the first part of the training.

In a story only one word in twenty is a name, so a small model learns late that a name comes from
the text before it. In a drill it is every second or third word.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from models.teller import Teller

_INTRODUCTIONS: tuple[str, ...] = (
    "{a} is {a.an}.",
    "This is {a.intro}.",
    "There was {a.an} named {a}.",
    "Here comes {a.intro}.",
)
_MEETINGS: tuple[str, ...] = (
    "{a} saw {b}.",
    "{a} waved to {b}, and {b} waved to {a}.",
    '"Hello, {b}," said {a}.',
    '"Hello, {a}," said {b}. "Hello, {b}," said {a}.',
    "{a} and {b}, {b} and {a}.",
    "{a.intro} likes {b.intro}.",
    "{a} gave {b.him} {b.his} hat, and {b} gave {a.him} {a.his} scarf.",
    "{a} asked {b}, and {b.he} nodded.",
    '{b} said, "Thank you, {a}."',
    "{a} is {a.an}, and {b} is {b.an}.",
    "{b}, {a}, {b}, {b}, {a}.",
    "{a} looked at {b}. {a.He} smiled.",
)


def drill(seed: int, index: int) -> str:
    """Return drill number ``index`` of the sequence that the seed starts."""
    rng = random.Random(f"drill:{seed}:{index}")
    cast = Teller(rng).cast[: rng.choice((2, 2, 3, 4))]
    lines = [rng.choice(_INTRODUCTIONS).format(a=person) for person in cast]
    for _ in range(rng.randint(6, 14)):
        first, second = rng.sample(cast, 2)
        lines.append(rng.choice(_MEETINGS).format(a=first, b=second))
    return " ".join(lines)


def drills(seed: int) -> Iterator[str]:
    """Yield the drills of a seed without end."""
    return (drill(seed, index) for index in itertools.count())
