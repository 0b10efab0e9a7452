"""The state that a session's layers keep beside keys and values.

Convolutions over tokens and recurrences carry a state of fixed size from one token to the next. It
belongs to one position, so nothing can be cut from its end as from pages. A copy from before the
newest step is kept beside it: rows go on from either of the two positions, or from the first token.
Storage and updates are ``transformers``' own, so that each family's layers find what they expect.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch


class SessionState:
    """States of one session by layer; only the engine's thread changes them."""

    def __init__(self, states_per_layer: int) -> None:
        self._states_per_layer = states_per_layer
        self._layers: dict[int, Any] = {}
        self._position: int | None = 0
        """Position that comes next; None while a step runs."""
        self._before: tuple[int, dict[int, Any]] = (0, {})
        """The position before the newest step, and the states there."""

    def layer(self, index: int) -> Any:
        """The states of a layer, as ``transformers.cache_utils.LinearAttentionLayer``."""
        if index not in self._layers:
            from transformers.cache_utils import LinearAttentionLayer

            self._layers[index] = LinearAttentionLayer(number_of_states=self._states_per_layer)
        return self._layers[index]

    def resumable(self, position: int) -> int:
        """The last position up to ``position`` from which rows can go on."""
        known = (self._position, self._before[0])
        return max((each for each in known if each is not None and each <= position), default=0)

    def begin(self, position: int) -> None:
        """Stand at ``position`` and keep a copy; ValueError if no state is known there.

        A step that failed midway is begun again from the copy.
        """
        if position == self._position:
            self._before = position, copy.deepcopy(self._layers)
        elif position == self._before[0]:
            self._layers = copy.deepcopy(self._before[1])
        elif position == 0:
            self._layers, self._before = {}, (0, {})
        else:
            raise ValueError(f"position {position} asked, the states stand at {self._position}")
        self._position = None

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
