"""Limits this peer's traffic to what its owner lends of the connection."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.policies.links.token_bucket import Allowance, MonthlyUse
from dht.errors import NetworkError
from dht.process.whole_file import write_whole

logger = logging.getLogger(__name__)


def loop_us() -> int:
    """The running loop's time in microseconds; tests may use a virtual clock."""
    return int(asyncio.get_running_loop().time() * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """How traffic beside sessions is held back."""

    save_every_s: float = 30.0
    beside_part: float = 0.1
    """Part of the month's traffic that others may take beside sessions: probes, plans, records,
    text files, relayed calls. What is lent is lent for answers."""
    small_bytes: int = 1 << 12
    """Maximum size of a message that is no body of anything."""


TRAFFIC = TrafficConfig()


class LentTraffic:
    """Counts the bytes of all streams and draws them from the owner's allowances."""

    def __init__(
        self,
        *,
        up: Allowance | None = None,
        down: Allowance | None = None,
        month_bytes_max: float | None = None,
        month_file: Path | None = None,
    ) -> None:
        self.up = up or Allowance()
        self.down = down or Allowance()
        self.purposes: Mapping[str, int] = {}
        """Bytes in both directions by purpose, if somebody counts them."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.month_bytes_max = month_bytes_max
        self._month_file = month_file
        self._saved_bytes = 0
        self._beside_bytes = self._saved_beside_bytes = 0
        self.month, self._beside = month_of(month_file) or 2 * (MonthlyUse.at(time.time()),)

    def sent(self, size_bytes: int) -> None:
        """Count bytes written to a stream."""
        self.sent_bytes += size_bytes
        self.up.spend(size_bytes, loop_us())

    def received(self, size_bytes: int) -> None:
        """Count bytes read from a stream."""
        self.received_bytes += size_bytes
        self.down.spend(size_bytes, loop_us())

    async def wait_up(self) -> None:
        """Wait until bytes that are not urgent may leave."""
        if wait_us := self.up.wait_us(loop_us()):
            await asyncio.sleep(wait_us / 1e6)

    @property
    def down_exceeded(self) -> bool:
        """Whether more arrives than the owner lends; others then get no credit for prefill."""
        return self.down.limited and self.down.wait_us(loop_us()) > 0

    def beside(self, size_bytes: int, is_known: Callable[[], bool]) -> None:
        """Count bytes that another peer takes beside sessions.

        Raises NetworkError where ``beside_part`` of the month's traffic is used, but for
        ``small_bytes`` or less of a peer that is known: its pings go on being answered.
        """
        self._beside_bytes += size_bytes
        if self.beside_left_bytes <= 0 and (size_bytes > TRAFFIC.small_bytes or not is_known()):
            raise NetworkError("what this peer lends beside sessions is used for this month")

    async def wait_beside(self) -> None:
        """Wait until bytes beside sessions may leave; raises NetworkError where this month's part
        is used."""
        if self.beside_left_bytes <= 0:
            raise NetworkError("what this peer lends beside sessions is used for this month")
        await self.wait_up()

    @property
    def beside_left_bytes(self) -> float:
        """Bytes that others may still take beside sessions this month."""
        if self.month_bytes_max is None:
            return math.inf
        more = self._beside_bytes - self._saved_beside_bytes
        used_bytes = self._beside.spent(more, time.time()).used_bytes
        return TRAFFIC.beside_part * self.month_bytes_max - used_bytes

    def exhausted(self) -> str | None:
        """Why this peer lends nothing for the rest of the month, or None. Books the use so far."""
        total = self.sent_bytes + self.received_bytes
        self.month = self.month.spent(total - self._saved_bytes, time.time())
        self._saved_bytes = total
        more = self._beside_bytes - self._saved_beside_bytes
        self._beside = self._beside.spent(more, time.time())
        self._saved_beside_bytes = self._beside_bytes
        if self.month_bytes_max is None or self.month.used_bytes < self.month_bytes_max:
            return None
        return (
            f"{self.month.used_bytes / 1e9:.2f} GB of this month's {self.month_bytes_max / 1e9:g}"
            f" GB are used; the count starts again on {self.month.next_month} (UTC)"
        )

    def save(self) -> None:
        """Save the month's count for later runs, if the file can be written."""
        if self._month_file is None:
            return
        self.exhausted()
        text = json.dumps(_written(self.month, self._beside))
        try:
            write_whole(self._month_file, text.encode())
        except OSError as error:
            logger.warning("cannot keep this month's traffic: %s", error)


def traffic_file(identity: Path) -> Path:
    """Where the peer with this key file keeps what it used of the month's traffic."""
    return identity.with_suffix(".traffic.json")


def month_of(file: Path | None) -> tuple[MonthlyUse, MonthlyUse] | None:
    """The use of the month and what of it was beside sessions, if ``file`` tells."""
    if file is None or not file.exists():
        return None
    try:
        kept = json.loads(file.read_text())
        use, beside = _read(kept)
        if (before := kept.get("before")) is not None:
            use, beside = map(_behind, (use, beside), _read(before))
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
        logger.warning("%s is unreadable, this month counts from 0: %s", file, error)
        return None
    return use, beside


def _behind(use: MonthlyUse, before: MonthlyUse) -> MonthlyUse:
    return replace(use, before=before)


def _read(kept: Mapping[str, Any]) -> tuple[MonthlyUse, MonthlyUse]:
    """The use of a month and what of it was beside sessions, as :func:`_written` wrote them. Raises
    ValueError, KeyError, TypeError and AttributeError."""
    month = str(kept["month"])
    use = MonthlyUse(month=month, used_bytes=int(kept["used_bytes"]))
    _ = use.next_month  # ValueError unless it is a month
    return use, MonthlyUse(month=month, used_bytes=int(kept.get("beside_bytes", 0)))


def _written(use: MonthlyUse, beside: MonthlyUse) -> dict[str, Any]:
    said = {
        "month": use.month,
        "used_bytes": use.used_bytes,
        "beside_bytes": beside.used_bytes,
    }
    if use.before is None or beside.before is None:
        return said
    return {**said, "before": _written(use.before, beside.before)}
