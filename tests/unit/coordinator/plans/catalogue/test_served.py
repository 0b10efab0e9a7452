"""The models of a network, counted from their peers' records."""

from dataclasses import replace

import pytest

from coordinator.plans.catalogue.need import needed_elsewhere, needs
from coordinator.plans.catalogue.served import (
    MODELS_MAX,
    announced_models,
    listed,
    only_model,
    served_model,
)
from dht.errors import UserError
from dht.messages.types import ModelRecord, ModelSpec, NodeState, Reach
from tests.unit.records import MODEL, record_of

OTHER = replace(MODEL, root="e")
SECOND = replace(MODEL, name="second", layers=4)


def entry(peer_id: str, model: ModelSpec = MODEL) -> ModelRecord:
    return ModelRecord(peer_id=peer_id, model=model, start=0, end=2)


def test_each_model_is_listed_once_the_named_peers_first() -> None:
    records = {
        "a": entry("a"),
        "b": entry("b"),
        "c": entry("c", SECOND),
        "d": entry("d", OTHER),
    }
    assert announced_models(records)[0] == MODEL
    assert set(announced_models(records)) == {MODEL, SECOND, OTHER}
    assert announced_models(records, ("d",))[0] == OTHER
    assert "fingerprint" in listed(announced_models(records))


def test_a_flood_of_models_is_bounded_and_hides_no_named_peers_model() -> None:
    flood = {f"x{n}": entry(f"x{n}", replace(MODEL, name=f"m{n // 2}")) for n in range(4096)}
    models = announced_models({**flood, "mine": entry("mine", SECOND)}, ("mine",))
    assert len(models) == MODELS_MAX
    assert models[0] == SECOND


@pytest.mark.parametrize("name", ["/etc", "../x", "a\x1b[2J", "", "-rf", "a b", "ab\u202e"])
def test_a_name_that_is_no_name_is_left_out(name: str) -> None:
    assert announced_models({"a": entry("a", replace(MODEL, name=name))}) == ()


def test_what_is_served_is_counted_from_node_records() -> None:
    nodes = {
        "a": record_of("a", 0, 5, kv_tokens_free=100, kv_tokens_wanted=7),
        "b": record_of("b", 3, 8, kv_tokens_free=40, kv_tokens_wanted=5),
        "c": record_of("c", 0, 8, state=NodeState.LOADING),
        "waits": record_of("waits"),
        "closed": record_of("closed", 0, 8, reach=Reach.NONE),
        "other": record_of("other", 0, 8, model=OTHER),
        "too far": record_of("too far", 6, 900),
    }
    served = served_model(MODEL, nodes)
    assert served.holders == (1, 1, 1, 2, 2, 1, 2, 2)
    assert served.coming == (2, 2, 2, 3, 3, 2, 3, 3)
    assert (served.replicas, served.covered, served.peers) == (1, 8, 5)
    assert served.tokens_per_s == 100.0
    assert served.kv_tokens_free == 40
    assert served.kv_tokens_wanted == 12


def test_a_model_without_node_records_is_not_served() -> None:
    served = served_model(MODEL, {})
    assert (served.replicas, served.covered, served.tokens_per_s) == (0, 0, 0.0)


def test_the_only_model_needs_no_name() -> None:
    assert only_model((MODEL,), "n") is MODEL
    with pytest.raises(UserError, match=r"second.*--model"):
        only_model((MODEL, SECOND), "n")
    with pytest.raises(UserError, match="no model"):
        only_model((), "n")


# Where a volunteer is needed

LAYER = MODEL.layer_bytes + MODEL.context_tokens * MODEL.kv_bytes_per_token_layer


def test_the_model_with_fewest_holders_comes_first() -> None:
    often = served_model(MODEL, {p: record_of(p, 0, 8) for p in ("a", "b", "c")})
    rare = served_model(SECOND, {"d": record_of("d", 0, 4, model=SECOND)})
    lost = served_model(OTHER, {})
    found = needs((often, rare, lost), 100 * LAYER)
    assert [need.model for need in found] == [OTHER, SECOND, MODEL]
    assert [need.holders for need in found] == [0, 1, 3]


def test_it_goes_to_the_layers_that_are_held_least() -> None:
    served = served_model(MODEL, {"a": record_of("a", 0, 3), "b": record_of("b", 5, 8)})
    (need,) = needs((served,), 2 * LAYER)
    assert (need.start, need.end, need.holders) == (3, 5, 0)


def test_of_two_that_lack_layers_the_one_that_it_makes_whole_comes_first() -> None:
    nearly = served_model(MODEL, {"a": record_of("a", 0, 6)})
    empty = served_model(OTHER, {})
    found = needs((empty, nearly), 3 * LAYER)
    assert found[0].model == MODEL
    assert found[0].start <= 6
    assert found[0].end == 8


def test_what_does_not_fit_is_no_need_of_it() -> None:
    assert needs((served_model(MODEL, {}),), LAYER - 1) == ()


def test_a_volunteer_moves_only_where_a_holder_is_lost_and_its_own_model_stays_whole() -> None:
    twice = served_model(MODEL, {p: record_of(p, 0, 8) for p in ("a", "b")})
    once = served_model(MODEL, {"a": record_of("a", 0, 8), "b": record_of("b", 0, 2)})
    lost, held = (
        served_model(SECOND, {}),
        served_model(OTHER, {"c": record_of("c", 0, 8, model=OTHER)}),
    )
    much = 100 * LAYER
    need = needed_elsewhere(twice, 0, 8, (held, lost), much)
    assert need is not None
    assert need.model == SECOND
    assert needed_elsewhere(once, 0, 8, (lost,), much) is None
    assert needed_elsewhere(once, 0, 2, (lost,), much) is not None
    assert needed_elsewhere(twice, 0, 8, (held,), much) is None
    assert needed_elsewhere(twice, 0, 8, (lost,), LAYER - 1) is None
    coming = served_model(
        SECOND, {"d": record_of("d", 0, 4, model=SECOND, state=NodeState.LOADING)}
    )
    assert needed_elsewhere(twice, 0, 8, (coming,), much) is None


# What is asked for

ROOMY = {"memory_bytes": 8 * MODEL.layer_bytes * 2, "kv_tokens_free": 0}


def test_of_two_models_held_alike_the_one_that_is_waited_for_comes_first() -> None:
    quiet = served_model(MODEL, {p: record_of(p, 0, 8, **ROOMY) for p in "ab"})
    busy = {p: record_of(p, 0, 8, model=OTHER, **ROOMY, kv_tokens_wanted=500) for p in "cd"}
    asked = served_model(OTHER, busy)
    assert [need.model for need in needs((quiet, asked), 100 * LAYER)] == [OTHER, MODEL]
    lost = served_model(SECOND, {})
    assert needs((asked, lost), 100 * LAYER)[0].model == SECOND, "a lost layer comes before it"


def test_it_goes_to_the_layers_where_sessions_wait() -> None:
    nodes = {"a": record_of("a", 0, 4, **ROOMY), "b": record_of("b", 4, 8, **ROOMY)}
    nodes["b"] = replace(nodes["b"], kv_tokens_wanted=1 << 20)
    (need,) = needs((served_model(MODEL, nodes),), 5 * LAYER)
    assert need.start <= 4
    assert need.end == 8


def test_who_invents_demand_draws_nobody_away() -> None:
    honest = {p: record_of(p, 0, 8, **ROOMY) for p in "ab"}
    liars = {f"x{n}": record_of(f"x{n}", 0, 8, **ROOMY, kv_tokens_wanted=1 << 50) for n in range(9)}
    before = served_model(MODEL, honest).relieved
    after = served_model(MODEL, honest | liars).relieved
    assert all(a >= b for a, b in zip(after, before, strict=True))
