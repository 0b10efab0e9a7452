"""Traces where a layer's arguments come from, so that they can be computed for other rows.

Beside the hidden states a layer receives constants, the positions, and what weightless modules
(rotary embeddings) compute from the positions. An argument's origin is found by object identity in
one forward pass, and checked against other passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from node.attention.mask_rules import MaskRule
from node.model.inspection.skeleton import PartCall


class Untraceable(Exception):
    """An argument is computed in a way that cannot be repeated for other rows."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is the same for all rows."""

    value: Any


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden states, of which only dtype and device matter."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of the rows, ``[1, tokens]``, or ``[tokens]`` if ``flat``."""

    flat: bool


@dataclass(frozen=True, slots=True)
class OutputOf:
    """The output of a weightless module's call, or one part of the output."""

    call: int
    index: int | None


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple of arguments."""

    parts: tuple["Origin", ...]


Origin = Constant | Hidden | Positions | OutputOf | Several


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentOrigins:
    """Origins of a call's arguments beside the hidden states."""

    positional: tuple[Origin, ...]
    named: tuple[tuple[str, Origin], ...]

    def resolve(
        self, hidden: torch.Tensor, positions: torch.Tensor, outputs: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for rows at ``positions``, ``[1, tokens]``."""
        positional = tuple(_resolve(o, hidden, positions, outputs) for o in self.positional)
        named = {name: _resolve(o, hidden, positions, outputs) for name, o in self.named}
        return positional, named


def _resolve(
    origin: Origin, hidden: torch.Tensor, positions: torch.Tensor, outputs: Sequence[Any]
) -> Any:
    match origin:
        case Constant(value):
            return value
        case Hidden():
            return hidden
        case Positions(flat):
            return positions[0] if flat else positions
        case OutputOf(call, index):
            return outputs[call] if index is None else outputs[call][index]
        case Several(parts):
            return tuple(_resolve(part, hidden, positions, outputs) for part in parts)


class Tracer:
    """Finds the origins of arguments within one forward pass over ``positions``."""

    def __init__(self, positions: torch.Tensor, width: int) -> None:
        self._positions = positions
        self._width = width
        self._rules: list[tuple[MaskRule, MaskRule]] = []
        self.calls: list[PartCall] = []
        """Calls of weightless modules whose outputs are arguments."""

    def offer(self, calls: Sequence[PartCall]) -> None:
        """Set the calls whose outputs may be arguments."""
        self._offered = list(calls)

    def arguments(self, positional: Sequence[Any], named: dict[str, Any]) -> ArgumentOrigins:
        """Origins of a call's arguments. Raises Untraceable."""
        return ArgumentOrigins(
            positional=tuple(self._origin(value, "") for value in positional),
            named=tuple((name, self._origin(value, name)) for name, value in named.items()),
        )

    def _origin(self, value: Any, name: str) -> Origin:
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return Constant(value)
        if isinstance(value, MaskRule):
            return Constant(self._settled(value))
        for call in self._offered:
            if value is call.output:
                return OutputOf(self._number(call), None)
            if isinstance(call.output, tuple | list):
                for index, part in enumerate(call.output):
                    if value is part:
                        return OutputOf(self._number(call), index)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, tuple | list):
            return Several(tuple(self._origin(part, name) for part in value))
        raise Untraceable(f"its layers are given {name} of type {type(value).__name__}")

    def _tensor(self, value: torch.Tensor, name: str) -> Origin:
        if not value.is_floating_point() and not value.is_complex():
            if torch.equal(value, self._positions):
                return Positions(flat=False)
            if torch.equal(value, self._positions[0]):
                return Positions(flat=True)
        elif value.shape == (1, self._positions.shape[1], self._width):
            return Hidden()
        raise Untraceable(f"its layers are given {name or 'a tensor'}, made beside them")

    def _settled(self, rule: MaskRule) -> MaskRule:
        from node.attention.mask_rules import windowed

        for seen, found in self._rules:
            if seen == rule:
                return found
        try:
            found = windowed(rule)
        except (LookupError, RuntimeError, TypeError) as error:
            raise Untraceable(f"its mask depends on the input ({error})") from error
        self._rules.append((rule, found))
        return found

    def _number(self, call: PartCall) -> int:
        for number, known in enumerate(self.calls):
            if known is call:
                return number
        self.calls.append(call)
        return len(self.calls) - 1


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal; tensors are compared by value."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, MaskRule) and isinstance(other, MaskRule):
        masks = [rule.allowed(4, 4, torch.device("cpu")) for rule in (one, other)]
        return same(masks[0], masks[1])
    return one is other or bool(one == other)
