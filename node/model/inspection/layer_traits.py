"""Finds traits of a layer without its weights, by one run on the meta device.

Tensors there have no values, so a layer that branches on a value fails. A layer that runs to its
end does the same operations whatever the values are, and may be recorded. Linear modules that
receive the very same tensor, unchanged in between, may share one product.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from node.attention.paged_attention import passed, set_passing

FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    StopIteration,
    AssertionError,
    ArithmeticError,
)
"""Errors by which a model's code says that it cannot be run in this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    recordable: bool = False
    """Whether its operations do not depend on the values of its tensors."""
    siblings: tuple[tuple[str, ...], ...] = ()
    """Groups of names of its linear modules that receive the same input."""
    attends: int = 0
    """Number of its calls of attention."""


def on_meta(value: Any) -> Any:
    """A call's arguments with tensors moved to the meta device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)


def ran_without_numbers(module: nn.Module, *positional: Any, **named: Any) -> bool:
    """Whether a call of ``module`` runs to its end on the meta device."""
    shadow = copy.deepcopy(module).to("meta")
    try:
        with torch.inference_mode(), _passing():
            shadow(*on_meta(positional), **on_meta(named))
    except FAILURES:
        return False
    return True


def traits_of(layer: nn.Module, *positional: Any, **named: Any) -> LayerTraits:
    """Traits of a layer whose attention was replaced by ours, from a call's arguments."""
    shadow = copy.deepcopy(layer).to("meta")
    given: dict[str, list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(_listener(name, given))
        for name, module in shadow.named_modules()
        if type(module) is nn.Linear
    ]
    changed = _Changed()
    try:
        with torch.inference_mode(), _passing(), changed:
            shadow(*on_meta(positional), **on_meta(named))
    except FAILURES:
        return LayerTraits(attends=passed())
    finally:
        for hook in hooks:
            hook.remove()
    siblings = _siblings(shadow, given, changed.storages)
    return LayerTraits(recordable=True, siblings=siblings, attends=passed())


def _siblings(
    layer: nn.Module, given: dict[str, list[torch.Tensor]], changed: set[int]
) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[int, bool, torch.dtype], list[str]] = {}
    for name, inputs in given.items():
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)  # noqa: S101 - listeners are on linear modules only
        if len(inputs) == 1 and _storage(inputs[0]) not in changed:
            key = (id(inputs[0]), linear.bias is not None, linear.weight.dtype)
            groups.setdefault(key, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _listener(name: str, given: dict[str, list[torch.Tensor]]) -> Any:
    def listen(_: nn.Module, positional: tuple[Any, ...]) -> None:
        # Keep it alive until all are compared: another tensor might take its place in memory.
        given.setdefault(name, []).extend(positional[:1])

    return listen


class _Changed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else named.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self.storages.add(_storage(tensor))
                        self._kept.append(tensor)
        return func(*args, **named)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _passing() -> Iterator[None]:
    set_passing(True)
    try:
        yield
    finally:
        set_passing(False)
