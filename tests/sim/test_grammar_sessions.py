"""Answers under a grammar over a swarm that loses peers: the same as in one place."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from client import GenerationOptions
from dht.errors import SwarmError
from dht.grammars.trial import _Bytes, limits
from dht.messages.session import RefusalCode, Sampling
from node.engine.batch_output import draw_of
from node.engine.work_item import WorkItem, WorkResult
from node.sampling.grammar import GrammarError, GrammarState
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows, draw_runs
from node.sampling.token_history import TokenHistory
from testing.clock import run_virtual
from tests.sim.paper_swarm import VOCAB, PaperEngine, PaperSwarm, fold
from tests.sim.test_sessions import held, owner, until

pytestmark = pytest.mark.sim

END = 256
GRAMMAR = 'start: "[" [ITEM ("," ITEM)*] "]"\nITEM: /[a-z]{1,3}[0-9]{2}/'
PROMPT = tuple(range(100, 140))
SPANS = ((0, 3), (3, 6), (6, 8)) * 2
OPTIONS = GenerationOptions(
    max_new_tokens=60, temperature=1.0, seed=4, grammar=GRAMMAR, stop_token_ids=(END,)
)
BYTES = LLTokenizer(TokenizerWrapper(_Bytes(0)))


def followed(sampling: Sampling, answer: Sequence[int]) -> GrammarState:
    matcher = LLMatcher(BYTES, sampling.grammar.decode(), limits=limits(), log_level=0)
    state = GrammarState(matcher, sampling.stop_token_ids)
    for token_id in answer:
        state.add(token_id)
    return state


def logits_of(state: int) -> torch.Tensor:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(state))
    logits[ord("]")] -= 3
    return logits


class BoundEngine(PaperEngine):
    """Reads grammars over bytes, which takes a while."""

    reads = True
    given_up = 0
    """Grammars that nobody waited for any more."""

    async def grammar(self, client: str, sampling: Sampling, answer: Sequence[int]) -> GrammarState:
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if not self.reads:
            raise GrammarError(RefusalCode.NOT_HELD, "no tokenizer for grammars")
        return followed(sampling, answer)

    def _sampled(self, item: WorkItem, states: Sequence[int]) -> WorkResult:
        draw = draw_of(item)
        logits = torch.stack([logits_of(state) for state in states])
        return WorkResult(item=item, token_ids=draw_runs(logits, [draw])[0])


class BoundSwarm(PaperSwarm):
    engine_class = BoundEngine
    foretold = True

    def foretell(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return expected()[len(tokens) - len(PROMPT) :][:most]


def expected() -> tuple[int, ...]:
    sampling, history, state = OPTIONS.sampling(()), TokenHistory(), 7
    history.grammar = followed(sampling, ())
    for token_id in PROMPT:
        state = fold(state, token_id)
    found: list[int] = []
    while len(found) < 60 and (not found or found[-1] != END):
        draw = SamplingRow(sampling=sampling, position=len(PROMPT) + len(found), history=history)
        found += draw_rows(logits_of(state)[None], [draw])
        history.add(found[-1])
        state = fold(state, found[-1])
    return tuple(found)


async def bound_swarm(swarm: BoundSwarm) -> BoundSwarm:
    for start, end in SPANS:
        await swarm.add(start, end)
    return swarm


@pytest.mark.parametrize("way", ["kill", "freeze"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_lost_stage_changes_no_token_of_an_answer_under_a_grammar(stage: int, way: str) -> None:
    async def scenario() -> None:
        swarm = await bound_swarm(BoundSwarm())
        try:
            async with swarm.client() as client:
                running = client.begin(PROMPT, OPTIONS)
                tokens: list[int] = []
                lost = False
                async for piece in running:
                    tokens += piece.token_ids
                    if len(tokens) >= 5 and not lost:
                        lost = True
                        getattr(swarm, way)(owner(swarm, running.route[stage].peer_id))
                answer = running.answer()
            assert answer.failovers >= 1
            assert tuple(tokens) == answer.token_ids == expected()
        finally:
            await swarm.close()

    assert len(expected()) > 10
    run_virtual(scenario(), limit_s=600)


@pytest.mark.virtual(limit_s=600)
async def test_a_last_stage_that_reads_no_grammar_is_passed_over() -> None:
    swarm = await bound_swarm(BoundSwarm())
    try:
        first = swarm.peers[2].engine
        assert isinstance(first, BoundEngine)
        first.reads = False
        async with swarm.client() as client:
            for cached in (0, 32, 32):
                answer = await client.generate(PROMPT, OPTIONS)
                assert (answer.token_ids, answer.cached_tokens) == (expected(), cached)
                await until(lambda: held(swarm) == 0)
    finally:
        await swarm.close()


@pytest.mark.virtual(limit_s=600)
async def test_without_a_stage_that_reads_grammars_the_reason_is_told() -> None:
    swarm = await bound_swarm(BoundSwarm())
    try:
        for peer in swarm.peers:
            assert isinstance(peer.engine, BoundEngine)
            peer.engine.reads = False
        async with swarm.client(wait_s=2.0) as client:
            with pytest.raises(SwarmError, match="no tokenizer for grammars"):
                await client.generate(PROMPT, OPTIONS)
            await until(lambda: held(swarm) == 0)
    finally:
        await swarm.close()


@pytest.mark.virtual(limit_s=600)
async def test_a_client_that_leaves_while_its_grammar_is_read_holds_nothing() -> None:
    swarm = await bound_swarm(BoundSwarm())
    try:
        async with swarm.client() as client:
            running = asyncio.create_task(client.generate(PROMPT, OPTIONS))
            await until(lambda: held(swarm) == 3)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await until(lambda: held(swarm) == 0)
            assert isinstance(last := swarm.peers[2].engine, BoundEngine)
            assert last.given_up == 1
    finally:
        await swarm.close()
