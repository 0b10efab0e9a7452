"""The paged KV pool of one peer: every layer's rows, and the sessions that hold them.

Reserving and freeing come from the event loop's thread, everything else from the engine's; a lock
keeps the accounts consistent. A session that is freed while a step runs may lose its pages to
another session at once; that other session's rows are written by a later step.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from node.kv import export
from node.kv.block_manager import BlockManager, Reservation
from node.kv.export import KvBytes, KvRows
from node.kv.layer_pool import LayerPool
from node.kv.page_names import NO_NAMES, PageNames
from node.kv.session_state import SessionState

ENDED = "this session holds no KV here"


def pool_rows(pages: Sequence[int], tokens: int, page_tokens: int) -> torch.Tensor:
    """Pool rows of the first ``tokens`` tokens that ``pages`` hold: ``[tokens]`` int64, on the
    CPU."""
    used = torch.tensor(pages[: -(-tokens // page_tokens)])
    return (used[:, None] * page_tokens + torch.arange(page_tokens)).flatten()[:tokens]


class KvPool:
    """KV pools by layer, each with ``pages`` pages of ``page_tokens`` tokens."""

    def __init__(
        self,
        pools: Mapping[int, LayerPool],
        pages: int,
        page_tokens: int,
        new_state: Callable[[], SessionState | None] = lambda: None,
        *,
        keeps: bool = True,
    ) -> None:
        """``new_state`` makes what a session keeps beside its pages. ``keeps``: whether pages with
        a name outlive their session while there is room."""
        self._pools = pools
        self._page_tokens = page_tokens
        self._new_state = new_state
        self._keeps = keeps
        self._lock = threading.Lock()
        layers = (min(pools), max(pools) + 1) if pools else (0, 1)
        self._accounts = BlockManager(pages, page_tokens, layers)
        self._names: dict[str, PageNames] = {}
        """Names of the sessions' pages, for those whose pages are kept."""

    @property
    def free_tokens(self) -> int:
        """Tokens that a new session could reserve."""
        with self._lock:
            return self._accounts.free_tokens

    @property
    def tokens(self) -> int:
        """Tokens that all pages of a layer hold together."""
        return self._accounts.pages * self._page_tokens

    def get(self, session: str) -> Reservation | None:
        """A session's reservation; None if it has none, or no longer."""
        with self._lock:
            return self._accounts.get(session)

    def reserve(self, session: str, tokens: int) -> str | None:
        """Give a session pages for ``tokens`` tokens on all layers; if they are lacking, return why
        and how much is free."""
        with self._lock:
            refused = self._accounts.reserve(session, tokens)
            self._give_state(session)
            return refused

    def open(
        self,
        session: str,
        tokens: int,
        layers: tuple[int, int],
        likely_tokens: int = 0,
        names: PageNames = NO_NAMES,
    ) -> int:
        """Let a session take pages for up to ``tokens`` tokens on ``layers``; see :meth:`extend`.

        Pages for ``likely_tokens`` are kept together for it where that is possible. Returns the
        number of leading tokens whose KV was kept here under ``names``: they need not run.
        """
        names = names if self._keeps else NO_NAMES
        with self._lock:
            found = names.found(self._page_tokens)
            pages = self._accounts.open(session, tokens, layers, likely_tokens, found)
            self._give_state(session)
            if names.space:
                self._names[session] = names
            return pages * self._page_tokens

    def _give_state(self, session: str) -> None:
        if (reservation := self._accounts.get(session)) is not None:
            reservation.state = self._new_state()

    def resumable(self, session: str, position: int) -> int:
        """The last position up to ``position`` from which a session's rows can go on here: the
        position itself, unless its layers keep a state, which is known at few positions."""
        with self._lock:
            reservation = self._accounts.get(session)
            if reservation is None or reservation.state is None:
                return position
            return reservation.state.resumable(position)

    def keep_no_more(self, session: str) -> None:
        """Keep no further pages of a session for others."""
        with self._lock:
            self._names.pop(session, None)

    def settle(self, session: str, tokens: int) -> None:
        """Nothing takes back a session's first ``tokens`` tokens, as far as they are written."""
        with self._lock:
            if (reservation := self._accounts.get(session)) is not None:
                known = min(tokens, reservation.written)
                reservation.settled = max(reservation.settled, known)

    def extend(self, session: str, tokens: int) -> bool:
        """Give a session pages for its first ``tokens`` tokens; False if too few are free, or the
        session has ended."""
        with self._lock:
            return self._accounts.get(session) is not None and self._accounts.extend(
                session, tokens
            )

    def free(self, session: str) -> None:
        """Free all that a session holds, at once; its items that still come get an error. Pages
        with a name stay while there is room."""
        with self._lock:
            reservation, names = self._accounts.get(session), self._names.pop(session, None)
            if reservation is not None and names is not None:
                self._seal(session, reservation, names, reservation.settled)
            self._accounts.free(session)

    def grow(self, session: str, reservation: Reservation, tokens: int) -> bool:
        """Assign pages for a session's first ``tokens`` tokens; False if it ended meanwhile."""
        with self._lock:
            if self._accounts.get(session) is not reservation:
                return False
            self._accounts.grow(session, tokens)
        return True

    def rewind(self, session: str, reservation: Reservation, position: int) -> str | None:
        """Let a session write from an earlier position on again; returns why if it may not."""
        with self._lock:
            if self._accounts.get(session) is not reservation:
                return "this session has ended"
            if reservation.state is not None and reservation.state.resumable(position) != position:
                return f"position {position} was run already, {reservation.written} comes next"
            try:
                moved = self._accounts.rewind(session, position)
            except ValueError as error:
                return str(error)
            if moved is not None:  # under the lock: the page left may be given to another
                source, target = (page * self._page_tokens for page in moved)
                inside = position % self._page_tokens
                for layer in range(*reservation.span):
                    self._pools[layer].copy(source, target, inside)
        return None

    def slots(self, reservation: Reservation, tokens: int) -> torch.Tensor:
        """Pool rows of a session's first ``tokens`` tokens: ``[tokens]`` int64, on the CPU."""
        return pool_rows(reservation.pages, tokens, self._page_tokens)

    def take(self, session: str, position: int, tokens: int) -> KvRows:
        """Copy a session's KV of up to ``tokens`` tokens from ``position`` on; the KV stays here.

        Raises KeyError if the session holds no KV, ValueError if nothing is written there yet.
        """
        reservation = self.get(session)
        if reservation is None:
            raise KeyError(session)
        if reservation.state is not None:
            raise ValueError("this model's layers keep a state, which is not copied")
        last = min(position + tokens, reservation.written)
        if not 0 <= position < last or reservation.layers is None:
            raise ValueError(f"KV from {position} on asked, {reservation.written} are written")
        slots = self.slots(reservation, last)[position:]
        return export.take(self._pools, slots, *reservation.layers, position)

    def put(self, session: str, came: KvRows | KvBytes) -> str | None:
        """Append KV that another pool gave to a session's; returns why if that fails.

        Rows must follow the rows already written, cover the session's layers, be finite, and have
        the pools' shape and dtype. The session then goes on as if it had run those tokens here.
        """
        reservation = self.get(session)
        if reservation is not None and reservation.state is not None:
            return "this model's layers keep a state, which is not copied"
        return self.put_made_up(session, came)

    def put_made_up(self, session: str, came: KvRows | KvBytes, like: str = "") -> str | None:
        """:meth:`put` of rows that stand for a context, to time what runs behind them: a state that
        the session's layers keep stays as it is, or becomes that of the session ``like``, and
        counts as that behind the rows."""
        reservation = self.get(session)
        if reservation is None:
            return ENDED
        rows = export.unpack_kv(self._pools, came) if isinstance(came, KvBytes) else came
        if isinstance(rows, str):
            return rows
        if (reason := export.kv_refusal(self._pools, rows)) is not None:
            return reason
        span, last = (rows.start, rows.end), rows.position + rows.tokens
        if reservation.layers is not None and reservation.layers != span:
            return f"KV of layers {list(span)} came, the session runs {list(reservation.layers)}"
        if rows.position != reservation.written:
            return f"KV from {rows.position} on came, {reservation.written} comes next"
        if last > reservation.tokens:
            return f"KV up to {last} came, {reservation.tokens} reserved"
        if span[0] < reservation.span[0] or reservation.span[1] < span[1]:
            return f"KV of layers {list(span)} came, {list(reservation.span)} reserved"
        try:
            if not self.grow(session, reservation, last):
                return ENDED
        except ValueError as error:
            return str(error)
        export.put(self._pools, self.slots(reservation, last)[rows.position :], rows)
        reservation.layers, reservation.written = span, last
        reservation.settled = rows.position
        if reservation.state is not None:
            other = self.get(like)
            if other is not None and other.state is not None:
                reservation.state = copy.deepcopy(other.state)
            reservation.state.ran(last)
        return None

    def ran(self, session: str, reservation: Reservation, position: int, end: int) -> None:
        """Record that the rows ``[position, end)`` are written, and seal the prompt's pages."""
        reservation.written, reservation.settled = end, position
        if reservation.state is not None:
            reservation.state.ran(end)
        with self._lock:
            names = self._names.get(session)
            if names is not None and self._accounts.get(session) is reservation:
                self._seal(session, reservation, names, min(end, names.prompt_tokens))

    def _seal(self, session: str, reservation: Reservation, names: PageNames, tokens: int) -> None:
        """Seal the pages that the first ``tokens`` tokens fill."""
        for index in range(reservation.sealed, tokens // self._page_tokens):
            if (name := names.page(index, self._page_tokens)) is None:
                return
            self._accounts.seal(session, index, name)
            reservation.sealed = index + 1
