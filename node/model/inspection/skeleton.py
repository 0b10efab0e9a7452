"""Runs a model's own forward without its weights, around layers that only record their calls.

Families differ in what they do beside their layers: they scale the embedding, add learned
positions, give each kind of layer its own rotation or bias, cap the logits. None of that is copied
here. The model's forward runs with a recorder in every layer's place, so the model itself shows
what a layer receives and what becomes of the last layer's output.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from node.model.inspection.layer_traits import on_meta
from node.model.inspection.tied import tied_to
from node.model.lean_transformers import without_compiler

LayerFunction = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, its input hidden states) → its output hidden states."""
Perform = Callable[[int, torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""(layer, its input hidden states, arguments beside them) → all that the layer returns."""


class EnoughHeard(Exception):
    """Ends a forward pass whose rest is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """Arguments of a layer's call: hidden states, and the arguments beside them."""

    hidden: torch.Tensor
    positional: tuple[Any, ...]
    named: dict[str, Any]


def argument_of(call: LayerCall, argument: int | str) -> Any:
    """An argument beside the hidden states, by its place or name."""
    return call.positional[argument] if isinstance(argument, int) else call.named[argument]


@dataclass(slots=True, kw_only=True)
class PartCall:
    """A call of a module beside the layers, in the order of the forward pass."""

    name: str
    layers_before: int
    positional: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


@dataclass(slots=True, kw_only=True)
class Heard:
    """Record of one forward pass."""

    layers: list[LayerCall] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    parts: list[PartCall] = field(default_factory=list)
    logits: torch.Tensor | None = None


class Slot(nn.Module):
    """Takes the place of one layer, and has its attributes."""

    def __init__(self, layer: nn.Module, index: int, skeleton: "Skeleton") -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a child: its weights are not this module's
        self.__dict__["skeleton"] = skeleton
        self._index = index

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *given: Any, **named: Any) -> Any:
        if given:
            hidden, rest = given[0], given[1:]
        else:
            hidden, rest = named.pop("hidden_states"), ()
        return self.__dict__["skeleton"].hear(self._index, hidden, rest, named)


class StandIn(nn.Module):
    """Takes the place of a module whose weights are not here. Its output has the right shape and is
    made row by row from its input, so that a row's output never depends on other rows."""

    def __init__(self, part: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.__dict__["part"] = copy.deepcopy(part).to("meta")
        self.shift = 0.0
        """Another number makes other output of the same input: it shows where the output goes."""
        self._device = device
        dtype = next(part.parameters()).dtype
        # A model asks its weights for its device.
        self.placed = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["part"], name)
        if isinstance(found, torch.Tensor):  # asked for its device or dtype: takes no memory
            return torch.zeros((), dtype=found.dtype, device=self._device).expand(found.shape)
        return found

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        with without_compiler():
            out = self.__dict__["part"](*on_meta(given), **on_meta(named))
        values = (*given, *named.values())
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), self._device)
        rows, dtype = out.shape[:-1], out.dtype
        channel = torch.arange(out.shape[-1], device=device) * 1.3
        seed = torch.zeros(rows, device=device)
        for place, value in enumerate(values):  # separate weights: no two inputs may cancel out
            weight = 0.7 + 0.31 * place
            if isinstance(value, torch.Tensor):
                numbers = value
                while numbers.dim() and not _spreads(numbers.shape, rows):
                    numbers = numbers.float().mean(-1)  # channels, and perhaps streams
                if _spreads(numbers.shape, rows):
                    seed = seed + weight * numbers
            elif isinstance(value, int | float):
                seed = seed + weight * value
        return torch.sin(seed[..., None] + channel + self.shift).to(dtype)


def _spreads(shape: torch.Size, rows: torch.Size) -> bool:
    """Whether ``shape`` broadcasts to ``rows``: one number per row, or one for several rows."""
    try:
        spread: torch.Size = torch.broadcast_shapes(shape, rows)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return spread == rows


class Skeleton:
    """A model's forward around slots. Parts with weights are stand-ins until :meth:`put`."""

    def __init__(
        self,
        model: nn.Module,
        layers_name: str,
        *,
        tuples: bool = False,
        first_position: int = 0,
    ) -> None:
        """``model`` is on the meta device; it is copied, its layers are not.

        ``tuples``: whether a layer returns a tuple whose first part is its output.
        ``first_position``: the number that the model gives the first token's position.
        """
        self.tuples = tuples
        self.first_position = first_position
        self.layers_name = layers_name
        self._device = torch.device("cpu")
        layers: Any = model.get_submodule(layers_name)
        empty = nn.ModuleList()
        model.set_submodule(layers_name, empty)
        try:
            self._model = copy.deepcopy(model).eval()
        finally:
            model.set_submodule(layers_name, layers)
        self._model.set_submodule(
            layers_name, nn.ModuleList(Slot(layer, i, self) for i, layer in enumerate(layers))
        )
        self.parts = dict(_parts_with_weights(self._model))
        for name, part in self.parts.items():
            self._model.set_submodule(name, StandIn(part, self._device))
        self._loose = dict(_weights_without_module(self._model))
        self.fill_loose(self._loose)
        self._by_length = [each for each in self._model.modules() if rotates_by_length(each)]
        self._takes = inspect.signature(model.forward).parameters
        self._heard = Heard()
        self._perform: Perform = self._answering(None)

    def put(self, name: str, part: nn.Module) -> None:
        """Replace a part's stand-in by the module with weights."""
        self._model.set_submodule(name, part)

    def take_out(self, name: str) -> None:
        """Replace a part by a stand-in again."""
        self._model.set_submodule(name, StandIn(self.parts[name], self._device))

    def to(self, device: torch.device) -> "Skeleton":
        """Move computed buffers (rotary frequencies, scales), which are not loaded, to ``device``.

        Every part becomes a stand-in again.
        """
        self._device = device
        self.fill_loose(self._loose)
        for name, part in self.parts.items():
            self._model.set_submodule(name, StandIn(part, device))
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)
        return self

    @property
    def padding_id(self) -> int | None:
        """The token id that stands for padding, if there is one."""
        structure: Any = self._model
        return getattr(structure.config.get_text_config(), "pad_token_id", None)

    def modules(self) -> Iterator[nn.Module]:
        """All modules but the layers."""
        return self._model.modules()

    def module(self, name: str) -> nn.Module:
        """A module beside the layers."""
        found: nn.Module = self._model.get_submodule(name)
        return found

    @property
    def loose(self) -> list[str]:
        """Names of weights beside the layers that belong to no part: to modules with others inside.

        A weight that is tied to one of a part is that part's: a head's bias, of which the module
        around the head has the name, too.
        """
        inside = tuple(f"{name}." for name in self.parts)
        return [
            name
            for name in self._loose
            if not any(tied.startswith(inside) for tied in tied_to(self._model, name))
        ]

    def fill_loose(self, names: Collection[str], number: float = 0.0) -> None:
        """Fill these weights that belong to no part with a number, which takes no memory."""
        for name in names:
            path, _, leaf = name.rpartition(".")
            like = self._loose[name]
            numbers = torch.full((), number, dtype=like.dtype, device=self._device)
            numbers = numbers.expand(like.shape)
            self._model.get_submodule(path)._parameters[leaf] = nn.Parameter(numbers, False)

    def hear(
        self, index: int, hidden: torch.Tensor, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Record a layer's call and return its output; called by a slot."""
        self._heard.order.append(index)
        self._heard.layers.append(LayerCall(hidden=hidden, positional=positional, named=named))
        return self._perform(index, hidden, positional, named)

    def _answering(self, answer: LayerFunction | None, beside: Sequence[Any] = ()) -> Perform:
        def perform(index: int, hidden: torch.Tensor, *_: Any) -> Any:
            out = hidden if answer is None else answer(index, hidden)
            return (out, beside[index] if beside else None) if self.tuples else out

        return perform

    def run(
        self,
        *,
        token_ids: torch.Tensor | None = None,
        embedded: torch.Tensor | None = None,
        positions: torch.Tensor | None,
        cache: Any = None,
        mask: torch.Tensor | None = None,
        answer: LayerFunction | None = None,
        beside: Sequence[Any] = (),
        perform: Perform | None = None,
        listen: bool = False,
        reach: int | None = None,
    ) -> Heard:
        """Run one forward pass over ids ``[1, tokens]`` or embeddings ``[1, tokens, hidden]``.

        ``answer`` computes the layers' outputs (None: their inputs), and ``beside`` has what each
        returns behind them, if layers return tuples; or ``perform`` runs them, and may end the pass
        with EnoughHeard. Positions begin with 0; None leaves them to the model. ``mask``,
        ``[sessions, tokens]``, is 0 for padding before contexts. ``listen`` also records the calls
        of all other modules. ``reach`` is the number of tokens that the session may have: rotary
        frequencies that go by the length of a context go by it; None: by the positions given.
        """
        self._heard = heard = Heard()
        self._perform = perform or self._answering(answer, beside)
        called = "cache_params" if "cache_params" in self._takes else "past_key_values"
        given: dict[str, Any] = {"use_cache": cache is not None, called: cache}
        if positions is not None and ("position_ids" in self._takes or "kwargs" in self._takes):
            given["position_ids"] = positions + self.first_position
        if mask is not None:
            given["attention_mask"] = mask
        if token_ids is not None:
            given["input_ids"] = token_ids
        else:
            given["inputs_embeds"] = embedded
        hooks = list(self._hooks(heard)) if listen else []
        if reach is not None:
            hooks += self._reaching(reach - 1 + self.first_position)
        try:
            heard.logits = self._model(**given).logits
        except EnoughHeard:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return heard

    def _reaching(self, last: int) -> Iterator[Any]:
        """Hooks by which rotary embeddings see the position ``last`` behind those of their rows,
        and their output, ``[..., tokens, channels]``, is without it."""

        def longer(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_floating_point():
                return value
            return torch.cat([value, value.new_full((*value.shape[:-1], 1), last)], dim=-1)

        def before(_: nn.Module, given: Any, named: Any) -> Any:
            return tuple(map(longer, given)), {name: longer(named[name]) for name in named}

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return tuple(each[..., :-1, :] for each in output)
            return output[..., :-1, :]

        for module in self._by_length:
            yield module.register_forward_pre_hook(before, with_kwargs=True)
            yield module.register_forward_hook(after)

    def _hooks(self, heard: Heard) -> Iterator[Any]:
        def hook_for(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, positional: Any, named: Any, output: Any) -> None:
                heard.parts.append(
                    PartCall(
                        name=name,
                        layers_before=len(heard.order),
                        positional=positional,
                        named=named,
                        output=output,
                    )
                )

            return hook

        for name, module in self._model.named_modules():
            if not isinstance(module, Slot) and not list(module.children()):
                yield module.register_forward_hook(hook_for(name), with_kwargs=True)


def rotates_by_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose frequencies, perhaps those of some kinds of
    layers, go by the longest context in a batch."""
    said = getattr(module, "rope_type", None)
    kinds = said.values() if isinstance(said, Mapping) else (said,)
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def blank_input(tokens: int, width: int | None, like: torch.Tensor) -> dict[str, Any]:
    """What :meth:`Skeleton.run` enters for ``tokens`` tokens whose embedding is of no use:
    embeddings of ``width``, or ids if it is None."""
    if width is None:
        return {"token_ids": torch.zeros(1, tokens, dtype=torch.long, device=like.device)}
    return {"embedded": like.new_zeros(1, tokens, width)}


def _weights_without_module(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights that are still on the meta device, by name: those of modules with others inside."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.device.type == "meta":
            yield name, parameter


def _parts_with_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have weights of their own, and around none that has others; and the input
    embedding, whatever is in it."""
    structure: Any = model
    embedding = structure.get_input_embeddings()
    within = {id(module) for module in embedding.modules()} if embedding is not None else set()
    for name, module in model.named_modules():
        if id(module) in within and module is not embedding:
            continue
        inside = any(list(child.parameters()) for child in module.children())
        if (module is embedding or not inside) and list(module.parameters(recurse=False)):
            yield name, module
