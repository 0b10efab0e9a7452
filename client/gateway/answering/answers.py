"""Makes the answers of one request: several prompts and choices at once, in bounded numbers."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from client.answer.answer import Answer, Piece
from client.answer.generation import GenerationOptions
from client.errors import RequestRefusedError, UnavailableError
from client.gateway.answering.turns import Turns
from client.gateway.errors import RETRY_AFTER_S, ApiError, bad_request, too_many, unavailable
from client.gateway.metrics import Metrics, ModelMetrics
from client.gateway.protocols.answer_bodies import ROUTE_STATES
from client.session.controller import RouteStatus
from client.swarm.swarm import Swarm
from dht.errors import NetworkError, SwarmError, UserError
from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason
from dht.process.supervision import end_all, loop_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersConfig:
    """How long requests wait for a turn, and how much waits for a reader."""

    wait_s: float = 30.0
    """Time for a turn, where nobody says: as for missing layers."""
    spare_share: int = 4
    """Divisor of the limit of requests: that part more is kept for those who have none here."""
    pieces_queued_max: int = 64
    """Pieces that wait for a slow reader before the answers wait, too."""


ANSWERING = AnswersConfig()


NOTHING = Piece(text="", token_ids=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTask:
    index: int
    prompt_ids: tuple[int, ...]
    options: GenerationOptions
    tells_route: bool = False
    """Whether parts tell how it stands with the answer's route."""
    continues: bool = False
    """Whether the answer's text goes on with the prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePart:
    """Something new of a choice; ``answer`` is set with the last one."""

    index: int
    piece: Piece
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None
    """Scores of the prompt's tokens, with the first part of a request that asks for them."""
    answer: Answer | None = None
    route: RouteStatus | None = None
    """Set in parts that tell this and bring no piece."""


@dataclass(slots=True, kw_only=True)
class _Asked:
    """The request that choices belong to."""

    who: str
    accepted: asyncio.Event
    has_begun: bool = False
    """Whether one of its choices has had a turn."""


class Answers:
    """Runs choices for all requests of a gateway; those who ask take turns."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        at_once_max: int,
        queued_max: int,
        wait_s: float = ANSWERING.wait_s,
    ) -> None:
        """``at_once_max`` choices run, ``queued_max`` requests wait or run; a request whose first
        choice gets no turn within ``wait_s`` is refused."""
        self._metrics = metrics
        self._turns = Turns(at_once_max)
        self._queued_max = queued_max
        self._wait_s = wait_s
        self._requests: Counter[str] = Counter()
        self.idle = asyncio.Event()
        """Set while no request runs or waits."""
        self.idle.set()

    @property
    def requests(self) -> int:
        return self._requests.total()

    @asynccontextmanager
    async def admitted(self, who: str = "") -> AsyncIterator[None]:
        """Count a request of ``who`` in; raises ApiError (429) when there are too many.

        There is some room beyond the limit for those who have no request here yet.
        """
        room = self._queued_max + (
            0 if self._requests[who] else self._queued_max // ANSWERING.spare_share
        )
        if self.requests >= room:
            raise too_many(
                f"{self.requests} requests are being answered or wait, that is the limit here"
            )
        self._requests[who] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._requests[who] -= 1
            if not self._requests[who]:
                del self._requests[who]
            if not self._requests:
                self.idle.set()

    async def parts(
        self,
        swarm: Swarm,
        tasks: Sequence[ChoiceTask],
        who: str = "",
        accepted: asyncio.Event | None = None,
    ) -> AsyncGenerator[ChoicePart, None]:
        """Parts of all ``tasks`` as they come, interleaved; close it to free every session.

        ``who`` asks for them; ``accepted`` is set once the stages have taken one. Raises ApiError
        for what goes wrong with any of them, and ends the others.
        """
        queue: asyncio.Queue[ChoicePart | ApiError] = asyncio.Queue(ANSWERING.pieces_queued_max)
        asked = _Asked(who=who, accepted=accepted or asyncio.Event())
        running = [asyncio.create_task(self._run(swarm, task, asked, queue)) for task in tasks]
        left = len(tasks)
        try:
            while left:
                part = await queue.get()
                if isinstance(part, ApiError):
                    raise part
                left -= part.answer is not None
                yield part
        finally:
            await end_all(running)

    async def _run(
        self,
        swarm: Swarm,
        task: ChoiceTask,
        asked: _Asked,
        queue: "asyncio.Queue[ChoicePart | ApiError]",
    ) -> None:
        metrics = self._metrics.of(swarm.text.name)
        try:
            with metrics.waiting.track_inprogress():
                came = await self._turns.take(asked.who, self._wait_s, lambda: not asked.has_begun)
            if not came:
                raise self._no_turn(asked.who)
            asked.has_begun = True
            try:
                with metrics.running.track_inprogress():
                    await self._answer(swarm, metrics, task, asked, queue)
            finally:
                self._turns.give_back(asked.who)
        except ApiError as error:
            await queue.put(error)
        except (UserError, SwarmError, NetworkError) as error:
            await queue.put(as_api_error(error))
        except Exception as error:  # noqa: BLE001  the request gets it, and raises it there
            await queue.put(_Fault(error))

    def _no_turn(self, who: str) -> ApiError:
        if self._turns.at_most(who):
            reason = "as many of your answers are being made as one may have at a time"
            return too_many(f"{reason}; none ended within {self._wait_s:.0f} s")
        reason = f"all turns to answer were taken for {self._wait_s:.0f} s"
        return unavailable(reason)

    async def _answer(
        self,
        swarm: Swarm,
        metrics: ModelMetrics,
        task: ChoiceTask,
        asked: _Asked,
        queue: "asyncio.Queue[ChoicePart | ApiError]",
    ) -> None:
        started_s = loop_s()
        running = swarm.begin(task.prompt_ids, task.options)
        running.continues = task.continues
        untold: list[ChoicePart] = []
        """The newest word on the route, where the queue had no room for it."""

        def tell(status: RouteStatus) -> None:
            if status.state not in ROUTE_STATES:
                asked.accepted.set()
            if not task.tells_route:
                return
            untold[:] = [ChoicePart(index=task.index, piece=NOTHING, route=status)]
            with suppress(asyncio.QueueFull):
                queue.put_nowait(untold[0])
                untold.clear()

        running.on_route = tell
        pieces = aiter(running)
        first = True
        try:
            async for piece in pieces:
                while untold:
                    await queue.put(untold.pop())
                scores = running.prompt_logprobs if first else None
                first = False
                await queue.put(ChoicePart(index=task.index, piece=piece, prompt_logprobs=scores))
        finally:
            await pieces.aclose()
        answer = running.answer()
        _record(metrics, answer, loop_s() - started_s)
        await queue.put(ChoicePart(index=task.index, piece=NOTHING, answer=answer))


def _record(metrics: ModelMetrics, answer: Answer, latency_s: float) -> None:
    metrics.prompt_tokens.inc(answer.prompt_tokens)
    metrics.cached_tokens.inc(answer.cached_tokens)
    metrics.generation_tokens.inc(len(answer.token_ids))
    metrics.drafted_tokens.inc(answer.drafted_tokens)
    metrics.prompt_size.observe(answer.prompt_tokens)
    metrics.answer_size.observe(len(answer.token_ids))
    metrics.first_token_s.observe(answer.ttft_s)
    if len(answer.token_ids) > 1:
        metrics.per_token_s.observe(answer.tpot_s)
    metrics.latency_s.observe(latency_s)
    metrics.failovers.inc(answer.failovers)
    metrics.succeeded("length" if answer.finish_reason is FinishReason.LENGTH else "stop")


class _Fault(ApiError):
    """A fault of this software; the cause is logged, not shown."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(500, "the gateway failed at this request", type="server_error")
        self.__cause__ = cause


def as_api_error(error: UserError | SwarmError | NetworkError) -> ApiError:
    """The error that the client of a failed answer is told."""
    match error:
        case RequestRefusedError():
            return bad_request(f"the swarm cannot follow this request: {error}")
        case UserError():
            return bad_request(str(error))
    known_s = error.retry_after_s if isinstance(error, UnavailableError) else 0.0
    said = f"the swarm cannot serve this now: {error}"
    return unavailable(said, math.ceil(known_s) or RETRY_AFTER_S)
