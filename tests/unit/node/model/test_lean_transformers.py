"""What a peer does without torch's compiler and SymPy comes out as it does with them."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
from testing.paths import ROOT
from testing.tiny_families import FAMILIES, make

STUDY = """
import json, sys
from node.model import lean_transformers
lean_transformers.prepare_transformers()
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore
found = {}
for name, directory in json.load(sys.stdin).items():
    structure = repr(ModelLayout.of(WeightStore.open(directory), "float32").structure)
    needless = {"torch._dynamo", "sympy", *lean_transformers.OPTIONAL}
    heavy = sorted(module for module in needless if module in sys.modules)
    found[name] = [structure, heavy]
print(json.dumps(found))
"""


def _placeless(text: str) -> str:
    """Without where functions lie in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@pytest.mark.slow
def test_every_family_is_understood_without_the_compiler(tmp_path: Path) -> None:
    """One of each kind of model, whatever its settings: what differs is its code."""
    directories = {}
    kinds = {kind: name for name, (kind, _) in reversed(FAMILIES.items())}
    for number, name in enumerate(kinds.values()):
        directory = tmp_path / str(number)
        make(directory, name)
        directories[name] = str(directory)
    done = subprocess.run(
        [sys.executable, "-c", STUDY],
        cwd=ROOT,
        input=json.dumps(directories),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lean = json.loads(done.stdout)
    assert {name: heavy for name, (_, heavy) in lean.items() if heavy} == {}
    importlib.import_module("torch._dynamo")
    for name, directory in directories.items():
        layout = ModelLayout.of(WeightStore.open(directory), "float32")
        assert _placeless(lean[name][0]) == _placeless(repr(layout.structure)), name
