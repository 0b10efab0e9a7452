"""Maps the tensors of a GGUF file to the parameters of the model's code, as transformers does.

llama.cpp has names of its own, and stores some weights changed: rows of queries and keys in another
order, norms with one added, experts apart that are computed together. transformers has the names,
and for each architecture code that undoes the rest on NumPy arrays. That code is run on numbers
that name rows. Where rows only move, the same rows of packed weights move, which stay packed; else
it is run on the weights themselves, which are small.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dht.checkpoints.gguf_model import ARCHITECTURE
from dht.checkpoints.gguf_settings import READ_TENSORS
from node.packed.tensor import PackedTensor

FAILURES = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError)
"""Errors of transformers' code for arrays that it cannot work with."""

BLOCK = re.compile(r"blk\.(\d+)\.")
IDLE = ("output.weight", "attn_rot_embd", "rope_freqs")
"""Tensors without a place that change nothing: a head tied to the embedding anyway, tables of
frequencies that old converters wrote for each layer."""


def needs_place(name: str, layers: int) -> bool:
    """Whether a tensor of a file that no parameter is made of would change what is answered; those
    that became settings, and blocks behind the ``layers`` that draft tokens, would not."""
    if name in READ_TENSORS or name == IDLE[0]:
        return False
    block = BLOCK.match(name)
    behind = block is not None and int(block[1]) >= layers
    return not behind and not any(f".{idle}." in name for idle in IDLE[1:])


def gguf_transforms(model: nn.Module, said: Mapping[str, Any]) -> list[Any] | None:
    """transformers' conversions for the architecture of the file that ``said``, the configuration,
    was made of; None where it has none and :func:`gguf_sources` is meant."""
    from transformers.integrations.gguf.utils import (
        get_gguf_conversion_mapping,
        is_gguf_arch_supported,
    )

    if not is_gguf_arch_supported(said[ARCHITECTURE]):
        return None
    mapping: list[Any] = get_gguf_conversion_mapping(said[ARCHITECTURE], model.config)
    return mapping


def gguf_sources(
    model: nn.Module, said: Mapping[str, Any], tensors: Sequence[str]
) -> Iterator[tuple[str, list[str], "Undone"]]:
    """For each parameter, the names of the file's ``tensors`` that make it, and their converter."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(said[ARCHITECTURE], TensorProcessor)(config=dict(said))
    names = get_gguf_hf_weights_map(_Outer(model, model.config), processor)
    undone = Undone(processor, names)
    known = model.state_dict()
    sources: dict[str, list[str]] = {}
    for tensor in tensors:
        target = undone.target(tensor)
        if target in known:
            sources.setdefault(target, []).append(tensor)
    for target, found in sources.items():
        yield target, found, undone


class _Outer:
    """The model's names as transformers asks for them: its own, and its outermost modules'.

    transformers asks every module in it, which takes minutes for a large model and finds the same.
    """

    def __init__(self, module: nn.Module, config: Any, *, is_inner: bool = False) -> None:
        self.config = config
        self._module = module
        self._is_inner = is_inner

    def state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def named_children(self) -> list[tuple[str, "_Outer"]]:
        if self._is_inner:
            return []
        inner = self._module.named_children()
        return [(name, _Outer(each, self.config, is_inner=True)) for name, each in inner]


class Undone:
    """Undoes what llama.cpp's converter did to a parameter; used as transformers' converters are.

    Its copies share what transformers knows of the architecture.
    """

    target_patterns: tuple[str, ...] = ()

    def __init__(self, processor: Any, names: Mapping[str, str]) -> None:
        self._processor = processor
        self._names = names
        self._given: dict[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Undone":
        return Undone(self._processor, self._names)

    def target(self, tensor: str) -> str:
        """Name of the parameter that a tensor is a part of; empty: none."""
        try:
            made = self._processed({tensor: np.zeros((1, 1, 1))})
        except FAILURES:  # a single number is no matrix, but a matrix it is
            made = {}
        return next(iter(made), self._names.get(tensor, ""))

    def add_tensor(self, target: str, source: str, pattern: str, tensor: torch.Tensor) -> None:
        self._given[source] = tensor

    def convert(self, target: str, *, model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
        """The parameter of the tensors taken. Raises one of FAILURES where they make none."""
        given = list(self._given.values())
        places = self._places(target)
        if places is not None:
            return {target: _gathered(given, torch.from_numpy(places))}
        if any(weight.device.type == "meta" for weight in given):
            return {target: torch.empty_like(model.state_dict()[target], device="meta")}
        plain = {name: _numbers(weight).numpy() for name, weight in self._given.items()}
        return {target: torch.from_numpy(np.ascontiguousarray(self._processed(plain)[target]))}

    def _places(self, target: str) -> np.ndarray | None:
        """For each row of the parameter its place among the rows of all tensors, in the shape of
        the parameter's leading dimensions (of all of them if the tensors have one each).

        None where the parameter is not made of whole rows.
        """
        named, count = {}, 0
        for name, weight in self._given.items():
            rows = tuple(weight.shape) if weight.dim() == 1 else (*weight.shape[:-1], 1)
            numbers = np.arange(count, count + int(np.prod(rows)), dtype=np.int64)
            count += len(numbers)
            named[name] = (2 * numbers + 1).reshape(rows)  # odd: one more or less names no row
        try:
            made = self._processed(named)[target]
        except FAILURES:
            return None
        are_rows = all(weight.dim() == 1 for weight in self._given.values())
        if made.dtype != np.int64 or not (are_rows or made.shape[-1:] == (1,)):
            return None
        if made.size < 1 or (made % 2 == 0).any() or made.min() < 0 or made.max() > 2 * count:
            return None
        places: np.ndarray = (made if are_rows else made[..., 0]) // 2
        return places

    def _processed(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What transformers' code makes of a file's tensors, by the names of parameters."""
        made: dict[str, Any] = {}
        for name, array in arrays.items():
            with np.errstate(all="ignore"):
                done = self._processor.process(
                    weights=array,
                    name=name,
                    tensor_key_mapping=self._names,
                    parsed_parameters={"tensors": made},
                )
            if done.name in self._names:
                made[self._names[done.name]] = done.weights
        return {name: np.asarray(array) for name, array in made.items()}


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    plain = weight.dequantised() if isinstance(weight, PackedTensor) else weight
    return plain.to(torch.float32)


def _gathered(weights: Sequence[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """Rows of these matrices or stacks (numbers of vectors), in the order of ``places``."""
    first = weights[0]
    if first.dim() == 1:
        whole = first if len(weights) == 1 else torch.cat([_numbers(weight) for weight in weights])
        return _taken(whole, places)
    shape = (*places.shape, first.shape[-1])
    if len(weights) == 1 and shape == tuple(first.shape) and _is_in_order(places):
        return first
    packings = [w.packing if isinstance(w, PackedTensor) else None for w in weights]
    if isinstance(first, PackedTensor) and all(each == packings[0] for each in packings):
        rows = [w.parts["codes"].flatten(0, -2) for w in weights if isinstance(w, PackedTensor)]
        codes = _taken(rows[0] if len(rows) == 1 else torch.cat(rows), places)
        return PackedTensor(first.packing, {"codes": codes}, first.dtype)
    plain = weights if not any(packings) else [_numbers(weight) for weight in weights]
    return _taken(torch.cat([weight.flatten(0, -2) for weight in plain]), places)


def _taken(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    flat = places.reshape(-1)
    taken = rows if _is_in_order(places) and len(rows) == len(flat) else rows[flat.to(rows.device)]
    return taken.view(*places.shape, *rows.shape[1:])


def _is_in_order(places: torch.Tensor) -> bool:
    flat = places.reshape(-1)
    return bool(torch.equal(flat, torch.arange(len(flat))))
