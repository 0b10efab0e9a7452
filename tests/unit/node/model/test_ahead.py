"""Layers that look at later tokens are refused, where only trying them tells."""

from pathlib import Path

import pytest

from bench.every_family import made
from dht.errors import UserError
from node.engine.engine import Engine, EngineConfig
from node.weights.store import WeightStore


def test_layers_that_look_ahead_are_refused(tmp_path: Path) -> None:
    """RemBERT's are an encoder's unless its configuration says otherwise."""
    made("rembert", tmp_path)
    store = WeightStore.open(str(tmp_path))
    engine = Engine(EngineConfig(store=store, name="ahead", memory_bytes=64 << 20))
    with pytest.raises(UserError, match="its layers answer otherwise where rows come one by one"):
        engine.load(0, engine.spec.layers)
