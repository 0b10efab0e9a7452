"""transformers' modelling code without the libraries that a peer never uses.

Importing it pulls in SciPy (for the losses of object detectors), image and text processing, and
torch's compiler with SymPy (for decorators of kernels, and for masks that paged attention does not
build): some 100 MiB and a second or two in every peer. So does running a model on the meta device,
as studying its structure does (:mod:`node.model.structure`). ``bench/footprint.py`` measures what
a peer costs.

For processes that only serve: in one that uses transformers in other ways too, import transformers
first, and :func:`prepare_transformers` does nothing.
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
"""Asked by whatever runs on the meta device, in case a size is a symbol."""


def prepare_transformers() -> None:
    """Import the modelling code, lean. Does nothing where it was imported already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with _absent(OPTIONAL), _undistributed(), without_compiler():
        for name in MODULES:
            importlib.import_module(name)


@contextmanager
def _absent(names: Collection[str]) -> Iterator[None]:
    """While active, importing these finds nothing, unless they were imported already."""
    missing: dict[str, Any] = {name: None for name in names if name not in sys.modules}
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


@contextmanager
def _undistributed() -> Iterator[None]:
    """While active, transformers takes torch to be built for one machine."""
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
    """While active, torch's compiler is a module whose decorators change nothing, and no size is
    a symbol: what runs on the meta device brings in neither the compiler nor SymPy.

    Afterwards whoever asks for them gets the real ones. Does nothing where they were imported.
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
"""What torch asks of sizes and conditions, where none of them is a symbol."""


class _Symbolless(ModuleType):
    """Its types have no instances; what is not in :data:`WITHOUT_SYMBOLS` cannot be imported."""

    def __getattr__(self, name: str) -> Any:
        if name in WITHOUT_SYMBOLS:
            return WITHOUT_SYMBOLS[name]
        if name[:1].isupper():
            return type(name, (), {})
        raise AttributeError(f"{self.__name__} without symbols has no {name}")


class _Undecorating(ModuleType):
    """Whatever is asked of it is a decorator, or makes one, that returns functions as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _undecorated
