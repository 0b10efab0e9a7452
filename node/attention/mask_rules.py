"""Rules for which keys a row may see, taken from a model's own mask.

``transformers`` composes a layer's mask from predicates over (query, key) positions. A registered
mask function receives the predicate. :class:`MaskRule` takes the mask's place in the layer's
arguments, so that attention over pages follows the model's own rule, whatever it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Predicate = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query positions, key positions) → whether the key may be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRule:
    """The last ``window`` keys including the row's own (0: all of them), or a predicate."""

    window: int = 0
    predicate: Predicate | None = None

    def allowed(self, rows: int, context: int, device: torch.device) -> torch.Tensor | None:
        """Mask ``[rows, context]`` for the last ``rows`` of ``context`` tokens; None: all."""
        window = self.window
        if self.predicate is None and rows == 1 and not 0 < window < context:
            return None
        query = torch.arange(context - rows, context, device=device)[:, None]
        key = torch.arange(context, device=device)[None, :]
        if self.predicate is not None:
            return self._judge(query, key)
        seen = key <= query
        return seen & (key > query - window) if window else seen

    @property
    def looks_ahead(self) -> bool:
        """Whether a row may see keys behind its own. Raises what the predicate raises."""
        if self.predicate is None:
            return False
        rows, keys = self._tried()
        return bool((self._judge(rows, keys) & (keys > rows)).any())

    def _tried(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query positions ``[rows, 1]`` and key positions ``[1, keys]`` that show what kind of rule
        it is: the first, those where a window ends, and the last."""
        span = 2 * self.window + 3
        wanted = {0, 1, 2, span - 1, *(self.window + n for n in (-2, -1, 0, 1))}
        rows = sorted(q for q in wanted if 0 <= q < span)
        return torch.tensor(rows)[:, None], torch.arange(span)[None, :]

    def _judge(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        assert self.predicate is not None  # noqa: S101 - for the type checker
        answer = self.predicate(0, 0, query, key)
        answer = torch.as_tensor(answer, dtype=torch.bool, device=query.device)
        return answer.expand(query.shape[0], key.shape[1]).contiguous()


CAUSAL = MaskRule()


def windowed(rule: MaskRule) -> MaskRule:
    """The same rule, as a plain window if its predicate is equal to one.

    ``rule.window`` is the length that the model's code names beside the predicate. Raises
    LookupError, RuntimeError or TypeError if the predicate only works for a particular input.
    """
    plain = MaskRule(window=rule.window)
    if rule.predicate is None:
        return plain
    judged = MaskRule(predicate=rule.predicate)
    rows, keys = rule._tried()
    expected = keys <= rows
    if plain.window:
        expected &= keys > rows - plain.window
    return plain if torch.equal(judged._judge(rows, keys), expected) else judged


def describe(*, mask_function: Predicate, local_size: int | None = None, **_: Any) -> MaskRule:
    """Mask function for ``transformers``' interface that returns a rule instead of a tensor."""
    return MaskRule(window=local_size or 0, predicate=mask_function)
