"""Bounds the terms and counters of plan versions by the clock. Pure.

A hostile leader could claim a term near the largest number, after which nobody could ever be
elected with a larger one. The clock that records' expiries rely on bounds terms without memory or
trust, and equally for every peer, newcomers included: an honest swarm uses far less than one term
and one plan per second, so a number above the seconds since a fixed day in the past was made up. A
claim at the very bound costs the others one second of waiting.
"""

import hashlib
from dataclasses import replace

from dht.messages.types import NO_VERSION, PlanVersion

BEGINNING_UNIX_S = 1_600_000_000
"""Start of the count, in September 2020: one term and one plan per second since are allowed."""
CLOCKS_DIFFER_S = 60
"""Slack for clocks: a peer whose clock is behind must accept claims of peers ahead of it."""


def number_max(now_unix_s: float) -> int:
    """The largest term or counter that can be honest at this time."""
    return max(0, int(now_unix_s) - BEGINNING_UNIX_S) + CLOCKS_DIFFER_S


def plausible(version: PlanVersion, now_unix_s: float) -> bool:
    """Whether a version can be honest at this time."""
    return max(version.term, version.counter) <= number_max(now_unix_s)


def believed(version: PlanVersion, now_unix_s: float) -> PlanVersion:
    """``version`` if it can be honest, otherwise ``NO_VERSION``."""
    return version if plausible(version, now_unix_s) else NO_VERSION


def rank(peer_id: str, term: int) -> int:
    """Rendezvous hash of a candidate in a term: the smallest goes first."""
    digest = hashlib.sha256(f"{term}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def next_version(seen: PlanVersion, term: int, rank: int) -> PlanVersion:
    """The version of the next plan of ``term``, after ``seen`` where that has the same term."""
    counter = seen.counter if seen.term == term else 0
    return replace(NO_VERSION, term=term, counter=counter + 1, rank=rank)
