"""The streams of one route attempt: open, prompt, read tokens, watch both ends.

What happens becomes an event of :mod:`client.session.events`; nothing here decides what follows
from it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from client.session.config import SessionConfig
from client.session.events import (
    Accepted,
    Arrived,
    Event,
    Leaving,
    Lost,
    MigrationCaughtUp,
    PromptScored,
    Refused,
)
from coordinator.policies.failure.detector import Dead, PeerWatch, PingNow
from dht.errors import NetworkError, PeerError
from dht.identity.grant import grant, is_own_word
from dht.messages import codec
from dht.messages.kv import KvCopy
from dht.messages.logprobs import TokenScore, row_bytes, unpack_scores
from dht.messages.session import (
    SESSION_BOUNDS,
    FinishReason,
    MigrationReady,
    Ping,
    Pong,
    Prompt,
    PromptScores,
    RefusalCode,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
    Tokens,
    TokensAttach,
)
from dht.process.supervision import end_all, loop_s, seen
from dht.transport.interface import SESSION_PROTOCOL, TOKENS_PROTOCOL, Stream, Transport


class _StageLost(Exception):
    """One end of the route is lost; ends the task that found out."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(reason)
        self.peer_id = peer_id
        self.reason = reason


class Attempt:
    """One attempt's streams to the first and to the last stage. Tasks end with :meth:`close`."""

    def __init__(
        self,
        transport: Transport,
        open_: SessionOpen,
        addresses: Mapping[str, tuple[str, ...]],
        post: Callable[[Event], None],
        *,
        vocab: int,
        config: SessionConfig,
    ) -> None:
        """``addresses`` are those in the stages' records, by peer id; ``vocab`` bounds the token
        ids that a stage may send."""
        self._vocab = vocab
        self._config = config
        self._transport = transport
        self._open_message = open_
        self._addresses = addresses
        self._post = post
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[Stream] = []
        self._first: Stream | None = None
        self._last: asyncio.Task[Stream] | None = None
        # What a stage says waits until the answer's reader wants more, so it is bounded.
        self._tokens_left = open_.max_new_tokens + SESSION_BOUNDS.draft_tokens_max
        self._scores_left = open_.scores_end
        self._words_left = config.words_max

    @property
    def attempt(self) -> int:
        return self._open_message.attempt

    @property
    def _is_warm(self) -> bool:
        """Whether it prepares a planned move, and serves nothing itself."""
        return self._open_message.migrate_until is not None

    @property
    def _answer_bytes_max(self) -> int:
        """Maximum bytes of a message with tokens or scores: as many as were asked for."""
        open_, most = self._open_message, SESSION_BOUNDS.message_tokens_max
        top, prompt_top = open_.sampling.logprobs, open_.sampling.prompt_logprobs
        token_bytes = self._config.token_id_bytes_max + (0 if top is None else row_bytes(top))
        scored_bytes = 0 if prompt_top is None else row_bytes(prompt_top)
        return self._config.control_bytes_max + max(
            min(most, self._tokens_left) * token_bytes, min(most, open_.scores_end) * scored_bytes
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were known when the attempt was opened."""
        return self._open_message.prompt_tokens

    def open(self) -> None:
        """Send the open down the route; posts Accepted, Refused or Lost.

        Where an answer goes on, its reader waits: the last stage is connected to meanwhile.

        Raises ValueError for an open that no stage would accept.
        """
        open_ = codec.canonical(self._open_message)
        granted = grant(open_, self._transport.sign, self._transport.now())
        self._start(self._open(granted))
        if self._open_message.answered and not self._is_warm:
            self._last = asyncio.create_task(self._connect(-1, TOKENS_PROTOCOL))
            self._last.add_done_callback(seen)

    def feed(self, position: int, token_ids: tuple[int, ...], *, behind: bool) -> None:
        """Prompt the first stage at ``position`` with those of ``token_ids``, all that is known,
        and ask the last for tokens. ``behind``: then prompt it with those before ``position``."""
        self._start(self._feed(position, token_ids, behind=behind))

    def feed_copy(self, token_ids: tuple[int, ...]) -> None:
        """Prompt the new first stage of a planned move; no tokens come back."""
        if self._first is not None:
            self._start(self._prompt(self._first, 0, token_ids))

    def meet_last(self) -> None:
        """Connect to the last stage ahead of time: the hand-over to it should not wait for that."""
        self._start(self._meet_last())

    async def _meet_last(self) -> None:
        """A stage that cannot be reached shows when it is needed."""
        with suppress(_StageLost):
            await self._connect(-1, TOKENS_PROTOCOL)

    def copy_kv(self, source: str, to: str) -> None:
        """Ask ``source`` to copy the session's KV to ``to``; posts MigrationCaughtUp or Refused."""
        self._start(self._copy_kv(source, to))

    async def _copy_kv(self, source: str, to: str) -> None:
        """The client bounds how long a move may take; a source that is lost ends it as well."""
        order = KvCopy(session=self._open_message.session, attempt=self.attempt, to=to)
        try:
            stream = await self._open_stream(source, SESSION_PROTOCOL)
            await codec.send_frame(stream, order)
            reply = (
                await codec.read_frame(stream, limit_bytes=self._config.control_bytes_max)
            ).message
        except (NetworkError, PeerError, TimeoutError) as error:
            reason = f"cannot be asked for its KV: {str(error) or 'no answer'}"
            self._refused((source,), RefusalCode.NO_COPY, reason, 0.0)
            return
        match reply:
            case MigrationReady():
                self._post(MigrationCaughtUp(attempt=self.attempt))
            case SessionRefused(reason=reason):
                self._refused((source,), RefusalCode.NO_COPY, reason, 0.0)
            case other:
                raise _StageLost(source, f"answered a copy with {type(other).__name__}")

    async def _prompt(self, first: Stream, position: int, token_ids: tuple[int, ...]) -> None:
        for at in range(0, len(token_ids), SESSION_BOUNDS.message_tokens_max):
            prompt = Prompt(
                session=self._open_message.session,
                attempt=self.attempt,
                position=position + at,
                token_ids=token_ids[at : at + SESSION_BOUNDS.message_tokens_max],
            )
            await self._send(0, first, prompt)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        # One that is cancelled before it began would warn that its work was never awaited.
        task.add_done_callback(lambda _: work.close())
        self._tasks.append(task)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except _StageLost as lost:
            self._lose(lost.peer_id, lost.reason)

    def _lose(
        self,
        peer_id: str,
        reason: str,
        suspects: tuple[str, ...] = (),
        retry_after_s: float = 0.0,
        *,
        watched: bool = False,
    ) -> None:
        self._post(
            Lost(
                attempt=self.attempt,
                peer_id=peer_id,
                reason=_one_line(reason),
                suspects=suspects,
                retry_after_s=retry_after_s,
                watched=watched,
            )
        )

    def _peer(self, stage: int) -> str:
        return self._open_message.route[stage].peer_id

    def _others(self, peer_id: str) -> tuple[str, ...]:
        """The route's other peers. Where ``peer_id`` left something undone, any of them may be the
        reason."""
        route = (stage.peer_id for stage in self._open_message.route)
        return tuple(other for other in route if other != peer_id)

    def _accused(self, teller: str, word: SessionFailed | SessionRefused) -> tuple[str, ...]:
        """Peers that may be at fault by a word that ``teller`` passed on; the accused first.

        A stage speaks of itself, or of a neighbour on the route: then it is the link between them
        that fails, and either may be the reason. Raises _StageLost for any other word.
        """
        route = [stage.peer_id for stage in self._open_message.route]
        mine = (self._open_message.session, self.attempt) == (word.session, word.attempt)
        signed = word.by == teller or is_own_word(word)
        if not (mine and signed and word.by in route):
            raise _StageLost(teller, "passes on what the stage that it names did not say")
        if word.by == word.peer_id:
            return (word.by,)
        at = route.index(word.by)
        linked = word.peer_id in {route[at - 1], route[(at + 1) % len(route)]}
        refusal = isinstance(word, SessionRefused) and word.code != RefusalCode.UNREACHABLE
        if not linked or refusal:
            raise _StageLost(word.by, "speaks for another stage")
        return (word.peer_id, word.by)

    async def _connect(self, stage: int, protocol: str) -> Stream:
        try:
            return await self._open_stream(self._peer(stage), protocol)
        except (NetworkError, TimeoutError) as error:
            reason = f"cannot be reached: {str(error) or 'no answer'}"
            raise _StageLost(self._peer(stage), reason) from error

    async def _open_stream(self, peer_id: str, protocol: str) -> Stream:
        async with asyncio.timeout(self._config.connect_s):
            stream = await self._transport.open_stream(
                peer_id, protocol, addresses=self._addresses.get(peer_id, ())
            )
        self._streams.append(stream)
        return stream

    async def _send(self, stage: int, stream: Stream, message: object) -> None:
        try:
            async with asyncio.timeout(self._config.open_s):
                await codec.send_frame(stream, message)
        except (NetworkError, TimeoutError) as error:
            raise _StageLost(self._peer(stage), f"connection lost: {error}") from error

    async def _open(self, granted: SessionOpen) -> None:
        first = self._peer(0)
        try:
            stream = self._first = await self._connect(0, SESSION_PROTOCOL)
        except _StageLost as lost:
            self._refused((first,), RefusalCode.UNREACHABLE, lost.reason, 0.0)
            return
        await self._send(0, stream, granted)
        try:
            async with asyncio.timeout(self._config.open_s):
                most = self._config.control_bytes_max
                reply = (await codec.read_frame(stream, limit_bytes=most)).message
        except TimeoutError:
            reason = f"the route did not answer an open within {self._config.open_s:.0f} s"
            accused = (first, *self._others(first))
            self._refused(accused, RefusalCode.UNREACHABLE, reason, 0.0)
            return
        except (NetworkError, PeerError) as error:
            raise _StageLost(first, str(error)) from error
        match reply:
            case SessionAccepted(position=position) if position > self.prompt_tokens:
                raise _StageLost(first, "accepted more than there is of the prompt")
            case SessionAccepted(position=position, rows=rows):
                self._post(Accepted(attempt=self.attempt, position=position, rows=rows))
                self._start(self._watched(0, stream))
            case SessionRefused() as refused:
                accused = self._accused(first, refused)
                self._refused(accused, refused.code, refused.reason, refused.retry_after_s)
            case SessionFailed(reason=reason) as failed:
                accused = self._accused(first, failed)
                after_s = 0.0 if accused[1:] else failed.retry_after_s
                self._lose(accused[0], reason, accused[1:], after_s)
            case other:
                raise _StageLost(first, f"answered an open with {type(other).__name__}")

    def _refused(
        self, accused: tuple[str, ...], code: str, reason: str, retry_after_s: float
    ) -> None:
        self._post(
            Refused(
                attempt=self.attempt,
                peer_id=accused[0],
                code=code,
                reason=_one_line(reason),
                retry_after_s=retry_after_s,
                suspects=accused[1:],
            )
        )

    async def _feed(self, position: int, token_ids: tuple[int, ...], *, behind: bool) -> None:
        session, first = self._open_message.session, self._first
        if first is None:
            raise RuntimeError("fed before the route was opened")
        await self._prompt(first, position, token_ids[position:])
        last = await (self._last or self._connect(-1, TOKENS_PROTOCOL))
        attach = TokensAttach(session=session, attempt=self.attempt, position=len(token_ids))
        await self._send(-1, last, attach)
        self._start(self._watched(-1, last))
        if behind:
            await self._prompt(first, 0, token_ids[:position])

    async def _watched(self, stage: int, stream: Stream) -> None:
        """Read one stream, and watch its peer; any end of it becomes an event."""
        watch = PeerWatch(config=self._config.watch, heard_s=loop_s())
        pings = asyncio.create_task(self._watch(stage, stream, watch))
        most = self._config.control_bytes_max if stage == 0 else self._answer_bytes_max
        try:
            while True:
                frame = await codec.read_frame(stream, limit_bytes=most)
                watch.heard(loop_s())
                if isinstance(frame.message, Pong):
                    pong = frame.message
                    watch.answered(pong.nonce, pong.stalled_s, pong.step_p95_s, loop_s())
                else:
                    self._take(stage, frame.message, frame.body)
        except (NetworkError, PeerError) as error:
            self._lose(self._peer(stage), str(error))
        finally:
            pings.cancel()

    async def _watch(self, stage: int, stream: Stream, watch: PeerWatch) -> None:
        while True:
            match watch.tick(loop_s()):
                case Dead(reason=reason):
                    self._lose(self._peer(stage), reason, watched=True)
                    return
                case PingNow(nonce=nonce):
                    # Written without waiting: the watch must run on when nothing is read there.
                    stream.write(codec.encode_frame(Ping(nonce=nonce)))
            await asyncio.sleep(max(0.0, watch.wake_at_s - loop_s()))

    def _scores(self, message: Tokens, body: bytes | memoryview) -> tuple[TokenScore, ...]:
        """The scores of a frame's tokens; raises MalformedError where they are not all there."""
        top = self._open_message.sampling.logprobs
        return () if top is None else unpack_scores(body, message.token_ids, top, self._vocab)

    def _take_prompt_scores(self, message: PromptScores, body: bytes | memoryview) -> None:
        open_ = self._open_message
        end = message.position + message.tokens
        top = open_.sampling.prompt_logprobs
        self._scores_left -= message.tokens
        asked = top is not None and message.position >= 1 and end <= open_.scores_end
        if top is None or not asked or self._scores_left < 0:
            raise codec.MalformedError("scores that nobody asked for")
        token_ids = open_.history[message.position : end]
        scores = unpack_scores(body, token_ids, top, self._vocab)
        self._post(PromptScored(attempt=message.attempt, position=message.position, scores=scores))

    def _take(self, stage: int, message: object, body: bytes | memoryview) -> None:
        self._words_left -= not isinstance(message, Tokens | PromptScores)
        if self._words_left < 0:
            raise _StageLost(self._peer(stage), "says the same again and again")
        match message:
            case PromptScores() if stage == -1 and message.session == self._open_message.session:
                self._take_prompt_scores(message, body)
            case Tokens() if stage == -1 and message.session == self._open_message.session:
                self._tokens_left -= len(message.token_ids)
                if self._tokens_left < 0:
                    raise _StageLost(self._peer(stage), "sent more tokens than were asked for")
                if message.token_ids:
                    self._post(
                        Arrived(
                            attempt=message.attempt,
                            position=message.position,
                            token_ids=message.token_ids,
                            scores=self._scores(message, body),
                            computed_s=message.computed_s,
                            waited_s=message.waited_s,
                        )
                    )
                if message.finish_reason is not None:
                    self._words_left -= 1
                    # Stale if these tokens did complete the answer: the client is done by then.
                    last = self._peer(stage)
                    closed = message.finish_reason is FinishReason.CANCELLED  # by any stage before
                    suspects = self._others(last) if closed else ()
                    self._lose(last, "ended the answer early", suspects)
            case SessionLeaving(peer_id=peer_id, to=to) as leaving:
                if leaving.session != self._open_message.session or not is_own_word(leaving):
                    raise _StageLost(self._peer(stage), "says of another stage that it leaves")
                self._post(Leaving(attempt=leaving.attempt, peer_id=peer_id, to=to))
            case MigrationReady() if stage == 0:
                self._post(MigrationCaughtUp(attempt=message.attempt))
            case SessionRefused() as refused if stage == 0 and self._is_warm:
                accused = self._accused(self._peer(0), refused)
                self._refused(accused, refused.code, refused.reason, refused.retry_after_s)
            case SessionFailed(reason=reason) as failed:
                accused = self._accused(self._peer(stage), failed)
                # A stage can only say of itself that it gave its KV to others.
                after_s = 0.0 if accused[1:] else failed.retry_after_s
                self._lose(accused[0], reason, accused[1:], after_s)
            case other:
                raise _StageLost(self._peer(stage), f"sent {type(other).__name__}")

    async def close(self, *, ends_session: bool) -> None:
        """End both streams; ``ends_session`` frees the route, too, by a close on the first."""
        tasks: list[asyncio.Task[Any]] = [*self._tasks]
        tasks += [self._last] if self._last is not None else []
        await end_all(tasks)
        if self._first is not None and ends_session:
            close = SessionClose(session=self._open_message.session, attempt=self.attempt)
            self._first.write(codec.encode_frame(close))
        for stream in self._streams:
            await stream.close()


def _one_line(reason: str) -> str:
    """Another's words without ends of lines: what follows one would look like a word of ours."""
    return " ".join(reason.split())
