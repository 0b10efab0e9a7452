"""Which session should move from a stage peer to a freer holder of the same layers. Pure.

Virtual usage and freeness are Llumnix's (OSDI'24, §4.4). A peer's usage is the KV that it promised,
and beside that what it *wants* free: headroom while it serves a session of high priority, and what
a session needs that it just refused. Freeness is what is left, per session of the batch. The least
free gives to the freest, the second least to the second freest, while that evens them out.

Every peer decides for itself, from its own state and from what others announced a while ago. So
that nothing swings, a move needs a gap of a factor two and may not turn the gap around; what was
given lately counts at the receiver whatever its record says; and a session that moved lately stays.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

from coordinator.routing.routes import HOP_S, NoRoute
from dht.messages.types import LinksRecord, NodeRecord, NodeState, RouteStage


def freeness(room_tokens: float, sessions: int) -> float:
    """Room per session, in tokens; what lacks is not divided, so less of it is always freer.

    Llumnix §4.4.2: ``(M - ΣV) / B``, for how many steps the batch can go on.
    """
    return room_tokens / max(1, sessions) if room_tokens > 0 else room_tokens


def evens_out(giver_after: float, taker_after: float) -> bool:
    """Whether a move shrinks the imbalance: the taker stays at least as free as the giver gets."""
    return taker_after >= giver_after


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """How full one stage peer is."""

    start: int
    end: int
    """Layers served: ``[start, end)``."""
    free_tokens: int
    """KV that is promised to nobody."""
    wanted_tokens: int = 0
    """KV that it would like to have free: headroom, and the demand of who was refused."""
    sessions: int = 0
    speed: float = 1.0
    """Beside the one who compares: as free and half as fast counts as half as free."""

    @property
    def freeness(self) -> float:
        """See :func:`freeness`; -inf for one without layers."""
        if self.start >= self.end:
            return float("-inf")
        value = freeness(self.free_tokens - self.wanted_tokens, self.sessions)
        return value * self.speed if value > 0 else value

    def with_more(self, sessions: int, tokens: int) -> "PeerLoad":
        """With so many sessions that need so much KV in all beside the present ones."""
        return replace(
            self, sessions=max(0, self.sessions + sessions), free_tokens=self.free_tokens - tokens
        )


def load_of(record: NodeRecord, *, beside: NodeRecord | None = None) -> PeerLoad:
    """The load that a peer announced; with ``beside``, its speed next to that one's."""
    serving = record.state is NodeState.SERVING
    return PeerLoad(
        start=record.start if serving else 0,
        end=record.end if serving else 0,
        free_tokens=record.kv_tokens_free,
        wanted_tokens=record.kv_tokens_wanted,
        sessions=record.sessions,
        speed=1.0 if beside is None else _speed(record, beside),
    )


def _speed(record: NodeRecord, beside: NodeRecord) -> float:
    """Tokens/s of one peer over another's, with as many layers; 1 where either is unknown."""
    layers = min(beside.end - beside.start, len(record.tokens_per_s), len(beside.tokens_per_s))
    if layers < 1:
        return 1.0
    mine, theirs = beside.tokens_per_s[layers - 1], record.tokens_per_s[layers - 1]
    return theirs / mine if mine > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A session that decodes at the peer that decides."""

    session: str
    start: int
    end: int
    """The layers that it runs there."""
    route: frozenset[str]
    """Peers of its route."""
    neighbours: frozenset[str]
    """Those that its rows or tokens come from and go to, the client aside."""
    kv_tokens: int
    """Promised to it."""
    ran_tokens: int
    moved_s: float
    """For how long it has been there, where it moved there; inf where it began there."""
    urgent: bool = False
    """Of high priority: it stays, and others make room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """A session whose owner is asked to move it."""

    session: str
    to: str
    kv_tokens: int
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """When to ask, and how often. Times in seconds."""

    sessions_least: int = 4
    """With fewer, a peer keeps them unless room lacks: a move costs bytes and gains nobody much."""
    gap: float = 2.0
    """The freest must be so many times freer before a move begins."""
    moves_max: int = 2
    """Under way from one peer at a time; to each other peer one at a time."""
    left_tokens_least: int = 32
    """A session that is nearly at its end is left where it is."""
    stays_s: float = 30.0
    """A session that moved here stays for so long at least."""
    limit_s: float = 25.0
    """A move that has not happened by then is given up, a little after its owner did."""
    bar_s: float = 30.0
    """Its taker is then not asked for so long."""
    slower_s: float = HOP_S
    """A session is not moved where its tokens would be so much longer on their way."""
    lag_s: float = 20.0
    """What was given counts at the receiver for so long, beside what its record says."""


@dataclass(slots=True, kw_only=True)
class Balance:
    """What one peer decides over time. At most one move per pair and session is under way."""

    me: str
    config: BalanceConfig = field(default_factory=BalanceConfig)
    under_way: dict[str, MoveOrder] = field(default_factory=dict)
    """By who takes."""
    given: list[tuple[float, MoveOrder]] = field(default_factory=list)
    barred_s: dict[str, float] = field(default_factory=dict)
    """Until when a peer is not asked to take anything."""

    def needs_relief(self, mine: PeerLoad) -> bool:
        """Whether it is worth looking at others at all."""
        lacks = mine.freeness < 0 or mine.sessions >= self.config.sessions_least
        return lacks and mine.start < mine.end

    def step(
        self,
        now_s: float,
        mine: PeerLoad,
        others: Mapping[str, PeerLoad],
        here: Collection[Movable],
        present: Collection[str],
        rtt_s: Mapping[frozenset[str], float] | None = None,
    ) -> tuple[MoveOrder, ...]:
        """The moves to ask for now, those under way included.

        ``here`` are sessions that could move, ``present`` all that hold KV here: an order ends when
        its session is gone, or at its time limit. ``rtt_s`` is what is known of links.
        """
        self._settle(now_s, present)
        loads = dict(others)
        for order in [*self.under_way.values(), *(order for _, order in self.given)]:
            if order.to in loads:
                loads[order.to] = loads[order.to].with_more(1, order.kv_tokens)
        for order in self.under_way.values():
            mine = mine.with_more(-1, -order.kv_tokens)
        while len(self.under_way) < self.config.moves_max:
            barred = self.barred_s.keys() | self.under_way.keys()
            open_to = {peer: load for peer, load in loads.items() if peer not in barred}
            following = self._next(now_s, mine, open_to, here, rtt_s or {})
            if following is None:
                break
            self.under_way[following.to] = following
            mine = mine.with_more(-1, -following.kv_tokens)
        return tuple(self.under_way.values())

    def _settle(self, now_s: float, present: Collection[str]) -> None:
        """Forget what is over."""
        config = self.config
        self.given = [(at_s, o) for at_s, o in self.given if now_s - at_s < config.lag_s]
        self.barred_s = {peer: at_s for peer, at_s in self.barred_s.items() if now_s < at_s}
        for to, order in list(self.under_way.items()):
            if order.session not in present:
                self.given.append((now_s, order))
                del self.under_way[to]
            elif now_s >= order.until_s:
                self.barred_s[to] = now_s + config.bar_s
                del self.under_way[to]

    def _next(
        self,
        now_s: float,
        mine: PeerLoad,
        others: Mapping[str, PeerLoad],
        here: Collection[Movable],
        rtt_s: Mapping[frozenset[str], float],
    ) -> MoveOrder | None:
        """The first session, cheapest first, whose move to its partner evens the two out."""
        if not self.needs_relief(mine):
            return None
        asked = {order.session for order in self.under_way.values()}
        partners: dict[tuple[int, int], str | None] = {}
        for each in sorted(here, key=self._order):
            if each.session in asked or not self._may_go(each):
                continue
            layers = (each.start, each.end)
            if layers not in partners:
                partners[layers] = partner_of(self.me, mine, others, layers, self.config.gap)
            to = partners[layers]
            if to is None or to in each.route:
                continue
            if detour_s(self.me, to, each.neighbours, rtt_s) > self.config.slower_s:
                continue
            taker = others[to].with_more(1, each.kv_tokens)
            giver = mine.with_more(-1, -each.kv_tokens)
            if taker.freeness >= 0 and evens_out(giver.freeness, taker.freeness):
                until_s = now_s + self.config.limit_s
                return MoveOrder(
                    session=each.session, to=to, kv_tokens=each.kv_tokens, until_s=until_s
                )
        return None

    def _order(self, each: Movable) -> tuple[int, int]:
        """The short ones first; among those about as long, others than another stage of the same
        route would take, as only one of a session's stages moves at a time."""
        return each.ran_tokens.bit_length(), crc32(f"{self.me} {each.session}".encode())

    def _may_go(self, each: Movable) -> bool:
        config = self.config
        left = each.kv_tokens - each.ran_tokens
        lasts = left >= config.left_tokens_least
        return lasts and not each.urgent and each.moved_s >= config.stays_s


def partner_of(
    me: str, mine: PeerLoad, others: Mapping[str, PeerLoad], layers: tuple[int, int], gap: float
) -> str | None:
    """Who should take from ``me`` among the holders of ``layers``; None: nobody.

    The least free gives to the freest, the next to the next (Llumnix §4.4.3): peers that see the
    same records choose different partners without asking each other.
    """
    start, end = layers
    holders = {p: each for p, each in others.items() if each.start <= start < end <= each.end}
    holders[me] = mine
    ordered = sorted(holders, key=lambda peer: (holders[peer].freeness, peer))
    partner = ordered[-1 - ordered.index(me)]
    theirs = holders[partner].freeness
    if partner == me or theirs <= 0:
        return None
    return partner if mine.freeness < 0 or theirs >= gap * mine.freeness else None


def round_trips(records: Mapping[str, LinksRecord]) -> dict[frozenset[str], float]:
    """Round trips by pair of peers, in seconds, as one of the two says; the longer of both."""
    known: dict[frozenset[str], float] = {}
    for author, record in records.items():
        for link in record.links:
            if author in (link.source, link.target):
                pair = frozenset((link.source, link.target))
                known[pair] = max(link.rtt_s, known.get(pair, 0.0))
    return known


def detour_s(
    me: str, to: str, neighbours: Collection[str], rtt_s: Mapping[frozenset[str], float]
) -> float:
    """How much longer a token's way is over ``to`` than over ``me``; 0 for what nobody measured."""
    total_s = 0.0
    for peer in neighbours:
        theirs, mine = rtt_s.get(frozenset((to, peer))), rtt_s.get(frozenset((me, peer)))
        if theirs is not None and mine is not None:
            total_s += (theirs - mine) / 2
    return total_s


def swapped(
    route: tuple[RouteStage, ...], leaving: str, record: NodeRecord
) -> tuple[RouteStage, ...] | NoRoute:
    """``route`` with the peer of ``record`` in the place of ``leaving``, for the same layers."""
    if record.peer_id in {stage.peer_id for stage in route}:
        return NoRoute(reason="that peer is on the route already")
    held = [stage for stage in route if stage.peer_id == leaving]
    if not held or not all(record.holds(stage.start, stage.end) for stage in held):
        return NoRoute(reason="that peer does not hold the layers")
    return tuple(
        replace(stage, peer_id=record.peer_id) if stage.peer_id == leaving else stage
        for stage in route
    )
