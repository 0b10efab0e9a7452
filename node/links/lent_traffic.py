"""Limits this peer's traffic to what its owner lends of the connection."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from coordinator.links.token_bucket import Allowance, MonthlyUse
from dht.whole_file import write_whole

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 30.0


def loop_us() -> int:
    """The running loop's time in microseconds; tests may use a virtual clock."""
    return int(asyncio.get_running_loop().time() * 1e6)


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
        self.month = _load(month_file) or MonthlyUse.at(time.time())

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

    def exhausted(self) -> str | None:
        """Why this peer lends nothing for the rest of the month, or None. Books the use so far."""
        total = self.sent_bytes + self.received_bytes
        self.month = self.month.spent(total - self._saved_bytes, time.time())
        self._saved_bytes = total
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
        text = json.dumps({"month": self.month.month, "used_bytes": self.month.used_bytes})
        try:
            write_whole(self._month_file, text.encode())
        except OSError as error:
            logger.warning("cannot keep this month's traffic: %s", error)


def _load(file: Path | None) -> MonthlyUse | None:
    if file is None or not file.exists():
        return None
    try:
        kept = json.loads(file.read_text())
        use = MonthlyUse(month=str(kept["month"]), used_bytes=int(kept["used_bytes"]))
        _ = use.next_month  # ValueError unless it is a month
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is unreadable, this month counts from 0: %s", file, error)
        return None
    return use
