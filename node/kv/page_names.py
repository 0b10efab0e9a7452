"""Under which names a session's KV pages are kept for later sessions, and found by them. Pure.

A page is named by the space that may share it, the block of the protocol in which it ends
(:mod:`dht.messages.prefix`), and where in that block, so pages of any size have names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from dht.messages.prefix import BLOCK_TOKENS, NAME_BYTES, answer_name, block_name
from dht.messages.session import SessionOpen

SPACE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNames:
    """Names of one session's pages. Without a ``space``, nothing is kept or found."""

    space: bytes = b""
    """Space of sessions that share pages: pages are found under the same space alone."""
    blocks: bytes = b""
    """Packed names of the prompt's blocks."""
    answers: str = ""
    """The session whose later blocks are kept, too; empty: those of the prompt alone."""
    found_most: int = 0
    """Maximum tokens that may be found kept: at least one row of the prompt has to run."""

    @classmethod
    def of(cls, open_: SessionOpen) -> "PageNames":
        """What the stage at ``open_.hop`` keeps and finds for a session.

        Private pages belong to the client, whose key signed the open. Shared ones belong to all who
        came over the very same stages before this one, which made the rows behind the KV. Rows of
        a later attempt may have been made under an earlier one, by others, so it shares nothing. A
        new stage of a planned move gets KV from a peer that the client names; it finds nothing.
        """
        moves = open_.migrate_until is not None
        if not open_.blocks or (open_.shares_prefix and (moves or open_.attempt)):
            return cls()
        whose = f"client {open_.client}"
        if open_.shares_prefix:
            before = (f"{s.peer_id} {s.start} {s.end}" for s in open_.route[: open_.hop])
            whose = "\n".join(("shared", *before))
        scored = open_.sampling.prompt_logprobs is not None  # every row of the prompt is needed
        return cls(
            space=blake2b(whose.encode(), digest_size=SPACE_BYTES).digest(),
            blocks=open_.blocks,
            answers="" if open_.shares_prefix else open_.session,
            found_most=0 if moves or scored else open_.prompt_tokens - 1,
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of leading tokens that the prompt's blocks cover."""
        return len(self.blocks) // NAME_BYTES * BLOCK_TOKENS

    def page(self, index: int, page_tokens: int) -> bytes | None:
        """Name of page ``index``; None if it is not to be kept."""
        end = (index + 1) * page_tokens
        block = (end - 1) // BLOCK_TOKENS
        name = block_name(self.blocks, block)
        if not name and self.answers:
            name = answer_name(self.answers, block)
        if not self.space or not name:
            return None
        return self.space + name + bytes([end - block * BLOCK_TOKENS - 1])

    def found(self, page_tokens: int) -> Iterator[bytes]:
        """Names of the pages that may be found kept, in order."""
        for index in range(self.found_most // page_tokens):
            name = self.page(index, page_tokens)
            if name is None:
                return
            yield name


NO_NAMES = PageNames()
