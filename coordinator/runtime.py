"""Runs the coordinator in every peer; it acts in the elected one.

The shell polls the DHT, steps the pure election and follows the newest plan. While it leads, it
builds the problem from peers' records, solves it in a process of its own, checks the answer and
publishes it.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from coordinator.planning.placement import why_uncoverable
from coordinator.planning.solve import SolveAnswer, SolveRequest
from coordinator.planning.solver_process import solve_apart
from coordinator.plans.demand import Demand
from coordinator.plans.election.election import ELECTION
from coordinator.plans.election.leadership import Leadership, LeadershipRules
from coordinator.plans.review import falls_short
from coordinator.plans.store import PlanStore
from coordinator.plans.transition import (
    PERIODIC,
    Change,
    TransitionConfig,
    carried_out,
    choose_plan,
    difference,
    left_out,
    moved_lately,
    reason_to_plan,
    settled,
    usable_nodes,
    with_effects,
)
from coordinator.plans.versions import next_version, rank
from coordinator.policies.failure.liveness import Liveness
from coordinator.problem.alike import alike
from coordinator.problem.from_records import problem_of
from dht.errors import NetworkError
from dht.identity.peer_id import short_name
from dht.messages.types import (
    RECORD_BOUNDS,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    Plan,
    PlanHead,
    PlanVersion,
    Problem,
)
from dht.process.supervision import Supervisor, end_all, loop_s
from dht.records.directory import Directory
from dht.transport.interface import Transport

logger = logging.getLogger(__name__)

ReportEvent = Callable[..., None]
"""A callback for an event's name and fields."""
IDLE_MAX = 64
"""Maximum idle coordinators that are remembered."""
FALLEN_BACK = "OR-Tools failed: %s; placed by the heuristics"
Solver = Callable[[SolveRequest, float], Awaitable[SolveAnswer]]
"""Solves a request within a limit in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Timings in seconds."""

    poll_s: float = 1.0
    solve_s: float = 3.0
    """Time limit of the solver after a change; its process is killed ``grace_s`` later."""
    thorough_solve_s: float = 40.0
    """Time limit of the solver while nothing changes."""
    grace_s: float = 60.0
    publish_every_s: float = 60.0
    idle_s: float = 60.0
    idle_per_peer_s: float = 0.2
    """Time per peer added to ``idle_s``: after the sum, a coordinator that publishes no plan, or
    one for peers that are gone, is distrusted."""
    headless_s: float = 180.0
    """Age of the plan's head above which its coordinator is idle: newcomers cannot find it."""
    weigh_every_s: float = 10.0
    """Interval at which the running plan is compared with the greedy placement."""
    weigh_per_peer_s: float = 1.0
    """Time per peer added to ``weigh_every_s``: the comparison takes longer with more peers, and
    more of them make it."""
    watchers: int = 8
    """Number of followers that ping the coordinator: those next in the succession."""
    witnesses: int = 3
    """Number of watchers that are asked before a silent coordinator counts as dead."""
    lapsed_s: float = 30.0
    """Time for which a watched peer that answers counts although its record has lapsed: those of
    one whose clock is behind end early, and each gap would be a loss."""
    coordinators: frozenset[str] = frozenset()
    """Peers that may lead; empty: everybody."""
    transition: TransitionConfig = field(default_factory=TransitionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What decides on a plan beside the problem: the choice changes once those that have just moved
    may move again, with those that are settled, and a while after a loss."""

    moved_lately: frozenset[str]
    settled: frozenset[str]
    lost_lately: bool
    answer_weight: float


class Coordinator:
    """One peer's election, planning and following of plans."""

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
        parts: Supervisor | None = None,
    ) -> None:
        """``solve`` defaults to :func:`solve_apart`, which uses a process of its own."""
        self._parts = parts or Supervisor()
        self._transport = transport
        self._directory = directory
        self._plans = plans
        self._model = model
        self._config = config
        self._on_event = on_event
        self._solve = solve or solve_apart
        self._liveness = Liveness(transport, self._parts)
        self._leadership = Leadership(
            transport,
            directory,
            plans,
            self._liveness,
            model=model,
            rules=LeadershipRules(
                transition=config.transition,
                watchers=config.watchers,
                witnesses=config.witnesses,
                coordinators=config.coordinators,
            ),
            on_event=on_event,
        )
        self._change: Change | None = None
        self._planned_s = 0.0
        self._thorough = False
        """Whether the last solve was a thorough one, or the present one is."""
        self._published_s = 0.0
        self._said = ""
        self._solving: asyncio.Task[None] | None = None
        self._considered: frozenset[str] = frozenset()
        self._retry_s = 0.0
        self._demand = Demand()
        self._read: dict[str, tuple[NodeRecord, float]] = {}
        """The last record of each peer that was lately read, and when."""
        self._idle: dict[str, float] = {}
        self._weighed_s = -math.inf
        self._weighed: tuple[object, ...] = ()
        """The plan version, problem and settled peers of the last comparison with the greedy
        one."""
        self._poor = False
        self._shortage = ""
        """Why the layers cannot all be placed, as a follower without a plan sees it."""
        self._solved: tuple[Problem, Standing] | None = None
        """The last solved problem, and what else decided on its answer."""
        self._fruitless = 0
        """Thorough solves of it in a row, each with another seed, that led to no plan."""
        self._planned: frozenset[str] | None = None
        """The settled peers of the running plan, at the last look; None before this process saw or
        made one."""
        self._lost_s = -math.inf
        """When a settled peer of a running plan was last seen to be gone, by this peer, whoever led
        then; or when this process first saw a plan that it had not made: there may have been a loss
        before."""
        plans.witness = self._liveness.answers

    async def run(self) -> None:
        """Poll until cancelled; a failed read of the DHT is logged and tried again."""
        await self._plans.serve()
        try:
            # Two parts: a plan whose holders do not answer must not delay an election, nor a fault
            # of one of them end the other.
            await self._parts.run(self._lead, self._follow, ends_process=False)
        finally:
            if self._solving is not None:
                await end_all((self._solving,))
            await self._liveness.close()

    async def _lead(self) -> None:
        await self._again(self._poll)

    async def _follow(self) -> None:
        await self._again(self._plans.refresh)

    async def _again(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
            except NetworkError as error:
                logger.info("cannot read or write the DHT: %s", error)
            await asyncio.sleep(self._config.poll_s)

    @property
    def leads(self) -> bool:
        """Whether this peer coordinates now."""
        return self._leadership.election.leading

    @property
    def why_no_plan(self) -> str:
        """Why a follower has no plan yet, in plain words; "" for a leader, which reports it."""
        if self.leads:
            return ""
        if self._shortage:
            return f"no plan for all layers now: {self._shortage}"
        leader = self._leadership.election.leader
        if leader is None:
            return "no plan yet: nobody coordinates"
        return f"no plan yet from {short_name(leader)}, who coordinates"

    @property
    def leaderless_s(self) -> float:
        """Seconds without a known coordinator."""
        return self._leadership.leaderless_s

    async def _poll(self) -> None:
        nodes, leases, links = await asyncio.gather(
            self._directory.nodes_as_seen(), self._directory.leases(), self._directory.links()
        )
        await self._leadership.look(nodes, leases)
        self._demand.look(nodes, self._plans.newest, loop_s())
        nodes = self._with_lapsed(nodes)
        usable = usable_nodes(nodes, self._model, self._liveness.silent)
        self._watch(nodes)
        self._note_losses(usable)
        if not self.leads:
            self._change = None
            if self._plans.newest is None:
                shortage = self._shortage_of(usable)
                self._shortage = "" if shortage is None else shortage + left_out(nodes, self._model)
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
            loop_s(),
            self._config.transition,
            thorough=self._thorough and not self._more_settled(usable),
        )
        running = self._running(usable)
        if reason is None and _differ(running, self._plans.newest):
            reason = "a coordinator before planned it"
        if reason not in {None, PERIODIC} and self._thorough:
            await self._stop_solving()
        if reason is not None and self._solving is None and loop_s() >= self._retry_s:
            problem = problem_of(self._model, usable, links, running)
            if not self._was_solved(problem, usable):
                self._fruitless = 0
            if reason == PERIODIC and self._fruitless >= self._config.transition.fruitless_max:
                self._planned_s = loop_s()  # the answer would be about the same
                return
            shortage = why_uncoverable(problem)
            if shortage is not None:
                shortage += left_out(nodes, self._model)
                self._say("no_plan", reason=shortage, peers=len(problem.nodes))
                return
            self._considered = frozenset(usable)
            self._solving = asyncio.create_task(self._plan(problem, usable, reason))
        elif not _differ(running, self._plans.newest):
            every_s = ELECTION.catch_up_s if self._behind else self._config.publish_every_s
            if loop_s() - self._published_s >= every_s:
                await self._republish()

    def _with_lapsed(self, nodes: dict[str, NodeRecord]) -> dict[str, NodeRecord]:
        """``nodes``, and the last records of watched peers that answer, for ``lapsed_s``."""
        now_s = loop_s()
        self._read |= {peer_id: (record, now_s) for peer_id, record in nodes.items()}
        since_s = now_s - self._config.lapsed_s
        self._read = {p: read for p, read in self._read.items() if read[1] >= since_s}
        lapsed = [p for p in self._read.keys() - nodes.keys() if self._liveness.answers(p)]
        return nodes | {p: self._read[p][0] for p in sorted(lapsed)}

    @property
    def _behind(self) -> bool:
        """Whether some peer adopted a later plan and would not adopt this coordinator's.

        The later plan may be of the same term: two peers may have led in it on two sides of a cut.
        For a later term, this peer must first be elected again.
        """
        highest = self._leadership.highest
        return self._plans.version < highest and highest.term <= self._leadership.election.term

    async def _note_idleness(
        self, usable: dict[str, NodeRecord], links: dict[str, LinksRecord]
    ) -> None:
        """Distrust a coordinator that publishes nothing although a plan is needed."""
        leader, now_s = self._leadership.election.leader, loop_s()
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
        """Whether a coordinator should publish a plan or its head now."""
        plan, now_s = self._plans.newest, loop_s()
        if plan is None or difference(plan, usable)[1]:
            return self._shortage_of(usable) is None
        if now_s - self._plans.head_seen_s > self._config.headless_s:
            return True
        every_s = self._config.weigh_every_s + self._config.weigh_per_peer_s * len(usable)
        if now_s - self._weighed_s >= every_s:
            self._weighed_s = now_s
            unix_s = self._transport.now()
            known = {p: usable[p] for p in settled(usable, unix_s, self._config.transition)}
            weighed = plan.version, problem_of(plan.model, usable, links), known.keys()
            if weighed != self._weighed:  # the same input would give the same answer
                self._poor = await asyncio.to_thread(falls_short, plan, usable, known, links)
                self._weighed = weighed
        return self._poor

    def _shortage_of(self, usable: dict[str, NodeRecord]) -> str | None:
        """Why the peers cannot hold every layer; None: they can. Their links do not matter."""
        return why_uncoverable(problem_of(self._model, usable, {}))

    def _watch(self, nodes: dict[str, NodeRecord]) -> None:
        """Ping the coordinator when next in line, and the plan's peers when leading."""
        watched: set[str] = set()
        leader = self._leadership.election.leader
        if self.leads and self._plans.newest is not None:
            watched = {a.peer_id for a in self._plans.newest.assignments}
        elif leader is not None and self._transport.peer_id in self._leadership.successors:
            watched = {leader}
        watched.discard(self._transport.peer_id)
        self._liveness.watch(watched, {p: record.addresses for p, record in nodes.items()})

    # Planning

    def _running(self, usable: dict[str, NodeRecord]) -> Plan | None:
        """The plan that the next one begins from.

        Of another's plan, and after a loss, that is what peers serve: another may have planned what
        nobody carries out. Another's newcomers do not count in it; they are planned anew, with the
        layers that they serve.
        """
        plan = self._plans.newest
        if plan is None:
            return None
        if plan.coordinator != self._transport.peer_id:
            counted = settled(usable, self._transport.now(), self._config.transition)
            return carried_out(plan, usable, counted)
        return carried_out(plan, usable) if difference(plan, usable)[1] else plan

    def _note_losses(self, usable: dict[str, NodeRecord]) -> None:
        """Note when settled peers of the running plan are gone, also while others lead."""
        plan = self._plans.newest
        if plan is None:
            return
        if self._planned is None:
            self._lost_s = loop_s()
        given = {a.peer_id for a in plan.assignments} & usable.keys()
        if self._planned is not None and self._planned - given:
            self._lost_s = loop_s()
        known = settled(usable, self._transport.now(), self._config.transition)
        self._planned = known & given

    @property
    def _lost_lately(self) -> bool:
        return loop_s() - self._lost_s < self._config.transition.calm_after_loss_s

    def _note_change(self, usable: dict[str, NodeRecord]) -> None:
        self._considered &= usable.keys()  # a peer that left and comes back has joined again
        joined, lost = map(frozenset, difference(self._plans.newest, usable))
        joined -= self._considered  # the last solve had no use for them
        if not joined and not lost:
            self._change = None
            return
        now_s, before = loop_s(), self._change
        same = before is not None and (before.joined, before.lost) == (joined, lost)
        self._change = Change(
            joined=joined,
            lost=lost,
            since_s=before.since_s if before is not None else now_s,
            last_s=before.last_s if before is not None and same else now_s,
        )

    async def _stop_solving(self) -> None:
        """End a thorough solve that is under way: a change does not wait for it."""
        if self._solving is None:
            return
        change = self._change
        await end_all((self._solving,))
        self._solving, self._change, self._retry_s = None, change, 0.0

    async def _plan(self, problem: Problem, usable: dict[str, NodeRecord], reason: str) -> None:
        version, config, running = self._next_version(), self._config, self._running(usable)
        self._thorough = reason == PERIODIC
        limit_s = config.thorough_solve_s if self._thorough else config.solve_s
        request = SolveRequest(
            problem=problem,
            version=version,
            coordinator=self._transport.peer_id,
            time_limit_s=limit_s,
            seed=version.counter + self._fruitless,
            now_unix_s=self._transport.now(),
            thorough=self._thorough,
            answer_weight=self._demand.answer_weight(self._plans.newest),
            settled=settled(usable, self._transport.now(), config.transition),
            flow=running.edges if running is not None else (),
        )
        try:
            answer = await self._solve(request, limit_s + config.grace_s)
        finally:
            self._planned_s = loop_s()
            self._change = None
            self._retry_s = self._planned_s + self._config.transition.retry_s
        if answer.error and self._thorough:
            logger.warning("the plan stays as it is: %s", answer.error)
            return
        if answer.error:
            self._say("no_plan", reason=answer.error, peers=len(problem.nodes))
            return
        self._solved = problem, self._standing(usable)
        if answer.searched is not None and answer.searched.failed:
            logger.warning(FALLEN_BACK, answer.searched.failed)
        best, kept = answer.best, answer.kept
        if best is None:
            logger.error("the solver found no plan that passes the checker")
        if best is None or not self.leads:
            return
        running = self._running(usable)
        choice = choose_plan(
            running,
            best,
            kept,
            usable,
            self._config.transition,
            self._transport.now(),
            answer.gain,
            tried=answer.tried,
            lost_lately=self._lost_lately,
        )
        if choice is None and _differ(running, self._plans.newest):
            choice = kept or best, "as its peers carry it out"
        if choice is None and running is not None and not usable.keys().isdisjoint(running.silent):
            choice = running, "peers that were silent answer"
        if (
            choice is None
            and running is not None
            and request.answer_weight != running.answer_weight
        ):
            choice = running, "the best for the load now, too"
        self._fruitless += self._thorough and choice is None
        if choice is not None:
            plan, why = choice
            plan = await asyncio.to_thread(with_effects, plan, usable)
            given = {a.peer_id for a in plan.assignments}
            plan = replace(
                plan,
                version=self._next_version(),  # a higher one may have been seen during the solve
                coordinator=self._transport.peer_id,
                answer_weight=request.answer_weight,
                silent=tuple(sorted(self._liveness.silent - given)[: RECORD_BOUNDS.peers_max]),
            )
            await self._publish(plan, f"{reason}: {why}")

    def _was_solved(self, problem: Problem, usable: dict[str, NodeRecord]) -> bool:
        """Whether the last solve saw the same, but for what measurements differ by anyway."""
        if self._solved is None:
            return False
        solved, standing = self._solved
        return standing == self._standing(usable) and alike(problem, solved)

    def _more_settled(self, usable: dict[str, NodeRecord]) -> bool:
        """Whether there are settled peers for whom the last solve moved nobody."""
        known = self._standing(usable).settled
        return self._solved is not None and not known <= self._solved[1].settled

    def _standing(self, usable: dict[str, NodeRecord]) -> Standing:
        now_s, config = self._transport.now(), self._config.transition
        return Standing(
            moved_lately=moved_lately(usable, now_s, config),
            settled=settled(usable, now_s, config),
            lost_lately=self._lost_lately,
            answer_weight=self._demand.answer_weight(self._plans.newest),
        )

    def _next_version(self) -> PlanVersion:
        seen = max(self._leadership.highest, self._plans.version)
        term = self._leadership.election.term
        return next_version(seen, term, rank(self._transport.peer_id, term))

    async def _publish(self, plan: Plan, reason: str) -> None:
        head = await self._plans.add(plan)
        self._planned = self._planned or frozenset()
        self._retry_s = 0.0
        self._said = ""
        self._on_event(
            "plan",
            version=str(plan.version),
            reason=reason,
            planner=plan.planner,
            estimate_tokens_per_s=round(plan.estimate_tokens_per_s or 0.0, 3),
            flow_tokens_per_s=round(plan.flow_tokens_per_s, 3),
            bound_tokens_per_s=round(plan.bound_tokens_per_s, 3),
            answer_weight=round(plan.answer_weight, 3),
            solve_s=round(plan.solve_s, 3),
            assignments={a.peer_id: [a.start, a.end] for a in plan.assignments},
            waves=[list(peers) for peers in plan.waves],
            fetch_bytes=plan.fetch_bytes,
        )
        await self._publish_head(head)

    async def _publish_head(self, head: PlanHead) -> None:
        """Publish the head; until some peer stores it, every poll tries again."""
        self._published_s = -math.inf
        if await self._directory.publish(head):
            self._published_s = loop_s()

    async def _republish(self) -> None:
        """Publish the head of the running plan again, also after its author is gone."""
        plan = self._plans.newest
        if plan is None:
            return
        mine = plan.coordinator == self._transport.peer_id
        if mine and self._plans.head is not None and not self._behind:
            await self._publish_head(self._plans.head)
            return
        taken_over = replace(
            plan, version=self._next_version(), coordinator=self._transport.peer_id, fetch_bytes=0
        )
        why = "peers follow a later one" if mine else "taken over from the coordinator before"
        await self._publish(taken_over, why)

    def _say(self, event: str, **fields: object) -> None:
        """Report an event unless it equals the last one reported."""
        text = f"{event}{fields}"
        if text != self._said:
            self._said = text
            self._on_event(event, **fields)


def _differ(one: Plan | None, other: Plan | None) -> bool:
    """Whether two plans give peers different layers."""
    if one is None or other is None:
        return one is not other
    return set(one.assignments) != set(other.assignments)
