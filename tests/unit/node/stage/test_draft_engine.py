"""A draft model on a real engine: it draws what that model draws, for few sessions, or nothing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dht.errors import UserError
from dht.messages.session import Sampling
from node.drafting.chain import ModelDrafts
from node.drafting.config import drafter_bytes
from node.engine.work_item import WorkItem
from node.stage.draft_engine import DRAFT_ENGINE, DraftEngine, found_beside
from node.weights.store import WeightStore
from tests.unit.node.engine.test_engine import LAYERS, Family, make, only, prompt_of

LENT_BYTES = 1 << 30
SAMPLED = Sampling(temperature=0.9, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make(tmp_path_factory.mktemp("llama"), "llama")


async def prepared(family: Family, lent_bytes: int = LENT_BYTES) -> DraftEngine:
    """The model as its own draft model, held."""
    store = WeightStore.open(str(family.directory))
    drafts = await DraftEngine.prepared(
        str(family.directory), store, store, device="cpu", dtype="float32", memory_bytes=lent_bytes
    )
    await drafts.hold(wanted=True)
    return drafts


def drawn(family: Family, prompt: Sequence[int], new: int, sampling: Sampling) -> tuple[int, ...]:
    """What plain decoding draws behind ``prompt``."""
    engine = family.engine()
    assert engine.kv.reserve("s", len(prompt) + new) is None
    tokens, position, ids = list(prompt), 0, tuple(prompt)
    for _ in range(new):
        item = WorkItem(
            session="s", start=0, end=LAYERS, position=position, token_ids=ids, sampling=sampling
        )
        (token_id,) = only(engine.step([item])).token_ids
        position, ids = len(tokens), (token_id,)
        tokens.append(token_id)
    return tuple(tokens[len(prompt) :])


class Told:
    """Waits until a session's drafts are there."""

    def __init__(self, drafts: DraftEngine, key: str, sampling: Sampling) -> None:
        self._news = asyncio.Event()
        self.model = ModelDrafts(drafts, key, sampling, self._news.set)

    async def ready(self, count: int) -> tuple[int, ...]:
        async with asyncio.timeout(120):
            while len(self.model.ready) < count and not self.model.failed:
                self._news.clear()
                self.model.wake_at(count)
                if len(self.model.ready) < count:
                    await self._news.wait()
        return self.model.ready[:count]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
async def test_it_draws_what_comes_and_begins_again_where_something_else_came(
    llama: Family, sampling: Sampling
) -> None:
    drafts, prompt = await prepared(llama), list(prompt_of(300))
    assert drafts.open("s", 400)
    told = Told(drafts, "s", sampling)
    told.model.follow(prompt, 6)
    right = await told.ready(6)
    assert right == drawn(llama, prompt, 6, sampling)
    tokens = [*prompt, *right[:2], (right[2] + 1) % 90]
    told.model.follow(tokens, 5)
    assert await told.ready(5) == drawn(llama, tokens, 5, sampling)
    assert told.model.token_s is None, "a long history says nothing of a token's time"
    tokens.append((told.model.ready[0] + 1) % 90)
    told.model.follow(tokens, 1)
    assert told.model.token_s is not None
    assert await told.ready(1) == drawn(llama, tokens, 1, sampling)
    told.model.stop()
    drafts.free("s")
    drafts.close()


async def test_sessions_and_tokens_are_bounded(
    llama: Family, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = await prepared(llama)
    names = [str(number) for number in range(DRAFT_ENGINE.sessions_max)]
    assert all(drafts.open(name, 100) for name in names)
    assert not drafts.open("more", 100)
    drafts.free("0")
    assert drafts.open("more", 100)
    told = Told(drafts, "more", Sampling())
    told.model.follow(prompt_of(200), 1)  # more than it was opened for
    assert await told.ready(1) == ()
    assert told.model.failed
    assert not caplog.records, "a session longer than its model's context is nothing to log"
    await drafts.hold(wanted=False)
    assert not drafts.open("another", 100), "its weights are not here"
    drafts.close()


async def test_tokens_of_another_vocabulary_end_a_sessions_drafts(llama: Family) -> None:
    drafts = await prepared(llama)
    assert drafts.open("s", 100)
    told = Told(drafts, "s", Sampling())
    told.model.follow([1, 2, 5000], 1)
    assert await told.ready(1) == ()
    assert told.model.failed
    drafts._vocab = 0  # as if the model knew fewer tokens
    assert drafts.open("t", 100)
    told = Told(drafts, "t", Sampling())
    told.model.follow([1, 2, 3], 1)
    assert await told.ready(1) == ()
    assert told.model.failed
    drafts.close()


async def test_what_takes_more_than_is_lent_is_refused(llama: Family) -> None:
    whole = await prepared(llama)
    assert whole.memory_bytes == drafter_bytes(whole._engine.spec)
    whole.close()
    with pytest.raises(UserError, match="--draft none"):
        await prepared(llama, lent_bytes=whole.memory_bytes)


def test_it_is_found_in_the_models_directory(tmp_path: Path) -> None:
    assert found_beside(str(tmp_path)) is None
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    assert found_beside(str(tmp_path)) == str(tmp_path / "draft")
    assert found_beside("org/name") is None
