"""A head that drafts at a last stage: a model of one layer with another entry.

Heads differ in what they are made of and in what they join with a token: rows behind the model's
last norm, or hidden states from within its stack. How they run is the same
(:mod:`node.engine.head_drafts`).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from node.model.layer_range import LoadedRange, ModelLayout

Enter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids ``[rows]``, what came of the positions before them, ``[rows, width]``) → rows of the
head's layer."""


class DraftHead(Protocol):
    """A head for the last stage of a model."""

    @property
    def layout(self) -> ModelLayout:
        """The head as a model of one layer, whose tokens are the model's."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the model in front of which it takes a token's hidden states, ascending; ():
        it takes rows behind the last norm."""

    def more_bytes(self, *, embeds: bool) -> int:
        """Bytes that it takes beside the last layer beyond those of its layout, which may be
        negative: parts are shared. ``embeds``: whether the model's embedding is there, too."""

    def fetch(self) -> None:
        """Download what it needs beside its layer. Raises UserError and NetworkError."""

    def lent(self, beside: LoadedRange) -> dict[str, nn.Module]:
        """Parts that it takes from ``beside``, which holds the model's last layer, by their names
        in its layout."""

    def entered(self, loaded: LoadedRange, beside: LoadedRange) -> Enter:
        """Its entry, once ``loaded`` holds its layer; from then on both ranges make what it joins
        with tokens (:attr:`node.model.layer_range.LoadedRange.behind`).

        Raises UserError and NetworkError.
        """
