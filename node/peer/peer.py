"""Runs a connected peer: announces, measures links, follows the plan, serves, drains.

Correctness never depends on the plan: a peer announces what it holds, and the stage server refuses
everything else.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coordinator.policies.routing.balance import BalanceConfig
from dht.budget import SHARES, Budget
from dht.errors import MachineError, NetworkError
from dht.messages.types import NodeRecord, NodeState, Reach
from dht.process.supervision import PartFunction, Supervisor, beside, end_all, first_of, loop_s
from node.links.lent_traffic import TRAFFIC
from node.links.probe import MeasuredLinks, ProbeServer
from node.links.reachability import ReachKeeper, ReachServer
from node.links.relay_slots import Relays
from node.owner.idle_policy import ComeBack, OwnerUse, Seen, StepAside, UseConfig
from node.owner.live_panel import Figures, holders
from node.owner.machine_watch import MachineWatch
from node.owner.reporter import Reporter, counted
from node.peer.announcer import Announcer
from node.peer.balancer import Balancer
from node.peer.clock_watch import jump_text
from node.peer.link_keeper import LinkKeeper
from node.peer.plan_follower import FollowConfig, PeerCore, PlanFollower
from node.peer.self_check import SelfChecker
from node.stage.layer_check import LayerCheckServer
from node.stage.local_engine import LocalEngine
from node.stage.server import StageServer
from node.stage.streams import StageStreams

logger = logging.getLogger(__name__)

REACH_SENTENCES = {
    Reach.DIRECT: "Others reach this peer: one of them dialled it back.",
    Reach.RELAYED: "Others reach this peer through a relay only: forward its port (--port) on the"
    " router to be faster.",
    Reach.NONE: "Others cannot reach this peer, and no relay takes calls for it: it gets no layers."
    " Forward its port (--port) on the router, and open it in the firewall.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Timings of a peer, in seconds."""

    announce_every_s: float = 15.0
    follow: FollowConfig = field(default_factory=FollowConfig)
    use: UseConfig = field(default_factory=UseConfig)
    """When to step aside for the machine's owner."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Which sessions to have moved to other holders of their layers."""
    look_s: float = 2.0
    """Interval between looks at what else the machine does."""
    aside_s: float = 8.0
    """How long sessions may take to move elsewhere before the owner gets the memory."""
    reach_s: float = 12.0
    """Maximum wait at the start until a dial-back succeeded, or all peers asked have answered."""
    drain_s: float = 30.0
    """How long live sessions may go on when the peer leaves."""
    turn_s: float = 10.0
    """Interval between looks whether the engine comes to the end of its step."""
    turn_looks: int = 30
    """Looks at one step, while this peer serves, after which the engine stands still for good:
    clients give up on a step after seconds."""


class Peer:
    """Runs all parts of one volunteer's process in the swarm."""

    def __init__(
        self,
        core: PeerCore,
        *,
        record: NodeRecord,
        config: PeerConfig,
        measured: MeasuredLinks,
        machine: MachineWatch | None = None,
        refined: Callable[[NodeRecord], NodeRecord] = lambda record: record,
        parts: Supervisor | None = None,
        budget: Budget | None = None,
    ) -> None:
        """``machine`` is used if ``config.use`` watches for the owner; ``refined`` is the
        announcer's."""
        self._parts = parts or Supervisor()
        self._budget = budget or Budget()
        self._transport = transport = core.transport
        self._directory = directory = core.directory
        self._engine = core.engine
        self._stage = stage = core.stage
        self._coordinator = core.coordinator
        self._plans = core.plans
        self._reporter = reporter = core.reporter
        self._config = config
        self._machine = machine if config.use.watches else None
        self._aside = ""
        """Why the owner lends nothing now."""
        self._leaving = asyncio.Event()
        self._hurry = asyncio.Event()
        self._announcer = Announcer(
            transport=transport,
            directory=directory,
            stage=stage,
            record=record,
            every_s=config.announce_every_s,
            refined=refined,
            on_jump=self._note_jump,
        )
        self._follower = PlanFollower(core, self._announcer, config.follow)
        self._introduced = False
        """Whether this peer has announced itself."""
        self._measured = measured
        self._links = LinkKeeper(transport, directory, stage, measured)
        self._balancer = Balancer(directory, stage, lambda: self._announcer.record, config.balance)
        self._checker = SelfChecker(
            transport,
            serves=self._serves_by_plan,
            again=self._announcer.again,
            reporter=reporter,
        )
        self._reach = ReachKeeper(
            transport, directory, self._note_reach, relays=Relays(transport, self._introduce)
        )

    @property
    def trouble(self) -> str:
        """Why others do not see this peer; empty where they do."""
        return self._checker.trouble

    def _serves_by_plan(self) -> bool:
        plan, record = self._plans.newest, self._announcer.record
        planned = plan is not None and any(a.peer_id == record.peer_id for a in plan.assignments)
        return planned and record.state is NodeState.SERVING

    async def is_spare(self) -> bool:
        """Whether others have shown that they hold all layers that this peer serves.

        Raises NetworkError.
        """
        return await self._follower.is_spare()

    def leave(self) -> None:
        """Start to drain; a second call ends the drain at once."""
        if self._leaving.is_set():
            self._hurry.set()
        self._leaving.set()

    async def run(self, *others: PartFunction) -> None:
        """Serve until :meth:`leave` is called, then drain and return. ``others`` run meanwhile.

        Raises NetworkError where this peer is cut off for good, and UserError or MachineError where
        a part of it cannot go on.
        """
        self._budget.parties.member = lambda peer_id: peer_id in self._directory.nodes_last_read()
        self._budget.parties.before = self._was_here
        self._budget.parties.needs_relay = self._needs_relay
        await ProbeServer(self._transport, self._stage.traffic, self._budget).start()
        await StageStreams(self._transport, self._stage, self._budget).start()
        await ReachServer(self._transport, budget=self._budget).start()
        await LayerCheckServer(
            self._transport, self._engine, self._budget, self._follower.leaves
        ).start()
        work = (
            self._stage.run,
            self._coordinator.run,
            self._announcer.run,
            self._links.run,
            self._balancer.run,
            self._count_traffic,
            self._follower.follow,
            self._follower.help_oneself,
            self._mind_owner,
            self._checker.run,
            *others,
        )
        async with (
            beside(self._watch_network, self._watch_device, self._watch_engine),
            self._parts.beside(self._reach.run),
        ):
            await self._wait_reach()
            self._introduced = True
            await self._announcer.announce()
            async with self._parts.beside(*work):
                await self._leaving.wait()
                await self._drain()
        await self._stage.close("the peer left")

    async def _introduce(self) -> bool:
        """Announce this peer as one that nobody reaches, unless it has announced itself already;
        returns whether it had not."""
        if self._introduced:
            return False
        self._introduced = True
        await self._directory.publish(replace(self._announcer.record, reach=Reach.NONE))
        return True

    def _needs_relay(self, peer_id: str) -> bool:
        """Whether a peer of this model's says that others do not reach it directly."""
        record = self._directory.nodes_last_read().get(peer_id)
        return record is not None and record.reach is not Reach.DIRECT

    def _was_here(self, peer_id: str) -> bool:
        """Whether a peer has announced itself for some time, as this one saw it."""
        here_s = self._transport.now() - self._directory.sightings.since_unix_s(peer_id)
        return here_s >= SHARES.before_s

    async def _wait_reach(self) -> None:
        """Let others dial this peer back before it announces itself."""
        settled, leaving = self._reach.settled.wait(), self._leaving.wait()
        await first_of(settled, leaving, limit_s=self._config.reach_s)

    async def _watch_network(self) -> None:
        """End the peer when it is cut off for good, because it would otherwise only look alive."""
        raise NetworkError(await self._transport.wait_ended())

    async def _watch_device(self) -> None:
        """End the peer when its device has failed for good, because every session would fail."""
        reason = await asyncio.shield(self._engine.lost)
        device = self._announcer.record.device.name
        raise MachineError(f"{device} has failed, and joining again may help: {reason}")

    async def _watch_engine(self) -> None:
        """End the peer when its engine stands still: it would answer pings, and keep layers that
        every session breaks at. Looks are counted, since a process that is stopped sees nothing."""
        while True:
            turn = asyncio.create_task(self._engine.turn())
            try:
                for _ in range(self._config.turn_looks):
                    await asyncio.wait({turn}, timeout=self._config.turn_s)
                    if turn.done() or self._announcer.record.state is not NodeState.SERVING:
                        break
                else:
                    limit_s = self._config.turn_looks * self._config.turn_s
                    raise MachineError(
                        f"the engine stands still: a step has not ended for {limit_s:.0f} s, and"
                        " joining again may help"
                    )
                await turn
            finally:
                turn.cancel()
            await asyncio.sleep(self._config.turn_s)

    @property
    def record(self) -> NodeRecord:
        """This peer's newest announcement."""
        return self._announcer.record

    def figures(self) -> Figures:
        record, traffic = self._announcer.record, self._stage.traffic
        return Figures(
            state=record.state,
            start=record.start,
            end=record.end,
            layers=record.model.layers,
            sessions=self._stage.sessions,
            tokens=self._engine.times.tokens + self._stage.counters["accepted_drafts"],
            up_bytes=traffic.sent_bytes,
            down_bytes=traffic.received_bytes,
            peers=len(self._others()),
            model=record.model.name,
            network=self._directory.network,
            links=tuple(self._measured.links.values()),
            device=record.device.name,
            month_bytes=traffic.month.used_bytes,
            month_bytes_max=traffic.month_bytes_max,
            aside=self._aside,
        )

    def with_others(self, figures: Figures) -> Figures:
        """The figures with what other peers say, of which only a panel shows more than a number."""
        others = self._others()
        return replace(
            figures,
            names={peer_id: other.name for peer_id, other in others.items()},
            held=holders(self._announcer.record.model, others.values()),
        )

    def _others(self) -> dict[str, NodeRecord]:
        """The records of other peers, as last read."""
        others = self._directory.nodes_last_read()
        others.pop(self._transport.peer_id, None)
        return others

    def _note_reach(self, reach: Reach, beside: tuple[str, ...]) -> None:
        same = reach is self._announcer.record.reach
        self._announcer.set_reach(reach, beside)
        self._reporter.event("reach", reach=str(reach), beside=list(beside))
        if not same and (sentence := REACH_SENTENCES.get(reach)) is not None:
            self._reporter.say(sentence)

    def _note_jump(self, jump_s: float) -> None:
        self._reporter.event("clock", jump_s=round(jump_s, 3))
        self._reporter.say(jump_text(jump_s))

    # What the owner lends

    async def _count_traffic(self) -> None:
        """Keep the month's count of traffic, and report what it was for."""
        traffic = self._stage.traffic
        while True:
            await asyncio.sleep(TRAFFIC.save_every_s)
            traffic.save()
            self._reporter.event("traffic", bytes=dict(traffic.purposes))

    # Stepping aside for the machine's owner

    async def _mind_owner(self) -> None:
        """Step aside when the owner lends nothing for a while, and come back after that."""
        if self._machine is None and self._stage.traffic.month_bytes_max is None:
            return
        use = OwnerUse(config=self._config.use, aside=self._follower.aside)
        if use.aside:  # this part failed meanwhile, perhaps before the memory was free
            async with self._follower.staying():
                await self._free_memory()
        coming: asyncio.Task[None] | None = None
        try:
            while True:
                seen = await self._look()
                match use.step(seen, loop_s()):
                    case StepAside(reason=reason):
                        async with self._follower.staying():
                            await self._step_aside(reason)
                    case ComeBack() if not self._leaving.is_set():
                        # Its layers may take hours to fetch, and the owner comes when they like.
                        coming = asyncio.create_task(self._come_back())
                await asyncio.sleep(self._config.look_s)
                if coming is not None and coming.done():
                    done, coming = coming, None
                    done.result()
        finally:
            await end_all(() if coming is None else (coming,))

    async def _look(self) -> Seen:
        """The machine's use by its owner, and the traffic left for the month."""
        machine = self._machine
        seen = Seen(minute=0) if machine is None else await asyncio.to_thread(machine.look)
        return replace(seen, month_used=self._stage.traffic.exhausted() or "")

    async def _step_aside(self, reason: str) -> None:
        """Move sessions elsewhere, then free all memory."""
        self._follower.aside, self._aside = True, reason
        await self._tell_drain(f"Stepping aside, {reason}")
        self._stage.move_all()
        try:
            await self._stage.wait_idle(self._config.aside_s)
        finally:
            self._stage.stay()
        await self._free_memory()
        self._reporter.event("aside", reason=reason)
        self._reporter.say("The model's memory is free; this peer comes back by itself.")

    async def _free_memory(self) -> None:
        self._stage.fail_all("the peer's owner lends nothing now")
        await self._engine.unload()

    async def _come_back(self) -> None:
        """Offer this machine again, and take the layers that the plan has for it."""
        async with self._follower.staying():
            if self._leaving.is_set():
                return
            self._follower.aside, self._aside = False, ""
            self._reporter.event("back")
            self._reporter.say("The machine may be used again: coming back.")
            self._announcer.set(NodeState.WAITING, 0, 0, self._announcer.record.plan_version)
            await self._announcer.announce()
            if (plan := self._plans.newest) is not None:
                await self._follower.enter(plan)

    # Leaving

    async def _tell_drain(self, why: str) -> None:
        """Take no new sessions, and announce the drain."""
        self._engine.stop_serving()
        self._announcer.set(NodeState.DRAINING, 0, 0, self._announcer.record.plan_version)
        self._reporter.event("draining", sessions=self._stage.sessions)
        sessions = counted(self._stage.sessions, "session")
        self._reporter.say(f"{why}: {sessions} to move or finish first.")
        await self._announcer.announce()

    async def _drain(self) -> None:
        # A plan that comes now would end the sessions at once.
        self._follower.aside, self._aside = True, ""
        await self._tell_drain("Leaving")
        self._stage.move_all()
        await first_of(self._stage.wait_idle(self._config.drain_s), self._hurry.wait())


def report_stats(
    reporter: Reporter, engine: LocalEngine, stage: StageServer, parts: Supervisor, budget: Budget
) -> None:
    """Report how a peer's time was spent since it started."""
    times = engine.times
    reporter.event(
        "stats",
        steps=times.steps,
        tokens=times.tokens + stage.counters["accepted_drafts"],
        compute_s=round(times.compute_s, 6),
        waiting_s=round(times.waiting_s, 6),
        serialisation_s=round(stage.pipeline.serialisation_s, 6),
        counters=dict(stage.counters),
        failures=dict(parts.failures),
        refused=budget.refused,
    )
