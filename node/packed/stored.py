"""What a checkpoint's tensors stand for: some are weights, some are parts of a packed one.

A format is a list of rules. Each names the tensors that make a weight together by the ends of their
names, and makes it. Rules run on the meta device as well, where the headers alone show whether the
parts fit each other and how many bytes the weight takes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dht.errors import UserError
from node.device.tensors import stored_dtype
from node.packed.packing import Parts
from node.packed.tensor import PackedTensor

NAME_CHARACTERS = 120
"""Characters of a stranger's tensor name that a message shows."""


class Described(Protocol):
    """What a file's header says of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Make = Callable[[Parts], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a format writes one weight."""

    anchor: tuple[str, str]
    """Part and end of the name of the tensor by which the weight is known."""
    needed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ends of the names that each other part may have; one of them must be there."""
    optional: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dtypes: frozenset[str]
    """Dtypes of the anchor; with others the tensor is what it seems."""
    ending: str = ".weight"
    """End of the weight's name."""
    make: Make
    """Raises ValueError for parts that do not fit each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One weight as files hold it."""

    names: Mapping[str, str]
    """Tensor of each part."""
    make: Make | None = None
    """None: the only tensor is the weight."""

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight from the tensors that it needs. Raises ValueError if they do not fit."""
        parts = {part: tensors[name] for part, name in self.names.items()}
        return next(iter(parts.values())) if self.make is None else self.make(parts)

    def made_up(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A weight to time with; of ``tensors`` only shapes and dtypes count where it is packed."""
        if self.make is None:
            return self.weight(tensors)
        shape = self.weight({name: tensors[name].to("meta") for name in self.names.values()})
        return shape.made_up() if isinstance(shape, PackedTensor) else torch.zeros(shape.shape)

    def on_meta(self, tensors: Mapping[str, Described]) -> torch.Tensor:
        """The weight's shape and packing. Raises ValueError as :meth:`weight`."""
        return self.weight(
            {
                name: torch.empty(
                    tensors[name].shape, dtype=stored_dtype(tensors[name].dtype), device="meta"
                )
                for name in self.names.values()
            }
        )


def read_names(
    where: str, tensors: Mapping[str, Described], rules: Iterable[Rule]
) -> dict[str, Stored]:
    """The weights that these tensors are, by name.

    Raises UserError where a part is missing or does not fit; ``where`` names the model.
    """
    found: dict[str, Stored] = {}
    taken: set[str] = set()
    checked: set[object] = set()
    for rule in rules:
        for name in _anchors(rule, tensors):
            base = name.removesuffix(rule.anchor[1])
            names = {rule.anchor[0]: name}
            for part, endings in {**rule.needed, **rule.optional}.items():
                there = next((base + end for end in endings if base + end in tensors), None)
                if there is not None:
                    names[part] = there
                elif part in rule.needed:
                    raise UserError(
                        f"{where} cannot be served: {name[:NAME_CHARACTERS]} is packed, and its"
                        f" {part} ({base[-NAME_CHARACTERS:]}{endings[0]}) are missing"
                    )
            stored = Stored(names=names, make=rule.make)
            known = (rule.anchor, *((p, _looks(tensors[n])) for p, n in names.items()))
            if known not in checked:
                _check(where, name, stored, tensors)
                checked.add(known)
            found[base + rule.ending] = stored
            taken.update(names.values())
    for name in tensors:
        if name not in taken:
            found.setdefault(name, Stored(names={"": name}))
    return found


def _anchors(rule: Rule, tensors: Mapping[str, Described]) -> Iterator[str]:
    for name, entry in tensors.items():
        if name.endswith(rule.anchor[1]) and entry.dtype in rule.dtypes:
            yield name


def _looks(entry: Described) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, entry.shape


def _check(where: str, name: str, stored: Stored, tensors: Mapping[str, Described]) -> None:
    try:
        stored.on_meta(tensors)
    except (ValueError, RuntimeError, LookupError, TypeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{where} cannot be served: {name[:NAME_CHARACTERS]} is packed wrongly ({reason})"
        ) from error


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a model's configuration says of its packing; None if it says nothing."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if (said := place.get(key)) is not None:
                return said if isinstance(said, dict) else {}
    return None
