"""The one transport of this process, chosen by configuration and by what is installed."""

import importlib.util
import sys

from dht.transport.config import TransportConfig, TransportKind
from dht.transport.interface import Transport


async def connect(config: TransportConfig) -> Transport:
    """Take part in the network with ``config.kind`` of transport.

    Raises UserError for what the caller got wrong and NetworkError when nobody answers.
    """
    # Each of them is heavy, and they cannot be in one process: imported only when chosen.
    if chosen_transport(config.kind) is TransportKind.LIGHT:
        from dht.light.transport import LightTransport

        return await LightTransport.create(config)
    from dht.daemon.transport import HivemindTransport

    return await HivemindTransport.create(config)


def chosen_transport(kind: TransportKind) -> TransportKind:
    """What ``auto`` means on this machine. The daemon comes with hivemind, for Linux only."""
    if kind is not TransportKind.AUTO:
        return kind
    has_daemon = sys.platform == "linux" and importlib.util.find_spec("hivemind") is not None
    return TransportKind.DAEMON if has_daemon else TransportKind.LIGHT
