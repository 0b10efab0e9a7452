"""Finds the quickest ring of a plan, for a swarm with little to do. Pure.

A plan's flow shares the routes as a full swarm must; a request alone is better off on the quickest
of them. It is taken where it is clearly quicker than the route whose turn it is, and its peers then
carry no more than the plan gives them: under load, and among routes that are about equal, the
shares of the flow hold.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from dht.messages.session import SESSION_BOUNDS
from dht.messages.types import SOURCE, NodeRecord, RouteStage

Ring = tuple[float, tuple[RouteStage, ...]]
"""Seconds per token of a route, and the route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickestConfig:
    """When a quicker ring is taken out of turn, and how long a late one is not."""

    quicker_share: float = 0.8
    """Maximum ratio of a ring's time to that of the route whose turn it is, to be taken instead."""
    hop_s: float = 0.02
    """Assumed time that one more stage costs a token, in seconds, where no link is known."""
    tries_max: int = 4
    """Maximum searches for a ring, each without the peers that had too much to do on the one
    before."""
    prompt_tokens: float = 3.3
    """Tokens of prompts for each of answers, as in Azure's conversations of 2023."""
    looks_max: int = 10_000
    """Maximum edges that one search looks at, over all first stages from which it begins."""
    late_times: float = 3.0
    late_s: float = 0.05
    """A ring is late if a token takes ``late_times`` what its peers announced when it was taken,
    and ``late_s`` longer: others may have joined since."""
    late_kept_s: float = 600.0
    """Time for which peers of a late ring are not taken out of turn, unless another one is on
    time."""


QUICKEST = QuickestConfig()


def token_s(record: NodeRecord, layers: int, sessions: int) -> float:
    """Expected seconds of a token in ``layers`` layers beside other sessions, ``sessions`` in all.

    A step decodes for all of them, and the prompts of those that follow each other run in between.
    Decode times are interpolated between those that the peer announces: fewer sessions than it
    measured take as long as the fewest, and more take longer in proportion. Without times, its T_j
    is shared.
    """
    times = record.decode_layer_ns
    if not times:
        rates = record.tokens_per_s[:layers]
        return sessions / rates[-1] if rates and rates[-1] > 0 else math.inf
    at = bisect_right(times, sessions, key=itemgetter(0))
    if at == len(times):
        rows, near_ns, _ = times[-1]
        layer_ns = near_ns * max(1.0, sessions / rows)
    else:
        fewer, before_ns, _ = times[max(0, at - 1)]
        more, after_ns, _ = times[at]
        share = (sessions - fewer) / (more - fewer) if at else 0.0
        layer_ns = before_ns + share * (after_ns - before_ns)
    for rows, near_ns, _ in record.prompt_layer_ns[-1:]:
        layer_ns += (sessions - 1) * QUICKEST.prompt_tokens * near_ns / rows
    return layers * layer_ns * 1e-9


class OwnSessions:
    """One client's sessions by peer, which peers announce some seconds late."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[str, ...]] = {}
        self._live: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        """The most at a peer since the last look at the records."""
        self._seen: dict[str, tuple[NodeRecord, int]] = {}
        """The newest record of each peer, and how many sessions of others it told of."""

    def goes_over(self, session: str, route: Collection[RouteStage]) -> None:
        """Count ``session`` at the peers of ``route``, and no more at those that it left."""
        self.ends(session)
        self._peers[session] = peers = tuple(stage.peer_id for stage in route)
        self._live.update(peers)
        for peer_id in peers:
            self._most[peer_id] = max(self._most[peer_id], self._live[peer_id])

    def ends(self, session: str) -> None:
        """Count ``session`` no more."""
        self._live.subtract(self._peers.pop(session, ()))

    def take_nodes(self, nodes: Mapping[str, NodeRecord]) -> None:
        """Take in records: what a new one tells of and was not begun here is others'."""
        before, self._seen = self._seen, {}
        for peer_id, record in nodes.items():
            seen, others = before.get(peer_id, (None, 0))
            if record != seen:
                others = max(0, record.sessions - self._most[peer_id])
            self._seen[peer_id] = record, others
        self._live += Counter()  # forgets those where none is left
        self._most = self._live.copy()

    def beside(self) -> dict[str, int]:
        """Number of sessions at each peer: those known here, and others' as last announced."""
        return {p: others + self._live[p] for p, (_, others) in self._seen.items()}


class LatePeers:
    """Peers that failed, or over which tokens took longer than these announced, as one client
    found."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def took(
        self, peers: Iterable[str], announced_s: float, measured_s: float, now_s: float
    ) -> None:
        """Take in a token's time over ``peers``: each of them may be why it was late, and none if
        it was not."""
        late = measured_s > QUICKEST.late_times * announced_s + QUICKEST.late_s
        for peer_id in peers:
            if late:
                self.failed(peer_id, now_s)
            else:
                self._until_s.pop(peer_id, None)

    def failed(self, peer_id: str, now_s: float) -> None:
        """A peer failed or refused: it is late, too."""
        self._until_s[peer_id] = now_s + QUICKEST.late_kept_s

    def at(self, now_s: float) -> frozenset[str]:
        self._until_s = {p: until_s for p, until_s in self._until_s.items() if now_s < until_s}
        return frozenset(self._until_s)


class RingTimes:
    """Expected seconds per token of rings, as peers announce."""

    def __init__(
        self,
        usable: Mapping[str, NodeRecord],
        sessions: Mapping[str, int],
        rtt_s: Mapping[frozenset[str], float],
    ) -> None:
        """``sessions`` run at the peers already; ``rtt_s`` are the measured round trips between
        pairs of peers."""
        self.usable = usable
        self._sessions = sessions
        self._rtt_s = rtt_s
        self._run_s: dict[RouteStage, float] = {}

    def among(self, peers: Collection[str]) -> "RingTimes":
        """The same for rings over ``peers`` alone."""
        usable = {p: record for p, record in self.usable.items() if p in peers}
        fewer = RingTimes(usable, self._sessions, self._rtt_s)
        fewer._run_s = self._run_s
        return fewer

    def sessions_at(self, peer_id: str) -> int:
        return self._sessions.get(peer_id, 0)

    def run_s(self, stage: RouteStage) -> float:
        if stage not in self._run_s:
            sessions = 1 + self.sessions_at(stage.peer_id)
            record, layers = self.usable[stage.peer_id], stage.end - stage.start
            self._run_s[stage] = token_s(record, layers, sessions)
        return self._run_s[stage]

    def hop_s(self, one: RouteStage, other: RouteStage) -> float:
        if one.peer_id == other.peer_id:
            return 0.0
        return self._rtt_s.get(frozenset((one.peer_id, other.peer_id)), 2 * QUICKEST.hop_s) / 2

    def token_s(self, route: Sequence[RouteStage]) -> float:
        """Seconds of a token, from the first stage through all others and back to the first."""
        hops_s = sum(self.hop_s(a, b) for a, b in zip(route, (*route[1:], route[0]), strict=True))
        return hops_s + sum(map(self.run_s, route))


Search = Callable[[RingTimes], Ring | None]
"""Finds the quickest ring over some peers."""


def quicker(
    turn: tuple[RouteStage, ...],
    times: RingTimes,
    quickest: Search,
    late: Collection[str] = (),
) -> tuple[RouteStage, ...]:
    """The route to take where it is ``turn``'s turn: the quickest ring over peers that are not
    ``late``, if ``turn`` takes much longer."""
    ring = quickest(times.among(times.usable.keys() - late))
    return (
        turn if ring is None or ring[0] > QUICKEST.quicker_share * times.token_s(turn) else ring[1]
    )


def light_ring(
    edges: Mapping[str, Collection[str]],
    ends: Mapping[str, int],
    given: Mapping[str, float],
    times: RingTimes,
) -> Ring | None:
    """The quickest ring over peers with little to do; None: there is none.

    They have no session, or their sessions and one more make no more tokens/s than they are
    ``given`` by the plan at full load. For the rest see :func:`quickest_ring`.
    """
    for _ in range(QUICKEST.tries_max):
        ring = quickest_ring(edges, ends, times)
        if ring is None:
            return None
        token_s, stages = ring
        full = {
            stage.peer_id
            for stage in stages
            if (beside := times.sessions_at(stage.peer_id))
            and 1 + beside > given.get(stage.peer_id, 0.0) * token_s
        }
        if not full:
            return ring
        times = times.among(times.usable.keys() - full)
    return None


def quickest_ring(
    edges: Mapping[str, Collection[str]], ends: Mapping[str, int], times: RingTimes
) -> Ring | None:
    """The ring of the least time per token over ``times.usable`` peers; None: there is none.

    ``edges`` lead from the source and from each peer to the peers of the next stage, and each peer
    runs the layers up to its place in ``ends``.
    """
    usable = times.usable

    def stages_after(tail: str, start: int) -> Iterator[RouteStage]:
        for head in edges.get(tail, ()):
            end = ends.get(head, 0)
            if head in usable and usable[head].holds(start, end):
                yield RouteStage(peer_id=head, start=start, end=end)

    layers = max(ends.values(), default=0)
    in_order = sorted(usable, key=lambda peer_id: (ends.get(peer_id, 0), peer_id))
    entries = sorted(stages_after(SOURCE, 0), key=lambda s: (times.run_s(s) / s.end, s.peer_id))
    found: Ring | None = None
    looks = sum(map(len, edges.values()))
    for first in entries[: max(1, QUICKEST.looks_max // max(1, looks))]:
        best: dict[str, Ring] = {first.peer_id: (times.run_s(first), (first,))}
        for peer_id in in_order:
            if peer_id not in best:
                continue
            time_s, stages = best[peer_id]
            if ends[peer_id] == layers:
                whole_s = time_s + times.hop_s(stages[-1], first)
                if found is None or whole_s < found[0]:
                    found = whole_s, stages
            if len(stages) == SESSION_BOUNDS.stages_max:
                continue
            for stage in stages_after(peer_id, ends[peer_id]):
                later_s = time_s + times.hop_s(stages[-1], stage) + times.run_s(stage)
                if stage.peer_id not in best or later_s < best[stage.peer_id][0]:
                    best[stage.peer_id] = later_s, (*stages, stage)
    return found
