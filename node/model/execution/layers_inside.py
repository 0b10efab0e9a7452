"""Runs the layers that a peer holds inside their model's own forward, for one session's rows.

The forward computes each layer's arguments and hands what a layer returns on to the next. What
layers elsewhere would have handed on comes with the rows, and leaves with them again.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from node.attention.cache_view import PoolCache, SharedKv
from node.model.carried import Argument, Carried
from node.model.inspection.skeleton import EnoughHeard


class LayersInside:
    """Layers ``[start, end)`` as what :meth:`node.model.inspection.skeleton.Skeleton.run`
    performs."""

    def __init__(
        self,
        carried: Carried,
        layers: Mapping[int, nn.Module],
        start: int,
        end: int,
        rows: torch.Tensor,
        cache: PoolCache,
        *,
        tuples: bool,
        stacked: bool = False,
    ) -> None:
        """``rows``, ``[tokens, width]``, go into layer ``start``; ``tuples``: whether layers return
        tuples; ``stacked``: whether each row is another session's. Raises UnsoundRows."""
        self._stacked = stacked
        self._position = cache.get_query_offset()
        self._tuples = tuples
        self._carried, self._layers = carried, layers
        self._start, self._end = start, end
        self._passed = carried.unpack(start, rows)
        self._shared = SharedKv(cache, rows.shape[0], self._passed.shared)

    def perform(
        self, index: int, hidden: torch.Tensor, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Output of a layer; of one that does not run here, its input."""
        if index < self._start:
            return (hidden, None) if self._tuples else hidden
        passed = self._passed
        given: dict[Argument, Any] = {
            argument: passed.inputs[index, argument] for argument, _ in self._carried.inputs[index]
        }
        if index == self._start:
            hidden = passed.hidden.transpose(0, 1) if self._stacked else passed.hidden
            if (chosen := self._carried.chosen[index]) is not None:
                given[chosen.argument] = passed.chosen
        self._shared.layer = index

        def seen(argument: Argument, value: Any) -> Any:
            if isinstance(value, MutableMapping) and not value:
                return self._shared
            return given.get(argument, value)

        output = self._layers[index](
            hidden,
            *(seen(at, value) for at, value in enumerate(positional)),
            **{name: seen(name, value) for name, value in named.items()},
        )
        if index < self._end - 1:
            return output
        parts = output if isinstance(output, tuple) else (output,)
        passed.hidden = parts[0].transpose(0, 1) if self._stacked else parts[0]
        passed.chosen = parts[1] if parts[1:] else None
        raise EnoughHeard

    def rows(self) -> torch.Tensor:
        """Rows ``[tokens, width]`` behind the last layer."""
        return self._carried.pack(self._end, self._passed, self._position)
