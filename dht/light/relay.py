"""Takes and makes calls through relays, for light peers.

py-libp2p reads and writes the messages of circuit relay v2, and secures and multiplexes the relayed
connection as go-libp2p expects it. Its own listener takes the relay's IP address for the caller's,
accepts any number of calls, and loses a call whose other side reads nothing for 5 s; so the steps
between its messages and its upgrade of the connection are here. The relay sees ciphertext.
"""

import logging
from contextlib import suppress
from typing import Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import OK, HopMessage, PeerId, StopMessage
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID, STOP_PROTOCOL_ID
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from dht.errors import NetworkError
from dht.light.stream import WINDOW_LOOKS_S

CALLS_MAX = 256
"""Maximum incoming calls through relays that are open or being opened."""
MESSAGE_LIMIT_S = 5.0
STALL_LIMIT_S = 30.0
"""Time for which the other side reads nothing after which a call is ended."""
_log = logging.getLogger(__name__)


class CircuitConnection(RawConnection):  # type: ignore[misc]  # py-libp2p is not seen
    """A stream to a relay, used as the raw connection to the peer behind it."""

    def __init__(self, stream: Any, *, initiator: bool, relay_id: ID) -> None:
        at = Multiaddr(f"/p2p/{relay_id}/p2p-circuit")
        super().__init__(stream, initiator, ConnectionType.RELAYED, [at])
        self._net = stream

    async def write(self, data: bytes) -> None:
        view, muxed = memoryview(data), self._net.muxed_stream
        # A cancelled half of a write would garble the call for all its streams.
        with trio.CancelScope(shield=True):
            while view:
                await self._wait_for_window()
                size_bytes = min(len(view), max(1, muxed.send_window))
                await super().write(bytes(view[:size_bytes]))
                view = view[size_bytes:]

    async def _wait_for_window(self) -> None:
        """Wait until the send window opens, where py-libp2p would give up after 5 s.

        For a connection that has ended, the next write raises the error.
        """
        muxed, look_s = self._net.muxed_stream, WINDOW_LOOKS_S[0]
        until_s = trio.current_time() + STALL_LIMIT_S
        while muxed.send_window <= 0 and not muxed.send_closed and not muxed.closed:
            if trio.current_time() > until_s:
                await _end(self._net)
                return
            await trio.sleep(look_s)
            look_s = min(2 * look_s, WINDOW_LOOKS_S[1])

    def get_remote_address(self) -> None:
        """None: the address is unknown, since the relay's is not the caller's."""
        return


class Circuits:
    """Takes calls through relays, and makes them. Runs in trio, as all of py-libp2p."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._open = 0

    def listen(self) -> None:
        """Take calls from now on; a relay passes them on once a slot is reserved
        (:mod:`dht.transport.relay_reservation`)."""
        self._host.set_stream_handler(STOP_PROTOCOL_ID, self._take)

    async def dial(self, relay_id: ID, peer_id: ID) -> None:
        """Connect to a peer through a relay to which there is a connection.

        Raises NetworkError when the relay refuses. The caller sets the time limit.
        """
        stream = await self._host.new_stream(relay_id, [PROTOCOL_ID])
        try:
            wanted = PeerId(id=peer_id.to_bytes())
            await write_delimited_msg(stream, HopMessage(type=HopMessage.CONNECT, peer=wanted))
            answer = await read_delimited_msg(stream, HopMessage)
            if answer.type != HopMessage.STATUS or answer.status != OK:
                raise NetworkError(f"relay {relay_id} passes nothing on: status {answer.status}")
            raw = CircuitConnection(stream, initiator=True, relay_id=relay_id)
            await self._host.upgrade_outbound_connection(raw, peer_id)
        except BaseException:
            await _end(stream)
            raise

    async def _take(self, stream: Any) -> None:
        """Take one call, and return when it is over. Raises nothing but a cancellation."""
        relay_id = stream.muxed_conn.peer_id
        # A stream without a remote address belongs to a relayed connection itself.
        if self._open >= CALLS_MAX or stream.get_remote_address() is None:
            await _end(stream)
            return
        self._open += 1
        try:
            with trio.fail_after(MESSAGE_LIMIT_S):
                message = await read_delimited_msg(stream, StopMessage)
                if message.type != StopMessage.CONNECT:
                    raise NetworkError(f"a relay asks for {message.type}")
                await write_delimited_msg(stream, StopMessage(type=StopMessage.STATUS, status=OK))
            # The upgrade proves the caller's peer id, whatever the relay said.
            raw = CircuitConnection(stream, initiator=False, relay_id=relay_id)
            where = raw.get_transport_addresses()[0]
            muxed = await self._host.upgrade_inbound_connection(raw, where)
            await muxed.event_closed.wait()
        except Exception as error:  # noqa: BLE001  (whatever py-libp2p raises ends this call)
            _log.debug("a call through relay %s failed: %r", relay_id, error)
        finally:
            self._open -= 1
            await _end(stream)


async def _end(stream: Any) -> None:
    """Reset a stream in any state; an error here would end all streams of the relay."""
    with trio.move_on_after(MESSAGE_LIMIT_S, shield=True), suppress(Exception):
        await stream.reset()
