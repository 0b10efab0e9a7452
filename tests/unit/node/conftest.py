"""What the tests of a volunteer's machine share."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from node.model import layer_range

_STRUCTURES: dict[tuple[Any, ...], Any] = {}


@pytest.fixture(scope="session", autouse=True)
def _structures_are_found_once() -> Iterator[None]:
    """To find a tiny model's structure takes nearly half of what its engine takes.

    It follows from the model's class and configuration, whatever its weights, and must be the same
    with torch's compiler and without.
    """
    inspect = layer_range.inspect_model

    def remembered(model: Any, stack: str, **given: Any) -> Any:
        config = model.config.to_json_string(use_diff=False)
        compiler = "torch._dynamo" in sys.modules
        key = (type(model), config, compiler, stack, *given.values())
        if key not in _STRUCTURES:
            _STRUCTURES[key] = inspect(model, stack, **given)
        return _STRUCTURES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_range, "inspect_model", remembered)
        yield
