"""Builds layers of a decoder-only model from its configuration, and fills ranges of them.

``transformers`` supplies every line of model code. A model's parts are found by structure, never by
its name: the one list of ``num_hidden_layers`` modules, the input embedding, the output head, and
whatever the model's own forward does around them (:mod:`node.model.inspection.structure`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dht.checkpoints.library_files import key_words
from dht.checkpoints.model_files import sizes_of
from dht.errors import UserError, first_line
from dht.messages.types import ModelSpec, with_layer_bytes
from node.attention.paged_attention import ATTENTION_NAME, LooksAhead, register_attention
from node.device.heap import give_back
from node.device.tensors import DTYPES, is_finite
from node.kernels.choice import RowsKernels
from node.model.execution.cuda_graphs import CudaCapture
from node.model.execution.forward import LayerForward
from node.model.inspection.layer_traits import FAILURES
from node.model.inspection.meta_model import build_meta_model, kept_float32, layers_name
from node.model.inspection.session_inspection import Unservable
from node.model.inspection.skeleton import Skeleton
from node.model.inspection.structure import ModelStructure, inspect_model
from node.model.inspection.tied import tied_to, ties
from node.model.linear.packed_linear import favour_few_rows
from node.model.linear.quantize import held_bytes, packed_of, quantised, quantize_linears
from node.packed.formats import stored_weights
from node.packed.operand import operand_of
from node.packed.stored import Stored
from node.packed.tensor import PackedTensor
from node.weights.checkpoint_names import CheckpointNames, integers_of
from node.weights.hashes import Progress
from node.weights.store import WeightStore

STATE_TOKENS = 1024
"""Tokens that a session is charged with where a model keeps states alone."""
CPU = torch.device("cpu")
Behind = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""(rows of the last layer, ``[rows, width]``, the hidden states of the last of them in front of
earlier layers, if there are any) → what a head joins with the tokens behind the last rows; None
where it lacks something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model's parts on the meta device: shapes without memory."""

    store: WeightStore
    dtype: torch.dtype
    config: Any
    model: nn.Module
    layers: nn.ModuleList
    layers_name: str
    embed_name: str
    head_name: str
    tied: bool
    structure: ModelStructure
    names: CheckpointNames
    kept_float32: frozenset[str]
    """Parameters that the model's code computes in float32, whatever the dtype."""
    quantize: str | None = None
    """Quantisation of the layers' linear modules, one of
    :data:`coordinator.plans.catalogue.precision.QUANTISED`."""
    device: torch.device = CPU
    """The device that the weights will be on; sizes are those that they take there."""

    @classmethod
    def of(
        cls, store: WeightStore, dtype: str, quantize: str | None = None, *, device: str = "cpu"
    ) -> "ModelLayout":
        """Build the model without weights; UserError if its structure cannot be served."""
        register_attention()
        reason = ""
        stored = stored_weights(str(store.directory), store.config, store.tensors)
        for packed in (True, False):  # all sessions in one row if that is right
            try:
                attention = ATTENTION_NAME if packed else None
                config, model = build_meta_model(store, DTYPES[dtype], attention)
                studied = cls.studied(store, config, model, stored, DTYPES[dtype], packed=packed)
                return replace(studied, quantize=quantize, device=torch.device(device))
            except LooksAhead:
                reason = "its layers attend to later tokens"
                break
            except (Unservable, *FAILURES, OSError, ImportError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of this machine, such as a full disk
                told = first_line(error)
                if isinstance(error, ImportError):  # whose advice takes several lines
                    told = " ".join(str(error).split())[:300]
                if isinstance(error, KeyError) and error.args:
                    told = key_words(error, store.config)
                if ATTENTION_NAME not in told:
                    reason = told
        raise UserError(f"{store.directory} cannot be served yet: {reason}")

    @classmethod
    def studied(
        cls,
        store: WeightStore,
        config: Any,
        model: nn.Module,
        stored: Mapping[str, Stored],
        dtype: torch.dtype,
        *,
        packed: bool,
    ) -> "ModelLayout":
        """The layout of ``model``, which is on the meta device, with the weights ``stored``, by
        their names in checkpoints of its family.

        ``packed``: whether its attention is ours. Raises what its code raises, and Unservable.
        """
        stack = layers_name(model, config)
        structure = inspect_model(
            model,
            stack,
            packed=packed,
            context_tokens=sizes_of(config)[1],
            dtype=dtype,
        )
        if not any(shape.numbers for shape in structure.kv_shapes) and not any(
            structure.state_bytes
        ):
            raise Unservable("its layers keep neither keys and values nor a state")
        named = {id(module): name for name, module in model.named_modules()}
        whole: Any = model
        embed_name = named.get(id(whole.get_input_embeddings()), "")
        head_name = named.get(id(whole.get_output_embeddings()), "")
        if embed_name not in structure.before or head_name not in structure.behind:
            raise Unservable("its embedding or its LM head is not where it says")
        names = CheckpointNames(str(store.directory), model, stored, store.config)
        layers: Any = model.get_submodule(stack)
        return cls(
            store=store,
            dtype=dtype,
            config=config,
            model=model,
            layers=layers,
            layers_name=stack,
            embed_name=embed_name,
            head_name=head_name,
            tied=f"{head_name}.weight" not in names and ties(model, f"{head_name}.weight"),
            structure=structure,
            names=names,
            kept_float32=kept_float32(model, dtype),
        )

    def with_names(self, stored: Mapping[str, Stored]) -> "ModelLayout":
        """The layout with the weights ``stored`` for all modules that the model has by now."""
        store = self.store
        names = CheckpointNames(str(store.directory), self.model, stored, store.config)
        return replace(self, names=names)

    def skeleton(self) -> Skeleton:
        """The model's own forward without weights, on the CPU."""
        return Skeleton(
            self.model,
            self.layers_name,
            tuples=self.structure.tuples,
            first_position=self.structure.first_position,
        )

    def spec(self, name: str) -> ModelSpec:
        """The model as planners need it; sizes are in the dtype that peers compute in."""
        layers, longest, vocab = sizes_of(self.config)
        sizes = list(self._layer_bytes())
        item = self.dtype.itemsize
        behind = sum(self._part_bytes(part) for part in self.structure.behind)
        before = sum(self._part_bytes(part) for part in self.structure.before)
        spec = ModelSpec(
            name=name,
            root=self.store.root,
            layers=layers,
            layer_bytes=max(sizes),
            embed_bytes=before,
            head_bytes=behind,
            kv_bytes_per_token_layer=self.kv_bytes_per_token_layer,
            activation_bytes=self.structure.row_width * item,
            context_tokens=longest - self.structure.first_position,
            vocab=vocab,
        )
        return with_layer_bytes(spec, sizes)

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of KV per token and layer, by which memory is shared out.

        States of a layer take what its own keys and values leave of it: a layer that keeps both is
        given twice as much, and a model without keys and values its states for ``STATE_TOKENS``.
        """
        item, structure = self.dtype.itemsize, self.structure
        kv = [shape.numbers * item for shape in structure.kv_shapes]
        states = structure.state_bytes or (0,) * len(kv)
        both = [2 * size if state else size for size, state in zip(kv, states, strict=True)]
        return max(both) or -(-2 * max(states) // STATE_TOKENS)

    @property
    def state_tokens(self) -> int:
        """Tokens of KV on each layer whose memory a session's states, and their copies from before
        the newest step, may take."""
        per_token, item = self.kv_bytes_per_token_layer, self.dtype.itemsize
        kept = zip(self.structure.kv_shapes, self.structure.state_bytes, strict=False)
        return max(
            (-(-2 * size // (per_token - kv.numbers * item)) for kv, size in kept if size),
            default=0,
        )

    def _layer_bytes(self) -> Iterator[int]:
        """Bytes of each layer, and of what a stage needs wherever it begins; those of equal tensors
        are counted once."""
        known: dict[object, int] = {}
        beside = sum(map(self._part_bytes, self.structure.everywhere))
        for index in range(len(self.layers)):
            kind = self.layer_kind(index)
            if kind not in known:
                known[kind] = self._part_bytes(f"{self.layers_name}.{index}", self.quantize)
            yield known[kind] + beside

    def layer_kind(self, index: int) -> object:
        """The same for layers of equal tensors."""
        parameters = self.part_parameters(f"{self.layers_name}.{index}")
        names = self.names.sources(map(self.stored_as, parameters))
        entries = [self.store.tensors[name] for name in names]
        return tuple((entry.dtype, entry.shape) for entry in entries)

    def _part_bytes(self, path: str, quantize: str | None = None) -> int:
        parameters = self.part_parameters(path)
        packed = self.names.packed(parameters, self.store.tensors)
        module = self.model.get_submodule(path)
        if quantize is not None:
            for name, turned in packed_of(module, quantize, self.device, self.dtype).items():
                weight = module.get_parameter(name)
                rows = weight.transpose(1, 2) if turned else weight
                packed.setdefault(f"{path}.{name}", quantised(rows, quantize, rows.device))
        sizes = {
            name.removeprefix(f"{path}."): self.held(name, part).held_bytes
            for name, part in packed.items()
        }
        return held_bytes(module, quantize, self.dtype, sizes)

    def part_parameters(self, path: str) -> list[str]:
        """Names of a module's parameters in a checkpoint, in the terms of the model's code."""
        module = self.model.get_submodule(path)
        return [f"{path}.{name}" for name in module.state_dict()]

    def stored_as(self, parameter: str) -> str:
        """The parameter whose tensors fill ``parameter``: itself, or one that it is tied to where
        the files hold that one alone."""
        tied = () if parameter in self.names else tied_to(self.model, parameter)
        return next((name for name in tied if name in self.names), parameter)

    def held(self, parameter: str, weight: PackedTensor) -> PackedTensor:
        """A packed weight, perhaps on the meta device, in the layout that it is kept in."""
        return operand_of(weight.to(self.dtype_of(parameter)), self.device)  # type: ignore[arg-type]

    def dtype_of(self, parameter: str) -> torch.dtype:
        """The dtype of a parameter; some must stay float32, whatever the rest uses, and integers
        what they are."""
        if parameter in self.kept_float32:
            return torch.float32
        if (kept := integers_of(self.model, parameter)) is not None:
            return kept
        return self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module to fill: a layer, or one beside the layers."""

    path: str
    """Name of the module in the model."""
    names: list[str]
    """Checkpoint tensors from which the parameters are made."""
    stored: dict[str, list[str]]
    """The module's parameters, by the names of the model's code, under the one whose tensors fill
    them: itself, or one that they are tied to."""
    layer: int | None = None
    shares: bool = False
    """Whether its weight is the tied matrix, which another part holds."""


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
    """Modules of the layers that this peer holds, filled on its device."""

    def __init__(
        self, layout: ModelLayout, device: torch.device, kernels: RowsKernels | None = None
    ) -> None:
        """``kernels`` take the place of parts of the layers where they compute the same."""
        self._layout = layout
        self.device = device
        """Device on which parts are filled."""
        self.layers: dict[int, nn.Module] = {}
        self.parts: dict[str, nn.Module] = {}
        """Modules with weights beside the layers, by their names in the model."""
        self.behind: Behind | None = None
        """Makes what a head that is held joins with tokens; None where there is no head."""
        self._made_up = False
        capture = CudaCapture(device) if device.type == "cuda" else None
        self.forward = LayerForward(
            layout.structure, layout.skeleton().to(device), capture, kernels
        )
        """Runs rows through what is held."""

    @property
    def embed(self) -> nn.Module | None:
        """The token embedding, if the first layer is held."""
        return self.parts.get(self._layout.embed_name)

    @property
    def head(self) -> nn.Module | None:
        """The output head, if the last layer is held."""
        return self.parts.get(self._layout.head_name)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of the last layer, ``[rows, width]``, behind the model's last norm, where nothing
        else but the head is behind that layer."""
        for path in self._layout.structure.behind[:-1]:
            hidden = self.parts[path](hidden)
        return hidden

    def fetch(self, start: int, end: int, progress: Progress | None = None) -> None:
        """Download the files that layers ``[start, end)`` need beyond what is held; may run beside
        steps. Raises UserError and NetworkError."""
        if self._made_up:
            self.layers, self.parts, self._made_up = {}, {}, False
        names = [name for part in self._missing(start, end, None) for name in part.names]
        self._layout.store.fetch(names, progress)

    def set(
        self, start: int, end: int, progress: Progress | None = None, *, made_up: bool = False
    ) -> int:
        """Hold exactly layers ``[start, end)``; those that stay are not read again. Returns bytes
        read.

        ``made_up`` fills the parts with random numbers instead; the next call forgets them.

        Layers that leave are freed first, and parts are filled one after the other. So memory holds
        at most the larger of the two ranges, and the source tensors of one parameter. After an
        error, filled parts stay and the next call does not read them again.
        """
        store = self._layout.store
        if self._made_up or made_up:
            self.layers, self.parts = {}, {}
        self._made_up = made_up
        self.layers = {i: layer for i, layer in self.layers.items() if start <= i < end}
        self.forward.keep(self.layers)
        shared = self._tied_weight()
        beside = self._beside(start, end)
        self.parts = {path: part for path, part in self.parts.items() if path in beside}
        self.forward.hold(self.parts)  # drops the other parts
        missing = self._missing(start, end, shared)
        entries = [store.tensors[n] for part in missing for n in part.names if n in store.tensors]
        meter = _Meter(sum(entry.size_bytes for entry in entries), progress)
        before = store.bytes_read
        for part in missing:
            tensors = self._tensors(part, shared, meter)
            module = self._fill(part, tensors)
            self.forward.multiply_packed(module)
            if self._layout.quantize is not None and part.layer is not None:
                module = quantize_linears(module, self._layout.quantize)
            if part.layer is not None:
                module = self.forward.prepared(part.layer, module, self._layout.dtype, self.device)
            elif not self._layout.tied:
                module = favour_few_rows(module)
            if part.layer is not None:
                self.layers[part.layer] = module
            else:
                self.parts[part.path] = module
            shared = shared if shared is not None else self._tied_weight()
            del tensors, module
            give_back()  # what the sources of this part took, before those of the next
        self.forward.hold(self.parts)
        return store.bytes_read - before

    def lend(self, parts: Mapping[str, nn.Module]) -> None:
        """Use parts beside the layers that another range holds, by their names in the model, until
        the next :meth:`clear`."""
        self.parts |= parts

    def filled(self, path: str) -> nn.Module:
        """A module, filled on the device beside the parts that are held; the tied matrix, if it is
        here, is not read again."""
        layout, shared = self._layout, self._tied_weight()
        tied = shared is not None and path in (layout.embed_name, layout.head_name)
        part = self._part(path, shares=tied)
        return self._fill(part, self._tensors(part, shared, _Meter(0, None)))

    def clear(self) -> None:
        """Hold nothing; the memory is free once nobody uses the parts."""
        self.layers, self.parts, self._made_up = {}, {}, False
        self.forward.keep(self.layers)
        self.forward.hold({})

    def _beside(self, start: int, end: int) -> list[str]:
        """Modules beside the layers that ``[start, end)`` needs."""
        structure = self._layout.structure
        before = structure.before if start == 0 else structure.everywhere
        behind = structure.behind if end == len(self._layout.layers) else ()
        return [*before, *behind]

    def _tied_weight(self) -> torch.Tensor | None:
        """The matrix shared by embedding and head, if the model has one and it is here."""
        holder = self.embed if self.embed is not None else self.head
        if not self._layout.tied or holder is None:
            return None
        return holder.get_parameter("weight")

    def _missing(self, start: int, end: int, shared: torch.Tensor | None) -> "list[_Part]":
        """Parts that ``[start, end)`` needs beyond those held; the tied matrix is needed once."""
        layout = self._layout
        parts = [
            self._part(f"{layout.layers_name}.{index}", layer=index)
            for index in range(start, end)
            if index not in self.layers
        ]
        here = shared is not None
        for path in self._beside(start, end):
            if path not in self.parts:
                tied = layout.tied and path in (layout.embed_name, layout.head_name)
                parts.append(self._part(path, shares=tied and here))
                here = here or tied
        return parts

    def _part(self, path: str, layer: int | None = None, shares: bool = False) -> "_Part":
        layout = self._layout
        weight = f"{path}.weight"
        parameters = [n for n in layout.part_parameters(path) if not (shares and n == weight)]
        lent = layout.tied and path == layout.head_name and not shares
        stored: dict[str, list[str]] = {}
        for name in parameters:
            known = f"{layout.embed_name}.weight" if lent and name == weight else name
            stored.setdefault(layout.stored_as(known), []).append(name)
        return _Part(
            path=path,
            names=layout.names.sources(stored),
            stored=stored,
            layer=layer,
            shares=shares,
        )

    def _tensors(
        self, part: "_Part", shared: torch.Tensor | None, meter: _Meter
    ) -> dict[str, torch.Tensor]:
        """The part's parameters by name, each made as soon as all its source tensors are read."""
        layout, weight = self._layout, f"{part.path}.weight"
        made = {weight: shared} if part.shares and shared is not None else {}
        waiting = layout.names.conversions(part.stored)
        packed: dict[str, bool] = {}
        if layout.quantize is not None and part.layer is not None:
            module = layout.model.get_submodule(part.path)
            found = packed_of(module, layout.quantize, self.device, layout.dtype).items()
            packed = {f"{part.path}.{name}": turned for name, turned in found}
        sources = {
            source: names for c in waiting for source, names in layout.names.tensors(c).items()
        }
        owners = {name: source for source, names in sources.items() for name in names}
        read: dict[str, dict[str, torch.Tensor]] = {}
        weights: dict[str, torch.Tensor] = {}
        tensors = layout.store.make_up if self._made_up else layout.store.read
        for name, tensor in tensors(part.names):
            meter.add(layout.store.tensors[name].size_bytes)
            source = owners[name]
            read.setdefault(source, {})[name] = tensor
            if len(read[source]) < len(sources[source]):
                continue
            weights[source] = layout.names.weight(source, read.pop(source), made_up=self._made_up)
            ready = [c for c in waiting if all(s in weights for s, _ in c.sources)]
            for conversion in ready:
                waiting.remove(conversion)
                for target, parameter in layout.names.convert(conversion, weights).items():
                    for filled in part.stored.get(target, ()):
                        made[filled] = self._moved(
                            filled, self._quantised(parameter, packed.get(filled))
                        )
        return made

    def _quantised(self, weight: torch.Tensor, turned: bool | None) -> torch.Tensor:
        """Weights to pack in the bits asked for; all else (``turned`` None) as it is."""
        if turned is None or isinstance(weight, PackedTensor):
            return weight
        rows = weight.transpose(1, 2) if turned else weight
        packed = quantised(rows, self._layout.quantize or "", self.device)
        return packed.transpose(1, 2) if turned else packed

    def _moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._layout.dtype_of(name)
        moved = tensor.to(self.device, dtype)
        if isinstance(moved, PackedTensor):
            finite = moved.is_finite
        else:
            finite = not _is_narrower(dtype, tensor.dtype) or is_finite(moved)
        if not finite:
            beyond = "float16; use --dtype bfloat16 or float32"
            if dtype is not torch.float16:
                beyond = f"{str(dtype).removeprefix('torch.')}, or that are none"
            raise UserError(f"{self._layout.store.directory}: {name} has numbers beyond {beyond}")
        return self._layout.held(name, moved) if isinstance(moved, PackedTensor) else moved

    def _fill(self, part: "_Part", tensors: dict[str, torch.Tensor]) -> nn.Module:
        module = copy.deepcopy(self._layout.model.get_submodule(part.path))
        prefix = f"{part.path}."
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:  # names or shapes that the model's code lacks
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self._layout.store.directory} cannot be served yet: {reason}"
            ) from error
        for inner in module.modules():
            for name, buffer in inner.named_buffers(recurse=False):
                if buffer.device.type != "meta":  # computed by the model's code, not stored
                    inner._buffers[name] = buffer.to(self.device)
        left = [name for name, tensor in _tensors(module) if tensor.device.type == "meta"]
        if left:
            raise UserError(
                f"{self._layout.store.directory} cannot be served yet: {prefix}{left[0]} is"
                " computed by the model's code, not stored"
            )
        return module.eval().requires_grad_(False)


def _is_narrower(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether numbers of one dtype may be beyond another's."""
    if not (dtype.is_floating_point and stored.is_floating_point):
        return False
    return torch.finfo(dtype).max < torch.finfo(stored).max


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
