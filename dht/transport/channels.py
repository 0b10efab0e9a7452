"""Every protocol on which a stranger can open a stream to a peer, and the limits that bound it.

A test starts the peers of each transport, asks them which protocols they speak, and fails for one
that has no row here.
"""

from collections.abc import Mapping

from dht.budget import (
    CONNECTIONS,
    DHT_BULK_STORES,
    DHT_FIND_BYTES,
    DHT_FOUND_BYTES,
    DHT_PINGS,
    DHT_STORE_BYTES,
    DHT_STORES,
    DIALS,
    DIALS_BACK,
    DIALS_BACK_OPEN,
    DIALS_BACK_TO,
    FRAME_BYTES,
    HANDSHAKES,
    LAYER_CHECKS,
    OPENS,
    PINGS,
    PLAN_BYTES,
    PROBE_BYTES,
    RECORD_BYTES,
    RECORD_REQUESTS,
    RECORD_SEARCHES,
    RECORD_STORES,
    RECORD_STREAMS,
    RELAY_BYTES,
    RELAY_CALLS,
    RELAY_SLOTS,
    REQUESTS,
    ROW_BYTES,
    STREAMS,
    TEXT_BYTES,
    TEXT_STREAMS,
    UNREAD_BYTES,
    Limit,
)
from dht.transport.interface import (
    HOP_PROTOCOL,
    LAYERS_PROTOCOL,
    PLAN_PROTOCOL,
    PROBE_PROTOCOL,
    REACH_PROTOCOL,
    RECORDS_PROTOCOL,
    RELAY_PROTOCOL,
    RELAY_STOP_PROTOCOL,
    SESSION_PROTOCOL,
    TEXT_PROTOCOL,
    TOKENS_PROTOCOL,
)

CHANNELS: Mapping[str, tuple[Limit, ...]] = {
    SESSION_PROTOCOL: (STREAMS, FRAME_BYTES, PINGS, OPENS),
    TOKENS_PROTOCOL: (STREAMS, FRAME_BYTES, PINGS),
    HOP_PROTOCOL: (STREAMS, FRAME_BYTES, ROW_BYTES, PINGS, OPENS, DIALS),
    PROBE_PROTOCOL: (STREAMS, REQUESTS, PROBE_BYTES),
    PLAN_PROTOCOL: (STREAMS, REQUESTS, PLAN_BYTES),
    REACH_PROTOCOL: (STREAMS, REQUESTS, DIALS_BACK_OPEN, DIALS_BACK, DIALS_BACK_TO),
    LAYERS_PROTOCOL: (STREAMS, REQUESTS, LAYER_CHECKS),
    RECORDS_PROTOCOL: (
        STREAMS,
        RECORD_STREAMS,
        RECORD_REQUESTS,
        RECORD_BYTES,
        RECORD_STORES,
        RECORD_SEARCHES,
    ),
    TEXT_PROTOCOL: (STREAMS, REQUESTS, TEXT_STREAMS, TEXT_BYTES),
    RELAY_PROTOCOL: (STREAMS, RELAY_SLOTS, RELAY_CALLS, RELAY_BYTES),
    "DHTProtocol.rpc_ping": (DHT_PINGS,),
    "DHTProtocol.rpc_store": (DHT_STORES, DHT_STORE_BYTES, DHT_BULK_STORES),
    "DHTProtocol.rpc_find": (DHT_FIND_BYTES, DHT_FOUND_BYTES),
    "connections to a light peer": (HANDSHAKES, CONNECTIONS, UNREAD_BYTES),
}
"""Our own protocols, hivemind's calls as we make and answer them, and what lies below them."""

LIBRARIES: Mapping[str, str] = {
    "/ipfs/kad/1.0.0": "libp2p's own DHT, by which a daemon finds where another peer listens; what"
    " strangers leave there is bounded by the daemon's collector alone (see what is not protected)",
    "/ipfs/id/1.0.0": "libp2p tells its protocols and addresses, 2 KiB",
    "/ipfs/id/push/1.0.0": "libp2p hears of the other's protocols and addresses, 8 KiB at most",
    "/ipfs/ping/1.0.0": "libp2p echoes 32 bytes at a time",
    "/libp2p/autonat/1.0.0": "go-libp2p dials back whoever asks, 3 times a minute for a peer and 30"
    " in all, at the address that it comes from",
    RELAY_STOP_PROTOCOL: "a call through a relay: a connection like others; a light peer takes 256",
}
"""Protocols that libp2p answers itself, with what bounds them there."""
