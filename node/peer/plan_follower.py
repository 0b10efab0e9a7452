"""Decides which layers a peer holds: the newest plan's, or without a leader the worst served."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.planning.heuristics.uncoordinated import span_to_take
from coordinator.plans.move_waits import (
    MoveWait,
    MoveWaitConfig,
    Patience,
    covers,
    layers_of,
    other_holders,
    serving_beside,
    why_wait,
    with_layers,
)
from coordinator.plans.store import PlanStore
from coordinator.policies.failure.asked import Asked, AskedConfig
from coordinator.policies.failure.pinger import BY_PEERS, answers_ping
from coordinator.policies.routing.balance import BALANCE
from coordinator.problem.from_records import problem_of
from coordinator.runtime import Coordinator
from dht.errors import MachineError, NetworkError, UserError
from dht.messages.types import (
    NO_VERSION,
    Assignment,
    NodeRecord,
    NodeState,
    Plan,
    PlanVersion,
    Reach,
    fits,
    layers_text,
)
from dht.process.supervision import beside, end_all
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.owner.reporter import Reporter, gibibytes, layers_sentence
from node.peer.announcer import Announcer
from node.stage.layer_check import LayerChecker
from node.stage.local_engine import LocalEngine
from node.stage.server import StageServer

T = TypeVar("T")

logger = logging.getLogger(__name__)

TURN_EVERY_S = 1.0
"""Interval at which a peer that waits for its turn to move looks again."""
UNTOLD_S = 5.0
"""A peer that waits for a plan reports the reason once it has held for ``UNTOLD_S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowConfig:
    """How a peer follows plans; times in seconds."""

    move_s: float = BALANCE.move_s
    """How long sessions on layers that a plan takes away may take to move elsewhere."""
    alone_s: float = 60.0
    """Time without a coordinator after which a peer without layers takes some by itself."""
    waits: MoveWaitConfig = field(default_factory=MoveWaitConfig)
    """How long a peer waits for others before it gives up layers."""
    asked_max: int = 16
    """Maximum pings of one look at who holds the other layers: records may be made up."""
    asked: AskedConfig = field(
        default_factory=lambda: AskedConfig(silent_misses=BY_PEERS.silent_misses)
    )
    """How long what these pings said counts."""
    load_look_s: float = 10.0
    """Interval between looks whether a load goes on."""
    load_looks: int = 90
    """Looks that see no further byte after which a load stands still for good: a disk that is slow
    reads the largest tensor in less, and graphs and kernels behind the last byte are made."""
    pinned: Assignment | None = None
    """Layers that this peer serves whatever the plan says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCore:
    """What all tasks of a peer work with; one of each in a process."""

    transport: Transport
    directory: Directory
    engine: LocalEngine
    stage: StageServer
    coordinator: Coordinator
    plans: PlanStore
    reporter: Reporter


class PlanFollower:
    """Moves this peer to other layers: fetches, waits for its turn, makes room, loads."""

    def __init__(self, core: PeerCore, announcer: Announcer, config: FollowConfig) -> None:
        self._transport = core.transport
        self._directory = core.directory
        self._engine = core.engine
        self._stage = core.stage
        self._coordinator = core.coordinator
        self._plans = core.plans
        self._reporter = core.reporter
        self._announcer = announcer
        self._config = config
        self._checker = LayerChecker(core.transport, core.engine)
        self._moving = asyncio.Lock()
        """Held while layers change, and while this peer waits for its turn."""
        self._rng = random.Random(core.transport.peer_id)  # noqa: S311  when to look is no secret
        self._patience = Patience(config.waits)
        self._leaving = False
        """Whether this peer is about to give up its layers."""
        self._asked = Asked(config.asked)
        self._unfetched: Assignment | None = None
        """Layers whose files could not be fetched when they were last tried."""
        self._stays = 0
        """Number of callers of :meth:`staying` that wait."""
        self._working: asyncio.Task[Any] | None = None
        """The download or load that is waited for."""
        self._loaded_bytes = 0
        """What the present load has read."""
        self.aside = False
        """Whether the machine's owner needs it, or this peer leaves: plans are noted and not
        followed."""
        self._waits_for = ""
        self._waits_since_s = 0.0

    def leaves(self) -> bool:
        """Whether this peer gives up its layers, or is about to: it then shows them to nobody."""
        return self._leaving or self.aside

    async def follow(self) -> None:
        """Take the layers of each new plan."""
        version = NO_VERSION
        while True:
            plan = await self._plans.wait_newer(version)
            version = plan.version
            async with self._moving:
                await self.enter(plan)

    @asynccontextmanager
    async def staying(self) -> AsyncIterator[None]:
        """Layers do not change within the block. A wait for this peer's turn ends, as does a
        download, which may take hours, and a load, which takes minutes from a slow disk."""
        self._stays += 1
        if self._working is not None:
            self._working.cancel()
        try:
            await self._moving.acquire()
        finally:
            self._stays -= 1
        try:
            yield
        finally:
            self._moving.release()

    async def enter(self, plan: Plan) -> None:
        """Take the plan's layers for this peer; call it within :meth:`staying`."""
        record = self._announcer.record
        if self.aside:
            self._announcer.set(record.state, record.start, record.end, plan.version)
            return
        mine = self._config.pinned or plan.assignment_of(record.peer_id)
        if mine is None:
            if record.state is NodeState.LOADING:  # for an older plan that was not carried out
                self._announcer.set(NodeState.WAITING, 0, 0, plan.version)
                record = self._announcer.record
            if record.state is NodeState.WAITING:
                why = ": others cannot reach it" if record.reach is Reach.NONE else " yet"
                self._tell_waiting(f"the plan has no layers for this peer{why}")
            self._announcer.set(record.state, record.start, record.end, plan.version)
            return
        if mine is not self._config.pinned and not _holds(record, mine):
            self._reporter.event("unfit", start=mine.start, end=mine.end, version=str(plan.version))
            logger.warning(
                "plan %s asks for %s, which this peer cannot hold: not followed",
                plan.version,
                layers_text((mine.start, mine.end)),
            )
            self._announcer.set(record.state, record.start, record.end, plan.version)
            return
        if record.state is NodeState.SERVING and (mine.start, mine.end) == (
            record.start,
            record.end,
        ):
            self._announcer.set(NodeState.SERVING, mine.start, mine.end, plan.version)
            return
        self._reporter.event("assigned", start=mine.start, end=mine.end, version=str(plan.version))
        serving = record.state is NodeState.SERVING
        # Announce before the move: the coordinator must know that this plan was seen.
        if serving:
            self._announcer.set(NodeState.SERVING, record.start, record.end, plan.version)
        else:
            self._announcer.set(NodeState.LOADING, mine.start, mine.end, plan.version)
        if not await self._is_ready(mine, plan, serving=serving):
            return
        try:
            if serving:
                if not await self._wait_for_turn(plan):
                    return
                await self._make_room(mine)
            await self._take(mine, plan.version)
        finally:
            self._leaving = False

    async def _take(self, mine: Assignment, version: PlanVersion) -> None:
        """Load layers and serve them."""
        self._reporter.stands("waiting", "")
        self._engine.stop_serving()
        self._announcer.set(NodeState.LOADING, mine.start, mine.end, version)
        self._stage.fail_all("the peer moves to other layers")
        total = self._announcer.record.model.layers
        what = f"Loading {layers_text((mine.start, mine.end))}"
        try:
            with self._reporter.phase(what, counted=True) as meter:

                def progress(done_bytes: int, total_bytes: int) -> None:
                    self._loaded_bytes = done_bytes
                    meter(done_bytes, total_bytes)

                load = self._engine.load(mine.start, mine.end, progress)
                async with beside(self._watch_load):
                    loaded = await self._unless_staying(load)
        except Exception:  # or nobody would take layers for this peer again
            self._announcer.set(NodeState.WAITING, 0, 0, version)
            raise
        if loaded is None:
            self._announcer.set(NodeState.WAITING, 0, 0, version)
        if loaded is None or self.aside:
            return
        loaded_bytes = loaded.result()
        self._engine.start_serving(mine.start, mine.end)
        self._announcer.set(NodeState.SERVING, mine.start, mine.end, version)
        await self._announcer.announce()
        self._reporter.event(
            "serving", start=mine.start, end=mine.end, version=str(version), bytes=loaded_bytes
        )
        self._reporter.say(
            f"{layers_sentence(mine.start, mine.end, total, NodeState.SERVING)}"
            f" ({gibibytes(loaded_bytes)} read, memory for {self._engine.kv_tokens} tokens)"
        )

    async def _watch_load(self) -> None:
        """End the peer when a load stands still, as a disk or a device that hangs makes it: others
        count on the layers for as long as it says that it loads them. Looks are counted, since a
        process that is stopped sees nothing."""
        looks, seen_bytes = 0, -1
        while looks < self._config.load_looks:
            await asyncio.sleep(self._config.load_look_s)
            looks = looks + 1 if self._loaded_bytes == seen_bytes else 0
            seen_bytes = self._loaded_bytes
        limit_s = self._config.load_looks * self._config.load_look_s
        raise MachineError(
            f"loading stands still: not a byte was read for {limit_s:.0f} s, and joining again may"
            " help"
        )

    async def help_oneself(self) -> None:
        """Take the worst served layers if nobody led for ``alone_s`` and no plan names this peer.

        A later coordinator may plan around it; until then the last plan serves on.
        """
        while True:
            await asyncio.sleep(TURN_EVERY_S)
            self._mind_waiting()
            if self._unfetched is not None:
                await self._try_again()
            alone_s = self._coordinator.leaderless_s
            if (
                self._announcer.record.state is not NodeState.WAITING
                or alone_s < self._config.alone_s
            ):
                continue
            try:
                nodes = await self._directory.nodes()
            except NetworkError as error:
                logger.info("cannot see which layers are served the worst: %s", error)
                continue
            async with self._moving:
                span = span_to_take(self._announcer.record, nodes)
                if span is None or self._announcer.record.state is not NodeState.WAITING:
                    continue
                self._reporter.say("Nobody coordinates: taking the layers that need it the most.")
                version = self._announcer.record.plan_version
                self._reporter.event(
                    "assigned", start=span.start, end=span.end, version=str(version)
                )
                if await self._fetch(span):
                    await self._take(span, version)

    def _mind_waiting(self) -> None:
        """Tell the owner why this peer has no plan to follow, once the reason is stable."""
        if self._announcer.record.state is not NodeState.WAITING or self._plans.newest is not None:
            return
        reason, now_s = self._coordinator.why_no_plan, asyncio.get_running_loop().time()
        if reason != self._waits_for:
            self._waits_for, self._waits_since_s = reason, now_s
        if reason and now_s - self._waits_since_s >= UNTOLD_S:
            self._tell_waiting(reason)

    def _tell_waiting(self, reason: str) -> None:
        """Say once why this peer holds no layers."""
        if self._reporter.stands("waiting", f"{reason[0].upper()}{reason[1:]}; waiting."):
            self._reporter.event("waiting", reason=reason)

    def _tell_staying(self, plan: Plan, reason: str) -> None:
        """Say why this peer goes on serving layers that ``plan`` takes from it."""
        record = self._announcer.record
        mine = plan.assignment_of(record.peer_id)
        if mine is None:
            return
        text = (
            f"The plan has {layers_text((mine.start, mine.end))} for this peer; it goes on serving"
            f" {layers_text((record.start, record.end))} for now: {reason}"
        )
        if self._reporter.stands("staying", text):
            self._reporter.event("stays", start=record.start, end=record.end, reason=reason)

    async def _is_ready(self, mine: Assignment, plan: Plan, *, serving: bool) -> bool:
        """Fetch the files of new layers; returns whether the move can begin. Who serves stays with
        its layers where the files are gone or find no room on the disk, as what is loaded needs
        none of them. Raises NetworkError, and UserError for who does not serve."""
        try:
            if not await self._fetch(mine):
                return False
        except UserError as error:
            if not serving:
                raise
            self._tell_staying(plan, str(error))
            return False
        return self._plans.version <= plan.version  # else a newer plan came meanwhile

    async def _fetch(self, mine: Assignment) -> bool:
        """Download the files of new layers while the old ones are served; returns whether they are
        here, and nobody wants layers to stay. Those of a local model are only looked at. Raises
        UserError and NetworkError: then nobody counts on a peer that serves nothing, until it can
        fetch them."""
        if self._engine.is_local:
            await self._engine.fetch(mine.start, mine.end, lambda *_: None)
            return True
        what = f"Fetching {layers_text((mine.start, mine.end))}"
        try:
            with self._reporter.phase(what, counted=True) as meter:
                fetch = self._engine.fetch(mine.start, mine.end, meter)
                if await self._unless_staying(fetch) is None:
                    return False
        except NetworkError as error:
            record = self._announcer.record
            if record.state is not NodeState.SERVING and not self.aside:
                self._unfetched = mine
                self._announcer.set(NodeState.DRAINING, 0, 0, record.plan_version)
                self._reporter.stands("fetching", f"Others take no account of this peer: {error}")
            raise
        self._unfetched = None
        self._reporter.stands("fetching", "")
        return True

    async def _unless_staying(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
        """``work`` once it ended; None where somebody wanted layers to stay before. Raises as it
        does."""
        self._working = task = asyncio.create_task(work)
        if self._stays:
            task.cancel()
        try:
            await asyncio.wait({task})
        finally:
            self._working = None
            await end_all((task,))
        if task.cancelled():
            return None
        task.result()
        return task

    async def _try_again(self) -> None:
        """Offer this machine again once the files are here that it could not fetch; raises as
        :meth:`_fetch`."""
        async with self._moving:
            if self._unfetched is None or self.aside:
                return
            if await self._fetch(self._unfetched):
                self._announcer.set(NodeState.WAITING, 0, 0, self._announcer.record.plan_version)

    async def _wait_for_turn(self, plan: Plan) -> bool:
        """Wait until this peer may give up its layers; False if the plan is old, or somebody else
        wants to change them.

        At the end others show their layers once more, while this peer shows its own to nobody: they
        may have moved meanwhile, or follow another plan, and count on this one.
        """
        clock = asyncio.get_running_loop()
        began_s, told = clock.time(), False
        while self._plans.version <= plan.version and not (self._stays or self.aside):
            found = await self._look_at_turn(plan, again=self._leaving)
            before_s = clock.time()
            waits = self._patience.left(found, before_s)
            if not waits and self._leaving:
                self._patience.end()
                return True
            self._leaving = not waits
            if not waits:
                continue
            logger.info("this peer does not move yet: %s", waits[0].text)
            if not told and before_s - began_s >= UNTOLD_S:
                told = True
                self._tell_staying(plan, waits[0].text)
            # Two that refuse each other must not try again at the same moment.
            await asyncio.sleep(TURN_EVERY_S * self._rng.uniform(0.5, 1.5))
            # Only the first reason's time runs; that of the next starts once it comes first.
            now_s = clock.time()
            self._patience.waited(waits[0].what, now_s - before_s, now_s)
        return False

    async def _look_at_turn(self, plan: Plan, *, again: bool) -> tuple[MoveWait, ...]:
        """What this peer waits for now, having asked other holders to show their layers; with
        ``again``, those that did so before."""
        try:
            nodes = await self._directory.nodes()
        except NetworkError as error:
            logger.info("cannot see whether it is this peer's turn to move: %s", error)
            nodes = {}
        mine = self._announcer.record
        held = range(mine.start, mine.end)
        others = other_holders(plan, mine, nodes)
        proven = await self._checker.proven(others, held, held, again=again)
        answering = await self._answering(plan, mine, nodes)
        now_s = self._transport.now()
        unshown = self._checker.unshown(nodes.values())
        waits = self._config.waits
        return why_wait(plan, mine, nodes, proven, answering, now_s, waits, unshown)

    async def _answering(
        self, plan: Plan, mine: NodeRecord, nodes: dict[str, NodeRecord]
    ) -> frozenset[str]:
        """Peers that answer this one, or were not asked, of those that announce layers.

        As few are asked as cover all layers, ``asked_max`` at most: those first who were seen here
        first. So whoever announces layers under many names and answers nothing makes no emergency,
        nor does one answer that is lost.
        """
        now_s, asked = asyncio.get_running_loop().time(), self._asked
        beside = serving_beside(mine, nodes)
        asked.forget(nodes, now_s)
        since_unix_s = self._directory.sightings.since_unix_s
        left = sorted(
            (record for record in beside if not asked.answered(record.peer_id)),
            key=lambda r: (asked.waits(r.peer_id, now_s), since_unix_s(r.peer_id), r.peer_id),
        )
        room = self._config.asked_max
        while left and room and not covers(plan, mine, self._answered(beside)):
            asking: list[NodeRecord] = []
            seen = set(layers_of(self._answered(beside)))
            for record in left:
                new = set(range(record.start, record.end)) - seen
                if new and len(asking) < room:
                    asking.append(record)
                    seen |= new
            if not asking:
                break
            answers = await asyncio.gather(
                *(answers_ping(self._transport, BY_PEERS, r.peer_id, r.addresses) for r in asking)
            )
            for record, answered in zip(asking, answers, strict=True):
                asked.note(record.peer_id, answered=answered, now_s=now_s)
            room -= len(asking)
            done = {record.peer_id for record in asking}
            left = [record for record in left if record.peer_id not in done]
        return frozenset(r.peer_id for r in beside if not asked.silent(r.peer_id))

    def _answered(self, records: Iterable[NodeRecord]) -> list[NodeRecord]:
        """Those of ``records`` whose peers have answered a ping lately."""
        return [record for record in records if self._asked.answered(record.peer_id)]

    async def is_spare(self) -> bool:
        """Whether others have shown that they hold all layers that this peer serves.

        Where they have, this peer is about to leave, and shows nobody its own. Raises NetworkError.
        """
        mine = self._announcer.record
        held = range(mine.start, mine.end)
        nodes = await self._directory.nodes()
        serving = (
            record
            for peer_id, record in nodes.items()
            if peer_id != mine.peer_id
            and record.state is NodeState.SERVING
            and record.model.serves_with(mine.model)
        )
        others = with_layers(serving, held)
        if self._moving.locked():
            return False  # it changes its layers, or waits for its turn to
        spare = False
        try:
            for again in (False, True):
                self._leaving = again
                proven = await self._checker.proven(others, held, held, again=again)
                spare = layers_of(r for r in others if r.peer_id in proven).issuperset(held)
                if not spare:
                    break
        finally:
            self._leaving = spare
        return spare

    async def _make_room(self, mine: Assignment) -> None:
        """Take no new sessions, and let the others end or move, within bounds, to load ``mine``."""
        self._engine.stop_serving()
        version, now_s = self._announcer.record.plan_version, self._transport.now()
        self._announcer.set_moved(now_s)
        self._announcer.set(NodeState.LOADING, mine.start, mine.end, version)
        self._stage.move_all()
        try:
            await self._stage.wait_idle(self._config.move_s)
        finally:
            self._stage.stay()


def _holds(record: NodeRecord, mine: Assignment) -> bool:
    """Whether the peer can hold these layers, by its own announcement."""
    (node,) = problem_of(record.model, {record.peer_id: record}, {}).nodes
    return fits(record.model, node, mine.start, mine.end)
