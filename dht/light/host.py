"""Runs py-libp2p's host in a thread of its own, for peers without hivemind's daemon.

py-libp2p runs on trio, everything else here on asyncio. The two loops in two threads share only
:class:`dht.light.stream.BridgedStream` and calls handed over; neither loop blocks on the other.
Importing this module needs py-libp2p, which cannot be in one process with hivemind.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

import trio
from libp2p import new_host
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from dht.budget import CONNECTIONS, Budget
from dht.errors import NetworkError, UserError
from dht.identity.multiaddr import split_circuit
from dht.identity.peer_id import Identity
from dht.light.bounds import restrain, upgrades
from dht.light.relay import Circuits
from dht.light.stream import BridgedStream
from dht.messages.types import RECORD_BOUNDS
from dht.process.newest import Newest

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """Times and bounds of a light peer's connections."""

    stop_limit_s: float = 3.0
    stagger_s: float = 0.25
    """Delay between the starts of dials to one peer's addresses (RFC 8305 §5)."""
    dial_limit_s: float = 5.0
    directly_every_s: float = 300.0
    """Minimum time between direct dials of a peer that is connected only through relays."""
    connections_max: int = 2 * CONNECTIONS.in_all
    """Connections at one time, accepted or dialled: however many others make, which the budget
    bounds, as many are left to dial."""
    mute_s: float = 5.0
    """Time without a byte, while a stream is opened there, after which a connection is broken: the
    other side's network or address may have changed, which TCP finds out a quarter of an hour
    later."""


class LightHost:
    """A libp2p host that listens, dials and carries streams; make one with :meth:`start`."""

    def __init__(
        self,
        identity: Identity,
        on_stream: Callable[[str, BridgedStream], None],
        budget: Budget,
        config: HostConfig | None = None,
    ) -> None:
        self._config = config or HostConfig()
        self._identity = identity
        self._budget = budget
        self._on_stream = on_stream
        """Callback in asyncio for incoming streams, with protocol and stream."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[tuple[str, ...]] = self._loop.create_future()
        self._thread: threading.Thread | None = None
        self.ended = asyncio.Event()
        """Set when the host has ended, for any reason."""
        self.last_words = "it was never started"
        # Used in trio's thread only
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._stop: trio.Event
        self._host: Any = None
        self._circuits: Circuits
        self._dialling: Newest[str, trio.Lock] = Newest(RECORD_BOUNDS.peers_max)
        self._tried_directly_s: Newest[str, float] = Newest(RECORD_BOUNDS.peers_max)

    async def start(self, listen: tuple[str, ...], *, limit_s: float) -> tuple[str, ...]:
        """Start and listen; returns the addresses listened on, without peer ids.

        Raises UserError when one of ``listen`` cannot be listened on, NetworkError after
        ``limit_s``.
        """
        self._thread = threading.Thread(
            target=self._run, args=(listen,), name="libp2p", daemon=True
        )
        self._thread.start()
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise NetworkError(f"libp2p did not start within {limit_s:.0f} s") from None

    async def stop(self) -> None:
        """Leave the network. May be called twice, or without a start."""
        if self._thread is None:
            return
        with suppress(AttributeError, trio.RunFinishedError):  # trio may not have started yet
            self._token.run_sync_soon(self._stop.set)
        await asyncio.to_thread(self._thread.join, self._config.stop_limit_s)
        if not self._ready.done():
            self._ready.cancel()

    async def serve(self, protocol: str) -> None:
        """Accept streams of ``protocol`` from now on."""

        async def accept(net_stream: Any) -> None:
            await self._accept(protocol, net_stream)

        async def add() -> None:
            self._host.set_stream_handler(protocol, accept)

        await self._call(add)

    async def open(self, peer_id: str, protocol: str, dialled: tuple[str, ...]) -> BridgedStream:
        """Open a stream to a peer, over the present connection or a new one to ``dialled``.

        ``dialled`` are TCP addresses and those of :func:`dht.identity.multiaddr.circuits_of`.
        """

        async def work() -> BridgedStream:
            fresh = await self._connect(peer_id, dialled)
            began_s = trio.current_time()
            try:
                return await self._open_known(peer_id, protocol)
            except Exception:
                # A connection on which something comes carries others' streams, too.
                if fresh or not dialled or self._heard(peer_id, began_s):
                    raise
                await self._host.disconnect(ID.from_base58(peer_id))
                await self._connect(peer_id, dialled)
                return await self._open_known(peer_id, protocol)

        return await self._call(work, BridgedStream.abandon)

    async def _call(
        self, work: Callable[[], Awaitable[T]], discard: Callable[[T], None] | None = None
    ) -> T:
        """Run ``work`` in trio; its errors become NetworkError.

        ``work`` goes on when the caller is cancelled, since half a write would garble a connection;
        its result then goes to ``discard``.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        async def run() -> None:
            try:
                result = await work()
            except Exception as error:  # noqa: BLE001  (py-libp2p's errors have no common base)
                self._in_asyncio(partial(_fail, answer, _words(error)))
            else:
                self._in_asyncio(partial(_settle, answer, result, discard))

        def begin() -> None:
            self._nursery.start_soon(run)

        if self.ended.is_set():
            raise NetworkError(f"libp2p has ended: {self.last_words}")
        try:
            self._token.run_sync_soon(begin)
        except trio.RunFinishedError:
            raise NetworkError(f"libp2p has ended: {self.last_words}") from None
        return await answer

    def _in_asyncio(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    # In the thread

    def _run(self, listen: tuple[str, ...]) -> None:
        words = "it was asked to stop"
        try:
            trio.run(self._main, listen)
        except BaseException as error:  # noqa: BLE001  (recorded as the reason of the end)
            words = _words(error)
            _log.debug("libp2p ended", exc_info=error)
            self._in_asyncio(lambda: self._not_started(words, listen))

        def end() -> None:
            self.last_words = words
            self.ended.set()

        self._in_asyncio(end)

    def _not_started(self, words: str, listen: tuple[str, ...]) -> None:
        if not self._ready.done():
            why = f"cannot listen on {', '.join(listen)}: {words}; give another port"
            self._ready.set_exception(UserError(why))

    async def _main(self, listen: tuple[str, ...]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        quiet()
        addresses = [Multiaddr(address) for address in listen]
        keys = create_new_key_pair(self._identity.seed())
        self._host = new_host(
            key_pair=keys,
            **upgrades(keys, self._budget),
            connection_config=ConnectionConfig(
                max_connections=self._config.connections_max,
                high_watermark=self._config.connections_max,
                # Otherwise py-libp2p would dial any peer that it has heard of.
                min_connections=0,
                low_watermark=0,
                inbound_upgrade_timeout=self._config.dial_limit_s,
                outbound_upgrade_timeout=self._config.dial_limit_s,
            ),
            disable_identify_address_discovery=True,
        )
        restrain(self._host, self._budget)
        self._host.get_network().retry_config = RetryConfig(max_retries=0)
        self._circuits = Circuits(self._host)
        self._circuits.listen()
        async with self._host.run(listen_addrs=addresses):
            bound = tuple(str(address) for address in self._host.get_transport_addrs())
            if len(bound) < len(listen):
                raise OSError("the address is taken, or not one of this machine")
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._in_asyncio(partial(_settle, self._ready, bound, None))
                await self._stop.wait()
                nursery.cancel_scope.cancel()

    async def _accept(self, protocol: str, net_stream: Any) -> None:
        peer_id = net_stream.muxed_conn.peer_id.to_base58()
        where = net_stream.get_remote_address()
        host = str(where[0]) if where else ""
        stream = BridgedStream(peer_id, net_stream, self._loop, self._token, remote_host=host)
        self._in_asyncio(lambda: self._on_stream(protocol, stream))
        await stream.carry()

    async def _open_known(self, peer_id: str, protocol: str) -> BridgedStream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_mute, peer_id)
            net_stream = await self._host.new_stream(ID.from_base58(peer_id), [protocol])
            nursery.cancel_scope.cancel()
        stream = BridgedStream(peer_id, net_stream, self._loop, self._token)
        self._nursery.start_soon(stream.carry)
        return stream

    async def _end_mute(self, peer_id: str) -> None:
        """End the connections to a peer on which nothing comes for ``mute_s`` from now on.

        Without it a stream whose first bytes nobody takes would be opened for ever.
        """
        began_s, found = trio.current_time(), self._connections(peer_id)
        await trio.sleep(self._config.mute_s)
        for connection in found:
            if connection.muxed_conn.heard_s < began_s:
                await connection.close()

    def _heard(self, peer_id: str, since_s: float) -> bool:
        """Whether anything has come from a connected peer since then."""
        return any(c.muxed_conn.heard_s >= since_s for c in self._connections(peer_id))

    def _is_connected(self, peer_id: str) -> bool:
        return bool(self._connections(peer_id))

    def _connections(self, peer_id: str) -> list[Any]:
        found = self._host.get_network().get_connections(ID.from_base58(peer_id))
        return [connection for connection in found if not connection.is_closed]

    async def _connect(self, peer_id: str, dialled: tuple[str, ...]) -> bool:
        """Ensure a connection to a peer; returns whether it is a new one."""
        lock = self._dialling[peer_id] = self._dialling.get(peer_id) or trio.Lock()
        async with lock:
            if self._is_connected(peer_id):
                self._go_direct(peer_id, dialled)
                return False
            if not dialled:
                raise NetworkError("it is not connected, and no address of it is known")
            await self._dial(ID.from_base58(peer_id), dialled)
            return True

    def _go_direct(self, peer_id: str, dialled: tuple[str, ...]) -> None:
        """Dial a peer in the background that is connected only through relays.

        Streams that either side opens afterwards take the direct connection.
        """
        direct = tuple(address for address in dialled if split_circuit(address) is None)
        found = self._connections(peer_id)
        if not direct or any(c.get_connection_type() is not ConnectionType.RELAYED for c in found):
            return
        now_s = trio.current_time()
        if now_s - self._tried_directly_s.get(peer_id, -inf) < self._config.directly_every_s:
            return
        self._tried_directly_s[peer_id] = now_s

        async def dial() -> None:
            with suppress(NetworkError):  # the relayed connection stays
                await self._dial(ID.from_base58(peer_id), direct)

        self._nursery.start_soon(dial)

    async def _dial(self, peer: Any, dialled: tuple[str, ...]) -> None:
        """Dial addresses one after the other, the next when one fails or takes ``stagger_s``."""
        errors: list[str] = []
        network = self._host.get_network()

        async def dial(address: str, over: trio.Event) -> None:
            try:
                with trio.fail_after(self._config.dial_limit_s):
                    if (relay := split_circuit(address)) is None:
                        await network.dial_addr(Multiaddr(address), peer)
                    else:
                        await self._connect(relay[0], relay[1:])
                        await self._circuits.dial(ID.from_base58(relay[0]), peer)
                nursery.cancel_scope.cancel()
            except Exception as error:  # noqa: BLE001
                errors.append(f"{address}: {_words(error)}")
            finally:
                over.set()

        async with trio.open_nursery() as nursery:
            for address in dialled:
                over = trio.Event()
                nursery.start_soon(dial, address, over)
                with trio.move_on_after(self._config.stagger_s):
                    await over.wait()
        if not self._is_connected(peer.to_base58()):
            raise NetworkError("; ".join(errors) or "nobody answers")


def _fail(answer: "asyncio.Future[Any]", words: str) -> None:
    if not answer.done():
        answer.set_exception(NetworkError(words))


def _settle(answer: "asyncio.Future[T]", result: T, discard: Callable[[T], None] | None) -> None:
    if not answer.done():
        answer.set_result(result)
    elif discard is not None:
        discard(result)


def _words(error: BaseException) -> str:
    """The message of the innermost cause, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (" ".join(str(cause).split()) or type(cause).__name__)[:300]


def quiet() -> None:
    """Hide py-libp2p's log from users, who get our errors; ANABRANCH_DEBUG shows it."""
    level = logging.DEBUG if os.environ.get("ANABRANCH_DEBUG") else logging.CRITICAL
    for name in ("libp2p", "async_service", "multiaddr"):
        logging.getLogger(name).setLevel(level)
