"""Accounts of the paged KV pool: who holds which pages. No tensors here.

One space of page indices is shared by all layers that a peer holds: page p of a session is page p
in every layer's pool. A session's pages are taken when it opens, for its whole length, so that
nothing is refused after work was done; in one run where one is free, because a run is read
without a copy.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Pages of one session, in the order of its tokens."""

    pages: tuple[int, ...]
    tokens: int
    run: bool
    """Whether the pages are consecutive."""
    written: int = 0
    """Tokens whose KV is there; behind them the pages hold what an earlier session left. Only the
    engine's thread changes it, and it dies with the session."""


class KvAccounts:
    """Pages of ``page_tokens`` tokens each."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._free = bytearray(pages)  # 0 is free, 1 is taken
        self._free_pages = pages
        self._reservations: dict[str, Reservation] = {}
        self.page_tokens = page_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that a new session could reserve."""
        return self._free_pages * self.page_tokens

    def reserve(self, session: str, tokens: int) -> str | None:
        """Take pages for ``tokens`` tokens; returns the reason when there are too few.

        Raises ValueError for a session that holds pages already.
        """
        if session in self._reservations:
            raise ValueError(f"session {session} holds pages already")
        needed = -(-tokens // self.page_tokens)
        if needed > self._free_pages:
            return f"{tokens} tokens of KV asked, {self.free_tokens} are free"
        at = self._free.find(bytes(needed))
        pages = tuple(range(at, at + needed)) if at >= 0 else self._scattered(needed)
        for page in pages:
            self._free[page] = 1
        self._free_pages -= needed
        self._reservations[session] = Reservation(pages=pages, tokens=tokens, run=at >= 0)
        return None

    def _scattered(self, needed: int) -> tuple[int, ...]:
        pages: list[int] = []
        at = -1
        while len(pages) < needed:
            at = self._free.find(b"\0", at + 1)
            pages.append(at)
        return tuple(pages)

    def free(self, session: str) -> None:
        """Give back a session's pages; unknown sessions are ignored."""
        reservation = self._reservations.pop(session, None)
        if reservation is None:
            return
        for page in reservation.pages:
            self._free[page] = 0
        self._free_pages += len(reservation.pages)

    def get(self, session: str) -> Reservation | None:
        """A session's pages, None when it has none (any more)."""
        return self._reservations.get(session)

    def check(self) -> None:
        """Raise AssertionError when a page is held twice or the counts do not add up."""
        held = [page for r in self._reservations.values() for page in r.pages]
        if len(held) != len(set(held)):
            raise AssertionError("a page is held twice")
        if sum(self._free) != len(held) or self._free_pages != len(self._free) - len(held):
            raise AssertionError("free and held pages do not add up")
