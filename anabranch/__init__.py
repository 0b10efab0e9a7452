"""Anabranch for programs: a large language model served by many people's GPUs together.

    from anabranch import Swarm

    async with Swarm.connect("anabranch:…", model="models/brook") as swarm:
        answer = await swarm.chat("What is a river?", max_new_tokens=64)
        print(answer.text)

:class:`BlockingSwarm` has the same shape without ``async``; :class:`SwarmModel` takes what
``transformers``' ``generate()`` takes. ``python -m anabranch`` runs the commands.

The software's parts are packages with common names (``client``, ``node``, …). Importing this one
makes sure that they are found where this package is, and not a ``client.py`` of somebody else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anabranch.own_parts import find_own_parts

if TYPE_CHECKING:
    from client import (
        AnabranchError,
        Answer,
        BlockingSwarm,
        ClosedError,
        GenerationOptions,
        NetworkError,
        Piece,
        Swarm,
        SwarmConfig,
        SwarmError,
        SwarmModel,
        TokenScore,
        TransportKind,
        UnavailableError,
        UserError,
    )

__all__ = [
    "AnabranchError",
    "Answer",
    "BlockingSwarm",
    "ClosedError",
    "GenerationOptions",
    "NetworkError",
    "Piece",
    "Swarm",
    "SwarmConfig",
    "SwarmError",
    "SwarmModel",
    "TokenScore",
    "TransportKind",
    "UnavailableError",
    "UserError",
]

find_own_parts()


def __getattr__(name: str) -> Any:
    # Commands that only print help need none of it.
    if name in __all__:
        return getattr(import_module("client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
