"""How long this machine has slept: event loops' clock, which nobody sets, stands still then."""

import sys
import time


def slept_s() -> float:
    """Seconds for which this machine has slept since it was started; 0.0 where its system does not
    say so, or the clock of event loops goes on meanwhile."""
    if sys.platform == "linux":
        clocks = time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC
    elif sys.platform == "darwin":
        clocks = time.CLOCK_MONOTONIC_RAW, time.CLOCK_UPTIME_RAW
    else:
        return 0.0
    counted_s, awake_s = map(time.clock_gettime, clocks)
    return counted_s - awake_s
