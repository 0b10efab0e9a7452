"""What a client knows of the KV that stages keep of its earlier answers: names and routes. Pure.

Each block of a prompt has a digest under a key of its own secret and a salt. Stages know it by that
digest if it was part of a prompt, or by its session if it reached into an answer
(:mod:`dht.messages.prefix`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from coordinator.policies.routing.affinity import Route
from dht.messages.prefix import (
    BLOCK_TOKENS,
    BLOCKS_MAX,
    ROOT,
    SHARED_KEY,
    answer_name,
    block_names,
)
from dht.process.newest import Newest

KNOWN_BLOCKS_MAX = 1 << 16
"""Blocks that a client remembers, the longest unused forgotten first: a million tokens."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Under which name stages keep a block, and on which route."""

    name: bytes
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrompt:
    """The blocks of one session's prompt."""

    key: bytes
    digests: tuple[bytes, ...]
    names: tuple[bytes, ...]
    """Names of the prompt's blocks, as stages are told them."""
    route: Route = ()
    """The route that has the longest known beginning; empty if none is known."""
    known_tokens: int = 0
    """Length of that beginning."""

    @property
    def is_shared(self) -> bool:
        """Whether other clients have the same names."""
        return self.key == SHARED_KEY


class PrefixMemory:
    """Blocks of earlier prompts and answers of one client."""

    def __init__(self, secret: bytes = b"", blocks_max: int = KNOWN_BLOCKS_MAX) -> None:
        """``secret``: at most 64 bytes that stages do not know; without one, they can try which
        prompt a name stands for."""
        self._secret = secret
        self._kept: Newest[bytes, _Kept] = Newest(blocks_max)  # longest unused first

    def __len__(self) -> int:
        return len(self._kept)

    def named(self, token_ids: Sequence[int], salt: str, *, shared: bool = False) -> NamedPrompt:
        """The blocks of a prompt; ``shared``: under names that all clients give them."""
        key = SHARED_KEY
        if not shared:
            key = blake2b(salt.encode(), key=self._secret, digest_size=32).digest()
        digests = block_names(key, token_ids[: BLOCKS_MAX * BLOCK_TOKENS])
        route: Route = ()
        known = 0
        for count in range(len(digests), 0, -1):
            if (kept := self._kept.get(digests[count - 1])) is not None:
                route, known = kept.route, count * BLOCK_TOKENS
                break
        names = (self._kept[d].name if d in self._kept else d for d in digests)
        return NamedPrompt(
            key=key, digests=tuple(digests), names=tuple(names), route=route, known_tokens=known
        )

    def remember(
        self, prompt: NamedPrompt, token_ids: Sequence[int], session: str, route: Route
    ) -> None:
        """Remember that ``route`` ran ``token_ids``, the prompt and what followed it.

        Without the answer's last token: no stage has run it.
        """
        count = len(prompt.digests)
        kept = dict(zip(prompt.digests, prompt.names, strict=True))
        if not prompt.is_shared:
            parent = prompt.digests[-1] if count else ROOT
            answered = block_names(prompt.key, token_ids[count * BLOCK_TOKENS :], parent)
            kept |= {d: answer_name(session, at) for at, d in enumerate(answered, start=count)}
        for digest, name in kept.items():
            self._kept[digest] = _Kept(name, route)
