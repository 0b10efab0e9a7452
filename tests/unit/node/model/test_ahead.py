"""Layers that look at later tokens are refused, by their masks or where only trying them tells."""

from pathlib import Path

import pytest
import torch

from bench.families.every_family import small_config, write_random
from dht.errors import UserError
from node.attention.mask_rules import CAUSAL, MaskRule
from node.engine.engine import Engine, EngineConfig
from node.weights.store import WeightStore

BY_TRIAL = "its layers answer otherwise where rows come one by one"


def load(store: WeightStore) -> None:
    """Load a whole model."""
    engine = Engine(EngineConfig(store=store, name="ahead", memory_bytes=64 << 20))
    engine.load(0, engine.spec.layers)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("electra", "its layers attend to later tokens"),  # its logits hardly differ
        ("bert", "its layers attend to later tokens"),
        ("rembert", BY_TRIAL),  # its attention is its own
        ("big_bird", BY_TRIAL),
    ],
)
def test_layers_that_look_ahead_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    """These are encoders unless their configuration says otherwise."""
    write_random(small_config(name, {"is_decoder": False}), tmp_path)
    store = WeightStore.open(str(tmp_path))
    with pytest.raises(UserError, match=reason):
        load(store)


def test_a_rule_says_whether_rows_see_later_keys() -> None:
    def chunks(_: int, __: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key // 4 == query // 4)

    def near(_: int, __: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key - query).abs() < 4

    assert not CAUSAL.looks_ahead
    assert not MaskRule(predicate=chunks).looks_ahead
    assert not MaskRule(window=5, predicate=chunks).looks_ahead
    assert MaskRule(predicate=near).looks_ahead
    assert MaskRule(window=4, predicate=near).looks_ahead
    assert MaskRule(predicate=lambda *_: True).looks_ahead
