"""A model's own sampling, for requests that say nothing about it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from client.answer.generation import GenerationOptions
from dht.errors import UserError
from dht.process.json_file import object_or_empty

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling where a request says nothing: the model's own, as vLLM takes them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> "SamplingDefaults":
        """The defaults in a ``generation_config.json``; values that cannot be are left out."""
        found: dict[str, Any] = {}
        for name in (each.name for each in fields(cls)):
            value = generation_config.get(name)
            if value is None:
                continue
            with suppress(UserError):
                found[name] = getattr(GenerationOptions(**{name: value}), name)
        return cls(**found)

    @classmethod
    def read(cls, directory: Path) -> "SamplingDefaults":
        """The defaults in a model's directory; where it has none that can be read, these here."""
        return cls.of(object_or_empty(directory / FILE))
