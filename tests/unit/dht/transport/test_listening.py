"""Where a peer listens, on machines with addresses of either version."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from dht.errors import UserError
from dht.transport.config import any_host, listen_address

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        (["127.0.0.1", "::1"], "0.0.0.0"),  # noqa: S104
        (["127.0.0.1", "::1", "192.168.0.7", "fe80::1%eth0"], "0.0.0.0"),  # noqa: S104
        (["127.0.0.1", "::1", "192.168.0.7", "2001:db8::7"], "0.0.0.0"),  # noqa: S104
        (["127.0.0.1", "::1", "2001:db8::7", "fe80::1%eth0"], "::"),
        (["127.0.0.1", "::1", "fe80::1%eth0"], "0.0.0.0"),  # noqa: S104
        ([], "0.0.0.0"),  # noqa: S104
    ],
)
def test_a_machine_with_ipv6_alone_listens_there(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], host: str
) -> None:
    found = [SimpleNamespace(family=V6 if ":" in each else V4, address=each) for each in addresses]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found})
    assert any_host() == host


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "/ip4/0.0.0.0/tcp/5"),  # noqa: S104
        ("::", "/ip6/::/tcp/5"),
        ("2001:db8::7", "/ip6/2001:db8::7/tcp/5"),
    ],
)
def test_the_kind_of_address_follows_from_the_host(host: str, address: str) -> None:
    assert listen_address(host, 5) == address


@pytest.mark.parametrize("host", ["my-pc", "fe80::1%eth0", "1.2.3", "[::]", ""])
def test_any_other_host_is_refused_by_name(host: str) -> None:
    with pytest.raises(UserError, match="--host takes an IP address"):
        listen_address(host, 5)
