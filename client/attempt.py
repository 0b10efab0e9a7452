"""One session over one route: open, prompt, read tokens; ends in tokens or in a clear failure."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from client.answer import AnswerLog
from client.errors import StageFailedError, StageRefusedError
from dht import wire
from dht.errors import NetworkError, PeerError
from dht.messages import (
    Ping,
    Pong,
    Prompt,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionOpen,
    SessionRefused,
    Tokens,
    TokensAttach,
)
from dht.transport import SESSION_PROTOCOL, TOKENS_PROTOCOL, Stream, Transport
from dht.types import RouteStage


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptConfig:
    """Time limits of one attempt, in seconds. None of them depends on a connection breaking."""

    connect_s: float = 5.0
    open_s: float = 10.0
    """For every stage to accept or refuse."""
    ping_every_s: float = 1.0
    silence_s: float = 5.0
    """Without any frame from the first or last stage for so long, it is lost."""
    stall_s: float = 30.0
    """Without a new token for so long although the ends answer, the route is given up."""
    stall_per_prompt_token_s: float = 0.1
    """Added to ``stall_s`` until the first token, per prompt token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAddresses:
    """A route with the addresses of its stages, in order."""

    stages: tuple[RouteStage, ...]
    addresses: tuple[tuple[str, ...], ...]


class Attempt:
    """Runs ``log`` under its current epoch over ``route``."""

    def __init__(
        self,
        transport: Transport,
        config: AttemptConfig,
        *,
        session: str,
        fingerprint: str,
        route: RouteAddresses,
        log: AnswerLog,
    ) -> None:
        self._transport = transport
        self._config = config
        self._session = session
        self._fingerprint = fingerprint
        self._route = route
        self._log = log
        self._events: asyncio.Queue[tuple[int, ...] | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[Stream] = []

    async def tokens(self) -> AsyncGenerator[tuple[int, ...], None]:
        """New tokens as they arrive, until the log has its finish reason.

        Raises:
            StageRefusedError: a stage refused before any work was done.
            StageFailedError: a stage was lost, stalled or broke the protocol.
        """
        log, config = self._log, self._config
        prompt_ids = log.replay_ids
        try:
            first = await self._connect(0, SESSION_PROTOCOL)
            await self._open(first, prompt_ids)
            await self._send(0, first, self._prompt(prompt_ids))
            self._watch(0, first)
            last = await self._connect(-1, TOKENS_PROTOCOL)
            attach = TokensAttach(
                session=self._session, epoch=log.epoch, position=log.next_position
            )
            await self._send(-1, last, attach)
            self._watch(-1, last)
            limit_s = config.stall_s + config.stall_per_prompt_token_s * len(prompt_ids)
            while log.finish_reason is None:
                try:
                    event = await asyncio.wait_for(self._events.get(), limit_s)
                except TimeoutError:
                    raise StageFailedError(
                        self._peer(-1), f"no token for {limit_s:.0f} s although it answers"
                    ) from None
                if isinstance(event, Exception):
                    raise event
                limit_s = config.stall_s
                yield event
        finally:
            await self._close()

    def _peer(self, stage: int) -> str:
        return self._route.stages[stage].peer_id

    async def _connect(self, stage: int, protocol: str) -> Stream:
        try:
            async with asyncio.timeout(self._config.connect_s):
                stream = await self._transport.open_stream(
                    self._peer(stage), protocol, addresses=self._route.addresses[stage]
                )
        except (NetworkError, TimeoutError) as error:
            reason = f"cannot be reached: {str(error) or 'no answer'}"
            raise StageRefusedError(self._peer(stage), "unreachable", reason) from error
        self._streams.append(stream)
        return stream

    async def _send(self, stage: int, stream: Stream, message: object) -> None:
        try:
            async with asyncio.timeout(self._config.open_s):
                await wire.send_frame(stream, message)
        except (NetworkError, TimeoutError) as error:
            raise StageFailedError(self._peer(stage), f"connection lost: {error}") from error

    async def _open(self, stream: Stream, prompt_ids: tuple[int, ...]) -> None:
        message = SessionOpen(
            session=self._session,
            epoch=self._log.epoch,
            client=self._transport.peer_id,
            fingerprint=self._fingerprint,
            route=self._route.stages,
            addresses=self._route.addresses,
            hop=0,
            prompt_tokens=len(prompt_ids),
            max_new_tokens=self._log.remaining_tokens,
            sampling=self._log.request.sampling,
        )
        await self._send(0, stream, message)
        try:
            async with asyncio.timeout(self._config.open_s):
                reply = (await wire.read_frame(stream)).message
        except TimeoutError:
            reason = f"the route did not answer an open within {self._config.open_s:.0f} s"
            raise StageRefusedError(self._peer(0), "unreachable", reason) from None
        except (NetworkError, PeerError) as error:
            raise StageFailedError(self._peer(0), str(error)) from error
        match reply:
            case SessionAccepted():
                return
            case SessionRefused(peer_id=peer_id, code=code, reason=reason):
                raise StageRefusedError(peer_id, code, reason)
            case SessionFailed(peer_id=peer_id, reason=reason):
                raise StageFailedError(peer_id, reason)
            case other:
                raise StageFailedError(
                    self._peer(0), f"answered an open with {type(other).__name__}"
                )

    def _prompt(self, prompt_ids: tuple[int, ...]) -> Prompt:
        return Prompt(
            session=self._session, epoch=self._log.epoch, position=0, token_ids=prompt_ids
        )

    def _watch(self, stage: int, stream: Stream) -> None:
        self._tasks.append(asyncio.create_task(self._watched(stage, stream)))

    async def _watched(self, stage: int, stream: Stream) -> None:
        """Read one stream and ping it; any end of it becomes an event."""
        pings = asyncio.create_task(self._ping(stream))
        try:
            while True:
                async with asyncio.timeout(self._config.silence_s):
                    message = (await wire.read_frame(stream)).message
                self._take(stage, message)
        except TimeoutError:
            reason = f"silent for {self._config.silence_s:.0f} s"
            self._events.put_nowait(StageFailedError(self._peer(stage), reason))
        except StageFailedError as error:
            self._events.put_nowait(error)
        except (NetworkError, PeerError) as error:
            self._events.put_nowait(StageFailedError(self._peer(stage), str(error)))
        finally:
            pings.cancel()

    async def _ping(self, stream: Stream) -> None:
        nonce = 0
        while True:
            await asyncio.sleep(self._config.ping_every_s)
            nonce += 1
            try:
                await wire.send_frame(stream, Ping(nonce=nonce))
            except NetworkError:
                return  # the reader of the same stream reports it

    def _take(self, stage: int, message: object) -> None:
        match message:
            case Pong():
                pass
            case Tokens() if stage == -1 and message.session == self._session:
                fresh = self._log.accept(
                    epoch=message.epoch,
                    position=message.position,
                    token_ids=message.token_ids,
                )
                if fresh:
                    self._events.put_nowait(fresh)
                if message.finish_reason is not None and self._log.finish_reason is None:
                    raise StageFailedError(self._peer(stage), "ended the answer early")
            case SessionFailed(peer_id=peer_id, reason=reason):
                raise StageFailedError(peer_id, reason)
            case other:
                raise StageFailedError(self._peer(stage), f"sent {type(other).__name__}")

    async def _close(self) -> None:
        """Free the route: a close on the first stream, and the end of both."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._streams:
            self._streams[0].write(
                wire.encode_frame(SessionClose(session=self._session, epoch=self._log.epoch))
            )
        for stream in self._streams:
            await stream.close()
