"""Gives sessions the pages of the KV pool, and knows which page of which layer is whose.

It has no tensors. Page p of a session is page p in the pools of all layers that the session runs
here, and of no others: two sessions that run disjoint layers may have the same page. How much a
session may take, and who gives way when pages run out, is decided before
(:mod:`coordinator.admission.room`). Where possible a session's pages are consecutive (a run),
because a run is read without a copy.

A full page can be sealed with the digest of all tokens up to its end (:mod:`node.kv.prefix_hash`).
Another session with the same leading tokens then holds that page, too (vLLM's automatic prefix
caching). Sealed pages that nobody holds stay until the room is needed; the longest unused go first.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from node.kv.session_state import SessionState

_TAKEN, _CLAIMED = 1, 2
"""States of a page on a layer. Taken: given to a session, or kept for its digest. Claimed: a
session will probably grow into it."""


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Pages that one session holds, in the order of its tokens, and those that it takes next."""

    tokens: int
    """Maximum number of tokens of the session."""
    span: tuple[int, int]
    """Layers on which the session has pages."""
    home: range
    """Consecutive pages that the session prefers; empty if no such run was free."""
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    given: deque[int] = field(default_factory=deque)
    """Pages that the session was given beyond ``pages``."""
    run: bool = True
    """Whether ``pages`` are consecutive."""
    written: int = 0
    """Number of leading tokens whose KV is written; pages beyond hold an earlier session's data.
    Only the engine's thread changes ``written``, and it ends with the session."""
    layers: tuple[int, int] | None = None
    """Layers that the session runs here, set with its first rows."""
    state: SessionState | None = None
    """What its layers keep beside keys and values; None if that is nothing."""

    @property
    def page_count(self) -> int:
        """Number of pages that the session has, with those that it was given and has not used."""
        return len(self.pages) + len(self.given)


class BlockManager:
    """Gives pages of ``page_tokens`` tokens each on layers ``[start, end)`` to sessions."""

    def __init__(self, pages: int, page_tokens: int, layers: tuple[int, int] = (0, 1)) -> None:
        self._layers = layers
        self._state = np.zeros((layers[1] - layers[0], pages), dtype=np.uint8)
        self._reservations: dict[str, Reservation] = {}
        self._digests: dict[int, bytes] = {}
        self._sealed: dict[bytes, int] = {}
        self._holders: dict[int, int] = {}
        """Number of sessions that hold a sealed page."""
        self._unheld: dict[int, None] = {}  # sealed pages that nobody holds, longest unused first
        self.page_tokens = page_tokens

    @property
    def pages(self) -> int:
        """Number of pages of each layer."""
        return int(self._state.shape[1])

    @property
    def free_tokens(self) -> int:
        """Tokens that a session on all layers could take."""
        taken = int(np.count_nonzero(self._over(self._layers) & _TAKEN))
        return (self.pages - taken + len(self._unheld)) * self.page_tokens

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _cells(self, span: tuple[int, int]) -> Any:
        return self._state[span[0] - self._layers[0] : span[1] - self._layers[0]]

    def _over(self, span: tuple[int, int]) -> Any:
        """States of the pages on any layer of ``span``, ``[pages]``."""
        return np.bitwise_or.reduce(self._cells(span), axis=0)

    def open(
        self,
        session: str,
        tokens: int,
        span: tuple[int, int] | None = None,
        likely_tokens: int = 0,
    ) -> None:
        """Let ``session`` take pages for up to ``tokens`` tokens on the layers of ``span``, of all
        layers if it is None. It will prefer a run for ``likely_tokens``.

        Raises ValueError if the session is open already, or for layers that are not held.
        """
        if session in self._reservations:
            raise ValueError(f"session {session} holds pages already")
        span = self._layers if span is None else span
        if not self._layers[0] <= span[0] < span[1] <= self._layers[1]:
            raise ValueError(f"layers {list(span)} asked, {list(self._layers)} have pages")
        needed = self._pages_of(likely_tokens)
        at = self._over(span).tobytes().find(bytes(needed)) if needed else -1
        home = range(at, at + needed) if at >= 0 else range(0)
        self._cells(span)[:, home.start : home.stop] |= _CLAIMED
        self._reservations[session] = Reservation(tokens=tokens, span=span, home=home)

    def extend(self, session: str, tokens: int) -> bool:
        """Give pages for the first ``tokens`` tokens; False, and none given, if too few are free.

        Raises KeyError for an unknown session, ValueError beyond its maximum.
        """
        reservation = self._reservations[session]
        if tokens > reservation.tokens:
            raise ValueError(f"{tokens} tokens asked, {reservation.tokens} reserved")
        had = len(reservation.given)
        while reservation.page_count < self._pages_of(tokens):
            page = self._next_page(reservation)
            if page is None:
                while len(reservation.given) > had:
                    self._release(reservation, reservation.given.pop())
                return False
            self._cells(reservation.span)[:, page] |= _TAKEN
            reservation.given.append(page)
        return True

    def reserve(self, session: str, tokens: int) -> str | None:
        """Open a session and give it all its pages at once; returns why if too few are free."""
        free = self.free_tokens
        if self._pages_of(tokens) * self.page_tokens > free:
            if session in self._reservations:
                raise ValueError(f"session {session} holds pages already")
            return f"{tokens} tokens of KV asked, {free} are free"
        self.open(session, tokens, likely_tokens=tokens)
        self.extend(session, tokens)
        return None

    def grow(self, session: str, tokens: int) -> None:
        """Put the first ``tokens`` tokens of ``session`` on the pages that it was given.

        Raises KeyError for an unknown session, ValueError beyond what it was given.
        """
        reservation = self._reservations[session]
        lacking = self._pages_of(tokens) - len(reservation.pages)
        if tokens > reservation.tokens or lacking > len(reservation.given):
            raise ValueError(f"{tokens} tokens asked, {self.given_tokens(session)} reserved")
        for _ in range(lacking):
            self._hold(reservation, reservation.given.popleft())

    def given_tokens(self, session: str) -> int:
        """Tokens for which a session has pages. Raises KeyError for an unknown session."""
        reservation = self._reservations[session]
        return min(reservation.tokens, reservation.page_count * self.page_tokens)

    def _hold(self, reservation: Reservation, page: int) -> None:
        pages = reservation.pages
        reservation.run = not pages or (reservation.run and page == pages[-1] + 1)
        pages.append(page)

    def _next_page(self, reservation: Reservation) -> int | None:
        """A page that is free on the session's layers, if possible the next of its run."""
        home, cells = reservation.home, self._cells(reservation.span)
        last = reservation.given or reservation.pages
        wanted = last[-1] + 1 if last else (home.start if home else -1)
        if 0 <= wanted < self.pages:
            state = int(np.bitwise_or.reduce(cells[:, wanted]))
            if state == 0 or (state == _CLAIMED and wanted in home):
                return wanted
        while True:
            states: bytes = self._over(reservation.span).tobytes()
            for state in (0, _CLAIMED):
                if (page := states.find(state)) >= 0:
                    return page
            if not self._unheld:
                return None
            self._forget(next(iter(self._unheld)))

    def _release(self, reservation: Reservation, page: int) -> None:
        self._cells(reservation.span)[:, page] &= ~_TAKEN & 0xFF

    def _forget(self, page: int) -> None:
        """Drop the digest of a sealed page that nobody holds, which frees the page."""
        del self._unheld[page], self._holders[page]
        del self._sealed[self._digests.pop(page)]
        self._state[:, page] &= ~_TAKEN & 0xFF

    def free(self, session: str) -> None:
        """Free a session's pages; an unknown session is ignored."""
        reservation = self._reservations.pop(session, None)
        if reservation is None:
            return
        home = reservation.home
        self._cells(reservation.span)[:, home.start : home.stop] &= ~_CLAIMED & 0xFF
        # Last page first: if room is needed, the end of a prefix goes before its beginning.
        for page in reversed(reservation.pages):
            if page not in self._digests:
                self._release(reservation, page)
                continue
            self._holders[page] -= 1
            if not self._holders[page]:
                self._unheld[page] = None
        for page in reservation.given:
            self._release(reservation, page)

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
        """Seal a session's full page ``index`` with ``digest``, unless either is sealed already.

        Only a session on all layers can leave its pages to others.
        """
        reservation = self._reservations[session]
        page = reservation.pages[index]
        whole = reservation.span == self._layers
        if whole and digest not in self._sealed and page not in self._digests:
            self._sealed[digest] = page
            self._digests[page] = digest
            self._holders[page] = 1

    def adopt(self, session: str, digests: Iterable[bytes]) -> int:
        """Let ``session`` hold the sealed pages of its next tokens instead of pages that it was
        given; returns how many it got.

        Stops at the first digest that no page has, and where the session was given no more. Raises
        KeyError for an unknown session.
        """
        reservation = self._reservations[session]
        if reservation.span != self._layers:
            return 0
        adopted = 0
        for digest in digests:
            page = self._sealed.get(digest)
            if page is None or not reservation.given:
                break
            self._release(reservation, reservation.given.popleft())
            self._unheld.pop(page, None)
            self._holders[page] += 1
            self._hold(reservation, page)
            adopted += 1
        return adopted

    def get(self, session: str) -> Reservation | None:
        """A session's reservation; None if it has none, or no longer."""
        return self._reservations.get(session)

    def check(self) -> None:
        """Raise AssertionError if a page is lost or held too often."""
        taken = np.zeros_like(self._state)
        claimed = np.zeros_like(self._state)
        holders = dict.fromkeys(self._digests, 0)
        first = self._layers[0]
        for reservation in self._reservations.values():
            rows = slice(reservation.span[0] - first, reservation.span[1] - first)
            if reservation.page_count > self._pages_of(reservation.tokens):
                raise AssertionError("a session was given more than it may hold")
            for page in (*reservation.pages, *reservation.given):
                if page in self._digests:
                    holders[page] += 1
                else:
                    taken[rows, page] += 1
            claimed[rows, reservation.home.start : reservation.home.stop] += 1
        if taken.max(initial=0) > 1:
            raise AssertionError("a page is held twice")
        if claimed.max(initial=0) > 1:
            raise AssertionError("a page is claimed twice")
        taken[:, list(self._digests)] += 1
        if holders != self._holders or set(self._unheld) != {
            p for p, n in holders.items() if not n
        }:
            raise AssertionError("holders of sealed pages do not add up")
        if not np.array_equal(taken > 0, self._state & _TAKEN > 0) or taken.max(initial=0) > 1:
            raise AssertionError("a page is lost")
        if not np.array_equal(claimed > 0, self._state & _CLAIMED > 0):
            raise AssertionError("claims do not add up")
        if {page: digest for digest, page in self._sealed.items()} != self._digests:
            raise AssertionError("digests do not add up")
