"""Pings peers on the plan protocol to learn which answer, whatever their records still say."""

import asyncio
from collections.abc import Collection, Mapping

from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.peer import REQUESTS_MAX, Witness, WitnessRequest
from dht.messages.session import Ping, Pong
from dht.supervision import Supervisor, end_all
from dht.transport.interface import PLAN_PROTOCOL, Stream, Transport

EVERY_S = 1.5
ANSWER_S = 3.0
AGAIN_S = 0.5
"""Pause before a ping is repeated that was refused at once, as when the process is gone."""
FAILURES = 3
"""Pings in a row without an answer after which a peer is silent."""
WITNESS_S = 2.0
"""Maximum wait for witnesses' answers on a silent peer."""


class Liveness:
    """Pings the watched peers. A silent peer stays silent until it answers again."""

    def __init__(self, transport: Transport, parts: Supervisor | None = None) -> None:
        self._parts = parts or Supervisor()
        self._transport = transport
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._failures: dict[str, int] = {}

    @property
    def silent(self) -> frozenset[str]:
        """Peers that did not answer lately. They stay watched until they answer."""
        limit = FAILURES
        return frozenset(peer for peer, count in self._failures.items() if count >= limit)

    def watch(self, peers: Mapping[str, tuple[str, ...]], known: Collection[str]) -> None:
        """Watch exactly ``peers`` (addresses by peer id) and the silent peers among ``known``."""
        self._addresses.update(peers)
        keep = set(peers) | (self.silent & set(known))
        for peer_id in [p for p in self._tasks if p not in keep]:
            self._tasks.pop(peer_id).cancel()
            self._failures.pop(peer_id, None)
            self._addresses.pop(peer_id, None)
        for peer_id in peers:
            if peer_id not in self._tasks:
                pinging = self._parts.keep(self._ping, peer_id, ends_process=False)
                self._tasks[peer_id] = asyncio.create_task(pinging)

    def answers(self, peer_id: str) -> bool | None:
        """Whether a watched peer answers; None: not watched, or failed but not yet silent."""
        count = self._failures.get(peer_id)
        if count is None or peer_id not in self._tasks:
            return None
        return True if count == 0 else False if count >= FAILURES else None

    async def confirm_silent(
        self, peer_id: str, witnesses: Mapping[str, tuple[str, ...]]
    ) -> bool | None:
        """Whether ``witnesses`` (addresses by peer id) confirm that a silent peer does not answer.

        False if any witness gets answers; None if no witness can tell; True without witnesses.
        """
        if not witnesses:
            return True
        said = await asyncio.gather(
            *(self._witness(peer, peer_id, where) for peer, where in witnesses.items())
        )
        if any(said):
            return False
        return True if False in said else None

    async def _witness(self, witness: str, peer_id: str, addresses: tuple[str, ...]) -> bool | None:
        try:
            async with asyncio.timeout(WITNESS_S):
                reply = await _ask(
                    self._transport, witness, addresses, WitnessRequest(peer_id=peer_id)
                )
        except (NetworkError, PeerError, TimeoutError):
            return None
        return reply.answers if isinstance(reply, Witness) and reply.peer_id == peer_id else None

    async def close(self) -> None:
        """Stop all pings; :meth:`watch` starts them again."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await end_all(tasks)

    async def _ping(self, peer_id: str) -> None:
        line = _Line(self._transport, peer_id)
        try:
            while True:
                pause_s = EVERY_S
                try:
                    async with asyncio.timeout(ANSWER_S):
                        await line.ping(self._addresses.get(peer_id, ()))
                    self._failures[peer_id] = 0
                except (NetworkError, PeerError, TimeoutError) as error:
                    await line.close()
                    self._failures[peer_id] = self._failures.get(peer_id, 0) + 1
                    silent = self._failures[peer_id] >= FAILURES
                    if isinstance(error, NetworkError) and not silent:
                        pause_s = AGAIN_S
                await asyncio.sleep(pause_s)
        finally:
            await line.close()


class _Line:
    """A stream to a watched peer, kept open: opening one costs several times as much as a ping."""

    def __init__(self, transport: Transport, peer_id: str) -> None:
        self._transport = transport
        self._peer_id = peer_id
        self._stream: Stream | None = None
        self._requests = 0

    async def ping(self, addresses: tuple[str, ...]) -> None:
        """:func:`ask_ping` on the open stream; a stream that the peer closed is opened again."""
        if self._requests >= REQUESTS_MAX:
            await self.close()
        if self._stream is not None:
            try:
                await self._ask(self._stream)
                return
            except NetworkError:
                await self.close()
        self._stream = await self._transport.open_stream(
            self._peer_id, PLAN_PROTOCOL, addresses=addresses
        )
        await self._ask(self._stream)

    async def _ask(self, stream: Stream) -> None:
        self._requests += 1
        _check_pong(await _answer(stream, Ping(nonce=1)))

    async def close(self) -> None:
        """Close the stream if there is one."""
        stream, self._stream, self._requests = self._stream, None, 0
        if stream is not None:
            await stream.close()


async def ask_ping(transport: Transport, peer_id: str, addresses: tuple[str, ...]) -> None:
    """Ping ``peer_id`` and wait for the answer; the caller sets the time limit.

    Raises NetworkError when the peer cannot be reached, PeerError when it answers something else.
    """
    _check_pong(await _ask(transport, peer_id, addresses, Ping(nonce=1)))


async def answers_ping(
    transport: Transport, peer_id: str, addresses: tuple[str, ...], limit_s: float = ANSWER_S
) -> bool:
    """Whether ``peer_id`` answers one ping within ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            await ask_ping(transport, peer_id, addresses)
    except (NetworkError, PeerError, TimeoutError):
        return False
    return True


def _check_pong(answer: object) -> None:
    if not isinstance(answer, Pong):
        raise codec.MalformedError("a ping was answered with something else")


async def _ask(
    transport: Transport, peer_id: str, addresses: tuple[str, ...], request: Ping | WitnessRequest
) -> object:
    stream = await transport.open_stream(peer_id, PLAN_PROTOCOL, addresses=addresses)
    try:
        return await _answer(stream, request)
    finally:
        await stream.close()


async def _answer(stream: Stream, request: Ping | WitnessRequest) -> object:
    await codec.send_frame(stream, request)
    return (await codec.read_frame(stream, limit_bytes=1 << 10)).message
