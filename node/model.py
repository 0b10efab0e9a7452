"""Layers of a decoder-only model, built from its configuration and filled range by range.

``transformers`` supplies every line of model code. Its parts are found by structure, never by a
model's name: the one list of ``num_hidden_layers`` modules, the input embedding, the output head,
a rotary module, and one final norm.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dht.errors import UserError
from dht.types import ModelSpec
from node.anatomy import hidden_steps
from node.attention import ATTENTION_NAME, register
from node.tensors import DTYPES
from node.weights import Progress, WeightStore, is_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """Where the parts of a model are, on the meta device: shapes without memory."""

    store: WeightStore
    dtype: torch.dtype
    config: Any
    model: nn.Module
    base: nn.Module
    layers: nn.ModuleList
    layers_name: str
    embed_name: str
    norm_name: str
    rotary_name: str
    head_name: str
    tied: bool

    @classmethod
    def of(cls, store: WeightStore, dtype: str) -> "ModelLayout":
        """Build the model without weights; UserError when its structure cannot be served."""
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        register()
        try:
            config = AutoConfig.from_pretrained(store.directory, trust_remote_code=False)
            with init_empty_weights(), no_init_weights():
                model = AutoModelForCausalLM.from_config(
                    config, attn_implementation=ATTENTION_NAME, trust_remote_code=False
                )
        except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
            if ATTENTION_NAME in str(error):
                raise UserError(
                    f"{store.directory} cannot be served yet: its layers do not call attention"
                    " through transformers' interface"
                ) from error
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise UserError(f"{store.directory} cannot be served yet: {first_line}") from error
        return cls._found(store, DTYPES[dtype], config, model)

    @classmethod
    def _found(
        cls, store: WeightStore, dtype: torch.dtype, config: Any, model: nn.Module
    ) -> "ModelLayout":
        where = store.directory
        count = config.get_text_config().num_hidden_layers
        modules: dict[str, Any] = dict(model.named_modules())
        stacks = [
            (name, module)
            for name, module in modules.items()
            if isinstance(module, nn.ModuleList) and len(module) == count and name
        ]
        stacks = [(n, m) for n, m in stacks if not any(n.startswith(f"{o}.") for o, _ in stacks)]
        if len(stacks) != 1:
            raise UserError(f"{where} cannot be served yet: it has {len(stacks)} stacks of layers")
        layers_name, layers = stacks[0]
        base_name = layers_name.rpartition(".")[0]
        base = model.get_submodule(base_name)
        names = {id(module): name for name, module in model.named_modules()}
        anatomy: Any = model
        embed = anatomy.get_input_embeddings()
        head = anatomy.get_output_embeddings()
        if embed is None or head is None:
            raise UserError(f"{where} cannot be served yet: it has no embedding or no LM head")
        rest = {
            name: module
            for name, module in base.named_children()
            if module is not layers and module is not embed
        }
        rotary = [n for n, m in rest.items() if not list(m.parameters()) and list(m.buffers())]
        norms = [n for n, m in rest.items() if list(m.parameters())]
        if len(rotary) != 1 or len(norms) != 1 or len(rest) != 2:
            raise UserError(
                f"{where} cannot be served yet: beside its layers it has {', '.join(sorted(rest))}"
            )
        layout = cls(
            store=store,
            dtype=dtype,
            config=config,
            model=model,
            base=base,
            layers=layers,
            layers_name=layers_name,
            embed_name=names[id(embed)],
            norm_name=f"{base_name}.{norms[0]}",
            rotary_name=f"{base_name}.{rotary[0]}",
            head_name=names[id(head)],
            tied=f"{names[id(head)]}.weight" not in store.tensors,
        )
        layout._check_flow()
        return layout

    def _check_flow(self) -> None:
        """Raise UserError when the parts in a row are not the whole model."""
        names = {
            "embed": self.embed_name,
            "layers": self.layers_name,
            "norm": self.norm_name,
            "head": self.head_name,
            "rotary": self.rotary_name,
        }
        width = self.config.get_text_config().hidden_size
        rotary = self.make_rotary(torch.device("cpu"))
        found = hidden_steps(self.model, names, len(self.layers), width, rotary)
        if found is not None:
            raise UserError(f"{self.store.directory} cannot be served yet: {found}")

    def make_rotary(self, device: torch.device) -> nn.Module:
        """Rotary frequencies are computed, not stored: made anew on the real device.

        Raises UserError where they depend on how long the context is, because sessions of
        different lengths share a step.
        """
        on_meta = self.model.get_submodule(self.rotary_name)
        kind = str(getattr(on_meta, "rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            raise UserError(
                f"{self.store.directory} cannot be served yet: its rotary embedding ({kind})"
                " changes with the length of the context"
            )
        try:
            with torch.device(device):
                rotary: nn.Module = type(on_meta)(config=self.config.get_text_config())
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(
                f"{self.store.directory} cannot be served yet: its rotary embedding cannot be made"
                f" ({error})"
            ) from error
        return rotary

    def spec(self, name: str) -> ModelSpec:
        """What planners must know; sizes are in the dtype that peers compute in."""
        text = self.config.get_text_config()
        item = self.dtype.itemsize
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return ModelSpec(
            name=name,
            fingerprint=self.store.fingerprint,
            layers=len(self.layers),
            layer_bytes=max(_numbers(layer) for layer in self.layers) * item,
            embed_bytes=_numbers(self.model.get_submodule(self.embed_name)) * item,
            head_bytes=(
                _numbers(self.model.get_submodule(self.head_name))
                + _numbers(self.model.get_submodule(self.norm_name))
            )
            * item,
            kv_bytes_per_token_layer=2 * kv_heads * width * item,
            activation_bytes=text.hidden_size * item,
            context_tokens=text.max_position_embeddings,
            vocab=text.vocab_size,
        )

    def layer_names(self, index: int) -> list[str]:
        """Checkpoint names that one layer needs."""
        prefix = f"{self.layers_name}.{index}"
        return [f"{prefix}.{name}" for name, _ in self.layers[index].named_parameters()]

    def tail_names(self) -> list[str]:
        """Checkpoint names of the final norm and the head; a tied head is the embedding."""
        norm, head = (
            self.model.get_submodule(self.norm_name),
            self.model.get_submodule(self.head_name),
        )
        weight = f"{self.embed_name if self.tied else self.head_name}.weight"
        biases = [n for n, _ in head.named_parameters() if n != "weight"]
        return [
            *(f"{self.norm_name}.{name}" for name, _ in norm.named_parameters()),
            weight,
            *(f"{self.head_name}.{name}" for name in biases),
        ]


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module to fill: a layer, the embedding, the norm or the head."""

    kind: str
    prefix: str
    on_meta: nn.Module
    names: list[str]
    layer: int | None = None
    shares: bool = False
    """Its weight is the tied matrix, which another part holds."""


@dataclass(slots=True)
class _Meter:
    total_bytes: int
    progress: Progress | None
    done_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)


class LoadedRange:
    """The modules of the layers that this peer holds, filled on its device."""

    def __init__(self, layout: ModelLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self.layers: dict[int, nn.Module] = {}
        self.embed: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.head: nn.Module | None = None
        self.rotary = layout.make_rotary(device)

    def set(self, start: int, end: int, progress: Progress | None = None) -> int:
        """Hold exactly ``[start, end)``; what stays is not read again. Returns bytes read.

        What leaves is freed first, and parts are filled one after the other, so that at most the
        larger of the two ranges and one tensor more are in memory. After an error the parts that
        were filled stay, and are not read again by the next call.
        """
        layout = self._layout
        total = len(layout.layers)
        self.layers = {i: layer for i, layer in self.layers.items() if start <= i < end}
        shared = self._tied_weight()
        if start != 0:
            self.embed = None
        if end != total:
            self.norm = self.head = None
        missing = self._missing(start, end, shared)
        store = layout.store
        entries = [store.tensors[n] for part in missing for n in part.names if n in store.tensors]
        meter = _Meter(sum(entry.size_bytes for entry in entries), progress)
        before = store.bytes_read
        store.fetch([name for part in missing for name in part.names])
        for part in missing:
            tensors = {f"{part.prefix}weight": shared} if part.shares and shared is not None else {}
            for name, tensor in store.read(part.names):
                meter.add(store.tensors[name].size_bytes)
                tensors[self._target(name, part)] = self._moved(name, tensor)
            module = self._fill(part.on_meta, part.prefix, tensors)
            if part.layer is not None:
                self.layers[part.layer] = module
            else:
                setattr(self, part.kind, module)
            shared = shared if shared is not None else self._tied_weight()
        return store.bytes_read - before

    def _tied_weight(self) -> torch.Tensor | None:
        """The matrix that embedding and head share, where the model has one and it is here."""
        holder = self.embed if self.embed is not None else self.head
        if not self._layout.tied or holder is None:
            return None
        return holder.get_parameter("weight")

    def _missing(self, start: int, end: int, shared: torch.Tensor | None) -> "list[_Part]":
        """What ``[start, end)`` needs and is not held; the tied matrix is needed once."""
        layout, total = self._layout, len(self._layout.layers)
        parts: list[_Part] = []
        if start == 0 and self.embed is None:
            names = [] if shared is not None else [f"{layout.embed_name}.weight"]
            parts.append(self._part("embed", layout.embed_name, names, shares=shared is not None))
        parts += [
            _Part(
                kind="layer",
                layer=index,
                prefix=f"{layout.layers_name}.{index}.",
                on_meta=layout.layers[index],
                names=layout.layer_names(index),
            )
            for index in range(start, end)
            if index not in self.layers
        ]
        if end == total and self.head is None:
            inside = [n for n in layout.tail_names() if n.startswith(f"{layout.norm_name}.")]
            outside = [n for n in layout.tail_names() if n not in inside]
            tied = layout.tied and (shared is not None or start == 0)
            if tied:
                outside.remove(f"{layout.embed_name}.weight")
            parts.append(self._part("norm", layout.norm_name, inside))
            parts.append(self._part("head", layout.head_name, outside, shares=tied))
        return parts

    def _part(self, kind: str, path: str, names: list[str], shares: bool = False) -> "_Part":
        on_meta = self._layout.model.get_submodule(path)
        return _Part(kind=kind, prefix=f"{path}.", on_meta=on_meta, names=names, shares=shares)

    def _target(self, name: str, part: "_Part") -> str:
        """A tied head is filled from the embedding's tensor."""
        return name if name.startswith(part.prefix) else f"{part.prefix}weight"

    def _moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self._device, self._layout.dtype)
        if self._layout.dtype is torch.float16 and not is_finite(moved):
            raise UserError(
                f"{self._layout.store.directory}: {name} has numbers beyond float16;"
                " use --dtype bfloat16 or float32"
            )
        return moved

    def _fill(self, on_meta: nn.Module, prefix: str, tensors: dict[str, torch.Tensor]) -> nn.Module:
        module = copy.deepcopy(on_meta)
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:  # names or shapes that the model's code does not have
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self._layout.store.directory} cannot be served yet: {reason}"
            ) from error
        left = [name for name, tensor in _tensors(module) if tensor.device.type == "meta"]
        if left:
            raise UserError(
                f"{self._layout.store.directory} cannot be served yet: {prefix}{left[0]} is"
                " computed by the model's code, not stored"
            )
        return module.eval().requires_grad_(False)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
