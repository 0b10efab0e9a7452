"""The page's probes and what the swarm served in SQLite: kept over restarts, for 90 days."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

from client.health.served import Served
from client.health.state import PROBES_S, VERSIONS_SHOWN_MAX, Probe
from dht.errors import UserError
from dht.messages.types import Plan

KEPT_S = 90 * 86_400.0
HOURS_SHOWN = 24 * 7


class History:
    """Every call runs in a thread, one at a time. Raises UserError for a file that is none."""

    def __init__(self, path: Path | None) -> None:
        self._lock = asyncio.Lock()
        try:
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False)
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS probes (at_unix_s REAL NOT NULL, reason TEXT NOT NULL,"
                " ttft_s REAL NOT NULL, tpot_s REAL NOT NULL, tokens INTEGER NOT NULL)"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS probes_at ON probes (at_unix_s)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS published_plans (version TEXT NOT NULL,"
                " planner TEXT NOT NULL,"
                " flow_tokens_per_s REAL NOT NULL, peers INTEGER NOT NULL,"
                " created_unix_s REAL NOT NULL, seen_unix_s REAL NOT NULL,"
                " PRIMARY KEY (version, created_unix_s))"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS served (start_unix_s INTEGER PRIMARY KEY,"
                " answers INTEGER NOT NULL, tokens INTEGER NOT NULL)"
            )
            self._db.commit()
        except sqlite3.Error as error:
            raise UserError(f"--data {path} cannot be used: {error}") from None

    async def add(self, probe: Probe) -> None:
        """Keep ``probe`` and forget what is older than 90 days before it."""
        async with self._lock:
            await asyncio.to_thread(self._add, probe)

    def _add(self, probe: Probe) -> None:
        row = (probe.at_unix_s, probe.reason, probe.ttft_s, probe.tpot_s, probe.tokens)
        with self._db:
            self._db.execute("INSERT INTO probes VALUES (?, ?, ?, ?, ?)", row)
            self._db.execute("DELETE FROM probes WHERE at_unix_s < ?", (row[0] - KEPT_S,))

    async def add_served(self, served: Served, now_unix_s: float) -> None:
        """Add what the swarm served to this hour's sums; forget those of over 90 days ago."""
        async with self._lock:
            await asyncio.to_thread(self._add_served, served, now_unix_s)

    def _add_served(self, served: Served, now_unix_s: float) -> None:
        row = (int(now_unix_s // 3600 * 3600), served.answers, served.tokens)
        with self._db:
            self._db.execute("DELETE FROM served WHERE start_unix_s < ?", (now_unix_s - KEPT_S,))
            self._db.execute(
                "INSERT INTO served VALUES (?, ?, ?) ON CONFLICT (start_unix_s) DO UPDATE SET"
                " answers = answers + excluded.answers, tokens = tokens + excluded.tokens",
                row,
            )

    async def served(self, now_unix_s: float) -> tuple[dict[str, float], ...]:
        """Answers and tokens of the whole swarm for each hour of the last week."""
        async with self._lock:
            return await asyncio.to_thread(self._served, now_unix_s - HOURS_SHOWN * 3600)

    def _served(self, since_unix_s: float) -> tuple[dict[str, float], ...]:
        rows = self._db.execute(
            "SELECT start_unix_s, answers, tokens FROM served WHERE start_unix_s >= ? ORDER BY 1",
            (since_unix_s,),
        )
        names = ("start_unix_s", "answers", "tokens")
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    async def add_plan(self, plan: Plan, now_unix_s: float) -> None:
        """Keep that ``plan`` was seen, once; forget those of more than 90 days ago."""
        async with self._lock:
            await asyncio.to_thread(self._add_plan, plan, now_unix_s)

    def _add_plan(self, plan: Plan, now_unix_s: float) -> None:
        peers, flow = len(plan.assignments), plan.flow_tokens_per_s
        row = (str(plan.version), plan.planner, flow, peers, plan.created_unix_s, now_unix_s)
        with self._db:
            self._db.execute(
                "DELETE FROM published_plans WHERE seen_unix_s < ?", (now_unix_s - KEPT_S,)
            )
            self._db.execute("INSERT OR IGNORE INTO published_plans VALUES (?, ?, ?, ?, ?, ?)", row)

    async def plans(self) -> tuple[dict[str, Any], ...]:
        """The plans that were seen last, the newest first."""
        async with self._lock:
            return await asyncio.to_thread(self._plans)

    def _plans(self) -> tuple[dict[str, Any], ...]:
        names = ("version", "planner", "flow_tokens_per_s", "peers", "seen_unix_s")
        rows = self._db.execute(
            "SELECT version, planner, flow_tokens_per_s, peers, seen_unix_s FROM published_plans"
            " ORDER BY seen_unix_s DESC LIMIT ?",
            (VERSIONS_SHOWN_MAX,),
        )
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    async def recent(self, now_unix_s: float, span_s: float = PROBES_S) -> tuple[Probe, ...]:
        """Probes of the last ``span_s``, oldest first."""
        async with self._lock:
            return await asyncio.to_thread(self._recent, now_unix_s - span_s)

    def _recent(self, since_unix_s: float) -> tuple[Probe, ...]:
        rows = self._db.execute(
            "SELECT at_unix_s, reason, ttft_s, tpot_s, tokens FROM probes"
            " WHERE at_unix_s >= ? ORDER BY at_unix_s",
            (since_unix_s,),
        )
        names = ("at_unix_s", "reason", "ttft_s", "tpot_s", "tokens")
        return tuple(Probe(**dict(zip(names, row, strict=True))) for row in rows)

    async def hours(self, now_unix_s: float) -> tuple[dict[str, float], ...]:
        """Requests, answers and tokens of the page for each hour of the last week."""
        async with self._lock:
            return await asyncio.to_thread(self._hours, now_unix_s - HOURS_SHOWN * 3600)

    def _hours(self, since_unix_s: float) -> tuple[dict[str, float], ...]:
        rows = self._db.execute(
            "SELECT CAST(at_unix_s / 3600 AS INTEGER) * 3600, COUNT(*), SUM(reason = ''),"
            " SUM(tokens) FROM probes WHERE at_unix_s >= ? GROUP BY 1 ORDER BY 1",
            (since_unix_s,),
        )
        names = ("start_unix_s", "requests", "answered", "tokens")
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
