"""Elects the coordinator by leases in a DHT that has no compare-and-swap.

Two leaders can exist for a while and must be harmless: plans carry versions, and a peer adopts only
larger ones. The state machine is pure: :func:`step` takes an observation and the time, and returns
the new state with effects to perform in order.

A lease is renewed three times in its life, which is cheap. Pings detect a lost holder much
sooner: a lease is void once its holder answers neither this peer nor the witnesses it asks
(:class:`ElectionView`, ``dead``) and the lease has not been renewed since.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.plans.versions import rank
from dht.messages.types import NO_VERSION, LeaseRecord, PlanVersion
from dht.records.directory import LIFETIME_S, RecordKind

LEASE_S = LIFETIME_S[RecordKind.LEASE]
"""Time for which a lease lives once it was stored."""
RENEW_S = LEASE_S / 3
"""Time between renewals: two of them may be lost while the lease lives."""
UNRENEWED_S = 1.25 * RENEW_S
"""Time without renewal after which a lease is void if its holder does not answer this peer,
whatever others say.

A renewed lease counts even if this peer cannot reach its holder: otherwise two peers that
cannot reach each other would take the lead from one another for ever.
"""
FENCE_S = 2 * RENEW_S
"""Time without a stored lease after which a leader stops acting: another may be elected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionConfig:
    """How candidates and leaders wait for each other; times in seconds."""

    stagger_s: float = 5.0
    """Time that a candidate waits per rank, so that mostly one of them tries."""
    stagger_max_s: float = 60.0
    """Maximum of that time: candidates that do not exist take places in the succession, too."""
    catch_up_s: float = 20.0
    """Minimum time between two moves of a leader's term past a higher one: claims may be false."""
    term_max: int = 1 << 48
    """Maximum term on the wire; :mod:`coordinator.plans.versions` bounds terms far below."""


ELECTION = ElectionConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """One peer's state of the election. ``term`` is its own while it holds or seeks a lease."""

    peer_id: str
    term: int = 0
    seeking: bool = False
    """Whether this peer's lease was stored but not yet read back as the best."""
    leading: bool = False
    stored_s: float = 0.0
    leaderless_since_s: float | None = None
    leader: str | None = None
    highest_term: int = 0
    """The highest term of all leases and versions that count now."""
    caught_up_s: float | None = None
    """When this peer last moved its term past another's higher version."""
    renewed: Mapping[str, tuple[LeaseRecord, float]] = field(default_factory=dict)
    """The newest lease seen of each holder, and when that lease was first seen."""
    silent_since_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionView:
    """An observation: living leases, peers that may lead, and the highest plan version seen.

    ``silent`` peers do not answer this peer's pings; the ``dead`` among them do not answer the
    witnesses either. ``elders`` are candidates that were first seen long ago; they try first.
    ``distrusted`` peers published plans that were refused, or lead and do nothing: their claims are
    ignored, as are terms above ``term_max``.
    """

    leases: Mapping[str, LeaseRecord]
    candidates: frozenset[str]
    version: PlanVersion = NO_VERSION
    silent: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    distrusted: frozenset[str] = frozenset()
    term_max: int = ELECTION.term_max
    elders: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStored:
    """The lease of ``term`` was stored."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLease:
    """Store a lease of ``term`` now; report :class:`LeaseStored` when some peer accepted it."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected:
    """A new coordinator is to be followed; it may be this peer."""

    peer_id: str
    term: int


ElectionEvent = ElectionView | LeaseStored
ElectionEffect = StoreLease | Elected


def step(
    state: Election, event: ElectionEvent, now_s: float
) -> tuple[Election, tuple[ElectionEffect, ...]]:
    """The next state, and the effects to perform in order."""
    match event:
        case LeaseStored(term=term):
            return _stored(state, term, now_s), ()
        case ElectionView():
            return _observed(state, event, now_s)


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


def _void(state: Election, observed: ElectionView, now_s: float) -> frozenset[str]:
    """Holders whose leases are void: they neither answer nor renew."""
    return frozenset(
        peer_id
        for peer_id, (_, seen_s) in state.renewed.items()
        if peer_id in observed.silent
        and (
            now_s - seen_s >= UNRENEWED_S
            or (peer_id in observed.dead and seen_s <= state.silent_since_s[peer_id])
        )
    )


def _credible(observed: ElectionView) -> dict[str, LeaseRecord]:
    """Leases that may count: those of trusted candidates, with terms that can be honest."""
    return {
        peer_id: lease
        for peer_id, lease in observed.leases.items()
        if peer_id == lease.peer_id
        and peer_id in observed.candidates - observed.distrusted
        and lease.term <= observed.term_max
    }


def _best(observed: ElectionView, void: frozenset[str]) -> LeaseRecord | None:
    """The lease to follow: the one of the highest term, within that of the smallest rank."""
    living = [lease for lease in observed.leases.values() if lease.peer_id not in void]
    return max(living, key=lambda ls: (ls.term, -rank(ls.peer_id, ls.term)), default=None)


def succession(term: int, observed: ElectionView) -> list[str]:
    """The candidates in the order in which they try to be elected in ``term``."""
    living = observed.candidates - observed.silent - observed.distrusted
    return sorted(living, key=lambda peer: (peer not in observed.elders, rank(peer, term)))


def _observed(
    state: Election, observed: ElectionView, now_s: float
) -> tuple[Election, tuple[ElectionEffect, ...]]:
    observed = replace(observed, leases=_credible(observed))
    claims = [ls.term for ls in observed.leases.values()]
    claims += [observed.version.term] if observed.version.term <= observed.term_max else []
    state = replace(state, highest_term=max(claims, default=0))
    state = _note_renewals(state, observed, now_s)
    best = _best(observed, _void(state, observed, now_s))
    effects: list[ElectionEffect] = []
    if state.leading or state.seeking:
        state = _hold(state, best, observed, now_s, effects)
    elif best is not None and best.peer_id != state.peer_id:
        state = replace(state, leaderless_since_s=None)
    else:
        followed = best is not None
        state = _seek(state, observed, now_s, effects, followed=followed)
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
    effects: list[ElectionEffect],
) -> Election:
    """Renew, confirm or give up this peer's own lease."""
    mine = (state.term, -rank(state.peer_id, state.term))
    better = best is not None and (best.term, -rank(best.peer_id, best.term)) > mine
    fenced = state.leading and now_s - state.stored_s > FENCE_S
    if better or fenced:
        return replace(state, leading=False, seeking=False, leaderless_since_s=None)
    if best is not None and best.peer_id == state.peer_id and best.term == state.term:
        state = replace(state, leading=True, seeking=False)
    if _must_catch_up(state, observed, now_s):
        # A plan of a later term exists: this peer's plans would never be adopted again.
        state = replace(
            state, term=observed.version.term + 1, leading=False, seeking=True, caught_up_s=now_s
        )
        effects.append(StoreLease(term=state.term))
    elif state.seeking or now_s - state.stored_s >= RENEW_S:
        effects.append(StoreLease(term=state.term))
    return state


def _must_catch_up(state: Election, observed: ElectionView, now_s: float) -> bool:
    rested = state.caught_up_s is None or now_s - state.caught_up_s >= ELECTION.catch_up_s
    return state.term < observed.version.term < observed.term_max and rested


def _seek(
    state: Election,
    observed: ElectionView,
    now_s: float,
    effects: list[ElectionEffect],
    *,
    followed: bool,
) -> Election:
    """Without a leader, try for a lease when this peer's turn has come.

    A peer that is ``followed`` tries at once: others still follow its lease, which it gave up for
    one that has become void since.
    """
    if state.peer_id not in observed.candidates:
        return replace(state, leaderless_since_s=None)
    since_s = now_s if state.leaderless_since_s is None else state.leaderless_since_s
    state = replace(state, leaderless_since_s=since_s)
    term = state.highest_term + 1
    if term > observed.term_max:
        return state  # the highest term of this second is taken: wait for the next second
    itself = replace(
        observed,
        silent=observed.silent - {state.peer_id},
        distrusted=observed.distrusted - {state.peer_id},
    )
    place = 0 if followed else succession(term, itself).index(state.peer_id)
    if now_s - since_s >= min(place * ELECTION.stagger_s, ELECTION.stagger_max_s):
        effects.append(StoreLease(term=term))
        state = replace(state, term=term, seeking=True, stored_s=now_s)
    return state
