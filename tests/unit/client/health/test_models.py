"""The network's models on the page: what is served of each, and what asks and joins it."""

import random
from dataclasses import replace

import pytest

from client.health.app import Page
from client.health.history import History
from client.health.models import models_json
from client.health.prober import Prober, ProberConfig
from client.health.state import SwarmSnapshot, build_state
from client.swarm.swarm import Swarm, SwarmConfig
from client.text.tokenizer import ModelText
from coordinator.plans.catalogue.served import served_model
from dht.errors import NetworkError, UserError
from dht.messages.types import ModelSpec
from dht.networks.invitation import is_invitation, read_invitation
from testing.network import MemoryNetwork
from testing.paper_health import HUGE, LAYERS, MODEL, SMALL, record

TWO = {each.peer_id: each for each in (record(0, 0, LAYERS), record(1, 0, LAYERS))}


def test_what_is_served_is_said_of_each_and_the_watched_one_comes_first() -> None:
    one = {each.peer_id: replace(each, model=SMALL) for each in [record(0, 0, LAYERS)]}
    models = [served_model(HUGE, {}), served_model(SMALL, one), served_model(MODEL, TWO)]
    rows = models_json(models, HUGE, [], "")
    assert [row["name"] for row in rows] == [HUGE.name, SMALL.name, MODEL.name]
    assert [row["watched"] for row in rows] == [True, False, False]
    said = ["not whole", "healthy, but fragile", "healthy"]
    assert [row["verdict"] for row in rows] == said
    assert [(row["covered"], row["layers"]) for row in rows] == [(0, 80), (14, 14), (32, 32)]
    assert [row["replicas"] for row in rows] == [0, 1, 2]
    assert [row["tokens_per_s"] > 0 for row in rows] == [False, True, True]


def test_of_the_watched_model_only_believed_holders_count() -> None:
    depths = [1] * 31 + [0]
    (row,) = models_json([served_model(MODEL, TWO)], MODEL, depths, "")
    assert (row["replicas"], row["covered"], row["verdict"]) == (0, 31, "not whole")
    assert row["tokens_per_s"] == 0


def test_another_name_with_the_watched_models_fingerprint_is_not_the_watched_one() -> None:
    twin = replace(MODEL, name="a-stranger/m")
    assert twin.fingerprint == MODEL.fingerprint
    models = [served_model(twin, {}), served_model(MODEL, TWO)]
    own, other = models_json(models, MODEL, [2] * LAYERS, "")
    assert (own["name"], own["watched"], own["replicas"]) == (MODEL.name, True, 2)
    assert (other["name"], other["watched"], other["replicas"]) == (twin.name, False, 0)


def test_commands_name_the_model_its_fingerprint_and_the_invitation() -> None:
    at_hub, beside = (
        models_json([served_model(each, {})], None, [], "anabranch:WORD")[0]
        for each in (HUGE, SMALL)
    )
    pin = HUGE.fingerprint[:16]
    asks = f"anabranch chat anabranch:WORD --model {HUGE.name} --fingerprint {pin}"
    assert at_hub["ask"] == asks
    assert at_hub["join"] == f"anabranch join anabranch:WORD --model {HUGE.name}"
    assert beside["join"] == "anabranch join anabranch:WORD --model ./brook"
    (alone,) = models_json([served_model(SMALL, {})], None, [], "")
    assert alone["join"] == "anabranch join anabranch:… --model ./brook", "else it founds a network"
    assert is_invitation(alone["join"].split()[2]), "and what is pasted as it is says what it lacks"
    with pytest.raises(UserError, match="is no invitation"):
        read_invitation(alone["join"].split()[2])


@pytest.mark.parametrize(
    "name", ["x;reboot", "$(x)", "--yes", "../m", "a b", "203.0.113.7", "<b>", "\u202eevil", "x\ny"]
)
def test_no_command_is_made_of_a_name_that_a_shell_or_page_takes_for_more(name: str) -> None:
    state = build_state(
        SwarmSnapshot(
            model_name="m", now_unix_s=0, models=(served_model(replace(MODEL, name=name), {}),)
        )
    )
    (row,) = state["models"]
    assert row["ask"] == row["join"] == ""
    page = Page(lambda: state).render(state)
    assert "data-copy" not in page
    assert "203.0.113.7" not in page


async def test_what_cannot_be_read_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, network = 1000.0, [SMALL]

    async def specs(*_: object) -> tuple[ModelSpec, ...]:
        if not network:
            raise NetworkError("nobody answers")
        return tuple(network)

    monkeypatch.setattr("client.health.prober.network_models", specs)
    transport = MemoryNetwork(random.Random(0)).transport()
    monkeypatch.setattr(transport, "now", lambda: now_s)
    swarm = Swarm(transport, ModelText(name=MODEL.name), SwarmConfig())
    history = History(None)
    prober = Prober(swarm, history, ProberConfig())

    async def shown() -> list[str]:
        await prober._look_at_models()
        await prober.show()
        return [row["name"] for row in prober.state["models"]]

    assert await shown() == ["brook"]
    network.clear()
    now_s = 1060.0
    assert await shown() == ["brook"]
    now_s = 1301.0
    assert await shown() == []
    history.close()
