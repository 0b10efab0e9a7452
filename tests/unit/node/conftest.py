"""What the tests of a volunteer's machine share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from node.model import layer_range
from node.model.inspection.structure import inspect_model
from tests.structures import structures_are_found_once  # noqa: F401


@pytest.fixture
def found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that change what finds structures."""
    monkeypatch.setattr(layer_range, "inspect_model", inspect_model)


@pytest.fixture(scope="session", autouse=True)
def _triton_is_replaced_once() -> Iterator[None]:
    """Triton's interpreter replaces its language at every launch of a kernel, and again at every
    call of a function of that language within: most of what small kernels take.

    The replacements are always the same. Here they are made once, and put back at the end.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no test of this run imports kernels
        yield
        return
    replace: Callable[[Any], Any] = interpreter._patch_lang
    done: set[int] = set()
    stays = SimpleNamespace(restore=lambda: None)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def once(function: Any) -> Any:
            module = id(function.__globals__)  # by whose names it finds the language
            if module not in done:
                done.add(module)
                stack.callback(replace(function).restore)
            return stays

        patch.setattr(interpreter, "_patch_lang", once)
        yield
