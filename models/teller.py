"""Composes a story's sentences: a cast, a place, and a choice between phrasings."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from models.words import (
    ANIMALS,
    ASIDES,
    CARGOES,
    FOODS,
    HABITS,
    HE_NAMES,
    HOMES,
    LOOKS,
    NEST_THINGS,
    PEOPLE,
    PLACES,
    PLAIN_THINGS,
    SHE_NAMES,
    WHENS,
    Character,
    Thing,
)

_FIRST_LETTER = re.compile(r"[A-Za-z]")


def capitalized(sentence: str) -> str:
    """Return the sentence with its first letter in upper case."""
    return _FIRST_LETTER.sub(lambda match: match.group().upper(), sentence, count=1)


def _cast(rng: random.Random, size: int) -> list[Character]:
    """Pick characters of different names and kinds; neighbors mostly differ in pronoun."""
    she = rng.sample(SHE_NAMES, size)
    he = rng.sample(HE_NAMES, size)
    kinds = rng.sample(ANIMALS, size)
    people = rng.sample(PEOPLE, size)
    is_she = rng.random() < 0.5
    cast = []
    for index in range(size):
        name = she[index] if is_she else he[index]
        roll = rng.random()
        if index == 0 and roll < 0.15:
            kind, hand = ("girl" if is_she else "boy"), "hand"
        elif roll < 0.4:
            kind, hand = people[index], "hand"
        else:
            kind, hand = kinds[index]
        cast.append(Character(name, kind, hand))
        if rng.random() < 0.75:
            is_she = not is_she
    return cast


def _things(rng: random.Random, count: int) -> list[Thing]:
    """Pick different things with different looks."""
    nouns = rng.sample(PLAIN_THINGS + NEST_THINGS, count)
    looks = rng.sample(LOOKS, count)
    return [Thing(noun, look, noun in NEST_THINGS) for noun, look in zip(nouns, looks, strict=True)]


class Teller:
    """One story in the making.

    Templates name the hero ``{a}``, the others ``{b}``, ``{c}`` and ``{d}``, the things ``{x}``
    and ``{y}``, the places ``{p}``, ``{q}`` and ``{r}``; ``{he}``, ``{him}``, ``{his}`` are the
    hero's pronouns, ``{b.he}`` and so on those of the others.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sentences: list[str] = []
        self._last_line: tuple[int, Character] | None = None
        self.cast = _cast(rng, 4)
        self.a, self.b, self.c, self.d = self.cast
        self.x, self.y = _things(rng, 2)
        self.p, self.q, self.r = rng.sample(PLACES, 3)
        self.food, self.other_food = rng.sample(FOODS, 2)
        self.when, self.weather = rng.choice(WHENS)
        self.habit = rng.choice(HABITS) if rng.random() < 0.55 else None
        self.fields: dict[str, object] = {
            **dict(zip("abcd", self.cast, strict=True)),
            "x": self.x,
            "y": self.y,
            "p": self.p,
            "q": self.q,
            "r": self.r,
            "food": self.food,
            "food2": self.other_food,
            "cargo": rng.choice(CARGOES),
            "home": rng.choice(HOMES),
            "he": self.a.he,
            "him": self.a.him,
            "his": self.a.his,
            "himself": self.a.himself,
            "He": self.a.He,
            "when": self.when,
            "When": capitalized(self.when),
        }

    def fill(self, template: str) -> str:
        """Return the template with this story's people and things in it."""
        return template.format(**self.fields)

    def say(self, *options: str) -> None:
        """Add one of the options."""
        self.sentences.append(capitalized(self.fill(self.rng.choice(options))))

    def maybe(self, *options: str, chance: float = 0.5) -> None:
        """Add one of the options, or nothing."""
        if self.rng.random() < chance:
            self.say(*options)

    def aside(self) -> None:
        """Perhaps look around for a moment, at something that does not matter."""
        self.maybe(*ASIDES, chance=0.45)

    def some(self, count: int, options: Sequence[str]) -> None:
        """Add ``count`` different options."""
        for option in self.rng.sample(list(options), count):
            self.say(option)

    def quote(self, who: Character, *options: str, verb: str = "said") -> None:
        """Add a line of speech, with its speaker before or after it."""
        line = capitalized(self.fill(self.rng.choice(options)))
        if line.endswith("?"):
            verb = "asked"
        elif line.endswith("!"):
            verb = self.rng.choice(("said", "cried", "called"))
        goes_on = self._last_line == (len(self.sentences), who)
        self._last_line = (len(self.sentences) + 1, who)
        spoken = f"{line[:-1]}," if line.endswith(".") else line
        if goes_on:
            verb = "added" if verb == "said" else verb
            self.sentences.append(f'"{spoken}" {who.he} {verb}.')
        elif self.rng.random() < 0.3:
            self.sentences.append(f'{who} {verb}, "{line}"')
        else:
            self.sentences.append(f'"{spoken}" {verb} {who}.')

    def open(self) -> None:
        """Introduce the hero, and say when it all happened if the opening allows."""
        habit = self.fill(self.habit.verb) if self.habit else ""
        self.fields["habit"] = habit
        if habit:
            self.say(
                "Once upon a time there was {a.an} named {a} who {habit}.",
                "Once upon a time there was {a.an} named {a} who {habit}.",
                "Once upon a time {a.an} named {a} lived {home}. {a} {habit}.",
                "Once there was {a.an} named {a} who {habit}.",
                "{a} was {a.an} who lived {home} and {habit}.",
                "There was once {a.an} named {a}, who lived {home} and {habit}.",
                "Long ago, {home}, there lived {a.an} named {a} who {habit}.",
                "Everyone knew {a.intro}, who {habit}.",
            )
        else:
            self.say(
                "Once upon a time there was {a.an} named {a}, who lived {home}.",
                "Once upon a time {a.an} named {a} lived {home}.",
                "Once upon a time, {home}, there lived {a.an} named {a}.",
                "Once there was {a.an} named {a}, who lived {home}.",
                "Once {a.an} named {a} lived {home}.",
                "{a} was {a.an} who lived {home}.",
                "Long ago, {home}, there lived {a.an} named {a}.",
                "In a small town by the river there lived {a.an} named {a}.",
            )

    def open_on_the_day(self, *options: str) -> None:
        """Start with the day itself, or with the hero and then the day; then the weather.

        The options go on from "One morning, ..." and must name the hero. Either the opening or
        ``{who}`` tells the hero's kind.
        """
        if self.habit is None and self.rng.random() < 0.45:
            self.fields["who"] = self.a.intro
        else:
            self.open()
            self.fields["who"] = self.a.name
        self.say(*(f"{{when}}, {option}" for option in options))
        if self.weather and self.rng.random() < 0.6:
            self.sentences.append(self.weather)

    def close(self, *options: str) -> None:
        """End the story: with the hero's habit if it has one, else with a line of the plot."""
        if self.habit is None:
            self.say(*options)
            return
        self.maybe(*options, chance=0.3)
        self.say(*self.habit.closings)

    def text(self) -> str:
        """Return the whole story."""
        return " ".join(self.sentences)
