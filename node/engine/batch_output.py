"""Turns a step's hidden states into results: rows for the next stage, or sampled tokens."""

import itertools
from collections.abc import Sequence

import torch

from dht.messages.session import OVERFLOWS
from dht.messages.types import ModelSpec
from node.device.tensors import finite_rows, to_device, to_host
from node.engine.batch_rows import StepRows
from node.engine.work_item import WorkItem, WorkResult
from node.model.layer_range import LoadedRange
from node.sampling.logprobs import score_prompt, score_rows
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_runs


def results_of(
    rows: Sequence[StepRows], hidden: torch.Tensor, loaded: LoadedRange, spec: ModelSpec
) -> list[WorkResult]:
    """One result per item, in order, from the step's hidden states ``[tokens, hidden]``.

    An item with rows that are not finite gets an error instead. Sampling and scoring happen only if
    ``loaded`` has the model's head.
    """
    drawn = [row for row in rows if row.item.sampling is not None and loaded.head is not None]
    logits, greedy = hidden, torch.empty(0, dtype=torch.long, device=hidden.device)
    if drawn:
        spans = (range(row.last - 1 - len(row.item.drafts), row.last) for row in drawn)
        last = to_device(list(itertools.chain.from_iterable(spans)), hidden.device)
        logits = loaded.forward.leave(hidden[last])
        greedy = torch.argmax(logits, dim=-1)
    # One transfer brings the step's output from the device: rows for the next stage, or tokens
    # together with whether their rows are finite.
    finite = finite_rows(hidden)
    passed_on = hidden
    returned = [row.item.end < spec.layers or row.item.returns_rows for row in rows]
    if any(returned):
        passed_on = to_host(hidden)
    features = {row.index: _features(row, hidden) for row in rows if row.item.end < spec.layers}
    known: list[int] = torch.cat([finite, greedy]).tolist()
    sampled = _sampled(drawn, logits, known[len(hidden) :]) if drawn else {}
    results = []
    for row, returns in zip(rows, returned, strict=True):
        if not all(known[row.first : row.last]):
            span = f"[{row.item.start}, {row.item.end})"
            told = f"layers {span} made hidden states that are not finite"
            passed_in = row.item.hidden is not None
            if hidden.dtype is torch.float16:
                # What came in was finite: float16 is likelier at fault than who sent it.
                told = f"layers {span} {OVERFLOWS}; bfloat16 holds them (--dtype bfloat16)"
                passed_in = False
            results.append(WorkResult(item=row.item, error=told, unsound_input=passed_in))
            continue
        token_ids, scores = sampled.get(row.index, ((), ()))
        results.append(
            WorkResult(
                item=row.item,
                hidden=passed_on[row.first : row.last] if returns else None,
                features=features.get(row.index),
                behind=_behind(row, hidden, loaded),
                token_ids=token_ids,
                scores=scores,
                prompt_scores=_prompt_scores(row, hidden, loaded, spec.vocab),
            )
        )
    return results


def draw_of(item: WorkItem) -> SamplingRow:
    assert item.sampling is not None  # noqa: S101 - for the type checker
    return SamplingRow(
        sampling=item.sampling,
        position=item.position + item.tokens - len(item.drafts) + item.drawn_later,
        history=item.history,
        drafts=item.drafts,
    )


def _sampled(
    rows: Sequence[StepRows], logits: torch.Tensor, greedy: Sequence[int]
) -> dict[int, tuple[tuple[int, ...], tuple[bytes, ...]]]:
    """By item index: the item's new tokens, and their packed scores if asked for.

    ``greedy``: the likeliest token of each row of ``logits``, ``[rows, vocab]``.
    """
    draws = [draw_of(row.item) for row in rows]
    runs = draw_runs(logits, draws, greedy)
    firsts = itertools.accumulate((1 + len(draw.drafts) for draw in draws), initial=0)
    scored: dict[int, tuple[bytes, ...]] = {}
    for row, draw, run, first in zip(rows, draws, runs, firsts, strict=False):
        if (top := draw.sampling.logprobs) is not None:
            scored[row.index] = tuple(score_rows(logits[first : first + len(run)], run, top))
    return {
        row.index: (run, scored.get(row.index, (b"",) * len(run)))
        for row, run in zip(rows, runs, strict=True)
    }


def _features(row: StepRows, hidden: torch.Tensor) -> torch.Tensor | None:
    """The item's features for the next stage, on the host."""
    features = row.joined_features(hidden)
    return None if features is None else to_host(features)


def _behind(row: StepRows, hidden: torch.Tensor, loaded: LoadedRange) -> torch.Tensor | None:
    if loaded.behind is None or not row.item.foretells:
        return None
    return loaded.behind(hidden[row.first : row.last], row.joined_features(hidden))


def _prompt_scores(row: StepRows, hidden: torch.Tensor, loaded: LoadedRange, vocab: int) -> bytes:
    targets = row.item.targets
    if targets is None or loaded.head is None:
        return b""
    first = row.first + targets.first_row
    rows = hidden[first : first + len(targets.token_ids)]
    return score_prompt(loaded.forward.leave, rows, targets.token_ids, targets.top, vocab)
