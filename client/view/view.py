"""A consumer's view of the swarm: who serves what, and over whom a session's route goes.

Pure: the caller reads the records and hands them in, and times are those of its clock, in seconds.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from client.errors import ClosedError
from client.pages.clean import namer
from client.view.avoidance import AVOIDING, Avoidance
from client.view.belief import believed
from client.view.blame import Blame
from client.view.prefixes import PrefixMemory
from client.view.waiting import Waiting
from coordinator.policies.routing.affinity import KnownPrefix, Route, again
from coordinator.policies.routing.balance import load_of, reported, round_trips, swapped
from coordinator.policies.routing.quickest import (
    QUICKEST,
    LatePeers,
    OwnSessions,
    RingTimes,
    quicker,
)
from coordinator.policies.routing.routes import (
    FollowedRouter,
    NoRoute,
    being_loaded,
    replacement,
    route_from_records,
)
from coordinator.problem.model_pin import ModelPin, allowed_models
from dht.messages.session import RefusalCode
from dht.messages.types import (
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanVersion,
)
from dht.process.newest import Newest
from dht.records.directory import LIFETIME_S, RecordKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """What a client believes of peers, for how many seconds, and how many it remembers."""

    poll_s: float = 2.0
    """Time between two looks at the DHT while all is well."""
    avoid_s: float = 15.0
    """Time for which a peer that failed is avoided, unless it joins anew."""
    busy_s: float = 1.0
    """Time for which a peer without room is avoided where it does not say how long."""
    busy_most_s: float = 8.0
    """A peer without room is asked again after this long at the latest, whatever it expects."""
    misled_max: int = 256
    on_time_max: int = 1024
    """Maximum peers that are remembered as having been on time."""
    believed_times: float = 1.5
    """Maximum ratio of the speed that a peer counts with to that of the fastest peer that is known
    here: enough that a faster one gets more turns and shows it, too little to draw all who are
    new."""

    @property
    def stale_s(self) -> float:
        """Time for which a peer whose record was wrong is avoided: until it was read again."""
        return 2 * self.poll_s


TROUBLE_S = LIFETIME_S[RecordKind.NODES]
"""Time after a failure for which a client pings all that serve."""
NOBODY = NoRoute(reason="nobody announces this model")
NO_PIN = ModelPin()
FULL = NoRoute(reason="the peers that hold the missing layers are full")


class SwarmView:
    """The newest records, the plans that the peers follow, and what sessions found out since."""

    def __init__(
        self,
        config: ViewConfig,
        *,
        identity: str = "",
        pin: ModelPin = NO_PIN,
        is_silent: Callable[[str], bool] = lambda peer_id: False,
        secret: bytes = b"",
    ) -> None:
        """``identity``, the client's peer id, decides where among the routes it begins.

        ``pin`` says which of the models under its name is meant; ``is_silent`` tells whether a peer
        leaves pings unanswered; ``secret`` is known to this client alone.
        """
        self._config = config
        self._is_silent = is_silent
        self._router = FollowedRouter(identity, self._freeness_of, self._credit_of)
        self.nodes: Mapping[str, NodeRecord] = {}
        """The peers' newest announcements by peer id."""
        self._kv_tokens_free: int | None = None
        """Counted once for each reading of records."""
        self.pin = pin
        """Which model is meant; with the fingerprint of the first that was followed."""
        self.spec: ModelSpec | None = None
        """The model as a peer describes it; None while no peer announces the one that is meant."""
        self.models: tuple[ModelSpec, ...] = ()
        """The models that may be meant; more than one where that is not known."""
        self.avoidance = Avoidance()
        self.waiting = Waiting()
        self.own = OwnSessions()
        """This client's sessions, which peers announce late."""
        self._rtt_s: Mapping[frozenset[str], float] = {}
        self._late = LatePeers()
        self._on_time: Newest[str, None] = Newest(self._config.on_time_max)
        """Peers over which tokens came as soon as announced."""
        self._believed: tuple[frozenset[str], dict[str, NodeRecord]] | None = None
        self._blame = Blame()
        self._failed_s = -math.inf
        """When a peer failed or could not be reached last."""
        self.prefixes = PrefixMemory(secret)
        """Where the KV of earlier prompts and answers is kept."""
        self.misled: deque[str] = deque(maxlen=config.misled_max)
        """Peers that refused layers that their records announce, the newest last."""
        self.counters: Counter[str] = Counter()
        self.is_left = False
        """Whether this client has left the network: nothing of what it sees is the peers' fault."""

    def check(self) -> None:
        """Raise ClosedError once this client has left the network."""
        if self.is_left:
            raise ClosedError

    @property
    def plan(self) -> Plan | None:
        """The plan that most of the routes are drawn over."""
        serving = {p: r for p, r in self.nodes.items() if r.state is NodeState.SERVING}
        return None if self.spec is None else self._router.plan(serving, self.spec)

    def take_nodes(self, nodes: Mapping[str, NodeRecord]) -> None:
        self.nodes = nodes
        self._believed = None
        self._kv_tokens_free = None
        self.own.take_nodes(nodes)
        self.models = allowed_models(nodes, self.pin)
        self.spec = self.models[0] if len(self.models) == 1 else None
        if self.spec is not None:
            self.pin = replace(self.pin, fingerprint=self.spec.fingerprint)

    def take_plans(self, plans: Mapping[PlanVersion, Plan]) -> None:
        """Draw over these plans, each among the peers that say that they follow it."""
        self._router.take_plans(plans)

    def take_links(self, links: Mapping[str, LinksRecord]) -> None:
        """Take the round trips between peers from these records."""
        self._rtt_s = round_trips(reported(links))

    @property
    def kv_tokens_free(self) -> int:
        """Tokens that every layer's roomiest peer has free: what one more session may get."""
        if self._kv_tokens_free is None:
            layers = 0 if self.spec is None else self.spec.layers
            free = [0] * layers
            for record in self.nodes.values():
                if record.state is NodeState.SERVING:
                    for layer in range(record.start, min(record.end, layers)):
                        free[layer] = max(free[layer], record.kv_tokens_free)
            self._kv_tokens_free = min(free, default=0)
        return self._kv_tokens_free

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Where a peer says that it can be reached; empty when its record is gone."""
        record = self.nodes.get(peer_id)
        return () if record is None else record.addresses

    def name_of(self, peer_id: str) -> str:
        """What a peer calls itself, fit to show."""
        return namer(self.nodes)(peer_id)

    def draw(
        self,
        mend: Route,
        lost: frozenset[str],
        kv_tokens: int,
        now_s: float,
        *,
        urgent: bool = False,
        without: frozenset[str] = frozenset(),
        known: KnownPrefix | None = None,
    ) -> Route | NoRoute:
        """A route for ``kv_tokens`` tokens; with ``mend``, that route with ``lost`` replaced.

        A new route uses no peer of ``without``, and goes over the route that is ``known`` to have
        the prompt's beginning unless another is sooner; else over the quickest where those have
        little to do, and in turn where they do not.

        An ``urgent`` route may go over peers that only had no room for ordinary sessions.
        """
        spec = self.spec
        if spec is None:
            return NOBODY

        def over(usable: Mapping[str, NodeRecord]) -> Route | NoRoute:
            if mend:
                return replacement(mend, lost, usable, spec.layers)
            usable = {p: r for p, r in usable.items() if p not in without} if without else usable
            if known is not None and isinstance(found := again(known, usable, spec.layers), tuple):
                return found
            turn = self._router.next_route(usable, spec)
            if isinstance(turn, NoRoute):
                return turn
            late = self._late.at(now_s)
            if self.pin.named:  # whom nobody here knows yet gets its turns alone
                late |= usable.keys() - self._known
            times = RingTimes(usable, self.own.beside(), self._rtt_s)
            return quicker(turn, times, lambda among: self._router.quickest(among, spec), late)

        usable = self._usable(spec, now_s, urgent=urgent)
        # Others may reach a peer that leaves this client's pings unanswered, and what peers
        # announced of their room is up to 15 s old: both decide where there is a choice.
        answering = {p: r for p, r in usable.items() if not self._is_silent(p)}
        roomy = {p: r for p, r in answering.items() if r.kv_tokens_free >= kv_tokens}
        # A session that met one that fails, or refuses what others may take, goes to those that
        # delivered or that the owner named, sooner than to strangers, who cost nothing to make.
        doubts = bool(lost or without)
        proven = {p: r for p, r in roomy.items() if doubts and self.trusts(p)}
        route = route_from_records({}, spec.layers)
        tried: Mapping[str, NodeRecord] = {}
        for peers in (proven, roomy, answering, usable):
            if isinstance(route, NoRoute) and peers != tried:
                route, tried = over(peers), peers
        if isinstance(route, NoRoute):
            with_full = self._usable(spec, now_s, urgent=urgent, full=True)
            if not isinstance(over(with_full), NoRoute):
                return replace(FULL, retry_after_s=self.avoidance.room_after_s(with_full, now_s))
            chance = over(self._usable(spec, now_s, urgent=urgent, second_chance=True))
            route = route if isinstance(chance, NoRoute) else chance
        if isinstance(route, NoRoute):
            return replace(route, loading=being_loaded(self.nodes, spec))
        self.avoidance.trying((stage.peer_id for stage in route), now_s)
        return route

    def goes_over(self, session: str, route: Route) -> float:
        """Count ``session`` at the peers of ``route``; returns a token's expected seconds there, by
        what they announce now, and inf where the record of one is gone."""
        self.own.ends(session)
        times = RingTimes(self.nodes, self.own.beside(), self._rtt_s)
        self.own.goes_over(session, route)
        known = all(stage.peer_id in self.nodes for stage in route)
        return times.token_s(route) if known else math.inf

    def took(self, route: Route, expected_s: float, token_s: float, now_s: float) -> None:
        """Compare a token's measured time over ``route`` with what was expected when it was taken:
        a peer may announce something else since."""
        if expected_s == math.inf:
            return
        peers = tuple(stage.peer_id for stage in route)
        self._late.took(peers, expected_s, token_s, now_s)
        if token_s <= QUICKEST.late_times * expected_s:
            for peer_id in peers:
                self._on_time[peer_id] = None

    @property
    def _known(self) -> frozenset[str]:
        """Peers whose speed counts as announced: those that the owner named, and those that were on
        time."""
        return frozenset(self.pin.named) | self._on_time.keys()

    def believes(self, peer_ids: Collection[str]) -> bool:
        """Whether what these peers say of a request counts: strangers cost nothing to make, so
        their word alone does not where somebody trusted serves the model."""
        spec = self.spec
        trusted = {
            peer_id
            for peer_id, record in self.nodes.items()
            if self.trusts(peer_id) and spec is not None and record.model.serves_with(spec)
        }
        return not trusted or not trusted.isdisjoint(peer_ids)

    def trusts(self, peer_id: str) -> bool:
        """Whether a peer delivered before, or the owner named it."""
        return self.avoidance.is_proven(peer_id) or peer_id in self.pin.named

    def _as_believed(self) -> Mapping[str, NodeRecord]:
        """The peers that serve the model, no faster than this client has reason to believe."""
        known = self._known
        if self._believed is None or self._believed[0] != known:
            same = {
                peer_id: record
                for peer_id, record in self.nodes.items()
                if self.spec is not None and record.model.serves_with(self.spec)
            }
            # Who named nobody has only the peers' word, and takes it.
            held = believed(same, known, self._config.believed_times) if self.pin.named else same
            self._believed = known, held
        return self._believed[1]

    def _freeness_of(self, record: NodeRecord) -> float:
        """How free a peer is; one that is not known here is no freer than the freest that is."""
        free = load_of(record).freeness
        known = self._known
        if not self.pin.named or record.peer_id in known:
            return free
        others = (load_of(self.nodes[p]).freeness for p in known if p in self.nodes)
        return min(free, max(others, default=math.inf))

    def _credit_of(self, record: NodeRecord) -> float:
        """The part that is believed of the rates that the peer of ``record``, as it is believed,
        announces."""
        told = self.nodes.get(record.peer_id)
        if told is None or not told.tokens_per_s or told.tokens_per_s[0] <= 0:
            return 1.0
        return record.tokens_per_s[0] / told.tokens_per_s[0]

    def swap(
        self, mend: Route, leaving: str, to: str, kv_tokens: int, now_s: float
    ) -> Route | NoRoute:
        """``mend`` with ``to`` in the place of ``leaving``, where that one has room to spare.

        That another stage proposes ``to`` is not enough: it must serve these layers, with room, and
        not have failed lately.
        """
        spec = self.spec
        record = None if spec is None else self._usable(spec, now_s).get(to)
        if record is None or record.kv_tokens_free - record.kv_tokens_wanted < kv_tokens:
            return NoRoute(reason="that peer has no room to spare")
        return swapped(mend, leaving, record)

    def answering_route(self, now_s: float) -> Route | NoRoute:
        """A route over peers that answer pings, as a short request might get it now.

        It takes no turn of theirs, and no second chance: requests need those.
        """
        spec = self.spec
        if spec is None:
            return NOBODY

        def over(*, full: bool) -> Route | NoRoute:
            usable = self._usable(spec, now_s, full=full, second_chance=True)
            answering = {p: r for p, r in usable.items() if not self._is_silent(p)}
            return route_from_records(answering, spec.layers)

        route = over(full=False)
        if not isinstance(route, NoRoute):
            return route
        if not isinstance(over(full=True), NoRoute):
            return FULL
        return replace(route, loading=being_loaded(self.nodes, spec))

    def avoid(
        self,
        peer_id: str,
        code: str | None,
        retry_after_s: float,
        now_s: float,
        *,
        urgent: bool = False,
        reason: str = "",
    ) -> None:
        """Pass over a peer for a while: it refused with ``code``, or failed if that is None."""
        self.counters["failovers" if code is None else f"refused_{code}"] += 1
        if code is None or code == RefusalCode.UNREACHABLE:
            self._failed_s = now_s
        self._late.failed(peer_id, now_s)
        config, full = self._config, False
        match code:
            case RefusalCode.NO_KV | RefusalCode.TOO_MANY:
                for_s, full = min(retry_after_s or config.busy_s, config.busy_most_s), True
            case RefusalCode.NOT_HELD | RefusalCode.DRAINING:
                for_s = config.stale_s
            case _:
                for_s = config.avoid_s
        if code == RefusalCode.NOT_HELD:
            self.misled.append(peer_id)
        record = self.nodes.get(peer_id)
        self.avoidance.add(
            peer_id,
            for_s,
            now_s,
            joined_unix_s=0.0 if record is None else record.joined_unix_s,
            full=full,
            urgent=urgent,
            reason=reason,
        )

    def answered(self, peer_ids: Collection[str], *, had_room: bool) -> None:
        """These peers answered a request of this client, or it waits no more; ``had_room``: they
        took it, for which they kept no room from others."""
        self.avoidance.answered(peer_ids, had_room=had_room)
        if had_room:
            self.waiting.wake(AVOIDING.woken)

    def passed_over(self, missing: Sequence[tuple[int, int]], now_s: float) -> tuple[str, ...]:
        """Why peers that say that they serve some of ``missing`` (empty: any layers) are passed
        over, one sentence for each."""
        found, name_of = [], namer(self.nodes)
        for peer_id, record in self.nodes.items():
            wanted = any(a < record.end and record.start < b for a, b in missing) or not missing
            if record.state is not NodeState.SERVING or not wanted:
                continue
            if self._is_silent(peer_id):
                found.append(f"{name_of(peer_id)} does not answer")
            elif reason := self.avoidance.reason(peer_id, now_s):
                found.append(f"{name_of(peer_id)}: {reason}")
        return tuple(found)

    def at_fault(self, suspects: tuple[str, ...], now_s: float) -> str:
        """The one of ``suspects`` that is taken to have failed a session, where only one of them
        need have; see :meth:`client.view.blame.Blame.at_fault`."""
        return self._blame.at_fault(suspects, self._lives(), now_s)

    def is_troubled(self, now_s: float) -> bool:
        """Whether a peer failed so lately that the records of others that died with it may be
        there still, so that pings pay."""
        return now_s < self._failed_s + TROUBLE_S

    def heard(self) -> None:
        """Forgive peers that were taken to be at fault where pings told since who was."""
        for peer_id in self._blame.cleared(self._lives()):
            self.avoidance.forgive(peer_id)

    def _lives(self) -> dict[str, float]:
        """When each peer that seems to be well joined, in Unix seconds."""
        return {
            peer_id: record.joined_unix_s
            for peer_id, record in self.nodes.items()
            if not self._is_silent(peer_id)
        }

    def _usable(
        self,
        spec: ModelSpec,
        now_s: float,
        *,
        urgent: bool = False,
        full: bool = False,
        second_chance: bool = False,
    ) -> dict[str, NodeRecord]:
        """Peers that serve the model and are not avoided (see :meth:`Avoidance.avoids`)."""
        return {
            peer_id: record
            for peer_id, record in self._as_believed().items()
            if record.state is NodeState.SERVING
            and record.model.serves_with(spec)
            and not self.avoidance.avoids(
                record, now_s, urgent=urgent, full=full, second_chance=second_chance
            )
        }
