"""Penalties and log probabilities over a swarm that loses peers: the same as in one place."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from client import Answer, GenerationOptions, TokenScore
from dht.messages.logprobs import unpack_scores
from node.engine.batch_output import draw_of
from node.engine.work_item import WorkItem, WorkResult
from node.sampling.logprobs import score_prompt, score_rows
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows, draw_runs
from node.sampling.token_history import TokenHistory
from testing.network import LinkModel
from tests.sim.paper_swarm import LAYERS, VOCAB, PaperEngine, PaperSwarm, fold
from tests.sim.test_sessions import held, owner, until

pytestmark = pytest.mark.sim

PROMPT = tuple(range(100, 170))
PROMPTS = [PROMPT[:length] for length in (1, 2, 16, 17, 70)]
NEW = 40
SPANS = ((0, 3), (3, 6), (6, 8)) * 2
OPTIONS = {
    "penalties": GenerationOptions(
        max_new_tokens=NEW,
        temperature=0.7,
        top_p=0.9,
        seed=5,
        repetition_penalty=1.4,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    ),
    "answer only": GenerationOptions(max_new_tokens=NEW, presence_penalty=2.0, logprobs=2),
    "least length": GenerationOptions(
        max_new_tokens=NEW,
        temperature=2.0,
        seed=2,
        min_new_tokens=30,
        stop_token_ids=tuple(range(0, 960, 30)),
    ),
    "scores": GenerationOptions(
        max_new_tokens=NEW, temperature=1.0, seed=9, logprobs=3, prompt_logprobs=2
    ),
}


def logits_of(state: int) -> torch.Tensor:
    """What the paper model says behind a sequence; few tokens, so that penalties bind."""
    generator = torch.Generator().manual_seed(state)
    logits = torch.full((VOCAB,), -4.0)
    logits[::30] = 2 * torch.randn(len(logits[::30]), generator=generator)
    return logits


class SampledEngine(PaperEngine):
    """Draws from logits with everything that the session asks for."""

    def _sampled(self, item: WorkItem, states: Sequence[int]) -> WorkResult:
        draw = draw_of(item)
        logits = torch.stack([logits_of(state) for state in states])
        run, scores = draw_runs(logits, [draw])[0], ()
        if (top := draw.sampling.logprobs) is not None:
            scores = tuple(score_rows(logits[: len(run)], run, top))
        return WorkResult(item=item, token_ids=run, scores=scores)

    def _run(self, item: WorkItem) -> WorkResult:
        result = super()._run(item)
        if result.error is not None or item.end < LAYERS:
            return result
        states, prompt_scores = self.states[item.session][item.position + 1 :], b""
        if item.targets is not None:
            first, ids = item.targets.first_row, item.targets.token_ids
            rows = torch.stack([logits_of(s) for s in states[first : first + len(ids)]])
            prompt_scores = score_prompt(lambda r: r, rows, ids, item.targets.top, VOCAB)
        return replace(result, prompt_scores=prompt_scores)


class SampledSwarm(PaperSwarm):
    engine_class = SampledEngine
    foretold = True

    def __init__(self, options: GenerationOptions) -> None:
        super().__init__()
        self.whole = [prompt + expected(prompt, options)[0] for prompt in PROMPTS]

    def foretell(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        at = len(tokens)
        known = (whole for whole in self.whole if whole[:at] == tuple(tokens))
        return next((whole[at : at + most] for whole in known), ())


def expected(
    prompt: Sequence[int], options: GenerationOptions
) -> tuple[tuple[int, ...], tuple[TokenScore, ...] | None, tuple[TokenScore | None, ...] | None]:
    """Tokens, their scores and the prompt's, computed in one place."""
    sampling, history = options.sampling(()), TokenHistory(prompt)
    state, states = 7, []
    for token_id in prompt:
        state = fold(state, token_id)
        states.append(state)
    tokens: list[int] = []
    scores: list[TokenScore] = []
    while len(tokens) < NEW:
        logits = logits_of(states[-1])[None]
        draw = SamplingRow(sampling=sampling, position=len(prompt) + len(tokens), history=history)
        tokens += draw_rows(logits, [draw])
        history.add(tokens[-1])
        states.append(fold(states[-1], tokens[-1]))
        if options.logprobs is not None:
            packed = score_rows(logits, tokens[-1:], options.logprobs)[0]
            scores += unpack_scores(packed, tokens[-1:], options.logprobs, VOCAB)
        if tokens[-1] in sampling.stop_token_ids:
            break
    prompt_scores: tuple[TokenScore | None, ...] | None = None
    if options.prompt_logprobs is not None:
        rows = torch.stack([logits_of(s) for s in states])
        packed = score_prompt(lambda r: r, rows, prompt[1:], options.prompt_logprobs, VOCAB)
        prompt_scores = (None, *unpack_scores(packed, prompt[1:], options.prompt_logprobs, VOCAB))
    return tuple(tokens), tuple(scores) if options.logprobs is not None else None, prompt_scores


def check(answer: Answer, prompt: Sequence[int], options: GenerationOptions) -> None:
    got = (answer.token_ids, answer.logprobs, answer.prompt_logprobs)
    assert got == expected(prompt, options)


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("name", OPTIONS)
async def test_answers_are_those_of_one_place(name: str) -> None:
    options = OPTIONS[name]

    swarm = SampledSwarm(options)
    try:
        for start, end in SPANS:
            await swarm.add(start, end)
        async with swarm.client() as client:
            answers = await asyncio.gather(*(client.generate(p, options) for p in PROMPTS))
            await until(lambda: held(swarm) == 0)
            again = await client.generate(PROMPT, options)  # over what is kept of the first
            check(again, PROMPT, options)
            assert again.cached_tokens == (0 if options.prompt_logprobs is not None else 64)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            check(answer, prompt, options)
    finally:
        await swarm.close()


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("way", ["kill", "freeze"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIONS)
async def test_a_lost_stage_changes_no_token_and_no_score(name: str, stage: int, way: str) -> None:
    options = OPTIONS[name]

    swarm = SampledSwarm(options)
    try:
        for start, end in SPANS:
            await swarm.add(start, end)
        async with swarm.client() as client:
            running = client.begin(PROMPT, options)
            tokens: list[int] = []
            scores: list[TokenScore] = []
            lost = False
            async for piece in running:
                tokens += piece.token_ids
                scores += piece.logprobs
                if len(tokens) >= 15 and not lost:
                    lost = True
                    getattr(swarm, way)(owner(swarm, running.route[stage].peer_id))
            answer = running.answer()
        assert answer.failovers >= 1
        assert tuple(tokens) == answer.token_ids
        assert tuple(scores) == (answer.logprobs or ())
        check(answer, PROMPT, options)
    finally:
        await swarm.close()


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("after_s", [0.04, 0.06, 0.08, 0.1, 0.12])
@pytest.mark.parametrize("stage", [0, 2])
async def test_a_stage_lost_while_the_prompt_is_scored_costs_no_score(
    stage: int, after_s: float
) -> None:
    options = OPTIONS["scores"]

    swarm = SampledSwarm(options)
    try:
        for start, end in SPANS:
            await swarm.add(start, end)
        async with swarm.client() as client:
            for peer in swarm.peers:  # scores are on their way when the stage is lost
                far = LinkModel(delay_s=0.03)
                swarm.network.set_link(peer.peer_id, client.transport.peer_id, far)
            running = client.begin(PROMPT, options)
            task = asyncio.create_task(_drain(running))
            await until(lambda: held(swarm) == 3)
            await asyncio.sleep(after_s)
            assert not task.done()
            swarm.kill(owner(swarm, running.route[stage].peer_id))
            answer = await task
            check(answer, PROMPT, options)
            assert answer.failovers <= 1, "the survivors kept what they had scored"
    finally:
        await swarm.close()


async def _drain(running: object) -> Answer:
    async for _ in running:  # type: ignore[attr-defined]
        pass
    return running.answer()  # type: ignore[attr-defined, no-any-return]
