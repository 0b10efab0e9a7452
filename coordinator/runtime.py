"""The coordinator's shell, running in every peer and acting in the elected one.

It polls the DHT, steps the pure election, follows the newest plan, and when it leads builds the
problem from what peers announced, has it solved in a process of its own, checks the answer and
publishes it.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import msgspec

from coordinator.check import check_plan
from coordinator.election import (
    Elected,
    Election,
    ElectionConfig,
    Observed,
    Stored,
    StoreLease,
    rank,
    step,
)
from coordinator.liveness import Liveness, LivenessConfig
from coordinator.placement import why_uncoverable
from coordinator.plan_store import PlanStore
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
    Assignment,
    LeaseRecord,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanEpoch,
    PlannerNode,
    Problem,
)

logger = logging.getLogger(__name__)

ReportEvent = Callable[..., None]
"""Called with an event's name and its fields."""
Solver = Callable[[SolveRequest, float], Awaitable[SolveAnswer]]
"""Solves a request within so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Timings in seconds."""

    poll_s: float = 1.0
    solve_s: float = 3.0
    """For the solver; its process is ended a little later."""
    publish_every_s: float = 60.0
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
        elif self._now() - self._published_s >= self._config.publish_every_s:
            await self._republish()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Election

    async def _elect(self, nodes: dict[str, NodeRecord], leases: dict[str, LeaseRecord]) -> None:
        self._highest = max(
            [self._highest, self._plans.epoch, *(record.epoch for record in nodes.values())]
        )
        candidates = frozenset(
            peer_id
            for peer_id, record in nodes.items()
            if record.state is not NodeState.DRAINING
            and record.model.fingerprint == self._model.fingerprint
        )
        for _ in range(2):  # a lease that was just stored is read back at once
            observed = Observed(
                leases=leases,
                candidates=candidates,
                epoch=self._highest,
                silent=self._liveness.silent,
                elders=elders(nodes, self._transport.now(), self._config.transition),
            )
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
            if not stored or self._election.leading:
                return
            leases = await self._directory.leases()

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
        """Ping the coordinator when following, and the plan's peers when leading."""
        watched = set()
        if self.leads and self._plans.newest is not None:
            watched = {a.peer_id for a in self._plans.newest.assignments}
        elif self._election.leader is not None:
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
        best, kept = _checked(answer.best, problem), _checked(answer.kept, problem)
        best = best or kept
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
        return PlanEpoch(
            term=self._election.term,
            counter=seen.counter + 1,
            rank=rank(self._transport.peer_id, self._election.term),
        )

    async def _publish(self, plan: Plan, reason: str) -> None:
        head = await self._plans.add(plan)
        self._published_s = self._now()
        self._retry_s = 0.0
        self._said = ""
        self._on_event(
            "plan",
            epoch=str(plan.epoch),
            reason=reason,
            planner=plan.planner,
            flow_tokens_per_s=round(plan.flow_tokens_per_s, 3),
            bound_tokens_per_s=round(plan.bound_tokens_per_s, 3),
            solve_s=round(plan.solve_s, 3),
            assignments={a.peer_id: [a.start, a.end] for a in plan.assignments},
            waves=[list(peers) for peers in plan.waves],
            fetch_bytes=plan.fetch_bytes,
        )
        await self._directory.publish(head)

    async def _republish(self) -> None:
        """Keep the head of the running plan alive, also after its author is gone."""
        self._published_s = self._now()
        plan = self._plans.newest
        if plan is None:
            return
        if plan.coordinator == self._transport.peer_id and self._plans.head is not None:
            await self._directory.publish(self._plans.head)
            return
        taken_over = replace(
            plan, epoch=self._next_epoch(), coordinator=self._transport.peer_id, fetch_bytes=0
        )
        await self._publish(taken_over, "taken over from the coordinator before")

    def _say(self, event: str, **fields: object) -> None:
        """Report an event once until something else happens."""
        text = f"{event}{fields}"
        if text != self._said:
            self._said = text
            self._on_event(event, **fields)


def _checked(plan: Plan | None, problem: Problem) -> Plan | None:
    """The solver's plan if the checker finds nothing wrong with it."""
    if plan is None:
        return None
    wrong = check_plan(plan, problem)
    for reason in wrong:
        logger.error("the solver's plan is wrong: %s", reason)
    return None if wrong else plan


def problem_of(
    model: ModelSpec,
    usable: dict[str, NodeRecord],
    links: dict[str, LinksRecord],
    plan: Plan | None = None,
) -> Problem:
    """The planners' input from the peers' announcements; links only between usable peers.

    What a peer holds is what ``plan`` gave it, or else what it serves: it may be loading still.
    """
    given = {a.peer_id: a for a in plan.assignments} if plan is not None else {}
    nodes = tuple(
        PlannerNode(
            peer_id=peer_id,
            memory_bytes=record.memory_bytes,
            kv_tokens_min=record.kv_tokens_min,
            tokens_per_s=record.tokens_per_s,
            current=given.get(peer_id, _served(record)),
        )
        for peer_id, record in sorted(usable.items())
    )
    measured = tuple(
        link
        for author, record in sorted(links.items())
        for link in record.links
        if link.target == author and link.source in usable and author in usable
    )
    return Problem(model=model, nodes=nodes, links=measured)


def _served(record: NodeRecord) -> Assignment | None:
    if record.start >= record.end:
        return None
    return Assignment(peer_id=record.peer_id, start=record.start, end=record.end)


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
    if process.returncode != 0:
        logger.error("the solver failed: %s", err.decode(errors="replace")[-1000:])
        return SolveAnswer(error=f"the solver ended with {process.returncode}")
    return msgspec.msgpack.decode(out, type=SolveAnswer)
