"""What strangers may make py-libp2p hold: connections, lines, streams, and bytes nobody has read.

Of itself py-libp2p reads a first line of any length before it knows who sends it, lets senders
ignore their windows, keeps a place of each connection that was ever accepted, takes connections
in plain text in which anybody can call himself anybody, and stores what strangers push of
themselves. Importing this module needs py-libp2p.
"""

import logging
import struct
from contextlib import suppress
from typing import Any

import trio
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.exceptions import ParseError
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.io.exceptions import IOException
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer import muxer_multistream
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    FLAG_SYN,
    GO_AWAY_NORMAL,
    HEADER_SIZE,
    TYPE_DATA,
    YAMUX_HEADER_FORMAT,
    Yamux,
)
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from dht.budget import (
    CONNECTIONS,
    HANDSHAKES,
    STREAMS,
    UNREAD_BYTES,
    Budget,
    Held,
    neighbourhood_of,
)

LINE_BYTES_MAX = 1024
"""Fixed by go-libp2p: maximum line with which two sides agree on a protocol
(multistream-select)."""
STREAMS_MAX = 2 * STREAMS.per_peer
"""Maximum streams on one connection, those of this side and those that have no protocol yet among
them."""
STREAM_BYTES = 4 << 10
"""Memory of a stream that holds nothing, which counts as unread."""
_log = logging.getLogger(__name__)


class TooMuchError(IOException):  # type: ignore[misc]  # py-libp2p is not seen
    """The other side sent more than it may; its connection ends."""


async def _read_line(self: Any) -> str:
    """One line of a negotiation; raises MultiselectCommunicatorError for none or a long one."""
    try:
        line: bytes = await read_varint_prefixed_bytes_limited(self.read_writer, LINE_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise ParseError("a line without its end")
        return line[:-1].decode()
    except (ParseError, IOException, UnicodeDecodeError) as error:
        raise MultiselectCommunicatorError(f"no line: {error}") from error


class CheckedFrames:
    """A secured connection as a yamux muxer reads it, which ends where a frame breaks a rule."""

    def __init__(self, connection: Any, muxer: "BoundedYamux") -> None:
        self._connection = connection
        self._muxer = muxer
        self._header = bytearray()
        self._body_left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def read(self, n: int | None = None) -> bytes:
        """Up to ``n`` bytes, never beyond the frame's header or body that was begun.

        Raises TooMuchError at a header that announces more than its stream may send.
        """
        rest = self._body_left or HEADER_SIZE - len(self._header)
        data: bytes = await self._connection.read(rest if n is None else min(n, rest))
        self._muxer.heard_s = trio.current_time()
        if self._body_left:
            self._body_left -= len(data)
            return data
        self._header += data
        if len(self._header) == HEADER_SIZE:
            _, kind, flags, stream_id, length = struct.unpack(YAMUX_HEADER_FORMAT, self._header)
            self._header.clear()
            self._body_left = length if kind == TYPE_DATA else 0
            self._muxer.check(stream_id, self._body_left, opens=bool(flags & FLAG_SYN))
        return data


class BoundedYamux(Yamux):  # type: ignore[misc]
    """py-libp2p's muxer with windows that hold, and a bound on what nobody has read.

    Whoever sends beyond a window loses the connection, as with go-yamux.
    """

    room: "UnreadRoom"
    """Set in a subclass for the host: py-libp2p makes muxers by their class."""
    farewell_s = 1.0
    """Maximum time for which a connection that ends waits to say so."""
    silent_s = 75.0
    """Time without a byte after which a connection is broken: both sides ping every 30 s, and an
    answer may take 10 s. TCP alone finds that out a quarter of an hour later."""

    def __init__(self, secured_conn: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(secured_conn, *args, **kwargs)
        self.heard_s = trio.current_time()
        """When something came last, by trio's clock."""
        self.secured_conn = CheckedFrames(secured_conn, self)

    def check(self, stream_id: int, body_bytes: int, *, opens: bool) -> None:
        """Raise TooMuchError where a frame with this header must not come."""
        stream = self.streams.get(stream_id)
        window = DEFAULT_WINDOW_SIZE if stream is None else stream.recv_window
        if body_bytes > window:
            raise TooMuchError(f"{body_bytes} bytes on a stream that may send {window}")
        if opens and len(self.streams) >= STREAMS_MAX:
            raise TooMuchError(f"more than {STREAMS_MAX} streams on a connection")
        if (opens or body_bytes) and not self.room.fits(self, body_bytes):
            raise TooMuchError("no room for more bytes that nobody has read")

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        """End the connection, also one whose other side reads nothing any more.

        py-libp2p would wait for it to read a farewell, and all who open streams there would wait.
        """
        with trio.move_on_after(self.farewell_s):
            await super().close(error_code)
            return
        await self._cleanup_on_error()

    async def _measure_rtt_loop(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super()._measure_rtt_loop)  # it pings
            while (until_s := self.heard_s + self.silent_s) > trio.current_time():
                with trio.move_on_at(until_s):
                    await self.event_shutting_down.wait()
                    return
            with trio.CancelScope(shield=True):  # whoever reads it cancels this at its end
                await self._cleanup_on_error()

    @property
    def unread_bytes(self) -> int:
        """Bytes that came and have not been read, with the memory of streams."""
        if self.event_closed.is_set():
            return 0
        return sum(map(len, self.stream_buffers.values())) + STREAM_BYTES * len(self.streams)


class UnreadRoom:
    """Memory for what has come on all connections of one host and was not read."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._counted: dict[BoundedYamux, int] = {}

    def fits(self, muxer: BoundedYamux, more_bytes: int) -> bool:
        """Whether there is room for more bytes on a connection; counts them if so."""
        if muxer in self._counted and self._takes(muxer, more_bytes):
            return True
        # A connection is new, or room is short: what was read, or has ended, counts no more.
        for each in list(self._counted):
            self._takes(each, 0)
        return self._takes(muxer, more_bytes)

    def _takes(self, muxer: BoundedYamux, more_bytes: int) -> bool:
        peer_id = str(muxer.peer_id)
        self._held.give_back(peer_id, self._counted.pop(muxer, 0))
        wanted = muxer.unread_bytes + more_bytes
        fits = self._held.take(peer_id, wanted)
        if fits and not muxer.event_closed.is_set():
            self._counted[muxer] = wanted
        elif fits:
            self._held.give_back(peer_id, wanted)
        return fits


class Door:
    """Takes TCP connections in, a few at a time of one address, until they end."""

    def __init__(self, network: Any, budget: Budget) -> None:
        self._network = network
        self._handshakes = budget.held(HANDSHAKES)
        self._connections = budget.held(CONNECTIONS)

    async def take(self, raw: Any, listened: Any) -> None:
        """Make a connection of what was accepted, and return when it is over."""
        where = neighbourhood_of(_host_of(raw))
        if not self._connections.take(where):
            await _close(raw)
            return
        try:
            muxed = await self._shake_hands(raw, listened, where)
            if muxed is not None:
                await muxed.event_closed.wait()
        finally:
            self._connections.give_back(where)
            await _close(raw)

    async def _shake_hands(self, raw: Any, listened: Any, where: str) -> Any:
        if not self._handshakes.take(where):
            return None
        try:
            return await self._network.upgrade_inbound_raw_conn(RawConnection(raw, False), listened)
        except Exception as error:  # noqa: BLE001  (whatever py-libp2p raises ends this one)
            _log.debug("a connection of %s came to nothing: %r", where, error)
            return None
        finally:
            self._handshakes.give_back(where)


async def _close(raw: Any) -> None:
    with suppress(Exception):
        await raw.close()


def _host_of(raw: Any) -> str:
    try:
        return str(raw.stream.socket.getpeername()[0])
    except (AttributeError, OSError):  # it has gone already
        return ""


def upgrades(keys: KeyPair, budget: Budget) -> dict[str, Any]:
    """Options of py-libp2p's host: noise and yamux alone.

    It also offers plain text, in which a peer id is claimed and not proved, and mplex, which has no
    windows.
    """
    room = UnreadRoom(budget.held(UNREAD_BYTES))
    bounded = type("HostsYamux", (BoundedYamux,), {"room": room})
    # It makes muxers of that name there, whatever class it is given.
    muxer_multistream.Yamux = bounded
    noise = NoiseTransport(keys, noise_privkey=create_new_key_pair().private_key)
    return {"sec_opt": {NOISE: noise}, "muxer_opt": {YAMUX: bounded}}


def restrain(host: Any, budget: Budget) -> None:
    """Bound what a host takes before anything of ours reads it."""
    MultiselectCommunicator.read = _read_line
    # Its own limits are lower than the budget's, and the same for strangers as for honest peers.
    host.get_network().set_resource_manager(None)
    host.get_network()._handle_inbound_connection = Door(host.get_network(), budget).take
    # Nothing here asks py-libp2p where peers are or what they speak: it would keep what they say.
    host.get_mux().remove_handler(ID_PUSH)
    host._schedule_identify = lambda *_, **__: None
