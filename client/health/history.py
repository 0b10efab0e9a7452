"""The page's probes and what the swarm served in SQLite: kept over restarts, for 90 days."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from client.health.given import GIVEN
from client.health.past import INCIDENTS_SHOWN_MAX, SPANS, SWARM, Incident, Past, Span
from client.health.served import ServedCounts
from client.health.state import STATE, Probe
from dht.errors import UserError
from dht.messages.types import Plan

T = TypeVar("T")
Given = ParamSpec("Given")
logger = logging.getLogger(__name__)

DAY_S = 86_400
"""Fixed by the clock."""
KEPT_S = 90.0 * DAY_S
INCIDENTS_KEPT_MAX = 1000
SERVED_STEP_S = 60
"""What the swarm served is kept in sums over this time."""
_INCIDENT = "key, name, what, since_unix_s, until_unix_s"
_PROBES = """
    SELECT start, COUNT(*), SUM(ok), SUM(tokens),
        MIN(CASE WHEN ok AND place * 2 >= of_all THEN ttft_s END),
        MIN(CASE WHEN ok AND place * 20 >= of_all * 19 THEN ttft_s END)
    FROM (
        SELECT start, ok, tokens, ttft_s,
            ROW_NUMBER() OVER (PARTITION BY start, ok ORDER BY ttft_s) AS place,
            COUNT(*) OVER (PARTITION BY start, ok) AS of_all
        FROM (
            SELECT CAST(at_unix_s / :step_s AS INTEGER) * :step_s AS start, reason = '' AS ok,
                tokens, ttft_s
            FROM probes WHERE at_unix_s >= :begin_unix_s
        )
    )
    GROUP BY start ORDER BY start
"""
_SERVED = """
    SELECT start_unix_s / :step_s * :step_s AS start, SUM(answers), SUM(tokens)
    FROM served WHERE start_unix_s >= :begin_unix_s GROUP BY start ORDER BY start
"""


def _reads(
    read: Callable[Concatenate["History", Given], T],
) -> Callable[Concatenate["History", Given], Coroutine[Any, Any, T]]:
    """``read`` in a thread, while no other call runs."""

    async def in_thread(self: "History", /, *given: Given.args, **named: Given.kwargs) -> T:
        async with self._lock:
            return await asyncio.to_thread(read, self, *given, **named)

    update_wrapper(in_thread, read)
    return in_thread


def _writes(
    write: Callable[Concatenate["History", Given], None],
) -> Callable[Concatenate["History", Given], Coroutine[Any, Any, None]]:
    """``write`` in the same way, as one transaction. What cannot be kept now, as on a full disk, is
    only logged: the page goes on to show how things are, with or without their past."""

    def transaction(self: "History", /, *given: Given.args, **named: Given.kwargs) -> None:
        try:
            with self._db:
                write(self, *given, **named)
        except sqlite3.OperationalError as error:
            logger.warning("the page's past cannot be kept: %s", error)

    update_wrapper(transaction, write)
    return _reads(transaction)


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
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS incidents (key TEXT NOT NULL, name TEXT NOT NULL,"
                " what TEXT NOT NULL, since_unix_s REAL NOT NULL, until_unix_s REAL,"
                " PRIMARY KEY (key, since_unix_s))"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS given (day INTEGER NOT NULL, key TEXT NOT NULL,"
                " layer_s REAL NOT NULL, PRIMARY KEY (day, key))"
            )
            self._db.commit()
        except sqlite3.Error as error:
            raise UserError(f"--data {path} cannot be used: {error}") from None

    @_writes
    def add(self, probe: Probe) -> None:
        """Keep ``probe`` and forget what is older than 90 days before it."""
        row = (probe.at_unix_s, probe.reason, probe.ttft_s, probe.tpot_s, probe.tokens)
        self._db.execute("INSERT INTO probes VALUES (?, ?, ?, ?, ?)", row)
        self._db.execute("DELETE FROM probes WHERE at_unix_s < ?", (row[0] - KEPT_S,))

    @_writes
    def add_served(self, served: ServedCounts, now_unix_s: float) -> None:
        """Add what the swarm served to this minute's sums; forget those of over 90 days ago."""
        start_unix_s = int(now_unix_s) // SERVED_STEP_S * SERVED_STEP_S
        self._db.execute("DELETE FROM served WHERE start_unix_s < ?", (now_unix_s - KEPT_S,))
        self._db.execute(
            "INSERT INTO served VALUES (?, ?, ?) ON CONFLICT (start_unix_s) DO UPDATE SET"
            " answers = answers + excluded.answers, tokens = tokens + excluded.tokens",
            (start_unix_s, served.answers, served.tokens),
        )

    @_writes
    def add_given(self, layer_s: Mapping[str, float], now_unix_s: float) -> None:
        """Add layer-seconds to the sums of this day; forget those of over 90 days ago."""
        day = int(now_unix_s // DAY_S)
        self._db.execute("DELETE FROM given WHERE day < ?", (day - KEPT_S // DAY_S,))
        self._db.executemany(
            "INSERT INTO given VALUES (?, ?, ?) ON CONFLICT (day, key) DO UPDATE SET"
            " layer_s = layer_s + excluded.layer_s",
            [(day, key, value) for key, value in layer_s.items()],
        )

    @_reads
    def given(self, now_unix_s: float) -> dict[str, float]:
        """Layer-seconds by key, of the last days."""
        query = "SELECT key, SUM(layer_s) FROM given WHERE day > ? GROUP BY key"
        after_day = int(now_unix_s // DAY_S) - GIVEN.days
        return dict(self._db.execute(query, (after_day,)).fetchall())

    @_reads
    def past(self, now_unix_s: float) -> tuple[Past, ...]:
        """The page's own requests and what the whole swarm served, for each of the spans."""
        return tuple(self._past(span, span.begin_unix_s(now_unix_s)) for span in SPANS)

    def _past(self, span: Span, begin_unix_s: int) -> Past:
        bounds = {"step_s": span.step_s, "begin_unix_s": begin_unix_s}

        def rows(query: str, *names: str) -> tuple[dict[str, Any], ...]:
            found = self._db.execute(query, bounds)
            return tuple(dict(zip(("start_unix_s", *names), row, strict=True)) for row in found)

        figures = ("requests", "answered", "tokens", "ttft_p50_s", "ttft_p95_s")
        return Past(
            span=span, probes=rows(_PROBES, *figures), served=rows(_SERVED, "answers", "tokens")
        )

    @_writes
    def add_incidents(self, incidents: Sequence[Incident]) -> None:
        """Keep what began and what ended; forget the oldest beyond a bound."""
        self._db.executemany(
            f"INSERT OR REPLACE INTO incidents ({_INCIDENT}) VALUES (?, ?, ?, ?, ?)",  # noqa: S608  a constant
            [(i.key, i.name, i.what, i.since_unix_s, i.until_unix_s) for i in incidents],
        )
        self._db.execute(
            "DELETE FROM incidents WHERE rowid NOT IN"
            " (SELECT rowid FROM incidents ORDER BY since_unix_s DESC LIMIT ?)",
            (INCIDENTS_KEPT_MAX,),
        )

    @_reads
    def incidents(self, now_unix_s: float) -> tuple[Incident, ...]:
        """Incidents of the last week, the newest first.

        Single peers take half of the list at most: those that come and go cannot empty it.
        """
        found = [
            incident
            for own in (f"key = '{SWARM}'", f"key <> '{SWARM}'")
            for incident in self._incidents_where(
                f"{own} AND since_unix_s >= ? ORDER BY since_unix_s DESC LIMIT ?",
                now_unix_s - SPANS[-1].span_s,
                INCIDENTS_SHOWN_MAX // 2,
            )
        ]
        return tuple(sorted(found, key=lambda each: -each.since_unix_s))

    @_reads
    def open_incidents(self) -> dict[str, Incident]:
        """The newest incident of each key, where it has not ended."""
        found = self._incidents_where("until_unix_s IS NULL ORDER BY since_unix_s")
        return {each.key: each for each in found}

    def _incidents_where(self, condition: str, *values: float) -> list[Incident]:
        rows = self._db.execute(f"SELECT {_INCIDENT} FROM incidents WHERE {condition}", values)  # noqa: S608  constants
        names = _INCIDENT.split(", ")
        return [Incident(**dict(zip(names, row, strict=True))) for row in rows]

    @_writes
    def add_plan(self, plan: Plan, now_unix_s: float) -> None:
        """Keep that ``plan`` was seen, once; forget those of more than 90 days ago."""
        peers, flow = len(plan.assignments), plan.flow_tokens_per_s
        row = (str(plan.version), plan.planner, flow, peers, plan.created_unix_s, now_unix_s)
        self._db.execute(
            "DELETE FROM published_plans WHERE seen_unix_s < ?", (now_unix_s - KEPT_S,)
        )
        self._db.execute("INSERT OR IGNORE INTO published_plans VALUES (?, ?, ?, ?, ?, ?)", row)

    @_reads
    def plans(self) -> tuple[dict[str, Any], ...]:
        """The plans that were seen last, the newest first."""
        names = ("version", "planner", "flow_tokens_per_s", "peers", "seen_unix_s")
        rows = self._db.execute(
            f"SELECT {', '.join(names)} FROM published_plans ORDER BY seen_unix_s DESC LIMIT ?",  # noqa: S608  constants
            (STATE.versions_shown_max,),
        )
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    @_reads
    def recent(self, now_unix_s: float, span_s: float = STATE.probes_s) -> tuple[Probe, ...]:
        """Probes of the last ``span_s``, oldest first."""
        names = ("at_unix_s", "reason", "ttft_s", "tpot_s", "tokens")
        rows = self._db.execute(
            f"SELECT {', '.join(names)} FROM probes WHERE at_unix_s >= ? ORDER BY at_unix_s",  # noqa: S608  constants
            (now_unix_s - span_s,),
        )
        return tuple(Probe(**dict(zip(names, row, strict=True))) for row in rows)

    def close(self) -> None:
        self._db.close()
