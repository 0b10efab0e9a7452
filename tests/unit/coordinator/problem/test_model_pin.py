"""Which model a name means: what files say, then what named peers say, never what most say."""

from dataclasses import replace

import pytest

from coordinator.problem.model_pin import (
    ModelPin,
    allowed_models,
    checked_fingerprint,
    named_peers,
    other_weights,
    several,
)
from dht.errors import UserError
from dht.messages.types import ModelSpec, NodeRecord
from tests.unit.records import MODEL, record_of

MADE_UP = replace(MODEL, root="made up")
LONGER = replace(MODEL, layers=16)


def announced(*models: ModelSpec) -> dict[str, NodeRecord]:
    """The records of peers ``p0``, ``p1``, … that announce these models."""
    return {f"p{n}": record_of(f"p{n}", model=model) for n, model in enumerate(models)}


def test_who_has_other_weights_is_told_which_there_are() -> None:
    said = other_weights(ModelPin(fingerprint="ab" * 16), announced(MODEL, LONGER, MODEL))
    assert said.startswith(f" with fingerprint {'ab' * 8}; others do, with other weights")
    for model in (MODEL, LONGER):
        assert said.count(model.fingerprint[:16]) == 1
    assert "--fingerprint" in said
    assert other_weights(ModelPin(root="r"), announced(MODEL)).startswith(" with the same weights;")


def test_the_fingerprint_covers_root_and_sizes_alone() -> None:
    changed = [
        replace(MODEL, root="g"),
        LONGER,
        replace(MODEL, context_tokens=65),
        replace(MODEL, vocab=11),
    ]
    assert len({model.fingerprint for model in (MODEL, *changed)}) == 5
    assert replace(MODEL, layer_bytes=7, name="n").fingerprint == MODEL.fingerprint


@pytest.mark.parametrize("others", [1, 50])
def test_numbers_of_peers_do_not_choose(others: int) -> None:
    nodes = announced(MODEL, *[MADE_UP] * others)
    assert set(allowed_models(nodes, ModelPin())) == {MODEL, MADE_UP}
    assert allowed_models(nodes, ModelPin(root=MODEL.root)) == (MODEL,)
    assert allowed_models(nodes, ModelPin(fingerprint=MODEL.fingerprint)) == (MODEL,)
    assert allowed_models(nodes, ModelPin(fingerprint=MODEL.fingerprint[:16])) == (MODEL,)
    assert allowed_models(nodes, ModelPin(named=("gone", "p0", "p1"))) == (MODEL,)
    assert allowed_models(nodes, ModelPin(root=MODEL.root, named=("p1",))) == (MODEL,)


def test_sizes_under_the_right_root_are_told_apart() -> None:
    nodes = announced(MODEL, LONGER)
    assert set(allowed_models(nodes, ModelPin(root=MODEL.root))) == {MODEL, LONGER}
    assert allowed_models(nodes, ModelPin(fingerprint=MODEL.fingerprint)) == (MODEL,)


def test_several_models_are_named_by_their_fingerprints() -> None:
    models = tuple(replace(MODEL, root=f"{n}") for n in range(9))
    text = several("brook", models)
    assert "9 models as brook" in text
    assert text.count(", ") >= 4
    assert sum(model.fingerprint[:16] in text for model in models) == 4


def test_a_fingerprint_is_hex_and_long_enough() -> None:
    assert checked_fingerprint("") == ""
    assert checked_fingerprint(" " + "AB" * 8) == "ab" * 8
    for wrong in ("ab" * 7, "x" * 16, "a" * 65):
        with pytest.raises(UserError, match="no fingerprint"):
            checked_fingerprint(wrong)


def test_the_last_peer_of_an_address_is_named() -> None:
    addresses = ("/ip4/1.2.3.4/tcp/1/p2p/Relay/p2p-circuit/p2p/Far/", "/ip4/1.2.3.4/tcp/1/p2p/Near")
    assert named_peers(addresses) == ("Far", "Near")


def test_a_peer_of_several_addresses_is_named_once() -> None:
    addresses = ("/ip4/1.2.3.4/tcp/1/p2p/A", "/ip4/1.2.3.4/tcp/2/p2p/B", "/ip6/::1/tcp/1/p2p/A")
    assert named_peers(addresses) == ("A", "B")
