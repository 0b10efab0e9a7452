"""Imports transformers' modelling code without the libraries that a peer never uses.

A plain import pulls in SciPy (for the losses of object detectors), image and text processing, and
torch's compiler with SymPy (for decorators of kernels, and for masks that paged attention does not
build): some 100 MiB and a second or two in every peer. So does running a model on the meta device,
as studying its structure does (:mod:`node.model.inspection.structure`). ``bench speed.footprint``
measures what a peer costs.

This is for processes that only serve. In a process that also uses transformers in other ways,
import transformers first; then :func:`prepare_transformers` does nothing.
"""

import importlib
import operator
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

OPTIONAL = ("PIL", "jinja2", "scipy", "torchao", "trio")
"""Libraries that transformers, or the HTTP client that it imports, uses where they are installed.
torchao cannot be imported without torch's compiler."""
MODULES = (
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
)
DISTRIBUTED = "is_torch_distributed_available"
"""A question of transformers that is answered with no, which saves 15 MiB of torch's modules."""
COMPILER = "torch._dynamo"
TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
SYMBOLS = ("torch.fx.experimental.symbolic_shapes", "sympy")
"""Modules imported by whatever runs on the meta device, in case a size is a symbol."""


def prepare_transformers() -> None:
    """Import the modelling code without optional libraries, unless it is imported already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with _absent(OPTIONAL), _undistributed(), without_compiler():
        for name in MODULES:
            importlib.import_module(name)


@contextmanager
def _absent(names: Collection[str]) -> Iterator[None]:
    """Within the context, importing ``names`` fails, unless they were imported already."""
    missing: dict[str, Any] = {name: None for name in names if name not in sys.modules}
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


@contextmanager
def _undistributed() -> Iterator[None]:
    """Within the context, transformers believes that torch has no distributed support."""
    names = ("transformers.utils", "transformers.utils.import_utils")
    asked = [importlib.import_module(name) for name in names]
    answers = [vars(module)[DISTRIBUTED] for module in asked]
    for module in asked:
        vars(module)[DISTRIBUTED] = lambda: False
    try:
        yield
    finally:
        for module, answer in zip(asked, answers, strict=True):
            vars(module)[DISTRIBUTED] = answer


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within the context, torch's compiler is a stub whose decorators change nothing, and no size
    is a symbol: a run on the meta device imports neither the compiler nor SymPy.

    Afterwards an import gets the real ones. Does nothing if the compiler was imported already.
    """
    if COMPILER in sys.modules:
        yield
        return
    import torch

    stub, tracing = _Undecorating(COMPILER), ModuleType(TRACING)
    stub.__path__ = []
    vars(tracing)["TransformGetItemToIndex"] = nullcontext
    stubs: dict[str, ModuleType] = {COMPILER: stub, TRACING: tracing}
    stubs.update({name: _Symbolless(name) for name in SYMBOLS if name not in sys.modules})
    sys.modules.update(stubs)
    vars(torch)["_dynamo"] = stub
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        del vars(torch)["_dynamo"]


WITHOUT_SYMBOLS: dict[str, Any] = {
    "expect_true": bool,
    "free_unbacked_symbols": lambda _: set(),
    "guard_int": int,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "guarding_hint_or_throw": lambda size: size,
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "statically_known_true": bool,
    "sym_and": lambda *conditions: all(conditions),
    "sym_eq": operator.eq,
    "sym_or": lambda *conditions: any(conditions),
}
"""Functions that torch calls on sizes and conditions, for sizes that are never symbols."""


class _Symbolless(ModuleType):
    """Stub whose types have no instances and whose functions are :data:`WITHOUT_SYMBOLS`; all other
    names cannot be imported."""

    def __getattr__(self, name: str) -> Any:
        if name in WITHOUT_SYMBOLS:
            return WITHOUT_SYMBOLS[name]
        if name[:1].isupper():
            return type(name, (), {})
        raise AttributeError(f"{self.__name__} without symbols has no {name}")


class _Undecorating(ModuleType):
    """Stub whose every attribute is a decorator, or makes one, that returns functions unchanged."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _undecorated
