"""Structures of tiny models, found once in a run of tests that build engines.

A folder's ``conftest.py`` imports the fixture, which then holds for all its tests.
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from node.model import layer_range
from node.model.inspection.structure import inspect_model

_STRUCTURES: dict[str, Any] = {}


@pytest.fixture(scope="session", autouse=True)
def structures_are_found_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """To find a tiny model's structure takes nearly half of what its engine takes.

    It follows from the model's class and configuration, whatever its weights, and must be the same
    with torch's compiler and without. All workers of a run share what was found, as far as it can
    be written down.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "structures"
    shared.mkdir(exist_ok=True)

    def remembered(model: Any, stack: str, **given: Any) -> Any:
        code = {getattr(type(m).forward, "__module__", "").split(".")[0] for m in model.modules()}
        if code - {"transformers", "torch", "node"}:  # a test's
            return inspect_model(model, stack, **given)
        said = model.config.to_json_string(use_diff=False).splitlines()
        config = [line for line in said if '"_name_or_path"' not in line]  # a new one each time
        compiler = "torch._dynamo" in sys.modules
        key = repr((type(model), config, compiler, stack, sorted(given.items())))
        if key not in _STRUCTURES:
            path = shared / hashlib.sha256(key.encode()).hexdigest()
            _STRUCTURES[key] = kept(path, lambda: inspect_model(model, stack, **given))
        return _STRUCTURES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_range, "inspect_model", remembered)
        yield


def kept(path: Path, find: Callable[[], Any]) -> Any:
    """What another worker wrote to ``path``, or what is found, which is written there."""
    if path.exists():
        return pickle.loads(path.read_bytes())  # noqa: S301  written below
    found = find()
    with suppress(AttributeError, TypeError, pickle.PicklingError):  # functions without a name
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(pickle.dumps(found))
        beside.replace(path)
    return found
