"""Sessions that begin alike share pages, and answer as if they did not."""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.prefix import block_names
from dht.messages.session import Sampling
from node.engine.engine import Engine, WorkItem
from node.kv.page_names import PageNames
from testing.random_model import make_llama
from tests.examples import examples
from tests.unit.node.engines import loaded
from tests.unit.node.kv.accounts import check_pool

LAYERS, VOCAB = 3, 61
PROMPT = tuple(n * 11 % VOCAB for n in range(1, 54))
SPANS = ((0, 1), (1, 3))
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("prefixes")
    return make_llama(where, hidden=64, layers=LAYERS, vocab=VOCAB, context_tokens=256)


engine_of = partial(loaded, memory_bytes=4 << 20)


def names_of(session: str, ids: Sequence[int], space: bytes = b"client") -> PageNames:
    blocks = b"".join(block_names(b"key", ids))
    return PageNames(space=space, blocks=blocks, answers=session, found_most=len(ids) - 1)


class Session:
    """One session at two stages of one engine, as stages would run it."""

    def __init__(self, engine: Engine, name: str, ids: Sequence[int], names: PageNames) -> None:
        self.engine, self.name = engine, name
        self.found = [
            engine.kv.open(f"{name} {span}", 200, span, len(ids), names) for span in SPANS
        ]
        self.tokens = list(ids)
        self.rows = 0
        self.run(min(self.found), len(ids))

    def run(self, position: int, end: int) -> None:
        """Run tokens at ``[position, end)``; a stage that has more takes no row again."""
        rows: torch.Tensor | None = None
        first = position
        for span, found in zip(SPANS, self.found, strict=True):
            at = max(position, found)
            key = f"{self.name} {span}"
            assert self.engine.kv.extend(key, end)
            item = WorkItem(
                session=key,
                start=span[0],
                end=span[1],
                position=at if rows is not None else first,
                token_ids=None if rows is not None else tuple(self.tokens[first:end]),
                hidden=None if rows is None else rows[at - first :],
                sampling=Sampling() if span[1] == LAYERS else None,
            )
            (ran,) = self.engine.step([item])
            assert ran.error is None, ran.error
            self.rows += item.tokens
            rows = ran.hidden
        assert ran.token_id is not None
        self.tokens.append(ran.token_id)

    def answer(self, new: int) -> list[int]:
        """``new`` tokens in all; the first one came with the prompt."""
        for _ in range(new - 1):
            self.run(len(self.tokens) - 1, len(self.tokens))
        return self.tokens[-new:]

    def end(self) -> None:
        for span in SPANS:
            self.engine.kv.free(f"{self.name} {span}")
        check_pool(self.engine.kv)


def test_later_sessions_run_what_is_new_and_answer_the_same(directory: Path) -> None:
    engine, alone = engine_of(directory), engine_of(directory, keep_prefixes=False)
    prompts = {
        "a": (PROMPT, 0),
        "the same": (PROMPT, 48),
        "another end": ((*PROMPT[:32], 1, 2, 3), 32),
        "its last row must run": (PROMPT[:48], 32),
        "another beginning": ((5, *PROMPT), 0),
    }
    for live in (True, False):  # beside the sessions that made the pages, and after them
        sessions = []
        for name, (ids, found) in prompts.items():
            expected = Session(alone, f"{name} {live}", ids, names_of(name, ids)).answer(6)
            session = Session(engine, f"{name} {live}", ids, names_of(name, ids))
            assert session.answer(6) == expected, name
            if live:
                assert session.found == [found, found], name
            sessions.append(session)
            check_pool(engine.kv)
        for session in sessions:
            session.end()
    assert engine.kv.free_tokens == engine.kv.tokens


def test_an_answer_is_kept_under_its_session(directory: Path) -> None:
    """The next turn of a chat goes on behind the answer, but not behind its newest token."""
    engine, alone = engine_of(directory), engine_of(directory, keep_prefixes=False)
    first = Session(engine, "first", PROMPT, names_of("first", PROMPT))
    first.answer(30)
    first.end()
    turn = (*first.tokens, 7, 8, 9)
    blocks = names_of("first", PROMPT).blocks
    names = PageNames(space=b"client", blocks=blocks, answers="first", found_most=len(turn) - 1)
    assert Session(engine, "stranger", turn, names_of("x", turn)).found == [48, 48]
    later = Session(engine, "later", turn, names)
    assert later.found == [80, 80], "83 tokens were settled"
    assert later.answer(8) == Session(alone, "alone", turn, names).answer(8)


def test_another_space_finds_nothing(directory: Path) -> None:
    engine = engine_of(directory)
    Session(engine, "mine", PROMPT, names_of("mine", PROMPT)).end()
    other = names_of("mine", PROMPT, space=b"other")
    assert Session(engine, "other", PROMPT, other).found == [0, 0]
    assert Session(engine, "none", PROMPT, PageNames()).found == [0, 0]


def test_names_that_lie_harm_their_own_space_alone(directory: Path) -> None:
    """A client that runs other tokens than it names finds these; nobody else does."""
    engine, alone = engine_of(directory), engine_of(directory, keep_prefixes=False)
    liar = tuple(reversed(PROMPT))
    Session(engine, "liar", liar, names_of("liar", PROMPT, space=b"liar")).end()
    honest = Session(engine, "honest", PROMPT, names_of("honest", PROMPT))
    assert honest.found == [0, 0]
    assert honest.answer(5) == Session(alone, "s", PROMPT, PageNames()).answer(5)
    again = Session(engine, "liar again", PROMPT, names_of("again", PROMPT, space=b"liar"))
    assert again.found == [48, 48]


def test_pages_go_when_others_need_them_and_never_before(directory: Path) -> None:
    engine = engine_of(directory)
    Session(engine, "old", PROMPT, names_of("old", PROMPT)).end()
    assert engine.kv.free_tokens == engine.kv.tokens
    assert engine.kv.reserve("all", engine.kv.tokens) is None
    check_pool(engine.kv)
    engine.kv.free("all")
    assert Session(engine, "late", PROMPT, names_of("late", PROMPT)).found == [0, 0]


@pytest.fixture(scope="module")
def engines(directory: Path) -> dict[int, Engine]:
    return {size: engine_of(directory, page_tokens=size) for size in (4, 16, 24)}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 4), st.booleans()),
        max_size=6,
    ),
    st.sampled_from([4, 16, 24]),
)
@examples(25, deadline=None)
def test_any_sessions_answer_as_they_do_alone(
    engines: dict[int, Engine], drawn: list[tuple[int, int, int, bool]], page_tokens: int
) -> None:
    """Prompts that begin alike, in pages of any size, some ending in between."""
    engine = engines[page_tokens]
    live = []
    for other, length, new, ends in drawn:
        ids = (*PROMPT[: 16 * other], *((t + 1) % VOCAB for t in PROMPT[16 * other :]))[:length]
        name = f"session {next(NUMBERS)}"
        session = Session(engine, name, ids, names_of(name, ids))
        alone = Session(engine, f"{name} alone", ids, PageNames())
        assert session.answer(1 + new) == alone.answer(1 + new)
        alone.end()
        live.append(session)
        if ends:
            session.end()
    for session in live:
        session.end()
