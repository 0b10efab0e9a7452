"""The most KV that each peer was seen to hold, over many looks at all sessions. Pure.

A look every simulated second at hundreds of sessions with a dozen stages each is a tenth of a run
when it is written as loops; here a session's stages are turned into arrays once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.simulator.core.parts import SimulatedPeer, SimulatedSession


class KvPeaks:
    """Remembers the stages of live sessions as arrays: peers' numbers, and layers there."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[Sequence[object], Any]] = {}
        """By session: its stages as they were looked at, and an array of shape (2, stages)."""

    def look(
        self, sessions: Iterable[SimulatedSession], peers: Mapping[str, SimulatedPeer]
    ) -> None:
        """Raise ``kv_peak`` of the peers that hold more entries (tokens x layers) than ever."""
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
        # Sums of whole numbers far below 2^53: exact as floats.
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
