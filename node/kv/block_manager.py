"""Accounts for the pages of the KV pool: how many each session may hold, and which it holds.

It has no tensors. All layers that a peer holds share one space of page indices: page p of a session
is page p in every layer's pool. Opening a session reserves room for its whole length, so that an
admitted session is never refused later; pages are assigned as its tokens come. Where possible a
session's pages are consecutive (a run), because a run is read without a copy.

A full page can be sealed with the digest of all tokens up to its end (:mod:`node.kv.prefix_hash`).
Another session with the same leading tokens then holds that page, too (vLLM's automatic prefix
caching). Sealed pages that nobody holds stay until the room is needed; the longest unused go first.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

_TAKEN, _CLAIMED = 1, 2
"""States of a page. Taken: held, or kept for its digest. Claimed: a session may grow into it."""


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Pages that one session may hold and holds, in the order of its tokens."""

    tokens: int
    """Maximum number of tokens of the session."""
    home: range
    """Consecutive pages that the session prefers; empty if no such run was free."""
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    run: bool = True
    """Whether ``pages`` are consecutive."""
    written: int = 0
    """Number of leading tokens whose KV is written; pages beyond hold an earlier session's data.
    Only the engine's thread changes ``written``, and it ends with the session."""
    layers: tuple[int, int] | None = None
    """Layers that the session runs here, set with its first rows."""


class BlockManager:
    """Assigns pages of ``page_tokens`` tokens each to sessions."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._state = bytearray(pages)
        self._holders = [0] * pages
        self._unpromised = pages
        self._reservations: dict[str, Reservation] = {}
        self._digests: dict[int, bytes] = {}
        self._sealed: dict[bytes, int] = {}
        self._unheld: dict[int, None] = {}  # sealed pages that nobody holds, longest unused first
        self.page_tokens = page_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that a new session could reserve."""
        return self._unpromised * self.page_tokens

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def reserve(self, session: str, tokens: int) -> str | None:
        """Reserve room for ``tokens`` tokens; returns why if there is too little.

        Raises ValueError if the session has a reservation already.
        """
        if session in self._reservations:
            raise ValueError(f"session {session} holds pages already")
        needed = self._pages_of(tokens)
        if needed > self._unpromised:
            return f"{tokens} tokens of KV asked, {self.free_tokens} are free"
        at = self._state.find(bytes(needed))
        home = range(at, at + needed) if at >= 0 else range(0)
        for page in home:
            self._state[page] |= _CLAIMED
        self._unpromised -= needed
        self._reservations[session] = Reservation(tokens=tokens, home=home)
        return None

    def grow(self, session: str, tokens: int) -> None:
        """Assign pages for the first ``tokens`` tokens of ``session``, which keeps those it has.

        Raises KeyError for an unknown session, ValueError beyond its reservation.
        """
        reservation = self._reservations[session]
        if tokens > reservation.tokens:
            raise ValueError(f"{tokens} tokens asked, {reservation.tokens} reserved")
        while len(reservation.pages) < self._pages_of(tokens):
            page = self._next_page(reservation)
            self._state[page] |= _TAKEN
            self._hold(reservation, page)

    def _hold(self, reservation: Reservation, page: int) -> None:
        pages = reservation.pages
        reservation.run = not pages or (reservation.run and page == pages[-1] + 1)
        pages.append(page)
        self._holders[page] += 1

    def _next_page(self, reservation: Reservation) -> int:
        """A page that nobody holds; one exists, because reservations never exceed the pages."""
        pages, home = reservation.pages, reservation.home
        wanted = pages[-1] + 1 if pages else (home.start if home else -1)
        if wanted in home and not self._state[wanted] & _TAKEN:
            return wanted
        for state in (0, _CLAIMED):
            if (page := self._state.find(state)) >= 0:
                return page
        page = next(iter(self._unheld))
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        """Drop the digest of a sealed page that nobody holds, which frees the page."""
        del self._unheld[page]
        del self._sealed[self._digests.pop(page)]
        self._state[page] &= ~_TAKEN

    def free(self, session: str) -> None:
        """Free a session's pages and reservation; an unknown session is ignored."""
        reservation = self._reservations.pop(session, None)
        if reservation is None:
            return
        for page in reservation.home:
            self._state[page] &= ~_CLAIMED
        # Last page first: if room is needed, the end of a prefix goes before its beginning.
        for page in reversed(reservation.pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._digests:
                    self._unheld[page] = None
                else:
                    self._state[page] &= ~_TAKEN
        self._unpromised += self._pages_of(reservation.tokens)

    def rewind(self, session: str, position: int) -> str | None:
        """Let ``session`` write from ``position`` on again; returns why if it shares a page."""
        reservation = self._reservations[session]
        again = reservation.pages[position // self.page_tokens :]
        if any(page in self._digests for page in again):
            return (
                f"position {position} was run already and is shared, {reservation.written} comes"
                " next"
            )
        reservation.written = position
        return None

    def seal(self, session: str, index: int, digest: bytes) -> None:
        """Seal a session's full page ``index`` with ``digest``, unless either is sealed already."""
        page = self._reservations[session].pages[index]
        if digest not in self._sealed and page not in self._digests:
            self._sealed[digest] = page
            self._digests[page] = digest

    def adopt(self, session: str, digests: Iterable[bytes]) -> int:
        """Let ``session`` hold the sealed pages of its next tokens; returns how many it got.

        Stops at the first digest that no page has. Raises KeyError for an unknown session,
        ValueError beyond its reservation.
        """
        reservation = self._reservations[session]
        adopted = 0
        for digest in digests:
            page = self._sealed.get(digest)
            if page is None:
                break
            if len(reservation.pages) >= self._pages_of(reservation.tokens):
                raise ValueError(f"pages beyond the {reservation.tokens} tokens reserved")
            self._unheld.pop(page, None)
            self._hold(reservation, page)
            adopted += 1
        return adopted

    def get(self, session: str) -> Reservation | None:
        """A session's reservation; None if it has none, or no longer."""
        return self._reservations.get(session)

    def check(self) -> None:
        """Raise AssertionError if a page is lost or held too often."""
        holders = [0] * len(self._state)
        for reservation in self._reservations.values():
            if len(reservation.pages) > self._pages_of(reservation.tokens):
                raise AssertionError("a session holds more than it was promised")
            for page in reservation.pages:
                holders[page] += 1
        if holders != self._holders:
            raise AssertionError("holders do not add up")
        for page, count in enumerate(holders):
            if count > 1 and page not in self._digests:
                raise AssertionError("a page is held twice")
            kept = page in self._unheld
            if kept and (count or page not in self._digests):
                raise AssertionError("a page is kept for nobody")
            if bool(self._state[page] & _TAKEN) != bool(count or kept):
                raise AssertionError("a page is lost")
        promised = sum(self._pages_of(r.tokens) for r in self._reservations.values())
        if self._unpromised != len(self._state) - promised or self._unpromised < 0:
            raise AssertionError("promises do not add up")
        claimed = [page for r in self._reservations.values() for page in r.home]
        if sum(bool(state & _CLAIMED) for state in self._state) != len(claimed):
            raise AssertionError("claims do not add up")
        if {page: digest for digest, page in self._sealed.items()} != self._digests:
            raise AssertionError("digests do not add up")
