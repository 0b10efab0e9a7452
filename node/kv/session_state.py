"""The state that a session's layers keep beside keys and values.

Convolutions over tokens and recurrences carry a state of fixed size from one token to the next. It
belongs to one position, so nothing can be cut from its end as from pages. A copy from before the
newest step is kept beside it: rows go on from either of the two positions, or from the first token.
Where rows of that step were drafted, they are kept, too. Those that turn out right run again, so
rows may also go on from within the step.
Storage and updates are ``transformers``' own, so that each family's layers find what they expect.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Before:
    """What was known before the newest step."""

    position: int
    layers: dict[int, Any]
    """The states there."""
    rows: torch.Tensor | None = None
    """The step's rows as they came, ``[rows, width]``; None: not kept."""

    @property
    def last(self) -> int:
        """The last position that the kept rows lead to."""
        return self.position + (0 if self.rows is None else len(self.rows))


class SessionState:
    """States of one session by layer; only the engine's thread changes them."""

    def __init__(self, states_per_layer: int) -> None:
        self._states_per_layer = states_per_layer
        self._layers: dict[int, Any] = {}
        self._position: int | None = 0
        """Position that comes next; None while a step runs."""
        self._before = _Before(0, {})

    def layer(self, index: int) -> Any:
        """The states of a layer, as ``transformers.cache_utils.LinearAttentionLayer``."""
        if index not in self._layers:
            from transformers.cache_utils import LinearAttentionLayer

            self._layers[index] = LinearAttentionLayer(number_of_states=self._states_per_layer)
        return self._layers[index]

    def recurrences(self, index: int) -> list[torch.Tensor]:
        """The states of a layer's recurrences, themselves."""
        return [kept for kept in self.layer(index).recurrent_states.values() if kept is not None]

    def resumable(self, position: int) -> int:
        """The last position up to ``position`` from which rows can go on."""
        before = self._before  # the event loop asks while the engine's thread goes on
        if before.position <= position <= before.last:
            return position
        known = (self._position, before.last, before.position)
        return max((each for each in known if each is not None and each <= position), default=0)

    def again(self, position: int) -> torch.Tensor | None:
        """Rows, ``[rows, width]``, that have to run once more before those at ``position``; None if
        the states are known there."""
        before = self._before
        if before.rows is None or position == self._position:
            return None
        if not before.position < position <= before.last:
            return None
        return before.rows[: position - before.position]

    def begin(self, position: int) -> None:
        """Stand at ``position`` and keep a copy; ValueError if no state is known there.

        A step that failed midway is begun again from the copy.
        """
        if position == self._position:
            self._before = _Before(position, copy.deepcopy(self._layers))
        elif position == self._before.position:
            self._layers = copy.deepcopy(self._before.layers)
        elif position == 0:
            self._layers, self._before = {}, _Before(0, {})
        else:
            raise ValueError(f"position {position} asked, the states stand at {self._position}")
        self._position = None

    def keep(self, rows: torch.Tensor | None) -> None:
        """Keep the rows of the step that has begun, ``[rows, width]``; None: it takes none back."""
        self._before = replace(self._before, rows=rows)

    def ran(self, position: int) -> None:
        """The step is over; ``position`` comes next."""
        self._position = position


class StackedStates:
    """The states of several sessions along the batch dimension, for one step."""

    def __init__(self, states: Sequence[SessionState]) -> None:
        self._states = states
        self._layers: dict[int, Any] = {}

    def layer(self, index: int) -> Any:
        """The states of a layer for all sessions, which must have some there."""
        if index not in self._layers:
            parts = [state.layer(index) for state in self._states]
            stacked = copy.copy(parts[0])
            for name in ("conv_states", "recurrent_states"):
                of_each = [getattr(part, name) for part in parts]
                setattr(
                    stacked, name, {key: _stacked([e[key] for e in of_each]) for key in of_each[0]}
                )
            self._layers[index] = stacked
        return self._layers[index]

    def put_back(self) -> None:
        """Give each session its own states."""
        for index, stacked in self._layers.items():
            for at, state in enumerate(self._states):
                own = state.layer(index)
                for name in ("conv_states", "recurrent_states"):
                    for key, value in getattr(stacked, name).items():
                        if value is not None:
                            getattr(own, name)[key].copy_(value[at : at + 1])


def _stacked(parts: Sequence[Any]) -> Any:
    if any(part is None for part in parts):
        return None
    return torch.cat(list(parts))
