"""A consumer's view of the swarm: who serves what, routes, and answers that survive lost peers."""

import asyncio
import logging
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from client.answer.generation import Answer, GenerationOptions, Piece
from client.answer.running import Generation
from client.errors import UnavailableError
from client.session.attempt import AttemptConfig
from client.session.events import Avoid, Route
from client.session.failover import SessionController
from client.session.progress import Progress, StatusCallback, Waiting
from client.session.session import SessionDriver
from client.session.token_log import AnswerLog
from client.swarm.avoidance import Avoidance
from client.text.tokenizer import Tokenizer, stop_token_ids
from coordinator.plans.store import PlanStore
from coordinator.routing.balance import swapped
from coordinator.routing.routes import (
    NoRoute,
    Router,
    being_loaded,
    replacement,
    route_from_records,
)
from dht.connecting import connect
from dht.errors import NetworkError, UserError
from dht.hub import HubId, fetch_text_files
from dht.identity.peer_id import short_name
from dht.messages.session import RefusalCode
from dht.messages.types import ModelSpec, NodeRecord, NodeState, Plan, RouteStage, model_key
from dht.records.directory import DEFAULT_NETWORK, Directory
from dht.transport.config import TransportConfig, TransportKind
from dht.transport.interface import Transport

logger = logging.getLogger(__name__)

BUSY_MOST_S = 8.0
"""A peer without room is asked again after so long at the latest, whatever it expects."""
LOOK_S = 0.25
"""Between looks for a first peer."""
NOBODY = NoRoute(reason="nobody announces this model")
FULL = NoRoute(reason="the peers that hold the missing layers are full")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """How a client looks at the swarm. Times in seconds."""

    network: str = DEFAULT_NETWORK
    poll_s: float = 2.0
    """Between looks at the DHT while all is well."""
    wait_s: float = 60.0
    """How long an answer waits for missing layers before it gives up; 0 gives up at once."""
    avoid_s: float = 15.0
    """How long a peer that failed is avoided, unless it joins anew."""
    busy_s: float = 1.0
    """How long a peer without room is avoided."""
    transport: TransportKind = TransportKind.AUTO
    attempt: AttemptConfig = field(default_factory=AttemptConfig)


class Swarm:
    """A connection to the peers that serve one model. Use as an async context manager."""

    def __init__(
        self,
        *,
        model: str,
        config: SwarmConfig,
        open_transport: Callable[[], Awaitable[Transport]],
        on_status: StatusCallback | None = None,
    ) -> None:
        self._config = config
        self._open_transport = open_transport
        self._on_status = on_status or (lambda text: logger.info("%s", text))
        directory = Path(model)
        self._hub_id = None if directory.is_dir() else HubId.parse(model)
        self.tokenizer: Tokenizer | None = None
        self.stop_token_ids: tuple[int, ...] = ()
        self.text_directory: Path | None = None
        """Where the model's tokenizer and its text files are, if anywhere here."""
        self.model_name = model
        if directory.is_dir():
            self.model_name = directory.resolve().name
            self._read_text_files(directory)
        elif self._hub_id is None and ("/" in model or model.startswith((".", "~")) or not model):
            raise UserError(
                f"{model!r} is not a directory; give a model's directory, its hub id or its name"
            )
        self._nodes: dict[str, NodeRecord] = {}
        self._blind = ""
        """Why the last look showed nothing; empty when it was answered."""
        self._router: Router | None = None
        self._avoidance = Avoidance()
        self._poll: asyncio.Task[None] | None = None
        self.counters: Counter[str] = Counter()

    def _read_text_files(self, directory: Path) -> None:
        self.text_directory = directory
        self.tokenizer = Tokenizer.load(directory)
        self.stop_token_ids = stop_token_ids(directory)

    @classmethod
    def connect(
        cls,
        initial_peers: Sequence[str],
        *,
        model: str,
        config: SwarmConfig | None = None,
        on_status: StatusCallback | None = None,
    ) -> Self:
        """A swarm reached through ``initial_peers`` (multiaddresses), for ``async with``.

        ``model`` is a local directory, a hub id (its tokenizer is used) or the name that peers
        serve it under (token ids only). Entering raises UserError for malformed addresses and for
        a model that is not on the hub, HubUnreachableError, and NetworkError when nobody answers.
        """

        async def open_transport() -> Transport:
            from dht.identity.peer_id import Identity

            return await connect(
                TransportConfig(
                    identity=Identity.generate(),
                    kind=kind,
                    initial_peers=tuple(initial_peers),
                    client_mode=True,
                )
            )

        kind = config.transport if config is not None else TransportKind.AUTO
        if not initial_peers:
            raise UserError("give the address of at least one peer of the swarm")
        return cls(
            model=model,
            config=config or SwarmConfig(),
            open_transport=open_transport,
            on_status=on_status,
        )

    async def __aenter__(self) -> Self:
        if self._hub_id is not None:
            self._read_text_files(await asyncio.to_thread(fetch_text_files, self._hub_id))
        self._transport = await self._open_transport()
        self._directory = Directory(
            self._transport, self._config.network, model_key(self.model_name)
        )
        self._plans = PlanStore(self._transport, self._directory)
        await self.refresh()
        self._poll = asyncio.create_task(self._keep_fresh(), name="swarm view")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._poll is not None:
            self._poll.cancel()
            with suppress(asyncio.CancelledError):
                await self._poll
        await self._transport.close()

    # The view

    @property
    def nodes(self) -> dict[str, NodeRecord]:
        """The peers' newest announcements by peer id."""
        return self._nodes

    @property
    def plan(self) -> Plan | None:
        """The newest plan that was seen and checked."""
        return self._plans.newest

    @property
    def spec(self) -> ModelSpec | None:
        """The model as the peers describe it; the description that most of them share."""
        counted = Counter(record.model for record in self._nodes.values())
        return counted.most_common(1)[0][0] if counted else None

    async def refresh(self) -> None:
        """Read node records and plan now."""
        self._nodes = await self._directory.nodes()
        self._blind = ""
        await self._plans.refresh()
        plan = self._plans.newest
        if plan is not None and (self._router is None or self._router.plan is not plan):
            self._router = Router(plan)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            await self.look()

    def _usable(
        self,
        spec: ModelSpec,
        *,
        urgent: bool = False,
        full: bool = False,
        second_chance: bool = False,
    ) -> dict[str, NodeRecord]:
        """Peers that serve the model and are not avoided (see :meth:`Avoidance.avoids`)."""
        now_s = asyncio.get_running_loop().time()
        return {
            peer_id: record
            for peer_id, record in self._nodes.items()
            if record.state is NodeState.SERVING
            and record.model.serves_with(spec)
            and not self._avoidance.avoids(
                record, now_s, urgent=urgent, full=full, second_chance=second_chance
            )
        }

    def worked(self, route: tuple[RouteStage, ...], *, had_room: bool) -> None:
        """Peers that delivered are no longer held to their past."""
        self._avoidance.worked((stage.peer_id for stage in route), had_room=had_room)

    def asked(self, route: tuple[RouteStage, ...]) -> None:
        """A new session waits for what these peers say (``RouteSource``)."""
        self._avoidance.asked({stage.peer_id for stage in route})

    def answered(self, route: tuple[RouteStage, ...]) -> None:
        """It does not wait for that any more (``RouteSource``)."""
        self._avoidance.answered({stage.peer_id for stage in route})

    # Answers (see client.session.session)

    async def answer_tokens(
        self, log: AnswerLog, progress: Progress
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Tokens of ``log`` as they come; a lost stage is replaced on the way.

        Raises UnavailableError when no route was found for ``wait_s``.
        """
        spec = await self.ready_spec()
        session = SessionDriver(
            self._transport,
            self._config.attempt,
            self,
            SessionController(log=log, wait_s=self._config.wait_s),
            progress,
            Waiting(self._on_status),
            fingerprint=spec.fingerprint,
        )
        async with aclosing(session.tokens()) as tokens:
            async for token_ids in tokens:
                yield token_ids

    def draw(
        self, mend: Route, lost: frozenset[str], kv_tokens: int, *, urgent: bool = False
    ) -> Route | NoRoute:
        """A new route, or ``mend`` with what is ``lost`` replaced (``RouteSource``)."""
        spec = self.spec
        if spec is None:
            return NOBODY

        def over(usable: Mapping[str, NodeRecord]) -> Route | NoRoute:
            if mend:
                return replacement(mend, lost, usable, spec.layers)
            if self._router is not None:
                route = self._router.next_route(usable)
                if not isinstance(route, NoRoute):
                    return route
            return route_from_records(usable, spec.layers)

        usable = self._usable(spec, urgent=urgent)
        # What peers announced of their room is up to 15 s old: it decides where there is a choice.
        roomy = {p: r for p, r in usable.items() if r.kv_tokens_free >= kv_tokens}
        route = over(roomy) if roomy != usable else NoRoute(reason="")
        if isinstance(route, NoRoute):
            route = over(usable)
        now_s = asyncio.get_running_loop().time()
        if isinstance(route, NoRoute):
            with_full = self._usable(spec, urgent=urgent, full=True)
            if not isinstance(over(with_full), NoRoute):
                return replace(FULL, retry_after_s=self._avoidance.room_after_s(with_full, now_s))
            chance = over(self._usable(spec, urgent=urgent, second_chance=True))
            route = route if isinstance(chance, NoRoute) else chance
        if isinstance(route, NoRoute):
            return replace(route, loading=being_loaded(self._nodes, spec))
        self._avoidance.trying((stage.peer_id for stage in route), now_s)
        return route

    def swap(self, mend: Route, leaving: str, to: str, kv_tokens: int) -> Route | NoRoute:
        """``mend`` with ``to`` in the place of ``leaving`` (``RouteSource``).

        That another stage proposes ``to`` is not enough: it must serve these layers, with room, and
        not have failed lately.
        """
        spec = self.spec
        record = None if spec is None else self._usable(spec).get(to)
        if record is None or record.kv_tokens_free - record.kv_tokens_wanted < kv_tokens:
            return NoRoute(reason="that peer has no room to spare")
        return swapped(mend, leaving, record)

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Where a peer says that it can be reached; empty when its record is gone."""
        record = self._nodes.get(peer_id)
        return () if record is None else record.addresses

    def avoid(self, avoid: Avoid, *, urgent: bool = False) -> None:
        """Pass a peer over for a while that failed or refused."""
        what = "failovers" if avoid.code is None else f"refused_{avoid.code}"
        self.counters[what] += 1
        config = self._config
        full = False
        match avoid.code:
            case None:
                reason = f"peer {short_name(avoid.peer_id)}: {avoid.reason}"
                self._on_status(f"{reason}; going on over another route")
                for_s = config.avoid_s
            case RefusalCode.NO_KV | RefusalCode.TOO_MANY:
                for_s, full = min(avoid.retry_after_s or config.busy_s, BUSY_MOST_S), True
            case RefusalCode.NOT_HELD | RefusalCode.DRAINING:
                for_s = 2 * config.poll_s
            case _:
                for_s = config.avoid_s
        record = self._nodes.get(avoid.peer_id)
        self._avoidance.add(
            avoid.peer_id,
            for_s,
            asyncio.get_running_loop().time(),
            joined_unix_s=0.0 if record is None else record.joined_unix_s,
            full=full,
            urgent=urgent,
        )

    async def look(self) -> None:
        """Read all anew; where nobody answers, the view stays as it is."""
        try:
            await self.refresh()
        except NetworkError as error:
            self._blind = str(error)
            self.counters["refresh_failed"] += 1
            logger.info("cannot read who serves what: %s", error)

    async def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.wait_s
        waiting = Waiting(self._on_status)
        while (spec := self.spec) is None:
            reason = f"nobody in network {self._config.network!r} announces {self.model_name}"
            if self._blind:  # then nobody said so
                reason = f"cannot read who serves {self.model_name}: {self._blind}"
            waiting.say(NoRoute(reason=reason, missing=()))
            if loop.time() >= deadline_s:
                raise UnavailableError(waiting.text)
            await asyncio.sleep(LOOK_S)
            await self.look()
        return spec

    async def stream(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> AsyncIterator[Piece]:
        """Pieces of the answer to ``prompt`` (text, or token ids) as they come.

        Options may be given as one object or by name, e.g. ``max_new_tokens=64``.
        """
        async with aclosing(aiter(self.begin(prompt, options, **named))) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> Answer:
        """The whole answer to ``prompt`` with its figures."""
        running = self.begin(prompt, options, **named)
        async for _ in running:
            pass
        return running.answer()

    def begin(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> Generation:
        """An answer to iterate over, whose :meth:`Generation.answer` has the figures after."""
        if options is not None and named:
            raise TypeError("give options as one object or by name, not both")
        if options is None:
            options = GenerationOptions(**named)  # type: ignore[arg-type]  # checked at run time
        return Generation(self, prompt, options)
