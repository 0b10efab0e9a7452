"""A model's own head: a layer of its checkpoint, beyond its stack, that foretells tokens.

Such a head (multi-token prediction, DeepSeek-V3, §2.2) takes the last layer's output at a position,
behind the final norm, and the embedding of the token drawn from it. Both are normed, joined and
projected, and go through one more layer of the model's own kind, a norm and the model's output
head, which gives the token after the next. So it is a model of one layer with another entry, and it
is built, inspected and filled like any model. Families are told apart by the names of their tensors
alone.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
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

logger = logging.getLogger(__name__)

ENTRY = "own_head_entry"
"""Name of the head's entry among the modules of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """Beginnings of the names of a head's tensors; ``{layers}`` is the number of the model's."""

    block: str
    """Its layer. Names that another beginning fits as well are not of the layer."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    """The norm before the output head."""


LAYOUTS = (
    HeadNames(  # DeepSeek-V3 and its kin, GLM-4.x MoE: one layer more than the configuration says
        block="model.layers.{layers}.",
        embedding_norm="model.layers.{layers}.enorm.",
        hidden_norm="model.layers.{layers}.hnorm.",
        projection="model.layers.{layers}.eh_proj.",
        norm="model.layers.{layers}.shared_head.norm.",
    ),
    HeadNames(  # Qwen3-Next, Mellum
        block="mtp.layers.0.",
        embedding_norm="mtp.pre_fc_norm_embedding.",
        hidden_norm="mtp.pre_fc_norm_hidden.",
        projection="mtp.fc.",
        norm="mtp.norm.",
    ),
)


class HeadEntry(nn.Module):
    """Joins the last layer's output at a position with the token that was drawn from it."""

    def __init__(self, norm: nn.Module, width: int, dtype: torch.dtype, hidden_first: bool) -> None:
        """``norm``: one of the model's, on the meta device, of ``width`` numbers."""
        super().__init__()
        self.embedding_norm = copy.deepcopy(norm)
        self.hidden_norm = copy.deepcopy(norm)
        with torch.device("meta"):
            self.projection = nn.Linear(2 * width, width, bias=False, dtype=dtype)
        self._hidden_first = hidden_first

    def forward(self, embedded: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """Input of the head's layer, ``[rows, width]``, from the tokens' embeddings and the rows
        behind the model's last norm."""
        parts = [self.embedding_norm(embedded), self.hidden_norm(behind)]
        if self._hidden_first:
            parts.reverse()
        joined: torch.Tensor = self.projection(torch.cat(parts, dim=-1))
        return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHead:
    """Implements :class:`node.model.draft_head.DraftHead` over a model's own checkpoint."""

    main: ModelLayout
    layout: ModelLayout
    feature_layers: tuple[int, ...] = ()

    def more_bytes(self, *, embeds: bool) -> int:
        spec = self.layout.spec("")
        entry = sum(part.numel() for part in self.layout.model.get_submodule(ENTRY).parameters())
        shared = spec.head_bytes + (spec.embed_bytes if embeds else 0)
        return entry * self.main.dtype.itemsize - shared

    def fetch(self) -> None:
        layout = self.layout
        layout.store.fetch(layout.names.sources(layout.part_parameters(ENTRY)))

    def lent(self, beside: LoadedRange) -> dict[str, nn.Module]:
        shared = {self.main.embed_name, self.main.head_name}
        return {name: part for name, part in beside.parts.items() if name in shared}

    def entered(self, loaded: LoadedRange, beside: LoadedRange) -> Enter:
        entry, embed = loaded.filled(ENTRY), loaded.embed
        assert embed is not None  # noqa: S101 - for the type checker: its first layer is held
        loaded.behind = lambda hidden, _: loaded.normed(hidden)
        beside.behind = lambda hidden, _: beside.normed(hidden)

        def enter(token_ids: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = entry(embed(token_ids), behind)
            return rows

        return enter


def own_head(main: ModelLayout) -> OwnHead | None:
    """The head of the model ``main``; None if its checkpoint has none that can be run here."""
    config = main.config
    stored = stored_weights(str(main.store.directory), main.store.config, main.store.tensors)
    given = _names(stored, len(main.layers))
    if given is None:
        return None
    reason = "it is run beside more than hidden states and positions"
    if config.get_text_config() is config and _is_plain(main):
        for packed in (True, False):
            try:
                layout = _head_of(main, given, stored, packed=packed)
                return OwnHead(main=main, layout=layout)
            except (Unservable, *FAILURES, OSError, UserError) as error:
                reason = first_line(error)
    logger.info("the model's own head is left out: %s", reason[:200])
    return None


def _head_of(
    main: ModelLayout, names: HeadNames, stored: Mapping[str, Stored], *, packed: bool
) -> ModelLayout:
    norm, stack = main.structure.behind[0], main.layers_name
    config = _one_layer(library_config(main.store.directory))
    model = model_of(config, main.dtype, ATTENTION_NAME if packed else None)
    as_own = {
        names.embedding_norm: f"{ENTRY}.embedding_norm.",
        names.hidden_norm: f"{ENTRY}.hidden_norm.",
        names.projection: f"{ENTRY}.projection.",
        names.norm: f"{norm}.",
        names.block: f"{stack}.0.",
    }
    left_out = (f"{stack}.", f"{norm}.", *as_own)
    renamed = {name: kept for name, kept in stored.items() if not name.startswith(left_out)}
    for name, kept in stored.items():
        begin = next((begin for begin in as_own if name.startswith(begin)), None)
        if begin is not None:
            renamed[as_own[begin] + name.removeprefix(begin)] = kept
    layout = ModelLayout.studied(main.store, config, model, renamed, main.dtype, packed=packed)
    if not _is_plain(layout):
        raise Unservable("its layer takes more than hidden states and positions")
    width = layout.structure.width
    first = bool(getattr(config, "mtp_hidden_states_first", False))
    entry = HeadEntry(model.get_submodule(norm), width, main.dtype, first)
    model.add_module(ENTRY, entry)
    made = replace(layout, quantize=main.quantize, device=main.device).with_names(renamed)
    parts = (ENTRY, f"{stack}.0", norm)
    parameters = [name for path in parts for name in made.part_parameters(path)]
    made.names.sources(parameters)  # raises UserError where one is lacking
    made.names.packed(parameters, main.store.tensors)  # or has another shape
    return made


def _names(stored: Iterable[str], layers: int) -> HeadNames | None:
    """Names of the head's tensors in this checkpoint; None if it has no head."""
    known = list(stored)
    for layout in LAYOUTS:
        begins_of = {part: begin.format(layers=layers) for part, begin in asdict(layout).items()}
        given = HeadNames(**begins_of)
        begins = (given.embedding_norm, given.hidden_norm, given.projection, given.norm)
        if all(any(name.startswith(begin) for name in known) for begin in begins):
            return given
    return None


def _is_plain(layout: ModelLayout) -> bool:
    """Whether embedding, layers, norm and head follow each other with nothing in between."""
    structure = layout.structure
    plain = structure.plain_entry and structure.plain_tail and len(structure.behind) == 2
    return plain and structure.row_width == structure.width


def _one_layer(config: Any) -> Any:
    """The configuration of a model whose one layer is of the head's kind.

    That is what the configuration says of its heads, or the kind of the last layer.
    """
    layers = config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            said = getattr(config, f"mtp_{key}", None)
            setattr(config, key, [said[0] if said else value[-1]])
    config.num_hidden_layers = 1
    for key, value in {"first_k_dense_replace": 0, "decoder_sparse_step": 1}.items():
        if hasattr(config, key):  # experts from the first layer on
            setattr(config, key, value)
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = []
    return config
