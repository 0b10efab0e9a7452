"""Who coordinates: leases in a DHT that has no compare-and-swap.

Two leaders can exist for a while and must be harmless: plans carry versions, and a peer adopts only
larger ones. The machine is pure: :func:`step` takes what was seen and the time, and returns the
new state with effects to perform in order.

A lease lives for 30 s and is renewed every 10 s, which is cheap; that its holder is gone is seen
much sooner, by pings: a lease counts for nothing once its holder answers neither this peer nor
those it asks (:class:`ElectionView`, ``dead``) and has not been renewed since.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dht.messages.types import NO_VERSION, LeaseRecord, PlanVersion

TERM_MAX = 1 << 48
"""What the wire allows; :mod:`coordinator.plans.versions` bounds terms far below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionConfig:
    """Times in seconds of a monotonic clock."""

    renew_s: float = 10.0
    unrenewed_s: float = 12.5
    """The lease of a holder that does not answer this peer's pings is void when not renewed for
    so long, whatever others say.

    One that is renewed counts, even if this peer in particular cannot reach its holder: otherwise
    two peers that cannot reach each other would take the lead from one another for ever.
    """
    fence_s: float = 20.0
    """A leader that could not store its lease for so long stops acting: others may have elected."""
    stagger_s: float = 5.0
    """Candidates wait so long per rank, so that mostly one of them tries."""
    catch_up_s: float = 20.0
    """A leader moves its term past a higher one at most this often: claims may be made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """One peer's view. ``term`` is its own while it holds or seeks a lease."""

    peer_id: str
    term: int = 0
    seeking: bool = False
    """Its lease was stored but not yet read back as the best."""
    leading: bool = False
    stored_s: float = 0.0
    leaderless_since_s: float | None = None
    leader: str | None = None
    highest_term: int = 0
    """Of all leases and versions that count now."""
    caught_up_s: float | None = None
    """When it last moved its term past somebody's higher version."""
    renewed: Mapping[str, tuple[LeaseRecord, float]] = field(default_factory=dict)
    """The newest lease seen of each holder, and when it was first seen."""
    silent_since_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionView:
    """What the DHT showed: living leases, peers that may lead, and the highest plan version seen.

    ``silent`` peers do not answer this peer's pings; the ``dead`` among them do not answer the
    others that were asked either. ``elders`` are candidates that have been here for long; they try
    first, the others after them. ``distrusted`` peers published plans that were refused, or lead
    and do nothing: what they claim counts for nothing. Terms above ``term_max`` are made up.
    """

    leases: Mapping[str, LeaseRecord]
    candidates: frozenset[str]
    version: PlanVersion = NO_VERSION
    silent: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    distrusted: frozenset[str] = frozenset()
    term_max: int = TERM_MAX
    elders: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The lease of ``term`` was stored."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLease:
    """Store a lease of ``term`` now, and report with :class:`Stored` when somebody took it."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected:
    """Another coordinator than before is the one to follow; it may be this peer."""

    peer_id: str
    term: int


Event = ElectionView | Stored
Effect = StoreLease | Elected


def rank(peer_id: str, term: int) -> int:
    """Rendezvous hash of a candidate in a term: the smallest goes first."""
    digest = hashlib.sha256(f"{term}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def step(
    state: Election, event: Event, now_s: float, config: ElectionConfig
) -> tuple[Election, tuple[Effect, ...]]:
    """The next state, and what to do."""
    match event:
        case Stored(term=term):
            return _stored(state, term, now_s), ()
        case ElectionView():
            return _observed(state, event, now_s, config)


def _stored(state: Election, term: int, now_s: float) -> Election:
    if term != state.term or not (state.seeking or state.leading):
        return state
    return replace(state, stored_s=now_s)


def _note_renewals(state: Election, observed: ElectionView, now_s: float) -> Election:
    renewed: dict[str, tuple[LeaseRecord, float]] = {}
    for peer_id, lease in observed.leases.items():
        known = state.renewed.get(peer_id)
        renewed[peer_id] = known if known is not None and known[0] == lease else (lease, now_s)
    since_s = {p: state.silent_since_s.get(p, now_s) for p in observed.silent}
    return replace(state, renewed=renewed, silent_since_s=since_s)


def _void(
    state: Election, observed: ElectionView, now_s: float, config: ElectionConfig
) -> frozenset[str]:
    """Holders that neither answer nor renew."""
    return frozenset(
        peer_id
        for peer_id, (_, seen_s) in state.renewed.items()
        if peer_id in observed.silent
        and (
            now_s - seen_s >= config.unrenewed_s
            or (peer_id in observed.dead and seen_s <= state.silent_since_s[peer_id])
        )
    )


def _credible(observed: ElectionView) -> dict[str, LeaseRecord]:
    """Leases that may count: of candidates that are trusted, with terms that can be honest."""
    return {
        peer_id: lease
        for peer_id, lease in observed.leases.items()
        if peer_id == lease.peer_id
        and peer_id in observed.candidates - observed.distrusted
        and lease.term <= observed.term_max
    }


def _best(observed: ElectionView, void: frozenset[str]) -> LeaseRecord | None:
    """The lease to follow: the highest term, the smallest rank within it."""
    living = [lease for lease in observed.leases.values() if lease.peer_id not in void]
    return max(living, key=lambda ls: (ls.term, -rank(ls.peer_id, ls.term)), default=None)


def succession(term: int, observed: ElectionView) -> list[str]:
    """Who tries first, second, … to be elected in ``term``."""
    living = observed.candidates - observed.silent - observed.distrusted
    return sorted(living, key=lambda peer: (peer not in observed.elders, rank(peer, term)))


def _observed(
    state: Election, observed: ElectionView, now_s: float, config: ElectionConfig
) -> tuple[Election, tuple[Effect, ...]]:
    observed = replace(observed, leases=_credible(observed))
    claims = [ls.term for ls in observed.leases.values()]
    claims += [observed.version.term] if observed.version.term <= observed.term_max else []
    state = replace(state, highest_term=max(claims, default=0))
    state = _note_renewals(state, observed, now_s)
    best = _best(observed, _void(state, observed, now_s, config))
    effects: list[Effect] = []
    if state.leading or state.seeking:
        state = _hold(state, best, observed, now_s, config, effects)
    elif best is not None and best.peer_id != state.peer_id:
        state = replace(state, leaderless_since_s=None)
    else:
        followed = best is not None
        state = _seek(state, observed, now_s, config, effects, followed=followed)
    leader = state.peer_id if state.leading else None
    if leader is None and best is not None and best.peer_id != state.peer_id:
        leader = best.peer_id
    if leader is not None and leader != state.leader:
        term = state.term if leader == state.peer_id or best is None else best.term
        effects.append(Elected(peer_id=leader, term=term))
    return replace(state, leader=leader), tuple(effects)


def _hold(
    state: Election,
    best: LeaseRecord | None,
    observed: ElectionView,
    now_s: float,
    config: ElectionConfig,
    effects: list[Effect],
) -> Election:
    """Renew, confirm or give up this peer's own lease."""
    mine = (state.term, -rank(state.peer_id, state.term))
    better = best is not None and (best.term, -rank(best.peer_id, best.term)) > mine
    fenced = state.leading and now_s - state.stored_s > config.fence_s
    if better or fenced:
        return replace(state, leading=False, seeking=False, leaderless_since_s=None)
    if best is not None and best.peer_id == state.peer_id and best.term == state.term:
        state = replace(state, leading=True, seeking=False)
    if _must_catch_up(state, observed, now_s, config):
        # Somebody planned in a later term: this peer's plans would never be adopted again.
        state = replace(
            state, term=observed.version.term + 1, leading=False, seeking=True, caught_up_s=now_s
        )
        effects.append(StoreLease(term=state.term))
    elif state.seeking or now_s - state.stored_s >= config.renew_s:
        effects.append(StoreLease(term=state.term))
    return state


def _must_catch_up(
    state: Election, observed: ElectionView, now_s: float, config: ElectionConfig
) -> bool:
    rested = state.caught_up_s is None or now_s - state.caught_up_s >= config.catch_up_s
    return state.term < observed.version.term < observed.term_max and rested


def _seek(
    state: Election,
    observed: ElectionView,
    now_s: float,
    config: ElectionConfig,
    effects: list[Effect],
    *,
    followed: bool,
) -> Election:
    """Nobody leads: try for a lease when this peer's turn has come.

    At once where it is ``followed``: by a lease of its own that it has given up, for one that is
    void since. The others wait for nobody else.
    """
    if state.peer_id not in observed.candidates:
        return replace(state, leaderless_since_s=None)
    since_s = now_s if state.leaderless_since_s is None else state.leaderless_since_s
    state = replace(state, leaderless_since_s=since_s)
    term = state.highest_term + 1
    if term > observed.term_max:
        return state  # somebody claimed the highest term of this second: wait for the next
    itself = replace(
        observed,
        silent=observed.silent - {state.peer_id},
        distrusted=observed.distrusted - {state.peer_id},
    )
    place = 0 if followed else succession(term, itself).index(state.peer_id)
    if now_s - since_s >= place * config.stagger_s:
        effects.append(StoreLease(term=term))
        state = replace(state, term=term, seeking=True, stored_s=now_s)
    return state
