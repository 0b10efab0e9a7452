"""Which model, and which of its layers, need a volunteer's memory the most. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.plans.catalogue.served import ServedModel
from dht.messages.types import ModelSpec, kv_tokens_least, longest_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Layers ``[start, end)`` of a model that a volunteer should hold."""

    model: ModelSpec
    start: int
    end: int
    holders: int
    """Number of peers that hold or load the least held of these layers now."""


def needs(served: Sequence[ServedModel], memory_bytes: int) -> tuple[Need, ...]:
    """What a volunteer with this memory could do for each model that fits it, most needed first.

    Sizes of the models are in the volunteer's precision
    (:func:`coordinator.plans.catalogue.precision.in_precision`).

    Holders count by what is asked of them (:attr:`ServedModel.relieved`). The model whose least
    relieved layer has the fewest comes first; of several, one that this volunteer alone would make
    whole, then the one whose layers have fewer on average.
    """
    found = []
    for model in served:
        need = _need_of(model, memory_bytes)
        if need is None:
            continue
        left = sum(
            not count and not need.start <= layer < need.end
            for layer, count in enumerate(model.coming)
        )
        mean = sum(model.relieved) / len(model.relieved)
        key = (min(model.relieved), left > 0, mean, model.name, model.spec.fingerprint)
        found.append((key, need))
    return tuple(need for _, need in sorted(found, key=lambda each: each[0]))


def _need_of(model: ServedModel, memory_bytes: int) -> Need | None:
    """The window with the most of the least relieved layers, among the longest that fit from each
    layer on; of several, the longest, then the one with the fewest holders for what is asked. None
    where no layer fits."""
    spec, relieved = model.spec, model.relieved
    least = min(relieved)
    windows = [(start, _longest(spec, start, memory_bytes)) for start in range(spec.layers)]
    kept = [(start, end) for start, end in windows if end > start]
    if not kept:
        return None

    def worth(window: tuple[int, int]) -> tuple[int, int, float, int]:
        start, end = window
        held = relieved[start:end]
        return -held.count(least), start - end, sum(held), start

    start, end = min(kept, key=worth)
    return Need(
        model=spec,
        start=start,
        end=end,
        holders=min(model.coming[start:end]),
    )


def _longest(spec: ModelSpec, start: int, memory_bytes: int) -> int:
    """End of the longest window from ``start`` on that fits into the memory."""
    return start + longest_spans(spec, memory_bytes, kv_tokens_least(spec), spec.layers)[start]


def needed_elsewhere(
    mine: ServedModel, start: int, end: int, others: Sequence[ServedModel], memory_bytes: int
) -> Need | None:
    """The most needed of ``others`` that lacks a holder of some layer, for a volunteer that holds
    ``[start, end)`` of ``mine``.

    None where none does, or where nobody else holds one of the volunteer's own layers: whoever
    leaves must leave its model whole.
    """
    if start == end or min(mine.holders[start:end]) < 2:
        return None
    found = needs([other for other in others if not min(other.coming)], memory_bytes)
    return next((need for need in found if not need.holders), None)
