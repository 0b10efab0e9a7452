"""What a draft model draws beside a ring: always of the session's own tokens, whatever comes."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.session import Sampling
from node.drafting.chain import DraftChain, ModelDrafts
from node.drafting.config import DRAFTING
from node.drafting.pace import MODEL_GRADE, DraftOffer, DraftPace
from node.drafting.session_drafts import SessionDrafts, Wait
from node.drafting.suffix import SuffixDrafter

MOST = 15


def said(token_ids: Sequence[int]) -> int:
    """What the model says behind these tokens."""
    return (7 * len(token_ids) + sum(token_ids[-3:])) % 5


class Runner:
    """Runs chains when it is told to, as a thread would; ``rows`` stands for the KV."""

    def __init__(self, token_s: float = 0.0) -> None:
        self.rows: list[int] = []
        self.token_s = token_s
        self.broken = False
        self._jobs: list[tuple[DraftChain, Callable[[], None]]] = []
        self._busy_until_s = 0.0

    def open(self, key: str, tokens: int) -> bool:
        return True

    def free(self, key: str) -> None:
        pass

    def draw(self, chain: DraftChain, told: Callable[[], None]) -> None:
        self._jobs.append((chain, told))

    def step(self) -> bool:
        """One step of the oldest chain that goes on; False if there is none."""
        while self._jobs:
            chain, told = self._jobs[0]
            if chain.goes_on:
                token_ids, draws = chain.rows()
                assert len(token_ids) <= DRAFTING.chain_rows_max
                assert 0 <= chain.ran <= len(self.rows), "rows are lacking"
                self.rows[chain.ran :] = token_ids
                chain.ran += len(token_ids)
                chain.spent_s += self.token_s
                chain.failed = self.broken
                if draws and not self.broken:
                    chain.drawn.append(said(self.rows))
                return True
            del self._jobs[0]
            chain.running = False
            told()
        return False

    def until(self, now_s: float) -> None:
        """Let time pass: a step takes ``token_s``."""
        while self._busy_until_s + self.token_s <= now_s and self.step():
            self._busy_until_s += self.token_s
        if not self._jobs:
            self._busy_until_s = now_s


def drafts_of(runner: Runner) -> ModelDrafts:
    return ModelDrafts(runner, "s", Sampling(), lambda: None)


@given(st.randoms(use_true_random=False), st.integers(1, 700))
def test_whatever_comes_it_draws_behind_the_sessions_own_tokens(
    rng: random.Random, prompt_tokens: int
) -> None:
    runner = Runner()
    model, tokens = drafts_of(runner), [rng.randrange(5) for _ in range(prompt_tokens)]
    for _ in range(12):
        model.follow(tokens, rng.randrange(1, 6))
        for _ in range(rng.randrange(9)):
            runner.step()
        told = list(tokens)
        for token_id in model.ready:
            assert token_id == said(told)
            told.append(token_id)
        for _ in range(rng.randrange(1, 5)):
            tokens.append(said(tokens) if rng.random() < 0.7 else rng.randrange(5))


def test_rows_that_were_foretold_are_not_run_again() -> None:
    runner, tokens = Runner(), [1, 2, 3]
    model = drafts_of(runner)
    model.follow(tokens, 4)
    while runner.step():
        pass
    assert len(model.ready) == 4
    tokens += model.ready[:2]
    model.follow(tokens, 4)
    assert len(model.ready) == 2
    while runner.step():
        pass
    assert len(model.ready) == 4
    tokens.append((model.ready[0] + 1) % 5)
    model.follow(tokens, 1)
    ran = len(tokens) - 1
    assert model.ready == ()
    runner.step()
    assert runner.rows[:ran] == tokens[:ran]
    assert model.ready == (said(tokens),)


def test_drafts_are_drawn_with_the_sessions_key_alone() -> None:
    asked = Sampling(temperature=0.7, seed=9, top_p=0.9, grammar=b"x", repetition_penalty=2.0)
    runner = Runner()
    model = ModelDrafts(runner, "s", asked, lambda: None)
    model.follow([1, 2], 1)
    ((chain, _),) = runner._jobs
    assert chain.sampling == Sampling(temperature=0.7, seed=9, top_p=0.9)


def speed(
    right: float, token_s: float, *, row_s: float = 0.0005, rounds: int = 500, broken: bool = False
) -> float:
    """Tokens/s over those of plain decoding, where a share ``right`` of the model's tokens come."""
    rng, plain_s = random.Random(3), 0.1
    runner = Runner(token_s)
    runner.broken = broken
    drafts = SessionDrafts(drafter=SuffixDrafter(), model=drafts_of(runner))
    tokens = [0, 1, 2]
    now_s = 0.0
    for _ in range(rounds):
        sent = drafts.propose(tokens, MOST, 0.0, now_s)
        while isinstance(sent, Wait):
            now_s = min(now_s + max(token_s, 1e-4) / 4, sent.until_s)
            runner.until(now_s)
            sent = drafts.propose(tokens, MOST, 0.0, now_s)
        drafts.sent(len(sent), now_s)
        now_s += plain_s + row_s * len(sent)
        runner.until(now_s)
        came: list[int] = []
        for draft in (*sent, None):
            likely = said([*tokens, *came])
            came.append(likely if rng.random() < right else (likely + 1) % 5)
            if came[-1] != draft:
                break
        drafts.came(came, now_s)
        tokens += came
    return (len(tokens) - 3) * plain_s / now_s


def test_a_good_draft_model_is_worth_several_tokens_a_round() -> None:
    assert speed(0.85, 0.002) > 2.5
    assert speed(0.85, 0.02) > 1.3


@pytest.mark.parametrize("right", [0.05, 0.3, 0.85])
@pytest.mark.parametrize("token_s", [0.002, 0.05, 0.3, 3.0])
def test_no_draft_model_makes_it_slower_than_plain_decoding(right: float, token_s: float) -> None:
    assert speed(right, token_s, rounds=300) >= 0.97


def test_a_draft_model_that_breaks_is_left() -> None:
    assert speed(0.9, 0.002, rounds=100, broken=True) >= 0.97


def test_the_drafter_that_earns_more_is_taken() -> None:
    pace = DraftPace(plain_s=0.1)
    model = DraftOffer(grade=MODEL_GRADE, ready=0, most=MOST, token_s=0.002)
    copied = DraftOffer(grade=3, ready=MOST, most=MOST)
    assert pace.choose([copied, model], 0.0)[0] == 0, "it is free, and assumed to be better"
    for _ in range(20):
        pace.came(grade=3, tried=1, right=0)
    index, count = pace.choose([copied, model], 0.0)
    assert (index, count > 0) == (1, True)
    slow = DraftOffer(grade=MODEL_GRADE, ready=0, most=MOST, token_s=0.2)
    assert pace.choose([slow], 0.0)[1] == 0
    unknown = DraftOffer(grade=MODEL_GRADE, ready=2, most=MOST)
    assert pace.choose([unknown], 0.0)[1] == 2, "what is there already costs no time"
    for _ in range(DRAFTING.plain_every):
        pace.took(0.1, 2)
    assert pace.choose([model], 0.0)[1] == 0
