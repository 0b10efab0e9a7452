"""The HTTP side of the gateway: routes, keys, bounds, streams, slow clients."""

import asyncio
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
)
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from client.errors import no_route_text
from client.gateway.answering.answers import Answers
from client.gateway.answering.job import Job
from client.gateway.answering.models import GatewayModels
from client.gateway.answering.service import CompletionService
from client.gateway.answering.text_threads import THREADS, TextThreads
from client.gateway.errors import ApiError, bad_request, unavailable
from client.gateway.keys import Key, Keys
from client.gateway.metrics import Metrics
from client.gateway.protocols import anthropic_messages, ollama
from client.gateway.protocols.answer_bodies import Usage
from client.gateway.protocols.blocks import AnswerWriter
from client.gateway.protocols.requests import ChatRequest, CompletionRequest, parse_request
from client.gateway.web.beats import with_beats
from client.gateway.web.bodies import Body
from client.gateway.web.callers import (
    IpNetwork,
    answers_to,
    asked_by,
    is_allowed,
    is_own,
    is_proxy,
    party_of,
)
from client.gateway.web.dialects import (
    CHATS,
    COMPLETIONS,
    MESSAGES,
    OLLAMA_CHATS,
    OLLAMA_TEXTS,
    RESPONSES,
    Dialect,
)
from client.gateway.web.error_answers import (
    ANTHROPIC_HEADER,
    answer_to,
    error_body,
    error_response,
    is_of_ollama,
    json_answer,
)
from client.gateway.web.openapi import Endpoint, document
from client.gateway.web.request_log import HUNG_UP, Asked
from client.gateway.web.uploads import Uploads, UploadsConfig
from client.pages.fixed import fixed_file, page_files
from client.swarm.swarm import Swarm
from coordinator.policies.routing.affinity import Route
from coordinator.policies.routing.routes import NoRoute
from dht.process.json_file import Json

T = TypeVar("T")
logger = logging.getLogger(__name__)
requests = logging.getLogger(f"{__name__}.requests")
"""A line per request, without anything that a client wrote."""

CHAT = Path(__file__).parents[1] / "static"
CHAT_FILES = {"/": CHAT / "chat.html", **page_files(CHAT)}
"""The page to chat on: its files, by path."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", *CHAT_FILES})
"""Paths that need no key, as with vLLM; the page asks its visitor for one."""
KEY_HEADERS = ("x-api-key", "api-key")
"""Where clients of Anthropic and of Azure send a key that is no bearer's."""
OF_BROWSERS = frozenset({"origin", "sec-fetch-site"})
"""Headers that browsers send with what pages ask, and a page cannot leave out."""
PREFLIGHT_S = 600
"""Time for which a browser need not ask again what a page may send."""
ASKED = web.RequestKey("asked", Asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Bounds of the gateway. Times in seconds."""

    keys: tuple[Key, ...] = ()
    """Empty: no key is asked."""
    now_s: Callable[[], float] = time.time
    """Unix time, for quotas."""
    origins: tuple[str, ...] = ()
    """Web pages from these origins may call (:func:`client.gateway.web.callers.origin_of`). Empty:
    none (no CORS headers)."""
    pages_told_max: int = 8
    """Origins whose pages were refused that the owner is told of; anybody may make more up."""
    hosts: frozenset[str] | None = None
    """Names that a request may ask this gateway by while no key is asked, besides those of this
    machine; None: any. See
    :func:`client.gateway.web.callers.hosts_of`."""
    proxies: tuple[IpNetwork, ...] = ()
    """Web servers before this gateway that are believed who asked them, and by what name."""
    uploads: UploadsConfig = field(default_factory=UploadsConfig)
    answers_at_once_max: int = 48
    """Stages take 64 sessions of one client."""
    requests_max: int = 256
    """Requests that are answered or wait at a time; one more is refused with 429."""
    health_s: float = 1.0
    """Time for which ``/health``, which needs no key, says what was found: a look takes longer the
    more peers are announced."""
    silent_s: float = 0.5
    """Time after which headers leave though nothing has come yet: clients and proxies see within a
    second that a request was taken, and what fails at once still has its own status."""
    beat_s: float = 10.0
    """Time between signs of life while nothing comes: proxies cut silent answers after 60 s."""
    head_s: float = 15.0
    """Time for a connection to bring a whole request head, after it was opened or last answered."""
    write_s: float = 30.0
    """Time for a client to take what is written; then its answer is ended."""


class Gateway:
    """The web application. ``swarm``, of the first model, pings its peers, so that ``/health``
    knows who answers."""

    def __init__(
        self,
        models: GatewayModels,
        answers: Answers,
        metrics: Metrics,
        config: GatewayConfig,
        swarm: Swarm,
    ) -> None:
        self._served = models
        self._answers = answers
        self._metrics = metrics
        self._config = config
        self._swarm = swarm
        self._keys = Keys(config.keys)
        self._reading = TextThreads()
        self._busy: set[Any] = set()
        self._pages: set[str] = set()
        """Origins whose pages were refused, as far as the owner was told of them."""
        self._uploads = Uploads(config.uploads)
        self._answering: tuple[Route | NoRoute, object, float] = (), None, -math.inf
        """The route that was found last for ``/health``, the records that it was found in, and
        when."""
        self.draining = False
        """Set to refuse new requests while the last ones are answered."""
        self.app = web.Application(
            middlewares=[self._outermost, self._guard],
            client_max_size=config.uploads.bytes_max,
        )
        self._paths: dict[str, str] = {}
        """The path that an endpoint is documented with, by each that it has."""
        for endpoint, handler in ENDPOINTS:
            route = web.get if endpoint.method == "GET" else web.post
            for alias in _aliases(endpoint.path) if endpoint.is_api else [endpoint.path]:
                resource = self.app.add_routes([route(alias, partial(handler, self))])[0].resource
                assert resource is not None  # noqa: S101  it has a path
                self._paths[resource.canonical] = endpoint.name
        self.app.add_routes([web.get(path, self._chat_page) for path in CHAT_FILES])

    # Around every request

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count it, turn every error into OpenAI's form, and add CORS where it is allowed."""
        self._busy.add(request.protocol)
        status = HUNG_UP
        loop = asyncio.get_running_loop()
        asked = request[ASKED] = Asked(account=self._keys.nobody, started_s=loop.time())
        try:
            response = await self._answered(request, handler)
            status = response.status
        finally:
            self._busy.discard(request.protocol)
            resource = request.match_info.route.resource
            path = "other" if resource is None else resource.canonical
            path = self._paths.get(path, path)
            self._metrics.responded(path, status)
            if asked.account is not self._keys.nobody:
                usage = asked.usage
                name = asked.account.key.name
                self._metrics.used(name, status, usage.prompt_tokens, usage.completion_tokens)
            requests.info(
                "%s %s %d %s", request.method, path, status, asked.told(status, loop.time())
            )
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        cors = self._cors(request)
        if request.method == "OPTIONS" and cors:
            return web.Response(status=204, headers=cors)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            self._tell_of_page(request.headers.get("Origin", ""))
        try:
            response = await handler(request)
        except ApiError as error:
            if error.__cause__ is not None:
                logger.error("a request failed", exc_info=error.__cause__)
            response = error_response(request, error)
        except web.HTTPException as error:
            response = answer_to(request, error)
        except ConnectionError:
            raise
        except RecursionError:  # what reads a body recurses over it, and nothing else here recurses
            response = error_response(request, bad_request("the body nests too deep"))
        except Exception:
            logger.exception("a request failed")
            fault = ApiError(500, "the gateway failed at this request", type="server_error")
            response = error_response(request, fault)
        if not response.prepared:
            response.headers.update(cors)
        return response

    def _cors(self, request: web.Request) -> dict[str, str]:
        origin, allowed = request.headers.get("Origin"), self._config.origins
        if origin is None or not is_allowed(origin, allowed):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in allowed else origin,
            "Access-Control-Allow-Methods": "GET, POST",
            # The clients of several vendors send headers of their own.
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "Authorization, Content-Type, X-Api-Key"
            ),
            "Access-Control-Expose-Headers": "Retry-After",
            "Access-Control-Max-Age": str(PREFLIGHT_S),
            "Vary": "Origin, Access-Control-Request-Headers",
        }

    def _tell_of_page(self, origin: str) -> None:
        """Tell the owner that a page was refused: its visitor sees that it failed, and not why."""
        if origin in self._pages or len(self._pages) >= self._config.pages_told_max:
            return
        self._pages.add(origin)
        logger.warning("a web page of %a may not call; --allow-origin lets it", origin[:200])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for a key where keys are set; where none are, refuse other people's web pages.

        A browser names the page's origin with every POST, also of text/plain and after DNS
        rebinding, and sends those without asking first.
        """
        if not self._keys and not answers_to(self._host(request), self._config.hosts):
            raise ApiError(
                403,
                "this gateway asks for no key and answers to this machine's own names alone;"
                " --allow-host NAME adds one",
            )
        origin = request.headers.get("Origin")
        if (
            not self._keys
            and request.method == "POST"
            and origin
            and not self._cors(request)
            and not is_own(origin, self._host(request), self._config.hosts)
        ):
            self._tell_of_page(origin)
            raise ApiError(403, f"pages of {origin[:200]} may not call; --allow-origin lets them")
        if self._keys and request.path not in OPEN_PATHS:
            scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
            given = [request.headers.get(name, "") for name in KEY_HEADERS]
            given += [bearer] if scheme.lower() == "bearer" else []
            request[ASKED].account = self._keys.find(*given)
        return await handler(request)

    def is_busy(self, connection: object) -> bool:
        """Whether a request of this connection is being answered."""
        return connection in self._busy

    # Answers

    async def _count_tokens(self, request: web.Request) -> web.Response:
        async with self._admitted(request) as body:
            kind = anthropic_messages.CountRequest
            asked = await self._read(
                request,
                body,
                lambda data: anthropic_messages.prompt_of(parse_request(data, kind)),
            )
            async with self._served.ready(asked.model) as model:
                return json_answer(
                    {"input_tokens": await model.service.count(asked, self._who(request))}
                )

    @asynccontextmanager
    async def _admitted(self, request: web.Request) -> AsyncIterator[Body]:
        """The body of a request that is counted in; raises ApiError."""
        request[ASKED].account.begin(self._config.now_s())
        with closing(await self._body(request)) as body:
            if self.draining:
                raise unavailable("this gateway is stopping")
            async with self._answers.admitted(self._who(request)):
                yield body

    async def _body(self, request: web.Request) -> Body:
        """The body of a request; raises ApiError. Ollama reads it as JSON whatever type it is said
        to have, and its manual's requests say none: here a browser alone has to say it."""
        any_type = is_of_ollama(request) and not OF_BROWSERS & {*map(str.lower, request.headers)}
        return await self._uploads.body(request, self._party(request), any_type=any_type)

    async def _generate(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        async with self._admitted(request) as body:
            given, parsed, writer = await self._read(request, body, partial(_understood, dialect))
            done = dialect.at_once(given, int(self._config.now_s()))
            if done is not None:
                async with self._served.use(parsed.model):
                    return json_answer(done)
            understood = self._understood(request, parsed, dialect, writer)
            del given, parsed  # as large as its body, or twenty times that
            async with understood as (service, job):
                body.close()
                if not job.streams:
                    return await self._whole(request, service, job, writer)

                async def written() -> AsyncGenerator[Json, None]:
                    async with aclosing(service.chunks(job)) as chunks:
                        async for chunk in chunks:
                            for event in writer.push(chunk):
                                yield event

                return await self._stream(request, written(), writer)

    async def _read(self, request: web.Request, body: Body, read: Callable[[bytes], T]) -> T:
        """What ``read`` makes of a body, in a thread where that may take long."""
        data = bytes(body.data)
        size = len(data) if len(data) >= THREADS.long_size else 0
        return await self._reading.run(size, partial(read, data), self._who(request))

    @asynccontextmanager
    async def _understood(
        self,
        request: web.Request,
        parsed: ChatRequest | CompletionRequest,
        dialect: Dialect,
        writer: AnswerWriter,
    ) -> AsyncIterator[tuple[CompletionService, Job]]:
        """What there is to do, at the expense of who asks; raises ApiError."""
        asked = request[ASKED]
        async with self._served.ready(parsed.model) as model:
            now_s = self._config.now_s()
            if isinstance(parsed, ChatRequest) and not model.service.template:
                parsed = dialect.bare(parsed)
            try:
                job = await model.service.understand(
                    parsed,
                    asked.account.key.salt,
                    who=self._who(request),
                    tokens_left=asked.account.tokens_left(now_s),
                )
            except ApiError as error:
                raise error.renamed(dialect.params) from error.__cause__
            del parsed
            writer.begin(
                job.usage.prompt_tokens,
                job.head.created,
                lambda: asked.took(asyncio.get_running_loop().time()),
            )
            with asked.spending(job, now_s):
                yield model.service, job

    async def _whole(
        self, request: web.Request, service: CompletionService, job: Job, writer: AnswerWriter
    ) -> web.StreamResponse:
        """A whole answer as JSON. Once the stages have taken it, blanks in front of it keep what is
        between here and the client from taking silence for the end."""
        response: web.StreamResponse | None = None
        loop, written_s = asyncio.get_running_loop(), -math.inf

        async def only() -> AsyncGenerator[Json, None]:
            yield await service.whole(job)

        try:
            async with aclosing(with_beats(only(), self._config.silent_s)) as beaten:
                async for answer in beaten:
                    if answer is not None and response is None:
                        return json_answer(writer.whole(answer))
                    if response is None and job.accepted.is_set():
                        response = await self._begun(request, "application/json")
                    if response is None:
                        continue
                    if answer is not None:
                        await self._write(
                            request, response, msgspec.json.encode(writer.whole(answer))
                        )
                    elif loop.time() - written_s >= self._config.beat_s:
                        await self._write(request, response, b" ")
                        written_s = loop.time()
        except ApiError as error:
            if response is None:
                raise
            self._failed(request, error)
            await self._write(request, response, msgspec.json.encode(error_body(request, error)))
            if request.transport is not None:
                request.transport.close()  # before its end, so that nobody takes it for an answer
        assert response is not None  # noqa: S101  there is an answer, or an error
        return response

    def _who(self, request: web.Request) -> str:
        """Whose turn a request takes, for its answer and its grammar: a key's, or an address's."""
        return request[ASKED].account.key.name if self._keys else self._party(request)

    def _party(self, request: web.Request) -> str:
        """Who asks, by address."""
        forwarded = self._forwarded(request, "X-Forwarded-For")
        return party_of(asked_by(request.remote or "", forwarded, self._config.proxies))

    def _host(self, request: web.Request) -> str:
        own: str = request.headers.get("Host", "")
        said = self._forwarded(request, "X-Forwarded-Host")
        believed = said and is_proxy(request.remote or "", self._config.proxies)
        return said[-1] if believed else own  # what stands before it, anybody may write

    @staticmethod
    def _forwarded(request: web.Request, header: str) -> list[str]:
        """What proxies say in ``header`` of who asked them, the first one's first."""
        said = ",".join(request.headers.getall(header, ())).split(",")
        return [each.strip() for each in said if each.strip()]

    async def _stream(
        self, request: web.Request, events: AsyncGenerator[Json, None], writer: AnswerWriter
    ) -> web.StreamResponse:
        """A stream of events. Headers leave with the first one, or once nothing came for a while:
        what fails before that is an error with its own status, and what fails later an event."""
        response: web.StreamResponse | None = None
        loop, written_s = asyncio.get_running_loop(), -math.inf
        try:
            async with aclosing(with_beats(events, self._config.silent_s)) as beaten:
                async for event in beaten:
                    if response is None:
                        response = await self._begun(request, writer.media)
                    if event is not None:
                        request[ASKED].has_answered = True
                        data = writer.framed(event)
                    elif loop.time() - written_s >= self._config.beat_s:
                        data = writer.beat
                    else:
                        continue
                    await self._write(request, response, data)
                    written_s = loop.time()
            last = writer.ended
        except ApiError as error:
            if response is None:
                raise
            self._failed(request, error)
            last = b"".join(map(writer.framed, writer.failed(error)))
        assert response is not None  # noqa: S101  there are events, or an error
        if last:
            await self._write(request, response, last)
        return response

    async def _begun(self, request: web.Request, media: str) -> web.StreamResponse:
        """A response whose headers have left."""
        response = web.StreamResponse(
            headers={
                "Content-Type": media,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **self._cors(request),
            }
        )
        await response.prepare(request)
        return response

    def _failed(self, request: web.Request, error: ApiError) -> None:
        """Note that a request failed whose status had been sent; where nothing of its answer was,
        it costs nothing."""
        if error.__cause__ is not None:
            logger.error("a request failed", exc_info=error.__cause__)
        asked = request[ASKED]
        asked.failed = True
        if asked.job is not None and not asked.has_answered:
            asked.job.usage = Usage()

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._config.write_s):
                await response.write(data)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None

    # The rest

    async def _embeddings(self, request: web.Request) -> web.Response:
        raise bad_request("embeddings are not served here: the swarm's model writes text")

    async def _models(self, request: web.Request) -> web.Response:
        listed = self._served.list()
        if ANTHROPIC_HEADER in request.headers:
            listed = anthropic_messages.models_of(listed["data"])
        return json_answer(listed)

    async def _tags(self, request: web.Request) -> web.Response:
        return json_answer(ollama.tags_of(self._served.list()["data"]))

    async def _show(self, request: web.Request) -> web.Response:
        with closing(await self._body(request)) as body:
            asked = parse_request(bytes(body.data), ollama.ShowRequest)
        name = ollama.name_of(asked.model or asked.name or "")
        async with self._served.ready(name) as model:
            service = model.service
            return json_answer(
                ollama.shown(
                    self._served.entry(name),
                    service.template,
                    calls=service.calls_functions,
                    thinks=service.thinks,
                )
            )

    async def _version(self, request: web.Request) -> web.Response:
        return json_answer({"version": ollama.VERSION})

    async def _model(self, request: web.Request) -> web.Response:
        entry = self._served.entry(request.match_info["model"].rstrip("/"))
        if ANTHROPIC_HEADER in request.headers:
            entry = anthropic_messages.model_of(entry)
        return json_answer(entry)

    async def _health(self, request: web.Request) -> web.Response:
        """200 where a route covers all layers of the first model now, 503 with the layers that
        nobody holds or answers for: peers are pinged, so this needs no request that fails."""
        view, now_s = self._swarm.view, asyncio.get_running_loop().time()
        found, nodes, found_s = self._answering
        if nodes is not view.nodes or now_s - found_s >= self._config.health_s:
            found = view.answering_route(now_s)
            self._answering = found, view.nodes, now_s
        if isinstance(found, NoRoute):
            raise unavailable(no_route_text(found))
        return json_answer({"status": "ok", "stages": len(found)})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _chat_page(self, request: web.Request) -> web.Response:
        return fixed_file(CHAT_FILES[request.path], request)

    async def _openapi(self, request: web.Request) -> web.Response:
        endpoints = (endpoint for endpoint, _ in ENDPOINTS)
        return json_answer(document(endpoints, with_keys=bool(self._keys)))


EndpointHandler = Callable[[Gateway, web.Request], Coroutine[Any, Any, web.StreamResponse]]


_get, _post = partial(Endpoint, method="GET"), partial(Endpoint, method="POST")


def _answers(path: str, summary: str, dialect: Dialect) -> tuple[Endpoint, EndpointHandler]:
    async def handle(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        return await gateway._generate(request, dialect)

    return _post(path=path, summary=summary, body=dialect.kind, streams=True), handle


ENDPOINTS: tuple[tuple[Endpoint, EndpointHandler], ...] = (
    _answers("/v1/chat/completions", "Answer a chat with the model's own chat template.", CHATS),
    _answers("/v1/completions", "Continue text or token ids.", COMPLETIONS),
    _answers("/v1/messages", "Answer a chat in Anthropic's form.", MESSAGES),
    (
        _post(
            path="/v1/messages/count_tokens",
            summary="Count the tokens of a chat's prompt.",
            body=anthropic_messages.CountRequest,
        ),
        Gateway._count_tokens,
    ),
    _answers(
        "/v1/responses",
        "Answer items in the form of OpenAI's Responses; nothing is stored.",
        RESPONSES,
    ),
    _answers("/api/chat", "Answer a chat in Ollama's form.", OLLAMA_CHATS),
    _answers("/api/generate", "Answer a text in Ollama's form.", OLLAMA_TEXTS),
    (_post(path="/api/show", summary="One model.", body=ollama.ShowRequest), Gateway._show),
    (_get(path="/api/tags", summary="The models."), Gateway._tags),
    (_get(path="/api/ps"), Gateway._tags),
    (_get(path="/api/version", summary="Ollama's version."), Gateway._version),
    (
        _post(path="/v1/embeddings", summary="Refused: the model writes text."),
        Gateway._embeddings,
    ),
    (_post(path="/api/embed"), Gateway._embeddings),
    (_post(path="/api/embeddings"), Gateway._embeddings),
    (_get(path="/v1/models", summary="The models that are served."), Gateway._models),
    (_get(path="/v1/models/{model:.+}", summary="One model."), Gateway._model),
    (
        _get(path="/health", summary="Whether all layers are held, and which are not."),
        Gateway._health,
    ),
    (
        _get(path="/metrics", summary="Figures for Prometheus.", media="text/plain"),
        Gateway._show_metrics,
    ),
    (_get(path="/openapi.json", summary="This document."), Gateway._openapi),
)
"""What is answered at which path, as routes and as the OpenAPI document."""


def _aliases(path: str) -> list[str]:
    """An endpoint's path, and where people's settings look for it, too: without ``/v1``, with it
    twice or before Ollama's, with a slash too many."""
    behind = path.removeprefix("/v1")
    paths = [path, f"/{path}", f"/v1{path}", f"/v1/{behind}"]
    paths += [behind] if behind != path else []
    return paths + [f"{each}/" for each in paths if not each.endswith("}")]


def _understood(
    dialect: Dialect, body: bytes
) -> tuple[Any, ChatRequest | CompletionRequest, AnswerWriter]:
    """A request, what it asks of the swarm, and what writes the answer; raises ApiError (400)."""
    given = parse_request(body, dialect.kind)
    return given, dialect.chat_of(given), dialect.writer(given)
