"""Names KV pages by their content: digests of the tokens up to the page's end. Pure.

A page's digest covers every token up to the page's end, so equal digests mean equal KV for the same
model. The chain therefore begins with the model's fingerprint.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class PrefixChain:
    """Digests of one session's full pages, extended as tokens come."""

    page_tokens: int
    digests: list[bytes]
    """The root, then one digest per full page."""
    rest: list[int] = field(default_factory=list)
    """Tokens of the last page, which is not full yet."""

    @classmethod
    def of(cls, root: bytes, page_tokens: int) -> "PrefixChain":
        """The chain of a session without tokens."""
        return cls(page_tokens=page_tokens, digests=[root])

    @property
    def tokens(self) -> int:
        """Number of tokens that the chain covers."""
        return (len(self.digests) - 1) * self.page_tokens + len(self.rest)

    def ahead(self, token_ids: Sequence[int]) -> list[bytes]:
        """Digests of the pages that ``token_ids`` would fill; the chain does not change."""
        tokens, digest, found = [*self.rest, *token_ids], self.digests[-1], []
        for at in range(0, len(tokens) - self.page_tokens + 1, self.page_tokens):
            page = b"".join(t.to_bytes(8, "little") for t in tokens[at : at + self.page_tokens])
            digest = hashlib.sha256(digest + page).digest()
            found.append(digest)
        return found

    def extend(self, token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """Append tokens; returns index and digest of each page that they filled."""
        found = self.ahead(token_ids)
        first = len(self.digests) - 1
        self.rest = [*self.rest, *token_ids][len(found) * self.page_tokens :]
        self.digests += found
        return list(enumerate(found, start=first))
