"""Runs the election: reads leases and records from the DHT, steps, and performs the effects."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.plans.election.election import (
    LEASE_S,
    Elected,
    Election,
    ElectionView,
    LeaseStored,
    StoreLease,
    step,
    succession,
)
from coordinator.plans.store import PlanStore
from coordinator.plans.transition import TransitionConfig, elders
from coordinator.plans.versions import believed, number_max
from coordinator.policies.failure.liveness import Liveness
from dht.messages.types import NO_VERSION, LeaseRecord, ModelSpec, NodeRecord, NodeState, Reach
from dht.process.supervision import loop_s
from dht.records.directory import Directory
from dht.transport.interface import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipRules:
    """Who may lead (``coordinators``; empty: everybody), and how many peers watch the leader."""

    transition: TransitionConfig
    watchers: int
    witnesses: int
    coordinators: frozenset[str]


class Leadership:
    """The election as this peer sees it; ``election`` is the state of the pure decision."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        plans: PlanStore,
        liveness: Liveness,
        *,
        model: ModelSpec,
        rules: LeadershipRules,
        on_event: Callable[..., None],
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._plans = plans
        self._liveness = liveness
        self._model = model
        self._rules = rules
        self._on_event = on_event
        self.election = Election(peer_id=transport.peer_id)
        plans.elected = True
        self.highest = NO_VERSION
        """The highest believable plan version of any peer."""
        self.successors: list[str] = []
        """The peers that would lead next, in turn."""
        self._dead: frozenset[str] = frozenset()
        self._leaderless_since_s: float | None = None

    @property
    def leaderless_s(self) -> float:
        """Seconds without a known coordinator."""
        return 0.0 if self._leaderless_since_s is None else loop_s() - self._leaderless_since_s

    async def look(self, nodes: dict[str, NodeRecord], leases: dict[str, LeaseRecord]) -> None:
        """Step the election by the DHT's present records. Raises NetworkError."""
        clock_s, unix_s = loop_s(), self._transport.now()
        distrusted = self._plans.trust.distrusted(clock_s) - {self._transport.peer_id}
        versions = [
            believed(record.plan_version, unix_s)
            for peer_id, record in nodes.items()
            if peer_id not in distrusted
        ]
        self.highest = max([self._plans.version, *versions])
        self._dead &= self._liveness.silent  # who has answered since is asked about anew
        allowed = self._rules.coordinators
        candidates = frozenset(
            peer_id
            for peer_id, record in nodes.items()
            if record.state is not NodeState.DRAINING
            # A light peer reaches the DHT only through a few full peers.
            and not record.light
            and record.reach is not Reach.NONE
            and record.model.serves_with(self._model)
            and (not allowed or peer_id in allowed)
        )
        for _ in range(2):  # a lease that was just stored is read back at once
            observed = ElectionView(
                leases=leases,
                candidates=candidates,
                version=self.highest,
                silent=self._liveness.silent,
                dead=self._dead,
                distrusted=distrusted,
                term_max=number_max(unix_s),
                elders=elders(nodes, unix_s, self._rules.transition),
            )
            if self.election.leader in observed.silent - observed.dead:
                observed = await self._with_witnesses(observed, nodes)
            self.election, effects = step(self.election, observed, loop_s())
            stored = False
            for effect in effects:
                match effect:
                    case StoreLease(term=term):
                        stored = await self._store_lease(term) or stored
                    case Elected(peer_id=peer_id, term=term):
                        self._on_event("coordinator", peer_id=peer_id, term=term)
            self._note_leader(observed)
            if not stored or self.election.leading:
                return
            leases = await self._directory.leases(latest=True)

    def _note_leader(self, observed: ElectionView) -> None:
        leader = self._plans.leader = self.election.leader
        if leader is not None:
            self._leaderless_since_s = None
        elif self._leaderless_since_s is None:
            self._leaderless_since_s = loop_s()
        next_up = succession(self.election.highest_term + 1, observed)
        self.successors = [p for p in next_up if p != leader][: self._rules.watchers]

    async def _with_witnesses(
        self, observed: ElectionView, nodes: dict[str, NodeRecord]
    ) -> ElectionView:
        """Ask witnesses about the silent coordinator; it is dead if they confirm its silence."""
        leader = self.election.leader
        if leader is None:
            return observed
        others = [p for p in self.successors if p != self._transport.peer_id and p in nodes]
        witnesses = {p: nodes[p].addresses for p in others[: self._rules.witnesses]}
        if await self._liveness.confirm_silent(leader, witnesses):
            self._dead = (self._dead | {leader}) & observed.candidates
            return replace(observed, dead=self._dead)
        return observed

    async def _store_lease(self, term: int) -> bool:
        lease = LeaseRecord(
            peer_id=self._transport.peer_id,
            term=term,
            expires_unix_s=self._transport.now() + LEASE_S,
        )
        if not await self._directory.publish(lease):
            return False
        self.election, _ = step(self.election, LeaseStored(term=term), loop_s())
        return True
