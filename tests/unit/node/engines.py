"""Engines of tiny models, as most tests of a volunteer's machine want them."""

from pathlib import Path
from typing import Any

from node.engine.engine import Engine, EngineConfig
from node.weights.store import WeightStore


def opened(directory: Path, **config: Any) -> Engine:
    """An engine of the model in ``directory`` that has loaded no layer yet."""
    given: dict[str, Any] = {"name": "tiny", "memory_bytes": 64 << 20, **config}
    return Engine(EngineConfig(store=WeightStore.open(str(directory)), **given))


def loaded(directory: Path, start: int = 0, end: int | None = None, **config: Any) -> Engine:
    """One that holds layers ``[start, end)``, by default all."""
    engine = opened(directory, **config)
    engine.load(start, engine.spec.layers if end is None else end)
    return engine
