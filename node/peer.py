"""A peer's life once it is connected: announce, measure links, follow the plan, serve, drain.

Correctness never depends on the plan: what is announced is what is held, and the stage server
refuses what is not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from coordinator.plan_store import PlanStore
from coordinator.runtime import Coordinator
from coordinator.self_help import span_to_take
from coordinator.turn import TurnConfig, WaitFor, why_wait
from dht.directory import Directory
from dht.errors import NetworkError, UserError
from dht.transport import Transport
from dht.types import (
    NO_EPOCH,
    Assignment,
    NodeRecord,
    NodeState,
    Plan,
    PlanEpoch,
)
from node.link_keeper import LinkKeeper, LinkKeeperConfig
from node.live_view import Figures
from node.owner_use import ComeBack, OwnerUse, Seen, StepAside, UseConfig
from node.probe import ProbeServer
from node.report import Reporter, gibibytes, layers_sentence
from node.stage import StageServer
from node.stage_engine import EngineStage
from node.stage_streams import StageStreams, StreamLimits
from node.traffic import SAVE_EVERY_S
from node.watch import Watch

logger = logging.getLogger(__name__)


TURN_EVERY_S = 1.0
"""How often a peer that waits for its turn to move looks again."""
RESTART_S = 5.0
"""Before a part of the peer that failed is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Timings of a peer, in seconds."""

    announce_every_s: float = 15.0
    links: LinkKeeperConfig = field(default_factory=LinkKeeperConfig)
    move_s: float = 20.0
    """How long sessions on layers that a plan takes away may go on before they are moved."""
    alone_s: float = 60.0
    """Without a coordinator for so long, a peer without layers helps itself."""
    turn: TurnConfig = field(default_factory=TurnConfig)
    """How long a peer waits for others before it gives up layers."""
    pinned: Assignment | None = None
    """Layers that this peer serves whatever the plan says."""
    use: UseConfig = field(default_factory=UseConfig)
    """When to step aside for the machine's owner."""
    look_s: float = 2.0
    """Between looks at what else the machine does."""
    aside_s: float = 8.0
    """How long sessions may go on elsewhere before the owner gets the memory."""
    drain_s: float = 30.0
    """How long live sessions may go on when the peer leaves."""


class LooksAtMachine(Protocol):
    """Sees what else this machine does (:mod:`node.owner_watch`)."""

    def look(self) -> Seen: ...


class Peer:
    """Everything one volunteer's process does in the swarm."""

    def __init__(
        self,
        *,
        transport: Transport,
        directory: Directory,
        engine: EngineStage,
        stage: StageServer,
        coordinator: Coordinator,
        plans: PlanStore,
        reporter: Reporter,
        record: NodeRecord,
        config: PeerConfig,
        machine: LooksAtMachine | None = None,
    ) -> None:
        """``machine`` is looked at where ``config.use`` watches for the owner."""
        self._transport = transport
        self._directory = directory
        self._engine = engine
        self._stage = stage
        self._coordinator = coordinator
        self._plans = plans
        self._reporter = reporter
        self._record = record
        self._config = config
        self._machine = machine if config.use.watches else None
        self._aside = False
        self._changed = asyncio.Event()
        self._moving = asyncio.Lock()
        self._leaving = asyncio.Event()
        self._hurry = asyncio.Event()
        self._links = LinkKeeper(transport, directory, stage, config.links)
        stage.bandwidth_from = self._links.bandwidth_from
        self.watch: Watch | None = None
        """Shows the owner how it goes, where there is one."""

    def leave(self) -> None:
        """Start to drain; a second call ends the drain at once."""
        if self._leaving.is_set():
            self._hurry.set()
        self._leaving.set()

    async def run(self) -> None:
        """Serve until :meth:`leave` is called, then drain and return."""
        self._stage.on_idle = self._report_stats
        await ProbeServer(self._transport, self._stage.traffic).start()
        await StageStreams(self._transport, self._stage, StreamLimits()).start()
        await self._announce()
        work = (
            self._stage.run,
            self._coordinator.run,
            self._keep_announced,
            self._links.run,
            self._keep_within_month,
            self._follow_plans,
            self._help_oneself,
            self._mind_owner,
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._kept_running(each)) for each in work]
                tasks.append(group.create_task(self._watch_network()))
                if self.watch is not None:
                    tasks.append(group.create_task(self._kept_running(self.watch.run)))
                await self._leaving.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
        except* NetworkError as failures:
            raise NetworkError(str(failures.exceptions[0])) from None
        except* UserError as mistakes:
            raise UserError(str(mistakes.exceptions[0])) from None
        await self._stage.close("the peer left")

    async def _kept_running(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the peer; a fault of ours in it is reported, and it starts again.

        The other parts go on serving meanwhile.
        """
        while True:
            try:
                await work()
            except UserError:  # such as a file that is damaged even when it is fetched again
                raise
            except NetworkError as error:
                logger.warning("%s", error)
                self._reporter.event("error", message=str(error))
            except Exception as error:  # the top of a task: recorded, never swallowed
                logger.exception("%s failed", work.__qualname__)
                self._reporter.event("error", message=f"{work.__qualname__}: {error!r}")
            await asyncio.sleep(RESTART_S)

    async def _watch_network(self) -> None:
        """End the peer when it is cut off for good, rather than look alive."""
        raise NetworkError(await self._transport.wait_ended())

    def figures(self) -> Figures:
        """How it goes, for the owner."""
        record, traffic = self._record, self._stage.traffic
        return Figures(
            state=record.state,
            start=record.start,
            end=record.end,
            layers=record.model.layers,
            sessions=self._stage.sessions,
            tokens=self._engine.times.tokens,
            up_bytes=traffic.sent_bytes,
            down_bytes=traffic.received_bytes,
            peers=self._links.others,
            links=self._links.measured,
            device=record.device.name,
        )

    def _report_stats(self) -> None:
        """Where this peer's time went since it started; written whenever it becomes idle."""
        times = self._engine.times
        self._reporter.event(
            "stats",
            steps=times.steps,
            tokens=times.tokens,
            compute_s=round(times.compute_s, 6),
            waiting_s=round(times.waiting_s, 6),
            serialisation_s=round(self._stage.serialisation_s, 6),
            counters=dict(self._stage.counters),
        )

    # Announcing

    def _set(self, state: NodeState, start: int, end: int, epoch: PlanEpoch) -> None:
        self._record = replace(self._record, state=state, start=start, end=end, epoch=epoch)
        self._changed.set()

    async def _announce(self) -> None:
        self._record = replace(
            self._record,
            kv_tokens_free=self._engine.kv_tokens_free,
            sessions=self._stage.sessions,
            addresses=self._transport.addresses[:8],
        )
        try:
            if not await self._directory.publish(self._record):
                logger.info("nobody took this peer's announcement")
        except NetworkError as error:
            logger.info("cannot announce: %s", error)

    async def _keep_announced(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.announce_every_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await self._announce()

    # What the owner lends

    async def _keep_within_month(self) -> None:
        """Count the traffic, and leave when the month's share is used."""
        traffic = self._stage.traffic
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            traffic.save()
            if (why := traffic.exhausted()) is not None and not self._leaving.is_set():
                self._reporter.event("month_used", reason=why)
                self._reporter.say(f"{why}.")
                self.leave()

    @property
    def _me(self) -> str:
        return self._transport.peer_id

    # Following the plan

    async def _follow_plans(self) -> None:
        epoch = NO_EPOCH
        while True:
            plan = await self._plans.wait_newer(epoch)
            epoch = plan.epoch
            async with self._moving:
                await self._enter(plan)

    async def _enter(self, plan: Plan) -> None:
        record = self._record
        if self._aside:
            self._set(record.state, record.start, record.end, plan.epoch)
            return
        mine = self._config.pinned or plan.assignment_of(self._me)
        if mine is None:
            if record.state is NodeState.WAITING:
                self._reporter.say("The plan has no layers for this peer yet; waiting.")
            self._set(record.state, record.start, record.end, plan.epoch)
            return
        if record.state is NodeState.SERVING and (mine.start, mine.end) == (
            record.start,
            record.end,
        ):
            self._set(NodeState.SERVING, mine.start, mine.end, plan.epoch)
            return
        self._reporter.event("assigned", start=mine.start, end=mine.end, epoch=str(plan.epoch))
        serving = record.state is NodeState.SERVING
        # Announced before the move: the coordinator must know that this plan was seen.
        state = NodeState.SERVING if serving else NodeState.LOADING
        self._set(state, record.start, record.end, plan.epoch)
        await self._fetch(mine)
        if self._plans.epoch > plan.epoch:
            return  # fetching took a while, and there is other work now
        if serving:
            if not await self._wait_for_turn(plan):
                return
            await self._make_room()
        await self._take(mine, plan.epoch)

    async def _take(self, mine: Assignment, epoch: PlanEpoch) -> None:
        """Load layers and serve them."""
        self._engine.stop_serving()
        self._set(NodeState.LOADING, 0, 0, epoch)
        self._stage.fail_outside(0, 0, "the peer moves to other layers")
        total = self._record.model.layers
        what = f"Loading layers {mine.start} to {mine.end - 1}"
        with self._reporter.phase(what, counted=True) as meter:
            loaded_bytes = await self._engine.load(mine.start, mine.end, meter.update)
        self._engine.start_serving(mine.start, mine.end)
        self._set(NodeState.SERVING, mine.start, mine.end, epoch)
        await self._announce()
        self._reporter.event(
            "serving", start=mine.start, end=mine.end, epoch=str(epoch), bytes=loaded_bytes
        )
        self._reporter.say(
            f"{layers_sentence(mine.start, mine.end, total, NodeState.SERVING)}"
            f" ({gibibytes(loaded_bytes)} read, room for {self._engine.kv_tokens_free} tokens)"
        )

    async def _help_oneself(self) -> None:
        """Take the worst served layers when nobody has led for a while and no plan names this peer.

        Whoever may lead plans around it later; until then the last plan serves on.
        """
        while True:
            await asyncio.sleep(TURN_EVERY_S)
            alone_s = self._coordinator.leaderless_s
            if self._record.state is not NodeState.WAITING or alone_s < self._config.alone_s:
                continue
            try:
                nodes = await self._directory.nodes()
            except NetworkError as error:
                logger.info("cannot see which layers are served the worst: %s", error)
                continue
            async with self._moving:
                span = span_to_take(self._record, nodes)
                if span is None or self._record.state is not NodeState.WAITING:
                    continue
                self._reporter.say("Nobody coordinates: taking the layers that need it the most.")
                epoch = self._record.epoch
                self._reporter.event("assigned", start=span.start, end=span.end, epoch=str(epoch))
                await self._fetch(span)
                await self._take(span, epoch)

    async def _fetch(self, mine: Assignment) -> None:
        """Bring the files of new layers here while the old ones are served."""
        with self._reporter.phase(
            f"Fetching layers {mine.start} to {mine.end - 1}", counted=True
        ) as meter:
            await self._engine.fetch(mine.start, mine.end, meter.update)

    async def _wait_for_turn(self, plan: Plan) -> bool:
        """Wait, within bounds, until this peer may give up its layers; False: the plan is old."""
        clock = asyncio.get_running_loop()
        waited_s: dict[WaitFor, float] = {}
        while self._plans.epoch <= plan.epoch:
            try:
                nodes = await self._directory.nodes()
            except NetworkError as error:
                logger.info("cannot see whether it is this peer's turn to move: %s", error)
                nodes = {}
            waits = why_wait(plan, self._record, nodes, self._transport.now(), self._config.turn)
            waits = tuple(
                each
                for each in waits
                if waited_s.get(each.what, 0.0) < self._config.turn.limit_s(each.what)
            )
            if not waits:
                return True
            logger.info("this peer does not move yet: %s", waits[0].text)
            before_s = clock.time()
            await asyncio.sleep(TURN_EVERY_S)
            # What is waited for next only counts from when it is all that is left.
            first = waits[0].what
            waited_s[first] = waited_s.get(first, 0.0) + clock.time() - before_s
        return False

    async def _make_room(self) -> None:
        """Take no new sessions, and let those that run end, within bounds."""
        self._engine.stop_serving()
        epoch, now_s = self._record.epoch, self._transport.now()
        self._record = replace(self._record, moved_unix_s=now_s)
        self._set(NodeState.LOADING, 0, 0, epoch)
        self._stage.move_outside(0, 0)
        try:
            await self._stage.wait_idle(self._config.move_s)
        finally:
            self._stage.stay()

    # Stepping aside for the machine's owner

    async def _mind_owner(self) -> None:
        """Step aside when the owner wants the machine, come back when it is free."""
        use = OwnerUse(config=self._config.use)
        if self._machine is None:
            await asyncio.Event().wait()
            return
        clock = asyncio.get_running_loop()
        while True:
            seen = await asyncio.to_thread(self._machine.look)
            match use.step(seen, clock.time()):
                case StepAside(reason=reason):
                    async with self._moving:
                        await self._step_aside(reason)
                case ComeBack():
                    async with self._moving:
                        await self._come_back()
            await asyncio.sleep(self._config.look_s)

    async def _step_aside(self, reason: str) -> None:
        """Move sessions elsewhere, then give all memory back."""
        self._aside = True
        await self._tell_drain(f"Stepping aside, {reason}")
        self._stage.move_outside(0, 0)
        try:
            await self._stage.wait_idle(self._config.aside_s)
        finally:
            self._stage.stay()
        self._stage.fail_outside(0, 0, "the peer's owner needs the machine")
        await self._engine.unload()
        self._reporter.event("aside", reason=reason)
        self._reporter.say("All memory is free; this peer comes back when the machine is idle.")

    async def _come_back(self) -> None:
        """Offer this machine again, and take layers where some are planned for it."""
        self._aside = False
        self._reporter.event("back")
        self._reporter.say("The machine is free: coming back.")
        self._set(NodeState.WAITING, 0, 0, self._record.epoch)
        await self._announce()
        if (plan := self._plans.newest) is not None:
            await self._enter(plan)

    # Leaving

    async def _tell_drain(self, why: str) -> None:
        """Take no new sessions, and announce it."""
        self._engine.stop_serving()
        self._set(NodeState.DRAINING, 0, 0, self._record.epoch)
        self._reporter.event("draining", sessions=self._stage.sessions)
        self._reporter.say(f"{why}: {self._stage.sessions} sessions to move or finish first.")
        await self._announce()

    async def _drain(self) -> None:
        await self._tell_drain("Leaving")
        self._stage.move_outside(0, 0)
        drained = asyncio.create_task(self._stage.wait_idle(self._config.drain_s))
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, hurried):
            task.cancel()
