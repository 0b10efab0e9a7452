"""Gives a ``transformers`` model sessions' pages as its cache.

This serves families whose layers do not call attention through the interface, or whose own forward
computes a bias for it. Their sessions run one by one, with this view of the page pool as cache, or
together where each runs one row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from node.attention.segment import Segment
from node.kv.layer_pool import KvShape, LayerPool
from node.kv.session_state import SessionState, StackedStates


class PoolCache:
    """The cache interface that models need: keys, values, indexer keys, and states. A model that
    keeps something else fails here."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()
    """No layer forgets keys: windows are the mask's."""

    def __init__(self, pools: dict[int, LayerPool], segment: Segment) -> None:
        self._pools = pools
        self._segment = segment
        self._written: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its cache holds more than keys and values ({name})")

    @property
    def _state(self) -> SessionState:
        if self._segment.state is None:
            raise AttributeError("its cache holds more than keys and values")
        return self._segment.state

    # States beside keys and values, as transformers.cache_utils.Cache has them

    def _states_of(self, layer_idx: int) -> Any:
        return self._state.layer(layer_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether the session has run tokens before this step."""
        if layer_idx is None:
            return self._segment.position > 0
        known = self._state.layer(layer_idx).has_previous_state
        return all(known.values()) if state_idx is None else bool(known[state_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: states are copied whole (:mod:`node.kv.session_state`)."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """State of a layer's convolution, ``[1, channels, columns]``; None before its first
        token."""
        kept = self._states_of(layer_idx)
        return kept.conv_states[state_idx] if kept.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> torch.Tensor:
        """Append columns to a convolution's state; returns it with all, ``[1, channels,
        columns]``."""
        kept = self._states_of(layer_idx)
        state: torch.Tensor = kept.update_conv_state(conv_states, state_idx, **named)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """State of a layer's recurrence, ``[1, …]`` as the family has it; None before its first
        token."""
        kept = self._states_of(layer_idx)
        return kept.recurrent_states[state_idx] if kept.has_previous_state[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> torch.Tensor:
        """Replace the state of a layer's recurrence; returns the new one, of the same shape."""
        kept = self._states_of(layer_idx)
        state: torch.Tensor = kept.update_recurrent_state(recurrent_states, state_idx, **named)
        return state

    # Keys and values

    @property
    def _before(self) -> int:
        """Number of the session's tokens before this step, as the model asks for it."""
        return self._segment.position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that the layer holds."""
        return self._segment.context_tokens if layer_idx in self._written else self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first new row."""
        return self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """``(keys, offset of the first key)``; pages hold a session from its first token on."""
        return self._before + query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: the cache grows without a fixed length."""
        return -1

    def _fresh(self) -> slice | torch.Tensor:
        """Pool rows of the new tokens."""
        segment, slots = self._segment, self._segment.slots
        if isinstance(slots, slice):
            return slice(slots.start + segment.position, slots.stop)
        return slots[segment.position :]

    @property
    def layers(self) -> "LayerViews":
        """The list of cache layers, of which some families call methods."""
        return LayerViews(self)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write indexer keys ``[1, tokens, width]``; returns those of the whole context."""
        return self.append(layer_idx, "update_indexer", indexer_key_states)

    def append(self, layer_idx: int, method: str, fresh: torch.Tensor) -> torch.Tensor:
        """Write the indexer keys that a layer appends by the named method, ``[…, tokens, width]``
        with all other sizes 1; returns those of the whole context."""
        kept = self._pools[layer_idx].indexer
        assert kept is not None  # noqa: S101 - the layer was seen to keep them
        kept[self._fresh()] = fresh.reshape(-1, 1, fresh.shape[-1]).to(kept.dtype)
        return kept[self._segment.slots].reshape(*fresh.shape[:-2], -1, fresh.shape[-1])

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, kv_heads, tokens, width]``, return keys and values of the whole context."""
        if layer_idx in self._written:
            raise NotImplementedError("a layer that attends twice")
        slots, pool = self._segment.slots, self._pools[layer_idx]
        pool.write(self._fresh(), key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._written.add(layer_idx)
        return (
            pool.keys[slots].transpose(0, 1)[None],
            pool.values[slots].transpose(0, 1)[None],
        )


class BatchedCache(PoolCache):
    """The caches of several sessions that each run one row, along the batch dimension. Shorter
    contexts are padded in front, so that all end together; ``mask`` says where the padding is."""

    def __init__(
        self, pools: dict[int, LayerPool], segments: Sequence[Segment], device: torch.device
    ) -> None:
        longest = max(segments, key=lambda segment: segment.context_tokens)
        super().__init__(pools, longest)
        context = longest.context_tokens
        states = [segment.state for segment in segments if segment.state is not None]
        self.states = StackedStates(states)
        self._rows = torch.zeros(len(segments), context, dtype=torch.long, device=device)
        """Pool rows of the contexts, ``[sessions, tokens]``; padding is row 0, which is masked."""
        self.mask = torch.zeros(len(segments), context, dtype=torch.long, device=device)
        """1 for each token of a context, 0 for padding, ``[sessions, tokens]``."""
        for at, segment in enumerate(segments):
            slots, tokens = segment.slots, segment.context_tokens
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=device)
            self._rows[at, context - tokens :] = slots
            self.mask[at, context - tokens :] = 1

    def _states_of(self, layer_idx: int) -> Any:
        return self.states.layer(layer_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True: each session has run tokens before."""
        return True

    def append(self, layer_idx: int, method: str, fresh: torch.Tensor) -> torch.Tensor:
        """Not supported for several sessions at once."""
        raise NotImplementedError("indexer keys of several sessions")

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[sessions, kv_heads, 1, width]``, return those of the padded contexts."""
        if layer_idx in self._written:
            raise NotImplementedError("a layer that attends twice")
        pool = self._pools[layer_idx]
        pool.write(self._rows[:, -1], key[:, :, 0], value[:, :, 0])
        self._written.add(layer_idx)
        # Padding must be a number: masked scores are added to, and 0 × NaN is NaN.
        known = self.mask[..., None, None].bool()
        keys = torch.where(known, pool.keys[self._rows], 0)
        values = torch.where(known, pool.values[self._rows], 0)
        return keys.transpose(1, 2), values.transpose(1, 2)


class AskedCache:
    """The cache that a layer is given to see whether it runs without one: it hands back what it is
    given, as an empty one does, and notes what else its code asks, which cannot be left out."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Names of what was asked beside keys and values."""

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(f"its layers ask their cache for {name}")

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values themselves, ``[1, KV heads, tokens, width]`` each."""
        return key, value


class LayerViews:
    """Stands for a cache's list of layers, whose methods append indexer keys."""

    def __init__(self, cache: PoolCache, layer: int | None = None) -> None:
        self._cache = cache
        self._layer = layer

    def __getitem__(self, layer_idx: int) -> "LayerViews":
        return LayerViews(self._cache, layer_idx)

    def __getattr__(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = self._layer
        if layer is None or not name.startswith("update_"):
            raise AttributeError(f"its cache holds more than keys and values ({name})")
        return lambda fresh: self._cache.append(layer, name, fresh)


class SharedKv:
    """Replaces the mapping by which layers pass keys and values on to later layers.

    A layer that takes some writes those of the new tokens to pages of its own: the layer that made
    them may be on another machine.
    """

    def __init__(self, cache: PoolCache, rows: int, fresh: dict[Any, Any]) -> None:
        """``fresh`` holds the keys and values of the step's ``rows`` tokens that layers on other
        machines made."""
        self._cache = cache
        self._rows = rows
        self.fresh = fresh
        """Keys and values of the step's tokens, ``[1, kv_heads, tokens, width]``, by name."""
        self.layer = 0

    def __setitem__(self, key: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.fresh[key] = tuple(part[:, :, -self._rows :] for part in pair)

    def __getitem__(self, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(*self.fresh[key], self.layer)


class LookingCache(PoolCache):
    """The cache of a trial run on the meta device: notes what each layer would keep."""

    def __init__(
        self,
        tokens: int,
        states_per_layer: int = 1,
        context_tokens: int = 0,
        own_layer: Callable[[int], Any] | None = None,
    ) -> None:
        """``tokens`` rows at the end of a context, by default the whole of it.

        ``own_layer`` makes an empty layer of the cache that ``transformers`` would use.
        """
        context = context_tokens or tokens
        super().__init__(
            {},
            Segment(
                first=0,
                last=tokens,
                context_tokens=context,
                slots=slice(0, context),
                state=SessionState(states_per_layer),
            ),
        )
        self._own_layer = own_layer
        self.unanswered: list[str] = []
        """Names of what was asked in vain, perhaps without an error (``hasattr``)."""
        self.asks_length = False
        """Whether it was asked for the session's length."""
        self.seen: set[int] = set()
        """Layers that would keep something."""
        self.kv_shapes: dict[int, KvShape] = {}
        """Shape of keys and values, by layer."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):  # else it is a library's question, as by copy.deepcopy
            self.unanswered.append(name)
        return super().__getattr__(name)

    @property
    def _before(self) -> int:
        self.asks_length = True
        return super()._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the layer's shape; nothing is written. Returns ``[1, KV heads, context, width]``
        without meaning for keys and for values."""
        self._note(layer_idx, kv_heads=key.shape[1])
        self._note(layer_idx, key_width=key.shape[-1], value_width=value.shape[-1])
        context = self._segment.context_tokens
        return (
            key.new_empty(*key.shape[:2], context, key.shape[-1]),
            value.new_empty(*value.shape[:2], context, value.shape[-1]),
        )

    def append(self, layer_idx: int, method: str, fresh: torch.Tensor) -> torch.Tensor:
        """Note the width of a layer's indexer keys, if the method does no more than append them."""
        shape = tuple(fresh.shape)
        if fresh.numel() != self._segment.rows * shape[-1] or shape[-2] != self._segment.rows:
            raise NotImplementedError(f"it keeps indexer keys of shape {shape}")
        if method != "update_indexer" and not self._appends(layer_idx, method, shape):
            raise NotImplementedError(f"its cache holds more than keys and values ({method})")
        if self.kv_shapes.get(layer_idx, KvShape()).indexer_width:
            raise NotImplementedError("it keeps indexer keys of several kinds")
        self._note(layer_idx, indexer_width=shape[-1])
        return fresh.new_empty(*shape[:-2], self._segment.context_tokens, shape[-1])

    def _appends(self, layer_idx: int, method: str, shape: tuple[int, ...]) -> bool:
        """Whether the method of the layer that ``transformers`` would use returns all that it was
        given, one after the other."""
        if self._own_layer is None:
            return False
        generator = torch.Generator().manual_seed(0)
        one, other = (torch.randn(shape, generator=generator) for _ in range(2))
        append = getattr(self._own_layer(layer_idx), method)
        both = append(one), append(other)
        expected = one, torch.cat([one, other], dim=-2)
        return all(map(torch.equal, both, expected))

    def _note(self, layer_idx: int, **widths: int) -> None:
        self.seen.add(layer_idx)
        self.kv_shapes[layer_idx] = self.kv_shapes.get(layer_idx, KvShape())._replace(**widths)

    def _states_of(self, layer_idx: int) -> Any:
        self.seen.add(layer_idx)
        return super()._states_of(layer_idx)

    def state_bytes(self, layer_idx: int) -> int:
        """Bytes of the states that a layer keeps for a session."""
        kept = self._state.layer(layer_idx)
        tensors = [*kept.conv_states.values(), *kept.recurrent_states.values()]
        return sum(each.numel() * each.itemsize for each in tensors if each is not None)
