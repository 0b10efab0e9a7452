"""Talks to the libp2p daemon: streams, single requests, addresses.

hivemind's bindings are imported where they are used, see :mod:`dht.daemon.transport`.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from dht.errors import NetworkError
from dht.identity.multiaddr import by_peer, checked_tcp
from dht.messages.types import RECORD_BOUNDS
from dht.transport.streams import ReadTurns

_CLOSE_LIMIT_S = 1.0
"""Maximum time that closing a stream waits for its written bytes to leave."""
_FLUSH_LIMIT_S = 60.0
_READ_BYTES = 256 << 10
_P2P_CODE = b"\xa5\x03"
"""Multiaddress protocol 421 (p2p) as a varint."""


class LibP2PStream:
    """A stream through the daemon. All its failures are NetworkErrors."""

    def __init__(
        self,
        remote_peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        remote_host: str = "",
    ) -> None:
        self.remote_peer_id = remote_peer_id
        self.remote_host = remote_host
        self._reader = reader
        self._writer = writer
        self._turns = ReadTurns()
        self._closed = False

    async def read_exactly(self, count: int) -> bytes:
        await self._turns.take()
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            raise NetworkError(f"peer {self.remote_peer_id} closed the stream") from error
        except (OSError, RuntimeError) as error:
            raise NetworkError(f"stream of peer {self.remote_peer_id} broke: {error}") from error

    async def read_some(self, most: int) -> bytes:
        try:
            data = await self._reader.read(most)
        except (OSError, RuntimeError) as error:
            raise NetworkError(f"stream of peer {self.remote_peer_id} broke: {error}") from error
        if not data:
            raise NetworkError(f"peer {self.remote_peer_id} closed the stream")
        return data

    def write(self, data: bytes) -> None:
        if not self._writer.transport.is_closing():
            with suppress(OSError, RuntimeError):  # the next drain raises the error
                self._writer.write(data)

    async def drain(self) -> None:
        if self._closed or self._writer.transport.is_closing():
            raise NetworkError(f"stream of peer {self.remote_peer_id} is closed")
        try:
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise NetworkError(f"stream of peer {self.remote_peer_id} broke: {error}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._writer.close()
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            # The other side reads slowly: flush in the background, for a limited time.
            loop = asyncio.get_running_loop()
            loop.call_later(_FLUSH_LIMIT_S, self._writer.transport.abort)
        except (OSError, RuntimeError):
            self._writer.transport.abort()


async def ask(
    control_path: Path, request: Any, failure: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request on a connection of its own, which the answer may turn into a stream.

    Raises NetworkError that begins with ``failure``. hivemind's own client leaks the connections
    of requests that fail or are cancelled.
    """
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2

    try:
        reader, writer = await asyncio.open_unix_connection(str(control_path), limit=_READ_BYTES)
    except OSError as error:
        raise NetworkError(f"{failure}: the p2p daemon does not answer: {error}") from error
    try:
        await asking_daemon(write_pbmsg(writer, request))
        response = p2pd_pb2.Response()
        await asking_daemon(read_pbmsg_safe(reader, response))
        if response.type == p2pd_pb2.Response.ERROR:
            reason = " ".join(response.error.msg.split())
            raise NetworkError(f"{failure}: {reason[:300]}")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def asking_daemon(work: Any) -> Any:
    """Await hivemind's ``work``; its errors and the daemon's become NetworkError."""
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

    try:
        return await work
    except asyncio.IncompleteReadError as error:
        raise NetworkError("the p2p daemon closed the connection") from error
    except (OSError, P2PDaemonError, P2PHandlerError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise NetworkError(f"the p2p daemon failed: {error}") from error


def raw_id(peer_id: str) -> bytes:
    """The bytes of a peer id; raises NetworkError for text that is not one."""
    from hivemind.p2p import PeerID

    try:
        raw: bytes = PeerID.from_base58(peer_id).to_bytes()
    except ValueError as error:
        raise NetworkError(f"{peer_id[:64]!r} is no peer id") from error
    return raw


def parse_peers(addresses: tuple[str, ...]) -> dict[str, tuple[bytes, ...]]:
    """The addresses to dial, by peer, of full multiaddresses; raises UserError for others."""
    return by_peer(addresses, _parse)


def parse_known(addresses: tuple[str, ...]) -> list[bytes]:
    """Addresses to dial that another peer told; those that do not parse are skipped."""
    dialed = []
    for address in addresses[: RECORD_BOUNDS.addresses_max]:
        with suppress(ValueError):
            dialed.append(_parse(address)[1])
    return dialed


def _parse(address: str) -> tuple[str, bytes]:
    """The peer id at the end of a multiaddress, and the rest in libp2p's binary form.

    Raises ValueError unless it is an address with TCP, or one through a relay at such an address.
    hivemind encodes peer ids as CIDs, which its own daemon refuses, so this encodes them itself.
    """
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    Multiaddr(address)  # raises an error that says what is wrong
    head, found, peer_id = address.rstrip("/").rpartition("/p2p/")
    if not found or not head or "/" in peer_id:
        raise ValueError("it lacks the peer id at its end, /p2p/12D3KooW…")
    first, *relays = head.split("/p2p/")
    encoded: bytes = Multiaddr(checked_tcp(first)).to_bytes()
    for part in relays:
        relay_id, _, rest = part.partition("/")
        raw = PeerID.from_base58(relay_id).to_bytes()
        encoded += _P2P_CODE + bytes([len(raw)]) + raw
        encoded += Multiaddr(f"/{rest}").to_bytes() if rest else b""
    return peer_id, encoded
