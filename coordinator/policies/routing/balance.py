"""Decides which session moves from a stage peer to a freer holder of the same layers. Pure.

Virtual usage and freeness are Llumnix's (OSDI'24, §4.4). A peer's usage is the KV that it promised
plus the KV that it *wants* free: headroom while it serves a session of high priority, and the need
of a session that it just refused. Freeness is the remaining KV per session of the batch. The least
free peer gives to the freest, the second least free to the second freest, while that evens them
out.

By default sessions move to make room alone: where a peer lacks KV. Moves that even out peers with
room are for who asks for them (``evens``). Llumnix moves a request whole, between instances of one
data centre; here one stage of a session moves, and a token that has a longer way from then on keeps
the session's KV longer at all of its stages. With pipelines 20 ms apart, moves of 18 ms each made
tokens 40% slower, and the KV ran out (``python -m bench.papers llumnix``). So a move that only
evens out may add next to nothing to a token's way (``evening_slower_s``).

Every peer decides for itself, from its own state and from records that may be old. Three rules
prevent oscillation: a move needs a gap of a factor two and may not reverse it; a session given
lately counts at its receiver even if the receiver's record does not show it yet; and a session that
moved lately stays.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

from coordinator.policies.routing.quickest import QUICKEST
from coordinator.policies.routing.routes import NoRoute
from dht.messages.types import Link, LinksRecord, NodeRecord, NodeState, RouteStage


def freeness(room_tokens: float, sessions: int) -> float:
    """Freeness: room per session, in tokens; negative room is not divided by the sessions.

    So the peer that lacks less KV is always the freer one. Llumnix §4.4.2: ``(M - ΣV) / B``, the
    number of steps for which the batch can go on.
    """
    return room_tokens / max(1, sessions) if room_tokens > 0 else room_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """The load of one stage peer: layers, free and wanted KV, sessions, speed."""

    start: int
    end: int
    """End of the layers served, ``[start, end)``."""
    free_tokens: int
    """KV promised to nobody, in tokens."""
    wanted_tokens: int = 0
    """KV that the peer wants free, in tokens: headroom, and the demand of refused sessions."""
    sessions: int = 0
    speed: float = 1.0
    """Speed relative to the peer that compares: half as fast counts as half as free."""

    @property
    def freeness(self) -> float:
        """See :func:`freeness`; -inf for a peer without layers."""
        if self.start >= self.end:
            return float("-inf")
        value = freeness(self.free_tokens - self.wanted_tokens, self.sessions)
        return value * self.speed if value > 0 else value

    def with_more(self, sessions: int, tokens: int) -> "PeerLoad":
        """The load with ``sessions`` more sessions, which need ``tokens`` of KV in all."""
        return replace(
            self, sessions=max(0, self.sessions + sessions), free_tokens=self.free_tokens - tokens
        )


def load_of(record: NodeRecord, *, beside: NodeRecord | None = None) -> PeerLoad:
    """The load that a peer announced; ``speed`` is relative to ``beside`` where that is given."""
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
    """Ratio of two peers' tokens/s at the same number of layers; 1 where either is unknown."""
    layers = min(beside.end - beside.start, len(record.tokens_per_s), len(beside.tokens_per_s))
    if layers < 1:
        return 1.0
    mine, theirs = beside.tokens_per_s[layers - 1], record.tokens_per_s[layers - 1]
    return theirs / mine if mine > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A session that decodes at the deciding peer."""

    session: str
    start: int
    end: int
    """End of the layers that the session runs here, ``[start, end)``."""
    route: frozenset[str]
    """All peers of the session's route."""
    neighbours: frozenset[str]
    """Peers that its rows or tokens come from and go to; without the client."""
    kv_tokens: int
    """KV promised to the session or held by it, in tokens."""
    left_tokens: int
    """Most tokens that it may still run."""
    ran_tokens: int
    moved_s: float
    """Seconds since the session moved here; inf if it began here."""
    urgent: bool = False
    """Whether the session has high priority: it stays, and others make room for it."""


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

    evens: bool = False
    """Whether sessions move while KV suffices, too, to even peers out."""
    sessions_least: int = 4
    """Minimum sessions to move one away while KV suffices: with fewer, a move gains little."""
    gap: float = 2.0
    """Minimum ratio of the taker's freeness to the giver's."""
    moves_max: int = 2
    """Maximum moves under way from one peer; to each taker at most one."""
    left_tokens_least: int = 32
    """Minimum tokens left of a session's grant for it to move: one near its end stays."""
    stays_s: float = 30.0
    """Minimum time that a session stays after it moved here."""
    move_s: float = 20.0
    """How long the new stages of a move may take to catch up, as the session's owner allows."""
    bar_s: float = 30.0
    """Time for which a taker is not asked after a move to it missed its limit."""
    slower_s: float = QUICKEST.hop_s
    """Maximum time that a move which makes room may add to a token's way."""
    evening_slower_s: float = 0.002
    """The same of a move that only evens out: about what a step takes beside its layers."""
    lag_s: float = 20.0
    """Time for which a session given away counts at its receiver beside the receiver's record."""

    @property
    def limit_s(self) -> float:
        """Time limit of a move at the peer that asked for it; a little longer than ``move_s``."""
        return 1.25 * self.move_s


BALANCE = BalanceConfig()


@dataclass(slots=True, kw_only=True)
class Balance:
    """One peer's moves over time. At most one move per pair and session is under way."""

    me: str
    config: BalanceConfig = field(default_factory=BalanceConfig)
    under_way: dict[str, MoveOrder] = field(default_factory=dict)
    """Moves under way, by the taker's peer id."""
    given: list[tuple[float, MoveOrder]] = field(default_factory=list)
    barred_s: dict[str, float] = field(default_factory=dict)
    """Time until which a peer is not asked to take a session, by peer id."""

    def needs_others(self, mine: PeerLoad) -> bool:
        """Whether to know who is freer: KV is short, or there are sessions enough to fill it."""
        crowded = mine.sessions >= self.config.sessions_least
        return (mine.freeness < 0 or crowded) and mine.start < mine.end

    def step(
        self,
        now_s: float,
        mine: PeerLoad,
        others: Mapping[str, PeerLoad],
        here: Collection[Movable],
        present: Collection[str],
        rtt_s: Mapping[frozenset[str], float] | None = None,
    ) -> tuple[MoveOrder, ...]:
        """The moves to ask for now, including those under way.

        ``here`` are the sessions that could move, ``present`` all sessions that hold KV here: an
        order ends when its session is gone, or at its time limit. ``rtt_s`` are the known round
        trips between pairs of peers, in seconds.
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
        """Drop expired entries: orders without a session become given, late ones bar the taker."""
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
        """An order for the cheapest session whose move to its partner evens the two peers out."""
        if not (self.needs_others(mine) and (mine.freeness < 0 or self.config.evens)):
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
            config = self.config
            most_s = config.slower_s if mine.freeness < 0 else config.evening_slower_s
            if detour_s(self.me, to, each.neighbours, rtt_s) > most_s:
                continue
            taker = others[to].with_more(1, each.kv_tokens)
            giver = mine.with_more(-1, -each.kv_tokens)
            if taker.freeness >= max(0, giver.freeness):
                until_s = now_s + self.config.limit_s
                return MoveOrder(
                    session=each.session, to=to, kv_tokens=each.kv_tokens, until_s=until_s
                )
        return None

    def taker_of(self, each: Movable, others: Mapping[str, PeerLoad]) -> str | None:
        """The freest holder of a session's layers with room for it, if there is one: the session
        has to go from here, or wait."""
        loads = {
            peer: load.with_more(1, each.kv_tokens)
            for peer, load in others.items()
            if load.start <= each.start < each.end <= load.end
            and peer not in each.route
            and peer not in self.barred_s
        }
        best = max(loads, key=lambda peer: (loads[peer].freeness, peer), default=None)
        return best if best is not None and loads[best].freeness > 0 else None

    def _order(self, each: Movable) -> tuple[int, int]:
        """Sort key: shortest session first; about equal ones in an order that differs by peer.

        So stages of a route choose different sessions, of which only one stage moves at a time.
        """
        return each.ran_tokens.bit_length(), crc32(f"{self.me} {each.session}".encode())

    def _may_go(self, each: Movable) -> bool:
        config = self.config
        lasts = each.left_tokens >= config.left_tokens_least
        return lasts and not each.urgent and each.moved_s >= config.stays_s


def partner_of(
    me: str, mine: PeerLoad, others: Mapping[str, PeerLoad], layers: tuple[int, int], gap: float
) -> str | None:
    """The peer that should take from ``me`` among the holders of ``layers``; None: nobody.

    The least free peer gives to the freest, the second least free to the second freest (Llumnix
    §4.4.3): peers that see the same records choose different partners without asking each other.
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


def reported(records: Mapping[str, LinksRecord]) -> Iterator[Link]:
    """The links that a peer at one of their ends reports."""
    for author, record in records.items():
        yield from (link for link in record.links if author in (link.source, link.target))


def round_trips(links: Iterable[Link]) -> dict[frozenset[str], float]:
    """Round trips by pair of peers, in seconds; the longer where both ways are known."""
    known: dict[frozenset[str], float] = {}
    for link in links:
        pair = frozenset((link.source, link.target))
        known[pair] = max(link.rtt_s, known.get(pair, 0.0))
    return known


def detour_s(
    me: str, to: str, neighbours: Collection[str], rtt_s: Mapping[frozenset[str], float]
) -> float:
    """Seconds that a token's way is longer over ``to`` than over ``me``; a link that was not
    measured counts as clients count it (``QUICKEST.hop_s``)."""

    def hop_s(a: str, b: str) -> float:
        return rtt_s.get(frozenset((a, b)), 2 * QUICKEST.hop_s) / 2

    return sum(hop_s(to, peer) - hop_s(me, peer) for peer in neighbours)


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
