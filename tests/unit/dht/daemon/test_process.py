"""With what the libp2p daemon is started."""

from pathlib import Path

import pytest

from dht.daemon.process import DaemonConfig, _arguments, _environment
from dht.identity.peer_id import Identity

LISTENING = ("/ip4/1.2.3.4/tcp/5",)


def config(
    *, listens: bool = True, nat_traversal: bool = True, relays: bool = True
) -> DaemonConfig:
    return DaemonConfig(
        binary=Path("p2pd"),
        identity=Identity(b"i" * 32),
        host_addresses=LISTENING if listens else (),
        nat_traversal=nat_traversal,
        relays=relays,
    )


def test_who_relays_takes_itself_for_public_and_bounds_what_it_passes_on() -> None:
    arguments = _arguments(config(), Path("control"), Path("identity"))
    assert {"-relayService=1", "-forceReachabilityPublic=1"} < set(arguments)
    assert "-relayBufferSize=32768" in arguments
    assert _environment(config())["GOMAXPROCS"] == "1"


@pytest.mark.parametrize("without", ["listens", "nat_traversal", "relays"])
def test_others_do_not(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    other = config(**{without: False})
    arguments = _arguments(other, Path("control"), Path("identity"))
    assert not any("Public" in each or "relayService" in each for each in arguments)
    assert "GOMAXPROCS" not in _environment(other)
