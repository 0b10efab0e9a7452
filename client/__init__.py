"""A consumer of the swarm: sessions, text generation and tokens. It holds no weights.

    from anabranch import Swarm

    async with Swarm.connect("anabranch:…", model="models/brook") as swarm:
        async for piece in swarm.stream("Once", max_new_tokens=64):
            print(piece.text, end="")
        answer = await swarm.generate("Once", max_new_tokens=64, temperature=0.8, seed=1)

:class:`BlockingSwarm` has the same shape without ``async``; :class:`SwarmModel`
takes what ``transformers``' ``generate()`` takes.
"""

from client.answer.answer import Answer, Piece
from client.answer.generation import GenerationOptions
from client.errors import ClosedError, UnavailableError
from client.model import SwarmModel
from client.swarm.blocking import BlockingSwarm
from client.swarm.swarm import Swarm, SwarmConfig
from dht.errors import AnabranchError, NetworkError, SwarmError, UserError
from dht.messages.logprobs import TokenScore
from dht.transport.config import TransportKind

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
