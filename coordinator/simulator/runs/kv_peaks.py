"""Samples the peak KV use of each simulated peer over all sessions. Pure.

A sample every simulated second of hundreds of sessions with a dozen stages each would take a tenth
of a run as loops; here a session's stages are turned into arrays once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.simulator.core.parts import SimulatedPeer, SimulatedSession


class KvPeaks:
    """Keeps the stages of live sessions as arrays: peers' numbers, and their numbers of layers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[Sequence[object], Any]] = {}
        """By session number: the stages last seen, and their array of shape (2, stages)."""

    def look(
        self, sessions: Iterable[SimulatedSession], peers: Mapping[str, SimulatedPeer]
    ) -> None:
        """Raise ``kv_peak`` of peers that now hold more entries (tokens x layers) than before."""
        known: dict[int, tuple[Sequence[object], Any]] = {}
        held, tokens = [], []
        for session in sessions:
            seen = self._known.get(session.number)
            if seen is None or seen[0] is not session.stages:
                seen = session.stages, self._array(session)
            known[session.number] = seen
            held.append(seen[1])
            tokens.append(session.tokens_in_kv)
        self._known = known
        if not held:
            return
        where, layers = np.concatenate(held, axis=1)
        entries = layers * np.array(tokens).repeat(np.array([each.shape[1] for each in held]))
        # The sums are whole numbers far below 2^53: exact as floats.
        used = np.bincount(where, entries, len(self._numbers)).astype(int).tolist()
        for name, number in self._numbers.items():
            peer = peers.get(name)
            if peer is not None and used[number] > peer.kv_peak:
                peer.kv_peak = used[number]

    def _array(self, session: SimulatedSession) -> Any:
        numbers = [
            self._numbers.setdefault(name, len(self._numbers)) for name, _, _ in session.stages
        ]
        return np.array([numbers, [end - start for _, start, end in session.stages]], dtype=int)
