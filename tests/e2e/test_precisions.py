"""Two real peers, each with half of the layers, that compute in different dtypes or packed bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from client import BlockingSwarm
from testing.forked import forked
from testing.local_swarm import LocalSwarm
from testing.packed_checkpoints import FORMATS, write
from testing.reference import Reference
from tests.e2e.conftest import MODEL

pytestmark = pytest.mark.e2e

PROMPT = "Once upon a time"
TOKENS = 24
HALVES = ("0:4", "4:8")
BEHIND_MAX = 1.0
"""Logits that a chosen token may be behind float32's choice (docs/weights.md)."""


def answered(
    model: Path, dtypes: Sequence[Sequence[str]]
) -> tuple[list[int], list[dict[str, Any] | None]]:
    """Tokens of an answer that went over both halves, and what each peer says of its dtype."""
    extra = ("--threads", "1", "--draft", "none", "--cpu")
    with LocalSwarm(model, extra=extra, start=forked) as swarm:
        for layers, dtype in zip(HALVES, dtypes, strict=True):
            swarm.start_peer(memory_gib=0.25, extra=("--layers", layers, *dtype))
        swarm.wait_serving()
        with BlockingSwarm.connect(swarm.addresses, model=str(model)) as client:
            answer = client.generate(PROMPT, max_new_tokens=TOKENS)
        assert [(stage.start, stage.end) for stage in answer.route] == [(0, 4), (4, 8)]
        assert len({stage.peer_id for stage in answer.route}) == 2
        return list(answer.token_ids), [peer.find("dtype") for peer in swarm.peers]


def assert_near(reference: Reference, token_ids: Sequence[int]) -> None:
    """Each token is the one of float32 after those before it, or close behind."""
    assert len(token_ids) == TOKENS
    ids = reference.encode(PROMPT)
    for token_id in token_ids:
        logits = reference.logits(ids)
        assert float(logits.max() - logits[token_id]) < BEHIND_MAX
        ids.append(token_id)


def test_peers_of_different_dtypes_serve_one_answer(reference: Reference) -> None:
    token_ids, said = answered(MODEL, (("--dtype", "float32"), ("--dtype", "bfloat16")))
    assert said == [None, None]
    assert_near(reference, token_ids)


def test_a_packed_model_is_served_by_two_peers_in_the_dtype_that_they_timed(
    tmp_path: Path,
) -> None:
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    write(MODEL, FORMATS["gptq"], packed, meant)
    token_ids, said = answered(packed, ((), ()))
    for event in said:
        assert event is not None
        assert event["dtype"] == min(event["seconds"], key=event["seconds"].__getitem__)
    assert_near(Reference.load(meant), token_ids)
