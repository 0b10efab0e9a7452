"""How far terms and counters may have come: no further than time has.

Whoever may lead could claim a term near the largest number there is, after which nobody could ever
be elected with a larger one. What bounds terms without memory, without trust and alike for every
peer, newcomers included, is the clock that records' expiries rely on anyway: an honest swarm uses
far less than one term and one plan per second, so a number beyond the seconds since a fixed day in
the past was made up. A claim at the very bound costs the others one second of waiting. Pure.
"""

from dataclasses import replace

from dht.messages.types import NO_VERSION, PlanVersion

BEGINNING_UNIX_S = 1_600_000_000
"""September 2020: terms are counted as if a swarm had held elections every second since."""
CLOCKS_DIFFER_S = 60
"""Peers whose clocks are behind must accept what those ahead of them claim."""


def number_max(now_unix_s: float) -> int:
    """The largest term or counter that can be honest at this time."""
    return max(0, int(now_unix_s) - BEGINNING_UNIX_S) + CLOCKS_DIFFER_S


def plausible(version: PlanVersion, now_unix_s: float) -> bool:
    """Whether an version can be honest at this time."""
    return max(version.term, version.counter) <= number_max(now_unix_s)


def believed(version: PlanVersion, now_unix_s: float) -> PlanVersion:
    """``version`` if it can be honest, no version otherwise."""
    return version if plausible(version, now_unix_s) else NO_VERSION


def next_version(seen: PlanVersion, term: int, rank: int) -> PlanVersion:
    """The version of a plan of ``term``, past ``seen`` where that is of the same term."""
    counter = seen.counter if seen.term == term else 0
    return replace(NO_VERSION, term=term, counter=counter + 1, rank=rank)
