"""With what the libp2p daemon is started, and whose its sockets are."""

from pathlib import Path

import pytest

from dht.daemon.process import DaemonConfig
from dht.identity.peer_id import Identity

LISTENING = ("/ip4/1.2.3.4/tcp/5",)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("nat_traversal", [True, False])
def test_the_daemon_keeps_nothing_for_strangers_and_passes_nothing_on(
    listens: bool, nat_traversal: bool
) -> None:
    config = DaemonConfig(
        binary=Path("p2pd"),
        identity=Identity(b"i" * 32),
        host_addresses=LISTENING if listens else (),
        nat_traversal=nat_traversal,
    )
    arguments = _arguments(config, Path("control"), Path("identity"))
    assert not any(each.startswith("-dht") for each in arguments), "its own DHT takes any record"
    assert "-relayService=0" in arguments
    assert not any("forceReachability" in each for each in arguments)
