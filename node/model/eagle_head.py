"""An EAGLE-3 head: a checkpoint beside a model's own, of one layer that foretells its tokens.

Such a head (EAGLE-3, Li et al. 2025, §3) takes a token's hidden states in front of three of the
model's layers, an early one, one in the middle and a late one, joined and projected, and the
embedding of the token that follows. Both are normed and joined, and one layer attends to them; its
output, behind a norm and an output head of few tokens, gives the token after the next. For the
drafts after that, the layer's own output stands in for the hidden states. Heads are known by the
names of their tensors.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from dht.checkpoints.model_files import library_config
from dht.errors import UserError, first_line
from node.attention.paged_attention import ATTENTION_NAME
from node.model.draft_head import Enter
from node.model.inspection.layer_traits import FAILURES
from node.model.inspection.meta_model import model_of
from node.model.inspection.session_inspection import Unservable
from node.model.layer_range import LoadedRange, ModelLayout
from node.packed.formats import stored_weights
from node.packed.stored import Stored
from node.weights.store import WeightStore

LAYER, STACK, ENTRY, NORM, OUTPUT, EMBEDDING = (
    "midlayer.",
    "model.layers.0.",
    "model.embed_tokens.",
    "model.norm.",
    "lm_head.",
    "own_embedding.",
)
RENAMED = {
    LAYER: STACK,
    "layers.0.": STACK,
    "fc.": ENTRY,
    "norm.": NORM,
    OUTPUT: OUTPUT,
    "embed_tokens.": EMBEDDING,
}
"""Beginnings of the names of a head's tensors, and where they are in its model."""
TOKENS, MASK = "d2t", "t2d"
"""For each token of the head's output, what is to be added for the model's; which of the model's
tokens those are, which follows from it."""
NEEDED = ("fc.weight", "norm.weight", "lm_head.weight")
FEATURE_LAYERS = 3
"""Layers in front of which a head takes hidden states."""
IDS = "eagle_aux_hidden_state_layer_ids"
"""How a configuration names them, where they are not the usual ones."""


class Entry(nn.Linear):
    """Projects a token's hidden states. As a part of the head's model it stands where others have
    their embedding, which the head shares with the model that it drafts for."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.weight.new_zeros(*token_ids.shape, 2 * self.out_features)

    def rows(self, embedded: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """Rows of the layer, ``[rows, 2 × width]``: embeddings, and hidden states, which are those
        of the model, ``[rows, 3 × its width]``, or the layer's own, ``[rows, width]``."""
        if behind.shape[-1] == self.in_features:
            behind = nn.functional.linear(behind, self.weight, self.bias)
        return torch.cat([embedded.to(behind.dtype), behind], dim=-1)


class Layer(nn.Module):
    """A decoder layer of transformers whose attention takes embeddings beside hidden states."""

    def __init__(self, layer: Any, width: int, *, norm_before_residual: bool) -> None:
        """``layer`` is on the meta device; its parts become this one's."""
        super().__init__()
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            made = getattr(layer.self_attn, name)
            with torch.device("meta"):
                wider = nn.Linear(
                    2 * width,
                    made.out_features,
                    bias=made.bias is not None,
                    dtype=made.weight.dtype,
                )
            setattr(self.self_attn, name, wider)
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self._norm_before_residual = norm_before_residual

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        embedded, hidden = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        if self._norm_before_residual:
            hidden = normed
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=joined, **given)
        hidden = hidden + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return torch.cat([embedded, hidden], dim=-1)


class Norm(nn.RMSNorm):
    """The norm behind the layer, of its output alone."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(own_half(rows))


class Output(nn.Linear):
    """The output head, which knows the model's most usual tokens alone."""

    tokens: torch.Tensor | None = None
    """The model's token for each of its own; None: they are the same."""
    vocab: int = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = super().forward(rows)
        if self.tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf)
        return whole.index_copy(-1, self.tokens, logits)


def own_half(rows: torch.Tensor) -> torch.Tensor:
    """The layer's output, ``[rows, width]``, from its rows, ``[rows, 2 × width]``."""
    return rows[..., rows.shape[-1] // 2 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """Implements :class:`node.model.draft_head.DraftHead` over a checkpoint of its own."""

    main: ModelLayout
    layout: ModelLayout
    feature_layers: tuple[int, ...]
    embeds: bool
    """Whether it has an embedding of its own."""

    def more_bytes(self, *, embeds: bool) -> int:
        if self.embeds:
            own = self.layout.model.get_submodule(EMBEDDING[:-1])
            return sum(each.numel() for each in own.parameters()) * self.main.dtype.itemsize
        return 0 if embeds else self.main.spec("").embed_bytes

    def fetch(self) -> None:
        layout = self.layout if self.embeds else self.main
        path = EMBEDDING[:-1] if self.embeds else self.main.embed_name
        layout.store.fetch(layout.names.sources(layout.part_parameters(path)))

    def lent(self, beside: LoadedRange) -> dict[str, nn.Module]:
        return {}

    def entered(self, loaded: LoadedRange, beside: LoadedRange) -> Enter:
        entry: Any = loaded.embed
        output: Any = loaded.head
        embed = self._embedding(loaded, beside)
        output.tokens, output.vocab = self._tokens(loaded.device), self.main.spec("").vocab
        loaded.behind = lambda hidden, _: own_half(hidden)
        beside.behind = lambda _, features: features

        def enter(token_ids: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = entry.rows(embed(token_ids), behind)
            return rows

        return enter

    def _embedding(self, loaded: LoadedRange, beside: LoadedRange) -> nn.Module:
        if self.embeds:
            return loaded.filled(EMBEDDING[:-1])
        return beside.parts.get(self.main.embed_name) or beside.filled(self.main.embed_name)

    def _tokens(self, device: torch.device) -> torch.Tensor | None:
        """The model's token for each of the head's; None where they are the same."""
        store, vocab = self.layout.store, self.main.spec("").vocab
        if TOKENS not in store.tensors:
            return None
        ((_, offsets),) = store.read([TOKENS])
        tokens = offsets.long() + torch.arange(len(offsets))
        if not bool(((tokens >= 0) & (tokens < vocab)).all()):
            raise UserError(f"{store.directory}: {TOKENS} has tokens beyond the model's {vocab}")
        return tokens.to(device)


def is_eagle_head(store: WeightStore) -> bool:
    """Whether a checkpoint is an EAGLE-3 head, by the names of its tensors."""
    attention = any(f"{begin}hidden_norm.weight" in store.tensors for begin in (LAYER, "layers.0."))
    return attention and all(name in store.tensors for name in NEEDED)


def eagle_head(main: ModelLayout, store: WeightStore) -> EagleHead:
    """The head in ``store`` for the model ``main``. Raises UserError where it is none for it."""
    where = store.directory
    try:
        return _head_of(main, store)
    except (Unservable, *FAILURES, OSError) as error:
        told = f"{where} cannot draft for {main.store.directory}: {first_line(error)}"
        raise UserError(told) from error


def _head_of(main: ModelLayout, store: WeightStore) -> EagleHead:
    structure, layers = main.structure, len(main.layers)
    if structure.row_width != structure.width:
        raise Unservable("the model's rows carry more than hidden states")
    config = library_config(store.directory)
    features = _feature_layers(store.config, layers)
    shapes = {name: entry.shape for name, entry in store.tensors.items()}
    strange = [name for name in shapes if not name.startswith((*RENAMED, TOKENS, MASK))]
    if strange:
        raise Unservable(f"it has {strange[0][:80]}, which no EAGLE-3 head has that is known here")
    if store.config.get("norm_output"):
        raise Unservable("it goes on from normed output")
    width, vocab = int(config.hidden_size), main.spec("").vocab
    _check_shape(shapes, "fc.weight", (width, FEATURE_LAYERS * structure.width))
    known = shapes["lm_head.weight"][0]
    if TOKENS in shapes:
        _check_shape(shapes, TOKENS, (known,))
    elif known != vocab:
        raise Unservable(f"it knows {known} tokens of {vocab}, and does not say which")
    embeds = "embed_tokens.weight" in shapes
    if embeds:
        _check_shape(shapes, "embed_tokens.weight", (vocab, width))
    elif width != structure.width:
        raise Unservable(f"it has no embedding, and its width is {width}, not {structure.width}")
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    config.vocab_size, config.max_position_embeddings = vocab, main.spec("").context_tokens
    stored = _renamed(stored_weights(str(store.directory), store.config, store.tensors))
    model = _model_of(config, main.dtype, int(known), prod(shapes["fc.weight"][1:]), stored)
    if embeds:
        with torch.device("meta"):
            model.add_module(EMBEDDING[:-1], nn.Embedding(vocab, width, dtype=main.dtype))
    layout = ModelLayout.studied(store, config, model, stored, main.dtype, packed=True)
    layout = replace(layout, quantize=main.quantize, device=main.device).with_names(stored)
    for path in ("model.layers.0", *layout.structure.before, *layout.structure.behind):
        layout.names.sources(layout.part_parameters(path))  # raises UserError where one is lacking
    return EagleHead(main=main, layout=layout, feature_layers=features, embeds=embeds)


def _feature_layers(said: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers in front of which the head takes hidden states.

    Configurations number them in two ways: by these layers, or, within ``eagle_config``, by those
    before them.
    """
    nested = said.get("eagle_config")
    named = said.get(IDS)
    if named is None and isinstance(nested, dict) and isinstance(nested.get(IDS), list):
        named = [each + 1 for each in nested[IDS] if isinstance(each, int)]
    found = (2, layers // 2, layers - 3) if named is None else named
    whole = isinstance(found, list | tuple) and all(type(each) is int for each in found)
    if not whole or len(set(found)) != FEATURE_LAYERS or not 0 <= min(found) <= max(found) < layers:
        raise Unservable(f"it takes hidden states in front of layers {str(found)[:80]} of {layers}")
    return tuple(sorted(found))


def _check_shape(
    shapes: Mapping[str, tuple[int, ...]], name: str, expected: tuple[int, ...]
) -> None:
    if tuple(shapes[name]) != expected:
        found = list(shapes[name])
        raise Unservable(f"its {name} has the shape {found}; {list(expected)} fits the model")


def _renamed(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The head's weights by their names in its model."""
    return {
        own + name.removeprefix(begin): kept
        for name, kept in stored.items()
        for begin, own in RENAMED.items()
        if name.startswith(begin)
    }


def _model_of(
    config: Any, dtype: torch.dtype, tokens: int, features: int, stored: Mapping[str, Stored]
) -> nn.Module:
    """The head's model on the meta device, with ``tokens`` rows of its output head and
    ``features`` numbers that come with a token."""
    model: Any = model_of(config, dtype, ATTENTION_NAME)
    width, stack = int(config.hidden_size), model.model
    first = bool(getattr(config, "norm_before_residual", False))
    stack.layers[0] = Layer(stack.layers[0], width, norm_before_residual=first)
    with torch.device("meta"):
        biased = f"{ENTRY}bias" in stored
        stack.embed_tokens = Entry(features, width, bias=biased, dtype=dtype)
        stack.norm = Norm(width, eps=config.rms_norm_eps, dtype=dtype)
        model.lm_head = Output(width, tokens, bias=False, dtype=dtype)
    made: nn.Module = model.eval()
    return made
