"""Which steps of a stage say something of a layer's time."""

import pytest

from node.engine.work_item import WorkItem, WorkResult
from node.stage.local_engine import step_seen

LAYERS = 8


def item(tokens: int = 1, position: int = 100, start: int = 2, end: int = 6) -> WorkItem:
    ids = tuple(range(tokens))
    return WorkItem(session=f"{position}", start=start, end=end, position=position, token_ids=ids)


def seen(*batch: WorkItem, error: str | None = None):  # type: ignore[no-untyped-def]
    results = [WorkResult(item=each, error=error) for each in batch]
    return step_seen(batch, results, 0.5, LAYERS)


def test_decodes_together_and_a_chunk_alone_do() -> None:
    step = seen(item(), item(position=300))
    assert (step.decodes, step.rows, step.context_tokens) == (True, 2, 200)
    assert (step.layers, step.seconds) == (4, 0.5)
    chunk = seen(item(tokens=128, position=64))
    assert (chunk.decodes, chunk.rows, chunk.context_tokens) == (False, 128, 64)


@pytest.mark.parametrize(
    "batch",
    [
        (item(), item(tokens=128)),
        (item(tokens=64), item(tokens=128)),
        (item(), item(start=3)),
        (item(end=LAYERS),),
    ],
    ids=["mixed", "two chunks", "other layers", "the head's time is in it"],
)
def test_others_do_not(batch: tuple[WorkItem, ...]) -> None:
    assert seen(*batch) is None


def test_a_step_that_failed_does_not() -> None:
    assert seen(item(), error="no") is None
