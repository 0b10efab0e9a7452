"""A gateway over a swarm that makes tokens up: real HTTP, real tokenizer, no peers."""

import asyncio
import random
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp

from client.answer.answer import AnswerRequest
from client.answer.defaults import SamplingDefaults
from client.gateway.answering.answers import ANSWERING, Answers
from client.gateway.answering.models import GatewayModels, OpenModel
from client.gateway.answering.service import CompletionService
from client.gateway.metrics import Metrics
from client.gateway.protocols.requests import CHAT_TOKENS_DEFAULT
from client.gateway.web.app import Gateway, GatewayConfig
from client.gateway.web.server import serving
from client.session.controller import ControllerState
from client.session.driver import SessionDriver
from client.swarm.swarm import Swarm, SwarmConfig
from client.text.chat_template import ChatTemplate
from client.text.tokenizer import ModelText, Tokenizer
from coordinator.policies.routing.affinity import Route
from dht.grammars.trial import fault_of
from dht.grammars.trials import GrammarTrials, TrialLimits
from dht.messages.logprobs import TokenScore
from dht.messages.session import Sampling
from dht.messages.types import ModelSpec, RouteStage
from dht.process.supervision import Supervisor
from testing.network import MemoryNetwork
from testing.paths import ROOT
from tests.unit.records import record_of

MODEL = ROOT / "models" / "brook"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPEC = ModelSpec(
    name="brook",
    root="paper",
    layers=8,
    layer_bytes=1,
    embed_bytes=1,
    head_bytes=1,
    kv_bytes_per_token_layer=1,
    activation_bytes=4,
    context_tokens=1024,
    vocab=2048,
)
EOS = 1


class PaperSwarm(Swarm):
    """Answers with tokens that only prompt, seed and place decide."""

    def __init__(
        self, *, tokenizer: Tokenizer | None, step_s: float = 0.0, spec: ModelSpec = SPEC
    ) -> None:
        text = ModelText(name="brook", tokenizer=tokenizer, stop_token_ids=(EOS,))
        super().__init__(MemoryNetwork(random.Random(0)).transport(), text, SwarmConfig())
        self.step_s = step_s
        self.live = 0
        """Sessions that are open now."""
        self.served = 0
        self.fails: Exception | None = None
        self.fails_after: int | None = None
        self.gate: asyncio.Event | None = None
        """Where set, tokens come only once it is."""
        self.says: str | None = None
        """What it answers with; None: what prompt, seed and place decide."""
        self.at_once = 1
        """Tokens that come at a time, as drafts that were accepted do."""
        self.loses_at: int | None = None
        """Where set, this many tokens are followed by the loss of the first stage."""
        self.losses = 0
        self.mended: asyncio.Event | None = None
        """Where set, a lost stage is replaced only once it is."""
        self.spec = spec
        self.hold((0, 8))

    def hold(self, *spans: tuple[int, int]) -> None:
        """Let peers hold these layers, and no others."""
        self.serve({f"peer {start}": (start, end) for start, end in spans})

    def free(self, kv_tokens: int) -> None:
        """Let every peer announce free room for this many tokens."""
        nodes = self.view.nodes.items()
        self.view.take_nodes(
            {each: replace(node, kv_tokens_free=kv_tokens) for each, node in nodes}
        )

    def serve(self, spans: Mapping[str, tuple[int, int]]) -> None:
        """Let peers of these names hold these layers, and no others."""
        peers = (
            record_of(f"id {at}", start, end, model=self.spec, name=name)
            for at, (name, (start, end)) in enumerate(spans.items())
        )
        self.view.take_nodes({peer.peer_id: peer for peer in peers})

    def route(self, without: Sequence[str] = ()) -> Route:
        """The first peers that follow on each other, but for those ``without``."""
        route: list[RouteStage] = []
        for each in sorted(self.view.nodes.values(), key=lambda node: (node.start, node.peer_id)):
            if each.start == (route[-1].end if route else 0) and each.peer_id not in without:
                route.append(RouteStage(peer_id=each.peer_id, start=each.start, end=each.end))
        return tuple(route)

    def session(self, request: AnswerRequest) -> SessionDriver:
        return PaperSession(self, request)

    @staticmethod
    def next_token(ids: Sequence[int], sampling: Sampling) -> int:
        seed = 0 if sampling.temperature == 0 else sampling.seed
        return 300 + zlib.crc32(repr((len(ids), tuple(ids[-8:]), seed)).encode()) % 700

    @staticmethod
    def score(token_id: int, top: int) -> TokenScore:
        own = -0.25 - token_id % 7
        others = tuple((300 + n, own - 1 - n) for n in range(max(0, top - 1)))
        first = ((token_id, own),) if top else ()
        return TokenScore(token_id=token_id, logprob=own, top=(*first, *others))


class PaperSession(SessionDriver):
    """A session whose tokens are made up here."""

    def __init__(self, swarm: PaperSwarm, request: AnswerRequest) -> None:
        super().__init__(
            swarm.transport,
            swarm.view,
            request,
            wait_s=0.0,
            look=swarm.reader.look,
            on_status=print,
        )
        self._swarm = swarm

    async def tokens(self) -> AsyncGenerator[tuple[int, ...], None]:
        swarm, log = self._swarm, self.controller.log
        sampling = log.request.sampling
        swarm.live += 1
        swarm.served += 1
        named = self._named
        self.controller.cached_tokens = 0 if named is None else named.known_tokens
        said = None if swarm.says is None else swarm.text.prompt_ids(swarm.says)
        self._stands(ControllerState.OPENING, swarm.route())
        self._stands(ControllerState.RUNNING, swarm.route())
        try:
            if sampling.prompt_logprobs is not None:
                top = sampling.prompt_logprobs
                scored = log.request.prompt_ids[1:]
                scores = tuple(swarm.score(token_id, top) for token_id in scored)
                log.accept_prompt_scores(attempt=0, position=1, scores=scores)
            while log.finish_reason is None:
                if swarm.fails is not None and len(log.token_ids) == (swarm.fails_after or 0):
                    raise swarm.fails
                if swarm.gate is not None:
                    await swarm.gate.wait()
                await asyncio.sleep(swarm.step_s)
                if len(log.token_ids) == swarm.loses_at:
                    await self._reroute()
                ids: tuple[int, ...] = ()
                if said is not None:
                    ids = (*said, EOS)[len(log.token_ids) :][: swarm.at_once]
                while said is None and len(ids) < swarm.at_once:
                    ids = (*ids, swarm.next_token((*log.replay_ids, *ids), sampling))
                top = sampling.logprobs
                fresh = () if top is None else tuple(swarm.score(each, top) for each in ids)
                yield log.accept(attempt=0, position=log.next_position, token_ids=ids, scores=fresh)
        finally:
            swarm.live -= 1
            if named is not None:
                route = (RouteStage(peer_id="peer 0", start=0, end=8),)
                swarm.view.prefixes.remember(named, log.replay_ids[:-1], "session", route)

    async def _reroute(self) -> None:
        """Lose the first stage, and go on without it."""
        lost = self.controller.route[0].peer_id
        self.controller.lost = {lost}
        self.controller.failovers += 1
        self._stands(ControllerState.DRAWING, self.controller.route)
        if self._swarm.mended is not None:
            await self._swarm.mended.wait()
        self._stands(ControllerState.OPENING, self._swarm.route(without=[lost]))
        self.controller.lost = set()
        self._stands(ControllerState.RUNNING, self.controller.route)
        self._swarm.losses += 1

    def _stands(self, state: ControllerState, route: Route) -> None:
        self.controller.state, self.controller.route = state, route
        self._tell_route()


class TrialsHere(GrammarTrials):
    """Reads grammars in this process, for tests whose grammars do no harm."""

    async def _try(self, grammar: bytes) -> str:
        return fault_of(grammar.decode())


APART = TrialLimits(answer_s=60.0)
"""Limits of trials in processes of their own, however slow the machine."""


@dataclass
class PaperGateway:
    """What a test talks to."""

    url: str
    swarm: PaperSwarm
    gateway: Gateway
    answers: Answers
    trials: GrammarTrials
    http: aiohttp.ClientSession

    async def post(self, path: str, **body: object) -> tuple[int, dict[str, object]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()


@asynccontextmanager
async def paper_gateway(
    *,
    config: GatewayConfig | None = None,
    template: str | None = TEMPLATE,
    tokenizer: bool = True,
    step_s: float = 0.0,
    defaults: SamplingDefaults | None = None,
    head_s: float = 15.0,
    chat_tokens: int | None = CHAT_TOKENS_DEFAULT,
    context_tokens: int = SPEC.context_tokens,
    others: Sequence[str] = (),
    wait_s: float = ANSWERING.wait_s,
    trials: GrammarTrials | None = None,
) -> AsyncIterator[PaperGateway]:
    """``trials``: who reads grammars; None: this process."""
    config = config or GatewayConfig(silent_s=60.0)  # no error is late, however slow the machine
    swarm = PaperSwarm(
        tokenizer=Tokenizer.load(MODEL) if tokenizer else None,
        step_s=step_s,
        spec=replace(SPEC, context_tokens=context_tokens),
    )
    metrics, parts = Metrics(), Supervisor()
    metrics.registry.register(parts)
    answers = Answers(
        metrics,
        at_once_max=config.answers_at_once_max,
        queued_max=config.requests_max,
        wait_s=wait_s,
    )
    trials = trials or TrialsHere()
    service = CompletionService(
        swarm,
        answers,
        template=ChatTemplate(template, {"bos_token": "<|bos|>"}) if template else None,
        defaults=defaults or {"temperature": 0.0},
        chat_tokens=chat_tokens,
        trials=trials,
    )

    @asynccontextmanager
    async def opened(_: str) -> AsyncIterator[OpenModel]:
        yield OpenModel(swarm=swarm, service=service)

    models = GatewayModels((swarm.text.name, *others), opened)
    gateway = Gateway(models, answers, metrics, config, swarm)
    async with (
        serving(gateway, parts, host="127.0.0.1", port=0, head_s=head_s) as port,
        aiohttp.ClientSession() as http,
    ):
        yield PaperGateway(
            url=f"http://127.0.0.1:{port}",
            swarm=swarm,
            gateway=gateway,
            answers=answers,
            trials=trials,
            http=http,
        )
