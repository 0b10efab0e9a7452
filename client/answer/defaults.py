"""A model's own sampling, for requests that say nothing about it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from client.answer.generation import THEIRS, GenerationOptions
from dht.errors import UserError
from dht.process.json_file import object_or_empty

FILE = "generation_config.json"
FOLLOWED = THEIRS.keys() - {"min_new_tokens"}
"""The options that a model's own file sets where a request says nothing; as with vLLM, the least
length of an answer is none of them."""

SamplingDefaults = Mapping[str, float]
"""Sampling by option, where a request says nothing."""


def defaults_in(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults in a ``generation_config.json``, with a temperature of 1 where it has none;
    values that cannot be are left out."""
    found = {"temperature": 1.0}
    for name in FOLLOWED:
        value = generation_config.get(name)
        if value is None:
            continue
        with suppress(UserError):
            found[name] = getattr(GenerationOptions(**{name: value}), name)
    return found


def defaults_of(directory: Path) -> SamplingDefaults:
    """The defaults of the model in ``directory``, as far as its file can be read."""
    return defaults_in(object_or_empty(directory / FILE))
