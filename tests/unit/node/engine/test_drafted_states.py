"""Drafted rows through models that keep a state: what is taken back leaves nothing in it."""

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dht.messages.session import Sampling
from node.engine import model_runner
from node.engine.engine import Engine
from node.engine.model_runner import RUNNER, ModelRunner
from node.engine.work_item import WorkItem
from testing.tiny_families import LAYERS, VOCAB, make
from tests.unit.node.engine.test_drafted_rows import answer
from tests.unit.node.engines import loaded
from tests.unit.node.model.test_families import prompt_of

FAMILIES = (
    "mamba",  # whose rows run one by one behind a state
    "falcon_h1",
    "falcon_h1, longrope",
    "qwen3_next",
    "lfm2",
)
ROUNDING = 1e-3
"""Difference, relative to the norm, of rows that run at once and one by one, in float32."""
CUTS = ((0, LAYERS), (0, 1, LAYERS))
SAMPLINGS = {"greedy": Sampling(logprobs=2), "sampled": Sampling(temperature=0.9, seed=3)}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(request.param.partition(",")[0])
    make(where, request.param)
    return where


def engines_of(directory: Path, cuts: Sequence[int]) -> list[Engine]:
    return [loaded(directory, start, end) for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_token(directory: Path, cuts: Sequence[int], name: str) -> None:
    engines, prompt = engines_of(directory, cuts), prompt_of(20)
    plain, _, plain_rounds = answer(engines, prompt, SAMPLINGS[name])
    drafted, _, rounds = answer(engines, prompt, SAMPLINGS[name], told=plain)
    assert drafted == plain
    assert rounds < plain_rounds


Work = tuple[int, tuple[int, ...], int]
"""Position, token ids, and how many of them were drafted."""


def rows_of(engine: Engine, work: dict[str, Work]) -> list[torch.Tensor]:
    """What comes out for the work of each session, in one step."""
    items = [
        WorkItem(
            session=session,
            start=0,
            end=engine.held[1],
            position=position,
            token_ids=ids,
            drafts=ids[len(ids) - drafts :],
        )
        for session, (position, ids, drafts) in work.items()
    ]
    results = engine.step(items)
    assert not any(result.error for result in results), results
    return [result.hidden for result in results if result.hidden is not None]


def test_sessions_are_taken_back_by_different_numbers_of_rows_in_one_step(
    directory: Path,
) -> None:
    """Beside each other, and beside one that takes nothing back."""
    engine, rng = loaded(directory, 0, LAYERS - 1), random.Random(2)
    drafts = {"a": 4, "b": 3, "c": 0}
    prompts = {session: prompt_of(6 + at, seed=at) for at, session in enumerate(drafts)}
    for session in drafts:
        assert engine.kv.reserve(session, 64) is None
        assert engine.kv.reserve(f"{session}, plain", 64) is None
    seen = {session: len(prompt) for session, prompt in prompts.items()}
    rows_of(engine, {session: (0, prompt, 0) for session, prompt in prompts.items()})
    rows_of(engine, {f"{session}, plain": (0, prompt, 0) for session, prompt in prompts.items()})
    for _ in range(6):
        ids = {s: tuple(rng.randrange(VOCAB) for _ in range(1 + drafts[s])) for s in drafts}
        right = {session: 1 + rng.randrange(1 + drafts[session]) for session in drafts}
        given = {session: (seen[session], ids[session], drafts[session]) for session in drafts}
        made = rows_of(engine, given)
        for session, rows in zip(drafts, made, strict=True):
            for at in range(right[session]):
                token = (seen[session] + at, ids[session][at : at + 1], 0)
                (expected,) = rows_of(engine, {f"{session}, plain": token})
                apart = torch.linalg.vector_norm(rows[at : at + 1] - expected)
                assert apart <= ROUNDING * torch.linalg.vector_norm(expected)
            seen[session] += right[session]


@pytest.mark.parametrize("most", [RUNNER.again_rows_max, 0], ids=["in one pass", "in two"])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_step_that_fails_while_rows_run_again_is_begun_again(
    fails: int, most: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first or second pass over the layers."""
    monkeypatch.setattr(model_runner, "RUNNER", replace(RUNNER, again_rows_max=most))
    engine = loaded(directory, 0, LAYERS - 1)
    prompt, drafted, newest = prompt_of(9), prompt_of(5, seed=1), prompt_of(1, seed=2)
    made = []
    run_layers, passes = ModelRunner._run_layers, itertools.repeat(0)

    def maybe(self: ModelRunner, *given: Any) -> torch.Tensor:
        out = run_layers(self, *given)
        if next(passes) == fails:
            raise RuntimeError("once")
        return out

    monkeypatch.setattr(ModelRunner, "_run_layers", maybe)
    for session, tries in (("calm", 1), ("failing", 3)):
        assert engine.kv.reserve(session, 64) is None
        rows_of(engine, {session: (0, prompt, 0)})
        rows_of(engine, {session: (9, drafted, 4)})
        if session == "failing":
            passes = itertools.count(1)
        for _ in range(tries):
            with suppress(AssertionError):
                made += rows_of(engine, {session: (11, newest, 0)})
    assert len(made) == 1 + 2, "one of three tries failed"
    for rows in made[1:]:
        apart = torch.linalg.vector_norm(made[0] - rows)
        assert apart <= ROUNDING * torch.linalg.vector_norm(rows)


def test_rows_that_were_not_drafted_are_not_taken_back(directory: Path) -> None:
    engine = loaded(directory, 0, LAYERS - 1)
    assert engine.kv.reserve("s", 64) is None
    rows_of(engine, {"s": (0, prompt_of(9), 0)})
    rows_of(engine, {"s": (9, prompt_of(5), 4)})
    rows_of(engine, {"s": (9, prompt_of(5, seed=1), 0)})
    assert [engine.kv.resumable("s", at) for at in (14, 12, 9, 8)] == [14, 9, 9, 0]
    item = WorkItem(session="s", start=0, end=LAYERS - 1, position=11, token_ids=prompt_of(1))
    (result,) = engine.step([item])
    assert result.error == "position 11 was run already, 14 comes next"
