"""A peer that gives up its layers gives their memory back to the machine."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from testing.paths import ROOT
from testing.random_model import make_llama

LAYERS = 8
LOADS = """
import gc, json, sys
import psutil
from node.engine.engine import Engine, EngineConfig
from node.weights.store import WeightStore

def resident_bytes():
    gc.collect()
    return psutil.Process().memory_info().rss

directory, layers = sys.argv[1], int(sys.argv[2])
store = WeightStore.open(directory)
engine = Engine(EngineConfig(store=store, name="given up", memory_bytes=1 << 30))
engine.load(0, 1)  # what torch keeps from its first computations on is there
engine.unload()
empty_bytes = resident_bytes()
found = {"weights": engine.spec.layer_bytes * layers}
engine.load(0, layers)
found["all"] = resident_bytes() - empty_bytes
engine.load(0, 1)
found["one"] = resident_bytes() - empty_bytes
engine.unload()
found["none"] = resident_bytes() - empty_bytes
print(json.dumps(found))
"""
"""In a process of its own: what others leave in this one would be counted."""


def has_malloc_trim() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not has_malloc_trim(), reason="only glibc keeps what was freed until asked")
def test_what_layers_took_is_free_when_they_are_given_up(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, hidden=512, layers=LAYERS, vocab=256)
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(directory), str(LAYERS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    weights = found["weights"]
    assert 0.9 * weights < found["all"] < 1.25 * weights, "copies made on the way are gone"
    assert found["one"] < 0.3 * weights, "layers that left are gone"
    assert found["none"] < 0.2 * weights
