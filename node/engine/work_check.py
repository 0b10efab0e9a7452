"""Checks a work item before the engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from node.device.tensors import is_finite
from node.engine.work_item import WorkItem
from node.kv.block_manager import Reservation
from node.model.carried import Carried


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBounds:
    """Bounds on the work items of an engine that holds layers ``[start, end)``."""

    start: int
    end: int
    page_tokens: int
    width: int
    """Numbers per row."""
    vocab: int
    context_tokens: int
    """Longest context that the model supports; there are no positions beyond it."""
    carried: Carried | None = None
    """What rows carry beyond hidden states, if anything."""
    unsound: frozenset[int] = frozenset()
    """``id`` of hidden states that are not finite."""


def unsound_of(items: Sequence[WorkItem]) -> frozenset[int]:
    """``id`` of the items' hidden states that are not finite.

    Rows on a device are this peer's own, and are looked at with what becomes of them, without a
    wait; others' come on the CPU. They are looked at together: many rows alone take milliseconds.
    """
    came = [
        item.hidden
        for item in items
        if item.hidden is not None
        and item.hidden.device.type == "cpu"
        and item.hidden.is_floating_point()
    ]
    alike = {(hidden.dtype, hidden.shape[1:]) for hidden in came}
    if len(came) > 1 and len(alike) == 1 and is_finite(torch.cat(came)):
        return frozenset()
    return frozenset(id(hidden) for hidden in came if not is_finite(hidden))


def work_refusal(item: WorkItem, reservation: Reservation | None, bounds: WorkBounds) -> str | None:
    """Why ``item`` cannot run, or None.

    Positions come in order. Earlier ones may come again when a session goes on over a mended route;
    all later ones must then come again, too.
    """
    if reservation is None:
        return "this session holds no KV here"
    span = f"layers [{item.start}, {item.end})"
    if not bounds.start <= item.start < item.end <= bounds.end:
        return f"{span} asked, [{bounds.start}, {bounds.end}) held"
    if item.start < reservation.span[0] or reservation.span[1] < item.end:
        return f"{span} asked, the session has KV on layers {list(reservation.span)}"
    if reservation.layers is not None and reservation.layers != (item.start, item.end):
        return f"{span} asked, the session runs layers {list(reservation.layers)}"
    if item.tokens < 1:
        return "an item without rows"
    given = min(reservation.tokens, bounds.page_tokens * reservation.page_count)
    if item.position < 0 or item.position + item.tokens > given:
        at = f"[{item.position}, {item.position + item.tokens})"
        return f"positions {at} asked, {given} reserved"
    if item.position + item.tokens > bounds.context_tokens:
        return f"the model reads at most {bounds.context_tokens} tokens"
    if item.position > reservation.written:
        return f"position {item.position} asked, {reservation.written} comes next"
    if (item.token_ids is None) == (item.hidden is None):
        return "exactly one of token ids and hidden states is taken"
    if item.token_ids is not None:
        return _tokens_refusal(item.token_ids, item.start, bounds.vocab)
    return None if item.hidden is None else _hidden_refusal(item.hidden, item, bounds)


def _tokens_refusal(token_ids: tuple[int, ...], start: int, vocab: int) -> str | None:
    if start != 0:
        return "token ids are for the first layer"
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab:
            return f"token id {token_id} of a vocabulary of {vocab}"
    return None


def _hidden_refusal(hidden: torch.Tensor, item: WorkItem, bounds: WorkBounds) -> str | None:
    width = bounds.width
    if hidden.shape[1:] != (width,):
        shape = tuple(hidden.shape)
        return f"hidden states of shape {shape}, ({item.tokens}, {width}) expected"
    if not hidden.is_floating_point():
        return f"hidden states of {hidden.dtype}, floating point expected"
    if id(hidden) in bounds.unsound:
        return f"hidden states that are not finite came in for layers [{item.start}, {item.end})"
    return _carried_refusal(hidden, item, bounds)


def _carried_refusal(hidden: torch.Tensor, item: WorkItem, bounds: WorkBounds) -> str | None:
    if bounds.carried is None:
        return None
    return bounds.carried.refusal(item.start, hidden, item.position + item.tokens)


def is_unsound(item: WorkItem, bounds: WorkBounds) -> bool:
    """Whether a refused item's rows have numbers that no sound stage sends."""
    hidden = item.hidden
    if hidden is None or not hidden.is_floating_point():
        return False
    if id(hidden) in bounds.unsound:
        return True
    fits = hidden.shape[1:] == (bounds.width,) and bounds.start <= item.start < bounds.end
    return fits and _carried_refusal(hidden, item, bounds) is not None
