"""Which addresses the page gives to strangers, and which it keeps."""

import sys
from dataclasses import replace
from typing import Any

import pytest

import client.health.__main__ as command
from client.health.app import Page
from client.health.inviting import page_invitation
from client.health.models import NO_WORD
from client.health.state import build_state
from dht.identity.peer_id import Identity
from dht.networks.invitation import invitation_to, read_invitation, text_of
from dht.networks.remembered import Remembered, remember
from testing.paper_health import healthy, observed, record

A, B, C = (Identity(bytes([n]) * 32).peer_id for n in range(3))
PUBLIC = f"/ip4/8.8.4.4/tcp/31337/p2p/{A}"
NAMED = f"/dns/swarm.example.org/tcp/31337/p2p/{B}"
THIRD = f"/ip6/2606:4700::1111/tcp/31337/p2p/{C}"
NEAR = (
    f"/ip4/127.0.0.1/tcp/31337/p2p/{A}",
    f"/ip6/::1/tcp/31337/p2p/{A}",
    f"/ip4/192.168.1.7/tcp/31337/p2p/{A}",
    f"/ip4/10.0.0.4/tcp/31337/p2p/{A}",
    f"/ip4/100.64.0.9/tcp/31337/p2p/{A}",
    f"/ip4/169.254.1.1/tcp/31337/p2p/{A}",
    f"/ip6/fd00::1/tcp/31337/p2p/{A}",
    f"/ip6/::ffff:192.168.1.7/tcp/31337/p2p/{A}",
    f"/dns/localhost/tcp/31337/p2p/{A}",
    f"/dns/gaming-pc/tcp/31337/p2p/{A}",
    f"/dns/gaming-pc.local/tcp/31337/p2p/{A}",
    f"/ip4/0.0.0.0/tcp/31337/p2p/{A}",
    f"{PUBLIC}/p2p-circuit/p2p/{B}",
)


@pytest.mark.parametrize("address", NEAR)
def test_no_address_of_a_home_or_of_one_machine_is_given_away(address: str) -> None:
    assert page_invitation("home", [address]) is None
    made = page_invitation("home", [address, PUBLIC])
    assert made is not None
    assert made.addresses == (PUBLIC,)


def test_the_first_two_public_addresses_are_shown_with_the_model() -> None:
    made = page_invitation("home", [NEAR[0], NAMED, PUBLIC, THIRD], "brook", "ab" * 32)
    assert made is not None
    assert made.addresses == (NAMED, PUBLIC)
    assert (made.network, made.model, made.fingerprint) == ("home", "brook", "ab" * 16)
    short = page_invitation("home", [PUBLIC], "brook", "ab" * 8)
    assert short is not None
    assert (short.model, short.fingerprint) == ("brook", ""), "too little for an invitation"
    assert page_invitation("home", [PUBLIC], "a directory") == page_invitation("home", [PUBLIC])
    assert page_invitation("no/name", [PUBLIC]) is None


def shown(monkeypatch: pytest.MonkeyPatch, *given: str) -> str:
    """What visitors are shown by a page that is started with these arguments."""
    monkeypatch.setattr(sys, "argv", ["page", *given])
    return command._invitation(command.parse(), "brook")


def test_the_command_invites_to_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", f"{tmp_path}/network.json")
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    given = ("--initial-peers", NEAR[2], PUBLIC)
    assert read_invitation(shown(monkeypatch, *given)).addresses == (PUBLIC,)
    said = capsys.readouterr().err
    assert "visitors are invited through /ip4/8.8.4.4/tcp/31337 (--invite none" in said
    assert shown(monkeypatch, *given, "--invite", "none") == ""
    assert "invited" not in capsys.readouterr().err
    own = text_of(invitation_to("home", NEAR[2:3]))
    assert shown(monkeypatch, *given, "--invite", own) == own, "who says so may show any"
    assert shown(monkeypatch, "--initial-peers", NEAR[0]) == ""
    assert "no public address was given" in capsys.readouterr().err
    word = text_of(invitation_to("home", [PUBLIC], "brook", "ab" * 32))
    assert shown(monkeypatch, word) == word


def test_of_remembered_addresses_only_the_one_that_was_given_once_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", f"{tmp_path}/network.json")
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)

    def with_memory(*addresses: str) -> str:
        home = Remembered(network="home", initial_peers=addresses, model="brook")
        remember(home, lambda _: None)
        return shown(monkeypatch)

    assert read_invitation(with_memory(PUBLIC, THIRD)).addresses == (PUBLIC,)
    assert with_memory(NEAR[2], THIRD) == "", "a volunteer's address is nobody's to give"


def test_the_page_says_what_its_commands_are_good_for() -> None:
    page = Page(lambda: {})
    assert "where this network is entered" in page.render(healthy())
    alone = build_state(replace(observed([record(0, 0, 32)]), invitation=""))
    text = page.render(alone)
    assert "stands for an invitation to this network" in text
    assert "anabranch chat --model" in text
    assert f"anabranch join {NO_WORD} --model" in text, "it would found a network of its own"
