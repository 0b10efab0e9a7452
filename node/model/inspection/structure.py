"""Finds how a model is put together, by running its own forward with recorders for layers.

Nothing is known of families by name. Around its layers a model is either plain (the embedding goes
into the first layer, the last layer's output through norm and head), or its own forward is run. The
layers' arguments are traced to their origins, or computed by the model's own forward for each
session. A model that fits neither is refused with the reason, because it would answer nonsense
without any error.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from node.attention.cache_view import AskedCache, LookingCache
from node.attention.paged_attention import KvShapeFound, LooksAhead, set_looking
from node.kv.layer_pool import KvShape
from node.kv.session_state import SessionState
from node.model.carried import Carried, TokenForm
from node.model.inspection.argument_tracing import (
    ArgumentOrigins,
    Hidden,
    Positions,
    Tracer,
    Untraceable,
    same,
)
from node.model.inspection.layer_traits import (
    FAILURES,
    LayerTraits,
    on_meta,
    ran_without_numbers,
    traits_of,
)
from node.model.inspection.session_inspection import SessionFlow, SessionInspection, Unservable
from node.model.inspection.skeleton import (
    Heard,
    LayerFunction,
    PartCall,
    Skeleton,
    StandIn,
    blank_input,
    rotates_by_length,
)
from node.model.lean_transformers import without_compiler

TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """A weightless module that computes arguments from positions, such as a rotary embedding."""

    name: str
    arguments: ArgumentOrigins
    token_dims: tuple[int, ...]
    """Dimension of each output tensor that counts the tokens."""
    by_length: bool
    """Whether its output depends on the length of the context, not only on the position."""
    recordable: bool = False
    """Whether its operations are the same for all positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """A model's parts and the flow between them."""

    tuples: bool
    """Whether layers return a tuple."""
    packed: bool
    """Whether rows of many sessions may share a layer's call."""
    width: int
    """Width of the hidden states between layers."""
    before: tuple[str, ...]
    """Parts with weights that run before the layers: the embedding, and whatever follows it."""
    behind: tuple[str, ...]
    """Parts with weights that run after the layers, in order; the last one is the head."""
    plain_entry: bool
    plain_tail: bool
    everywhere: tuple[str, ...] = ()
    """Those of ``before`` that go by positions alone and make arguments of layers: every stage
    needs them."""
    sources: tuple[LayerSource, ...] = ()
    calls: tuple[ArgumentOrigins, ...] = ()
    """Arguments of each layer, if ``packed``."""
    kv_shapes: tuple[KvShape, ...] = ()
    """What each layer keeps per token."""
    carried: Carried | None = None
    """What rows carry beyond hidden states; None if that is nothing."""
    rotates_by_length: bool = False
    """Whether rotary frequencies depend on the length of the context."""
    by_ids: bool = False
    """Whether its forward runs for token ids alone, not for embeddings."""
    first_position: int = 0
    """The number that its own forward gives the first token's position."""
    state_bytes: tuple[int, ...] = ()
    """Bytes of the states beside keys and values that each layer keeps for a session."""
    states_per_layer: int = 1
    """Maximum number of such states of a layer."""
    asks_length: bool = False
    """Whether a layer asks its session's cache for its length."""
    traits: tuple[LayerTraits, ...] = ()
    """Traits of each layer, if ``packed``."""

    @property
    def keeps_state(self) -> bool:
        """Whether sessions keep a state beside keys and values."""
        return any(self.state_bytes)

    def new_state(self) -> SessionState | None:
        """What a new session keeps beside keys and values; None if that is nothing."""
        return SessionState(self.states_per_layer) if self.keeps_state else None

    @property
    def row_width(self) -> int:
        """Numbers of a row between layers."""
        return self.width if self.carried is None else self.carried.width

    def trial_rows(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Rows that layers from ``layer`` on can run, made of ``numbers``, ``[tokens, width]``."""
        return numbers if self.carried is None else self.carried.trial(layer, numbers)

    @property
    def may_stack(self) -> bool:
        """Whether rows of sessions with states may run along the batch dimension, if a trial shows
        the same results."""
        plain = self.carried is not None and self.carried.plain and not self.by_ids
        indexed = any(shape.indexer_width for shape in self.kv_shapes)
        by_length = self.rotates_by_length or self.asks_length
        return self.keeps_state and plain and not indexed and not by_length

    @property
    def by_length(self) -> bool:
        """Whether keys depend on the maximum length of their session."""
        if not self.packed:
            return self.rotates_by_length
        return any(source.by_length for source in self.sources)


def inspect_model(
    model: nn.Module, layers_name: str, *, packed: bool, context_tokens: int, dtype: torch.dtype
) -> ModelStructure:
    """The structure of ``model``, which is on the meta device.

    ``packed``: whether its attention was replaced by ours. Raises Unservable, and LooksAhead.
    """

    def studied() -> ModelStructure:
        return _Inspection(model, layers_name, packed, context_tokens, dtype).structure()

    try:
        try:
            with without_compiler():
                return studied()
        except ImportError:  # it needs something that only the compiler has
            return studied()
    except Untraceable as reason:
        raise Unservable(str(reason)) from reason
    except LooksAhead:
        raise
    except FAILURES as error:
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise Unservable(f"its layers cannot be run one by one ({what})") from error


def _positions(start: int, tokens: int) -> torch.Tensor:
    return torch.arange(start, start + tokens)[None]


def _noisy(seed: int) -> LayerFunction:
    """Layers that output their input plus noise; the noise depends on the layer."""

    def answer(index: int, hidden: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + index)
        noise = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        return hidden + noise

    return answer


class _Inspection:
    def __init__(
        self,
        model: nn.Module,
        layers_name: str,
        packed: bool,
        context_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        stack: Any = model.get_submodule(layers_name)
        self._layers: list[nn.Module] = list(stack)
        self._packed = packed
        self._context_tokens = context_tokens
        self._dtype = dtype
        if packed and _convolves(self._layers):
            raise Unservable("its layers keep a state beside keys and values")
        self._states_per_layer = _states_per_layer(model)
        self._skeleton, self._first = self._rightly_answered(model, layers_name)
        hidden = self._first.layers[0].hidden
        self._form = TokenForm(shape=(1, hidden.shape[-1]), dim=1)
        self._flow: SessionFlow | None = None
        if not packed:
            inspection = SessionInspection(
                self._skeleton,
                self._layers,
                states_per_layer=self._states_per_layer,
                context_tokens=context_tokens,
                own_layer=lambda index: _cache_layer(model, index),
                answer=_noisy(0),
                other_answer=_noisy(1),
            )
            self._form = inspection.form()
            self._flow = inspection.flow(self._noise(self._embedded_width(), 5)[None])
        self._width = self._form.width
        loose = self._skeleton.loose
        if self._matter(loose):
            which = next((name for name in loose if self._matter([name])), loose[0])
            raise Unservable(f"beside its layers it has {which}, which belongs to no module")

    def _matter(self, loose: Sequence[str]) -> bool:
        """Whether the numbers of weights that belong to no module change anything for token ids;
        those of what sees or hears do not."""
        if not loose:
            return False
        self._skeleton.fill_loose(loose, 1.0)
        try:
            filled = self._heard(self._skeleton)
        finally:
            self._skeleton.fill_loose(loose)
        alike = _same_layers(self._first, filled) and same(self._first.logits, filled.logits)
        return not alike

    def _rightly_answered(self, model: nn.Module, layers_name: str) -> tuple[Skeleton, Heard]:
        """The skeleton whose layers return outputs in the form that the model's forward expects."""
        failure: Exception | None = None
        for tuples in (False, True):
            skeleton = Skeleton(model, layers_name, tuples=tuples)
            try:
                skeleton.first_position = self._first_position(skeleton)
                heard = self._heard(skeleton)
                self._check_order(heard)
            except (*FAILURES, Unservable) as error:
                failure = failure or error
                continue
            return skeleton, heard
        assert failure is not None  # noqa: S101 - for the type checker
        raise failure

    def _first_position(self, skeleton: Skeleton) -> int:
        """The number that the model's own forward gives the first token's position where nobody
        says so: beyond padding's, in RoBERTa and what comes of it."""
        padding = skeleton.padding_id
        ids = torch.tensor([[at for at in range(TOKENS + 1) if at != padding][:TOKENS]])

        def heard(first: int | None) -> Heard:
            positions = None if first is None else _positions(first, TOKENS)
            with torch.inference_mode():
                return skeleton.run(
                    token_ids=ids,
                    positions=positions,
                    cache=self._cache(TOKENS),
                    answer=_noisy(0),
                    listen=True,
                )

        try:
            own = heard(None)
        except FAILURES:
            return 0  # it has to be told
        told = heard(0)
        if _same_layers(own, told):
            return 0
        for first in _shifts(own, told):
            if _same_layers(own, heard(first)):
                return first
        raise Unservable("it numbers positions in a way of its own")

    def _cache(self, tokens: int) -> Any:
        return None if self._packed else LookingCache(tokens, self._states_per_layer)

    def _heard(self, skeleton: Skeleton, seed: int = 0, start: int = 0, first_id: int = 0) -> Heard:
        with torch.inference_mode():
            return skeleton.run(
                token_ids=torch.arange(first_id, first_id + TOKENS)[None],
                positions=_positions(start, TOKENS),
                cache=self._cache(TOKENS),
                answer=_noisy(seed),
                listen=True,
            )

    def _check_order(self, heard: Heard) -> None:
        if heard.order != list(range(len(self._layers))):
            raise Unservable("its layers are not called once each, in order")
        expected = heard.layers[0].hidden
        if self._packed and (expected.dim() != 3 or expected.shape[:2] != (1, TOKENS)):
            raise Unservable(f"its layers pass on tensors of shape {tuple(expected.shape)}")
        answer = _noisy(0)
        for index, call in enumerate(heard.layers):
            if not torch.equal(call.hidden, expected):
                raise Unservable("it changes the hidden states between its layers")
            expected = answer(index, call.hidden)

    def structure(self) -> ModelStructure:
        before, behind = self._sides()
        flow = self._flow
        if flow is None:
            self._check_independence()
        sources, calls = self._traced() if flow is None else ((), ())
        if flow is None:
            self._check_entry_is_by_row()
        self._check_tail()
        layers = range(len(self._layers))
        return ModelStructure(
            tuples=self._skeleton.tuples,
            packed=flow is None,
            width=self._width,
            before=before,
            behind=behind,
            everywhere=self._everywhere(before) if flow else (),
            plain_entry=self._plain_entry(before),
            plain_tail=self._form.shape == (1, self._width) and self._plain_tail(behind),
            sources=sources,
            calls=calls,
            kv_shapes=flow.kv_shapes if flow else tuple(self._kept(index) for index in layers),
            state_bytes=flow.state_bytes if flow else (0,) * len(layers),
            carried=flow.carried if flow else None,
            first_position=self._skeleton.first_position,
            by_ids=flow is not None and flow.by_ids,
            asks_length=flow is not None and flow.asks_length,
            rotates_by_length=any(map(rotates_by_length, self._skeleton.modules())),
            states_per_layer=self._states_per_layer,
            traits=self._traits() if flow is None else (),
        )

    def _noise(self, width: int, seed: int) -> torch.Tensor:
        """Random numbers ``[TOKENS, width]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(TOKENS, width, generator=generator).to(self._dtype)

    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parts with weights, before and behind the layers."""
        before: list[str] = []
        behind: list[str] = []
        for call in self._part_calls():
            if 0 < call.layers_before < len(self._layers):
                raise Unservable(f"{call.name} runs between its layers")
            side = before if call.layers_before == 0 else behind
            if call.name in before or call.name in behind:
                raise Unservable(f"{call.name} runs more than once")
            side.append(call.name)
        if not before or not behind:
            raise Unservable("it has no embedding or no LM head")
        return tuple(before), tuple(behind)

    def _everywhere(self, before: Sequence[str]) -> tuple[str, ...]:
        """Those of the parts whose output goes by positions alone, and reaches layers beside their
        rows."""
        one, other = (
            {call.name: call.output for call in heard.parts}
            for heard in (self._first, self._heard(self._skeleton, first_id=TOKENS))
        )
        by_positions = (name for name in before if same(one[name], other[name]))
        return tuple(filter(self._reaches_beside_rows, by_positions))

    def _reaches_beside_rows(self, name: str) -> bool:
        """Whether a part's output makes arguments of layers, and nothing of their rows."""
        part = self._skeleton.module(name)
        assert isinstance(part, StandIn)  # noqa: S101 - no part has weights yet
        part.shift = 1.0
        try:
            shifted = self._heard(self._skeleton)
        finally:
            part.shift = 0.0
        layers = zip(self._first.layers, shifted.layers, strict=True)
        return all(same(a.hidden, b.hidden) for a, b in layers) and not _same_arguments(
            self._first, shifted
        )

    def _part_calls(self) -> list[PartCall]:
        return [call for call in self._first.parts if call.name in self._skeleton.parts]

    def _check_independence(self) -> None:
        """Raise Unservable if the layers' arguments depend on hidden states or token ids."""
        with torch.inference_mode():
            other = self._skeleton.run(
                embedded=self._noise(self._embedded_width(), 5)[None],
                positions=_positions(0, TOKENS),
                cache=self._cache(TOKENS),
                answer=_noisy(1),
            )
        for one, two in zip(self._first.layers, other.layers, strict=True):
            for a, b in zip(
                (*one.positional, *one.named.values()),
                (*two.positional, *two.named.values()),
                strict=True,
            ):
                if not same(a, b) and not (isinstance(a, LookingCache) and type(a) is type(b)):
                    raise Unservable("its layers are given more than hidden states and positions")

    def _embedded_width(self) -> int:
        return int(self._part_calls()[0].output.shape[-1])

    def _traced(self) -> tuple[tuple[LayerSource, ...], tuple[ArgumentOrigins, ...]]:
        weightless = [
            call
            for call in self._first.parts
            if call.layers_before <= len(self._layers) and call.name not in self._skeleton.parts
        ]
        tracer = Tracer(_positions(0, TOKENS), self._width)
        tracer.offer(weightless)
        calls = tuple(tracer.arguments(c.positional, c.named) for c in self._first.layers)
        if any(isinstance(origin, Hidden) for call in calls for origin in _origins(call)):
            raise Unservable("its layers are given hidden states twice")
        outer = Tracer(_positions(0, TOKENS), self._embedded_width())
        outer.offer([])
        sources = tuple(
            self._source(call, outer.arguments(call.positional, call.named))
            for call in tracer.calls
        )
        self._check_traced(sources, calls)
        return sources, calls

    def _source(self, call: PartCall, arguments: ArgumentOrigins) -> LayerSource:
        module = self._skeleton.module(call.name)
        if not any(isinstance(origin, Positions) for origin in _origins(arguments)):
            raise Unservable(f"{call.name} does not go by positions")

        def made(positions: torch.Tensor) -> list[torch.Tensor]:
            hidden = torch.zeros(1, TOKENS, self._embedded_width(), dtype=self._dtype)
            positional, named = arguments.resolve(hidden, positions, ())
            with torch.inference_mode():
                output = module(*positional, **named)
            return list(output) if isinstance(output, tuple | list) else [output]

        three, four = made(_positions(0, TOKENS)), made(_positions(0, TOKENS + 1))
        dims = []
        for a, b in zip(three, four, strict=True):
            differing = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
            if len(differing) != 1:
                raise Unservable(f"{call.name} does not go by tokens")
            dims.append(differing[0])
        last = torch.tensor([[max(self._context_tokens - 1, TOKENS)]])
        far = made(torch.cat([_positions(0, TOKENS), last], dim=1))
        by_length = any(
            not torch.equal(a, b.narrow(dim, 0, TOKENS))
            for a, b, dim in zip(three, far, dims, strict=True)
        )
        return LayerSource(
            name=call.name,
            arguments=arguments,
            token_dims=tuple(dims),
            by_length=by_length,
            recordable=ran_without_numbers(module, *call.positional, **call.named),
        )

    def _check_traced(
        self, sources: Sequence[LayerSource], calls: Sequence[ArgumentOrigins]
    ) -> None:
        """Raise Untraceable if traced arguments differ from the model's at other positions."""
        start = 7
        heard = self._heard(self._skeleton, seed=2, start=start)
        positions = _positions(start, TOKENS)
        hidden = heard.layers[0].hidden
        with torch.inference_mode():
            outputs = []
            for source in sources:
                positional, named = source.arguments.resolve(hidden, positions, ())
                outputs.append(self._skeleton.module(source.name)(*positional, **named))
        for call, expected in zip(calls, heard.layers, strict=True):
            positional, named = call.resolve(hidden, positions, outputs)
            if not same(positional, expected.positional) or not same(named, expected.named):
                raise Untraceable("its layers are given what cannot be traced to positions")

    def _check_entry_is_by_row(self) -> None:
        """Raise Untraceable if a row's input to the layers depends on other rows."""
        ids = torch.tensor([[0, 1, 1, 0]])
        positions = torch.tensor([[0, 1, 0, 1]])
        with torch.inference_mode():
            whole, left, right = (
                self._skeleton.run(token_ids=ids[:, at], positions=positions[:, at])
                for at in (slice(0, 4), slice(0, 2), slice(2, 4))
            )
        apart = torch.cat([left.layers[0].hidden, right.layers[0].hidden], dim=1)
        if not torch.equal(whole.layers[0].hidden, apart):
            raise Untraceable("it mixes tokens before the first layer")

    def _check_tail(self) -> None:
        """Raise Unservable if a row's logits depend on other rows."""
        hidden = self._noise(self._width, 6)
        by_ids = self._flow is not None and self._flow.by_ids

        def logits(rows: torch.Tensor) -> torch.Tensor:
            tokens = rows.shape[0]
            with torch.inference_mode():
                heard = self._skeleton.run(
                    **blank_input(tokens, None if by_ids else self._embedded_width(), rows),
                    positions=_positions(0, tokens),
                    answer=lambda _, __: self._form.tensor(rows),
                )
            assert heard.logits is not None  # noqa: S101 - the forward returned them
            return heard.logits

        whole = logits(hidden)
        alone = [logits(hidden[at : at + 1]) for at in range(TOKENS)]
        if whole.shape[:2] != (1, TOKENS) or not torch.allclose(whole, torch.cat(alone, dim=1)):
            raise Unservable("it mixes tokens behind the last layer")

    def _plain_entry(self, before: tuple[str, ...]) -> bool:
        if len(before) != 1:
            return False
        call = self._part_calls()[0]
        ids = torch.arange(TOKENS)[None]
        given = (*call.positional, *call.named.values())
        return (
            len(given) == 1
            and same(given[0], ids)
            and torch.equal(call.output, self._first.layers[0].hidden)
        )

    def _plain_tail(self, behind: tuple[str, ...]) -> bool:
        """Whether the last layer's output goes through each part in turn, and nothing else."""
        last = len(self._layers) - 1
        flowing = _noisy(0)(last, self._first.layers[last].hidden)
        calls = {call.name: call for call in self._part_calls()}
        for name in behind:
            given = (*calls[name].positional, *calls[name].named.values())
            if len(given) != 1 or not same(given[0], flowing):
                return False
            flowing = calls[name].output
        return self._first.logits is not None and torch.equal(self._first.logits, flowing)

    def _traits(self) -> tuple[LayerTraits, ...]:
        found = tuple(
            traits_of(layer, call.hidden, *call.positional, **call.named)
            for layer, call in zip(self._layers, self._first.layers, strict=True)
        )
        self._check_no_cache_is_needed()
        if any(traits.attends > 1 for traits in found):  # their pages would be written twice
            raise Unservable("its layers attend more than once")
        return found

    def _check_no_cache_is_needed(self) -> None:
        """Raise Unservable if the model's code asks a cache for more than to keep keys and values,
        such as for its length: rows of many sessions share no such cache."""
        start = 7
        cache = LookingCache(TOKENS, self._states_per_layer, start + TOKENS)
        with torch.inference_mode():
            with_cache = self._skeleton.run(
                token_ids=torch.arange(TOKENS)[None],
                positions=_positions(start, TOKENS),
                cache=cache,
                answer=_noisy(0),
            )
        if not _same_arguments(self._heard(self._skeleton, start=start), with_cache):
            raise Unservable("its layers are given what depends on its cache")
        for index, (layer, call) in enumerate(zip(self._layers, with_cache.layers, strict=True)):
            asked = AskedCache()

            def seen(value: Any, asked: AskedCache = asked) -> Any:
                return asked if value is cache else value

            named = {name: seen(value) for name, value in call.named.items()}
            traits_of(layer, call.hidden, *map(seen, call.positional), **named)
            if asked.asked:
                raise Unservable(f"layer {index} asks its cache for {asked.asked[0]}")

    def _kept(self, index: int) -> KvShape:
        """What a layer keeps per token; found on the meta device, at no cost."""
        layer = copy.deepcopy(self._layers[index]).to("meta")
        call = self._first.layers[index]
        set_looking(True)
        try:
            with torch.inference_mode():
                layer(
                    call.hidden.to("meta"),
                    *on_meta(call.positional),
                    **on_meta(call.named),
                )
        except KvShapeFound as found:
            if found.layer != index:
                raise Unservable(f"layer {index} uses the keys of layer {found.layer}") from None
            return KvShape(*found.shape)
        finally:
            set_looking(False)
        raise Unservable(f"layer {index} does not call attention")


def _same_layers(own: Heard, told: Heard) -> bool:
    """Whether layers get the same hidden states and arguments in two passes."""
    hidden = zip(own.layers, told.layers, strict=False)
    return _same_arguments(own, told) and all(torch.equal(a.hidden, b.hidden) for a, b in hidden)


def _same_arguments(own: Heard, told: Heard) -> bool:
    """Whether layers get the same arguments in two passes; what they get in the second alone is
    what only its caller said, such as that there is a cache."""

    def is_same(a: Any, b: Any) -> bool:
        cached = isinstance(a, LookingCache) and type(a) is type(b)
        return a is None or (a is False and b is True) or cached or same(a, b)

    return len(own.layers) == len(told.layers) and all(
        len(a.positional) == len(b.positional)
        and all(map(is_same, a.positional, b.positional))
        and all(name in b.named and is_same(a.named[name], b.named[name]) for name in a.named)
        for a, b in zip(own.layers, told.layers, strict=True)
    )


def _shifts(own: Heard, told: Heard) -> list[int]:
    """By how much integers that parts are given differ in two passes, if all by the same."""
    found: dict[int, None] = {}
    for a, b in zip(own.parts, told.parts, strict=False):
        for p, q in zip(a.positional, b.positional, strict=False):
            if not isinstance(p, torch.Tensor) or not isinstance(q, torch.Tensor):
                continue
            if p.is_floating_point() or p.shape != q.shape or not p.numel():
                continue
            apart = p.long() - q.long()
            if int(apart.min()) == int(apart.max()) > 0:
                found[int(apart.max())] = None
    return list(found)


def _convolves(layers: Sequence[nn.Module]) -> bool:
    """Whether layers may mix tokens without asking a cache; one with a recurrence alone shows that
    it needs a cache, or calls no attention."""
    return any(isinstance(module, nn.Conv1d) for each in layers for module in each.modules())


def _states_per_layer(model: Any) -> int:
    """Maximum number of convolutions or recurrences of one layer."""
    return int(getattr(model.config.get_text_config(), "number_of_conv_states", None) or 1)


def _cache_layer(model: Any, index: int) -> Any:
    """An empty layer of the cache that ``transformers`` uses for the model."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=model.config).layers[index]


def _origins(arguments: ArgumentOrigins) -> list[Any]:
    return [*arguments.positional, *(origin for _, origin in arguments.named)]
