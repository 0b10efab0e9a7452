"""The page's own look at the swarm: records, who answers, one short answer now and then."""

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from client.answer.generation import GenerationOptions
from client.errors import UnavailableError
from client.health.given import GivenTally
from client.health.history import History
from client.health.past import IncidentWatch
from client.health.served import ServedTally
from client.health.state import (
    Probe,
    SeenPeer,
    SwarmSnapshot,
    TokenTime,
    build_state,
    first_of,
)
from client.swarm.swarm import Swarm
from coordinator.plans.catalogue.reading import network_models, served_models
from coordinator.plans.catalogue.served import ServedModel
from coordinator.policies.failure.pinger import BY_CLIENTS, Pinger
from dht.errors import NetworkError, PeerError, SwarmError, UserError
from dht.messages.types import (
    RECORD_BOUNDS,
    LeaseRecord,
    LinksRecord,
    NodeRecord,
    RouteStage,
    layers_text,
)
from dht.process.json_file import Json
from dht.records.directory import LIFETIME_S, RecordKind

logger = logging.getLogger(__name__)

GONE_S = 600.0
"""Time for which a peer that left is shown."""
REFUSALS_MAX = 16
MODELS_KEPT_S = LIFETIME_S[RecordKind.MODELS]
"""Time for which models are shown that could not be read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProberConfig:
    """Times in seconds."""

    every_s: float = 30.0
    """Time between two of the page's own requests."""
    models_s: float = 60.0
    """Time between two looks at what the network serves of all its models."""
    look_s: float = 10.0
    """Time between two looks at the DHT, each with a new state."""
    calm_s: float = 0.5
    """Least time between two new states, however much changes."""
    answer_s: float = 20.0
    prompt_ids: tuple[int, ...] = (1, 2, 3, 4)
    new_tokens: int = 8
    thanked: Mapping[str, str] = field(default_factory=dict)
    """Names of those who asked to be thanked, by peer id."""
    invitation: str = ""
    """Shown to visitors in the commands that ask and join; empty: none is."""


class Prober:
    """Asks every ``every_s``, looks more often, and keeps the newest state; a peer that falls
    silent or answers again is in it at once."""

    def __init__(
        self,
        swarm: Swarm,
        history: History,
        config: ProberConfig,
    ) -> None:
        self._swarm = swarm
        self._transport = swarm.transport
        self._directory = swarm.reader.directory
        self._history = history
        self._config = config
        self._peers: dict[str, SeenPeer] = {}
        """The one that was seen first comes first."""
        self._links: dict[str, LinksRecord] = {}
        self._leases: dict[str, LeaseRecord] = {}
        self._blind = False
        """Whether nobody answered the last look."""
        self._route: tuple[RouteStage, ...] = ()
        self._token_time: TokenTime | None = None
        self._models: tuple[ServedModel, ...] = ()
        self._models_unix_s = -math.inf
        self._tally = ServedTally()
        self._given = GivenTally(named=frozenset(config.thanked))
        self._watch: IncidentWatch | None = None
        self._changed = asyncio.Event()
        self._parts = swarm.reader.parts
        self._pinger = Pinger(swarm.transport, BY_CLIENTS, self._changed.set, self._parts)
        self.state: Json = build_state(
            SwarmSnapshot(model_name=swarm.text.name, now_unix_s=swarm.transport.now())
        )

    async def run(self) -> None:
        """Ask and look until cancelled; raises what the swarm's supervisor raises."""
        try:
            parts = (self._requests, self._states, self._catalogue)
            await self._parts.run(*parts, ends_process=False)
        finally:
            await self._pinger.close()

    async def once(self) -> Json:
        """The state after one request of its own, once everybody answered a ping or is silent."""
        try:
            await asyncio.gather(self._look(), self._look_at_models())
            await self._history.add(await self._ask())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.answer_s):
                    await self._pinged()
            await self.show()
            return self.state
        finally:
            await self._pinger.close()

    async def _pinged(self) -> None:
        while True:
            self._changed.clear()
            states = [self._pinger.state_of(peer_id) for peer_id in self._peers]
            if all(state.answered_unix_s is not None or state.silent for state in states):
                return
            await self._changed.wait()

    async def _requests(self) -> None:
        while True:
            await self._history.add(await self._ask())
            self._changed.set()
            await asyncio.sleep(self._config.every_s)

    async def _states(self) -> None:
        loop = asyncio.get_running_loop()
        looked_s = -math.inf
        while True:
            if loop.time() - looked_s >= self._config.look_s:
                looked_s = loop.time()
                await self._look()
            await self.show()
            await asyncio.sleep(self._config.calm_s)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(looked_s + self._config.look_s):
                    await self._changed.wait()
            self._changed.clear()

    async def _catalogue(self) -> None:
        while True:
            await self._look_at_models()
            await asyncio.sleep(self._config.models_s)

    async def _look_at_models(self) -> None:
        """Read what is served of each model; what cannot be read is forgotten after a while."""
        network, now_unix_s = self._swarm.config.network, self._transport.now()
        try:
            async with asyncio.timeout(self._config.answer_s):
                specs = await network_models(self._transport, network, self._swarm.named)
                self._models = await served_models(self._transport, network, specs)
                self._models_unix_s = now_unix_s
        except (NetworkError, TimeoutError) as error:
            logger.warning("cannot read the network's models: %s", error)
            if now_unix_s - self._models_unix_s > MODELS_KEPT_S:
                self._models = ()
        self._changed.set()

    async def show(self) -> None:
        """Build the state from what is known now."""
        now_unix_s = self._transport.now()
        if (plan := self._swarm.view.plan) is not None:
            await self._history.add_plan(plan, now_unix_s)
        seen = SwarmSnapshot(
            model_name=self._swarm.text.name,
            now_unix_s=now_unix_s,
            model=self._swarm.view.spec,
            peers=tuple(map(self._with_beat, self._peers)),
            links=tuple(self._links.values()),
            leases=tuple(self._leases.values()),
            plan=plan,
            blind=self._blind,
            probes=await self._history.recent(now_unix_s),
            past=await self._history.past(now_unix_s),
            incidents=await self._history.incidents(now_unix_s),
            route=self._route,
            token_time=self._token_time,
            versions=await self._history.plans(),
            models=self._models,
            given=await self._history.given(now_unix_s),
            thanked=self._config.thanked,
            invitation=self._config.invitation,
        )
        state = await asyncio.to_thread(build_state, seen)
        if self._watch is None:
            self._watch = IncidentWatch(open=await self._history.open_incidents())
        if changed := self._watch.look(state):
            await self._history.add_incidents(changed)
            incidents = await self._history.incidents(now_unix_s)
            state = await asyncio.to_thread(build_state, replace(seen, incidents=incidents))
        self._given.look(state)
        self.state = state

    def _with_beat(self, peer_id: str) -> SeenPeer:
        state = self._pinger.state_of(peer_id)
        return replace(
            self._peers[peer_id],
            answered_unix_s=state.answered_unix_s,
            rtt_s=state.rtt_s,
            misses=state.misses,
        )

    async def _look(self) -> None:
        """Read the DHT; one that cannot be read leaves what was seen, which then grows old."""
        now_unix_s = self._transport.now()
        try:
            async with asyncio.timeout(self._config.answer_s):
                nodes = await self._directory.nodes()
                self._links = await self._directory.links()
                self._leases = await self._directory.leases()
        except (NetworkError, TimeoutError) as error:
            logger.warning("cannot read the DHT: %s", error)
            self._blind = True
            return
        self._blind = False
        for peer_id, record in nodes.items():
            self._peers[peer_id] = self._seen(peer_id, record, now_unix_s)
        kept = [
            self._with_beat(peer_id)
            for peer_id, seen in self._peers.items()
            if now_unix_s - seen.seen_unix_s <= GONE_S
        ]
        kept = first_of(kept, RECORD_BOUNDS.peers_max)
        self._peers = {each.record.peer_id: each for each in kept}
        self._pinger.watch({key: seen.record.addresses for key, seen in self._peers.items()})
        await self._history.add_served(self._tally.look(nodes.values(), now_unix_s), now_unix_s)
        self._tally.forget(self._peers)
        await self._history.add_given(self._given.take(), now_unix_s)

    def _seen(self, peer_id: str, record: NodeRecord, now_unix_s: float) -> SeenPeer:
        before = self._peers.get(peer_id)
        now = SeenPeer(record=record, seen_unix_s=now_unix_s, placed_unix_s=now_unix_s)
        if before is None or (before.record.start, before.record.end) != (record.start, record.end):
            return now
        return replace(before, record=record, seen_unix_s=now_unix_s)

    async def _ask(self) -> Probe:
        """One short answer. The reason of a failure is in the page's own words: others' may hold
        addresses."""
        at_unix_s = self._transport.now()
        options = GenerationOptions(
            max_new_tokens=self._config.new_tokens, ignore_eos=True, temperature=0.0
        )
        try:
            async with asyncio.timeout(self._config.answer_s):
                answer = await self._swarm.generate(self._config.prompt_ids, options)
        except TimeoutError:
            reason = f"no answer within {self._config.answer_s:.0f} s"
        except UnavailableError as error:
            missing = layers_text(*error.missing) + " missing" if error.missing else "no free peer"
            reason = f"no route: {missing}"
        except (SwarmError, NetworkError, PeerError, UserError) as error:
            logger.warning("a probe failed: %s", error)
            reason = "the swarm broke the request off"
        else:
            self._route = answer.route
            self._token_time = TokenTime(
                computed_s=answer.computed_s, waited_s=answer.waited_s, way_s=answer.way_s
            )
            return Probe(
                at_unix_s=at_unix_s,
                ttft_s=answer.ttft_s,
                tpot_s=answer.tpot_s,
                tokens=len(answer.token_ids),
            )
        finally:
            self._note_refusals(self._transport.now())
        return Probe(at_unix_s=at_unix_s, reason=reason)

    def _note_refusals(self, now_unix_s: float) -> None:
        misled = self._swarm.view.misled
        while misled:
            peer_id = misled.popleft()
            if (seen := self._peers.get(peer_id)) is not None:
                times = (*seen.refused_unix_s, now_unix_s)[-REFUSALS_MAX:]
                self._peers[peer_id] = replace(seen, refused_unix_s=times)
