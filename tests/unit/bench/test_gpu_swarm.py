"""The swarm on one GPU: who holds what, what one answer is allowed, parts that fail."""

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from bench.gpu.served import FULL, LINK, TINY, Figures, Plan, arithmetic
from bench.gpu.swarm import Bench
from bench.results_table import recorded, render
from client import Answer
from dht.messages.session import FinishReason
from dht.messages.types import RouteStage

STAGE_S, ROW_BYTES = 0.003, 5760


def answer(tpot_s: float) -> Answer:
    stages = tuple(RouteStage(peer_id=f"p{n}", start=n, end=n + 1) for n in range(4))
    return Answer(
        text=None, token_ids=(1, 2), prompt_tokens=1, finish_reason=FinishReason.LENGTH,
        ttft_s=1.0, tpot_s=tpot_s, computed_s=4 * STAGE_S, waited_s=0.0, route=stages,
        plan_version="", fingerprint="", failovers=0,
    )  # fmt: skip


@pytest.mark.parametrize("plan", [FULL, TINY])
def test_stages_hold_every_layer_and_some_twice(plan: Plan) -> None:
    for layers in {size.layers for size in plan.sizes.values()}:
        spans = plan.spans(layers)
        stages = spans[: len(plan.ends)]
        assert [layer for start, end in stages for layer in range(start, end)] == [*range(layers)]
        assert all(spans.count(spans[number]) == 2 for number in plan.twice)
        assert 3 <= len(spans) <= 6


def test_an_answer_is_compared_with_its_steps_and_links() -> None:
    links_s = 4 * LINK.delay_ms / 1e3 + 3 * 8 * ROW_BYTES / (LINK.mbit * 1e6)
    allowed_s = 4 * STAGE_S + links_s
    told = arithmetic(ROW_BYTES, answer(allowed_s / 0.8))
    assert told["share"] == pytest.approx(0.8, abs=1e-3)
    assert told["links_ms"] == pytest.approx(1e3 * links_s, abs=1e-3)
    told = arithmetic(ROW_BYTES, answer(0.9 * allowed_s))
    assert "share" not in told
    assert "less than the floor" in told["refused"]


def test_a_part_that_fails_or_has_no_time_left_costs_no_other(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = argparse.Namespace(out=out)
    bench = Bench(arguments=arguments, result={"models": {}}, ends_s=float("inf"))

    async def fails() -> Figures:
        raise RuntimeError("no such stage")

    async def never() -> Figures:
        await asyncio.Event().wait()
        return {}

    async def found() -> Figures:
        return {"figure": 1}

    asyncio.run(bench.part("model", "one", fails))
    asyncio.run(bench.part("model", "eight", found))
    bench.ends_s = 0.0
    asyncio.run(bench.part("model", "many", never))
    told = json.loads(out.read_text())["models"]["model"]
    assert told["one"]["failed"] == "RuntimeError: no such stage"
    assert told["eight"]["figure"] == 1
    assert told["many"]["failed"].startswith("TimeoutError")


def test_what_is_there_of_a_result_is_told() -> None:
    one = {"without_drafts": {"each_tokens_per_s": 17.6, "share": 0.84, "ttft_s": 0.5}}
    found = {"Qwen": {"swarm": {"layers": 48}, "one": one}, "oss": {"one": {"failed": "x"}}}
    results = recorded() | {"gpu_swarm": {"gpu": "A card", "models": found}}
    text = render("gpu", results.__getitem__, results=results)
    assert "A swarm on one A card" in text
    assert "| Qwen | 48 | 17.6 | 0.84 | 0.50 | – | – | – | – | – |" in text
    assert "| oss | – | – | – | – | – | – | – | – | – |" in text
