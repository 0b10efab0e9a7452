"""transformers' modelling code without the libraries that a peer never uses.

Importing it pulls in SciPy (for the losses of object detectors) and torch's compiler with SymPy
(for decorators of kernels, and for masks that paged attention does not build): some 100 MiB and
more than a second in every peer. ``bench/footprint.py`` measures what a peer costs.

For processes that only serve: in one that uses transformers in other ways too, import transformers
first, and :func:`prepare` does nothing.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

OPTIONAL = (
    "is_scipy_available",
    "is_torch_distributed_available",
    "is_torchao_available",
    "is_bitsandbytes_available",
)
"""Questions of transformers about optional libraries that are answered with no: those for
quantised checkpoints import torch's compiler, whether or not such a checkpoint is served."""
MODULES = (
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
)
COMPILER = "torch._dynamo"
TRACING = "torch._dynamo._trace_wrapped_higher_order_op"


def prepare() -> None:
    """Import the modelling code, lean. Does nothing where it was imported already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    asked = [(module, name) for module in _asked_modules() for name in OPTIONAL]
    answers = [getattr(module, name) for module, name in asked]
    try:
        for module, name in asked:
            setattr(module, name, lambda: False)
        with _no_compiler():
            for name in MODULES:
                importlib.import_module(name)
    finally:
        for (module, name), answer in zip(asked, answers, strict=True):
            setattr(module, name, answer)


def _asked_modules() -> tuple[ModuleType, ...]:
    """Where modelling code takes the answers from."""
    names = ("transformers.utils", "transformers.utils.import_utils")
    return tuple(importlib.import_module(name) for name in names)


@contextmanager
def _no_compiler() -> Iterator[None]:
    """While active, torch's compiler is a module whose decorators change nothing.

    Afterwards whoever asks for the compiler gets the real one.
    """
    if COMPILER in sys.modules:
        yield
        return
    import torch

    stub, tracing = _Undecorating(COMPILER), ModuleType(TRACING)
    stub.__path__ = []
    vars(tracing)["TransformGetItemToIndex"] = nullcontext
    sys.modules.update({COMPILER: stub, TRACING: tracing})
    vars(torch)["_dynamo"] = stub
    try:
        yield
    finally:
        del sys.modules[COMPILER], sys.modules[TRACING]
        del vars(torch)["_dynamo"]


class _Undecorating(ModuleType):
    """Whatever is asked of it is a decorator, or makes one, that returns functions as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    if callable(function):
        return function
    passed: Callable[[Any], Any] = lambda decorated: decorated  # noqa: E731
    return passed
