"""Keeps the records that this process reads up to date.

A key that is read is *followed* for a while. Full peers refresh all followed keys in the
background, a little at a time, so that reads do not wait; clients and light peers refresh them when
they read. Either way one request covers all followed keys, and known records are not sent again
(anti-entropy as in Demers et al., "Epidemic algorithms for replicated database maintenance", 1987).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from dht.errors import NetworkError
from dht.messages.peer import PEER_BOUNDS, SignedRecord
from dht.process.supervision import loop_s, seen
from dht.records.signed import RecordGuard

Refresh = Callable[[tuple[str, ...]], Awaitable[None]]
"""Refreshes the records under some keys; raises NetworkError where no peer could be asked."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Times in seconds."""

    fresh_s: float
    """Time after a refresh for which a key is read without asking other peers."""
    followed_s: float = 60.0
    """Time after its last read for which a key is followed."""
    every_s: float = 1.0
    """Period of refreshes in the background."""


class Replica:
    """The followed keys and when they were refreshed; ``guard`` holds the records themselves."""

    def __init__(
        self, guard: RecordGuard, now: Callable[[], float], refresh: Refresh, config: ReplicaConfig
    ) -> None:
        """``now`` is the network's time in Unix seconds."""
        self._guard = guard
        self._now = now
        self._refresh = refresh
        self._config = config
        self._read_s: dict[str, float] = {}
        self._updated_s: dict[str, float] = {}
        self._wanted: set[str] = set()
        """Keys that readers wait for: they may be more than one request takes."""
        self._refreshing: tuple[tuple[str, ...], asyncio.Task[None] | None] = (), None

    def living(self, key: str) -> Mapping[str, SignedRecord]:
        """The newest living records under ``key`` that are known here, by author."""
        return self._guard.living(key, self._now())

    def fresh(self, key: str) -> bool:
        """Whether ``key`` was refreshed within ``fresh_s``: others may be answered from here."""
        return loop_s() - self._updated_s.get(key, -1e9) < self._config.fresh_s

    async def read(self, key: str) -> Mapping[str, bytes]:
        """The payloads under ``key`` by author; refreshes first where they are not fresh.

        Raises NetworkError where no peer could be asked.
        """
        self._follow(key)
        while not self.fresh(key):
            self._wanted.add(key)
            keys, refreshing = self._shared_refresh()
            # Shielded: a reader that leaves must not end the refresh for the others.
            await asyncio.shield(refreshing)
            if key in keys:
                break
        return {author: record.payload for author, record in self.living(key).items()}

    async def run(self) -> None:
        """Refresh all followed keys every ``every_s`` until cancelled."""
        while True:
            await asyncio.sleep(self._config.every_s)
            keys = self.followed()
            if not keys:
                continue
            try:
                await self._refresh_all(keys)
            except (NetworkError, TimeoutError) as error:  # or the refreshes would end for good
                _log.debug("no records of others: %s", error)

    def _follow(self, key: str) -> None:
        # To the end: ordered by last read.
        self._read_s.pop(key, None)
        self._read_s[key] = loop_s()

    def follows(self, key: str) -> bool:
        """Whether ``key`` was read lately, or is waited for."""
        since_s = loop_s() - self._config.followed_s
        return self._read_s.get(key, -1e9) >= since_s or key in self._wanted

    def followed(self) -> tuple[str, ...]:
        """The followed keys, ``PEER_BOUNDS.keys_asked_max`` at most: the last read ones."""
        since_s = loop_s() - self._config.followed_s
        self._read_s = {
            key: at_s
            for key, at_s in self._read_s.items()
            if at_s >= since_s or key in self._wanted
        }
        self._updated_s = {k: at_s for k, at_s in self._updated_s.items() if k in self._read_s}
        return tuple(self._read_s)[-PEER_BOUNDS.keys_asked_max :]

    def _shared_refresh(self) -> "tuple[tuple[str, ...], asyncio.Task[None]]":
        """The refresh that readers share now, and its keys. One that has ended is not waited for,
        as that would not yield."""
        keys, shared = self._refreshing
        if shared is None or shared.done():
            keys = self._due()
            shared = asyncio.create_task(self._refresh_all(keys))
            shared.add_done_callback(seen)
            self._refreshing = keys, shared
        return keys, shared

    def _due(self) -> tuple[str, ...]:
        """The keys of the next refresh: those that readers wait for, who read first come first, and
        with them the last read ones."""
        recent = self.followed()
        wanted = [key for key in self._read_s if key in self._wanted]
        first = [*dict.fromkeys((*wanted, *reversed(recent)))][: PEER_BOUNDS.keys_asked_max]
        return tuple(key for key in self._read_s if key in first)

    async def _refresh_all(self, keys: tuple[str, ...]) -> None:
        try:
            await self._refresh(keys)
        finally:
            self._wanted.difference_update(keys)
        self._updated_s.update(dict.fromkeys(keys, loop_s()))
