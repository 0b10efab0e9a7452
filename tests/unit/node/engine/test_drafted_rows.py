"""Drafted rows through real engines: the tokens and scores of plain decoding, in float32."""

import itertools
import random
from collections.abc import Sequence

import pytest

from dht.messages.logprobs import unpack_scores
from dht.messages.session import SESSION_BOUNDS, Sampling
from node.engine.engine import Engine
from node.sampling.token_history import TokenHistory
from tests.unit.node.engine.test_engine import FAMILIES, LAYERS, VOCAB, make, prompt_of, through

NEW = 24
SAMPLINGS = {
    "greedy": Sampling(logprobs=2),
    "sampled": Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=3, logprobs=0),
    "penalties": Sampling(
        temperature=0.7,
        seed=5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        min_new_tokens=6,
        stop_token_ids=tuple(range(0, VOCAB, 5)),
    ),
}
CUTS = ((0, LAYERS), (0, 1, 3, LAYERS))


def answer(
    engines: Sequence[Engine],
    prompt: tuple[int, ...],
    sampling: Sampling,
    told: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], list[bytes], int]:
    """Tokens, scores, and rounds; what is drafted comes from ``told``, with faults."""
    rng = random.Random(len(told))
    for engine in engines:
        assert engine.kv.reserve("s", len(prompt) + NEW + SESSION_BOUNDS.draft_tokens_max) is None
    history = TokenHistory(prompt)
    tokens: list[int] = []
    scores: list[bytes] = []
    drafts: tuple[int, ...] = ()
    position, ids, rounds = 0, prompt, 0
    while len(tokens) < NEW:
        rounds += 1
        result = through(engines, position, ids + drafts, sampling, drafts=drafts, history=history)
        for token_id in result.token_ids:
            history.add(token_id)
        tokens += result.token_ids
        scores += result.scores
        position, ids = len(prompt) + len(tokens) - 1, (tokens[-1],)
        most = min(rng.randrange(SESSION_BOUNDS.draft_tokens_max + 1), NEW - len(tokens) - 1)
        right = told[len(tokens) : len(tokens) + most]
        drafts = tuple((n + (rng.random() < 0.15)) % VOCAB for n in right)
    for engine in engines:
        engine.kv.free("s")
    return tuple(tokens), scores, rounds


@pytest.fixture(scope="module", params=itertools.product(FAMILIES, CUTS), ids=str)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Engine]:
    family, cuts = request.param
    made = make(tmp_path_factory.mktemp(family), family)
    return [made.engine(start, end) for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_token_and_no_score(engines: list[Engine], name: str) -> None:
    sampling, prompt = SAMPLINGS[name], prompt_of(20)
    plain, plain_scores, plain_rounds = answer(engines, prompt, sampling)
    drafted, scores, rounds = answer(engines, prompt, sampling, told=plain)
    assert drafted == plain
    assert rounds < plain_rounds == NEW
    if (top := sampling.logprobs) is not None:
        for one, other in zip(plain_scores, scores, strict=True):
            a, b = (unpack_scores(packed, (0,), top, VOCAB)[0] for packed in (one, other))
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
