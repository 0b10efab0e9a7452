"""The first join on a machine that knows no network and was told no model."""

import asyncio
import io
import sys
from argparse import Namespace
from collections.abc import Callable

import pytest

from dht.errors import NetworkError, UserError
from dht.identity.peer_id import Identity
from dht.networks.local_network import Offer, offer_of_peer
from node.owner.reporter import Reporter
from node.peer import first_steps, join_options
from node.peer.first_steps import BIGGER, BUNDLED, begin_alone, next_steps, whole_here

GIB = 1 << 30
ADDRESS = f"/ip4/192.168.0.7/tcp/31337/p2p/{Identity(b'1' * 32).peer_id}"
Begin = Callable[..., tuple[Namespace, str]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Begin:
    """Begins as ``join --cpu`` does where peers here offer something."""
    monkeypatch.setenv("ANABRANCH_MEMORY", f"{tmp_path}/network.json")
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)

    def begun(offers: object, *words: str) -> tuple[Namespace, str]:
        def look() -> tuple[Offer, ...]:
            if isinstance(offers, Exception):
                raise offers
            return offers  # type: ignore[return-value]

        monkeypatch.setattr("dht.networks.mdns.look", look)
        identity = ["--identity", f"{tmp_path}/id.key"]
        monkeypatch.setattr(sys, "argv", ["join", "--cpu", *identity, *words])
        arguments = join_options.parse()
        assert arguments.alone
        out = io.StringIO()
        asyncio.run(begin_alone(arguments, Reporter(json_log=False, out=out)))
        return arguments, out.getvalue()

    return begun


def offered(model: str, network: str = "home") -> Offer:
    return offer_of_peer("oak", network, [ADDRESS], model, "cd" * 32)


def test_where_nobody_is_it_founds_a_network_with_the_bundled_model(begin: Begin) -> None:
    arguments, said = begin(())
    assert "looking on this network" in said
    assert "Founding a network with the bundled model" in said
    assert (arguments.model, arguments.model_name) == (str(BUNDLED), "brook")
    assert (arguments.initial_peers, arguments.bundled, arguments.local) == ([], True, True)


def test_on_no_network_it_founds_one_all_the_same(begin: Begin) -> None:
    arguments, said = begin(NetworkError("there is none"))
    assert "cannot be asked: there is none" in said
    assert arguments.bundled


def test_where_somebody_serves_it_joins(begin: Begin) -> None:
    arguments, said = begin((offered("brook", network="garden"),))
    assert "as offered here" in said
    assert (arguments.network, arguments.model) == ("garden", str(BUNDLED))
    assert ("cd" * 32).startswith(arguments.fingerprint or "no"), (
        "other weights under that name are refused"
    )
    assert (arguments.initial_peers, arguments.bundled) == ([ADDRESS], False)
    arguments, _ = begin((offered("org/large"),))
    assert (arguments.model, arguments.said_model) == ("", "org/large"), "the owner is asked"


def test_a_network_that_was_named_is_meant(begin: Begin) -> None:
    arguments, _ = begin((offered("brook", network="garden"),), "--network", "lab")
    assert (arguments.network, arguments.bundled) == ("lab", True)


def test_without_a_bundled_model_it_must_be_said(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_steps, "BUNDLED", BUNDLED / "nowhere")
    with pytest.raises(UserError, match="which model"):
        begin(())


@pytest.mark.parametrize(
    ("gib", "weight_bytes", "hub_id"),
    [
        (0.5, 2, None),
        (4, 2, "Qwen/Qwen3-0.6B"),
        (12, 2, "Qwen/Qwen3-4B"),
        (24, 2, "Qwen/Qwen3-8B"),
        (24, 4, "Qwen/Qwen3-4B"),
        (1000, 2, [*BIGGER][-1]),
    ],
)
def test_what_comes_next_fits_the_device(gib: float, weight_bytes: int, hub_id: str) -> None:
    assert whole_here(int(gib * GIB), weight_bytes) == hub_id
    text = next_steps(int(gib * GIB), {2: "bfloat16", 4: "float32"}[weight_bytes])
    assert f"anabranch join --model {hub_id or next(iter(BIGGER))}" in text
