"""Guesses the links that nobody measured, from those of peers that are linked to both ends. Pure.

A record has room for a few links, so in a swarm of dozens most pairs are not measured. A planner
that takes all of those for slow ones spreads its stages by who happened to probe whom.
"""

from collections.abc import Sequence

from coordinator.problem.config import ASSUMED
from dht.messages.types import Link


def with_guesses(peers: Sequence[str], links: Sequence[Link]) -> tuple[Link, ...]:
    """``links`` and, for every pair of ``peers`` that has none, the best that ``ASSUMED.witnesses``
    allow.

    Over a common neighbour, a link is as fast as the slower of the two links to it, and its round
    trip the sum of theirs. A round trip is known where either direction was measured, and the rate
    of the way back is a witness of this one's. Pairs with fewer witnesses get no link.
    """
    if not links or not ASSUMED.witnesses < len(peers) <= ASSUMED.guessed_peers_max:
        return tuple(links)
    import numpy as np  # a client that starts does not wait for it

    at = {name: index for index, name in enumerate(peers)}
    shape = len(peers), len(peers)
    rates, round_trips = np.zeros(shape), np.full(shape, np.inf)
    known = [(at[k.source], at[k.target], k) for k in links if k.source in at and k.target in at]
    for source, target, link in sorted(known, key=lambda each: each[2].measured_unix_s):
        rates[source, target] = link.bandwidth_bytes_per_s
        round_trips[source, target] = round_trips[target, source] = link.rtt_s
    measured = {(source, target) for source, target, _ in known}
    guessed: list[Link] = []
    for source, name in enumerate(peers):
        slower = np.vstack([np.minimum(rates[source][:, None], rates), rates[:, source]])
        sums = round_trips[source][:, None] + round_trips
        fast = np.partition(slower, -ASSUMED.witnesses, axis=0)[-ASSUMED.witnesses]
        near = np.partition(sums, ASSUMED.witnesses - 1, axis=0)[ASSUMED.witnesses - 1]
        nearest = np.minimum(round_trips[source], near)
        guessed += [
            Link(
                source=name,
                target=peers[target],
                bandwidth_bytes_per_s=float(fast[target]),
                rtt_s=float(nearest[target]),
                measured_unix_s=0.0,
            )
            for target in np.flatnonzero((fast > 0) & np.isfinite(nearest)).tolist()
            if source != target and (source, target) not in measured
        ]
    return (*links, *guessed)
