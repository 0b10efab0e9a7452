"""The coordinator's shell, running in every peer and acting in the elected one.

It polls the DHT, steps the pure election, follows the newest plan, and when it leads builds the
problem from what peers announced, has it solved in a process of its own, checks the answer and
publishes it.
"""

import asyncio
import contextlib
import logging
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import msgspec

from coordinator.election import (
    Elected,
    Election,
    ElectionConfig,
    Observed,
    Stored,
    StoreLease,
    rank,
    step,
    succession,
)
from coordinator.epochs import believed, next_epoch, number_max
from coordinator.liveness import Liveness, LivenessConfig
from coordinator.placement import why_uncoverable
from coordinator.plan_store import PlanStore
from coordinator.problem import problem_of
from coordinator.review import ReviewConfig, falls_short
from coordinator.solve import SolveAnswer, SolveRequest
from coordinator.transition import (
    Change,
    TransitionConfig,
    choose_plan,
    difference,
    elders,
    reason_to_plan,
    usable_nodes,
    with_effects,
)
from dht.directory import LIFETIME_S, Directory, RecordKind
from dht.errors import NetworkError
from dht.transport import Transport
from dht.types import (
    NO_EPOCH,
    LeaseRecord,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanEpoch,
    PlanHead,
    Problem,
)

logger = logging.getLogger(__name__)

ReportEvent = Callable[..., None]
"""Called with an event's name and its fields."""
IDLE_MAX = 64
"""Idle coordinators that are remembered."""
Solver = Callable[[SolveRequest, float], Awaitable[SolveAnswer]]
"""Solves a request within so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Timings in seconds."""

    poll_s: float = 1.0
    solve_s: float = 3.0
    """For the solver; its process is ended a little later."""
    publish_every_s: float = 60.0
    idle_s: float = 60.0
    idle_per_peer_s: float = 0.2
    """A coordinator that plans for peers which are gone, or not at all, is not followed any more
    after so long."""
    headless_s: float = 180.0
    """Nor is one that does not keep the plan's head alive: newcomers would not find the plan."""
    weigh_every_s: float = 10.0
    """How often the running plan is held against the greedy placement."""
    review: ReviewConfig = field(default_factory=ReviewConfig)
    watchers: int = 8
    """Of the followers, so many ping the coordinator: those that would come next."""
    witnesses: int = 3
    """So many of them are asked before a silent coordinator counts as dead."""
    coordinators: frozenset[str] = frozenset()
    """Who may lead; none: everybody."""
    election: ElectionConfig = field(default_factory=ElectionConfig)
    transition: TransitionConfig = field(default_factory=TransitionConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)


class Coordinator:
    """Election, planning and plan following of one peer."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        plans: PlanStore,
        *,
        model: ModelSpec,
        config: CoordinatorConfig,
        on_event: ReportEvent,
        solve: Solver | None = None,
    ) -> None:
        """``solve`` defaults to :func:`solve_apart`, a process of its own."""
        self._transport = transport
        self._directory = directory
        self._plans = plans
        self._model = model
        self._config = config
        self._on_event = on_event
        self._solve = solve or solve_apart
        self._election = Election(peer_id=transport.peer_id)
        self._liveness = Liveness(transport, config.liveness)
        self._change: Change | None = None
        self._planned_s = 0.0
        self._published_s = 0.0
        self._highest = NO_EPOCH
        self._said = ""
        self._solving: asyncio.Task[None] | None = None
        self._considered: frozenset[str] = frozenset()
        self._retry_s = 0.0
        self._pokes: list[asyncio.Event] = []
        self._dead: frozenset[str] = frozenset()
        self._idle: dict[str, float] = {}
        self._leaderless_since_s: float | None = None
        self._successors: list[str] = []
        self._weighed_s = -math.inf
        self._poor = False
        plans.witness = self._liveness.answers

    def poke(self) -> None:
        """Look now rather than at the next poll."""
        for poked in self._pokes:
            poked.set()

    async def run(self) -> None:
        """Poll until cancelled; a failed look at the DHT is logged and tried again."""
        await self._plans.serve()
        try:
            async with asyncio.TaskGroup() as group:
                # Apart: a plan whose holders do not answer must not hold up an election.
                group.create_task(self._again(self._poll))
                group.create_task(self._again(self._plans.refresh))
        finally:
            if self._solving is not None:
                self._solving.cancel()
                await asyncio.gather(self._solving, return_exceptions=True)
            await self._liveness.close()

    async def _again(self, look: Callable[[], Awaitable[None]]) -> None:
        poked = asyncio.Event()
        self._pokes.append(poked)
        while True:
            poked.clear()
            try:
                await look()
            except NetworkError as error:
                logger.info("cannot read or write the DHT: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_s):
                    await poked.wait()

    @property
    def leads(self) -> bool:
        """Whether this peer coordinates now."""
        return self._election.leading

    @property
    def leaderless_s(self) -> float:
        """For how long no coordinator has been known, in seconds."""
        return 0.0 if self._leaderless_since_s is None else self._now() - self._leaderless_since_s

    async def _poll(self) -> None:
        nodes, leases, links = await asyncio.gather(
            self._directory.nodes(), self._directory.leases(), self._directory.links()
        )
        await self._elect(nodes, leases)
        silent = self._liveness.silent
        usable = usable_nodes(nodes, self._model.fingerprint, silent)
        self._watch(usable, nodes)
        if not self.leads:
            self._change = None
            await self._note_idleness(usable, links)
            return
        self._note_change(usable)
        if self._solving is not None and self._solving.done():
            solved, self._solving = self._solving, None
            solved.result()
        reason = reason_to_plan(
            self._plans.newest,
            self._change,
            self._planned_s,
            self._now(),
            self._config.transition,
        )
        if reason is not None and self._solving is None and self._now() >= self._retry_s:
            problem = problem_of(self._model, usable, links, self._plans.newest)
            shortage = why_uncoverable(problem)
            if shortage is not None:
                self._say("no_plan", reason=shortage, peers=len(problem.nodes))
                return
            self._considered = frozenset(usable)
            self._solving = asyncio.create_task(self._plan(problem, usable, reason))
        elif self._now() - self._published_s >= self._republish_after_s:
            await self._republish()

    @property
    def _behind(self) -> bool:
        """Whether some peer adopted a later plan than this coordinator's, and would miss it."""
        return self._plans.epoch < self._highest and self._highest.term < self._election.term

    @property
    def _republish_after_s(self) -> float:
        config = self._config
        return config.election.catch_up_s if self._behind else config.publish_every_s

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Election

    async def _elect(self, nodes: dict[str, NodeRecord], leases: dict[str, LeaseRecord]) -> None:
        clock_s, unix_s = self._now(), self._transport.now()
        distrusted = self._plans.trust.distrusted(clock_s) - {self._transport.peer_id}
        epochs = [
            believed(record.epoch, unix_s)
            for peer_id, record in nodes.items()
            if peer_id not in distrusted
        ]
        self._highest = max([self._plans.epoch, *epochs])
        allowed = self._config.coordinators
        candidates = frozenset(
            peer_id
            for peer_id, record in nodes.items()
            if record.state is not NodeState.DRAINING
            and record.model.fingerprint == self._model.fingerprint
            and (not allowed or peer_id in allowed)
        )
        for _ in range(2):  # a lease that was just stored is read back at once
            observed = Observed(
                leases=leases,
                candidates=candidates,
                epoch=self._highest,
                silent=self._liveness.silent,
                dead=self._dead & self._liveness.silent,
                distrusted=distrusted,
                term_max=number_max(unix_s),
                elders=elders(nodes, unix_s, self._config.transition),
            )
            if self._election.leader in observed.silent - observed.dead:
                observed = await self._with_witnesses(observed, nodes)
            self._election, effects = step(
                self._election, observed, self._now(), self._config.election
            )
            stored = False
            for effect in effects:
                match effect:
                    case StoreLease(term=term):
                        stored = await self._store_lease(term) or stored
                    case Elected(peer_id=peer_id, term=term):
                        self._on_event("coordinator", peer_id=peer_id, term=term)
            self._note_leader(observed)
            if not stored or self._election.leading:
                return
            leases = await self._directory.leases()

    def _note_leader(self, observed: Observed) -> None:
        leader = self._plans.leader = self._election.leader
        if leader is not None:
            self._leaderless_since_s = None
        elif self._leaderless_since_s is None:
            self._leaderless_since_s = self._now()
        next_up = succession(self._election.highest_term + 1, observed)
        self._successors = [p for p in next_up if p != leader][: self._config.watchers]

    async def _with_witnesses(self, observed: Observed, nodes: dict[str, NodeRecord]) -> Observed:
        """Ask others whether the silent coordinator answers them."""
        leader = self._election.leader
        if leader is None:
            return observed
        others = [p for p in self._successors if p != self._transport.peer_id and p in nodes]
        witnesses = {p: nodes[p].addresses for p in others[: self._config.witnesses]}
        if await self._liveness.confirm_silent(leader, witnesses):
            self._dead = (self._dead | {leader}) & observed.candidates
            return replace(observed, dead=self._dead & observed.silent)
        return observed

    async def _note_idleness(
        self, usable: dict[str, NodeRecord], links: dict[str, LinksRecord]
    ) -> None:
        """Stop following a coordinator that does nothing though there is something to do."""
        leader, now_s = self._election.leader, self._now()
        needed = await self._plan_needed(usable, links)
        if not needed:
            self._idle.clear()
        if not needed or leader is None:
            return
        since_s = self._idle.setdefault(leader, now_s)
        while len(self._idle) > IDLE_MAX:
            del self._idle[next(iter(self._idle))]
        patience_s = self._config.idle_s + self._config.idle_per_peer_s * len(usable)
        if now_s - since_s >= patience_s:
            del self._idle[leader]
            logger.warning("coordinator %s does nothing; another is elected", leader)
            self._plans.trust.distrust(leader, now_s)

    async def _plan_needed(
        self, usable: dict[str, NodeRecord], links: dict[str, LinksRecord]
    ) -> bool:
        """Whether a coordinator should publish something."""
        plan, now_s = self._plans.newest, self._now()
        if plan is None or difference(plan, usable)[1]:
            return why_uncoverable(problem_of(self._model, usable, links)) is None
        if now_s - self._plans.head_seen_s > self._config.headless_s:
            return True
        if now_s - self._weighed_s >= self._config.weigh_every_s:
            self._weighed_s = now_s
            self._poor = await asyncio.to_thread(
                falls_short, plan, usable, links, self._transport.now(), self._config.review
            )
        return self._poor

    async def _store_lease(self, term: int) -> bool:
        lease = LeaseRecord(
            peer_id=self._transport.peer_id,
            term=term,
            expires_unix_s=self._transport.now() + LIFETIME_S[RecordKind.LEASE],
        )
        if not await self._directory.publish(lease):
            return False
        self._election, _ = step(
            self._election, Stored(term=term), self._now(), self._config.election
        )
        return True

    def _watch(self, usable: dict[str, NodeRecord], nodes: dict[str, NodeRecord]) -> None:
        """Ping the coordinator when next in line, and the plan's peers when leading."""
        watched: set[str] = set()
        if self.leads and self._plans.newest is not None:
            watched = {a.peer_id for a in self._plans.newest.assignments}
        elif self._election.leader is not None and self._transport.peer_id in self._successors:
            watched = {self._election.leader}
        watched.discard(self._transport.peer_id)
        self._liveness.watch(
            {peer: usable[peer].addresses if peer in usable else () for peer in watched},
            nodes.keys(),
        )

    # Planning

    def _note_change(self, usable: dict[str, NodeRecord]) -> None:
        if self._now() - self._planned_s >= self._config.transition.period_s:
            self._considered = frozenset()
        self._considered &= usable.keys()  # who left and comes back has joined again
        joined, lost = map(frozenset, difference(self._plans.newest, usable))
        joined -= self._considered  # the last solve had no use for them
        if not joined and not lost:
            self._change = None
            return
        now_s, before = self._now(), self._change
        same = before is not None and (before.joined, before.lost) == (joined, lost)
        self._change = Change(
            joined=joined,
            lost=lost,
            since_s=before.since_s if before is not None else now_s,
            last_s=before.last_s if before is not None and same else now_s,
        )

    async def _plan(self, problem: Problem, usable: dict[str, NodeRecord], reason: str) -> None:
        epoch = self._next_epoch()
        request = SolveRequest(
            problem=problem,
            epoch=epoch,
            coordinator=self._transport.peer_id,
            time_limit_s=self._config.solve_s,
            seed=epoch.counter,
            now_unix_s=self._transport.now(),
        )
        try:
            answer = await self._solve(request, self._config.solve_s + 20.0)
        finally:
            self._planned_s = self._now()
            self._change = None
            self._retry_s = self._planned_s + self._config.transition.retry_s
        if answer.error:
            self._say("no_plan", reason=answer.error, peers=len(problem.nodes))
            return
        best, kept = answer.best, answer.kept
        if best is None:
            logger.error("the solver found no plan that passes the checker")
        if best is None or not self.leads:
            return
        choice = choose_plan(
            self._plans.newest,
            best,
            kept,
            usable,
            self._config.transition,
            self._transport.now(),
        )
        if choice is not None:
            plan, why = choice
            plan = await asyncio.to_thread(with_effects, plan, usable)
            # Another epoch may have been seen while this was solved.
            await self._publish(replace(plan, epoch=self._next_epoch()), f"{reason}: {why}")

    def _next_epoch(self) -> PlanEpoch:
        seen = max(self._highest, self._plans.epoch)
        term = self._election.term
        return next_epoch(seen, term, rank(self._transport.peer_id, term))

    async def _publish(self, plan: Plan, reason: str) -> None:
        head = await self._plans.add(plan)
        self._retry_s = 0.0
        self._said = ""
        self._on_event(
            "plan",
            epoch=str(plan.epoch),
            reason=reason,
            planner=plan.planner,
            estimate_tokens_per_s=round(plan.estimate_tokens_per_s, 3),
            flow_tokens_per_s=round(plan.flow_tokens_per_s, 3),
            bound_tokens_per_s=round(plan.bound_tokens_per_s, 3),
            solve_s=round(plan.solve_s, 3),
            assignments={a.peer_id: [a.start, a.end] for a in plan.assignments},
            waves=[list(peers) for peers in plan.waves],
            fetch_bytes=plan.fetch_bytes,
        )
        await self._publish_head(head)

    async def _publish_head(self, head: PlanHead) -> None:
        """Until somebody took it, every look tries again: others cannot follow what they miss."""
        self._published_s = -math.inf
        if await self._directory.publish(head):
            self._published_s = self._now()

    async def _republish(self) -> None:
        """Keep the head of the running plan alive, also after its author is gone."""
        plan = self._plans.newest
        if plan is None:
            return
        mine = plan.coordinator == self._transport.peer_id
        if mine and self._plans.head is not None and not self._behind:
            await self._publish_head(self._plans.head)
            return
        taken_over = replace(
            plan, epoch=self._next_epoch(), coordinator=self._transport.peer_id, fetch_bytes=0
        )
        why = "peers follow a later one" if mine else "taken over from the coordinator before"
        await self._publish(taken_over, why)

    def _say(self, event: str, **fields: object) -> None:
        """Report an event once until something else happens."""
        text = f"{event}{fields}"
        if text != self._said:
            self._said = text
            self._on_event(event, **fields)


async def solve_apart(request: SolveRequest, limit_s: float) -> SolveAnswer:
    """Solve in a process of its own, which is ended when it takes too long or we are cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "coordinator.solve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate(msgspec.msgpack.encode(request))
    except TimeoutError:
        return SolveAnswer(error=f"the solver did not end within {limit_s:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if err:
        logger.error("the solver says: %s", err.decode(errors="replace")[-1000:])
    if process.returncode != 0:
        return SolveAnswer(error=f"the solver ended with {process.returncode}")
    return msgspec.msgpack.decode(out, type=SolveAnswer)
