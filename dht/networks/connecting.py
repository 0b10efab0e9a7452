"""Chooses the one transport of this process, by configuration and by what is installed."""

import importlib.util
import sys
from collections.abc import Sequence

from dht.transport.config import TransportConfig, TransportKind
from dht.transport.interface import Transport


async def connect(config: TransportConfig) -> Transport:
    """Join the network with the transport of ``config.kind``.

    Raises UserError for the caller's mistakes and NetworkError when no peer answers.
    """
    # Imported only when chosen: each is heavy, and both cannot be in one process.
    if chosen_transport(config.kind) is TransportKind.LIGHT:
        from dht.light.transport import LightTransport

        return await LightTransport.create(config)
    from dht.daemon.transport import HivemindTransport

    return await HivemindTransport.create(config)


async def observe(
    initial_peers: Sequence[str], kind: TransportKind = TransportKind.AUTO
) -> Transport:
    """Reach the network through ``initial_peers``, under a new identity, without serving anybody.

    Raises as :func:`connect`.
    """
    from dht.identity.peer_id import Identity

    return await connect(
        TransportConfig(
            identity=Identity.generate(),
            kind=kind,
            initial_peers=tuple(initial_peers),
            client_mode=True,
        )
    )


def chosen_transport(kind: TransportKind) -> TransportKind:
    """``kind`` with ``auto`` resolved: the daemon where hivemind is installed, on Linux only."""
    if kind is not TransportKind.AUTO:
        return kind
    has_daemon = sys.platform == "linux" and importlib.util.find_spec("hivemind") is not None
    return TransportKind.DAEMON if has_daemon else TransportKind.LIGHT
