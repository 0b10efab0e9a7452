"""How a client enters a swarm whose peers are slow, gone, or never were."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from client.swarm import swarm
from client.swarm.narrator import SILENT_S, Narrator
from client.swarm.swarm import REFUSED_S, SwarmConfig
from dht.errors import NetworkError, UserError
from dht.networks.invitation import invitation_to, text_of
from dht.networks.remembered import Remembered, remember
from dht.transport.config import TransportKind
from dht.transport.interface import Transport
from testing.clock import run_virtual

PEER = "12D3KooWDRmLyUggxdMe4qjtx9uWy3yCjf4GRUJxMsbEATgXRznG"
ADDRESS = f"/ip4/192.0.2.1/tcp/31337/p2p/{PEER}"
ENTERED = cast(Transport, object())


def entering(
    monkeypatch: pytest.MonkeyPatch, attempts: Sequence[tuple[float, bool]], wait_s: float
) -> tuple[bool, float, list[str]]:
    """Whether a client comes in where attempts take these seconds and succeed or fail, the last
    one again and again; after how many seconds; and what it said."""
    made: list[int] = []
    said: list[str] = []

    async def observe(initial_peers: Sequence[str], kind: TransportKind) -> Transport:
        takes_s, succeeds = attempts[min(len(made), len(attempts) - 1)]
        made.append(1)
        await asyncio.sleep(takes_s)
        if not succeeds:
            raise NetworkError("nobody answers")
        return ENTERED

    async def body() -> tuple[bool, float]:
        loop = asyncio.get_running_loop()
        began_s, narrator = loop.time(), Narrator(said.append)
        try:
            found = await swarm._entered([ADDRESS], SwarmConfig(wait_s=wait_s), narrator)
        except NetworkError:
            return False, loop.time() - began_s
        return found is ENTERED, loop.time() - began_s

    monkeypatch.setattr(swarm, "observe", observe)
    came_in, took_s = run_virtual(body(), limit_s=1000.0)
    return came_in, took_s, said


def test_a_refusal_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entering(monkeypatch, [(REFUSED_S / 2, False)], 60.0) == (False, REFUSED_S / 2, [])


def test_who_answers_late_is_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    came_in, took_s, said = entering(monkeypatch, [(14.0, False), (8.0, True)], 60.0)
    assert (came_in, took_s) == (True, 22.0)
    first, second = (
        [f"still waiting after {n} s: no answer yet from peer {PEER[-8:]}" for n in seconds]
        for seconds in ((3, 6, 9, 12), (17, 20))
    )
    assert said == [*first, "waiting: nobody answers", *second]


def test_an_answer_in_time_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entering(monkeypatch, [(SILENT_S / 2, True)], 60.0) == (True, SILENT_S / 2, [])


@pytest.mark.parametrize(("wait_s", "took_s"), [(0.0, 15.0), (30.0, 30.0), (31.0, 45.0)])
def test_nobody_is_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, took_s: float
) -> None:
    came_in, after_s, _ = entering(monkeypatch, [(15.0, False)], wait_s)
    assert (came_in, after_s) == (False, took_s)


def test_a_program_may_say_an_invitation_addresses_or_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", str(tmp_path / "network.json"))
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    def meant(*typed: str, model: str = "", **config: str) -> tuple[list[str], str, str, str]:
        given = typed[0] if len(typed) == 1 else typed
        found = swarm._meant(given, model, SwarmConfig(**config), said.append)  # type: ignore[arg-type]
        return found[0], found[1], found[2].network, found[2].fingerprint

    invitation = text_of(invitation_to("lab", [ADDRESS], "brook", "ab" * 16))
    assert meant(ADDRESS, ADDRESS, model="m") == ([ADDRESS], "m", "anabranch", "")
    assert meant(ADDRESS) == ([ADDRESS], "", "anabranch", "")
    assert said == []
    none: Any
    for none in (None, 5, b"/ip4", [None], [5]):
        with pytest.raises(UserError, match="is no invitation and no list of addresses"):
            meant(none)
    assert meant(f" {invitation}\n") == meant(invitation)  # as it is read from a file
    assert meant(invitation) == ([ADDRESS], "brook", "lab", "ab" * 16)
    assert meant(invitation, model="org/other") == ([ADDRESS], "org/other", "lab", "")
    with pytest.raises(UserError, match="network lab"):
        meant(invitation, network="home")
    with pytest.raises(UserError, match="which network"):
        meant()
    remember(
        Remembered(network="home", initial_peers=(ADDRESS,), model="brook", model_name="brook"),
        lambda _: None,
    )
    assert meant() == ([ADDRESS], "brook", "home", "")
    assert "remembered in" in said[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait_s", -1),
        ("wait_s", math.nan),
        ("wait_s", "5"),
        ("piece_tokens_max", 0),
        ("transport", "x"),
        ("transport", None),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} is"):
        SwarmConfig(**{name: value})


def test_a_transport_may_be_named() -> None:
    assert SwarmConfig(transport=cast(Any, "light")).transport is TransportKind.LIGHT
