"""Maps the tensors of a checkpoint to the parameters of the model's code.

A family's code changes over the years, its checkpoints do not: a mixture's experts are stored one
by one and computed as one stacked tensor, and modules have been renamed. ``transformers`` has the
conversions of whole models. Here they are planned by name alone, and run only for the parameters of
a range, from only their tensors.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dht.checkpoints.gguf_model import ARCHITECTURE
from dht.errors import UserError
from node.packed.stored import Described, Stored, settings_of
from node.packed.tensor import PackedTensor
from node.weights.gguf_names import FAILURES, gguf_sources, gguf_transforms, needs_place

CODE_DTYPES = frozenset({"I8", "U8", "I16", "I32", "I64"})
"""Dtypes of packed codes, where the model's code has numbers in their place."""

WITHOUT_EFFECT = re.compile(
    r"bias|weight_shape|(input|output|activation|act|[kqv]|kv|prob)_"
    r"(scale|zero_point|global_scale|g_idx|scale_inv)|qscale_act"
)
"""Ends of the names of tensors beside a packed weight that say nothing of its numbers: how inputs
and caches may be rounded, and a bias that the model's code does not add."""

ROUNDS = re.compile(r"weight_(scale|zero_point|global_scale|g_idx|scale_inv)")
"""Ends of the names of tensors by which a plain weight is rounded where it is used: those of a
model that was quantised, but not compressed."""


def integers_of(model: nn.Module, name: str) -> torch.dtype | None:
    """The dtype of a parameter or buffer where the model's code has integers in it, such as a table
    of experts by token; None for all others."""
    tensor = _tensor_of(model, name)
    return None if tensor is None or tensor.is_floating_point() else tensor.dtype


def _tensor_of(model: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or buffer by its name; None where the model's code has no such."""
    path, _, leaf = name.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(path), leaf, None)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, torch.Tensor) else None


def _fills(stored: torch.Size, wanted: torch.Size) -> bool:
    """Whether a tensor of one shape is taken for another; one number may lie in a list."""
    return stored == wanted or (stored == (1,) and wanted == ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A group of a checkpoint's weights that become parameters together."""

    target: str
    """The parameter that names the conversion."""
    sources: tuple[tuple[str, str], ...]
    """``(weight, pattern that it matched)``, in the order in which they are joined."""
    converter: Any = None
    """``transformers``' operations; None if one tensor is the parameter."""

    def convert(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> "Converted":
        """Parameters by name, made from the weights of all sources, which are taken out."""
        if self.converter is None:
            return {self.target: weights.pop(self.sources[0][0])}
        running = copy.deepcopy(self.converter)
        for source, pattern in self.sources:
            running.add_tensor(self.target, source, pattern, weights.pop(source))
        made = running.convert(self.target, model=model, config=model.config)
        return {name: part[0] if isinstance(part, list) else part for name, part in made.items()}


Converted = dict[str, torch.Tensor]


class CheckpointNames:
    """Which tensors of a checkpoint each parameter needs."""

    def __init__(
        self,
        where: str,
        model: nn.Module,
        stored: Mapping[str, Stored],
        said: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``model`` is on the meta device; ``stored`` are the checkpoint's weights by name;
        ``said`` is its configuration, which names the architecture of a GGUF file.

        Raises UserError if its names cannot be planned.
        """
        self._where = where
        self._model = model
        self._stored = stored
        self._by_parameter: dict[str, Conversion] = {}
        used: set[str] = set()
        for conversion in self._plan(sorted(stored), said):
            used |= {source for source, _ in conversion.sources}
            for name in self._made_by(conversion):
                self._by_parameter.setdefault(name, conversion)
        packed = {name.rpartition(".")[0] for name in used if stored[name].make is not None}
        plain = {name.rpartition(".")[0] for name in used if stored[name].make is None}
        rounded = plain if settings_of(said) is not None else set[str]()
        for name in sorted(stored.keys() - used):
            base, _, end = name.rpartition(".")
            if base in packed and not WITHOUT_EFFECT.fullmatch(end):
                raise UserError(
                    f"{where} cannot be served: {name[:120]} changes a packed weight in a way that"
                    " its quantization_config does not tell"
                )
            if base in rounded and ROUNDS.fullmatch(end):
                raise UserError(
                    f"{where} cannot be served: {name[:120]} rounds a weight that is not packed;"
                    " save the checkpoint compressed"
                )
        if ARCHITECTURE in said:
            layers = int(model.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr, operator]
            for name in sorted(stored.keys() - used):
                if needs_place(name, layers):
                    raise UserError(
                        f"{where} cannot be served: transformers' code for its architecture has no"
                        f" place for the tensor {name[:120]}"
                    )

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._by_parameter

    def conversions(self, parameters: Iterable[str]) -> list[Conversion]:
        """Conversions that make these parameters, each once; UserError if one lacks tensors."""
        wanted: dict[str, Conversion] = {}
        for name in parameters:
            if name not in self._by_parameter:
                raise UserError(
                    f"{self._where} cannot be served yet: its files hold no tensor for {name},"
                    " which the model's code needs"
                )
            conversion = self._by_parameter[name]
            wanted[conversion.target] = conversion
        return list(wanted.values())

    def sources(self, parameters: Iterable[str]) -> list[str]:
        """Names of the tensors that these parameters need."""
        found = [
            name
            for conversion in self.conversions(parameters)
            for names in self.tensors(conversion).values()
            for name in names
        ]
        return list(dict.fromkeys(found))

    def tensors(self, conversion: Conversion) -> dict[str, list[str]]:
        """Names of the tensors that each source of a conversion is made of."""
        return {
            source: list(self._stored[source].names.values()) for source, _ in conversion.sources
        }

    def packed(
        self, parameters: Iterable[str], described: Mapping[str, Described]
    ) -> dict[str, PackedTensor]:
        """Those parameters that stay packed, on the meta device; ``described`` are the files'
        tensors.

        Raises UserError for codes of a packing that nobody knows, and for shapes of any of the
        parameters that are not those of the model's code.
        """
        made: dict[str, torch.Tensor] = {}
        for conversion in self.conversions(p for p in parameters if p in self):
            stored = {source: self._stored[source] for source, _ in conversion.sources}
            on_meta = {name: weight.on_meta(described) for name, weight in stored.items()}
            try:
                made |= self.convert(conversion, on_meta)
            except UserError:
                if any(weight.make is not None for weight in stored.values()):
                    raise
                # What becomes of plain numbers may depend on them.
            if integers_of(self._model, conversion.target) is None:
                for weight in stored.values():
                    self._refuse_codes(weight, described)
        for name, part in made.items():
            wanted = _tensor_of(self._model, name)
            if wanted is not None and not _fills(part.shape, wanted.shape):
                raise UserError(
                    f"{self._where} cannot be served yet: {name} has the shape {tuple(part.shape)}"
                    f" in its files, and {tuple(wanted.shape)} by its configuration"
                )
        return {name: part for name, part in made.items() if isinstance(part, PackedTensor)}

    def _refuse_codes(self, weight: Stored, described: Mapping[str, Described]) -> None:
        for name in weight.names.values() if weight.make is None else ():
            if described[name].dtype in CODE_DTYPES and len(described[name].shape) > 1:
                raise UserError(
                    f"{self._where} cannot be served: {name[:120]} holds integers"
                    f" ({described[name].dtype}), and its configuration does not say how they"
                    " are packed"
                )

    def weight(
        self, source: str, tensors: Mapping[str, torch.Tensor], *, made_up: bool = False
    ) -> torch.Tensor:
        """A conversion's source from its tensors; UserError if they do not fit each other.

        ``made_up``: with numbers to time with where it is packed.
        """
        stored = self._stored[source]
        try:
            return stored.made_up(tensors) if made_up else stored.weight(tensors)
        except ValueError as error:
            raise UserError(
                f"{self._where} cannot be served: {source[:120]} is packed wrongly ({error})"
            ) from error

    def convert(self, conversion: Conversion, weights: dict[str, torch.Tensor]) -> Converted:
        """Parameters by name from the sources, which are taken out; UserError if they do not fit
        each other."""
        try:
            return conversion.convert(self._model, weights)
        except FAILURES as error:
            raise UserError(
                f"{self._where} cannot be served yet: {conversion.target} cannot be made of its"
                f" tensors ({error})"
            ) from error

    def _plan(self, tensors: list[str], said: Mapping[str, Any]) -> Iterator[Conversion]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        model: Any = self._model
        if ARCHITECTURE not in said:
            yield from self._converted(tensors, get_model_conversion_mapping(model))
        elif (transforms := gguf_transforms(model, said)) is not None:
            yield from self._converted(tensors, transforms)
        else:
            for target, names, undone in gguf_sources(model, said, tensors):
                sources = tuple((name, name) for name in names)
                yield Conversion(target=target, sources=sources, converter=undone)

    def _converted(self, tensors: list[str], transforms: list[Any]) -> Iterator[Conversion]:
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        model: Any = self._model
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        known = model.state_dict()
        prefix = model.base_model_prefix
        groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for tensor in sorted(tensors, key=dot_natural_key):
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, known)
            if name not in known and tensor in known:  # the tensor has its present name already
                name, pattern = rename_source_key(tensor, [], [], prefix, known)
            if name not in known:
                continue  # the model's code does not need it
            converter = None if pattern is None else by_pattern[pattern]
            groups.setdefault(name, (converter, []))[1].append((tensor, pattern or tensor))
        for name, (converter, sources) in groups.items():
            chosen = sources if converter is not None else sources[:1]
            yield Conversion(target=name, sources=tuple(chosen), converter=converter)

    def _made_by(self, conversion: Conversion) -> list[str]:
        """Parameters that a conversion makes; several if a tensor is split."""
        converter, target = conversion.converter, conversion.target
        if converter is None or len(converter.target_patterns) < 2:
            return [target]
        first, *others = converter.target_patterns
        return [target, *(target.replace(first, other) for other in others)]
