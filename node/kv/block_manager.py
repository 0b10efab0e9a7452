"""Gives sessions the pages of the KV pool, and knows which page of which layer is whose.

It has no tensors. Page p of a session is page p in the pools of all layers that the session runs
here, and of no others: two sessions that run disjoint layers may have the same page. How much a
session may take, and who gives way when pages run out, is decided before
(:mod:`coordinator.policies.admission.room`). Where possible a session's pages are consecutive (a
run), because a run is read without a copy.

A full page can be sealed with a name that stands for all tokens up to its end
(:mod:`node.kv.page_names`). Another session over the same layers that begins with the same names
then holds that page, too (vLLM's automatic prefix caching). Sealed pages that nobody holds stay
until the room is needed; the longest unused go first. A sealed page is never written: a session
that goes back into one gets another page, unless nobody else holds it, which ends the seal.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from node.kv.session_state import SessionState

_TAKEN, _CLAIMED, _KEPT = 1, 2, 4
"""States of a page on a layer. Taken: given to a session. Claimed: a session will probably grow
into it. Kept: sealed, and no session holds it."""

Layers = tuple[int, int]
Cell = tuple[Layers, int]
"""A sealed page: the layers of the session that wrote it, and its number."""


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Pages that one session holds, in the order of its tokens, and those that it takes next."""

    tokens: int
    """Maximum number of tokens of the session."""
    span: Layers
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
    settled: int = 0
    """Number of leading tokens that nothing takes back: those before the newest rows."""
    sealed: int = 0
    """Number of leading pages that were sealed as far as they can be."""
    layers: Layers | None = None
    """Layers that the session runs here, set with its first rows."""
    state: SessionState | None = None
    """Numbers that its layers keep beside keys and values; None if there are none."""

    @property
    def page_count(self) -> int:
        """Number of pages that the session has, with those that it was given and has not used."""
        return len(self.pages) + len(self.given)


class BlockManager:
    """Gives pages of ``page_tokens`` tokens each on layers ``[start, end)`` to sessions."""

    def __init__(self, pages: int, page_tokens: int, layers: Layers = (0, 1)) -> None:
        self._layers = layers
        self._state = np.zeros((layers[1] - layers[0], pages), dtype=np.uint8)
        self._reservations: dict[str, Reservation] = {}
        self._names: dict[Cell, bytes] = {}
        self._sealed: dict[tuple[Layers, bytes], int] = {}
        """Sealed pages by the layers that they have and their name."""
        self._holders: dict[Cell, int] = {}
        """Number of sessions that hold a sealed page."""
        self._unheld: dict[Cell, None] = {}  # sealed pages that nobody holds, longest unused first
        self.page_tokens = page_tokens

    @property
    def pages(self) -> int:
        return int(self._state.shape[1])

    @property
    def free_tokens(self) -> int:
        """Tokens that a session on all layers could take."""
        taken = int(np.count_nonzero(self._over(self._layers) & _TAKEN))
        return (self.pages - taken) * self.page_tokens

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _rows(self, span: Layers) -> slice:
        return slice(span[0] - self._layers[0], span[1] - self._layers[0])

    def _cells(self, span: Layers) -> Any:
        return self._state[self._rows(span)]

    def _over(self, span: Layers) -> Any:
        """States of the pages on any layer of ``span``, ``[pages]``."""
        return np.bitwise_or.reduce(self._cells(span), axis=0)

    def open(
        self,
        session: str,
        tokens: int,
        span: Layers | None = None,
        likely_tokens: int = 0,
        names: Iterable[bytes] = (),
    ) -> int:
        """Let ``session`` take pages for up to ``tokens`` tokens on the layers of ``span``, of all
        layers if it is None. It will prefer a run for ``likely_tokens``.

        ``names`` are those of its first pages. It holds the sealed ones up to the first that is not
        here; returns their number. Raises ValueError if the session is open already, or for layers
        that are not held.
        """
        if session in self._reservations:
            raise ValueError(f"session {session} holds pages already")
        span = self._layers if span is None else span
        if not self._layers[0] <= span[0] < span[1] <= self._layers[1]:
            raise ValueError(f"layers {list(span)} asked, {list(self._layers)} have pages")
        reservation = Reservation(tokens=tokens, span=span, home=range(0))
        for name in names:
            page = self._sealed.get((span, name))
            if page is None or len(reservation.pages) == self._pages_of(tokens):
                break
            self._unheld.pop((span, page), None)
            self._holders[span, page] += 1
            self._cells(span)[:, page] ^= _TAKEN | _KEPT if self._holders[span, page] == 1 else 0
            self._hold(reservation, page)
        found = len(reservation.pages)
        reservation.written = reservation.settled = found * self.page_tokens
        reservation.sealed = found
        needed = self._pages_of(likely_tokens) - found
        if needed > 0:
            reservation.home = self._home(reservation, needed)
            self._cells(span)[:, reservation.home.start : reservation.home.stop] |= _CLAIMED
        self._reservations[session] = reservation
        return found

    def _home(self, reservation: Reservation, needed: int) -> range:
        """A run of ``needed`` free pages, if possible after those that are held; empty if there is
        none. Kept pages go for it only as far as the session will need them anyway."""
        span, run = reservation.span, bytes(needed)
        for last_try in (False, True):
            states: bytes = self._over(span).tobytes()
            after = reservation.pages[-1] + 1 if reservation.pages else 0
            at = after if states.startswith(run, after) else states.find(run)
            if at >= 0:
                return range(at, at + needed)
            if last_try or not self._unheld:
                break
            lacking = max(0, needed - states.count(0))
            kept = (cell for cell in self._unheld if _meet(cell[0], span))
            for cell in list(islice(kept, lacking)):
                self._unseal(cell)
        return range(0)

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
        for wanted in (last[-1] + 1 if last else -1, home.start if home else -1):
            if 0 <= wanted < self.pages:
                state = int(np.bitwise_or.reduce(cells[:, wanted]))
                if state == 0 or (state == _CLAIMED and wanted in home):
                    return wanted
        while True:
            states: bytes = self._over(reservation.span).tobytes()
            for state in (0, _CLAIMED):
                if (page := states.find(state)) >= 0:
                    return page
            oldest = next((c for c in self._unheld if _meet(c[0], reservation.span)), None)
            if oldest is None:
                return None
            self._unseal(oldest)

    def _release(self, reservation: Reservation, page: int) -> None:
        self._cells(reservation.span)[:, page] &= ~_TAKEN & 0xFF

    def _unseal(self, cell: Cell) -> None:
        """Drop the name of a sealed page; one that nobody holds is free then."""
        span, page = cell
        del self._holders[cell]
        del self._sealed[span, self._names.pop(cell)]
        if cell in self._unheld:
            del self._unheld[cell]
            self._cells(span)[:, page] &= ~_KEPT & 0xFF

    def free(self, session: str) -> None:
        """Free a session's pages; an unknown session is ignored."""
        reservation = self._reservations.pop(session, None)
        if reservation is None:
            return
        home = reservation.home
        self._cells(reservation.span)[:, home.start : home.stop] &= ~_CLAIMED & 0xFF
        # Last page first: if room is needed, the end of a prefix goes before its beginning.
        for page in reversed(reservation.pages):
            cell = (reservation.span, page)
            if cell not in self._names:
                self._release(reservation, page)
            else:
                self._let_go(cell)
        for page in reservation.given:
            self._release(reservation, page)

    def _let_go(self, cell: Cell) -> None:
        """Count one session fewer that holds a sealed page."""
        self._holders[cell] -= 1
        if not self._holders[cell]:
            self._unheld[cell] = None
            self._cells(cell[0])[:, cell[1]] ^= _TAKEN | _KEPT

    def rewind(self, session: str, position: int) -> tuple[int, int] | None:
        """Let ``session`` write from ``position`` on again.

        Returns the page that it wrote ``position`` to and the one that it has instead, where others
        hold the first: what stands before ``position`` is to be copied. Raises ValueError if too
        few pages are free for that.
        """
        reservation = self._reservations[session]
        reservation.written = position
        reservation.settled = min(reservation.settled, position)
        first, inside = divmod(position, self.page_tokens)
        reservation.sealed = min(reservation.sealed, first)
        moved = None
        for index, page in enumerate(reservation.pages[first:], start=first):
            cell = (reservation.span, page)
            if cell not in self._names:
                continue
            if self._holders[cell] == 1:
                self._unseal(cell)
                continue
            fresh = self._next_page(reservation)
            if fresh is None:
                raise ValueError(f"position {position} is shared, and no page is free for it")
            self._cells(reservation.span)[:, fresh] |= _TAKEN
            reservation.pages[index] = fresh
            self._let_go(cell)
            if index == first and inside:
                moved = page, fresh
            reservation.run = False  # at worst its pages are read one by one
        return moved

    def seal(self, session: str, index: int, name: bytes) -> None:
        """Seal a session's full page ``index`` with ``name``, unless either is sealed already."""
        reservation = self._reservations[session]
        span, page = reservation.span, reservation.pages[index]
        if (span, name) not in self._sealed and (span, page) not in self._names:
            self._sealed[span, name] = page
            self._names[span, page] = name
            self._holders[span, page] = 1

    def get(self, session: str) -> Reservation | None:
        """A session's reservation; None if it has none, or no longer."""
        return self._reservations.get(session)


def _meet(one: Layers, other: Layers) -> bool:
    return one[0] < other[1] and other[0] < one[1]
