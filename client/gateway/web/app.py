"""The HTTP side of the gateway: routes, keys, bounds, streams, slow clients."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from client.errors import no_route_text
from client.gateway.answering.answers import RETRY_AFTER_S, Answers
from client.gateway.answering.models import GatewayModels
from client.gateway.errors import ApiError, bad_request, too_many, unavailable
from client.gateway.keys import Key, Keys
from client.gateway.metrics import Metrics
from client.gateway.protocols import anthropic_messages, openai_responses
from client.gateway.protocols.anthropic_messages import error_of
from client.gateway.protocols.blocks import AnswerWriter, AsItIs
from client.gateway.protocols.requests import ChatRequest, CompletionRequest, parse_request
from client.gateway.web.openapi import document
from client.gateway.web.request_log import HUNG_UP, Asked
from client.pages.fixed import fixed_file
from client.swarm.swarm import Swarm
from coordinator.routing.routes import NoRoute
from dht.json_file import Json

logger = logging.getLogger(__name__)
requests = logging.getLogger(f"{__name__}.requests")
"""A line per request, without anything that a client wrote."""

CHAT = Path(__file__).parents[1] / "static"
CHAT_FILES = {"/": "chat.html", "/static/chat.css": "chat.css", "/static/chat.js": "chat.js"}
"""The page to chat on, by path."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", *CHAT_FILES})
"""Paths that need no key, as with vLLM; the page asks its visitor for one."""
ASKED = web.RequestKey("asked", Asked)
ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths whose errors have Anthropic's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An interface that asks for answers: its requests, as those to OpenAI's chats or completions,
    and how answers are written."""

    kind: type[msgspec.Struct]
    chat_of: Callable[[Any], ChatRequest | CompletionRequest] = lambda request: request
    """Raises ApiError (400)."""
    writer: Callable[[Any, int], AnswerWriter] = AsItIs
    """Made of a request and the number of tokens of its prompt."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Fields of a chat whose names differ."""


CHATS = Dialect(kind=ChatRequest)
COMPLETIONS = Dialect(kind=CompletionRequest)
MESSAGES = Dialect(
    kind=anthropic_messages.MessagesRequest,
    chat_of=anthropic_messages.chat_of_messages,
    writer=anthropic_messages.MessageWriter,
)
RESPONSES = Dialect(
    kind=openai_responses.ResponsesRequest,
    chat_of=openai_responses.chat_of_response,
    writer=openai_responses.ResponseWriter,
    params=openai_responses.PARAMS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Bounds of the gateway. Times in seconds."""

    keys: tuple[Key, ...] = ()
    """Empty: no key is asked."""
    now_s: Callable[[], float] = time.time
    """Unix time, for quotas."""
    origins: tuple[str, ...] = ()
    """Web pages from these origins may call; ``*`` is any. Empty: none (no CORS headers)."""
    hosts: frozenset[str] | None = None
    """Names that a request may ask this gateway by while no key is asked, besides those of this
    machine; None: any. See :func:`hosts_of`."""
    body_bytes_max: int = 8 << 20
    answers_at_once_max: int = 48
    """Stages take 64 sessions of one client."""
    requests_max: int = 256
    """Requests that are answered or wait at a time; one more is refused with 429."""
    uploads_per_address_max: int = 256
    """Requests of one address whose body is still on its way; one more is refused with 429."""
    head_s: float = 15.0
    """Time for a connection to bring a whole request head, after it was opened or last answered."""
    body_s: float = 30.0
    """Time for the body of a request."""
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
        self._busy: set[Any] = set()
        self._uploads: Counter[str] = Counter()
        """Requests whose body is still on its way, by address."""
        self.draining = False
        """Set to refuse new requests while the last ones are answered."""
        self.app = web.Application(
            middlewares=[self._outermost, self._guard],
            client_max_size=config.body_bytes_max,
        )
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/messages", self._messages),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/v1/responses", self._responses),
                web.post("/v1/embeddings", self._embeddings),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.get("/openapi.json", self._openapi),
                *(web.get(path, self._chat_page) for path in CHAT_FILES),
            ]
        )

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
        try:
            response = await handler(request)
        except ApiError as error:
            if error.__cause__ is not None:
                logger.error("a request failed", exc_info=error.__cause__)
            response = _error(request, error)
        except web.HTTPException as error:
            response = _error(request, _of_http(error))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:
            raise
        except Exception:
            logger.exception("a request failed")
            fault = ApiError(500, "the gateway failed at this request", type="server_error")
            response = _error(request, fault)
        if not response.prepared:
            response.headers.update(cors)
        return response

    def _cors(self, request: web.Request) -> dict[str, str]:
        origin, allowed = request.headers.get("Origin"), self._config.origins
        if origin is None or not ("*" in allowed or origin in allowed):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in allowed else origin,
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Api-Key",
            "Vary": "Origin",
        }

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for a key where keys are set; where none are, refuse other people's web pages.

        A browser names the page's origin with every POST, also of text/plain and after DNS
        rebinding, and sends those without asking first.
        """
        if not self._keys and not self._answers_to(request.headers.get("Host", "")):
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
            and not self._is_own(origin, request.headers.get("Host", ""))
        ):
            raise ApiError(403, f"pages of {origin[:200]} may not call; --allow-origin lets them")
        if self._keys and request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                key = request.headers.get("x-api-key", "")  # Anthropic's clients
            request[ASKED].account = self._keys.find(key)
        return await handler(request)

    def _answers_to(self, host: str) -> bool:
        """Whether this gateway goes by the name in a ``Host`` header.

        A page may bind its own name to this machine's address and ask by that, without an origin.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        known = self._config.hosts
        return known is None or name in known or _is_loopback(name)

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page of ``origin`` came from this gateway, asked by ``host``.

        The same name is not enough: any page may have bound its own to this machine. It cannot do
        that to an address, to ``localhost``, nor to a name that the owner allowed.
        """
        try:
            at = urlsplit(origin)
            name = at.hostname or ""
        except ValueError:
            return False
        known = self._config.hosts or frozenset()
        return (
            at.scheme in {"http", "https"}
            and at.netloc.lower() == host.lower()
            and (name in known or name == "localhost" or _address(name) is not None)
        )

    def is_busy(self, connection: object) -> bool:
        """Whether a request of this connection is being answered."""
        return connection in self._busy

    # Answers

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CHATS)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, COMPLETIONS)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, MESSAGES)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        async with self._admitted(request) as body:
            asked = anthropic_messages.prompt_of(
                parse_request(body, anthropic_messages.CountRequest)
            )
            async with self._served.use(asked.model) as model:
                return _json({"input_tokens": await model.service.count(asked)})

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, RESPONSES)

    @asynccontextmanager
    async def _admitted(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body of a request that is counted in; raises ApiError."""
        request[ASKED].account.begin(self._config.now_s())
        body = await self._body(request)
        if self.draining:
            raise unavailable("this gateway is stopping", RETRY_AFTER_S)
        async with self._answers.admitted():
            yield body

    async def _generate(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        async with self._admitted(request) as body:
            given = parse_request(body, dialect.kind)
            parsed = dialect.chat_of(given)
            async with self._served.use(parsed.model) as model:
                asked, service = request[ASKED], model.service
                try:
                    job = await service.understand(parsed, asked.account.key.salt)
                except ApiError as error:
                    error.param = dialect.params.get(error.param or "", error.param)
                    raise
                writer = dialect.writer(given, job.usage.prompt_tokens)
                with asked.spending(job, self._config.now_s()):
                    if not job.streams:
                        return _json(writer.whole(await service.whole(job)))
                    async with aclosing(service.chunks(job)) as chunks:

                        async def written() -> AsyncGenerator[Json, None]:
                            async for chunk in chunks:
                                for event in writer.push(chunk):
                                    yield event

                        async with aclosing(written()) as events:
                            return await self._stream(request, events, writer)

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            said = request.headers.get("Content-Type", "none")[:100]
            raise ApiError(415, f"send 'Content-Type: application/json'; this body's is {said}")
        address = request.remote or ""
        if self._uploads[address] >= self._config.uploads_per_address_max:
            reason = f"{self._uploads[address]} unfinished requests come from {address}"
            raise too_many(reason, RETRY_AFTER_S)
        self._uploads[address] += 1
        try:
            async with asyncio.timeout(self._config.body_s):
                return await request.read()
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self._config.body_s:.0f} s"
            ) from None
        finally:
            self._uploads[address] -= 1
            if not self._uploads[address]:
                del self._uploads[address]

    async def _stream(
        self, request: web.Request, events: AsyncGenerator[Json, None], writer: AnswerWriter
    ) -> web.StreamResponse:
        """Server-sent events. Headers leave with the first event, so that what fails before it
        is an error with its own status."""
        event = await anext(events)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **self._cors(request),
            }
        )
        await response.prepare(request)
        try:
            await self._send(request, response, event)
            async for event in events:
                await self._send(request, response, event)
            if "type" not in event:
                await self._write(request, response, b"data: [DONE]\n\n")
        except ApiError as error:
            if error.__cause__ is not None:
                logger.error("a request failed", exc_info=error.__cause__)
            request[ASKED].failed = True
            await self._send(request, response, writer.failed(error))
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, event: Json) -> None:
        """An event; where it has a type, that is its name, too."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        data = b"data: " + msgspec.json.encode(event) + b"\n\n"
        await self._write(request, response, name.encode() + data)

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
        return _json(self._served.list())

    async def _model(self, request: web.Request) -> web.Response:
        return _json(self._served.entry(request.match_info["model"]))

    async def _health(self, request: web.Request) -> web.Response:
        """200 where a route covers all layers of the first model now, 503 with the layers that
        nobody holds or answers for: peers are pinged, so this needs no request that fails."""
        route = self._swarm.view.answering_route(asyncio.get_running_loop().time())
        if isinstance(route, NoRoute):
            raise unavailable(no_route_text(route), RETRY_AFTER_S)
        return _json({"status": "ok", "stages": len(route)})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _chat_page(self, request: web.Request) -> web.Response:
        return fixed_file(CHAT / CHAT_FILES[request.path])

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(document(with_keys=bool(self._keys)))


def hosts_of(listens_at: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """The names that a gateway without keys answers to, besides those of this machine.

    None, which is any, where it listens for other machines and none is ``allowed`` by name: those
    know it by names that are not known here.
    """
    if not allowed and not _is_loopback(listens_at):
        return None
    return frozenset(name.lower().strip("[]") for name in (listens_at, *allowed))


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )


def _body_of(request: web.Request, error: ApiError) -> Json:
    return error_of(error) if request.path in ANTHROPIC_PATHS else error.body


def _error(request: web.Request, error: ApiError) -> web.Response:
    response = _json(_body_of(request, error), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status in {408, 413}:
        response.force_close()
    return response


def _of_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own errors in OpenAI's form."""
    match error.status:
        case 404:
            return ApiError(
                404, "there is nothing at this path; see /openapi.json", code="not_found"
            )
        case 405:
            return ApiError(405, f"{error.reason}: see the Allow header", code="method_not_allowed")
        case 413:
            return ApiError(413, "the body is larger than this gateway takes", code="too_large")
        case status:
            return ApiError(status, error.reason or "the request failed")
