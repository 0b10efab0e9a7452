"""One session's rows in a step, and where its context is in the KV pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from node.attention.mask_rules import MaskRule
from node.kv.session_state import SessionState


@dataclass(slots=True, kw_only=True)
class Segment:
    """Rows ``[first, last)`` of a step, which are the end of one session's context."""

    first: int
    last: int
    context_tokens: int
    """Tokens attended to by the last row, itself included."""
    slots: torch.Tensor | slice
    """Pool rows of the whole context. A slice if the pages are consecutive; empty if they are not
    and a kernel finds them by ``pages``."""
    pages: Sequence[int] = ()
    """Page indices in the pool, at least those of the context, in the context's order."""
    run: bool = True
    """Whether ``pages`` are consecutive."""
    tokens_max: int = 0
    """Maximum number of tokens of the session. Rotary embeddings that depend on the context's
    length use it: it is the same for every row of the session, however often it is replayed."""
    state: SessionState | None = None
    """What the session's layers keep beside keys and values, if anything."""
    masks: dict[MaskRule, torch.Tensor | None] = field(default_factory=dict)
    """Masks of the session's rows by rule, made once per step."""

    @property
    def rows(self) -> int:
        """Number of rows of the session in the step."""
        return self.last - self.first

    @property
    def position(self) -> int:
        """Position of the first row in the session."""
        return self.context_tokens - self.rows

    def mask(self, rule: MaskRule, device: torch.device) -> torch.Tensor | None:
        """Mask ``[rows, context]`` of the context that each row may see; None: all of it."""
        if rule not in self.masks:
            self.masks[rule] = rule.allowed(self.rows, self.context_tokens, device)
        return self.masks[rule]
