"""Whether the accounts of KV add up, recomputed from what each session holds."""

import numpy as np

from node.kv.block_manager import _CLAIMED, _KEPT, _TAKEN, BlockManager
from node.kv.pool import KvPool


def check_pages(accounts: BlockManager) -> None:
    """Raise AssertionError if a page is lost or held too often."""
    taken = np.zeros_like(accounts._state)
    claimed = np.zeros_like(accounts._state)
    kept = np.zeros_like(accounts._state)
    holders = dict.fromkeys(accounts._names, 0)
    for reservation in accounts._reservations.values():
        if reservation.page_count > accounts._pages_of(reservation.tokens):
            raise AssertionError("a session was given more than it may hold")
        for page in (*reservation.pages, *reservation.given):
            cell = (reservation.span, page)
            if cell in holders:
                holders[cell] += 1
            else:
                taken[accounts._rows(reservation.span), page] += 1
        home = reservation.home
        claimed[accounts._rows(reservation.span), home.start : home.stop] += 1
    for (span, page), count in holders.items():
        (taken if count else kept)[accounts._rows(span), page] += 1
    if (taken + kept).max(initial=0) > 1:
        raise AssertionError("a page is held twice")
    if claimed.max(initial=0) > 1:
        raise AssertionError("a page is claimed twice")
    if holders != accounts._holders or set(accounts._unheld) != {
        cell for cell, count in holders.items() if not count
    }:
        raise AssertionError("holders of sealed pages do not add up")
    for cells, state in ((taken, _TAKEN), (kept, _KEPT), (claimed, _CLAIMED)):
        if not np.array_equal(cells > 0, accounts._state & state > 0):
            raise AssertionError("a page is lost")
    named = {(span, page): name for (span, name), page in accounts._sealed.items()}
    if named != accounts._names:
        raise AssertionError("names do not add up")


def check_pool(pool: KvPool) -> None:
    """Raise AssertionError if the accounts of a pool are inconsistent."""
    with pool._lock:
        check_pages(pool._accounts)
