"""Answers in OpenAI's form: whole objects, stream chunks, both kinds of log probabilities. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from client.errors import no_route_text
from client.pages.clean import namer
from client.session.controller import ControllerState, RouteStatus
from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason
from dht.messages.types import NodeRecord

ROUTE_STATES = {ControllerState.DRAWING: "drawing", ControllerState.OPENING: "opening"}
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

TextOf = Callable[[int], str]
BytesOf = Callable[[int], bytes]


def rfc3339(unix_s: float) -> str:
    """A Unix time in seconds, as other interfaces than OpenAI's write it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """What all chunks of one answer repeat."""

    id: str
    object: str
    created: int
    model: str

    def body(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The object around ``choices``."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens that an answer cost; each prompt counts once, whatever ``n`` is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV the peers had kept when the first choice began."""
    reasoning_tokens: int | None = None
    """Tokens of the answers' thoughts; None: they are not told from the rest of the answers."""

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def body(self) -> dict[str, Any]:
        found = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return found


def route_body(index: int, status: RouteStatus, nodes: Mapping[str, NodeRecord]) -> dict[str, Any]:
    """How it stands with the route of choice ``index``; peers' own names are made fit to show."""
    name_of = namer(nodes)

    def peer(peer_id: str) -> dict[str, Any]:
        return {"peer": peer_id, "name": name_of(peer_id)}

    return {
        "index": index,
        "state": ROUTE_STATES.get(status.state, "open"),
        "stages": [
            {**peer(stage.peer_id), "start": stage.start, "end": stage.end}
            for stage in status.route
        ],
        "lost": [peer(peer_id) for peer_id in sorted(status.lost)],
        "failovers": status.failovers,
        "waits_for": "" if status.no_route is None else no_route_text(status.no_route),
    }


def finish_of(reason: FinishReason | None) -> str | None:
    """OpenAI's name of why an answer ended."""
    return None if reason is None else FINISH.get(reason, "stop")


def chat_logprobs(
    scores: Sequence[TokenScore], text_of: TextOf, bytes_of: BytesOf
) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": text_of(token_id),
            "logprob": logprob,
            "bytes": list(bytes_of(token_id)),
        }

    content = [
        {
            **entry(score.token_id, score.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


@dataclass(slots=True, kw_only=True)
class CompletionLogprobs:
    """Builds the ``logprobs`` objects of a completion; ``text_offset`` runs on between chunks."""

    text_of: TextOf
    top: int
    """Alternatives that were asked; with 0 the alternatives are null, as with OpenAI."""
    offset: int = field(default=0)

    def add(self, tokens: Sequence[tuple[int, TokenScore | None]]) -> dict[str, Any]:
        """The log probabilities of tokens with their scores; a prompt's first token has none."""
        texts = [self.text_of(token_id) for token_id, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        alternatives = [self._alternatives(score) for _, score in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else score.logprob for _, score in tokens],
            "top_logprobs": alternatives if self.top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, score: TokenScore | None) -> dict[str, float] | None:
        """The likeliest tokens and the one that stands there; of equal texts the likeliest."""
        if score is None:
            return None
        found: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            found.setdefault(self.text_of(token_id), logprob)
        return found
