"""A peer that gives up its layers gives their memory back to the machine."""

import ctypes
import gc
import sys
from pathlib import Path

import psutil
import pytest

from bench.random_model import make_llama
from node.engine import Engine, EngineConfig
from node.weights import WeightStore

LAYERS = 8


def has_malloc_trim() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(not has_malloc_trim(), reason="only glibc keeps what was freed until asked")
def test_what_layers_took_is_free_when_they_are_given_up(tmp_path: Path) -> None:
    store = WeightStore.open(str(make_llama(tmp_path, hidden=512, layers=LAYERS, vocab=256)))
    engine = Engine(EngineConfig(store=store, name="given up", memory_bytes=1 << 30))
    engine.load(0, 1)  # what torch keeps from its first computations on is there
    engine.unload()
    empty_bytes = resident_bytes()
    engine.load(0, LAYERS)
    weights_bytes = engine.spec.layer_bytes * LAYERS
    held_bytes = resident_bytes() - empty_bytes
    assert held_bytes > 0.9 * weights_bytes
    assert held_bytes < 1.25 * weights_bytes, "copies that were made on the way are gone"
    engine.load(0, 1)
    assert resident_bytes() - empty_bytes < 0.3 * weights_bytes, "layers that left are gone"
    engine.unload()
    assert resident_bytes() - empty_bytes < 0.2 * weights_bytes
