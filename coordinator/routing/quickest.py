"""Finds the quickest ring of a plan, for a swarm with little to do. Pure.

A plan's flow shares the routes as a full swarm must; a request alone is better off on the quickest
of them. It is taken where it is clearly quicker than the route whose turn it is, and one more
session slows nobody there by much (:func:`has_little_to_do`): under load, and among routes that are
about equal, the shares of the flow hold.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from dht.messages.session import STAGES_MAX
from dht.messages.types import SOURCE, NodeRecord, RouteStage

Ring = tuple[float, tuple[RouteStage, ...]]
"""Seconds per token of a route, and the route."""

QUICKER_MIN = 0.8
"""Maximum ratio of a ring's time to that of the route whose turn it is, to be taken instead."""
HOP_S = 0.02
"""Assumed time that one more stage costs a token, in seconds, where no link is known."""
SLOWER_MAX = 3.0
"""Maximum ratio of a token's time beside one more session to that of a session alone, at a peer
with little to do."""
PROMPT_TOKENS = 3.3
"""Tokens of prompts for each of answers, as in Azure's conversations of 2023."""
ENTRIES_MAX = 16
"""Maximum first stages from which rings are searched."""
Step = tuple[float, float, str]
"""Seconds of a stage and all that follow it, seconds of that stage alone, each with the hop before
it, and the stage's peer."""
LATE_S = 0.05
"""A ring is late if a token takes ``SLOWER_MAX`` times what its peers announced when it was taken,
and so much longer: others may have joined since, as long as these had little to do."""
LATE_KEPT_S = 600.0
"""Time for which peers of a late ring are not taken out of turn, unless another one is on time."""


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
        layer_ns += (sessions - 1) * PROMPT_TOKENS * near_ns / rows
    return layers * layer_ns * 1e-9


def has_little_to_do(record: NodeRecord, sessions: int) -> bool:
    """Whether one more than ``sessions`` sessions slows none of them by much."""
    layers = record.end - record.start
    return not sessions or (
        token_s(record, layers, sessions + 1) <= SLOWER_MAX * token_s(record, layers, 1)
    )


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
        late = measured_s > SLOWER_MAX * announced_s + LATE_S
        for peer_id in peers:
            if late:
                self.failed(peer_id, now_s)
            else:
                self._until_s.pop(peer_id, None)

    def failed(self, peer_id: str, now_s: float) -> None:
        """A peer failed or refused: it is late, too."""
        self._until_s[peer_id] = now_s + LATE_KEPT_S

    def at(self, now_s: float) -> frozenset[str]:
        """The late peers."""
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

    def among(self, usable: Mapping[str, NodeRecord]) -> "RingTimes":
        """The same for rings over other peers."""
        return RingTimes(usable, self._sessions, self._rtt_s)

    def over_idle(self, late: Collection[str] = ()) -> "RingTimes":
        """The same for rings over peers with little to do, less those that are ``late``."""
        beside = self._sessions
        idle = {
            peer_id: record
            for peer_id, record in self.usable.items()
            if peer_id not in late and has_little_to_do(record, beside.get(peer_id, 0))
        }
        return self.among(idle)

    def run_s(self, stage: RouteStage) -> float:
        """Seconds of a step at one stage."""
        beside = self._sessions.get(stage.peer_id, 0)
        return token_s(self.usable[stage.peer_id], stage.end - stage.start, 1 + beside)

    def hop_s(self, one: str, other: str) -> float:
        """Seconds from one peer to another."""
        return 0.0 if one == other else self._rtt_s.get(frozenset((one, other)), 2 * HOP_S) / 2

    def token_s(self, route: Sequence[RouteStage]) -> float:
        """Seconds of a token, from the first stage through all others and back to the first."""
        peers = [stage.peer_id for stage in route]
        hops_s = sum(map(self.hop_s, peers, (*peers[1:], peers[0])))
        return hops_s + sum(map(self.run_s, route))


Search = Callable[[RingTimes], Ring | None]
"""Finds the quickest ring over some peers."""


def quicker(
    turn: tuple[RouteStage, ...],
    times: RingTimes,
    quickest: Search,
    late: Collection[str] = (),
) -> tuple[RouteStage, ...]:
    """The route to take where it is ``turn``'s turn: the quickest ring over peers with little to
    do that are not ``late``, if ``turn`` takes much longer."""
    ring = quickest(times.over_idle(late))
    return turn if ring is None or ring[0] > QUICKER_MIN * times.token_s(turn) else ring[1]


def quickest_ring(
    edges: Mapping[str, Collection[str]], ends: Mapping[str, int], times: RingTimes
) -> Ring | None:
    """The ring of the least time per token over ``times.usable`` peers; None: there is none.

    ``edges`` lead from the source and from each peer to the peers of the next stage, and each peer
    runs the layers up to its place in ``ends``. Every link is looked at once; the least times to
    the last layer bound what the search from each first stage can find.
    """
    layers = max(ends.values(), default=0)
    firsts, steps = _steps(edges, ends, times)
    least_s = math.inf
    found: tuple[str, ...] = ()
    for first_s, first in firsts:
        best: dict[str, tuple[float, tuple[str, ...]]] = {first: (first_s, (first,))}
        reached = [(ends[first], first)]
        while reached:
            _, peer_id = heappop(reached)
            time_s, route = best[peer_id]
            if ends[peer_id] == layers and time_s + times.hop_s(peer_id, first) < least_s:
                least_s, found = time_s + times.hop_s(peer_id, first), route
            if len(route) == STAGES_MAX:
                continue
            for rest_s, step_s, head in steps[peer_id]:
                if time_s + rest_s >= least_s:
                    break
                if head not in best:
                    heappush(reached, (ends[head], head))
                if head not in best or time_s + step_s < best[head][0]:
                    best[head] = time_s + step_s, (*route, head)
    starts = (0, *(ends[peer_id] for peer_id in found))
    stages = zip(found, starts, strict=False)
    ring = tuple(RouteStage(peer_id=p, start=at, end=ends[p]) for p, at in stages)
    return (least_s, ring) if ring else None


def _steps(
    edges: Mapping[str, Collection[str]], ends: Mapping[str, int], times: RingTimes
) -> tuple[list[tuple[float, str]], dict[str, list[Step]]]:
    """The first stages, each with its seconds, and the steps from all peers that they lead to,
    those that are nearest to the last layer first."""
    usable, layers = times.usable, max(ends.values(), default=0)
    run_s: dict[tuple[str, int], float] = {}

    def heads_of(tail: str, start: int) -> list[str]:
        for head in edges.get(tail, ()):
            if (head, start) not in run_s and head in usable:
                end = ends.get(head, 0)
                if usable[head].holds(start, end):
                    run_s[head, start] = times.run_s(RouteStage(peer_id=head, start=start, end=end))
        return [head for head in edges.get(tail, ()) if (head, start) in run_s]

    def per_layer(head: str) -> tuple[float, str]:
        return run_s[head, 0] / ends[head], head

    firsts = sorted(heads_of(SOURCE, 0), key=per_layer)[:ENTRIES_MAX]
    heads: dict[str, list[str]] = {}
    to_do = list(firsts)
    while to_do:
        peer_id = to_do.pop()
        if peer_id not in heads:
            heads[peer_id] = heads_of(peer_id, ends[peer_id])
            to_do += heads[peer_id]
    left_s: dict[str, float] = {}
    steps: dict[str, list[Step]] = {}
    for peer_id in sorted(heads, key=lambda peer_id: -ends[peer_id]):
        following = steps[peer_id] = []
        for head in heads[peer_id]:
            step_s = times.hop_s(peer_id, head) + run_s[head, ends[peer_id]]
            following.append((step_s + left_s[head], step_s, head))
        following.sort()
        least_s = following[0][0] if following else math.inf
        left_s[peer_id] = 0.0 if ends[peer_id] == layers else least_s
    return [(run_s[head, 0], head) for head in firsts], steps
