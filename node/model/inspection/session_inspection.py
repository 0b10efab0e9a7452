"""Finds what layers keep and pass on in a model whose layers run session by session.

Its own forward computes the layers' arguments, so they are only compared: what differs between
token ids has to travel with the rows, what differs between hidden states cannot be served. Layers
are run without numbers, on the meta device, to see what each keeps per token and per session, what
it takes from layers before it, and under which name.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from node.attention.cache_view import LookingCache
from node.kv.layer_pool import KvShape
from node.model.carried import Argument, Carried, Chosen, NoForm, Pair, Shared, TokenForm
from node.model.inspection.argument_tracing import same
from node.model.inspection.layer_traits import FAILURES, on_meta
from node.model.inspection.skeleton import Heard, LayerCall, LayerFunction, Skeleton, argument_of

IDS, OTHER_IDS = (0, 1, 2), (2, 0, 1)


class Unservable(Exception):
    """The reason why a model cannot be run part by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFlow:
    """What rows carry, and what each layer keeps."""

    carried: Carried
    by_ids: bool
    """Whether its forward runs only for token ids, not for embeddings."""
    kv_shapes: tuple[KvShape, ...]
    state_bytes: tuple[int, ...]
    asks_length: bool
    """Whether a layer asks its cache for its length."""


class LookingShares(dict[Any, Any]):
    """Stands for the mapping in which layers pass on keys and values; notes who takes whose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = 0
        self.kept: dict[Any, tuple[int, Pair]] = {}
        self.taken: dict[int, Shared] = {}

    def __setitem__(self, key: Any, pair: Pair) -> None:
        self.kept[key] = self.layer, pair

    def __getitem__(self, key: Any) -> Pair:
        source, (keys, values) = self.kept[key]
        kv = KvShape(keys.shape[1], keys.shape[-1], values.shape[-1])
        shared = Shared(key=key, source=source, kv=kv)
        if self.taken.setdefault(self.layer, shared) != shared:
            raise Unservable(f"layer {self.layer} takes the keys of several layers")
        return keys, values


@dataclass(slots=True, kw_only=True)
class _Looked:
    """Outcome of a layer's run without numbers."""

    view: LookingCache
    output: Any = None
    failure: str = ""
    needs_chosen: bool = False
    chosen: Any = field(default=None)


class SessionInspection:
    """Inspects the layers of a model on the meta device through its skeleton."""

    def __init__(
        self,
        skeleton: Skeleton,
        layers: Sequence[nn.Module],
        *,
        states_per_layer: int,
        context_tokens: int,
        own_layer: Callable[[int], Any],
        answer: LayerFunction,
        other_answer: LayerFunction,
    ) -> None:
        """``own_layer`` makes an empty cache layer of ``transformers``; ``answer`` and
        ``other_answer`` are outputs of layers that differ."""
        self._own_layer = own_layer
        self._skeleton, self._layers = skeleton, layers
        self._states = states_per_layer
        self._context_tokens = context_tokens
        self._answer, self._other_answer = answer, other_answer
        self._first = self._heard(IDS)
        self._longer = self._heard((*IDS, 3))

    def _heard(
        self,
        ids: Sequence[int],
        context_tokens: int = 0,
        answer: LayerFunction | None = None,
        beside: Sequence[Any] = (),
    ) -> Heard:
        """A forward pass over ``ids`` at the end of a context."""
        context = context_tokens or len(ids)
        with torch.inference_mode():
            return self._skeleton.run(
                token_ids=torch.tensor([ids]),
                positions=torch.arange(context - len(ids), context)[None],
                cache=LookingCache(len(ids), self._states, context),
                answer=answer or self._answer,
                beside=beside,
            )

    def form(self) -> TokenForm:
        """Form of the hidden states. Raises Unservable."""
        one, other = (heard.layers[0].hidden for heard in (self._first, self._longer))
        try:
            return TokenForm.of(one, other)
        except NoForm:
            shape = tuple(one.shape)
            raise Unservable(f"its layers pass on tensors of shape {shape}") from None

    def flow(self, embedded: torch.Tensor) -> SessionFlow:
        """What rows carry and layers keep; ``embedded`` tries whether embeddings are taken.

        Raises Unservable.
        """
        inputs = self._inputs()
        chains = self._chains()
        shares = LookingShares()
        looked = self._look(self._first, len(IDS), len(IDS), chains, shares)
        kept = []
        for index, each in enumerate(looked):
            if each.view.unanswered:
                raise Unservable(f"layer {index} asks its cache for {each.view.unanswered[0]}")
            if others := each.view.seen - {index}:
                raise Unservable(f"layer {index} uses what layer {min(others)} keeps")
            own = each.view.kv_shapes.get(index, KvShape())
            shared = shares.taken.get(index)
            if shared is not None and own.numbers:
                raise Unservable(f"layer {index} uses the keys of layer {shared.source}, too")
            kept.append(own if shared is None else shared.kv)
        failure = next((each.failure for each in looked if each.failure), "")
        if failure and not any(each.view.seen for each in looked):
            raise Unservable(f"its layers look at numbers before they keep any ({failure})")
        count = len(self._layers)
        carried = Carried(
            hidden=self.form(),
            inputs=inputs,
            chosen=self._chosen(chains) if chains else (None,) * count,
            shared=tuple(shares.taken.get(index) for index in range(count)),
        )
        return SessionFlow(
            carried=carried,
            by_ids=self._runs_by_ids_alone(embedded),
            kv_shapes=tuple(kept),
            state_bytes=tuple(each.view.state_bytes(at) for at, each in enumerate(looked)),
            asks_length=any(each.view.asks_length for each in looked),
        )

    def _runs_by_ids_alone(self, embedded: torch.Tensor) -> bool:
        tokens = embedded.shape[1]
        try:
            with torch.inference_mode():
                self._skeleton.run(
                    embedded=embedded,
                    positions=torch.arange(tokens)[None],
                    cache=LookingCache(tokens, self._states),
                )
        except FAILURES:
            return True
        return False

    def _inputs(self) -> tuple[tuple[tuple[Argument, TokenForm], ...], ...]:
        """Arguments of each layer that depend on token ids, row by row. Raises Unservable."""
        elsewhere = self._heard(IDS, answer=self._other_answer)
        others = self._heard(OTHER_IDS)
        apart = [self._heard(IDS[:1]), self._heard(IDS[1:], len(IDS))]
        found = []
        for index, call in enumerate(self._first.layers):
            own: list[tuple[Argument, TokenForm]] = []
            for argument, value in _arguments(call):
                if isinstance(value, LookingCache):
                    continue
                if not same(value, _argument(elsewhere, index, argument)):
                    raise Unservable("its layers are given more than hidden states and positions")
                if same(value, _argument(others, index, argument)):
                    continue
                parts = [_argument(heard, index, argument) for heard in apart]
                longer = _argument(self._longer, index, argument)
                own.append((argument, _form(value, longer, parts)))
            found.append(tuple(own))
        return tuple(found)

    def _chains(self) -> dict[int, Argument]:
        """Arguments in which layers are given what the layer before returned beside its output."""
        if not self._skeleton.tuples:
            return {}
        marks = [torch.zeros(1, len(IDS), 1, dtype=torch.int32) for _ in self._layers]
        try:
            heard = self._heard(IDS, beside=marks)
        except FAILURES:
            return {}
        chains: dict[int, Argument] = {}
        for index, call in enumerate(heard.layers):
            for argument, value in _arguments(call):
                sources = [at for at, mark in enumerate(marks) if value is mark]
                if sources and sources != [index - 1]:
                    raise Unservable(f"layer {index} is given what layer {sources[0]} returns")
                if sources:
                    chains[index] = argument
        return chains

    def _chosen(self, chains: dict[int, Argument]) -> tuple[Chosen | None, ...]:
        """What each layer needs of tokens that the one before chose, in the longest context."""
        context = self._context_tokens
        heard = self._heard(IDS[:1], context)
        looked = self._look(heard, 1, context, chains, LookingShares())
        found: list[Chosen | None] = []
        for index, each in enumerate(looked):
            if not each.needs_chosen:
                found.append(None)
                continue
            before = looked[index - 1].chosen
            if not isinstance(before, torch.Tensor) or before.is_floating_point():
                raise Unservable(f"layer {index} needs what layer {index - 1} returns")
            found.append(Chosen(argument=chains[index], most=int(before.shape[-1])))
        return tuple(found)

    def _look(
        self,
        heard: Heard,
        tokens: int,
        context_tokens: int,
        chains: dict[int, Argument],
        shares: LookingShares,
    ) -> list[_Looked]:
        """Run the layers in order on the meta device, at no cost."""
        looked: list[_Looked] = []
        for index, (layer, call) in enumerate(zip(self._layers, heard.layers, strict=True)):
            shares.layer = index
            shadow = copy.deepcopy(layer).to("meta")
            before = looked[-1].chosen if looked else None
            each = self._looked(shadow, call, tokens, context_tokens, shares, {})
            if index in chains and before is not None:
                given = {chains[index]: before}
                again = self._looked(shadow, call, tokens, context_tokens, shares, given)
                again.needs_chosen = each.failure != again.failure
                each = again
            looked.append(each)
        return looked

    def _looked(
        self,
        shadow: nn.Module,
        call: LayerCall,
        tokens: int,
        context_tokens: int,
        shares: LookingShares,
        given: dict[Argument, Any],
    ) -> _Looked:
        view = LookingCache(tokens, self._states, context_tokens, self._own_layer)
        looked = _Looked(view=view)

        def seen(argument: Argument, value: Any) -> Any:
            if isinstance(value, LookingCache):
                return view
            if isinstance(value, MutableMapping) and not value:
                return shares
            return given.get(argument, on_meta(value))

        def listen(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1:
                last = output[-1]
                if isinstance(last, torch.Tensor) and not last.is_floating_point():
                    looked.chosen = last

        hooks = [module.register_forward_hook(listen) for module in shadow.children()]
        try:
            with torch.inference_mode():
                output = shadow(
                    call.hidden.to("meta"),
                    *(seen(at, value) for at, value in enumerate(call.positional)),
                    **{name: seen(name, value) for name, value in call.named.items()},
                )
            looked.chosen = output[1] if isinstance(output, tuple) and output[1:] else None
        except FAILURES as error:
            # Experts may need numbers; what was not noted then fails in the trial of a load.
            looked.failure = f"{type(error).__name__}: {error}"
        finally:
            for hook in hooks:
                hook.remove()
        return looked


def _arguments(call: LayerCall) -> Iterator[tuple[Argument, Any]]:
    """A layer's arguments beside its hidden states."""
    yield from enumerate(call.positional)
    yield from call.named.items()


def _argument(heard: Heard, index: int, argument: Argument) -> Any:
    return argument_of(heard.layers[index], argument)


def _form(value: Any, longer: Any, parts: Sequence[Any]) -> TokenForm:
    """Form of an argument computed from token ids; ``parts`` is for its first and other tokens."""
    told = "its layers are given something computed from several tokens' ids"
    if not isinstance(value, torch.Tensor):
        raise Unservable(told)
    try:
        form = TokenForm.of(value, longer)
    except NoForm:
        raise Unservable(told) from None
    if not torch.equal(torch.cat(list(parts), dim=form.dim), value):
        raise Unservable(told)
    return form
