"""Messages that copy a session's KV from the serving stage to the new stage of a planned move.

The owner asks the leaving stage to copy. The leaving stage sends its KV in bounded pieces, in the
order in which it was appended, while the session goes on; the new stage reports its progress
(Llumnix, OSDI'24, §4.2). See docs/protocol.md, "A planned move".
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from dht.messages import codec
from dht.messages.session import SESSION_BOUNDS, OfAttempt, Position, Reason
from dht.messages.types import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy(OfAttempt):
    """Client to a serving stage, on a stream of its own: copy the session's KV to another peer.

    ``attempt`` is that of the copies, under which the new stage has reserved. The answer is a
    ``migration-ready`` when only a few rows are missing there, or a ``refused``.
    """

    to: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages(OfAttempt):
    """Serving stage to new stage: the KV of ``tokens`` tokens from ``position`` on.

    The frame's body holds, for each layer of the stage in order, the keys of all tokens, then their
    values.
    """

    position: Position
    tokens: Annotated[int, Meta(ge=1, le=SESSION_BOUNDS.message_tokens_max)]
    dtype: Annotated[str, Meta(max_length=16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTaken(OfAttempt):
    """New stage to serving stage: the KV of all tokens before ``position`` has arrived."""

    position: Position
    refused: Reason = ""
    """Why the new stage takes no more KV; empty while it does."""


for _kind, _cls in {"kv-copy": KvCopy, "kv": KvPages, "kv-taken": KvTaken}.items():
    codec.register_message(_kind, _cls)
